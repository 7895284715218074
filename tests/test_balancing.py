"""The balancing selector in a cache: the solver's own on one row, and loops over single swaps for groups of rows."""

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from data import BadInput
from eviction import Decode, evict
from eviction.method import Cells, ContextRows
from eviction.selection.balancing import Balancing
from eviction.selection.balancing import weights_of as weights_and_outputs
from eviction.selection.top_mass import TopMass
from solvers import Instance, balancing
from tests.test_run import small_model

SAME = 1e-9  # relative difference of two errors below which either swap may have been the better one
NOISE = 1e-24  # squared error of all entries, which is rounding alone


def cells_with_rows(
    random: np.random.Generator, lengths: Sequence[Sequence[int]], groups: int, rows: int, d: int = 3
) -> Cells:
    """Cells of these lengths (B, K), the latest `rows` of whose query rows are at hand."""
    longest, batch, kv_heads = max(map(max, lengths)), len(lengths), len(lengths[0])
    shape = (batch, kv_heads, longest, d)
    keys, values = (torch.tensor(random.standard_normal(shape), dtype=torch.float32) for _ in range(2))
    place = torch.arange(longest)
    held = place < torch.tensor(lengths)[..., None]
    positions = torch.where(held, place, -1)
    values = torch.where(held[..., None], values, math.nan)
    queries = torch.tensor(random.standard_normal((batch, kv_heads * groups, rows, d)), dtype=torch.float32)
    read = torch.arange(longest - rows, longest).expand(batch, -1)
    seen = ContextRows(queries, read, torch.zeros_like(read), 1.0, None)
    return Cells(0, 1, keys, values, positions, (longest,) * batch, budget=longest, rows=seen)


def weights_of(cells: Cells, b: int, h: int) -> np.ndarray:
    """(rows of the group, held entries) float64, entry by entry."""
    rows = cells.rows
    assert rows is not None
    kv_heads, heads = cells.keys.shape[1], rows.queries.shape[1]
    group, found = heads // kv_heads, []
    n = int(cells.lengths[b, h])
    for g, t in product(range(group), range(rows.queries.shape[2])):
        query = rows.queries[b, h * group + g, t].double().numpy()
        visible = [int(cells.positions[b, h, j]) <= int(rows.positions[b, t]) for j in range(n)]
        logits = [float(query @ cells.keys[b, h, j].double().numpy()) * rows.scale for j in range(n)]
        powers = np.array([math.exp(x) if seen else 0.0 for x, seen in zip(logits, visible, strict=True)])
        found.append(powers / powers.sum())
    return np.array(found)


def squared_error(weights: np.ndarray, values: np.ndarray, kept: Sequence[int]) -> float:
    total = 0.0
    for row in weights:
        dense = row @ values
        mass = sum(row[j] for j in kept)
        if mass == 0:  # a row that keeps nothing has no output
            return math.inf
        part = sum(row[j] * values[j] for j in kept) / mass
        total += float(((part - dense) ** 2).sum())
    return total


def swapped(
    weights: np.ndarray, values: np.ndarray, start: list[int], offered: list[int], fixed: set[int]
) -> list[int]:
    """The best single swap again and again, every error from the definition."""
    kept, best = sorted(start), squared_error(weights, values, start)
    while True:
        found = None
        for i in sorted(set(kept) - fixed):
            for j in sorted(set(offered) - set(kept)):
                trial = [*(x for x in kept if x != i), j]
                after = squared_error(weights, values, trial)
                if after < best * (1 - 1e-12) ** 2:
                    best, found = after, sorted(trial)
        if found is None:
            return kept
        kept = found


@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.data())
def test_one_row_and_head_is_the_solvers_balancing_selector(seed: int, n: int, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    s = data.draw(st.integers(1, n))
    cells = cells_with_rows(random, [[n]], groups=1, rows=1)
    weights = weights_of(cells, 0, 0)[0]
    kept = Balancing()([cells], [torch.tensor(weights[None, None], dtype=torch.float32)], [torch.tensor([[s]])])[0]
    row = Instance(weights, cells.values[0, 0].double().numpy())
    offered = np.argsort(-weights.astype(np.float32), kind="stable")[: s + 24]
    expected = balancing(row, s, np.sort(offered))
    found = torch.nonzero(kept[0, 0]).flatten().numpy()
    if s == n:
        assert found.tolist() == list(range(n))
    else:
        assert row.forced_error(found) == pytest.approx(row.forced_error(expected), rel=1e-6, abs=1e-12)


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=1, max_size=2),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 6),
    st.booleans(),
)
def test_groups_of_rows_are_swapped_as_in_loops(
    seed: int, lengths: list[list[int]], groups: int, rows: int, extra: int, protecting: bool
) -> None:
    assume(max(map(max, lengths)) >= rows)
    random = np.random.default_rng(seed)
    cells = cells_with_rows(random, lengths, groups, rows)
    # every row sees the first entry, so its output is one of what the cell holds
    scores = torch.tensor(random.standard_normal(tuple(cells.positions.shape)), dtype=torch.float32)
    scores[..., 0] = torch.inf if protecting else scores[..., 0]
    scores = scores.masked_fill(~cells.held, -torch.inf)
    counts = torch.tensor([[int(random.integers(1, n + 1)) for n in heads] for heads in lengths])
    kept = Balancing(rows, extra)([cells], [scores], [counts])[0]
    assert torch.equal(kept.sum(-1), counts)
    for b, h in np.ndindex(*counts.shape):
        n, count = lengths[b][h], int(counts[b, h])
        weights, values = weights_of(cells, b, h), cells.values[b, h, :n].double().numpy()
        order = sorted(range(n), key=lambda j: (-float(scores[b, h, j]), j))
        start, offered = order[:count], order[count : count + extra]
        expected = swapped(weights, values, start, offered, {0} if protecting else set())
        found = torch.nonzero(kept[b, h]).flatten().tolist()
        assert not protecting or 0 in found
        if found != expected:  # two swaps that are equally good but for rounding
            mine, other = squared_error(weights, values, found), squared_error(weights, values, expected)
            assert mine == pytest.approx(other, rel=SAME, abs=NOISE)
        assert squared_error(weights, values, found) <= squared_error(weights, values, start) * (1 + SAME) + NOISE


