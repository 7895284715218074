"""The tables of the page: each a list of headings and rows of cells, numbers already written as a reader sees them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from analysis.bootstrap import format_p
from figures import style
from figures.penalty import ESTIMATES
from figures.roc import STATISTICS
from figures.rules import NAMES, SUPPORTS

Record = Mapping[str, object]
NONE = "–"  # where a number is not defined or not given


@dataclass(frozen=True)
class Cell:
    """What a cell says, and under it in small print the interval; rows: how many rows of the table it spans."""

    main: str
    below: str = ""
    rows: int = 1
    text: bool = False


@dataclass(frozen=True)
class PageTable:
    """Headings, rows, and where a new group of rows begins."""

    headings: list[str]
    rows: list[list[Cell]]
    groups: list[int] = field(default_factory=list)


def number(value: object, digits: int = 3) -> str:
    """A number at so many decimals; larger ones at three figures; the dash where there is none."""
    if not isinstance(value, int | float) or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞"
    size = abs(value)
    digits = digits if size < 10 else min(digits, 1) if size < 1000 else 0
    return f"{round(value, digits) + 0.0:,.{digits}f}"  # adding 0 turns -0 into 0


def percent(value: object, digits: int = 0) -> str:
    """A share as a percentage; one that is small but not zero never reads as 0%."""
    if not isinstance(value, int | float) or math.isnan(value):
        return NONE
    shown = f"{100 * value:.{digits}f}%"
    return f"< {10**-digits:g}%" if value > 0 and float(shown[:-1]) == 0 else shown


def count(value: object) -> str:
    """A count with thousands set off; the dash where there is none."""
    return f"{value:,}" if isinstance(value, int) else NONE


def estimate(row: Record, name: str, digits: int = 3, share: bool = False) -> Cell:
    """A number over its 95% interval, where it has one."""
    write = percent if share else number
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    interval = "" if low is None or high is None else f"[{write(low, digits)}, {write(high, digits)}]"
    return Cell(write(row[name], digits), interval)


def with_interval(row: Record, name: str, digits: int = 3, share: bool = False) -> str:
    """A number as running text has it, with its 95% interval in brackets where it has one: "3.5% [3.2, 3.9]"."""
    cell = estimate(row, name, digits, share)
    return f"{cell.main} {cell.below.replace('%', '')}".rstrip()


def reach(records: Sequence[Record], name: str, digits: int = 3, share: bool = False) -> str:
    """The least and the largest of a column, each with its interval; one alone if they print alike."""
    known = [row for row in records if isinstance(value := row[name], float) and not math.isnan(value)]
    if not known:
        return NONE
    by_value = sorted(known, key=lambda row: float(str(row[name])))
    low, high = (with_interval(row, name, digits, share) for row in (by_value[0], by_value[-1]))
    return low if low == high else f"{low} to {high}"


def span(values: Sequence[float | None], digits: int = 3, share: bool = False) -> str:
    """The least and the largest of several numbers, "0.050 to 0.060"; one number if they print alike."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return NONE
    write = percent if share else number
    low, high = write(min(known), digits), write(max(known), digits)
    return low if low == high else f"{low} to {high}"


def ceiling(frame: pl.DataFrame) -> PageTable:
    """What the best subset known gains, with the rows and documents behind it."""
    headings = [
        "s", "ĉ, median", "ĉ, mean", "ĉ, quartiles", "cap", "κ̂, median", "κ̂, 99th pct", "gain ≥ 10%", "rows", "docs",
    ]  # fmt: skip

    def cells(row: Record) -> list[Cell]:
        return [
            Cell(str(row["s"])),
            estimate(row, "closable"),
            estimate(row, "closable_mean"),
            Cell(f"{number(row['closable_q25'])} to {number(row['closable_q75'])}"),
            Cell(number(row["cap"]), "" if row["cap_share"] is None else f"f = {percent(row['cap_share'], 1)}"),
            estimate(row, "kappa"),
            estimate(row, "kappa_p99", 2),
            estimate(row, "share", 1, share=True),
            Cell(count(row["n_rows"])),
            Cell(count(row["n_documents"])),
        ]

    return by_model(style.in_order(frame, "s"), headings, cells)


