"""How much a better subset of the candidate set gains, and how much of it the balancing selector recovers."""

import numpy as np

from analysis.bootstrap import (
    MIN_DOCUMENTS,
    Estimate,
    Reals,
    coverage,
    mean,
    median,
    plain_quantile,
    quantile,
    share,
)
from analysis.frame import BALANCING, SAME_RELATIVE, Sample, exactly_one
from data import published

COUNT_SLACK = 1e-9  # rows: a share times a count this close below a whole number is that number


def ceiling(sample: Sample) -> dict[str, object]:
    """The record of table ceiling for one model at one budget.

    Definitions of P1, section 2 and Tables 1 and 8. Ours, where P1 is silent: rows without a gap have no
    recovery and count 0 in the closure; rows whose top-mass error is zero have c-hat 0, kappa-hat 1, label 0.
    """
    everyone = (sample.document, sample.multiplicity)
    cap_share = published_cap_share(sample.s)
    return {
        **sample.identity,
        "n_rows": sample.n_rows,
        "n_documents": sample.n_documents,
        "n_zero_gap": int((~sample.has_gap).sum()),
        "n_zero_top": int(sample.zero_top.sum()),
        "n_infinite": int(np.isinf(sample.kappa).sum()),
        **median(sample.closable, *everyone).columns("closable"),
        **mean(sample.closable, *everyone).columns("closable_mean"),
        **median(sample.kappa, *everyone).columns("kappa"),
        **quantile(sample.kappa, *everyone, 0.99).columns("kappa_p99"),
        **share(sample.label, *everyone).columns("share"),
        **_balancing(sample),
        "closable_q25": plain_quantile(sample.closable, 0.25),
        "closable_q75": plain_quantile(sample.closable, 0.75),
        "cap": None if cap_share is None else median_cap(sample.closable, cap_share),
        "cap_share": cap_share,
        "coverage": coverage(sample.n_documents) if sample.n_documents >= MIN_DOCUMENTS else None,
    }


def median_cap(values: Reals, raised: float) -> float:
    """The largest median that the values can reach when at most this fraction of them rises, to at most 1.

    Shape: values (n,), each at most 1. Source: P1, uncertainty: no more than the (0.5 + raised) quantile of
    the values as they are. Attained when the smallest floor(raised n) values become 1.
    """
    count = int(np.floor(raised * len(values) + COUNT_SLACK))
    return float(np.median(np.concatenate([np.sort(values)[count:], np.ones(count)])))


def published_cap_share(s: int) -> float | None:
    """The share of instances at budget s whose optimum the published solver improved; None if not given."""
    found = published.find("cap_share", s)
    return None if found is None else found.value


def _balancing(sample: Sample) -> dict[str, float | None]:
    """Recovery, closure and exactness of the balancing selector, over the rows on which it ran."""
    rows, chosen = sample.of_rule(BALANCING)
    if len(rows) == 0:
        return {
            name: end
            for column in ("recovery", "closure", "balancing_exact")
            for name, end in Estimate(None).columns(column).items()
        }
    balanced = chosen["error"].to_numpy()
    document, gap = sample.document[rows], sample.has_gap[rows]
    top, optimum, rounding = sample.top[rows], sample.optimum[rows], sample.rounding[rows]
    gained = top[gap] - balanced[gap]
    closure = np.zeros(len(rows))
    closure[gap] = gained / top[gap]
    exact = balanced <= np.maximum(optimum * (1 + SAME_RELATIVE), rounding)
    recovered = median(exactly_one(gained / (top[gap] - optimum[gap])), document[gap], sample.multiplicity)
    return {
        **recovered.columns("recovery"),
        **median(closure, document, sample.multiplicity).columns("closure"),
        **share(exact, document, sample.multiplicity).columns("balancing_exact"),
    }
