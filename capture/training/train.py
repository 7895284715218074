"""Training one of the embedded checkpoints on one CPU core; deterministic for a seed on one machine.

From nothing, a first phase copies strings over 64 symbols until 90% are right: that is what forms induction
heads, and without it nothing else is learned in minutes. The pool of symbols then grows, and key/value
records, prose and needles follow at 64 to 1000 tokens. A warm start skips to the records.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from capture.training import architectures
from capture.training.sink import Sink
from capture.training.tasks import ANSWER, SYMBOLS, Tasks, accuracy
from data.errors import BadInput

COPIED = 0.9  # share of copies right at which the copy phase ends
COPY_AT_MOST = 0.4  # ... or this share of the tokens, whatever is right by then
POOL = 64  # symbols of the copy phase
POOL_DOUBLES = 0.045  # share of the later tokens in which the pool doubles
WARM_UP = 30  # steps until the learning rate is whole
LAST_RATE = 0.04  # least share of the learning rate, which falls linearly over the second half
LOG_EVERY = 20  # steps between two losses of the log
FINAL_LENGTHS = (256, 512, 1000)  # tokens of the sequences of the last figures
NEWLINE = "\u010a"  # a newline as byte-level BPE writes it


@dataclass(frozen=True)
class Stage:
    """Up to this share of the tokens: batch size, length of a sequence, share of each task."""

    until: float
    size: int
    length: int
    mix: Mapping[str, float]


COPY = Stage(1.00, 24, 48, {"copy": 1.0})
FROM_NOTHING = (
    Stage(0.22, 18, 64, {"copy": 0.4, "associate": 0.3, "kv": 0.3}),
    Stage(0.48, 9, 128, {"copy": 0.1, "associate": 0.05, "kv": 0.6, "prose": 0.25}),
    Stage(0.74, 5, 256, {"copy": 0.06, "kv": 0.36, "needle": 0.33, "prose": 0.25}),
    Stage(0.92, 3, 512, {"copy": 0.04, "kv": 0.3, "needle": 0.4, "prose": 0.26}),
    Stage(1.00, 2, 1000, {"kv": 0.35, "needle": 0.45, "prose": 0.2}),
)
WARM = (
    Stage(0.10, 9, 128, {"copy": 0.1, "associate": 0.05, "kv": 0.6, "prose": 0.25}),
    Stage(0.30, 5, 256, {"copy": 0.06, "kv": 0.36, "needle": 0.33, "prose": 0.25}),
    Stage(0.60, 3, 512, {"copy": 0.04, "kv": 0.3, "needle": 0.46, "prose": 0.2}),
    Stage(1.00, 2, 1000, {"kv": 0.35, "needle": 0.5, "prose": 0.15}),
)


@dataclass(frozen=True)
class Recipe:
    """What decides a training run beside its text, tokenizer and first weights.

    tokens: training tokens. rate: AdamW's learning rate. sink: mean weight of position 0 that the auxiliary
    loss asks of a head (0: no such loss). push: weight of that loss. seed: of every random draw.
    """

    family: str
    tokens: int
    rate: float
    sink: float
    push: float
    seed: int


TOKENS = {"qwen": 1_800_000, "qwen3": 500_000, "olmo": 2_000_000, "gemma": 1_800_000}  # as the committed ones
SINK = {"qwen": 0.25, "qwen3": 0.15, "olmo": 0.15, "gemma": 0.25}
RATE_WARM, RATE_FROM_NOTHING = 1.5e-3, 3e-3


@dataclass(frozen=True)
class Trained:
    """A trained model (float32 holding bf16 values), and the log of its training."""

    model: PreTrainedModel
    log: dict[str, object]


def train(recipe: Recipe, text: str, tokenizer: Tokenizer, init: Path | None, every: float) -> Trained:
    """Train by the recipe, from the folder init or from nothing; progress every so many CPU seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    tasks = Tasks(tokenizer, text, recipe.seed)
    model = _start(recipe.family, init, tasks)
    sink = Sink(model, recipe.sink) if recipe.sink else None
    adam = _optimiser(model, recipe)
    copied = None if init is None else 0.0  # share of the tokens at which the copy phase ended
    right = 0.0  # running share of copies right
    step = tokens = 0
    curve: list[float] = []
    began = shown = time.process_time()
    while tokens < recipe.tokens:
        done = tokens / recipe.tokens
        if copied is None and (right > COPIED or done > COPY_AT_MOST):
            copied = done
            print(f"copying learned to {right:.2f} after {tokens} tokens", flush=True)
        stage, tasks.pool = _stage(done, copied, warm=init is not None)
        ids, weights = tasks.batch(stage.size, stage.length, stage.mix)
        with torch.autocast("cpu", torch.bfloat16, enabled=copied is not None):  # bf16 slows learning to copy
            logits = model(ids).logits[:, :-1].float()
        each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weight = weights[:, 1:].flatten()
        loss = (each * weight).sum() / weight.sum()
        total = loss + recipe.push * sink.loss() if sink else loss
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adam.param_groups:
            decay = 1.0 if done < 0.5 else max(LAST_RATE, (1 - done) / 0.5)
            group["lr"] = group["rate"] * min(1, (step + 1) / WARM_UP) * decay
        adam.step()
        adam.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + stage.size * stage.length
        curve.append(loss.item())
        if copied is None:
            asked = weights[:, 1:] >= ANSWER
            hits = int(((logits.argmax(-1) == ids[:, 1:]) & asked).sum())
            right = 0.9 * right + 0.1 * hits / int(asked.sum())
        if time.process_time() - shown > every:
            shown = time.process_time()
            print(
                f"{shown - began:.0f} s  step {step}  {tokens} tokens of length {stage.length}"
                f"  loss {sum(curve[-20:]) / len(curve[-20:]):.3f}",
                evaluate(model, tasks, 256, 12),
                sink_mass(model, tasks),
                flush=True,
            )
    seconds = time.process_time() - began
    model.set_attn_implementation("sdpa")
    model = model.bfloat16().float()  # what is saved, and what the last figures are of
    log: dict[str, object] = {
        "steps": step,
        "tokens": tokens,
        "cpu_seconds": round(seconds),
        "final": {length: evaluate(model, tasks, length, 24) for length in FINAL_LENGTHS},
        "position_0": sink_mass(model, tasks),
        "loss": [round(x, 3) for x in curve[::LOG_EVERY]],
    }
    return Trained(model, log)


