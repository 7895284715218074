"""What was measured, model by model, as the files themselves say it."""

from collections.abc import Iterable
from pathlib import Path

import polars as pl

from data.schema import ROWS
from data.store import CHECKOUT, Store, digest_of, footer, read, sha256
from figures.page_tables import NONE, Cell, PageTable, count

EMBEDDED = "embedded-"  # how the names of the checkpoints that this project trained begin
QUANTISED = "Q4"  # in the name of a model whose 4-bit weights were made plain
TEXTS = CHECKOUT / "data" / "text"  # the default texts


def measured(store: Store, ceiling: pl.DataFrame) -> PageTable:
    """A row per model of the ceiling: documents, tokens, rows, text, dtype, seed, worst difference of the check.

    Raises BadInput if a rows file is not readable.
    """
    headings = [
        "model", "documents", "tokens each", "rows a layer", "rows", "row, budget pairs", "text", "dtype", "seed",
        "worst difference",
    ]  # fmt: skip
    rows = []
    for (family, model), part in ceiling.group_by("family", "model", maintain_order=True):
        pairs = count(int(part["n_rows"].sum()))
        name = Cell(str(model), "" if family == model else str(family), text=True)
        rows.append([name, *_captured(store.row_files(str(model)), part), Cell(pairs)])
        rows[-1].insert(5, rows[-1].pop())
    return PageTable(headings, rows)


def _captured(files: list[Path], ceiling: pl.DataFrame) -> list[Cell]:
    """All cells but the pairs; where the model's rows are not stored, only what the ceiling counts."""
    if not files:
        counts = [Cell(count(int(ceiling[name].max()))) for name in ("n_documents", "n_rows")]  # type: ignore[arg-type]
        return [counts[0], Cell(NONE), Cell(NONE), counts[1], *([Cell(NONE)] * 4)]
    footers = [footer(ROWS, path) for path in files]
    frame = pl.concat([read(ROWS, path, ["row_id", "worst_difference", "source_dtype"]) for path in files])
    parameters = [found["parameters"] for found in footers]
    texts = {_text(found["inputs"]) for found in footers}
    worst = frame["worst_difference"].max()
    return [
        Cell(count(len(files))),
        Cell(_each(p.get("length") for p in parameters if isinstance(p, dict))),
        Cell(_each(p.get("rows") for p in parameters if isinstance(p, dict))),
        Cell(count(frame.height)),
        Cell(", ".join(sorted(texts)), text=True),
        Cell(_each(frame["source_dtype"].unique().sort())),
        Cell(_each(found["seed"] for found in footers)),
        Cell(f"{worst:.1e}" if isinstance(worst, float) else NONE),
    ]


def _each(values: Iterable[object]) -> str:
    """The distinct values in order of appearance, as text; the dash if there are none."""
    found = dict.fromkeys(f"{v:,}" if isinstance(v, int) else str(v) for v in values if v is not None)
    return ", ".join(found) or NONE


def reads_default_text(store: Store, model: str) -> bool:
    """Whether some rows of the model were captured from a default text; raises BadInput if a file is not readable."""
    defaults = {digest_of([sha256(path)]) for path in TEXTS.glob("*.txt")}
    inputs = [footer(ROWS, path)["inputs"] for path in store.row_files(model)]
    return any(isinstance(one, dict) and one.get("text") in defaults for one in inputs)


def _text(inputs: object) -> str:
    """The name of a default text whose digest this is, else that it is the user's own and the digest's beginning."""
    digest = inputs.get("text") if isinstance(inputs, dict) else None
    if digest is None:
        return NONE
    for path in sorted(TEXTS.glob("*.txt")):
        if digest == digest_of([sha256(path)]):
            return path.name
    return f"own text ({str(digest)[:8]})"
