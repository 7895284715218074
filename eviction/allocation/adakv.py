"""Ada-KV: within a layer, heads whose entries score higher keep more."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch

from eviction.method import Allocation, Allocator, Scope
from eviction.options import check_number
from eviction.ranking import counts_above_one_threshold, held
from eviction.shares import apportion, by_layer, flat, whole_budget


@dataclass(frozen=True)
class AdaKV(Allocator):
    """KV head h of a layer of H heads with budget b keeps p_h + (1 - alpha) n_h + alpha r / H entries.

    p_h: its protected entries (+inf, such as a window); r = H b - sum_h p_h: what is left of the layer's budget; n_h:
    how many of the r highest-scored other entries of the layer, all heads pooled, are in head h; alpha: the share that
    is dealt evenly, a safeguard. With as many protected entries in every head this is the reference, whose window is
    on top of its base r / H. Equal scores are taken by (head, position).

    Departures: the paper's budget and the reference's leave the window aside, here it is inside. The reference rounds
    each head by itself; here the total is exact, by largest remainder, among equal remainders the first head. A cell
    that holds less leaves the rest to the others, in proportion. If the protected entries do not all fit, heads keep
    equally many of them. The reference's optional factor (share of a head's score in its top entries) is not offered.
    alpha is taken at its decimal value. Source: arXiv 2407.11550, algorithms 1 and 2; FFY0/AdaKV.
    """

    alpha: float = 0.2

    name: ClassVar[str] = "adakv"
    source: ClassVar[str] = "Ada-KV (arXiv 2407.11550); FFY0/AdaKV"
    scope: ClassVar[Scope] = "layer"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_number("allocator adakv", "alpha", self.alpha, least=0, most=1)

    def __call__(
        self,
        scores: Sequence[torch.Tensor],
        lengths: Sequence[torch.Tensor],
        budgets: Sequence[int],
        first_layer: int,
        n_layers: int,
    ) -> Allocation:
        """Counts that sum to the budget in each layer by itself."""
        return Allocation([self._layer(*layer) for layer in zip(scores, lengths, budgets, strict=True)])

    def _layer(self, scores: torch.Tensor, lengths: torch.Tensor, budget: int) -> torch.Tensor:
        total = whole_budget([budget], [lengths])
        pooled = counts_above_one_threshold([scores], [lengths], floor=0, total=total)
        protected = flat([(held(scores, lengths) & (scores == torch.inf)).sum(-1)])
        rest = total - sum(protected)
        if rest <= 0:
            return pooled[0]
        alpha = Fraction(str(self.alpha))
        heads, even = len(protected), alpha.numerator
        n = [count - p for count, p in zip(flat(pooled), protected, strict=True)]
        weights = [(alpha.denominator - even) * heads * count + even * rest for count in n]
        most = [length - p for length, p in zip(flat([lengths]), protected, strict=True)]
        shares = apportion(weights, most, rest)
        return by_layer([p + share for p, share in zip(protected, shares, strict=True)], [lengths])[0]
