"""CP-SAT beside brute force: its decisions are right, and its intervals hold the exact optimum and are narrow."""

from collections.abc import Callable
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import Instance, IntegerInstance, candidate_set, cp_sat, exhaustive
from solvers.cp_sat import error_interval, zero_es
from tests import oracle
from tests.strategies import Reals, rows

NARROW = 1e-6  # relative to the error: what two searches that agree to six digits can differ by


def integer_rows(largest: int) -> st.SearchStrategy[IntegerInstance]:
    def build(n: int, d: int) -> st.SearchStrategy[IntegerInstance]:
        point = st.tuples(*[st.integers(-3, 3)] * d)
        return st.builds(
            IntegerInstance,
            st.lists(st.integers(1, largest), min_size=n, max_size=n).map(tuple),
            st.lists(point, min_size=n, max_size=n).map(tuple),
            st.integers(1, n),
        )

    return st.tuples(st.integers(1, 7), st.integers(1, 3)).flatmap(lambda shape: build(*shape))


def zeros(row: IntegerInstance) -> set[tuple[int, ...]]:
    total = sum(row.masses)
    exact = ([Fraction(m, total) for m in row.masses], [[Fraction(x) for x in v] for v in row.points])
    mu = oracle.mean(exact, range(row.n))
    return {A for A in combinations(range(row.n), row.s) if oracle.mean(exact, A) == mu}


def agrees(row: IntegerInstance) -> bool:
    found, wanted = zero_es(row), zeros(row)
    assert found.answer == ("found" if wanted else "none")
    assert (found.subset is None) == (not wanted)
    assert {A for A in combinations(range(row.n), row.s) if row.is_zero(A)} == wanted
    if found.subset is not None:
        assert tuple(found.subset.tolist()) in wanted
    return bool(wanted)


@settings(max_examples=40)
@given(integer_rows(largest=3))
def test_zero_es_on_small_integers(row: IntegerInstance) -> None:
    agrees(row)


