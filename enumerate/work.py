"""The work of the stage: which files are stale, rows spread over processes, results put down document by document."""

import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from data import BadInput, Provenance, Store
from data.schema import ROW_FACTS, ROWS, SUBSETS
from data.store import code_digest, is_current, read, sha256, write
from enumerate.rows import RowToGrade, captured_rows, own_rows
from enumerate.rules import Graded, grade, grade_user
from enumerate.user_rule import UserRule, apply, load
from solvers import leverage_scores, top_mass
from solvers.problem import Reals

STANDARD = "standard"
COMMAND = "enumerate"
OWN_ROWS_AT_A_TIME = 64  # rows of a user's file that one worker takes


@dataclass(frozen=True)
class Settings:
    """What a user sets: the budget, the search, a rule of one's own, and whether short rows are left out."""

    s: int
    search: str
    rule: UserRule | None = None
    drop_short: bool = False


@dataclass(frozen=True)
class Document:
    """One document's rows: captured (source None) or from a user's file."""

    model: str
    doc_id: int
    source: Path | None = None


@dataclass(frozen=True)
class Piece:
    """What one worker takes: one layer of a captured document, or some rows of a user's file."""

    document: Document
    part: int


def documents_of(store: Store, model: str | None) -> list[Document]:
    """Captured documents, or those of the models whose name or family is `model`; raises BadInput if there are none."""
    found = []
    for path in store.row_files():
        name, doc_id = path.parent.name, int(path.stem.split("-")[1])
        if model is None or model in (name, _family(path)):
            found.append(Document(name, doc_id))
    if not found:
        have = ", ".join(store.models()) or "none"
        raise BadInput(f"no captured rows{f' of {model}' if model else ''}: expected a captured model (have: {have})")
    return found


def documents_in(path: Path) -> list[Document]:
    """The documents of a user's file."""
    rows = own_rows(path)
    return [Document(rows[0].model, doc_id, path) for doc_id in sorted({row.doc_id for row in rows})]


def check_budget(store: Store, documents: list[Document], settings: Settings) -> int:
    """How many rows are too short for s; raises BadInput that names the shortest unless they are to be left out."""
    short, total, shortest = 0, 0, ("", 1 << 62)
    for document in documents:
        for row_id, n_keys in _lengths(store, document):
            total += 1
            short += n_keys < settings.s
            shortest = min(shortest, (row_id, n_keys), key=lambda pair: pair[1])
    if settings.s < 1:
        raise BadInput(f"S={settings.s}: expected at least 1")
    if short == total or (short and not settings.drop_short):
        raise BadInput(
            f"S={settings.s}: {short} of {total} rows have fewer keys, {shortest[0]} only {shortest[1]}:"
            f" expected S <= {shortest[1]}" + ("" if short == total else ", or --drop-short to leave such rows out")
        )
    return short


