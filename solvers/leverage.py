"""The leverage rival: the keys that stand out most among the row's keys, whatever the query (P1, appendix)."""

import numpy as np
import numpy.typing as npt

from solvers.problem import Indices, Instance, Reals

RIDGE_SHARE = 1e-3  # lambda = 1e-3 tr(K'K) / d; P1 states no lambda (ours)


def leverage_scores(keys: npt.ArrayLike, ridge_share: float = RIDGE_SHARE) -> Reals:
    """k_j' (K'K + lambda I)^-1 k_j of keys K (n, d), (n,)."""
    matrix = np.asarray(keys, dtype=np.float64)
    gram = matrix.T @ matrix
    d = gram.shape[0]
    ridge = ridge_share * np.trace(gram) / d
    if ridge <= 0:
        return np.zeros(matrix.shape[0])
    inverse = np.linalg.inv(gram + ridge * np.eye(d))  # its condition is at most 1 + d / ridge_share
    return np.asarray(np.einsum("ij,ij->i", matrix @ inverse, matrix))


def leverage(row: Instance, scores: npt.ArrayLike, s: int) -> Indices:
    """A_lev: the s keys of positive weight of largest leverage, ties to the lowest index; sorted indices (s,)."""
    row.check_budget(s)
    ranked = np.where(row.weights > 0, np.asarray(scores, dtype=np.float64), -1.0)
    return np.sort(np.argsort(-ranked, kind="stable")[:s])