def balancing(frame: pl.DataFrame) -> PageTable:
    """What the balancing selector reaches of it, and the rows that are special."""
    headings = ["s", "recovery", "closure", "optimal", "rows", "docs", "no gap", "e_top = 0", "κ̂ = ∞"]

    def cells(row: Record) -> list[Cell]:
        counts = ("n_rows", "n_documents", "n_zero_gap", "n_zero_top", "n_infinite")
        return [
            Cell(str(row["s"])),
            estimate(row, "recovery", 2),
            estimate(row, "closure"),
            estimate(row, "balancing_exact", 1, share=True),
            *(Cell(count(row[name])) for name in counts),
        ]

    return by_model(style.in_order(frame, "s"), headings, cells)


def predictor(frame: pl.DataFrame, resamples: int) -> PageTable:
    """AUC of each statistic, its distance to dropped mass, and the rank correlations."""
    headings = [
        "s", "statistic", "AUC", "behind dropped mass", "p", "ρ with the gap", "ρ(Φ, ES)", "label 1", "rows", "docs",
    ]  # fmt: skip

    def cells(row: Record) -> list[Cell]:
        rival = row["statistic"] != "dropped_mass"
        p = row["p_value"]
        return [
            Cell(str(row["s"])),
            Cell(STATISTICS.get(str(row["statistic"]), str(row["statistic"])), text=True),
            estimate(row, "auc"),
            estimate(row, "auc_lead") if rival else Cell(NONE),
            Cell(format_p(float(str(p)), resamples) if p is not None else NONE),
            estimate(row, "spearman_gap", 2),
            estimate(row, "spearman_phi", 2) if not rival else Cell(""),
            Cell(count(row["n_positive"])),
            Cell(count(row["n_rows"])),
            Cell(count(row["n_documents"])),
        ]

    rank = pl.col("statistic").replace_strict({name: n for n, name in enumerate(STATISTICS)}, default=9)
    ordered = style.in_order(frame.sort("s", rank, maintain_order=True))
    return by_model(ordered, headings, cells)


def penalty(frame: pl.DataFrame) -> PageTable:
    """pi-hat of each estimate, and how often it is below 1, which no true pi can be."""
    headings = ["s", "free error by", "π̂, median", "π̂, 99th pct", "π̂ below 1", "rows", "docs", "EF = 0"]

    def cells(row: Record) -> list[Cell]:
        return [
            Cell(str(row["s"])),
            Cell(ESTIMATES.get(str(row["estimate"]), str(row["estimate"])), text=True),
            estimate(row, "penalty", 2),
            estimate(row, "penalty_p99", 1),
            estimate(row, "below_one", 1, share=True),
            Cell(count(row["n_rows"])),
            Cell(count(row["n_documents"])),
            Cell(count(row["n_zero_free"])),
        ]

    rank = pl.col("estimate").replace_strict({name: n for n, name in enumerate(ESTIMATES)}, default=9)
    return by_model(style.in_order(frame.sort("s", rank, maintain_order=True)), headings, cells)


def rules(frame: pl.DataFrame) -> PageTable:
    """Each rule's error beside top-mass's and the pool optimum's, and how often it is better or worse."""
    headings = ["s", "rule", "e / e_top", "e / ES_pool", "kept mass", "better", "worse", "rows", "docs"]

    def cells(row: Record) -> list[Cell]:
        rule = str(row["rule"])
        return [
            Cell(str(row["s"])),
            Cell("top-mass" if rule == "top_mass" else NAMES.get(rule, rule), text=True),
            estimate(row, "ratio", 2),
            estimate(row, "ratio_to_optimum", 2),
            estimate(row, "kept_mass", 2),
            estimate(row, "better", 0, share=True),
            estimate(row, "worse", 0, share=True),
            Cell(count(row["n_rows"])),
            Cell(count(row["n_documents"])),
        ]

    shown = frame.filter(~pl.col("rule").is_in(SUPPORTS))
    order = ["top_mass", *NAMES]
    rank = pl.col("rule").replace_strict({name: n for n, name in enumerate(order)}, default=len(order))
    return by_model(style.in_order(shown.sort("s", rank, "rule", maintain_order=True)), headings, cells)


