"""Exact search over every key of a row, with and without mass floors: the pairs of a manifest, document by document."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import polars as pl

from data import BadInput, Provenance, Store
from data.schema import SUBSETS
from data.store import code_digest, footer, is_current, read, write
from enumerate.documents import Document, Selection, digest_of_rows, rows_of, selections_of
from enumerate.pool import spread
from enumerate.proofs import Replays, check, without_logs, write_logs
from enumerate.rows import RowToGrade
from enumerate.rules import Graded, subsets_frame
from solvers import certify, decide, free_error, top_mass
from solvers.branch_and_bound import DECISION_SLACK, SEARCH_SHARE
from solvers.certificate import Certificate, Floor
from solvers.problem import Instance

FOLDER = "certified"  # of the store, beside the standard rules
COMMAND = "certify"
FULL, FLOOR = "optimal_full", "optimal_floor"  # the rules: no mass floor, and one
HALF = 0.5  # the headline's floor
FLOORS = (0.95, 0.9, 0.75, 0.5, 0.25, 0.1)
NODE_LIMITS = {"small": 1_000, "paper": 10_000, "all": 10_000}  # of a pair, by manifest: most are within the seconds
TIME_LIMITS = {"small": 0.5, "paper": 2.0, "all": 2.0}  # seconds of a pair, by manifest: a safety
LABEL_RATIO = 0.9  # label yes: a subset with e_s <= 0.9 e_s(top-mass) exists (P1, Table 8)
LABEL_SHARE = 0.3  # of a pair's time limit that the label's decision may take at least, where the search left it open


@dataclass(frozen=True)
class Settings:
    """What a user sets: the mass floors, from the highest, the limits of a pair, and whether proofs are logged."""

    floors: tuple[float, ...]
    node_limit: int
    time_limit: float
    proof: bool = False


@dataclass(frozen=True, eq=False)
class Held:
    """What the file of one document and budget holds that still counts, and the limits (nodes, seconds) of each row."""

    subsets: pl.DataFrame
    limits: dict[str, tuple[int, float]]

    def answered(self, settings: Settings) -> set[str]:
        """The rows that need no search: made under limits no smaller, or under limits that did not stop them."""
        stops = self.subsets.group_by("row_id").agg(pl.col("stopped_by").unique())
        done = set()
        for row_id, by in stops.iter_rows():
            nodes, seconds = self.limits[row_id]
            untimed = "time_limit" not in by
            unstopped = untimed and "node_limit" not in by
            if (unstopped or nodes >= settings.node_limit) and (untimed or seconds >= settings.time_limit):
                done.add(row_id)
        return done


def parse_floors(text: str) -> tuple[float, ...]:
    """Mass floors from "0.5" or "0.5,0.1" (commas or spaces), falling; raises BadInput unless each is in (0, 1].

    HALF is always among them: the analysis rests on it.
    """
    try:
        found = {float(part) for part in text.replace(",", " ").split()}
    except ValueError:
        found = set()
    if not found or not all(0 < rho <= 1 for rho in found):
        raise BadInput(f"FLOORS={text}: expected numbers above 0 and up to 1, such as 0.5,0.1")
    return tuple(sorted(found | {HALF}, reverse=True))


def run(
    store: Store, documents: list[Document], manifest: pl.DataFrame, settings: Settings, workers: int
) -> Iterator[tuple[Document, int]]:
    """Certify the manifest's pairs; yields each document with the pairs searched once its files are in place.

    What a file holds of other pairs stays, if the same code made it from the same rows at the same floors; a pair
    that it holds is searched again only if a limit that is smaller than now asked stopped it. So a small manifest
    after a large one finds its pairs answered, and keeps the rest. Raises BadInput if a worker dies; documents
    already done stay.
    """
    code = code_digest("data", "solvers", "enumerate")
    provenances: dict[tuple[Document, int], Provenance] = {}
    held: dict[tuple[Document, int], Held] = {}
    pieces: dict[Document, list[Selection]] = {}
    for document, by_budget in wanted_of(documents, manifest).items():
        rows = digest_of_rows(store, document)
        missing = {}
        for s, row_ids in by_budget.items():
            parameters = {"s": s, "floors": list(settings.floors)}
            provenances[document, s] = Provenance(COMMAND, parameters, 0, {"rows": rows}, code)
            held[document, s] = _held(path_of(store, document, s), provenances[document, s])
            answered = held[document, s].answered(settings)
            if settings.proof:
                answered -= without_logs(store, document.model, held[document, s].subsets, rows, code)
            if todo := row_ids - answered:
                missing[s] = todo
        if missing:
            pieces[document] = selections_of(store, document, missing)
        else:
            yield document, 0
    for document, results in spread(pieces, partial(work, store, settings=settings, code=code), workers):
        searched = 0
        for s in sorted({s for result in results for s in result}):
            fresh = pl.concat([result[s] for result in results if s in result])
            _put(path_of(store, document, s), provenances[document, s], held[document, s], fresh, settings)
            searched += fresh["row_id"].n_unique()
        yield document, searched


def check_proofs(
    store: Store, documents: list[Document], manifest: pl.DataFrame, replay_all: bool, workers: int
) -> Iterator[tuple[Document, Replays]]:
    """Check the manifest's pairs from the files alone: subsets in exact rationals, proof logs replayed."""
    pieces = {each: selections_of(store, each, wanted) for each, wanted in wanted_of(documents, manifest).items()}
    for document, results in spread(pieces, partial(check, store, folder=FOLDER, replay_all=replay_all), workers):
        yield document, Replays.total(results)


