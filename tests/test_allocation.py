"""Allocators against loops from their formulas; the total is exact whatever the scores, lengths and windows are."""

import importlib
import inspect
import itertools
import math
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data import BadInput
from eviction import allocation, scores, selection
from eviction.allocation.adakv import AdaKV
from eviction.allocation.contour import Contour
from eviction.allocation.pyramid import Pyramid
from eviction.allocation.random_control import RandomControl
from eviction.allocation.uniform import Uniform
from eviction.method import Allocator, Score, Selector, listed, named
from eviction.ranking import keep_best
from eviction.shares import apportion

KINDS = ("gaussian", "ties", "all equal", "all protected", "protected window", "protected here and there", "minus inf")
SCALES = (1e-30, 1.0, 1e30)


@dataclass(frozen=True)
class Case:
    """Scores and lengths of one sequence, and what the caller hands over with them."""

    scores: list[torch.Tensor]
    lengths: list[torch.Tensor]
    budgets: list[int]
    cells: list[list[float]] = field(repr=False)  # what each cell holds, in the order of (layer, head)

    @property
    def held(self) -> list[int]:
        return [len(cell) for cell in self.cells]

    def allocate(self, allocator: Allocator) -> list[int]:
        """Flat counts; a layer at a time where the allocator may be called so."""
        n = len(self.scores)
        if allocator.scope == "model":
            found = allocator(self.scores, self.lengths, self.budgets, 0, n).counts
        else:
            found = [
                allocator([self.scores[i]], [self.lengths[i]], [self.budgets[i]], i, n).counts[0] for i in range(n)
            ]
        assert [x.dtype for x in found] == [torch.int64] * n
        assert [x.shape for x in found] == [x.shape for x in self.lengths]
        return [int(x) for x in torch.cat(list(found))]


def case_of(cells: Sequence[Sequence[Sequence[float]]], budgets: Sequence[int], padding: int = 0) -> Case:
    """cells[layer][head]: scores in the order of position."""
    score, length = [], []
    for layer in cells:
        longest = max(len(cell) for cell in layer) + padding
        score.append(
            torch.tensor([[*cell, *[-math.inf] * (longest - len(cell))] for cell in layer]).view(len(layer), -1)
        )
        length.append(torch.tensor([len(cell) for cell in layer]))
    # as the allocator sees them: rounded to float32
    flat = [score[i][h, : len(cell)].tolist() for i, layer in enumerate(cells) for h, cell in enumerate(layer)]
    return Case(score, length, list(budgets), flat)


@st.composite
def cases(draw: st.DrawFn, most_layers: int = 4, most_heads: int = 3, most_held: int = 9) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    heads = draw(st.integers(1, most_heads))
    kind, scale = draw(st.sampled_from(KINDS)), draw(st.sampled_from(SCALES))
    ragged, windows = draw(st.booleans()), draw(st.booleans())
    s, longest = draw(st.integers(1, most_held + 2)), draw(st.integers(0, most_held))
    cells, budgets = [], []
    for number in range(draw(st.integers(1, most_layers))):
        holds = min(longest, 3) if windows and number % 2 else longest
        layer = []
        for _ in range(heads):
            n = int(random.integers(0, holds + 1)) if ragged else holds
            cell = random.standard_normal(n) * scale
            if kind == "ties":
                cell = random.integers(-1, 2, n) * scale
            elif kind == "all equal":
                cell[:] = 0.5
            elif kind == "all protected":
                cell[:] = math.inf
            elif kind == "protected window":
                cell[-3:] = math.inf
            elif kind == "protected here and there":
                cell[random.random(n) < 0.4] = math.inf
            elif kind == "minus inf":
                cell[random.random(n) < 0.5] = -math.inf
            layer.append(cell.tolist())
        cells.append(layer)
        budgets.append(min(s, holds))
    return case_of(cells, budgets, padding=draw(st.integers(0, 2)))


# What is expected, in loops


