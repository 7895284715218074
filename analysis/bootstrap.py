"""The cluster bootstrap over documents, and the statistics that it is taken of.

A resample draws as many documents as there are, with replacement; it is kept as the multiplicity of each
document, never as a longer sample. Every resampled_* function below returns, for each resample, exactly the
plain statistic of the sample in which each row is repeated as often as its document was drawn; it is NaN
where that sample leaves the statistic undefined (no rows, one class, a constant).

Shapes throughout: values and document are (n,), document holds codes 0..D-1, multiplicity is (B, D).
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import scipy.stats
import sklearn.metrics
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]

MIN_DOCUMENTS = 10  # below this many documents no interval is given: it would cover far less than it says
RESAMPLES = 1000  # B of P1
LEVEL = 0.95  # of the percentile interval
MAX_UNDEFINED = 0.05  # no interval if the statistic is undefined in more than this share of the resamples
FEW_DOCUMENTS = 64  # up to here a table over pairs of documents is cheaper than walking through the resamples
BLOCK_CELLS = 1 << 19  # cells (resamples x rows) worked on at a time: bounds memory and stays in cache


@dataclass(frozen=True)
class Estimate:
    """A statistic and the ends of its interval: None where it is undefined, or no interval can be given."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def columns(self, name: str) -> dict[str, float | None]:
        """The three columns that a table of the analysis holds for it."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def draw(documents: int, resamples: int = RESAMPLES, seed: int = 0) -> Counts:
    """Multiplicity of each document in each resample, (B, D), summing to D. Source: P1, uncertainty."""
    chance = np.full(documents, 1.0 / documents)
    return np.random.default_rng(seed).multinomial(documents, chance, size=resamples).astype(np.int64)


def interval(statistics: Reals) -> tuple[float | None, float | None]:
    """The percentile interval of (B,) resampled statistics, or two None if too many are undefined."""
    defined = statistics[~np.isnan(statistics)]
    if len(defined) < (1 - MAX_UNDEFINED) * len(statistics):
        return None, None
    return plain_quantile(defined, (1 - LEVEL) / 2), plain_quantile(defined, (1 + LEVEL) / 2)


def sign_p_value(differences: Reals) -> float | None:
    """Two-sided bootstrap p of no difference, 2 min(P(<= 0), P(>= 0)) capped at 1; 0 means below 2 / B."""
    defined = differences[~np.isnan(differences)]
    if len(defined) < (1 - MAX_UNDEFINED) * len(differences):
        return None
    return min(1.0, 2 * min(float(np.mean(defined <= 0)), float(np.mean(defined >= 0))))


def format_p(p: float | None, resamples: int = RESAMPLES) -> str:
    """A bootstrap p for a reader: a p of 0 is only known to be below 2 / B."""
    if p is None:
        return "-"
    return f"< {2 / resamples:.3g}" if p == 0 else f"{p:.2g}"


def median(values: Reals, document: Counts, multiplicity: Counts) -> Estimate:
    """The median of the values, infinite ones included, and its interval."""
    return quantile(values, document, multiplicity, 0.5)


def quantile(values: Reals, document: Counts, multiplicity: Counts, q: float) -> Estimate:
    """The q-quantile (linear between order statistics) and its interval."""
    if len(values) == 0:
        return Estimate(None)
    value = plain_quantile(values, q)
    if not _enough(document):
        return Estimate(value)
    return Estimate(value, *interval(resampled_quantile(values, document, multiplicity, q)))


def mean(values: Reals, document: Counts, multiplicity: Counts) -> Estimate:
    """The mean of the values and its interval."""
    if len(values) == 0:
        return Estimate(None)
    value = float(np.mean(values))
    if not _enough(document):
        return Estimate(value)
    return Estimate(value, *interval(resampled_mean(values, document, multiplicity)))


def share(flags: Flags, document: Counts, multiplicity: Counts) -> Estimate:
    """The share of rows that are flagged, and its interval."""
    return mean(flags.astype(np.float64), document, multiplicity)


def spearman(x: Reals, y: Reals, document: Counts, multiplicity: Counts) -> Estimate:
    """Spearman's rank correlation (ties share their mean rank) and its interval."""
    value = plain_spearman(x, y)
    if value is None or not _enough(document):
        return Estimate(value)
    return Estimate(value, *interval(resampled_spearman(x, y, document, multiplicity)))


def estimate(value: float | None, document: Counts, statistics: Reals) -> Estimate:
    """A value with the interval of its (B,) resampled statistics, where there are documents enough."""
    if value is None or not _enough(document):
        return Estimate(value)
    return Estimate(value, *interval(statistics))


