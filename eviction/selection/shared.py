"""Shared: several cells keep the same positions, chosen by their scores together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from data import BadInput
from eviction.method import Cells, Scope, Selector
from eviction.options import check_one_of
from eviction.ranking import keep_best
from eviction.selection.alpha import Alpha, slots_of_positions

ACROSS = ("all", "layers")


@dataclass(frozen=True)
class Shared(Selector):
    """Cells that share have one order of positions: each keeps the first that it holds, as many as it was given.

    across "all": all layers and KV heads share; a position's score is its highest in any of them. "layers": the KV
    heads of one number in all layers share; a position's score is its mean over the layers. Among equal scores the
    earliest first; a position protected in one cell comes before all others in those that share with it, the latest
    first. With equal counts and equal positions, as under the uniform allocator without windows, the cells that share
    keep the same set; otherwise (ours) the maximum or mean is over the cells that hold the position.

    Source: WeianMao/triattention, whose global mode is "all" and whose mode per head is "layers", on z-scores.
    """

    across: str = "all"

    name: ClassVar[str] = "shared"
    source: ClassVar[str] = "TriAttention's global and per-head modes (WeianMao/triattention)"

    def __post_init__(self) -> None:
        """Raises BadInput for an option that means nothing."""
        check_one_of(f"selector {self.name}", "across", self.across, ACROSS)

    @property
    def scope(self) -> Scope:
        """All layers must be known."""
        return "model"

    def __call__(
        self, cells: Sequence[Cells], scores: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Per layer (B, K, L) bool. Raises BadInput for "layers" where layers have different numbers of KV heads."""
        if self.across == "all":
            return Alpha(lambda_=0.0, score_scale="raw")(cells, scores, counts)
        shapes = {score.shape[:2] for score in scores}
        if len(shapes) > 1:
            raise BadInput(f"selector {self.name}: across=layers: layers have different numbers of KV heads")
        slots, n = slots_of_positions([layer.positions for layer in cells])
        total = torch.zeros(*shapes.pop(), n + 1, dtype=torch.float64, device=scores[0].device)
        layers = torch.zeros_like(total)
        for score, slot in zip(scores, slots, strict=True):  # slot n: where nothing is held
            total.scatter_add_(2, slot, score.double().masked_fill(slot == n, 0.0))
            layers.scatter_add_(2, slot, torch.ones_like(score, dtype=torch.float64))
        mean = total / layers.clamp(min=1)
        return [
            keep_best(mean.gather(2, slot).masked_fill(slot == n, -torch.inf), count)
            for slot, count in zip(slots, counts, strict=True)
        ]
