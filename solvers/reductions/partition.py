"""Partition -> Balanced Partition: as many zeros as numbers supply whatever cardinality is missing (P1, Prop. 2.1)."""

from dataclasses import dataclass
from typing import Final

from solvers.reductions.balanced_partition import BalancedPartition
from solvers.reductions.interface import Size, Solution, written_sum

NAME: Final = "Partition to Balanced Partition"
SOURCE: Final = "P1, Prop. 2.1"


@dataclass(frozen=True)
class Partition:
    """Positive integers; a solution is a set of them (by index) that sums to half of all."""

    numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.numbers or min(self.numbers) <= 0:
            raise ValueError(f"numbers {self.numbers}: expected at least one, each above 0")

    def __str__(self) -> str:
        return f"numbers {', '.join(map(str, self.numbers))}; half of their sum is {sum(self.numbers) / 2:g}"

    def solves(self, solution: Solution) -> bool:
        """Whether these numbers sum to half of all."""
        return 2 * sum(self.numbers[j] for j in solution) == sum(self.numbers)

    def tell(self, solution: Solution) -> str:
        """The sum, written out."""
        return written_sum([self.numbers[j] for j in sorted(solution)])


def reduce(source: Partition) -> BalancedPartition:
    """The numbers and as many zeros behind them."""
    return BalancedPartition(source.numbers + (0,) * len(source.numbers))


def pull_back(source: Partition, solution: Solution) -> Solution:
    """The numbers of the balanced solution, without the zeros."""
    return frozenset(j for j in solution if j < len(source.numbers))


def size(source: Partition) -> Size:
    """Twice as many numbers, none longer."""
    return Size(2 * len(source.numbers), 1, max(source.numbers).bit_length())
