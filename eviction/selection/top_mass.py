"""Top mass: the highest-scored entries stay."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from eviction.method import Cells, Scope, Selector
from eviction.ranking import keep_best


@dataclass(frozen=True)
class TopMass(Selector):
    """The highest-scored entries of each cell; among equal scores the earliest, among protected ones the latest.

    With attention weights as scores this is A*_s of P1, whose tie rule is not stated (the earliest: ours).
    Source: P1, section 2.
    """

    name: ClassVar[str] = "top_mass"
    source: ClassVar[str] = "P1 (arXiv 2608.25230), section 2; the selection of most published methods"

    @property
    def scope(self) -> Scope:
        """Each layer by itself."""
        return "layer"

    def __call__(
        self, cells: Sequence[Cells], scores: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Per layer (B, K, L) bool."""
        return [keep_best(score, count) for score, count in zip(scores, counts, strict=True)]
