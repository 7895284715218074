"""TriAttention's score, its modes and its statistics against loops from the formula and two-pass means."""

import cmath
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from capture import checkpoints
from data import BadInput
from data.store import CHECKOUT, digest_of, sha256
from eviction import Decode, evict
from eviction.calibration import Statistics, calibrate, calibrated
from eviction.method import Cells, ContextRows, Score, Selector, named
from eviction.rotary import Rotary, rotary_of
from eviction.scores.triattention import TriAttention
from eviction.selection.shared import Shared
from eviction.support import output_weight_of
from tests.test_run import small_model
from tests.test_scores import CASES, FAMILIES, Case, case_of, held_of, load, projections, read_once, rotation

ROUNDING = 1e-6  # float64 against loops, of float32 statistics, then rounded to float32; relative to the largest score
# Statistics from queries turned back, against the projections themselves, both float32: relative to the largest.
TURNED_BACK = 1e-5
PEER_ROUNDING = 1e-5  # of the code's scores, relative to the largest: float32 angles up to 135
EMBEDDED = ["qwen", "qwen3", "olmo", "gemma"]


def statistics_of(case: Any, seed: int = 0, layers: int = 1) -> Statistics:
    """Made-up statistics that fit the case: |E q_f| <= E |q_f|, some of them zero."""
    _, kv_heads, group = case.shape
    d, turning = case.cells.keys.shape[-1], len(case.cells.rotary.parameters()[0])
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, kv_heads * group, d - turning)
    mean = torch.randn(shape, generator=generator, dtype=torch.complex64)
    mean[..., turning:] = mean[..., turning:].real + 0j
    mean[:, :, 0] *= float(torch.rand((), generator=generator) > 0.2)
    return Statistics(mean, mean.abs() + torch.rand(shape, generator=generator), torch.empty(0), turning, d)


def loop_score(
    case: Any, statistics: Statistics, b: int, h: int, furthest: int, layer: int = 0, from_position: int = 0
) -> list[float]:
    """S of every held entry for one query head, key by key, turned back at its own position."""
    positions, keys, _ = held_of(case, b, h // case.shape[2])
    frequencies, scaling = case.cells.rotary.parameters()
    omega = [float(x) for x in frequencies]
    d, half = keys.shape[1], len(omega)
    offsets = [2**i for i in range(100) if 2**i <= furthest]
    mean, magnitude = statistics.mean[layer, h].tolist(), statistics.magnitude[layer, h].tolist()
    scores = []
    for position, key in zip(positions, keys, strict=True):
        before = np.linalg.solve(rotation(position, omega, scaling, d), key)
        components = [complex(before[f], before[half + f]) for f in range(half)]
        components += [complex(before[i], 0.0) for i in range(2 * half, d)]
        total = 0.0
        for f, k in enumerate(components):
            speed, c = (omega[f], scaling**2) if f < half else (0.0, 1.0)
            q = complex(mean[f])
            phase = cmath.phase(q * k.conjugate())
            waves = [math.cos(speed * (case.cells.seen[b] - position + offset) + phase) for offset in offsets]
            total += c * abs(q) * abs(k) * sum(waves) / len(offsets)
            total += c * (magnitude[f] - abs(q)) * abs(k)
        scores.append(total)
    return scores


def z_scored(scores: list[float], competing: list[bool]) -> list[float]:
    some = [x for x, there in zip(scores, competing, strict=True) if there]
    if not some:
        return [0.0] * len(scores)
    mean = sum(some) / len(some)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in some) / len(some))
    return [(x - mean) / max(deviation, 1e-6) for x in scores]


