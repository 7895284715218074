"""PyramidKV: lower layers keep more than upper ones, in equal steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch

from eviction.method import Allocation, Allocator, Scope
from eviction.options import check_one_of, check_whole
from eviction.shares import apportion, by_layer, flat, whole_budget

VARIANTS = ("reference", "kvpress")


@dataclass(frozen=True)
class Pyramid(Allocator):
    """Layer l of n keeps w + high - l (high - low) / (n - 1) entries a KV head: on average the budget s.

    "reference" (KVCache-Factory), with w = min(window, s) and b = s - w: low = b / beta, high = 2 b - low. If high >=
    N - w, N being the longest cell, high = N - w and low = 2 b - high. If N < 2 b, or b = 0, or there is one layer,
    every layer keeps s. The window is inside the count, so that a budget up to the window is shared evenly.
    "kvpress": w = 0 and b = s, so that upper layers can get fewer entries than a window; low, high and the case of a
    short cell as above but with N - window; every layer keeps s unless N >= high >= low >= window (its own default
    window is 64, so budgets below 64 beta = 1,280 are even).

    Departures of both: exact fractions instead of integer division (reference) or rounding (kvpress) of beta's share
    and of the step, whose totals miss n s; the total is made exact by largest remainder, among equal remainders the
    first (layer, head). Where layers have different budgets (a sliding window holds less), a layer's share is in
    proportion to its budget times the shape above for s = the largest budget. What a cell cannot hold is shared again
    in the same proportions among those that can, so all layers must be known.
    Source: arXiv 2406.02069, section 3; Zefan-Cai/KVCache-Factory; NVIDIA/kvpress.
    """

    beta: int = 20
    window: int = 32
    variant: str = "reference"

    name: ClassVar[str] = "pyramid"
    source: ClassVar[str] = "PyramidKV (arXiv 2406.02069); Zefan-Cai/KVCache-Factory; NVIDIA/kvpress"
    scope: ClassVar[Scope] = "model"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_whole("allocator pyramid", "beta", self.beta, least=1)
        check_whole("allocator pyramid", "window", self.window, least=0)
        check_one_of("allocator pyramid", "variant", self.variant, VARIANTS)

    def __call__(
        self,
        scores: Sequence[torch.Tensor],
        lengths: Sequence[torch.Tensor],
        budgets: Sequence[int],
        first_layer: int,
        n_layers: int,
    ) -> Allocation:
        """Counts that sum to the budget over all layers together; scores are not looked at."""
        most = flat(lengths)
        shape = self._shape(max(budgets, default=0), max(most, default=0), n_layers)
        here = shape[first_layer : first_layer + len(lengths)]
        unit = math.lcm(*(share.denominator for share in here))
        weights: list[int] = []
        for share, budget, length in zip(here, budgets, lengths, strict=True):
            weights += [int(share * unit) * budget] * length.numel()
        return Allocation(by_layer(apportion(weights, most, whole_budget(budgets, lengths)), lengths))

    def _shape(self, s: int, longest: int, n_layers: int) -> list[Fraction]:
        """Entries of a KV head of each layer, before windows and short cells are looked at."""
        window = min(self.window, s) if self.variant == "reference" else 0
        b = Fraction(s - window)
        low = b / self.beta
        high = 2 * b - low
        outside = longest - self.window
        if high >= outside:
            high, low = Fraction(outside), 2 * b - outside
        if self.variant == "reference":
            even = longest < 2 * b or b == 0
        else:
            even = not longest >= high >= low >= self.window
        if even or n_layers == 1:
            return [Fraction(s)] * n_layers
        step = (high - low) / (n_layers - 1)
        return [window + high - layer * step for layer in range(n_layers)]
