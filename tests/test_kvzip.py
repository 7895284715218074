"""KVzip's score against the model's own eager attention on the context and its replay, and against kvpress's."""

import ast
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from data import BadInput
from data.store import CHECKOUT
from eviction import Decode, evict
from eviction.attention import Queries
from eviction.compression import no_rows, rows_of
from eviction.method import Cells, ContextRows, Score, named
from eviction.ragged import LayerShape, RaggedCache
from eviction.scores.kvzip import KVzip
from tests.test_run import CONFIGS, TOLERANCE, Oracle, read, small_model
from tests.test_scores import CASES, case_of, held_of, loop_weights

ROUNDING = 1e-6  # relative to the largest score of the cell, float32 against loops in float64
EMBEDDED_ROUNDING = 4e-6  # the same where logits reach 30: rounding them to float32 changes a weight by 2e-6 of it
# The same against kvpress, both float32 throughout, and with other kernels.
PEER_ROUNDING = 1e-5
EMBEDDED = ["qwen", "qwen3", "olmo", "gemma"]
FIRST, BEFORE, AFTER = (31, 32, 33), (41, 42), (51,)
PEER_FILE = Path(__file__).parent / "data" / "kvzip-kvpress-0.5.5.json"


@dataclass(frozen=True)
class Watched(KVzip):
    """KVzip that remembers what it was handed last and what it said."""

    said: dict[int, tuple[Cells, torch.Tensor]] = field(default_factory=dict, compare=False)

    def __call__(self, cells: Cells, rows: Any) -> torch.Tensor:
        scores = super().__call__(cells, rows)
        self.said[cells.layer] = cells, scores
        return scores


def double(name: str) -> PreTrainedModel:
    if name.startswith("embedded_"):
        folder = CHECKOUT / "data" / "models" / name.removeprefix("embedded_")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    return small_model(name, torch.float64)


def lead_of(ids: torch.Tensor, start: int, chunk: int, asked: bool = True) -> list[int]:
    """The request ahead of the chunk from `start` on: the code's rule, with made-up words."""
    if not asked:
        return []
    return [*BEFORE, *ids[max(start - 8, start - chunk) : start].tolist(), *AFTER] if start else list(FIRST)


@contextmanager
def softmax_in_double() -> Iterator[None]:
    """Eager attention casts its logits to float32, whatever the model's dtype: not here."""
    own = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda logits, dim, dtype=None: own(logits, dim=dim)
    try:
        yield
    finally:
        torch.nn.functional.softmax = own


