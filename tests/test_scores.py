"""Scores and rotary embeddings against loops from the formulas, and against the models' own weights and projections."""

import functools
import itertools
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from capture.attention import capturing
from data import BadInput
from data.store import CHECKOUT
from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score, listed, named
from eviction.rotary import Rotary, rotary_of
from eviction.scores.expected_attention import ExpectedAttention
from eviction.scores.keydiff import KeyDiff
from eviction.scores.knorm import KNorm
from eviction.scores.snapkv import SnapKV
from eviction.scores.streaming_llm import StreamingLLM
from eviction.scores.tova import TOVA

ROUNDING = 1e-6  # float32 against loops in float64, relative to the largest score of the cell
GAUSSIAN_ROUNDING = 2e-5  # the same where an exponent is a sum of d^2 products, and the softmax magnifies its rounding
OWN_WEIGHTS = 1e-5  # absolute distance from the weights that the model's own eager attention returns
OWN_SCORES = 1e-4  # ExpectedAttention, relative, from queries turned back against the projections themselves
SIX = {"expected_attention", "keydiff", "knorm", "snapkv", "streaming_llm", "tova"}


# Random cells


@dataclass(frozen=True)
class Case:
    cells: Cells
    rows: ContextRows

    @property
    def shape(self):
        """Batch, KV heads, query heads of a group."""
        batch, kv_heads = self.cells.positions.shape[:2]
        return batch, kv_heads, self.rows.queries.shape[1] // kv_heads


