"""ContourKV: one score and one threshold for all layers and KV heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from data import BadInput
from eviction.method import Allocation, Allocator, Scope
from eviction.options import check_flag, check_one_of, check_whole
from eviction.ranking import counts_above_one_threshold
from eviction.shares import flat, whole_budget

MODES = ("ragged", "uniform")


@dataclass(frozen=True)
class Contour(Allocator):
    """A cell keeps its `floor` latest entries F and every other entry of score r >= tau; tau makes the average s.

    tau is the lowest score for which all layers and KV heads together keep no more than the budget; among entries of
    score tau the first by (layer, head, position) stay, so that the total is exact. No other allocation with this floor
    and this total keeps a larger sum of scores. Protected entries (+inf) are above every threshold; if they do not all
    fit, cells keep equally many of their latest. Any score can be used; P1 borrows KVzip's or SnapKV's.

    floor_counts: P1 does not say whether the average s includes F. True (default, ours): it does, and s < floor is
    refused where it would evict from F. False: F is on top: the caller adds `extra` = floor entries per KV head to the
    budget, as far as the layer can hold them, and the counts sum to that larger budget, sum_l K_l (s + floor).
    mode: "ragged": heads keep what the threshold gives them (P1's retrieval runs, where deletion is per head).
    "uniform": no head keeps more than its layer's budget (P1's enforced benchmark runs, which cap each head at SnapKV's
    count): F and the min(count, s) - floor highest-scored others. The counts then sum to at most the budget and not
    exactly: what is cut from wide heads is given to nobody. P1's third form, nothing enforced and every layer padded
    to its widest cell, is mode "ragged" on a padded storage.

    Departures: none known; where P1 is silent (floor and average, ties, protected entries) the choices above are ours.
    Source: P1, section 5 and appendix C.
    """

    floor: int = 32
    floor_counts: bool = True
    mode: str = "ragged"

    name: ClassVar[str] = "contour"
    source: ClassVar[str] = "ContourKV (P1, arXiv 2608.25230, section 5)"
    scope: ClassVar[Scope] = "model"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_whole("allocator contour", "floor", self.floor, least=0)
        check_flag("allocator contour", "floor_counts", self.floor_counts)
        check_one_of("allocator contour", "mode", self.mode, MODES)

    @property
    def extra(self) -> int:
        """The floor, if it is on top of the budget."""
        return 0 if self.floor_counts else self.floor

    def __call__(
        self,
        scores: Sequence[torch.Tensor],
        lengths: Sequence[torch.Tensor],
        budgets: Sequence[int],
        first_layer: int,
        n_layers: int,
    ) -> Allocation:
        """Counts over all layers together, with the floor as `recent`; budgets include `extra`."""
        total = whole_budget(budgets, lengths)
        if sum(min(length, self.floor) for length in flat(lengths)) > total:
            raise BadInput(
                f"allocator contour: a budget of {max(budgets)} entries per KV head is less than the recency floor of"
                f" {self.floor}: expected a budget of at least {self.floor}, a lower floor=, or floor_counts=false"
            )
        counts = counts_above_one_threshold(scores, lengths, self.floor, total)
        if self.mode == "uniform":
            counts = [count.clamp(max=budget) for count, budget in zip(counts, budgets, strict=True)]
        return Allocation(counts, recent=self.floor)