def work(store: Store, chosen: Selection, settings: Settings, code: str) -> dict[int, pl.DataFrame]:
    """Search the chosen rows, and put down their proofs if wanted; rows of table subsets by budget."""
    graded: dict[int, list[tuple[RowToGrade, Graded]]] = {s: [] for s, _ in chosen.wanted}
    rows = digest_of_rows(store, chosen.document)
    for row in rows_of(store, chosen.document, chosen.part, chosen.row_ids):
        for s, row_ids in chosen.wanted:
            if row.row_id in row_ids:
                found, ones = search(row.instance, s, settings)
                graded[s].extend((row, one) for one in ones)
                if settings.proof:
                    write_logs(store, row, s, found, rows, code)
    return {s: subsets_frame(ones, s) for s, ones in graded.items()}


def search(row: Instance, s: int, settings: Settings) -> tuple[Certificate, list[Graded]]:
    """The least error at each mass floor, from the highest, and without one, with what each search proved.

    The lower bound of optimal_full is raised where the 0.9 label can be refuted. Nodes and seconds are those spent
    until each floor was done; with optimal_full, the label's decision included. What the clock may have cut short is
    marked as stopped by it, the label's decision too.
    """
    floors, nodes, limit = settings.floors, settings.node_limit, settings.time_limit
    found = certify(row, s, node_limit=nodes, time_limit=limit, cascade=floors, proof=settings.proof)
    graded = [_graded(row, FLOOR, found, each) for each in found.floors[:-1]]
    last = found.floors[-1]
    full = _graded(row, FULL, found, last)
    if last.proved:
        return found, [*graded, full]
    began = time.perf_counter()
    limit = max(limit - found.seconds, LABEL_SHARE * limit)
    refuted = refuted_label(row, s, last, nodes, limit)
    seconds = time.perf_counter() - began
    full = replace(full, seconds=found.seconds + seconds)
    if refuted is not None:
        full = replace(full, lower=max(full.lower, refuted))
    elif seconds > SEARCH_SHARE * limit:
        full = replace(full, stopped_by="time_limit")
    return found, [*graded, full]


def refuted_label(row: Instance, s: int, best: Floor, node_limit: int, time_limit: float) -> float | None:
    """A lower bound of e_s just below 0.9 e_s(top-mass), if it is proved here that no subset is better; else None.

    Not tried where the label is known: the best subset says yes, its bound says no, or the top-mass error is zero
    within rounding, which is no.
    """
    top = row.forced_error(top_mass(row, s))
    threshold = LABEL_RATIO * top
    bound = threshold * (1 - DECISION_SLACK)
    if top <= row.rounding or best.error <= threshold or best.lower >= bound:
        return None
    return bound if decide(row, s, threshold, node_limit=node_limit, time_limit=time_limit) is False else None


def wanted_of(documents: list[Document], manifest: pl.DataFrame) -> dict[Document, dict[int, set[str]]]:
    """The manifest's rows by document and budget, in the order of the documents; without those that have none."""
    by_name = {(document.model, document.doc_id): document for document in documents}
    wanted: dict[Document, dict[int, set[str]]] = {document: {} for document in documents}
    for (model, doc_id, s), part in sorted(manifest.group_by("model", "doc_id", "s")):
        wanted[by_name[str(model), int(str(doc_id))]][int(str(s))] = set(part["row_id"])
    return {document: by_budget for document, by_budget in wanted.items() if by_budget}


def path_of(store: Store, document: Document, s: int) -> Path:
    """The file of the certified rows of one document at one budget."""
    return store.subsets(document.model, s, FOLDER, document.doc_id)


def _graded(row: Instance, rule: str, found: Certificate, floor: Floor) -> Graded:
    return Graded(
        rule=rule,
        search=found.search,
        subset=floor.subset,
        error=floor.error,
        lower=floor.lower,
        free_error=free_error(row, floor.subset),
        status="optimal" if floor.proved else "bracketed",
        searched=found.searched,
        nodes=floor.nodes,
        seconds=floor.seconds,
        stopped_by=floor.stopped_by,
        mass_floor=floor.rho,
    )


def _held(path: Path, provenance: Provenance) -> Held:
    if not is_current(SUBSETS, path, provenance):
        return Held(subsets_frame([], 0), {})
    try:
        limits = footer(SUBSETS, path)["notes"]["limits"]  # type: ignore[index]
        by_row = {str(row_id): (int(nodes), float(seconds)) for row_id, (nodes, seconds) in limits.items()}
        found = read(SUBSETS, path)
    except (BadInput, KeyError, TypeError, ValueError):  # a damaged file is made again
        return Held(subsets_frame([], 0), {})
    return Held(found.filter(pl.col("row_id").is_in(list(by_row))), by_row)


def _put(path: Path, provenance: Provenance, held: Held, fresh: pl.DataFrame, settings: Settings) -> None:
    """The rows searched now, and those of before that were not, with the limits of each."""
    kept = held.subsets.join(fresh, on="row_id", how="anti")
    limits = {row_id: held.limits[row_id] for row_id in kept["row_id"].unique()}
    limits |= dict.fromkeys(fresh["row_id"], (settings.node_limit, settings.time_limit))
    together = pl.concat([kept, fresh]).sort("row_id", "mass_floor", descending=[False, True])
    write(SUBSETS, together, path, replace(provenance, notes={"limits": dict(sorted(limits.items()))}))
