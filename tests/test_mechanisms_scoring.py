"""P2's rejected mechanisms of scoring and routing against loops from what they say, and in models."""

import itertools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel
from typer.testing import CliRunner

from capture import checkpoints
from capture.attention import LayerAttention, capturing
from data import BadInput
from data.store import CHECKOUT
from eviction import Decode, evict
from eviction.__main__ import application
from eviction.calibration import Generation, Statistics, calibrate, calibrated, traces_of
from eviction.measured import texts_of
from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score, listed, named
from eviction.ranking import keep_best
from eviction.routing import Routes, routed, routes_of
from eviction.scores.direction_bonus import DirectionBonus
from eviction.scores.even import Even
from eviction.scores.h2o import H2O
from eviction.scores.knorm import KNorm
from eviction.scores.recalibrated import QStats
from eviction.scores.snapkv import SnapKV
from eviction.scores.static_route import StaticRoute
from eviction.scores.tova import TOVA
from eviction.scores.triattention import TriAttention
from tests.test_run import small_model
from tests.test_scores import CASES, EMBEDDED, case_of, fresh, held_of, load
from tests.test_triattention import statistics_of

ROUNDING = 1e-6  # absolute, of a cosine in float64 added to a float32 score of size one
TURNED_BACK = 1e-5  # statistics against statistics of the same queries, computed in another pass, relative
MASS = 1e-5  # of attention mass: float64 softmax here, of the float32 numbers there; decides which heads are compared
FOUR = {"Q_stats", "even", "static_route", "variant_b"}


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginning of a text: tokens of the whole take longer than what is tested."""
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    whole = CHECKOUT / "data" / "text" / "austen-heldout.txt"
    path.write_text(whole.read_text("utf-8")[:8000], "utf-8")
    return path


def test_the_mechanisms_are_found_by_name_and_say_what_became_of_them() -> None:
    found = listed(Score)
    assert set(found) >= FOUR
    for name in FOUR - {"even"}:
        assert "rejected there" in found[name].source
        assert "Hypothesis:" in (found[name].__doc__ or "") and "Verdict (P2" in (found[name].__doc__ or "")


@pytest.mark.parametrize("name", sorted(FOUR - {"even"}))
def test_a_mechanism_without_its_file_says_which_it_needs(name: str) -> None:
    command = "routes" if name == "static_route" else "calibrate"
    with (
        evict(small_model("llama"), name, budget=6) as run,
        pytest.raises(BadInput, match=f"expected the file of .* that `python -m eviction {command}` writes"),
    ):
        run.prefill(torch.arange(2, 40))


# Direction bonus


def loop_cosine(value: list[float], direction: list[float]) -> float:
    lengths = [math.sqrt(sum(x * x for x in vector)) for vector in (value, direction)]
    if min(lengths) == 0:
        return 0.0
    return sum(x * y for x, y in zip(value, direction, strict=True)) / lengths[0] / lengths[1]


def loop_mean(values: list[list[float]], width: int) -> list[float]:
    mean = [0.0] * width
    for value in values:
        for i, x in enumerate(value):
            mean[i] += x / len(values)
    return mean


def assert_bonus(found: torch.Tensor, base: torch.Tensor, case: Any, prompt: Any, strength: float) -> None:
    """found is base + strength cos(v_j, mean of v over the positions in prompt(b, k)), entry by entry."""
    for b, k in np.ndindex(*case.shape[:2]):
        positions, _, values = held_of(case, b, k)
        held = dict(zip(positions, values.tolist(), strict=True))
        direction = loop_mean(prompt(b, k, held), values.shape[1])
        if 0 < math.sqrt(sum(x * x for x in direction)) <= 1e-9 * np.abs(values).max(initial=0.0):
            continue  # a direction that is all rounding
        for j, position in enumerate(positions):
            wanted = float(base[b, k, j])
            if wanted != math.inf:
                wanted += strength * loop_cosine(held[position], direction)
            got = float(found[b, k, j])
            assert got == wanted or abs(got - wanted) <= ROUNDING * max(1.0, abs(wanted), strength), (b, k, j)


@given(CASES, st.sampled_from([1e-3, 0.5, 2.0]), st.sampled_from(["tova", "knorm", "streaming_llm"]), st.booleans())
def test_the_bonus_is_its_formula(case: Any, strength: float, base: str, asked: bool) -> None:
    rows = ContextAndQuestionRows(**vars(case.rows)) if asked else case.rows
    found = DirectionBonus(strength, base)(case.cells, rows)
    assert found.dtype == torch.float32
    plain = named(Score, base)(fresh(case).cells, rows)
    assert_bonus(found, plain, case, lambda b, k, held: list(held.values()), strength)


@given(CASES, st.integers(0, 100))
def test_in_p2s_regime_the_base_is_triattention(case: Any, seed: int) -> None:
    base = TriAttention(statistics_of(case, seed))
    found = DirectionBonus(base=base)(case.cells, case.rows)
    assert_bonus(found, base(case.cells, case.rows), case, lambda b, k, held: list(held.values()), 0.5)


@pytest.mark.parametrize("base", ["tova", "h2o", "streaming_llm"])
@settings(max_examples=15)
@given(case=CASES)
def test_without_strength_it_is_the_base_bit_for_bit(base: str, case: Any) -> None:
    score = named(Score, f"variant_b:lambda=0,base={base}")
    plain = named(Score, base)
    case = fresh(case)
    assert torch.equal(score(case.cells, case.rows), plain(fresh(case).cells, case.rows))
    assert "direction" not in case.cells.memory  # nothing is kept for nothing
    assert score.rows_needed(case.cells.budget) == plain.rows_needed(case.cells.budget)


def test_options_of_the_base_are_separated_by_semicolons() -> None:
    score = named(Score, "variant_b:lambda=2,base=snapkv:variant=kvpress;window=3")
    assert isinstance(score, DirectionBonus) and score.lambda_ == 2
    assert score._base == SnapKV("kvpress", window=3) and score.rows_needed(8) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lambda_": -1}, "lambda=-1: expected a number of at least 0"),
        ({"lambda_": math.nan}, "lambda=nan: expected a number"),
        ({"lambda_": True}, "lambda=True: expected a number"),
        ({"base": "kvzip"}, "base kvzip has the context read again"),
        ({"base": "variant_b"}, "base variant_b: expected another score"),
        ({"base": "nothing"}, "unknown score 'nothing'"),
        ({"base": "snapkv:window=0"}, "score snapkv: window=0"),
        ({"base": 7}, "score 7: expected a name"),
    ],
)
def test_a_bonus_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        DirectionBonus(**options)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_bonus_knows_no_size_and_no_value_of_length_zero(size: float) -> None:
    case = case_of(seed=2, garbage=math.nan)
    scaled = replace(case.cells, values=case.cells.values * size, memory={})
    score = DirectionBonus(1.0, "streaming_llm:sinks=0")
    held = case.cells.held
    wanted, found = score(case.cells, case.rows)[held], score(scaled, case.rows)[held]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    zero = replace(case.cells, values=torch.zeros_like(case.cells.values), memory={})
    assert torch.equal(score(zero, case.rows)[held], named(Score, "streaming_llm:sinks=0")(zero, case.rows)[held])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e30])
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), pad=st.integers(0, 3))
def test_nothing_in_padding_changes_a_mechanism(garbage: float, seed: int, pad: int) -> None:
    clean, dirty = case_of(seed=seed, garbage=0.0), case_of(seed=seed, garbage=garbage, pad=pad)
    for score in (DirectionBonus(base="tova"), StaticRoute(made_routes([[True, False]], "tova")), Even()):
        wanted, found = score(clean.cells, clean.rows), score(dirty.cells, dirty.rows)
        torch.testing.assert_close(found[dirty.cells.held], wanted[clean.cells.held], rtol=1e-5, atol=1e-7)


@settings(max_examples=20)
@given(case=CASES)
def test_sequences_of_a_batch_do_not_see_each_other(case: Any) -> None:
    route = StaticRoute(made_routes([[True, False][: case.shape[1]]], "tova:heads=group"))
    for score in (DirectionBonus(base="tova"), route, Even()):
        whole = score(fresh(case).cells, case.rows)
        for b in range(case.shape[0]):
            one, rows = slice(b, b + 1), case.rows
            cells = replace(
                case.cells,
                keys=case.cells.keys[one],
                values=case.cells.values[one],
                positions=case.cells.positions[one],
                seen=case.cells.seen[one],
                memory={},
            )
            alone = ContextRows(rows.queries[one], rows.positions[one], rows.first[one], rows.scale, rows.softcap)
            torch.testing.assert_close(score(cells, alone), whole[one], rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_that_of_its_numbers_in_float32(dtype: torch.dtype) -> None:
    case = case_of(seed=11, dtype=dtype)
    wide = replace(case.cells, keys=case.cells.keys.float(), values=case.cells.values.float(), memory={})
    rows = ContextRows(
        case.rows.queries.float(), case.rows.positions, case.rows.first, case.rows.scale, case.rows.softcap
    )
    for score in (DirectionBonus(base="tova"), StaticRoute(made_routes([[True, False]], "tova")), Even()):
        found, wanted = score(case.cells, case.rows), score(wide, rows)
        assert found.dtype == torch.float32 and torch.equal(found[wide.held], wanted[wide.held])


@dataclass(frozen=True)
class Watched(DirectionBonus):
    """Remembers the cells that it scored, what it said, and a copy of what its memory held then."""

    said: list[tuple[Cells, Any, torch.Tensor]] = field(default_factory=list, compare=False)

    def __call__(self, cells: Cells, rows: Any) -> torch.Tensor:
        before = dict(cells.memory)
        kept = {name: tensor.clone() for name, tensor in before.items()}
        scores = super().__call__(cells, rows)
        assert all(torch.equal(before[name], kept[name]) for name in kept)  # replaced, never written to
        self.said.append((cells, rows, scores))
        return scores


@dataclass(frozen=True)
class Scored:
    cells: Cells
    shape: tuple[int, int]


def values_of(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Per layer, the values (B, K, N, dv) of a dense pass."""
    found: list[LayerAttention] = []
    with torch.no_grad(), capturing(model, found.append):
        model(ids, use_cache=False)
    return [layer.value for layer in found]


