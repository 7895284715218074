"""One law for everything that searches: brute force = enumeration = branch and bound, with bounds that hold."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import (
    Certificate,
    Instance,
    balancing,
    candidate_set,
    certify,
    exhaustive,
    frank_wolfe,
    free_error,
    kernels,
    least_free_error,
    leverage,
    leverage_scores,
    top_mass,
)
from solvers.balancing import balancing_with_swaps
from tests import oracle, strategies

SEARCHES = {
    "exhaustive": lambda row, s, pool: exhaustive(row, s, pool),
    "branch and bound": lambda row, s, pool: certify(row, s, candidates=pool),
}
Row = tuple[np.ndarray, np.ndarray]


def captured_like(seed: int, n: int = 400, d: int = 16, sharpness: float = 2.5) -> Instance:
    """A row with a long tail of light keys, like those of a model."""
    random = np.random.default_rng(seed)
    weights = np.exp(sharpness * random.standard_normal(n))
    return Instance(weights / weights.sum(), random.standard_normal((n, d)) + 0.3)


def check(row: Instance, s: int, found: Certificate, best_square: object) -> None:
    best = math.sqrt(float(best_square))  # type: ignore[arg-type]
    slack = 2 * row.rounding + 1e-13 * row.radius
    assert found.subset.dtype == np.int64
    assert len(set(found.subset.tolist())) == s
    assert (np.diff(found.subset) > 0).all()
    assert (row.weights[found.subset] > 0).all()
    assert found.error == pytest.approx(row.forced_error(found.subset), rel=1e-12, abs=slack)
    assert found.status == "optimal"
    assert found.stopped_by == "finished"
    assert best - slack <= found.error <= best * (1 + 2e-9) + slack
    assert found.lower <= best  # exactly: a lower bound that rounding breaks is wrong
    assert found.lower >= best * (1 - 2e-9) - 100 * slack


@pytest.mark.parametrize("search", SEARCHES)
@given(strategies.rows(most_keys=8), st.data())
def test_search_finds_the_exact_optimum(search: str, row: Row, data: st.DataObject) -> None:
    instance = Instance(*row)
    s = data.draw(st.integers(1, instance.n_positive))
    pool = np.arange(instance.n)
    best, _ = oracle.least_squared_error(oracle.exact(instance.weights, instance.values), s)
    check(instance, s, SEARCHES[search](instance, s, pool), best)


@pytest.mark.parametrize("s", [1, 2, 3, 5, 8, 16, 32])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 3.0])
def test_branch_and_bound_equals_enumeration_on_pools(s: int, sharpness: float) -> None:
    for seed in range(4):
        row = captured_like(seed, sharpness=sharpness)
        pool = candidate_set(row, s)
        slow, fast = exhaustive(row, s, pool), certify(row, s, candidates=pool)
        assert slow.nodes == math.comb(pool.size, s)
        assert fast.error == pytest.approx(slow.error, rel=1e-9)
        assert fast.lower <= slow.error * (1 + 1e-15)
        assert fast.searched == slow.searched == pool.size


@pytest.mark.parametrize("s", [1, 2, 3, 4])
def test_whole_rows_are_certified_too(s: int) -> None:
    # large enough for the leaves that scan one key or pairs of keys, small enough to enumerate
    for seed in range(4):
        row = captured_like(seed, n=[5000, 400, 70, 40][s - 1], d=5, sharpness=3.0)
        slow, fast = exhaustive(row, s, np.arange(row.n)), certify(row, s)
        assert fast.error == pytest.approx(slow.error, rel=1e-9)
        assert fast.status == "optimal"


def test_order_of_the_rules() -> None:
    for seed in range(20):
        row = captured_like(seed)
        for s in (4, 8, 16):
            best = certify(row, s, candidates=candidate_set(row, s)).error
            balanced, top = row.forced_error(balancing(row, s)), row.forced_error(top_mass(row, s))
            assert best * (1 - 1e-12) <= balanced <= top * (1 + 1e-12)
            assert row.forced_error(balancing(row, s, pool="full")) <= top * (1 + 1e-12)


def test_a_larger_pool_is_never_worse() -> None:
    for seed in range(10):
        row = captured_like(seed)
        errors = [certify(row, 4, candidates=candidate_set(row, 4, extra)).error for extra in (0, 4, 12, 24, 60)]
        assert all(later <= earlier * (1 + 2e-9) for earlier, later in pairwise(errors))


def test_permuting_keys_leaves_the_optimal_error() -> None:
    random = np.random.default_rng(0)
    for seed in range(10):
        row = captured_like(seed, n=60, d=4)
        order = random.permutation(row.n)
        other = Instance(row.weights[order], row.values[order])
        assert certify(other, 3).error == pytest.approx(certify(row, 3).error, rel=1e-9)


def test_scaling_values_by_a_power_of_two_scales_everything_exactly() -> None:
    row = captured_like(1)
    scaled = Instance(row.weights, row.values * 2.0**-40)
    for s in (4, 16):
        ours, theirs = (
            certify(row, s, candidates=candidate_set(row, s)),
            certify(scaled, s, candidates=candidate_set(row, s)),
        )
        assert theirs.subset.tolist() == ours.subset.tolist()
        assert (theirs.error, theirs.lower) == (ours.error * 2.0**-40, ours.lower * 2.0**-40)


@pytest.mark.parametrize("tail", [1e-30, 1e-90, 1e-125])
def test_keys_of_tiny_weight_do_not_break_the_bound(tail: float) -> None:
    # light keys whose mean is mu: the optimum is among weights whose squares underflow
    weights = np.array([0.4, 0.3, 0.3, tail, tail, tail])
    values = np.array([[0.0], [1.0], [2.0], [0.9 - 1e-3], [0.9 + 1.1e-3], [5.0]])
    row = Instance(weights / weights.sum(), values)
    best, sets = oracle.least_squared_error(oracle.exact(row.weights, row.values), 2)
    assert sets == {(3, 4)}
    found = certify(row, 2)
    assert found.subset.tolist() == [3, 4]
    assert found.lower <= math.sqrt(best)


def test_an_outlier_does_not_break_the_bound() -> None:
    # a key of huge norm nearly orthogonal to the certificate's vector is off by more than the bound's own size
    random = np.random.default_rng(5)
    for _ in range(30):
        values = random.standard_normal((10, 3))
        values[0] *= 1e7
        values[1] = -values[0] + random.standard_normal(3)
        weights = random.random(10)
        row = Instance(weights / weights.sum(), values)
        best, _ = oracle.least_squared_error(oracle.exact(row.weights, row.values), 3)
        found = certify(row, 3)
        assert found.lower <= math.sqrt(best)
        assert found.error >= math.sqrt(best) * (1 - 1e-9) - 2 * row.rounding
        assert found.error <= math.sqrt(best) * (1 + 1e-8) + 2 * row.rounding + 1e-13 * row.radius


def test_a_heavy_key_that_leaves_does_not_spoil_the_mass_of_light_ones() -> None:
    # the running mass of an enumeration forgets a tail of 1e-12 beside a key of weight 1
    random = np.random.default_rng(0)
    for _ in range(4):
        weights = np.append(1.0, random.random(11) * 10.0 ** random.uniform(-16, -9, 11))
        values = np.concatenate([np.zeros((1, 2)), random.standard_normal((11, 2))])
        row = Instance(weights / weights.sum(), values)
        best = math.sqrt(oracle.least_squared_error(oracle.exact(row.weights, row.values), 5)[0])
        for found in (exhaustive(row, 5, np.arange(12)), certify(row, 5)):
            assert found.lower <= best
            assert found.error == pytest.approx(best, rel=1e-9, abs=2 * row.rounding)


def test_gap_and_node_limit() -> None:
    row = captured_like(3, n=2000, d=32, sharpness=0.5)
    stopped = certify(row, 8, node_limit=5)
    assert (stopped.status, stopped.stopped_by) == ("bracketed", "node_limit")
    assert [floor.rho for floor in stopped.floors] == [0.5, 0.1, 0.0]
    assert stopped.error <= row.forced_error(top_mass(row, 8))
    pool = candidate_set(row, 8)
    loose, tight = certify(row, 8, gap=0.2, candidates=pool), certify(row, 8, candidates=pool)
    assert loose.status == "within_gap"
    assert loose.lower <= tight.error <= loose.error <= loose.lower / 0.8 * (1 + 1e-9)
    assert loose.nodes <= tight.nodes


def test_a_row_without_error_is_zero_within_rounding() -> None:
    row = Instance(np.full(40, 1 / 40), np.ones((40, 3)) / 3)
    found = certify(row, 5)
    assert found.status == "optimal"
    assert found.error <= row.rounding
    assert found.lower == 0


@given(strategies.rows(most_keys=9), st.data())
def test_balancing_follows_its_definition(row: Row, data: st.DataObject) -> None:
    instance = Instance(*row)
    s = data.draw(st.integers(1, instance.n_positive))
    exact = oracle.exact(instance.weights, instance.values)
    kept = balancing(instance, s, pool="full")
    errors = {tuple(kept): math.sqrt(oracle.squared_error(exact, kept))}
    slack = 4 * instance.rounding + 1e-13 * instance.radius
    # where it stopped, no single swap lowers the error by more than rounding
    for i in kept:
        for j in np.flatnonzero(instance.weights):
            if j not in kept:
                swapped = [k for k in kept if k != i] + [int(j)]
                errors[tuple(swapped)] = math.sqrt(oracle.squared_error(exact, swapped))
    assert errors[tuple(kept)] <= min(errors.values()) * (1 + 1e-9) + slack


def test_balancing_takes_the_best_swap_and_the_first_of_ties() -> None:
    # keys 2 and 3 are equal, and so are 0 and 1: the swap (0, 2) is the smallest of four equal ones
    row = Instance(np.array([0.3, 0.3, 0.2, 0.2]), np.array([[1.0], [1.0], [-1.0], [-1.0]]))
    subset, swaps = balancing_with_swaps(row, 2, "full")
    assert (subset.tolist(), swaps) == ([1, 2], 1)


def test_revolving_door_changes_one_key_and_visits_every_subset_once() -> None:
    for n in range(1, 9):
        for r in range(1, n + 1):
            chosen = np.append(np.arange(r), n)
            seen = {tuple(chosen[:r].tolist())}
            while True:
                before = set(chosen[:r].tolist())
                out, into = kernels.revolve(chosen, r)
                if out < 0:
                    break
                after = set(chosen[:r].tolist())
                assert before - after == {out}
                assert after - before == {into}
                assert (np.diff(chosen) > 0).all()
                seen.add(tuple(chosen[:r].tolist()))
            assert len(seen) == math.comb(n, r)


@pytest.mark.parametrize("s", [1, 2, 4, 8, 16, 32])
def test_free_errors_are_attained_and_ours_is_least(s: int) -> None:
    for seed in range(6):
        row = captured_like(seed)
        plain, corrected = frank_wolfe(row, s, fully_corrective=False), frank_wolfe(row, s, fully_corrective=True)
        best = certify(row, s, candidates=candidate_set(row, s))
        least = least_free_error(row, [plain.subset, corrected.subset, top_mass(row, s), best.subset])
        slack = 1e-7 * row.radius
        for support in (plain, corrected, least):
            assert support.subset.size == s == len(set(support.subset.tolist()))
        assert free_error(row, plain.subset) <= plain.error + slack  # the iterate lies in its support's hull
        assert free_error(row, corrected.subset) == pytest.approx(corrected.error, abs=slack)
        assert least.error <= min(corrected.error, free_error(row, best.subset), best.error) + slack
        assert least.error <= best.error  # so pi-hat >= 1, always
        assert free_error(row, least.subset) <= least.error + slack


def test_frank_wolfe_on_a_row_known_by_hand() -> None:
    # mu = 0; nearest is key 0 at (1, 0); the oracle's vertex is (-3, 0); line search reaches 0
    weights = np.array([0.45, 0.15, 0.2, 0.2])
    values = np.array([[1.0, 0.0], [-3.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    row = Instance(weights, values)
    for fully_corrective in (False, True):
        found = frank_wolfe(row, 2, fully_corrective)
        assert found.subset.tolist() == [0, 1]
        assert found.error <= 1e-12
        assert frank_wolfe(row, 1, fully_corrective).error == pytest.approx(1.0)


def test_leverage_equals_the_formula_in_loops() -> None:
    random = np.random.default_rng(2)
    keys = random.standard_normal((20, 4)).astype(np.float32)
    matrix = keys.astype(float)
    ridge = 1e-3 * sum(float(k @ k) for k in matrix) / 4
    expected = [float(k @ np.linalg.solve(matrix.T @ matrix + ridge * np.eye(4), k)) for k in matrix]
    scores = leverage_scores(keys)
    assert scores == pytest.approx(expected, rel=1e-10)
    row = Instance(np.full(20, 0.05), random.standard_normal((20, 3)))
    assert leverage(row, scores, 5).tolist() == sorted(sorted(range(20), key=lambda j: -expected[j])[:5])
    assert leverage(row, np.ones(20), 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda row: certify(row, 0), "s = 0"),
        (lambda row: certify(row, 401), "s = 401"),
        (lambda row: certify(row, 4, candidates=[1, 2, 3]), "expected at least s = 4"),
        (lambda row: certify(row, 4, gap=1.0), "gap = 1.0"),
        (lambda row: certify(row, 4, node_limit=0), "node_limit = 0"),
        (lambda row: exhaustive(row, 16, candidate_set(row, 16, 24)), "expected at most 5,000,000"),
        (lambda row: balancing(row, 4, pool="all"), "pool 'all'"),
        (lambda row: balancing(row, 4, pool=[1, 2, 3, 4]), "lacks a key of the top-mass set"),
    ],
)
def test_bad_requests_are_refused_by_name(call: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call(captured_like(0))  # type: ignore[operator]


def test_balancing_ends_where_a_heavy_key_hides_light_ones() -> None:
    # differences of sums claimed a swap that raised the error, undid it, and claimed it again
    weights = np.array(
        [0.20141591692543748, 0.40519098130149167, 5.464040452460124e-21, 0.0006633869133328741, 4.067801614393758e-05]
        + [0.39252827322341505, 1.6175314750227614e-18, 5.3340203684121875e-19, 2.0882011083770893e-18]
        + [7.703432795893468e-07, 0.00015999327689944956]
    )
    values = np.array(
        [-32.51962315339464, 67274.08335286862, 0.0185171117650781, -1738602402150.3848, -35.93052765911527]
        + [-0.18918914789172755, 6234052528.18546, -7.513855888902832, 0.009942473423833052, -209.27799669396455]
        + [-33962.823725936905]
    )
    row = Instance(weights, values[:, None])
    for s in (2, 3, 8):
        top = row.forced_error(top_mass(row, s))
        assert row.forced_error(balancing(row, s)) <= top
        assert certify(row, s).error <= exhaustive(row, s, np.arange(11)).error * (1 + 1e-9) + row.rounding


def test_the_bound_holds_however_many_keys_the_mean_is_taken_over() -> None:
    for n in (1024, 8192):
        random = np.random.default_rng(n)
        weights = np.where(np.arange(n) % 3 == 0, 3.0, 1.0) * random.random(n)
        values = np.where(np.arange(n)[:, None] % 2 == 0, 1.0, -1.0) * (1 + 1e-3 * random.random((n, 2)))
        row = Instance(weights / weights.sum(), values)
        keys = [0, 1, n - 1]
        exact = oracle.exact(row.weights, row.values)
        best = min(oracle.squared_error(exact, [j]) for j in keys)
        for found in (certify(row, 1, candidates=keys), exhaustive(row, 1, keys)):
            assert oracle.Fraction(found.lower) ** 2 <= best
            assert found.lower >= math.sqrt(best) * (1 - 2e-9)


@pytest.mark.parametrize("unit", [5e-324, 1e-310, 1e-300])
def test_values_that_have_lost_their_digits_prove_nothing(unit: float) -> None:
    row = Instance(np.array([0.5, 0.3, 0.2]), np.array([[3.0], [-2.0], [1.0]]) * unit)
    assert certify(row, 2).lower == 0


@pytest.mark.parametrize("tiny", [1e-120, 1e-128])
def test_light_keys_whose_squares_are_small_are_not_taken_for_zero(tiny: float) -> None:
    random = np.random.default_rng(1)
    weights = np.append([0.4, 0.3, 0.3], np.full(600, tiny))
    row = Instance(weights / weights.sum(), random.standard_normal((603, 3)))
    for s in (1, 2):
        found = certify(row, s)
        assert found.error == pytest.approx(row.forced_error(found.subset), rel=1e-12)
        assert found.error == pytest.approx(exhaustive(row, s, np.arange(603)).error, rel=1e-9)
