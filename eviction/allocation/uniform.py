"""Uniform: every KV head of a layer keeps the same number of entries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from eviction.method import Allocation, Allocator, Scope
from eviction.shares import apportion, by_layer, flat, whole_budget


@dataclass(frozen=True)
class Uniform(Allocator):
    """Each KV head keeps its layer's budget.

    A cell that holds less leaves the rest to the other heads of its layer, in equal shares, the first heads one more
    where it does not divide. Source: the default of SnapKV and of most others; the sharing of rests is ours.
    """

    name: ClassVar[str] = "uniform"
    source: ClassVar[str] = "SnapKV (arXiv 2404.14469) and most others"
    scope: ClassVar[Scope] = "layer"

    def __call__(
        self,
        scores: Sequence[torch.Tensor],
        lengths: Sequence[torch.Tensor],
        budgets: Sequence[int],
        first_layer: int,
        n_layers: int,
    ) -> Allocation:
        """Counts that sum to the budget in each layer by itself."""
        counts: list[torch.Tensor] = []
        for length, budget in zip(lengths, budgets, strict=True):
            most = flat([length])
            counts += by_layer(apportion([1] * len(most), most, whole_budget([budget], [length])), [length])
        return Allocation(counts)