@pytest.mark.parametrize(
    ("name", "prompt"),
    [("llama", "free"), ("qwen3", "free"), ("gemma3", "free"), ("llama", "pinned"), ("qwen3", "on_top")],
)
def test_the_direction_stays_that_of_the_prompt(name: str, prompt: Any) -> None:
    """Evicted from or pinned, while the question is read and while the model answers."""
    model = small_model(name)
    score = Watched(0.7, "streaming_llm")
    ids = torch.randint(2, 97, (2, 30), generator=torch.Generator().manual_seed(8))
    pads = (0, 6)
    mask = torch.tensor([[0] * pad + [1] * (30 - pad) for pad in pads])
    with evict(model, score, budget=33 if prompt == "pinned" else 10, decode=Decode(prompt=prompt)) as run:
        run.prefill(ids, mask)
        assert len(score.said) == (4 if prompt == "free" else 0)
        run.generate(torch.tensor([[5, 9], [6, 7]]), max_new_tokens=14)
        side = run.side_bytes
        for layer in run.cache.layers:
            layer.memory.clear()
        assert side - run.side_bytes == 4 * (2 * 2 * 16 * 8 + 2 * 8)  # layers of 2 sums of 16 float64 a sequence
    assert len(score.said) > 8
    dense = [values_of(model, ids[b : b + 1, pad:]) for b, pad in enumerate(pads)]
    for cells, rows, scores in score.said:
        base = named(Score, "streaming_llm")(cells, rows)

        def whole(b: int, k: int, held: Any, layer: int = cells.layer) -> list[list[float]]:
            lines: list[list[float]] = dense[b][layer][0, k].double().tolist()
            return lines

        assert_bonus(scores, base, Scored(cells, (2, 2)), whole, 0.7)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    way=st.sampled_from(["context", "asked", "pinned"]),
    seed=st.integers(0, 1000),
    budget=st.integers(1, 8),
)
def test_the_direction_adds_up_over_the_chunks_of_a_prompt(
    lengths: list[int], way: str, seed: int, budget: int
) -> None:
    """Chunks and then single tokens; between them entries go. What counts follows from what the rows are said to be."""
    ends = np.cumsum([0, *lengths, 1, 1]).tolist()
    steps = len(lengths)
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(1, 2, ends[-1], 4, generator=random, dtype=torch.float64).float()
    kept: list[set[int]] = [set(), set()]
    memory: dict[str, torch.Tensor] = {}
    for step, (start, end) in enumerate(itertools.pairwise(ends)):
        decoding = step >= steps
        held = [sorted(one | set(range(start, end))) for one in kept]
        width = max(map(len, held))
        positions = torch.tensor([[line + [-1] * (width - len(line)) for line in held]])
        mine = torch.gather(values, 2, positions.clamp(min=0)[..., None].expand(-1, -1, -1, 4))
        mine = mine.masked_fill(positions[..., None] < 0, math.nan)
        pinned = (ends[steps],) if way == "pinned" and decoding else ()
        cells = Cells(0, 1, mine, mine, positions, (end,), 8, memory=memory, pinned=pinned)
        kind = ContextRows if way == "context" and not decoding else ContextAndQuestionRows
        none = torch.zeros(1, 0, dtype=torch.int64)
        rows = kind(torch.zeros(1, 2, 0, 4), none, none, 1.0, None)
        found = DirectionBonus(1.0, "streaming_llm")(cells, rows)
        base = named(Score, "streaming_llm")(cells, rows)
        first = ends[1]
        last = {"context": ends[min(step + 1, steps)], "asked": first, "pinned": ends[steps] if decoding else first}

        def prompt(b: int, k: int, there: Any, last: int = last[way]) -> list[list[float]]:
            lines: list[list[float]] = values[b, k, :last].double().tolist()
            return lines

        assert_bonus(found, base, Scored(cells, (1, 2)), prompt, 1.0)
        if way != "pinned":  # a pinned prompt is not evicted from
            choice = [torch.randperm(len(line), generator=random)[:budget].tolist() for line in held]
            held = [[line[j] for j in some] for line, some in zip(held, choice, strict=True)]
        kept = [set(line) for line in held]


