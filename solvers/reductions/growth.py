"""How branch and bound grows with n: reduced instances beside captured rows of as many keys."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from data.schema import HARDNESS, ROWS
from data.store import Provenance, Store, code_digest, read, sha256
from solvers.branch_and_bound import certify
from solvers.cp_sat import zero_es
from solvers.load import load
from solvers.problem import Indices, Instance
from solvers.reductions import PAPER, exact_cover
from solvers.reductions.exact_cover import ExactCover
from solvers.reductions.partition import Partition

SIZES = (8, 12, 16, 20, 24, 28)  # keys; even, since the paper's reduction keeps half of them
DRAWS = 5  # random instances of each kind and size
ROWS_OF_A_MODEL = 3
NODE_LIMIT = 500_000  # a few seconds
SPARE_BITS = 6  # numbers of n / 2 + 6 bits: so few subsets for so many sums that most instances have no solution
COVER_SHARE = 5  # one key in so many is kept in exact covers
PARTITION, EXACT_COVER, CAPTURED = "Partition", "Exact Cover by 3-Sets", "captured"


@dataclass(frozen=True, eq=False)
class Problem:
    """An instance to search: what it is made from, whether a subset of error 0 exists (None: nobody has decided)."""

    problem: str
    draw: int
    row_id: str | None
    zero: bool | None
    row: Instance
    s: int
    candidates: Indices | None


def provenance(store: Store, seed: int, row_ids: Sequence[str]) -> Provenance:
    """How table hardness comes to be from these captured rows."""
    parameters = {"sizes": SIZES, "draws": DRAWS, "node_limit": NODE_LIMIT, "rows": row_ids}
    files = sorted({store.rows(*_document(row_id)) for row_id in row_ids})
    inputs = {str(path.relative_to(store.root)): sha256(path) for path in files}
    return Provenance("solvers.reductions", _plain(parameters), seed, inputs, code_digest("data", "solvers"))


def captured(store: Store, seed: int) -> list[str]:
    """Ids of ROWS_OF_A_MODEL rows of each model's first document, drawn among those with keys enough."""
    found = []
    for number, model in enumerate(store.models()):
        frame = read(ROWS, store.row_files(model)[0], ["row_id", "n_keys"])
        ids = frame.filter(pl.col("n_keys") >= SIZES[-1])["row_id"].sort()
        random = np.random.default_rng([seed, number])
        found += [ids[int(j)] for j in random.permutation(len(ids))[:ROWS_OF_A_MODEL]]
    return found


def problems(store: Store, seed: int, row_ids: Sequence[str]) -> Iterator[Problem]:
    """Every instance, by size: Partition and Exact Cover without and with a solution, then the captured rows."""
    rows = [load(row_id, store.root) for row_id in row_ids]
    for n in SIZES:
        for draw in range(DRAWS):
            for zero in (False, True):
                numbers = PAPER.reduce(partition_of(n // 2, zero, np.random.default_rng([seed, n, draw, zero])))
                yield Problem(PARTITION, draw, None, zero, numbers.instance(), numbers.s, None)
                cover = exact_cover.reduce(cover_of(n, zero, np.random.default_rng([seed, n, draw, zero, 3])))
                yield Problem(EXACT_COVER, draw, None, zero, cover.instance(), cover.s, None)
        for draw, (row_id, row) in enumerate(zip(row_ids, rows, strict=True)):
            if row.n_positive >= n:
                yield Problem(CAPTURED, draw, row_id, None, row, n // 2, row.order[:n])


def count(row_ids: Sequence[str]) -> int:
    """How many instances problems() yields at most."""
    return len(SIZES) * (4 * DRAWS + len(row_ids))


def searched(problem: Problem) -> dict[str, object]:
    """A row of table hardness: what branch and bound did with an instance."""
    found = certify(problem.row, problem.s, candidates=problem.candidates, node_limit=NODE_LIMIT)
    n = problem.row.n if problem.candidates is None else problem.candidates.size
    return {
        "problem": problem.problem,
        "draw": problem.draw,
        "row_id": problem.row_id,
        "zero": problem.zero,
        "n": n,
        "d": problem.row.d,
        "s": problem.s,
        "subsets": float(math.comb(n, problem.s)),
        "error": found.error,
        "lower": found.lower,
        "proved": found.stopped_by == "finished",
        "nodes": found.nodes,
        "seconds": found.seconds,
    }


def as_frame(records: Sequence[dict[str, object]]) -> pl.DataFrame:
    """Rows of table hardness as its frame."""
    return pl.DataFrame(records, schema={name: column.dtype for name, column in HARDNESS.columns.items()})


def partition_of(items: int, zero: bool, random: np.random.Generator) -> Partition:
    """Numbers of even sum and items + SPARE_BITS bits: planted with a solution, or drawn until they have none."""
    largest = 2 ** (items + SPARE_BITS)
    while True:
        numbers = [int(u) for u in random.integers(1, largest, items)]
        if zero:  # what the first half of a random order lacks is put on its first number
            side = random.permutation(items)
            lack = sum(numbers[j] for j in side[items // 2 :]) - sum(numbers[j] for j in side[: items // 2])
            numbers[side[0]] += lack
            if numbers[side[0]] > 0:
                return Partition(tuple(numbers))
        elif sum(numbers) % 2 == 0 and not _has_half(numbers):
            return Partition(tuple(numbers))


def cover_of(keys: int, zero: bool, random: np.random.Generator) -> ExactCover:
    """Triples that give a row of so many keys: planted with a cover, or drawn until CP-SAT proves that they have none.

    Without a cover, every element is in some triple, so that the reason is not plain.
    """
    q = max(2, keys // COVER_SHARE)
    m = keys - q - 1
    while True:
        planted = random.permutation(3 * q).reshape(q, 3) if zero else np.empty((0, 3), dtype=np.int64)
        others = [random.permutation(3 * q)[:3] for _ in range(m - len(planted))]
        triples = [sorted(int(x) for x in triple) for triple in [*planted, *others]]
        order = random.permutation(m)
        cover = ExactCover(q, tuple((triples[j][0], triples[j][1], triples[j][2]) for j in order))
        if zero:
            return cover
        covered = {x for triple in cover.triples for x in triple}
        if len(covered) == 3 * q and zero_es(exact_cover.reduce(cover)).answer == "none":
            return cover


def _has_half(numbers: Sequence[int]) -> bool:
    """Whether some of the numbers sum to half of all: the bits of one integer are the sums that can be had."""
    sums = 1
    for u in numbers:
        sums |= sums << u
    return bool(sums >> (sum(numbers) // 2) & 1)


def _document(row_id: str) -> tuple[str, int]:
    model, doc_id, *_ = row_id.rsplit(":", 4)
    return model, int(doc_id)


def _plain(parameters: dict[str, object]) -> dict[str, object]:
    """As JSON would give them back, so that what was written compares equal."""
    return {name: list(x) if isinstance(x, tuple) else x for name, x in parameters.items()}
