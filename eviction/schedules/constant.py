"""Constant: every round cuts to the nominal budget."""

from dataclasses import dataclass
from typing import ClassVar

from eviction.method import Schedule


@dataclass(frozen=True)
class Constant(Schedule):
    """The nominal budget in every round. Source: every method of both papers that is not of P2's family cadence."""

    name: ClassVar[str] = "constant"
    source: ClassVar[str] = "most published methods"

    def level(self, budget: int, number: int) -> int:
        """The budget."""
        return budget

    def lowest(self, budget: int) -> int:
        """The budget."""
        return budget
