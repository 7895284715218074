"""One document through the model: each layer's keys and values go to disk as soon as they are seen."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from transformers import PreTrainedModel

from capture.attention import LayerAttention, capturing
from capture.rows import kv_frame, rows_frame, sample_positions, take_rows
from data import BadInput, Provenance, Store
from data.schema import KV
from data.store import sha256, write


@dataclass(frozen=True, eq=False)
class Captured:
    """A document's rows, the sha256 and bytes of its kv file per layer, and the worst difference of its rows."""

    rows: pl.DataFrame
    kv: dict[int, str]
    kv_bytes: dict[int, int]
    worst: float


def capture_document(
    model: PreTrainedModel,
    ids: npt.NDArray[np.int64],
    family: str,
    label: str,
    doc_id: int,
    n_rows: int,
    provenance: Provenance,
    store: Store,
) -> Captured:
    """Run the decoder over ids (N,) and write one kv file a layer into the store; the rows are returned.

    n_rows positions a layer, drawn with the provenance's seed. Memory beside the model: one layer of the
    document, and the rows. Raises BadInput as take_rows does, and if the device's memory is too small.
    """
    frames: list[pl.DataFrame] = []
    kv: dict[int, str] = {}
    kv_bytes: dict[int, int] = {}
    worst = 0.0

    def on_layer(seen: LayerAttention) -> None:
        nonlocal worst
        if seen.layer in kv:
            raise BadInput(f"{label}: layer {seen.layer} calls attention more than once: it cannot be captured")
        rows = take_rows(seen, sample_positions(len(ids), n_rows, provenance.seed, doc_id, seen.layer))
        path = store.kv(label, doc_id, seen.layer)
        write(KV, kv_frame(label, doc_id, rows), path, provenance)
        kv[seen.layer], kv_bytes[seen.layer] = sha256(path), path.stat().st_size
        frames.append(rows_frame(family, label, doc_id, rows))
        worst = max(worst, float(rows.differences.max()))

    try:
        with torch.inference_mode(), capturing(model, on_layer):
            states = model(input_ids=batch_of(model, ids), use_cache=False).last_hidden_state
    except torch.OutOfMemoryError as error:
        raise BadInput(f"{model.device}: not enough memory for a document of {len(ids)} tokens") from error
    if not frames:
        raise BadInput(f"{label}: no layer with attention was seen: this architecture cannot be captured")
    if not bool(states.isfinite().all()):
        raise BadInput(f"{label}: the model's output is not finite (NaN or infinite) after its last layer")
    return Captured(pl.concat(frames), kv, kv_bytes, worst)


def batch_of(model: PreTrainedModel, ids: npt.NDArray[np.int64]) -> torch.Tensor:
    """The ids as a batch of one on the model's device, (1, N)."""
    return torch.from_numpy(ids)[None].to(model.device)