# Even


def loop_number(position: int) -> float:
    """The binary digits of the position, in reverse, after the point."""
    total, weight = 0.0, 0.5
    while position:
        total, position, weight = total + weight * (position % 2), position // 2, weight / 2
    return total


@given(CASES)
def test_even_is_its_formula(case: Any) -> None:
    found = Even()(case.cells, case.rows)
    for b, k in np.ndindex(*case.shape[:2]):
        for j, position in enumerate(held_of(case, b, k)[0]):
            assert float(found[b, k, j]) == -loop_number(position)


def cells_at(positions: list[int], seen: int) -> Cells:
    held = torch.tensor(positions)[None, None]
    empty = torch.zeros(1, 1, len(positions), 2)
    return Cells(0, 1, empty, empty, held, (seen,), 8)


NONE = ContextRows(torch.zeros(1, 1, 0, 2), torch.zeros(1, 0).long(), torch.zeros(1, 0).long(), 1.0, None)


def kept_evenly(positions: list[int], count: int, seen: int) -> list[int]:
    keep = keep_best(Even()(cells_at(positions, seen), NONE), torch.tensor([[count]]))
    return [p for p, stays in zip(positions, keep[0, 0].tolist(), strict=True) if stays]


@given(st.integers(2, 700), st.data())
def test_any_number_of_entries_is_spread_evenly(n: int, data: Any) -> None:
    count = data.draw(st.integers(1, n))
    kept = kept_evenly(list(range(n)), count, n)
    assert len(kept) == count and kept[0] == 0
    stride = 1
    while math.ceil(n / stride) > count:
        stride *= 2
    assert {b - a for a, b in itertools.pairwise(kept)} <= {stride, stride // 2 or 1}
    assert n - kept[-1] <= stride
    digits = 1 + int(math.log2(n))
    start = data.draw(st.integers(0, n - 1))
    width = data.draw(st.integers(1, n - start))
    inside = sum(start <= p < start + width for p in kept)
    assert abs(inside - count * width / n) <= 2 * digits


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data())
def test_evicting_evenly_again_and_again_is_evicting_once(lengths: list[int], data: Any) -> None:
    held: list[int] = []
    seen = 0
    budget = data.draw(st.integers(1, 20))
    for length in lengths:
        held += range(seen, seen + length)
        seen += length
        held = kept_evenly(held, min(budget, len(held)), seen)
    assert held == kept_evenly(list(range(seen)), min(budget, seen), seen)
    fewer = data.draw(st.integers(0, len(held)))
    assert set(kept_evenly(held, fewer, seen)) <= set(held)


