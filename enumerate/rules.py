"""Every rule that is applied to a row at a budget, and what is recorded of the subset that it keeps."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import polars as pl

from data.schema import SUBSETS, Table
from enumerate.rows import RowToGrade
from solvers import balancing, candidate_set, certify, exhaustive, frank_wolfe, free_error, least_free_error, top_mass
from solvers import leverage as leverage_subset
from solvers.balancing import LARGEST_ENUMERATED_BUDGET
from solvers.candidates import MOST_EXTRA
from solvers.problem import Indices, Instance, Reals

T = TypeVar("T")

SEARCHES = ("branch_and_bound", "exhaustive")
RULES = ("top_mass", "balancing", "optimal_pool", "frank_wolfe", "geometric", "least_free", "leverage")


@dataclass(frozen=True, eq=False)
class Graded:
    """One row of the subsets table, but for its labels."""

    rule: str
    search: str
    subset: Indices
    error: float
    lower: float
    free_error: float
    status: str
    searched: int
    nodes: int
    seconds: float
    stopped_by: str = "finished"
    mass_floor: float = 0.0


def grade(row: RowToGrade, s: int, search: str, leverage_scores: Reals | None) -> Iterator[Graded]:
    """What each standard rule keeps of the row. leverage is left out where the row has no keys.

    optimal_pool is the forced optimum of the candidate set, by branch and bound or by exhaustive enumeration;
    frank_wolfe records the free error of plain line search, geometric that of the fully corrective support (P1's
    A_geo), least_free the least free error over all of them, improved by swaps (ours).
    """
    instance = row.instance
    candidates = candidate_set(instance, s)
    pool = candidates.size
    offered = pool if s <= LARGEST_ENUMERATED_BUDGET else min(s + MOST_EXTRA, instance.n_positive)

    top, seconds = _timed(lambda: top_mass(instance, s))
    yield _heuristic(instance, "top_mass", "sort", top, instance.n_positive, seconds)
    balanced, seconds = _timed(lambda: balancing(instance, s))
    yield _heuristic(instance, "balancing", "swap", balanced, offered, seconds)

    if search == "exhaustive":
        best = exhaustive(instance, s, candidates)
    else:
        best = certify(instance, s, candidates=candidates)
    yield Graded(
        "optimal_pool",
        best.search,
        best.subset,
        best.error,
        best.lower,
        free_error(instance, best.subset),
        best.status,
        best.searched,
        best.nodes,
        best.seconds,
    )

    plain, seconds = _timed(lambda: frank_wolfe(instance, s, fully_corrective=False))
    yield _free(instance, "frank_wolfe", "line_search", plain.subset, plain.error, seconds)
    corrected, seconds = _timed(lambda: frank_wolfe(instance, s, fully_corrective=True))
    yield _free(instance, "geometric", "fully_corrective", corrected.subset, corrected.error, seconds)
    supports = [corrected.subset, plain.subset, top, balanced, best.subset]
    least, seconds = _timed(lambda: least_free_error(instance, supports))
    yield _free(instance, "least_free", "swap", least.subset, min(least.error, plain.error), seconds)

    if leverage_scores is not None:
        scores = leverage_scores
        kept, seconds = _timed(lambda: leverage_subset(instance, scores, s))
        yield _heuristic(instance, "leverage", "sort", kept, instance.n_positive, seconds)


def grade_user(instance: Instance, name: str, subset: Indices, seconds: float) -> Graded:
    """The record of a user's rule."""
    return _heuristic(instance, name, "user", subset, instance.n, seconds)


def _heuristic(row: Instance, rule: str, search: str, subset: Indices, searched: int, seconds: float) -> Graded:
    error = row.forced_error(subset)
    return Graded(rule, search, subset, error, 0.0, free_error(row, subset), "heuristic", searched, 0, seconds)


def _free(row: Instance, rule: str, search: str, subset: Indices, free: float, seconds: float) -> Graded:
    return Graded(rule, search, subset, row.forced_error(subset), 0.0, free, "heuristic", row.n_positive, 0, seconds)


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


def subsets_frame(graded: list[tuple[RowToGrade, Graded]], s: int) -> pl.DataFrame:
    """The records as rows of the table subsets, with true positions for row-local indices."""
    ones = [one for _, one in graded]
    positions = [(one.subset + row.first_key).astype(np.uint32) for row, one in graded]
    return pl.DataFrame(
        {
            "row_id": [row.row_id for row, _ in graded],
            "s": pl.Series([s] * len(ones), dtype=pl.Int32),
            "rule": [one.rule for one in ones],
            "search": [one.search for one in ones],
            "mass_floor": [one.mass_floor for one in ones],
            "n_searched": pl.Series([one.searched for one in ones], dtype=pl.Int32),
            "subset": pl.Series(positions, dtype=pl.List(pl.UInt32)),
            "error": [one.error for one in ones],
            "lower": [one.lower for one in ones],
            "kept_mass": [row.instance.kept_mass(one.subset) for row, one in graded],
            "free_error": [one.free_error for one in ones],
            "status": [one.status for one in ones],
            "stopped_by": [one.stopped_by for one in ones],
            "nodes": pl.Series([one.nodes for one in ones], dtype=pl.Int64),
            "seconds": [one.seconds for one in ones],
        },
        schema=schema_of(SUBSETS),
    )


def schema_of(table: Table) -> dict[str, pl.DataType]:
    """The polars schema of a table of ours."""
    return {name: column.dtype for name, column in table.columns.items()}