def dealt(most: Sequence[int], total: int) -> list[int]:
    """One entry at a time, round after round."""
    counts = [0] * len(most)
    while sum(counts) < min(total, sum(most)):
        for i in range(len(most)):
            if counts[i] < most[i] and sum(counts) < total:
                counts[i] += 1
    return counts


def shared(weights: Sequence[Fraction], most: Sequence[int], total: int) -> list[int]:
    """In proportion; full ones are set aside one at a time; then the largest remainders."""
    shares: dict[int, Fraction] = {}
    active = [i for i in range(len(most)) if weights[i] > 0]
    rest = Fraction(total)
    while True:
        share = {i: rest * weights[i] / sum(weights[j] for j in active) for i in active}
        full = [i for i in active if share[i] >= most[i]]
        if not full:
            break
        shares[full[0]] = Fraction(most[full[0]])
        active.remove(full[0])
        rest -= most[full[0]]
    shares |= share
    counts = [int(shares.get(i, 0)) for i in range(len(most))]
    while active and sum(counts) < total:
        best = max(active, key=lambda i: (shares[i] - counts[i], -i))
        counts[best] += 1
        active.remove(best)
    if sum(counts) < total:  # those of weight 0
        room = [m if w == 0 else 0 for w, m in zip(weights, most, strict=True)]
        counts = [a + b for a, b in zip(counts, dealt(room, total - sum(counts)), strict=True)]
    return counts


def best_of_all(cells: Sequence[Sequence[float]], floor: int, total: int) -> list[list[int]]:
    """Positions kept in each cell: floors, protected ones from the latest backwards, then by score."""
    order = []
    for c, cell in enumerate(cells):
        inside = len(cell) - min(floor, len(cell))
        back = 0
        for i in reversed(range(inside)):
            if cell[i] == math.inf:
                order.append((1, back, c, i))
                back += 1
        order += [(0, 0.0, c, i) for i in range(inside, len(cell))]
        order += [(2, -cell[i], c, i) for i in range(inside) if cell[i] < math.inf]
    kept: list[list[int]] = [[] for _ in cells]
    for _, _, c, i in sorted(order)[:total]:
        kept[c].append(i)
    return [sorted(cell) for cell in kept]


# The shares themselves


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), min_size=1, max_size=7), st.integers(0, 40))
def test_shares_are_proportional_exact_and_within_bounds(pairs: list[tuple[int, int]], total: int) -> None:
    weights, most = [w for w, _ in pairs], [m for _, m in pairs]
    counts = apportion(weights, most, total)
    assert sum(counts) == min(total, sum(most))
    assert all(0 <= c <= m for c, m in zip(counts, most, strict=True))
    assert counts == shared([Fraction(w) for w in weights], most, min(total, sum(most)))
    assert apportion([7] * len(most), most, total) == dealt(most, total)


def test_shares_of_huge_numbers_do_not_overflow() -> None:
    assert apportion([2**60, 2**61], [2**62, 2**62], 3 * 2**50) == [2**50, 2**51]


# Every allocator that there is


def every_allocator() -> list[Allocator]:
    parts: list[Allocator] = []
    for kind in listed(Allocator).values():
        parts.append(kind())
        if "floor" in {x.name for x in fields(kind)}:  # type: ignore[arg-type]
            parts += [kind(floor=0), kind(floor=2)]  # type: ignore[call-arg]
    return [*parts, Pyramid(window=1, beta=2), Pyramid(window=0, variant="kvpress"), AdaKV(0.0), AdaKV(1.0)]


