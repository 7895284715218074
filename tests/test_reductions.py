"""One law over all reductions: the target's solutions, pulled back, are the source's, and both answers occur."""

import io
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from data.schema import HARDNESS
from data.store import Store, read
from solvers import IntegerInstance, certify, decide, exhaustive, reductions
from solvers.cp_sat import zero_es
from solvers.dynamic_programme import least_error
from solvers.reductions import (
    PAPER,
    REDUCTIONS,
    BalancedPartition,
    ExactCover,
    KSubsetSum,
    Partition,
    Reduction,
    balanced_partition,
    exact_cover,
    growth,
    partition,
    story,
    subset_sum,
    two_values,
)
from tests import oracle
from tests.small_store import small_store

Solutions = set[frozenset[int]]


def subsets(n: int) -> Iterator[frozenset[int]]:
    for size in range(n + 1):
        yield from map(frozenset, combinations(range(n), size))


def solutions(problem: Any) -> Solutions:
    """Every solution, by the words of the problem: brute force that shares nothing with the reductions."""
    match problem:
        case Partition(numbers):
            total = Fraction(sum(numbers), 2)
            return {S for S in subsets(len(numbers)) if sum(numbers[j] for j in S) == total}
        case BalancedPartition(numbers):
            total, half = Fraction(sum(numbers), 2), len(numbers) // 2
            return {S for S in subsets(len(numbers)) if len(S) == half and sum(numbers[j] for j in S) == total}
        case KSubsetSum(numbers, k, target):
            return {S for S in subsets(len(numbers)) if len(S) == k and sum(numbers[j] for j in S) == target}
        case ExactCover(q, triples):
            everything = sorted(range(3 * q))
            return {S for S in subsets(len(triples)) if sorted(x for j in S for x in triples[j]) == everything}
        case IntegerInstance():
            row = fractions(problem)
            mu = oracle.mean(row, range(problem.n))
            return {frozenset(A) for A in combinations(range(problem.n), problem.s) if oracle.mean(row, A) == mu}
    raise AssertionError(problem)


def fractions(row: IntegerInstance) -> oracle.Row:
    total = sum(row.masses)
    return [Fraction(m, total) for m in row.masses], [[Fraction(x) for x in point] for point in row.points]


def size_of(target: Any) -> tuple[int, int, int]:
    if isinstance(target, BalancedPartition):
        return len(target.numbers), 1, max(target.numbers).bit_length()
    integers = [*target.masses, *(x for point in target.points for x in point)]
    return len(target.masses), len(target.points[0]), max(abs(x) for x in integers).bit_length()


def bits_of(source: Any) -> int:
    """Bits to write the source down, a separator for each number."""
    numbers = (
        [x for triple in source.triples for x in triple] + [source.q] * 3 * source.q
        if isinstance(source, ExactCover)
        else [*source.numbers, *([source.target, source.k] if isinstance(source, KSubsetSum) else [])]
    )
    return sum(abs(x).bit_length() + 1 for x in numbers)


@dataclass(frozen=True)
class Sources:
    """How instances of one problem are drawn; the fixed ones have and lack a solution for reasons of their own."""

    drawn: st.SearchStrategy[Any]
    yes: tuple[Any, ...]
    no: tuple[Any, ...]


