"""Entries spread evenly over the text, whatever they say: the control of every score that reads something."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score

BITS = 24  # of a position: what float32 holds exactly


@dataclass(frozen=True)
class Even(Score):
    """Minus the van der Corput number of the position: its binary digits in reverse, after the point.

    The smallest numbers are those of the multiples of 2^m, then the odd multiples of 2^(m-1), these, too, spread
    evenly. So of a text that is held whole, any number of entries kept is evenly spread: the distances between
    neighbours are two neighbouring powers of 2 at most. The number depends on the position alone. Hence what a smaller
    budget keeps is part of what a larger one keeps, evicting twice keeps what evicting once would have kept, and as
    text is added the same grid goes on and grows wider. Position 0 always stays. Every KV head keeps the same entries.

    Positions count modulo 2^24. Source: ours, the uniform control of a static route (P2, arXiv 2605.14292, which does
    not say how its uniform scoring spreads); J. G. van der Corput 1935 for the sequence.
    """

    name: ClassVar[str] = "even"
    source: ClassVar[str] = "ours; the uniform scoring of P2 (arXiv 2605.14292), static_route"

    def rows_needed(self, budget: int) -> int:
        """None of them."""
        return 0

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32 in (-1, 0]."""
        reversed_digits = torch.zeros_like(cells.positions)
        for bit in range(BITS):
            reversed_digits = reversed_digits * 2 + (cells.positions >> bit & 1)
        numbers: torch.Tensor = reversed_digits.float() / 2**BITS
        return -numbers
