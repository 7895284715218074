"""Reading and writing Parquet under one root: schemas checked, provenance in the footer, files replaced atomically."""

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from data.errors import BadInput
from data.schema import TABLES, Table

CHECKOUT = Path(__file__).resolve().parent.parent
SOURCE_CHUNK = 1 << 20  # bytes hashed at a time
_FOOTER = "forced_weights"  # key of our entry in the Parquet footer
_FOOTER_KEYS = ("table", "version", "command", "parameters", "seed", "inputs", "code", "notes")
_UNREADABLE = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)  # what damaged Parquet raises


@dataclass(frozen=True)
class Provenance:
    """How a file came to be; two files with equal provenance hold the same rows.

    command: the stage that wrote it. parameters: what its user could have set. seed: of every random draw in
    it. inputs: sha256 of every file (or of the digests of many) that it was made from. code: sha256 of the
    source of the packages that made it. notes: measurements worth keeping that do not bear on freshness.
    """

    command: str
    parameters: Mapping[str, object]
    seed: int
    inputs: Mapping[str, str]
    code: str
    notes: Mapping[str, object] = field(default_factory=dict, compare=False)

    def to_json(self, table: Table) -> str:
        """The footer entry for a file of this table."""
        content = {
            "table": table.name,
            "version": table.version,
            "command": self.command,
            "parameters": dict(self.parameters),
            "seed": self.seed,
            "inputs": dict(self.inputs),
            "code": self.code,
            "notes": dict(self.notes),
        }
        return json.dumps(content, sort_keys=True)


@dataclass(frozen=True)
class Store:
    """The folder that holds artefacts: root/kv, root/rows, root/subsets, root/fits, ...

    Every path below is a method here, so that no stage spells another stage's folders.
    """

    root: Path = CHECKOUT / "data"

    def kv(self, model: str, doc_id: int, layer: int) -> Path:
        """Keys and values of one layer of one document."""
        return self.root / "kv" / model / f"doc-{doc_id:03d}" / f"layer-{layer:03d}.parquet"

    def tokens(self, model: str, doc_id: int) -> Path:
        """Tokens of one document."""
        return self.root / "tokens" / model / f"doc-{doc_id:03d}.parquet"

    def rows(self, model: str, doc_id: int) -> Path:
        """Attention rows of one document; written last, so its presence says that the document is whole."""
        return self.root / "rows" / model / f"doc-{doc_id:03d}.parquet"

    def subsets(self, model: str, s: int, rules: str, doc_id: int) -> Path:
        """Subsets of one document's rows at one budget; rules is "standard" or the name of a user's rule."""
        return self.root / "subsets" / model / f"s-{s:03d}" / rules / f"doc-{doc_id:03d}.parquet"

    def facts(self, model: str, s: int, doc_id: int) -> Path:
        """Facts of one document's rows at one budget (table row_facts)."""
        return self.root / "subsets" / model / f"s-{s:03d}" / "facts" / f"doc-{doc_id:03d}.parquet"

    def manifest(self, name: str) -> Path:
        """The (row, budget) pairs that one kind of certification takes."""
        return self.root / "manifests" / f"{name}.parquet"

    def proof(self, model: str, s: int, row_id: str, mass_floor: float) -> Path:
        """The proof log of one row at one budget and mass floor."""
        readable = re.sub("[^A-Za-z0-9._-]", "-", row_id)[:80]
        digest = hashlib.sha256(row_id.encode()).hexdigest()[:12]  # two ids may read the same
        name = f"{readable}-{digest}-floor-{mass_floor!r}.parquet"
        return self.root / "proofs" / model / f"s-{s:03d}" / name

    def audit(self, model: str) -> Path:
        """What each eviction method held and hit on one model."""
        return self.root / "audit" / f"{model}.parquet"

    def audit_files(self) -> list[Path]:
        """Every audit file, sorted."""
        return sorted((self.root / "audit").glob("*.parquet"))

    def loss(self, model: str) -> Path:
        """What restricting every head to s keys costs one model."""
        return self.root / "loss" / f"{model}.parquet"

    def loss_files(self) -> list[Path]:
        """Every loss file, sorted."""
        return sorted((self.root / "loss").glob("*.parquet"))

    def peer_question(self) -> Path:
        """The prompts of the audit, as another program is asked to run them."""
        return self.root / "audit" / "kvpress-question.json"

    def peer_audit(self) -> Path:
        """What that program answered."""
        return self.root / "audit" / "kvpress-answer.json"

    def fit(self, name: str) -> Path:
        """One table of the analysis."""
        return self.root / "fits" / f"{name}.parquet"

    def models(self) -> list[str]:
        """Models that have rows, sorted."""
        return sorted({path.parent.name for path in (self.root / "rows").glob("*/doc-*.parquet")})

    def row_files(self, model: str | None = None) -> list[Path]:
        """Every rows file, or those of one model, sorted."""
        return sorted((self.root / "rows").glob(f"{model or '*'}/doc-*.parquet"))

    def subset_files(self) -> list[Path]:
        """Every subsets file (not the facts), sorted."""
        found = (self.root / "subsets").glob("*/s-*/*/doc-*.parquet")
        return sorted(path for path in found if path.parent.name != "facts")

    def derived_from(self, model: str, doc_id: int) -> list[Path]:
        """Every file of subsets and facts that was made from one document's rows."""
        return sorted((self.root / "subsets" / model).glob(f"s-*/*/doc-{doc_id:03d}.parquet"))

    def fact_files(self) -> list[Path]:
        """Every row_facts file, sorted."""
        return sorted((self.root / "subsets").glob("*/s-*/facts/doc-*.parquet"))


