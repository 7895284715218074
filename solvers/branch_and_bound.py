"""The least forced error over a candidate set or a whole row, proved by branch and bound."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from solvers import kernels
from solvers.certificate import Certificate, Floor
from solvers.exhaustive import leaf_rounding, searchable
from solvers.problem import Indices, Instance, Reals
from solvers.proof import Proof

PROOF_GAP = 1e-9  # "optimal" means that no subset has an error below (1 - 1e-9) of the one returned
DECISION_SLACK = 1e-9  # a decision of False says that no subset has an error below (1 - 1e-9) of the threshold
MASS_SLACK = 1e-12  # p(A) >= rho p(top-mass) is compared with this relative slack
CASCADE = (0.5, 0.1)  # floors that a search without one goes through first: each is easy, and starts the next
BRACKET = (0.9, 0.75, 0.5, 0.25)  # shares of the best error that are tried as lower bounds where no proof ends
FIRST_NODES = 150  # nodes of a whole row before better subsets to start from are looked for: most proofs end within
KICKED_KEYS, KICKS = 256, 1500  # keys of largest reach among which kicked copies of the best subset are improved
WINDOW, WINDOW_TRIES = 1024, 3  # keys of like weight among which subsets of little mass are looked for, starts in each
SEARCH_SHARE = 0.75  # of a time limit for the search; the rest is for a lower bound where no proof ended
FLOORED_SHARE = 0.95  # the same under a mass floor, where such bounds come soon
MOST_DIMENSIONS = 4096  # the relative slack on computed norms covers no more
MOST_MEMORY = 8 * 2**30  # bytes that a search may set aside; it touches what its tree needs
NO_LIMIT = 2**62
STOPPED_BY = {
    kernels.DONE: "finished",
    kernels.OUT_OF_NODES: "node_limit",
    kernels.OUT_OF_TIME: "time_limit",
    kernels.FOUND_ONE: "finished",
}


def certify(
    row: Instance,
    s: int,
    mass_floor: float = 0.0,
    gap: float = 0.0,
    node_limit: int | None = None,
    time_limit: float | None = None,
    candidates: npt.ArrayLike | None = None,
    cascade: Sequence[float] = CASCADE,
    proof: bool = False,
) -> Certificate:
    """The subset of s keys of least forced error e_s, with a lower bound that holds in floating point (ours).

    candidates: row-local indices to draw from, such as candidate_set(row, s); None searches the whole row. mass_floor:
    rho, only subsets with p(A) >= rho p(top-mass set of the whole row), compared with relative slack 1e-12; 0 is the
    paper's problem, in which the best subset of a flat row is often one of next to no mass that happens to hit mu. gap:
    accept a subset proved to be within this relative distance of the least (0: within 1e-9). node_limit, time_limit
    (seconds): stop there with the best subset found and the largest lower bound proved; node_limit alone makes a result
    repeatable (where no proof ends, the lower bound may take up to half as many nodes again). cascade: falling floors
    above mass_floor that the search of a whole row goes through first, each of which is part of the answer. proof: log
    the search tree behind every lower bound, to be replayed by solvers.replay. Keys of weight 0 are left out while s
    others exist. The bound and the search are described at kernels.branch_and_bound.
    Raises ValueError for a bad budget, floor, gap, limit or cascade, fewer than s candidates of positive weight,
    candidates that cannot keep the floor, d > 4,096.
    """
    if not 0 <= gap < 1:
        raise ValueError(f"gap = {gap}: expected 0 <= gap < 1")
    gap = max(gap, PROOF_GAP)
    if cascade is not CASCADE and (
        not all(0 < rho <= 1 for rho in cascade) or any(below >= above for above, below in pairwise(cascade))
    ):
        raise ValueError(f"cascade = {tuple(cascade)}: expected floors that fall, from at most 1 to above 0")
    if candidates is not None and mass_floor == 0 and node_limit is None and time_limit is None and not proof:
        return _certify_candidates(row, s, gap, candidates)
    problem = _problem(row, s, mass_floor, node_limit, time_limit, candidates, proof)
    began = time.perf_counter()
    above = [rho for rho in cascade if rho > mass_floor] if candidates is None else []
    best = _start(problem, max([mass_floor, *above]))
    floors: list[Floor] = []
    spent = 0
    for rho in [*above, mass_floor]:
        last = rho == mass_floor
        share = problem.nodes - spent if last else problem.nodes // 4
        found = _least(problem, rho, best, gap, share, whole_row=candidates is None)
        best, spent = found.subset, spent + found.nodes
        proved = found.stop == kernels.DONE
        floor = _floor(problem, rho, found)
        if last and not proved:
            floor, found, extra = _bracket(problem, mass_floor, found)
            spent += extra
        floors.append(replace(floor, nodes=spent, seconds=time.perf_counter() - began))
    for k in range(len(floors) - 2, -1, -1):
        floors[k] = _helped(problem, floors[k], floors[k + 1])
    zero = found.error <= problem.slack
    status = "bracketed" if not proved else "optimal" if gap == PROOF_GAP or zero else "within_gap"
    return Certificate(
        floors[-1].subset,
        floors[-1].error,
        floors[-1].lower,
        status,
        tuple(floors),
        problem.keys.size,
        spent,
        floors[-1].seconds,
        floors[-1].stopped_by,
        "branch_and_bound",
    )


def _certify_candidates(row: Instance, s: int, gap: float, candidates: npt.ArrayLike) -> Certificate:
    """certify() of a candidate set without floor or limits: the case that a study makes a hundred thousand times."""
    _check_size(row, s)
    keys = searchable(row, s, candidates)
    slack = leaf_rounding(row, keys.size) + row.rounding / row.unit
    began = time.perf_counter()
    _, subset, error, tau, nodes = kernels.search_candidates(
        row.steps, row.weights, row.distances, row.unit, keys, s, gap, slack, NO_LIMIT
    )
    seconds = time.perf_counter() - began
    lower = max(0.0, tau - slack) * row.unit
    status = "optimal" if gap == PROOF_GAP or error <= slack else "within_gap"
    floors = (Floor(0.0, subset, error * row.unit, lower, proved=True, nodes=nodes, seconds=seconds),)
    return Certificate(
        subset, error * row.unit, lower, status, floors, keys.size, nodes, seconds, "finished", "branch_and_bound"
    )


def decide(
    row: Instance,
    s: int,
    threshold: float,
    mass_floor: float = 0.0,
    node_limit: int | None = None,
    time_limit: float | None = None,
    candidates: npt.ArrayLike | None = None,
) -> bool | None:
    """Whether some subset of s keys has a forced error of at most `threshold` (ours).

    True: such a subset was found. False: it is proved that none has an error below threshold (1 - 1e-9). None:
    neither within the limits. The other parameters and the errors are those of certify(), and threshold must be
    positive and finite.
    """
    if not (math.isfinite(threshold) and threshold > 0):
        raise ValueError(f"threshold = {threshold}: expected a positive finite number")
    problem = _problem(row, s, mass_floor, node_limit, time_limit, candidates)
    best = _start(problem, mass_floor)
    if row.forced_error(problem.keys[best]) <= threshold:
        return True
    target = threshold / row.unit
    whole_row = candidates is None
    first = min(problem.nodes, FIRST_NODES) if whole_row else problem.nodes
    found = _run(problem, mass_floor, best, target, 0.0, first)
    if found.stop == kernels.OUT_OF_NODES and problem.nodes > first:
        better = _better_start(problem, mass_floor, found.subset)
        found = _run(problem, mass_floor, better, target, 0.0, problem.nodes - first, problem.time_end)
    if row.forced_error(problem.keys[found.subset]) <= threshold:
        return True
    # What rounding could hide must be less than the slack that False allows.
    if found.stop == kernels.DONE and problem.slack <= DECISION_SLACK * target:
        return False
    return None


@dataclass(frozen=True, eq=False)
class _Problem:
    """The keys to draw from and what the kernels need of them; errors in row.unit."""

    row: Instance
    s: int
    keys: Indices
    steps: Reals
    weights: Reals
    distances: Reals
    top_mass: float
    slack: float
    nodes: int
    deadline: float  # of the search, and of all, on the clock of time.perf_counter
    time_end: float
    logged: bool


@dataclass(frozen=True, eq=False)
class _Found:
    """What one run of the kernel gave: subset as places in keys, error and tau in row.unit."""

    stop: int
    subset: Indices
    error: float
    tau: float
    nodes: int
    marks: npt.NDArray[np.int32]
    reals: Reals


def _problem(
    row: Instance,
    s: int,
    mass_floor: float,
    node_limit: int | None,
    time_limit: float | None,
    candidates: npt.ArrayLike | None,
    logged: bool = False,
) -> _Problem:
    _check_size(row, s)
    if not 0 <= mass_floor <= 1:
        raise ValueError(f"mass_floor = {mass_floor}: expected 0 <= mass_floor <= 1")
    if node_limit is not None and not (isinstance(node_limit, int | np.integer) and 1 <= node_limit <= NO_LIMIT):
        raise ValueError(f"node_limit = {node_limit}: expected a whole number from 1 to {NO_LIMIT}")
    if time_limit is not None:
        if not time_limit > 0:
            raise ValueError(f"time_limit = {time_limit}: expected a positive number of seconds")
        _clock_compiled()
    now = time.perf_counter()
    # By falling weight, so that windows of like weight are slices.
    keys = row.order[: row.n_positive] if candidates is None else searchable(row, s, candidates)
    weights = row.weights[keys]
    top = float(row.weights[row.order[:s]].sum()) if mass_floor > 0 or candidates is None else 0.0
    if mass_floor > 0 and np.sort(weights)[-s:].sum() < mass_floor * top * (1 - MASS_SLACK):
        raise ValueError(f"no {s} candidates keep {mass_floor} of the top-mass set's mass: expected some that do")
    return _Problem(
        row,
        s,
        keys,
        row.steps[keys],
        weights,
        row.distances[keys] / row.unit,
        top,
        leaf_rounding(row, keys.size) + row.rounding / row.unit,
        node_limit or NO_LIMIT,
        math.inf if time_limit is None else now + (FLOORED_SHARE if mass_floor > 0 else SEARCH_SHARE) * time_limit,
        math.inf if time_limit is None else now + time_limit,
        logged,
    )


@cache
def _clock_compiled() -> None:
    """Let the kernels look at the clock once: numba compiles that anew in each process, which counts in no limit."""
    kernels.balance(np.ones((1, 1)), np.ones(1), np.zeros(1, dtype=np.int64), 0.0, 0.0)


def _check_size(row: Instance, s: int) -> None:
    row.check_budget(s)
    if row.d > MOST_DIMENSIONS:
        raise ValueError(f"values have {row.d} dimensions: expected at most {MOST_DIMENSIONS}")
    # What branch and bound keeps on its stack: s + 4 nodes of at most d + 3 points, each with its s keys.
    stack = 8 * (s + 4) * (min(row.d, row.n) + 3) * (row.d + s + 2)
    if stack > MOST_MEMORY:
        raise ValueError(f"s = {s} and d = {row.d} would take {stack >> 30} GiB: expected at most {MOST_MEMORY >> 30}")


def _start(problem: _Problem, rho: float) -> Indices:
    """Swaps from the heaviest keys among the WINDOW heaviest, keeping the floor; places in keys, (s,)."""
    heaviest = np.argsort(-problem.weights, kind="stable")
    window = max(WINDOW, 2 * problem.s)
    if heaviest.size <= window:
        near, start = np.arange(heaviest.size), heaviest[: problem.s]
    else:
        near = np.sort(heaviest[:window])
        start = np.searchsorted(near, np.sort(heaviest[: problem.s]))
    subset, _, _ = kernels.balance(
        problem.steps[near], problem.weights[near], start, _least_mass(problem, rho), problem.deadline
    )
    return np.asarray(near[subset])


def _least(problem: _Problem, rho: float, start: Indices, gap: float, nodes: int, whole_row: bool) -> _Found:
    """The least error at one floor; on a whole row, better starts are looked for after its first nodes."""
    if time.perf_counter() > problem.deadline:  # a run that could do nothing still takes its time to set up
        none, nothing = np.empty(0, dtype=np.int32), np.empty(0)
        return _Found(kernels.OUT_OF_TIME, start, _error(problem, start), 0.0, 0, none, nothing)
    first = min(nodes, FIRST_NODES) if whole_row else nodes
    found = _run(problem, rho, start, 0.0, gap, first)
    if found.stop != kernels.OUT_OF_NODES or first == nodes:
        return found
    again = _run(problem, rho, _better_start(problem, rho, found.subset), 0.0, gap, nodes - first)
    return replace(again, nodes=again.nodes + first)


def _better_start(problem: _Problem, rho: float, best: Indices) -> Indices:
    """The best of the subset given, of what kicks make of it, and, without a floor, of subsets of little mass."""
    by_reach = np.argsort(-problem.weights * problem.distances, kind="stable")
    place = np.empty_like(by_reach)
    place[by_reach] = np.arange(by_reach.size)
    near = by_reach[np.union1d(np.arange(min(KICKED_KEYS, by_reach.size)), place[best])]
    start = np.searchsorted(place[near], np.sort(place[best]))
    moved, _ = kernels.kicked(
        problem.steps[near], problem.weights[near], start, _least_mass(problem, rho), KICKS, problem.deadline
    )
    found = [best, np.asarray(near[moved])]
    if rho == 0:
        little, _ = kernels.search_windows(
            problem.steps, problem.weights, problem.s, WINDOW, WINDOW_TRIES, problem.deadline
        )
        found.append(np.asarray(little))
    return min(found, key=lambda keys: _error(problem, keys))


def _bracket(problem: _Problem, rho: float, found: _Found) -> tuple[Floor, _Found, int]:
    """The largest share of the error found that is proved a lower bound, the run that found the best, nodes spent.

    Deciding at a share may meet a better subset than the search did.
    """
    spent, best, stop, bound = 0, found, found.stop, found
    for share in BRACKET:
        left = problem.time_end - time.perf_counter()
        if left <= 0:
            stop = kernels.OUT_OF_TIME
            break
        tried = _run(
            problem,
            rho,
            best.subset,
            share * found.error,
            0.0,
            max(1, problem.nodes // 8) if problem.nodes < NO_LIMIT else NO_LIMIT,
            deadline=time.perf_counter() + left / 2,
        )
        spent += tried.nodes
        if tried.error < best.error:
            best = tried
        if tried.stop == kernels.OUT_OF_TIME:
            stop = kernels.OUT_OF_TIME
        if tried.stop == kernels.DONE:
            bound = tried
            break
    floor = _floor(problem, rho, replace(bound, subset=best.subset, error=best.error))
    return replace(floor, proved=False, stopped_by=STOPPED_BY[stop]), best, spent


def _run(
    problem: _Problem,
    rho: float,
    start: Indices,
    target: float,
    gap: float,
    nodes: int,
    deadline: float | None = None,
) -> _Found:
    return _Found(
        *kernels.search(
            problem.steps,
            problem.weights,
            problem.distances,
            start,
            target,
            gap,
            problem.slack,
            _least_mass(problem, rho),
            nodes,
            problem.deadline if deadline is None else deadline,
            problem.keys,
            problem.logged,
        )
    )


def _floor(problem: _Problem, rho: float, found: _Found) -> Floor:
    done = found.stop == kernels.DONE
    unit = problem.row.unit
    lower = max(0.0, found.tau - problem.slack) * unit if done else 0.0
    proof = None
    if problem.logged and lower > 0:
        proof = Proof(problem.s, rho, np.sort(problem.keys), lower, unit, found.marks, found.reals)
    subset = np.sort(problem.keys[found.subset])
    return Floor(rho, subset, found.error * unit, lower, done, proof, STOPPED_BY[found.stop])


def _helped(problem: _Problem, floor: Floor, below: Floor) -> Floor:
    """A floor where no proof ended, with what the next lower one gives it: a lower bound, and its subset if it fits."""
    if floor.proved:
        return floor
    kept = problem.row.weights[below.subset].sum()
    if below.error < floor.error and kept >= _least_mass(problem, floor.rho):
        floor = replace(floor, subset=below.subset, error=below.error)
    if below.lower > floor.lower:
        floor = replace(floor, lower=below.lower, proof=below.proof)
    return floor


def _error(problem: _Problem, subset: Indices) -> float:
    return problem.row.forced_error(problem.keys[subset]) / problem.row.unit


def _least_mass(problem: _Problem, rho: float) -> float:
    return rho * problem.top_mass * (1 - MASS_SLACK)