def loop_triattention(case: Any, statistics: Statistics, b: int, k: int, furthest: int, normalise: bool) -> list[float]:
    """The highest of the group's z-scores."""
    group, positions = case.shape[2], held_of(case, b, k)[0]
    pinned = case.cells.pinned[b] if case.cells.pinned else 0
    heads = []
    for h in range(k * group, (k + 1) * group):
        scores = loop_score(case, statistics, b, h, furthest)
        heads.append(z_scored(scores, [p >= pinned for p in positions]) if normalise else scores)
    return [max(column) for column in zip(*heads, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    case=CASES,
    seed=st.integers(0, 1000),
    furthest=st.sampled_from([1, 2, 3, 64, 65536]),
    normalise=st.booleans(),
    pinned=st.sampled_from([(), (3, 0), (100, 2)]),
)
def test_the_score_is_its_formula(
    case: Any, seed: int, furthest: int, normalise: bool, pinned: tuple[int, ...]
) -> None:
    case = replace(case, cells=replace(case.cells, pinned=pinned[: case.shape[0]]))
    statistics = statistics_of(case, seed)
    found = TriAttention(statistics, furthest, normalise)(case.cells, case.rows)
    assert found.dtype == torch.float32 and found.shape == case.cells.positions.shape
    for b in range(case.shape[0]):
        for k in range(case.shape[1]):
            wanted = np.array(loop_triattention(case, statistics, b, k, furthest, normalise))
            got = found[b, k, : len(wanted)].double().numpy()
            competing = np.array(held_of(case, b, k)[0]) >= (pinned[b] if pinned else 0)  # the others stay anyway
            largest = np.abs(wanted[competing]).max(initial=0.0)
            assert np.abs(got - wanted)[competing].max(initial=0.0) <= ROUNDING * largest, (b, k)


def layers_of(name: str, budget: int = 8) -> tuple[Any, list[Any], Statistics]:
    """What two sequences left in a full cache of every layer, with statistics of another text of the same model."""
    found = read_once(name)
    texts = [torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(n)) for n in (30, 41)]
    statistics = calibrate(load(name), texts)
    cases = [found.case(layer, budget) for layer in range(len(found.layers))]
    weights = [output_weight_of(found.model, layer) for layer in range(len(cases))]
    return (
        found,
        [
            replace(case, cells=replace(case.cells, output_weight=weight))
            for case, weight in zip(cases, weights, strict=True)
        ],
        statistics,
    )


def by_head(cases: list[Any], statistics: Statistics, b: int, furthest: int = 64) -> list[list[list[float]]]:
    """z[layer][query head][position] of one sequence."""
    return [
        [
            z_scored(scores, [True] * len(scores))
            for h in range(case.rows.queries.shape[1])
            for scores in [loop_score(case, statistics, b, h, furthest, layer)]
        ]
        for layer, case in enumerate(cases)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_score_is_its_formula_on_captured_keys(name: str) -> None:
    """Partial rotary embeddings (phi3), scalings above 1 (llama_yarn), one embedding per type of layer among them."""
    _, cases, statistics = layers_of(name)
    for layer, case in enumerate(cases):
        found = TriAttention(statistics, 64)(case.cells, case.rows)
        for b, k in np.ndindex(*case.shape[:2]):
            group = case.shape[2]
            heads = [loop_score(case, statistics, b, h, 64, layer) for h in range(k * group, (k + 1) * group)]
            wanted = np.max([z_scored(scores, [True] * len(scores)) for scores in heads], axis=0)
            got = found[b, k, : len(wanted)].double().numpy()
            assert np.abs(got - wanted).max() <= ROUNDING * np.abs(wanted).max(), (layer, b, k)


# The modes, by selector


def kept_by(selector: str, cases: list[Any], score: Score, count: int) -> list[list[list[set[int]]]]:
    """kept[sequence][layer][KV head] positions, every cell keeping `count`."""
    cells = [case.cells for case in cases]
    scores = [score(case.cells, case.rows).masked_fill(~case.cells.held, -torch.inf) for case in cases]
    counts = [layer.lengths.clamp(max=count) for layer in cells]
    kept = named(Selector, selector)(cells, scores, counts)
    for keep, wanted in zip(kept, counts, strict=True):
        assert torch.equal(keep.sum(-1), wanted)
    return [
        [
            [set(layer.positions[b, k][keep[b, k]].tolist()) for k in range(keep.shape[1])]
            for layer, keep in zip(cells, kept, strict=True)
        ]
        for b in range(cells[0].keys.shape[0])
    ]


def top(scores: list[float], count: int) -> list[int]:
    """The best `count` indices, of equal ones the earliest."""
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count]


