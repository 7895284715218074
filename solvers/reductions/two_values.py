"""Partition -> ZERO-ES with two distinct values, +1 and -1: here the masses carry the numbers (ours).

For numbers u_1..u_n of sum U: value +1 with masses 2 (u_i + 1) and n times 2, value -1 with two masses of U + 2 n;
s = n + 1. Both sides weigh 2 U + 4 n, so mu = 0, and a set of error 0 keeps as much of one side as of the other. With
no key of -1 it has nothing to weigh the +1 side up. With both, its n - 1 keys of +1 weigh at most 2 U + 2 (n - 1),
less than 2 U + 4 n. So it keeps one, and n keys of +1 that weigh 2 u(S) + 2 n = U + 2 n: u(S) = U / 2; any S with
that sum is completed to n keys by keys of mass 2. So neither distinct values nor uniform masses make the problem
hard.
"""

from typing import Final

from solvers.integer import IntegerInstance
from solvers.reductions.interface import Size, Solution
from solvers.reductions.partition import Partition

NAME: Final = "Partition to ZERO-ES with two distinct values"
SOURCE: Final = "ours"


def reduce(source: Partition) -> IntegerInstance:
    """Keys 0..n-1 carry the numbers, n..2n-1 complete the count, the last two stand on the other side."""
    n, total = len(source.numbers), sum(source.numbers)
    masses = [2 * (u + 1) for u in source.numbers] + [2] * n + [total + 2 * n] * 2
    return IntegerInstance(tuple(masses), ((1,),) * (2 * n) + ((-1,),) * 2, n + 1)


def pull_back(source: Partition, solution: Solution) -> Solution:
    """The numbers whose keys are kept."""
    return frozenset(j for j in solution if j < len(source.numbers))


def size(source: Partition) -> Size:
    """2 n + 2 keys; no mass exceeds 2 (U + n)."""
    n, total = len(source.numbers), sum(source.numbers)
    return Size(2 * n + 2, 1, (2 * (total + n)).bit_length())
