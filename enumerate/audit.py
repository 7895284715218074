"""What the certified rows of a manifest say, per budget and pooled, beside the published solver audit (P1, B.4)."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl
from rich.table import Table

from data import BadInput, Store, published
from data.schema import ROW_FACTS, SUBSETS
from data.store import read
from enumerate.certify import FLOOR, FULL, LABEL_RATIO, Settings, path_of, wanted_of
from enumerate.documents import Document
from enumerate.work import STANDARD
from solvers.branch_and_bound import DECISION_SLACK
from solvers.problem import Reals

IMPROVED = 0.01  # an optimum is improved if its error is below the pool optimum's by more than this share (P1)


@dataclass(frozen=True, eq=False)
class Audit:
    """Pairs of a row and a budget, m of them, each array (m,); errors in the unit of the values.

    top, pool: errors of the top-mass set and of the pool optimum. error, lower: of the best subset found over the
    whole row, and the bound that was proved. proved: whether it is the optimum. smallest: the least mass floor at
    which the optimum is proved, 0 for none, NaN if at no floor either. seconds: of the search. clock: whether it may
    have stopped any of a pair's searches. rounding: errors up to it are zero.
    """

    s: Reals
    top: Reals
    pool: Reals
    rounding: Reals
    error: Reals
    lower: Reals
    proved: npt.NDArray[np.bool_]
    smallest: Reals
    seconds: Reals
    clock: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.s)

    def at(self, s: int) -> "Audit":
        """The pairs of one budget."""
        here = self.s == s
        return Audit(**{name: values[here] for name, values in vars(self).items()})

    @property
    def improvement(self) -> Reals:
        """1 - error / ES_pool of the pairs where that exceeds IMPROVED, (k,)."""
        gained = np.zeros(len(self))
        np.divide(self.pool - self.error, self.pool, out=gained, where=self.pool > self.rounding)
        return np.asarray(gained[gained > IMPROVED])

    @property
    def labels(self) -> tuple[int, int, int]:
        """Pairs with a subset of at most 0.9 e_s(top-mass), pairs proved to have none, and the others.

        A top-mass error that is zero within rounding counts as no.
        """
        zero = self.top <= self.rounding
        threshold = LABEL_RATIO * self.top
        yes = (self.error <= threshold) & ~zero
        no = ~yes & (zero | (self.lower >= threshold * (1 - DECISION_SLACK)))
        return int(yes.sum()), int(no.sum()), int((~yes & ~no).sum())

    @property
    def brackets(self) -> Reals:
        """lower / error of the pairs that are not proved, (k,)."""
        return np.asarray(self.lower[~self.proved] / self.error[~self.proved])


def gather(store: Store, documents: list[Document], manifest: pl.DataFrame) -> Audit:
    """The manifest's pairs as the files hold them; raises BadInput if a file lacks one."""
    frames = []
    for document, by_budget in wanted_of(documents, manifest).items():
        for s, row_ids in by_budget.items():
            wanted = pl.DataFrame({"row_id": sorted(row_ids)})
            graded = read(SUBSETS, store.subsets(document.model, s, STANDARD, document.doc_id))
            facts = read(ROW_FACTS, store.facts(document.model, s, document.doc_id)).select("row_id", "rounding")
            certified = read(SUBSETS, path_of(store, document, s))
            full = certified.filter(pl.col("rule") == FULL)
            floors = certified.filter(pl.col("rule").is_in([FULL, FLOOR])).group_by("row_id")
            proved = pl.col("mass_floor").filter(pl.col("status") == "optimal")
            over = floors.agg(
                proved.min().alias("smallest"), (pl.col("stopped_by") == "time_limit").any().alias("clock")
            )
            joined = (
                wanted.join(facts, on="row_id")
                .join(_errors(graded, "top_mass", "top"), on="row_id")
                .join(_errors(graded, "optimal_pool", "pool"), on="row_id")
                .join(full.select("row_id", "s", "error", "lower", "status", "seconds"), on="row_id")
                .join(over, on="row_id")
            )
            if joined.height != wanted.height:
                raise BadInput(f"{path_of(store, document, s)}: lacks rows of the manifest: run the command again")
            frames.append(joined)
    found = pl.concat(frames)
    arrays = {
        name: found[name].to_numpy() for name in ("top", "pool", "rounding", "error", "lower", "seconds", "clock")
    }
    smallest = found["smallest"].fill_null(float("nan")).to_numpy()
    return Audit(s=found["s"].to_numpy(), proved=(found["status"] == "optimal").to_numpy(), smallest=smallest, **arrays)


