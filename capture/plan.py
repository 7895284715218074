"""What a capture is to do: its parameters checked, which documents are already there, and what the rest will cost."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from capture.checkpoints import Source
from data import BadInput, Provenance, Store
from data.schema import ROWS
from data.store import code_digest, digest_of, footer, is_current, sha256

if TYPE_CHECKING:  # transformers takes seconds to import, and a run that finds all current needs none of it
    from transformers import PretrainedConfig

FIRST_POSITION = 64  # rows are drawn from here on: earlier ones have too few keys to choose among (P1)
DTYPES = ("float32", "bfloat16", "float16")
WRITING_SPEED = 150e6  # bytes a second: compressing and writing kv on one core, for the estimate of time alone
EFFICIENCY = 0.4  # share of a matrix product's speed that a whole model reaches, for the estimate of time alone
LOADING = 5.0  # seconds that importing torch and loading a small model take, for the same
LIBRARIES = 0.8e9  # bytes that Python with torch and transformers takes before any model is loaded
GGUF_BYTES = 0.7  # bytes a parameter takes in a 4- to 5-bit GGUF file
SLACK = 1.05  # room that table rows, tokens and file footers take beside kv, for the estimate of disk alone


@dataclass(frozen=True)
class Request:
    """What the user asked for. text: files; length None: the source's default."""

    text: Sequence[Path]
    docs: int
    length: int | None
    rows: int
    device: str
    dtype: str
    seed: int


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that its costs follow from."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    longest: int | None
    parameters: float
    embeddings: float


@dataclass(frozen=True)
class Cost:
    """Estimates: bytes written, bytes of memory, seconds on this CPU."""

    disk: int
    memory: int
    seconds: float


def check(request: Request, source: Source) -> int:
    """The length of a document, after the numbers were checked; raises BadInput that names the one that is wrong."""
    length = request.length if request.length is not None else source.length
    if request.docs < 1:
        raise BadInput(f"--docs {request.docs}: expected at least 1")
    if request.rows < 1:
        raise BadInput(f"--rows {request.rows}: expected at least 1")
    if request.seed < 0:
        raise BadInput(f"--seed {request.seed}: expected 0 or more")
    if request.dtype not in DTYPES:
        raise BadInput(f"--dtype {request.dtype}: expected one of {', '.join(DTYPES)}")
    if length < FIRST_POSITION + request.rows:
        raise BadInput(
            f"--length {length}: expected at least {FIRST_POSITION + request.rows}, as {request.rows} rows are drawn"
            f" from positions {FIRST_POSITION} on"
        )
    return length


def provenances(request: Request, source: Source, length: int) -> list[Provenance]:
    """How each document is to be made; what decides that it is current."""
    inputs = {
        "text": digest_of(sha256(path) for path in request.text),
        "checkpoint": source.digest,
    }
    parameters = {
        "family": source.family,
        "model": source.label,
        "length": length,
        "rows": request.rows,
        "device": request.device.split(":")[0],
        "dtype": request.dtype,
        "libraries": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    code = code_digest("capture", "data")
    return [
        Provenance("capture", {**parameters, "doc_id": doc_id}, request.seed, inputs, code)
        for doc_id in range(request.docs)
    ]


def is_whole(store: Store, model: str, doc_id: int, provenance: Provenance) -> bool:
    """Whether a document was captured in just this way and all its files are there at their sizes."""
    path = store.rows(model, doc_id)
    if not is_current(ROWS, path, provenance) or not store.tokens(model, doc_id).is_file():
        return False
    notes = footer(ROWS, path)["notes"]
    sizes = notes.get("kv_bytes", {}) if isinstance(notes, dict) else {}
    files = {store.kv(model, doc_id, int(layer)): size for layer, size in sizes.items()}
    return bool(files) and all(kv.is_file() and kv.stat().st_size == size for kv, size in files.items())


def documents_there(store: Store, model: str) -> list[int]:
    """Numbers of the documents of which the store holds anything, ascending."""
    found = {path.stem for path in store.row_files(model)}
    found |= {path.stem for path in store.tokens(model, 0).parent.glob("doc-*.parquet")}
    found |= {path.name for path in store.kv(model, 0, 0).parent.parent.glob("doc-*")}
    return sorted(int(name.removeprefix("doc-")) for name in found)


def shape_of(config: PretrainedConfig, weight_bytes: int, quantised: bool) -> Shape:
    """A model's sizes from its configuration and the size of its weight files."""
    heads = config.num_attention_heads
    stored = GGUF_BYTES if quantised else 4 if "32" in str(config.dtype) else 2
    return Shape(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        width=config.hidden_size,
        longest=getattr(config, "max_position_embeddings", None),
        parameters=weight_bytes / stored,
        embeddings=config.vocab_size * config.hidden_size,
    )


def estimate(shape: Shape, docs: int, length: int, dtype: str) -> Cost:
    """What capturing so many documents of so many tokens will take, on this CPU."""
    size = 4 if dtype == "float32" else 2
    kv_layer = 2 * shape.kv_heads * length * shape.head_dim * 4
    disk = math.ceil(SLACK * docs * shape.layers * kv_layer)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * length**2  # the lower triangle of two products
    operations = docs * (2 * max(shape.parameters - shape.embeddings, 0) * length + attention)
    working = 12 * length * shape.width * size + 6 * kv_layer
    return Cost(
        disk=disk,
        memory=math.ceil(LIBRARIES + shape.parameters * size + working),
        seconds=LOADING + operations / (EFFICIENCY * _matmul_speed()) + disk / WRITING_SPEED,
    )


def documents_of(number: int) -> str:
    """1 document, 2 documents."""
    return f"{number} document{'' if number == 1 else 's'}"


def describe(cost: Cost, device: str) -> str:
    """The estimate for a person."""
    minutes = f"{cost.seconds / 60:.0f} min" if cost.seconds >= 90 else f"{math.ceil(cost.seconds)} s"
    when = f"{minutes} on this CPU" if device == "cpu" else f"time on {device} not estimated"
    return f"about {_readable(cost.disk)} of disk before compression, {_readable(cost.memory)} of memory, {when}"


def _matmul_speed() -> float:
    """Operations a second of torch's float32 matrix product on this CPU now: best of a few, as others may use it."""
    import torch

    a = torch.ones(1024, 1024)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best


def check_disk(store: Store, needed: int) -> None:
    """Raise BadInput if the estimate exceeds the free space where the store is."""
    root = next(path for path in (store.root, *store.root.parents) if path.exists())
    free = shutil.disk_usage(root).free
    if needed > free:
        raise BadInput(
            f"{store.root}: the capture needs about {_readable(needed)} of disk and {_readable(free)} are free:"
            " use fewer --docs or a shorter --length, or another --data folder"
        )


def _readable(size: float) -> str:
    """Bytes for a person: 95 MB, 1.2 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.{0 if size >= 10 * scale else 1}f} {unit}"
    return f"{size / 1e3:.0f} kB"
