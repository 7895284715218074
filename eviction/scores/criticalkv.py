"""CriticalKV: another score, times what the output projection makes of the values."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from data import BadInput
from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score, named
from eviction.ranking import keep_best

BLOCK = 2**24  # numbers of projected values computed at a time: 64 MiB


@dataclass(frozen=True)
class CriticalKV(Score):
    """(r_j + epsilon) ||W_O v_j||_1 for a base score r; the best of r are protected, half a budget of them.

    W_O is the part of the layer's output projection that a query head's output is multiplied with; the norm is the
    mean over the query heads of the group. first: the share of the budget that the base score fills by itself,
    int(first * budget) entries of each KV head but at least 1 (0: none). Entries that the base score protects are
    filled in first, and those that find no room there stay protected.

    base: a name, with one option as "criticalkv:base=snapkv:variant=kvpress", or a Score. Its scores must not be
    negative (attention-like): times a norm they would be turned round, and BadInput says so.

    Departures. kvpress takes its base's protected entries as ordinary large numbers and multiplies them, too. Its
    variant with Ada-KV gives the first stage half of each head's own budget: a score does not know what an allocator
    will give, so that half of the average is taken here. A norm after the projection (Gemma 2, OLMo 2) is not looked
    at, as in the paper. Raises BadInput where the output projection is unknown.
    Source: arXiv 2502.03805; NVIDIA/kvpress 0.5.5, CriticalKVPress.
    """

    base: str | Score = "snapkv"
    epsilon: float = 1e-4
    first: float = 0.5

    name: ClassVar[str] = "criticalkv"
    source: ClassVar[str] = "CriticalKV (arXiv 2502.03805); NVIDIA/kvpress 0.5.5"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        for option, value, most in (("epsilon", self.epsilon, math.inf), ("first", self.first, 1.0)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= most or value == math.inf:
                ends = "a finite number, at least 0" if most == math.inf else "a number from 0 to 1"
                raise BadInput(f"score {self.name}: {option}={value}: expected {ends}")
        if isinstance(self.base, str) and self.base.partition(":")[0] == self.name:
            raise BadInput(f"score {self.name}: base={self.base}: expected another score")
        named(Score, self.base)

    @cached_property
    def _base(self) -> Score:
        return named(Score, self.base)

    def rows_needed(self, budget: int) -> int | None:
        """What the base score needs."""
        return self._base.rows_needed(budget)

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32; +inf for the first stage's entries and what the base score protects."""
        if cells.output_weight is None:
            raise BadInput(
                f"score {self.name}, layer {cells.layer}: needs the layer's output projection, and the model has none"
                " that is known here"
            )
        base = self._base(cells, rows)
        if bool((cells.held & (base < 0)).any()):
            raise BadInput(f"score {self.name}: base {self._base.name} gives negative scores: expected none below 0")
        norms = _projected_norms(cells, cells.output_weight)
        share = 0 if self.first == 0 else max(1, int(self.first * cells.budget))
        ranked = torch.where(cells.held, base, -torch.inf)
        first = keep_best(ranked, torch.full_like(cells.lengths, share)) & cells.held
        protected = first | (base == torch.inf)
        return torch.where(protected, torch.inf, (base + self.epsilon) * norms)


def _projected_norms(cells: Cells, output_weight: torch.Tensor) -> torch.Tensor:
    """(B, K, L) float32: ||W_O^h v_j||_1, averaged over the query heads h of each KV head; a block at a time."""
    values = torch.where(cells.held[..., None], cells.values.float(), 0.0)
    batch, kv_heads, length, _ = values.shape
    group = output_weight.shape[0] // kv_heads
    size = max(1, BLOCK // (batch * output_weight.shape[1]))
    norms = values.new_zeros(batch, kv_heads, length)
    for head, weight in enumerate(output_weight):
        mine = values[:, head // group]
        parts = [(part @ weight.float().T).abs().sum(-1) for part in mine.split(size, dim=1)]
        norms[:, head // group] += torch.cat(parts, dim=1)
    return norms / group
