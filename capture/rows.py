"""Which rows are taken, what is kept of them, and the check that they are what the model computed."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from capture.attention import LayerAttention, emitted_weights
from capture.plan import FIRST_POSITION
from data import BadInput
from data.schema import KV, ROWS
from solvers.problem import attention_weights

Floats = npt.NDArray[np.float32]
Reals = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

# How far a row's output, recomputed in float64 from the stored q, k, v, may lie from the model's own before
# the capture stops. Absolute in float32, as in P1 (2e-6 is typical); in the half precisions, whose rounding
# is larger, units in the last place times the largest value that the row sees.
FLOAT32_TOLERANCE = 4e-3
HALF_TOLERANCE_ULPS = 4


@dataclass(frozen=True, eq=False)
class LayerRows:
    """The sampled rows of one layer of one document, and the keys and values that they read; positions are true.

    keys (K, n, d) and values (K, n, dv) float32: all n tokens of the document. positions (R,); first_keys and
    n_keys (R,): what the mask shows each. queries (H, R, d) float32; weights[h][r] float32, as the model
    emits them; differences (H, R): largest entry of |model's output - float64 output|.
    """

    layer: int
    keys: Floats
    values: Floats
    positions: Indices
    first_keys: Indices
    n_keys: Indices
    queries: Floats
    weights: list[list[Floats]]
    differences: Reals
    scale: float
    softcap: float | None
    window: int | None
    dtype: str


def sample_positions(length: int, rows: int, seed: int, doc_id: int, layer: int) -> Indices:
    """Positions of one document and layer, the same for all its heads; ascending, (rows,).

    Drawn uniformly and without replacement from [64, length) by a generator seeded with (seed, doc_id, layer)
    alone (ours: P1 states no rule). Raises BadInput if there are fewer than `rows` such positions.
    """
    if rows < 1 or length - FIRST_POSITION < rows:
        raise BadInput(
            f"{rows} rows of a document of {length} tokens: positions are drawn from [{FIRST_POSITION}, {length})"
        )
    generator = np.random.default_rng(np.random.SeedSequence([seed, doc_id, layer]))
    drawn = generator.choice(length - FIRST_POSITION, size=rows, replace=False)
    return np.sort(drawn) + FIRST_POSITION


def take_rows(seen: LayerAttention, positions: Indices, batch: int = 0) -> LayerRows:
    """The rows at these true positions (R,) of one batch element, checked; padding has no position.

    Raises BadInput if the layer's output is not finite, if a position is not in the document, or if a row's
    output, recomputed in float64 from the stored float32 numbers, differs from the model's own by more than
    the tolerance of the model's dtype.
    """
    document = seen.document(batch)
    output = seen.output[batch, document]
    if not bool(output.isfinite().all()):
        position, head, _ = torch.nonzero(~output.isfinite())[0].tolist()
        raise BadInput(
            f"the model's output is not finite (NaN or infinite) at layer {seen.layer}, head {head}, position"
            f" {position}: nothing can be captured from it"
        )
    n = document.stop - document.start
    if positions.min() < 0 or positions.max() >= n:
        raise BadInput(f"position {positions.max()}: the document has positions 0 to {n - 1}")
    at = torch.from_numpy(positions).to(output.device)
    query = seen.query[batch, :, document][:, at]
    keys, values = _float32(seen.key[batch, :, document]), _float32(seen.value[batch, :, document])
    first = (seen.first[batch, document] - document.start)[at]
    last = (seen.last[batch, document] - document.start)[at]
    first_keys, ends = first.cpu().numpy(), last.cpu().numpy() + 1
    queries = _float32(query)
    return LayerRows(
        layer=seen.layer,
        keys=keys,
        values=values,
        positions=positions,
        first_keys=first_keys,
        n_keys=ends - first_keys,
        queries=queries,
        weights=_emitted(seen, query, batch, document, first, last),
        differences=_differences(
            seen, queries, keys, values, positions, first_keys, ends, _float32(output[at].transpose(0, 1))
        ),
        scale=seen.scale,
        softcap=seen.softcap,
        window=seen.window,
        dtype=str(seen.query.dtype).removeprefix("torch."),
    )


def tolerance(dtype: torch.dtype, largest_value: float) -> float:
    """The largest difference that passes for a model that ran in this dtype, in the unit of the values."""
    if dtype in (torch.float32, torch.float64):
        return FLOAT32_TOLERANCE
    return HALF_TOLERANCE_ULPS * torch.finfo(dtype).eps * largest_value


def kv_frame(model: str, doc_id: int, rows: LayerRows) -> pl.DataFrame:
    """Table kv of one layer of one document."""
    heads, n, _ = rows.keys.shape
    return pl.DataFrame(
        {
            "kv_head": np.repeat(np.arange(heads, dtype=np.int32), n),
            "position": np.tile(np.arange(n, dtype=np.int32), heads),
            "key": np.ascontiguousarray(rows.keys).reshape(heads * n, -1),
            "value": np.ascontiguousarray(rows.values).reshape(heads * n, -1),
        }
    ).select(
        pl.lit(model).alias("model"),
        pl.lit(doc_id, pl.Int32).alias("doc_id"),
        pl.lit(rows.layer, pl.Int32).alias("layer"),
        *(name for name in KV.columns if name not in ("model", "doc_id", "layer")),
    )


def rows_frame(family: str, model: str, doc_id: int, rows: LayerRows) -> pl.DataFrame:
    """Table rows of one layer of one document: all query heads, positions within a head."""
    heads, n_rows, d = rows.queries.shape
    group = heads // rows.keys.shape[0]
    head = np.repeat(np.arange(heads, dtype=np.int32), n_rows)
    position = np.tile(rows.positions.astype(np.int32), heads)
    count = heads * n_rows
    frame = pl.DataFrame(
        {
            "row_id": [f"{model}:{doc_id}:{rows.layer}:{h}:{p}" for h, p in zip(head, position, strict=True)],
            "family": [family] * count,
            "model": [model] * count,
            "doc_id": np.full(count, doc_id, dtype=np.int32),
            "layer": np.full(count, rows.layer, dtype=np.int32),
            "kv_head": head // group,
            "q_head": head,
            "position": position,
            "n_keys": np.tile(rows.n_keys.astype(np.int32), heads),
            "first_key": np.tile(rows.first_keys.astype(np.int32), heads),
            "scale": np.full(count, rows.scale),
            "softcap": pl.Series([rows.softcap] * count, dtype=pl.Float64),
            "window": pl.Series([rows.window] * count, dtype=pl.Int32),
            "query": rows.queries.reshape(count, d),
            "weights": pl.Series([w for of_head in rows.weights for w in of_head]).cast(pl.List(pl.Float32)),
            "worst_difference": rows.differences.reshape(count),
            "source_dtype": [rows.dtype] * count,
        }
    )
    return ROWS.select(frame)


def _float32(x: torch.Tensor) -> Floats:
    return x.to(device="cpu", dtype=torch.float32).numpy()


def _emitted(
    seen: LayerAttention,
    query: torch.Tensor,
    batch: int,
    document: slice,
    first: torch.Tensor,
    last: torch.Tensor,
) -> list[list[Floats]]:
    """Weights of the sampled rows in the model's own precision, each over the keys that its mask shows."""
    key = seen.key[batch, :, document]
    heads, n_rows, d = query.shape
    groups = heads // key.shape[0]
    slots = torch.arange(key.shape[1], device=key.device)
    visible = (slots >= first[:, None]) & (slots <= last[:, None])
    weights = emitted_weights(
        query.reshape(key.shape[0], groups * n_rows, d),
        key,
        visible.repeat(groups, 1),
        seen.scale,
        seen.softcap,
    )
    plain = _float32(weights.reshape(heads, n_rows, -1))
    spans = [slice(int(a), int(b) + 1) for a, b in zip(first, last, strict=True)]
    return [[plain[h, r, span] for r, span in enumerate(spans)] for h in range(heads)]


