"""One model at one budget as the analysis sees it: facts and subsets joined, and what follows row by row."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from analysis.bootstrap import Counts, Flags, Reals, draw
from data import store
from data.errors import BadInput
from data.schema import ROW_FACTS, SUBSETS, Table

TOP_MASS, OPTIMAL_POOL, BALANCING = "top_mass", "optimal_pool", "balancing"
REQUIRED = (TOP_MASS, OPTIMAL_POOL)  # without these two no row has a ceiling
CERTIFIED_FOLDER = "certified"  # whose files hold the searches over whole rows: bounds of some rows, no rule's choices

LABEL_RATIO = 0.9  # label 1: a better subset removes at least 10% of the error (P1, Table 8)
GAP_RELATIVE = 1e-12  # a row has a gap only if its optimum is below top-mass by more than this share of it
SAME_RELATIVE = 1e-9  # two errors this close, relatively, are the same subset's up to rounding
EXACT = 1e-12  # a ratio this close to 1 is 1: the same keys summed in another order

_CHOICE_COLUMNS = ["row_id", "s", "rule", "error", "kept_mass", "free_error"]
_SEARCH_COLUMNS = [
    "row_id", "s", "rule", "mass_floor", "error", "lower", "kept_mass", "status", "stopped_by", "seconds",
]  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """The rows of one model at one budget, sorted by row_id; every array is (n,).

    document: codes 0..D-1 of the rows' documents. rounding: errors up to it are zero. top, optimum: forced
    errors of the top-mass set and of the pool optimum, in units of |v|. choices: one row per row and rule,
    with columns row (index into the arrays here), rule, error, kept_mass, free_error. searches: one row per
    certified row and mass floor, with columns row, rule, mass_floor, error, lower, kept_mass, status, stopped_by,
    seconds; empty where nothing was certified. multiplicity: (B, D), the resamples of the documents, the same
    for every statistic so that differences are paired.
    """

    family: str
    model: str
    s: int
    facts: pl.DataFrame
    document: Counts
    rounding: Reals
    top: Reals
    optimum: Reals
    choices: pl.DataFrame
    searches: pl.DataFrame
    multiplicity: Counts

    @property
    def n_rows(self) -> int:
        """Rows."""
        return len(self.document)

    @property
    def n_documents(self) -> int:
        """Documents: the clusters of the bootstrap."""
        return int(self.multiplicity.shape[1])

    @property
    def identity(self) -> dict[str, object]:
        """The columns that say which model and budget a record of the analysis is about."""
        return {"family": self.family, "model": self.model, "s": self.s}

    @property
    def zero_top(self) -> Flags:
        """Rows whose top-mass error is zero within rounding: nothing is left to gain."""
        return self.top <= self.rounding

    @property
    def gap(self) -> Reals:
        """e_s(top-mass) - ES_pool, in units of |v|."""
        return self.top - self.optimum

    @property
    def has_gap(self) -> Flags:
        """Rows whose pool optimum is better than top-mass by more than rounding."""
        return (self.gap > self.rounding) & (self.optimum < self.top * (1 - GAP_RELATIVE))

    @property
    def kappa(self) -> Reals:
        """kappa-hat = e_s(top-mass) / ES_pool (P1, section 2): infinite if ES_pool is zero, 1 if both are."""
        ratio = np.full(self.n_rows, np.inf)
        np.divide(self.top, self.optimum, out=ratio, where=self.optimum > self.rounding)
        return np.where(self.zero_top, 1.0, exactly_one(ratio))

    @property
    def closable(self) -> Reals:
        """c-hat = 1 - ES_pool / e_s(top-mass), a lower bound of the true c; 0 where top-mass is exact."""
        kept = np.ones(self.n_rows)
        np.divide(self.optimum, self.top, out=kept, where=~self.zero_top)
        return 1 - exactly_one(kept)

    @property
    def label(self) -> Flags:
        """Whether a better subset removes at least 10% of the error (P1, Table 8; 10/9 exactly)."""
        return (self.optimum <= LABEL_RATIO * self.top) & ~self.zero_top

    def statistic(self, name: str) -> Reals:
        """A column of the facts."""
        return self.facts[name].to_numpy()

    def rules(self) -> list[str]:
        """Every rule that chose a subset of some row, sorted."""
        return sorted(self.choices["rule"].unique())

    def of_rule(self, rule: str) -> tuple[Counts, pl.DataFrame]:
        """Indices of the rows for which the rule ran, (m,) ascending, and its choices in that order."""
        chosen = self.choices.filter(pl.col("rule") == rule).sort("row")
        return chosen["row"].to_numpy(), chosen


def exactly_one(ratios: Reals) -> Reals:
    """The ratios (n,), with those that differ from 1 by rounding alone (EXACT) written as 1."""
    return np.where(np.abs(ratios - 1) <= EXACT, 1.0, ratios)


def samples(where: store.Store, resamples: int, seed: int) -> Iterator[Sample]:
    """Each model at each budget, in order of model and s; holds one of them in memory at a time.

    Raises BadInput if there are no subsets, if a file is not whole, if a row of the facts lacks its top-mass
    set or its pool optimum, or if a rule chose twice for a row.
    """
    for folder, (fact_files, subset_files) in files_of(where).items():
        facts = store.read_all(ROW_FACTS, fact_files)
        chosen_files = [path for path in subset_files if path.parent.name != CERTIFIED_FOLDER]
        choices = store.read_all(SUBSETS, chosen_files, _CHOICE_COLUMNS)
        searched = [store.read(SUBSETS, path, _SEARCH_COLUMNS) for path in subset_files if path not in chosen_files]
        searches = pl.concat(searched) if searched else as_table(SUBSETS, []).select(_SEARCH_COLUMNS)
        for key, part in sorted(facts.group_by(["family", "model", "s"])):
            family, model, s = key
            yield _sample(str(family), str(model), int(str(s)), part, choices, searches, folder, resamples, seed)


def files_of(where: store.Store) -> dict[Path, tuple[list[Path], list[Path]]]:
    """Facts and subsets files of each model and budget, by the folder that holds both kinds; without the outdated().

    Raises BadInput if there are none, if a folder holds one kind without the other, or if one is not readable.
    """
    left_out = set(outdated(where))
    facts, subsets = where.fact_files(), [path for path in where.subset_files() if path not in left_out]
    if not subsets and not facts:
        raise BadInput(f"no subsets under {where.root}: expected those of a model; run make enumerate")
    groups: dict[Path, tuple[list[Path], list[Path]]] = {}
    for kind, paths in enumerate((facts, subsets)):
        for path in paths:
            groups.setdefault(path.parent.parent, ([], []))[kind].append(path)
    for folder, (own_facts, own_subsets) in groups.items():
        if not own_facts or not own_subsets:
            missing = "facts" if own_subsets else "subsets"
            raise BadInput(f"{folder}: holds no {missing} files: run make enumerate again")
    return dict(sorted(groups.items()))


def outdated(where: store.Store) -> list[Path]:
    """Subsets files whose rows are not those of the facts of the same document: captured, or given, anew since.

    A user's rule is graded when its user asks for it, the facts whenever rows change. Raises BadInput if a file
    is not readable.
    """
    graded = {path: _rows_digest(ROW_FACTS, path) for path in where.fact_files()}
    return [
        path
        for path in where.subset_files()
        if (facts := path.parent.parent / "facts" / path.name) in graded
        and graded[facts] != _rows_digest(SUBSETS, path)
    ]


def _rows_digest(table: Table, path: Path) -> object:
    """What the footer says of the rows that the file was made from."""
    inputs = store.footer(table, path)["inputs"]
    return inputs.get("rows") if isinstance(inputs, dict) else None


def _sample(
    family: str,
    model: str,
    s: int,
    facts: pl.DataFrame,
    choices: pl.DataFrame,
    searches: pl.DataFrame,
    folder: Path,
    resamples: int,
    seed: int,
) -> Sample:
    facts = facts.sort("row_id")
    if facts["row_id"].is_duplicated().any():
        raise BadInput(f"{folder}: a row has two rows of facts: delete the folder and run make enumerate")
    numbered = facts.select("row_id", pl.int_range(pl.len(), dtype=pl.Int64).alias("row"))
    joined = choices.filter(pl.col("s") == s).join(numbered, on="row_id", how="inner").sort("rule", "row")
    twice = joined.filter(pl.struct("rule", "row").is_duplicated())
    if len(twice):
        raise BadInput(f"{folder}: rule {twice['rule'][0]} has two subsets of row {twice['row_id'][0]}: expected one")
    searched = searches.filter(pl.col("s") == s).join(numbered, on="row_id", how="inner").sort("row", "mass_floor")
    again = searched.filter(pl.struct("row", "mass_floor").is_duplicated())
    if len(again):
        rho, row_id = again["mass_floor"][0], again["row_id"][0]
        raise BadInput(f"{folder}: mass floor {rho:g} has two searches of row {row_id}: expected one")
    errors = {}
    for rule in REQUIRED:
        own = joined.filter(pl.col("rule") == rule)
        if len(own) < len(facts):
            lacking = facts.join(own, on="row_id", how="anti")["row_id"]
            raise BadInput(
                f"{folder}: rule {rule} is missing for {len(lacking)} of {len(facts)} rows,"
                f" first {lacking[0]}: run make enumerate again"
            )
        errors[rule] = own["error"].to_numpy()
    documents, document = np.unique(facts["doc_id"].to_numpy(), return_inverse=True)
    return Sample(
        family=family,
        model=model,
        s=s,
        facts=facts,
        document=document.astype(np.int64),
        rounding=facts["rounding"].to_numpy(),
        top=errors[TOP_MASS],
        optimum=errors[OPTIMAL_POOL],
        choices=joined.drop("s", "row_id"),
        searches=searched.drop("s", "row_id"),
        multiplicity=draw(len(documents), resamples, seed),
    )


def as_table(table: Table, records: list[dict[str, object]]) -> pl.DataFrame:
    """Records as a frame of the table, its columns in its order."""
    schema = {name: column.dtype for name, column in table.columns.items()}
    return pl.DataFrame(records, schema=schema, orient="row")
