"""The log of a finished branch and bound: what another program needs to check it by itself.

The log is the search tree, depth first. A checker starts from the node that keeps nothing, with every key of `keys`
still free, and takes the records in order; each belongs to the node that is current.

- branch: the node falls into two, the child that keeps the key, whose whole subtree comes next, and the one that drops
  it.
- fix: `kept` leave the free keys and are kept, `dropped` leave them for good, and the node goes on.
- prune, mass, leaf: the node is closed. A prune gives the vector z and the multiplier nu of a Lagrangian bound; mass
  says that the heaviest completion keeps too little; leaf says that the few completions are to be looked at one by one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from data import BadInput, Provenance
from data.schema import PROOF
from data.store import footer, read, write

Indices = npt.NDArray[np.int64]
Marks = npt.NDArray[np.int32]
Reals = npt.NDArray[np.float64]

BRANCH, FIX, PRUNE, MASS, LEAF = range(5)
WITH_VECTOR = (FIX, PRUNE)
KINDS = ("branch", "fix", "prune", "mass", "leaf")  # names of the above, in tables and messages
MOST_KEYS = 2**31  # an index of a log fits in int32
NEEDED = {"key": (BRANCH,), "kept": (FIX,), "dropped": (FIX,), "nu": WITH_VECTOR, "z": WITH_VECTOR}  # null elsewhere


class InvalidProof(ValueError):
    """A log that does not prove what it claims: which record, of which kind, and what fails."""


class Step(NamedTuple):
    """What the stream of marks says of one record: key of a branch (-1: none), ids of a fix."""

    kind: int
    key: int
    kept: Marks
    dropped: Marks


class Record(NamedTuple):
    """One record: its step, and of a fix or prune nu (in Proof.unit) and z (d,)."""

    step: Step
    nu: float
    z: Reals


@dataclass(frozen=True, eq=False)
class Proof:
    """A proof that no subset of s of the keys that keeps enough mass has a forced error below `lower` (ours).

    s: budget. mass_floor: rho, only subsets with p(A) >= rho p(top-mass set of the whole row) are spoken of. keys: (m,)
    ascending row-local indices that subsets are drawn from, all of positive weight. lower: the claim, in the unit of
    the values; 0 claims nothing. unit: a power of two; nu in the stream times it is in the unit of the values (z is a
    pure number). marks: int32 stream of "BRANCH key", "FIX n kept_1 .. kept_n m dropped_1 .. dropped_m", "PRUNE",
    "MASS", "LEAF", with row-local indices. reals: float64 stream of nu, z_1 .. z_d for each FIX and PRUNE.
    """

    s: int
    mass_floor: float
    keys: Indices
    lower: float
    unit: float
    marks: Marks
    reals: Reals

    def steps(self) -> Iterator[Step]:
        """The records in order, without their vectors; raises InvalidProof where the stream of marks breaks off."""
        none = self.marks[:0]
        at = number = 0
        while at < self.marks.size:
            kind = int(self.marks[at])
            where = f"record {number}"
            if not 0 <= kind < len(KINDS):
                raise InvalidProof(f"{where}: kind {kind}: expected 0 to {len(KINDS) - 1}")
            key, kept, dropped = -1, none, none
            at += 1
            if kind == BRANCH:
                self._expect(at + 1, where, kind)
                key, at = int(self.marks[at]), at + 1
            elif kind == FIX:
                kept, at = self._ids(at, where)
                dropped, at = self._ids(at, where)
            yield Step(kind, key, kept, dropped)
            number += 1

    def records(self, d: int) -> Iterator[Record]:
        """The records in order, for values of d dimensions; raises InvalidProof where a stream breaks off."""
        at = 0
        for number, step in enumerate(self.steps()):
            if step.kind not in WITH_VECTOR:
                yield Record(step, 0.0, self.reals[:0])
                continue
            end = at + 1 + d
            if end > self.reals.size:
                raise InvalidProof(f"record {number} ({KINDS[step.kind]}): the stream of vectors ends within it")
            yield Record(step, float(self.reals[at]), self.reals[at + 1 : end])
            at = end
        if at != self.reals.size:
            raise InvalidProof(f"after the last record {self.reals.size - at} numbers are left over")

    def _ids(self, at: int, where: str) -> tuple[Marks, int]:
        self._expect(at + 1, where, FIX)
        end = at + 1 + int(self.marks[at])
        if end <= at:
            raise InvalidProof(f"{where} (fix): {self.marks[at]} keys: expected at least 0")
        self._expect(end, where, FIX)
        return self.marks[at + 1 : end], end

    def _expect(self, end: int, where: str, kind: int) -> None:
        if end > self.marks.size:
            raise InvalidProof(f"{where} ({KINDS[kind]}): the stream of marks ends within it")

    def frame(self) -> pl.DataFrame:
        """The log as a table of schema PROOF, nu in the unit of the values; raises InvalidProof for broken streams."""
        steps = list(self.steps())
        has_vector = np.array([step.kind in WITH_VECTOR for step in steps], dtype=bool)
        n_vectors = int(has_vector.sum())
        width = self.reals.size // n_vectors if n_vectors else 2
        if self.reals.size != n_vectors * width or width < 2:
            raise InvalidProof(f"{self.reals.size} numbers for {n_vectors} vectors: expected nu and z for each")
        vectors = self.reals.reshape(-1, width)
        z = pl.Series(vectors[:, 1:], dtype=pl.Array(pl.Float64, width - 1)).arr.to_list()
        # Record i has vector number place[i]; null where it has none.
        place = pl.Series(np.cumsum(has_vector) - 1).set(pl.Series(~has_vector), None)
        return pl.DataFrame(
            {
                "kind": pl.Series([KINDS[step.kind] for step in steps], dtype=pl.String),
                "key": pl.Series([step.key if step.kind == BRANCH else None for step in steps], dtype=pl.Int32),
                "nu": pl.Series(vectors[:, 0] * self.unit, dtype=pl.Float64).gather(place),
                "z": z.gather(place),
                "kept": _lists([step.kept if step.kind == FIX else None for step in steps]),
                "dropped": _lists([step.dropped if step.kind == FIX else None for step in steps]),
            }
        )

    @classmethod
    def from_frame(
        cls, frame: pl.DataFrame, s: int, mass_floor: float, keys: Indices, lower: float, unit: float = 1.0
    ) -> "Proof":
        """The log that frame() made, nu taken in `unit`; raises BadInput that names the row that makes no sense."""
        PROOF.check(frame)
        marks: list[int] = []
        reals: list[float] = []
        for number, entry in enumerate(frame.iter_rows(named=True)):
            if entry["kind"] not in KINDS:
                raise BadInput(f"row {number} of a proof has kind {entry['kind']!r}: expected one of {KINDS}")
            kind = KINDS.index(entry["kind"])
            for name, needed in NEEDED.items():
                if (entry[name] is not None) != (kind in needed):
                    raise BadInput(f"row {number} of a proof, a {entry['kind']}: {name} is {entry[name]}")
            marks.append(kind)
            if kind == BRANCH:
                marks.append(entry["key"])
            elif kind == FIX:
                for ids in (entry["kept"], entry["dropped"]):
                    marks += [len(ids), *ids]
            if kind in WITH_VECTOR:
                reals += [entry["nu"], *entry["z"]]
        if None in marks or None in reals:
            raise BadInput("a list of a proof holds a null: expected numbers")
        return cls(s, mass_floor, keys, lower, unit, np.array(marks, dtype=np.int32), np.array(reals, dtype=np.float64))


def save(proof: Proof, path: Path, provenance: Provenance) -> None:
    """Write a log as Parquet (schema PROOF), by an atomic rename, with what it claims in the footer's notes.

    provenance.parameters must hold "row_id", so that the file and the row suffice to check it; raises ValueError if
    not.
    """
    if "row_id" not in provenance.parameters:
        raise ValueError("the provenance of a proof lacks row_id among its parameters: expected it")
    claim = {
        "s": proof.s,
        "mass_floor": float(proof.mass_floor),
        "lower": float(proof.lower),
        "keys": _runs(proof.keys),
    }
    notes = {**provenance.notes, "claim": claim}
    noted = Provenance(
        provenance.command, provenance.parameters, provenance.seed, provenance.inputs, provenance.code, notes
    )
    write(PROOF, proof.frame(), path, noted)


def load(path: Path) -> Proof:
    """The log of a file that save() wrote, nu in the unit of the values; raises BadInput if it is damaged."""
    notes = footer(PROOF, path)["notes"]
    try:
        claim = notes["claim"]  # type: ignore[index]
        s, mass_floor, lower = claim["s"], claim["mass_floor"], claim["lower"]
        ends = [(first, last) for first, last in claim["keys"]]
        if type(s) is not int or not all(type(x) is float for x in (mass_floor, lower)):
            raise TypeError("s, mass_floor or lower")
        if not all(type(x) is int and 0 <= x < MOST_KEYS for run in ends for x in run):
            raise TypeError("keys")
        runs = [np.arange(first, last + 1, dtype=np.int64) for first, last in ends]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: its footer has no whole claim: expected a file that save() wrote") from error
    keys = np.concatenate([np.empty(0, dtype=np.int64), *runs])
    try:
        return Proof.from_frame(read(PROOF, path), s, mass_floor, keys, lower)
    except BadInput as error:
        raise error if str(path) in str(error) else BadInput(f"{path}: {error}") from error


def _runs(keys: Indices) -> list[tuple[int, int]]:
    """Ascending indices as (first, last) of every run without a gap: mostly one, as zero weights are rare."""
    breaks = np.flatnonzero(np.diff(keys) != 1)
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, keys.size - 1)
    return [(int(keys[a]), int(keys[b])) for a, b in zip(firsts, lasts, strict=True)] if keys.size else []


def _lists(ids: list[Marks | None]) -> pl.Series:
    return pl.Series([None if i is None else i.tolist() for i in ids], dtype=pl.List(pl.Int32))
