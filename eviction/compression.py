"""One compression of a cache: score every entry, allocate the budget, select what stays, let go of the rest."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from data import BadInput
from eviction.attention import Queries
from eviction.budget import Account
from eviction.method import Allocator, Cells, ContextAndQuestionRows, ContextRows, Reconstruction, Score, Selector
from eviction.ragged import Padded, Page, RaggedCache, unique_bytes
from eviction.rotary import Rotary

AnyRows = ContextRows | ContextAndQuestionRows


@dataclass(frozen=True)
class Method:
    """The three parts; score None evicts nothing."""

    score: Score | None
    allocator: Allocator
    selector: Selector

    @property
    def by_layer(self) -> bool:
        """Whether a layer can be evicted from as soon as it was computed."""
        return self.allocator.scope == "layer" and self.selector.scope == "layer"


@dataclass
class Compressor:
    """Applies a method to a cache, layer by layer as they are computed or all at once at the end of a pass.

    rotary, output_weights: of each layer. seconds: spent here so far. peak: the most bytes of transient copies since it
    was last set.
    """

    method: Method
    cache: RaggedCache
    account: Account
    rotary: Sequence[Rotary | None]
    output_weights: Sequence[torch.Tensor | None]
    device: torch.device
    seconds: float = 0.0
    peak: int = 0
    pinned: tuple[int, ...] = ()  # per sequence, tokens of the prompt, which stay whatever their score
    on_top: bool = False  # whether pinned tokens are on top of the budget
    _scores: dict[int, torch.Tensor] = field(default_factory=dict)  # of the held entries, cell by cell
    _rows: dict[int, AnyRows] = field(default_factory=dict)  # latest of the chunk before, by layer
    _side_by_side: tuple[list[Page], Cells, Padded] | None = None  # the layer last looked at, as long as it holds that

    def forget(self) -> None:
        """Forget the text at hand."""
        self._scores.clear()
        self._rows.clear()
        self._side_by_side = None
        self.pinned = ()

    def extra(self, batch: int) -> tuple[int, ...]:
        """Entries per KV head that each sequence may hold on top of its budget."""
        return self.pinned if self.on_top and self.pinned else (0,) * batch

    def rows(self) -> dict[int, AnyRows]:
        """The query rows kept, to be put back by `put_back`."""
        return dict(self._rows)

    def reorder(self, order: torch.Tensor) -> None:
        """Sequence b becomes the former sequence order[b]."""
        self._rows = {number: rows.sequences(order) for number, rows in self._rows.items()}
        if self.pinned:
            self.pinned = tuple(self.pinned[b] for b in order.tolist())

    def put_back(self, rows: dict[int, AnyRows]) -> None:
        """Keep these query rows instead."""
        self._rows = dict(rows)

    def show(self, number: int, rows: AnyRows, spans: Sequence[tuple[int, int]]) -> None:
        """A pass of layer `number` in which parts of the context were read again."""
        began = self._clock()
        score = self.method.score
        assert isinstance(score, Reconstruction)
        cells, _ = self._cells(number, rows.queries.shape[0])
        score.observe(cells, rows, spans)
        self.seconds += self._clock() - began

    def observe(self, number: int, rows: AnyRows) -> None:
        """A pass of layer `number` that nothing is evicted after, and a later one may need its rows.

        A score that reads every row is given them now, and what it says is not used.
        """
        assert self.method.score is not None
        need = self.method.score.rows_needed(self._budget(number))
        if need is None:
            self.weigh(number, rows, more_to_come=True)
            self._scores.pop(number)
        elif need:
            began = self._clock()
            self._needed(number, rows, need, more_to_come=True)
            self.seconds += self._clock() - began

    @property
    def row_bytes(self) -> int:
        """Bytes of the query rows kept from one chunk to the next."""
        kept = [tensor for rows in self._rows.values() for tensor in (rows.queries, rows.positions, rows.first)]
        return unique_bytes(kept)

    def weigh(self, number: int, rows: AnyRows, more_to_come: bool) -> None:
        """Score layer `number`; rows are those of this pass, and the score may need earlier ones.

        Entries about to leave the layer's window are still there: the rows' weights went to them, too. more_to_come:
        another chunk of the same text follows. Raises BadInput for NaN and for a score of another shape.
        """
        began = self._clock()
        score, layer = self.method.score, self.cache.layers[number]
        assert score is not None
        cells, held = self._cells(number, rows.queries.shape[0])
        rows = self._needed(number, rows, score.rows_needed(cells.budget), more_to_come)
        scores = score(cells, rows)
        if not isinstance(scores, torch.Tensor) or scores.shape != cells.positions.shape:
            got = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
            raise BadInput(f"score {score.name}: {got}: expected a tensor {tuple(cells.positions.shape)}")
        scores = scores.float()
        wrong = cells.held & scores.isnan()
        if bool(wrong.any()):
            sequence, kv_head, entry = torch.nonzero(wrong)[0].tolist()
            position = int(cells.positions[sequence, kv_head, entry])
            raise BadInput(f"score {score.name} is NaN at layer {number}, KV head {kv_head}, position {position}")
        if self.pinned:
            prompt = torch.tensor(self.pinned, device=scores.device)[:, None, None]
            scores = scores.masked_fill(cells.positions < prompt, torch.inf)
        oldest = 0 if layer.window is None else max(0, layer.seen - layer.window + 1)
        self._scores[number] = scores[held.slots.view(scores.shape) >= oldest]
        self.peak = max(self.peak, held.copied)
        self.seconds += self._clock() - began

    def decide(self, numbers: Iterable[int], batch: int, due: Sequence[bool] | None) -> None:
        """Allocate, select and evict in the layers of these numbers, from the scores of what each still holds.

        due: which sequences are evicted from; None: all. Raises BadInput for what an allocator or selector must not
        return.
        """
        began = self._clock()
        cells, candidates, scores = [], [], []
        for number in numbers:
            mine, held = self._cells(number, batch)
            spread = torch.full(mine.positions.shape, -torch.inf, device=mine.positions.device)
            spread[mine.held] = self._scores.pop(number)
            cells.append(mine)
            candidates.append(held)
            scores.append(spread)
        self._side_by_side = None
        counts = self._allocate(cells, scores, due)
        if counts is not None:
            selector = self.method.selector
            kept = selector(cells, scores, counts)
            for keep, mine, count in zip(kept, cells, counts, strict=True):
                where = f"selector {selector.name}: layer {mine.layer}"
                if keep.shape != mine.held.shape or keep.dtype != torch.bool:
                    raise BadInput(
                        f"{where}: expected bool {tuple(mine.held.shape)}, got {keep.dtype} {tuple(keep.shape)}"
                    )
                if bool((keep & ~mine.held).any()) or not torch.equal(keep.sum(-1), count):
                    raise BadInput(f"{where}: kept other entries or counts than it may")
            made = 0
            for keep, mine, held, count in zip(kept, cells, candidates, counts, strict=True):
                layer = self.cache.layers[mine.layer]
                layer.evict(held, keep.flatten(0, 1), count.flatten().tolist())
                made += layer.nbytes
            self.peak = max(self.peak, made + sum(held.copied for held in candidates))
        self.seconds += self._clock() - began

    def _allocate(
        self, cells: Sequence[Cells], scores: Sequence[torch.Tensor], due: Sequence[bool] | None
    ) -> list[torch.Tensor] | None:
        """Per layer (B, K) entries that stay, or None if all may; raises the scores of an allocator's recent floor."""
        lengths = [mine.lengths for mine in cells]
        seen = cells[0].seen
        budgets = [self.account.layer_limits(n, more) for n, more in zip(seen, self.extra(len(seen)), strict=True)]
        limits = [sum(mine.keys.shape[1] * budget[mine.layer] for mine in cells) for budget in budgets]
        if all(sum(int(x[b].sum()) for x in lengths) <= limit for b, limit in enumerate(limits)):
            return None
        counts = [length.clone() for length in lengths]
        for b, budget in enumerate(budgets):
            if due is not None and not due[b]:
                continue
            allocation = self.method.allocator(
                [score[b] for score in scores],
                [length[b] for length in lengths],
                [budget[mine.layer] for mine in cells],
                cells[0].layer,
                len(self.cache.layers),
            )
            for count, allocated, score, length in zip(counts, allocation.counts, scores, lengths, strict=True):
                self._check_count(allocated, length[b])
                count[b] = allocated
                self._check_pinned(b, score, allocated)
                entry = torch.arange(score.shape[-1], device=score.device)
                latest = (entry >= length[b][:, None] - allocation.recent) & (entry < length[b][:, None])
                score[b] = score[b].masked_fill(latest, torch.inf)
        return counts

    def _check_count(self, allocated: torch.Tensor, length: torch.Tensor) -> None:
        """Raises BadInput unless these are whole numbers between none and all of what each KV head holds."""
        where = f"allocator {self.method.allocator.name}"
        if not isinstance(allocated, torch.Tensor) or allocated.dtype != torch.int64 or allocated.shape != length.shape:
            raise BadInput(f"{where}: expected an int64 tensor {tuple(length.shape)} a layer, one count a KV head")
        if bool(((allocated < 0) | (allocated > length)).any()):
            raise BadInput(f"{where}: counts {allocated.tolist()} where {length.tolist()} entries are held")

    def _check_pinned(self, sequence: int, score: torch.Tensor, allocated: torch.Tensor) -> None:
        if self.pinned and bool(
            ((score[sequence] == torch.inf).sum(-1).clamp(max=self.pinned[sequence]) > allocated).any()
        ):
            raise BadInput(
                f"allocator {self.method.allocator.name} gives a KV head fewer entries than the pinned prompt of"
                f' {self.pinned[sequence]} tokens: expected another allocator, or prompt="free"'
            )

    def _cells(self, number: int, batch: int) -> tuple[Cells, Padded]:
        layer, padding = self.cache.layers[number], self.cache.padding
        if self._side_by_side is not None and self._side_by_side[0] == layer.pages:
            return self._side_by_side[1:]
        held = layer.candidates()
        kv_heads, longest = self.cache.shapes[number].kv_heads, held.keys.shape[1]
        cells = Cells(
            layer=number,
            n_layers=len(self.cache.layers),
            keys=held.keys.view(batch, kv_heads, longest, held.keys.shape[-1]),
            values=held.values.view(batch, kv_heads, longest, held.values.shape[-1]),
            positions=padding.positions(held.slots.view(batch, kv_heads, longest)),
            seen=padding.tokens,
            budget=self._budget(number),
            rotary=self.rotary[number],
            output_weight=self.output_weights[number],
            memory=layer.memory,
            pinned=self.pinned,
        )
        self._side_by_side = list(layer.pages), cells, held
        return cells, held

    def _budget(self, number: int) -> int:
        """Average entries of a KV head of the layer, for the longest sequence."""
        return self.account.layer_budgets(max(self.cache.padding.tokens))[number]

    def _needed(self, number: int, rows: AnyRows, need: int | None, more_to_come: bool) -> AnyRows:
        """The rows that a score reads: the pass's own and, within a text read in chunks, the latest before it."""
        before = self._rows.pop(number, None)
        if need is None:
            return rows
        rows = rows.last(need)
        if before is not None and rows.queries.shape[2] < need:
            rows = before.followed_by(rows).last(need)
        if more_to_come and need:
            self._rows[number] = rows.copy()
        return rows

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def no_rows(batch: int, device: torch.device) -> ContextRows:
    """Rows for a score that reads none."""
    none = torch.empty(batch, 0, dtype=torch.int64, device=device)
    return ContextRows(torch.empty(batch, 1, 0, 1, device=device), none, none, 1.0, None)


def rows_of(
    query: torch.Tensor,
    queries: Queries,
    cache: RaggedCache,
    kind: type[ContextRows] | type[ContextAndQuestionRows],
    scale: float,
    softcap: float | None,
) -> AnyRows:
    """The query rows of a pass at their true positions: query (B, H, T, d)."""
    padding = cache.padding
    positions = padding.positions(queries.slots.expand(query.shape[0], -1))
    slots = queries.first.clamp(max=padding.slots - 1)
    first = padding.positions(slots)
    if padding.real is not None:  # a slot of padding has the position of the token before it: the next one is seen
        first = first + (~padding.real.gather(1, slots)).long()
    if queries.real is not None:
        positions = torch.where(queries.real, positions, -1)
    return kind(query, positions, first, scale, softcap)
