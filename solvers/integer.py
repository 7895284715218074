"""Attention rows in exact integers: the problem ZERO-ES and the instances that hardness is made of (P1, Prop. 2.1).

ZERO-ES asks whether some s keys have forced error 0: whether m_A = mu for the masses m_j and points v_j given. A
yes-instance is told from a no-instance by integers alone, never by a tolerance.
"""

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from solvers.problem import Instance

Vector = tuple[int, ...]


@dataclass(frozen=True)
class IntegerInstance:
    """A row of n keys in exact integers of any size: masses (n,) > 0, points (n, d), and the budget s, 1 <= s <= n.

    The weight of a key is its mass over the sum W of all. Any integers are taken and kept as Python's own. Raises
    ValueError that names what is wrong. Source: the statement of ZERO-ES in P1, Prop. 2.1, with rationals over a
    common denominator.
    """

    masses: Vector
    points: tuple[Vector, ...]
    s: int

    def __post_init__(self) -> None:
        masses = _integers(self.masses, "masses")
        points = tuple(_integers(point, f"point {j}") for j, point in enumerate(self.points))
        (s,) = _integers((self.s,), "s")
        if not masses:
            raise ValueError("masses are empty: expected (n,) with n >= 1")
        if len(points) != len(masses):
            raise ValueError(f"{len(points)} points and {len(masses)} masses: expected as many of each")
        widths = {len(point) for point in points}
        if len(widths) > 1 or 0 in widths:
            raise ValueError(f"points have {sorted(widths)} coordinates: expected one number d >= 1 for all")
        if min(masses) <= 0:
            raise ValueError(f"mass {masses.index(min(masses))} is {min(masses)}: expected every mass above 0")
        if not 1 <= s <= len(masses):
            raise ValueError(f"s = {s}: expected 1 <= s <= {len(masses)}, the number of keys")
        for name, value in (("masses", masses), ("points", points), ("s", s)):
            object.__setattr__(self, name, value)

    @property
    def n(self) -> int:
        """Number of keys."""
        return len(self.masses)

    @property
    def d(self) -> int:
        """Number of coordinates of a point."""
        return len(self.points[0])

    @cached_property
    def total(self) -> int:
        """W, the sum of all masses."""
        return sum(self.masses)

    @cached_property
    def moment(self) -> Vector:
        """W mu = sum_j m_j v_j, (d,)."""
        return self._moment(range(self.n))

    @cached_property
    def steps(self) -> tuple[Vector, ...]:
        """m_j (W v_j - W mu), (n, d): the residuals a_j times W^2, which are integers."""
        return tuple(
            tuple(m * (self.total * x - centre) for x, centre in zip(v, self.moment, strict=True))
            for m, v in zip(self.masses, self.points, strict=True)
        )

    def is_zero(self, subset: Iterable[int]) -> bool:
        """Whether m_A = mu, tested as W sum_A m_j v_j = W_A sum m_j v_j in integers.

        subset: s distinct keys; raises ValueError for anything else.
        """
        keys = self._subset(subset)
        mass = sum(self.masses[j] for j in keys)
        return all(self.total * x == mass * y for x, y in zip(self._moment(keys), self.moment, strict=True))

    def error_squared(self, subset: Iterable[int]) -> Fraction:
        """e_s(A)^2 = |mu - m_A|^2, exactly. subset: s distinct keys; raises ValueError for anything else."""
        keys = self._subset(subset)
        mass = sum(self.masses[j] for j in keys)
        return sum(
            ((Fraction(x, mass) - Fraction(y, self.total)) ** 2
             for x, y in zip(self._moment(keys), self.moment, strict=True)),
            Fraction(0),
        )  # fmt: skip

    def instance(self) -> Instance:
        """The row in float64: weights (n,) nearest to m_j / W, values (n, d) equal to the points.

        What is lost: a weight keeps 53 bits of m_j / W, so the row is a neighbour of this one, and its errors can be
        off by some 1e-16 of the points' size either way. The masses of the two-value reduction carry numbers that no
        float need hold; e = 0 is therefore never decided on this row, but by is_zero(). Masses below 1e-130 W count
        as 0 there. Raises ValueError for a point that is not a float64, or beyond 1e150.
        """
        try:
            values = [[float(x) for x in point] for point in self.points]
        except OverflowError:
            raise ValueError("points are beyond the range of float64: expected them rescaled") from None
        for j, (point, held) in enumerate(zip(self.points, values, strict=True)):
            if any(int(x) != y for x, y in zip(held, point, strict=True)):
                raise ValueError(f"point {j} is not held by float64: expected integers of at most 53 significant bits")
        return Instance([m / self.total for m in self.masses], values)  # type: ignore[arg-type]  # any array-like

    def _moment(self, keys: Collection[int]) -> Vector:
        return tuple(sum(self.masses[j] * self.points[j][i] for j in keys) for i in range(self.d))

    def _subset(self, subset: Iterable[int]) -> list[int]:
        keys = sorted(operator.index(j) for j in subset)
        if len(keys) != self.s or len(set(keys)) != self.s:
            raise ValueError(f"a subset of {len(keys)} keys, {len(set(keys))} distinct: expected s = {self.s}")
        if keys[0] < 0 or keys[-1] >= self.n:
            raise ValueError(f"a subset with keys {keys[0]} to {keys[-1]}: expected them in 0 to {self.n - 1}")
        return keys


def _integers(values: Sequence[int], what: str) -> Vector:
    try:
        return tuple(operator.index(x) for x in values)
    except TypeError:
        raise ValueError(f"{what}: expected integers, found {list(values)!r:.60}") from None
