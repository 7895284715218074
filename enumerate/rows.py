"""Where rows come from: captured tables, or a file of the user's own weights and values."""

import re
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from data import BadInput, Store
from data.schema import ROWS
from data.store import footer, read, sha256
from solvers import Instance
from solvers.load import captured_row, read_heads

OWN = "own"  # family of rows that a user brings
LONGEST_NAME = 100  # characters of a file's name, which becomes a folder's
LARGEST_KEY = 1e150  # beyond it a product of keys would overflow
SUMS = {np.dtype(np.float16): 1e-2, np.dtype(np.float32): 1e-4}  # how far a row's weights may sum from 1; else 1e-6


@dataclass(frozen=True, eq=False)
class RowToGrade:
    """A row with its labels. keys (n, d) and query (d,) are None where a user's file has none.

    first_key is the true position of the instance's key 0. keys_id is equal for rows that see the same keys.
    """

    row_id: str
    family: str
    model: str
    doc_id: int
    layer: int
    q_head: int
    first_key: int
    instance: Instance
    keys: npt.NDArray[np.floating[Any]] | None
    query: npt.NDArray[np.floating[Any]] | None
    keys_id: tuple[int, int, int]


def captured_rows(
    store: Store, model: str, doc_id: int, layer: int, row_ids: Collection[str] | None = None
) -> Iterator[RowToGrade]:
    """The rows of one layer of one document, or those of them that are named.

    Raises BadInput if the kv file is not the one captured with them.
    """
    path = store.rows(model, doc_id)
    records = read(ROWS, path).filter(pl.col("layer") == layer)
    if row_ids is not None:
        records = records.filter(pl.col("row_id").is_in(list(row_ids)))
    kv_path = store.kv(model, doc_id, layer)
    written = footer(ROWS, path)["notes"]
    expected = written.get("kv", {}).get(str(layer)) if isinstance(written, dict) else None
    if expected != sha256(kv_path):
        raise BadInput(f"{kv_path}: not the file that was captured with {path} (sha256): capture this document again")
    heads = read_heads(kv_path)
    for record in records.iter_rows(named=True):
        row = captured_row(record, heads)
        yield RowToGrade(
            record["row_id"],
            record["family"],
            model,
            doc_id,
            layer,
            record["q_head"],
            row.first_key,
            row.instance,
            row.keys,
            row.query,
            (record["kv_head"], record["first_key"], record["n_keys"]),
        )


def own_rows(path: Path) -> list[RowToGrade]:
    """A user's rows from .npz or .parquet; raises BadInput that names the file, the row and what is wrong.

    .npz: weights (rows, n) and values (rows, n, d), or (n,) and (n, d) for one row; optional keys like values,
    queries (rows, d_key), doc_id (rows,). .parquet: a row each, columns weights (list) and values (list of lists or
    arrays), optional keys, query, doc_id, row_id. doc_id may be whole numbers or names; without it all rows count as
    one document. Weights are renormalised; how far their sum may be from 1 follows the dtype they are stored in
    (SUMS), since a softmax over many keys in half precision is off by more than one in float64.
    """
    if not path.is_file():
        raise BadInput(f"ROWS={path}: no such file; expected .npz or .parquet with weights and values")
    name = _model_name(path)
    if path.suffix == ".npz":
        raw = _from_npz(path)
    elif path.suffix == ".parquet":
        raw = _from_parquet(path)
    else:
        raise BadInput(f"ROWS={path}: expected a file that ends in .npz or .parquet")
    rows = []
    numbers: dict[int | str, int] = {}  # of documents, in the order in which the file names them
    for i, entry in enumerate(raw):
        try:
            instance = Instance(_normalised(entry["weights"]), entry["values"])
        except (ValueError, TypeError) as error:
            raise BadInput(f"{path}, row {i}: {error}") from error
        keys, query = entry.get("keys"), entry.get("query")
        if keys is not None and (
            keys.ndim != 2 or keys.shape[0] != instance.n or not keys.size or not (np.abs(keys) < LARGEST_KEY).all()
        ):
            raise BadInput(
                f"{path}, row {i}: keys have shape {keys.shape}: expected ({instance.n}, d), all below {LARGEST_KEY:g}"
            )
        if query is not None and (query.ndim != 1 or (keys is not None and query.size != keys.shape[1])):
            raise BadInput(f"{path}, row {i}: query has shape {query.shape}: expected (d,), as the keys")
        label = entry.get("doc_id", 0)
        if isinstance(label, np.generic):
            label = label.item()
        if not isinstance(label, int | str) or isinstance(label, bool):  # also null, NaN, an array
            raise BadInput(f"{path}, row {i}: doc_id {label!r}: expected a whole number or a name")
        doc_id = numbers.setdefault(label, len(numbers))
        row_id = entry.get("row_id", f"{name}:{doc_id}:0:0:{i}")
        if row_id is None:
            raise BadInput(f"{path}, row {i}: row_id is null: expected a name of its own for each row")
        rows.append(RowToGrade(str(row_id), OWN, name, doc_id, 0, 0, 0, instance, keys, query, (i, 0, instance.n)))
    if not rows:
        raise BadInput(f"{path}: holds no rows; expected at least one")
    if len({row.row_id for row in rows}) < len(rows):
        raise BadInput(f"{path}: two rows share a row_id; expected each id once")
    return rows


