"""Exact Cover by 3-Sets -> ZERO-ES with all masses equal and small integers: hard in the strong sense (ours).

For m triples of 3 q elements: a point q 1_T for each triple T, with one coordinate more, 0; q compensators
(0, ..., 0, -1) and one compensator (N 1 - q sum of 1_T, q); N = m + q + 1 keys, s = q. The mean is (1, ..., 1, 0). In
the last coordinate a set of q keys is 0 only without compensators, since all q + 1 of them, which cancel, do not fit.
So it is q triples T with q sum 1_T = q 1: an exact cover. No integer exceeds N q, which is polynomial in m and q, so
the problem stays NP-complete with numbers written in unary; the dimension must then be part of the input, for in one
dimension a dynamic programme is polynomial in the numbers.
"""

from dataclasses import dataclass
from typing import Final

from solvers.integer import IntegerInstance
from solvers.reductions.interface import Size, Solution

NAME: Final = "Exact Cover by 3-Sets to ZERO-ES"
SOURCE: Final = "ours"


@dataclass(frozen=True)
class ExactCover:
    """q >= 1 and triples of the elements 0..3q-1; a solution is a set of q triples (by index) that meets each once."""

    q: int
    triples: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        if self.q < 1:
            raise ValueError(f"q = {self.q}: expected at least 1")
        for j, triple in enumerate(self.triples):
            if len(set(triple)) != 3 or min(triple) < 0 or max(triple) >= 3 * self.q:
                raise ValueError(f"triple {j} is {triple}: expected three distinct elements in 0 to {3 * self.q - 1}")

    def __str__(self) -> str:
        return f"elements 0 to {3 * self.q - 1}; triples " + ", ".join("-".join(map(str, t)) for t in self.triples)

    def solves(self, solution: Solution) -> bool:
        """Whether these triples meet each element once."""
        return sorted(x for j in solution for x in self.triples[j]) == list(range(3 * self.q))

    def tell(self, solution: Solution) -> str:
        """The triples, written out."""
        return " and ".join("-".join(map(str, self.triples[j])) for j in sorted(solution))


def reduce(source: ExactCover) -> IntegerInstance:
    """Keys 0..m-1 are the triples, the q + 1 behind them the compensators."""
    q, elements = source.q, range(3 * source.q)
    n = len(source.triples) + q + 1
    points = [(*(q if x in triple else 0 for x in elements), 0) for triple in source.triples]
    covered = [sum(point[x] for point in points) for x in elements]
    points += [(0,) * len(elements) + (-1,)] * q
    points.append((*(n - times for times in covered), q))
    return IntegerInstance((1,) * n, tuple(points), q)


def pull_back(source: ExactCover, solution: Solution) -> Solution:
    """The kept keys are the chosen triples: no compensator is among them."""
    return solution


def size(source: ExactCover) -> Size:
    """N = m + q + 1 keys in 3 q + 1 coordinates, no integer above N q."""
    n = len(source.triples) + source.q + 1
    return Size(n, 3 * source.q + 1, (n * source.q).bit_length())
