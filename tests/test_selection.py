"""Selectors against greedy loops over single entries; exact counts, protected entries first, ties as stated."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eviction.method import Cells, Rows, Selector, listed
from eviction.selection import alpha
from eviction.selection.alpha import Alpha
from eviction.selection.top_mass import TopMass

KINDS = ("gaussian", "ties", "all equal", "protected", "protected here and there", "minus inf", "zeros of both signs")
VALUES = ("gaussian", "duplicates", "integers", "zeros", "one direction", "opposite", "huge", "tiny")
LAMBDAS = (0.1, 0.5, 3.0, 100.0)


@dataclass(frozen=True)
class Case:
    """What a selector is handed: per layer cells (B, K, L), scores and counts; where nothing is held values are NaN."""

    cells: list[Cells]
    scores: list[torch.Tensor]
    counts: list[torch.Tensor]

    def select(self, selector: Selector) -> list[torch.Tensor]:
        """A layer at a time where the selector may be called so."""
        if selector.scope == "model":
            return selector(self.cells, self.scores, self.counts)
        layers = zip(self.cells, self.scores, self.counts, strict=True)
        return [selector([c], [s], [n])[0] for c, s, n in layers]

    def sequence(self, b: int) -> "Case":
        """One sequence of the batch by itself."""
        cells = []
        for c in self.cells:
            rows = c.rows.sequences(torch.tensor([b]))  # type: ignore[union-attr]
            one = cells_of(c.keys[b : b + 1], c.values[b : b + 1], c.positions[b : b + 1], c.layer, rows)
            cells.append(one)
        return Case(cells, [s[b : b + 1] for s in self.scores], [n[b : b + 1] for n in self.counts])


def cells_of(
    keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, layer: int, rows: Rows | None = None
) -> Cells:
    return Cells(layer, 9, keys, values, positions, (99,) * len(keys), budget=9, rows=rows)


@st.composite
def cases(
    draw: st.DrawFn,
    kinds: tuple[str, ...] = KINDS,
    values: tuple[str, ...] = VALUES,
    same_positions: bool | None = None,
    same_counts: bool | None = None,
    most_held: int = 8,
    dtype: torch.dtype | None = None,
) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind, value_kind = draw(st.sampled_from(kinds)), draw(st.sampled_from(values))
    batch, heads, layers = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    same_positions = draw(st.booleans()) if same_positions is None else same_positions
    same_counts = draw(st.booleans()) if same_counts is None else same_counts
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16])) if dtype is None else dtype
    padding, d = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    longest = [int(random.integers(0, most_held + 1)) for _ in range(batch)]  # of each sequence
    count = [int(random.integers(0, n + 1)) for n in longest]
    made = Case([], [], [])
    for layer in range(layers):
        window = 3 if not same_positions and layer % 2 else most_held
        held = []
        for b in range(batch):
            first = max(0, longest[b] - window)
            whole = np.arange(first, longest[b])
            held.append([whole if same_positions else whole[random.random(len(whole)) < 0.7] for _ in range(heads)])
        most = max(len(cell) for sequence in held for cell in sequence) + padding
        positions = np.full((batch, heads, most), -1)
        scores = np.full((batch, heads, most), -math.inf)
        vectors = np.full((batch, heads, most, d), math.nan)
        counts = np.zeros((batch, heads), dtype=np.int64)
        for b in range(batch):
            for h in range(heads):
                n = len(held[b][h])
                positions[b, h, :n] = held[b][h]
                scores[b, h, :n] = cell_scores(kind, n, random)
                vectors[b, h, :n] = cell_values(value_kind, n, d, random)
                counts[b, h] = min(count[b], n) if same_counts else random.integers(0, n + 1)
        keys = torch.tensor(random.standard_normal((batch, heads, most, 2)), dtype=torch.float32)
        queries = torch.tensor(random.standard_normal((batch, 2 * heads, 1, 2)), dtype=torch.float32)
        rows = Rows(queries, torch.full((batch, 1), 98), torch.zeros(batch, 1, dtype=torch.int64), 1.0, None)
        made.cells.append(cells_of(keys, torch.tensor(vectors).to(dtype), torch.tensor(positions), layer, rows))
        made.scores.append(torch.tensor(scores, dtype=torch.float32))
        made.counts.append(torch.tensor(counts))
    return made


def cell_scores(kind: str, n: int, random: np.random.Generator) -> np.ndarray:
    scores = random.standard_normal(n)
    if kind == "ties":
        scores = random.integers(-1, 2, n).astype(float)
    elif kind == "all equal":
        scores[:] = 0.25
    elif kind == "protected":
        scores[-3:] = math.inf
    elif kind == "protected here and there":
        scores[random.random(n) < 0.5] = math.inf
    elif kind == "minus inf":
        scores[random.random(n) < 0.4] = -math.inf
    elif kind == "zeros of both signs":
        scores = np.where(random.random(n) < 0.5, 0.0, -0.0)
    return scores


def cell_values(kind: str, n: int, d: int, random: np.random.Generator) -> np.ndarray:
    values = random.standard_normal((n, d))
    if kind == "duplicates":
        values = values[random.integers(0, max(n, 1), n)] if n else values
    elif kind == "integers":
        values = random.integers(-1, 2, (n, d)).astype(float)
    elif kind == "zeros":
        values[:] = 0.0
    elif kind == "one direction":
        values = np.abs(values[:, :1]) * np.ones(d)
    elif kind == "opposite":
        values = np.sign(values[:, :1]) * np.ones(d)
    elif kind == "huge":
        values *= 1e30
    elif kind == "tiny":
        values *= 1e-30
    return values


# What is expected, in loops over lists


def best_order(scores: dict[int, float]) -> list[int]:
    """Protected ones from the latest backwards, then by score, then from the earliest on."""
    safe = sorted((i for i in scores if scores[i] == math.inf), reverse=True)
    return safe + sorted((i for i in scores if scores[i] < math.inf), key=lambda i: (-scores[i], i))


def scaled(scores: dict[int, float], score_scale: str) -> dict[int, float]:
    finite = [x for x in scores.values() if abs(x) < math.inf]
    if score_scale == "raw" or not finite:
        return dict(scores)
    mean = sum(finite) / len(finite)
    spread = math.sqrt(sum((x - mean) ** 2 for x in finite) / len(finite))
    low, high = min(finite), max(finite)

    def scale(x: float) -> float:
        if abs(x) == math.inf:
            return x
        if low == high:
            return 0.0
        return (x - low) / (high - low) if score_scale == "minmax" else (x - mean) / spread

    return {i: scale(x) for i, x in scores.items()}


def greedy_order(
    scores: dict[int, float], by: dict[int, float], values: dict[int, np.ndarray], lambda_: float
) -> list[int]:
    """All entries in the order in which they are picked; `by`: the scores that break ties before positions do."""
    unit = {i: v / (np.linalg.norm(v) + 1e-8) for i, v in values.items()}
    order = [i for i in best_order(by) if by[i] == math.inf]
    left = [i for i in best_order(by) if abs(by[i]) < math.inf]
    while left:
        gains = {}
        for i in left:
            # cosines are rounded to multiples of 2^-32
            nearest = max((round(float(unit[i] @ unit[j]) * 2**32) / 2**32 for j in order), default=0.0)
            gains[i] = scores[i] - lambda_ * max(0.0, nearest)
        pick = left[0]
        for i in left:  # in the order of best_order, so that the first of equal gains is the better by score
            if gains[i] > gains[pick]:
                pick = i
        order.append(pick)
        left.remove(pick)
    return order + [i for i in best_order(by) if by[i] == -math.inf]


def entries(case: Case, b: int, layer: int, head: int) -> dict[int, int]:
    """Index of each position that a cell holds."""
    return {int(p): i for i, p in enumerate(case.cells[layer].positions[b, head]) if p >= 0}


def expected_by_cell(case: Case, lambda_: float, score_scale: str) -> list[torch.Tensor]:
    out = [torch.zeros_like(s, dtype=torch.bool) for s in case.scores]
    for layer, scores in enumerate(case.scores):
        for b, h in np.ndindex(*scores.shape[:2]):
            raw = {i: float(scores[b, h, i]) for i in entries(case, b, layer, h).values()}
            values = {i: case.cells[layer].values[b, h, i].double().numpy() for i in raw}
            order = greedy_order(scaled(raw, score_scale), raw, values, lambda_) if lambda_ else best_order(raw)
            for i in order[: int(case.counts[layer][b, h])]:
                out[layer][b, h, i] = True
    return out


def expected_of_one_order(case: Case, lambda_: float, score_scale: str) -> list[torch.Tensor]:
    out = [torch.zeros_like(s, dtype=torch.bool) for s in case.scores]
    for b in range(len(case.scores[0])):
        pooled: dict[int, float] = {}
        values: dict[int, list[np.ndarray]] = {}
        for layer, scores in enumerate(case.scores):
            for h in range(scores.shape[1]):
                place = entries(case, b, layer, h)
                mine = scaled({p: float(scores[b, h, i]) for p, i in place.items()}, score_scale)
                for p, i in place.items():
                    pooled[p] = max(pooled.get(p, -math.inf), mine[p])
                    values.setdefault(p, []).append(case.cells[layer].values[b, h, i].double().numpy())
        means = {p: np.sum(v, axis=0) / len(v) for p, v in values.items()}
        order = greedy_order(pooled, pooled, means, lambda_) if lambda_ else best_order(pooled)
        for layer, counts in enumerate(case.counts):
            for h in range(counts.shape[1]):
                place = entries(case, b, layer, h)
                for p in [p for p in order if p in place][: int(counts[b, h])]:
                    out[layer][b, h, place[p]] = True
    return out


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bool
        assert torch.equal(one, other)


# Every selector that there is


def every_selector() -> list[Selector]:
    parts: list[Selector] = [part() for part in listed(Selector).values()]
    return [
        *parts,
        *(Alpha(0.7, scale, "cell") for scale in alpha.SCORE_SCALES),
        Alpha(0.0),
        Alpha(0.0, signature="cell"),
    ]


@pytest.mark.parametrize("selector", every_selector(), ids=str)
@given(cases())
def test_counts_are_exact_and_sequences_do_not_meet(selector: Selector, case: Case) -> None:
    kept = case.select(selector)
    for stays, cells, count in zip(kept, case.cells, case.counts, strict=True):
        assert torch.equal(stays.sum(-1), count)
        assert not (stays & ~cells.held).any()
    for b in range(len(case.counts[0])):
        assert_same(case.sequence(b).select(selector), [stays[b : b + 1] for stays in kept])


@pytest.mark.parametrize("selector", every_selector(), ids=str)
@given(cases(kinds=("protected",), same_positions=True))
def test_protected_entries_stay_first_and_the_latest_of_them(selector: Selector, case: Case) -> None:
    for stays, scores, counts in zip(case.select(selector), case.scores, case.counts, strict=True):
        for b, h in np.ndindex(*counts.shape):
            safe = torch.nonzero(scores[b, h] == math.inf).flatten().tolist()
            kept = torch.nonzero(stays[b, h]).flatten().tolist()
            latest = safe[max(0, len(safe) - int(counts[b, h])) :]
            assert set(latest) <= set(kept)


@given(cases())
def test_top_mass_is_a_sorted_list(case: Case) -> None:
    assert_same(case.select(TopMass()), expected_by_cell(case, 0.0, "raw"))


# Alpha against loops. The z-scores of two cells can be equal in theory and differ in the last bit, and then nothing
# says which is the larger: their oracle is given scores without ties between cells.


@pytest.mark.parametrize("lambda_", LAMBDAS)
@given(cases(), st.sampled_from(alpha.SCORE_SCALES))
def test_alpha_by_cell_is_greedy(lambda_: float, case: Case, score_scale: str) -> None:
    assert_same(case.select(Alpha(lambda_, score_scale, "cell")), expected_by_cell(case, lambda_, score_scale))


@pytest.mark.parametrize("lambda_", [0.0, *LAMBDAS])
@given(cases(), st.sampled_from(["raw", "minmax"]))
def test_alpha_over_the_model_is_greedy(lambda_: float, case: Case, score_scale: str) -> None:
    assert_same(case.select(Alpha(lambda_, score_scale)), expected_of_one_order(case, lambda_, score_scale))


@pytest.mark.parametrize("lambda_", [0.0, *LAMBDAS])
@given(cases(kinds=("gaussian",), same_positions=True, most_held=12).filter(lambda case: case.scores[0].shape[-1] > 6))
def test_alpha_over_the_model_on_z_scores_is_greedy(lambda_: float, case: Case) -> None:
    if (case.cells[0].lengths < 3).any():  # the z-scores of two entries are 1 and -1 in every cell
        return
    assert_same(case.select(Alpha(lambda_)), expected_of_one_order(case, lambda_, "zscore_max"))


@given(cases(same_positions=True, same_counts=True))
def test_equal_cells_keep_one_set_of_positions(case: Case) -> None:
    kept = case.select(Alpha())
    for stays in kept:
        assert torch.equal(stays, kept[0][:, :1].expand_as(stays))


# The limit of no penalty


@given(cases())
def test_no_penalty_is_top_mass_bit_for_bit(case: Case) -> None:
    assert_same(case.select(Alpha(0.0, signature="cell")), case.select(TopMass()))
    assert_same(case.select(Alpha(0, "raw", "cell")), case.select(TopMass()))


@pytest.mark.parametrize("score_scale", alpha.SCORE_SCALES)
@pytest.mark.parametrize("signature", alpha.SIGNATURES)
@given(cases(kinds=("gaussian", "protected", "protected here and there", "minus inf")))
def test_a_vanishing_penalty_is_none(signature: str, score_scale: str, case: Case) -> None:
    if signature == "global" and score_scale != "raw":
        # a score of exactly 0 is the only one that so small a penalty changes: a cell of one entry, and the lowest of a
        # cell on the scale from 0 to 1
        finite = torch.cat([scores.isfinite().sum(-1).flatten() for scores in case.scores])
        if score_scale == "minmax" or (finite == 1).any():
            return
    assert_same(case.select(Alpha(1e-300, score_scale, signature)), case.select(Alpha(0.0, score_scale, signature)))


# What the penalty is for


def two_clusters() -> Case:
    """Four entries of one direction with the highest scores, then two of another."""
    values = torch.tensor([[1.0, 0.0]] * 4 + [[0.0, 1.0]] * 2)[None, None]
    scores = torch.tensor([1.0, 0.99, 0.98, 0.97, 0.9, 0.5])[None, None]
    cells = cells_of(torch.zeros(1, 1, 6, 1), values, torch.arange(6)[None, None], 0)
    return Case([cells], [scores], [torch.tensor([[2]])])


@pytest.mark.parametrize("signature", alpha.SIGNATURES)
def test_a_penalty_spreads_what_is_kept(signature: str) -> None:
    assert two_clusters().select(Alpha(0.0, "raw", signature))[0].flatten().tolist() == [True, True] + [False] * 4
    assert two_clusters().select(Alpha(0.5, "raw", signature))[0].flatten().tolist() == [
        True,
        *[False] * 3,
        True,
        False,
    ]


def test_opposite_values_earn_nothing() -> None:
    case = two_clusters()
    case.cells[0].values[..., 4:, :] = torch.tensor([-1.0, 0.0])
    case.scores[0][..., 1:] = torch.tensor([0.95, 0.95, 0.95, 0.4, 0.3])  # a bonus would let the fifth win
    assert case.select(Alpha(0.5, "raw"))[0].flatten().tolist() == [True, True] + [False] * 4


def test_protected_entries_repel_before_the_first_pick() -> None:
    case = two_clusters()
    case.scores[0][..., 3] = math.inf
    assert case.select(Alpha(0.5, "raw"))[0].flatten().tolist() == [False, False, False, True, True, False]


def test_a_cell_waits_until_other_cells_positions_were_picked() -> None:
    # positions 3 and 4, of the other head, are picked before the second of the first head, which is then 2 and not 1
    e = torch.eye(4)
    values = torch.stack([torch.stack([e[0], e[0], e[0] / 2 + e[1]]), torch.stack([e[2], e[3], e[3]])])[None]
    scores = torch.tensor([[[1.0, 0.9, 0.85], [0.95, 0.89, -math.inf]]])
    positions = torch.tensor([[[0, 1, 2], [3, 4, -1]]])
    case = Case([cells_of(torch.zeros(1, 2, 3, 1), values, positions, 0)], [scores], [torch.tensor([[2, 1]])])
    kept = case.select(Alpha(0.5, "raw"))
    assert kept[0].tolist() == [[[True, False, True], [True, False, False]]]
    assert_same(kept, expected_of_one_order(case, 0.5, "raw"))


def test_more_protected_entries_than_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    n = 40
    scores = torch.tensor(random.standard_normal((2, 2, n)), dtype=torch.float32)
    scores[0, :, 9:18] = math.inf
    scores[1, 0, :7] = math.inf
    values = torch.tensor(random.standard_normal((2, 2, n, 4)))
    cells = cells_of(torch.zeros(2, 2, n, 1), values, torch.arange(n).expand(2, 2, n), 0)
    case = Case([cells], [scores], [torch.full((2, 2), 22)])
    monkeypatch.setattr(alpha, "PROTECTED_BLOCK", 2)
    assert_same(case.select(Alpha(0.8, signature="cell")), expected_by_cell(case, 0.8, "zscore_max"))
    assert_same(case.select(Alpha(0.8, "raw")), expected_of_one_order(case, 0.8, "raw"))


@pytest.mark.parametrize("signature", alpha.SIGNATURES)
def test_a_long_text_is_greedy_though_most_of_it_is_never_compared(signature: str) -> None:
    random = np.random.default_rng(1)
    n = 70
    scores = torch.tensor(random.standard_exponential((1, 2, n)), dtype=torch.float32)
    scores[..., -8:] = math.inf
    values = torch.tensor(random.standard_normal((1, 2, n, 4)), dtype=torch.float32)
    case = Case(
        [cells_of(torch.zeros(1, 2, n, 1), values, torch.arange(n).expand(1, 2, n), 0)],
        [scores],
        [torch.full((1, 2), 20)],
    )
    expected = expected_by_cell if signature == "cell" else expected_of_one_order
    kept = case.select(Alpha(2.0, signature=signature))
    assert_same(kept, expected(case, 2.0, "zscore_max"))
    assert not torch.equal(kept[0], case.select(Alpha(0.0, signature=signature))[0])
