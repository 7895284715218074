"""Making checkpoints' folders: which recipe, from what, whether it is there already, and its place."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer

from capture.training import architectures, corpus, train
from data import store
from data.errors import BadInput

MODELS = store.CHECKOUT / "data" / "models"
OUT = store.CHECKOUT / "out" / "models"
SEED_MODEL = MODELS / "seed-qwen3"  # the qwen3 checkpoint that all four committed ones started from
TOKENIZER = MODELS / "qwen3" / "tokenizer.json"
LOG = "training.json"


def read_text(path: Path | None) -> str:
    """The training text; raises BadInput, which says how to get it, if there is none."""
    if path is None:
        raise BadInput(f"no training text: give --text (with make: TEXT=); {corpus.HOW_TO_GET}")
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as text ({error}); {corpus.HOW_TO_GET}") from error


def recipe(
    family: str,
    init: Path | None,
    tokens: int | None,
    rate: float | None,
    sink: float | None,
    push: float,
    seed: int,
) -> train.Recipe:
    """The committed checkpoint's recipe, but for what is given; raises BadInput for an unknown family."""
    if family not in architectures.FAMILIES:
        raise BadInput(f"no embedded family {family!r}: expected one of {', '.join(architectures.FAMILIES)}")
    return train.Recipe(
        family=family,
        tokens=tokens if tokens is not None else train.TOKENS[family],
        rate=rate if rate is not None else train.RATE_FROM_NOTHING if init is None else train.RATE_WARM,
        sink=sink if sink is not None else train.SINK[family],
        push=push,
        seed=seed,
    )


def make(
    recipes: Sequence[train.Recipe], text: str, tokenizer: Path, init: Path | None, out: Path, every: float
) -> None:
    """Train by each recipe into out/FAMILY; a folder that was made in just this way is left as it is.

    Raises BadInput before any training if out is data/models or inside it, or if tokenizer or init is
    missing.
    """
    if out.resolve().is_relative_to(MODELS.resolve()):
        raise BadInput(f"{out}: the committed checkpoints are not overwritten; expected a folder elsewhere")
    inputs = {"text": store.digest_of([text]), "tokenizer": store.sha256(tokenizer)}
    inputs["init"] = "" if init is None else store.sha256(init / "model.safetensors")
    inputs["code"] = store.code_digest("capture/training")
    for one in recipes:
        folder = out / one.family
        made_by = {"recipe": asdict(one), "inputs": inputs}
        if _made_by(folder) == made_by:
            print(f"{folder}: current")
            continue
        print(f"{folder}: {one.tokens} tokens, some minutes of one core per million", flush=True)
        trained = train.train(one, text, Tokenizer.from_file(str(tokenizer)), init, every)
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        train.save(trained, tokenizer, partial, one.family)
        store.write_text(partial / LOG, json.dumps(made_by | trained.log, indent=1) + "\n")
        _replace(folder, partial)
        print(f"{folder}: {trained.log['cpu_seconds']} CPU seconds, {trained.log['final']}", flush=True)


def _made_by(folder: Path) -> dict[str, object] | None:
    """What the folder's log says of how it was made; None if there is no whole checkpoint."""
    try:
        log = json.loads((folder / LOG).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return {key: log.get(key) for key in ("recipe", "inputs")}


def _replace(folder: Path, partial: Path) -> None:
    """Put the finished folder in its place; the one before it is moved aside first, and then removed."""
    before = folder.with_name(f"{folder.name}.{os.getpid()}.before.partial")
    if folder.exists():
        folder.rename(before)
    partial.rename(folder)
    shutil.rmtree(before, ignore_errors=True)
