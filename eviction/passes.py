"""Forward passes of a model over a cache that is evicted from: attend, store, evict, keep account."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from capture.attention import HARMLESS_TENSORS, attention_over_intervals, visible_intervals
from data import BadInput
from eviction.attention import Queries, queries_of, ragged_attention
from eviction.budget import Account, Budget
from eviction.cadence import Decode, refuse_pinned
from eviction.compression import AnyRows, Compressor, Method, no_rows, rows_of
from eviction.ledger import Ledger, Phase, Step
from eviction.method import Anchors, ContextAndQuestionRows, ContextRows, Reconstruction, Replay, Schedule, named
from eviction.ragged import LayerShape, LayerState, Padding, RaggedCache, Storage, padded, page_of
from eviction.rotary import rotary_of
from eviction.support import CACHE_NAMES, output_weight_of

NOT_WRITTEN = -1  # stands for the id of a token that the model was given


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """All that a question may change; shares every tensor."""

    layers: tuple[LayerState, ...]
    padding: Padding
    rows: dict[int, AnyRows]
    pinned: tuple[int, ...]
    account: tuple[list[int], list[int]]
    written: torch.Tensor | None
    decoded: int
    batch: int


class Passes:
    """What a run's model does with its cache, pass by pass.

    `before`, `mask`, `attend` and `after` are what the model calls: at the start of a pass, for its mask, in every
    layer, and at the end. broken: what went wrong in a pass that did not end, or "". batch: sequences in the cache.
    snapshots: what the open questions will fall back to.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Sequence[LayerShape],
        method: Method,
        budget: Budget | None,
        storage: Storage,
        decode: Decode | None,
    ) -> None:
        self.cache, self.ledger = RaggedCache(shapes, storage), Ledger()
        self._model, self._budget, self._decode, self._method = model, budget, decode, method
        self._schedule = named(Schedule, "constant" if decode is None else decode.schedule)
        self._anchors = None if decode is None or decode.anchors is None else named(Anchors, decode.anchors)
        self._account = Account(budget, shapes, method.allocator.extra, self._schedule)
        rotary = [rotary_of(model, layer) for layer in range(len(shapes))]
        weights = [output_weight_of(model, layer) for layer in range(len(shapes))]
        on_top = decode is not None and decode.prompt == "on_top"
        self.compressor = Compressor(method, self.cache, self._account, rotary, weights, model.device, on_top=on_top)
        self.snapshots: list[_Snapshot] = []
        self.broken, self.batch = "", 1
        self._context_alone = False  # whether what was read is a context, which questions are to follow
        self.cache.followers.append(self._reorder)
        self._forget()

    def _forget(self) -> None:
        """Forget what is about the pass or the context at hand."""
        layers = len(self.cache.layers)
        self._context: type[ContextRows] | type[ContextAndQuestionRows] | None = None  # what is being read
        self.more_to_come = False
        self._decoded = 0  # passes since the prompt
        self._asked = False  # whether the next pass feeds what the model did not write, however few tokens
        self._coming: torch.Tensor | None = None  # what the pass at hand adds to `written`
        self._written: torch.Tensor | None = None  # (B, n) int32, all fed after the prompt: ids, or -1 if not written
        self._text: list[torch.Tensor] = []  # the prompt's token ids, for scores that have it read again
        self._next = torch.zeros(1, dtype=torch.int64)  # what position the model gives the token after the prompt
        self._replay: list[tuple[int, int]] | None = None  # the part of the prompt that is being read again
        self._masks: dict[int, tuple[torch.Tensor, Queries]] = {}
        self.compressor.forget()
        self._compressing = self._observing = self._first_pass = self._open = False
        self._due: tuple[bool, ...] | None = None  # which sequences the pass evicts from; None: all
        self._used: list[tuple[int, ...]] = [()] * layers
        self._stored = [layer.nbytes for layer in self.cache.layers]
        self._tokens = self._peak = self._beside = 0

    def reset(self) -> None:
        """Forget the sequence; the ledger stays."""
        self.cache.reset()
        self._account.reset()
        self.snapshots.clear()
        self.broken, self._context_alone = "", False
        self._forget()

    @property
    def bytes(self) -> int:
        """Bytes of the storages behind all keys and values, what an open question will fall back to included."""
        return self.cache.storages(self._fallbacks)

    @property
    def side_bytes(self) -> int:
        """Bytes of everything else that is kept for the cache: slots, padding, what the score remembers, query rows."""
        written = [self._written, *(was.written for was in self.snapshots)]
        rows = [self.compressor.rows(), *(was.rows for was in self.snapshots)]
        beside = [tensor for by_layer in rows for mine in by_layer.values() for tensor in mine.tensors]
        beside += [text for text in written if text is not None]
        beside += [tensor for was in self.snapshots for tensor in was.padding.tensors]
        return self.cache.side_data(self._fallbacks, beside)

    def check_whole(self) -> None:
        """Raises BadInput after a pass that did not end."""
        if self.broken:
            raise BadInput(f"the cache is not whole after an error ({self.broken}): call run.reset()")

    # What a question may change

    @contextmanager
    def undone(self) -> Iterator[None]:
        """What the passes inside do to the cache and to what is kept beside it is undone at the end."""
        layers, compressor = self.cache.layers, self.compressor
        self.snapshots.append(
            _Snapshot(
                tuple(layer.state() for layer in layers),
                self.cache.padding.copy(),
                compressor.rows(),
                compressor.pinned,
                self._account.state(),
                self._written,
                self._decoded,
                self.batch,
            )
        )
        for layer in layers:
            layer.seal()
        try:
            yield
        finally:
            if self.snapshots:  # reset() inside leaves none
                was = self.snapshots.pop()
                self.broken = ""
                self._forget()
                self.cache.padding, self._decoded, self.batch = was.padding, was.decoded, was.batch
                self._written = was.written
                self._account.put_back(was.account)
                compressor.put_back(was.rows)
                compressor.pinned = was.pinned
                self._restore(was.layers)

    def _restore(self, states: Sequence[LayerState]) -> None:
        for number, (layer, state) in enumerate(zip(self.cache.layers, states, strict=True)):
            layer.restore(state)
            self._account.hold(number, layer.seen_lengths)
            self._stored[number] = layer.nbytes

    @property
    def _fallbacks(self) -> list[LayerState]:
        """What open questions will fall back to."""
        return [state for was in self.snapshots for state in was.layers]

    # What is read

    @contextmanager
    def reading(self, kind: type[ContextRows] | type[ContextAndQuestionRows]) -> Iterator[None]:
        """The passes inside read one text, chunk by chunk; whoever feeds them sets more_to_come before each.

        The first with more_to_come False ends it: whatever is fed after it, inside too, is no part of the text.
        """
        self._context, self.more_to_come = kind, False
        try:
            yield
        finally:
            self._context = None

    @contextmanager
    def answering(self) -> Iterator[None]:
        """The first pass inside feeds what is asked, which the model did not write."""
        self._asked = True
        try:
            yield
        finally:
            self._asked = False

    def repeat(self, times: int, of_a_context: bool) -> None:
        """Hold every sequence `times` times, for beams or several answers; a context alone only in a question."""
        if times == 1:
            return
        if of_a_context and not self.snapshots:
            raise BadInput("beams or several answers after a context: expected inside run.question()")
        order = torch.arange(self.batch, device=self._model.device).repeat_interleave(times)
        self.batch *= times
        self.cache.reorder_cache(order)

    def repeat_undone(self, times: int) -> None:
        """Hold again every sequence once."""
        if times > 1:
            order = torch.arange(0, self.batch, times, device=self._model.device)
            self.batch //= times
            self.cache.reorder_cache(order)

    def _reorder(self, order: torch.Tensor) -> None:
        """The cache's sequences were reordered; so is what is kept beside it."""
        self.compressor.reorder(order)
        self._account.reorder(order.tolist())
        self._text = [fed[order.to(fed.device)] for fed in self._text]
        if self._written is not None:
            self._written = self._written[order.to(self._written.device)]
        for number, layer in enumerate(self.cache.layers):
            self._account.hold(number, layer.seen_lengths)
            self._stored[number] = layer.nbytes

    # The model's side

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        mask_function: Any = causal_mask_function,
        attention_mask: torch.Tensor | None = None,
        **other: Any,
    ) -> torch.Tensor:
        """The registered mask: intervals of slots. Remembered for the layers, which are handed it one by one."""
        if attention_mask is not None and attention_mask.shape != (batch_size, kv_length):
            raise BadInput(
                f"attention_mask {tuple(attention_mask.shape)}: expected ({batch_size}, {kv_length}), everything read"
                " so far and the new tokens"
            )
        padded = attention_mask is not None and not bool(attention_mask.all())
        mask = visible_intervals(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            mask_function=mask_function,
            # padding that was read before is not stored: only in the first pass is it among the keys
            attention_mask=attention_mask if q_offset == 0 else None,
            **other,
        )
        if padded and q_offset > 0 and attention_mask is not None:
            nothing = torch.tensor([kv_length, -1], device=mask.device)
            mask = torch.where(attention_mask[:, None, q_offset:, None], mask, nothing)
        plain = mask_function is causal_mask_function and not padded
        queries = queries_of(mask, q_offset, plain)
        if queries.real is not None and bool((queries.real.any(1) & ~queries.real[:, -1]).any()):
            raise BadInput("attention_mask: padding after tokens: expected it on the left")
        self._masks[id(mask)] = mask, queries
        return mask

    def before(self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pass begins: it runs on our cache. A model given none, or an empty one, begins a new sequence."""
        given = next((kwargs.pop(name) for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        for name in CACHE_NAMES:
            kwargs.pop(name, None)
        if kwargs.get("use_cache") is False:
            raise BadInput("use_cache=False inside evict(): there would be no cache to evict from")
        if given is not self.cache:
            if given is not None and given.get_seq_length() > 0:
                raise BadInput("the model was given a cache that is not the run's: pass cache=run.cache")
            if self.snapshots:
                raise BadInput("inside question() the model must go on: use run.generate, or pass cache=run.cache")
            if self._context_alone:
                raise BadInput(
                    "the context read by run.prefill would be forgotten: go on with run.generate or cache=run.cache, or"
                    " call run.reset() first"
                )
            if self.cache.padding.slots > 0:
                self.reset()
        self.check_whole()
        kwargs["cache"], kwargs["use_cache"] = self.cache, True
        self.broken = "a forward pass did not end"
        self._open = True
        self._first_pass = self.cache.padding.slots == 0
        fed = _fed(args, kwargs)
        if not self._first_pass and fed.shape[0] != self.batch:
            raise BadInput(f"{fed.shape[0]} sequences fed to a cache of {self.batch}: they must be the same")
        prompt = self._first_pass or self._context is not None
        self._coming = None if prompt or self._anchors is None else _ids_written(fed, self._asked)
        self._asked = False
        self._compressing = self._observing = False
        if self._replay is None and self._method.score is not None:
            self._due = None if prompt else self._exceeding(fed.shape[1])
            self._compressing = self._evicts_prompt if prompt else any(self._due or ())
            self._observing = self._decode is not None and not self._compressing
        if prompt and self._reconstructs and self._replay is None:
            if fed.is_floating_point():
                raise BadInput("a score that has the prompt read again needs token ids, not inputs_embeds")
            self._text.append(fed)
            given_at = kwargs.get("position_ids")
            end = self.cache.padding.slots + fed.shape[1]
            self._next = torch.tensor([end], device=fed.device) if given_at is None else given_at[..., -1] + 1
        self._masks.clear()
        self._used = [()] * len(self.cache.layers)
        self._stored = [layer.nbytes for layer in self.cache.layers]
        self._beside = self.bytes - sum(self._stored)  # what only an open question will fall back to
        self._peak = self._beside + sum(self._stored)
        self.compressor.peak = 0
        return args, kwargs

    @property
    def _evicts_prompt(self) -> bool:
        """Whether a pass over the prompt ends with an eviction."""
        return not self._reconstructs and (self._decode is None or self._decode.prompt == "free")

    @property
    def _reconstructs(self) -> bool:
        return isinstance(self._method.score, Reconstruction)

    def _exceeding(self, coming: int) -> tuple[bool, ...] | None:
        """Which sequences the pass that begins, of `coming` tokens after the prompt, evicts from; None: from none."""
        if self._decode is None:
            return None
        self._decoded += 1
        if self._decoded % self._decode.every:
            return None
        seen = self.cache.padding.tokens
        return self._account.exceeding(seen, coming, self.compressor.extra(self.batch), self._decode.slack)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        attended: torch.Tensor | None = None,
        **other: object,
    ) -> tuple[torch.Tensor, None]:
        """The registered attention function: attend, store, and evict where the layer can be decided alone.

        attended: what to return for the first pass over a text, where a replayed pass does not need it computed.
        """
        number = int(module.layer_idx)  # type: ignore[arg-type]  # every attention module of transformers has it
        layer, shape = self.cache.layers[number], self.cache.shapes[number]
        unknown = sorted(x for x, y in other.items() if isinstance(y, torch.Tensor) and x not in HARMLESS_TENSORS)
        if unknown:
            raise BadInput(f"layer {number}: attention takes {', '.join(unknown)}, which is not supported")
        if not self._open:
            raise BadInput(f"{type(self._model).__name__}: its attention runs outside its decoder: it is not supported")
        if layer.incoming is None or layer.incoming[0] is not key:
            raise BadInput(f"layer {number}: its keys did not come through the cache: the model is not supported")
        layer.incoming = None
        if attention_mask is None or id(attention_mask) not in self._masks:
            raise BadInput(f"layer {number}: the model did not use the registered mask: it is not supported")
        entry_bytes = (key.shape[-1] + value.shape[-1]) * key.element_size()
        expected = shape.kv_heads, shape.read_bytes or shape.entry_bytes, shape.window
        if (key.shape[1], entry_bytes, sliding_window) != expected:
            raise BadInput(
                f"layer {number}: {key.shape[1]} KV heads of {entry_bytes} bytes an entry, window {sliding_window},"
                f" where the configuration says {', '.join(map(str, expected))}: not supported"
            )
        queries = self._masks[id(attention_mask)][1]
        if number == 0:
            self.cache.padding.extend(queries.real, query.shape[0], query.shape[2], query.device)
            self.batch = query.shape[0]
            self._tokens = query.shape[2]
            if self._coming is not None:
                self._remember(self._coming, queries.real)
        scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
        replaced = layer.append(page_of(key.detach(), value.detach(), queries.slots, queries.real))
        layer.seen += query.shape[2]
        self._used[number] = layer.lengths
        self._account.hold(number, layer.seen_lengths)
        if not self._compressing:
            self._account.appended(self.cache.padding.tokens, self._method.score is not None)
        if queries.start == 0:
            output = attended
            if output is None:
                output = attention_over_intervals(
                    module, query, key, value, queries.first, queries.last, scale, softcap
                )
            self._note(number, 0)
        else:
            held = padded(layer.pages)
            all_seen = all(page.all_seen for page in layer.pages)
            output, mask_bytes = ragged_attention(query, held, all_seen, queries, scale, softcap, layer.basis)
            self._note(number, max(replaced, mask_bytes + held.copied))
            del held
        if self._compressing or self._observing:
            kind = self._context or ContextAndQuestionRows
            rows = rows_of(query.detach(), queries, self.cache, kind, scale, softcap)
            if self._compressing:
                more_to_come = self._decode is not None or (self._context is not None and self.more_to_come)
                self.compressor.weigh(number, rows, more_to_come)
            else:
                self.compressor.observe(number, rows)
        if self._replay is not None:
            self.compressor.show(
                number, rows_of(query.detach(), queries, self.cache, ContextRows, scale, softcap), self._replay
            )
        layer.expire()
        if self._compressing and self._method.by_layer:
            self._decide([number])
        self._account.hold(number, layer.seen_lengths)
        self._note(number, 0)
        return output, None

    def _remember(self, coming: torch.Tensor, real: torch.Tensor | None) -> None:
        """Note what the pass feeds after the prompt, real (B, T) of it tokens, and say what of it all is anchored."""
        if real is not None:
            coming = coming.masked_fill(~real, NOT_WRITTEN)
        self._written = coming if self._written is None else torch.cat([self._written, coming], dim=1)
        self.compressor.anchored = None
        if self._compressing:
            assert self._anchors is not None
            written = self._written.long()
            stays = self._anchors(written)
            if not isinstance(stays, torch.Tensor) or stays.dtype != torch.bool or stays.shape != written.shape:
                raise BadInput(f"anchors {self._anchors.name}: expected a bool tensor {tuple(written.shape)}")
            before = self.cache.padding.slots - written.shape[1]
            self.compressor.anchored = torch.nn.functional.pad(stays & (written >= 0), (before, 0))

    def after(self, decoder: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A forward pass ended: evict where all layers had to be known, and write the ledger."""
        missing = [number for number, used in enumerate(self._used) if not used]
        if missing:
            raise BadInput(f"layers {missing} did not run the registered attention: the model is not supported")
        batch = self.batch
        if self._compressing:
            if not self._method.by_layer:
                self._decide(range(len(self.cache.layers)))
            self._account.close(self.cache.padding.tokens, self.compressor.extra(batch), self._due)
        self._masks.clear()
        self._open = False
        phase: Phase = "question" if self._tokens > 1 else "decode"
        if self._first_pass or self._context is not None or self._replay is not None:
            phase = "prefill"
            if self._replay is None and (self._context is None or not self.more_to_come):
                tokens, used, peak = self._tokens, self._used, self._peak
                if self._reconstructs:
                    self._reconstruct(decoder)
                self._tokens, self._used, self._peak = tokens, used, max(peak, self._peak)
                self._prompt_read(batch)
                self._context_alone = self._context is ContextRows
                self._context = None
        held = self.bytes
        self.ledger.steps.append(
            Step(
                phase=phase,
                batch=batch,
                tokens=self._tokens,
                used=tuple(self._used),
                kept=tuple(layer.lengths for layer in self.cache.layers),
                nbytes=held,
                side_bytes=self.side_bytes,
                peak_bytes=max(self._peak, held),
            )
        )
        self.broken = ""

    def _decide(self, numbers: Sequence[int]) -> None:
        """Evict in these layers; what they held is there until what they hold is."""
        self.compressor.decide(numbers, self.batch, self._due)
        self._peak = max(self._peak, self._beside + sum(self._stored) + self.compressor.peak)
        for number in numbers:
            self._account.hold(number, self.cache.layers[number].seen_lengths)
            self._stored[number] = self.cache.layers[number].nbytes

    def _reconstruct(self, decoder: torch.nn.Module) -> None:
        """Feed the prompt again as the score asks, show it every pass, forget each pass, and evict after the last."""
        score, cache, batch = self._method.score, self.cache, self.batch
        assert isinstance(score, Reconstruction)
        ids = torch.cat(self._text, dim=1)
        real = torch.ones_like(ids, dtype=torch.bool) if cache.padding.real is None else cache.padding.real
        pads = (~real).sum(1).tolist()
        plans = [score.replays(line[pad:]) for line, pad in zip(ids, pads, strict=True)]
        for number_of_pass in range(max(map(len, plans))):
            layers, padding = [layer.state() for layer in cache.layers], cache.padding.copy()
            lines, self._replay = [], []
            for line, pad, plan in zip(ids, pads, plans, strict=True):  # a sequence that is done is fed padding
                replay = plan[number_of_pass] if number_of_pass < len(plan) else Replay((), 0, 0)
                part = line[pad + replay.start : pad + replay.end]
                lines.append(torch.cat([part.new_tensor(replay.lead), part]))
                self._replay.append((replay.start, replay.end))
            width = max(len(line) for line in lines)
            block = torch.stack([torch.nn.functional.pad(line, (width - len(line), 0)) for line in lines])
            fed = torch.stack([torch.arange(width, device=ids.device) >= width - len(line) for line in lines])
            whole = torch.cat([real, fed], dim=1)
            self.broken = ""  # the pass that calls this has ended but for its eviction
            try:
                decoder(
                    input_ids=block,
                    attention_mask=None if bool(whole.all()) else whole.long(),
                    position_ids=(fed.cumsum(1) - 1).clamp(min=0) + self._next[:, None],
                    cache=cache,
                    use_cache=True,
                )
            finally:
                self._replay = None
            cache.padding, noted = padding, [layer.memory for layer in cache.layers]
            self._restore(layers)
            for layer, memory in zip(cache.layers, noted, strict=True):
                layer.memory = memory
        for number in range(len(cache.layers)):
            self.compressor.weigh(number, no_rows(batch, ids.device), more_to_come=False)
        self._decide(range(len(cache.layers)))
        self._account.close(cache.padding.tokens, self.compressor.extra(batch), None)

    def _prompt_read(self, batch: int) -> None:
        """The whole prompt is in the cache: what follows is appended to pages of its own."""
        self._text.clear()
        self._peak = max(self._peak, self._beside + sum(self._stored) + self.compressor.settle())
        for layer in self.cache.layers:
            layer.seal()
            if self._decode is None:  # nothing more is scored
                layer.memory.clear()
        if self._decode is not None and self._decode.prompt != "free":
            self.compressor.pinned = seen = self.cache.padding.tokens
            if self._decode.prompt == "pinned" and self._budget is not None:
                for count in seen:
                    refuse_pinned(count, self._schedule.lowest(self._budget.per_head(self.cache.shapes, count)))

    def _note(self, number: int, transient: int) -> None:
        """Layer `number` stores what it stores now, and beside all layers this many bytes are in use for a moment."""
        self._stored[number] = self.cache.layers[number].nbytes
        self._peak = max(self._peak, self._beside + sum(self._stored) + transient)


def _ids_written(fed: torch.Tensor, asked: bool) -> torch.Tensor:
    """(B, T) int32 ids of what a pass after the prompt feeds, NOT_WRITTEN if the model was given it."""
    if asked or fed.shape[1] > 1:
        return torch.full(fed.shape[:2], NOT_WRITTEN, dtype=torch.int32, device=fed.device)
    if fed.is_floating_point():
        raise BadInput("decode: anchors look at what the model writes: expected token ids, not inputs_embeds")
    return fed.int()


def _fed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    fed = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
    assert isinstance(fed, torch.Tensor)
    return fed
