"""A captured row as an Instance, from the Parquet tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from data import BadInput, Store
from data.schema import KV, ROWS
from data.store import read
from solvers.problem import Instance, attention_weights


@dataclass(frozen=True, eq=False)
class Head:
    """Positions (m,) ascending, keys (m, d) and values (m, d) of one KV head, float32 as stored."""

    positions: npt.NDArray[np.int32]
    keys: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class CapturedRow:
    """A row with what its rules may look at: the instance, the keys (n, d) and the query (d,), float32 as stored."""

    instance: Instance
    keys: npt.NDArray[np.float32]
    query: npt.NDArray[np.float32]
    first_key: int


def load(row_id: str, root: Path | None = None) -> Instance:
    """The Instance of a captured row, its weights recomputed in float64 from the stored query and keys.

    root: the data folder; default that of the checkout. Raises BadInput for an id that is not there or a damaged
    file. Index j of the instance is true position first_key + j of the rows table.
    """
    store = Store() if root is None else Store(root)
    record = find_row(store, row_id)
    heads = read_heads(store.kv(record["model"], record["doc_id"], record["layer"]))
    return captured_row(record, heads).instance


def find_row(store: Store, row_id: str) -> dict[str, Any]:
    """The entry of the rows table; raises BadInput if there is none."""
    parts = row_id.rsplit(":", 4)
    if len(parts) != 5 or not all(part.isdigit() for part in parts[1:]):
        raise BadInput(f"row {row_id!r}: expected MODEL:doc_id:layer:q_head:position")
    path = store.rows(parts[0], int(parts[1]))
    if not path.exists():
        raise BadInput(f"row {row_id!r}: there is no {path}; captured models: {', '.join(store.models()) or 'none'}")
    found = read(ROWS, path).filter(pl.col("row_id") == row_id)
    if found.is_empty():
        raise BadInput(f"row {row_id!r} is not in {path}")
    return found.row(0, named=True)


def read_heads(path: Path) -> dict[int, Head]:
    """The KV heads of one layer of one document, by number."""
    frame = read(KV, path)
    return {
        int(kv_head): Head(part["position"].to_numpy(), part["key"].to_numpy(), part["value"].to_numpy())
        for (kv_head,), part in frame.partition_by("kv_head", as_dict=True, maintain_order=True).items()
    }


def captured_row(record: Mapping[str, Any], heads: Mapping[int, Head]) -> CapturedRow:
    """The row that an entry of the rows table describes, from the heads of its layer."""
    head = heads.get(record["kv_head"])
    first, n = record["first_key"], record["n_keys"]
    start = 0 if head is None else int(np.searchsorted(head.positions, first))
    seen = slice(start, start + n)
    if head is None or not np.array_equal(head.positions[seen], np.arange(first, first + n, dtype=np.int32)):
        raise BadInput(f"row {record['row_id']}: the kv table lacks some of its keys {first} to {first + n - 1}")
    query = np.asarray(record["query"], dtype=np.float32)
    weights = attention_weights(query, head.keys[seen], record["scale"], record["softcap"])
    return CapturedRow(Instance(weights, head.values[seen].astype(np.float64)), head.keys[seen], query, first)
