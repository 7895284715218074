"""The problem: one attention row, and what a subset of its keys gets wrong.

Notation of P1 (arXiv 2608.25230, section 2): weights p_j >= 0 with sum 1, values v_j in R^d, mu = sum_j p_j v_j.
A subset A of s keys keeps its forced weights p_j / p(A), so its output is m_A = sum_A p_j v_j / p(A) and its
forced error is e_s(A) = |mu - m_A| = |g_A| / p(A), with the residual g_A = sum_A p_j (v_j - mu).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from solvers import kernels

Reals = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Array = TypeVar("Array", Reals, Indices)

SUM_TOLERANCE = 1e-6  # how far the given weights may sum from 1 before they are refused rather than renormalised
SMALLEST_WEIGHT = 1e-130  # a weight below it counts as 0: squares of its products would underflow in the searches
SMALLEST_ERROR = 1e-300  # errors below it are zero: the numbers near it have lost their digits
LARGEST_VALUE = 1e150  # values beyond it are refused: their squares would overflow
UNIT_ROUNDOFF = 2.0**-53


@dataclass(frozen=True, eq=False)
class Instance:
    """One attention row: weights (n,) and values (n, d), float64 inside.

    Raises ValueError that names what is wrong: shapes that do not fit, NaN or infinite entries, negative weights,
    weights that do not sum to 1 within 1e-6. Weights are renormalised to sum 1. Source: P1, section 2.
    """

    weights: Reals
    values: Reals

    def __post_init__(self) -> None:
        weights = np.array(self.weights, dtype=np.float64)
        values = np.array(self.values, dtype=np.float64, order="C")
        if weights.ndim != 1 or weights.size == 0:
            raise ValueError(f"weights have shape {weights.shape}: expected (n,) with n >= 1")
        if values.ndim != 2 or values.shape[0] != weights.size or values.shape[1] == 0:
            raise ValueError(f"values have shape {values.shape}: expected ({weights.size}, d) with d >= 1")
        if not np.isfinite(weights).all():
            raise ValueError("weights have NaN or infinite entries: expected finite ones")
        if not np.isfinite(values).all():
            raise ValueError("values have NaN or infinite entries: expected finite ones")
        if (weights < 0).any():
            raise ValueError("weights have negative entries: expected none below 0")
        total = weights.sum()
        if not abs(total - 1) <= SUM_TOLERANCE:
            raise ValueError(f"weights sum to {total:.9g}: expected 1 within {SUM_TOLERANCE:g}")
        if np.abs(values).max() > LARGEST_VALUE:
            raise ValueError(f"values exceed {LARGEST_VALUE:g} in size: expected them rescaled")
        weights = weights / total
        weights[weights < SMALLEST_WEIGHT] = 0.0
        for array in (weights, values):
            array.setflags(write=False)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "values", values)

    @property
    def n(self) -> int:
        """Number of keys."""
        return int(self.weights.size)

    @property
    def d(self) -> int:
        """Dimension of the values."""
        return int(self.values.shape[1])

    @cached_property
    def mean(self) -> Reals:
        """The dense output mu, (d,). A second, compensated pass over v - mu takes out the rounding of the first."""
        first = self.weights @ self.values
        offset: Reals = kernels.weighted_offset(self.weights, self.values, first)
        return first + offset

    @cached_property
    def unit(self) -> float:
        """A power of two near max |v_j - mu|; dividing by it is exact and keeps kernels from under- and overflow."""
        largest = np.abs(self.values - self.mean).max()
        return float(2.0 ** math.frexp(largest)[1]) if largest > 0 else 1.0

    @cached_property
    def centred(self) -> Reals:
        """(v_j - mu) / unit, (n, d)."""
        return _frozen((self.values - self.mean) / self.unit)

    @cached_property
    def steps(self) -> Reals:
        """p_j (v_j - mu) / unit, (n, d): what the kernels add up."""
        return _frozen(self.weights[:, None] * self.centred)

    @property
    def residuals(self) -> Reals:
        """a_j = p_j (v_j - mu), (n, d), in the unit of the values. They sum to 0 (P1, Lemma 2.1)."""
        return self.steps * self.unit

    @cached_property
    def distances(self) -> Reals:
        """|v_j - mu|, (n,)."""
        return _frozen(np.sqrt(np.einsum("ij,ij->i", self.centred, self.centred)) * self.unit)

    @cached_property
    def single_key_errors(self) -> Reals:
        """p_j |v_j - mu|, (n,): what leaving out one key alone moves, to first order."""
        return _frozen(self.weights * self.distances)

    @cached_property
    def order(self) -> Indices:
        """Keys by falling weight, ties by index (ours; P1 states no tie rule), (n,)."""
        return _frozen(np.argsort(-self.weights, kind="stable"))

    @cached_property
    def n_positive(self) -> int:
        """Number of keys with weight above 0: the most that a subset may keep."""
        return int(np.count_nonzero(self.weights))

    @cached_property
    def radius(self) -> float:
        """D = max_j |v_j - mu| over keys of positive weight (P1, section 2)."""
        return float(self.distances[self.weights > 0].max())

    @cached_property
    def spread(self) -> float:
        """Sigma, the square root of sum_j p_j |v_j - mu|^2 (P1, section 2)."""
        scaled = self.distances / self.unit
        return float(np.sqrt(self.weights @ (scaled * scaled)) * self.unit)

    @cached_property
    def rounding(self) -> float:
        """How far a computed error may lie from the exact one of the given weights and values (ours).

        In each coordinate the two-pass mean is within 7u max|v| of mu, however many keys there are, and each
        p_j (v_j - mu) within 2u of itself, u = 2^-53; a forced error averages the latter. An error up to this is zero
        within rounding.
        """
        largest = float(np.abs(self.values).max())
        return 16 * UNIT_ROUNDOFF * math.sqrt(self.d) * largest + SMALLEST_ERROR

    def subset(self, keys: npt.ArrayLike) -> Indices:
        """The keys as sorted int64 indices, (s,); raises ValueError unless they are distinct, in range, of mass > 0."""
        raw = np.asarray(keys)
        if raw.ndim != 1 or raw.size == 0 or raw.dtype.kind not in "iu":
            raise ValueError(f"a subset of shape {raw.shape} and type {raw.dtype}: expected (s,) integers, s >= 1")
        found = raw.astype(np.int64)
        if not (found[1:] > found[:-1]).all():
            found = np.sort(found)
            if (found[1:] == found[:-1]).any():
                raise ValueError("a subset that names a key twice: expected distinct keys")
        if found[0] < 0 or found[-1] >= self.n:
            raise ValueError(f"a subset with keys {found[0]} to {found[-1]}: expected them in 0 to {self.n - 1}")
        if not self.weights[found].any():
            raise ValueError("a subset whose keys all have weight 0: expected positive mass")
        return found

    def kept_mass(self, keys: npt.ArrayLike) -> float:
        """p(A)."""
        return float(self.weights[self.subset(keys)].sum())

    def dropped_mass(self, keys: npt.ArrayLike) -> float:
        """1 - p(A), summed over what is dropped so that small values keep their digits (P1, section 2)."""
        dropped = np.ones(self.n, dtype=bool)
        dropped[self.subset(keys)] = False
        return float(self.weights[dropped].sum())

    def forced_error(self, keys: npt.ArrayLike) -> float:
        """e_s(A) = |mu - m_A|, in the unit of the values (P1, eq. for e_s; section 2)."""
        kept = self.subset(keys)
        relative = self.weights[kept]
        relative = relative / relative.max()  # p(A) may be tiny; the ratio does not care
        moved = relative @ self.centred[kept]
        return math.sqrt(moved @ moved) / float(relative.sum()) * self.unit

    def residual_norm(self, keys: npt.ArrayLike) -> float:
        """|g_A| = |sum_A p_j (v_j - mu)|; of the top-mass set this is P1's one-pass statistic Phi."""
        return float(np.linalg.norm(self.steps[self.subset(keys)].sum(axis=0)) * self.unit)

    def check_budget(self, s: int) -> None:
        """Raise ValueError unless s is whole and 1 <= s <= number of keys with positive weight."""
        if not isinstance(s, int | np.integer):
            raise ValueError(f"s = {s!r}: expected a whole number")
        if not 1 <= s <= self.n:
            raise ValueError(f"s = {s}: expected 1 <= s <= {self.n}, the number of keys")
        if s > self.n_positive:
            raise ValueError(f"s = {s}: only {self.n_positive} keys have positive weight")


def attention_weights(query: npt.ArrayLike, keys: npt.ArrayLike, scale: float, softcap: float | None = None) -> Reals:
    """Weights of one row from the stored query (d,) and keys (n, d): softmax of the logits, in float64, (n,).

    logit_j = scale q.k_j, or c tanh(scale q.k_j / c) with a soft-cap c (Gemma-2).
    """
    logits = np.asarray(keys, dtype=np.float64) @ np.asarray(query, dtype=np.float64) * scale
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def top_mass(row: Instance, s: int) -> Indices:
    """A*_s: the s keys of largest weight, ties to the lowest index; sorted indices (s,) (P1, section 2)."""
    row.check_budget(s)
    return np.sort(row.order[:s])


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array