def test_numbers_of_far_positions_are_exact() -> None:
    far = [0, 1, 2**23, 2**24 - 1, 12_345_678]
    found = Even()(cells_at(far, 2**24), NONE)[0, 0].tolist()
    assert found == [-loop_number(p) for p in far] and len(set(found)) == 5


# Static route


def made_routes(by_attention: list[list[bool]], score: str = "snapkv") -> Routes:
    made = torch.tensor(by_attention)
    return Routes(made, torch.zeros(*made.shape, 2), torch.empty(0), score, 8, 4, 20, 1)


@given(CASES, st.lists(st.booleans(), min_size=2, max_size=2), st.sampled_from(["tova", "knorm", "streaming_llm"]))
def test_a_head_has_the_score_of_its_route(case: Any, by: list[bool], name: str) -> None:
    kv_heads = case.shape[1]
    found = StaticRoute(made_routes([by[:kv_heads]], name))(case.cells, case.rows)
    attention = named(Score, name)(case.cells, case.rows)
    assert found.dtype == torch.float32
    for b, k in np.ndindex(*case.shape[:2]):
        for j, position in enumerate(held_of(case, b, k)[0]):
            theirs = float(attention[b, k, j])
            wanted = theirs if by[k] or theirs == math.inf else -loop_number(position)
            assert float(found[b, k, j]) == wanted


def test_a_layer_has_its_own_routes() -> None:
    case = case_of(seed=4)
    routes = made_routes([[True, False], [False, True]], "knorm")
    for layer in (0, 1):
        cells = replace(case.cells, layer=layer, n_layers=2)
        found = StaticRoute(routes)(cells, case.rows)
        keys, even = KNorm()(cells, case.rows), Even()(cells, case.rows)
        wanted = torch.stack([(keys if layer == k else even)[:, k] for k in (0, 1)], dim=1)
        assert torch.equal(found[cells.held], wanted[cells.held])