def union_then_top(heads: list[list[float]], count: int) -> set[int]:
    """The global mode as the code has it: every head's best, their union, and of that the best by the maximum."""
    union = sorted({j for scores in heads for j in top(scores, count)})
    highest = [max(scores[j] for scores in heads) for j in union]
    return {union[i] for i in top(highest, count)}


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "embedded_qwen", "embedded_olmo"])
def test_modes_are_those_of_the_code(name: str) -> None:
    _, cases, statistics = layers_of(name)
    score, count = TriAttention(statistics, 64), 9
    group = cases[0].shape[2]
    alone, per_head, everywhere = (
        kept_by(selector, cases, score, count) for selector in ("top_mass", "shared:across=layers", "shared")
    )
    assert everywhere == kept_by("alpha:lambda=0,score_scale=raw", cases, score, count)
    for b in range(2):
        z = by_head(cases, statistics, b)
        n = len(z[0][0])
        of_cell = [
            [[max(column) for column in zip(*heads[k * group : (k + 1) * group], strict=True)] for k in range(2)]
            for heads in z
        ]
        flat = [scores for heads in z for scores in heads]
        wanted = union_then_top(flat, count)
        assert wanted == set(top([max(scores[j] for scores in flat) for j in range(n)], count))
        for layer in range(len(cases)):
            for k in range(len(everywhere[b][layer])):
                assert everywhere[b][layer][k] == wanted
                if k < 2:
                    mean = [sum(heads[k][j] for heads in of_cell) / len(of_cell) for j in range(n)]
                    assert per_head[b][layer][k] == set(top(mean, count))
                    assert alone[b][layer][k] == set(top(of_cell[layer][k], count))
        assert len({frozenset(x) for layer in alone[b] for x in layer}) > 1  # the modes differ


@given(st.integers(1, 5), st.integers(1, 12), st.data())
def test_the_union_of_the_best_of_every_head_changes_nothing(heads: int, n: int, data: Any) -> None:
    line = st.lists(st.sampled_from([-1.5, -1.0, 0.0, 0.25, 1.0, 3.0]), min_size=n, max_size=n)
    scores = [data.draw(line) for _ in range(heads)]
    highest = [max(column) for column in zip(*scores, strict=True)]
    for count in range(1, n + 1):
        # among equal maxima either may be kept
        assert sorted(highest[j] for j in union_then_top(scores, count)) == sorted(
            highest[j] for j in top(highest, count)
        )


def cells_at(positions: list[list[list[int]]], layer: int) -> Cells:
    """Cells of one sequence and two layers that hold these positions, [KV head]."""
    width = max(len(head) for head in positions[layer])
    padded = torch.tensor([[head + [-1] * (width - len(head)) for head in positions[layer]]])
    empty = torch.zeros(1, len(padded[0]), width, 2)
    return Cells(layer, len(positions), empty, empty, padded, (20,), 4)


HEADS = st.lists(st.sets(st.integers(0, 9), min_size=1).map(sorted), min_size=2, max_size=2)


@given(st.lists(HEADS, min_size=1, max_size=3), st.sampled_from(["all", "layers"]), st.data())
def test_shared_keeps_the_best_of_one_order_that_each_cell_holds(positions: Any, across: str, data: Any) -> None:
    value = st.sampled_from([-1.0, 0.0, 0.5, 0.5, 2.0, math.inf])
    cells = [cells_at(positions, layer) for layer in range(len(positions))]
    scores, counts = [], []
    for layer in cells:
        drawn = [[[data.draw(value) if p >= 0 else -math.inf for p in head] for head in layer.positions[0].tolist()]]
        scores.append(torch.tensor(drawn))
        counts.append(torch.tensor([[data.draw(st.integers(0, int(n))) for n in layer.lengths[0]]]))
    kept = Shared(across)(cells, scores, counts)
    for number, (layer, count) in enumerate(zip(cells, counts, strict=True)):
        for k in range(2):
            pooled = {}
            for p in positions[number][k]:
                found = [
                    float(score[0, other, entry])
                    for score, where in zip(scores, cells, strict=True)
                    for other in ([0, 1] if across == "all" else [k])
                    for entry, held in enumerate(where.positions[0, other].tolist())
                    if held == p
                ]
                pooled[p] = max(found) if across == "all" else sum(found) / len(found)
            order = sorted(
                pooled,
                key=lambda p: (0, -p) if pooled[p] == math.inf else (1, -pooled[p], p),
            )
            assert set(layer.positions[0, k][kept[number][0, k]].tolist()) == set(order[: int(count[0, k])])


