"""How well the dropped mass, and two absolute bounds beside it, tell where a better subset exists."""

import numpy as np
import sklearn.metrics

from analysis.bootstrap import (
    MIN_DOCUMENTS,
    Estimate,
    Reals,
    estimate,
    plain_auc,
    resampled_auc,
    sign_p_value,
    spearman,
)
from analysis.frame import Sample

DROPPED_MASS = "dropped_mass"
ROC_POINTS = 200  # a curve is thinned to about as many of its own corners


def statistics(sample: Sample) -> dict[str, Reals]:
    """Each candidate predictor of a row, (n,): the dropped mass (1), and two bounds of e_s(top-mass), in |v|.

    Source: P1, Lemma 2.1 for 2 D mbar; ours for the variance bound sigma sqrt(mbar / (1 - mbar)).
    """
    dropped = np.maximum(sample.statistic("dropped_mass"), 0.0)  # rounding can take it below zero
    return {
        DROPPED_MASS: dropped,
        "diameter_bound": 2 * sample.statistic("radius") * dropped,
        "variance_bound": sample.statistic("spread") * np.sqrt(dropped / (1 - dropped)),
    }


def predictor(sample: Sample) -> list[dict[str, object]]:
    """The records of table predictor for one model at one budget: one a statistic.

    The lead is the AUC of the dropped mass less that of the statistic, on the same resamples. AUC and lead
    are None where all rows have one label; the lead of the dropped mass over itself is None.
    """
    label, document, draws = sample.label, sample.document, sample.multiplicity
    phi = spearman(sample.statistic("residual"), sample.optimum, document, draws)
    enough = sample.n_documents >= MIN_DOCUMENTS and label.any() and not label.all()
    records: list[dict[str, object]] = []
    first: tuple[float | None, Reals] | None = None
    for name, score in statistics(sample).items():
        area = plain_auc(score, label)
        areas = resampled_auc(score, label, document, draws) if enough else np.full(len(draws), np.nan)
        lead, p_value = Estimate(None), None
        if first is None:
            first = area, areas
        elif area is not None and first[0] is not None:
            differences = first[1] - areas
            lead = estimate(first[0] - area, document, differences)
            p_value = sign_p_value(differences) if enough else None
        records.append(
            {
                **sample.identity,
                "statistic": name,
                "n_rows": sample.n_rows,
                "n_documents": sample.n_documents,
                "n_positive": int(label.sum()),
                **estimate(area, document, areas).columns("auc"),
                **lead.columns("auc_lead"),
                "p_value": p_value,
                **spearman(score, sample.gap, document, draws).columns("spearman_gap"),
                **phi.columns("spearman_phi"),
            }
        )
    return records


def roc(sample: Sample) -> list[dict[str, object]]:
    """The records of table roc for one model at one budget; none where all rows have one label.

    Every point is a corner of the exact curve; a longer curve keeps its two ends and about ROC_POINTS corners
    spread evenly along it.
    """
    label = sample.label
    if label.all() or not label.any():
        return []
    records: list[dict[str, object]] = []
    for name, score in statistics(sample).items():
        false, true, threshold = sklearn.metrics.roc_curve(label, score)  # the first threshold is infinite
        for point in thinned(false + true, ROC_POINTS):
            records.append(
                {
                    **sample.identity,
                    "statistic": name,
                    "threshold": float(threshold[point]),
                    "false_positive_rate": float(false[point]),
                    "true_positive_rate": float(true[point]),
                }
            )
    return records


def thinned(along: Reals, points: int) -> list[int]:
    """Indices of at most this many places of an ascending (n,) array: the nearest to an even grid."""
    if len(along) <= points:
        return list(range(len(along)))
    grid = np.linspace(along[0], along[-1], points)
    after = np.clip(np.searchsorted(along, grid), 1, len(along) - 1)
    nearer = after - (grid - along[after - 1] < along[after] - grid)
    return sorted({0, len(along) - 1, *nearer.tolist()})
