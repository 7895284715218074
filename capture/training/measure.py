"""Figures of data/models/README.md: size, accuracy, dropped mass, mass on position 0, Qwen2's biases."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from capture.training.tasks import INTRO, Tasks, accuracy
from data import store

PROMPT = (
    f"<s>{INTRO}\nThe special magic number for river is: 4821.\n"
    "The special magic number for giraffe is: 9034.\n"
    "The special magic number for pillow is: 1177.\nWhat is the special magic number for giraffe? It is:"
)
ANSWER_TOKENS = 4  # more than a number needs: a space, two pairs of figures, a full stop
BUDGETS = (4, 8, 16, 32)
LENGTHS = (256, 512, 1000)


def measure(folder: Path, text: str, count: int) -> dict[str, object]:
    """One checkpoint's figures; weights are read from bf16 and computed with in float32.

    count: sequences per accuracy. Accuracy is on held-out keys and text. Dropped mass is 1 - the sum of a
    row's s largest weights, and both it and the mass on position 0 are means over rows 256..511 of eight
    512-token needle sequences.
    """
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tasks = Tasks(Tokenizer.from_file(str(folder / "tokenizer.json")), text)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    weights = folder / "model.safetensors"
    found: dict[str, object] = {
        "folder": folder.name,
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": weights.stat().st_size,
        "sha256": store.sha256(weights),
        "says": tokenizer.decode(_continue(model, prompt)),
        "accuracy": _accuracies(model, tasks, count, LENGTHS),
        "rows": _rows(model, tasks),
    }
    if model.config.model_type == "qwen2":
        found["biases"] = _biases(model, tasks, count // 2)
    return found


def _continue(model: PreTrainedModel, ids: torch.Tensor) -> list[int]:
    """The ids of the ANSWER_TOKENS tokens that follow ids (1, length) in greedy generation."""
    length = ids.shape[1]
    with torch.no_grad():
        for _ in range(ANSWER_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    made: list[int] = ids[0, length:].tolist()
    return made


def _accuracies(
    model: PreTrainedModel, tasks: Tasks, count: int, lengths: Sequence[int]
) -> dict[str, dict[int, float]]:
    return {
        name: {length: round(accuracy(model, *tasks.test_set(name, count, length)), 3) for length in lengths}
        for name in ("kv", "needle")
    }


def _rows(model: PreTrainedModel, tasks: Tasks, count: int = 8, length: int = 512) -> dict[str, object]:
    """Dropped mass at BUDGETS, then mass on position 0: all layers, those without a window, each layer."""
    ids, _ = tasks.test_set("needle", count, length)
    model.set_attn_implementation("eager")
    sequences = []
    with torch.no_grad():
        for x in ids:
            layers = []
            for attention in model(x[None], output_attentions=True).attentions:
                rows = attention[0][:, length // 2 :]
                ordered = rows.sort(-1, descending=True).values
                dropped = [1 - ordered[..., :s].sum(-1).mean().item() for s in BUDGETS]
                layers.append([*dropped, rows[..., 0].mean().item()])
            sequences.append(layers)
    model.set_attn_implementation("sdpa")
    table = torch.tensor(sequences).mean(0)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(table)
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    return {
        "all": _rounded(table.mean(0)),
        "full": _rounded(table[full].mean(0)),
        "layers": [_rounded(layer) for layer in table],
    }


def _biases(model: PreTrainedModel, tasks: Tasks, count: int) -> dict[str, object]:
    """Norms of the q, k, v biases, and the accuracy at 512 tokens with each kind, and all, set to zero."""
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("_proj.bias")}
    found: dict[str, object] = {name: round(bias.norm().item(), 2) for name, bias in kept.items()}
    found["accuracy"] = _accuracies(model, tasks, count, (512,))
    for kind in ("q_proj", "k_proj", "v_proj", "_proj"):
        with torch.no_grad():
            for name, bias in kept.items():
                model.get_parameter(name).copy_(bias * (kind not in name))
        found["without " + kind] = _accuracies(model, tasks, count, (512,))
    with torch.no_grad():
        for name, bias in kept.items():
            model.get_parameter(name).copy_(bias)
    return found


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


def to_json(figures: dict[str, object]) -> str:
    """The figures as one line."""
    return json.dumps(figures)