def loop_mass(
    model: PreTrainedModel, text: list[int], score: Score, budget: int, later: int
) -> list[list[list[float]]]:
    """mass[layer][KV head] of the even way and of the score's, from the model's own eager weights.

    What is kept is what runs keep that evict after the context, by the score, and by hand evenly.
    """
    context = len(text) - later
    previous = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([text]), output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(previous)
    protected = Protected(score)
    with evict(model, protected, budget=budget) as run:
        run.prefill(torch.tensor(text[:context]))
        by_score = run.kept
        windows = [shape.window for shape in run.cache.shapes]
    found: list[list[list[float]]] = []
    for layer, window in enumerate(windows):
        oldest = 0 if window is None else max(0, context - window + 1)
        found.append([])
        for k, kept in enumerate(by_score[layer]):
            safe = [p for p in protected.positions[layer][k] if p >= oldest]
            others = sorted(set(range(oldest, context)) - set(safe), key=loop_number)
            evenly = (sorted(safe, reverse=True) + others)[: min(budget, context - oldest)]
            group = weights[layer].shape[1] // len(by_score[layer])
            masses = []
            for some in (evenly, kept.tolist()):
                total = 0.0
                for h in range(k * group, (k + 1) * group):
                    for t in range(context, len(text)):
                        total += sum(float(weights[layer][0, h, t, p]) for p in some) / later / group
                masses.append(total)
            found[-1].append(masses)
    return found


@dataclass(frozen=True)
class Protected(Score):
    """A score, with the positions that it protects noted: positions[layer][KV head] of the first sequence."""

    score: Score
    positions: dict[int, list[list[int]]] = field(default_factory=dict, compare=False)

    name = "protected"
    source = "test"

    def rows_needed(self, budget: int) -> int | None:
        return self.score.rows_needed(budget)

    def __call__(self, cells: Cells, rows: Any) -> torch.Tensor:
        scores = self.score(cells, rows)
        safe = (scores[0] == math.inf) & cells.held[0]
        self.positions[cells.layer] = [p[x].tolist() for p, x in zip(cells.positions[0], safe, strict=True)]
        return scores


@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("llama", "knorm"),
        ("llama_yarn", "snapkv:window=4"),
        ("gemma2", "tova"),
        ("gemma3", "knorm"),
        ("phi3", "h2o:recent=2"),
        ("embedded_qwen", "knorm"),
        ("embedded_olmo", "keydiff"),
    ],
)
def test_routes_follow_the_mass_that_later_rows_find(name: str, score: str) -> None:
    model, budget, later = load(name), 9, 7
    texts = [torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    routes = routes_of(model, texts, score, budget, later)
    masses = np.mean([loop_mass(model, text.tolist(), named(Score, score), budget, later) for text in texts], axis=0)
    assert np.abs(routes.mass.double().numpy() - masses).max() <= MASS
    clear = np.abs(masses[..., 1] - masses[..., 0]) > 2 * MASS
    assert clear.any()
    assert np.array_equal(routes.by_attention.numpy()[clear], (masses[..., 1] > masses[..., 0])[clear])
    assert (routes.score, routes.budget, routes.later, routes.context, routes.documents) == (score, 9, 7, 33, 2)


def test_heads_differ_and_equal_ways_are_even() -> None:
    model = load("llama")
    texts = [torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(3))]
    assert 0 < int(routes_of(model, texts, "keydiff", 9, 7).by_attention.sum()) < 4
    same = routes_of(model, texts, "even", 9, 7)  # even against even
    assert torch.equal(same.mass[..., 0], same.mass[..., 1]) and not bool(same.by_attention.any())
    windowed = routes_of(load("mistral"), texts, "knorm", 30, 7)  # whose windows of 12 hold less
    assert not bool(windowed.by_attention.any())


def test_routes_are_the_same_after_a_file_and_in_a_run(tmp_path: Path) -> None:
    model = small_model("llama")
    texts = [torch.randint(2, 97, (40,), generator=torch.Generator().manual_seed(3))]
    made = replace(routes_of(model, texts, "snapkv:window=4,kernel=3", 9, 7), model="mine", digest="abc", text="def")
    made = replace(made, by_attention=torch.tensor([[True, False]] * 3 + [[False, True]]))
    path = tmp_path / "deep" / "routes.safetensors"
    made.save(path)
    found = Routes.load(path)
    for name in ("by_attention", "mass", "witness"):
        assert torch.equal(getattr(found, name), getattr(made, name))
    for name in ("score", "budget", "later", "context", "documents", "model", "digest", "text"):
        assert getattr(found, name) == getattr(made, name)
    ids = torch.randint(2, 97, (2, 30), generator=torch.Generator().manual_seed(8))
    kept = []
    for score in (StaticRoute(made), f"static_route:routes={path}", "even", "snapkv:window=4,kernel=3"):
        with evict(model, score, budget=10, decode=Decode()) as run:
            run.prefill(ids)
            kept.append([[head.tolist() for head in layer] for layer in run.kept])
    assert kept[0] == kept[1]
    for layer, heads in enumerate(kept[0]):
        for k, head in enumerate(heads):
            window = list(range(26, 30))
            others = sorted(range(26), key=loop_number)[:6]
            assert head == (kept[3][layer][k] if bool(made.by_attention[layer, k]) else sorted(others + window))
            assert kept[2][layer][k] == sorted(sorted(range(30), key=loop_number)[:10])


