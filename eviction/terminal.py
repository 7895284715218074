"""What audit and loss found of one model, each in one table for a person at a terminal."""

import numpy as np
import numpy.typing as npt
import polars as pl
from rich import box
from rich.console import Group
from rich.table import Table as Grid

from eviction.loss import BALANCING, TOP_MASS

MIN_DOCUMENTS = 10  # below this many no interval is given, here as on the page
RESAMPLES = 1000  # of the bootstrap over documents, likewise
LEVEL = 0.95

AUDIT_NOTE = (
    "Unseen, seen: needles hit with the question unseen or seen by what was evicted on. All else is with the question"
    " unseen. Held, peak: shares of the full cache's bytes, after evicting and at most. Entries: in memory a KV head,"
    " mean while answering. Cost: seconds of scoring, allocating and selecting over a dense prefill's. Within: whether"
    " the bytes after evicting are within the budget; full: they are the full cache's."
)
LOSS_NOTE = (
    "Less top-mass: cross-entropy in nats a token less that under top-mass on the same documents, negative is better;"
    " in brackets the 95% percentile interval of the cluster bootstrap over documents. Captured: gain over top-mass as"
    " a share of balancing's in all cells."
)

Reals = npt.NDArray[np.float64]


def audited(frame: pl.DataFrame) -> Group:
    """Table audit of one model, a line per budget and method."""
    first = frame.row(0, named=True)
    budgets = frame["budget"].drop_nulls().unique().sort().to_list()
    named = " and ".join(map(str, budgets))
    title = (
        f"{first['model']}: {first['prompts']} prompts of {first['tokens']} tokens, budget {named} entries a KV head"
    )
    several = ["budget"] if len(budgets) > 1 else []
    grid = _grid("method", *several, "unseen", "seen", "held", "peak", "entries", "cost", "within")
    for budget in (None, *budgets):
        own = frame.filter(pl.col("budget").eq_missing(budget))
        seen = {row["method"]: row for row in own.filter("question_seen").iter_rows(named=True)}
        for row in own.filter(~pl.col("question_seen")).iter_rows(named=True):
            within = "yes" if row["enforced"] else "full" if row["holds_full_cache"] else "no"
            other = seen.get(row["method"])
            grid.add_row(
                row["method"],
                *("-" if budget is None else str(budget) for _ in several),
                *("-" if one is None else f"{one['hits']} of {one['prompts']}" for one in (row, other)),
                f"{row['physical_bytes'] / row['full_bytes']:.1%}",
                f"{row['peak_bytes'] / row['full_bytes']:.0%}",
                f"{row['mean_cache_len']:.1f}",
                "-" if budget is None else f"{row['compression_seconds'] / row['dense_prefill_seconds']:.1%}",
                "-" if budget is None else within,
            )
    return Group(title, grid)


def about_audit(frame: pl.DataFrame) -> list[str]:
    """A line per budget at which nothing was evicted while the question was unseen, though a whole prompt is longer."""
    idle = frame.filter(
        ~pl.col("question_seen"), pl.col("nominal_bytes") >= pl.col("full_bytes"), pl.col("budget") < pl.col("tokens")
    )
    return [
        f"{frame['model'][0]}: at budget {budget} nothing is evicted with the question unseen: the context fits."
        for budget in idle["budget"].unique().sort().to_list()
    ]


def lost(frame: pl.DataFrame) -> Group:
    """Table loss of one model, a line per rule; intervals as the page has them (analysis.bootstrap)."""
    first, documents = frame.row(0, named=True), frame["doc_id"].n_unique()
    few = "" if documents >= MIN_DOCUMENTS else f" (no interval below {MIN_DOCUMENTS})"
    plural = "" if documents == 1 else "s"
    title = (
        f"{first['model']}: {documents} document{plural}{few} of {first['tokens']} predicted tokens, s = {first['s']}"
    )
    grid = _grid("rule", "nats a token", "less top-mass", "captured")
    means = {
        rule: frame.filter(rule=rule).group_by("doc_id").agg(pl.col("nats_per_token").mean()).sort("doc_id")
        for rule in frame["rule"].unique(maintain_order=True).to_list()
    }
    nats: dict[str, Reals] = {rule: own["nats_per_token"].to_numpy() for rule, own in means.items()}
    whole = (nats[TOP_MASS] - nats[BALANCING]).sum() if BALANCING in nats else 0.0
    for rule, own in nats.items():
        difference = own - nats[TOP_MASS]
        told = f"{difference.mean():+.4f}{_interval(difference)}"
        share = f"{-difference.sum() / whole:.0%}" if whole > 0 and rule not in ("dense", TOP_MASS) else "-"
        grid.add_row(rule, f"{own.mean():.4f}", "-" if rule == TOP_MASS else told, share)
    return Group(title, grid)


def _interval(differences: Reals) -> str:
    """The percentile interval of the mean of (D,) under resampling of documents; nothing where there are too few."""
    count = len(differences)
    if count < MIN_DOCUMENTS:
        return ""
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    low, high = np.quantile(drawn @ differences / count, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return f" [{low:+.4f}, {high:+.4f}]"


def _grid(*headings: str) -> Grid:
    """A table whose first column is text and folds; all others are numbers."""
    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    for place, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if place else "left", overflow="fold", no_wrap=place > 0)
    return grid