def plain_quantile(values: Reals, q: float) -> float:
    """numpy's linear quantile, except that infinite order statistics give infinity and not NaN."""
    if q == 0.5:
        return float(np.median(values))
    if np.isfinite(values).all():
        return float(np.quantile(values, q))
    below, above = (np.quantile(values, [q], method=method) for method in ("lower", "higher"))
    return float(_between(below, above, np.array([(len(values) - 1) * q % 1]))[0])


def plain_auc(score: Reals, label: Flags) -> float | None:
    """Area under the ROC curve; None if all rows have one label."""
    if len(label) == 0 or label.all() or not label.any():
        return None
    return float(sklearn.metrics.roc_auc_score(label, score))


def plain_spearman(x: Reals, y: Reals) -> float | None:
    """Spearman's rank correlation; None if there are fewer than two rows or one side is constant."""
    if len(x) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.stats.ConstantInputWarning)
        value = float(scipy.stats.spearmanr(x, y).statistic)
    return None if np.isnan(value) else value


def resampled_mean(values: Reals, document: Counts, multiplicity: Counts) -> Reals:
    """Mean of each resample, (B,)."""
    documents = multiplicity.shape[1]
    sums = multiplicity @ np.bincount(document, weights=values, minlength=documents)
    rows: Counts = multiplicity @ np.bincount(document, minlength=documents)
    return _ratio(sums, rows)


