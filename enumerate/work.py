"""The work of the stage: which files are stale, rows spread over processes, results put down document by document."""

import multiprocessing
import os
import threading
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
from data.schema import ROW_FACTS, ROWS, SUBSETS, Table
from data.store import code_digest, footer, is_current, read, sha256, write
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
    """What a user sets: the budgets, the search, a rule of one's own, and whether short rows are left out."""

    budgets: tuple[int, ...]
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
    """What one worker takes: one layer of a captured document, or some rows of a user's file, at some budgets."""

    document: Document
    part: int
    budgets: tuple[int, ...]


def parse_budgets(text: str) -> tuple[int, ...]:
    """Budgets from "16" or "4,8,16,32" (commas or spaces), ascending; raises BadInput for anything else."""
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isascii() and part.isdecimal() and int(part) >= 1 for part in parts):
        raise BadInput(f"S={text}: expected a whole number of at least 1, or several such as 4,8,16,32")
    return tuple(sorted({int(part) for part in parts}))


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


def documents_in(store: Store, path: Path) -> list[Document]:
    """The documents of a user's file, which goes by its name; raises BadInput if that is a captured model's."""
    rows = own_rows(path)
    name = rows[0].model
    if name in store.models():
        raise BadInput(f"ROWS={path}: {name} is the name of a captured model; expected a file of another name")
    return [Document(name, doc_id, path) for doc_id in sorted({row.doc_id for row in rows})]


def forget_others(store: Store, documents: list[Document]) -> int:
    """Remove what was graded on an earlier state of a user's file, at any budget; how many files."""
    made_from = {document.doc_id: sha256(document.source) for document in documents if document.source is not None}
    removed = 0
    for path in sorted((store.root / "subsets" / documents[0].model).glob("s-*/*/doc-*.parquet")):
        table = ROW_FACTS if path.parent.name == "facts" else SUBSETS
        try:
            inputs = footer(table, path)["inputs"]
        except BadInput:
            inputs = {}
        if not isinstance(inputs, dict) or inputs.get("rows") != made_from.get(int(path.stem.split("-")[1]), ""):
            path.unlink()
            removed += 1
    return removed


def check_budgets(store: Store, documents: list[Document], settings: Settings) -> dict[int, int]:
    """Per budget, how many rows are too short for it.

    Raises BadInput that names the shortest row unless short rows are to be left out and some are long enough.
    """
    lengths = [pair for document in documents for pair in _lengths(store, document)]
    shortest, fewest = min(lengths, key=lambda pair: pair[1])
    short = {s: sum(n_keys < s for _, n_keys in lengths) for s in settings.budgets}
    for s, count in short.items():
        if count == len(lengths) or (count and not settings.drop_short):
            hint = "" if count == len(lengths) else ", or --drop-short to leave such rows out"
            raise BadInput(
                f"S={s}: {count} of {len(lengths)} rows have fewer keys of positive weight, {shortest} only {fewest}:"
                f" expected S <= {fewest}{hint}"
            )
    return short


