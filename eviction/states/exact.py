"""Exact: every entry as the model made it."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from eviction.method import State


@dataclass(frozen=True)
class Exact(State):
    """Keys and values as the model made them, one entry a token, bit for bit.

    Source: what every method of both papers does that is not of P2's family state.
    """

    name: ClassVar[str] = "exact"
    source: ClassVar[str] = "most published methods"

    def value_rank(self, width: int) -> None:
        """Values stay as they are."""
        return None

    def pooled(self, counts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Every entry is one token."""
        return None
