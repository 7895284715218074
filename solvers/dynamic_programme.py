"""The exact optimum in one dimension with equal masses, by dynamic programming over (count, sum)."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from solvers.integer import IntegerInstance
from solvers.problem import Indices

MOST_BITS = 2**31  # of all tables together, so that they take at most a quarter of a GiB


@dataclass(frozen=True, eq=False)
class Optimum:
    """subset: sorted int64 indices (s,) of least forced error. error: that error, exactly."""

    subset: Indices
    error: Fraction


def least_error(row: IntegerInstance) -> Optimum:
    """The least forced error of a row with d = 1 and equal masses, exactly, in O(n s R) bit operations (ours).

    With n keys of sum V, a subset of sum S has e_s = |n S - s V| / (n s): the sum nearest to s V / n is wanted. For
    every prefix of the keys and every count c, one big integer holds as its bits the sums that c of those keys can
    have; R is the range of the sums. The complement of a subset of the least |n S - s V| has the same one, so the
    smaller of s and n - s keys are chosen. Polynomial in the numbers and not in their bits: in one dimension with
    equal masses the problem is hard in the weak sense only.
    Raises ValueError for d > 1, masses that differ, or tables of more than MOST_BITS bits.
    """
    if row.d != 1:
        raise ValueError(f"points have {row.d} coordinates: expected 1")
    if len(set(row.masses)) > 1:
        raise ValueError(f"masses from {min(row.masses)} to {max(row.masses)}: expected equal ones")
    points = [point[0] for point in row.points]
    chosen = _nearest(points, row.s) if 2 * row.s <= row.n else _complement(_nearest(points, row.n - row.s), row.n)
    difference = row.n * sum(points[j] for j in chosen) - row.s * sum(points)
    return Optimum(np.array(chosen, dtype=np.int64), Fraction(abs(difference), row.n * row.s))


def _complement(chosen: list[int], n: int) -> list[int]:
    return sorted(set(range(n)) - set(chosen))


def _nearest(points: list[int], s: int) -> list[int]:
    """The s places whose points have the mean nearest to that of all, ascending."""
    n = len(points)
    lowest = min(points)
    values = [x - lowest for x in points]  # >= 0, so that a sum is the place of a bit
    width = sum(sorted(values)[n - s :]) + 1
    bits = sum((_most(j, s) - _least(j, n, s) + 1) * width for j in range(n + 1))
    if bits > MOST_BITS:
        raise ValueError(f"{n} points of range {max(values)} need {bits:,} bits: expected at most {MOST_BITS:,}")
    tables = [{0: 1}]  # tables[j][c]: sums that c of the first j values can have; only counts that can still reach s
    for j, value in enumerate(values):
        before = tables[j]
        tables.append(
            {
                c: before.get(c, 0) | (before.get(c - 1, 0) << value)
                for c in range(_least(j + 1, n, s), _most(j + 1, s) + 1)
            }
        )
    total = _nearest_bit(tables[n][s], s * sum(values), n)
    chosen: list[int] = []
    left = s
    for j in range(n - 1, -1, -1):
        if not tables[j].get(left, 0) >> total & 1:  # not reached without value j
            chosen.append(j)
            left, total = left - 1, total - values[j]
    return chosen[::-1]


def _least(j: int, n: int, s: int) -> int:
    """The fewest of the first j values that a choice of s of n takes."""
    return max(0, s - (n - j))


def _most(j: int, s: int) -> int:
    """The most of the first j values that a choice of s takes."""
    return min(j, s)


def _nearest_bit(table: int, numerator: int, denominator: int) -> int:
    """The place of the bit nearest to numerator / denominator; the lower of two."""
    middle = numerator // denominator
    below = (table & ((1 << (middle + 1)) - 1)).bit_length() - 1
    above = table >> (middle + 1)
    places = [below] if below >= 0 else []
    if above:
        places.append(middle + 1 + (above & -above).bit_length() - 1)
    return min(places, key=lambda place: abs(denominator * place - numerator))