@torch.inference_mode()
def oracle_scores(
    model: PreTrainedModel, ids: torch.Tensor, pads: list[int], chunk: int, sinks: int, asked: bool = True
) -> list[Any]:
    """scores[layer][sequence][KV head][position], from one eager pass over context, request and chunk, a chunk."""
    model.set_attn_implementation("eager")
    config = model.config.get_text_config()
    group = config.num_attention_heads // config.num_key_value_heads
    slots = ids.shape[1]
    scores = [
        [[[0.0] * (slots - pad) for _ in range(config.num_key_value_heads)] for pad in pads]
        for _ in range(config.num_hidden_layers)
    ]
    for start in range(0, slots, chunk):
        again = [ids[b, pad + start : pad + start + chunk].tolist() for b, pad in enumerate(pads)]
        leads = [lead_of(ids[b, pad:], start, chunk, asked) if again[b] else [] for b, pad in enumerate(pads)]
        width = max(len(lead) + len(part) for lead, part in zip(leads, again, strict=True))
        lines, masks = [], []
        for b, pad in enumerate(pads):
            gap = width - len(leads[b]) - len(again[b])
            lines.append(ids[b].tolist() + [0] * gap + leads[b] + again[b])
            masks.append([0] * pad + [1] * (slots - pad) + [0] * gap + [1] * (width - gap))
        mask = torch.tensor(masks)
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        passed = {"attention_mask": mask, "position_ids": places, "use_cache": False, "output_attentions": True}
        with softmax_in_double():
            everything = model(torch.tensor(lines), **passed).attentions
        for layer, weights in enumerate(everything):
            for b, pad in enumerate(pads):
                own = [slot for slot in range(slots, slots + width) if masks[b][slot]]
                part = list(range(pad + start, pad + start + len(again[b])))
                among = sorted({*range(pad, pad + sinks), *part, *own})
                for head in range(config.num_attention_heads):
                    mine = scores[layer][b][head // group]
                    for row in own:
                        line = weights[b, head, row].tolist()  # nothing after the row itself
                        total = sum(line[slot] for slot in among)
                        for slot in part:
                            mine[slot - pad] = max(mine[slot - pad], line[slot] / total)
    return scores


def assert_said(said: dict[int, Any], wanted: list[Any], sinks: int, tolerance: float = ROUNDING) -> int:
    """What the score said of every held entry is the oracle's; how many entries were compared."""
    compared = 0
    for layer, (cells, scores) in said.items():
        for b, of_sequence in enumerate(wanted[layer]):
            for k, line in enumerate(of_sequence):
                n = int(cells.lengths[b, k])
                positions = cells.positions[b, k, :n].tolist()
                largest = max((line[p] for p in positions), default=0.0)
                for entry, position in enumerate(positions):
                    got = float(scores[b, k, entry])
                    if position < sinks:
                        assert got == torch.inf
                        continue
                    assert abs(got - line[position]) <= tolerance * largest, (layer, b, k, position)
                    compared += 1
    return compared


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("name", [*CONFIGS, *(f"embedded_{x}" for x in EMBEDDED)])
def test_scores_are_the_models_own_weights_on_a_replay(name: str, asked: bool) -> None:
    """Several chunks, the last one short; the second sequence has one chunk less than the first."""
    chunk, sinks, pads = 13 if asked else 6, 4, [0, 9]
    ids = torch.randint(60, 97, (2, 34), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, : pads[1]] = 0
    requests = (FIRST, BEFORE, AFTER) if asked else ((), (), ())
    model = double(name)
    wanted = oracle_scores(model, ids, pads, chunk, sinks, asked)
    score = Watched(chunk, sinks, *requests)
    with evict(model, score, "contour:floor=0", budget=6) as run:
        run.prefill(ids, mask)
    assert len(score.said) == model.config.get_text_config().num_hidden_layers
    tolerance = EMBEDDED_ROUNDING if name.startswith("embedded") else ROUNDING
    assert assert_said(score.said, wanted, sinks, tolerance) > 100


def test_the_oracle_sees_what_the_score_leaves_out() -> None:
    """A row's softmax over all that it saw, or over no first tokens, is another one by far."""
    ids = torch.randint(60, 97, (1, 34), generator=torch.Generator().manual_seed(1))
    right = oracle_scores(double("llama"), ids, [0], 13, 4)
    for chunk, sinks in ((34, 4), (13, 0)):
        wrong = oracle_scores(double("llama"), ids, [0], chunk, sinks)
        assert max(abs(x - y) for x, y in zip(right[1][0][0][14:], wrong[1][0][0][14:], strict=True)) > 1e-3


# One layer, from the formula in loops


def loop_kvzip(case: Any, b: int, k: int, span: tuple[int, int], sinks: int) -> dict[int, float]:
    """Largest weight of any row to each position of the span, softmax over first tokens, span and the rows' own."""
    rows = case.rows
    own = min((p for p in rows.positions[b].tolist() if p >= 0), default=10**9)
    positions = held_of(case, b, k)[0]
    best = {p: 0.0 for p in positions if span[0] <= p < span[1]}
    for h in range(k * case.shape[2], (k + 1) * case.shape[2]):
        for t in range(rows.positions.shape[1]):
            weights = loop_weights(case, b, h, t)
            if weights is None:
                continue
            among = [p < sinks or span[0] <= p < span[1] or p >= own for p in positions]
            total = sum(x for x, there in zip(weights, among, strict=True) if there)
            for p, x in zip(positions, weights, strict=True):
                if p in best and total > 0:
                    best[p] = max(best[p], x / total)
    return best


@settings(max_examples=40, deadline=None)
@given(CASES, st.integers(0, 5), st.data())
def test_what_is_noted_is_its_formula(case: Any, sinks: int, data: Any) -> None:
    """Gaps, windows, soft-caps, padding rows; two passes over spans that may be empty."""
    score = KVzip(sinks=sinks)
    reaches = [max(0, n - case.rows.positions[b].ge(0).sum().item()) for b, n in enumerate(case.cells.seen)]
    assume(max(reaches) > 0)  # or there is nothing but the rows' own tokens
    wanted: dict[tuple[int, int, int], float] = {}
    for _ in range(2):
        spans = []
        for reach in reaches:
            start = data.draw(st.integers(0, reach))
            spans.append((start, data.draw(st.integers(start, reach))))
        score.observe(case.cells, case.rows, spans)
        for b in range(case.shape[0]):
            for k in range(case.shape[1]):
                for p, x in loop_kvzip(case, b, k, spans[b], sinks).items():
                    wanted[b, k, p] = max(wanted.get((b, k, p), 0.0), x)
    found = score(case.cells, no_rows(case.shape[0], case.cells.keys.device))
    for b in range(case.shape[0]):
        for k in range(case.shape[1]):
            for entry, p in enumerate(held_of(case, b, k)[0]):
                if p < reaches[b]:
                    got = float(found[b, k, entry])
                    assert got == torch.inf if p < sinks else abs(got - wanted.get((b, k, p), 0.0)) <= ROUNDING


# In a run


def best(said: dict[int, Any], b: int, allocator: str, budget: int) -> dict[tuple[int, int], list[int]]:
    """What stays of one sequence, entry by entry: by one order of all, or by that of each cell."""
    entries = []
    for layer, (cells, scores) in said.items():
        for k in range(cells.keys.shape[1]):
            n = int(cells.lengths[b, k])
            line = zip(cells.positions[b, k, :n].tolist(), scores[b, k, :n].tolist(), strict=True)
            entries += [(-x, layer, k, p) for p, x in line]
    kept: dict[tuple[int, int], list[int]] = {entry[1:3]: [] for entry in entries}
    if allocator.startswith("contour"):
        total = sum(cells.keys.shape[1] * min(budget, max(cells.lengths[b].tolist())) for cells, _ in said.values())
        for _, layer, k, p in sorted(entries)[:total]:
            kept[layer, k].append(p)
    else:
        for cell, positions in kept.items():
            positions += [p for x, layer, k, p in sorted(entries) if (layer, k) == cell][:budget]
    return kept


@pytest.mark.parametrize("allocator", ["contour:floor=0", "uniform"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "olmo2"])
def test_the_cache_holds_what_is_selected_and_nothing_of_the_replay(name: str, allocator: str) -> None:
    ids = torch.randint(60, 97, (2, 40), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    score, budget = Watched(11, 4, FIRST, BEFORE, AFTER), 7
    oracle, model = Oracle(small_model(name)), small_model(name)
    with evict(model, score, allocator, budget=budget) as run:
        last = run.prefill(ids, mask)
        theirs = oracle.read(ids, mask)
        assert (last - theirs[:, -1]).abs().max() < TOLERANCE * max(1.0, float(theirs.abs().max()))
        for b in range(2):
            wanted = best(score.said, b, allocator, budget)
            for layer, heads in enumerate(run.kept_of(b)):
                for k, head in enumerate(heads):
                    assert head.tolist() == sorted(wanted[layer, k]), (b, layer, k)
        held = sum(len(head) for b in range(2) for layer in run.kept_of(b) for head in layer)
        entry = run.cache.shapes[0].entry_bytes
        assert run.bytes == held * entry and run.cache.padding.slots == 40
        assert all(not layer.memory for layer in run.cache.layers)
        assert run.side_bytes == 4 * held + run.cache.padding.real.nbytes + run.cache.padding.index.nbytes
        oracle.evict([run.kept_of(b) for b in range(2)], mask)
        for begin in (40, 43, 44):  # what follows is read as after any eviction
            more = torch.randint(60, 97, (2, 3 if begin == 40 else 1), generator=torch.Generator().manual_seed(begin))
            mask = torch.cat([mask, torch.ones_like(more)], dim=1)
            ours, theirs = read(run, more, mask), oracle.read(more, mask)
            assert (ours - theirs).abs().max() < TOLERANCE * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("reading", [None, 17])
def test_what_is_fed_is_the_context_and_once_more_its_chunks_after_their_requests(
    whole: bool, reading: int | None
) -> None:
    model, fed = small_model("llama"), []
    ids = torch.randint(60, 97, (1, 45), generator=torch.Generator().manual_seed(3))
    score = Watched(20, 4, FIRST, BEFORE, AFTER)
    with evict(model, score, "contour:floor=0", budget=7) as run, torch.no_grad():
        hook = model.model.embed_tokens.register_forward_hook(lambda _, args, __: fed.append(args[0][0].tolist()))
        if whole:
            model(ids)
        else:
            run.prefill(ids, chunk=reading)
        hook.remove()
        steps = [step.tokens for step in run.ledger.steps]
    line = ids[0].tolist()
    starts = range(0, 45, reading or 45) if not whole else [0]
    context = [line[start : start + (reading or 45 if not whole else 45)] for start in starts]
    replays = [lead_of(ids[0], start, 20) + line[start : start + 20] for start in (0, 20, 40)]
    assert fed == context + replays
    assert sum(map(len, fed)) == 45 + 45 + len(FIRST) + 2 * (len(BEFORE) + 8 + len(AFTER))
    assert sorted(steps) == sorted(map(len, fed))
    assert {step.phase for step in run.ledger.steps} == {"prefill"}


def test_a_row_whose_window_begins_in_padding_sees_from_the_token_after_it() -> None:
    cache = RaggedCache([LayerShape(1, 8, 4)])
    real = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1]]).bool()
    cache.padding.extend(real, 1, 8, real.device)
    first = torch.tensor([[8, 0, 0, 8, 8, 2, 3, 4]])
    last = torch.tensor([[-1, 1, 2, -1, -1, 5, 6, 7]])
    queries = Queries(first, last, 0, plain=False, real=real)
    rows = rows_of(torch.zeros(1, 1, 8, 2), queries, cache, ContextRows, 1.0, None)
    assert rows.positions[0].tolist() == [-1, 0, 1, -1, -1, 2, 3, 4]
    assert rows.first[0, real[0]].tolist() == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("name", ["llama", "olmo2", "qwen3"])
