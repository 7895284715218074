"""Alpha: entries whose values resemble what is kept already lose score."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from eviction.method import Cells, Scope, Selector
from eviction.options import check_number, check_one_of
from eviction.ranking import best_first, keep_best

SIGNATURES = ("global", "cell")
SCORE_SCALES = ("zscore_max", "raw", "minmax")
EPS = 1e-8  # of P2's signature; P2 does not give it
# Cosines are rounded to multiples of 1 / GRID, so that entries with the same value vector have the same cosine
# whatever order a matrix product sums in, and ties are ties on every machine.
GRID = 2.0**32  # an even power, so that its root is exact
# By how much a rounded cosine may exceed 1: decides only which entries are certain not to be picked.
COSINE_SLACK = 1e-6
PROTECTED_BLOCK = 64  # protected entries compared with all others at once


@dataclass(frozen=True)
class Alpha(Selector):
    """Greedy by the gain s_i - lambda max(0, max over the entries kept already of cos(v_i, v_j)).

    The first pick is the entry of highest score s. Protected entries are kept before all others (the latest first) and
    count as kept from the start. Equal gains: the higher score, then the earliest (P2 does not say). lambda = 0 takes
    the path of top_mass and picks what it picks, bit for bit ("global": from the scores s of the model), and so does
    lambda -> 0.

    signature "global" (P2): one order of positions for the whole model. v_i = u_i / (|u_i| + eps), u_i the mean of the
    values at position i over all layers and KV heads; s_i = the highest scaled score of position i over all KV heads.
    Every cell keeps the first positions of that order that it holds, as many as it was given. With equal counts and
    equal positions, as under the uniform allocator without windows, this is P2's one index set. Otherwise (windows,
    other allocators, later chunks; ours) mean and maximum are over the cells that hold the position, an entry protected
    in one cell comes first in all, and each cell keeps its own number of the one order. "cell" (ours): each KV head by
    itself, v_i from its own values, s_i from its own scores.
    score_scale: of the scores of each KV head, over its entries that are not protected. "zscore_max": (s - mean) /
    standard deviation; "minmax": (s - min) / (max - min); both 0 if all are equal; "raw": as they are. P2 does not say
    on which scale its lambda of 0.5 acts; the z-score, maximised over heads, is what its base score's code does.

    Departures: s and the maximum over heads are over KV heads, of whatever score is used (P2: TriAttention's, of query
    heads, with the standard deviation held above 1e-6 and random noise of 1e-6 against ties); cosines are rounded to
    2^-32. A pick costs one product (n, d) by (d), n being the entries that score at most lambda less than the last one
    that a selection by score alone would keep.
    Source: P2 (arXiv 2605.14292), the V-signature and the gain; WeianMao/triattention for the scale.
    """

    lambda_: float = 0.5
    score_scale: str = "zscore_max"
    signature: str = "global"

    name: ClassVar[str] = "alpha"
    source: ClassVar[str] = "P2 (arXiv 2605.14292)"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_number("selector alpha", "lambda", self.lambda_, least=0)
        check_one_of("selector alpha", "score_scale", self.score_scale, SCORE_SCALES)
        check_one_of("selector alpha", "signature", self.signature, SIGNATURES)

    @property
    def scope(self) -> Scope:
        """The whole model for P2's signature, else each layer by itself."""
        return "model" if self.signature == "global" else "layer"

    def __call__(
        self, cells: Sequence[Cells], scores: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Per layer (B, K, L) bool."""
        if self.signature == "global":
            return self._one_order(cells, scores, counts)
        return [self._by_cell(*layer) for layer in zip(cells, scores, counts, strict=True)]

    def _by_cell(self, cells: Cells, scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self.lambda_ == 0:
            return keep_best(scores, counts)
        together, kept = scores.flatten(0, 1), counts.flatten()
        order, protected = best_first(together)
        scaled = scale_scores(together, self.score_scale)
        values = cells.values.flatten(0, 1)
        ranks = greedy_ranks(
            scaled,
            order,
            protected,
            lambda some: values.gather(1, some[..., None].expand(-1, -1, values.shape[-1])),
            kept,
            self.lambda_,
        )
        return (ranks < kept[:, None]).view_as(scores)

    def _one_order(
        self, cells: Sequence[Cells], scores: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        scaled = [scale_scores(score, self.score_scale) for score in scores]
        first = cells[0].positions[:, :1]
        if not all(
            layer.positions.shape[-1] == first.shape[-1]
            and torch.equal(layer.positions, first.expand_as(layer.positions))
            for layer in cells
        ):
            return self._of_different_positions(cells, scaled, counts)
        pooled = torch.stack([score.amax(1) for score in scaled]).amax(0)
        order, protected = best_first(pooled)
        if self.lambda_ == 0:
            ranks = order.argsort(-1)
        else:
            values = [layer.values for layer in cells]
            most = torch.cat(list(counts), dim=1).amax(1)
            ranks = greedy_ranks(
                pooled,
                order,
                protected,
                lambda some: mean_values(values, [some[:, None].expand(-1, layer.shape[1], -1) for layer in values]),
                most,
                self.lambda_,
            )
        return [(ranks[:, None] < count[..., None]) & layer.held for layer, count in zip(cells, counts, strict=True)]

    def _of_different_positions(
        self, cells: Sequence[Cells], scaled: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        slots, n = slots_of_positions([layer.positions for layer in cells])
        batch = slots[0].shape[0]
        pooled = scaled[0].new_full((batch, n + 1), -torch.inf)  # slot n: where nothing is held
        for score, slot in zip(scaled, slots, strict=True):
            pooled.scatter_reduce_(1, slot.flatten(1), score.flatten(1), "amax")
        mine = [pooled.gather(1, slot.flatten(1)).view_as(slot) for slot in slots]
        mine = [score.masked_fill(slot == n, -torch.inf) for score, slot in zip(mine, slots, strict=True)]
        if self.lambda_ == 0:
            return [keep_best(score, count) for score, count in zip(mine, counts, strict=True)]
        pooled = pooled[:, :n]
        order, protected = best_first(pooled)
        # As long as a cell lacks entries, one of its `count` highest-scored ones can still be picked, so that nothing
        # is picked that scores lower than the last of these by more than lambda.
        last = torch.cat([_lowest_kept(score, count) for score, count in zip(mine, counts, strict=True)], dim=1).amin(1)
        needed = (pooled >= last[:, None] - self.lambda_ * (1 + COSINE_SLACK)).sum(-1)
        entries = [entries_of_slots(slot, n) for slot in slots]
        ranks = greedy_ranks(
            pooled,
            order,
            protected,
            lambda some: mean_values(
                [layer.values for layer in cells],
                [entry.gather(2, some[:, None].expand(-1, entry.shape[1], -1)) for entry in entries],
            ),
            needed,
            self.lambda_,
        )
        kept = []
        for slot, count in zip(slots, counts, strict=True):
            rank = torch.cat([ranks, ranks.new_zeros(batch, 1)], dim=1).gather(1, slot.flatten(1)).view_as(slot)
            kept.append(keep_best((-rank.double()).masked_fill(slot == n, -torch.inf), count))
        return kept


def scale_scores(scores: torch.Tensor, score_scale: str) -> torch.Tensor:
    """Scores (..., L) on one of SCORE_SCALES, float64; infinite ones stay, and the scale is that of the others."""
    scores = scores.double()
    finite = scores.isfinite()
    if score_scale == "raw" or not scores.numel():
        return scores
    low = scores.masked_fill(~finite, torch.inf).amin(-1, keepdim=True)
    high = scores.masked_fill(~finite, -torch.inf).amax(-1, keepdim=True)
    if score_scale == "minmax":
        scaled = (scores - low) / (high - low)
    else:
        some = finite.sum(-1, keepdim=True).clamp(min=1)
        centred = scores - scores.masked_fill(~finite, 0).sum(-1, keepdim=True) / some
        scaled = centred / (centred.masked_fill(~finite, 0).square().sum(-1, keepdim=True) / some).sqrt()
    return torch.where(finite, torch.where(low < high, scaled, 0.0), scores)


def slots_of_positions(positions: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Positions (B, K, L) of each layer as slots among the positions that any cell of the sequence holds, and how many.

    Slots are in the order of positions; where nothing is held the slot is that number, one past the last.
    """
    size = max(int(layer.max()) + 1 if layer.numel() else 0 for layer in positions)
    there = torch.zeros(positions[0].shape[0], size + 1, dtype=torch.bool, device=positions[0].device)
    columns = [torch.where(layer < 0, size, layer) for layer in positions]
    for layer in columns:
        there.scatter_(1, layer.flatten(1), True)
    there[:, size] = False
    n = int(there.sum(-1).max())
    slots = there.cumsum(-1) - 1
    slots[:, size] = n
    return [slots.gather(1, layer.flatten(1)).view_as(layer) for layer in columns], n


def entries_of_slots(slots: torch.Tensor, n: int) -> torch.Tensor:
    """(B, K, n) int64: which entry of each cell is at which of n slots, -1 for none; slots (B, K, L)."""
    entries = slots.new_full((*slots.shape[:2], n + 1), -1)
    return entries.scatter_(2, slots, torch.arange(slots.shape[2], device=slots.device).expand_as(slots))[..., :n]


def mean_values(values: Sequence[torch.Tensor], entries: Sequence[torch.Tensor]) -> torch.Tensor:
    """(B, w, d) float64: per column the mean over the cells of all layers that have an entry there.

    values (B, K, L, d) and entries (B, K, w) of each layer: which entry of a cell is in which column, -1 for none.
    """
    batch, _, columns = entries[0].shape
    total = torch.zeros(batch, columns, values[0].shape[-1], dtype=torch.float64, device=values[0].device)
    cells = torch.zeros(batch, columns, dtype=torch.int64, device=values[0].device)
    for layer, entry in zip(values, entries, strict=True):
        length, d = layer.shape[2:]
        if length:
            first = (
                torch.arange(entry.shape[0] * entry.shape[1], device=entry.device).view(*entry.shape[:2], 1) * length
            )
            rows = layer.reshape(-1, d).index_select(0, (first + entry.clamp(min=0)).flatten())
            rows = rows.view(*entry.shape, d).masked_fill_((entry < 0)[..., None], 0.0)
            total += rows.sum(1, dtype=torch.float64)
            cells += (entry >= 0).sum(1)
    return total / cells.clamp(min=1)[..., None]


def greedy_ranks(
    scores: torch.Tensor,
    order: torch.Tensor,
    protected: torch.Tensor,
    values_of: Callable[[torch.Tensor], torch.Tensor],
    needed: torch.Tensor,
    lambda_: float,
) -> torch.Tensor:
    """(C, L) int64: the place of each entry in the greedy order; right below needed (C,), else some place beyond.

    scores (C, L) float64, +inf: protected, -inf: never penalised and last, as ordered. order, protected: of best_first,
    (C, L) and (C, 1). values_of: entries (C, w) -> their values (C, w, d); asked once, for those that can matter.
    """
    n, device = scores.shape[-1], scores.device
    if n == 0:
        return order
    protected = protected[:, 0]
    sorted_scores = scores.gather(-1, order)
    finite = sorted_scores.isfinite()
    picked = (needed - protected).clamp(min=0).minimum(finite.sum(-1))
    # Until the last pick one of the `needed` best by score is left, with a gain of at least its score minus lambda:
    # no entry that scores lower than that can be picked.
    last = sorted_scores.gather(-1, (needed - 1).clamp(min=0)[:, None])
    within = finite & (sorted_scores >= last - lambda_ * (1 + COSINE_SLACK)) & (picked > 0)[:, None]
    steps, most, width = torch.stack([picked.max(), protected.max(), (protected + within.sum(-1)).max()]).tolist()
    place = torch.arange(n, device=device)
    # protected entries and those of -inf are where they belong; entries never picked are behind all
    ranks = torch.where(finite, n + place, place)
    if steps > 0:
        vectors = directions(values_of(order[:, :width]))
        vectors.masked_fill_((sorted_scores[:, :width] == -torch.inf)[..., None], 0.0)  # maybe nothing is held there
        vectors = vectors.transpose(1, 2).contiguous()
        best = _nearest_protected(vectors, protected, most)
        left = sorted_scores[:, :width].masked_fill(~within[:, :width], -torch.inf)
        picks = _greedy(left, best, vectors, steps, lambda_)
        step = torch.arange(steps, device=device)
        picks = torch.where(step < picked[:, None], picks, n)  # cells that are done pick into an extra column
        ranks = torch.cat([ranks, ranks[:, :1]], dim=1).scatter_(1, picks, protected[:, None] + step)[:, :n]
    return torch.empty_like(ranks).scatter_(-1, order, ranks)


def directions(values: torch.Tensor) -> torch.Tensor:
    """values / (|values| + eps) (..., d), float64, times sqrt(GRID): products are cosines in units of 1 / GRID."""
    values = values.double()
    norms: torch.Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    return values / (norms + EPS) * math.sqrt(GRID)


def _nearest_protected(vectors: torch.Tensor, protected: torch.Tensor, most: int) -> torch.Tensor:
    """(C, w) highest cosine of each vector (C, d, w) with the first `protected` (C,) of its cell, at least 0."""
    best = vectors.new_zeros(vectors.shape[0], vectors.shape[2])
    for start in range(0, most, PROTECTED_BLOCK):
        block = vectors[:, :, start : min(start + PROTECTED_BLOCK, most)]
        there = torch.arange(start, start + block.shape[2], device=vectors.device) < protected[:, None]
        cosines = torch.bmm(block.transpose(1, 2), vectors).round_().masked_fill_(~there[:, :, None], 0.0)
        torch.maximum(best, cosines.amax(1), out=best)
    return best


def _greedy(left: torch.Tensor, best: torch.Tensor, vectors: torch.Tensor, steps: int, lambda_: float) -> torch.Tensor:
    """(C, steps) int64 picks of highest gain left - lambda best, the first of equals; left and best (C, w) change.

    vectors (C, d, w).
    """
    picks = torch.empty(len(left), steps, dtype=torch.int64, device=left.device)
    gains = torch.empty_like(left)
    row = torch.arange(len(left), device=left.device)
    for step in range(steps):
        torch.add(left, best, alpha=-lambda_ / GRID, out=gains)
        pick = gains.argmax(-1)
        picks[:, step] = pick
        left[row, pick] = -torch.inf
        cosines = torch.bmm(vectors[row, :, pick][:, None], vectors)[:, 0]
        torch.maximum(best, cosines.round_(), out=best)
    return picks


def _lowest_kept(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(B, K) the counts-th highest score of each cell (B, K, L); +inf where nothing is kept."""
    if not scores.shape[-1]:
        return scores.new_full(counts.shape, torch.inf)
    lowest = scores.sort(dim=-1, descending=True).values.gather(-1, (counts - 1).clamp(min=0)[..., None])[..., 0]
    return lowest.masked_fill(counts == 0, torch.inf)
