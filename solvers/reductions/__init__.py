"""Hardness, running: reductions of NP-complete problems to ZERO-ES, and the solutions back.

Each reduction is a module with NAME, SOURCE, reduce, pull_back and size (see interface.Reduction); a new one is a
file and a line in REDUCTIONS.
"""

from typing import Any

from solvers.reductions import balanced_partition, exact_cover, partition, subset_sum, two_values
from solvers.reductions.balanced_partition import BalancedPartition
from solvers.reductions.exact_cover import ExactCover
from solvers.reductions.interface import Chain, Reduction, Size, Solution
from solvers.reductions.partition import Partition
from solvers.reductions.subset_sum import KSubsetSum

PAPER = Chain(partition, balanced_partition)  # Partition to ZERO-ES, as P1 proves Prop. 2.1
REDUCTIONS: tuple[Reduction[Any, Any], ...] = (
    partition,
    balanced_partition,
    PAPER,
    two_values,
    subset_sum,
    exact_cover,
)

__all__ = [
    "PAPER",
    "REDUCTIONS",
    "BalancedPartition",
    "Chain",
    "ExactCover",
    "KSubsetSum",
    "Partition",
    "Reduction",
    "Size",
    "Solution",
]
