"""The one order of entries by score, and what follows from it: which of a cell stay, how many of each cell stay."""

from collections.abc import Sequence

import torch

from eviction.shares import apportion, by_layer, flat


def best_first(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., L) int64 indices of the entries, best first, and (..., 1) int64, how many of them are protected.

    scores (..., L): +inf where an entry is protected, -inf (or nothing held) last. Protected entries come first, the
    latest before the others; then by score, the earliest first among equal scores. -0.0 and 0.0 are equal.
    """
    order = torch.sort(scores + 0.0, dim=-1, descending=True, stable=True).indices  # -0.0 + 0.0 = 0.0
    protected = (scores == torch.inf).sum(-1, keepdim=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    return order.gather(-1, torch.where(rank < protected, protected - 1 - rank, rank)), protected


def keep_best(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(..., L) bool: the first counts (...) entries of each cell in the order of best_first."""
    order, _ = best_first(scores)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, rank < counts[..., None])


def held(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """(K, L) bool: the first lengths (K,) entries of each cell of scores (K, L)."""
    return torch.arange(scores.shape[-1], device=scores.device) < lengths[:, None]


def counts_above_one_threshold(
    scores: Sequence[torch.Tensor], lengths: Sequence[torch.Tensor], floor: int, total: int
) -> list[torch.Tensor]:
    """How many entries of each cell are among the best `total` of all cells together; per layer (K,) int64.

    The `floor` latest entries of every cell come first (they must fit), then the protected ones, then the others by
    score: among equal scores by (layer, head, position), so that the sum is exactly min(total, all that is held). If
    the protected entries do not all fit, every cell keeps as many of its latest as any other (the first cells one
    more), and a cell that has fewer leaves the rest to the others.
    """
    floors, protected, others = [], [], []
    for score, length in zip(scores, lengths, strict=True):
        there = held(score, length)
        latest = there & (torch.arange(score.shape[-1], device=score.device) >= (length - floor)[:, None])
        safe = there & ~latest & (score == torch.inf)
        floors.append(latest.sum(-1))
        protected.append(safe.sum(-1))
        others.append(there & ~latest & ~safe)
    kept = [a + b for a, b in zip(floors, protected, strict=True)]
    left = total - sum(flat(kept))
    if left <= 0:
        some = flat(protected)
        shared = by_layer(apportion([1] * len(some), some, left + sum(some)), protected)
        return [a + b for a, b in zip(floors, shared, strict=True)]
    pool = torch.cat([score[other] for score, other in zip(scores, others, strict=True)])
    if left >= pool.numel():
        return [length.clone() for length in lengths]
    threshold = pool.kthvalue(pool.numel() - left + 1).values  # the left-th largest
    above = torch.cat([(other & (score > threshold)).sum(-1) for score, other in zip(scores, others, strict=True)])
    equal = torch.cat([(other & (score == threshold)).sum(-1) for score, other in zip(scores, others, strict=True)])
    # equal scores are taken cell by cell until nothing is left of the total
    taken = (left - above.sum() - (equal.cumsum(0) - equal)).clamp(min=0).minimum(equal)
    more = (above + taken).split([length.numel() for length in lengths])
    return [a + b for a, b in zip(kept, more, strict=True)]
