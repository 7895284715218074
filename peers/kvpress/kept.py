"""What six presses of kvpress keep, as bits. Runs in the environment of `make peers` and imports nothing of ours.

.venv-kvpress/bin/python peers/kvpress/kept.py out/kvpress/contexts.json tests/data/kvpress-0.5.5.json

Input: {"ratios": [fraction removed, ...], "models": [{"label", "folder", "ids": [token ids]}, ...]}.

Output: {"versions": {package: version}, "options": {what the presses were called with}, "ratios": [...],
"models": {label: {"sha256": of model.safetensors, "ids": [...], "ids_sha256": of the ids as little-endian int64,
"kept": {reading: {press: {ratio: [layer][KV head] of bits}}}, "failed": {reading: {press: what it raised}},
"window_error": [layer]}}}. Bits are hexadecimal, the first token the highest bit of the first digit.

reading is "sdpa" (kvpress's own choice: its presses then recompute the window's queries from the hidden states) or
"eager" (the model hands its weights over, and the presses of ATTENTION read those: what they keep is then right for
any architecture), or "normed" (OLMo-2 alone: sdpa, with the norm over all heads put back into the queries that
ExpectedAttention computes again). window_error: largest distance of the recomputed window weights from the model's,
per layer.
"""

import hashlib
import importlib.metadata
import json
import logging
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from kvpress import (
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress.presses import expected_attention_press
from kvpress.presses.base_press import BasePress
from kvpress.presses.scorer_press import ScorerPress
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

PACKAGES = ("kvpress", "transformers", "torch")
PRESSES = {
    "snapkv": SnapKVPress,
    "streaming_llm": StreamingLLMPress,
    "tova": TOVAPress,
    "knorm": KnormPress,
    "keydiff": KeyDiffPress,
    "expected_attention": ExpectedAttentionPress,
}
ATTENTION = ("snapkv", "tova")  # the presses that read the weights of the model where it hands them over


def main(contexts: Path, target: Path) -> None:
    """Run every press on every context and write what it keeps."""
    logging.disable(logging.WARNING)  # "model not tested", once a press
    transformers_logging.disable_progress_bar()
    question = json.loads(contexts.read_text("utf-8"))
    ratios = question["ratios"]
    models = {entry["label"]: measure(Path(entry["folder"]), entry["ids"], ratios) for entry in question["models"]}
    answer = {
        "versions": {name: importlib.metadata.version(name).partition("+")[0] for name in PACKAGES},
        "options": {name: vars(press()) for name, press in PRESSES.items()},
        "ratios": ratios,
        "models": models,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(answer, separators=(",", ":")) + "\n", "utf-8")
    print(f"{target}: {target.stat().st_size} bytes")


def measure(folder: Path, ids: list[int], ratios: list[float]) -> dict[str, Any]:
    """One model's entry of the output."""
    kept: dict[str, Any] = {}
    failed: dict[str, Any] = {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    readings = [("sdpa", "sdpa", tuple(PRESSES)), ("eager", "eager", ATTENTION)]
    if model.config.model_type == "olmo2":
        readings.append(("normed", "sdpa", ("expected_attention",)))
    for reading, implementation, presses in readings:
        model.set_attn_implementation(implementation)
        kept[reading], failed[reading] = {}, {}
        with query_norm_put_back() if reading == "normed" else nullcontext():
            for name in presses:
                try:
                    kept[reading][name] = {str(ratio): positions(model, ids, PRESSES[name](ratio)) for ratio in ratios}
                except Exception as error:  # a press fails anywhere in its own code: what it raised is the measurement
                    failed[reading][name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    model.set_attn_implementation("eager")
    probe = WindowProbe()
    prefill(model, ids, probe)
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return {
        "sha256": weights,
        "ids": ids,
        "ids_sha256": hashlib.sha256(struct.pack(f"<{len(ids)}q", *ids)).hexdigest(),
        "kept": kept,
        "failed": failed,
        "window_error": probe.errors,
    }


@contextmanager
def query_norm_put_back() -> Iterator[None]:
    """ExpectedAttention with the queries of OLMo-2 as its attention makes them before RoPE."""

    def queries(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = module.q_norm(module.q_proj(hidden))
        heads: torch.Tensor = normed.unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        return heads

    before = expected_attention_press.get_prerope_query_states
    expected_attention_press.get_prerope_query_states = queries
    try:
        yield
    finally:
        expected_attention_press.get_prerope_query_states = before


def prefill(model: Any, ids: list[int], press: BasePress) -> None:
    """The context through the model with the press on, over a cache as kvpress's own pipeline makes it."""
    with torch.inference_mode(), press(model):
        model.model(input_ids=torch.tensor([ids]), past_key_values=DynamicCache())


def positions(model: Any, ids: list[int], press: ScorerPress) -> list[list[str]]:
    """Bits of the kept tokens, [layer][KV head]: the keys and values that stay, found among all that there were."""
    layers: dict[int, list[str]] = {}
    compress = press.compress

    def watched(module: Any, hidden: Any, keys: torch.Tensor, values: torch.Tensor, *rest: Any) -> Any:
        left = compress(module, hidden, keys, values, *rest)
        everything, stayed = torch.cat([keys, values], -1)[0], torch.cat(left, -1)[0]
        same = (stayed[:, :, None] == everything[:, None]).all(-1)  # (K, kept, N)
        if not bool((same.sum(-1) == 1).all()):
            raise RuntimeError("two tokens have the same key and value: what was kept cannot be told")
        layers[module.layer_idx] = [bits(head) for head in same.any(1).tolist()]
        return left

    press.compress = watched
    prefill(model, ids, press)
    return [layers[layer] for layer in sorted(layers)]


def bits(kept: list[bool]) -> str:
    """Hexadecimal, four tokens a digit."""
    padded = kept + [False] * (-len(kept) % 4)
    return "".join(f"{int(''.join('01'[b] for b in padded[i : i + 4]), 2):x}" for i in range(0, len(padded), 4))


class WindowProbe(BasePress):
    """Compresses nothing; notes how far SnapKVPress's recomputed window weights are from those of an eager model."""

    def __init__(self) -> None:
        self.errors: list[float] = []

    def compress(
        self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: torch.Tensor, kwargs: dict[str, Any]
    ) -> Any:
        """The cache as it is; the distance goes into errors."""
        window = SnapKVPress().window_size
        weights = SnapKVPress.compute_window_attention(
            module, hidden_states, keys, window, kwargs["position_embeddings"]
        )
        self.errors.append(float((weights - attentions[..., -window:, :-window]).abs().max()))
        return keys, values


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
