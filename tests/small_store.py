"""A store with a few captured rows, written through the schemas alone: no model, no torch."""

from pathlib import Path

import numpy as np
import polars as pl

from data import Provenance, Store
from data.schema import KV, ROWS, TOKENS
from data.store import sha256, write

D, LAYERS, KV_HEADS, GROUP, LENGTH, POSITIONS = 8, 2, 2, 2, 40, (20, 33)


def write_document(store: Store, model: str = "toy", doc_id: int = 0, seed: int = 0) -> None:
    """One document of 40 tokens: 2 layers (the second with a window of 16), 2 KV heads, 4 query heads, 2 positions."""
    random = np.random.default_rng([seed, doc_id])
    made = {}
    rows = []
    for layer in range(LAYERS):
        keys, values = random.standard_normal((2, KV_HEADS, LENGTH, D)).astype(np.float32)
        path = store.kv(model, doc_id, layer)
        frame = pl.DataFrame(
            {
                "model": [model] * (KV_HEADS * LENGTH),
                "doc_id": pl.Series([doc_id] * (KV_HEADS * LENGTH), dtype=pl.Int32),
                "layer": pl.Series([layer] * (KV_HEADS * LENGTH), dtype=pl.Int32),
                "kv_head": np.repeat(np.arange(KV_HEADS, dtype=np.int32), LENGTH),
                "position": np.tile(np.arange(LENGTH, dtype=np.int32), KV_HEADS),
                "key": keys.reshape(-1, D),
                "value": values.reshape(-1, D),
            }
        )
        write(KV, frame, path, Provenance("capture", {}, seed, {}, "test"))
        made[str(layer)] = sha256(path)
        window = 16 if layer == 1 else None
        for q_head in range(KV_HEADS * GROUP):
            for position in POSITIONS:
                first = 0 if window is None else max(0, position - window + 1)
                query = (2.0 * random.standard_normal(D)).astype(np.float32)
                logits = 0.35 * keys[q_head // GROUP, first : position + 1].astype(float) @ query.astype(float)
                weights = np.exp(logits - logits.max())
                rows.append(
                    {
                        "row_id": f"{model}:{doc_id}:{layer}:{q_head}:{position}",
                        "family": "toys",
                        "model": model,
                        "doc_id": doc_id,
                        "layer": layer,
                        "kv_head": q_head // GROUP,
                        "q_head": q_head,
                        "position": position,
                        "n_keys": position + 1 - first,
                        "first_key": first,
                        "scale": 0.35,
                        "softcap": None,
                        "window": window,
                        "query": query,
                        "weights": (weights / weights.sum()).astype(np.float32),
                        "worst_difference": 0.0,
                        "source_dtype": "float32",
                    }
                )
    schema = {name: column.dtype for name, column in ROWS.columns.items()} | {"query": pl.Array(pl.Float32, D)}
    frame = pl.DataFrame(rows, schema=schema)
    write(ROWS, frame, store.rows(model, doc_id), Provenance("capture", {}, seed, {}, "test", {"kv": made}))
    tokens = pl.DataFrame(
        {
            "model": [model] * LENGTH,
            "doc_id": pl.Series([doc_id] * LENGTH, dtype=pl.Int32),
            "position": np.arange(LENGTH, dtype=np.int32),
            "token_id": np.arange(LENGTH, dtype=np.int32),
            "text": [f" t{i}" for i in range(LENGTH)],
        }
    )
    write(TOKENS, tokens, store.tokens(model, doc_id), Provenance("capture", {}, seed, {}, "test"))


def small_store(root: Path, documents: int = 2) -> Store:
    """A store of that many documents."""
    store = Store(root)
    for doc_id in range(documents):
        write_document(store, doc_id=doc_id)
    return store
