"""A physically evicted cache against the full cache with an additive mask, on every supported architecture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import eager_mask

from capture import checkpoints
from data import BadInput
from eviction import Budget, BudgetExceeded, Decode, evict
from eviction.method import (
    Allocation,
    Allocator,
    Cells,
    ContextAndQuestionRows,
    ContextRows,
    Rows,
    Scope,
    Score,
    Selector,
)
from eviction.ragged import RaggedCache

TOLERANCE = 2e-5  # of logits, in float32: summation order differs between the two ways of attending
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
}
NARROW = {key: value for key, value in SMALL.items() if key != "head_dim"} | {"num_attention_heads": 4}
WINDOWED = ["sliding_attention", "full_attention"] * 2
CONFIGS: dict[str, Any] = {
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen2-window": lambda: Qwen2Config(**SMALL, sliding_window=12, use_sliding_window=True, layer_types=WINDOWED),
    "qwen3": lambda: Qwen3Config(**SMALL),
    "llama": lambda: LlamaConfig(**SMALL),
    "olmo2": lambda: Olmo2Config(**NARROW),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, sliding_window=12, layer_types=WINDOWED, query_pre_attn_scalar=24),
    "gemma2": lambda: Gemma2Config(
        **SMALL, sliding_window=12, layer_types=WINDOWED, query_pre_attn_scalar=24, attn_logit_softcapping=2.0
    ),
    "mistral-window": lambda: MistralConfig(**SMALL, sliding_window=12),
    "phi3": lambda: Phi3Config(
        **NARROW,
        sliding_window=12,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
}


def small_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    for parameter in model.parameters():  # rows with some shape: at the initial scale all weights are nearly equal
        if parameter.ndim > 1:
            parameter.data.mul_(6.0)
    return model.to(dtype).eval()


# Parts of a method that share nothing with those of the package


@dataclass(frozen=True)
class Noise(Score):
    """Random scores, different in every cell."""

    name: ClassVar[str] = "noise"
    source: ClassVar[str] = "test"
    need: int | None = 0
    seen_types: tuple[list[type], ...] = ([],)
    seen_rows: tuple[list[int], ...] = ([],)

    def rows_needed(self, budget: int) -> int | None:
        return self.need

    def __call__(self, cells: Cells, rows: Rows) -> torch.Tensor:
        self.seen_types[0].append(type(rows))
        self.seen_rows[0].append(rows.queries.shape[2])
        generator = torch.Generator().manual_seed(cells.layer)
        return torch.rand(1000, generator=generator)[
            (cells.positions + 13 * torch.arange(cells.keys.shape[1])[:, None]).clamp(min=0)
        ]


@dataclass(frozen=True)
class Slanted(Allocator):
    """Earlier heads and layers get more; the total is exact."""

    name: ClassVar[str] = "slanted"
    source: ClassVar[str] = "test"
    scope: ClassVar[Scope] = "model"

    def __call__(
        self,
        scores: Sequence[torch.Tensor],
        lengths: Sequence[torch.Tensor],
        budgets: Sequence[int],
        first_layer: int,
        n_layers: int,
    ) -> Allocation:
        total = min(sum(len(x) * b for x, b in zip(lengths, budgets, strict=True)), int(sum(x.sum() for x in lengths)))
        flat = torch.cat(list(lengths)).tolist()
        counts, left = [], total
        for i, most in enumerate(flat):
            after = sum(flat[i + 1 :])
            take = min(most, max(left - after, min(left, 1 + left // 3)))
            counts.append(take)
            left -= take
        assert left == 0
        sizes = [len(x) for x in lengths]
        return Allocation([*torch.tensor(counts).split(sizes)])


@dataclass(frozen=True)
class ByLayer(Slanted):
    scope: ClassVar[Scope] = "layer"


@dataclass(frozen=True)
class Even(Slanted):
    """The same for all."""

    scope: ClassVar[Scope] = "layer"

    def __call__(self, scores: Any, lengths: Any, budgets: Any, first_layer: int, n_layers: int) -> Allocation:
        return Allocation([torch.minimum(x, torch.full_like(x, b)) for x, b in zip(lengths, budgets, strict=True)])


@dataclass(frozen=True)
class Highest(Selector):
    name: ClassVar[str] = "highest"
    source: ClassVar[str] = "test"

    @property
    def scope(self) -> Scope:
        return "layer"

    def __call__(
        self, cells: Sequence[Cells], scores: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        kept = []
        for score, count in zip(scores, counts, strict=True):
            keep = torch.zeros_like(score, dtype=torch.bool)
            for index in np.ndindex(*score.shape[:2]):
                keep[index][score[index].topk(int(count[index])).indices] = True
            kept.append(keep)
        return kept


# The oracle: everything stays in the cache, and what was evicted gets -inf


class Oracle:
    """A second copy of the model on a full cache; allowed[layer] (B, K, slots) says what is not evicted."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.cache, self.allowed = model, DynamicCache(), {}
        AttentionInterface.register("oracle", self.attend)
        AttentionMaskInterface.register("oracle", eager_mask)
        model.set_attn_implementation("oracle")

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **kw: Any
    ) -> tuple[torch.Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * kw["scaling"]
        if kw.get("softcap") is not None:
            logits = kw["softcap"] * torch.tanh(logits / kw["softcap"])
        logits = logits + mask
        if module.layer_idx in self.allowed:
            allowed = self.allowed[module.layer_idx]
            new = torch.ones(*allowed.shape[:2], key.shape[2] - allowed.shape[2], dtype=torch.bool)
            gone = ~torch.cat([allowed, new], -1).repeat_interleave(groups, 1)
            logits = logits.masked_fill(gone[:, :, None], torch.finfo(logits.dtype).min)
        weights = torch.softmax(logits.float(), -1).to(query.dtype)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    def read(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.inference_mode():
            return self.model(ids, attention_mask=mask, position_ids=positions, cache=self.cache).logits

    def evict(self, kept: list[list[list[np.ndarray]]], mask: torch.Tensor) -> None:
        """kept[sequence][layer][kv_head]: true positions, as run.kept_of gives them."""
        slots = mask.shape[1]
        for layer in range(len(kept[0])):
            allowed = torch.zeros(len(kept), len(kept[0][layer]), slots, dtype=torch.bool)
            for sequence, layers in enumerate(kept):
                real = torch.nonzero(mask[sequence]).flatten()
                for head, positions in enumerate(layers[layer]):
                    allowed[sequence, head, real[torch.from_numpy(positions)]] = True
            self.allowed[layer] = allowed


def read(run: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.inference_mode():
        return run.model(ids, attention_mask=mask, position_ids=positions, cache=run.cache).logits


@pytest.mark.parametrize("storage", ["ragged", "padded", "masked"])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_full_cache_with_an_additive_mask(name: str, storage: Any) -> None:
    ids = torch.randint(2, 97, (3, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 60, dtype=torch.long)
    mask[0, :7] = 0
    mask[2, :21] = 0
    steps = [40, 10, 1, 1, 5, 1, 1, 1]
    oracle = Oracle(small_model(name))
    with evict(small_model(name), Noise(), Slanted(), Highest(), budget=9, storage=storage) as run:
        end = 0
        for number, step in enumerate(steps):
            begin, end = end, end + step
            part, seen = ids[:, begin:end], mask[:, :end]
            ours, theirs = read(run, part, seen), oracle.read(part, seen)
            real = seen[:, begin:].bool()
            assert (ours - theirs)[real].abs().max() < TOLERANCE * max(1.0, float(theirs[real].abs().max()))
            if number == 0:
                oracle.evict([run.kept_of(sequence) for sequence in range(3)], seen)
        used = [step.used for step in run.ledger.steps]
        assert len(used) == len(steps)
        # the test shows something only if evicting changes the result
        oracle.allowed.clear()
        assert (read(run, ids[:, -1:], torch.cat([mask, mask[:, -1:]], 1)) - theirs).abs().max() > 1e-3


@pytest.mark.parametrize("allocator", [Slanted(), ByLayer()])
@pytest.mark.parametrize("name", CONFIGS)
def test_chunked_prefill_evicts_every_chunk(name: str, allocator: Allocator) -> None:
    ids = torch.randint(2, 97, (2, 47), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 47, dtype=torch.long)
    mask[1, :11] = 0
    oracle, model = Oracle(small_model(name)), small_model(name)
    with evict(model, Noise(), allocator, Highest(), budget=5) as run:
        records = []
        handle = model.base_model.register_forward_hook(lambda *_: records.append([run.kept_of(0), run.kept_of(1)]))
        last = run.prefill(ids, mask, chunk=15)
        handle.remove()
    assert len(records) == 4
    for number, (begin, kept) in enumerate(zip(range(0, 47, 15), records, strict=True)):
        end = min(begin + 15, 47)
        theirs = oracle.read(ids[:, begin:end], mask[:, :end])
        oracle.evict(kept, mask[:, :end])
        lengths = [sum(len(head) for layer in kept[b] for head in layer) for b in range(2)]
        assert all(length <= 8 * 5 for length in lengths), number
    assert (last - theirs[:, -1]).abs().max() < TOLERANCE * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("name", ["llama", "qwen", "qwen3", "olmo", "gemma"])
def test_default_checkpoints_equal_the_masked_full_cache(name: str) -> None:
    """SmolLM2 and the four embedded models, as they are loaded for everything else."""

    def load() -> PreTrainedModel:
        return checkpoints.load_causal(checkpoints.find(name, None), "cpu", "float32")

    ids = torch.randint(5, 2000, (1, 240), generator=torch.Generator().manual_seed(4))
    ids[:, 0] = 1
    mask = torch.ones_like(ids)
    oracle = Oracle(load())
    with evict(load(), Noise(), Slanted(), Highest(), budget=20) as run:
        for number, (begin, end) in enumerate([(0, 200), (200, 230), (230, 231), (231, 232)]):
            ours, theirs = read(run, ids[:, begin:end], mask[:, :end]), oracle.read(ids[:, begin:end], mask[:, :end])
            assert (ours - theirs).abs().max() < TOLERANCE * float(theirs.abs().max())
            if number == 0:
                oracle.evict([run.kept], mask[:, :end])


def stored(run: Any) -> int:
    """Bytes of unique storages of all floating tensors that the cache's layers reach."""
    found = {}
    for layer in run.cache.layers:
        for page in layer.pages:
            for tensor in vars(page).values():
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_bytes_are_those_of_the_entries(name: str, dtype: torch.dtype) -> None:
    model = small_model(name, dtype)
    entry = 2 * model.config.head_dim * dtype.itemsize if name != "phi3" else 2 * 12 * dtype.itemsize
    with evict(model, Noise(), Slanted(), Highest(), budget=7) as run:
        run.prefill(torch.arange(2, 52))
        held = [len(head) for layer in run.kept for head in layer]
        assert sum(held) == 8 * 7
        assert run.bytes == stored(run) == sum(held) * entry
        assert run.side_bytes == 4 * sum(held)  # a slot is four bytes
        for _ in range(3):
            with torch.inference_mode():
                model(torch.tensor([[5]]), cache=run.cache)
            held = [len(head) for layer in run.kept for head in layer]
            assert run.bytes == stored(run) == sum(held) * entry
            assert run.bytes == run.ledger.steps[-1].nbytes
        assert run.ledger.peak_bytes >= 50 * 2 * entry  # a whole layer at least was held before it was evicted from


def test_masked_and_padded_storage_hold_more_than_they_keep() -> None:
    ids = torch.arange(2, 62)
    sizes, kept = {}, {}
    for storage in ("ragged", "padded", "masked"):
        with evict(small_model("llama"), Noise(), Slanted(), Highest(), budget=6, storage=storage) as run:
            run.prefill(ids)
            sizes[storage], kept[storage] = run.bytes, run.kept
            assert run.enforced == (storage == "ragged")
    assert sizes["ragged"] < sizes["padded"] < sizes["masked"] == 60 * 8 * 2 * 16 * 4
    widest = [max(len(head) for head in layer) for layer in kept["padded"]]
    assert sizes["padded"] == sum(2 * n for n in widest) * 2 * 16 * 4
    for storage in ("padded", "masked"):
        for ours, theirs in zip(kept[storage], kept["ragged"], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("budget", "tokens", "expected"),
    [
        (Budget(compression_ratio=0.9), 100, 10),
        (Budget(compression_ratio="0.75"), 10, 2),
        (Budget(compression_ratio=0.999), 50, 1),
        (Budget(compression_ratio=0), 50, 50),
        (Budget(nbytes=8 * 2 * 16 * 4 * 5 + 100), 40, 5),
        (Budget(entries=1), 40, 1),
        (1000, 40, 40),
        (3, 1, 1),
    ],
)
def test_budgets_keep_whole_entries_exactly(budget: Any, tokens: int, expected: int) -> None:
    with evict(small_model("llama"), Noise(), ByLayer(), Highest(), budget=budget) as run:
        run.prefill(torch.full((tokens,), 7))
        assert sum(len(head) for layer in run.kept for head in layer) == 8 * expected
        if isinstance(budget, Budget) and budget.nbytes:
            assert run.bytes <= budget.nbytes


def test_window_layers_count_with_what_they_can_hold() -> None:
    with evict(small_model("gemma3"), Noise(), Slanted(), Highest(), budget=20) as run:
        run.prefill(torch.arange(2, 80))
        layers = [sum(len(head) for head in layer) for layer in run.kept]
        assert sum(layers) == 2 * (11 + 20 + 11 + 20)
        for layer in (0, 2):
            assert all(head.min() >= 78 - 11 for head in run.kept[layer])


@dataclass(frozen=True)
class Greedy(ByLayer):
    """Takes more than it was given."""

    name: ClassVar[str] = "greedy"

    def __call__(self, scores: Any, lengths: Any, budgets: Any, first_layer: int, n_layers: int) -> Allocation:
        return Allocation([torch.minimum(x, torch.full_like(x, b + 1)) for x, b in zip(lengths, budgets, strict=True)])


@pytest.mark.parametrize("storage", ["ragged", "padded", "masked"])
def test_an_allocator_cannot_exceed_the_budget(storage: Any) -> None:
    said = r"7 entries a KV head held on average, the budget allows 6 \(56 of 48 in 8 KV heads\)"
    with (
        evict(small_model("llama"), Noise(), Greedy(), Highest(), budget=6, storage=storage) as run,
        pytest.raises(BudgetExceeded, match=said),
    ):
        run.prefill(torch.arange(2, 62))


def test_spare_entries_bound_what_is_added_after_eviction() -> None:
    model = small_model("llama")
    with evict(model, Noise(), ByLayer(), Highest(), budget=Budget(entries=6, spare=2)) as run:
        run.prefill(torch.arange(2, 62))
        with torch.inference_mode():
            model(torch.tensor([[5]]), cache=run.cache)
            model(torch.tensor([[5]]), cache=run.cache)
            with pytest.raises(BudgetExceeded):
                model(torch.tensor([[5]]), cache=run.cache)
            with pytest.raises(BadInput, match="reset"):
                model(torch.tensor([[5]]), cache=run.cache)
        run.prefill(torch.arange(2, 62))  # a new sequence is whole again


def test_a_budget_without_a_score_refuses_what_does_not_fit() -> None:
    with evict(small_model("llama"), None, budget=10) as run:
        run.prefill(torch.arange(2, 12))
        with pytest.raises(BudgetExceeded):
            run.prefill(torch.arange(2, 13))


def test_questions_leave_no_trace() -> None:
    model = small_model("gemma3")
    context, questions = (
        torch.arange(2, 62),
        [torch.tensor([9, 11, 60]), torch.tensor([17, 3]), torch.tensor([9, 11, 60])],
    )
    alone = []
    for question in questions:
        with evict(model, Noise(), Slanted(), Highest(), budget=8) as run:
            run.prefill(context)
            alone.append(run.generate(question, max_new_tokens=6))
    with evict(model, Noise(), Slanted(), Highest(), budget=8) as run:
        run.prefill(context)
        kept, size, side = run.kept, run.bytes, run.side_bytes
        for question, expected in zip(questions, alone, strict=True):
            with run.question():
                assert torch.equal(run.generate(question, max_new_tokens=6), expected)
                assert max(len(head) for layer in run.kept for head in layer) > max(
                    len(head) for layer in kept for head in layer
                )
            assert run.bytes == size and run.side_bytes == side
            for before, after in zip(kept, run.kept, strict=True):
                for a, b in zip(before, after, strict=True):
                    np.testing.assert_array_equal(a, b)
        with pytest.raises(RuntimeError, match="inside"), run.question():
            run.generate(questions[0], max_new_tokens=2)
            raise RuntimeError("inside")
        with run.question():
            assert torch.equal(run.generate(questions[1], max_new_tokens=6), alone[1])
    assert not torch.equal(alone[0], alone[1])


def test_an_open_question_copies_no_context() -> None:
    model = small_model("llama")
    with evict(model, Noise(), ByLayer(), Highest(), budget=20) as run:
        run.prefill(torch.arange(2, 62))
        size = run.bytes
        with run.question(), torch.inference_mode():
            model(torch.tensor([[5, 6, 7]]), cache=run.cache)
            assert run.bytes == size + 3 * 8 * 2 * 16 * 4


def test_the_model_is_as_before() -> None:
    model = small_model("qwen3")
    ids = torch.arange(2, 40)[None]
    before = model(ids).logits
    functions, masks = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    implementation = model.config._attn_implementation
    for broken in (False, True):
        try:
            with evict(model, Noise(), ByLayer(), Highest(), budget=5) as run:
                run.prefill(ids)
                assert model.config._attn_implementation != implementation
                if broken:
                    raise KeyError("user's")
        except KeyError:
            pass
        assert model.config._attn_implementation == implementation
        assert AttentionInterface._global_mapping == functions
        assert AttentionMaskInterface._global_mapping == masks
        for module in model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
        assert torch.equal(model(ids).logits, before)


def test_generate_needs_no_cache_argument() -> None:
    model = small_model("llama")
    ids = torch.arange(2, 42)[None]
    with evict(model, None) as run:
        ours = model.generate(ids, max_new_tokens=8, do_sample=False)
        assert [len(head) for layer in run.kept for head in layer] == [47] * 8
        assert run.ledger.mean_length("decode") == 40 + (1 + 7) / 2
        beams = model.generate(ids, max_new_tokens=8, do_sample=False, num_beams=3)
    assert torch.equal(ours, model.generate(ids, max_new_tokens=8, do_sample=False))
    assert torch.equal(beams, model.generate(ids, max_new_tokens=8, do_sample=False, num_beams=3))
    with evict(model, Noise(), ByLayer(), Highest(), budget=4) as run:
        through_model = model.generate(ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(through_model[:, 40:], run_fresh(run, ids))
        assert [step.phase for step in run.ledger.steps[:8]] == ["prefill"] + ["decode"] * 7


def run_fresh(run: Any, ids: torch.Tensor) -> torch.Tensor:
    run.reset()
    return run.generate(ids, max_new_tokens=8)


def test_left_padded_batches_generate_as_their_sequences_alone() -> None:
    model = small_model("qwen2-window")
    ids = torch.randint(2, 97, (2, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    with evict(model, Noise(), Slanted(), Highest(), budget=6) as run:
        run.prefill(ids, mask)
        kept = [run.kept_of(0), run.kept_of(1)]
        together = run.generate(torch.tensor([[5, 6], [5, 6]]), max_new_tokens=5)
        for sequence, alone in enumerate([ids[0], ids[1, 13:]]):
            run.prefill(alone)
            for ours, theirs in zip(kept[sequence], run.kept, strict=True):
                for a, b in zip(ours, theirs, strict=True):
                    np.testing.assert_array_equal(a, b)
            assert torch.equal(run.generate(torch.tensor([5, 6]), max_new_tokens=5)[0], together[sequence])


def test_what_a_score_is_given_says_whether_the_question_was_seen() -> None:
    model = small_model("llama")
    score = Noise(need=4, seen_types=([],), seen_rows=([],))
    with evict(model, score, ByLayer(), Highest(), budget=5) as run:
        run.prefill(torch.arange(2, 49), chunk=15)
        assert set(score.seen_types[0]) == {ContextRows}
        assert score.seen_rows[0] == [4] * 16  # also in the last chunk, which has two tokens
        score.seen_types[0].clear()
        run.generate(torch.tensor([5, 6]), max_new_tokens=3)
        assert not score.seen_types[0]  # question and answer are appended
        run.reset()
        run.generate(torch.arange(2, 49), chunk=15, max_new_tokens=3)
        assert set(score.seen_types[0]) == {ContextAndQuestionRows}
        score.seen_types[0].clear()
        model(torch.arange(2, 49)[None])
        assert set(score.seen_types[0]) == {ContextAndQuestionRows}


@dataclass(frozen=True)
class NotANumber(Noise):
    name: ClassVar[str] = "nan"

    def __call__(self, cells: Cells, rows: Rows) -> torch.Tensor:
        scores = super().__call__(cells, rows)
        if cells.layer == 2:
            scores[0, 1, 3] = math.nan
        return scores


def test_nan_scores_are_refused_by_place() -> None:
    with (
        evict(small_model("llama"), NotANumber(), ByLayer(), Highest(), budget=5) as run,
        pytest.raises(BadInput, match="score nan is NaN at layer 2, KV head 1, position 3"),
    ):
        run.prefill(torch.arange(2, 42))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "snap"}, "unknown score 'snap': expected one of"),
        ({"allocator": "nobody", "budget": 4}, "unknown allocator"),
        ({"selector": "best", "budget": 4}, "unknown selector"),
        ({"budget": None}, "needs one"),
        ({"budget": 0}, "at least 1"),
        ({"budget": 0.5}, "expected entries per KV head"),
        ({"budget": True}, "expected entries per KV head"),
        ({"storage": "disk", "budget": 4}, "unknown storage"),
    ],
)
def test_bad_options_are_one_clear_line(options: dict[str, Any], message: str) -> None:
    options = {"score": Noise(), "allocator": ByLayer(), "selector": Highest(), "budget": 4, **options}
    with pytest.raises(BadInput, match=message), evict(small_model("llama"), **options):
        pass


def test_models_without_support_are_refused() -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(BadInput, match="encoder-decoder"), evict(t5, Noise(), ByLayer(), Highest(), budget=4):
        pass
    with pytest.raises(BadInput, match="expected a model of transformers"), evict(torch.nn.Linear(2, 2), budget=4):
        pass


def test_another_cache_or_none_is_refused() -> None:
    model = small_model("llama")
    other = DynamicCache()
    model(torch.tensor([[3, 4]]), cache=other)
    with evict(model, Noise(), ByLayer(), Highest(), budget=4) as run:
        with pytest.raises(BadInput, match="not the run's"):
            model(torch.tensor([[5]]), cache=other)
        with pytest.raises(BadInput, match="use_cache=False"):
            model(torch.tensor([[5]]), use_cache=False)
        with pytest.raises(BadInput, match="nothing was read"), run.question():
            pass
        run.prefill(torch.arange(2, 22))
        with run.question(), pytest.raises(BadInput, match="inside question"):
            model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
        right = torch.tensor([[1, 1, 1], [1, 1, 0]])
        with pytest.raises(BadInput, match="on the left"):
            run.prefill(torch.full((2, 3), 5), right, chunk=2)
        with pytest.raises(BadInput, match=r"the context read by run.prefill would be forgotten"):
            model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
        run.reset()
        with pytest.raises(BadInput, match="on the left"):
            model(torch.full((2, 3), 5), attention_mask=right)
        run.reset()
        with pytest.raises(BadInput, match="no tokens"):
            run.prefill(torch.empty(1, 0, dtype=torch.long))
        with pytest.raises(BadInput, match="inside evict"), evict(model, Noise(), ByLayer(), Highest(), budget=4):
            pass
    assert isinstance(run.cache, RaggedCache)


def as_lists(kept: list[list[Any]]) -> list[list[list[int]]]:
    return [[head.tolist() for head in layer] for layer in kept]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_whole_prompt_in_chunks_is_evicted_from_to_its_end(name: str) -> None:
    """As prefill in the same chunks is, but for what its rows say: the question is among them."""
    model, ids = small_model(name), torch.arange(2, 49)
    with evict(model, Noise(), Slanted(), Highest(), budget=6) as run:
        run.prefill(ids, chunk=15)
        expected, phases = run.kept, [(step.phase, step.tokens) for step in run.ledger.steps]
    with evict(model, Noise(), Slanted(), Highest(), budget=6) as run:
        run.generate(ids, max_new_tokens=1, chunk=15)
        assert [(step.phase, step.tokens) for step in run.ledger.steps] == phases
        assert as_lists(run.kept) == as_lists(expected)
        run.reset()
        run.generate(ids, max_new_tokens=3, chunk=15)
        assert [step.phase for step in run.ledger.steps[-3:]] == ["prefill", "decode", "decode"]
    batch = torch.stack([ids, torch.cat([torch.zeros(20, dtype=torch.int64), ids[:27]])])
    mask = torch.ones_like(batch)
    mask[1, :20] = 0
    with evict(model, "snapkv:window=4", budget=8) as run:
        both = run.generate(batch, attention_mask=mask, max_new_tokens=4, chunk=15, pad_token_id=0)
        kept = run.kept_of(0)
        run.reset()
        alone = run.generate(ids, max_new_tokens=4, chunk=15, pad_token_id=0)
        assert torch.equal(both[:1], alone)
        assert as_lists(run.kept) == as_lists(kept)


@pytest.mark.parametrize("score", ["snapkv:window=4", "kvzip"])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True, "seed": 7}])
def test_several_answers_to_a_prompt_in_chunks(score: str, options: dict[str, Any]) -> None:
    """As to a prompt that is read at once, for a budget that evicts nothing."""
    model, ids = small_model("llama"), torch.arange(2, 49)
    options = dict(options)
    seed, answers = options.pop("seed", 0), []
    for chunk in (None, 10):
        with evict(model, score, budget=60) as run:
            torch.manual_seed(seed)
            answers.append(run.generate(ids, chunk=chunk, max_new_tokens=4, pad_token_id=0, **options))
    assert torch.equal(*answers)