@pytest.mark.parametrize("bits", [20, 70, 300])
def test_zero_es_on_numbers_of_any_length(bits: int) -> None:
    # +1 and -1 with masses of many bits: a planted zero, then the same off by one unit
    random = np.random.default_rng(bits)

    def number() -> int:
        return int.from_bytes(random.bytes(bits // 8 + 1), "little") + 1

    plus = [number() for _ in range(5)]
    share = number() % plus[0] + 1
    minus = [share, sum(plus[:3]) - share]  # the first three against these two
    rest = sum(plus[3:])
    for extra, answer in ((0, True), (1, False)):
        masses = [*plus, *minus, rest + extra]
        row = IntegerInstance(tuple(masses), ((1,),) * 5 + ((-1,),) * 3, 5)
        assert agrees(row) == answer


def test_zero_es_says_undecided_when_time_is_up() -> None:
    random = np.random.default_rng(1)
    masses = tuple(int(x) for x in random.integers(2**50, 2**52, 60))
    row = IntegerInstance(masses, tuple((int(x),) for x in random.integers(-(2**40), 2**40, 60)), 30)
    found = zero_es(row, time_limit=0.01)
    assert (found.answer, found.subset) == ("undecided", None)


def holds(row: Instance, s: int, keys: list[int], scale_bits: int = 40) -> cp_sat.Interval:
    found = error_interval(row, s, keys, scale_bits=scale_bits)
    exact = oracle.exact(row.weights.tolist(), row.values.tolist())
    best, _ = oracle.least_squared_error(exact, s, keys)
    assert Fraction(found.lower) ** 2 <= best <= Fraction(found.upper) ** 2
    assert oracle.squared_error(exact, found.subset.tolist()) <= Fraction(found.upper) ** 2
    assert set(found.subset.tolist()) <= set(keys)
    assert found.subset.size == s
    return found


@settings(max_examples=40)
@given(rows(most_keys=7, most_dimensions=3), st.data())
def test_the_interval_holds_the_optimum_of_any_row(made: tuple[Reals, Reals], data: st.DataObject) -> None:
    row = Instance(*made)
    s = data.draw(st.integers(1, row.n_positive))
    found = holds(row, s, list(range(row.n)), data.draw(st.sampled_from((8, 24, 40))))
    assert found.finished


@pytest.mark.parametrize(("n", "d", "s"), [(9, 2, 4), (10, 64, 3), (11, 8, 5), (12, 16, 2)])
def test_the_interval_is_narrow_on_rows_like_captured_ones(n: int, d: int, s: int) -> None:
    random = np.random.default_rng([n, d, s])
    weights = np.exp(2 * random.standard_normal(n + 20))
    row = Instance(weights / weights.sum(), random.standard_normal((n + 20, d)) + 1)
    keys = sorted(int(j) for j in row.order[:n])
    found = holds(row, s, keys)
    assert found.finished
    assert found.upper - found.lower <= NARROW * found.upper
    assert found.lower <= exhaustive(row, s, keys).error * (1 + 1e-12)


@pytest.mark.parametrize(("s", "size"), [(4, 28), (8, 20), (16, 22), (32, 36)])
def test_the_interval_meets_enumeration_on_the_papers_candidate_sets(s: int, size: int) -> None:
    random = np.random.default_rng(s)
    weights = np.exp(2 * random.standard_normal(300))
    row = Instance(weights / weights.sum(), random.standard_normal((300, 32)))
    keys = candidate_set(row, s)
    assert keys.size == size
    found, known = error_interval(row, s, keys), exhaustive(row, s, keys)
    assert found.finished
    assert found.lower <= known.error <= found.upper * (1 + 1e-12)
    assert found.upper - found.lower <= NARROW * found.upper


@pytest.mark.parametrize("time_limit", [0.003, 0.01, 0.03, 0.1])
def test_an_interval_cut_short_holds(time_limit: float) -> None:
    random = np.random.default_rng(9)
    weights = np.exp(random.standard_normal(40))
    row = Instance(weights / weights.sum(), random.standard_normal((40, 8)))
    keys = row.order[:18]
    found, known = error_interval(row, 7, keys, time_limit=time_limit), exhaustive(row, 7, keys)
    assert found.lower <= known.error <= found.upper * (1 + 1e-12)
    assert row.forced_error(found.subset) <= found.upper * (1 + 1e-12)


def test_fewer_bits_and_less_time_only_widen_the_interval() -> None:
    random = np.random.default_rng(6)
    weights = np.exp(random.standard_normal(11))
    row = Instance(weights / weights.sum(), random.standard_normal((11, 3)))
    widths = []
    for bits in (12, 20, 40):
        found = holds(row, 5, list(range(11)), bits)
        widths.append(found.upper - found.lower)
    assert widths[0] > widths[1] > widths[2] > 0
    cut = error_interval(row, 5, np.arange(11), time_limit=1e-6)
    assert not cut.finished
    assert cut.lower <= exhaustive(row, 5, np.arange(11)).error <= cut.upper


def test_a_row_without_error() -> None:
    row = Instance(np.full(6, 1 / 6), np.full((6, 2), 3.0))
    found = error_interval(row, 2, np.arange(6))
    assert (found.lower, found.upper) == (0.0, 0.0)


SMALL = Instance(np.full(80, 1 / 80), np.arange(80.0)[:, None])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: error_interval(SMALL, 2, np.arange(65)), "65 candidates: expected at most 64"),
        (
            lambda: error_interval(SMALL, 2, np.arange(5), scale_bits=60),
            "scale_bits = 60 with 5 candidates: expected 8 to 48",
        ),
        (lambda: error_interval(SMALL, 2, np.arange(64), scale_bits=41), "scale_bits = 41 .* expected 8 to 40"),
        (lambda: error_interval(SMALL, 2, np.arange(5), time_limit=0.0), "time_limit = 0.0"),
        (lambda: zero_es(IntegerInstance((1,), ((1,),), 1), workers=0), "workers = 0"),
        (lambda: error_interval(SMALL, 9, np.arange(5)), "5 candidates of positive weight: expected at least s = 9"),
        (lambda: error_interval(SMALL, 0, np.arange(5)), "s = 0"),
    ],
)
def test_what_it_cannot_do_is_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