def run(store: Store, documents: list[Document], settings: Settings, workers: int) -> Iterator[tuple[Document, int]]:
    """Grade every stale document; yields each with its number of rows once its files are in place (0: was current).

    Raises BadInput if a worker dies; documents already done stay.
    """
    code = code_digest("data", "solvers", "enumerate")
    inputs = {document: _inputs(store, document, settings) for document in documents}
    stale = []
    for document in documents:
        if _is_done(store, document, settings, inputs[document], code):
            yield document, 0
        else:
            stale.append(document)
    pieces = {document: _pieces(store, document) for document in stale}
    if not stale:
        return
    # A spawned worker must not inherit threads: its BLAS uses one, since the workers fill the cores.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    done: dict[Document, dict[int, list[pl.DataFrame]]] = defaultdict(dict)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        futures: dict[Future[list[pl.DataFrame]], Piece] = {
            pool.submit(work, store, piece, settings): piece for document in stale for piece in pieces[document]
        }
        for future in as_completed(futures):
            piece = futures.pop(future)
            document = piece.document
            done[document][piece.part] = future.result()
            if len(done[document]) == len(pieces[document]):
                parts = done.pop(document)
                frames = [pl.concat(group) for group in zip(*(parts[part] for part in sorted(parts)), strict=True)]
                _put(store, document, settings, inputs[document], code, frames)
                yield document, frames[-1].height
    except BrokenProcessPool as error:
        raise BadInput(
            "a worker process died (out of memory, or killed): finished documents are kept; run the command again"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def work(store: Store, piece: Piece, settings: Settings) -> list[pl.DataFrame]:
    """Grade one piece: frames of the subsets (standard or the user's rule) and, for the standard rules, the facts."""
    rule = settings.rule
    function = None if rule is None else load(rule)
    graded: list[tuple[RowToGrade, Graded]] = []
    facts: list[dict[str, object]] = []
    leverages: dict[tuple[int, int, int], Reals] = {}
    for row in _rows(store, piece):
        if row.instance.n < settings.s:
            continue
        row.instance.check_budget(settings.s)
        if rule is not None and function is not None:
            began = time.perf_counter()
            kept = apply(rule, function, row, settings.s)
            graded.append((row, grade_user(row.instance, rule.name, kept, time.perf_counter() - began)))
            continue
        if row.keys is not None and row.keys_id not in leverages:
            leverages[row.keys_id] = leverage_scores(row.keys)
        graded.extend((row, one) for one in grade(row, settings.s, settings.search, leverages.get(row.keys_id)))
        facts.append(facts_of(row, settings.s))
    frames = [_subsets_frame(graded, settings.s)]
    return frames if rule is not None else [*frames, pl.DataFrame(facts, schema=_schema_of_facts())]


def facts_of(row: RowToGrade, s: int) -> dict[str, object]:
    """One row of the table row_facts."""
    instance = row.instance
    top = top_mass(instance, s)
    return {
        "row_id": row.row_id,
        "family": row.family,
        "model": row.model,
        "doc_id": row.doc_id,
        "layer": row.layer,
        "q_head": row.q_head,
        "n_keys": instance.n,
        "s": s,
        "dropped_mass": instance.dropped_mass(top),
        "radius": instance.radius,
        "spread": instance.spread,
        "residual": instance.residual_norm(top),
        "rounding": instance.rounding,
    }


def _rows(store: Store, piece: Piece) -> Iterator[RowToGrade]:
    document = piece.document
    if document.source is None:
        yield from captured_rows(store, document.model, document.doc_id, piece.part)
        return
    mine = [row for row in own_rows(document.source) if row.doc_id == document.doc_id]
    yield from mine[piece.part * OWN_ROWS_AT_A_TIME : (piece.part + 1) * OWN_ROWS_AT_A_TIME]


def _pieces(store: Store, document: Document) -> list[Piece]:
    if document.source is None:
        layers = read(ROWS, store.rows(document.model, document.doc_id), ["layer"])["layer"].unique().sort()
        return [Piece(document, int(layer)) for layer in layers]
    count = sum(row.doc_id == document.doc_id for row in own_rows(document.source))
    return [Piece(document, part) for part in range(-(-count // OWN_ROWS_AT_A_TIME))]


def _lengths(store: Store, document: Document) -> list[tuple[str, int]]:
    if document.source is None:
        frame = read(ROWS, store.rows(document.model, document.doc_id), ["row_id", "n_keys"])
        return list(frame.iter_rows())
    rows = own_rows(document.source)
    return [(row.row_id, row.instance.n_positive) for row in rows if row.doc_id == document.doc_id]


def _family(path: Path) -> str:
    return str(read(ROWS, path, ["family"])["family"][0])


def _inputs(store: Store, document: Document, settings: Settings) -> dict[str, str]:
    source = store.rows(document.model, document.doc_id) if document.source is None else document.source
    found = {"rows": sha256(source)}  # its footer names the sha256 of every kv file, which each reader checks
    if settings.rule is not None:
        found["rule"] = sha256(settings.rule.path)
    return found


def _provenance(settings: Settings, inputs: dict[str, str], code: str) -> Provenance:
    rule = None if settings.rule is None else settings.rule.name
    parameters = {"s": settings.s, "search": settings.search, "rule": rule, "drop_short": settings.drop_short}
    return Provenance(COMMAND, parameters, 0, inputs, code)


def _paths(store: Store, document: Document, settings: Settings) -> list[Path]:
    if settings.rule is not None:
        return [store.subsets(document.model, settings.s, settings.rule.name, document.doc_id)]
    return [
        store.subsets(document.model, settings.s, STANDARD, document.doc_id),
        store.facts(document.model, settings.s, document.doc_id),
    ]


def _is_done(store: Store, document: Document, settings: Settings, inputs: dict[str, str], code: str) -> bool:
    provenance = _provenance(settings, inputs, code)
    tables = (SUBSETS, ROW_FACTS)
    paths = _paths(store, document, settings)
    return all(is_current(table, path, provenance) for table, path in zip(tables, paths, strict=False))


def _put(
    store: Store,
    document: Document,
    settings: Settings,
    inputs: dict[str, str],
    code: str,
    frames: list[pl.DataFrame],
) -> None:
    provenance = _provenance(settings, inputs, code)
    paths = _paths(store, document, settings)
    # Facts go first: a subsets file in place then says that the document is whole.
    for table, path, frame in reversed(list(zip((SUBSETS, ROW_FACTS), paths, frames, strict=False))):
        write(table, frame, path, provenance)


def _subsets_frame(graded: list[tuple[RowToGrade, Graded]], s: int) -> pl.DataFrame:
    ones = [one for _, one in graded]
    positions = [(one.subset + row.first_key).astype(np.uint32) for row, one in graded]
    return pl.DataFrame(
        {
            "row_id": [row.row_id for row, _ in graded],
            "s": pl.Series([s] * len(ones), dtype=pl.Int32),
            "rule": [one.rule for one in ones],
            "search": [one.search for one in ones],
            "mass_floor": [0.0] * len(ones),
            "n_searched": pl.Series([one.searched for one in ones], dtype=pl.Int32),
            "subset": pl.Series(positions, dtype=pl.List(pl.UInt32)),
            "error": [one.error for one in ones],
            "lower": [one.lower for one in ones],
            "kept_mass": [row.instance.kept_mass(one.subset) for row, one in graded],
            "free_error": [one.free_error for one in ones],
            "status": [one.status for one in ones],
            "nodes": pl.Series([one.nodes for one in ones], dtype=pl.Int64),
            "seconds": [one.seconds for one in ones],
        },
        schema={name: column.dtype for name, column in SUBSETS.columns.items()},
    )


def _schema_of_facts() -> dict[str, pl.DataType]:
    return {name: column.dtype for name, column in ROW_FACTS.columns.items()}