def test_shared_refuses_what_it_cannot_do() -> None:
    with pytest.raises(BadInput, match="across"):
        Shared("heads")
    cells = [cells_at([[[0, 1], [2]]], 0), cells_at([[[0, 1]]], 0)]
    scores, counts = [torch.zeros(1, 2, 2), torch.zeros(1, 1, 2)], [torch.ones(1, 2).long(), torch.ones(1, 1).long()]
    with pytest.raises(BadInput, match="numbers of KV heads"):
        Shared("layers")(cells, scores, counts)


# Against the code


def made(offset: int, *shape: int) -> torch.Tensor:
    """As in peers/kvpress/triattention_keeps.py: numbers that look random and are the same everywhere."""
    i = torch.arange(math.prod(shape), dtype=torch.int64) + offset
    return ((((i * i * 7919 + 13 * i) % 1009).double() / 1009 - 0.5) * 3).float().reshape(shape)


def peer_cases() -> tuple[list[Case], Statistics]:
    """The script's two layers of 30 entries with gaps, of which the first 5 are a pinned prompt."""
    omega, scaling, entries = [1.0, 0.1, 0.01, 0.001], 1.25, 30
    positions = [i if i < 5 else 5 + 2 * (i - 5) + i % 2 for i in range(entries)]
    mean = torch.complex(made(5000, 2, 4, 4), made(7000, 2, 4, 4))
    statistics = Statistics(mean, mean.abs() + made(9000, 2, 4, 4).abs(), torch.empty(0), 4, 8)
    cases = []
    for layer, keys in enumerate(made(1, 2, 1, 2, entries, 8)):
        turned = torch.empty_like(keys)
        for entry, position in enumerate(positions):
            turn = torch.tensor(rotation(position, omega, scaling, 8))
            turned[:, :, entry] = (turn @ keys[:, :, entry].double()[..., None])[..., 0].float()
        held = torch.tensor(positions).expand(1, 2, -1)
        rotary = Rotary(lambda: (torch.tensor(omega), scaling))
        cells = Cells(layer, 2, turned, turned, held, (71,), 14, rotary, pinned=(5,))
        none = torch.empty(1, 0, dtype=torch.int64)
        cases.append(Case(cells, ContextRows(torch.empty(1, 4, 0, 8), none, none, 1.0, None)))
    return cases, statistics


def test_scores_and_kept_sets_are_those_of_the_code() -> None:
    peer = json.loads((Path(__file__).parent / "data" / "triattention.json").read_text("utf-8"))
    assert peer["versions"] == {
        "torch": "2.13.0",
        "WeianMao/triattention": "c3744ee6a50522a1559a577f85aef2b165a344f2",
    }
    cases, statistics = peer_cases()
    for layer, case in enumerate(cases):
        theirs = torch.tensor(peer["scores"][layer]).unflatten(0, (2, 2))
        found = TriAttention(statistics, 64, normalise=False)(case.cells, case.rows)[0]
        assert float((found - theirs.amax(1)).abs().max()) <= PEER_ROUNDING * float(theirs.abs().max())
    score = TriAttention(statistics, 64)
    cells = [case.cells for case in cases]
    scores = []
    for case in cases:
        scores.append(score(case.cells, case.rows))
        scores[-1][..., :5] = math.inf  # what a run does to a pinned prompt
    counts = [torch.full((1, 2), 14)] * 2
    for mode, selector in (("global", "shared"), ("head", "shared:across=layers"), ("layer_head", "top_mass")):
        kept = named(Selector, selector)(cells, scores, counts)
        assert [[torch.nonzero(head).flatten().tolist() for head in keep[0]] for keep in kept] == peer["kept"][mode]


