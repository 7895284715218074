"""Compactor: keys that stand out, and what tokens nearby attend to when they may look ahead."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn import functional

from data import BadInput
from eviction.carried import carried, carry
from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score
from eviction.options import check_whole
from eviction.rotary import Rotary

PADDED_LOGIT = -1e-9  # what the published code gives padded keys where it means to mask them
SMALLEST_DEVIATION = 1e-6  # standard deviations below it count as it


@dataclass(frozen=True)
class Compactor(Score):
    """blending z(leverage) + z(attention); the first `sinks` and the latest `recent` tokens are protected.

    Only the entries that are not protected count in what follows.
    leverage: x_j^T (X^T X + ridge I)^-1 x_j, X the keys of the KV head before RoPE, centred over its entries, times a
    Gaussian matrix d -> `sketch` with entries of variance 1 / sketch.
    attention: tokens in chunks of `chunk`; in each, every token's queries attend to the entries of all of its tokens,
    later ones included; the softmax of q.k, summed over the rows of the chunk, averaged over the query heads of the
    group, times ||v_j||_2, average pooling of width 3 along the entries.
    z: less the mean, over the standard deviation (n - 1) of all KV heads of the layer together, at least 1e-6.
    blending None: the share removed, 1 - budget / tokens read, as kvpress has it.

    Two known quirks of the code, each a switch:
      scaled  False: logits are q.k, without the model's scale and soft-cap (its own kernels do the same); True: with
              both.
      padded  True: the last chunk is filled up with zeros, whose logits should have been masked and are -1e-9: the m
              padded keys take weight from every row, and the m padded queries give each entry of that chunk an equal
              share of m; False: the padding takes no part.

    In chunked prefill the sums of attention stay in cells.memory (8 bytes an entry), and so do the `recent` latest
    queries, which wait for the next pass: both are side data of the cache. Chunks of `chunk` begin anew in each pass,
    and the leverage is among what the cache holds by then. An entry whose token's pass was not seen has attention 0.
    The method is meant for prefill: with passes of one token its chunks have one token.

    Departures. The sketch is drawn from `seed` and the layer's number: the same in every run, pass and sequence (the
    code draws it anew). z is within each sequence (the code's is over the batch). Leverage and attention are in
    float64: the sketched matrix has rank min(d, sketch) or less, and unscaled logits are large. kvpress protects by
    the largest score, which ties; here protected entries come before all others. Its paper has another default of
    blending. Raises BadInput where the layer's rotary embedding is unknown.
    Source: arXiv 2507.08143; NVIDIA/kvpress 0.5.5, CompactorPress.
    """

    blending: float | None = None
    sketch: int = 48
    ridge: float = 0.01
    chunk: int = 256
    sinks: int = 8
    recent: int = 4
    scaled: bool = False
    padded: bool = True
    seed: int = 0

    name: ClassVar[str] = "compactor"
    source: ClassVar[str] = "Compactor (arXiv 2507.08143); NVIDIA/kvpress 0.5.5"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        for option, least in (("sketch", 1), ("chunk", 1), ("sinks", 0), ("recent", 0), ("seed", 0)):
            check_whole(f"score {self.name}", option, getattr(self, option), least)
        for option in ("scaled", "padded"):
            if not isinstance(getattr(self, option), bool):
                raise BadInput(f"score {self.name}: {option}={getattr(self, option)}: expected true or false")
        if not _finite(self.ridge) or self.ridge <= 0:
            raise BadInput(f"score {self.name}: ridge={self.ridge}: expected a finite number above 0")
        if self.blending is not None and not (_finite(self.blending) and self.blending >= 0):
            raise BadInput(f"score {self.name}: blending={self.blending}: expected a finite number, at least 0")

    def rows_needed(self, budget: int) -> None:
        """All of the pass."""
        return None

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32; +inf for protected entries. Adds the rows' attention to cells.memory."""
        if cells.rotary is None:
            raise BadInput(
                f"score {self.name}, layer {cells.layer}: needs the layer's rotary embedding, and the model has none"
                " that is known here"
            )
        protected = cells.held & ((cells.positions < self.sinks) | (cells.ages < self.recent))
        scored = cells.held & ~protected
        attention = self._attention(cells, rows)
        values = torch.linalg.vector_norm(torch.where(scored[..., None], cells.values.double(), 0.0), dim=-1)
        pooled = functional.avg_pool1d(torch.where(scored, attention * values, 0.0), 3, stride=1, padding=1)
        leverage = self._leverage(cells, cells.rotary, scored)
        scores = self._blending(cells) * _standardised(leverage, scored) + _standardised(pooled, scored)
        return torch.where(protected, torch.inf, scores.float())

    def _blending(self, cells: Cells) -> torch.Tensor:
        """(B, 1, 1) float64."""
        if self.blending is not None:
            shares = [self.blending] * len(cells.seen)
        else:
            shares = [1 - min(1.0, cells.budget / max(1, seen)) for seen in cells.seen]
        return torch.tensor(shares, dtype=torch.float64, device=cells.positions.device)[:, None, None]

    def _leverage(self, cells: Cells, rotary: Rotary, scored: torch.Tensor) -> torch.Tensor:
        """(B, K, L) float64."""
        there = scored[..., None]
        keys = torch.where(there, rotary.unrotate(cells.keys, cells.positions).double(), 0.0)
        centre = keys.sum(-2, keepdim=True) / scored.sum(-1).clamp(min=1)[..., None, None]
        drawn = _gaussian(self.seed, cells.layer, cells.keys.shape[1], cells.keys.shape[3], self.sketch)
        sketched = torch.where(there, keys - centre, 0.0) @ (drawn.to(keys.device) / math.sqrt(self.sketch))
        # eigenvectors and not a Cholesky factor: of large keys, the ridge is lost in the rounding of X^T X
        sizes, directions = torch.linalg.eigh(sketched.transpose(-1, -2) @ sketched)
        along = (sketched @ directions).square()
        found: torch.Tensor = (along / (sizes.clamp(min=0) + self.ridge)[..., None, :]).sum(-1)
        return found

    def _attention(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float64: column sums of each entry's chunk, of this pass and (in float32) of those before."""
        if "queries" in cells.memory:
            rows = replace(
                rows,
                queries=torch.cat([cells.memory["queries"], rows.queries], dim=2),
                positions=torch.cat([cells.memory["query_positions"].long(), rows.positions], dim=1),
                first=torch.cat([rows.first.new_zeros(cells.memory["query_positions"].shape), rows.first], dim=1),
            )
        waiting = rows.last(self.recent)
        sums = carried(cells, "attention").double() + self._column_sums(cells, rows)
        carry(cells, "attention", sums)
        cells.memory["queries"] = waiting.queries.clone()
        cells.memory["query_positions"] = waiting.positions.int()
        return sums

    def _column_sums(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float64: summed over the rows of each chunk, averaged over the group; 0 outside the pass."""
        device = cells.positions.device
        real = rows.positions >= 0
        end = torch.tensor(cells.seen, device=device) - self.recent
        begin = torch.where(real, rows.positions, max(cells.seen)).amin(1).clamp(min=self.sinks)
        counts = (end - begin).clamp(min=0)  # (B,)
        chunks = -(-int(counts.max()) // self.chunk)
        entry_of = _places(cells.positions, begin[:, None, None], counts[:, None, None], chunks * self.chunk)
        row_of = _places(rows.positions, begin[:, None], counts[:, None], chunks * self.chunk)
        sums = torch.zeros(cells.positions.shape, dtype=torch.float64, device=device)
        for number in range(chunks):
            part = slice(number * self.chunk, (number + 1) * self.chunk)
            missing = (part.stop - counts).clamp(min=0)
            last = (missing < self.chunk) & self.padded  # a sequence that ended before has no chunk here
            padding = torch.where(last, missing, 0)
            found = self._chunk(cells, rows, entry_of[..., part], row_of[..., part], padding)
            there = entry_of[..., part] >= 0
            sums = sums.scatter_add(-1, entry_of[..., part].clamp(min=0), torch.where(there, found, 0.0))
        return sums

    def _chunk(
        self,
        cells: Cells,
        rows: ContextRows | ContextAndQuestionRows,
        entry_of: torch.Tensor,
        row_of: torch.Tensor,
        padding: torch.Tensor,
    ) -> torch.Tensor:
        """(B, K, C) column sums of one chunk: entry_of (B, K, C), row_of (B, C) with -1 for none, padding (B,)."""
        there, real = entry_of >= 0, row_of >= 0
        heads, d = rows.queries.shape[1], rows.queries.shape[3]
        keys = cells.keys.gather(2, entry_of.clamp(min=0)[..., None].expand(-1, -1, -1, d)).double()
        queries = rows.queries.gather(2, row_of.clamp(min=0)[:, None, :, None].expand(-1, heads, -1, d)).double()
        logits = queries.unflatten(1, (cells.keys.shape[1], -1)) @ keys[:, :, None].transpose(-1, -2)
        if self.scaled:
            logits = logits * rows.scale
            if rows.softcap is not None:
                logits = torch.tanh(logits / rows.softcap) * rows.softcap
        seen = there[:, :, None, None] & real[:, None, None, :, None]
        padded = padding.double()[:, None, None]
        # all padded keys together are one more column
        column = (padded.log() + PADDED_LOGIT)[..., None, None].expand(*logits.shape[:-1], 1)
        weights = torch.softmax(torch.cat([logits.masked_fill(~seen, -torch.inf), column], dim=-1), dim=-1)[..., :-1]
        sums = torch.where(seen, weights, 0.0).sum(-2).mean(2)
        equal = there.sum(-1, keepdim=True) + padded * math.exp(PADDED_LOGIT)
        return sums + torch.where(padded > 0, padded / equal, 0.0)


def _places(positions: torch.Tensor, begin: torch.Tensor, counts: torch.Tensor, size: int) -> torch.Tensor:
    """(..., size) int64: which of the positions (..., L) is `begin` + i, for i below `counts`; -1 if none is."""
    slots = positions - begin
    slots = torch.where((positions >= 0) & (slots >= 0) & (slots < counts), slots, size)
    index = torch.arange(positions.shape[-1], device=positions.device).expand_as(slots)
    return slots.new_full((*slots.shape[:-1], size + 1), -1).scatter(-1, slots, index)[..., :-1]


def _gaussian(seed: int, layer: int, kv_heads: int, d: int, sketch: int) -> torch.Tensor:
    """(K, d, sketch) float64, standard normal, the same on every device."""
    generator = torch.Generator().manual_seed((seed << 16) + layer)
    return torch.randn(kv_heads, d, sketch, dtype=torch.float64, generator=generator)


def _standardised(numbers: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """(B, K, L): z over the scored entries of each sequence; 0 elsewhere."""
    count = scored.sum((1, 2), keepdim=True)
    mean = torch.where(scored, numbers, 0.0).sum((1, 2), keepdim=True) / count.clamp(min=1)
    centred = torch.where(scored, numbers - mean, 0.0)
    deviation = (centred.square().sum((1, 2), keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred / deviation.clamp(min=SMALLEST_DEVIATION)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
