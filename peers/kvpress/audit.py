"""What presses of kvpress hold, cost and answer at a budget. Runs in the environment of `make peers`.

It imports nothing of ours.

.venv-kvpress/bin/python peers/kvpress/audit.py QUESTION.json ANSWER.json

QUESTION.json: {"models": [{"label": str, "folder": str, "prompts": [{"context_ids": [int], "question_ids": [int],
"answer_ids": [int]}]}], "budgets": [entries that a KV head keeps on average], and, where wanted, "presses": [names,
all of PRESSES if left out], "window": SnapKV's window (kvpress's own 64 if left out), "dtype": "float32" if left out}.

ANSWER.json: {"versions": {package: version}, "question_sha256": of QUESTION.json's bytes, "window", "dtype", "rows":
[...]}, one row per model, press, budget, question_seen and prompt (its number in the list), and per model,
question_seen and prompt one more with press "none" and budget null, the dense cache:

  n_tokens         tokens of the prefill: the context, and the question where question_seen
  ratio            compression_ratio that the press was given, chosen so that it keeps budget entries a KV head on
                   average where its own rounding allows; 0 where the budget is not below n_tokens
  kept_entries     entries over all layers and KV heads that attention still reads: held less masked
  held_entries     entries over all layers and KV heads that the cache has slots for
  logical_bytes    numel x itemsize of the cache's keys and values after the prefill and compression
  physical_bytes   bytes of the unique storages behind them, at the same moment
  final_bytes      the same after the last answer token was decoded
  full_bytes       logical bytes of the dense cache after the same prefill
  seconds          wall clock of the prefill with the press, whatever the press adds to it included
  dense_seconds    of the same prefill without one, run just before
  hit              whether greedy decoding gives the answer_ids; null where it could not be run
  error            what kvpress raised, or null; bytes and seconds are null where it was raised in the prefill

question_seen false: the press reads the context alone; then the question is read in one pass, as kvpress's pipeline
does, and the answer decoded. True: the press reads context and question, and the first answer token comes from that
prefill's own logits, which is before any compression, as in a call of `generate`; the others come from the compressed
cache. Cache and position ids are as in kvpress's pipeline: DynamicCache(), which holds window layers whole, and true
positions. Batches of one, sdpa (the presses that mask refuse eager).
"""

