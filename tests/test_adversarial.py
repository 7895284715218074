"""Rows built to break a search: what it returns and what it claims, against exact brute force."""

import math
from itertools import combinations

import numpy as np
import pytest

from solvers import Instance, certify
from solvers.replay import check_certificate, replay
from tests import oracle, strategies

SLACK = 1 - 1e-12  # of the comparison p(A) >= rho p(top-mass)
DOUBT = oracle.Fraction(1, 10**11)  # a mass this near its floor counts as kept or not, as the float sum falls
FLOORS = (0.0, 0.1, 0.5)


def check(weights: np.ndarray, values: np.ndarray, s: int, rho: float) -> None:
    """The least error and the bound of certify() against every subset in fractions, and the replayed proof."""
    row = Instance(weights, values)
    exact = oracle.exact(row.weights, row.values)
    positive = [j for j in range(row.n) if row.weights[j] > 0]
    least = oracle.Fraction(rho) * sum(sorted(exact[0])[-s:])
    masses = {A: sum(exact[0][j] for j in A) for A in combinations(positive, s)}
    surely = min(oracle.squared_error(exact, A) for A, mass in masses.items() if mass >= least)
    perhaps = min(oracle.squared_error(exact, A) for A, mass in masses.items() if mass >= least * (1 - DOUBT))
    found = certify(row, s, mass_floor=rho, proof=True)
    slack = oracle.Fraction(2 * row.rounding + 1e-13 * row.radius)
    # The bound and the error are floats, so their exact values can be compared with the fractions.
    assert oracle.Fraction(found.lower) ** 2 <= surely
    assert masses[tuple(found.subset)] >= least * (1 - DOUBT)
    assert root_at_most(oracle.Fraction(found.error) - slack, surely * (1 + oracle.Fraction(3, 10**9)))
    assert perhaps <= (oracle.Fraction(found.error) + slack) ** 2
    check_certificate(row, found)
    for floor in found.floors:
        assert (floor.proof is not None) == (floor.lower > 0)
        if floor.proof is not None:
            replay(row.weights, row.values, floor.proof)
    assert found.status == "optimal"


def root_at_most(x: oracle.Fraction, square: oracle.Fraction) -> bool:
    return x <= 0 or x * x <= square


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def cases() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(7)
    n, d = 11, 3
    values = random.standard_normal((n, d))
    weights = softmax(random.standard_normal(n))
    pairs = np.repeat(random.standard_normal((6, d)), 2, axis=0)
    cancelling = np.concatenate([values[:5], -values[:5], np.zeros((1, d))])
    heavy = np.full(n, 1e-16)
    heavy[4] = 1 - 1e-15
    outlier = values.copy()
    outlier[0] *= 500 / np.linalg.norm(outlier[0])
    underflow = softmax(np.concatenate([np.zeros(7), np.full(4, -800.0)]))
    nearly = np.concatenate([np.full(7, 1.0), np.full(4, 1e-290)])
    return {
        "near ties": (weights, np.ones((n, d)) * values[0] + 1e-12 * values),
        "two means that differ by 1e-12": (np.full(n, 1 / n), np.round(values, 1) + 1e-12 * random.random((n, d))),
        "duplicated keys": (np.full(12, 1 / 12), pairs),
        "duplicated keys of unequal weight": (softmax(np.arange(12) / 3), pairs),
        "all values equal": (weights, np.tile(values[0], (n, 1))),
        "residuals that cancel exactly": (np.full(n, 1 / n), cancelling),
        "one key with all but 1e-15 of the mass": (heavy / heavy.sum(), values),
        "one key at radius 500": (weights, outlier),
        "a heavy key at radius 500": (softmax(np.arange(n)[::-1] * 1.0), outlier),
        "weights that underflow to 0": (underflow, values),
        "weights near the smallest": (nearly / nearly.sum(), values),
        "one dimension": (weights, values[:, :1]),
        "one dimension, integers": (
            np.full(n, 1 / n),
            np.array([[3.0], [5], [8], [13], [1], [0], [0], [0], [2], [7], [1]]),
        ),
        "huge": (weights, values * 1e140),
        "tiny": (weights, values * 1e-140),
        "far from the origin": (weights, values * 1e-6 + 1e6),
        "256 dimensions": (weights, random.standard_normal((n, 256))),
        "256 dimensions and an outlier": (weights, random.standard_normal((n, 256)) * np.geomspace(1e6, 1, n)[:, None]),
    }


@pytest.mark.parametrize("rho", FLOORS)
@pytest.mark.parametrize("name", cases())
def test_answers_and_bounds_hold_on_rows_that_break_things(name: str, rho: float) -> None:
    weights, values = cases()[name]
    positive = int((Instance(weights, values).weights > 0).sum())
    for s in sorted({1, 2, 4, positive - 1, positive}):
        if math.comb(positive, s) * values.shape[1] < 20_000:
            check(weights, values, s, rho)


def sweep(first: int, count: int) -> None:
    for seed in range(first, first + count):
        random = np.random.default_rng(seed)
        weights, values = strategies.row_of(
            kind=str(random.choice(strategies.KINDS)),
            n=int(random.integers(1, 8)),
            d=int(random.integers(1, 4)),
            spread=float(random.choice(strategies.SPREADS)),
            offset=float(random.choice(strategies.OFFSETS)),
            scale=float(random.choice(strategies.SCALES)),
            random=random,
        )
        s = int(random.integers(1, np.count_nonzero(Instance(weights, values).weights) + 1))
        try:
            check(weights, values, s, float(random.choice(FLOORS)))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, s = {s}") from error


def test_bounds_never_exceed_the_optimum_of_random_rows() -> None:
    sweep(0, 400)


@pytest.mark.long
def test_bounds_never_exceed_the_optimum_of_a_hundred_thousand_random_rows() -> None:
    sweep(1000, 100_000)
