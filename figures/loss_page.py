"""The loss on the page: what was measured and how, every rule in one table, and ours beside published."""

import polars as pl

from analysis.bootstrap import MIN_DOCUMENTS, RESAMPLES
from data import published
from figures import style
from figures.loss import BALANCING, DENSE, FLAT, RANDOM, RULES, TOP_MASS, budgets
from figures.measured import EMBEDDED
from figures.page_tables import NONE, Cell, PageTable, Record, by_model, count, estimate, number, percent

STEM = "loss"
NAMES = {DENSE: "dense attention", TOP_MASS: "top-mass", **RULES}
CAPTION = (
    "What eviction costs the model",
    "Cross-entropy on held-out text when every head of every layer attends to s keys a row. Left: the loss under each"
    " rule less that under top-mass, so that left of the line is better; the grey stroke is dense attention. Right: the"
    " share of what top-mass costs over dense attention that the rule takes back. Lines: 95% intervals of differences"
    " paired by document. The published range is of other models, text and lengths.",
)
NOTE = (
    "In cells where a rule does not choose, top-mass does; a cell is a layer and query head. Recovered: share of what"
    " top-mass costs over dense attention. Captured: gain over top-mass, as a share of balancing's in all cells."
    " Proved: of the rows where the rule chose, those whose choice is proved the best of what was searched. Floor ½:"
    " the whole row's optimum must keep half of top-mass's mass, which the candidate set's need not, so neither is"
    " always the better. Seconds: a pass over a document, choices included."
)


def about(frame: pl.DataFrame) -> list[str]:
    """What was run, how the intervals are made, and what to keep in mind; frame as figures.loss.table() gives it."""
    documents = frame.group_by("model", maintain_order=True).agg(
        pl.col("n_documents").first(), pl.col("tokens").first(), pl.col("draws").max()
    )
    runs = [
        f"{model}: {count(n)} documents, {count(tokens)} predicted tokens each"
        + (f", {count(draws)} draws of random cells" if draws is not None else "")
        for model, n, tokens, draws in documents.iter_rows()
    ]
    fewest = min(documents["n_documents"].to_list())
    few = f" None is given below {MIN_DOCUMENTS} documents, and no finding in words." if fewest < MIN_DOCUMENTS else ""
    lines = [
        f"Each head's attention is replaced by the kept keys' weights, renormalised, over its own values"
        f" (s = {budgets(frame)}), in every row that sees more keys than that. {'; '.join(runs)}.",
        f"Intervals: cluster bootstrap over documents, {count(RESAMPLES)} resamples, percentile 95%, of the differences"
        f" document by document, draws of random cells averaged first.{few} Flat cells: median dropped mass at s = 8"
        " above 0.25, told on further documents, whose loss is not taken.",
    ]
    if any(str(name).startswith(EMBEDDED) for name in documents["model"].to_list()):
        lines.append("The embedded models are tiny: what they show is that the measurement works, and little else.")
    return lines


def rules(frame: pl.DataFrame) -> PageTable:
    """A row per model and rule."""
    headings = ["rule", "cells", "nats per token", "less top-mass", "recovered", "captured", "proved", "seconds"]

    def cells(row: Record) -> list[Cell]:
        rule, searched = str(row["rule"]), row["searched_rows"]
        own = rule in (BALANCING, FLAT, RANDOM)
        chose = NONE if rule in (DENSE, TOP_MASS) else f"{row['cells']} of {row['all_cells']}"
        proved = row["proved_rows"] if rule not in (DENSE, TOP_MASS) and not own else None
        share = float(str(proved)) / float(str(searched)) if proved is not None and searched else None
        return [
            Cell(NAMES.get(rule, rule), text=True),
            Cell(chose),
            Cell(number(row["nats"], 4)),
            Cell(NONE) if rule == TOP_MASS else estimate(row, "difference", 4),
            Cell(NONE) if rule in (DENSE, TOP_MASS) else estimate(row, "recovered", 0, share=True),
            Cell(NONE) if rule in (DENSE, TOP_MASS, BALANCING) else estimate(row, "captured", 0, share=True),
            Cell(percent(share, 1)),
            Cell(number(row["seconds"], 2)),
        ]

    return by_model(frame, headings, cells)


def beside_published(frame: pl.DataFrame) -> PageTable:
    """Ours beside what the paper says of the loss at s = 8; Qwen3 is told apart here as it is there."""
    frame = frame.filter(pl.col("s") == 8)
    rows: list[list[Cell]] = []
    groups: list[int] = []
    differs = "Ours: smaller models, shorter documents, other text"
    for key, name, rule, qwen3, model in (
        ("loss_saved", "loss, balancing in flat cells less top-mass", FLAT, False, "five of eight families"),
        ("loss_captured_flat", "captured by flat cells", FLAT, False, "five of eight families"),
        ("loss_captured_flat", "captured by flat cells", FLAT, True, "Qwen3, three scales"),
        ("loss_captured_random", "captured by random cells", RANDOM, True, "Qwen3-1.7B"),
    ):
        found = published.find(key, 8, model)
        if found is None:
            continue
        share = key != "loss_saved"
        ends = [found.value] if found.value is not None else [found.low, found.high]
        theirs = [percent(end) for end in ends] if share else [number(-end) for end in ends if end is not None]
        for row in frame.filter((pl.col("family") == "qwen3") == qwen3, pl.col("rule") == rule).iter_rows(named=True):
            if not rows or rows[-1][0].main != name:
                groups.append(len(rows))
            ours = estimate(row, "captured", 0, share=True) if share else estimate(row, "difference")
            rows.append(
                [
                    Cell(name, text=True),
                    Cell(str(row["model"]), text=True),
                    ours,
                    Cell(" to ".join(theirs)),
                    Cell(f"There ({found.place}): {model}; {found.condition}. {differs}", text=True),
                ]
            )
    return PageTable(["quantity", "of", "ours", "published", "what differs"], rows, groups)


def finding(frame: pl.DataFrame) -> list[str]:
    """A sentence on the first model, which is the real one wherever it was measured; none below ten documents."""
    first = style.of_first_model(frame)
    own = {str(row["rule"]): row for row in first.iter_rows(named=True)}
    if int(own[DENSE]["n_documents"]) < MIN_DOCUMENTS:
        return []
    told = [f"{NAMES[rule]} {number(own[rule]['difference'], 4)}{_ends(own[rule])}" for rule in RULES if rule in own]
    cost = number(-own[DENSE]["difference"], 4)
    others = f" Less top-mass: {'; '.join(told)}." if told else ""
    return [f"{first['model'][0]}: top-mass costs {cost} nats a token over dense attention.{others}"]


def _ends(row: Record) -> str:
    below = estimate(row, "difference", 4).below
    return f" {below}" if below else ""
