"""The balancing selector: swaps from the top-mass set until none lowers the forced error (P1, section 2)."""

import math

import numpy as np
import numpy.typing as npt

from solvers import kernels
from solvers.candidates import MOST_EXTRA, candidate_set, extra_keys
from solvers.problem import Indices, Instance, top_mass

LARGEST_ENUMERATED_BUDGET = 32  # beyond it P1 does not say which candidates are offered; ours: 24 extra keys


def balancing(row: Instance, s: int, pool: str | npt.ArrayLike = "candidate") -> Indices:
    """A_bal: from the top-mass set, repeat the single swap of largest decrease of e_s; sorted indices (s,).

    pool: "candidate" (default: the candidate set of P1; beyond s = 32, where P1 states none, 24 extra keys: ours),
    "full" (every key of positive weight), or indices that include the top-mass set. A swap must lower e_s by a
    relative 1e-12; ties go to the smallest (dropped, added). Its error lies between the pool's optimum and top-mass.
    Raises ValueError for a bad budget or a pool without the top-mass set. Source: P1, section 2 and B.4.
    """
    return balancing_with_swaps(row, s, pool)[0]


def balancing_with_swaps(row: Instance, s: int, pool: str | npt.ArrayLike = "candidate") -> tuple[Indices, int]:
    """As balancing(), with the number of swaps made."""
    row.check_budget(s)
    keys = _pool(row, s, pool)
    top = top_mass(row, s)
    start = np.searchsorted(keys, top)
    if (start == keys.size).any() or (keys[start] != top).any():
        raise ValueError("the pool of the balancing selector lacks a key of the top-mass set: expected all of them")
    subset, _, swaps = kernels.balance(row.steps[keys], row.weights[keys], start, 0.0, math.inf)
    return keys[subset], swaps


def _pool(row: Instance, s: int, pool: str | npt.ArrayLike) -> Indices:
    if isinstance(pool, str):
        if pool == "candidate":
            extra = extra_keys(s) if s <= LARGEST_ENUMERATED_BUDGET else MOST_EXTRA
            return candidate_set(row, s, extra)
        if pool == "full":
            return np.flatnonzero(row.weights)
        raise ValueError(f"pool {pool!r}: expected candidate, full, or indices")
    return row.subset(pool)
