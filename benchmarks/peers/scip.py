"""SCIP on the cone model, through PySCIPOpt: the solver that P1 asked for its proofs (section B.4)."""

import numpy as np
import numpy.typing as npt
from pyscipopt import Model, quicksum

from benchmarks.peers.cone import Cone, PeerAnswer, Question, Reply, answer
from solvers import Instance

STATUS = {"timelimit": "time_limit", "infeasible": "infeasible", "optimal": "optimal"}


def solve(
    row: Instance,
    s: int,
    candidates: npt.ArrayLike | None = None,
    time_limit: float = 60.0,
    form: str = "bisection",
    start: npt.ArrayLike | None = None,
    tolerance: float | None = None,
) -> PeerAnswer:
    """SCIP's subset of s keys on one thread with its default tolerances, its error computed again from its indices.

    candidates: row-local indices, None the whole row. time_limit: seconds for all its solves together. start: a subset
    to begin at (default the s heaviest keys). form: "bisection" of tau (P1), each step a feasibility problem; "direct"
    minimises t under |y| <= e, e = t W; "homogeneous" minimises the norm of the kept mean, z / W linearised exactly;
    "refutation" asks once for a subset better than the start by PROOF_STEP. Raises ValueError as answer() does.
    """
    return answer(_ask, row, s, candidates, time_limit, form, start, tolerance)


def _ask(data: Cone, question: Question) -> Reply:
    n, k = data.points.shape
    model = Model()
    model.hideOutput()
    model.setParam("limits/time", question.seconds)
    if question.tolerance is not None:
        model.setParam("numerics/feastol", question.tolerance)
    z = [model.addVar(vtype="B") for _ in range(n)]
    model.addCons(quicksum(z) == data.s)
    y = [model.addVar(lb=None) for _ in range(k)]
    chosen = question.start
    hint = list(zip(z, chosen, strict=True))
    if question.form == "homogeneous":
        most = 1 / float(np.sort(data.masses)[: data.s].sum())  # of the factor 1 / W; the least is 1
        factor = model.addVar(lb=1, ub=most)
        x = [model.addVar(lb=0, ub=most) for _ in range(n)]  # factor where chosen, else 0
        for one, binary in zip(x, z, strict=True):
            model.addCons(one <= most * binary)
            model.addCons(one >= binary)
            model.addCons(one <= factor - (1 - binary))
            model.addCons(one >= factor - most * (1 - binary))
        model.addCons(quicksum(float(p) * one for p, one in zip(data.masses, x, strict=True)) == 1)
        model.addCons(quicksum(x) == data.s * factor)
        inverse = 1 / float(chosen @ data.masses)
        hint += [(factor, inverse), *zip(x, chosen * inverse, strict=True)]
        at = chosen @ data.points * inverse
    else:
        x = z
        at = chosen @ data.points
    for i in range(k):
        model.addCons(quicksum(float(a) * one for a, one in zip(data.points[:, i], x, strict=True)) == y[i])
    hint += zip(y, at, strict=True)
    norm = quicksum(one * one for one in y)
    if question.form == "homogeneous":
        t = model.addVar(lb=0)
        model.addCons(norm <= t * t)
        hint.append((t, float(np.linalg.norm(at))))
    else:
        mass = model.addVar(lb=0, ub=1)
        model.addCons(quicksum(float(p) * one for p, one in zip(data.masses, z, strict=True)) == mass)
        kept = float(chosen @ data.masses)
        hint.append((mass, kept))
        if question.tau is not None:
            model.addCons(norm <= question.tau**2 * mass * mass)
        else:
            size = float(np.linalg.norm(at))
            t = model.addVar(lb=0, ub=size / kept)
            most_size = model.addVar(lb=0)
            model.addCons(norm <= most_size * most_size)
            model.addCons(most_size == t * mass)
            hint += [(t, size / kept), (most_size, size)]
    if question.tau is None:
        model.setObjective(t, "minimize")
        begin = model.createSol()
        for variable, value in hint:
            model.setSolVal(begin, variable, float(value))
        model.addSol(begin)
    model.optimize()
    status = model.getStatus()
    choices = np.array([model.getVal(one) for one in z]) if model.getNSols() else None
    value = bound = None
    if question.tau is None:
        value = float(model.getObjVal()) if choices is not None else None
        bound = max(0.0, float(model.getDualbound()))
    return Reply(choices, value, bound, STATUS.get(status, status))
