"""Exact search over whole rows: mass floors, decisions, brackets, limits, and bounds that survive an attack."""

import math
import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import Instance, candidate_set, certify, decide, exhaustive, kernels, top_mass
from tests import oracle, strategies

FLOORS = (0.0, 0.02, 0.1, 0.5, 0.9, 1.0)
SLACK = 1 - 1e-12  # of the comparison p(A) >= rho p(top-mass)


def peaked(seed: int, n: int, d: int, sharpness: float = 2.5, offset: float = 0.3) -> Instance:
    random = np.random.default_rng(seed)
    weights = np.exp(sharpness * random.standard_normal(n))
    return Instance(weights / weights.sum(), random.standard_normal((n, d)) + offset)


def least_by_force(row: Instance, s: int, rho: float) -> float:
    """The least error over subsets that keep enough, from float arrays alone (n small)."""
    subsets = np.array(list(combinations(range(row.n), s)))
    mass = row.weights[subsets].sum(axis=1)
    moved = np.einsum("as,asd->ad", row.weights[subsets], row.values[subsets] - row.weights @ row.values)
    errors = np.linalg.norm(moved, axis=1) / mass
    top = np.sort(row.weights)[-s:].sum()
    return float(errors[mass >= rho * top * SLACK].min())


@given(strategies.rows(most_keys=8), st.data())
def test_least_error_at_every_floor_equals_exact_brute_force(
    row: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    instance = Instance(*row)
    s = data.draw(st.integers(1, instance.n_positive))
    rho = data.draw(st.sampled_from(FLOORS))
    exact = oracle.exact(instance.weights, instance.values)
    positive = [j for j in range(instance.n) if instance.weights[j] > 0]
    top = sum(sorted(exact[0])[-s:])
    kept = [A for A in combinations(positive, s) if float(sum(exact[0][j] for j in A) / top) >= rho * SLACK]
    best = math.sqrt(min(oracle.squared_error(exact, A) for A in kept))
    found = certify(instance, s, mass_floor=rho)
    slack = 2 * instance.rounding + 1e-13 * instance.radius
    assert found.status == "optimal"
    assert found.lower <= best
    assert best - slack <= found.error <= best * (1 + 2e-9) + slack
    assert instance.kept_mass(found.subset) >= rho * float(top) * (1 - 1e-11)


@pytest.mark.parametrize("sharpness", [0.3, 1.5, 3.0])
@pytest.mark.parametrize(("n", "s"), [(60, 2), (40, 3), (26, 4), (22, 5), (18, 9)])
def test_trees_deeper_than_a_leaf_agree_with_brute_force(n: int, s: int, sharpness: float) -> None:
    for seed in range(3):
        row = peaked(seed, n, 3, sharpness)
        for rho in FLOORS:
            best = least_by_force(row, s, rho)
            found = certify(row, s, mass_floor=rho)
            assert found.error == pytest.approx(best, rel=1e-8, abs=1e-13)
            assert found.lower <= best * (1 + 1e-13)
            for share in (0.7, 0.999999, 1.000001, 1.4):
                assert decide(row, s, share * best, mass_floor=rho) is (share >= 1)


def test_the_cascade_is_part_of_the_answer() -> None:
    row = peaked(4, 300, 6)
    found = certify(row, 6)
    assert [floor.rho for floor in found.floors] == [0.5, 0.1, 0.0]
    top = row.kept_mass(top_mass(row, 6))
    errors = []
    for floor in found.floors:
        assert row.forced_error(floor.subset) == pytest.approx(floor.error, rel=1e-12)
        assert row.kept_mass(floor.subset) >= floor.rho * top * (1 - 1e-11)
        assert floor.lower <= floor.error
        errors.append(floor.error)
    assert errors == sorted(errors, reverse=True)  # the optimum does not rise when the floor falls
    assert found.error == found.floors[-1].error
    assert [f.rho for f in certify(row, 6, mass_floor=0.3).floors] == [0.5, 0.3]
    assert [f.rho for f in certify(row, 6, cascade=(0.9, 0.7), mass_floor=0.5).floors] == [0.9, 0.7, 0.5]
    assert [f.rho for f in certify(row, 6, cascade=()).floors] == [0.0]
    assert [f.rho for f in certify(row, 6, candidates=candidate_set(row, 6)).floors] == [0.0]


def test_a_floor_of_one_keeps_the_top_mass_and_its_ties_alone() -> None:
    weights = np.array([0.3, 0.3, 0.3, 0.1])
    row = Instance(weights, np.array([[0.0], [4.0], [1.0], [2.0]]))
    # all pairs of the first three keys keep as much as the top-mass set {0, 1}
    assert certify(row, 2, mass_floor=1.0).subset.tolist() == [0, 1]
    # mu is 1.7; the means are 2, 0.5, 2.5
    assert certify(row, 1, mass_floor=1.0).subset.tolist() == [2]


def test_a_lucky_subset_of_little_mass_needs_the_floor_to_fall() -> None:
    # light keys hit mu exactly; the best of the heavy pairs is at a tenth
    weights = np.array([0.4, 0.3, 0.3 - 2e-6, 1e-6, 1e-6])
    values = np.array([[0.0], [1.0], [2.0], [0.0], [0.0]])
    mu = 0.3 + 2 * (0.3 - 2e-6)
    values[3], values[4] = (mu - 1) / (1 - 2e-6), (mu + 1) / (1 - 2e-6)
    row = Instance(weights, values)
    floored, free = certify(row, 2, mass_floor=0.5), certify(row, 2)
    assert free.subset.tolist() == [3, 4]
    assert free.error < 1e-4 < floored.error
    assert decide(row, 2, floored.error / 2) is True
    assert decide(row, 2, floored.error / 2, mass_floor=0.5) is False


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6, 1e9])
def test_bounds_survive_outliers_at_every_floor(scale: float) -> None:
    # a key of huge norm nearly orthogonal to z has a computed c_j that is off by more than the bound's own size
    random = np.random.default_rng(11)
    for _ in range(5):
        values = random.standard_normal((13, 2))
        values[0] *= scale
        values[1] = -values[0] * random.uniform(0.5, 2) + random.standard_normal(2)
        weights = random.random(13) ** 3
        row = Instance(weights / weights.sum(), values)
        exact = oracle.exact(row.weights, row.values)
        top = sum(sorted(exact[0])[-4:])
        errors = [(oracle.squared_error(exact, A), sum(exact[0][j] for j in A)) for A in combinations(range(13), 4)]
        for rho in (0.0, 0.5):
            best = min(error for error, mass in errors if float(mass / top) >= rho * SLACK)
            found = certify(row, 4, mass_floor=rho)
            # in exact arithmetic: the bound is a float, its square a fraction
            assert oracle.Fraction(found.lower) ** 2 <= best
            assert (
                oracle.Fraction(found.error) ** 2
                >= best * (1 - oracle.Fraction(1, 10**9)) - oracle.Fraction(2 * row.rounding) ** 2
            )