def test_weights_sum_to_one_and_outputs_are_their_means() -> None:
    cells = cells_with_rows(np.random.default_rng(0), [[7, 4], [5, 6]], groups=2, rows=2)
    assert cells.rows is not None
    weights, _, outputs = weights_and_outputs(cells, cells.rows)
    assert torch.allclose(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    for b, h in np.ndindex(2, 2):
        n = int(cells.lengths[b, h])
        expected = weights_of(cells, b, h) @ cells.values[b, h, :n].double().numpy()
        assert np.allclose(outputs[b, h].numpy(), expected, rtol=1e-12)


def test_a_row_of_padding_has_no_say() -> None:
    cells = cells_with_rows(np.random.default_rng(1), [[8, 8]], groups=1, rows=2)
    rows = cells.rows
    assert rows is not None
    scores, counts = torch.randn(1, 2, 8), torch.tensor([[3, 4]])
    padded = ContextRows(rows.queries, torch.tensor([[-1, 7]]), rows.first, rows.scale, None)
    with_padding = Cells(0, 1, cells.keys, cells.values, cells.positions, (8,), budget=8, rows=padded)
    alone = Cells(0, 1, cells.keys, cells.values, cells.positions, (8,), budget=8, rows=rows.last(1))
    first, second = (Balancing(rows=2)([x], [scores], [counts])[0] for x in (with_padding, alone))
    assert torch.equal(first, second)


def test_without_rows_it_says_so() -> None:
    cells = Cells(3, 4, torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), torch.tensor([[[0, 1]]]), (2,), budget=1)
    with pytest.raises(BadInput, match="selector balancing: layer 3: no query rows"):
        Balancing()([cells], [torch.zeros(1, 1, 2)], [torch.tensor([[1]])])
    said = "selector balancing: needs query rows: score kvzip"
    with pytest.raises(BadInput, match=said), evict(small_model("llama"), "kvzip", selector="balancing", budget=4):
        pass


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("score", ["tova", "keydiff", "knorm"])
def test_the_last_rows_output_is_kept_better(name: str, score: str) -> None:
    """At the prompt's own eviction, where both selectors find the same entries and the same row; then both decode."""
    model, ids = small_model(name), torch.arange(3, 35)[None]
    lost = {}
    for selector in (TopMass(), Balancing()):
        noted: list[float] = []
        watched = _Watched(selector, noted)
        with evict(model, score=score, selector=watched, budget=6, decode=Decode(prompt="free")) as run:
            run.prefill(ids)
            with run.question():
                run.generate(torch.tensor([[5]]), min_new_tokens=4, max_new_tokens=4, pad_token_id=0)
            assert all(len(cell) <= 6 + 1 for layer in run.kept for cell in layer)
        lost[type(selector).__name__] = noted
    first = len(lost["TopMass"]) // 5
    assert sum(lost["Balancing"][:first]) < sum(lost["TopMass"][:first])


class _Watched(Balancing):
    """Another selector, and the squared forced error of the step's own output under it, layer by layer."""

    def __init__(self, selector: TopMass | Balancing, noted: list[float]) -> None:
        super().__init__()
        object.__setattr__(self, "_selector", selector)
        object.__setattr__(self, "_noted", noted)

    def __call__(
        self, cells: Sequence[Cells], scores: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        kept = self._selector(cells, scores, counts)  # type: ignore[attr-defined]
        for mine, stays in zip(cells, kept, strict=True):
            values = torch.where(mine.held[..., None], mine.values, 0.0).double().numpy()
            total = 0.0
            for b, h in np.ndindex(*stays.shape[:2]):
                weights, stay = weights_of(mine, b, h), torch.nonzero(stays[b, h]).flatten().tolist()
                total += squared_error(weights, values[b, h, : weights.shape[1]], stay)
            self._noted.append(total)  # type: ignore[attr-defined]
        return kept
