"""Direction bonus (P2, rejected): another score, plus what an entry's value has of the direction of the task."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from data import BadInput
from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Reconstruction, Score, named
from eviction.options import check_number

DIRECTION, COUNTED = "direction", "direction_counted"  # in cells.memory


@dataclass(frozen=True)
class DirectionBonus(Score):
    """r_j + lambda cos(v_j, dir) for a base score r, dir the mean of the values of the prompt's tokens.

    Hypothesis: entries whose values point where the task's values point on average carry the task, and a bonus keeps
    them when the base score would let them go. (Alpha, which survived, does the opposite: it rewards what is unlike.)
    Verdict (P2, family scoring, "variant_b"): rejected. Kill mode proxy-to-runtime drift: the gain of an offline
    measure was not there when the model ran.

    What P2 leaves open, and the reading here. "dir = mean-V task direction": each KV head has its own, the mean of its
    values over all tokens of the prompt as they are read, before any is evicted (of a prompt that is pinned and was not
    evicted from, those that a sliding window still holds); the cosine is 0 where either vector is. It stays what it is
    while the model answers: the sum of those values, and how many tokens it is over, stay in cells.memory (8 dv bytes a
    KV head, 8 a sequence), which is side data of the cache. A context that prefill() reads in chunks adds up chunk by
    chunk. A whole prompt that generate() reads in chunks looks like decoding: unless it is pinned, its direction is
    that of the first chunk. lambda: P2 gives none; 0.5 as for its alpha, on whatever scale the base has, which is a
    z-score for TriAttention. lambda = 0 is the base, bit for bit.

    base: a name, its options separated by ";" (variant_b:lambda=1,base=triattention:statistics=FILE;furthest=64), or a
    Score; P2's is TriAttention, which needs statistics. What the base protects stays protected. Raises BadInput for a
    base that has the context read again, as only a score by itself is shown that.
    Source: P2 (arXiv 2605.14292), variant_b.
    """

    lambda_: float = 0.5
    base: str | Score = "triattention"

    name: ClassVar[str] = "variant_b"
    source: ClassVar[str] = "P2 (arXiv 2605.14292), rejected there: scoring"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_number(f"score {self.name}", "lambda", self.lambda_, least=0)
        if isinstance(self._base, Reconstruction):
            raise BadInput(
                f"score {self.name}: base {self._base.name} has the context read again, which a base cannot: expected"
                " another score"
            )
        if isinstance(self._base, DirectionBonus):
            raise BadInput(f"score {self.name}: base {self._base.name}: expected another score")

    @cached_property
    def _base(self) -> Score:
        return named(Score, self.base.replace(";", ",") if isinstance(self.base, str) else self.base)

    def rows_needed(self, budget: int) -> int | None:
        """What the base score needs."""
        return self._base.rows_needed(budget)

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32; +inf where the base protects. Adds a prompt's values to the sum in cells.memory."""
        base = self._base(cells, rows)
        if self.lambda_ == 0:
            return base
        values = torch.where(cells.held[..., None], cells.values.double(), 0.0)
        direction = _direction(cells, values, reading=isinstance(rows, ContextRows))
        cosines = (_unit(values) @ _unit(direction)[..., None])[..., 0]
        return base + self.lambda_ * cosines.float()


def _direction(cells: Cells, values: torch.Tensor, reading: bool) -> torch.Tensor:
    """(B, K, dv): the sum of the values of the prompt's tokens, which points where their mean does.

    values (B, K, L, dv) float64, 0 where nothing is held. reading: whether all that was read so far is prompt.
    """
    if COUNTED in cells.memory:
        total, counted = cells.memory[DIRECTION], cells.memory[COUNTED]
    else:
        total, counted = values.new_zeros(()), torch.zeros(len(cells.seen), dtype=torch.int64, device=values.device)
        reading = True
    ends = counted
    if reading or cells.pinned:
        ends = torch.tensor(cells.pinned or cells.seen, device=values.device)
    new = (cells.positions >= counted[:, None, None]) & (cells.positions < ends[:, None, None])
    total = total + torch.where(new[..., None], values, 0.0).sum(-2)
    cells.memory.update({DIRECTION: total, COUNTED: ends})
    return total


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors (..., d) float64 of length 1, or 0 where they are 0: no square of a float32 is 0 in float64."""
    return torch.nn.functional.normalize(vectors, dim=-1, eps=torch.finfo(torch.float64).tiny)
