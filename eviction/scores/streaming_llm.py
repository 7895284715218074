"""StreamingLLM: the first tokens and the most recent ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score
from eviction.options import check_whole


@dataclass(frozen=True)
class StreamingLLM(Score):
    """Minus the tokens read after an entry; the first min(sinks, budget // 2) tokens of the sequence are protected.

    At most half of the budget goes to sinks, as in P1 (App. C: min(4, s/2)); from budgets of 2 * sinks on that is
    what the paper's own code and kvpress do, which keep all sinks at any budget. No score reads the content, so every
    KV head keeps the same entries. Tokens are true positions: padding is no sink.

    Departures: the paper's code rotates a key by its place in the cache; here keys keep their true positions, as in
    kvpress without its re-rotation. Source: arXiv 2309.17453; mit-han-lab/streaming-llm; P1, App. C.
    """

    sinks: int = 4

    name: ClassVar[str] = "streaming_llm"
    source: ClassVar[str] = "StreamingLLM (arXiv 2309.17453); P1, App. C; NVIDIA/kvpress 0.5.5"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_whole(f"score {self.name}", "sinks", self.sinks, least=0)

    def rows_needed(self, budget: int) -> int:
        """None of them."""
        return 0

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32, 0 for the latest token; +inf for sinks."""
        sink = cells.held & (cells.positions < min(self.sinks, cells.budget // 2))
        return torch.where(sink, torch.inf, -cells.ages.float())