def test_prunes_hold_in_exact_arithmetic() -> None:
    # the kernel's own selection bound against fractions: low never exceeds the exact c_j, however large the key
    random = np.random.default_rng(3)
    for exponent in range(-8, 9, 2):
        a = random.standard_normal((40, 5)) * 10.0 ** random.uniform(-8, exponent, (40, 1))
        w = random.random(40) * 10.0 ** random.uniform(-12, 0, 40)
        z = random.standard_normal(5)
        z /= np.linalg.norm(z) * (1 + 1e-12)
        tau, nu = random.random(), random.random() * 10
        reach = (np.linalg.norm(a, axis=1) + tau * w) * kernels.INFLATION + kernels.ABSOLUTE
        order = np.argsort(-reach)
        a, w, reach = np.ascontiguousarray(a[order]), np.ascontiguousarray(w[order]), reach[order]
        after = np.maximum.accumulate(w[::-1])[::-1].copy()
        chosen, least = np.empty(12, np.int64), np.empty(12)
        lengths, free = np.linalg.norm(a, axis=1) * kernels.INFLATION, np.arange(40, dtype=np.int32)
        dots, stamps, last, m = np.empty(40), np.full(40, -kernels.PAST), 0, 0
        past, away = np.empty((kernels.PAST, 5)), np.empty(kernels.PAST)
        keys, memory = (a, w, reach, lengths, after), (dots, stamps, past, away)
        for moved in (0.0, 1e-1, 1e-4, 1e-9):  # products with earlier vectors, near and far, stand in for those with z
            z = z + moved * random.standard_normal(5)
            z /= np.linalg.norm(z) * (1 + 1e-12)
            last, _, m = kernels.select_least(keys, free, 40, z, nu, tau, 10, chosen, least, m, memory, last)
            exact = [
                sum((oracle.Fraction(x) * oracle.Fraction(y) for x, y in zip(a[j], z, strict=True)), oracle.Fraction(0))
                - (oracle.Fraction(tau) + oracle.Fraction(nu)) * oracle.Fraction(w[j])
                for j in range(40)
            ]
            assert m == len(set(chosen[:10])) == 10
            assert all(oracle.Fraction(x) <= exact[j] for j, x in zip(chosen[:10], least[:10], strict=True))
            assert all(exact[j] >= oracle.Fraction(least[9]) for j in range(40) if j not in set(chosen[:10]))


