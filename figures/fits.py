"""Reading the analysis' tables, with a word on what to run when one is missing."""

import polars as pl

from data.errors import BadInput
from data.schema import CEILING, CERTIFIED, MAP, MASS_FLOORS, OPEN, PENALTY, PREDICTOR, PROVED, ROC, RULES, Table
from data.store import Store, read

TABLES = (
    CEILING,
    RULES,
    PENALTY,
    PREDICTOR,
    ROC,
    MAP,
    CERTIFIED,
    MASS_FLOORS,
    PROVED,
    OPEN,
)  # all that the analysis writes


def analysed(store: Store) -> bool:
    """Whether any table of the analysis is there: then all must be."""
    return any(store.fit(table.name).is_file() for table in TABLES)


def fit(store: Store, table: Table, may_be_empty: bool = False) -> pl.DataFrame:
    """One table of the analysis, whole; raises BadInput if it is missing, not readable, or empty where none may be."""
    path = store.fit(table.name)
    if not path.is_file():
        raise BadInput(f"{path}: no such file: expected table {table.name}, which the analysis writes (make analysis)")
    frame = read(table, path)
    if frame.is_empty() and not may_be_empty:
        raise BadInput(f"{path}: table {table.name} has no rows: expected at least one model and budget")
    return frame