TRIPLES_OF_6 = list(combinations(range(6), 3))
PARTITIONS = Sources(
    st.lists(st.integers(1, 12), min_size=1, max_size=5).map(lambda u: Partition(tuple(u))),
    (Partition((1, 1)), Partition((3, 5, 7, 9, 14)), Partition((10**30, 1, 10**30 + 1))),
    (
        Partition((1,)),
        Partition((2, 4, 1)),  # odd total
        Partition((1, 2, 4, 8, 16)),  # powers of two
        Partition((3, 5, 7, 9, 12)),  # even total
        Partition((10**30, 1, 10**30 + 3)),  # off by less than float64 sees
    ),
)
BALANCED = Sources(
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(lambda u: BalancedPartition(tuple(u + u[::-1][1:] + [1]))),
    (BalancedPartition((0, 0)), BalancedPartition((1, 4, 2, 3)), BalancedPartition((0, 5, 2, 3, 1, 1))),
    (BalancedPartition((0, 1)), BalancedPartition((0, 0, 0, 2)), BalancedPartition((1, 1, 1, 3))),  # 1+1+1 = 3
)
SUBSET_SUMS = Sources(
    st.lists(st.integers(-6, 6), min_size=1, max_size=6).flatmap(
        lambda a: st.builds(KSubsetSum, st.just(tuple(a)), st.integers(1, len(a)), st.integers(-10, 10))
    ),
    (KSubsetSum((0,), 1, 0), KSubsetSum((-7, -3, 2, 5, 8, 12), 3, 3), KSubsetSum((-5, -5, -5), 3, -15)),
    (KSubsetSum((0,), 1, 1), KSubsetSum((2, 4, 6, 8), 2, 7), KSubsetSum((1, 2, 3), 2, -100)),
)
COVERS = Sources(
    st.lists(st.sampled_from(TRIPLES_OF_6), max_size=6).map(lambda t: ExactCover(2, tuple(t))),
    (
        ExactCover(1, ((0, 1, 2), (2, 1, 0))),
        ExactCover(2, ((0, 1, 2), (3, 4, 5))),
        ExactCover(3, ((0, 1, 2), (3, 4, 5), (6, 7, 8), (2, 3, 4), (0, 1, 5))),
    ),
    (
        ExactCover(1, ()),
        ExactCover(2, ((0, 1, 2), (0, 1, 2))),
        ExactCover(3, ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (1, 3, 8))),
    ),
)
SOURCES: dict[str, Sources] = {
    partition.NAME: PARTITIONS,
    balanced_partition.NAME: BALANCED,
    PAPER.NAME: PARTITIONS,
    two_values.NAME: PARTITIONS,
    subset_sum.NAME: SUBSET_SUMS,
    exact_cover.NAME: COVERS,
}
each = pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda reduction: reduction.NAME)


def obeys_the_law(reduction: Reduction[Any, Any], source: Any) -> bool:
    """Check the law and the size on one source; whether it has a solution."""
    target = reduction.reduce(source)
    wanted = solutions(source)
    assert {reduction.pull_back(source, A) for A in solutions(target)} == wanted
    for solution in wanted:
        assert source.solves(solution)
    claimed = reduction.size(source)
    for measured, most in zip(size_of(target), (claimed.items, claimed.dimensions, claimed.bits), strict=True):
        assert measured <= most
    assert claimed.items * claimed.dimensions * claimed.bits <= 8 * (bits_of(source) + 2) ** 3
    return bool(wanted)


@each
def test_drawn_instances(reduction: Reduction[Any, Any]) -> None:
    answers: Counter[bool] = Counter()

    @given(SOURCES[reduction.NAME].drawn)
    def law(source: Any) -> None:
        answers[obeys_the_law(reduction, source)] += 1

    law()
    assert answers[True] >= 5
    assert answers[False] >= 5


@each
def test_fixed_instances(reduction: Reduction[Any, Any]) -> None:
    sources = SOURCES[reduction.NAME]
    assert all(obeys_the_law(reduction, source) for source in sources.yes)
    assert not any(obeys_the_law(reduction, source) for source in sources.no)


@each
def test_cp_sat_decides_what_brute_force_decides(reduction: Reduction[Any, Any]) -> None:
    sources = SOURCES[reduction.NAME]
    for source in (*sources.yes, *sources.no):
        target = reduction.reduce(source)
        if isinstance(target, IntegerInstance):
            found = zero_es(target)
            assert found.answer == ("found" if source in sources.yes else "none")
            if found.subset is not None:
                assert reduction.pull_back(source, frozenset(found.subset.tolist())) in solutions(source)


@each
def test_a_wrong_subset_is_no_solution(reduction: Reduction[Any, Any]) -> None:
    source = SOURCES[reduction.NAME].yes[1]
    wrong = next(S for S in subsets(2) if S not in solutions(source))
    assert not source.solves(wrong)