def test_a_sequence_is_scored_in_a_batch_as_alone(name: str) -> None:
    """Not with windows: they count the slots of padding, as transformers does."""
    ids = torch.randint(60, 97, (3, 40), generator=torch.Generator().manual_seed(2))
    pads = [0, 13, 30]
    mask = torch.tensor([[0] * pad + [1] * (40 - pad) for pad in pads])
    said = []
    model = double(name)
    for lines, masks in ((ids, mask), *((ids[b : b + 1, pad:], None) for b, pad in enumerate(pads))):
        score = Watched(11, 4, FIRST, BEFORE, AFTER)
        with evict(model, score, "contour:floor=0", budget=7) as run:
            run.prefill(lines, masks)
        said.append(score.said)
    together, *singles = said
    for layer, (_, scores) in together.items():
        for b, single in enumerate(singles):
            n = 40 - pads[b]
            torch.testing.assert_close(scores[b, :, :n], single[layer][1][0], rtol=0, atol=1e-5)


def test_questions_find_the_cache_as_it_was() -> None:
    model = small_model("gemma3")
    with evict(model, KVzip(15, 4, FIRST, BEFORE, AFTER), "contour:floor=0", budget=9) as run:
        run.prefill(torch.arange(10, 60))
        kept, answers = run.kept, []
        for _ in range(2):
            with run.question():
                answers.append(run.generate(torch.tensor([5, 6]), max_new_tokens=4).tolist())
        assert answers[0] == answers[1]
        assert all((a == b).all() for x, y in zip(kept, run.kept, strict=True) for a, b in zip(x, y, strict=True))