def test_routes_of_no_or_another_model_are_refused(tmp_path: Path) -> None:
    model = small_model("llama")
    text = [torch.arange(2, 50)]
    routes = replace(routes_of(model, text, "tova", 9, 7), model="mine")
    other = small_model("llama")
    with torch.no_grad():
        other.model.layers[2].self_attn.o_proj.weight[0].mul_(1.1)
    for wrong, score, why in (
        (other, StaticRoute(routes), "layer 2: routes of mine: this model's weights are others"),
        (model, StaticRoute(made_routes([[True]])), "layer 0: routes of an unnamed model, of 1 layers and 1 KV heads"),
    ):
        with evict(wrong, score, budget=6) as run, pytest.raises(BadInput, match=why):
            run.prefill(torch.arange(2, 40))
    with evict(small_model("llama", torch.bfloat16), StaticRoute(routes), budget=6) as run:
        run.prefill(torch.arange(2, 40))  # the same one in another precision is the same one
    for score, why in (("nothing", "unknown score 'nothing'"), ("kvzip", "has the context read again")):
        with pytest.raises(BadInput, match=why):
            StaticRoute(made_routes([[True]], score))
        with pytest.raises(BadInput, match=why):
            routes_of(model, text, score, 9, 7)
    with pytest.raises(BadInput, match="no such file: expected one that `python -m eviction routes` wrote"):
        StaticRoute(tmp_path / "x.safetensors")
    calibrate(model, text).save(tmp_path / "statistics.safetensors")
    with pytest.raises(BadInput, match="no routes of version 1: run `python -m eviction routes` again"):
        named(Score, f"static_route:routes={tmp_path / 'statistics.safetensors'}")
    for budget, later, why in ((41, 7, "a budget of 41 in contexts of 41 tokens"), (9, 47, "documents of 48 tokens")):
        with pytest.raises(BadInput, match=why):
            routes_of(model, text, "tova", budget, later)


def test_a_route_needs_the_rows_of_its_score_and_carries_its_sums() -> None:
    routes = made_routes([[True, False]] * 4, "h2o:recent=0")
    assert StaticRoute(routes).rows_needed(8) is None
    assert StaticRoute(made_routes([[True]], "tova")).rows_needed(8) == 1
    model = small_model("llama")
    ids = torch.randint(2, 97, (30,), generator=torch.Generator().manual_seed(8))
    kept = []
    for score in (StaticRoute(routes), H2O(0)):
        with evict(model, score, budget=9) as run:
            run.prefill(ids, chunk=8)
            kept.append(run.kept)
    assert kept[0][0][0].tolist() == kept[1][0][0].tolist()  # the first layer's: later ones read what others left
    assert kept[0][0][1].tolist() == sorted(sorted(range(30), key=loop_number)[:9])


# Recalibrated statistics


def greedy_trace(model: PreTrainedModel, prompt: list[int], new: int, end: int | None) -> list[int]:
    """Token by token, the whole text read again for each."""
    text = list(prompt)
    for _ in range(new):
        with torch.no_grad():
            token = int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax())
        if token == end:
            break
        text.append(token)
    return text


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_traces_are_what_the_model_writes(name: str) -> None:
    model = small_model(name)
    prompts = [torch.randint(3, 90, (8,), generator=torch.Generator().manual_seed(seed)) for seed in range(10)]
    model.generation_config.eos_token_id = None
    wanted = [greedy_trace(model, prompt.tolist(), 12, None) for prompt in prompts]
    assert [trace.tolist() for trace in traces_of(model, prompts, Generation(12))] == wanted
    end = wanted[0][13]  # from now on this token ends a text
    model.generation_config.eos_token_id = end
    ended = [greedy_trace(model, prompt.tolist(), 12, end) for prompt in prompts]
    assert len(ended[0]) < 14 and max(map(len, ended)) == 20
    assert [trace.tolist() for trace in traces_of(model, prompts, Generation(12))] == ended
    model.generation_config.eos_token_id = [end, wanted[0][8]]
    assert len(traces_of(model, prompts, Generation(12))[0]) == 8
    with pytest.raises(BadInput, match="ended every trace with its first token"):
        traces_of(model, prompts[:1], Generation(12))