@pytest.mark.parametrize("allocator", every_allocator(), ids=str)
@given(cases())
def test_totals_are_exact(allocator: Allocator, case: Case) -> None:
    floor = getattr(allocator, "floor", 0)
    heads = [x.numel() for x in case.lengths]
    allowed = sum(k * s for k, s in zip(heads, case.budgets, strict=True))
    if allocator.scope == "model" and sum(min(n, floor) for n in case.held) > min(allowed, sum(case.held)):
        with pytest.raises(BadInput, match=f"floor.{{1,4}}{floor}"):
            case.allocate(allocator)
        return
    counts = case.allocate(allocator)
    assert all(min(floor, n) <= count <= n for count, n in zip(counts, case.held, strict=True))
    if allocator.scope == "model":
        assert sum(counts) == min(allowed, sum(case.held))
        return
    start = 0
    for k, s in zip(heads, case.budgets, strict=True):
        assert sum(counts[start : start + k]) == min(k * s, sum(case.held[start : start + k]))
        start += k


@pytest.mark.parametrize("allocator", every_allocator(), ids=str)
def test_a_text_shorter_than_the_budget_is_kept_whole(allocator: Allocator) -> None:
    case = case_of([[[0.1, 0.2, 0.3]] * 2] * 3, [3] * 3)
    assert case.allocate(allocator) == [3] * 6


@pytest.mark.parametrize("allocator", every_allocator(), ids=str)
def test_one_layer_of_one_head_gets_the_budget(allocator: Allocator) -> None:
    case = case_of([[[float(i % 5) for i in range(60)]]], [40])
    assert case.allocate(allocator) == [40]


@given(cases())
def test_uniform_is_dealt_in_turn(case: Case) -> None:
    expected, start = [], 0
    for length, budget in zip(case.lengths, case.budgets, strict=True):
        heads = length.numel()
        expected += dealt(case.held[start : start + heads], heads * budget)
        start += heads
    assert case.allocate(Uniform()) == expected


# Ada-KV


