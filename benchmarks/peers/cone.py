"""The problem as a general solver takes it: binary choices, linear sums and one second-order cone.

For a fixed tau, e_s(A) <= tau iff |sum_j z_j a_j| <= tau sum_j z_j p_j with z binary and sum z = s (P1, section B.4).
The model is handed over scaled so that max |a_j| = 1, and in the fewest coordinates: a rotation of R^d drops the
directions that no candidate has (exact up to rounding), so that at most as many are left as there are candidates.

What the scaling does with a tolerance: a solver accepts |y|^2 <= tau^2 W^2 + 1e-6, absolute. A subset of so little mass
that both squares are below 1e-6 therefore passes whatever its error is. Another scale only moves that limit. So no
answer is taken at its word: its indices are, and its error is computed again from them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers import Instance
from solvers.problem import Indices, Reals

FORMS = ("bisection", "direct", "homogeneous", "refutation")
PROOF_STEP = 1e-4  # relative: tau is bisected down to it, and a refutation asks for a subset better by it
ARTEFACT = 1e-4  # relative: a claim this much below the error computed from the indices is wrong, not merely rounded
LEAST_SECONDS = 0.01  # handed to a solver whose time is up, which then says so itself


@dataclass(frozen=True, eq=False)
class PeerAnswer:
    """What a peer says of one instance, and what its subset is worth.

    subset: the best that it named, sorted row-local indices (s,), or the start. error: the subset's e_s, computed from
    the indices by the row. claimed_error, claimed_lower: the peer's own numbers in the unit of the values, None where
    it gave none. status: "optimal", "infeasible" (nothing below the threshold of a refutation), "feasible" (something
    is), "time_limit", "too_large" (for its licence), or the peer's own word. seconds: wall time, building included.
    solves: calls of the peer. wrong: how many of its subsets have a larger error than it said.
    """

    subset: Indices
    error: float
    claimed_error: float | None
    claimed_lower: float | None
    status: str
    seconds: float
    solves: int
    wrong: int


@dataclass(frozen=True, eq=False)
class Cone:
    """Scaled data: points a_j / unit (n, k) with k <= min(n, d), masses p_j / heaviest (n,), and whose they are.

    heaviest: the largest mass of any s keys, so that masses of subsets are at most 1.
    """

    keys: Indices
    points: Reals
    masses: Reals
    unit: float
    heaviest: float
    s: int


@dataclass(frozen=True, eq=False)
class Question:
    """One call of a peer. tau: threshold in the scaled data, None to minimise; start: choices (n,) of 0 and 1.

    tolerance: feasibility tolerance that the peer is set to; None leaves it at its default.
    """

    form: str
    tau: float | None
    start: Reals
    seconds: float
    tolerance: float | None


@dataclass(frozen=True, eq=False)
class Reply:
    """What the peer said: choices (n,) or None; its value and bound in the scaled data; its status."""

    choices: Reals | None
    value: float | None
    bound: float | None
    status: str


Ask = Callable[[Cone, Question], Reply]


def cone(row: Instance, s: int, candidates: npt.ArrayLike | None) -> Cone:
    """The scaled, rotated data; candidates None is the whole row. Keys of weight 0 are left out."""
    row.check_budget(s)
    keys = np.arange(row.n, dtype=np.int64) if candidates is None else row.subset(candidates)
    keys = keys[row.weights[keys] > 0]
    if keys.size < s:
        raise ValueError(f"{keys.size} candidates of positive weight: expected at least s = {s}")
    residuals = row.residuals[keys]
    unit = float(np.linalg.norm(residuals, axis=1).max()) or 1.0
    points = residuals / unit
    if keys.size < row.d:
        points = np.asarray(np.linalg.qr(points.T, mode="r")).T  # inner products stay
    masses = row.weights[keys]
    heaviest = float(np.sort(masses)[-s:].sum())
    return Cone(keys, np.ascontiguousarray(points), masses / heaviest, unit, heaviest, s)


def answer(
    ask: Ask,
    row: Instance,
    s: int,
    candidates: npt.ArrayLike | None,
    time_limit: float,
    form: str,
    start: npt.ArrayLike | None,
    tolerance: float | None,
) -> PeerAnswer:
    """The peer's answer, by one form of the model (see the solve() of each peer).

    Raises ValueError for a form not in FORMS, a bad budget, or candidates or a start that do not fit.
    """
    if form not in FORMS:
        raise ValueError(f"form {form!r}: expected one of {', '.join(FORMS)}")
    began = time.perf_counter()
    data = cone(row, s, candidates)
    subset = np.sort(data.keys[np.argsort(-data.masses, kind="stable")[:s]]) if start is None else row.subset(start)
    if subset.size != s or not np.isin(subset, data.keys).all():
        raise ValueError(f"start: expected {s} of the candidates")
    error = row.forced_error(subset)
    scale = data.unit / data.heaviest  # of an error in the scaled data
    claimed: float | None = None
    high, low = error / scale, 0.0
    solves = wrong = 0
    status = "optimal"
    while high - low > PROOF_STEP * high or solves == 0:
        tau = {"bisection": (high + low) / 2, "refutation": high * (1 - PROOF_STEP)}.get(form)
        left = max(LEAST_SECONDS, began + time_limit - time.perf_counter())
        reply = ask(data, Question(form, tau, np.isin(data.keys, subset).astype(np.float64), left, tolerance))
        solves += 1
        if reply.choices is not None:
            named = data.keys[np.sort(np.argsort(-reply.choices, kind="stable")[:s])]
            worth = row.forced_error(named)
            claimed = (reply.value if tau is None and reply.value is not None else tau or 0.0) * scale
            wrong += worth > claimed * (1 + ARTEFACT)
            if worth < error:
                subset, error = named, worth
            high = claimed / scale  # the peer's word, so that its own search goes on as it would
        if tau is None:
            status, low = reply.status, reply.bound or 0.0
            break
        if reply.status == "infeasible":
            low = tau
        if form == "refutation" or reply.status not in ("infeasible", "optimal"):
            status = "feasible" if reply.status == "optimal" else reply.status
            break
    lower = low * scale if low > 0 else None
    return PeerAnswer(subset, error, claimed, lower, status, time.perf_counter() - began, solves, wrong)
