"""The least forced error over a candidate set or a whole row, proved by branch and bound."""

import time

import numpy as np
import numpy.typing as npt

from solvers import kernels
from solvers.certificate import Certificate
from solvers.exhaustive import leaf_rounding, searchable
from solvers.problem import Instance

PROOF_GAP = 1e-9  # "optimal" means that no subset has an error below (1 - 1e-9) of the one returned
NO_LIMIT = 2**62
MOST_DIMENSIONS = 4096  # the relative slack on computed norms covers no more


def certify(
    row: Instance,
    s: int,
    gap: float = 0.0,
    node_limit: int | None = None,
    candidates: npt.ArrayLike | None = None,
) -> Certificate:
    """The subset of s keys of least forced error e_s, with a lower bound that holds in floating point (ours).

    candidates: row-local indices to draw from, such as candidate_set(row, s); None searches the whole row. gap: stop
    at a subset proved to be within this relative distance of the least (0: within 1e-9). node_limit: stop after
    that many nodes with the best subset found and lower = 0. Keys of weight 0 are left out while s others exist.
    The bound and the search are described at kernels.branch_and_bound. A candidate set takes well under a
    millisecond; a whole row with much dropped mass may not finish: give a node_limit.
    Raises ValueError for a bad budget, fewer than s candidates of positive weight, gap outside [0, 1), d > 4,096.
    """
    if not 0 <= gap < 1:
        raise ValueError(f"gap = {gap}: expected 0 <= gap < 1")
    if row.d > MOST_DIMENSIONS:
        raise ValueError(f"values have {row.d} dimensions: expected at most {MOST_DIMENSIONS}")
    if node_limit is not None and node_limit < 1:
        raise ValueError(f"node_limit = {node_limit}: expected at least 1")
    keys = searchable(row, s, np.flatnonzero(row.weights) if candidates is None else candidates)
    gap = max(gap, PROOF_GAP)
    began = time.perf_counter()
    steps, weights = row.steps[keys], row.weights[keys]
    slack = leaf_rounding(row, keys.size) + row.rounding / row.unit
    done, chosen, error, tau, nodes = kernels.search(
        steps, weights, row.distances[keys] / row.unit, s, gap, slack, node_limit or NO_LIMIT
    )
    seconds = time.perf_counter() - began
    zero = error <= slack
    lower = max(0.0, tau - slack) * row.unit if done else 0.0
    status = "bracketed" if not done else "optimal" if gap == PROOF_GAP or zero else "within_gap"
    return Certificate(
        np.sort(keys[chosen]),
        error * row.unit,
        lower,
        status,
        keys.size,
        nodes,
        seconds,
        "finished" if done else "node_limit",
        "branch_and_bound",
    )