def test_an_option_that_is_refused_leaves_things_as_they_were() -> None:
    model, ids, asked = small_model("llama"), torch.arange(2, 49), torch.arange(3, 9)
    with evict(model, "snapkv:window=4", budget=12) as run:
        expected = run.generate(ids, chunk=16, max_new_tokens=4)
        run.reset()
        with pytest.raises(ValueError, match="max_new_token"):
            run.generate(ids, chunk=16, max_new_token=5)
        assert torch.equal(run.generate(ids, chunk=16, max_new_tokens=4), expected)
        run.reset()
        run.prefill(ids)
        with run.question():
            with pytest.raises(ValueError, match="max_new_token"):
                run.generate(asked, num_beams=2, max_new_token=5)
            first = run.generate(asked, num_beams=2, max_new_tokens=3)
        with run.question():
            assert torch.equal(run.generate(asked, num_beams=2, max_new_tokens=3), first)


@pytest.mark.parametrize("score", ["knorm", "snapkv:window=4", "h2o", "kvzip"])
def test_padding_that_all_lines_share_is_no_chunk(score: str) -> None:
    model, ids = small_model("llama"), torch.randint(2, 97, (2, 50), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :35], mask[1, :31] = 0, 0
    with evict(model, score, budget=6) as run:
        run.prefill(ids, mask, chunk=10)
        kept = [run.kept_of(b) for b in range(2)]
        run.reset()
        run.generate(ids, attention_mask=mask, chunk=10, max_new_tokens=1, pad_token_id=0)
        run.reset()
        run.prefill(ids[:, 31:], mask[:, 31:], chunk=10)
        assert [as_lists(run.kept_of(b)) for b in range(2)] == [as_lists(x) for x in kept]


