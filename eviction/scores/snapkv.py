"""SnapKV: what the latest rows attended to, smoothed along the sequence."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from data import BadInput
from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score
from eviction.options import check_one_of, check_whole


@dataclass(frozen=True)
class Variant:
    """One published reading: window None means max(1, min(32, budget // 2)); over_window: "sum" or "mean" of rows."""

    window: int | None
    kernel: int
    pooling: str
    over_window: str


VARIANTS = {
    "reference": Variant(window=32, kernel=5, pooling="average", over_window="sum"),
    "kvpress": Variant(window=64, kernel=5, pooling="average", over_window="mean"),
    "paper": Variant(window=None, kernel=7, pooling="max", over_window="mean"),
}
PAPER_WINDOW = 32  # the paper's largest window


@dataclass(frozen=True)
class SnapKV(Score):
    """Attention that the rows of the latest w tokens (the window) pay to each entry before them, pooled along entries.

    Per query head: A_j = sum (or mean) over the window's rows of a_tj, softmax over all entries that row t sees (so
    causal inside the window, 0 outside a sliding one), with the model's own scale and soft-cap; then pooling of width
    k and stride 1 along the entries before the window, with k // 2 zeros on either side that average pooling counts;
    then the mean over the query heads of the group. The window's own entries are protected.

    variant, and what window, kernel and pooling ("average", "max") are where they are None:
      reference  w = 32, k = 5, average, sum over the window   (FasterDecoding/SnapKV, the defaults of its model set-up)
      kvpress    w = 64, k = 5, average, mean over the window  (NVIDIA/kvpress 0.5.5, SnapKVPress)
      paper      w = max(1, min(32, budget // 2)), k = 7, max  (P1, App. C; it leaves open sum or mean over the window:
                 mean is ours, since w, and a sum with it, would differ between layers of different budgets)

    Departures. From the reference: it stores one cache per query head, ours is per KV head, hence the mean over the
    group (kvpress does the same). From both: they stop or leave everything in place where the context is not longer
    than the window; here all of it is protected, so that the latest tokens are kept. They also need a budget above
    the window (below it kvpress's choice inside the window is an arbitrary tie): here a budget below the window keeps
    the latest tokens. They know one uncompressed prompt: here the entries may have gaps, where earlier chunks were
    compressed (pooling joins entries that are neighbours in the cache), and the window is the latest w tokens read,
    of which the rows of this pass are observed, at most w. kvpress ignores QK-norm over all heads, scales other than
    1 / sqrt(d), soft-caps, sliding windows and padding: here each is the model's own. Padding rows count in no mean.
    Source: arXiv 2404.14469.
    """

    variant: str = "reference"
    window: int | None = None
    kernel: int | None = None
    pooling: str | None = None

    name: ClassVar[str] = "snapkv"
    source: ClassVar[str] = "SnapKV (arXiv 2404.14469); FasterDecoding/SnapKV; NVIDIA/kvpress 0.5.5; P1, App. C"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_one_of(f"score {self.name}", "variant", self.variant, tuple(VARIANTS))
        if self.window is not None:
            check_whole(f"score {self.name}", "window", self.window, least=1)
        if self.kernel is not None:
            check_whole(f"score {self.name}", "kernel", self.kernel, least=1)
            if self.kernel % 2 == 0:
                raise BadInput(f"score {self.name}: kernel={self.kernel}: expected an odd number")
        if self.pooling is not None:
            check_one_of(f"score {self.name}", "pooling", self.pooling, ("average", "max"))

    def rows_needed(self, budget: int) -> int:
        """The window."""
        if self.window is not None:
            return self.window
        return VARIANTS[self.variant].window or max(1, min(PAPER_WINDOW, budget // 2))

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32; +inf for the window's entries."""
        window = self.rows_needed(cells.budget)
        latest = rows.last(window)
        observed = latest.weights(cells).sum(-2)
        if VARIANTS[self.variant].over_window == "mean":
            observed = observed / (latest.positions >= 0).sum(-1).clamp(min=1)[:, None, None, None]
        protected = cells.held & (cells.ages < window)
        before = (cells.held & ~protected)[:, :, None]
        pooled = self._pooled(torch.where(before, observed, 0.0)).mean(2)
        return torch.where(protected, torch.inf, pooled)

    def _pooled(self, observed: torch.Tensor) -> torch.Tensor:
        """(B, K, G, L), pooled along L; a zero beyond the entries is what pooling would pad with."""
        kernel = self.kernel or VARIANTS[self.variant].kernel
        pooling = self.pooling or VARIANTS[self.variant].pooling
        pool = functional.max_pool1d if pooling == "max" else functional.avg_pool1d
        return pool(observed.flatten(0, 1), kernel, stride=1, padding=kernel // 2).view_as(observed)
