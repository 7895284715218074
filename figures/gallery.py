"""The rows of largest kappa-hat, first model first, told in tokens: what top-mass keeps and what the optimum swaps."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from analysis.frame import CERTIFIED_FOLDER, OPTIMAL_POOL, TOP_MASS, files_of, samples
from analysis.rules import OURS
from data.schema import ROWS, SUBSETS, TOKENS
from data.store import Store, read
from figures import style

COUNT = 10  # rows shown
OF_FIRST = 4  # of them are of the first model, where there are others
CONTEXT = 60  # tokens shown up to the query
BEFORE = 3  # tokens shown before a key, so that it can be read
_VISIBLE = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}


@dataclass(frozen=True)
class Key:
    """A key of a row: true position, weight (share of the row), token and the tokens before it.

    text and before are "" where the model's tokens are not stored; weight is None where its rows are not. swapped:
    the optimum drops it, or, among the keys of a user's rule, top-mass does not keep it.
    """

    position: int
    weight: float | None
    text: str
    before: str
    swapped: bool


@dataclass(frozen=True)
class Piece:
    """A token of the context and what becomes of its key: any of "kept", "out", "in", "query", or nothing."""

    text: str
    role: str


@dataclass(frozen=True)
class Own:
    """What a user's rule keeps of the row; ratio: its error over top-mass's, both above 0 for a row shown here."""

    rule: str
    error: float
    ratio: float
    kept_mass: float
    kept: list[Key]


@dataclass(frozen=True)
class Entry:
    """One row of the gallery. Errors in units of |v|; masses are shares of the row's attention."""

    row_id: str
    family: str
    model: str
    doc_id: int
    layer: int
    q_head: int
    s: int
    n_keys: int
    position: int | None
    dropped_mass: float
    e_top: float
    e_pool: float
    kappa: float
    mass_top: float
    mass_pool: float
    kept: list[Key]
    swaps: list[tuple[Key, Key]]
    own: list[Own]
    context: list[Piece]


def gallery(store: Store, count: int = COUNT) -> list[Entry]:
    """`count` distinct rows of large finite kappa-hat, each at its worst budget; see largest() for which.

    Empty if there are no subsets. Raises BadInput if the subsets are not whole.
    """
    if not store.subset_files():
        return []
    files = (path for _, paths in files_of(store).values() for path in paths)
    subsets = [path for path in files if path.parent.name != CERTIFIED_FOLDER]
    return [_entry(store, subsets, row) for row in largest(store, count).iter_rows(named=True)]


def largest(store: Store, count: int = COUNT) -> pl.DataFrame:
    """Facts of the rows shown with kappa, e_top and e_pool, each at the budget where its kappa-hat is largest.

    The OF_FIRST rows of largest kappa-hat of the first model, which is the real one wherever it was measured, and the
    largest over all other models; more of the one where the other has too few. In order of model, then kappa-hat.
    kappa-hat = e_s(top-mass) / ES_pool (P1), as the analysis counts it. Ties go by row_id, then s.
    """
    best, found_of = [], []
    for sample in samples(store, resamples=1, seed=0):
        found_of.append((sample.family, sample.model))
        found = sample.facts.with_columns(
            kappa=pl.Series(sample.kappa), e_top=pl.Series(sample.top), e_pool=pl.Series(sample.optimum)
        )
        best.append(_ranked(found.filter(pl.col("kappa").is_finite() & (pl.col("kappa") > 1))).head(count))
    ranked = _ranked(pl.concat(best)).unique("row_id", keep="first", maintain_order=True)
    headline = style.in_order(pl.DataFrame(found_of, schema=["family", "model"], orient="row"))["model"][0]
    first, others = (ranked.filter(of) for of in (pl.col("model") == headline, pl.col("model") != headline))
    first = first.head(max(min(OF_FIRST, count), count - others.height))
    return style.in_order(pl.concat([first, others.head(count - first.height)]))


def visible(text: str) -> str:
    """A token with its white space and control characters shown; an empty one as the empty set."""
    shown = (_VISIBLE.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in text)
    return "".join(shown) or "∅"


