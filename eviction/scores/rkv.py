"""R-KV: what the latest rows attend to, less what other entries say as well."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from data import BadInput
from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score
from eviction.options import check_whole

SMALLEST_NORM = 1e-8  # added to the length of a key, as the code does
BLOCK = 2**22  # cosines computed at a time: 16 MiB


@dataclass(frozen=True)
class RKV(Score):
    """lambda A_j - (1 - lambda) rho_j: attention less redundancy; the latest w tokens (the window) are protected.

    A: the logits of the window's rows, the largest of the group's query heads; softmax over the entries before the
    window; mean over the rows; max pooling of width `kernel` along the entries.
    rho: cosines c_ij of all the keys that the KV head holds (after RoPE), c_ii = 0; in each row i the cosine with the
    latest entry of cosine above `similar` is set to 0, too, so that of alike entries the latest is not called
    redundant; rho = softmax over all entries j of the mean over i of c_ij. A row i with no such entry loses its cosine
    with the first entry: so the code does, and so does this.

    lambda is 0.1 in the paper; the default of the code's class is 0.07.

    Departures. The method is meant for generation, where it compresses every 128 tokens; as a score of entries it
    knows no trigger. Logits are the model's own, soft-cap included, and an entry outside a row's sliding window gets
    nothing from that row. Padding rows count in no mean. The code's other choices of which alike entry is spared
    (first, percentages) are not offered. Source: arXiv 2505.24133; Zefan-Cai/R-KV.
    """

    lambda_: float = 0.1
    window: int = 8
    kernel: int = 7
    similar: float = 0.5

    name: ClassVar[str] = "rkv"
    source: ClassVar[str] = "R-KV (arXiv 2505.24133); Zefan-Cai/R-KV"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_whole(f"score {self.name}", "window", self.window, least=1)
        check_whole(f"score {self.name}", "kernel", self.kernel, least=1)
        if self.kernel % 2 == 0:
            raise BadInput(f"score {self.name}: kernel={self.kernel}: expected an odd number")
        for option, value in (("lambda", self.lambda_), ("similar", self.similar)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= 1:
                raise BadInput(f"score {self.name}: {option}={value}: expected a number from 0 to 1")

    def rows_needed(self, budget: int) -> int:
        """The window."""
        return self.window

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32 in [-1, 1]; +inf for the window's entries."""
        protected = cells.held & (cells.ages < self.window)
        attention = self._attention(cells, rows.last(self.window), cells.held & ~protected)
        mixed = self.lambda_ * attention - (1 - self.lambda_) * _redundancy(cells, self.similar)
        return torch.where(protected, torch.inf, mixed)

    def _attention(
        self, cells: Cells, rows: ContextRows | ContextAndQuestionRows, before: torch.Tensor
    ) -> torch.Tensor:
        seen = rows.visible(cells) & before[:, :, None]
        logits = rows.logits(cells, torch.float64).amax(2).masked_fill(~seen, -torch.inf)
        weights = torch.where(seen, torch.softmax(logits, dim=-1), 0.0)  # a row may see nothing before the window
        mean = weights.sum(-2) / (rows.positions >= 0).sum(-1).clamp(min=1)[:, None, None]
        return functional.max_pool1d(mean.float(), self.kernel, stride=1, padding=self.kernel // 2)


def _redundancy(cells: Cells, similar: float) -> torch.Tensor:
    """(B, K, L): rho, from a block of rows of the cosine matrix at a time."""
    keys = torch.where(cells.held[..., None], cells.keys.float(), 0.0)
    units = keys / (torch.linalg.vector_norm(keys, dim=-1, keepdim=True) + SMALLEST_NORM)
    batch, kv_heads, length, _ = keys.shape
    entry = torch.arange(length, device=keys.device)
    size = max(1, BLOCK // (batch * kv_heads * length))
    total = keys.new_zeros(batch, kv_heads, length)
    for begin in range(0, length, size):
        cosines = units[:, :, begin : begin + size] @ units.transpose(-1, -2)
        mine = entry[begin : begin + size, None]
        cosines = cosines.masked_fill(mine == entry, 0.0)
        latest = torch.where(cosines > similar, entry, 0).amax(-1, keepdim=True)
        total = total + cosines.scatter(-1, latest, 0.0).sum(-2)
    mean = total / cells.lengths.clamp(min=1)[..., None]
    rho = torch.softmax(mean.masked_fill(~cells.held, -torch.inf), dim=-1)
    return torch.where(cells.held, rho, 0.0)
