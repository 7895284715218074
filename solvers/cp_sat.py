"""The constraint solver CP-SAT as a second opinion: ZERO-ES in integers, and the pool optimum as an interval."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt
from ortools.sat.python import cp_model

from solvers.exhaustive import searchable
from solvers.integer import IntegerInstance
from solvers.problem import Indices, Instance

DIGIT = 2**24  # base in which coefficients are written that are too large for one sum
LARGEST_SUM = 2**60  # of the sizes of a sum's terms: CP-SAT holds sums in 64 bits and refuses what may overflow
EXACT_OBJECTIVE = 2**52  # of the sizes of all coefficients: then bounds are whole numbers in CP-SAT's float64
MOST_CANDIDATES = 64  # a pool has a product for each pair of keys: 2,016 of them
MOST_ROUNDS = 64  # of Dinkelbach's iteration, which takes three or four
_SOLVED = (cp_model.OPTIMAL, cp_model.FEASIBLE)


@dataclass(frozen=True, eq=False)
class ZeroAnswer:
    """The answer to ZERO-ES: "found" with a subset (s,) of error 0, "none" (it is proved), or "undecided" in the time.

    A found subset was tested in integers by IntegerInstance.is_zero. seconds: of building and solving.
    """

    answer: Literal["found", "none", "undecided"]
    subset: Indices | None
    seconds: float


@dataclass(frozen=True, eq=False)
class Interval:
    """The least error of a pool lies in [lower, upper], in the unit of the values; rounding and scaling included.

    subset: sorted indices (s,) of error at most `upper`. finished: whether every solve ended by itself; then the
    width is that of the scaling alone.
    """

    lower: float
    upper: float
    subset: Indices
    finished: bool
    seconds: float


def zero_es(row: IntegerInstance, time_limit: float | None = None, workers: int = 1) -> ZeroAnswer:
    """Whether some s keys have error 0, decided by CP-SAT on the exact integers (ours).

    Asks for z in {0, 1}^n with sum z = s and sum_j z_j m_j (W v_j - W mu) = 0 in each coordinate. Coefficients too
    large for 64-bit sums are written in digits, one equation a digit, with the carries as variables; so numbers of
    any length are decided. time_limit: seconds. One worker gives the same subset every time. Raises ValueError for a
    time limit or a number of workers that is not positive. Source of the problem: P1, Prop. 2.1.
    """
    _check_limits(time_limit, workers)
    began = time.perf_counter()
    model = cp_model.CpModel()
    keep = [model.new_bool_var(f"keep {j}") for j in range(row.n)]
    model.add(sum(keep) == row.s)
    for i in range(row.d):
        _sums_to_zero(model, keep, [step[i] for step in row.steps])
    status, solver = _solve(model, time_limit, workers)
    seconds = time.perf_counter() - began
    if status in _SOLVED:
        subset = np.array([j for j, z in enumerate(keep) if solver.value(z)], dtype=np.int64)
        if not row.is_zero(subset.tolist()):
            raise RuntimeError(f"CP-SAT found keys {subset.tolist()}, whose error is not 0: one of us is wrong")
        return ZeroAnswer("found", subset, seconds)
    return ZeroAnswer("none" if status == cp_model.INFEASIBLE else "undecided", None, seconds)


def error_interval(
    row: Instance,
    s: int,
    candidates: npt.ArrayLike,
    scale_bits: int = 40,
    time_limit: float | None = None,
    workers: int = 1,
) -> Interval:
    """An interval that holds the least forced error of s of the candidates, from integers alone (ours).

    The row is taken at its exact binary values, the weights over their exact sum. For lambda = e(A)^2 of the best
    subset so far, CP-SAT minimises F(A) = |g_A|^2 - lambda p(A)^2, a sum over pairs of kept keys whose coefficients
    are scaled to scale_bits bits and rounded down; a subset with F < 0 is better and gives the next lambda
    (Dinkelbach's iteration). Whatever lambda and however the solve stopped, F >= b for all subsets gives
    e^2 >= lambda + b / p^2 for the least (b < 0) or the largest (b >= 0) mass p of s candidates. Errors are compared
    in rationals, and the ends of the interval rounded outwards.

    time_limit: seconds for all solves; an interval cut short is wide, and still holds. The candidate sets of P1 take a
    second or less, in any dimension; rows of values alike are slow, and 40 keys with s near 20 may not end. Raises
    ValueError as exhaustive() does, for more than 64 candidates, for scale_bits below 8 or so many that the objective
    would outgrow 52 bits (40 fit always), and for limits that are not positive.
    """
    keys = searchable(row, s, candidates)
    pairs = keys.size * (keys.size + 1) // 2
    if keys.size > MOST_CANDIDATES:
        raise ValueError(f"{keys.size} candidates: expected at most {MOST_CANDIDATES}, as each pair has a product")
    most_bits = (EXACT_OBJECTIVE // pairs).bit_length() - 1
    if not 8 <= scale_bits <= most_bits:
        raise ValueError(f"scale_bits = {scale_bits} with {keys.size} candidates: expected 8 to {most_bits}")
    _check_limits(time_limit, workers)
    began = time.perf_counter()
    pool = _Pool.of(row, keys)
    best = sorted(np.argsort(-row.weights[keys], kind="stable")[:s].tolist())  # places of the s heaviest
    least, lower, finished = pool.error_squared(best), Fraction(0), False
    for _ in range(MOST_ROUNDS):
        left = None if time_limit is None else time_limit - (time.perf_counter() - began)
        if left is not None and left <= 0:
            finished = False
            break
        found, bound, finished = pool.minimise(least, best, scale_bits, left, workers)
        lower = max(lower, bound)
        error = pool.error_squared(found)
        if error >= least:
            break
        best, least = found, error
    else:
        finished = False
    return Interval(
        _root(lower * pool.unit_squared, up=False),
        _root(least * pool.unit_squared, up=True),
        keys[best],
        finished,
        time.perf_counter() - began,
    )


@dataclass(frozen=True, eq=False)
class _Pool:
    """A pool in integers: |g_A|^2 W^2 W^2 = sum of gram over A x A, p(A) W = sum of masses over A.

    masses (k,) and gram (k, k) by place in the pool; total W of the whole row. Errors are in the unit of the integer
    points, whose square in units of the values is unit_squared.
    """

    masses: list[int]
    gram: list[list[int]]
    total: int
    unit_squared: Fraction

    @classmethod
    def of(cls, row: Instance, keys: Indices) -> "_Pool":
        """The pool of these keys, from the exact values of the row's floats."""
        masses, _ = _whole(row.weights.tolist())
        flat, unit = _whole(row.values.ravel().tolist())
        points = [flat[j * row.d : (j + 1) * row.d] for j in range(row.n)]
        total = sum(masses)
        moment = [sum(m * x for m, x in zip(masses, column, strict=True)) for column in zip(*points, strict=True)]
        steps = [[masses[j] * (total * x - y) for x, y in zip(points[j], moment, strict=True)] for j in keys.tolist()]
        gram = [[sum(x * y for x, y in zip(a, b, strict=True)) for b in steps] for a in steps]
        return cls([masses[j] for j in keys.tolist()], gram, total, unit * unit)

    def error_squared(self, places: Sequence[int]) -> Fraction:
        """e_s(A)^2 in the unit of the integer points."""
        mass = sum(self.masses[j] for j in places)
        return Fraction(sum(self.gram[j][k] for j in places for k in places), (self.total * mass) ** 2)

    def minimise(
        self, square: Fraction, start: Sequence[int], scale_bits: int, time_limit: float | None, workers: int
    ) -> tuple[list[int], Fraction, bool]:
        """Minimise |g_A|^2 - square p(A)^2: a subset, a lower bound of all e_s^2, whether the solve ended by itself."""
        n, s = len(self.masses), len(start)
        pairs = [(j, k) for j in range(n) for k in range(j, n)]
        weight = square.numerator * self.total**2
        exact = [
            (1 if j == k else 2) * (square.denominator * self.gram[j][k] - weight * self.masses[j] * self.masses[k])
            for j, k in pairs
        ]
        largest = max(map(abs, exact))
        if largest == 0:  # every subset has this error
            return list(start), square, True
        scaled = {pair: (c << scale_bits) // largest for pair, c in zip(pairs, exact, strict=True)}
        drops = 2 * s > n  # choose the smaller side: fewer of a chosen key's products are 1
        model = cp_model.CpModel()
        chosen = [model.new_bool_var(f"{'drop' if drops else 'keep'} {j}") for j in range(n)]
        both = _products(model, chosen, n - s if drops else s)
        for j in range(n):
            model.add_hint(chosen[j], (j in start) != drops)
        constant, linear = 0, [scaled[j, j] for j in range(n)]
        if drops:  # with x = 1 - z: z_j z_k = 1 - x_j - x_k + x_j x_k
            constant = sum(scaled.values())
            linear = [-sum(scaled[min(j, k), max(j, k)] for k in range(n)) for j in range(n)]
        model.minimize(
            cp_model.LinearExpr.weighted_sum([*chosen, *both.values()], [*linear, *(scaled[pair] for pair in both)])
        )
        status, solver = _solve(model, time_limit, workers)
        bound = -(s * (s + 1) // 2) << scale_bits  # holds anyway; before its first solution CP-SAT states none
        found = list(start)
        if status in _SOLVED:
            if math.isfinite(solver.best_objective_bound):
                bound = max(bound, math.floor(solver.best_objective_bound) + constant)
            found = [j for j in range(n) if bool(solver.value(chosen[j])) != drops]
        ordered = sorted(self.masses)
        mass = sum(ordered[:s]) if bound < 0 else sum(ordered[-s:])
        scale = square.denominator * (self.total * mass) ** 2 << scale_bits
        return found, max(Fraction(0), square + Fraction(bound * largest, scale)), status == cp_model.OPTIMAL


def _products(
    model: cp_model.CpModel, chosen: Sequence[cp_model.IntVar], count: int
) -> dict[tuple[int, int], cp_model.IntVar]:
    """Ask for `count` chosen keys and return, for each pair j < k, a variable that is 1 where both are chosen."""
    n = len(chosen)
    both = {(j, k): model.new_bool_var(f"both {j} {k}") for j in range(n) for k in range(j + 1, n)}
    model.add(sum(chosen) == count)
    for (j, k), product in both.items():
        model.add_implication(product, chosen[j])
        model.add_implication(product, chosen[k])
        model.add_bool_or(product, ~chosen[j], ~chosen[k])
    for j in range(n):  # implied, and what makes the linear relaxation strong: a chosen key has count - 1 partners
        partners = sum(both[min(j, k), max(j, k)] for k in range(n) if k != j)
        model.add(partners == (count - 1) * chosen[j])
    return both


def _sums_to_zero(model: cp_model.CpModel, keep: Sequence[cp_model.IntVar], coefficients: Sequence[int]) -> None:
    """Add sum_j coefficients_j keep_j = 0, in as many equations as the coefficients have digits."""
    divisor = math.gcd(*coefficients)
    if divisor == 0:
        return
    rest = [c // divisor for c in coefficients]
    if sum(map(abs, rest)) < LARGEST_SUM:
        model.add(cp_model.LinearExpr.weighted_sum(list(keep), rest) == 0)
        return
    carried: list[cp_model.IntVar] = []  # the carry into this digit, none into the first
    most = 0  # its size
    while any(rest):
        digits = [c % DIGIT if c >= 0 else -(-c % DIGIT) for c in rest]
        rest = [(c - digit) // DIGIT for c, digit in zip(rest, digits, strict=True)]
        most = (sum(map(abs, digits)) + most) // DIGIT
        onward = [model.new_int_var(-most, most, "carry")] if any(rest) else []
        terms, weights = [*keep, *carried, *onward], [*digits, *[1] * len(carried), *[-DIGIT] * len(onward)]
        model.add(cp_model.LinearExpr.weighted_sum(terms, weights) == 0)
        carried = onward


def _solve(
    model: cp_model.CpModel, time_limit: float | None, workers: int
) -> tuple[cp_model.CpSolverStatus, cp_model.CpSolver]:
    """Solve with a fixed seed; the status and where the values are."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 0
    if time_limit is not None:
        solver.parameters.max_time_in_seconds = time_limit
    status = solver.solve(model)
    if status == cp_model.MODEL_INVALID:
        raise RuntimeError(f"CP-SAT refuses the model: {model.validate()}")
    return status, solver


def _check_limits(time_limit: float | None, workers: int) -> None:
    if time_limit is not None and not time_limit > 0:
        raise ValueError(f"time_limit = {time_limit}: expected a positive number of seconds")
    if workers < 1:
        raise ValueError(f"workers = {workers}: expected at least 1")


def _whole(values: Sequence[float]) -> tuple[list[int], Fraction]:
    """Floats as integers times a common unit, exactly."""
    ratios = [value.as_integer_ratio() for value in values]
    denominator = max(below for _, below in ratios)  # powers of two, so the largest is a multiple of each
    return [above * (denominator // below) for above, below in ratios], Fraction(1, denominator)


def _root(square: Fraction, up: bool) -> float:
    """The square root, rounded to a float that is not below it (up) or not above it."""
    if square == 0:
        return 0.0
    shift = 64 + max(0, square.denominator.bit_length() - square.numerator.bit_length())
    near = float(Fraction(math.isqrt((square.numerator << 2 * shift) // square.denominator), 1 << shift))
    while (Fraction(near) ** 2 < square) if up else (Fraction(near) ** 2 > square):
        near = math.nextafter(near, math.inf if up else 0.0)
    return near
