"""Acts inside a model: scores, allocators and selectors on a KV cache that physically holds what its budget says."""

from eviction.budget import Budget, BudgetExceeded
from eviction.cadence import Decode
from eviction.ledger import Ledger
from eviction.method import Allocator, Anchors, Schedule, Score, Selector, State
from eviction.run import Run, evict

__all__ = [
    "Allocator",
    "Anchors",
    "Budget",
    "BudgetExceeded",
    "Decode",
    "Ledger",
    "Run",
    "Schedule",
    "Score",
    "Selector",
    "State",
    "evict",
]
