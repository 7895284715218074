"""Balanced Partition -> ZERO-ES with uniform masses, integer points on a line and s = n / 2 (P1, Prop. 2.1).

With numbers u_j of sum U, every mass 1 and the numbers as points, mu = U / n, and n / 2 keys of sum S have
m_A = 2 S / n: e_s(A) = |2 S - U| / n, which is 0 exactly where S is half of U.
"""

from dataclasses import dataclass
from typing import Final

from solvers.integer import IntegerInstance
from solvers.reductions.interface import Size, Solution, written_sum

NAME: Final = "Balanced Partition to ZERO-ES"
SOURCE: Final = "P1, Prop. 2.1"


@dataclass(frozen=True)
class BalancedPartition:
    """An even number of integers >= 0; a solution is half of them (by index) that sums to half of all."""

    numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.numbers or len(self.numbers) % 2 or min(self.numbers) < 0:
            raise ValueError(f"numbers {self.numbers}: expected an even number of them, none below 0")

    def __str__(self) -> str:
        half, total = len(self.numbers) // 2, sum(self.numbers)
        return f"numbers {', '.join(map(str, self.numbers))}; {half} of them are to sum to {total / 2:g}"

    def solves(self, solution: Solution) -> bool:
        """Whether these are half of the numbers and sum to half of all."""
        balanced = 2 * len(solution) == len(self.numbers)
        return balanced and 2 * sum(self.numbers[j] for j in solution) == sum(self.numbers)

    def tell(self, solution: Solution) -> str:
        """The sum, written out."""
        return written_sum([self.numbers[j] for j in sorted(solution)])


def reduce(source: BalancedPartition) -> IntegerInstance:
    """A key of mass 1 for each number, at that number; half of them are kept."""
    n = len(source.numbers)
    return IntegerInstance((1,) * n, tuple((u,) for u in source.numbers), n // 2)


def pull_back(source: BalancedPartition, solution: Solution) -> Solution:
    """The kept keys are the chosen numbers."""
    return solution


def size(source: BalancedPartition) -> Size:
    """A key per number, none longer."""
    return Size(len(source.numbers), 1, max(1, *source.numbers).bit_length())


def least_nonzero_error(source: BalancedPartition) -> tuple[int, int]:
    """What e_s of a subset of the reduced row is at least unless it is 0, as (numerator, denominator) (ours).

    e_s(A) = |2 S - U| / n (see above) and 2 S is even: 2 / n where U is even, 1 / n where it is odd. P1 states the
    weaker 2 / n^2. In the unit of the numbers: doubling them doubles it.
    """
    n = len(source.numbers)
    return (2 if sum(source.numbers) % 2 == 0 else 1), n