def test_a_later_chunk_quotes_the_chunk_before_it_alone() -> None:
    score = KVzip(5, 4, FIRST, BEFORE, AFTER)
    ids = torch.arange(100, 112)
    assert [(x.lead, x.start, x.end) for x in score.replays(ids)] == [
        (FIRST, 0, 5),
        ((*BEFORE, *range(100, 105), *AFTER), 5, 10),
        ((*BEFORE, *range(105, 110), *AFTER), 10, 12),
    ]
    assert [x.lead for x in KVzip(5).replays(ids)] == [(), (), ()]


def test_what_means_nothing_is_refused() -> None:
    for text in ("kvzip:chunk=0", "kvzip:sinks=-1", "kvzip:first=repeat", "kvzip:after=3"):
        with pytest.raises(BadInput, match=r"score kvzip: .*expected"):
            named(Score, text)
    case = case_of()
    with pytest.raises(BadInput, match="was shown no replay"):
        KVzip()(case.cells, case.rows)
    with (
        pytest.raises(BadInput, match="decode must be None"),
        evict(small_model("llama"), "kvzip", budget=5, decode=Decode()),
    ):
        pass


# Against kvpress


def peer() -> Any:
    spec = json.loads(PEER_FILE.read_text("utf-8"))
    assert spec["versions"] == {"kvpress": "0.5.5", "transformers": "5.2.0", "torch": "2.13.0"}
    return spec