def test_drawn_traces_follow_the_seed_and_leave_the_generator_alone() -> None:
    model = small_model("qwen3")
    model.generation_config.eos_token_id = None
    prompts = [torch.randint(3, 90, (8,), generator=torch.Generator().manual_seed(seed)) for seed in range(9)]

    def drawn(count: int = 9, **options: Any) -> list[list[int]]:
        return [trace.tolist() for trace in traces_of(model, prompts[:count], Generation(12, **options))]

    torch.manual_seed(4)
    wanted = torch.rand(3)
    torch.manual_seed(4)
    first = drawn(temperature=1.0, seed=1)
    assert torch.equal(torch.rand(3), wanted)
    assert first == drawn(temperature=1.0, seed=1) and first[:8] == drawn(8, temperature=1.0, seed=1)
    assert first != drawn(temperature=1.0, seed=2) != drawn(temperature=0.1, seed=2) and first != drawn()
    assert drawn(temperature=1e-4, seed=3) == drawn()  # next to greedy
    twice = [trace.tolist() for trace in traces_of(model, prompts[:8] * 2, Generation(12, 1.0, 1))]
    assert twice[:8] == first[:8] and all(a != b for a, b in zip(twice[:8], twice[8:], strict=True))


def test_traces_are_drawn_from_the_whole_softmax() -> None:
    """At a high temperature all tokens come, though the model's own settings would cut most of them off."""
    model = small_model("qwen3")
    model.generation_config.update(eos_token_id=None, top_k=5, top_p=0.1, repetition_penalty=9.0, do_sample=False)
    prompts = [torch.arange(3, 11)] * 320
    drawn = {int(trace[8]) for trace in traces_of(model, prompts, Generation(1, 1e6, 0))}
    assert len(drawn) > 80  # of 97, in 320 draws: a share of exp(-320 / 97) does not
    greedy = traces_of(model, prompts[:1], Generation(20))[0].tolist()
    assert greedy == greedy_trace(model, list(range(3, 11)), 20, None)


def test_statistics_are_over_generated_positions_alone(prose: Path) -> None:
    source = checkpoints.find("qwen3", None)
    found = calibrated(source, [prose], docs=2, length=24, generation=Generation(16, 0.5, seed=3))
    assert (found.of, found.generated, found.temperature, found.seed) == ("generated", 16, 0.5, 3)
    model = checkpoints.load_causal(source, "cpu", "float32")
    traces = traces_of(model, texts_of(source, [prose], 2, 24), Generation(16, 0.5, seed=3))
    whole, prompts = calibrate(model, traces), calibrate(model, [trace[:24] for trace in traces])
    assert found.tokens == whole.tokens - 48 > 0 and found.skipped == 24
    # what is after the prompt is the whole less the prompt, as causal attention lets no prompt see it
    mean = (whole.mean * whole.tokens - prompts.mean * 48) / found.tokens
    magnitude = (whole.magnitude * whole.tokens - prompts.magnitude * 48) / found.tokens
    largest = float(whole.magnitude.max())
    assert float((found.mean - mean).abs().max()) <= TURNED_BACK * largest
    assert float((found.magnitude - magnitude).abs().max()) <= TURNED_BACK * largest
    assert float((found.mean - prompts.mean).abs().max()) > 100 * TURNED_BACK * largest


def test_the_file_says_what_statistics_are_of(tmp_path: Path, prose: Path) -> None:
    source, path = checkpoints.find("qwen3", None), tmp_path / "x.safetensors"
    for options, of in (({}, "text"), ({"traces": True}, "traces"), ({"generation": Generation(8)}, "generated")):
        made = calibrated(source, [prose], 1, 24, **options)  # type: ignore[arg-type]
        made.save(path)
        found = Statistics.load(path)
        assert found.of == of
        for name in ("of", "generated", "temperature", "seed", "tokens", "skipped", "model"):
            assert getattr(found, name) == getattr(made, name)
        if of == "text":
            TriAttention(path)
            with pytest.raises(BadInput, match="Q_stats: statistics of a text that embedded-qwen3 only read: expected"):
                named(Score, f"Q_stats:statistics={path}")
        else:
            named(Score, f"Q_stats:statistics={path},furthest=64")