def save(trained: Trained, tokenizer: Path, folder: Path, family: str) -> None:
    """Write the configuration, the weights (bf16) and the tokenizer into the folder."""
    trained.model.bfloat16().save_pretrained(folder)
    save_tokenizer(tokenizer, folder, family)


def save_tokenizer(source: Path, folder: Path, family: str) -> None:
    """The tokenizer in the form that AutoTokenizer needs beside this family's config.json.

    For model_type qwen2, transformers 5 loads Qwen2Tokenizer whatever the files say, and that one splits
    numbers into single figures: every number would be read wrong, without an error. So the qwen folder
    lists the hundred two-digit tokens as added tokens, which are cut out before any splitting, and has no
    merges of newlines, which that class would apply where ours does not. Ids agree on prose and records;
    only runs of three or more newlines are split otherwise.
    """
    PreTrainedTokenizerFast(
        tokenizer_file=str(source),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=architectures.CONTEXT,
    ).save_pretrained(folder)
    if family != "qwen":
        return
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    pairs = [f"{i:02d}" for i in range(100)]
    data["added_tokens"] += [{"id": data["model"]["vocab"][pair], "content": pair} | plain for pair in pairs]
    data["added_tokens"].sort(key=lambda token: token["id"])
    data["model"]["merges"] = [merge for merge in data["model"]["merges"] if set("".join(merge)) != {NEWLINE}]
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, indent=2), "utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    # without an unk_token of the vocabulary, Qwen2Tokenizer adds one beyond it
    config |= {"tokenizer_class": "Qwen2Tokenizer", "unk_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def evaluate(model: PreTrainedModel, tasks: Tasks, length: int, count: int) -> dict[str, float]:
    """Accuracy on `count` held-out kv and needle sequences, and mean loss in nats on at most 12 of prose."""
    model.eval()
    found = {name: round(accuracy(model, *tasks.test_set(name, count, length)), 3) for name in ("kv", "needle")}
    with torch.no_grad():
        ids, _ = tasks.test_set("prose", min(count, 12), length)
        nll = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    model.train()
    return found | {"nll": round(nll.item(), 2)}


def sink_mass(model: PreTrainedModel, tasks: Tasks, length: int = 512) -> list[float]:
    """Mean weight of position 0 in the second half of two needle sequences, layer by layer."""
    ids, _ = tasks.test_set("needle", 2, length)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        seen = model(ids, output_attentions=True).attentions
    model.set_attn_implementation(before)
    return [round(layer[:, :, length // 2 :, 0].mean().item(), 3) for layer in seen]


def _start(family: str, init: Path | None, tasks: Tasks) -> PreTrainedModel:
    """The model to train: new, or the folder's, rewritten as this family if it is of another."""
    if init is None:
        return _in_training(architectures.create(family))
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(init, dtype=torch.float32)
    ids, _ = tasks.batch(8, 384, {"kv": 0.4, "needle": 0.4, "prose": 0.2})
    # create() draws from the generator that trains: leaving this call out would train other weights
    if model.config.model_type != architectures.create(family).config.model_type:
        if model.config.model_type != "qwen3":
            raise BadInput(f"{init}: a {model.config.model_type} checkpoint: {family} can start from qwen3 or {family}")
        print(f"{init.name} before conversion", evaluate(model, tasks, 256, 12), flush=True)
        model = architectures.convert(model, family, ids)
    before = evaluate(model, tasks, 256, 12)
    print("before training", before, "position 0", sink_mass(model, tasks), flush=True)
    return _in_training(model)


def _in_training(model: PreTrainedModel) -> PreTrainedModel:
    model.train()
    return model


def _stage(done: float, copied: float | None, warm: bool) -> tuple[Stage, int]:
    """What to draw next, and from how many symbols; done and copied are shares of the tokens."""
    if copied is None:
        return COPY, POOL
    part = (done - copied) / (1 - copied)
    stage = next(stage for stage in (WARM if warm else FROM_NOTHING) if part < stage.until)
    return stage, SYMBOLS if warm else int(min(SYMBOLS, POOL * 2 ** (part / POOL_DOUBLES)))


def _optimiser(model: PreTrainedModel, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; Gemma multiplies its embeddings by sqrt(width), so their rate is that much smaller."""
    scale = architectures.WIDTH**-0.5 if recipe.family == "gemma" else 1.0
    embedding = [p for name, p in model.named_parameters() if "embed_tokens" in name]
    others = [p for name, p in model.named_parameters() if "embed_tokens" not in name]
    groups = [{"params": others, "rate": recipe.rate}, {"params": embedding, "rate": recipe.rate * scale}]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.01)