def certified(frame: pl.DataFrame) -> PageTable:
    """The ceiling from both sides: pool, floor of a half, no floor; and what the floor changes."""
    headings = [
        "s", "pool", "floor ½", "at most", "no floor", "at most", "keeps < ½", "keeps < ⅒", "label changed", "rows",
        "docs",
    ]  # fmt: skip

    def cells(row: Record) -> list[Cell]:
        pool, changed = estimate(row, "pool"), estimate(row, "changed", 1, share=True)
        undecided = f"{count(row['n_changed'])} + {count(row['n_change_undecided'])} rows"
        return [
            Cell(str(row["s"])),
            Cell(pool.main, f"{pool.below} all: {number(row['pool_all'])}".lstrip()),
            *(estimate(row, name) for name in ("half", "half_cap", "full", "full_cap")),
            *(estimate(row, name, 1, share=True) for name in ("below_half", "below_tenth")),
            Cell(changed.main, f"{undecided} {changed.below}".rstrip()),
            Cell(count(row["n_rows"]), f"of {count(row['n_of'])}"),
            Cell(count(row["n_documents"])),
        ]

    return by_model(style.in_order(frame, "s"), headings, cells)


def search(frame: pl.DataFrame) -> PageTable:
    """What was proved at which floor, decided and improved, and how long it took."""
    headings = [
        "s", "proved ½", "proved ⅒", "proved", "label yes", "no", "undecided", "improved", "improvement", "seconds",
        "clock", "e_top = 0", "rows",
    ]  # fmt: skip

    def cells(row: Record) -> list[Cell]:
        largest = row["improvement_largest"]
        return [
            Cell(str(row["s"])),
            *(estimate(row, name, 1, share=True) for name in ("proved_half", "proved_tenth", "proved")),
            *(Cell(count(row[f"n_label_{answer}"])) for answer in ("yes", "no", "undecided")),
            Cell(count(row["n_improved"]), percent(row["improved"], 1)),
            Cell(percent(row["improvement"], 1), "" if largest is None else f"to {percent(largest, 1)}"),
            Cell(number(row["seconds"], 3), f"to {number(row['seconds_largest'], 2)}"),
            Cell(count(row["n_time_limit"])),
            Cell(count(row["n_zero_top"])),
            Cell(count(row["n_rows"])),
        ]

    return by_model(style.in_order(frame, "s"), headings, cells)


def mass_floors(frame: pl.DataFrame) -> PageTable:
    """What the best subset gains at each mass floor, and how often it is proved."""
    headings = ["s", "ρ", "gain", "at most", "proved", "smallest", "rows", "docs"]

    def cells(row: Record) -> list[Cell]:
        return [
            Cell(str(row["s"])),
            Cell(f"{row['rho']:g}"),
            estimate(row, "closable"),
            estimate(row, "cap"),
            estimate(row, "proved", 1, share=True),
            *(Cell(count(row[name])) for name in ("n_smallest", "n_rows", "n_documents")),
        ]

    return by_model(style.in_order(frame, "s", "rho"), headings, cells)


def left_open(frame: pl.DataFrame) -> PageTable:
    """Certified pairs whose optimum is not proved: their brackets, and from which mass floor on it is."""
    headings = ["s", "row", "keys", "dropped", "bracket", "kept", "proved from", "label", "stopped"]

    def cells(row: Record) -> list[Cell]:
        return [
            Cell(str(row["s"])),
            Cell(str(row["row_id"]).removeprefix(f"{row['model']}:")),
            Cell(count(row["n_keys"])),
            Cell(number(row["dropped_mass"], 2)),
            Cell(f"{number(row['lower'])} to {number(row['error'])}"),
            Cell(number(row["kept"])),
            Cell(number(row["smallest"], 2)),
            Cell(str(row["label"])),
            Cell("clock" if row["stopped_by"] == "time_limit" else "nodes"),
        ]

    return by_model(frame, headings, cells)


def by_model(frame: pl.DataFrame, headings: list[str], cells: Callable[[Record], list[Cell]]) -> PageTable:
    """A row per record, the model named once beside all its rows, which form a group."""
    rows: list[list[Cell]] = []
    groups = []
    for family, model in style.models(frame):
        own = frame.filter(pl.col("model") == model)
        groups.append(len(rows))
        for place, record in enumerate(own.iter_rows(named=True)):
            named = [Cell(model, "" if family == model else family, own.height, text=True)] if place == 0 else []
            rows.append([*named, *cells(record)])
    return PageTable(["model", *headings], rows, groups)
