"""`with evict(model, ...) as run`: a model that reads and writes a cache which holds what its budget says."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from data import BadInput
from eviction.budget import Budget, as_budget
from eviction.cadence import Decode
from eviction.compression import Method
from eviction.method import (
    Allocator,
    ContextAndQuestionRows,
    ContextRows,
    Reconstruction,
    Schedule,
    Score,
    Selector,
    State,
    named,
)
from eviction.options import check_whole
from eviction.passes import Passes
from eviction.ragged import Storage
from eviction.support import decoder_of, layer_shapes, takes

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
    state: str | State = "exact",
) -> Iterator["Run"]:
    """While open, the model runs on a physically evicted cache; afterwards it is as it was.

    model: any decoder of transformers whose attention can be replaced. score, allocator, selector, state: names (see
    `python -m eviction list`), with options as "snapkv:variant=kvpress", or objects; score None evicts nothing. budget:
    entries per KV head on average, or a Budget; required with a score; without one, what does not fit is refused.
    storage: "ragged" holds what was selected; "padded" (each layer's cells as long as its longest) and "masked"
    (everything, as most published code does) select the same and hold more, and `run.enforced` says so. decode: when to
    evict while answering, down to what, and what of the answer stays; None: only the prompt is evicted from, and what
    question and answer append is counted.
    state: how what is kept is held; other than "exact" in ragged storage alone.

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
        None if score is None else named(Score, score),
        named(Allocator, allocator),
        named(Selector, selector),
        named(State, state),
    )
    if method.state.name != "exact" and (storage != "ragged" or score is None):
        what = "a score to evict by" if score is None else f"storage ragged, not {storage}"
        raise BadInput(f"state {method.state.name}: expected {what}")
    decoder = decoder_of(model)
    shapes = layer_shapes(model, method.state)
    if decode is not None and not isinstance(decode, Decode):
        raise BadInput(f"decode {decode!r}: expected a Decode, such as Decode(slack=16)")
    if decode is not None and score is None:
        raise BadInput("decode: expected a score to evict by")
    if decode is not None and isinstance(method.score, Reconstruction):
        raise BadInput(f"score {method.score.name}: reads the prompt again and knows no decoding: decode must be None")
    if method.selector.rows_needed and isinstance(method.score, Reconstruction):
        raise BadInput(f"selector {method.selector.name}: needs query rows: score {method.score.name} has none")
    if isinstance(budget, Budget) and budget.nbytes is not None:
        what = f"allocator {method.allocator.name} with its floor on top" if method.allocator.extra else ""
        if decode is not None and decode.prompt == "on_top":
            what = 'decode with prompt="on_top"'
        elif decode is not None and named(Schedule, decode.schedule).name != "constant":
            what = f"schedule {named(Schedule, decode.schedule).name}"
        if what:
            raise BadInput(f"a budget in bytes with {what}: bytes limit all that is held: give entries instead")
    passes = Passes(model, shapes, method, None if budget is None else as_budget(budget), storage, decode)
    run = Run(model, passes, enforced=storage == "ragged" and score is not None)
    name = f"{NAME}{next(_numbers)}"
    previous = model.config._attn_implementation
    if str(previous).startswith(NAME):
        raise BadInput("evict() inside evict() on the same model: leave the first before the second")
    AttentionInterface.register(name, passes.attend)
    AttentionMaskInterface.register(name, passes.mask)
    hooks = [
        decoder.register_forward_pre_hook(passes.before, with_kwargs=True),
        decoder.register_forward_hook(passes.after),
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


class Run:
    """What evict() hands out: the cache, what it holds, and how to read and write on it.

    cache: pass it as `cache=run.cache` to go on from what was read. ledger: every forward pass. seconds: spent on
    scoring, allocating and selecting. enforced: whether the cache is held to its budget.
    """

    def __init__(self, model: PreTrainedModel, passes: Passes, enforced: bool) -> None:
        self.model, self.enforced, self._passes = model, enforced, passes
        self.cache, self.ledger = passes.cache, passes.ledger
        self._ended = False

    def __repr__(self) -> str:
        """What the cache holds, in a line."""
        cells = [length for layer in self.cache.layers for length in layer.lengths]
        average = sum(cells) / max(1, len(cells))
        read = ", ".join(map(str, self.cache.padding.tokens)) or "nothing"
        return f"Run(tokens read: {read}; entries a KV head on average: {average:.1f}; bytes: {self.bytes:,})"

    # What the cache holds

    @property
    def kept(self) -> list[list[npt.NDArray[np.int64]]]:
        """kept[layer][kv_head]: sorted true positions of the entries of the first sequence that queries still see.

        In ragged storage that is all that the cache holds; padded and masked storage hold more (`bytes`). An entry that
        stands for several tokens is at the position of the latest.
        """
        return self.kept_of(0)

    def kept_of(self, sequence: int) -> list[list[npt.NDArray[np.int64]]]:
        """kept of any sequence of the batch. Positions count its tokens; padding has none."""
        if not 0 <= sequence < self._passes.batch:
            raise BadInput(f"sequence {sequence}: expected 0 to {self._passes.batch - 1}")
        kept = []
        for layer, shape in zip(self.cache.layers, self.cache.shapes, strict=True):
            heads: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * shape.kv_heads
            if layer.pages:
                candidates = layer.candidates()
                slots = candidates.slots.view(self._passes.batch, shape.kv_heads, candidates.slots.shape[1])
                positions = self.cache.padding.positions(slots)[sequence].cpu().numpy()
                heads = [cell[cell >= 0] for cell in positions]
            kept.append(heads)
        return kept

    @property
    def bytes(self) -> int:
        """Bytes of the storages behind all keys and values, what an open question will fall back to included."""
        return self._passes.bytes

    @property
    def side_bytes(self) -> int:
        """Bytes of everything else that is kept for the cache: slots, padding, what the score remembers, query rows."""
        return self._passes.side_bytes

    @property
    def seconds(self) -> float:
        """Seconds spent on scoring, allocating, selecting and letting go."""
        return self._passes.compressor.seconds

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
        self._passes.check_whole()

    def reset(self) -> None:
        """Forget the sequence; the ledger stays."""
        self._passes.reset()

    @torch.no_grad()
    def prefill(
        self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None, chunk: int | None = None
    ) -> torch.Tensor:
        """Read a context as a new sequence and evict; the logits (B, V) after its last token, or, of a model without a
        head, its last hidden state.

        ids (B, N) or (N,). attention_mask (B, N): 0 for padding, on the left. chunk: tokens read at a time; the cache
        is evicted down to its budget after each. Scores see context rows only.
        """
        return self._prefill(ids, attention_mask, chunk, ContextRows)

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, chunk: int | None = None, **options: Any) -> Any:
        """Go on from what was read with further tokens ids (B, T) or (T,), and generate: (B, new) token ids.

        The new ones alone, unlike the model's generate(); with return_dict_in_generate its dictionary, whose sequences
        are the new ones. options: those of the model's generate(); greedy unless they say otherwise. Where nothing was
        read yet, ids are a whole prompt, evicted from after reading (after every `chunk` tokens), with its question
        seen. The last token generated was never fed and is not in the cache: to go on after it outside question(),
        begin the next ids with it.
        """
        self._check_usable()
        ids = _two_dimensional(ids).to(self.model.device)
        mask = _mask_like(options.pop("attention_mask", None), ids)
        if options.get("prefill_chunk_size") is not None:
            raise BadInput("prefill_chunk_size: expected chunk=, which evicts after every chunk")
        times = max(_count(options, "num_beams"), _count(options, "num_return_sequences"))
        read_before = self.cache.padding.slots > 0
        reading = self._passes.answering()
        if read_before and ids.shape[0] != self._passes.batch:
            raise BadInput(f"{ids.shape[0]} sequences fed to a cache of {self._passes.batch}: they must be the same")
        if chunk is not None:
            check_whole("generate", "chunk", chunk, least=1)
            if read_before:
                raise BadInput("generate: chunk= is for a whole prompt: what follows a context is read in one pass")
            ids, mask = _without_common_padding(ids, mask)
            if ids.shape[1] > chunk:
                # the last chunk is left for the model's generate(), which must feed something
                cut = (ids.shape[1] - 1) // chunk * chunk
                head = None if mask is None else mask[:, :cut]
                self._prefill(ids[:, :cut], head, chunk, ContextAndQuestionRows, more_to_come=True)
                ids, mask = ids[:, cut:], None if mask is None else mask[:, cut:]
                reading = self._passes.reading(ContextAndQuestionRows)
        past = self.cache.padding
        slots, lines = past.slots, past.real
        new = torch.ones_like(ids) if mask is None else mask.to(ids)
        before = new.new_ones(ids.shape[0], slots) if lines is None else lines.to(new)
        if slots:
            self._passes.repeat(times, of_a_context=read_before)
        options = {"do_sample": False, **options}
        try:
            with reading:
                out = self.model.generate(  # type: ignore[operator]
                    ids, attention_mask=torch.cat([before, new], dim=1), cache=self.cache, **options
                )
        except Exception:
            if slots and self.cache.padding.slots == slots:  # an option was refused before anything was fed
                if read_before:
                    self._passes.repeat_undone(times)
                else:
                    self._passes.reset()
            raise
        if isinstance(out, torch.Tensor):
            return out[:, ids.shape[1] :]
        out.sequences = out.sequences[:, ids.shape[1] :]
        return out

    @contextmanager
    def question(self) -> Iterator[None]:
        """Whatever is read and written inside is forgotten at the end: the next question finds the same cache."""
        if self.cache.padding.slots == 0:
            raise BadInput("question(): nothing was read yet: call run.prefill(context) first")
        self._check_usable()
        with self._passes.undone():
            yield

    def _prefill(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        chunk: int | None,
        kind: type[ContextRows] | type[ContextAndQuestionRows],
        more_to_come: bool = False,
    ) -> torch.Tensor:
        ids = _two_dimensional(ids).to(self.model.device)
        self._check_open()
        attention_mask = _mask_like(attention_mask, ids)
        if chunk is not None:
            check_whole("prefill", "chunk", chunk, least=1)
            ids, attention_mask = _without_common_padding(ids, attention_mask)
        if self._passes.snapshots:
            raise BadInput("prefill() inside question(): a context is read outside")
        self.reset()
        real = torch.ones_like(ids) if attention_mask is None else attention_mask.to(ids)
        position_ids = (real.cumsum(-1) - 1).clamp(min=0)
        step = chunk or ids.shape[1]
        only_last = {"logits_to_keep": 1} if takes(self.model, "logits_to_keep") else {}
        with self._passes.reading(kind):
            for begin in range(0, ids.shape[1], step):
                end = min(begin + step, ids.shape[1])
                self._passes.more_to_come = more_to_come or end < ids.shape[1]
                output = self.model(
                    ids[:, begin:end],
                    attention_mask=None if attention_mask is None else real[:, :end],
                    position_ids=position_ids[:, begin:end],
                    cache=self.cache,
                    use_cache=True,
                    **only_last,
                )
        states = output.logits if "logits" in output else output.last_hidden_state
        last: torch.Tensor = states[:, -1]
        return last


def _count(options: dict[str, Any], name: str) -> int:
    """A number among the options of generate(): 1 if it is not there."""
    count = options.get(name)
    if count is None:
        return 1
    check_whole("generate", name, count, least=1)
    return int(count)


def _without_common_padding(ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids and mask from the first column on in which some sequence has a token: a chunk of padding alone holds none."""
    if mask is None:
        return ids, None
    begin = int((mask != 0).any(0).long().argmax())
    return ids[:, begin:], mask[:, begin:]


def _two_dimensional(ids: torch.Tensor) -> torch.Tensor:
    if not isinstance(ids, torch.Tensor) or ids.ndim not in (1, 2) or ids.dtype not in INTEGERS:
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        hint = ": pass its input_ids, and attention_mask=" if hasattr(ids, "keys") else ""
        raise BadInput(f"ids: expected an integer tensor (tokens,) or (sequences, tokens), got {got}{hint}")
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
    if not bool((mask.bool().int().diff(dim=-1) >= 0).all()):
        raise BadInput("attention_mask: padding after tokens: expected it on the left")
    return mask