@given(cases(), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_adakv_is_its_formula(case: Case, alpha: float) -> None:
    expected: list[int] = []
    for length, budget in zip(case.lengths, case.budgets, strict=True):
        cells = case.cells[len(expected) : len(expected) + length.numel()]
        total = min(len(cells) * budget, sum(map(len, cells)))
        protected = [sum(x == math.inf for x in cell) for cell in cells]
        rest = total - sum(protected)
        if rest <= 0:
            expected += dealt(protected, total)
            continue
        others = sorted((-x, h, i) for h, cell in enumerate(cells) for i, x in enumerate(cell) if x < math.inf)
        n = [sum(h == head for _, h, _ in others[:rest]) for head in range(len(cells))]
        a = Fraction(str(alpha))
        share = [(1 - a) * count + a * Fraction(rest, len(cells)) for count in n]
        more = shared(share, [len(c) - p for c, p in zip(cells, protected, strict=True)], rest)
        expected += [p + x for p, x in zip(protected, more, strict=True)]
    assert case.allocate(AdaKV(alpha)) == expected


def test_adakv_gives_what_the_reference_gives_where_that_is_exact() -> None:
    # 2 heads, window 2, base 10: all of the best 20 in head 0, so 20 * 0.8 + 2 + 2 and 0 * 0.8 + 2 + 2
    cell = [1.0] * 28 + [math.inf] * 2
    assert case_of([[cell, [x / 2 for x in cell]]], [12]).allocate(AdaKV()) == [20, 4]


# PyramidKV


def pyramid_shape(s: int, longest: int, n: int, beta: int, window: int, variant: str) -> list[Fraction]:
    if n == 1:
        return [Fraction(s)]
    if variant == "reference":
        w = window if window < s else s
        b = s - w
        low = Fraction(b, beta)
        high = 2 * b - low
        if high >= longest - window:
            high = Fraction(longest - window)
            low = 2 * b - high
        if longest < 2 * b or b == 0:
            return [Fraction(s)] * n
        return [w + high - layer * (high - low) / (n - 1) for layer in range(n)]
    low = Fraction(s, beta)
    high = 2 * s - low
    if high >= longest - window:
        high = Fraction(longest - window)
        low = 2 * s - high
    if longest >= high and high >= low and low >= window:
        return [high - layer * (high - low) / (n - 1) for layer in range(n)]
    return [Fraction(s)] * n


@pytest.mark.parametrize("variant", ["reference", "kvpress"])
@given(cases(most_layers=6, most_held=40), st.integers(1, 20), st.integers(0, 6))
def test_pyramid_is_its_formula(variant: str, case: Case, beta: int, window: int) -> None:
    s = max(case.budgets)
    shape = pyramid_shape(s, max(case.held), len(case.budgets), beta, window, variant)
    weights = []
    for share, budget, length in zip(shape, case.budgets, case.lengths, strict=True):
        weights += [share * budget] * length.numel()
    total = min(sum(s * x.numel() for s, x in zip(case.budgets, case.lengths, strict=True)), sum(case.held))
    assert case.allocate(Pyramid(beta, window, variant)) == shared(weights, case.held, total)


@pytest.mark.parametrize(("s", "n", "longest"), [(128, 30, 4096), (128, 28, 300), (64, 16, 1000), (512, 24, 1024)])
def test_pyramid_is_near_the_reference_in_integers(s: int, n: int, longest: int) -> None:
    window, beta = 32, 20
    low = (s - window) // beta
    high = (s - window) * 2 - low
    if high >= longest - window:
        high, low = longest - window, (s - window) * 2 - (longest - window)
    step = (high - low) // (n - 1)
    counts = case_of([[[0.0] * longest] * 2] * n, [s] * n).allocate(Pyramid())
    assert sum(counts) == 2 * n * s
    for layer in range(n):
        assert counts[2 * layer] == counts[2 * layer + 1]
        # each step of the reference is less than 1 too small
        assert abs(counts[2 * layer] - (high - layer * step + window)) <= layer + 1


def test_pyramid_falls_and_never_below_the_window() -> None:
    counts = case_of([[[0.0] * 500]] * 10, [64] * 10).allocate(Pyramid())
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= 32
    assert counts[0] > 90
    assert case_of([[[0.0] * 500]] * 10, [32] * 10).allocate(Pyramid()) == [32] * 10
    assert case_of([[[0.0] * 500]] * 10, [64] * 10).allocate(Pyramid(variant="kvpress")) == [64] * 10


# ContourKV


@given(cases(), st.integers(0, 3))
def test_contour_is_one_threshold(case: Case, floor: int) -> None:
    total = min(sum(s * x.numel() for s, x in zip(case.budgets, case.lengths, strict=True)), sum(case.held))
    if sum(min(floor, n) for n in case.held) > total:
        with pytest.raises(BadInput, match="recency floor"):
            case.allocate(Contour(floor=floor))
        return
    kept = best_of_all(case.cells, floor, total)
    counts = case.allocate(Contour(floor=floor))
    assert counts == [len(cell) for cell in kept]
    # a selector that keeps the floor first finds the same entries
    start = 0
    for score, length in zip(case.scores, case.lengths, strict=True):
        place = torch.arange(score.shape[1])
        recent = (place >= (length - floor)[:, None]) & (place < length[:, None])
        stays = keep_best(
            score.masked_fill(recent, math.inf), torch.tensor(counts[start : start + length.numel()], dtype=torch.int64)
        )
        for row in stays:
            assert torch.nonzero(row).flatten().tolist() == kept[start]
            start += 1


@given(cases(most_layers=2, most_heads=2, most_held=5), st.integers(0, 2))
def test_contour_keeps_the_largest_sum_of_scores(case: Case, floor: int) -> None:
    cells = [[x if abs(x) < math.inf else 0.25 for x in cell] for cell in case.cells]
    case = case_of([[cells[i + h] for h in range(len(x))] for i, x in _starts(case.lengths)], case.budgets)
    total = min(sum(s * x.numel() for s, x in zip(case.budgets, case.lengths, strict=True)), sum(case.held))
    if sum(min(floor, n) for n in case.held) > total:
        return

    def worth(cell: list[float], count: int) -> Fraction:
        inside = len(cell) - min(floor, len(cell))
        best = sorted(map(Fraction, cell[:inside]), reverse=True)[: count - (len(cell) - inside)]
        return sum(map(Fraction, cell[inside:]), Fraction(0)) + sum(best, Fraction(0))

    choices = [range(min(floor, len(cell)), len(cell) + 1) for cell in case.cells]
    largest = max(
        sum(worth(cell, count) for cell, count in zip(case.cells, counts, strict=True))
        for counts in itertools.product(*choices)
        if sum(counts) == total
    )
    counts = case.allocate(Contour(floor=floor))
    assert sum(worth(cell, count) for cell, count in zip(case.cells, counts, strict=True)) == largest


def _starts(lengths: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    starts = [0, *itertools.accumulate(x.numel() for x in lengths)]
    return list(zip(starts, lengths, strict=False))


@given(cases(), st.integers(0, 2))
def test_contour_uniform_caps_each_head_at_its_layers_budget(case: Case, floor: int) -> None:
    try:
        ragged = case.allocate(Contour(floor=floor))
    except BadInput:
        return
    capped = case.allocate(Contour(floor=floor, mode="uniform"))
    budgets = [s for s, x in zip(case.budgets, case.lengths, strict=True) for _ in range(x.numel())]
    assert capped == [min(count, s) for count, s in zip(ragged, budgets, strict=True)]


def test_contour_says_what_it_does_with_its_floor() -> None:
    long = case_of([[[0.0] * 100] * 2] * 2, [31] * 2)
    with pytest.raises(BadInput, match=r"budget of 31 entries per KV head.*floor of 32.*floor_counts=false"):
        long.allocate(Contour())
    on_top = Contour(floor_counts=False)
    assert (Contour().extra, on_top.extra, Contour(floor=5, floor_counts=False).extra) == (0, 32, 5)
    allocation = on_top(long.scores, long.lengths, [31 + on_top.extra] * 2, 0, 2)
    assert sum(int(x.sum()) for x in allocation.counts) == 4 * (31 + 32)
    assert allocation.recent == 32
    # a window of 16 and a text of 20 tokens are no reason to refuse: their budget is all that they hold
    assert case_of([[[0.0] * 100]] + [[[0.0] * 16]], [40, 16]).allocate(Contour()) == [40, 16]
    assert case_of([[[0.0] * 20]] * 2, [20] * 2).allocate(Contour()) == [20, 20]


def test_contour_gives_nothing_but_the_floor_to_a_flat_head() -> None:
    sharp, flat = [9.0] * 100, [1.0] * 100
    assert case_of([[sharp, flat], [flat, flat]], [40] * 2).allocate(Contour()) == [64, 32, 32, 32]


# The control


def test_random_shares_depend_on_the_seed_alone() -> None:
    one, other = case_of([[[0.0] * 90] * 3] * 4, [20] * 4), case_of([[[float(i) for i in range(90)]] * 3] * 4, [20] * 4)
    draws = [one.allocate(RandomControl(seed=seed)) for seed in range(6)]
    assert other.allocate(RandomControl(seed=3)) == draws[3]
    assert len({tuple(x) for x in draws}) == len(draws)
    assert np.std(draws) > 5
    assert min(one.allocate(RandomControl(seed=1, floor=7))) >= 7
    assert RandomControl(floor=7)(one.scores, one.lengths, one.budgets, 0, 4).recent == 7


def test_random_shares_are_even_on_average() -> None:
    case = case_of([[[0.0] * 400] * 2] * 3, [50] * 3)
    draws = np.array([case.allocate(RandomControl(seed=seed)) for seed in range(400)])
    # the mean of 400 draws whose standard deviation is about 42 has one of about 2
    assert np.abs(draws.mean(0) - 50).max() < 10


# Parts are found by their files and named by their options


@pytest.mark.parametrize(
    ("kind", "package"), [(Score, scores), (Allocator, allocation), (Selector, selection)], ids=lambda x: x.__name__
)
def test_a_file_is_a_part(kind: type, package: object) -> None:
    found = listed(kind)
    homes = []
    for module_info in pkgutil.iter_modules(package.__path__):  # type: ignore[attr-defined]
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")  # type: ignore[attr-defined]
        own = [x for _, x in inspect.getmembers(module, inspect.isclass) if x.__module__ == module.__name__]
        parts = [x for x in own if issubclass(x, kind)]
        if module_info.name != "options":  # what scores share
            assert len(parts) == 1, module.__name__
        homes += [x.__module__ for x in parts]
    assert sorted(homes) == sorted(x.__module__ for x in found.values())
    for name, part in found.items():
        assert part.name == name
        assert part.source
        assert isinstance(named(kind, name), part)
        assert part() == named(kind, name)  # frozen dataclasses of their options


def test_the_allocators_and_selectors_are_these() -> None:
    assert list(listed(Allocator)) == ["adakv", "contour", "pyramid", "random", "uniform"]
    assert set(listed(Selector)) >= {"alpha", "shared", "top_mass"}


def test_options_are_read_from_names() -> None:
    assert named(Allocator, "contour:floor=8,floor_counts=false,mode=uniform") == Contour(8, False, "uniform")
    assert named(Allocator, "adakv:alpha=0.5") == AdaKV(0.5)
    assert named(Allocator, "pyramid:beta=3,variant=kvpress") == Pyramid(beta=3, variant="kvpress")
    own = RandomControl(seed=4)
    assert named(Allocator, own) is own


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (Allocator, "contor", "unknown allocator 'contor': expected one of adakv, contour"),
        (Allocator, "contour:flor=3", r"allocator contour: option 'flor=3': expected floor=, floor_counts=, mode="),
        (Allocator, "contour:floor", "option 'floor'"),
        (Allocator, "uniform:name=x", "option 'name=x': expected none"),
        (Allocator, "contour:floor=-1", "floor=-1: expected a whole number, at least 0"),
        (Allocator, "contour:floor=1.5", "floor=1.5: expected a whole number"),
        (Allocator, "contour:floor=true", "floor=True: expected a whole number"),
        (Allocator, "contour:floor=many", "floor=many"),
        (Allocator, "contour:floor_counts=1", "floor_counts=1: expected true or false"),
        (Allocator, "contour:mode=padded", "mode=padded: expected ragged or uniform"),
        (Allocator, "adakv:alpha=1.1", "alpha=1.1: expected a number from 0 to 1"),
        (Allocator, "adakv:alpha=nan", "alpha=nan"),
        (Allocator, "adakv:alpha=none", "alpha=None"),
        (Allocator, "pyramid:beta=0", "beta=0: expected a whole number, at least 1"),
        (Allocator, "pyramid:window=-2", "window=-2"),
        (Allocator, "pyramid:variant=other", "variant=other: expected reference or kvpress"),
        (Allocator, "random:seed=-1", "seed=-1: expected a whole number, from 0 to"),
        (Allocator, "random:seed=99999999999999999999", "seed=9+: expected"),
        (Selector, "alpha:lambda=-0.1", "selector alpha: lambda=-0.1: expected a number of at least 0"),
        (Selector, "alpha:lambda=inf", "lambda=inf"),
        (Selector, "alpha:lambda=half", "lambda=half"),
        (Selector, "alpha:signature=layer", "signature=layer: expected global or cell"),
        (Selector, "alpha:score_scale=rank", "score_scale=rank: expected zscore_max or raw or minmax"),
        (Selector, "top_mass:k=3", "selector top_mass: option 'k=3': expected none"),
        (Selector, 7, "selector 7: expected a name"),
    ],
)
def test_bad_names_and_options_are_one_clear_line(kind: type, text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as raised:
        named(kind, text)
    assert "\n" not in str(raised.value)
