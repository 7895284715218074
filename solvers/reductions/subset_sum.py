"""k-Subset-Sum -> ZERO-ES: k keys with a prescribed mean, all masses equal, s = k (ours).

For numbers a_1..a_n and a target t: points k a_i, k compensators at -B, one at k B + R, N = n + k + 1 keys in all,
R = N t - k sum a and B = k |t| + k^2 max |a| + |R| + 1. The compensators only move the mean: it is t. k keys without
compensators are right if k sum a_i = k t. With j >= 1 of those at -B they fall short by more than j B - k |t| -
k^2 max |a| > 0; with the large one and at most k - 1 others they are beyond it for the same reason; all k + 1, which
cancel, do not fit. s = k and a target of size n + k + 1 carry the hardness of k-Subset-Sum in the parameter k over:
W[1]-hardness in s, and no n^o(s) time under the exponential-time hypothesis.
"""

from dataclasses import dataclass
from typing import Final

from solvers.integer import IntegerInstance
from solvers.reductions.interface import Size, Solution, written_sum

NAME: Final = "k-Subset-Sum to ZERO-ES with compensators"
SOURCE: Final = "ours"


@dataclass(frozen=True)
class KSubsetSum:
    """Integers of any sign, a count k and a target; a solution is a set of k of them (by index) of that sum."""

    numbers: tuple[int, ...]
    k: int
    target: int

    def __post_init__(self) -> None:
        if not 1 <= self.k <= len(self.numbers):
            raise ValueError(f"k = {self.k}: expected 1 <= k <= {len(self.numbers)}, the count of numbers")

    def __str__(self) -> str:
        return f"{self.k} of {', '.join(map(str, self.numbers))} are to sum to {self.target}"

    def solves(self, solution: Solution) -> bool:
        """Whether these are k numbers of the wanted sum."""
        return len(solution) == self.k and sum(self.numbers[j] for j in solution) == self.target

    def tell(self, solution: Solution) -> str:
        """The sum, written out."""
        return written_sum([self.numbers[j] for j in sorted(solution)])


def reduce(source: KSubsetSum) -> IntegerInstance:
    """Keys 0..n-1 are the numbers, the k + 1 behind them the compensators."""
    k, t = source.k, source.target
    n = len(source.numbers) + k + 1
    rest = n * t - k * sum(source.numbers)
    far = k * abs(t) + k * k * max(map(abs, source.numbers)) + abs(rest) + 1
    points = [k * a for a in source.numbers] + [-far] * k + [k * far + rest]
    return IntegerInstance((1,) * n, tuple((x,) for x in points), k)


def pull_back(source: KSubsetSum, solution: Solution) -> Solution:
    """The kept keys are the chosen numbers: no compensator is among them."""
    return solution


def size(source: KSubsetSum) -> Size:
    """N = n + k + 1 keys; no point exceeds (k + 1) B, and B is at most 3 N^2 (max |a| + |t| + 1)."""
    n = len(source.numbers) + source.k + 1
    largest = max(map(abs, source.numbers)) + abs(source.target) + 1
    return Size(n, 1, (3 * n**3 * largest).bit_length())
