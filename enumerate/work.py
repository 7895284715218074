"""The work of the stage: which files are stale, rows spread over processes, results put down document by document."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polars as pl

from data import BadInput, Provenance, Store
from data.schema import ROW_FACTS, SUBSETS
from data.store import code_digest, is_current, sha256, write
from enumerate.documents import Document, digest_of_rows, lengths, parts_of, rows_of
from enumerate.pool import spread
from enumerate.rows import RowToGrade
from enumerate.rules import Graded, grade, grade_user, schema_of, subsets_frame
from enumerate.user_rule import UserRule, apply, load
from solvers import leverage_scores, top_mass
from solvers.problem import Reals

STANDARD = "standard"
COMMAND = "enumerate"


@dataclass(frozen=True)
class Settings:
    """What a user sets: the budgets, the search, a rule of one's own, and whether short rows are left out."""

    budgets: tuple[int, ...]
    search: str
    rule: UserRule | None = None
    drop_short: bool = False


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


def check_budgets(store: Store, documents: list[Document], settings: Settings) -> dict[int, int]:
    """Per budget, how many rows are too short for it.

    Raises BadInput that names the shortest row unless short rows are to be left out and some are long enough.
    """
    every = [pair for document in documents for pair in lengths(store, document)]
    shortest, fewest = min(every, key=lambda pair: pair[1])
    short = {s: sum(n_keys < s for _, n_keys in every) for s in settings.budgets}
    for s, count in short.items():
        if count == len(every) or (count and not settings.drop_short):
            hint = "" if count == len(every) else ", or --drop-short to leave such rows out"
            raise BadInput(
                f"S={s}: {count} of {len(every)} rows have fewer keys of positive weight, {shortest} only {fewest}:"
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
    pieces = {
        document: [Piece(document, part, budgets) for part in parts_of(store, document)]
        for document, budgets in stale.items()
        if budgets
    }
    for document in documents:
        if document not in pieces:
            yield document, 0
    for document, parts in spread(pieces, partial(work, store, settings=settings), workers):
        graded = 0
        for k, s in enumerate(stale[document]):
            grades = [part[k] for part in parts]
            _put(store, document, settings, s, inputs[document], code, grades)
            graded += sum(each.rows for each in grades)
        yield document, graded


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
    for row in rows_of(store, piece.document, piece.part):
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
            subsets_frame(graded[s], s),
            pl.DataFrame(facts[s], schema=schema_of(ROW_FACTS)) if rule is None else None,
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


def _inputs(store: Store, document: Document, settings: Settings) -> dict[str, str]:
    found = {"rows": digest_of_rows(store, document)}
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