def _differences(
    seen: LayerAttention,
    queries: Floats,
    keys: Floats,
    values: Floats,
    positions: Indices,
    firsts: Indices,
    ends: Indices,
    outputs: Floats,
) -> Reals:
    """Largest entry of |outputs (H, R, dv) - outputs recomputed in float64| per row, (H, R); stops beyond tolerance."""
    heads, n_rows, _ = queries.shape
    group = heads // keys.shape[0]
    found = np.empty((heads, n_rows))
    for kv_head in range(keys.shape[0]):
        keys64, values64 = keys[kv_head].astype(np.float64), values[kv_head].astype(np.float64)
        sizes = np.abs(values[kv_head]).max(axis=1)
        for head in range(kv_head * group, (kv_head + 1) * group):
            for r in range(n_rows):
                span = slice(firsts[r], ends[r])
                weights = attention_weights(queries[head, r], keys64[span], seen.scale, seen.softcap)
                difference = float(np.abs(weights @ values64[span] - outputs[head, r]).max())
                allowed = tolerance(seen.query.dtype, float(sizes[span].max()))
                if not difference <= allowed:
                    raise BadInput(
                        f"layer {seen.layer}, head {head}, position {positions[r]}: the output recomputed in float64"
                        f" differs from the model's own by {difference:.2g}, tolerance {allowed:.2g}"
                        f" ({str(seen.query.dtype).removeprefix('torch.')}); the capture is not what the model"
                        " computed, and stops"
                    )
                found[head, r] = difference
    return found
