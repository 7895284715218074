"""Gurobi on the cone model, through gurobipy: the best commercial solver that installs with a licence of its own.

The licence that comes with the package allows 200 variables in a model with quadratic terms: enough for the candidate
sets (a choice per key, at most as many coordinates, three sums), far from enough for a whole row.
"""

import gurobipy as gp
import numpy as np
import numpy.typing as npt
from gurobipy import GRB

from benchmarks.peers.cone import Cone, PeerAnswer, Question, Reply, answer
from solvers import Instance

PEER_GAP = 1e-9  # relative, between Gurobi's value and its bound: what it is asked to close
STATUS = {
    GRB.OPTIMAL: "optimal",
    GRB.INFEASIBLE: "infeasible",
    GRB.INF_OR_UNBD: "infeasible",  # the objective is bounded below
    GRB.TIME_LIMIT: "time_limit",
}


def solve(
    row: Instance,
    s: int,
    candidates: npt.ArrayLike | None = None,
    time_limit: float = 60.0,
    form: str = "homogeneous",
    start: npt.ArrayLike | None = None,
    tolerance: float | None = None,
) -> PeerAnswer:
    """Gurobi's subset of s keys on one thread, its error computed again from its indices.

    The parameters are those of benchmarks.peers.scip.solve(). A model beyond the licence has status "too_large" and
    the start as its subset.
    """
    return answer(_ask, row, s, candidates, time_limit, form, start, tolerance)


def _ask(data: Cone, question: Question) -> Reply:
    try:
        return _solve(data, question)
    except gp.GurobiError as error:
        if error.errno == GRB.Error.SIZE_LIMIT_EXCEEDED:
            return Reply(None, None, None, "too_large")
        raise


def _solve(data: Cone, question: Question) -> Reply:
    n, k = data.points.shape
    with gp.Env(params={"OutputFlag": 0}) as environment, gp.Model(env=environment) as model:
        model.Params.Threads = 1
        model.Params.TimeLimit = question.seconds
        model.Params.MIPGap = PEER_GAP
        if question.tolerance is not None:
            model.Params.FeasibilityTol = question.tolerance
            model.Params.IntFeasTol = question.tolerance
            model.Params.OptimalityTol = question.tolerance
        z = model.addMVar(n, vtype=GRB.BINARY)
        model.addConstr(z.sum() == data.s)
        z.setAttr(GRB.Attr.Start, question.start)
        y = model.addMVar(k, lb=-GRB.INFINITY)
        if question.form == "homogeneous":
            most = 1 / float(np.sort(data.masses)[: data.s].sum())  # of the factor 1 / W; the least is 1
            factor = model.addMVar(1, lb=1, ub=most)
            x = model.addMVar(n, ub=most)  # factor where chosen, else 0
            model.addConstr(x <= most * z)
            model.addConstr(x >= z)
            model.addConstr(x <= factor - (1 - z))
            model.addConstr(x >= factor - most * (1 - z))
            model.addConstr(data.masses @ x == 1)
            model.addConstr(x.sum() == data.s * factor)
            model.addConstr(data.points.T @ x == y)
            model.setObjective(y @ y, GRB.MINIMIZE)
        else:
            mass = model.addVar(ub=1)
            model.addConstr(data.masses @ z == mass)
            model.addConstr(data.points.T @ z == y)
            if question.tau is not None:
                model.addConstr(y @ y <= question.tau**2 * mass * mass)
            else:
                kept = float(question.start @ data.masses)
                t = model.addVar(ub=float(np.linalg.norm(question.start @ data.points)) / kept)
                size = model.addVar()
                model.addConstr(y @ y <= size * size)
                model.addConstr(size == t * mass)
                model.setObjective(t, GRB.MINIMIZE)
        model.optimize()
        choices = np.asarray(z.X) if model.SolCount else None
        value = bound = None
        if question.tau is None:
            value = float(model.ObjVal) if model.SolCount else None
            bound = max(0.0, float(model.ObjBound))
            if question.form == "homogeneous":  # its objective is the square
                value, bound = None if value is None else max(0.0, value) ** 0.5, bound**0.5
        return Reply(choices, value, bound, STATUS.get(model.Status, f"status {model.Status}"))
