"""ExpectedAttention: the attention that queries to come, taken as Gaussian, will pay on average."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from data import BadInput
from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score
from eviction.options import check_whole
from eviction.rotary import Rotary


@dataclass(frozen=True)
class ExpectedAttention(Score):
    """(softmax_j(E logit) averaged over the group, + epsilon) * ||v_j||_2; the first `sinks` tokens are protected.

    Per query head: mu and Sigma are the mean and the covariance (divided by the count) of the queries before RoPE of
    all tokens read so far at positions >= sinks; R is the mean over the next `future` positions of the layer's rotary
    matrix, its own scaling included (yarn, longrope), which leaves alone the coordinates that do not turn. Then
      x_j = scale k_j . (R mu) + scale^2 / 2 k_j^T (R Sigma R^T) k_j,
    and the softmax runs over the entries held at positions >= sinks. Keys are as the cache holds them, after RoPE.

    The moments stay in cells.memory from pass to pass, so that chunks of a prompt add up to the moments of the whole;
    H (d + d^2) numbers a layer and sequence, which is side data of the cache. They are as exact as the model's dtype
    lets queries be turned back.

    Departures. The code divides by sqrt(d); scale is the model's own factor. It ignores soft-caps: with c, x_j becomes
    c tanh(x_j / c), which grows with x_j and is x_j for large c (ours: the exact expectation has no closed form).
    Sliding windows: the entries held are scored alike, though the oldest will leave the window first, as in the code.
    A budget of no more than `sinks` keeps nothing but sinks. Raises BadInput where the layer's rotary embedding is
    unknown. Source: NVIDIA/kvpress 0.5.5, ExpectedAttentionPress with its defaults (its leaderboard entry adds
    Ada-KV's allocation and epsilon = 0.01); arXiv 2510.00636.
    """

    sinks: int = 4
    future: int = 512
    epsilon: float = 0.0

    name: ClassVar[str] = "expected_attention"
    source: ClassVar[str] = "ExpectedAttention (NVIDIA/kvpress 0.5.5; arXiv 2510.00636)"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_whole(f"score {self.name}", "sinks", self.sinks, least=0)
        check_whole(f"score {self.name}", "future", self.future, least=1)
        if (
            isinstance(self.epsilon, bool)
            or not isinstance(self.epsilon, int | float)
            or not 0 <= self.epsilon < math.inf
        ):
            raise BadInput(f"score {self.name}: epsilon={self.epsilon}: expected a finite number, at least 0")

    def rows_needed(self, budget: int) -> None:
        """All of the pass."""
        return None

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32; +inf for sinks. Adds the rows to the moments in cells.memory."""
        if cells.rotary is None:
            raise BadInput(
                f"score {self.name}, layer {cells.layer}: needs the layer's rotary embedding, and the model has none"
                " that is known here"
            )
        mean, covariance = self._moments(cells, cells.rotary, rows)
        mean, covariance = _turned_on(mean, covariance, cells, cells.rotary, self.future)
        keys = cells.keys.float()[:, :, None]
        exponents = rows.scale * (keys @ mean[..., None])[..., 0]
        exponents = exponents + rows.scale**2 / 2 * ((keys @ covariance) * keys).sum(-1)
        if rows.softcap is not None:
            exponents = torch.tanh(exponents / rows.softcap) * rows.softcap
        sink = cells.held & (cells.positions < self.sinks)
        others = cells.held & ~sink
        expected = torch.softmax(exponents.masked_fill(~others[:, :, None], -torch.inf), dim=-1).mean(2)
        expected = torch.where(others, expected, 0.0)  # a KV head that holds sinks alone has no softmax
        scores = (expected + self.epsilon) * torch.linalg.vector_norm(cells.values.float(), dim=-1)
        return torch.where(sink, torch.inf, scores)

    def _moments(
        self, cells: Cells, rotary: Rotary, rows: ContextRows | ContextAndQuestionRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean (B, H, d) and covariance (B, H, d, d) of the queries before RoPE, these rows and all before them.

        Sums of centred products of two sets are joined by their means (Chan, Golub and LeVeque 1979): a sum of raw
        products loses the covariance to rounding where the mean is large.
        """
        counted = (rows.positions >= self.sinks)[:, None, :, None]
        queries = torch.where(counted, rotary.unrotate(rows.queries, rows.positions[:, None]), 0.0)
        count = counted.sum(-2).float()
        mean = queries.sum(-2) / count.clamp(min=1)
        centred = torch.where(counted, queries - mean[:, :, None], 0.0)
        products = centred.transpose(-1, -2) @ centred
        if "count" in cells.memory:
            before, count_before = cells.memory["mean"], cells.memory["count"]
            total = count_before + count
            shift, share = mean - before, count / total.clamp(min=1)
            mean = before + shift * share
            products = cells.memory["products"] + products
            products = products + shift[..., None] * shift[..., None, :] * (count_before * share)[..., None]
            count = total
        cells.memory.update(count=count, mean=mean, products=products)
        return mean, products / count.clamp(min=1)[..., None]


def _turned_on(
    mean: torch.Tensor, covariance: torch.Tensor, cells: Cells, rotary: Rotary, future: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments (B, H, d), (B, H, d, d) under the mean rotation of the next positions: (B, K, G, d), (B, K, G, d, d)."""
    positions = torch.tensor(cells.seen, device=mean.device)[:, None] + torch.arange(future, device=mean.device)
    turn = rotary.mean_matrix(positions, mean.shape[-1])[:, None]
    mean = (turn @ mean[..., None])[..., 0]
    covariance = turn @ covariance @ turn.transpose(-1, -2)
    groups = (cells.keys.shape[1], -1)
    return mean.unflatten(1, groups), covariance.unflatten(1, groups)
