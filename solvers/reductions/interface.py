"""What a reduction is: a map of instances, a map of solutions back, and a claim of size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Solution = frozenset[int]  # every problem here asks for a subset of numbered things: items, triples, keys
Source = TypeVar("Source", contravariant=True)
Target = TypeVar("Target", covariant=True)


@dataclass(frozen=True)
class Size:
    """What a target may measure at most: its number of things, coordinates of each, bits of its largest integer."""

    items: int
    dimensions: int
    bits: int


def written_sum(terms: Sequence[int]) -> str:
    """The terms and their sum, as "-7 + 2 + 8 = 3"."""
    return f"{' + '.join(map(str, terms)).replace('+ -', '- ')} = {sum(terms)}"


class Reduction(Protocol[Source, Target]):
    """A polynomial map of instances under which the pulled-back solutions of the target are those of the source.

    The law: {pull_back(x, A) : A solves reduce(x)} = {S : S solves x}. So x has a solution if and only if reduce(x)
    has one, and nothing that pull_back returns is wrong. Every module of this package that names a reduction is one.
    """

    @property
    def NAME(self) -> str:
        """The two problems and what is special, for a person."""
        ...

    @property
    def SOURCE(self) -> str:
        """Where the reduction is from: a paper's proposition, or "ours"."""
        ...

    def reduce(self, source: Source) -> Target:
        """The instance of the target problem."""
        ...

    def pull_back(self, source: Source, solution: Solution) -> Solution:
        """The solution of the source that a solution of reduce(source) stands for."""
        ...

    def size(self, source: Source) -> Size:
        """What reduce(source) measures at most, a polynomial in the bits of the source."""
        ...


@dataclass(frozen=True)
class Chain:
    """Two reductions, one after the other."""

    first: Reduction[Any, Any]
    second: Reduction[Any, Any]

    @property
    def NAME(self) -> str:
        """Both names."""
        return f"{self.first.NAME}, then {self.second.NAME}"

    @property
    def SOURCE(self) -> str:
        """Both sources."""
        return " and ".join(dict.fromkeys((self.first.SOURCE, self.second.SOURCE)))

    def reduce(self, source: Any) -> Any:
        """The second reduction of the first one's target."""
        return self.second.reduce(self.first.reduce(source))

    def pull_back(self, source: Any, solution: Solution) -> Solution:
        """Back through the second, then through the first."""
        return self.first.pull_back(source, self.second.pull_back(self.first.reduce(source), solution))

    def size(self, source: Any) -> Size:
        """The size of the second's target."""
        return self.second.size(self.first.reduce(source))