def table(audit: Audit) -> Table:
    """The audit per budget and pooled, with the published numbers where there are any."""
    budgets = sorted({int(s) for s in audit.s})
    shown = Table(title="Search over every key of the row")
    shown.add_column("")
    for s in budgets:
        shown.add_column(f"s = {s}", justify="right")
    shown.add_column("pooled", justify="right")
    shown.add_column("published", justify="right")
    parts = [*(audit.at(s) for s in budgets), audit]
    for label, cell, there in _LINES:
        shown.add_row(label, *(cell(part) for part in parts), there())
        if label.startswith("improved beyond"):
            shown.add_row("  as published", *(_published("solver_improved", s=s) for s in budgets))
    return shown


def difference(models: Sequence[str], settings: Settings) -> str:
    """What is not the same as in the published audit, in one line."""
    there = published.find("solver_manifest")
    theirs = "" if there is None else f"Published: {there.model} on {there.text}, {there.condition}. "
    return (
        f"{theirs}Here: {', '.join(models)}, branch and bound, at most {settings.node_limit} nodes a pair, half as many"
        f" again for the bound of an open one, and {settings.time_limit:g} s by the clock on one core, a third of it"
        " again for an open label (more, where a pair was searched so before)."
    )


def _errors(graded: pl.DataFrame, rule: str, name: str) -> pl.DataFrame:
    return graded.filter(pl.col("rule") == rule).select("row_id", pl.col("error").alias(name))


def _smallest(part: Audit) -> str:
    """How many pairs have which floor as the smallest one proved, from no floor up."""
    counts = Counter(part.smallest[~np.isnan(part.smallest)].tolist())
    lines = [f"{rho:g}: {count}" for rho, count in sorted(counts.items())]
    unproved = int(np.isnan(part.smallest).sum())
    return "\n".join([*lines, f"none: {unproved}"] if unproved else lines)


def _share(count: int, of: int) -> str:
    return f"{count} ({count / of:.1%})" if of else "0"


def _at(statistic: Callable[[Reals], np.floating[npt.NBitBase]], values: Reals, form: str) -> str:
    return format(float(statistic(values)), form) if len(values) else "-"


def _published(key: str, form: str = "g", s: int | None = None) -> str:
    found = published.find(key, s)
    return "" if found is None or found.value is None else format(found.value, form)


def _nothing() -> str:
    return ""


# What is printed: its name, of some pairs, and the published number of all.
_LINES: tuple[tuple[str, Callable[[Audit], str], Callable[[], str]], ...] = (
    ("pairs", lambda part: str(len(part)), lambda: f"{_published('solver_solved')} of {_published('solver_manifest')}"),
    (
        "improved beyond the pool by > 1%",
        lambda part: _share(len(part.improvement), len(part)),
        lambda: _published("solver_improved_share", ".1%"),
    ),
    (
        "proved optimal",
        lambda part: _share(int(part.proved.sum()), len(part)),
        lambda: _published("solver_proved", ".0%"),
    ),
    ("label yes / no / undecided", lambda part: " / ".join(map(str, part.labels)), _nothing),
    ("smallest proved floor: pairs", _smallest, _nothing),
    ("unproved: median lower / error", lambda part: _at(np.median, part.brackets, ".3f"), _nothing),
    (
        "improved: median improvement",
        lambda part: _at(np.median, part.improvement, ".1%"),
        lambda: _published("solver_median_improvement", ".1%"),
    ),
    (
        "improved: largest",
        lambda part: _at(np.max, part.improvement, ".1%"),
        lambda: _published("solver_largest_improvement", ".0%"),
    ),
    ("seconds: median", lambda part: _at(np.median, part.seconds, ".3f"), _nothing),
    ("seconds: largest", lambda part: _at(np.max, part.seconds, ".2f"), _nothing),
    ("touched by the clock", lambda part: str(int(part.clock.sum())), _nothing),
)
