"""The value-aware, accumulated, page-wise, leverage and redundancy scores against loops from their formulas."""

import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from data import BadInput
from eviction import evict
from eviction.method import Cells, ContextRows, Score, listed, named
from eviction.rotary import Rotary
from eviction.scores import compactor
from eviction.scores.caote import CAOTE
from eviction.scores.compactor import Compactor
from eviction.scores.criticalkv import CriticalKV
from eviction.scores.dropkv import DropKV
from eviction.scores.h2o import H2O
from eviction.scores.quest import Quest
from eviction.scores.rkv import RKV
from solvers import Instance
from tests.test_scores import (
    CASES,
    EMBEDDED,
    FAMILIES,
    Case,
    assert_scores,
    case_of,
    fresh,
    held_of,
    load,
    loop_tova,
    loop_weights,
    read_once,
)

ROUNDING = 1e-6  # relative to the largest score of the cell
PEER_ROUNDING = 1e-5  # absolute, of scores of size one, from float32 code of others
SEVEN = {"h2o", "quest", "compactor", "criticalkv", "caote", "dropkv", "rkv"}
PEER = json.loads((Path(__file__).parent / "data" / "peer-scores.json").read_text("utf-8"))


# Loops from the formulas


@dataclass(frozen=True)
class Weights:
    """A case's attention weights in float64, row by row, each computed once."""

    case: Case
    known: dict

    def __call__(self, b, h, t):
        if (b, h, t) not in self.known:
            self.known[b, h, t] = loop_weights(self.case, b, h, t)
        return self.known[b, h, t]

    def rows(self, b, h, latest=None):
        """Those of the latest rows that are no padding."""
        last = self.case.rows.positions.shape[1]
        found = [self(b, h, t) for t in range(0 if latest is None else max(0, last - latest), last)]
        return [weights for weights in found if weights is not None]


def group_of(case, k):
    group = case.shape[2]
    return range(k * group, (k + 1) * group)


def loop_h2o(case, weights, b, k, recent, mean):
    positions, _, _ = held_of(case, b, k)
    sums = [0.0] * len(positions)
    for h in group_of(case, k):
        for row in weights.rows(b, h):
            for j, weight in enumerate(row):
                sums[j] += weight / (case.shape[2] if mean else 1)
    return [math.inf if p >= case.cells.seen[b] - recent else x for p, x in zip(positions, sums, strict=True)]


