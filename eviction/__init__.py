"""Acts inside a model: scores, allocators and selectors on a KV cache that physically holds what its budget says."""

from eviction.budget import Budget, BudgetExceeded
from eviction.cadence import Decode
from eviction.ledger import Ledger
from eviction.method import Allocator, Score, Selector
from eviction.run import Run, evict

__all__ = ["Allocator", "Budget", "BudgetExceeded", "Decode", "Ledger", "Run", "Score", "Selector", "evict"]
