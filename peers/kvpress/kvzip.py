"""The scores that kvpress's KVzipPress gives. Runs in the environment of `make peers` and imports nothing of ours.

.venv-kvpress/bin/python peers/kvpress/kvzip.py tests/data/kvzip-kvpress-0.5.5.json FOLDER ...

Each FOLDER is a model with its tokenizer; its context is `context`, which tests/test_kvzip.py makes again. Output:
{"versions": {package: version}, "chunk": tokens fed again in a pass, "models": {name of the folder: {"sha256": of
model.safetensors, "requests": [pass] of the token ids fed before its chunk, "scores": [layer][KV head][token]}}}. The
scores are those before the press raises the first four tokens above all others, rounded to 7 significant digits.
"""

import hashlib
import importlib.metadata
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from kvpress import KVzipPress
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

PACKAGES = ("kvpress", "transformers", "torch")
TOKENS, CHUNK = 90, 40


def main(target: Path, folders: list[Path]) -> None:
    """Write the scores of every model on the context."""
    logging.disable(logging.WARNING)  # "multiple forward passes", once a press
    transformers_logging.disable_progress_bar()
    answer = {
        "versions": {name: importlib.metadata.version(name).partition("+")[0] for name in PACKAGES},
        "chunk": CHUNK,
        "models": {folder.name: measure(folder) for folder in folders},
    }
    target.write_text(json.dumps(answer, separators=(",", ":")) + "\n", "utf-8")


def context() -> list[int]:
    """Token ids that look random and are the same everywhere, after the token that opens the embedded models' texts."""
    return [1] + [3 + (i * i * 7919 + 13 * i) % 2000 for i in range(1, TOKENS)]


def measure(folder: Path) -> dict[str, Any]:
    """One model's entry of the output."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    press = KVzipPress(0.5, chunk_size=CHUNK)
    found: dict[str, Any] = {"sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()}
    prepare = press.prepare

    def watched(*given: Any) -> Any:
        pairs = prepare(*given)
        found["requests"] = [fed[0, : fed.shape[1] - part.shape[1]].tolist() for part, fed in pairs]
        return pairs

    def kept(_: Any) -> None:
        scores = press.score_val[:, 0].tolist()
        found["scores"] = [[[float(f"{x:.7g}") for x in head] for head in layer] for layer in scores]

    press.prepare, press.compress_post = watched, kept
    with torch.inference_mode(), press(model):
        model.model(input_ids=torch.tensor([context()]), past_key_values=DynamicCache())
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