def run(store: Store, documents: list[Document], settings: Settings, workers: int) -> Iterator[tuple[Document, int]]:
    """Grade every stale document; yields each with the rows graded once its files are in place (0: was current).

    Raises BadInput if a worker dies; documents already done stay.
    """
    code = code_digest("data", "solvers", "enumerate")
    inputs = {document: _inputs(store, document, settings) for document in documents}
    stale = {
        document: tuple(
            s for s in settings.budgets if not _is_done(store, document, settings, s, inputs[document], code)
        )
        for document in documents
    }
    pieces = {document: _pieces(store, document, budgets) for document, budgets in stale.items() if budgets}
    for document in documents:
        if document not in pieces:
            yield document, 0
    if not pieces:
        return
    # A spawned worker must not inherit threads: its BLAS uses one, since the workers fill the cores.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"):
        os.environ.setdefault(variable, "1")
    done: dict[Document, dict[int, list[Grades]]] = defaultdict(dict)
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),)
    )
    try:
        futures: dict[Future[list[Grades]], Piece] = {
            pool.submit(work, store, piece, settings): piece for parts in pieces.values() for piece in parts
        }
        for future in as_completed(futures):
            piece = futures.pop(future)
            document = piece.document
            done[document][piece.part] = future.result()
            if len(done[document]) == len(pieces[document]):
                parts = done.pop(document)
                graded = 0
                for k, s in enumerate(stale[document]):
                    grades = [parts[part][k] for part in sorted(parts)]
                    _put(store, document, settings, s, inputs[document], code, grades)
                    graded += sum(each.rows for each in grades)
                yield document, graded
    except BrokenProcessPool as error:
        raise BadInput(
            "a worker process died (out of memory, or killed): finished documents are kept; run the command again"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with(parent: int) -> None:
    """In a worker: end when the parent is gone, as it cannot say so itself when it is killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True, eq=False)
class Grades:
    """What one piece gives at one budget: subsets, and the facts that go with the standard rules."""

    rows: int
    subsets: pl.DataFrame
    facts: pl.DataFrame | None


def work(store: Store, piece: Piece, settings: Settings) -> list[Grades]:
    """Grade one piece at each of its budgets."""
    rule = settings.rule
    function = None if rule is None else load(rule)
    graded: dict[int, list[tuple[RowToGrade, Graded]]] = {s: [] for s in piece.budgets}
    facts: dict[int, list[dict[str, object]]] = {s: [] for s in piece.budgets}
    rows = dict.fromkeys(piece.budgets, 0)
    leverages: dict[tuple[int, int, int], Reals] = {}
    for row in _rows(store, piece):
        if row.keys is not None and rule is None and row.keys_id not in leverages:
            leverages[row.keys_id] = leverage_scores(row.keys)
        for s in piece.budgets:
            if row.instance.n_positive < s:
                continue
            rows[s] += 1
            if rule is not None and function is not None:
                began = time.perf_counter()
                kept = apply(rule, function, row, s)
                graded[s].append((row, grade_user(row.instance, rule.name, kept, time.perf_counter() - began)))
            else:
                found = grade(row, s, settings.search, leverages.get(row.keys_id))
                graded[s].extend((row, one) for one in found)
                facts[s].append(facts_of(row, s))
    return [
        Grades(
            rows[s],
            _subsets_frame(graded[s], s),
            pl.DataFrame(facts[s], schema=_schema_of(ROW_FACTS)) if rule is None else None,
        )
        for s in piece.budgets
    ]


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


def _pieces(store: Store, document: Document, budgets: tuple[int, ...]) -> list[Piece]:
    if document.source is None:
        layers = read(ROWS, store.rows(document.model, document.doc_id), ["layer"])["layer"].unique().sort()
        return [Piece(document, int(layer), budgets) for layer in layers]
    count = sum(row.doc_id == document.doc_id for row in own_rows(document.source))
    return [Piece(document, part, budgets) for part in range(-(-count // OWN_ROWS_AT_A_TIME))]


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


def _provenance(settings: Settings, s: int, inputs: dict[str, str], code: str) -> Provenance:
    rule = None if settings.rule is None else settings.rule.name
    parameters = {"s": s, "search": settings.search, "rule": rule, "drop_short": settings.drop_short}
    return Provenance(COMMAND, parameters, 0, inputs, code)


def _subsets_path(store: Store, document: Document, settings: Settings, s: int) -> Path:
    rules = STANDARD if settings.rule is None else settings.rule.name
    return store.subsets(document.model, s, rules, document.doc_id)


def _is_done(store: Store, document: Document, settings: Settings, s: int, inputs: dict[str, str], code: str) -> bool:
    provenance = _provenance(settings, s, inputs, code)
    facts = store.facts(document.model, s, document.doc_id)
    whole = settings.rule is not None or is_current(ROW_FACTS, facts, provenance)
    return whole and is_current(SUBSETS, _subsets_path(store, document, settings, s), provenance)


def _put(
    store: Store,
    document: Document,
    settings: Settings,
    s: int,
    inputs: dict[str, str],
    code: str,
    grades: list[Grades],
) -> None:
    provenance = _provenance(settings, s, inputs, code)
    # Facts go first: a subsets file in place then says that the document is whole.
    facts = [each.facts for each in grades if each.facts is not None]
    if facts:
        write(ROW_FACTS, pl.concat(facts), store.facts(document.model, s, document.doc_id), provenance)
    subsets = pl.concat([each.subsets for each in grades])
    write(SUBSETS, subsets, _subsets_path(store, document, settings, s), provenance)


def _subsets_frame(graded: list[tuple[RowToGrade, Graded]], s: int) -> pl.DataFrame:
    ones = [one for _, one in graded]
    positions = [(one.subset + row.first_key).astype(np.uint32) for row, one in graded]
    return pl.DataFrame(
        {
            "row_id": [row.row_id for row, _ in graded],
            "s": pl.Series([s] * len(ones), dtype=pl.Int32),
            "rule": [one.rule for one in ones],
            "search": [one.search for one in ones],
            "mass_floor": [one.mass_floor for one in ones],
            "n_searched": pl.Series([one.searched for one in ones], dtype=pl.Int32),
            "subset": pl.Series(positions, dtype=pl.List(pl.UInt32)),
            "error": [one.error for one in ones],
            "lower": [one.lower for one in ones],
            "kept_mass": [row.instance.kept_mass(one.subset) for row, one in graded],
            "free_error": [one.free_error for one in ones],
            "status": [one.status for one in ones],
            "stopped_by": [one.stopped_by for one in ones],
            "nodes": pl.Series([one.nodes for one in ones], dtype=pl.Int64),
            "seconds": [one.seconds for one in ones],
        },
        schema=_schema_of(SUBSETS),
    )


def _schema_of(table: Table) -> dict[str, pl.DataType]:
    return {name: column.dtype for name, column in table.columns.items()}