@pytest.mark.parametrize("name", ["qwen", "qwen3"])
def test_scores_and_requests_are_those_of_kvpress(name: str) -> None:
    found = peer()
    theirs = found["models"][name]
    folder = CHECKOUT / "data" / "models" / name
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert weights == theirs["sha256"], "kvpress ran on other weights: run peers/kvpress/kvzip.py again"
    ids = torch.tensor([[1] + [3 + (i * i * 7919 + 13 * i) % 2000 for i in range(1, 90)]])
    made = KVzip.asking(AutoTokenizer.from_pretrained(folder), chunk=found["chunk"])
    assert [list(x.lead) for x in made.replays(ids[0])] == theirs["requests"]
    score = Watched(made.chunk, made.sinks, made.first, made.before, made.after)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with evict(model, score, "contour:floor=0", budget=20) as run:
        run.prefill(ids)
    assert len(theirs["scores"]) == len(score.said) == 4
    for layer, heads in enumerate(theirs["scores"]):
        for k, line in enumerate(heads):
            mine = score.said[layer][1][0, k]
            assert bool(torch.isposinf(mine[:4]).all())
            assert float((mine[4:] - torch.tensor(line)[4:]).abs().max()) <= PEER_ROUNDING * max(line[4:]), (layer, k)


@dataclass
class Chat:
    """A tokenizer of characters with a chat template."""

    chat_template: str | None = "there is one"

    def __call__(self, words: str, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[ord(x) for x in words])

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options["add_generation_prompt"] and not options["tokenize"]
        return f"<user>{messages[0]['content']}</user><answer>"


@pytest.mark.parametrize(
    ("tokenizer", "suffix", "wanted"),
    [(Chat(), None, "</user><answer>"), (Chat(None), None, "\n"), (Chat(), " Answer:", " Answer:")],
)
def test_requests_end_as_the_chat_template_has_it(tokenizer: Any, suffix: str | None, wanted: str) -> None:
    score = KVzip.asking(tokenizer, chunk=7, sinks=2, suffix=suffix)
    first, before, after = ("".join(map(chr, x)) for x in (score.first, score.before, score.after))
    assert first == "\n\nRepeat the previous context exactly." + wanted
    assert before == "\n\nRepeat the part of the previous context exactly, starting with"
    assert (after, score.chunk, score.sinks) == (wanted, 7, 2)


def test_the_script_beside_kvpress_imports_nothing_of_ours() -> None:
    root = CHECKOUT
    packages = {path.parent.name for path in root.glob("*/__init__.py")}
    tree = ast.parse((root / "peers" / "kvpress" / "kvzip.py").read_text("utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & packages
