"""TOVA: what the latest row attends to."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score
from eviction.options import check_one_of


@dataclass(frozen=True)
class TOVA(Score):
    """Attention weight of the latest row, averaged over query heads; the latest token is protected.

    heads "all": the mean over all query heads of the layer, so that its KV heads agree (the paper; kvpress); "group":
    over the query heads of each KV head. The weights are the model's own, over what each KV head holds, with its
    scale, soft-cap and sliding window.

    Departures. From the paper: the latest token is protected, as in kvpress (its weight is rarely the least). From
    both, which keep the same entries in every KV head: where KV heads hold different entries, "all" matches them by
    position, and a head that no longer holds one counts as a weight of 0 for it. kvpress departs from the model's
    weights as its SnapKV does. Source: arXiv 2401.06104; NVIDIA/kvpress 0.5.5, TOVAPress.
    """

    heads: str = "all"

    name: ClassVar[str] = "tova"
    source: ClassVar[str] = "TOVA (arXiv 2401.06104); NVIDIA/kvpress 0.5.5"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_one_of(f"score {self.name}", "heads", self.heads, ("all", "group"))

    def rows_needed(self, budget: int) -> int:
        """The latest."""
        return 1

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32; +inf for the latest token."""
        weights = rows.last(1).weights(cells).sum(-2).mean(2)
        if self.heads == "all":
            weights = _mean_by_position(weights, cells)
        return torch.where(cells.held & (cells.ages == 0), torch.inf, weights)


def _mean_by_position(weights: torch.Tensor, cells: Cells) -> torch.Tensor:
    """(B, K, L): mean over KV heads of the weights (B, K, L) at equal positions."""
    batch, kv_heads, _ = weights.shape
    slots = torch.where(cells.held, cells.positions, max(cells.seen))  # one slot more, for what is not held
    spread = weights.new_zeros(batch, kv_heads, max(cells.seen) + 1).scatter_(-1, slots, weights)
    return spread.mean(1, keepdim=True).expand_as(spread).gather(-1, slots)