def resampled_quantile(values: Reals, document: Counts, multiplicity: Counts, q: float) -> Reals:
    """Linear q-quantile of each resample, (B,).

    The values are sorted once. How many rows a resample has up to a place in that order is its multiplicity
    times the rows of each document up to there, which is kept at every D-th place alone (memory of order n).
    A bisection over these places, for all resamples at once, and one short walk find each order statistic.
    """
    n, documents = len(values), multiplicity.shape[1]
    order = np.argsort(values, kind="stable")
    ordered, owner = values[order], document[order]
    blocks = -(-n // documents)
    inside = np.bincount(np.arange(n) // documents * documents + owner, minlength=blocks * documents)
    before = np.zeros((blocks + 1, documents), dtype=np.int64)
    np.cumsum(inside.reshape(blocks, documents), axis=0, out=before[1:])
    rows = multiplicity @ before[-1]

    def order_statistic(place: Counts) -> Reals:
        first, last = np.zeros_like(place), np.full_like(place, blocks)
        while (last - first > 1).any():
            middle = (first + last) // 2
            beyond = np.einsum("bd,bd->b", multiplicity, before[middle]) > place
            first, last = np.where(beyond, first, middle), np.where(beyond, middle, last)
        index = np.minimum(first[:, None] * documents + np.arange(documents), n - 1)
        weight = np.take_along_axis(multiplicity, owner[index], axis=1)
        reached = np.einsum("bd,bd->b", multiplicity, before[first])[:, None] + np.cumsum(weight, axis=1)
        found = np.argmax(reached > place[:, None], axis=1)
        return np.asarray(ordered[index[np.arange(len(place)), found]])

    position = np.maximum(rows - 1, 0) * q
    lower = np.floor(position).astype(np.int64)
    upper = np.minimum(lower + 1, np.maximum(rows - 1, 0))
    found = _between(order_statistic(lower), order_statistic(upper), position - lower)
    return np.where(rows > 0, found, np.nan)


def resampled_auc(score: Reals, label: Flags, document: Counts, multiplicity: Counts) -> Reals:
    """Area under the ROC curve of each resample, (B,): ties between the classes count one half.

    The weight that a resample gives to (positive, negative) pairs in the right order is bilinear in its
    multiplicities: one (D, D) table of pair counts serves every resample. With many documents the resamples
    are worked through in blocks instead.
    """
    order, starts, _ = _tie_groups(score)
    owner, positive = document[order], label[order].astype(np.float64)

    def classes(drawn: Reals) -> tuple[Reals, Reals, Reals]:
        weight = drawn[:, owner]
        yes = _sum_groups(weight * positive, starts)
        no = _sum_groups(weight, starts) - yes
        return yes, no, np.cumsum(no, axis=1) - no / 2

    documents = multiplicity.shape[1]
    if documents <= FEW_DOCUMENTS:
        yes, no, beaten = classes(np.eye(documents))
        wins = np.einsum("bd,bd->b", multiplicity @ (yes @ beaten.T), multiplicity)
        return _ratio(wins, (multiplicity @ yes.sum(axis=1)) * (multiplicity @ no.sum(axis=1)))
    parts = []
    for drawn in _resample_blocks(multiplicity, len(score)):
        yes, no, beaten = classes(drawn)
        parts.append(_ratio(np.einsum("bg,bg->b", yes, beaten), yes.sum(axis=1) * no.sum(axis=1)))
    return np.concatenate(parts)


def resampled_spearman(x: Reals, y: Reals, document: Counts, multiplicity: Counts) -> Reals:
    """Spearman's rank correlation of each resample, (B,).

    A row's rank is linear in the multiplicities, so that each sum over the rows of a document is a quadratic
    form in them: one (D, D) table a document serves every resample. With many documents the resamples are
    worked through in blocks instead. Ranks are doubled and centred, hence whole numbers with exact sums.
    """
    x_ties, y_ties = _tie_groups(x), _tie_groups(y)
    documents = multiplicity.shape[1]
    if documents <= FEW_DOCUMENTS:
        weight = np.eye(documents)[:, document]
        x_rank, y_rank = _doubled_ranks(weight, *x_ties), _doubled_ranks(weight, *y_ties)
        sums = np.zeros((3, len(multiplicity)))  # of x y, x x, y y
        for code in range(documents):
            own = document == code
            x_own, y_own = x_rank[:, own], y_rank[:, own]
            for total, one, other in zip(sums, (x_own, x_own, y_own), (y_own, x_own, y_own), strict=True):
                form = np.einsum("bd,bd->b", multiplicity @ (one @ other.T), multiplicity)
                total += multiplicity[:, code] * form
        return _ratio(sums[0], np.sqrt(sums[1]) * np.sqrt(sums[2]))
    parts = []
    for drawn in _resample_blocks(multiplicity, len(x)):
        weight = drawn[:, document]
        x_rank, y_rank = _doubled_ranks(weight, *x_ties), _doubled_ranks(weight, *y_ties)
        weighted = weight * x_rank
        variances = np.einsum("bn,bn->b", weighted, x_rank), np.einsum("bn,bn,bn->b", weight, y_rank, y_rank)
        parts.append(_ratio(np.einsum("bn,bn->b", weighted, y_rank), np.sqrt(variances[0]) * np.sqrt(variances[1])))
    return np.concatenate(parts)


@cache
def coverage(documents: int, samples: int = 4000, resamples: int = RESAMPLES, seed: int = 0) -> float:
    """How often the percentile interval covers the mean of normal data, at this number of documents.

    Ours: one standard normal value a document, samples such samples. About .73, .84, .89, .93 at 3, 5, 10, 20
    documents, where the interval says .95. Raises ValueError below two documents.
    """
    if documents < 2:
        raise ValueError(f"coverage of an interval from {documents} documents: expected at least 2")
    values = np.random.default_rng([seed, documents]).standard_normal((samples, documents))
    means = values @ draw(documents, resamples, seed).T / documents
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1)
    return float(np.mean((low <= 0) & (high >= 0)))


def _enough(document: Counts) -> bool:
    return len(np.unique(document)) >= MIN_DOCUMENTS


def _between(below: Reals, above: Reals, fraction: Reals) -> Reals:
    """below + fraction (above - below), where both may be infinite."""
    step = np.zeros_like(below)
    np.subtract(above, below, out=step, where=(above != below) & (fraction > 0))
    return below + np.multiply(step, fraction, out=np.zeros_like(step), where=step != 0)


def _ratio(numerator: Reals | Counts, denominator: Reals | Counts) -> Reals:
    undefined = np.full(len(denominator), np.nan)
    return np.asarray(np.divide(numerator, denominator, out=undefined, where=denominator > 0))


def _resample_blocks(multiplicity: Counts, rows: int) -> Iterator[Reals]:
    size = max(1, BLOCK_CELLS // max(rows, 1))
    for start in range(0, len(multiplicity), size):
        yield multiplicity[start : start + size].astype(np.float64)


def _tie_groups(values: Reals) -> tuple[Counts, Counts, Counts]:
    """Ascending order, (n,); where each group of equal values starts in it, (g,); group of each row, (n,)."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    group = np.empty(len(values), dtype=np.int64)
    group[order] = np.cumsum(new) - 1
    return order, np.flatnonzero(new), group


def _sum_groups(weight: Reals, starts: Counts) -> Reals:
    if len(starts) == weight.shape[1]:
        return weight
    return np.asarray(np.add.reduceat(weight, starts, axis=1))


def _doubled_ranks(weight: Reals, order: Counts, starts: Counts, group: Counts) -> Reals:
    """Rows below less rows above, for each row of each resample, (b, n)."""
    mass = _sum_groups(weight[:, order], starts)
    through = np.cumsum(mass, axis=1)
    return np.asarray((2 * through - mass - through[:, -1:])[:, group])
