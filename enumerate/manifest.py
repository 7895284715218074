"""Which rows and budgets the search over whole rows takes: a draw spread evenly, the same for everyone."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import polars as pl

from data import BadInput, Provenance, Store
from data.schema import MANIFEST, ROW_FACTS
from data.store import code_digest, digest_of, footer, is_current, read, sha256, write
from enumerate.documents import Document, digest_of_rows

SIZES: dict[str, int | None] = {"small": 200, "paper": 960, "all": None}  # pairs; P1's solver audit took 960
DECILES = 10
COMMAND = "certify"

Name = TypeVar("Name", str, int)


def make(
    store: Store, documents: Sequence[Document], budgets: tuple[int, ...], name: str, model: str, seed: int
) -> tuple[pl.DataFrame, str]:
    """The manifest of that name over these documents, put into the store, and its sha256 in hex.

    The hash is of the (row_id, s) pairs in order. Raises BadInput as candidates() does.
    """
    found = candidates(store, documents, budgets)
    size = SIZES[name]
    drawn = found if size is None else draw(found, size, seed)
    drawn = drawn.sort("family", "model", "s", "decile", "row_id")
    facts = [store.facts(each.model, s, each.doc_id) for each in documents for s in budgets]
    parameters = {"manifest": name, "s": list(budgets), "model": model}
    inputs = {"facts": digest_of(sha256(path) for path in facts)}
    provenance = Provenance(COMMAND, parameters, seed, inputs, code_digest("data", "enumerate"))
    if not is_current(MANIFEST, store.manifest(name), provenance):
        write(MANIFEST, drawn, store.manifest(name), provenance)
    return drawn, digest_of(f"{row_id} {s}" for row_id, s in drawn.select("row_id", "s").iter_rows())


def candidates(store: Store, documents: Sequence[Document], budgets: tuple[int, ...]) -> pl.DataFrame:
    """Every row of these documents at every budget, with its decile, as rows of table manifest.

    Deciles are of the least dropped mass within a model and a budget: by rank, so that they are of equal size
    within one; equal masses by row_id. Raises BadInput if the facts of a document are missing or those of other rows.
    """
    parts = []
    for document in documents:
        rows = digest_of_rows(store, document)
        for s in budgets:
            path = store.facts(document.model, s, document.doc_id)
            try:
                inputs = footer(ROW_FACTS, path)["inputs"]
            except BadInput as error:
                raise _no_facts(document, s, str(error)) from error
            if not isinstance(inputs, dict) or inputs.get("rows") != rows:
                raise _no_facts(document, s, f"{path} is of other rows")
            parts.append(read(ROW_FACTS, path, ["row_id", "family", "model", "doc_id", "s", "dropped_mass"]))
    found = pl.concat(parts).sort("model", "s", "dropped_mass", "row_id")
    place = pl.int_range(pl.len()).over("model", "s")
    decile = (place * DECILES // pl.len().over("model", "s")).cast(pl.Int32)
    return MANIFEST.select(found.with_columns(decile.alias("decile")))


def draw(found: pl.DataFrame, size: int, seed: int) -> pl.DataFrame:
    """`size` of the candidates, spread over family, then budget, then decile; all of them where there are fewer.

    At each level the pairs are dealt out in turn, one each, to those that still have some: shares differ by one at
    most unless one runs out. Who comes first, which decides who gets the remainder, and which rows of a decile are
    taken, follow from the order of sha256(seed and name): the draw depends on the rows and the seed alone, and a
    larger draw holds the smaller one.
    """
    chosen = []
    families = dict(sorted((str(key[0]), part) for key, part in found.group_by("family")))
    for family, in_family in _deal(size, {family: part.height for family, part in families.items()}, f"{seed}").items():
        budgets = {int(str(key[0])): part for key, part in families[family].group_by("s")}
        heights = {s: part.height for s, part in budgets.items()}
        for s, in_budget in _deal(in_family, heights, f"{seed} {family}").items():
            deciles = {int(str(key[0])): part for key, part in budgets[s].group_by("decile")}
            heights = {decile: part.height for decile, part in deciles.items()}
            for decile, share in _deal(in_budget, heights, f"{seed} {family} {s}").items():
                part = deciles[decile]
                ranks = [digest_of((str(seed), row_id, str(s))) for row_id in part["row_id"]]
                order = pl.Series("rank", ranks, dtype=pl.String)
                chosen.append(part.with_columns(order).sort("rank").head(share).drop("rank"))
    return pl.concat(chosen) if chosen else found.head(0)


def _deal(total: int, holds: Mapping[Name, int], label: str) -> dict[Name, int]:
    """How many each gets of the total, dealt in turn in the order of the hash; none gets more than it holds."""
    order = sorted(holds, key=lambda name: digest_of((label, str(name))))
    shares = dict.fromkeys(order, 0)
    left = min(total, sum(holds.values()))
    while left:
        for name in order:
            if left and shares[name] < holds[name]:
                shares[name] += 1
                left -= 1
    return shares


def _no_facts(document: Document, s: int, why: str) -> BadInput:
    rows = "" if document.source is None else f" ROWS={document.source}"
    return BadInput(f"{document.model} has not been graded at s = {s} ({why}): run make enumerate S={s}{rows} first")
