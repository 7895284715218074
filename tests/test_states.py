"""Pooled slots and coded values against a full cache that is attended to entry by entry."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import eager_mask

from data import BadInput
from eviction import Budget, Decode, attention, evict
from eviction.basis import Basis, fit
from eviction.method import Cells, Rows, State
from eviction.ragged import Page, joined, padded
from eviction.states.span_mean import SpanMean, spans
from eviction.states.subspace import Subspace
from tests.test_run import CONFIGS, TOLERANCE, Even, Highest, Noise, Slanted, small_model

CONTEXTS = ["llama", "gemma2", "qwen3"]  # plain; soft-capped, with windows; with QK-norm


def noise(layer: int, head: int, position: int) -> float:
    """What the score Noise says."""
    return float(torch.rand(1000, generator=torch.Generator().manual_seed(layer))[position + 13 * head])


@dataclass
class Entry:
    key: np.ndarray
    value: np.ndarray
    slot: int
    position: int
    tokens: int = 1


def cut(entries: list[Any], tokens: list[int], parts: int) -> list[list[Any]]:
    """The entries in order in that many parts, none empty, of nearly equal tokens."""
    found: list[list[Any]] = [[] for _ in range(parts)]
    part, before = -1, 0
    for rank, (entry, n) in enumerate(zip(entries, tokens, strict=True)):
        if parts:
            middle = math.floor(Fraction(parts * (2 * before + n), 2 * sum(tokens)))
            part = max(min(middle, part + 1), parts - (len(entries) - rank))
            found[part].append(entry)
        before += n
    assert all(found)
    return found


@dataclass
class Reference:
    """A model whose attention is written out: per layer, sequence and KV head a list of entries, seen one by one.

    slots: pooled slots at most. rank: of the values' basis, fitted when a cell is first compressed.
    """

    model: PreTrainedModel
    slots: int = 0
    rank: int | None = None
    held: dict[tuple[int, int, int], list[Entry]] = field(default_factory=dict)
    projections: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    read: int = 0

    def __post_init__(self) -> None:
        self.cache = DynamicCache()
        AttentionInterface.register("entries", self.attend)
        AttentionMaskInterface.register("entries", eager_mask)
        self.model.set_attn_implementation("entries")

    def step(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.real = mask.bool()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.positions = positions
        with torch.inference_mode():
            logits = self.model(
                ids, attention_mask=mask, position_ids=positions[:, -ids.shape[1] :], cache=self.cache
            ).logits
        self.read = mask.shape[1]
        return logits

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **kw: Any
    ) -> tuple[torch.Tensor, None]:
        batch, heads, count, _ = query.shape
        kv_heads, length = key.shape[1:3]
        output = torch.zeros(batch, count, heads, value.shape[-1])
        for b in range(batch):
            for head in range(heads):
                mine = module.layer_idx, b, head // (heads // kv_heads)
                entries = self.held.setdefault(mine, [])
                if head % (heads // kv_heads) == 0:
                    for slot in range(length - count, length):
                        if self.real[b, slot]:
                            v = self.project(mine, value[b, mine[2], slot].double().numpy())
                            k = key[b, mine[2], slot].double().numpy()
                            entries.append(Entry(k, v, slot, int(self.positions[b, slot])))
                keys, values = (np.array([getattr(e, x) for e in entries]) for x in ("key", "value"))
                logits = query[b, head].double().numpy() @ keys.T * kw["scaling"]
                if kw.get("softcap") is not None:
                    logits = kw["softcap"] * np.tanh(logits / kw["softcap"])
                for t in range(count):
                    if self.real[b, length - count + t]:
                        weights = np.array([e.tokens * bool(mask[b, 0, t, e.slot] == 0) for e in entries])
                        weights = weights * np.exp(logits[t] - logits[t].max())
                        output[b, t, head] = torch.from_numpy(weights @ values / weights.sum())
        return output, None

    def project(self, cell: tuple[int, int, int], value: np.ndarray) -> np.ndarray:
        if cell not in self.projections:
            return value
        mean, directions = self.projections[cell]
        return mean + directions.T @ (directions @ (value - mean))

    def compress(self, cell: tuple[int, int, int], count: int) -> None:
        """Keep `count` entries of a cell: exact ones by the score Noise, and slots."""
        layer, _, head = cell
        window = None
        if getattr(self.model.config, "layer_types", ["full_attention"] * 4)[layer] == "sliding_attention":
            window = self.model.config.sliding_window
        entries = [e for e in self.held[cell] if window is None or e.slot >= self.read - window + 1]
        if self.rank is not None and cell not in self.projections and entries:
            values = np.array([e.value for e in entries])
            directions = np.linalg.svd(values - values.mean(0))[2][: self.rank]
            self.projections[cell] = values.mean(0), directions
            for entry in entries:
                entry.value = self.project(cell, entry.value)
        self.held[cell] = entries
        if count == len(entries):
            return
        pooled = min(self.slots, count // 2)
        by_score = sorted(entries, key=lambda e: -noise(layer, head, e.position))
        kept = by_score[: count - pooled]
        gone = [e for e in entries if not any(e is other for other in kept)]
        for part in cut(gone, [e.tokens for e in gone], pooled):
            tokens = sum(e.tokens for e in part)
            key, value = (
                sum(e.tokens * x for e, x in zip(part, xs, strict=True)) / tokens
                for xs in ([e.key for e in part], [e.value for e in part])
            )
            kept.append(Entry(key, value, part[-1].slot, part[-1].position, tokens))
        self.held[cell] = sorted(kept, key=lambda e: e.slot)

    def follow(self, run: Any) -> None:
        """Compress what the run compressed, to the counts that it holds; it must hold the same positions then."""
        for b in range(self.real.shape[0]):
            for layer, heads in enumerate(run.kept_of(b)):
                for head, positions in enumerate(heads):
                    self.compress((layer, b, head), len(positions))
                    assert [e.position for e in self.held[layer, b, head]] == positions.tolist()


def read(run: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.inference_mode():
        return run.model(ids, attention_mask=mask, position_ids=positions, cache=run.cache).logits


def ragged_batch(length: int, *pads: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(2, 97, (len(pads), length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return ids, mask


def agree(ours: torch.Tensor, theirs: torch.Tensor, real: torch.Tensor) -> None:
    assert (ours - theirs)[real].abs().max() < TOLERANCE * max(1.0, float(theirs[real].abs().max()))


def masses(run: Any) -> list[list[list[int]]]:
    """Tokens that the entries of every cell stand for, by layer."""
    found = []
    for layer in run.cache.layers:
        held = layer.candidates()
        mass = torch.ones_like(held.slots) if held.mass is None else held.mass
        found.append([mass[cell, :length].tolist() for cell, length in enumerate(held.lengths)])
    return found


STATES: list[tuple[State, dict[str, Any]]] = [(SpanMean(slots=3), {"slots": 3}), (Subspace(rank=5), {"rank": 5})]


@pytest.mark.parametrize(("state", "options"), STATES, ids=["span_mean", "subspace"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_equals_a_full_cache_entry_by_entry(name: str, state: State, options: dict[str, Any]) -> None:
    ids, mask = ragged_batch(38, 0, 9)
    reference = Reference(small_model(name), **options)
    with evict(small_model(name), Noise(), Slanted(), Highest(), budget=7, state=state) as run:
        end = 0
        for number, step in enumerate([28, 1, 5, 1, 1]):
            begin, end = end, end + step
            part, seen = ids[:, begin:end], mask[:, :end]
            agree(read(run, part, seen), reference.step(part, seen), seen[:, begin:].bool())
            if number == 0:
                reference.follow(run)


@pytest.mark.parametrize("state", [state for state, _ in STATES], ids=["span_mean", "subspace"])
def test_a_state_changes_what_follows(state: State) -> None:
    found = []
    for each in ("exact", state):
        with evict(small_model("llama"), Noise(), Slanted(), Highest(), budget=7, state=each) as run:
            run.prefill(torch.arange(2, 42))
            found.append(read(run, torch.tensor([[7]]), torch.ones(1, 41, dtype=torch.long)))
    assert (found[0] - found[1]).abs().max() > 1e-3


@pytest.mark.parametrize(("state", "options"), STATES, ids=["span_mean", "subspace"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_chunks_and_decoding_compress_again(name: str, state: State, options: dict[str, Any]) -> None:
    ids, mask = ragged_batch(42, 0, 4)  # a first chunk of more tokens than directions: fewer leave some to chance
    reference = Reference(small_model(name), **options)
    with evict(small_model(name), Noise(), Even(), Highest(), budget=6, state=state, decode=Decode(slack=1)) as run:
        records: list[Any] = []
        model = run.model
        handle = model.base_model.register_forward_hook(
            lambda *_: records.append([[[x.copy() for x in layer] for layer in run.kept_of(b)] for b in range(2)])
        )
        run.prefill(ids[:, :36], mask[:, :36], chunk=12)
        handle.remove()
        assert len(records) == 3
        for kept, end in zip(records, (12, 24, 36), strict=True):
            reference.step(ids[:, end - 12 : end], mask[:, :end])
            reference.follow(type("Then", (), {"kept_of": lambda _, b, kept=kept: kept[b]})())
        for end in range(37, 43):
            part, seen = ids[:, end - 1 : end], mask[:, :end]
            agree(read(run, part, seen), reference.step(part, seen), seen[:, end - 1 :].bool())
            held = [sum(len(head) for layer in run.kept_of(b) for head in layer) for b in range(2)]
            assert max(held) <= 8 * (6 + 1)
            reference.follow(run)
        expected = [
            [[e.tokens for e in reference.held[layer, b, head]] for b in range(2) for head in range(2)]
            for layer in range(4)
        ]
        assert masses(run) == expected
        if isinstance(state, SpanMean):
            assert max(max(cell) for layer in expected for cell in layer) > 4


def test_a_cell_that_held_nothing_is_fitted_to_what_comes_first() -> None:
    ids, mask = ragged_batch(30, 0, 14)  # the second sequence begins in the second chunk
    with evict(small_model("llama"), Noise(), Even(), Highest(), budget=6, state=Subspace(rank=16)) as run:
        with evict(small_model("llama"), Noise(), Even(), Highest(), budget=6) as exact:
            expected = exact.prefill(ids, mask, chunk=10)
        agree(run.prefill(ids, mask, chunk=10), expected, torch.ones(2, dtype=torch.bool))
        basis = run.cache.layers[0].basis
        assert basis is not None and basis.fitted == (True,) * 4


@pytest.mark.parametrize("name", CONFIGS)
def test_a_full_rank_is_exact(name: str) -> None:
    model = small_model(name)
    ids, mask = ragged_batch(40, 0, 13)
    found = []
    for state in ("exact", f"subspace:rank={model.config.hidden_size // 4 if name in ('olmo2', 'phi3') else 16}"):
        with evict(model, Noise(), Slanted(), Highest(), budget=9, state=state) as run:
            read(run, ids[:, :32], mask[:, :32])
            found.append(torch.cat([read(run, ids[:, n : n + 4], mask[:, : n + 4]) for n in (32, 36)], 1))
    agree(found[1], found[0], torch.ones(2, 8, dtype=torch.bool))


@pytest.mark.parametrize("name", CONTEXTS)
def test_no_slots_are_exact_bit_for_bit(name: str) -> None:
    ids, mask = ragged_batch(40, 0, 13)
    found = []
    for state in ("exact", "span_mean:slots=0"):
        with evict(small_model(name), Noise(), Slanted(), Highest(), budget=9, state=state, decode=Decode()) as run:
            read(run, ids[:, :32], mask[:, :32])
            found.append(torch.cat([read(run, ids[:, n : n + 1], mask[:, : n + 1]) for n in range(32, 40)], 1))
            assert all(page.mass is None for layer in run.cache.layers for page in layer.pages)
    assert torch.equal(*found)


@pytest.mark.parametrize("state", ["span_mean", "subspace"])
def test_nothing_changes_where_nothing_is_evicted(state: str) -> None:
    model = small_model("llama")
    with evict(
        model, Noise(), Even(), Highest(), budget=100, state=f"{state}:{'slots' if state == 'span_mean' else 'rank'}=16"
    ) as run:
        run.prefill(torch.arange(2, 42))
        assert run.kept[0][0].tolist() == list(range(40))
        assert all(page.mass is None for layer in run.cache.layers for page in layer.pages)
        assert (run.cache.layers[0].basis is None) == (state == "span_mean")  # values are coded all the same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [None, 13])
def test_masses_are_the_tokens_read(dtype: torch.dtype, chunk: int | None) -> None:
    ids, mask = ragged_batch(300, 0, 61)
    with evict(
        small_model("llama", dtype), Noise(), Even(), Highest(), 9, decode=Decode(), state="span_mean:slots=4"
    ) as run:
        run.prefill(ids[:, :280], mask[:, :280], chunk=chunk)
        for end in range(281, 290):
            read(run, ids[:, end - 1 : end], mask[:, :end])
            for layer in masses(run):
                assert [sum(cell) for cell in layer] == [end, end, end - 61, end - 61]
                assert all(len(cell) == 9 for cell in layer)


# Bytes and budgets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_count_codes_and_side_data_the_rest(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    with evict(small_model("llama", dtype), Noise(), Slanted(), Highest(), budget=7, state="subspace:rank=4") as run:
        run.prefill(torch.arange(2, 52))
        assert run.bytes == 8 * 7 * (16 + 4) * size
        assert run.side_bytes == 8 * 7 * 4 + 8 * (4 + 1) * 16 * size  # slots, and 4 directions and a mean a cell
        with run.question():
            before = run.side_bytes
            with torch.inference_mode():
                run.model(torch.tensor([[5]]), cache=run.cache)
            assert run.bytes == 8 * 8 * (16 + 4) * size
            assert run.side_bytes == before + 8 * 4
        assert run.ledger.peak_bytes >= 50 * 2 * 32 * size  # what was read was held before it was coded
    with evict(small_model("llama", dtype), Noise(), Slanted(), Highest(), budget=7, state="span_mean:slots=2") as run:
        run.prefill(torch.arange(2, 52))
        assert run.bytes == 8 * 7 * (16 + 16) * size
        assert run.side_bytes == 8 * 7 * (4 + 4)  # slots and masses


def test_a_budget_in_bytes_counts_the_coded_size() -> None:
    entry = (16 + 4) * 4
    for nbytes, expected in ((8 * entry * 5, 5), (8 * entry * 6 - 1, 5), (8 * entry * 6, 6)):
        with evict(
            small_model("llama"), Noise(), Even(), Highest(), Budget(nbytes=nbytes), state="subspace:rank=4"
        ) as run:
            run.prefill(torch.arange(2, 42), chunk=16)
            assert {len(head) for layer in run.kept for head in layer} == {expected}
            assert run.bytes <= nbytes
            assert run.cache.shapes[0].entry_bytes == entry


# Travelling along


@pytest.mark.parametrize("state", ["span_mean:slots=3", "subspace:rank=5"])
@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_questions_and_beams_leave_no_trace(name: str, state: str) -> None:
    model = small_model(name)
    context = torch.arange(2, 42)
    questions = [torch.tensor([9, 11, 60]), torch.tensor([17, 3])]

    def answers(run: Any, question: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for beams in (1, 2):
            with run.question():
                found.append(run.generate(question, max_new_tokens=3, num_beams=beams))
        return found

    alone = []
    for question in questions:
        with evict(model, Noise(), Slanted(), Highest(), budget=8, state=state) as run:
            run.prefill(context)
            alone.append(answers(run, question))
    with evict(model, Noise(), Slanted(), Highest(), budget=8, state=state) as run:
        run.prefill(context)
        sizes, mass = (run.bytes, run.side_bytes), masses(run)
        for number in (1, 0, 1):
            for got, expected in zip(answers(run, questions[number]), alone[number], strict=True):
                assert torch.equal(got, expected)
            assert (run.bytes, run.side_bytes) == sizes and masses(run) == mass


@pytest.mark.parametrize("state", ["span_mean:slots=3", "subspace:rank=5"])
def test_a_batch_is_its_sequences_and_follows_their_order(state: str) -> None:
    model = small_model("qwen2-window")
    ids, mask = ragged_batch(40, 0, 13, 5)
    lines = [ids[0], ids[1, 13:], ids[2, 5:]]
    steps = torch.tensor([[7], [8], [9]])
    with evict(model, Noise(), Slanted(), Highest(), budget=6, state=state) as run:
        alone = []
        for line, step in zip(lines, steps, strict=True):
            run.prefill(line)
            alone.append(read(run, step[None], torch.ones(1, len(line) + 1, dtype=torch.long)))
        run.prefill(ids, mask)
        order = torch.tensor([2, 0, 0, 1])
        with run.question():
            run.cache.reorder_cache(order)
            run._passes.batch = 4
            whole = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)[order]
            got = read(run, steps[order], whole)
        agree(got, torch.cat([alone[i] for i in order.tolist()]), torch.ones(4, 1, dtype=torch.bool))


# What scores and selectors are shown


@dataclass(frozen=True)
class Watching(Noise):
    """Notes what it was shown."""

    name: ClassVar[str] = "watching"
    shown: tuple[list[tuple[Cells, Rows]], ...] = field(default_factory=lambda: ([],))

    def __call__(self, cells: Cells, rows: Rows) -> torch.Tensor:
        self.shown[0].append((cells, rows))
        return super().__call__(cells, rows)


def test_scores_are_shown_decoded_values() -> None:
    score = Watching(need=1)
    with evict(small_model("llama"), score, Even(), Highest(), 6, state="subspace:rank=4", decode=Decode()) as run:
        run.prefill(torch.arange(2, 42))
        held = [layer.candidates() for layer in run.cache.layers]
        read(run, torch.tensor([[7]]), torch.ones(1, 41, dtype=torch.long))
    for layer in range(4):
        basis = run.cache.layers[layer].basis
        assert basis is not None
        raw, coded = score.shown[0][layer][0].values[0], score.shown[0][4 + layer][0].values[0]
        assert coded.shape == (2, 7, 16)
        for cell in range(2):
            mean, directions = basis.mean[cell].double(), basis.directions[cell].double()
            expected = mean + held[layer].values[cell].double() @ directions
            assert (coded[cell, :6] - expected).abs().max() < 1e-5 * raw.abs().max()
            values = raw[cell].double()
            best = np.linalg.svd(values - values.mean(0), compute_uv=False)
            left = (values - mean) - (values - mean) @ directions.T @ directions
            assert float((left**2).sum()) == pytest.approx(float((best[4:] ** 2).sum()), rel=1e-4)


def test_logits_of_rows_have_the_mass() -> None:
    score = Watching(need=1)
    with evict(small_model("gemma2"), score, Even(), Highest(), 6, state="span_mean:slots=2", decode=Decode()) as run:
        run.prefill(torch.arange(2, 42))
        mass = masses(run)
        read(run, torch.tensor([[7]]), torch.ones(1, 41, dtype=torch.long))
    assert all(cells.log_mass is None for cells, _ in score.shown[0][:4])
    for layer in range(4):
        cells, rows = score.shown[0][4 + layer]
        assert cells.log_mass is not None and rows.softcap == 2.0
        assert max(mass[layer][0]) > 1
        for head in range(6):
            key, query = cells.keys[0, head // 3], rows.queries[0, head, 0]
            for entry, tokens in enumerate([*mass[layer][head // 3], 1]):
                logit = 2.0 * math.tanh(float(key[entry] @ query) * rows.scale / 2.0) + math.log(tokens)
                got = rows.logits(cells)[0, head // 3, head % 3, 0, entry]
                if torch.isfinite(got):
                    assert float(got) == pytest.approx(logit, abs=1e-5)


@pytest.mark.parametrize("state", ["span_mean:slots=3", "subspace:rank=5"])
@pytest.mark.parametrize("score", ["caote", "compactor", "expected_attention", "h2o", "quest", "rkv", "snapkv"])
def test_scores_live_with_a_state(score: str, state: str) -> None:
    with evict(small_model("gemma2"), score, "adakv", "alpha", 8, decode=Decode(slack=1), state=state) as run:
        run.prefill(torch.arange(2, 50), chunk=16)
        assert run.generate(torch.tensor([5, 6]), max_new_tokens=4).shape == (1, 4)


@pytest.mark.parametrize("state", ["span_mean:slots=3", "subspace:rank=5"])
def test_a_prompt_that_is_read_twice_is_read_exactly(state: str) -> None:
    kept = {}
    for name in ("exact", state):
        with evict(small_model("llama"), "kvzip:chunk=15,sinks=0", "contour:floor=2", "top_mass", 8, state=name) as run:
            run.prefill(torch.arange(2, 42), chunk=14)
            kept[name] = run.kept
            run.generate(torch.tensor([5, 6]), max_new_tokens=3)
    if state.startswith("subspace"):  # the scores saw the values as they were
        assert all(np.array_equal(a, b) for x, y in zip(*kept.values(), strict=True) for a, b in zip(x, y, strict=True))


def test_a_pinned_prompt_is_never_pooled() -> None:
    with evict(
        small_model("llama"), Noise(), Even(), Highest(), 14, state="span_mean:slots=6", decode=Decode(prompt="pinned")
    ) as run:
        run.prefill(torch.arange(2, 12))
        run.generate(torch.tensor([5, 6]), max_new_tokens=40)
        for layer, mass in zip(run.kept, masses(run), strict=True):
            for positions, tokens in zip(layer, mass, strict=True):
                assert positions[:10].tolist() == list(range(10)) and tokens[:10] == [1] * 10
                assert len(positions) == 14 and sum(tokens) == 51 and max(tokens) > 1
    with evict(
        small_model("llama"), Noise(), Even(), Highest(), 16, state="subspace:rank=4", decode=Decode(prompt="pinned")
    ) as run:
        run.prefill(torch.arange(2, 12))
        assert run.bytes == 8 * 10 * 20 * 4  # coded at the end of the prompt, though nothing was evicted


# The two mechanisms by themselves


def naive_page(page: Page, keep: list[list[bool]], counts: list[int], slots: list[int]) -> list[list[tuple[Any, ...]]]:
    """Per cell (slot, tokens, key, value) of what is held."""
    keys, values, places = (x.double().numpy() for x in (page.keys, page.values, page.slots))
    tokens = np.ones(len(places)) if page.mass is None else page.mass.numpy()
    found, start = [], 0
    for cell, length in enumerate(page.lengths):
        mine = range(start, start + length)
        start += length
        stays = dict(zip(mine, keep[cell], strict=True))
        entries = [(places[i], tokens[i], keys[i], values[i]) for i in mine if stays[i]]
        gone = [i for i in mine if not stays[i]]
        parts = cut(gone, [int(tokens[i]) for i in gone], slots[cell])
        assert not slots[cell] or [i for part in parts for i in part] == gone
        if page.mass is None and parts:
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1
        for part in parts:
            n = sum(tokens[i] for i in part)
            entries.append(
                (
                    places[part[-1]],
                    n,
                    sum(tokens[i] * keys[i] for i in part) / n,
                    sum(tokens[i] * values[i] for i in part) / n,
                )
            )
        found.append(sorted(entries, key=lambda entry: entry[0]))
        assert len(found[-1]) == counts[cell]
    return found


@pytest.mark.parametrize(
    ("mass", "pooled", "expected"),
    [
        ([1] * 7, 3, [0, 0, 1, 1, 1, 2, 2]),
        ([1, 1, 1, 1, 1000], 3, [0, 0, 0, 1, 2]),  # no span is left empty
        ([1000, 1, 1, 1, 1], 3, [0, 1, 2, 2, 2]),
        ([10, 10, 10, 1], 3, [0, 1, 2, 2]),  # what comes one by one goes to the latest span
        ([10, 10, 10, 10, 10, 60, 1], 6, [0, 0, 1, 2, 3, 4, 5]),  # until it has enough
        ([5, 5], 0, [-1, -1]),
    ],
)
def test_spans_have_nearly_equal_masses(mass: list[int], pooled: int, expected: list[int]) -> None:
    span, last = spans(torch.ones(1, len(mass), dtype=torch.bool), torch.tensor([mass]), torch.tensor([pooled]))
    if pooled:
        assert span[0].tolist() == expected
    assert [n for n, end in enumerate(last[0].tolist()) if end] == [
        n for n in range(len(mass)) if pooled and (n + 1 == len(mass) or expected[n + 1] > expected[n])
    ]


@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_pooling_is_what_loops_make_of_it(data: st.DataObject, dtype: torch.dtype) -> None:
    lengths = data.draw(st.lists(st.integers(0, 14), min_size=1, max_size=4))
    seed = data.draw(st.integers(0, 2**32 - 1))
    random = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    slots = torch.cat([torch.randperm(20, generator=random)[:n].sort().values for n in lengths]).int()
    mass = None
    if data.draw(st.booleans()):
        mass = torch.tensor([1, 3, 1000])[torch.randint(3, (total,), generator=random)].int()
    scale = data.draw(st.sampled_from([0.0, 1e-6, 1.0, 1e6]))
    keys, values = (scale * torch.randn(total, d, generator=random) for d in (3, 2))
    page = Page(keys.to(dtype), values.to(dtype), slots, tuple(lengths), mass=mass)
    held = padded([page])
    counts = [data.draw(st.integers(0, n)) for n in lengths]
    state = SpanMean(slots=data.draw(st.integers(1, 4)))
    pooled = state.pooled(torch.tensor([counts]), torch.tensor([lengths]))
    assert pooled is not None
    some = [0 if n == length else min(state.slots, n // 2) for n, length in zip(counts, lengths, strict=True)]
    assert pooled.tolist() == [some]
    keep = [_some(length, n - p, random) for length, n, p in zip(lengths, counts, some, strict=True)]
    flags = torch.zeros(len(lengths), held.keys.shape[1], dtype=torch.bool)
    for cell, stays in enumerate(keep):
        flags[cell, : len(stays)] = torch.tensor(stays, dtype=torch.bool)
    got = state.page(held, flags, counts, pooled[0])
    assert list(got.lengths) == counts
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    start = 0
    for cell in naive_page(page, keep, counts, some):
        for slot, n, key, value in cell:
            assert int(got.slots[start]) == slot and int(got.masses[start]) == n
            for own, each in ((got.keys[start], key), (got.values[start], value)):
                assert np.abs(own.double().numpy() - each).max() <= tolerance * max(scale, 1e-300) * 5
            start += 1
    assert start == len(got.slots)


def _some(length: int, n: int, random: torch.Generator) -> list[bool]:
    picked = set(torch.randperm(length, generator=random)[:n].tolist())
    return [i in picked for i in range(length)]


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    width=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["gaussian", "equal", "collinear", "zeros", "offset"]),
    data=st.data(),
)
def test_a_basis_leaves_out_the_least_variance(
    lengths: list[int], width: int, seed: int, kind: str, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(1, width))
    random = np.random.default_rng(seed)
    values = random.standard_normal((len(lengths), max(lengths), width))
    if kind == "equal":
        values[:] = random.standard_normal(width)
    elif kind == "collinear":
        values[:] = random.standard_normal((len(lengths), max(lengths), 1)) * random.standard_normal(width)
    elif kind == "zeros":
        values[:] = 0
    elif kind == "offset":
        values += 1e3
    garbage = torch.from_numpy(values.copy())
    for cell, length in enumerate(lengths):
        garbage[cell, length:] = math.nan  # whatever stands where nothing is held
    basis = fit(garbage, lengths, rank)
    assert basis.fitted == tuple(n > 0 for n in lengths)
    for cell, length in enumerate(lengths):
        directions = basis.directions[cell].numpy()
        np.testing.assert_allclose(directions @ directions.T, np.eye(rank), atol=1e-10)
        if not length:
            continue
        mine = values[cell, :length]
        np.testing.assert_allclose(basis.mean[cell].numpy(), mine.mean(0), rtol=1e-10, atol=1e-12)
        singular = np.linalg.svd(mine - mine.mean(0), compute_uv=False)
        back = basis.decoded(basis.coded(torch.from_numpy(values)))[cell, :length].numpy()
        scale = max(1.0, float(np.abs(mine).max()))
        assert ((back - mine) ** 2).sum() == pytest.approx((singular[rank:] ** 2).sum(), abs=1e-9 * scale**2)


def test_an_average_of_codes_is_decoded_to_the_average() -> None:
    values = torch.randn(2, 9, 4, dtype=torch.float64)
    basis = fit(values, (9, 6), 2)
    weights = torch.softmax(torch.randn(2, 3, 9, dtype=torch.float64), -1)
    codes = basis.coded(values)
    assert torch.allclose(basis.decoded(weights @ codes), weights @ basis.decoded(codes))
    assert isinstance(basis.completed(values, (9, 9)), Basis) and basis.completed(values, (9, 9)) is basis


def test_joined_pages_keep_their_masses() -> None:
    first = Page(torch.zeros(3, 2), torch.zeros(3, 2), torch.tensor([0, 5, 7]), (2, 1), mass=torch.tensor([4, 2, 8]))
    second = Page(torch.ones(3, 2), torch.ones(3, 2), torch.tensor([8, 8, 9]), (1, 2))
    assert joined([first, second]).masses.tolist() == [4, 2, 1, 8, 1, 1]
    assert joined([second, second]).mass is None


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": "subspace:rank=17"}, "rank=17: expected at most 16"),
        ({"state": "subspace:rank=0"}, "rank=0: expected a whole number"),
        ({"state": "span_mean:slots=-1"}, "slots=-1: expected a whole number"),
        ({"state": "half"}, "unknown state 'half': expected one of exact, span_mean, subspace"),
        ({"state": "subspace:rank=4", "storage": "masked"}, "state subspace: expected storage ragged, not masked"),
        ({"state": "span_mean", "storage": "padded"}, "state span_mean: expected storage ragged, not padded"),
        ({"state": "span_mean", "score": None}, "state span_mean: expected a score"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(options: dict[str, Any], message: str) -> None:
    options = {"score": Noise(), "allocator": Even(), "selector": Highest(), "budget": 4, **options}
    with pytest.raises(BadInput, match=message), evict(small_model("llama"), **options):
        pass


def test_masses_of_one_change_nothing_in_bf16() -> None:
    """Weights as exact as those without masses: the logits are not rounded before the logarithm is added."""
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 2, n, 64, generator=random).to(torch.bfloat16) * 3 for n in (4, 300))
    visible, none = torch.ones((), dtype=torch.bool), torch.zeros(1, 2, 1, 300)
    exact = torch.softmax(query.double() @ key.double().mT * 0.125, dim=-1)
    found = attention._weights(query, key, visible, 0.125, None, none).double()
    assert float((found - exact).abs().max()) < 2.0**-8 * float(exact.max())
