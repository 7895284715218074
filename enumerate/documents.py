"""The documents whose rows a command takes, captured or a user's own, and how they fall into pieces of work."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from data import BadInput, Store
from data.schema import ROW_FACTS, ROWS, SUBSETS
from data.store import footer, read, sha256
from enumerate.rows import RowToGrade, captured_rows, own_rows

OWN_ROWS_AT_A_TIME = 64  # rows of a user's file that one worker takes


@dataclass(frozen=True)
class Document:
    """One document's rows: captured (source None) or from a user's file."""

    model: str
    doc_id: int
    source: Path | None = None


@dataclass(frozen=True)
class Selection:
    """What one worker takes: some rows of one part of a document, at which budgets each."""

    document: Document
    part: int
    wanted: tuple[tuple[int, frozenset[str]], ...]

    @property
    def row_ids(self) -> frozenset[str]:
        """The rows at any of the budgets."""
        return frozenset[str]().union(*(row_ids for _, row_ids in self.wanted))


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


def digest_of_rows(store: Store, document: Document) -> str:
    """sha256 of the file that holds the rows; a captured one's footer names that of every kv file."""
    return sha256(store.rows(document.model, document.doc_id) if document.source is None else document.source)


def lengths(store: Store, document: Document) -> list[tuple[str, int]]:
    """Each row's id and number of keys (of positive weight, where that is known without the keys)."""
    if document.source is None:
        columns = read(ROWS, store.rows(document.model, document.doc_id), ["row_id", "n_keys"])
        return list(zip(columns["row_id"], columns["n_keys"], strict=True))
    rows = own_rows(document.source)
    return [(row.row_id, row.instance.n_positive) for row in rows if row.doc_id == document.doc_id]


def parts_of(store: Store, document: Document) -> dict[int, list[str]]:
    """The ids of the rows of each part: a layer of a captured document, or so many rows of a user's file."""
    if document.source is None:
        columns = read(ROWS, store.rows(document.model, document.doc_id), ["row_id", "layer"])
        grouped = columns.group_by("layer", maintain_order=True).agg("row_id").sort("layer")
        return dict(zip(grouped["layer"], grouped["row_id"].to_list(), strict=True))
    mine = [row.row_id for row in own_rows(document.source) if row.doc_id == document.doc_id]
    starts = range(0, len(mine), OWN_ROWS_AT_A_TIME)
    return {part: mine[start : start + OWN_ROWS_AT_A_TIME] for part, start in enumerate(starts)}


def rows_of(
    store: Store, document: Document, part: int, row_ids: Collection[str] | None = None
) -> Iterator[RowToGrade]:
    """The rows of one part, or those of them that are named."""
    if document.source is None:
        yield from captured_rows(store, document.model, document.doc_id, part, row_ids)
        return
    mine = [row for row in own_rows(document.source) if row.doc_id == document.doc_id]
    for row in mine[part * OWN_ROWS_AT_A_TIME : (part + 1) * OWN_ROWS_AT_A_TIME]:
        if row_ids is None or row.row_id in row_ids:
            yield row


def selections_of(store: Store, document: Document, wanted: Mapping[int, Collection[str]]) -> list[Selection]:
    """Some rows of a document at some budgets, by the parts that are read together."""
    pieces = []
    for part, row_ids in parts_of(store, document).items():
        shares = tuple((s, here) for s, ids in wanted.items() if (here := frozenset(ids).intersection(row_ids)))
        if shares:
            pieces.append(Selection(document, part, shares))
    return pieces


def _family(path: Path) -> str:
    return str(read(ROWS, path, ["family"])["family"][0])