def least_swap(row: Instance, subset: np.ndarray, least_mass: float) -> float:
    """The least error that one swap of the subset reaches among those that keep enough, or its own; one by one."""
    best = row.forced_error(subset)
    for out in subset:
        for into in set(range(row.n)) - set(subset.tolist()):
            swapped = np.array([into if j == out else j for j in subset])
            if row.weights[swapped].sum() >= least_mass:
                best = min(best, row.forced_error(swapped))
    return best


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_swaps_by_products_end_where_no_swap_helps(share: float) -> None:
    made = kept = 0
    for seed in range(12):
        row = peaked(seed, 30, 4, 1.0)
        least_mass = share * row.weights[top_mass(row, 6)].sum()
        subset, inside = np.arange(6), np.arange(row.n) < 6  # often keeps too little: the first swap restores the mass
        gram = row.steps @ row.steps.T
        made += kernels.best_swaps(gram, row.weights, subset, inside, least_mass, *np.empty((3, row.n)))
        assert np.array_equal(np.sort(subset), np.flatnonzero(inside))
        if row.weights[subset].sum() >= least_mass:
            assert row.forced_error(subset) <= least_swap(row, subset, least_mass) * (1 + 1e-7)
            kept += 1
    assert made >= 12
    assert kept >= 8


def test_kicks_keep_the_floor_and_find_no_worse() -> None:
    better = 0
    for seed in range(4):
        row = peaked(seed, 60, 6, 1.0)
        start = top_mass(row, 8)
        least_mass = 0.6 * row.weights[start].sum()
        subset, error = kernels.kicked(row.steps, row.weights, start, least_mass, 200, np.inf)
        assert np.unique(subset).size == 8
        assert row.weights[subset].sum() >= least_mass
        assert error * row.unit == pytest.approx(row.forced_error(subset), rel=1e-9)
        best = certify(row, 8, mass_floor=0.6).error
        assert best * (1 - 1e-9) <= error * row.unit <= row.forced_error(start)
        better += error * row.unit <= best * (1 + 1e-9)
    assert better >= 3  # of these small rows it finds the optimum nearly always


def test_a_relaxation_is_rounded_to_its_largest_shares() -> None:
    shares = np.array([1.0, 0.4, 0.0, 0.6, 1.0, 0.7, 0.3, 0.0])
    free, split = np.array([1, 3, 4, 5, 6, 7], dtype=np.int32), np.array([5, 3, 1, 6])
    subset, kept = np.empty(4, dtype=np.int64), np.array([0])

    def rounded(near: int) -> set[int] | None:
        inside = np.empty(near, dtype=np.bool_)
        if not kernels.rounded(kept, 1, free, 6, shares, split, 4, near, subset, inside):
            return None
        assert np.array_equal(np.flatnonzero(inside), np.sort(subset))
        return set(subset.tolist())

    assert rounded(8) == {0, 4, 5, 3}
    assert rounded(5) == {0, 4, 3, 1}  # key 5 is too far
    assert rounded(4) is None  # and now key 4, which the relaxation keeps whole


def test_distances_from_the_hull_of_the_others() -> None:
    random = np.random.default_rng(5)
    for size in (1, 2, 5, 9):
        points = random.standard_normal((12, 10)) * 10.0 ** random.uniform(-1, 1)
        squares = np.empty(12)
        kernels.square_distances(points, size, np.empty((12, 12)), np.empty(12), squares)
        for i in range(size):
            others = np.delete(points[:size], i, axis=0)
            if size == 1:
                continue  # nothing to be distant from
            spans = (others[1:] - others[0]).T
            offset = points[i] - others[0]
            nearest = spans @ np.linalg.lstsq(spans, offset, rcond=None)[0] if size > 2 else 0.0
            # the constant coordinate is large, not infinite
            assert squares[i] == pytest.approx(((offset - nearest) ** 2).sum(), rel=0.2)