def test_with_statistics_of_traces_it_is_triattention() -> None:
    model = small_model("llama")
    ids = torch.randint(2, 97, (30,), generator=torch.Generator().manual_seed(8))
    made = replace(calibrate(model, [torch.arange(2, 60)]), of="generated")
    kept = []
    for score in (QStats(made, 64), TriAttention(made, 64)):
        with evict(model, score, "uniform", "shared", budget=8, decode=Decode(slack=2)) as run:
            run.prefill(ids)
            run.generate(torch.tensor([[5]]), max_new_tokens=7)
            kept.append([[head.tolist() for head in layer] for layer in run.kept])
    assert kept[0] == kept[1]
    with pytest.raises(BadInput, match="score Q_stats: furthest=0"):
        QStats(made, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation": Generation(8), "skip": 1}, "--generate 8: expected neither --skip nor --traces"),
        ({"generation": Generation(8), "traces": True}, "--generate 8: expected neither --skip nor --traces"),
        ({"generation": Generation(1000)}, "positions for 1024 tokens, the 1000 generated after them included"),
        ({"length": 1}, "--length 1: expected at least 2"),
    ],
)
def test_calibrations_that_mean_nothing_are_refused(options: dict[str, Any], message: str, prose: Path) -> None:
    with pytest.raises(BadInput, match=message):
        calibrated(checkpoints.find("qwen3", None), [prose], **{"docs": 1, "length": 48, **options})


@pytest.mark.parametrize("options", [(0,), (1.5,), (True,), (1, -0.1), (1, math.inf), (1, 0.0, -1)])
def test_generations_that_mean_nothing_are_refused(options: Any) -> None:
    with pytest.raises(BadInput, match=r"calibrate: (generate|temperature|seed)="):
        Generation(*options)


# The whole way, in trained models


@pytest.mark.parametrize("family", EMBEDDED)
def test_every_mechanism_runs_from_its_file(family: str, tmp_path: Path, prose: Path) -> None:
    source = checkpoints.find(family, None)
    routes, statistics = tmp_path / "routes.safetensors", tmp_path / "statistics.safetensors"
    made = routed(source, [prose], "snapkv:window=8", 20, docs=2, length=96, later=24)
    assert (made.model, made.digest, made.context) == (source.label, source.digest, 72)
    made.save(routes)
    calibrated(source, [prose], 2, 32, generation=Generation(16)).save(statistics)
    ids = texts_of(source, [prose], 3, 60)
    model = checkpoints.load_causal(source, "cpu", "float32")
    for score in (
        f"static_route:routes={routes}",
        f"Q_stats:statistics={statistics}",
        f"variant_b:lambda=1,base=Q_stats:statistics={statistics};furthest=64",
        "even",
    ):
        for chunk in (None, 16):
            with evict(model, score, budget=14, decode=Decode(slack=3)) as run:
                run.prefill(torch.stack(ids), chunk=chunk)
                with run.question():
                    run.generate(torch.tensor([[5]] * 3), max_new_tokens=8, min_new_tokens=8, pad_token_id=0)
                for layer, shape in zip(run.cache.layers, run.cache.shapes, strict=True):
                    assert layer.lengths == (min(14, shape.holds(60)),) * len(layer.lengths)


def test_chunks_do_not_change_what_is_kept_evenly() -> None:
    kept = []
    for chunk in (None, 7, 16):
        with evict(small_model("llama"), "even", budget=11) as run:
            run.prefill(torch.arange(2, 60), chunk=chunk)
            kept.append([[head.tolist() for head in layer] for layer in run.kept])
    assert kept[0] == kept[1] == kept[2] == [[sorted(sorted(range(58), key=loop_number)[:11])] * 2] * 4


def test_the_command_line_writes_files_that_the_scores_read(tmp_path: Path, prose: Path) -> None:
    runner, out = CliRunner(), tmp_path / "x.safetensors"

    def said(*words: str) -> str:
        result = runner.invoke(
            application, [*words, "--model", "qwen3", "--text", str(prose), "--out", str(out)], catch_exceptions=True
        )
        return result.output + (str(result.exception) if result.exception else "")

    assert "written" in said("calibrate", "--docs", "1", "--length", "24", "--generate", "8", "--temperature", "0.5")
    assert Statistics.load(out).temperature == 0.5 and QStats(out).name == "Q_stats"
    assert "nothing is generated: expected --generate N" in said("calibrate", "--seed", "1")
    assert "written" in said("calibrate", "--docs", "1", "--length", "24", "--traces")
    assert Statistics.load(out).of == "traces"
    words = (
        "routes",
        "--docs",
        "1",
        "--length",
        "48",
        "--later",
        "12",
        "--budget",
        "10",
        "--score",
        "tova:heads=group",
    )
    assert "of 8 KV heads by tova:heads=group" in said(*words)
    assert StaticRoute(out).rows_needed(10) == 1 and TOVA("group") == StaticRoute(out)._attention
    for words, why in (
        (("routes", "--later", "0"), "--later 0: expected at least 1"),
        (("routes", "--budget", "0"), "--budget 0: expected at least 1"),
        (("routes", "--length", "65"), "--length 65: expected at least 66"),
        (("routes", "--score", "no"), "unknown score 'no'"),
        (("routes", "--dtype", "int8"), "--dtype int8"),
        (("routes", "--length", "5000"), "positions for 1024 tokens"),
    ):
        assert why in said(*words)
