"""DropKV: the squared error of leaving out an entry, over the latest rows."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score
from eviction.options import check_whole
from eviction.removal import removal_errors

LARGEST_WINDOW = 32  # of the default


@dataclass(frozen=True)
class DropKV(Score):
    """(a_tj / (1 - a_tj))^2 ||o_t - v_j||_2^2, averaged over the rows t of the latest w tokens (the window) and over
    the query heads of the group; the window's own entries are protected.

    It differs from CAOTE in three ways, though both start from the same closed form of one entry's removal, with the
    remaining weights divided by 1 - a_tj: the error is squared (an entry that one row needs badly outweighs one that
    many rows need a little), it is taken over a window of rows and not from the latest alone, and it needs no other
    score beneath. With a window of one row and groups of one head it ranks the entries before it as CAOTE does.

    window None: w = max(1, min(32, budget // 2)), as P1 has it for SnapKV (ours: the proposal's text, which gives the
    formula, states no w).

    Departures. The proposal sums over the window: the mean, a constant factor in each layer, is the same across layers
    of different windows. The pull request has options epsilon and kernel_size, too; here the error is exact, whatever
    a_tj, and nothing is smoothed along the entries. An entry that some row sees alone is protected. The window's
    protection is ours: its later entries were seen by few of the rows that judge them.
    Source: NVIDIA/kvpress, issue 284 and pull request 285 (not part of 0.5.5).
    """

    window: int | None = None

    name: ClassVar[str] = "dropkv"
    source: ClassVar[str] = "DropKV (NVIDIA/kvpress, issue 284 and pull request 285)"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        if self.window is not None:
            check_whole(f"score {self.name}", "window", self.window, least=1)

    def rows_needed(self, budget: int) -> int:
        """The window."""
        return self.window or max(1, min(LARGEST_WINDOW, budget // 2))

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32; +inf for the window's entries, and where a row sees an entry alone."""
        window = self.rows_needed(cells.budget)
        latest = rows.last(window)
        real = (latest.positions >= 0).sum(-1).clamp(min=1)[:, None, None]
        squared = removal_errors(cells, latest).square().sum(-2).mean(2) / real
        return torch.where(cells.held & (cells.ages < window), torch.inf, squared.float())
