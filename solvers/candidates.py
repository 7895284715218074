"""The candidate set: the few keys of a row among which the paper looks for a better subset (P1, section 3)."""

import math
from functools import lru_cache

from solvers import kernels
from solvers.problem import Indices, Instance

ENUMERATION_CAP = 200_000  # subsets of a candidate set that P1 enumerates at most
MOST_EXTRA = 24  # keys that P1 adds to the top-mass set at most


@lru_cache
def extra_keys(s: int) -> int:
    """How many keys the candidate set adds to the top-mass set at budget s: 24, 12, 6, 4 at s = 4, 8, 16, 32.

    min(24, max{e : C(s + e, s) <= 200,000}) (ours, the rule that gives the numbers of P1, section 3).
    """
    if s < 1:
        raise ValueError(f"s = {s}: expected at least 1")
    extra = 0
    while extra < MOST_EXTRA and math.comb(s + extra + 1, s) <= ENUMERATION_CAP:
        extra += 1
    return extra


def candidate_set(row: Instance, s: int, extra: int | None = None) -> Indices:
    """The top-mass set and the `extra` other keys of largest single-key error p_j |v_j - mu|; sorted indices.

    extra: default extra_keys(s). Fewer keys are added when the row has no more of positive weight; ties go to
    the lowest index (ours). Raises ValueError for a bad budget or a negative extra. Source: P1, section 3.
    """
    row.check_budget(s)
    wanted = extra_keys(s) if extra is None else extra
    if wanted < 0:
        raise ValueError(f"extra = {wanted}: expected at least 0")
    wanted = min(wanted, row.n_positive - s)
    found: Indices = kernels.candidates(row.weights, row.single_key_errors, row.order[:s], wanted)
    return found
