"""Drawing every figure: PNG, PDF and the data beside them, skipped where nothing changed."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from data import BadInput, published
from data.schema import AUDIT, LOSS, Table
from data.store import Store, code_digest, read, sha256, write_bytes, write_text
from figures import (
    audit,
    ceiling,
    certified_ceiling,
    flat_map,
    hardness,
    loss,
    mass_floor,
    penalty,
    proved,
    roc,
    rules,
    style,
)
from figures.fits import analysed

SUFFIXES = ("png", "pdf", "csv")
_LEDGER = "made-from.json"  # beside the figures: what each was made from, and the sha256 of its files


@dataclass(frozen=True)
class Picture:
    """A figure: its file stem, the tables that it is made from, and the two functions that make it.

    optional: whether it is left out where one of its tables is missing or empty; the others are left out only where
    the analysis wrote no table at all.
    """

    stem: str
    inputs: tuple[Table, ...]
    table: Callable[[Store], pl.DataFrame]
    draw: Callable[[pl.DataFrame, Figure], None]
    optional: bool = False

    def applies(self, store: Store) -> bool:
        """Whether the store has what the figure needs; raises BadInput for a table that is not readable."""
        if not self.optional:
            return analysed(store)
        held = [[not read(table, path).is_empty() for path in files(store, table)] for table in self.inputs]
        return all(any(one) for one in held)


PICTURES = tuple(
    Picture(stem, module.INPUTS, module.table, module.draw, optional)
    for stem, module, optional in (
        ("ceiling", ceiling, False),
        ("flat_map", flat_map, False),
        ("roc", roc, False),
        ("penalty", penalty, False),
        ("rules", rules, False),
        ("certified_ceiling", certified_ceiling, True),
        ("mass_floor", mass_floor, True),
        ("proved", proved, True),
        ("hardness", hardness, True),
        ("audit", audit, True),
        ("loss", loss, True),
    )
)


def files(store: Store, table: Table) -> list[Path]:
    """The files of a table that are there: one of the analysis, or one per model of the audit and of the loss."""
    if table is AUDIT:
        return store.audit_files()
    return store.loss_files() if table is LOSS else [path for path in (store.fit(table.name),) if path.is_file()]


def check_measured(store: Store) -> None:
    """Raises BadInput if there is nothing to draw: no table of the analysis, of the audit or of the loss."""
    if not any(picture.applies(store) for picture in PICTURES):
        raise BadInput(f"{store.root}: nothing was measured yet: run make, make audit or make loss first")


def build(store: Store, folder: Path) -> list[str]:
    """Draw what is not current into folder and return the stems drawn; files of a figure left out are removed.

    Raises BadInput for a table that is missing or not readable, and where nothing was measured; figures made before it
    stay.

    A figure is current if its tables, the published numbers and our code are the same as when it was drawn, and
    its files are still those that were written.
    """
    check_measured(store)
    ledger = _read_ledger(folder / _LEDGER)
    code = code_digest("data", "analysis", "figures")
    drawn = []
    for picture in PICTURES:
        if not picture.applies(store):
            for suffix in SUFFIXES:
                (folder / f"{picture.stem}.{suffix}").unlink(missing_ok=True)
            continue
        made_from = {"code": code, "published": sha256(published.PATH)}
        made_from |= {path.name: sha256(path) for table in picture.inputs for path in files(store, table)}
        if ledger.get(picture.stem) == {"made_from": made_from, "files": _digests(folder, picture.stem)}:
            continue
        frame = picture.table(store)
        with style.applied():
            figure = style.blank()
            picture.draw(frame, figure)
            png, pdf = style.save(figure)
        write_bytes(folder / f"{picture.stem}.png", png)
        write_bytes(folder / f"{picture.stem}.pdf", pdf)
        write_text(folder / f"{picture.stem}.csv", to_csv(frame))
        ledger[picture.stem] = {"made_from": made_from, "files": _digests(folder, picture.stem)}
        write_text(folder / _LEDGER, json.dumps(ledger, indent=1, sort_keys=True))
        drawn.append(picture.stem)
    return drawn


def to_csv(frame: pl.DataFrame) -> str:
    """The frame as CSV: plain decimal numbers at full precision, nothing for null."""
    buffer = io.StringIO()
    frame.write_csv(buffer, float_scientific=False)
    return buffer.getvalue()


def _digests(folder: Path, stem: str) -> dict[str, str]:
    """sha256 of the figure's files that are there."""
    paths = (folder / f"{stem}.{suffix}" for suffix in SUFFIXES)
    return {path.name: sha256(path) for path in paths if path.is_file()}


def _read_ledger(path: Path) -> dict[str, object]:
    """The ledger as last written; an unreadable one counts as none, so that everything is drawn again."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