import hashlib
import importlib.metadata
import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from kvpress import (
    AdaKVPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    KVzipPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

PACKAGES = ("kvpress", "transformers", "torch")
KVPRESS_WINDOW = 64

# name -> (ratio, window) -> press
PRESSES: dict[str, Callable[[float, int], Any]] = {
    "snapkv": lambda ratio, window: SnapKVPress(ratio, window_size=window),
    "streaming_llm": lambda ratio, window: StreamingLLMPress(ratio),
    "tova": lambda ratio, window: TOVAPress(ratio),
    "knorm": lambda ratio, window: KnormPress(ratio),
    "keydiff": lambda ratio, window: KeyDiffPress(ratio),
    "expected_attention": lambda ratio, window: ExpectedAttentionPress(ratio),
    "adakv(snapkv)": lambda ratio, window: AdaKVPress(SnapKVPress(ratio, window_size=window)),
    "adakv(expected_attention)": lambda ratio, window: AdaKVPress(ExpectedAttentionPress(ratio)),
    "pyramidkv": lambda ratio, window: PyramidKVPress(ratio, window_size=window),
    "kvzip": lambda ratio, window: KVzipPress(ratio),
}


def main(question: Path, answer: Path) -> None:
    """Run all that the question asks for and write the answer."""
    logging.disable(logging.WARNING)  # "model not tested", once a press
    transformers_logging.disable_progress_bar()
    content = question.read_bytes()
    try:
        asked = json.loads(content)
        models, budgets = asked["models"], asked["budgets"]
    except (ValueError, KeyError, TypeError) as error:
        sys.exit(f"{question}: expected JSON with models and budgets, as this script's docstring says ({error!r})")
    presses = asked.get("presses") or list(PRESSES)
    window, dtype = asked.get("window") or KVPRESS_WINDOW, asked.get("dtype") or "float32"
    if unknown := [name for name in presses if name not in PRESSES]:
        sys.exit(f"{question}: unknown presses {', '.join(unknown)}: expected some of {', '.join(PRESSES)}")
    result: dict[str, Any] = {
        "versions": {name: importlib.metadata.version(name).partition("+")[0] for name in PACKAGES},
        "question_sha256": hashlib.sha256(content).hexdigest(),
        "window": window,
        "dtype": dtype,
        "rows": [],
    }
    for entry in models:
        model = AutoModelForCausalLM.from_pretrained(
            entry["folder"], dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        prompts = entry["prompts"]
        run(model, nullcontext(), prompts[0]["context_ids"], [], [0])  # a model's first pass costs more than the next
        for number, prompt in enumerate(prompts):
            began = time.monotonic()
            for question_seen in (False, True):
                for row in measured(model, prompt, question_seen, presses, budgets, window):
                    same = {"model": entry["label"], "prompt": number, "question_seen": question_seen}
                    result["rows"].append(same | row)
            print(f"{entry['label']}: {number + 1} of {len(prompts)}, {time.monotonic() - began:.0f} s", flush=True)
        write(answer.with_name(answer.name + ".partial"), result)  # what there is, should a later model fail
    write(answer, result)
    answer.with_name(answer.name + ".partial").unlink()
    print(f"{answer}: {len(result['rows'])} rows")


def write(target: Path, result: dict[str, Any]) -> None:
    """Replace the target at once, never by half."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    temporary.replace(target)


def measured(
    model: Any, prompt: dict[str, list[int]], question_seen: bool, presses: list[str], budgets: list[int], window: int
) -> list[dict[str, Any]]:
    """Rows of one prompt: the dense cache, then every press at every budget."""
    prefill = prompt["context_ids"] + (prompt["question_ids"] if question_seen else [])
    question = [] if question_seen else prompt["question_ids"]
    answer, n = prompt["answer_ids"], len(prefill)
    dense = run(model, nullcontext(), prefill, question, answer)
    common = {"n_tokens": n, "full_bytes": dense["logical_bytes"], "dense_seconds": dense["seconds"]}
    rows = [{"press": "none", "budget": None, "ratio": 0.0} | common | dense]
    for name in presses:
        for budget in budgets:
            ratio = ratio_for(name, n, budget, model.config)
            try:
                found = run(model, PRESSES[name](ratio, window)(model), prefill, question, answer)
            except Exception as error:  # a press fails anywhere in its own code: what it raised is the measurement
                found = FAILED | {"error": described(error)}
            rows.append({"press": name, "budget": budget, "ratio": ratio} | common | found)
    return rows


FAILED = dict.fromkeys(
    ("kept_entries", "held_entries", "logical_bytes", "physical_bytes", "final_bytes", "seconds", "hit")
)


def ratio_for(press: str, n: int, budget: int, config: Any) -> float:
    """The compression_ratio at which the press keeps budget entries of n, in the middle of what it rounds to that.

    Scorers and AdaKV keep int(n (1 - ratio)) a KV head, KVzip drops int(ratio n_layers K n) in all, PyramidKV rounds.
    """
    if budget >= n:
        return 0.0
    if press == "kvzip":
        cells = int(config.num_hidden_layers * config.num_key_value_heads)
        return (n - budget + 0.5 / cells) / n
    return 1 - (budget + (0.0 if press == "pyramidkv" else 0.5)) / n


@torch.inference_mode()
def run(
    model: Any, press: AbstractContextManager[None], prefill: list[int], question: list[int], answer: list[int]
) -> dict[str, Any]:
    """Prefill with the press on, measure, read the question, decode the answer."""
    cache: Any = DynamicCache()
    began = time.perf_counter()
    with press:
        logits = model(input_ids=torch.tensor([prefill]), past_key_values=cache, logits_to_keep=1).logits
    seconds = time.perf_counter() - began
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    held = sum(layer.keys.shape[1] * layer.keys.shape[2] for layer in cache.layers)
    found: dict[str, Any] = {
        "kept_entries": held - masked_entries(model),
        "held_entries": held,
        "logical_bytes": sum(x.numel() * x.element_size() for x in tensors),
        "physical_bytes": storage_bytes(cache),
        "seconds": seconds,
    }
    position = len(prefill)
    try:
        decoded: list[int] = []
        step = question
        while True:
            if step:
                positions = torch.arange(position, position + len(step))[None]
                logits = model(
                    input_ids=torch.tensor([step]), past_key_values=cache, position_ids=positions, logits_to_keep=1
                ).logits
                position += len(step)
            decoded.append(int(logits[0, -1].argmax()))
            if len(decoded) == len(answer):
                break
            step = decoded[-1:]
        return found | {"final_bytes": storage_bytes(cache), "hit": decoded == answer, "error": None}
    except Exception as error:  # of the presses that mask, some find no key that every query ignores
        return found | {"final_bytes": None, "hit": None, "error": described(error)}


def masked_entries(model: Any) -> int:
    """Entries that the cache still holds and attention is to skip."""
    masks = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]
    return sum(len(mask[0]) for mask in masks if mask is not None)


def storage_bytes(cache: Any) -> int:
    """Bytes of the unique storages of the cache's keys and values."""
    storages = [x.untyped_storage() for layer in cache.layers for x in (layer.keys, layer.values)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def described(error: Exception) -> str:
    """The exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
