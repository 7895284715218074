"""Hardness told to a person: each reduction on an instance with a solution and on one without, and what follows."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import polars as pl
from rich import box
from rich.console import Console
from rich.table import Table as Grid

from solvers.cp_sat import zero_es
from solvers.dynamic_programme import least_error
from solvers.integer import IntegerInstance
from solvers.reductions import PAPER, exact_cover, partition, subset_sum, two_values
from solvers.reductions.balanced_partition import least_nonzero_error
from solvers.reductions.exact_cover import ExactCover
from solvers.reductions.growth import CAPTURED, EXACT_COVER, PARTITION
from solvers.reductions.interface import Reduction
from solvers.reductions.partition import Partition
from solvers.reductions.subset_sum import KSubsetSum


@dataclass(frozen=True)
class Example:
    """A reduction to ZERO-ES with a source that has a solution and one that has none."""

    reduction: Reduction[Any, IntegerInstance]
    yes: Any
    no: Any


WITH_HALF, WITHOUT_HALF = Partition((3, 5, 7, 9, 14)), Partition((3, 5, 7, 9, 12))  # both of even sum
EXAMPLES = (
    Example(PAPER, WITH_HALF, WITHOUT_HALF),
    Example(two_values, WITH_HALF, WITHOUT_HALF),
    Example(subset_sum, KSubsetSum((-7, -3, 2, 5, 8, 12), 3, 3), KSubsetSum((-7, -3, 2, 5, 8, 12), 3, 5)),
    Example(
        exact_cover,
        ExactCover(2, ((0, 1, 2), (1, 2, 3), (2, 4, 5), (0, 4, 5))),
        ExactCover(2, ((0, 1, 2), (1, 2, 3), (2, 4, 5), (0, 3, 4))),
    ),
)

INTRODUCTION = (
    "ZERO-ES asks of a row of keys, each with a mass and a point, whether some s of them have the same mean as all:"
    " forced error 0. Below, NP-complete problems become such rows. Every subset shown was tested in integers; where"
    " there is none, CP-SAT has proved it, and so, on a line with equal masses, has the dynamic programme."
)
NO_FACTOR = (
    "Why no approximation within a finite factor can exist: a polynomial method that returned a subset of error at most"
    " f times the least would return one of error 0 wherever the least is 0, whatever f is, and one of error above 0"
    " elsewhere. It would tell the yes-instances above from the no-instances, which is NP-complete, so there is none"
    " unless P = NP."
)


def tell(example: Example) -> Grid:
    """The two sources, their rows, what was found or proved, and the solution pulled back.

    Raises RuntimeError if any of it does not hold.
    """
    grid = Grid(
        title=f"{example.reduction.NAME} ({example.reduction.SOURCE})",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        title_justify="left",
    )
    grid.add_column("")
    columns = []
    for heading, source in (("has a solution", example.yes), ("has none", example.no)):
        grid.add_column(heading, overflow="fold")
        columns.append(_lines(example.reduction, source, expected=source is example.yes))
    for name in columns[0] | columns[1]:
        grid.add_row(name, *(column.get(name, "-") for column in columns))
    return grid


def _lines(reduction: Reduction[Any, IntegerInstance], source: Any, expected: bool) -> dict[str, str]:
    row = reduction.reduce(source)
    found = zero_es(row)
    lines = {
        "source": str(source),
        "row": f"{row.n} keys, d = {row.d}, s = {row.s}",
        "masses": f"all {row.masses[0]}" if len(set(row.masses)) == 1 else _listed(row.masses),
        "points": (", " if row.d == 1 else "\n").join(map(_point, row.points)),
    }
    if (found.answer == "found") != expected:
        raise RuntimeError(f"{reduction.NAME}: {source}: CP-SAT says {found.answer}")
    if row.d == 1 and len(set(row.masses)) == 1:
        error = least_error(row).error
        if (error == 0) != expected:
            raise RuntimeError(f"{reduction.NAME}: {source}: the dynamic programme says {error}")
        lines["dynamic programme"] = f"least error {error}"
    if found.subset is None:
        return lines | {"CP-SAT": f"proved: no {row.s} keys have error 0"}
    keys = found.subset.tolist()
    solution = reduction.pull_back(source, frozenset(keys))
    if not (row.is_zero(keys) and source.solves(solution)):
        raise RuntimeError(f"{reduction.NAME}: {source}: keys {keys} do not solve it")
    mass = sum(row.masses[j] for j in keys)
    moment = tuple(sum(row.masses[j] * row.points[j][i] for j in keys) for i in range(row.d))
    of_kept, of_all = f"{_point(moment)} over mass {mass}", f"{_point(row.moment)} over {row.total}"
    return lines | {
        "CP-SAT": f"keys {_listed(keys)} have error 0",
        "in integers": f"sum of m v: {of_kept};{' ' if row.d == 1 else chr(10)}of all: {of_all}",
        "pulled back": source.tell(solution),
    }


def gap() -> str:
    """What an error above 0 is at least on the paper's rows, checked on every subset of the one without a solution.

    Raises RuntimeError if it does not hold.
    """
    balanced = partition.reduce(WITHOUT_HALF)
    row = PAPER.reduce(WITHOUT_HALF)
    bound = Fraction(*least_nonzero_error(balanced))
    squares = [row.error_squared(keys) for keys in combinations(range(row.n), row.s)]
    if min(squares) < bound**2 or min(squares) != least_error(row).error ** 2:
        raise RuntimeError(f"the least error of {balanced} is below {bound}")
    radius = max(abs(Fraction(row.moment[0], row.total) - point[0]) for point in row.points)
    return (
        f"Nor within a small additive error: on the paper's rows of n keys with integer points, a subset of error above"
        f" 0 has at least 1/n, and 2/n if the points' sum is even (ours; the paper states 2/n^2). In the instance"
        f" without a solution above, n = {row.n} and the bound is {bound}; the least error of its {len(squares)}"
        f" subsets is {least_error(row).error}. The bound is in the unit of the points; in units of D = max |v - mu|"
        f" it is {bound / radius}."
    )


def growth(frame: pl.DataFrame) -> Grid:
    """Nodes of branch and bound by number of keys: median and, in brackets, largest; > where the limit stopped one."""
    grid = Grid(
        title="Nodes of branch and bound: median (largest); > where some search met its node limit",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        title_justify="left",
    )
    kinds = {
        "Partition, unsolvable": (PARTITION, False),
        "Partition, solvable": (PARTITION, True),
        "Exact Cover, unsolvable": (EXACT_COVER, False),
        "Exact Cover, solvable": (EXACT_COVER, True),
        "captured": (CAPTURED, None),
    }
    for heading in ("n", "subsets of n / 2", *kinds):
        grid.add_column(heading, justify="right")
    for n in frame["n"].unique().sort():
        here = frame.filter(pl.col("n") == n)
        halves = here.filter(pl.col("problem") == PARTITION)["subsets"][0]
        cells = []
        for problem, zero in kinds.values():
            found = here.filter(pl.col("problem") == problem, pl.col("zero").eq_missing(zero))
            cells.append(_nodes(found))
        grid.add_row(str(n), f"{halves:,.0f}", *cells)
    return grid


def show(console: Console, frame: pl.DataFrame) -> None:
    """The whole story on a console, the searches from table hardness."""
    _say(console, INTRODUCTION)
    for example in EXAMPLES:
        console.print(tell(example), markup=False, highlight=False)
    console.print(growth(frame), markup=False, highlight=False)
    if frame.filter(pl.col("problem") == CAPTURED).is_empty():
        _say(console, "No captured rows are there, so the reduced ones stand alone; `make capture` brings some.")
    else:
        rows = frame.filter(pl.col("problem") == CAPTURED)["row_id"].n_unique()
        _say(console, f"Captured: the n heaviest keys of {rows} rows, half of them kept, as in the Partition rows.")
    _say(console, NO_FACTOR)
    _say(console, gap())


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)
    console.print()


def _nodes(found: pl.DataFrame) -> str:
    if found.is_empty():
        return "-"
    more = "" if found["proved"].all() else "> "
    nodes = found["nodes"].to_numpy()
    return f"{np.median(nodes):,.0f} ({more}{nodes.max():,})"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _point(x: tuple[int, ...]) -> str:
    return str(x[0]) if len(x) == 1 else f"({' '.join(map(str, x))})"