def _model_name(path: Path) -> str:
    """The name under which a file's rows go: its own, with what does not belong in a folder's name replaced."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-")
    if not name or len(name) > LONGEST_NAME:
        raise BadInput(f"ROWS={path}: expected a file name of 1 to {LONGEST_NAME} letters or figures")
    return name


def _normalised(weights: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The weights in float64, divided by their sum where it is as near 1 as their dtype can tell."""
    exact = np.asarray(weights, dtype=np.float64)
    total = exact.sum()
    return exact / total if abs(total - 1) <= SUMS.get(np.asarray(weights).dtype, 0.0) else exact


def _from_npz(path: Path) -> list[dict[str, Any]]:
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise BadInput(f"{path}: not readable as .npz ({error}); expected arrays weights and values") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or (array.dtype.kind not in "fiu" and name != "doc_id"):
            raise BadInput(f"{path}: {name!r} is not an array of real numbers: expected floats or integers")
    for name in ("weights", "values"):
        if name not in arrays:
            raise BadInput(f"{path}: no array {name!r}; it has {', '.join(arrays) or 'none'}")
    if arrays["weights"].ndim == 0:
        raise BadInput(f"{path}: weights is a single number: expected (rows, n), or (n,) for one row")
    if arrays["weights"].ndim == 1:
        arrays = {name: array[None] for name, array in arrays.items()}
    n_rows = arrays["weights"].shape[0]
    for name, array in arrays.items():
        if array.ndim == 0 or array.shape[0] != n_rows:
            raise BadInput(f"{path}: array {name!r} has shape {array.shape}: expected {n_rows} rows, as in weights")
    names = {"weights": "weights", "values": "values", "keys": "keys", "queries": "query", "doc_id": "doc_id"}
    return [{names[k]: arrays[k][i] for k in names if k in arrays} for i in range(n_rows)]


def _from_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        frame = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise BadInput(f"{path}: not readable as Parquet ({error}); expected columns weights and values") from error
    for name in ("weights", "values"):
        if name not in frame.columns:
            raise BadInput(f"{path}: no column {name!r}; it has {', '.join(frame.columns) or 'none'}")
    single = frame.schema["weights"] == pl.List(pl.Float32)  # its dtype says how far the sum may be from 1
    dtypes: dict[str, type] = {"weights": np.float32} if single else {}
    rows = []
    for i, record in enumerate(frame.iter_rows(named=True)):
        entry: dict[str, Any] = {name: record[name] for name in ("doc_id", "row_id") if name in record}
        for name in ("weights", "values", "keys", "query"):
            if name in record:
                try:
                    found = np.array(record[name])
                    if found.dtype.kind not in "fiu":
                        raise ValueError("not real numbers")
                    entry[name] = found.astype(dtypes.get(name, np.float64))
                except (TypeError, ValueError) as error:
                    raise BadInput(f"{path}, row {i}: {name} are not numbers of one shape: expected lists") from error
        rows.append(entry)
    return rows
