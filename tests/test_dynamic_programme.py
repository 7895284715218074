"""The dynamic programme equals brute force, whatever the signs, ties and budget, and reaches hundreds of keys."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import IntegerInstance, dynamic_programme, least_error
from tests import oracle


def on_a_line(points: list[int], s: int, mass: int = 1) -> IntegerInstance:
    return IntegerInstance((mass,) * len(points), tuple((x,) for x in points), s)


@given(st.lists(st.integers(-30, 30), min_size=1, max_size=9), st.integers(1, 5), st.data())
def test_equals_brute_force(points: list[int], mass: int, data: st.DataObject) -> None:
    s = data.draw(st.integers(1, len(points)))
    found = least_error(on_a_line(points, s, mass))
    n = len(points)
    row = ([Fraction(1, n)] * n, [[Fraction(x)] for x in points])
    best, subsets = oracle.least_squared_error(row, s)
    assert found.error**2 == best
    assert tuple(found.subset.tolist()) in subsets
    assert found.subset.dtype == np.int64


def test_long_numbers_and_a_planted_zero_among_hundreds_of_keys() -> None:
    random = np.random.default_rng(0)
    points = [int(x) for x in random.integers(-500, 501, 200)]
    for s in (7, 180):
        row = on_a_line(points, s)
        found = least_error(row)
        assert found.error == Fraction(abs(200 * sum(points[j] for j in found.subset) - s * sum(points)), 200 * s)
        assert found.error <= Fraction(1, s)  # so many sums that one is next to the wanted one
        assert found.error**2 == row.error_squared(found.subset.tolist())


def test_a_gap_that_only_counting_explains() -> None:
    # points are multiples of 10 but one: without it the mean is off, with it too
    points = [10] * 6 + [-10] * 5 + [1]
    n, s = len(points), 4
    least = min(
        abs(Fraction(sum(points[j] for j in A), s) - Fraction(sum(points), n)) for A in combinations(range(n), s)
    )
    assert least_error(on_a_line(points, s)).error == least > 0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (IntegerInstance((1, 1), ((1, 2), (3, 4)), 1), "points have 2 coordinates"),
        (IntegerInstance((1, 2), ((1,), (3,)), 1), "masses from 1 to 2"),
        (on_a_line([0, 2**40, 5, 6], 2), "bits: expected at most"),
    ],
)
def test_what_it_cannot_do_is_refused(row: IntegerInstance, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        least_error(row)
    assert dynamic_programme.MOST_BITS < 2**40