def test_numbers_of_generate_are_checked() -> None:
    model, ids = small_model("llama"), torch.randint(2, 97, (3, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with evict(model, "snapkv:window=4", budget=8) as run:
        for wrong in (0, -1, 2.5, "a", True):
            with pytest.raises(BadInput, match=f"generate: chunk={wrong}"):
                run.generate(ids, chunk=wrong)  # type: ignore[arg-type]
            with pytest.raises(BadInput, match=f"generate: num_beams={wrong}"):
                run.generate(ids, num_beams=wrong)
        run.prefill(ids, mask)
        with run.question():
            for lines in (2, 4):
                with pytest.raises(BadInput, match=f"{lines} sequences fed to a cache of 3"):
                    run.generate(torch.full((lines, 3), 7), max_new_tokens=2)
            with pytest.raises(BadInput, match="chunk= is for a whole prompt"):
                run.generate(torch.full((3, 3), 7), chunk=2)


@pytest.mark.parametrize("score", ["h2o", "snapkv:window=16", "knorm"])
def test_side_bytes_count_what_a_question_will_fall_back_to(score: str) -> None:
    with evict(small_model("llama"), score, budget=20, decode=Decode()) as run:
        run.prefill(torch.arange(2, 62))
        layers = run.cache.layers
        before = run.side_bytes
        memory = sum(tensor.nbytes for layer in layers for tensor in layer.memory.values())
        with run.question():
            run.generate(torch.tensor([[5]]), min_new_tokens=30, max_new_tokens=30, pad_token_id=0)
            slots = sum(page.slots.nbytes for layer in layers for page in layer.pages)
            mine = slots + sum(tensor.nbytes for layer in layers for tensor in layer.memory.values())
            rows = run._passes.compressor.rows().values()
            mine += sum(tensor.nbytes for layer_rows in rows for tensor in layer_rows.tensors)
            assert run.side_bytes >= before + mine
            assert (memory > 0) == (score == "h2o")
        assert run.side_bytes == before


def test_generate_returns_what_was_asked_for() -> None:
    model, ids = small_model("llama"), torch.arange(2, 22)
    with evict(model, Noise(), Slanted(), Highest(), budget=6) as run:
        plain = run.generate(ids, max_new_tokens=4)
        run.reset()
        found = run.generate(ids, max_new_tokens=4, return_dict_in_generate=True, output_scores=True)
        assert torch.equal(found.sequences, plain) and len(found.scores) == 4


def test_a_run_says_what_it_holds_and_refuses_what_there_is_not() -> None:
    with evict(small_model("llama"), Noise(), ByLayer(), Highest(), budget=4) as run:
        assert repr(run) == "Run(tokens read: nothing; entries a KV head on average: 0.0; bytes: 0)"
        run.prefill(torch.arange(2, 22))
        assert repr(run).startswith("Run(tokens read: 20; entries a KV head on average: 4.0; bytes: ")
        with pytest.raises(BadInput, match="sequence 1: expected 0 to 0"):
            run.kept_of(1)
        with pytest.raises(BadInput, match="phase 'decoding': expected one of prefill, question, decode"):
            run.ledger.mean_length("decoding")  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="got dict: pass its input_ids"):
            run.prefill({"input_ids": torch.arange(2, 22)})  # type: ignore[arg-type]
        with pytest.raises(BadInput, match=r"got torch.float32 \(3,\)"):
            run.prefill(torch.zeros(3))


class Unnamed(Score):
    """A score without a name that says it reads no rows, and reads them."""

    def rows_needed(self, budget: int) -> int:
        return 0

    def __call__(self, cells: Cells, rows: Rows) -> torch.Tensor:
        return rows.weights(cells).sum((2, 3))


class Counts(Slanted):
    """An allocator that returns its counts alone."""

    def __call__(self, *given: Any) -> Any:
        return super().__call__(*given).counts


def test_mistakes_of_parts_are_named() -> None:
    model, ids = small_model("llama"), torch.arange(2, 22)
    assert Unnamed.name == "Unnamed" and Unnamed.source == ""
    with evict(model, Unnamed(), budget=4) as run, pytest.raises(BadInput, match=r"rows_needed\(\) said that none"):
        run.prefill(ids)
    with evict(model, Noise(), Counts(), budget=4) as run, pytest.raises(BadInput, match="expected an Allocation"):
        run.prefill(ids)
    unscoped = Slanted()
    object.__setattr__(unscoped, "scope", "layers")
    with (
        pytest.raises(BadInput, match="scope 'layers': expected layer or model"),
        evict(model, Noise(), unscoped, budget=4),
    ):
        pass
    with pytest.raises(BadInput, match=r"decode 16: expected a Decode"), evict(model, "knorm", budget=4, decode=16):  # type: ignore[arg-type]
        pass


def test_gradients_flow_through_what_is_read_and_not_through_the_cache() -> None:
    model = small_model("llama")
    with evict(model, Noise(), ByLayer(), Highest(), budget=4) as run:
        run.prefill(torch.arange(2, 42))
        model(torch.tensor([[5, 6]]), cache=run.cache).logits.sum().backward()
        model(torch.tensor([[7]]), cache=run.cache).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_a_new_prompt_starts_a_new_sequence() -> None:
    model = small_model("llama")
    with evict(model, Noise(), ByLayer(), Highest(), budget=4) as run, torch.inference_mode():
        first = model(torch.arange(2, 42)[None]).logits
        model(torch.arange(12, 22)[None])
        assert torch.equal(model(torch.arange(2, 42)[None]).logits, first)
        assert max(int(head.max()) for layer in run.kept for head in layer) == 39


def test_decoding_evicts_to_the_budget_by_slack() -> None:
    ids = torch.randint(2, 97, (1, 60), generator=torch.Generator().manual_seed(6))
    mask = torch.ones_like(ids)
    for slack, lengths in ((0, [6] * 9), (3, [7, 8, 9, 6, 7, 8, 9, 6, 7])):
        for name in ("llama", "gemma3"):
            oracle = Oracle(small_model(name))
            with evict(small_model(name), Noise(), ByLayer(), Highest(), budget=6, decode=Decode(slack=slack)) as run:
                for number, (begin, end) in enumerate([(0, 40), *((i, i + 1) for i in range(40, 49))]):
                    ours = read(run, ids[:, begin:end], mask[:, :end])
                    theirs = oracle.read(ids[:, begin:end], mask[:, :end])
                    assert (ours - theirs).abs().max() < TOLERANCE * max(1.0, float(theirs.abs().max()))
                    oracle.evict([run.kept], mask[:, :end])
                    if number:
                        held = [len(head) for layer in run.kept for head in layer]
                        # what was kept in a window may leave it before the next eviction
                        assert sum(held) == 8 * lengths[number - 1] or (
                            name == "gemma3" and sum(held) < 8 * (6 + slack)
                        )
                assert (
                    name == "gemma3" or run.ledger.mean_length("decode") == sum(x + 1 for x in [6, *lengths[:-1]]) / 9
                )


def test_decoding_evicts_every_so_many_steps() -> None:
    model = small_model("llama")
    with evict(model, Noise(), ByLayer(), Highest(), budget=6, decode=Decode(every=4)) as run:
        run.prefill(torch.arange(2, 42))
        run.generate(torch.tensor([5]), max_new_tokens=9)
        assert [step.kept[0][0] + step.kept[0][1] for step in run.ledger.steps[1:]] == [
            14,
            16,
            18,
            12,
            14,
            16,
            18,
            12,
            14,
        ]


@pytest.mark.parametrize(("prompt", "held"), [("pinned", 15), ("on_top", 25)])
def test_pinned_prompts_stay(prompt: Any, held: int) -> None:
    model = small_model("llama")
    with evict(model, Noise(), Even(), Highest(), budget=15, decode=Decode(prompt=prompt)) as run:
        run.prefill(torch.arange(2, 12))
        run.generate(torch.tensor([5, 6]), max_new_tokens=40)
        for layer in run.kept:
            for head in layer:
                assert set(range(10)) <= set(head.tolist())
        assert sum(len(head) for layer in run.kept for head in layer) == 8 * held


def test_an_allocator_that_takes_from_a_pinned_prompt_is_refused() -> None:
    with (
        evict(small_model("llama"), Noise(), Slanted(), Highest(), budget=15, decode=Decode(prompt="pinned")) as run,
        pytest.raises(BadInput, match="fewer entries than the pinned prompt of 10"),
    ):
        run.prefill(torch.arange(2, 12))
        run.generate(torch.tensor([5, 6]), max_new_tokens=40)


def test_a_pinned_prompt_that_fills_the_budget_is_refused() -> None:
    with (
        evict(small_model("llama"), Noise(), ByLayer(), Highest(), budget=10, decode=Decode(prompt="pinned")) as run,
        pytest.raises(BadInput, match="leaves nothing"),
    ):
        run.prefill(torch.arange(2, 12))


def test_rows_are_kept_while_decoding() -> None:
    score = Noise(need=4, seen_types=([],), seen_rows=([],))
    with evict(small_model("llama"), score, ByLayer(), Highest(), budget=5, decode=Decode(slack=2)) as run:
        run.prefill(torch.arange(2, 22))
        with run.question():
            run.generate(torch.tensor([5]), max_new_tokens=8)
        assert set(score.seen_rows[0]) == {4} and len(score.seen_rows[0]) > 4
        before = run.side_bytes
        with run.question():
            run.generate(torch.tensor([5]), max_new_tokens=8)
        assert run.side_bytes == before


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_questions_of_unequal_length_in_one_batch(name: str) -> None:
    model = small_model(name)
    ids = torch.randint(2, 97, (2, 40), generator=torch.Generator().manual_seed(3))
    question, mask = torch.tensor([[5, 6, 9], [0, 0, 7]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
    with evict(model, Noise(), Even(), Highest(), budget=6) as run:
        run.prefill(ids)
        together = run.generate(question, attention_mask=mask, max_new_tokens=5)
        assert [int(run.kept_of(b)[1][0][-1]) for b in range(2)] == [40 + 3 + 3, 40 + 1 + 3]  # positions skip padding
        if name == "llama":  # windows count the slots of padding, as transformers does
            for sequence in range(2):
                run.prefill(ids[sequence])
                alone = run.generate(question[sequence][mask[sequence].bool()], max_new_tokens=5)
                assert torch.equal(alone[0], together[sequence])


def test_a_model_whose_decoder_is_not_called_is_refused() -> None:
    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=97,
            hidden_size=32,
            ffn_dim=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=32,
        )
    ).eval()
    with evict(model, Noise(), Even(), Highest(), budget=6) as run, pytest.raises(BadInput, match="not supported"):
        run.prefill(torch.arange(2, 42))


def test_a_cache_that_is_not_whole_stays_so_until_reset() -> None:
    model = small_model("llama")
    with evict(model, Noise(), Even(), Highest(), budget=6) as run:
        run.prefill(torch.arange(2, 42))
        hook = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.generate(torch.tensor([5]), max_new_tokens=2)
        hook.remove()
        with pytest.raises(BadInput, match="not whole"), run.question():
            pass
        with pytest.raises(BadInput, match="not whole"):
            run.generate(torch.tensor([5]), max_new_tokens=2)
        run.prefill(torch.arange(2, 42))
        with run.question():
            run.generate(torch.tensor([5]), max_new_tokens=2)


def test_a_run_that_has_ended_is_refused() -> None:
    model = small_model("llama")
    with evict(model, Noise(), Even(), Highest(), budget=6) as run:
        run.prefill(torch.arange(2, 42))
    assert len(run.kept[0][0]) == 6
    for use in (
        lambda: model(torch.tensor([[5]]), cache=run.cache),
        lambda: run.prefill(torch.arange(2, 42)),
        lambda: run.generate(torch.tensor([5])),
    ):
        with pytest.raises(BadInput, match="has ended"):
            use()


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_several_answers_to_one_question(options: dict[str, Any]) -> None:
    model = small_model("llama")
    with evict(model, None) as run:
        run.prefill(torch.arange(2, 42))
        torch.manual_seed(0)
        with run.question():
            ours = run.generate(torch.tensor([5, 6]), max_new_tokens=6, **options)
        assert [len(head) for head in run.kept[0]] == [40, 40]
        with pytest.raises(BadInput, match="inside"):
            run.generate(torch.tensor([5, 6]), max_new_tokens=6, **options)
    torch.manual_seed(0)
    whole = torch.cat([torch.arange(2, 42), torch.tensor([5, 6])])[None]
    assert torch.equal(ours, model.generate(whole, max_new_tokens=6, **{"do_sample": False, **options})[:, 42:])


def test_rows_follow_their_beams() -> None:
    score = Noise(need=3, seen_types=([],), seen_rows=([],))
    with evict(small_model("llama"), score, Even(), Highest(), budget=8, decode=Decode()) as run:
        run.generate(torch.arange(2, 22), max_new_tokens=2)
        rows = run._passes.compressor.rows()
        order = torch.tensor([0, 0])
        run.cache.reorder_cache(order)
        for number, kept in run._passes.compressor.rows().items():
            assert torch.equal(kept.queries, rows[number].queries[order])
        assert len(run.cache.layers[0].lengths) == 4


@pytest.mark.parametrize("slack", [0, 3])
def test_storage_changes_bytes_and_nothing_else_while_decoding(slack: int) -> None:
    kept, said = {}, {}
    for storage in ("ragged", "padded", "masked"):
        with evict(
            small_model("llama"), Noise(), Slanted(), Highest(), budget=6, storage=storage, decode=Decode(slack=slack)
        ) as run:
            run.prefill(torch.arange(2, 42))
            said[storage] = run.generate(torch.tensor([5, 6]), max_new_tokens=9)
            kept[storage] = [head.tolist() for layer in run.kept for head in layer]
    assert kept["ragged"] == kept["padded"] == kept["masked"]
    assert torch.equal(said["ragged"], said["masked"]) and torch.equal(said["ragged"], said["padded"])


def test_a_batch_keeps_while_decoding_what_its_sequences_keep_alone() -> None:
    model = small_model("llama")
    ids = torch.randint(2, 97, (2, 30), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    mask[1, :28] = 0
    steps = torch.randint(2, 97, (9, 1), generator=torch.Generator().manual_seed(9))

    def after(lines: torch.Tensor, seen: torch.Tensor | None) -> list[list[list[int]]]:
        with evict(model, Noise(), Even(), Highest(), budget=6, decode=Decode(slack=3)) as run:
            run.prefill(lines, seen)
            for step in steps:
                whole = None if seen is None else torch.ones(len(lines), run.cache.get_seq_length() + 1).long()
                if whole is not None and seen is not None:
                    whole[:, : seen.shape[1]] = seen
                read_one(run, step.expand(len(lines), 1), whole)
            return [[head.tolist() for layer in run.kept_of(b) for head in layer] for b in range(len(lines))]

    together = after(ids, mask)
    assert together == [after(ids[:1], None)[0], after(ids[1:, 28:], None)[0]]


def read_one(run: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
    with torch.no_grad():
        positions = None if mask is None else (mask.cumsum(-1) - 1)[:, -1:]
        run.model(ids, attention_mask=mask, position_ids=positions, cache=run.cache)


def test_budgets_in_bytes_hold_everything() -> None:
    model = small_model("llama")
    for options in (
        {"allocator": "contour:floor=2,floor_counts=false"},
        {"allocator": Even(), "decode": Decode(prompt="on_top")},
    ):
        with pytest.raises(BadInput, match="in bytes"), evict(model, Noise(), budget=Budget(nbytes=20480), **options):
            pass
    ids, mask = torch.full((2, 20), 5), torch.ones(2, 20).long()
    mask[1, :19] = 0
    with evict(model, Noise(), Even(), Highest(), budget=Budget(nbytes=8192)) as run:
        run.prefill(ids, mask, chunk=8)  # in the first chunk a sequence has nothing but padding
        assert sum(len(head) for layer in run.kept_of(0) for head in layer) == 8192 // (2 * 16 * 4)


def test_the_ledger_knows_batches_of_different_sizes() -> None:
    with evict(small_model("llama"), Noise(), Even(), Highest(), budget=4) as run:
        run.prefill(torch.arange(2, 42))
        run.prefill(torch.arange(2, 42).repeat(3, 1))
        table = run.ledger.table()
    assert table.filter(step=0)["sequence"].unique().to_list() == [0]
    assert table.filter(step=1)["sequence"].unique().sort().to_list() == [0, 1, 2]
    assert table["kv_head"].max() == 1 and table.height == 4 * 2 * (1 + 3)


@dataclass(frozen=True)
class Nothing(Even):
    """All entries to the last layer."""

    scope: ClassVar[Scope] = "model"

    def __call__(self, scores: Any, lengths: Any, budgets: Any, first_layer: int, n_layers: int) -> Allocation:
        counts = [torch.zeros_like(x) for x in lengths]
        counts[-1] += 4
        return Allocation(counts)


def test_layers_may_be_left_with_nothing() -> None:
    with evict(small_model("llama"), Noise(), Nothing(), Highest(), budget=1) as run:
        run.prefill(torch.arange(2, 42))
        assert [len(head) for layer in run.kept for head in layer] == [0] * 6 + [4, 4]
        run.generate(torch.tensor([5]), max_new_tokens=2)


@dataclass(frozen=True)
class Wrong(Even):
    """Returns what an allocator must not."""

    how: str = "float"

    def __call__(self, scores: Any, lengths: Any, budgets: Any, first_layer: int, n_layers: int) -> Allocation:
        x = lengths[0]
        counts = {"float": x * 0.5, "shape": x[:1], "negative": x * 0 - 1, "long": x + 1}
        return Allocation([counts[self.how]])


@pytest.mark.parametrize("how", ["float", "shape", "negative", "long"])
def test_an_allocators_mistakes_are_its_own(how: str) -> None:
    with (
        evict(small_model("llama"), Noise(), Wrong(how), Highest(), budget=5) as run,
        pytest.raises(BadInput, match="allocator slanted"),
    ):
        run.prefill(torch.arange(2, 42))


@dataclass(frozen=True)
class Careless(Highest):
    """Keeps entries that are not held, too."""

    def __call__(self, cells: Any, scores: Any, counts: Any) -> list[torch.Tensor]:
        return [keep | ~cell.held for keep, cell in zip(super().__call__(cells, scores, counts), cells, strict=True)]


def test_a_selector_may_only_keep_what_is_held() -> None:
    mask = torch.ones(2, 40).long()
    mask[1, :20] = 0
    with (
        evict(small_model("llama"), Noise(), Even(), Careless(), budget=5) as run,
        pytest.raises(BadInput, match="selector highest"),
    ):
        run.prefill(torch.full((2, 40), 5), mask)
