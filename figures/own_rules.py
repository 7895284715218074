"""A user's own rules on the page: a sentence each for its head, and a table of them beside ours."""

import polars as pl

from analysis.frame import BALANCING, OPTIMAL_POOL
from analysis.rules import users_rules
from figures import style
from figures.page_tables import Cell, PageTable, Record, by_model, count, estimate, number, span

NOTE = (
    "Medians over rows, each error divided by that of the same row; better, worse: share of rows whose error is below,"
    " above that of top-mass. A rule is free to keep keys outside the candidate set, so e / ES_pool can be below 1. The"
    " last two columns are e / e_top of two rules of ours, over all rows of the model, for comparison."
)


def sentences(rules: pl.DataFrame) -> list[str]:
    """One sentence per rule of the user's, on the first model on which it was graded, the other models in brief."""
    return [_sentence(rules, rule) for rule in users_rules(rules)]


def own_rules(rules: pl.DataFrame) -> PageTable | None:
    """A row per model, rule and budget, ours beside it; None if no rule of the user's was graded."""
    names = users_rules(rules)
    if not names:
        return None
    ours = {(r["model"], r["s"], r["rule"]): r["ratio"] for r in rules.iter_rows(named=True)}
    headings = [
        "rule", "s", "e / e_top", "e / ES_pool", "kept mass", "better", "worse", "rows", "balancing", "optimum",
    ]  # fmt: skip

    def cells(row: Record) -> list[Cell]:
        return [
            Cell(str(row["rule"]), text=True),
            Cell(str(row["s"])),
            estimate(row, "ratio"),
            estimate(row, "ratio_to_optimum"),
            estimate(row, "kept_mass", 2),
            estimate(row, "better", 0, share=True),
            estimate(row, "worse", 0, share=True),
            Cell(count(row["n_rows"]), f"{count(row['n_documents'])} docs"),
            *(Cell(number(ours.get((row["model"], row["s"], rule)))) for rule in (BALANCING, OPTIMAL_POOL)),
        ]

    return by_model(style.in_order(rules.filter(pl.col("rule").is_in(names)), "rule", "s"), headings, cells)


def not_graded(rules: pl.DataFrame) -> list[str]:
    """A line per rule of the user's that some model or budget lacks, saying which."""
    pairs = style.in_order(rules.select("family", "model", "s").unique(), "s")
    lines = []
    for rule in users_rules(rules):
        own = rules.filter(pl.col("rule") == rule)
        missing = pairs.join(own, on=["family", "model", "s"], how="anti", maintain_order="left")
        places = []
        for (model,), part in missing.group_by("model", maintain_order=True):
            whole = part.height == pairs.filter(pl.col("model") == model).height
            places.append(str(model) if whole else f"{model} at s = {', '.join(map(str, part['s']))}")
        if places:
            lines.append(f"{rule} was not graded on {'; '.join(places)}.")
    return lines


def _sentence(rules: pl.DataFrame, rule: str) -> str:
    known = style.in_order(rules.filter(pl.col("rule") == rule).drop_nulls("ratio"), "s")
    if known.is_empty():
        return f"Your rule {rule} has no error to compare: top-mass leaves none on the rows it was graded on."
    model = known["model"][0]
    own = known.filter(pl.col("model") == model)
    others = known.filter((pl.col("model") != model) & (pl.col("family") != style.OWN))
    users = known.filter((pl.col("model") != model) & (pl.col("family") == style.OWN))
    optimum = rules.filter(
        (pl.col("model") == model) & (pl.col("rule") == OPTIMAL_POOL) & pl.col("s").is_in(own["s"].to_list())
    )
    more = ""
    if not others.is_empty():
        n = others["model"].n_unique()
        more = f" On the {f'{n} other models' if n > 1 else 'other model'}: {span(others['ratio'].to_list())} times."
    for (name,), part in users.group_by("model", maintain_order=True):
        more += f" On your rows {name}: {span(part['ratio'].to_list())} times."
    return (
        f"Your rule {rule} leaves {span(own['ratio'].to_list())} times top-mass's error on {model} (median,"
        f" {_budgets(own)}): a smaller error than top-mass on {_shares(own, 'better')} of the rows, a larger one on"
        f" {_shares(own, 'worse')}. The best subset that the candidate set holds leaves"
        f" {span(optimum['ratio'].to_list())} times.{more}"
    )


def _budgets(records: pl.DataFrame) -> str:
    """The budgets of these records as a reader sees them: "s = 8", "s = 4 to 32"."""
    found = sorted({int(s) for s in records["s"]})
    return f"s = {found[0]}" if len(found) == 1 else f"s = {found[0]} to {found[-1]}"


def _shares(records: pl.DataFrame, name: str) -> str:
    return span(records[name].to_list(), digits=0, share=True)
