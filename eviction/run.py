"""`with evict(model, ...) as run`: a model that reads and writes a cache which holds what its budget says."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from capture.attention import HARMLESS_TENSORS, attention_over_intervals, visible_intervals
from data import BadInput
from eviction.attention import Queries, queries_of, ragged_attention
from eviction.budget import Account, Budget, as_budget
from eviction.cadence import Decode, refuse_pinned
from eviction.compression import AnyRows, Compressor, Method, no_rows, rows_of
from eviction.ledger import Ledger, Phase, Step
from eviction.method import (
    Allocator,
    ContextAndQuestionRows,
    ContextRows,
    Reconstruction,
    Replay,
    Score,
    Selector,
    named,
)
from eviction.options import check_whole
from eviction.ragged import LayerShape, LayerState, Padding, Page, RaggedCache, Storage, padded, page_of
from eviction.rotary import rotary_of
from eviction.support import CACHE_NAMES, decoder_of, layer_shapes, output_weight_of, takes

NAME = "forced_weights_eviction_"  # of the attention functions registered, with a number
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
STORAGES = ("ragged", "padded", "masked")

_numbers = itertools.count()


@contextmanager
def evict(
    model: PreTrainedModel,
    score: str | Score | None = "snapkv",
    allocator: str | Allocator = "uniform",
    selector: str | Selector = "top_mass",
    budget: int | Budget | None = None,
    storage: Storage = "ragged",
    decode: Decode | None = None,
) -> Iterator["Run"]:
    """While open, the model runs on a physically evicted cache; afterwards it is as it was.

    model: any decoder of transformers whose attention can be replaced. score, allocator, selector: names (`python -m
    eviction list`), with options as "snapkv:variant=kvpress", or objects; score None evicts nothing. budget: entries
    per KV head on average, or a Budget; required with a score. storage: "ragged" holds what was selected and the budget
    is enforced; "padded" (each layer's cells as long as its longest) and "masked" (everything, as most published code
    does) hold more, and `run.enforced` says so. decode: when to evict while answering; None: only the prompt is evicted
    from, and what question and answer append is counted.

    Inside, `run.prefill(ids)` reads a context and evicts before any question is known; `run.generate(ids)` goes on from
    there, inside `with run.question():` without changing the state that the next question finds. `model(ids)` and
    `model.generate(ids)` read a whole prompt, question included, as one new sequence. Raises BadInput for names,
    budgets and models that do not fit. Source: ours.
    """
    if budget is None and score is not None:
        raise BadInput("budget: a score needs one, such as budget=128 entries per KV head")
    if storage not in STORAGES:
        raise BadInput(f"unknown storage {storage!r}: expected one of {', '.join(STORAGES)}")
    method = Method(
        None if score is None else named(Score, score), named(Allocator, allocator), named(Selector, selector)
    )
    decoder = decoder_of(model)
    shapes = layer_shapes(model)
    if decode is not None and score is None:
        raise BadInput("decode: expected a score to evict by")
    if decode is not None and isinstance(method.score, Reconstruction):
        raise BadInput(f"score {method.score.name}: reads the prompt again and knows no decoding: decode must be None")
    if isinstance(budget, Budget) and budget.nbytes is not None:
        on_top = decode is not None and decode.prompt == "on_top"
        if method.allocator.extra or on_top:
            what = (
                'decode with prompt="on_top"' if on_top else f"allocator {method.allocator.name} with its floor on top"
            )
            raise BadInput(f"a budget in bytes with {what}: bytes limit all that is held: give entries instead")
    run = Run(model, shapes, method, None if budget is None else as_budget(budget), storage, decode)
    name = f"{NAME}{next(_numbers)}"
    previous = model.config._attn_implementation
    if str(previous).startswith(NAME):
        raise BadInput("evict() inside evict() on the same model: leave the first before the second")
    AttentionInterface.register(name, run._attend)
    AttentionMaskInterface.register(name, run._mask)
    hooks = [
        decoder.register_forward_pre_hook(run._before, with_kwargs=True),
        decoder.register_forward_hook(run._after),
    ]
    try:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise BadInput(
                f"{type(model).__name__} does not let its attention function be replaced: it is not supported"
            )
        yield run
    finally:
        run.close()
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(previous)
        # transformers has no way to unregister but its mapping
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """All that a question may change; shares every tensor."""

    layers: tuple[LayerState, ...]
    padding: Padding
    rows: dict[int, AnyRows]
    pinned: tuple[int, ...]
    decoded: int
    batch: int


class Run:
    """What evict() hands out: the cache, what it holds, and how to read and write on it.

    cache: pass it as `cache=run.cache` to go on from what was read. ledger: every forward pass. seconds: spent on
    scoring, allocating and selecting. enforced: whether the cache is held to its budget.
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
        self.model, self.budget, self.storage, self.decode = model, budget, storage, decode
        self.cache = RaggedCache(shapes, storage)
        self.ledger = Ledger()
        self.enforced = storage == "ragged" and method.score is not None
        self._method = method
        self._account = Account(budget, shapes, method.allocator.extra, enforced=storage == "ragged")
        rotary = [rotary_of(model, layer) for layer in range(len(shapes))]
        weights = [output_weight_of(model, layer) for layer in range(len(shapes))]
        on_top = decode is not None and decode.prompt == "on_top"
        self._compressor = Compressor(method, self.cache, self._account, rotary, weights, model.device, on_top=on_top)
        self._snapshots: list[_Snapshot] = []
        self._broken, self._ended, self._batch = "", False, 1
        self.cache.followers.append(self._reorder)
        self._forget()

    def _forget(self) -> None:
        """Forget what is about the pass or the context at hand."""
        layers = len(self.cache.layers)
        self._context: type[ContextRows] | type[ContextAndQuestionRows] | None = None  # what is being read
        self._last_chunk = True
        self._decoded = 0  # passes since the prompt
        self._text: list[torch.Tensor] = []  # the prompt's token ids, for scores that have it read again
        self._next = torch.zeros(1, dtype=torch.int64)  # what position the model gives the token after the prompt
        self._replay: list[tuple[int, int]] | None = None  # the part of the prompt that is being read again
        self._masks: dict[int, tuple[torch.Tensor, Queries]] = {}
        self._compressor.forget()
        self._compressing = self._observing = self._first_pass = self._open = False
        self._due: tuple[bool, ...] | None = None  # which sequences the pass evicts from; None: all
        self._used: list[tuple[int, ...]] = [()] * layers
        self._stored = [layer.nbytes for layer in self.cache.layers]
        self._tokens = self._peak = self._beside = 0

    # What the cache holds

    @property
    def kept(self) -> list[list[npt.NDArray[np.int64]]]:
        """kept[layer][kv_head]: sorted true positions that the cache holds of the first sequence."""
        return self.kept_of(0)

    def kept_of(self, sequence: int) -> list[list[npt.NDArray[np.int64]]]:
        """kept of any sequence of the batch. Positions count its tokens; padding has none."""
        kept = []
        for layer, shape in zip(self.cache.layers, self.cache.shapes, strict=True):
            heads: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * shape.kv_heads
            if layer.pages:
                candidates = layer.candidates()
                slots = candidates.slots.view(self._batch, shape.kv_heads, candidates.slots.shape[1])
                positions = self.cache.padding.positions(slots)[sequence].cpu().numpy()
                heads = [cell[cell >= 0] for cell in positions]
            kept.append(heads)
        return kept

    @property
    def bytes(self) -> int:
        """Bytes of the storages behind all keys and values, what an open question will fall back to included."""
        return self.cache.storages(self._snapshot_pages())

    @property
    def side_bytes(self) -> int:
        """Bytes of everything else that is kept for the cache: slots, padding, what the score remembers, query rows."""
        return self.cache.side_data(self._snapshot_pages()) + self._compressor.row_bytes

    @property
    def seconds(self) -> float:
        """Seconds spent on scoring, allocating, selecting and letting go."""
        return self._compressor.seconds

    # Reading and writing

    def close(self) -> None:
        """The run has ended: what it holds can be looked at, and no longer read or written on."""
        self._ended = True
        for layer in self.cache.layers:
            layer.closed = True

    def _check_open(self) -> None:
        if self._ended:
            raise BadInput("the run has ended: use it inside its with block")

    def _check_usable(self) -> None:
        self._check_open()
        if self._broken:
            raise BadInput(f"the cache is not whole after an error ({self._broken}): call run.reset()")

    def reset(self) -> None:
        """Forget the sequence; the ledger stays."""
        self.cache.reset()
        self._account.reset()
        self._snapshots.clear()
        self._broken = ""
        self._forget()

    @torch.no_grad()
    def prefill(
        self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None, chunk: int | None = None
    ) -> torch.Tensor:
        """Read a context as a new sequence and evict; the logits (B, V) after its last token.

        ids (B, N) or (N,). attention_mask (B, N): 0 for padding, on the left. chunk: tokens read at a time; the cache
        is evicted down to its budget after each. Scores see context rows only.
        """
        return self._prefill(ids, attention_mask, chunk, ContextRows)

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, chunk: int | None = None, **options: Any) -> torch.Tensor:
        """Go on from what was read with further tokens ids (B, T) or (T,), and generate: (B, new) token ids.

        options: those of the model's generate(); greedy unless they say otherwise. Where nothing was read yet, ids are
        a whole prompt, evicted from after reading (after every `chunk` tokens), with its question seen.
        """
        self._check_usable()
        ids = _two_dimensional(ids).to(self.model.device)
        mask = _mask_like(options.pop("attention_mask", None), ids)
        if options.get("prefill_chunk_size") is not None:
            raise BadInput("prefill_chunk_size: expected chunk=, which evicts after every chunk")
        past = self.cache.padding
        if past.slots:
            self._repeat(max(options.get("num_beams", 1) or 1, options.get("num_return_sequences", 1) or 1))
        if chunk is not None and past.slots == 0 and ids.shape[1] > chunk:
            # the last token is left for generate(), which must feed at least one
            head = None if mask is None else mask[:, :-1]
            self._prefill(ids[:, :-1], head, chunk, ContextAndQuestionRows)
            past, ids = self.cache.padding, ids[:, -1:]
            mask = None if mask is None else mask[:, -1:]
        new = torch.ones_like(ids) if mask is None else mask.to(ids)
        past = self.cache.padding
        before = new.new_ones(ids.shape[0], past.slots)
        if past.real is not None:
            before = past.real[:: past.real.shape[0] // ids.shape[0]].to(new)
        whole = torch.cat([before, new], dim=1)
        options = {"do_sample": False, **options}
        out = self.model.generate(ids, attention_mask=whole, cache=self.cache, **options)  # type: ignore[operator]
        sequences = out if isinstance(out, torch.Tensor) else out.sequences
        generated: torch.Tensor = sequences[:, ids.shape[1] :]
        return generated

    @contextmanager
    def question(self) -> Iterator[None]:
        """Whatever is read and written inside is forgotten at the end: the next question finds the same cache."""
        if self.cache.padding.slots == 0:
            raise BadInput("question(): nothing was read yet: call run.prefill(context) first")
        self._check_usable()
        layers = self.cache.layers
        self._snapshots.append(
            _Snapshot(
                tuple(layer.state() for layer in layers),
                self.cache.padding.copy(),
                self._compressor.rows(),
                self._compressor.pinned,
                self._decoded,
                self._batch,
            )
        )
        for layer in layers:
            layer.seal()
        try:
            yield
        finally:
            if self._snapshots:  # reset() inside leaves none
                was = self._snapshots.pop()
                self._broken = ""
                self._forget()
                self.cache.padding, self._decoded, self._batch = was.padding, was.decoded, was.batch
                self._compressor.put_back(was.rows)
                self._compressor.pinned = was.pinned
                for number, (layer, state) in enumerate(zip(layers, was.layers, strict=True)):
                    layer.restore(state)
                    self._account.hold(number, layer.seen_lengths)
                    self._stored[number] = layer.nbytes

    def _repeat(self, times: int) -> None:
        """Hold every sequence `times` times, for beams or several answers to one question."""
        if times == 1:
            return
        if not self._snapshots:
            raise BadInput("beams or several answers after a context: expected inside run.question()")
        order = torch.arange(self._batch, device=self.model.device).repeat_interleave(times)
        self._batch *= times
        self.cache.reorder_cache(order)

    def _reorder(self, order: torch.Tensor) -> None:
        """The cache's sequences were reordered; so is what is kept beside it."""
        self._compressor.reorder(order)
        for number, layer in enumerate(self.cache.layers):
            self._account.hold(number, layer.seen_lengths)
            self._stored[number] = layer.nbytes

    # The model's side

    def _mask(
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

    def _before(self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pass begins: it runs on our cache. A model given none, or an empty one, begins a new sequence."""
        given = next((kwargs.pop(name) for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        for name in CACHE_NAMES:
            kwargs.pop(name, None)
        if kwargs.get("use_cache") is False:
            raise BadInput("use_cache=False inside evict(): there would be no cache to evict from")
        if given is not self.cache:
            if given is not None and given.get_seq_length() > 0:
                raise BadInput("the model was given a cache that is not the run's: pass cache=run.cache")
            if self._snapshots:
                raise BadInput("inside question() the model must go on: use run.generate, or pass cache=run.cache")
            if self.cache.padding.slots > 0:
                self.reset()
        self._check_usable()
        kwargs["cache"], kwargs["use_cache"] = self.cache, True
        self._broken = "a forward pass did not end"
        self._open = True
        self._first_pass = self.cache.padding.slots == 0
        fed = _fed(args, kwargs)
        if not self._first_pass and fed.shape[0] != self._batch:
            raise BadInput(f"{fed.shape[0]} sequences fed to a cache of {self._batch}: they must be the same")
        prompt = self._first_pass or self._context is not None
        self._compressing = self._observing = False
        if self._replay is None and self._method.score is not None:
            self._due = None if prompt else self._exceeding(fed.shape[1])
            self._compressing = self._evicts_prompt if prompt else any(self._due or ())
            self._observing = self.decode is not None and not self._compressing
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
        self._compressor.peak = 0
        return args, kwargs

    @property
    def _evicts_prompt(self) -> bool:
        """Whether a pass over the prompt ends with an eviction."""
        return not self._reconstructs and (self.decode is None or self.decode.prompt == "free")

    @property
    def _reconstructs(self) -> bool:
        return isinstance(self._method.score, Reconstruction)

    def _exceeding(self, coming: int) -> tuple[bool, ...] | None:
        """Which sequences the pass that begins, of `coming` tokens after the prompt, evicts from; None: from none."""
        if self.decode is None:
            return None
        self._decoded += 1
        if self._decoded % self.decode.every:
            return None
        seen = self.cache.padding.tokens
        return self._account.exceeding(seen, coming, self._compressor.extra(self._batch), self.decode.slack)

    def _attend(
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
            raise BadInput(f"{type(self.model).__name__}: its attention runs outside its decoder: it is not supported")
        if layer.incoming is None or layer.incoming[0] is not key:
            raise BadInput(f"layer {number}: its keys did not come through the cache: the model is not supported")
        layer.incoming = None
        if attention_mask is None or id(attention_mask) not in self._masks:
            raise BadInput(f"layer {number}: the model did not use the registered mask: it is not supported")
        entry_bytes = (key.shape[-1] + value.shape[-1]) * key.element_size()
        if (key.shape[1], entry_bytes, sliding_window) != (shape.kv_heads, shape.entry_bytes, shape.window):
            raise BadInput(
                f"layer {number}: {key.shape[1]} KV heads of {entry_bytes} bytes an entry, window {sliding_window},"
                f" where the configuration says {shape.kv_heads}, {shape.entry_bytes}, {shape.window}: not supported"
            )
        queries = self._masks[id(attention_mask)][1]
        if number == 0:
            self.cache.padding.extend(queries.real, query.shape[0], query.shape[2], query.device)
            self._batch = query.shape[0]
            self._tokens = query.shape[2]
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
            output, mask_bytes = ragged_attention(query, held, all_seen, queries, scale, softcap)
            self._note(number, max(replaced, mask_bytes + held.copied))
            del held
        if self._compressing or self._observing:
            kind = self._context or ContextAndQuestionRows
            rows = rows_of(query.detach(), queries, self.cache, kind, scale, softcap)
            if self._compressing:
                more_to_come = self.decode is not None or (self._context is not None and not self._last_chunk)
                self._compressor.weigh(number, rows, more_to_come)
            else:
                self._compressor.observe(number, rows)
        if self._replay is not None:
            self._compressor.show(
                number, rows_of(query.detach(), queries, self.cache, ContextRows, scale, softcap), self._replay
            )
        layer.expire()
        if self._compressing and self._method.by_layer:
            self._decide([number])
        self._account.hold(number, layer.seen_lengths)
        self._note(number, 0)
        return output, None

    def _after(self, decoder: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A forward pass ended: evict where all layers had to be known, and write the ledger."""
        missing = [number for number, used in enumerate(self._used) if not used]
        if missing:
            raise BadInput(f"layers {missing} did not run the registered attention: the model is not supported")
        batch = self._batch
        if self._compressing:
            if not self._method.by_layer:
                self._decide(range(len(self.cache.layers)))
            self._account.close(self.cache.padding.tokens, self._compressor.extra(batch), self._due)
        self._masks.clear()
        self._open = False
        phase: Phase = "question" if self._tokens > 1 else "decode"
        if self._first_pass or self._context is not None or self._replay is not None:
            phase = "prefill"
            if self._replay is None and (self._context is None or self._last_chunk):
                tokens, used, peak = self._tokens, self._used, self._peak
                if self._reconstructs:
                    self._reconstruct(decoder)
                self._tokens, self._used, self._peak = tokens, used, max(peak, self._peak)
                self._prompt_read(batch)
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
        self._broken = ""

    def _decide(self, numbers: Sequence[int]) -> None:
        """Evict in these layers; what they held is there until what they hold is."""
        self._compressor.decide(numbers, self._batch, self._due)
        self._peak = max(self._peak, self._beside + sum(self._stored) + self._compressor.peak)
        for number in numbers:
            self._account.hold(number, self.cache.layers[number].seen_lengths)
            self._stored[number] = self.cache.layers[number].nbytes

    def _reconstruct(self, decoder: torch.nn.Module) -> None:
        """Feed the prompt again as the score asks, show it every pass, forget each pass, and evict after the last."""
        score, cache, batch = self._method.score, self.cache, self._batch
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
            self._broken = ""  # the pass that calls this has ended but for its eviction
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
            cache.padding = padding
            for number, (layer, state) in enumerate(zip(cache.layers, layers, strict=True)):
                noted = layer.memory
                layer.restore(state)
                layer.memory = noted
                self._account.hold(number, layer.seen_lengths)
                self._stored[number] = layer.nbytes
        for number in range(len(cache.layers)):
            self._compressor.weigh(number, no_rows(batch, ids.device), more_to_come=False)
        self._decide(range(len(cache.layers)))
        self._account.close(cache.padding.tokens, self._compressor.extra(batch), None)

    def _prompt_read(self, batch: int) -> None:
        """The whole prompt is in the cache: what follows is appended to pages of its own."""
        for layer in self.cache.layers:
            layer.seal()
            if self.decode is None:  # nothing more is scored
                layer.memory.clear()
        if self.decode is not None and self.decode.prompt != "free":
            self._compressor.pinned = seen = self.cache.padding.tokens
            if self.decode.prompt == "pinned" and self.budget is not None:
                for count in seen:
                    refuse_pinned(count, self.budget.per_head(self.cache.shapes, count))

    def _prefill(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        chunk: int | None,
        kind: type[ContextRows] | type[ContextAndQuestionRows],
    ) -> torch.Tensor:
        ids = _two_dimensional(ids).to(self.model.device)
        self._check_open()
        if chunk is not None:
            check_whole("prefill", "chunk", chunk, least=1)
        attention_mask = _mask_like(attention_mask, ids)
        if self._snapshots:
            raise BadInput("prefill() inside question(): a context is read outside")
        self.reset()
        real = torch.ones_like(ids) if attention_mask is None else attention_mask.to(ids)
        position_ids = (real.cumsum(-1) - 1).clamp(min=0)
        step = chunk or ids.shape[1]
        only_last = {"logits_to_keep": 1} if takes(self.model, "logits_to_keep") else {}
        if attention_mask is not None and not bool((attention_mask.bool().int().diff(dim=-1) >= 0).all()):
            raise BadInput("attention_mask: padding after tokens: expected it on the left")
        self._context = kind
        try:
            for begin in range(0, ids.shape[1], step):
                end = min(begin + step, ids.shape[1])
                self._last_chunk = end == ids.shape[1]
                output = self.model(
                    ids[:, begin:end],
                    attention_mask=None if attention_mask is None else real[:, :end],
                    position_ids=position_ids[:, begin:end],
                    cache=self.cache,
                    use_cache=True,
                    **only_last,
                )
        finally:
            self._context = None
        states = output.logits if "logits" in output else output.last_hidden_state
        last: torch.Tensor = states[:, -1]
        return last

    def _note(self, number: int, transient: int) -> None:
        """Layer `number` stores what it stores now, and beside all layers this many bytes are in use for a moment."""
        self._stored[number] = self.cache.layers[number].nbytes
        self._peak = max(self._peak, self._beside + sum(self._stored) + transient)

    def _snapshot_pages(self) -> Iterator[Page]:
        return (page for was in self._snapshots for state in was.layers for page in state.pages)


def _fed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    fed = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
    assert isinstance(fed, torch.Tensor)
    return fed


def _two_dimensional(ids: torch.Tensor) -> torch.Tensor:
    if not isinstance(ids, torch.Tensor) or ids.ndim not in (1, 2) or ids.dtype not in INTEGERS:
        raise BadInput("ids: expected an integer tensor (tokens,) or (sequences, tokens)")
    if ids.numel() == 0:
        raise BadInput("ids: no tokens")
    return ids if ids.ndim == 2 else ids[None]


def _mask_like(mask: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor | None:
    """The attention mask of these ids (B, N), checked; one line may come without its first dimension."""
    if mask is None:
        return None
    shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
    if isinstance(mask, torch.Tensor) and mask.ndim == 1:
        mask = mask[None]
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        raise BadInput(f"attention_mask {shape}: expected a tensor of the shape of the ids, {tuple(ids.shape)}")
    return mask
