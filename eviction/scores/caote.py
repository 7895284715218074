"""CAOTE: how far the output moves without an entry."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score
from eviction.options import check_whole
from eviction.removal import removal_errors


@dataclass(frozen=True)
class CAOTE(Score):
    """a_j / (1 - a_j) ||o - v_j||_2 of the `rows` latest rows, averaged over them and over the group's query heads.

    o is the row's output, a_j its weight on entry j: the score is what dropping j alone moves the output by, e_s of all
    entries but j in P1's terms. The weights are the model's own, over what the KV head holds.

    Departures. The paper puts the formula on top of another score (of H2O, TOVA or SnapKV, scaled to sum to 1 over the
    entries) and drops one entry a step; here the weights are those of the latest rows, so that with rows=1 each number
    is the exact error of one query head, and many entries may be dropped at once. Its faster variant, with the mean of
    the values in place of o, is not offered. The mean over heads, and over rows where there are several, is ours. An
    entry that some row sees alone is protected: nothing would be left of that row. Nothing else is protected.
    Source: arXiv 2504.14051; P1, section 2 and Lemma 2.1.
    """

    rows: int = 1

    name: ClassVar[str] = "caote"
    source: ClassVar[str] = "CAOTE (arXiv 2504.14051); P1, Lemma 2.1"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_whole(f"score {self.name}", "rows", self.rows, least=1)

    def rows_needed(self, budget: int) -> int:
        """The latest ones."""
        return self.rows

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32; +inf where a row sees an entry alone."""
        latest = rows.last(self.rows)
        real = (latest.positions >= 0).sum(-1).clamp(min=1)[:, None, None]
        return (removal_errors(cells, latest).sum(-2).mean(2) / real).float()
