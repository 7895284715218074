"""Acts inside a model: scores, allocators and selectors on a KV cache that physically holds what its budget says."""

from eviction.budget import Budget, BudgetExceeded
from eviction.cadence import Decode
from eviction.ledger import Ledger
from eviction.method import Allocation, Allocator, Anchors, Cells, Rows, Schedule, Score, Selector, State
from eviction.run import Run, evict

__all__ = [
    "Allocation",
    "Allocator",
    "Anchors",
    "Budget",
    "BudgetExceeded",
    "Cells",
    "Decode",
    "Ledger",
    "Rows",
    "Run",
    "Schedule",
    "Score",
    "Selector",
    "State",
    "evict",
]
