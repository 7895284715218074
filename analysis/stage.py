"""The analysis as a stage: which tables are current, and how all are made in one pass over the samples."""

from collections.abc import Callable, Mapping
from pathlib import Path

import polars as pl

from analysis import certified
from analysis.ceiling import ceiling
from analysis.flat_map import cells, flat_map
from analysis.frame import Sample, as_table, files_of, samples
from analysis.penalty import penalty
from analysis.predictor import predictor, roc
from analysis.rules import rules
from data import published, store
from data.schema import CEILING, CERTIFIED, MAP, MASS_FLOORS, OPEN, PENALTY, PREDICTOR, PROVED, ROC, RULES, Table

BY_PARTS = (MAP, PROVED)  # made of parts of every sample
FITS = (CEILING, RULES, PENALTY, PREDICTOR, ROC, MAP, CERTIFIED, MASS_FLOORS, PROVED, OPEN)
PACKAGES = ("analysis", "data")  # whose source the tables depend on


def provenance(where: store.Store, seed: int, resamples: int) -> store.Provenance:
    """How the tables of this store would be made now.

    Raises BadInput if there are no subsets or a file cannot be read.
    """
    files = files_of(where).values()
    inputs = {
        kind: store.digest_of(store.sha256(path) for own in files for path in own[place])
        for place, kind in enumerate(("facts", "subsets"))
    }
    inputs["published"] = store.sha256(published.PATH)
    return store.Provenance("analysis", {"resamples": resamples}, seed, inputs, store.code_digest(*PACKAGES))


def stale(where: store.Store, made: store.Provenance) -> list[Table]:
    """The tables that are missing, not whole, or were made in another way."""
    return [table for table in FITS if not store.is_current(table, where.fit(table.name), made)]


def compute(
    where: store.Store, seed: int, resamples: int, each: Callable[[Sample], None] = lambda _: None
) -> Mapping[str, pl.DataFrame]:
    """Every table of the analysis, by name; each is called before a sample is worked on.

    Raises BadInput as samples() does.
    """
    records: dict[str, list[dict[str, object]]] = {table.name: [] for table in FITS if table not in BY_PARTS}
    parts, features = [], []
    for sample in samples(where, resamples, seed):
        each(sample)
        records["ceiling"].append(ceiling(sample))
        for table, of in ((RULES, rules), (PENALTY, penalty), (PREDICTOR, predictor), (ROC, roc)):
            records[table.name].extend(of(sample))
        parts.append(cells(sample))
        searched = certified.pairs(sample)
        if searched is not None:
            records["certified"].append(certified.certified(searched))
            records["mass_floors"].extend(certified.mass_floors(searched))
            records["open"].extend(certified.open_pairs(searched))
            features.append(certified.features(searched))
    made = {table.name: as_table(table, records[table.name]) for table in FITS if table not in BY_PARTS}
    return made | {MAP.name: flat_map(parts), PROVED.name: certified.proved(features)}


def write(
    where: store.Store, frames: Mapping[str, pl.DataFrame], tables: list[Table], made: store.Provenance
) -> list[Path]:
    """Put these tables where the store keeps them, each by an atomic rename; returns their paths."""
    for table in tables:
        store.write(table, frames[table.name], where.fit(table.name), made)
    return [where.fit(table.name) for table in tables]