def write(table: Table, frame: pl.DataFrame, path: Path, provenance: Provenance) -> None:
    """Check the frame against its schema and put it at path by an atomic rename.

    Raises BadInput for a frame off its schema, before anything is written; OSError (no space, no permission)
    leaves what was at path as it was.
    """
    table.check(frame)
    content = io.BytesIO()  # polars would report a full disk as an error of its own
    footer_entry = {_FOOTER: provenance.to_json(table)}
    table.select(frame).write_parquet(content, compression="zstd", compression_level=1, metadata=footer_entry)
    write_bytes(path, content.getbuffer())


def read(table: Table, path: Path, columns: list[str] | None = None) -> pl.DataFrame:
    """The file's rows (or only these columns of them), after its footer and its schema were checked.

    Raises BadInput if the file is missing, not whole, not of this table or of another version of it.
    """
    footer(table, path)
    try:
        frame = pl.read_parquet(path, columns=columns)
    except _UNREADABLE as error:
        raise BadInput(
            f"{path}: not readable as Parquet ({_first_line(error)}): delete it and run its stage again"
        ) from error
    if columns is None:
        table.check(frame, str(path))
    return frame


def read_all(table: Table, paths: Iterable[Path], columns: list[str] | None = None) -> pl.DataFrame:
    """The rows of many files of one table, in the order of the paths."""
    frames = [read(table, path, columns) for path in paths]
    if not frames:
        raise BadInput(f"no files of table {table.name}: expected at least one; run the stage that writes it")
    return pl.concat(frames)


def footer(table: Table, path: Path) -> dict[str, object]:
    """Our footer entry of a Parquet file; raises BadInput as read() does."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file; expected table {table.name}")
    try:
        entry = pl.read_parquet_metadata(path).get(_FOOTER)
    except _UNREADABLE as error:
        raise BadInput(
            f"{path}: not readable as Parquet ({_first_line(error)}): delete it and run its stage again"
        ) from error
    if entry is None:
        raise BadInput(f"{path}: its footer has no provenance of ours: expected a file that a stage wrote")
    try:
        found: dict[str, object] = json.loads(entry)
    except ValueError as error:
        raise BadInput(f"{path}: its footer is damaged: delete it and run its stage again") from error
    if not isinstance(found, dict) or not set(_FOOTER_KEYS) <= set(found):
        raise BadInput(f"{path}: its footer is damaged: delete it and run its stage again")
    if (found["table"], found["version"]) != (table.name, table.version):
        raise BadInput(
            f"{path}: holds table {found['table']} version {found['version']}:"
            f" expected {table.name} version {table.version}"
        )
    return found


def is_current(table: Table, path: Path, provenance: Provenance) -> bool:
    """Whether the file at path exists, is whole, and was made in just this way (notes aside)."""
    try:
        found = footer(table, path)
    except BadInput:
        return False
    wanted = json.loads(provenance.to_json(table))
    return all(found[key] == wanted[key] for key in wanted if key != "notes")


def refresh(table: Table, path: Path, provenance: Provenance, make: Callable[[], pl.DataFrame]) -> bool:
    """Write what make() gives to path unless the file there is current; whether it was written."""
    if is_current(table, path, provenance):
        return False
    write(table, make(), path, provenance)
    return True


def sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes; raises BadInput if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(SOURCE_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def digest_of(parts: Iterable[str]) -> str:
    """Hex sha256 of several strings, in order and told apart."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def code_digest(*packages: str) -> str:
    """Hex sha256 over the Python source of our packages: an edit there makes their outputs stale."""
    files = sorted(path for package in packages for path in (CHECKOUT / package).rglob("*.py"))
    return digest_of(part for path in files for part in (str(path.relative_to(CHECKOUT)), sha256(path)))


def table_named(name: str) -> Table:
    """The table of that name; raises BadInput with the list of names."""
    if name not in TABLES:
        raise BadInput(f"no table {name!r}: expected one of {', '.join(TABLES)}")
    return TABLES[name]


def write_text(path: Path, content: str) -> None:
    """Put text at path by an atomic rename."""
    write_bytes(path, content.encode())


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Put bytes at path by an atomic rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
