"""What the analysis found, in one table for a person at a terminal."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import polars as pl
from rich import box
from rich.table import Table as Grid

from analysis.bootstrap import LEVEL, MIN_DOCUMENTS, format_p
from analysis.predictor import DROPPED_MASS
from analysis.rules import users_rules

HEADINGS = ("model", "s", "rows", "docs", "c-hat", "share", "recovery", "pi", "AUC", "lead", "p", "rho(Phi)")
TITLE = "Forced weights: what a better subset gains"
OWN_HEADINGS = ("rule", "model", "s", "rows", "docs", "e / e_top", "e / ES_pool", "kept mass", "better", "worse")
OWN_TITLE = "Your rules beside top-mass"
OWN_CAPTION = "Medians; better, worse: share of rows whose error is below, above that of top-mass."
CERTIFIED_HEADINGS = (
    "model", "s", "rows", "docs", "pool", "floor .5", "at most", "no floor", "at most", "proved .5", "proved",
    "label y/n/?", "changed", "improved",
)  # fmt: skip
CERTIFIED_TITLE = "The search over every key of a row"
CERTIFIED_CAPTION = (
    "Medians of 1 - e_s / e_top: pool optimum; best subset known that keeps half the top mass; best known of all; each"
    " with what it can at most be. Proved: share of rows whose optimum is. Changed: rows that are labelled yes (a tenth"
    " to gain) but proved no at the floor .5, + those that may be. Improved: rows more than 1% below the pool optimum."
)
CAPTION = (
    "Medians of c-hat, recovery and pi (least free error); share of rows with c-hat of at least 0.1;"
    " AUC of the dropped mass, its lead over the bound 2 D mbar, and the p of that lead;"
    " rho(Phi): Spearman with the pool optimum. 95% intervals in brackets, from ten documents on."
)


def in_short(fits: Mapping[str, pl.DataFrame], resamples: int) -> Grid:
    """A line per model and budget, from tables ceiling, penalty and predictor, with what intervals exist."""
    grid = Grid(title=TITLE, caption=CAPTION, box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    for heading in HEADINGS:
        grid.add_column(heading, justify="left" if heading == "model" else "right", overflow="fold")
    for row in fits["ceiling"].iter_rows(named=True):
        same = (pl.col("model") == row["model"]) & (pl.col("s") == row["s"])
        least = fits["penalty"].filter(same, pl.col("estimate") == "least").to_dicts()
        by_statistic = {found["statistic"]: found for found in fits["predictor"].filter(same).to_dicts()}
        mass, rival = by_statistic[DROPPED_MASS], by_statistic["diameter_bound"]
        grid.add_row(
            row["model"],
            str(row["s"]),
            str(row["n_rows"]),
            str(row["n_documents"]),
            _with_interval(row, "closable", ".3f"),
            _with_interval(row, "share", ".1%"),
            _number(row["recovery"], ".2f"),
            _number(least[0]["penalty"], ".2f") if least else "-",
            _with_interval(mass, "auc", ".2f"),
            _with_interval(rival, "auc_lead", "+.3f"),
            format_p(rival["p_value"], resamples),
            _with_interval(mass, "spearman_phi", ".2f"),
        )
    return grid


def own_rules(rules: pl.DataFrame) -> Grid | None:
    """A line per rule of the user's, model and budget, from table rules; None if there is no such rule."""
    own = rules.filter(pl.col("rule").is_in(users_rules(rules))).sort("rule", "model", "s")
    if own.is_empty():
        return None
    grid = Grid(title=OWN_TITLE, caption=OWN_CAPTION, box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    for heading in OWN_HEADINGS:
        grid.add_column(heading, justify="left" if heading in ("rule", "model") else "right", overflow="fold")
    for row in own.iter_rows(named=True):
        grid.add_row(
            row["rule"],
            row["model"],
            str(row["s"]),
            str(row["n_rows"]),
            str(row["n_documents"]),
            _with_interval(row, "ratio", ".3f"),
            _with_interval(row, "ratio_to_optimum", ".3f"),
            _with_interval(row, "kept_mass", ".2f"),
            _with_interval(row, "better", ".0%"),
            _with_interval(row, "worse", ".0%"),
        )
    return grid


def certified_in_short(certified: pl.DataFrame) -> Grid | None:
    """A line per model and budget, from table certified; None if nothing was certified."""
    if certified.is_empty():
        return None
    grid = Grid(
        title=CERTIFIED_TITLE,
        caption=CERTIFIED_CAPTION,
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
    )
    for heading in CERTIFIED_HEADINGS:
        grid.add_column(heading, justify="left" if heading == "model" else "right", overflow="fold")
    for row in certified.iter_rows(named=True):
        grid.add_row(
            row["model"],
            *(str(row[name]) for name in ("s", "n_rows", "n_documents")),
            *(_with_interval(row, name, ".3f") for name in ("pool", "half", "half_cap", "full", "full_cap")),
            *(_with_interval(row, name, ".0%") for name in ("proved_half", "proved")),
            "/".join(str(row[f"n_label_{answer}"]) for answer in ("yes", "no", "undecided")),
            f"{row['n_changed']} + {row['n_change_undecided']}",
            str(row["n_improved"]),
        )
    return grid


def about_outdated(paths: Iterable[Path]) -> list[str]:
    """A line per model, budget and rule that has subsets of rows that were replaced since."""
    counts: dict[tuple[str, str, str], int] = {}
    for path in paths:
        rule, budget, model = path.parent.name, path.parent.parent.name, path.parent.parent.parent.name
        counts[model, budget, rule] = counts.get((model, budget, rule), 0) + 1
    return [
        f"{model}, {budget}, {rule}: {count} documents left out, as their rows were replaced since: grade them again"
        for (model, budget, rule), count in sorted(counts.items())
    ]


def about_intervals(ceiling: pl.DataFrame) -> list[str]:
    """What the reader should know of the intervals: how often they cover, and which models have none."""
    measured = ceiling.filter(pl.col("coverage").is_not_null()).unique("n_documents").sort("n_documents")
    lines = [
        f"An interval from {documents} documents covers {share:.0%} of the time on normal data, not {LEVEL:.0%}."
        for documents, share in measured.select("n_documents", "coverage").iter_rows()
    ]
    few = ceiling.filter(pl.col("coverage").is_null())["model"].unique().sort().to_list()
    if few:
        lines.append(f"No intervals for {', '.join(few)}: fewer than {MIN_DOCUMENTS} documents.")
    return lines


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _with_interval(row: Mapping[str, float | None], name: str, form: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    number = _number(row[name], form)
    return number if low is None else f"{number}\n[{_number(low, form)}, {_number(high, form)}]"
