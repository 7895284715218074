"""Quest: the most that a row could attend to anything of an entry's page."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score
from eviction.options import check_one_of, check_whole


@dataclass(frozen=True)
class Quest(Score):
    """Upper bound of the logits of an entry's page, scale sum_c max(q_c min_c, q_c max_c), for the latest rows.

    A page is `page` entries that are neighbours in the cache, counted from the first; min and max are of each channel
    of its keys after RoPE. Every entry has its page's bound. page None: max(2, budget // 4), as P1 has it (App. C; its
    other configuration is page=16). The bound goes through the model's soft-cap where it has one, and is combined over
    the `rows` latest rows and the query heads of the group by "mean" or "max".

    Quest as published evicts nothing: at every step it reads the pages of largest bound and keeps the cache whole. As
    P1's row-level rule, and here, the page bound is the entries' score: entries of the best pages stay until the
    budget is full, and the page where it fills up keeps its first entries: four pages at P1's size, and part of a fifth
    where that does not divide the budget. P1 chooses again at every row; what is evicted here is gone for later rows.

    Departures. Published code has one KV head per query head: the mean over the group is ours ("max" is the bound of
    the largest logit in it). Pages are laid over what the cache holds, so that after an eviction they have gaps. Pages
    that reach beyond a row's sliding window, or past the row itself, count whole. It skips the first two layers; here
    every layer is scored. Source: arXiv 2406.10774; mit-han-lab/Quest; P1, App. C.
    """

    page: int | None = None
    rows: int = 1
    over: str = "mean"

    name: ClassVar[str] = "quest"
    source: ClassVar[str] = "Quest (arXiv 2406.10774); mit-han-lab/Quest; P1, App. C"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        if self.page is not None:
            check_whole(f"score {self.name}", "page", self.page, least=1)
        check_whole(f"score {self.name}", "rows", self.rows, least=1)
        check_one_of(f"score {self.name}", "over", self.over, ("mean", "max"))

    def rows_needed(self, budget: int) -> int:
        """The latest ones."""
        return self.rows

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32."""
        size = self.page or max(2, cells.budget // 4)
        least, most = _extremes(cells, size)
        latest = rows.last(self.rows)
        kv_heads = cells.keys.shape[1]
        # few pages: in float64, where min and max of opposite signs do not cancel to noise
        queries = latest.queries.double().unflatten(1, (kv_heads, -1))
        upper = queries.clamp(min=0) @ most[:, :, None].transpose(-1, -2)
        upper = (upper + queries.clamp(max=0) @ least[:, :, None].transpose(-1, -2)) * rows.scale
        if rows.softcap is not None:
            upper = torch.tanh(upper / rows.softcap) * rows.softcap
        real = (latest.positions >= 0)[:, None, None, :, None]
        if self.over == "max":
            bounds = upper.masked_fill(~real, -torch.inf).amax((2, 3))
        else:
            bounds = torch.where(real, upper, 0.0).sum(-2).mean(2) / real.sum(-2)[:, :, 0].clamp(min=1)
        found: torch.Tensor = bounds.float().repeat_interleave(size, dim=-1)
        return found[..., : cells.positions.shape[-1]]


def _extremes(cells: Cells, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, K, P, d) float64: least and largest of each channel in each page of `size` entries; 0 in empty pages."""
    missing = -cells.keys.shape[2] % size
    keys = torch.nn.functional.pad(cells.keys, (0, 0, 0, missing)).unflatten(2, (-1, size))
    held = torch.nn.functional.pad(cells.held, (0, missing)).unflatten(2, (-1, size))[..., None]
    least = keys.masked_fill(~held, torch.inf).amin(3)
    most = keys.masked_fill(~held, -torch.inf).amax(3)
    there = held.any(3)
    return torch.where(there, least, 0.0).double(), torch.where(there, most, 0.0).double()