# In a run


@dataclass(frozen=True)
class Watched(TriAttention):
    """Remembers the cells that it scored and what it said, call by call."""

    said: list[tuple[Cells, ContextRows, torch.Tensor]] = field(default_factory=list, compare=False)

    def __call__(self, cells: Cells, rows: Any) -> torch.Tensor:
        scores = super().__call__(cells, rows)
        self.said.append((cells, rows, scores))
        return scores


@dataclass(frozen=True)
class Scored:
    cells: Cells
    rows: Any

    @property
    def shape(self) -> tuple[int, int, int]:
        batch, kv_heads = self.cells.positions.shape[:2]
        return batch, kv_heads, self.rows.queries.shape[1] // kv_heads


@pytest.mark.parametrize("selector", ["top_mass", "shared", "shared:across=layers"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_an_evicted_cache_is_scored_at_its_true_positions(name: str, selector: str) -> None:
    model = small_model(name)
    statistics = calibrate(model, [torch.arange(2, 60)])
    score = Watched(statistics, 64)
    ids = torch.randint(2, 97, (2, 30), generator=torch.Generator().manual_seed(8))
    with evict(model, score, "uniform", selector, budget=8, decode=Decode(slack=2)) as run:
        run.prefill(ids, torch.tensor([[1] * 30, [0] * 6 + [1] * 24]))
        run.generate(torch.tensor([[5], [6]]), max_new_tokens=7)
        kept = [run.kept_of(b) for b in range(2)]
    late = [said for said in score.said if max(said[0].seen) > 31]
    assert len(late) >= 4
    for cells, rows, scores in late:
        case = Scored(cells, rows)
        gaps = [np.diff(held_of(case, b, k)[0]).max(initial=1) for b, k in np.ndindex(*case.shape[:2])]
        assert max(gaps) > 1 or name == "gemma3"
        for b, k in np.ndindex(*case.shape[:2]):
            group = case.shape[2]
            heads = [loop_score(case, statistics, b, h, 64, cells.layer) for h in range(k * group, (k + 1) * group)]
            wanted = np.max([z_scored(line, [True] * len(line)) for line in heads], axis=0)
            got = scores[b, k, : len(wanted)].double().numpy()
            # keys are turned by the model in float32, and back here in double: the angles differ by their rounding
            assert np.abs(got - wanted).max() <= TURNED_BACK * max(1.0, np.abs(wanted).max())
    if name == "gemma3":
        return
    for layers in kept:
        sets = {(layer, k): tuple(head) for layer, heads in enumerate(layers) for k, head in enumerate(heads)}
        different = len(set(sets.values()))
        if selector == "shared":
            assert different == 1
        elif selector != "top_mass":
            assert all(sets[layer, k] == sets[0, k] for layer, k in sets)


@pytest.mark.parametrize("prompt", ["pinned", "on_top"])
def test_a_pinned_prompt_is_outside_the_z_score(prompt: Any) -> None:
    model = small_model("llama")
    score = Watched(calibrate(model, [torch.arange(2, 60)]), 64)
    with evict(model, score, "uniform", "shared", budget=16, decode=Decode(prompt=prompt)) as run:
        run.prefill(torch.arange(2, 12))
        run.generate(torch.tensor([5]), max_new_tokens=22)
        assert all(set(range(10)) <= set(head.tolist()) for layer in run.kept for head in layer)
        assert len({tuple(head) for layer in run.kept for head in layer}) == 1
    assert score.said and all(cells.pinned == (10,) for cells, _, _ in score.said)


# Properties that all scores have


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), pad=st.integers(0, 3), garbage=st.sampled_from([math.nan, math.inf, -1e30]))
def test_nothing_in_padding_changes_the_score(seed: int, pad: int, garbage: float) -> None:
    clean, dirty = case_of(seed=seed, garbage=0.0), case_of(seed=seed, garbage=garbage, pad=pad)
    score = TriAttention(statistics_of(clean))
    wanted, found = score(clean.cells, clean.rows), score(dirty.cells, dirty.rows)
    torch.testing.assert_close(found[dirty.cells.held], wanted[clean.cells.held], rtol=1e-6, atol=1e-7)
    assert not bool(found.isnan().any())