def test_limits_stop_with_a_valid_bracket() -> None:
    row = peaked(0, 3000, 32, sharpness=0.4, offset=0.0)
    for limits in ({"node_limit": 400}, {"time_limit": 0.4}):
        began = time.perf_counter()
        found = certify(row, 16, **limits)
        assert found.status == "bracketed"
        assert found.stopped_by == next(iter(limits))
        assert 0 <= found.lower <= found.error <= row.forced_error(top_mass(row, 16))
        if "time_limit" in limits:
            assert time.perf_counter() - began < 30  # a limit that is looked at, not a measurement
    again = certify(row, 16, node_limit=400)
    assert again.subset.tolist() == certify(row, 16, node_limit=400).subset.tolist()
    assert decide(row, 16, 1e-6 * row.radius, node_limit=50) is None


def test_a_bracket_that_proves_part_of_the_gap() -> None:
    # stop early where the decision at a share of the error is easy: the bound is then that share
    row = peaked(8, 400, 24, sharpness=3.0)
    exact = certify(row, 8, mass_floor=0.9)
    assert exact.status == "optimal"
    stopped = certify(row, 8, mass_floor=0.9, node_limit=2)
    assert stopped.lower <= exact.error <= stopped.error
    assert exact.nodes > 2
    assert stopped.status == "bracketed"


@pytest.mark.parametrize(("n", "d"), [(16_384, 16), (2_000, 256)])
def test_long_rows_and_wide_values(n: int, d: int) -> None:
    row = peaked(1, n, d, sharpness=4.0)
    found = certify(row, 4, mass_floor=0.5)
    assert found.status == "optimal"
    assert found.searched == n
    pool = exhaustive(row, 4, candidate_set(row, 4))
    assert found.error <= pool.error * (1 + 2e-9) or row.kept_mass(pool.subset) < 0.5 * row.kept_mass(top_mass(row, 4))


def test_budgets_beyond_the_window_of_heavy_keys() -> None:
    row = peaked(2, 1400, 2)
    for s in (1023, 1024, 1025, 1300):
        found = certify(row, s, mass_floor=0.5, node_limit=3)
        assert found.subset.size == s
        assert found.error <= row.forced_error(top_mass(row, s))
        assert decide(row, s, 2 * row.forced_error(top_mass(row, s)), node_limit=3) is True


def test_a_search_that_would_fill_the_memory_is_refused() -> None:
    random = np.random.default_rng(0)
    row = Instance(np.full(2000, 1 / 2000), random.standard_normal((2000, 3000)))
    with pytest.raises(ValueError, match=r"s = 1000 and d = 3000 would take \d+ GiB"):
        certify(row, 1000)
    with pytest.raises(ValueError, match=r"s = 1000 and d = 3000"):
        certify(row, 1000, candidates=np.arange(1500))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda row: certify(row, 4, mass_floor=1.5), "mass_floor = 1.5"),
        (lambda row: certify(row, 4, mass_floor=math.nan), "mass_floor = nan"),
        (lambda row: certify(row, 4, time_limit=0.0), "time_limit = 0.0"),
        (lambda row: certify(row, 4, node_limit=1.5), "node_limit = 1.5"),
        (lambda row: certify(row, 2.5), "s = 2.5"),
        (lambda row: certify(row, 4, cascade=(0.1, 0.5)), "expected floors that fall"),
        (lambda row: certify(row, 4, cascade=(0.5, 0.0)), "expected floors that fall"),
        (lambda row: certify(row, 2, mass_floor=0.5, candidates=np.argsort(row.weights)[:5]), "candidates keep 0.5"),
        (lambda row: decide(row, 4, 0.0), "threshold = 0.0"),
        (lambda row: decide(row, 4, math.inf), "threshold = inf"),
        (lambda row: decide(row, 500, 1.0), "s = 500"),
    ],
)
def test_bad_requests_are_refused_by_name(call: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call(peaked(0, 200, 4))  # type: ignore[operator]
