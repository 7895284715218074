"""Free weights: how close the hull of s values comes to mu when the weights over them may be chosen anew.

EF(s) = min over |A| = s of e_f(A), e_f(A) = dist(mu, conv{v_j : j in A}) (P1, section 2). Its exact value is as hard
as ES(s); every function here returns the error of an actual subset or iterate, so an upper bound of EF(s).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers import kernels
from solvers.problem import Indices, Instance

MOST_ROUNDS = 100  # of swaps from one support; far beyond what is needed before no swap helps


@dataclass(frozen=True, eq=False)
class FreeSupport:
    """A support of s keys (sorted) and a free error; which one, the function that returns it says."""

    subset: Indices
    error: float
    steps: int


def free_error(row: Instance, keys: npt.ArrayLike) -> float:
    """e_f(A), by Wolfe's least-norm-point algorithm over the hull of the subset's values (P1, section 2).

    A point of the hull attains what is returned, so it is an upper bound of the exact value to rounding; it is above by
    at most what squaring the values loses, some 1e-8 of D, where values all but coincide beside an outlier.
    """
    return float(kernels.free_error_of(row.centred, row.subset(keys)) * row.unit)


def frank_wolfe(row: Instance, s: int, fully_corrective: bool) -> FreeSupport:
    """The Frank-Wolfe estimate of EF(s): the nearest value and s - 1 vertices of the linear oracle (P1, section 2).

    fully_corrective = False: plain line search; error is the last iterate's. True: weights re-optimised after every
    vertex; error is the free error of the whole support returned. A support of fewer than s keys is filled up with
    the heaviest others, as P1 does. P1 does not say which variant it uses.
    """
    row.check_budget(s)
    if not fully_corrective:
        support, error = kernels.frank_wolfe_line_search(row.centred, row.weights, s)
        return FreeSupport(_filled(row, support, s), error * row.unit, support.size)
    support, _ = kernels.frank_wolfe_fully_corrective(row.centred, row.weights, s)
    subset = _filled(row, support, s)
    return FreeSupport(subset, free_error(row, subset), support.size)


def least_free_error(row: Instance, supports: list[Indices]) -> FreeSupport:
    """The least free error found from the given supports of s keys each, improved by swaps (ours).

    From the support of least free error, swaps (the key deepest in the direction of the least-norm point for the
    least used one) go on until none helps. The result is at most each support's own forced error, so with the
    forced optimum among them pi-hat(s) = ES / EF-hat is at least 1, as pi(s) is by definition.
    """
    errors = [free_error(row, support) for support in supports]
    forced = [row.forced_error(support) for support in supports]
    best = supports[int(np.argmin(errors))]
    subset, error, rounds = kernels.improve_support(row.centred, row.weights, best, MOST_ROUNDS)
    # Forced weights are a feasible choice of free ones, whatever rounding did to the least-norm point.
    return FreeSupport(subset, min(error * row.unit, *errors, *forced), rounds)


def _filled(row: Instance, support: Indices, s: int) -> Indices:
    """The support and the heaviest other keys, s in all, sorted."""
    heaviest = row.order[:s]  # s of them hold enough keys outside the support
    others = heaviest[~np.isin(heaviest, support)]
    return np.sort(np.concatenate([support, others[: s - support.size]]))