def test_sizes_grow_like_polynomials() -> None:
    # ten times the numbers, each of ten times the bits: no more than a thousand times the target's
    def measure(count: int, bits: int) -> list[int]:
        numbers = tuple(2**bits - 1 - j for j in range(count))
        covers = ExactCover(count // 4, tuple((j % (count // 4), count // 4, count // 4 + 1) for j in range(count)))
        sources = [Partition(numbers), KSubsetSum(numbers, count // 2, 2**bits), covers]
        pairs = zip((two_values, subset_sum, exact_cover), sources, strict=True)
        return [math.prod(size_of(reduction.reduce(source))) for reduction, source in pairs]

    for small, large in zip(measure(12, 12), measure(120, 120), strict=True):
        assert large <= 1000 * small


@given(PARTITIONS.drawn)
def test_errors_of_the_papers_rows_keep_their_distance_from_zero(source: Partition) -> None:
    balanced = partition.reduce(source)
    row = balanced_partition.reduce(balanced)
    numerator, denominator = balanced_partition.least_nonzero_error(balanced)
    assert row.error_squared(range(row.s)) == oracle.squared_error(fractions(row), range(row.s))
    for A in combinations(range(row.n), row.s):
        off = abs(sum(source.numbers) - 2 * sum(row.points[j][0] for j in A))
        assert row.error_squared(A) == Fraction(off, row.n) ** 2
        assert off == 0 or Fraction(off, row.n) >= Fraction(numerator, denominator)


@pytest.mark.parametrize("seed", range(4))
def test_searches_in_floats_never_rule_out_a_zero_that_exists(seed: int) -> None:
    random = np.random.default_rng(seed)
    for zero in (True, False):
        source = growth.partition_of(5 + seed // 2, zero, random)
        for reduction in (PAPER, two_values):
            target = reduction.reduce(source)
            assert bool(solutions(target)) == zero
            row = target.instance()
            found = certify(row, target.s)
            tiny = 0.25 / target.n if reduction is PAPER else None  # a quarter of what 1 / n allows
            if zero:
                assert found.lower == 0
                assert found.floors[-1].lower == 0
                if tiny is not None:
                    assert decide(row, target.s, tiny) is True
            elif tiny is not None:
                assert found.lower > tiny
                assert found.lower**2 <= least_error(target).error ** 2 <= Fraction(found.error) ** 2 * (1 + 1e-9)
                assert decide(row, target.s, tiny) is not True  # None where rounding is too near


def test_an_integer_row_evaluates_exactly() -> None:
    row = IntegerInstance((1, 2, 3), ((10**40, 0), (0, 1), (-(10**40), 5)), 2)
    for A in combinations(range(3), 2):
        assert row.error_squared(A) == oracle.squared_error(fractions(row), A)
        assert row.is_zero(A) == (row.error_squared(A) == 0)
    near = IntegerInstance((10**25, 10**25, 10**25 + 1, 10**25), ((1,), (-1,), (1,), (-1,)), 2)
    assert not near.is_zero((0, 1))
    assert near.error_squared((0, 1)) == Fraction(1, 4 * 10**25 + 1) ** 2
    assert near.instance().forced_error([0, 1]) < 1e-15  # which is why floats do not decide


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: IntegerInstance((), (), 1), "masses are empty"),
        (lambda: IntegerInstance((1, 0), ((1,), (2,)), 1), "mass 1 is 0"),
        (lambda: IntegerInstance((1, 1), ((1,),), 1), "1 points and 2 masses"),
        (lambda: IntegerInstance((1, 1), ((1,), (1, 2)), 1), r"points have \[1, 2\] coordinates"),
        (lambda: IntegerInstance((1,), ((),), 1), "coordinates"),
        (lambda: IntegerInstance((1,), ((0.5,),), 1), "point 0: expected integers"),  # type: ignore[arg-type]
        (lambda: IntegerInstance((1,), ((1,),), 2), "s = 2"),
        (lambda: IntegerInstance((1, 1), ((1,), (2,)), 2).is_zero((0,)), "1 keys"),
        (lambda: IntegerInstance((1, 1), ((1,), (2,)), 2).is_zero((0, 0)), "1 distinct"),
        (lambda: IntegerInstance((1, 1), ((1,), (2,)), 1).is_zero((2,)), "keys 2 to 2"),
        (lambda: IntegerInstance((1,), ((2**53 + 1,),), 1).instance(), "point 0 is not held by float64"),
        (lambda: IntegerInstance((1,), ((10**400,),), 1).instance(), "beyond the range"),
        (lambda: Partition(()), "at least one"),
        (lambda: Partition((1, 0)), "above 0"),
        (lambda: BalancedPartition((1, 2, 3)), "even number"),
        (lambda: KSubsetSum((1,), 2, 0), "k = 2"),
        (lambda: ExactCover(1, ((0, 1, 1),)), "triple 0"),
    ],
)
def test_bad_instances_are_refused_by_name(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_every_reduction_is_in_the_list_and_told() -> None:
    assert {reduction.NAME for reduction in REDUCTIONS} == set(SOURCES)
    into_rows = {r.NAME for r in REDUCTIONS if isinstance(r.reduce(SOURCES[r.NAME].yes[0]), IntegerInstance)}
    assert {example.reduction.NAME for example in story.EXAMPLES} == into_rows - {balanced_partition.NAME}
    for example in story.EXAMPLES:
        assert solutions(example.yes)
        assert not solutions(example.no)
    assert reductions.PAPER in REDUCTIONS


def test_the_story_is_told_without_captured_rows(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "SIZES", (8, 10))
    monkeypatch.setattr(growth, "DRAWS", 1)
    store = Store(tmp_path)
    assert growth.captured(store, seed=0) == []
    problems = list(growth.problems(store, 0, []))
    frame = growth.as_frame([growth.searched(problem) for problem in problems])
    HARDNESS.check(frame)
    assert len(problems) == growth.count([])
    assert frame["proved"].all()
    assert (frame.filter(frame["zero"])["lower"] == 0).all()
    assert (frame.filter(~frame["zero"])["lower"] > 0).all()
    written = io.StringIO()
    story.show(Console(width=130, file=written), frame)
    said = written.getvalue()
    for words in ("5 + 14 = 19", "-7 + 2 + 8 = 3", "1-2-3 and 0-4-5", "No captured rows", "finite factor", "1/n"):
        assert words in said
    assert said.count("proved: no") == len(story.EXAMPLES)


def test_captured_rows_stand_beside_the_reduced_ones(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = small_store(tmp_path)
    monkeypatch.setattr(growth, "SIZES", (8, 20))
    monkeypatch.setattr(growth, "DRAWS", 1)
    row_ids = growth.captured(store, seed=1)
    assert len(set(row_ids)) == growth.ROWS_OF_A_MODEL
    assert row_ids == growth.captured(store, seed=1)
    found = [p for p in growth.problems(store, 1, row_ids) if p.problem == growth.CAPTURED]
    frame = growth.as_frame([growth.searched(problem) for problem in found])
    assert sorted(zip(frame["n"], frame["s"], strict=True)) == sorted(2 * [(8, 4), (20, 10)] + [(8, 4), (20, 10)])
    for problem, record in zip(found, frame.iter_rows(named=True), strict=True):
        assert problem.candidates is not None
        least = exhaustive(problem.row, problem.s, problem.candidates).error
        assert record["error"] == pytest.approx(least, rel=1e-9)
        heaviest = sorted(problem.row.weights, reverse=True)[: record["n"]]
        assert sorted(problem.row.weights[problem.candidates], reverse=True) == heaviest
    written = io.StringIO()
    reduced = growth.as_frame([growth.searched(p) for p in growth.problems(store, 1, [])])
    story.show(Console(width=130, file=written), pl.concat([reduced, frame]))
    assert "heaviest keys of 3 rows" in written.getvalue()
    changed = growth.provenance(store, 1, row_ids[:1])
    assert changed != growth.provenance(store, 1, row_ids)


def test_the_command_is_current_the_second_time(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from solvers.reductions.__main__ import hardness

    monkeypatch.setattr(growth, "SIZES", (8,))
    monkeypatch.setattr(growth, "DRAWS", 1)
    hardness(tmp_path, seed=3)
    first = capsys.readouterr()
    assert "written" in first.err
    before = read(HARDNESS, Store(tmp_path).fit("hardness"))
    hardness(tmp_path, seed=3)
    second = capsys.readouterr()
    assert "current" in second.err
    assert second.out == first.out
    assert read(HARDNESS, Store(tmp_path).fit("hardness")).equals(before)
    hardness(tmp_path, seed=4, only_table=True)
    third = capsys.readouterr()
    assert "written" in third.err and third.out == ""