@settings(max_examples=20, deadline=None)
@given(case=CASES)
def test_sequences_of_a_batch_do_not_see_each_other(case: Any) -> None:
    score = TriAttention(statistics_of(case))
    whole = score(case.cells, case.rows)
    for b in range(case.shape[0]):
        one, rows = slice(b, b + 1), case.rows
        cells = replace(
            case.cells,
            keys=case.cells.keys[one],
            values=case.cells.values[one],
            positions=case.cells.positions[one],
            seen=case.cells.seen[one],
        )
        alone = ContextRows(rows.queries[one], rows.positions[one], rows.first[one], rows.scale, rows.softcap)
        torch.testing.assert_close(score(cells, alone), whole[one], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_score_of_half_precision_is_that_of_its_numbers_in_float32(dtype: torch.dtype) -> None:
    case = case_of(seed=11, dtype=dtype)
    wide = replace(case.cells, keys=case.cells.keys.float(), output_weight=case.cells.output_weight.float())
    score = TriAttention(statistics_of(case))
    assert torch.equal(score(case.cells, case.rows), score(wide, case.rows))
    assert score.rows_needed(100) == 0
    assert torch.equal(score(case.cells, case.rows.last(0)), score(wide, case.rows))


# Statistics


@pytest.mark.parametrize("skip", [0, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_statistics_are_means_of_the_models_own_projections(name: str, skip: int) -> None:
    model = load(name)
    texts = [torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(n)) for n in (25, 40, 3)]
    found = calibrate(model, texts, skip)
    queries: list[list[list[np.ndarray]]] = []  # [layer][query head] of (tokens, d)
    for text in texts:
        with projections(model) as projected, torch.inference_mode():
            model(text[None], use_cache=False)
        if not queries:
            queries = [[[] for _ in layer["q"][0]] for layer in projected]
        for layer, into in zip(projected, queries, strict=True):
            for head, line in zip(layer["q"][0], into, strict=True):
                line.append(head[skip:].double().numpy())
    for layer, heads in enumerate(queries):
        half = len(rotary_of(model, layer).parameters()[0])
        for h, lines in enumerate(heads):
            tokens = [line for part in lines for line in part]
            assert len(tokens) == found.tokens == 68 - skip * 2 - min(skip, 3)
            d = len(tokens[0])
            wanted = []
            for f in range(d - half):
                parts = [complex(x[f], x[half + f]) if f < half else complex(x[half + f], 0.0) for x in tokens]
                mean = sum(parts) / len(parts)
                magnitude = sum(abs(x) for x in parts) / len(parts)
                wanted.append((mean, magnitude))
            largest = max(magnitude for _, magnitude in wanted)
            for f, (mean, magnitude) in enumerate(wanted):
                assert abs(complex(found.mean[layer, h, f]) - mean) <= TURNED_BACK * largest, (layer, h, f)
                assert abs(float(found.magnitude[layer, h, f]) - magnitude) <= TURNED_BACK * largest
        assert torch.equal(found.witness[layer], output_weight_of(model, layer)[:, 0])
    assert (found.skipped, found.d) == (skip, d)


def test_statistics_are_the_same_after_a_file(tmp_path: Path) -> None:
    model = small_model("phi3")
    made = replace(calibrate(model, [torch.arange(2, 50)]), model="phi", digest="abc", text="def")
    path = tmp_path / "deep" / "phi.safetensors"
    made.save(path)
    found = Statistics.load(path)
    for name in ("mean", "magnitude", "witness"):
        assert torch.equal(getattr(found, name), getattr(made, name))
    for name in ("turning", "d", "model", "digest", "text", "tokens", "skipped"):
        assert getattr(found, name) == getattr(made, name)
    ids = torch.randint(2, 97, (30,), generator=torch.Generator().manual_seed(8))
    kept = []
    for score in (TriAttention(made), f"triattention:statistics={path}", TriAttention(path)):
        with evict(model, score, budget=6) as run:
            run.prefill(ids)
            kept.append([head.tolist() for layer in run.kept for head in layer])
    assert kept[0] == kept[1] == kept[2]


def test_files_that_hold_no_statistics_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(BadInput, match="no such file"):
        TriAttention(path)
    path.write_bytes(b"nothing")
    with pytest.raises(BadInput, match="not readable as safetensors"):
        TriAttention(str(path))
    save_file({"mean": torch.zeros(2)}, path)
    with pytest.raises(BadInput, match="no query statistics of version"):
        named(Score, f"triattention:statistics={path}")
    about = {"format": "forced-weights query statistics", "version": "2"}
    save_file({"mean": torch.zeros(2)}, path, about)
    with pytest.raises(BadInput, match="not whole"):
        TriAttention(path)


@pytest.mark.parametrize("text", ["triattention:statistics=7", "triattention:furthest=0", "triattention:normalise=2"])
def test_options_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"score triattention: .*expected"):
        named(Score, text)


def test_statistics_of_no_or_another_model_are_refused() -> None:
    model = small_model("llama")
    statistics = replace(calibrate(model, [torch.arange(2, 50)]), model="mine")
    other = small_model("llama")
    with torch.no_grad():
        other.model.layers[2].self_attn.o_proj.weight[0].mul_(1.1)
    for wrong, score, why in (
        (model, TriAttention(), "statistics=None: expected the file"),
        (small_model("olmo2"), TriAttention(statistics), "layer 0: statistics of mine, of 4 layers, 6 query heads"),
        (other, TriAttention(statistics), "layer 2: statistics of mine: this model's weights are others"),
    ):
        with evict(wrong, score, budget=6) as run, pytest.raises(BadInput, match=why):
            run.prefill(torch.arange(2, 40))
    for dtype in (torch.bfloat16, torch.float16):  # the same one in another precision is the same one
        with evict(small_model("llama", dtype), TriAttention(statistics), budget=6) as run:
            run.prefill(torch.arange(2, 40))
    case = case_of()
    with pytest.raises(BadInput, match="rotary"):
        TriAttention(statistics_of(case))(replace(case.cells, rotary=None), case.rows)


def test_what_cannot_be_calibrated_is_refused() -> None:
    model = small_model("llama")
    for texts in ([], [torch.arange(2, 6)]):
        with pytest.raises(BadInput, match="no tokens"):
            calibrate(model, texts, skip=4)


def test_a_checkpoint_is_calibrated_on_documents_of_a_text() -> None:
    source = checkpoints.find("qwen3", None)
    files = [CHECKOUT / "data" / "text" / "austen-heldout.txt"]
    found = calibrated(source, files, docs=2, length=48, skip=4)
    assert (found.model, found.digest, found.tokens) == (source.label, source.digest, 2 * 44)
    assert found.text == digest_of([sha256(files[0])])
    assert found.mean.shape == (4, 4, 32) and bool((found.mean.abs() <= found.magnitude * (1 + 1e-5)).all())
    model = checkpoints.load_causal(source, "cpu", "float32")
    with evict(model, TriAttention(found), "uniform", "shared", budget=10) as run:
        run.prefill(torch.arange(2, 40))
    assert len({tuple(head) for layer in run.kept for head in layer}) == 1
    for options in ({"docs": 0}, {"length": 5, "skip": 4}, {"skip": -1}, {"dtype": "int8"}, {"length": 5000}):
        with pytest.raises(BadInput, match=f"--{next(iter(options))}"):
            calibrated(source, files, **{"docs": 2, "length": 48, **options})
