"""One compression of a cache: score every entry, allocate the budget, select what stays, let go of the rest."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import torch

from data import BadInput
from eviction.attention import Queries
from eviction.basis import fit
from eviction.budget import Account
from eviction.method import (
    Allocation,
    Allocator,
    Cells,
    ContextAndQuestionRows,
    ContextRows,
    Reconstruction,
    Scope,
    Score,
    Selector,
    State,
)
from eviction.ragged import Padded, Page, RaggedCache, RaggedLayer
from eviction.rotary import Rotary

SCOPES = get_args(Scope)

AnyRows = ContextRows | ContextAndQuestionRows


@dataclass(frozen=True)
class Method:
    """The four parts; score None evicts nothing."""

    score: Score | None
    allocator: Allocator
    selector: Selector
    state: State

    def __post_init__(self) -> None:
        """Raises BadInput for a scope that there is not."""
        for part in (self.allocator, self.selector):
            if part.scope not in SCOPES:
                raise BadInput(f"{part.name}: scope {part.scope!r}: expected {' or '.join(SCOPES)}")

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
    anchored: torch.Tensor | None = None  # (B, slots) bool, what stays of the answer whatever its score
    _scores: dict[int, torch.Tensor] = field(default_factory=dict)  # of the held entries, cell by cell
    _rows: dict[int, AnyRows] = field(default_factory=dict)  # latest of the chunk before, by layer
    _latest: dict[int, AnyRows] = field(default_factory=dict)  # rows for the selector, of the pass at hand
    _side_by_side: tuple[list[Page], Cells, Padded] | None = None  # the layer last looked at, as long as it holds that

    def forget(self) -> None:
        """Forget the text at hand."""
        self._scores.clear()
        self._rows.clear()
        self._latest.clear()
        self._side_by_side = None
        self.pinned, self.anchored = (), None

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
        need = self._rows_needed(number)
        if need is None:
            self.weigh(number, rows, more_to_come=True)
            self._scores.pop(number)
            self._latest.pop(number, None)
        elif need:
            began = self._clock()
            self._needed(number, rows, need, more_to_come=True)
            self.seconds += self._clock() - began

    def weigh(self, number: int, rows: AnyRows, more_to_come: bool) -> None:
        """Score layer `number`; rows are those of this pass, and the score may need earlier ones.

        Entries about to leave the layer's window are still there: the rows' weights went to them, too. more_to_come:
        another chunk of the same text follows. Raises BadInput for NaN and for a score of another shape.
        """
        began = self._clock()
        score, layer = self.method.score, self.cache.layers[number]
        assert score is not None
        cells, held = self._cells(number, rows.queries.shape[0])
        rows = self._needed(number, rows, self._rows_needed(number), more_to_come)
        if self.method.selector.rows_needed:
            self._latest[number] = rows.last(self.method.selector.rows_needed)
        need = score.rows_needed(cells.budget)
        scores = score(cells, rows if need is None else rows.last(need))
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
        if self.anchored is not None:
            slots = held.slots.view(scores.shape).long()
            stays = self.anchored.to(slots.device).gather(1, slots.clamp(min=0).flatten(1)).view_as(slots)
            scores = scores.masked_fill(stays & (slots >= 0), torch.inf)
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
            cells.append(replace(mine, rows=self._latest.pop(number, None)))
            candidates.append(held)
            scores.append(spread)
        self._side_by_side = None
        counts = self._allocate(cells, scores, due)
        made = 0
        if counts is not None:
            selector, state = self.method.selector, self.method.state
            pooled = [self._pooled(*layer) for layer in zip(cells, scores, counts, strict=True)]
            picked = [count if some is None else count - some for count, some in zip(counts, pooled, strict=True)]
            kept = selector(cells, scores, picked)
            for keep, mine, count in zip(kept, cells, picked, strict=True):
                where = f"selector {selector.name}: layer {mine.layer}"
                if keep.shape != mine.held.shape or keep.dtype != torch.bool:
                    raise BadInput(
                        f"{where}: expected bool {tuple(mine.held.shape)}, got {keep.dtype} {tuple(keep.shape)}"
                    )
                if bool((keep & ~mine.held).any()) or not torch.equal(keep.sum(-1), count):
                    raise BadInput(f"{where}: kept other entries or counts than it may")
            for keep, mine, held, count, some in zip(kept, cells, candidates, counts, pooled, strict=True):
                layer, keep = self.cache.layers[mine.layer], keep.flatten(0, 1)
                if layer.storage == "masked":
                    layer.hide(held, keep)
                else:
                    some = None if some is None else some.flatten()
                    layer.hold(state.page(held, keep, count.flatten().tolist(), some))
                made += layer.nbytes
        for mine, held in zip(cells, candidates, strict=True):
            made += self._code(self.cache.layers[mine.layer], held)
        if made:
            self.peak = max(self.peak, made + sum(held.copied for held in candidates))
        self.seconds += self._clock() - began

    def settle(self) -> int:
        """A prompt was read: it is held in the method's state even if nothing was evicted; bytes of passing copies."""
        waiting, most = [layer for layer in self.cache.layers if self._rank(layer) is not None], 0
        if not waiting:
            return 0
        began = self._clock()
        for layer in waiting:
            held = layer.candidates()
            most = max(most, self._code(layer, held) + held.copied)
        self.seconds += self._clock() - began
        return most

    def _rank(self, layer: RaggedLayer) -> int | None:
        """In how many numbers the values of a layer will be coded; None: they are already, or will not be."""
        if layer.basis is not None or self.method.score is None or not layer.pages:
            return None
        return self.method.state.value_rank(layer.pages[0].values.shape[-1])

    def _code(self, layer: RaggedLayer, held: Padded) -> int:
        """Fit the basis of a layer that is to have one to what it held, and code what it holds; bytes of codes."""
        rank = self._rank(layer)
        if rank is None:
            return 0
        layer.code(fit(held.values, held.lengths, rank))
        return sum(page.values.nbytes for page in layer.pages)

    def _pooled(self, cells: Cells, scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
        """(B, K) how many of the entries that stay are to stand for others; None: none."""
        pooled = self.method.state.pooled(counts, cells.lengths)
        if pooled is None or (not self.pinned and self.anchored is None):
            return pooled
        # a pinned prompt and what is anchored are held exactly, and a prompt is picked last among what is protected
        protected = (scores == torch.inf).sum(-1)
        return torch.minimum(pooled, (counts - protected).clamp(min=0))

    def _allocate(
        self, cells: Sequence[Cells], scores: Sequence[torch.Tensor], due: Sequence[bool] | None
    ) -> list[torch.Tensor] | None:
        """Per layer (B, K) entries that stay, or None if all may; raises the scores of an allocator's recent floor."""
        lengths = [mine.lengths for mine in cells]
        seen = cells[0].seen
        batch = len(seen)
        rounds = [None] * batch if due is None else self.account.rounds(batch)
        sequences = zip(seen, self.extra(batch), rounds, strict=True)
        budgets = [self.account.layer_limits(*sequence) for sequence in sequences]
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
            if not isinstance(allocation, Allocation) or len(allocation.counts) != len(cells):
                name, got = self.method.allocator.name, type(allocation).__name__
                raise BadInput(f"allocator {name}: returned {got}: expected an Allocation with counts of every layer")
            layers = zip(cells, counts, allocation.counts, scores, lengths, strict=True)
            for mine, count, allocated, score, length in layers:
                self._check_count(allocated, length[b])
                count[b] = allocated
                self._check_pinned(b, score, allocated)
                entry = torch.arange(score.shape[-1], device=score.device)
                latest = (entry >= length[b][:, None] - allocation.recent) & (entry < length[b][:, None])
                score[b] = score[b].masked_fill(latest, torch.inf)
                if self.pinned:
                    score[b] = _prompt_first(score[b], mine.positions[b] < self.pinned[b], allocated)
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
        values, mass = layer.values_of(held), held.mass
        if values is not held.values:
            held = replace(held, copied=held.copied + values.nbytes)
        kv_heads, longest = self.cache.shapes[number].kv_heads, held.keys.shape[1]
        cells = Cells(
            layer=number,
            n_layers=len(self.cache.layers),
            keys=held.keys.view(batch, kv_heads, longest, held.keys.shape[-1]),
            values=values.view(batch, kv_heads, longest, values.shape[-1]),
            positions=padding.positions(held.slots.view(batch, kv_heads, longest)),
            seen=padding.tokens,
            budget=self._budget(number),
            rotary=self.rotary[number],
            output_weight=self.output_weights[number],
            memory=layer.memory,
            pinned=self.pinned,
            log_mass=None if mass is None else mass.float().log().view(batch, kv_heads, longest),
        )
        self._side_by_side = list(layer.pages), cells, held
        return cells, held

    def _budget(self, number: int) -> int:
        """Average entries of a KV head of the layer, for the longest sequence."""
        return self.account.layer_budgets(max(self.cache.padding.tokens))[number]

    def _rows_needed(self, number: int) -> int | None:
        """How many of the latest query rows the score and the selector read; None: all of the pass."""
        assert self.method.score is not None
        need = self.method.score.rows_needed(self._budget(number))
        return None if need is None else max(need, self.method.selector.rows_needed)

    def _needed(self, number: int, rows: AnyRows, need: int | None, more_to_come: bool) -> AnyRows:
        """The rows that score and selector read: the pass's own and, in a text read in chunks, the latest before it."""
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


def _prompt_first(scores: torch.Tensor, prompt: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Scores (K, L) that protect no more than counts (K,) entries: the prompt's, then the latest of the others.

    prompt (K, L) bool: where the prompt's entries are, which fit. Protected entries of which too many are left would
    otherwise stay the latest first, and the prompt is the earliest.
    """
    others = (scores == torch.inf) & ~prompt
    excess = (scores == torch.inf).sum(-1) - counts
    return scores.masked_fill(others & (others.cumsum(-1) <= excess[:, None]), 0.0)


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
