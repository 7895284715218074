"""H2O: the attention that entries have received so far."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from eviction.carried import carried, carry
from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score
from eviction.options import check_one_of, check_whole

BLOCK = 2**22  # attention weights computed at a time: 16 MiB


@dataclass(frozen=True)
class H2O(Score):
    """S_j = sum over all rows t of the text so far of a_tj; the latest `recent` tokens are protected.

    Each row counts once, when it is read, with its weights over what the cache then holds; entries evicted do not come
    back. The sums stay in cells.memory from pass to pass: 8 bytes an entry, which is side data of the cache. group:
    "sum" or "mean" over the query heads of the KV head, a constant factor that no ranking depends on. recent None:
    budget // 2 (P1, App. C: recency s/2); 0 protects nothing.

    S_j is not divided by the number of rows that could see j, so that early entries have the advantage of having been
    there for longer. kvpress 0.5.5 divides by it (ObservedAttentionPress) and protects no recent tokens: another
    score, though it is often called H2O.

    Departures. The reference (FMInference/H2O) sums over the batch, too, and keeps one set per query head: here every
    sequence and KV head has its own. Its budget for recent tokens is a share of the prompt's length, which equals its
    budget for heavy ones by default: half each, as here. It evicts after every token and this after every pass: a
    prompt read in one pass is scored by dense rows. The weights are the model's own, soft-cap and sliding window
    included. Source: arXiv 2306.14048; FMInference/H2O; P1, App. C.
    """

    recent: int | None = None
    group: str = "mean"

    name: ClassVar[str] = "h2o"
    source: ClassVar[str] = "H2O (arXiv 2306.14048); FMInference/H2O; P1, App. C"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        if self.recent is not None:
            check_whole(f"score {self.name}", "recent", self.recent, least=0)
        check_one_of(f"score {self.name}", "group", self.group, ("sum", "mean"))

    def rows_needed(self, budget: int) -> None:
        """All of the pass."""
        return None

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32; +inf for recent tokens. Adds the rows' weights to the sums in cells.memory."""
        sums = carried(cells, "received") + _received(cells, rows)
        carry(cells, "received", sums)
        if self.group == "mean":
            sums = sums / (rows.queries.shape[1] // cells.keys.shape[1])
        recent = cells.budget // 2 if self.recent is None else self.recent
        return torch.where(cells.held & (cells.ages < recent), torch.inf, sums)


def _received(cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
    """(B, K, L): the weights of all rows and query heads summed, a block of rows at a time."""
    batch, heads, count, _ = rows.queries.shape
    size = max(1, BLOCK // (batch * heads * cells.keys.shape[2]))
    total = torch.zeros(cells.positions.shape, device=cells.positions.device)
    for begin in range(0, count, size):
        end = begin + size
        block = replace(
            rows,
            queries=rows.queries[:, :, begin:end],
            positions=rows.positions[:, begin:end],
            first=rows.first[:, begin:end],
        )
        # entries later than all of its rows, which come last in every cell, are left out
        reached = cells.held & (cells.positions <= block.positions.amax(1)[:, None, None])
        longest = int(reached.sum(-1).max())
        total[..., :longest] += block.weights(cells.first(longest)).sum((2, 3))
    return total