def case_of(
    seed=0,
    batch=2,
    kv_heads=2,
    group=2,
    d=6,
    rows=9,
    longest=24,
    budget=8,
    window=None,
    softcap=None,
    scale=0.4,
    size=1.0,
    dtype=torch.float32,
    garbage=math.nan,
    pad=0,
    turned=4,
):
    """Ragged cells with gaps; sequences of different lengths, the shorter with padding rows on the left.

    garbage stands wherever nothing is held and in padding rows; pad: more padding entries and rows on top.
    """
    random = np.random.default_rng(seed)
    seen = [longest - int(random.integers(0, longest - 1)) * (b > 0) for b in range(batch)]
    width = longest + pad
    keys, values = (np.full((batch, kv_heads, width, n), garbage) for n in (d, d - 1))
    positions = np.full((batch, kv_heads, width), -1)
    for b in range(batch):
        for k in range(kv_heads):
            reach = seen[b] if window is None else min(seen[b], window + rows)
            held = np.sort(random.choice(reach, int(random.integers(1, reach + 1)), replace=False)) + seen[b] - reach
            positions[b, k, : len(held)] = held
            keys[b, k, : len(held)] = random.standard_normal((len(held), d)) * size
            values[b, k, : len(held)] = random.standard_normal((len(held), d - 1)) * size
    queries = np.full((batch, kv_heads * group, rows + pad, d), garbage)
    row_positions = np.full((batch, rows + pad), -1)
    for b in range(batch):
        real = min(rows, seen[b])
        row_positions[b, rows + pad - real :] = np.arange(seen[b] - real, seen[b])
        queries[b, :, rows + pad - real :] = random.standard_normal((kv_heads * group, real, d)) + 0.5
    first = np.maximum(row_positions - (10**6 if window is None else window - 1), 0)
    frequencies = torch.tensor([1.0 / 10.0**i for i in range(turned // 2)])
    projection = random.standard_normal((kv_heads * group, 7, d - 1))
    cells = Cells(
        layer=0,
        n_layers=1,
        keys=torch.tensor(keys).to(dtype),
        values=torch.tensor(values).to(dtype),
        positions=torch.tensor(positions),
        seen=tuple(seen),
        budget=budget,
        rotary=Rotary(lambda: (frequencies, 1.25)),
        output_weight=torch.tensor(projection).to(dtype),
    )
    return Case(
        cells,
        ContextRows(torch.tensor(queries).to(dtype), torch.tensor(row_positions), torch.tensor(first), scale, softcap),
    )


def fresh(case):
    """The same case with an empty memory, as in a first pass."""
    return Case(replace(case.cells, memory={}), case.rows)


def held_of(case, b, k):
    """Positions, keys and values of a cell, in float64."""
    n = int((case.cells.positions[b, k] >= 0).sum())
    return (
        case.cells.positions[b, k, :n].tolist(),
        case.cells.keys[b, k, :n].double().numpy(),
        case.cells.values[b, k, :n].double().numpy(),
    )


# Loops from the formulas


def loop_weights(case, b, h, t):
    """Softmax of one row over one cell, entry by entry; None for a padding row."""
    rows = case.rows
    k = h // case.shape[2]
    positions, keys, _ = held_of(case, b, k)
    mine, first = int(rows.positions[b, t]), int(rows.first[b, t])
    if mine < 0:
        return None
    query = rows.queries[b, h, t].double().numpy()
    weights = []
    for position, key in zip(positions, keys, strict=True):
        logit = rows.scale * sum(float(x) * float(y) for x, y in zip(query, key, strict=True))
        if rows.softcap is not None:
            logit = rows.softcap * math.tanh(logit / rows.softcap)
        weights.append(math.exp(logit) if first <= position <= mine else 0.0)
    total = sum(weights)
    return [weight / total if total > 0 else 0.0 for weight in weights]


def loop_snapkv(case, b, k, window, kernel, pooling, mean):
    positions, _, _ = held_of(case, b, k)
    group, last_row = case.shape[2], case.rows.positions.shape[1]
    before = [j for j, position in enumerate(positions) if position < case.cells.seen[b] - window]
    scores = [math.inf] * len(positions)
    pooled = [0.0] * len(before)
    for h in range(k * group, (k + 1) * group):
        observed = [0.0] * len(before)
        real = 0
        for t in range(max(0, last_row - window), last_row):
            weights = loop_weights(case, b, h, t)
            if weights is not None:
                real += 1
                observed = [x + weights[j] for x, j in zip(observed, before, strict=True)]
        if mean:
            observed = [x / max(real, 1) for x in observed]
        for i in range(len(before)):
            near = [observed[j] if 0 <= j < len(before) else 0.0 for j in range(i - kernel // 2, i + kernel // 2 + 1)]
            pooled[i] += (sum(near) / kernel if pooling == "average" else max(near)) / group
    for i, j in enumerate(before):
        scores[j] = pooled[i]
    return scores


def loop_tova(case, b, k, every_head):
    _, kv_heads, group = case.shape
    positions, _, _ = held_of(case, b, k)
    heads = range(kv_heads * group) if every_head else range(k * group, (k + 1) * group)
    scores = []
    for position in positions:
        found = 0.0
        for h in heads:
            there, _, _ = held_of(case, b, h // group)
            weights = loop_weights(case, b, h, case.rows.positions.shape[1] - 1)
            found += weights[there.index(position)] if position in there else 0.0
        scores.append(math.inf if position == case.cells.seen[b] - 1 else found / len(heads))
    return scores


def loop_keydiff(case, b, k):
    _, keys, _ = held_of(case, b, k)
    units = [key / math.sqrt(sum(x * x for x in key)) for key in keys]
    centre = sum(units) / len(units)
    return [-float(unit @ centre) / math.sqrt(sum(x * x for x in centre)) for unit in units]


def loop_streaming(case, b, k, sinks):
    positions, _, _ = held_of(case, b, k)
    return [math.inf if p < sinks else -(case.cells.seen[b] - 1 - p) for p in positions]


def rotation(position, frequencies, scaling, d):
    """The rotary matrix at one position, entry by entry: coordinate i is paired with i + r/2."""
    matrix = np.eye(d)
    half = len(frequencies)
    for i, frequency in enumerate(frequencies):
        cosine, sine = math.cos(position * frequency) * scaling, math.sin(position * frequency) * scaling
        matrix[i, i] = matrix[half + i, half + i] = cosine
        matrix[i, half + i], matrix[half + i, i] = -sine, sine
    return matrix


def loop_expected(positions, keys, values, queries, mean_rotation, scale, softcap, sinks, epsilon):
    """queries: (G, n, d) before RoPE at positions >= sinks; keys after it; mean_rotation (d, d)."""
    others = [j for j, position in enumerate(positions) if position >= sinks]
    totals = dict.fromkeys(others, 0.0)
    for group_queries in queries:
        d = keys.shape[1]
        mu, sigma = np.zeros(d), np.zeros((d, d))
        for query in group_queries:
            mu += query / len(group_queries)
        for query in group_queries:
            sigma += np.outer(query - mu, query - mu) / len(group_queries)
        turned, spread = mean_rotation @ mu, mean_rotation @ sigma @ mean_rotation.T
        exponents = {}
        for j in others:
            exponent = scale * float(keys[j] @ turned) + scale**2 / 2 * float(keys[j] @ spread @ keys[j])
            exponents[j] = exponent if softcap is None else softcap * math.tanh(exponent / softcap)
        highest = max(exponents.values(), default=0.0)
        whole = sum(math.exp(x - highest) for x in exponents.values())
        for j in others:
            totals[j] += math.exp(exponents[j] - highest) / whole / len(queries)
    return [
        (totals[j] + epsilon) * math.sqrt(sum(x * x for x in values[j])) if j in totals else math.inf
        for j in range(len(positions))
    ]


def assert_scores(score, case, oracle, tolerance=ROUNDING):
    """score(cells, rows) is oracle(b, k) at every held entry, relative to the largest finite score of the cell."""
    found = score(case.cells, case.rows)
    assert found.dtype == torch.float32 and found.shape == case.cells.positions.shape
    batch, kv_heads, _ = case.shape
    for b in range(batch):
        for k in range(kv_heads):
            wanted = np.array(oracle(b, k))
            got = found[b, k, : len(wanted)].double().numpy()
            assert np.array_equal(np.isposinf(got), np.isposinf(wanted))
            finite = np.isfinite(wanted)
            largest = np.abs(wanted[finite]).max(initial=0.0)
            assert np.abs(got[finite] - wanted[finite]).max(initial=0.0) <= tolerance * largest, (b, k)


CASES = st.builds(
    case_of,
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    rows=st.integers(1, 12),
    longest=st.integers(2, 24),
    budget=st.integers(1, 20),
    window=st.sampled_from([None, None, 3, 10]),
    softcap=st.sampled_from([None, 0.7]),
    size=st.sampled_from([0.0, 1e-6, 1.0, 2.0]),
    pad=st.integers(0, 2),
)


@given(
    CASES,
    st.sampled_from(["reference", "kvpress", "paper"]),
    st.sampled_from([None, 1, 3, 5]),
    st.sampled_from([None, 1, 3, 7]),
    st.sampled_from([None, "average", "max"]),
)
def test_snapkv_is_its_formula(case, variant, window, kernel, pooling):
    published = {
        "reference": (32, 5, "average", False),
        "kvpress": (64, 5, "average", True),
        "paper": (max(1, min(32, case.cells.budget // 2)), 7, "max", True),
    }
    default_window, default_kernel, default_pooling, mean = published[variant]
    options = window or default_window, kernel or default_kernel, pooling or default_pooling
    score = SnapKV(variant, window, kernel, pooling)
    assert score.rows_needed(case.cells.budget) == options[0]
    assert_scores(score, case, lambda b, k: loop_snapkv(case, b, k, *options, mean))


@given(CASES, st.sampled_from(["all", "group"]))
def test_tova_is_its_formula(case, heads):
    assert_scores(TOVA(heads), case, lambda b, k: loop_tova(case, b, k, heads == "all"))


@given(CASES)
def test_knorm_is_its_formula(case):
    assert_scores(KNorm(), case, lambda b, k: [-math.sqrt(sum(x * x for x in key)) for key in held_of(case, b, k)[1]])


@given(st.integers(0, 10**6), st.sampled_from([1e-12, 1.0, 1e12]))
def test_keydiff_is_its_formula_at_every_scale(seed, size):
    case = case_of(seed=seed, size=size)
    assert_scores(KeyDiff(), case, lambda b, k: loop_keydiff(case, b, k))


def test_keys_of_length_zero_have_cosine_zero():
    case = case_of(size=0.0)
    assert bool((KeyDiff()(case.cells, case.rows)[case.cells.held] == 0).all())


@given(CASES, st.integers(0, 5))
def test_streaming_llm_is_its_formula(case, sinks):
    mine = min(sinks, case.cells.budget // 2)
    assert_scores(StreamingLLM(sinks), case, lambda b, k: loop_streaming(case, b, k, mine))


@given(CASES, st.integers(0, 5), st.integers(1, 40), st.sampled_from([0.0, 0.02]))
def test_expected_attention_is_its_formula(case, sinks, future, epsilon):
    frequencies, scaling = [float(x) for x in case.cells.rotary.parameters()[0]], case.cells.rotary.parameters()[1]
    group, d = case.shape[2], case.cells.keys.shape[-1]

    def oracle(b, k):
        queries = []
        for h in range(k * group, (k + 1) * group):
            before = []
            for t, position in enumerate(case.rows.positions[b].tolist()):
                if position >= sinks:
                    turned = rotation(position, frequencies, scaling, d)
                    before.append(np.linalg.solve(turned, case.rows.queries[b, h, t].double().numpy()))
            queries.append(before)
        seen = case.cells.seen[b]
        mean = sum(rotation(p, frequencies, scaling, d) for p in range(seen, seen + future)) / future
        held = held_of(case, b, k)
        return loop_expected(*held, queries, mean, case.rows.scale, case.rows.softcap, sinks, epsilon)

    assert_scores(ExpectedAttention(sinks, future, epsilon), case, oracle, GAUSSIAN_ROUNDING)


@pytest.mark.parametrize("chunks", [[1] * 30, [3, 10, 17], [29, 1], [2, 28]])
def test_moments_of_chunks_are_those_of_the_whole(chunks):
    case = case_of(seed=3, rows=30, longest=30)
    whole = ExpectedAttention()(case.cells, case.rows)
    memory, start = {}, 0
    for n in chunks:
        stop = start + n
        rows = case.rows
        part = ContextRows(
            rows.queries[:, :, start:stop], rows.positions[:, start:stop], rows.first[:, start:stop], rows.scale, None
        )
        before = {name: tensor.clone() for name, tensor in memory.items()}
        kept = dict(memory)
        found = ExpectedAttention()(replace(case.cells, memory=memory), part)
        # what an earlier pass left is replaced, never written to: a snapshot of the memory stays what it was
        assert all(torch.equal(before[name], kept[name]) for name in before)
        start = stop
    held = case.cells.held
    torch.testing.assert_close(found[held], whole[held], rtol=1e-5, atol=1e-7)
    assert all(tensor.shape[0] == case.shape[0] for tensor in memory.values())


def test_a_chunk_after_compression_is_pooled_over_the_entries_that_are_left():
    case = case_of(seed=5, rows=4, longest=40, batch=1, kv_heads=1)
    positions = case.cells.positions[0, 0][case.cells.held[0, 0]].tolist()
    assert max(b - a for a, b in itertools.pairwise(positions)) > 1  # there are gaps
    assert_scores(SnapKV(window=4), case, lambda b, k: loop_snapkv(case, b, k, 4, 5, "average", False))


@pytest.mark.parametrize(("variant", "window"), [("reference", 32), ("kvpress", 64)])
def test_a_budget_or_a_context_below_the_window_protects_all_of_it(variant, window):
    short = case_of(longest=20, rows=20, budget=4)
    assert bool(torch.isposinf(SnapKV(variant)(short.cells, short.rows)[short.cells.held]).all())
    long = case_of(longest=100, rows=100, budget=4, batch=1)
    protected = torch.isposinf(SnapKV(variant)(long.cells, long.rows)) & long.cells.held
    assert bool((protected == (long.cells.positions >= 100 - window)).all())


# Every score that there is, but for those that must be shown a replay or statistics first and have tests of their own

PREPARED = {"Q_stats", "kvzip", "static_route", "triattention", "variant_b"}


def parts():
    return [pytest.param(part, id=name) for name, part in listed(Score).items() if name not in PREPARED]


def test_the_six_scores_are_found_by_name():
    assert set(listed(Score)) >= SIX
    assert named(Score, "snapkv:variant=kvpress,kernel=3") == SnapKV("kvpress", kernel=3)


@pytest.mark.parametrize(
    "text",
    [
        "snapkv:variant=other",
        "snapkv:window=0",
        "snapkv:window=2.5",
        "snapkv:kernel=4",
        "snapkv:pooling=sum",
        "tova:heads=some",
        "streaming_llm:sinks=-1",
        "streaming_llm:sinks=true",
        "expected_attention:future=0",
        "expected_attention:epsilon=-1",
        "expected_attention:epsilon=x",
        "knorm:window=3",
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(text):
    with pytest.raises(BadInput, match=text.partition(":")[0]):
        named(Score, text)


def test_expected_attention_without_a_rotary_embedding_is_refused():
    case = case_of()
    with pytest.raises(BadInput, match="rotary"):
        ExpectedAttention()(replace(case.cells, rotary=None), case.rows)


@pytest.mark.parametrize("part", parts())
@settings(max_examples=20)
@given(case=CASES)
def test_a_score_is_float32_and_finite_or_protecting(part, case):
    scores = part()(case.cells, case.rows)
    assert scores.shape == case.cells.positions.shape and scores.dtype == torch.float32
    assert not bool((scores.isnan() | scores.isneginf())[case.cells.held].any())


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e30])
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), pad=st.integers(0, 3), window=st.sampled_from([None, 5]))
def test_nothing_in_padding_changes_a_score(part, garbage, seed, pad, window):
    clean = case_of(seed=seed, garbage=0.0, window=window)
    dirty = case_of(seed=seed, garbage=garbage, window=window, pad=pad)
    wanted, found = part()(clean.cells, clean.rows), part()(dirty.cells, dirty.rows)
    torch.testing.assert_close(found[dirty.cells.held], wanted[clean.cells.held], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("part", parts())
@settings(max_examples=20)
@given(case=CASES)
def test_sequences_of_a_batch_do_not_see_each_other(part, case):
    whole = part()(case.cells, case.rows)
    order = list(reversed(range(case.shape[0])))
    cells, rows = case.cells, case.rows
    turned = replace(
        cells,
        keys=cells.keys[order],
        values=cells.values[order],
        positions=cells.positions[order],
        seen=tuple(cells.seen[b] for b in order),
        memory={},
    )
    turned_rows = ContextRows(rows.queries[order], rows.positions[order], rows.first[order], rows.scale, rows.softcap)
    found = part()(turned, turned_rows)
    torch.testing.assert_close(
        found[turned.held], whole[order][turned.held], rtol=1e-6, atol=1e-9, msg=f"{part.name}: batch order"
    )


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_score_of_half_precision_is_that_of_its_numbers_in_float32(part, dtype):
    case = case_of(seed=11, dtype=dtype)
    cells = replace(case.cells, keys=case.cells.keys.float(), values=case.cells.values.float(), memory={})
    wide = ContextRows(
        case.rows.queries.float(), case.rows.positions, case.rows.first, case.rows.scale, case.rows.softcap
    )
    found, wanted = part()(case.cells, case.rows), part()(cells, wide)
    assert found.dtype == torch.float32
    assert torch.equal(found[cells.held], wanted[cells.held])


@pytest.mark.parametrize("part", parts())
def test_a_score_is_the_same_for_both_kinds_of_rows_and_needs_no_more_than_it_says(part):
    case = case_of(seed=7, rows=24)
    needed = part().rows_needed(case.cells.budget)
    wanted = part()(fresh(case).cells, case.rows)
    rows = case.rows if needed is None else case.rows.last(max(needed, 1))
    found = part()(
        fresh(case).cells,
        ContextAndQuestionRows(rows.queries, rows.positions, rows.first, rows.scale, rows.softcap),
    )
    assert torch.equal(found[case.cells.held], wanted[case.cells.held])


# Real architectures

COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
THETA = {"rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 3,
    "long_factor": [2.0, 3.0, 4.0],
    "partial_rotary_factor": 0.5,
}
PHI3 = {"bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    "llama": ("Llama", {}),
    "llama_yarn": (
        "Llama",
        {"rope_parameters": {**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "llama_dynamic": (
        "Llama",
        {"rope_parameters": {**THETA, "rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 20},
    ),
    "qwen2": ("Qwen2", {"use_sliding_window": True, **ALTERNATING}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", ALTERNATING),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 24, **ALTERNATING},
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            **ALTERNATING,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "mistral": ("Mistral", {"head_dim": 12, "sliding_window": 12}),
    "phi3": ("Phi3", {**PHI3, "rope_parameters": {**THETA, "rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi3_long": ("Phi3", {**PHI3, "rope_parameters": {**THETA, **LONG}, "original_max_position_embeddings": 32}),
}
EMBEDDED = ["qwen", "qwen3", "olmo", "gemma"]
FAMILIES = [*SMALL, *(f"embedded_{name}" for name in EMBEDDED)]
LENGTH = 45


def load(name):
    torch.manual_seed(0)
    if name.startswith("embedded_"):
        folder = CHECKOUT / "data" / "models" / name.removeprefix("embedded_")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prefix, changes = SMALL[name]
    config_class = getattr(transformers, prefix + ("TextConfig" if prefix == "Gemma3" else "Config"))
    model = getattr(transformers, prefix + "ForCausalLM")(config_class(**{**COMMON, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # wider weights: peaked rows, and a soft-cap that bites
            if parameter.ndim == 2:
                parameter.mul_(8)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@dataclass(frozen=True)
class Read:
    """A model that read two sequences, the second with padding on its left."""

    model: object
    layers: list
    pads: tuple[int, ...]
    eager: list
    projected: list  # per layer {"q": (B, H, N, d), "k": (B, K, N, d)}, before RoPE
    places: torch.Tensor  # the positions that the model's RoPE was given

    def case(self, layer, budget=8):
        """What a cache that holds everything would hand to a score."""
        seen = self.layers[layer]
        batch, kv_heads, length, _ = seen.key.shape
        positions = torch.full((batch, kv_heads, length), -1)
        keys, values = torch.full_like(seen.key, math.nan), torch.full_like(seen.value, math.nan)
        rows, first = torch.full((batch, length), -1), torch.zeros((batch, length), dtype=torch.long)
        for b, pad in enumerate(self.pads):
            positions[b, :, : length - pad] = torch.arange(length - pad)
            keys[b, :, : length - pad], values[b, :, : length - pad] = seen.key[b, :, pad:], seen.value[b, :, pad:]
            rows[b, pad:], first[b, pad:] = torch.arange(length - pad), seen.first[b, pad:] - pad
        rotary = rotary_of(self.model, layer)
        cells = Cells(
            layer, len(self.layers), keys, values, positions, tuple(length - p for p in self.pads), budget, rotary
        )
        return Case(cells, ContextRows(seen.query, rows, first, seen.scale, seen.softcap))


@pytest.fixture(params=FAMILIES)
def read(request):
    return read_once(request.param)


@functools.cache
def read_once(name):
    return read_by(load(name))


@torch.inference_mode()
def read_by(model, pads=(0, 7)):
    ids = torch.randint(3, 90, (len(pads), LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for b, pad in enumerate(pads):
        mask[b, :pad] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": places, "use_cache": False}
    layers = []
    with projections(model) as projected, capturing(model, layers.append):
        model(**inputs)
    model.set_attn_implementation("eager")
    eager = model(**inputs, output_attentions=True).attentions
    return Read(model, layers, tuple(pads), list(eager), projected, places)


@contextmanager
def projections(model):
    """Hands over a list that, after a forward pass, holds every layer's queries and keys before RoPE."""
    config = model.config.get_text_config()
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    layers = model.get_decoder().layers
    found, hooks = [{} for _ in layers], []
    for layer, into in zip(layers, found, strict=True):
        attention = layer.self_attn
        d = attention.head_dim

        def fused(_, __, output, into=into, d=d):
            queries, keys, _ = output.split([heads["q"] * d, heads["k"] * d, heads["k"] * d], dim=-1)
            into["q"], into["k"] = split(queries, heads["q"], d), split(keys, heads["k"], d)

        if hasattr(attention, "qkv_proj"):
            hooks.append(attention.qkv_proj.register_forward_hook(fused))
            continue
        for name in heads:

            def one(_, __, output, into=into, d=d, name=name):
                into[name] = split(output, heads[name], d)

            module = getattr(attention, f"{name}_norm", None) or getattr(attention, f"{name}_proj")
            hooks.append(module.register_forward_hook(one))
    yield found
    for hook in hooks:
        hook.remove()


def split(output, heads, d):
    """(B, H, N, d) of a projection's or a norm's output, whatever its order of axes."""
    if output.ndim == 4:
        return output if output.shape[1] == heads else output.transpose(1, 2)
    return output.unflatten(-1, (heads, d)).transpose(1, 2)


def test_weights_are_the_models_own(read):
    for layer, eager in enumerate(read.eager):
        case = read.case(layer)
        weights = case.rows.weights(case.cells).flatten(1, 2)
        for b, pad in enumerate(read.pads):
            real = LENGTH - pad
            mine, own = weights[b, :, pad:, :real], eager[b, :, pad:, pad:]
            assert float((mine - own).abs().max()) <= OWN_WEIGHTS, layer
            assert float(weights[b, :, :pad].abs().max() if pad else 0.0) == 0.0


def test_snapkv_and_tova_are_sums_of_the_models_own_weights(read):
    window = 6
    for layer, eager in enumerate(read.eager):
        case = read.case(layer)
        kv_heads, group = case.shape[1:]
        own = eager.unflatten(1, (kv_heads, group))
        snapkv = SnapKV(window=window)(case.cells, case.rows)
        tova = TOVA()(case.cells, case.rows)
        for b, pad in enumerate(read.pads):
            before = LENGTH - pad - window
            for k in range(kv_heads):
                summed = own[b, k, :, -window:, pad : LENGTH - window].sum(1).mean(0)
                for j in range(before):
                    wanted = sum(float(summed[i]) for i in range(max(0, j - 2), min(before, j + 3))) / 5
                    assert abs(float(snapkv[b, k, j]) - wanted) <= OWN_WEIGHTS * window
                last = eager[b, :, -1, pad : LENGTH - 1].mean(0)
                assert float((tova[b, k, : LENGTH - pad - 1] - last).abs().max()) <= OWN_WEIGHTS
                assert bool(torch.isposinf(tova[b, k, LENGTH - pad - 1]))


@pytest.mark.parametrize(
    ("name", "forgotten"),
    [
        ("gemma2", {"softcap": None}),
        ("gemma2", {"scale": 0.25}),
        ("gemma3", {"scale": 0.25}),
        ("mistral", {"first": torch.zeros(2, LENGTH, dtype=torch.long)}),
    ],
)
def test_the_comparison_with_the_model_would_see_what_peers_forget(name, forgotten):
    """1 / sqrt(head_dim) for the scale, no soft-cap, no window: each is far outside the tolerance."""
    found = read_once(name)
    case = found.case(0)
    rows = case.rows
    options = {"scale": rows.scale, "softcap": rows.softcap, "first": rows.first, **forgotten}
    wrong = ContextRows(rows.queries, rows.positions, options["first"], options["scale"], options["softcap"])
    difference = wrong.weights(case.cells)[0].flatten(0, 1) - found.eager[0][0]
    assert float(difference.abs().max()) > 100 * OWN_WEIGHTS


def test_rotary_embeddings_turn_projections_into_what_attention_saw_and_back(read):
    for layer, (seen, before) in enumerate(zip(read.layers, read.projected, strict=True)):
        rotary = rotary_of(read.model, layer)
        for after, projected in ((seen.query, before["q"]), (seen.key, before["k"])):
            places = read.places[:, None]
            torch.testing.assert_close(rotary.rotate(projected, places), after, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(rotary.unrotate(after, places), projected, rtol=1e-5, atol=1e-4)


def test_the_small_models_have_the_rotary_embeddings_that_the_tests_are_about():
    yarn = rotary_of(load("llama_yarn"), 0).parameters()
    assert yarn[1] > 1.0
    assert rotary_of(load("phi3"), 0).parameters()[0].shape == (3,)  # of 12 coordinates, 6 turn
    gemma = load("gemma3")
    assert not torch.equal(*(rotary_of(gemma, layer).parameters()[0] for layer in (0, 1)))
    long = load("phi3_long")
    first = rotary_of(long, 0).parameters()[0].clone()
    read_by(long)  # longer than the original 32 positions
    assert not torch.equal(rotary_of(long, 0).parameters()[0], first)


@pytest.mark.parametrize("turned", [4, 6])
def test_mean_matrix_is_the_mean_of_the_matrices(turned):
    frequencies = torch.tensor([1.0, 0.3, 0.01][: turned // 2])
    rotary = Rotary(lambda: (frequencies, 1.5))
    positions = torch.tensor([[3, 4, 5, 9], [100, 101, 102, 103]])
    found = rotary.mean_matrix(positions, 6)
    for row, places in zip(found, positions.tolist(), strict=True):
        wanted = sum(rotation(p, frequencies.tolist(), 1.5, 6) for p in places) / len(places)
        torch.testing.assert_close(row.double(), torch.tensor(wanted), rtol=0, atol=1e-5)
    vectors = torch.randn(2, 4, 6)
    single = rotary.rotate(vectors, positions)
    torch.testing.assert_close(rotary.unrotate(single, positions), vectors)
    turned_by_hand = rotation(9, frequencies.tolist(), 1.5, 6) @ vectors[0, 3].double().numpy()
    torch.testing.assert_close(single[0, 3].double(), torch.tensor(turned_by_hand), rtol=1e-5, atol=1e-5)


def test_models_without_a_known_rotary_embedding_have_none():
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2))
    assert rotary_of(gpt2, 0) is None
    small = {**COMMON, "head_dim": 12}
    unknown = transformers.CohereForCausalLM(transformers.CohereConfig(**small))  # pairs neighbouring coordinates
    assert rotary_of(unknown, 0) is None


def test_expected_attention_is_its_formula_on_the_models_own_projections(read):
    future, sinks = 16, 4
    module = read.model.get_decoder().rotary_emb
    if module.rope_type == "dynamic":
        pytest.skip("asked for later positions, the model's own module would change its frequencies")
    for layer in range(len(read.layers)):
        case = read.case(layer)
        _, kv_heads, group = case.shape
        types = [read.model.config.layer_types[layer]] if isinstance(module.rope_type, dict) else []
        found = ExpectedAttention(sinks=sinks, future=future)(case.cells, case.rows)
        for b, pad in enumerate(read.pads):
            seen = LENGTH - pad
            cosine, sine = module(torch.zeros(1), torch.arange(seen, seen + future)[None], *types)
            half = cosine.shape[-1] // 2
            mean = np.eye(case.cells.keys.shape[-1])
            for i in range(half):
                mean[i, i] = mean[half + i, half + i] = float(cosine[0, :, i].double().mean())
                mean[half + i, i] = float(sine[0, :, i].double().mean())
                mean[i, half + i] = -mean[half + i, i]
            for k in range(kv_heads):
                queries = read.projected[layer]["q"][b, k * group : (k + 1) * group, pad + sinks :].double().numpy()
                rows = case.rows
                wanted = np.array(
                    loop_expected(*held_of(case, b, k), queries, mean, rows.scale, rows.softcap, sinks, 0.0)
                )
                got = found[b, k, :seen].double().numpy()
                assert np.array_equal(np.isposinf(got), np.isposinf(wanted))
                finite = np.isfinite(wanted)
                error = np.abs(got[finite] - wanted[finite]).max()
                assert error <= OWN_SCORES * wanted[finite].max(), (layer, b, k)
