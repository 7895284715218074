"""Exhaustive enumeration of a candidate set: slow, simple, and what every faster search is compared with."""

import math
import time

import numpy as np
import numpy.typing as npt

from solvers import kernels
from solvers.candidates import candidate_set
from solvers.certificate import Certificate, Floor
from solvers.problem import UNIT_ROUNDOFF, Instance

EXHAUSTIVE_LIMIT = 5_000_000  # subsets; P1's largest sweep. A tenth of a second or so


def exhaustive(
    row: Instance, s: int, candidates: npt.ArrayLike | None = None, limit: int = EXHAUSTIVE_LIMIT
) -> Certificate:
    """The subset of s candidates of least forced error, by evaluating every one (P1, section 3).

    candidates: row-local indices; default the candidate set of P1. Keys of weight 0 are left out while s others
    exist. Raises ValueError if there are more than `limit` subsets, or fewer than s candidates of positive weight.
    """
    keys = searchable(row, s, candidate_set(row, s) if candidates is None else candidates)
    count = math.comb(keys.size, s)
    if count > limit:
        raise ValueError(f"{keys.size} candidates have {count:,} subsets of {s}: expected at most {limit:,}")
    began = time.perf_counter()
    chosen, error, visited = kernels.enumerate_subsets(row.steps[keys], row.weights[keys], s)
    seconds = time.perf_counter() - began
    slack = leaf_rounding(row, keys.size) * row.unit + row.rounding
    error *= row.unit
    lower = max(0.0, error - slack)
    subset = keys[chosen]
    floors = (Floor(0.0, subset, error, lower, proved=True, nodes=visited, seconds=seconds),)
    return Certificate(subset, error, lower, "optimal", floors, keys.size, visited, seconds, "finished", "exhaustive")


def searchable(row: Instance, s: int, candidates: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The candidates that a search may keep: sorted, of positive weight; raises ValueError if fewer than s."""
    row.check_budget(s)
    if isinstance(candidates, np.ndarray) and candidates.dtype == np.int64 and candidates.ndim == 1:
        given = np.ascontiguousarray(candidates)
        if given.size >= s and kernels.ascending_positive(row.weights, given):
            return given  # as candidate_set() makes them: nothing to sort or to leave out
    keys = row.subset(candidates)
    keys = keys[row.weights[keys] > 0]
    if keys.size < s:
        raise ValueError(f"{keys.size} candidates of positive weight: expected at least s = {s}")
    return keys


def leaf_rounding(row: Instance, n: int) -> float:
    """How far the error that a search computes for a subset may lie from that of its stored steps, in row.unit.

    The error averages the centred values: at most n + d + 8 roundings of terms whose weighted sizes average to at
    most D (ours).
    """
    return (n + row.d + 8) * UNIT_ROUNDOFF * row.radius / row.unit