def loop_quest(case, b, k, page, latest, over):
    positions, keys, _ = held_of(case, b, k)
    rows, last = case.rows, case.rows.positions.shape[1]
    scores = []
    for j in range(len(positions)):
        mine = keys[j // page * page : (j // page + 1) * page]
        bounds = []
        for h in group_of(case, k):
            for t in range(max(0, last - latest), last):
                if int(rows.positions[b, t]) < 0:
                    continue
                bound = 0.0
                for c, x in enumerate(rows.queries[b, h, t].double().tolist()):
                    column = [float(key[c]) for key in mine]
                    bound += max(x * min(column), x * max(column))
                bound *= rows.scale
                bounds.append(bound if rows.softcap is None else rows.softcap * math.tanh(bound / rows.softcap))
        scores.append(max(bounds) if over == "max" else sum(bounds) / len(bounds))
    return scores


def loop_removed(row, values, j):
    """Length of the output's move when entry j is dropped and the other weights are scaled to sum to 1."""
    if row[j] == 0:
        return 0.0
    rest = sum(weight for i, weight in enumerate(row) if i != j)
    if rest == 0:
        return math.inf
    dense = sum(weight * value for weight, value in zip(row, values, strict=True))
    left = sum(weight / rest * value for i, (weight, value) in enumerate(zip(row, values, strict=True)) if i != j)
    return math.sqrt(sum(float(x) ** 2 for x in dense - left))


def loop_errors(case, weights, b, k, latest, power):
    positions, _, values = held_of(case, b, k)
    heads = group_of(case, k)
    scores = []
    for j in range(len(positions)):
        errors = [loop_removed(row, values, j) ** power for h in heads for row in weights.rows(b, h, latest)]
        scores.append(sum(errors) / max(len(errors), 1))
    return scores


def loop_dropkv(case, weights, b, k, window):
    positions, _, _ = held_of(case, b, k)
    scores = loop_errors(case, weights, b, k, window, 2)
    return [math.inf if p >= case.cells.seen[b] - window else x for p, x in zip(positions, scores, strict=True)]


def loop_rkv(case, b, k, mix, window, kernel, similar):
    positions, keys, _ = held_of(case, b, k)
    rows, last = case.rows, case.rows.positions.shape[1]
    before = [j for j, position in enumerate(positions) if position < case.cells.seen[b] - window]
    mean, real = [0.0] * len(before), 0
    for t in range(max(0, last - window), last):
        mine, first = int(rows.positions[b, t]), int(rows.first[b, t])
        if mine < 0:
            continue
        real += 1
        exponentials = []
        for j in before:
            logits = [rows.scale * float(rows.queries[b, h, t].double().numpy() @ keys[j]) for h in group_of(case, k)]
            if rows.softcap is not None:
                logits = [rows.softcap * math.tanh(x / rows.softcap) for x in logits]
            exponentials.append(math.exp(max(logits)) if first <= positions[j] <= mine else 0.0)
        total = sum(exponentials)
        mean = [x + (y / total if total else 0.0) for x, y in zip(mean, exponentials, strict=True)]
    mean = [x / max(real, 1) for x in mean]
    n = len(positions)
    units = [key / (math.sqrt(sum(x * x for x in key)) + 1e-8) for key in keys]
    columns = [0.0] * n
    for i in range(n):
        cosines = [0.0 if i == j else float(units[i] @ units[j]) for j in range(n)]
        spared = max([j for j in range(n) if cosines[j] > similar], default=0)
        for j in range(n):
            columns[j] += 0.0 if j == spared else cosines[j] / n
    whole = sum(math.exp(x) for x in columns)
    scores = [math.inf] * n
    for i, j in enumerate(before):
        pooled = max(mean[max(0, i - kernel // 2) : i + kernel // 2 + 1])
        scores[j] = mix * pooled - (1 - mix) * math.exp(columns[j]) / whole
    return scores


def loop_norms(case, b, k):
    """||W_O v||_1, the mean over the group."""
    _, _, values = held_of(case, b, k)
    projection = case.cells.output_weight.double().numpy()
    heads = group_of(case, k)
    return [sum(sum(abs(float(row @ value)) for row in projection[h]) for h in heads) / len(heads) for value in values]


def loop_criticalkv(base, norms, first, epsilon):
    """base: scores of a cell; first: entries that it fills."""
    protected = [j for j, x in enumerate(base) if math.isinf(x)]
    order = protected[::-1] + sorted((j for j in range(len(base)) if j not in protected), key=lambda j: (-base[j], j))
    safe = set(order[:first]) | set(protected)
    return [math.inf if j in safe else (base[j] + epsilon) * norms[j] for j in range(len(base))]


def loop_columns(case, b, k, score, begin, end):
    """Position -> column sum, averaged over the group, of the chunks of positions begin to end."""
    positions, keys, _ = held_of(case, b, k)
    key_at = dict(zip(positions, keys, strict=True))
    row_at = {position: t for t, position in enumerate(case.rows.positions[b].tolist()) if position >= 0}
    rows, sums = case.rows, dict.fromkeys(positions, 0.0)
    for start in range(begin, end, score.chunk):
        stop = min(start + score.chunk, end)
        here = [p for p in range(start, stop) if p in key_at]
        padding = start + score.chunk - stop if score.padded else 0
        for h in group_of(case, k):
            for position in range(start, stop):
                query = rows.queries[b, h, row_at[position]].double().numpy()
                logits = [float(query @ key_at[p]) for p in here]
                if score.scaled:
                    logits = [x * rows.scale for x in logits]
                    if rows.softcap is not None:
                        logits = [rows.softcap * math.tanh(x / rows.softcap) for x in logits]
                highest = max([*logits, 0.0])
                whole = sum(math.exp(x - highest) for x in logits) + padding * math.exp(-1e-9 - highest)
                for p, x in zip(here, logits, strict=True):
                    sums[p] += math.exp(x - highest) / whole / case.shape[2]
            for p in here if padding else []:  # the rows of zeros
                sums[p] += padding / (len(here) + padding * math.exp(-1e-9)) / case.shape[2]
    return sums


def loop_compactor(case, b, score, passes=None, keys_of=None):
    """Per KV head the scores of its entries. passes: (begin, end) of positions, None for that of the case's rows."""
    seen, kv_heads = case.cells.seen[b], case.shape[1]
    end = seen - score.recent
    if passes is None:
        first = next(p for p in case.rows.positions[b].tolist() if p >= 0)
        passes = [(max(score.sinks, first), end)]
    drawn = compactor._gaussian(score.seed, case.cells.layer, kv_heads, case.cells.keys.shape[-1], score.sketch)
    leverages, attentions, middles = [], [], []
    for k in range(kv_heads):
        positions, _, values = held_of(case, b, k)
        middle = [j for j, p in enumerate(positions) if score.sinks <= p < end]
        middles.append(middle)
        sums = dict.fromkeys(positions, 0.0)
        for begin, stop in passes:
            for p, x in loop_columns(case, b, k, score, begin, stop).items():
                sums[p] += x
        raw = [sums[positions[j]] * math.sqrt(sum(x * x for x in values[j])) for j in middle]
        attentions += [sum(raw[max(0, i - 1) : i + 2]) / 3 for i in range(len(raw))]
        if middle:
            before = keys_of(b, k)[middle]
            x = (before - sum(before) / len(before)) @ drawn[k].numpy() / math.sqrt(score.sketch)
            inverse = np.linalg.inv(x.T @ x + score.ridge * np.eye(score.sketch))
            leverages += [float(row @ inverse @ row) for row in x]
    ratio = 1 - min(1.0, case.cells.budget / seen) if score.blending is None else score.blending
    both = [ratio * x + y for x, y in zip(standardised(leverages), standardised(attentions), strict=True)]
    scores = []
    for k in range(kv_heads):
        mine = [math.inf] * len(held_of(case, b, k)[0])
        for j in middles[k]:
            mine[j] = both.pop(0)
        scores.append(mine)
    return scores


def standardised(numbers):
    n = len(numbers)
    if n < 2:
        return [0.0] * n
    mean = math.fsum(numbers) / n
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (n - 1))
    return [(x - mean) / max(deviation, 1e-6) for x in numbers]


def turned_back(case):
    """The keys before RoPE as the rotary embedding (held against the models' own projections) gives them."""
    before = case.cells.rotary.unrotate(case.cells.keys, case.cells.positions).double().numpy()
    return lambda b, k: before[b, k]


# Random cells


@given(CASES, st.sampled_from([None, 0, 1, 5]), st.sampled_from(["sum", "mean"]))
def test_h2o_is_its_formula(case, recent, group):
    weights, mine = Weights(case, {}), case.cells.budget // 2 if recent is None else recent
    assert_scores(H2O(recent, group), case, lambda b, k: loop_h2o(case, weights, b, k, mine, group == "mean"))


@given(CASES, st.sampled_from([None, 1, 3, 16]), st.integers(1, 4), st.sampled_from(["mean", "max"]))
def test_quest_is_its_formula(case, page, rows, over):
    mine = page or max(2, case.cells.budget // 4)
    assert_scores(Quest(page, rows, over), case, lambda b, k: loop_quest(case, b, k, mine, rows, over))


@given(CASES, st.integers(1, 4))
def test_caote_is_what_dropping_an_entry_moves(case, rows):
    weights = Weights(case, {})
    assert_scores(CAOTE(rows), case, lambda b, k: loop_errors(case, weights, b, k, rows, 1))


@given(CASES, st.sampled_from([None, 1, 4]))
def test_dropkv_is_its_formula(case, window):
    weights, mine = Weights(case, {}), window or max(1, min(32, case.cells.budget // 2))
    assert DropKV(window).rows_needed(case.cells.budget) == mine
    assert_scores(DropKV(window), case, lambda b, k: loop_dropkv(case, weights, b, k, mine))


@given(CASES, st.sampled_from([0.0, 0.1, 0.7, 1.0]), st.integers(1, 9), st.sampled_from([1, 3, 7]), st.just(0.5))
def test_rkv_is_its_formula(case, mix, window, kernel, similar):
    score = RKV(mix, window, kernel, similar)
    assert_scores(score, case, lambda b, k: loop_rkv(case, b, k, mix, window, kernel, similar))


@given(CASES, st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.sampled_from([0.0, 1e-4]))
def test_criticalkv_is_its_formula(case, first, epsilon):
    share = 0 if first == 0 else max(1, int(first * case.cells.budget))

    def oracle(b, k):
        base = loop_tova(case, b, k, False)
        ranked = sorted(base, reverse=True)
        if 0 < share < len(ranked) and math.isfinite(ranked[share - 1]):
            # equal weights that were computed in float32 may differ in the last bit, and then either may be first;
            # those of 0 are equal to the bit
            gap, largest = ranked[share - 1] - ranked[share], max(x for x in ranked if math.isfinite(x))
            assume(gap > 4 * ROUNDING * largest or ranked[share - 1] == 0.0)
        return loop_criticalkv(base, loop_norms(case, b, k), share, epsilon)

    assert_scores(CriticalKV("tova:heads=group", epsilon, first), case, oracle)


@given(
    CASES,
    st.builds(
        Compactor,
        blending=st.sampled_from([None, 0.0, 0.7]),
        sketch=st.sampled_from([2, 6, 48]),
        chunk=st.sampled_from([3, 5, 256]),
        sinks=st.sampled_from([0, 2, 8]),
        recent=st.sampled_from([0, 1, 4]),
        scaled=st.booleans(),
        padded=st.booleans(),
        seed=st.integers(0, 3),
    ),
)
def test_compactor_is_its_formula(case, score):
    keys_of = turned_back(case)
    wanted = [loop_compactor(case, b, score, keys_of=keys_of) for b in range(case.shape[0])]
    assert_scores(score, case, lambda b, k: wanted[b][k])


@pytest.mark.parametrize("scale", [3.0, 60.0])
@given(seed=st.integers(0, 10**6), softcap=st.sampled_from([None, 50.0]))
@settings(max_examples=20)
def test_removal_of_an_entry_that_has_nearly_all_weight(scale, seed, softcap):
    case = case_of(seed=seed, scale=scale, softcap=softcap, group=1, rows=3)
    weights = Weights(case, {})
    assert_scores(CAOTE(), case, lambda b, k: loop_errors(case, weights, b, k, 1, 1))


@given(CASES)
def test_caote_is_the_forced_error_of_all_entries_but_one(case):
    if case.shape[2] > 1:
        case = Case(case.cells, replace(case.rows, queries=case.rows.queries[:, :: case.shape[2]]))
    found = CAOTE()(case.cells, case.rows)
    for b, k in itertools.product(*map(range, case.shape[:2])):
        _, _, values = held_of(case, b, k)
        row = np.array(loop_weights(case, b, k, case.rows.positions.shape[1] - 1))
        if not row.any():
            continue
        instance = Instance(row, values)
        for j in np.flatnonzero(row):
            others = [i for i in range(len(row)) if i != j]
            if not row[others].any():
                assert bool(torch.isposinf(found[b, k, j]))
                continue
            assert abs(float(found[b, k, j]) - instance.forced_error(others)) <= 2 * ROUNDING * instance.radius + 1e-12


@pytest.mark.parametrize("part", [CAOTE, DropKV])
def test_an_entry_whose_value_is_everyones_moves_nothing(part):
    case = case_of(seed=12)
    there = case.cells.held[..., None]
    values = torch.where(there, 1e6 + torch.arange(5.0), case.cells.values)  # garbage stays where nothing is held
    found = part()(replace(case.cells, values=values), case.rows)[case.cells.held]
    assert float(found[torch.isfinite(found)].abs().max()) <= 1e6 * 1e-14


def test_dropkv_of_one_row_and_one_head_ranks_as_caote_does():
    case = case_of(seed=3, group=1, rows=9, longest=30)
    dropkv, caote = DropKV(window=1)(case.cells, case.rows), CAOTE()(case.cells, case.rows)
    before = case.cells.held & (case.cells.ages >= 1)
    torch.testing.assert_close(dropkv[before], caote[before].square())


# Texts read in passes


def parts_of(case, lengths):
    """The rows in parts of these lengths."""
    rows, start = case.rows, 0
    for n in lengths:
        part = slice(start, start + n)
        yield replace(
            rows, queries=rows.queries[:, :, part], positions=rows.positions[:, part], first=rows.first[:, part]
        )
        start += n


@pytest.mark.parametrize("lengths", [[1] * 30, [3, 10, 17], [29, 1]])
def test_h2o_of_parts_is_that_of_the_whole(lengths):
    case = case_of(seed=3, rows=30, longest=30)
    whole, memory = H2O()(case.cells, case.rows), {}
    for part in parts_of(case, lengths):
        kept = {name: (tensor, tensor.clone()) for name, tensor in memory.items()}
        found = H2O()(replace(case.cells, memory=memory), part)
        assert all(torch.equal(tensor, copy) for tensor, copy in kept.values())  # replaced, never written to
    torch.testing.assert_close(found[case.cells.held], whole[case.cells.held], rtol=1e-5, atol=1e-6)
    assert all(tensor.shape[0] == case.shape[0] for tensor in memory.values())


def test_a_block_of_rows_at_a_time_is_all_of_them(monkeypatch):
    case = case_of(seed=4, rows=20)
    whole = {part: part()(fresh(case).cells, case.rows) for part in (H2O, RKV, CriticalKV)}
    for part in whole:
        monkeypatch.setattr(f"{part.__module__}.BLOCK", 300)
        found = part()(fresh(case).cells, case.rows)
        torch.testing.assert_close(found[case.cells.held], whole[part][case.cells.held], rtol=1e-5, atol=1e-7)


def test_sums_follow_their_entries_when_others_are_evicted():
    case = case_of(seed=5, batch=1, kv_heads=1, rows=12, longest=20)
    memory = {}
    first, second = parts_of(case, [8, 4])
    H2O(recent=0, group="sum")(replace(case.cells, memory=memory), first)
    n = int(case.cells.lengths[0, 0])
    stay = torch.tensor([j for j in range(n) if j % 3])
    cells = replace(
        case.cells,
        keys=case.cells.keys[:, :, stay],
        values=case.cells.values[:, :, stay],
        positions=case.cells.positions[:, :, stay],
        memory=memory,
    )
    found = H2O(recent=0, group="sum")(cells, second)
    before, left = Case(case.cells, first), Case(cells, second)
    wanted = [
        loop_h2o(before, Weights(before, {}), 0, 0, 0, False)[j] + x
        for j, x in zip(stay.tolist(), loop_h2o(left, Weights(left, {}), 0, 0, 0, False), strict=True)
    ]
    assert np.allclose(found[0, 0].numpy(), wanted, rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("padded", [True, False])
def test_compactor_scores_the_tokens_that_waited_with_the_next_pass(padded):
    """Passes of 20, 3 and 7 tokens: attention over 8 to 15, 16 to 18 and 19 to 25; the last 4 wait each time."""
    score = Compactor(chunk=5, sketch=4, padded=padded)
    whole = case_of(seed=6, batch=2, rows=30, longest=30)
    whole = Case(replace(whole.cells, seen=(30, whole.cells.seen[1])), whole.rows)
    memory, read = {}, 0
    for part, n in zip(parts_of(whole, [20, 3, 7]), [20, 3, 7], strict=True):
        read += n
        seen = tuple(max(0, read - (30 - mine)) for mine in whole.cells.seen)  # padding on the left
        there = whole.cells.positions < torch.tensor(seen)[:, None, None]
        cells = replace(whole.cells, positions=torch.where(there, whole.cells.positions, -1), seen=seen, memory=memory)
        kept = {name: (tensor, tensor.clone()) for name, tensor in memory.items()}
        found = score(cells, part)
        assert all(torch.equal(tensor, copy) for tensor, copy in kept.values())
    assert set(memory) == {"attention", "attention_positions", "queries", "query_positions"}
    keys_of = turned_back(whole)
    for b, mine in enumerate(whole.cells.seen):
        late = 30 - mine
        ends = [max(0, min(end - late, mine) - 4) for end in (20, 23, 30)]
        begins = [8, *ends[:-1]]
        passes = [(max(8, begin), end) for begin, end in zip(begins, ends, strict=True)]
        for k, wanted in enumerate(loop_compactor(whole, b, score, passes, keys_of)):
            got = found[b, k, : len(wanted)].tolist()
            assert all(x == y if math.isinf(y) else abs(x - y) <= 1e-5 for x, y in zip(got, wanted, strict=True))


def test_compactor_keeps_its_head_for_keys_of_any_size():
    for size in (1e-12, 1.0, 1e12):
        case = case_of(seed=8, size=size, longest=40, rows=40)
        assert bool(torch.isfinite(Compactor(recent=0, sinks=0)(case.cells, case.rows)[case.cells.held]).all())


def test_the_quirks_of_compactor_matter_and_the_sketch_depends_on_seed_and_layer():
    case = case_of(seed=9, batch=1, longest=40, rows=40)
    middle = case.cells.held & (case.cells.positions >= 8) & (case.cells.ages >= 4)

    def of(layer=0, **options):
        return Compactor(sketch=4, **options)(replace(case.cells, layer=layer, memory={}), case.rows)[middle]

    plain = of()
    assert torch.equal(plain, of())
    for other in (of(scaled=True), of(padded=False), of(seed=1), of(layer=1), of(blending=0.1)):
        assert float((plain - other).abs().max()) > 1e-2


def test_a_page_of_quest_shares_its_score_and_four_pages_fill_the_papers_budget():
    case = case_of(seed=10, batch=1, kv_heads=1, longest=400, rows=4, budget=16)
    n = int(case.cells.lengths[0, 0]) // 4 * 4
    pages = Quest()(case.cells, case.rows)[0, 0, :n].view(-1, 4)
    assert bool((pages == pages[:, :1]).all()) and len(set(pages[:, 0].tolist())) == len(pages)


# Models


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_captured_attention_are_their_formulas(family):
    read = read_once(family)
    for layer in (0, len(read.layers) - 1):
        case = read.case(layer, budget=12)
        projection = np.random.default_rng(layer).standard_normal(
            (case.rows.queries.shape[1], 5, case.cells.values.shape[-1])
        )
        case = Case(replace(case.cells, output_weight=torch.tensor(projection)), case.rows)
        case = one_head(case)
        weights, keys_of, score = Weights(case, {}), turned_back(case), Compactor(chunk=16)
        wanted = [loop_compactor(case, b, score, keys_of=keys_of) for b in range(case.shape[0])]
        assert_scores(H2O(), case, lambda b, k: loop_h2o(case, weights, b, k, 6, True))  # noqa: B023
        assert_scores(Quest(), case, lambda b, k: loop_quest(case, b, k, 3, 1, "mean"))  # noqa: B023
        assert_scores(CAOTE(), case, lambda b, k: loop_errors(case, weights, b, k, 1, 1))  # noqa: B023
        assert_scores(DropKV(), case, lambda b, k: loop_dropkv(case, weights, b, k, 6))  # noqa: B023
        assert_scores(RKV(), case, lambda b, k: loop_rkv(case, b, k, 0.1, 8, 7, 0.5))  # noqa: B023
        assert_scores(
            CriticalKV(H2O(recent=3)),
            fresh(case),
            lambda b, k: loop_criticalkv(loop_h2o(case, weights, b, k, 3, True), loop_norms(case, b, k), 6, 1e-4),  # noqa: B023
        )
        assert_scores(score, case, lambda b, k: wanted[b][k])  # noqa: B023


def one_head(case):
    """The first KV head alone with its group: loops over one head take a second, over all a minute."""
    group = case.shape[2]
    cells = replace(
        case.cells,
        keys=case.cells.keys[:, :1],
        values=case.cells.values[:, :1],
        positions=case.cells.positions[:, :1],
        output_weight=case.cells.output_weight[:group],
    )
    return Case(cells, replace(case.rows, queries=case.rows.queries[:, :group]))


@pytest.mark.parametrize("family", EMBEDDED)
@pytest.mark.parametrize("name", sorted(SEVEN))
def test_every_score_runs_in_a_model_whole_and_in_chunks(family, name):
    model, budget = load(f"embedded_{family}"), 14
    ids = torch.randint(3, 90, (2, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    for chunk in (None, 16):
        with evict(model, score=name, budget=budget) as run:
            run.prefill(ids, attention_mask=mask, chunk=chunk)
            for layer, shape in zip(run.cache.layers, run.cache.shapes, strict=True):
                assert layer.lengths == (min(budget, shape.holds(51)),) * len(layer.lengths)
                assert not layer.memory


def test_criticalkv_multiplies_by_the_models_own_output_projection():
    model = load("llama")
    read = read_once("llama")
    seen = []

    class Probe(Score):
        name, source = "probe", "a test"

        def __call__(self, cells, rows):
            seen.append(cells)
            return torch.zeros(cells.positions.shape)

        def rows_needed(self, budget):
            return 0

    ids = torch.randint(3, 90, (2, 45), generator=torch.Generator().manual_seed(1))
    with evict(model, score=Probe(), budget=8) as run:
        run.prefill(ids)
    assert len(seen) == len(read.layers)
    for cells, layer in zip(seen, model.model.layers, strict=True):
        heads = torch.randn(1, 4, cells.values.shape[-1])
        wanted = layer.self_attn.o_proj(heads.flatten(1))
        torch.testing.assert_close(torch.einsum("hmd,bhd->bm", cells.output_weight, heads), wanted)
        assert cells.output_weight.untyped_storage().data_ptr() == layer.self_attn.o_proj.weight.data_ptr()  # a view


# Their own code


def made(offset, *shape):
    """The inputs of peers/kvpress/scores.py."""
    i = torch.arange(math.prod(shape), dtype=torch.int64) + offset
    return ((((i * i * 7919 + 13 * i) % 1009).double() / 1009 - 0.5) * 3).float().reshape(shape)


def made_case(budget, turned):
    queries, keys, values = made(5000, 1, 4, 45, 6), made(1, 1, 2, 45, 6), made(9000, 1, 2, 45, 6)
    positions = torch.arange(45)[None]
    rotary = Rotary(lambda: (torch.tensor([1.0, 0.1, 0.01]), 1.0))
    if turned:
        queries, keys = rotary.rotate(queries, positions[:, None]), rotary.rotate(keys, positions[:, None])
    cells = Cells(
        layer=0,
        n_layers=1,
        keys=keys,
        values=values,
        positions=positions[:, None].expand(1, 2, 45),
        seen=(45,),
        budget=budget,
        rotary=rotary,
        output_weight=made(3000, 7, 4, 6).transpose(0, 1),
    )
    return Case(cells, ContextRows(queries, positions, torch.zeros_like(positions), 6**-0.5, None))


@dataclass(frozen=True)
class Made(Score):
    name = "made"
    source = "made up"

    def rows_needed(self, budget):
        return 0

    def __call__(self, cells, rows):
        return made(700, 1, 2, 45).abs()


def test_compactor_gives_the_numbers_of_kvpress(monkeypatch):
    assert PEER["versions"]["kvpress"] == "0.5.5"
    # its random matrix, which it scales by 1 / sqrt(sketch) as we do
    monkeypatch.setattr(compactor, "_gaussian", lambda *_: made(12000, 2, 6, 4).double())
    case = made_case(18, turned=True)  # 18 of 45: a ratio of 0.6
    found = Compactor(sketch=4, chunk=14)(case.cells, case.rows)[0]
    assert bool(torch.isposinf(found[:, :8]).all() and torch.isposinf(found[:, -4:]).all())
    assert float((found[:, 8:-4] - torch.tensor(PEER["compactor"])).abs().max()) <= PEER_ROUNDING


def test_criticalkv_gives_the_numbers_of_kvpress():
    case = made_case(20, turned=False)
    found = CriticalKV(Made())(case.cells, case.rows)[0]
    wanted = torch.tensor([[math.inf if x is None else x for x in head] for head in PEER["criticalkv"]])
    torch.testing.assert_close(found, wanted, rtol=PEER_ROUNDING, atol=0)
    assert torch.isposinf(wanted).sum(-1).tolist() == [10, 10]


def test_rkv_gives_the_numbers_of_its_own_code():
    case = made_case(20, turned=False)
    found = RKV()(case.cells, case.rows)[0]
    assert bool(torch.isposinf(found[:, -8:]).all())
    wanted = torch.tensor(PEER["rkv"])
    torch.testing.assert_close(found[:, :-8], wanted, rtol=PEER_ROUNDING, atol=PEER_ROUNDING / 100)


# Options


def test_the_seven_scores_are_found_by_name():
    assert set(listed(Score)) >= SEVEN
    assert named(Score, "rkv:lambda=0.25,window=4") == RKV(lambda_=0.25, window=4)
    assert named(Score, "criticalkv:base=snapkv:variant=kvpress").rows_needed(8) == 64
    assert named(Score, "compactor:scaled=true,padded=false") == Compactor(scaled=True, padded=False)
    assert all(CriticalKV(base).rows_needed(9) == named(Score, base).rows_needed(9) for base in ("h2o", "tova"))


@pytest.mark.parametrize(
    "text",
    [
        "h2o:recent=-1",
        "h2o:group=max",
        "quest:page=0",
        "quest:rows=0",
        "quest:over=sum",
        "compactor:chunk=0",
        "compactor:sketch=2.5",
        "compactor:ridge=0",
        "compactor:scaled=1",
        "compactor:padded=no",
        "compactor:blending=-0.1",
        "compactor:blending=nan",
        "criticalkv:base=nothing",
        "criticalkv:base=criticalkv",
        "criticalkv:first=1.5",
        "criticalkv:first=nan",
        "criticalkv:epsilon=-1",
        "criticalkv:epsilon=inf",
        "caote:rows=0",
        "dropkv:window=0",
        "rkv:lambda=2",
        "rkv:kernel=2",
        "rkv:window=0",
        "rkv:similar=-0.5",
    ],
)
def test_options_that_mean_nothing_are_refused(text):
    with pytest.raises(BadInput, match="nothing" if text.endswith("nothing") else text.partition(":")[0]):
        named(Score, text)


def test_what_a_score_needs_and_does_not_find_is_said():
    case = case_of()
    with pytest.raises(BadInput, match="rotary"):
        Compactor()(replace(case.cells, rotary=None), case.rows)
    with pytest.raises(BadInput, match="output projection"):
        CriticalKV()(replace(case.cells, output_weight=None), case.rows)
    with pytest.raises(BadInput, match="negative"):
        CriticalKV("knorm")(case.cells, case.rows)