def _ranked(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.sort("kappa", "row_id", "s", descending=[True, False, False])


def _entry(store: Store, subsets: list[Path], row: Mapping[str, object]) -> Entry:
    """Everything that the page shows of one row of `largest`."""
    model, doc_id, s, row_id = str(row["model"]), int(str(row["doc_id"])), int(str(row["s"])), str(row["row_id"])
    chosen = _chosen(store, subsets, model, s, doc_id, row_id)
    top, pool = (np.array(chosen[rule]["subset"], dtype=np.int64) for rule in (TOP_MASS, OPTIMAL_POOL))
    position, weights = _weights(store, model, doc_id, row_id)
    tokens = _tokens(store, model, doc_id)
    out, into = np.setdiff1d(top, pool), np.setdiff1d(pool, top)

    def keys(positions: npt.NDArray[np.int64], swapped: npt.NDArray[np.int64] = out) -> list[Key]:
        made = [
            Key(
                int(p),
                weights.get(int(p)),
                visible(tokens[p]) if p in tokens else "",
                "".join(visible(tokens[q]) for q in range(max(0, int(p) - BEFORE), int(p)) if q in tokens),
                bool(np.isin(p, swapped)),
            )
            for p in positions
        ]
        return sorted(made, key=lambda key: (-(key.weight or 0.0), key.position))

    roles = dict.fromkeys(top.tolist(), "kept") | dict.fromkeys(out.tolist(), "out")
    roles |= dict.fromkeys(into.tolist(), "in")
    context: list[Piece] = []
    if position is not None and tokens:
        for p in range(max(0, position - CONTEXT), position + 1):
            role = f"{roles.get(p, '')} {'query' if p == position else ''}"
            context.append(Piece(visible(tokens.get(p, "")), role.strip()))
    own = []
    for rule in sorted(set(chosen) - set(OURS)):
        kept, error = np.array(chosen[rule]["subset"], dtype=np.int64), float(str(chosen[rule]["error"]))
        mass, ratio = float(str(chosen[rule]["kept_mass"])), error / float(str(row["e_top"]))
        own.append(Own(rule, error, ratio, mass, keys(kept, np.setdiff1d(kept, top))))
    number = {name: float(str(row[name])) for name in ("dropped_mass", "e_top", "e_pool", "kappa")}
    return Entry(
        row_id=row_id,
        family=str(row["family"]),
        model=model,
        doc_id=doc_id,
        layer=int(str(row["layer"])),
        q_head=int(str(row["q_head"])),
        s=s,
        n_keys=int(str(row["n_keys"])),
        position=position,
        mass_top=float(str(chosen[TOP_MASS]["kept_mass"])),
        mass_pool=float(str(chosen[OPTIMAL_POOL]["kept_mass"])),
        kept=keys(top),
        swaps=list(zip(keys(out), keys(into), strict=False)),
        own=own,
        context=context,
        **number,
    )


def _chosen(
    store: Store, subsets: list[Path], model: str, s: int, doc_id: int, row_id: str
) -> dict[str, dict[str, object]]:
    """The records of table subsets of one row at one budget, by rule, from these files."""
    found: dict[str, dict[str, object]] = {}
    for path in subsets:
        if path == store.subsets(model, s, path.parent.name, doc_id):
            frame = read(SUBSETS, path, ["row_id", "rule", "subset", "error", "kept_mass"])
            for record in frame.filter(pl.col("row_id") == row_id).iter_rows(named=True):
                found[str(record["rule"])] = record
    return found


def _weights(store: Store, model: str, doc_id: int, row_id: str) -> tuple[int | None, dict[int, float]]:
    """The query's position and the stored weight at each true position; nothing if the row is not stored."""
    path = store.rows(model, doc_id)
    if not path.is_file():
        return None, {}
    frame = read(ROWS, path, ["row_id", "position", "first_key", "weights"]).filter(pl.col("row_id") == row_id)
    if frame.is_empty():
        return None, {}
    first = int(frame["first_key"][0])
    return int(frame["position"][0]), {first + j: float(w) for j, w in enumerate(frame["weights"][0])}


def _tokens(store: Store, model: str, doc_id: int) -> dict[int, str]:
    """The document's tokens by position; nothing if they are not stored."""
    path = store.tokens(model, doc_id)
    if not path.is_file():
        return {}
    frame = read(TOKENS, path, ["position", "text"])
    return dict(zip(frame["position"].to_list(), frame["text"].to_list(), strict=True))
