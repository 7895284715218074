"""Captured rows for the benchmarks, and how a target is reported."""

import itertools
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

from data import BadInput, Store
from data.schema import ROWS
from data.store import read
from enumerate.rows import RowToGrade, captured_rows

QUIET = 0.95  # share of a core from which on times are taken as they are
BUDGETS = (4, 8, 16, 32)  # of P1's tables


def load(data: Path, model: str = "", documents: int | None = None) -> tuple[str, list[RowToGrade]]:
    """A model's name (empty: the first in the folder) and the rows of so many of its documents (None: all).

    Raises BadInput if the folder has no rows of it.
    """
    store, name = _model(data, model)
    found = []
    for path in store.row_files(name)[:documents]:
        doc_id = int(path.stem.split("-")[1])
        layers = read(ROWS, path, ["layer"])["layer"].unique().sort()
        found.append(itertools.chain.from_iterable(captured_rows(store, name, doc_id, int(x)) for x in layers))
    return name, list(itertools.chain.from_iterable(found))


def sample(folders: Sequence[Path], model: str, count: int, seed: int = 0) -> tuple[str, int, list[RowToGrade]]:
    """The model's name, how many rows the folders have of it, and at most count of them, spread over their lengths.

    One is drawn from each of as many equal shares of the rows by length; only those are kept in memory. Drawn and not
    taken at a fixed step: rows of one length follow each other by head, and a step may be a multiple of the heads.
    Raises BadInput as load() does.
    """
    parts = []
    for place, folder in enumerate(folders):
        store, name = _model(folder, model)
        columns = ["row_id", "doc_id", "layer", "n_keys"]
        parts += [read(ROWS, path, columns).with_columns(folder=pl.lit(place)) for path in store.row_files(name)]
    frame = pl.concat(parts).sort("n_keys", maintain_order=True)
    random = np.random.default_rng(seed)
    ends = np.linspace(0, frame.height, min(count, frame.height) + 1).astype(int)
    chosen = frame[[int(random.integers(low, high)) for low, high in pairwise(ends)]]
    found = []
    for (place, doc_id, layer), part in chosen.group_by("folder", "doc_id", "layer", maintain_order=True):
        wanted = set(part["row_id"])
        rows = captured_rows(Store(folders[int(place)]), name, int(doc_id), int(layer))
        found += [row for row in rows if row.row_id in wanted]
    return name, frame.height, sorted(found, key=lambda row: row.instance.n)


def _model(data: Path, model: str) -> tuple[Store, str]:
    store = Store(data)
    models = store.models()
    if not models or (model and model not in models):
        raise BadInput(f"{data}: no captured rows{f' of {model}' if model else ''}; run `make capture MODEL=llama`")
    return store, model or models[0]


def share_of_a_core(began: float, began_cpu: float) -> str:
    """A line that says how much of a core this process had since perf_counter() and process_time() were these.

    Limits and seconds are of the wall clock: on a busy machine less is proved in time, and more is exceeded.
    """
    share = (time.process_time() - began_cpu) / (time.perf_counter() - began)
    busy = "" if share >= QUIET else ": the machine is busy, so times are too long and shares proved in time too small"
    return f"this process had {share:.0%} of a core{busy}"


def verdict(reached: bool) -> str:
    """How a target is printed."""
    return "reached" if reached else "MISSED"
