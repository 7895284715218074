"""Proof logs of certified rows: written beside the tables, read back, and replayed by the independent checker."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from data import BadInput, Provenance, Store
from data.schema import PROOF, SUBSETS
from data.store import is_current, read
from enumerate.documents import Selection, rows_of
from enumerate.rows import RowToGrade
from solvers import top_mass
from solvers.branch_and_bound import PROOF_GAP
from solvers.certificate import Certificate
from solvers.exhaustive import leaf_rounding
from solvers.problem import Instance
from solvers.proof import BRANCH, InvalidProof, Proof, load, save
from solvers.replay import ERROR_SLACK, exact_error_squared, replay

LIGHTEST = 1 - 1.1e-12  # a floor may be missed by 1e-12 relatively, and its rounding
REPLAYED_NODES = 5_000  # a longer log is replayed only on request


@dataclass(frozen=True)
class Replays:
    """What came of replaying logs.

    logs, replayed: how many there are, and how many were short enough or wanted anyway. subsets: whose error was
    computed again in exact rationals. nodes, seconds: of the replayed. n_bytes: of all logs. failures: one line each.
    """

    logs: int = 0
    replayed: int = 0
    subsets: int = 0
    nodes: int = 0
    seconds: float = 0.0
    n_bytes: int = 0
    failures: list[str] = field(default_factory=list)

    @classmethod
    def total(cls, parts: Iterable["Replays"]) -> "Replays":
        """All of them together."""
        found = list(parts)
        sums: dict[str, Any] = {f.name: sum(getattr(part, f.name) for part in found) for f in fields(cls)[:-1]}
        return cls(**sums, failures=[line for part in found for line in part.failures])


def provenance_of(row_id: str, s: int, mass_floor: float, lower: float, rows: str, code: str) -> Provenance:
    """How the log of one floor of a row comes to be; it is of the table's own search if it proves the same bound."""
    parameters = {"row_id": row_id, "s": s, "mass_floor": mass_floor, "lower": lower}
    return Provenance("certify", parameters, 0, {"rows": rows}, code)


def write_logs(store: Store, row: RowToGrade, s: int, found: Certificate, rows: str, code: str) -> None:
    """Put down the log of every proved floor that claims a bound."""
    for floor in found.floors:
        if floor.proved and floor.proof is not None:
            provenance = provenance_of(row.row_id, s, floor.rho, floor.lower, rows, code)
            save(floor.proof, store.proof(row.model, s, row.row_id, floor.rho), provenance)


def without_logs(store: Store, model: str, subsets: pl.DataFrame, rows: str, code: str) -> set[str]:
    """Of rows of table subsets, those that lack the log of a proved floor, or have one that other code made."""
    return {
        record["row_id"]
        for record in _logged(subsets).iter_rows(named=True)
        if not is_current(
            PROOF,
            store.proof(model, record["s"], record["row_id"], record["mass_floor"]),
            provenance_of(record["row_id"], record["s"], record["mass_floor"], record["lower"], rows, code),
        )
    }


def check(store: Store, chosen: Selection, folder: str, replay_all: bool) -> Replays:
    """Check what the files say of the chosen rows, from the stored weights and values alone.

    Each subset's error again in exact rationals, and each log that claims a proved bound replayed, unless it has more
    than REPLAYED_NODES nodes and not all are wanted.
    """
    parts = []
    certified = {
        s: read(SUBSETS, store.subsets(chosen.document.model, s, folder, chosen.document.doc_id))
        for s, _ in chosen.wanted
    }
    for row in rows_of(store, chosen.document, chosen.part, chosen.row_ids):
        for s, row_ids in chosen.wanted:
            if row.row_id in row_ids:
                records = certified[s].filter(pl.col("row_id") == row.row_id)
                parts += [_check_subset(row, record) for record in records.iter_rows(named=True)]
                for record in _logged(records).iter_rows(named=True):
                    path = store.proof(row.model, s, row.row_id, record["mass_floor"])
                    parts.append(_check_log(row, record, path, replay_all))
    return Replays.total(parts)


def _logged(subsets: pl.DataFrame) -> pl.DataFrame:
    """Rows of table subsets whose bound has a log: proved, and above 0."""
    return subsets.filter((pl.col("status") == "optimal") & (pl.col("lower") > 0))


def _check_subset(row: RowToGrade, record: dict[str, Any]) -> Replays:
    """What the record says of its subset and of its bound, but that no other subset is better."""
    instance, s, rho = row.instance, record["s"], record["mass_floor"]
    keys = np.array(record["subset"], dtype=np.int64) - row.first_key
    squared = exact_error_squared(instance.weights, instance.values, keys)
    error, lower = Fraction(record["error"]), Fraction(record["lower"])
    off = Fraction(instance.rounding) + ERROR_SLACK * error
    said = f"{row.row_id} at s = {s}, floor {rho:g}: error {record['error']!r}, lower {record['lower']!r}"
    failures = []
    if not (max(Fraction(0), error - off) ** 2 <= squared <= (error + off) ** 2 and squared >= lower**2):
        failures.append(f"{said}, but its subset has {math.sqrt(squared)!r}")
    if keys.size != s or instance.kept_mass(keys) < rho * instance.kept_mass(top_mass(instance, s)) * LIGHTEST:
        failures.append(f"{said}, but its {keys.size} keys are not {s} that keep the floor")
    # "optimal" leaves room for the proof gap and for the rounding that the bound has taken off.
    gap = Fraction(2 * PROOF_GAP) * error + 4 * Fraction(_rounding(instance))
    if record["status"] == "optimal" and lower < error - gap:
        failures.append(f"{said} is called optimal, but the bound does not say so")
    return Replays(subsets=1, failures=failures)


def _rounding(row: Instance) -> float:
    """What a search takes off a proved bound for rounding, in the unit of the values."""
    return row.rounding + leaf_rounding(row, row.n) * row.unit


def _check_log(row: RowToGrade, record: dict[str, Any], path: Path, replay_all: bool) -> Replays:
    """That the log proves the stated bound over all keys of positive weight."""
    try:
        proof = load(path)
        _check_claim(row, record, proof)
        nodes = 1 + 2 * sum(step.kind == BRANCH for step in proof.steps())
        if nodes > REPLAYED_NODES and not replay_all:
            return Replays(logs=1, n_bytes=path.stat().st_size)
        done = replay(row.instance.weights, row.instance.values, proof)
    except (InvalidProof, BadInput) as error:
        return Replays(logs=1, failures=[f"{path}: {error}"])
    return Replays(logs=1, replayed=1, nodes=done.nodes, seconds=done.seconds, n_bytes=path.stat().st_size)


def _check_claim(row: RowToGrade, record: dict[str, Any], proof: Proof) -> None:
    if (proof.s, proof.mass_floor) != (record["s"], record["mass_floor"]):
        raise InvalidProof(f"it is of s = {proof.s} and floor {proof.mass_floor:g}: expected those of its name")
    if proof.lower < record["lower"]:
        raise InvalidProof(f"it claims {proof.lower!r}: expected the bound of the table, {record['lower']!r}")
    if not np.array_equal(proof.keys, np.flatnonzero(row.instance.weights > 0)):
        raise InvalidProof(f"it searches {proof.keys.size} keys: expected all {row.instance.n_positive} of the row")
