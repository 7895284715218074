"""Ours beside published: the same quantity, what was measured there, and what differs."""

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from data.schema import ROW_FACTS, ROWS
from data.store import Store, footer, read_all
from figures import style
from figures.page_tables import NONE, Cell, PageTable, estimate, number, percent, span
from figures.published_values import Published, lookup


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


QUANTITIES = (
    Quantity("closable fraction ĉ, median", "closable", "ceiling", "closable"),
    Quantity("cap of that median", "cap", "ceiling", "cap"),
    Quantity("rows that gain at least 10%", "share", "ceiling", "share", 1, True),
    Quantity("κ̂, median", "kappa", "ceiling", "kappa"),
    Quantity("κ̂, 99th percentile", "kappa_p99", "ceiling", "kappa_p99", 2),
    Quantity("balancing closure, median", "closure", "ceiling", "closure"),
    Quantity("balancing reaches the pool optimum", "balancing_exact", "ceiling", "balancing_exact", 1, True),
    Quantity("AUC of dropped mass", "auc", "predictor", "auc", 2, only=("statistic", "dropped_mass")),
    Quantity("ρ(Φ, ES_pool)", "spearman_phi", "predictor", "spearman_phi", 2, only=("statistic", "dropped_mass")),
    Quantity("dropped mass, median", "dropped_mass", "facts", "dropped_mass", 2),
    Quantity("geometric over top-mass", "geo_ratio", "rules", "ratio", 2, only=("rule", "geometric")),
    Quantity("leverage over top-mass", "leverage_ratio", "rules", "ratio", 1, only=("rule", "leverage")),
    Quantity("π̂, median (fully corrective)", "penalty", "penalty", "penalty", 2, only=("estimate", "fully_corrective")),
    Quantity(
        "π̂, 99th percentile", "penalty_p99", "penalty", "penalty_p99", 2, only=("estimate", "fully_corrective")
    ),
)


@dataclass(frozen=True)
class Comparison:
    """The table and the sentence above it."""

    table: PageTable
    note: str


def compare(store: Store, tables: Mapping[str, pl.DataFrame]) -> Comparison:
    """A row per quantity and budget that both sides give; ours is the first model, the others are a range.

    Raises BadInput if a stored file is not readable.
    """
    ceiling = style.in_order(tables["ceiling"], "s")
    model = str(ceiling["model"][0])
    length, n_rows = _length(store, model), int(ceiling["n_rows"][0])
    found = {**tables, "facts": _facts(store)}
    rows: list[list[Cell]] = []
    groups = []
    for quantity in QUANTITIES:
        ours = found[quantity.table]
        if quantity.only is not None:
            ours = ours.filter(pl.col(quantity.only[0]) == quantity.only[1])
        part = []
        for record in ours.filter(pl.col("model") == model).sort("s").iter_rows(named=True):
            s = int(record["s"])
            published = lookup(quantity.key, s)
            if published is not None:
                others = ours.filter((pl.col("model") != model) & (pl.col("s") == s))
                part.append((s, record, others, published))
        if not part:
            continue
        groups.append(len(rows))
        one_place = len({published.where for *_, published in part}) == 1
        for place, (s, record, others, published) in enumerate(part):
            write = percent if quantity.share else number
            mine = (
                estimate(record, quantity.column, quantity.digits, quantity.share)
                if f"{quantity.column}_low" in record
                else Cell(write(record[quantity.column], quantity.digits))
            )
            named = [Cell(quantity.name, rows=len(part), text=True)] if place == 0 else []
            where = [Cell(published.where, rows=len(part) if one_place else 1, text=True)]
            last = [Cell(_differs(part[0][3], model, length, n_rows), rows=len(part), text=True)] if place == 0 else []
            rows.append(
                [
                    *named,
                    Cell(str(s)),
                    mine,
                    Cell(span(others[quantity.column].to_list(), quantity.digits, quantity.share)),
                    Cell(write(published.value, quantity.digits)),
                    *(where if place == 0 or not one_place else []),
                    *last,
                ]
            )
    headings = ["quantity", "s", model, "our other models", "published", "published for, in", "what differs"]
    note = (
        "Published values are the paper’s (arXiv 2608.25230), not ours; where a value is given for several models we"
        " show the nearest one. They were measured on larger models, so look at sizes and trends."
    )
    return Comparison(PageTable(headings, rows, groups), note)


def _differs(published: Published, model: str, length: int | None, n_rows: int) -> str:
    """What is not the same on the two sides, in a few words."""
    tokens = f"{length:,} tokens a document, not {published.tokens}" if length else f"{published.tokens} tokens there"
    return f"model {model}, not {published.model}; {tokens}; our text, not {published.text}; {n_rows:,} rows a budget, not {published.rows}"


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
