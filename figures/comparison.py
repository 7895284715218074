"""Ours beside published: the same quantity, what was measured there, and what differs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from data.published import Published, load
from data.schema import ROW_FACTS, ROWS
from data.store import Store, footer, read_all
from figures import style
from figures.measured import EMBEDDED, QUANTISED
from figures.page_tables import NONE, Cell, PageTable, estimate, number, percent, span
from figures.published_values import nearest

ABOUT = 0.1  # share of the published value within which ours counts as about the same


@dataclass(frozen=True)
class Quantity:
    """A number that both sides give: its published key, and the table, column and rows where ours stands."""

    name: str
    key: str
    table: str
    column: str
    digits: int = 3
    share: bool = False
    only: tuple[str, str] | None = None  # (column, value) that picks our rows
    origin: float = 0.0  # from where the verdict measures both sides


QUANTITIES = (
    Quantity("closable fraction ĉ, median", "closable", "ceiling", "closable"),
    Quantity("cap of that median", "cap", "ceiling", "cap"),
    Quantity("rows that gain at least 10%", "share", "ceiling", "share", 1, True),
    Quantity("κ̂, median", "kappa", "ceiling", "kappa", origin=1.0),
    Quantity("κ̂, 99th percentile", "kappa_p99", "ceiling", "kappa_p99", 2, origin=1.0),
    Quantity("balancing recovery, median", "recovery", "ceiling", "recovery", 2),
    Quantity("balancing closure, median", "closure", "ceiling", "closure"),
    Quantity("balancing reaches the pool optimum", "balancing_exact", "ceiling", "balancing_exact", 1, True),
    Quantity("AUC of dropped mass", "auc", "predictor", "auc", 2, only=("statistic", "dropped_mass")),
    Quantity("ρ(Φ, ES_pool)", "spearman_phi", "predictor", "spearman_phi", 2, only=("statistic", "dropped_mass")),
    Quantity("dropped mass, median", "dropped_mass", "facts", "dropped_mass", 2),
    Quantity("geometric over top-mass", "geo_ratio", "rules", "ratio", 2, only=("rule", "geometric")),
    Quantity("leverage over top-mass", "leverage_ratio", "rules", "ratio", 1, only=("rule", "leverage")),
    Quantity("π̂, median (fully corrective)", "penalty", "penalty", "penalty", 2, only=("estimate", "fully_corrective")),
    Quantity("π̂, 99th percentile", "penalty_p99", "penalty", "penalty_p99", 2, only=("estimate", "fully_corrective")),
)


@dataclass(frozen=True)
class Comparison:
    """The table and the sentence above it."""

    table: PageTable
    note: str


NOTE = (
    "Published values are those of the paper (P1, arXiv 2608.25230), not ours; where it gives several, the family's own"
    " model comes first, then the pooled one, then its reference model. Verdict: about the same if the published value"
    f" lies inside our interval or differs from ours by at most {ABOUT:.0%} of itself; else ours is higher or lower,"
    " with ours divided by theirs. κ̂ counts by its distance from 1. Of a published range, the end nearest to ours"
    " counts. It measured larger models, other text: sizes and trends can be compared, digits cannot."
)


def compare(store: Store, tables: Mapping[str, pl.DataFrame]) -> Comparison:
    """A row per quantity and budget that both sides give; ours is the first model, the others are a range.

    Rows of a user's own are never among the others. Raises BadInput if a stored file is not readable.
    """
    ceiling = style.in_order(tables["ceiling"], "s")
    family, model = style.models(ceiling)[0]
    length, n_rows = _length(store, model), int(ceiling["n_rows"][0])
    found = {**tables, "facts": _facts(store)}
    beside = ceiling.filter((pl.col("model") != model) & (pl.col("family") != style.OWN))["model"].unique()
    rows: list[list[Cell]] = []
    groups = []
    for quantity in QUANTITIES:
        ours = found[quantity.table]
        if quantity.only is not None:
            ours = ours.filter(pl.col(quantity.only[0]) == quantity.only[1])
        part = []
        for record in ours.filter(pl.col("model") == model).sort("s").iter_rows(named=True):
            s = int(record["s"])
            published = nearest(quantity.key, s, family)
            if published is not None:
                others = ours.filter(pl.col("model").is_in(beside.implode()) & (pl.col("s") == s))
                part.append((s, record, others, published))
        if not part:
            continue
        groups.append(len(rows))
        there = [published for *_, published in part]
        one_place = len({(one.model, one.place) for one in there}) == 1
        differs = Cell(
            _differs(there[0], length, n_rows, family == style.OWN),
            f"There: {there[0].condition}",
            len(part),
            text=True,
        )
        for place, (s, record, others, published) in enumerate(part):
            first = place == 0
            elsewhere = Cell(span(others[quantity.column].to_list(), quantity.digits, quantity.share))
            where = Cell(published.model, published.place, len(part) if one_place else 1, text=True)
            rows.append(
                [
                    *([Cell(quantity.name, rows=len(part), text=True)] if first else []),
                    Cell(str(s)),
                    _ours(record, quantity),
                    *([] if beside.is_empty() else [elsewhere]),
                    Cell(_theirs(published, quantity)),
                    _verdict(record, quantity, published),
                    *([where] if first or not one_place else []),
                    *([differs] if first else []),
                ]
            )
    more = [] if beside.is_empty() else ["our other models"]
    headings = ["quantity", "s", model, *more, "published", "verdict", "published for", "what differs"]
    return Comparison(PageTable(headings, rows, groups), f"{NOTE} {_reasons(family, model, length)}")


def _ours(record: Mapping[str, Any], quantity: Quantity) -> Cell:
    """Our number, with its interval where the table has one."""
    if f"{quantity.column}_low" in record:
        return estimate(record, quantity.column, quantity.digits, quantity.share)
    return Cell(_written(record[quantity.column], quantity))


def _verdict(record: Mapping[str, Any], quantity: Quantity, published: Published) -> Cell:
    """Whether ours is about the same as the published value, higher or lower: the rule that NOTE states."""
    ours = record[quantity.column]
    ends = [end for end in (published.value, published.low, published.high) if end is not None]
    if ours is None or math.isnan(ours):
        return Cell(NONE)
    least, most = min(ends), max(ends)
    theirs = min(max(ours, least), most) if published.value is None else published.value
    low, high = record.get(f"{quantity.column}_low"), record.get(f"{quantity.column}_high")
    overlaps = low is not None and high is not None and low <= most and high >= least
    size, there = ours - quantity.origin, theirs - quantity.origin
    if overlaps or abs(size - there) <= ABOUT * abs(there):
        return Cell("about the same")
    times = f"{number(size / there, 2)} times" if there else ""
    return Cell("ours higher" if ours > theirs else "ours lower", times)


def _reasons(family: str, model: str, length: int | None) -> str:
    """Why the two sides may differ, for the model at hand, in two sentences."""
    small = model.startswith(EMBEDDED) or QUANTISED in model
    parts = ["rows of another origin" if family == style.OWN else "a smaller model" if small else "another model"]
    parts += ["4-bit weights"] if QUANTISED in model else []
    parts += ["other text"]
    theirs = max(one.tokens or 0 for one in load())
    parts += ["shorter documents"] if length is not None and length < theirs else []
    return (
        f"Likely reasons for what differs, none of them tested here: {', '.join(parts[:-1])} and {parts[-1]}. For π the"
        " paper does not state its variant of Frank–Wolfe, and a weaker search for the free error makes π̂ smaller."
    )


def _theirs(published: Published, quantity: Quantity) -> str:
    """The published value, or its range."""
    if published.value is not None:
        return _written(published.value, quantity)
    return " to ".join(_written(end, quantity) for end in (published.low, published.high))


def _written(value: object, quantity: Quantity) -> str:
    return percent(value, quantity.digits) if quantity.share else number(value, quantity.digits)


def _differs(published: Published, length: int | None, n_rows: int, own_rows: bool) -> str:
    """What is not the same on the two sides: the model (named beside it), tokens, text and rows, as far as stated."""
    parts = ["the model"]
    if length is not None and published.tokens is not None:
        parts.append(f"{length:,} tokens a document, not {published.tokens:,}")
    if published.text:
        parts.append(f"{'rows of your own' if own_rows else 'our text'}, not {published.text}")
    parts.append(f"{n_rows:,} rows, {f'not {published.rows}' if published.rows else 'theirs not stated'}")
    return "; ".join(parts)


def _length(store: Store, model: str) -> int | None:
    """Tokens a document of the model, as its first rows file notes it."""
    files = store.row_files(model)
    parameters = footer(ROWS, files[0])["parameters"] if files else None
    length = parameters.get("length") if isinstance(parameters, dict) else None
    return length if isinstance(length, int) else None


def _facts(store: Store) -> pl.DataFrame:
    """Median dropped mass per model and budget; empty if no facts are stored."""
    names = ["model", "s", "dropped_mass"]
    files = store.fact_files()
    if not files:
        return pl.DataFrame(schema={"model": pl.String, "s": pl.Int32, "dropped_mass": pl.Float64})
    return read_all(ROW_FACTS, files, names).group_by("model", "s").agg(pl.col("dropped_mass").median())
