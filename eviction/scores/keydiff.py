"""KeyDiff: keys unlike the mean key."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score


@dataclass(frozen=True)
class KeyDiff(Score):
    """-cos(k_j, c), c the mean of the normalised keys (after RoPE) that the KV head holds, in float32.

    A chunked prefill compares with what the cache holds after each chunk, as the paper does block by block.
    Departures: a key of length 0, or a mean of length 0, has cosine 0, and keys are scaled by their largest
    coordinate first, so that no scale of the keys changes a score (published code adds an epsilon to norms).
    Source: arXiv 2504.15364; NVIDIA/kvpress 0.5.5, KeyDiffPress.
    """

    name: ClassVar[str] = "keydiff"
    source: ClassVar[str] = "KeyDiff (arXiv 2504.15364); NVIDIA/kvpress 0.5.5"

    def rows_needed(self, budget: int) -> int:
        """None of them."""
        return 0

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32 in [-1, 1]."""
        keys = _normalised(torch.where(cells.held[..., None], cells.keys.float(), 0.0))
        # The direction of the sum is the direction of the mean, whatever the number of entries.
        return -(keys @ _normalised(keys.sum(-2))[..., None])[..., 0]


def _normalised(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors (..., d) of length 1, or 0 where they are 0."""
    largest = vectors.abs().amax(-1, keepdim=True)
    scaled = vectors / torch.where(largest > 0, largest, 1.0)
    norms: torch.Tensor = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / torch.where(largest > 0, norms, 1.0)
