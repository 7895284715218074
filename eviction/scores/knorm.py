"""KNorm: keys of small norm."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score


@dataclass(frozen=True)
class KNorm(Score):
    """-||k_j||_2, in float32 whatever the model's dtype (a bf16 norm ties most entries).

    RoPE leaves the norm as it is (up to its own scaling), so that keys after it serve as well as before. No
    departures. Source: arXiv 2406.11430; NVIDIA/kvpress 0.5.5, KnormPress.
    """

    name: ClassVar[str] = "knorm"
    source: ClassVar[str] = "L2 norm of keys (arXiv 2406.11430); NVIDIA/kvpress 0.5.5"

    def rows_needed(self, budget: int) -> int:
        """None of them."""
        return 0

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32."""
        norms: torch.Tensor = torch.linalg.vector_norm(cells.keys.float(), dim=-1)
        return -norms
