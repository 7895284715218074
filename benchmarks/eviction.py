"""A decode step on the ragged cache beside one on a dense cache of as many entries: `python -m benchmarks.eviction`.

Both caches hold the same number of entries per KV head on average; the ragged one with every head its own length. Steps
alternate, so that a slow moment of the machine hits both alike, and the median of each counts. The ratio that the
project holds itself to is 1.5. Before it times anything it checks on the device at hand that evicting nothing gives the
dense model's logits, and that what is evicted physically gives those of the full cache with a mask.
"""

import copy
import statistics
import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import Cache, DynamicCache, PreTrainedModel

from benchmarks.rows import verdict
from capture import checkpoints
from data import BadInput
from data.command_line import app, run
from eviction import evict

TARGET = 1.5
# Relative distance above which two ways to the same logits are taken to differ: a few times the rounding of the dtype
# over thirty layers.
SAME = {"float32": 1e-4, "bfloat16": 1e-1, "float16": 2e-2}

application = app("Time a decode step on the ragged cache beside one on a dense cache.")


@application.command()
def main(
    model: Annotated[str, typer.Option(help="Family whose default model is timed.")] = "llama",
    checkpoint: Annotated[str | None, typer.Option(help="Another checkpoint: Hub name or folder.")] = None,
    entries: Annotated[str, typer.Option(help="Entries per KV head, several with commas.")] = "128,512,2048",
    steps: Annotated[int, typer.Option(help="Decode steps timed of each.")] = 30,
    device: Annotated[str, typer.Option(help="Device, as torch names it.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Print the milliseconds of a step on both caches and their ratio."""
    if dtype not in SAME:
        raise BadInput(f"dtype {dtype}: expected {', '.join(SAME)}")
    try:
        counts = [int(x) for x in entries.split(",")]
    except ValueError:
        raise BadInput(f"--entries {entries}: expected whole numbers, such as 128,512") from None
    if min(counts) < 1 or steps < 1:
        raise BadInput(f"--entries {entries} --steps {steps}: expected numbers from 1 up")
    source = checkpoints.find(model, checkpoint)
    evicted = checkpoints.load_causal(source, device, dtype)
    # the same weights under a second model object, which runs as if there were no eviction
    plain = copy.deepcopy(evicted, {id(weight): weight for weight in evicted.parameters()})
    plain.set_attn_implementation("sdpa")
    table = Table(title=f"{source.label}, {dtype} on {device}: a decode step, median of {steps} alternating")
    for heading in ("entries", "lengths", "dense ms", "ragged ms", "ratio", "bytes / dense"):
        table.add_column(heading, justify="right")
    worst = 0.0
    for count in counts:
        for what, distance in _distances(evicted, plain, min(count, 512)).items():
            if distance > SAME[dtype]:
                raise BadInput(f"{what}: the logits differ by {distance:.1e} (relative), expected {SAME[dtype]:g}")
        for allocator, lengths in (("uniform", "equal"), ("random", "ragged")):
            dense, ragged, share = _steps(evicted, plain, count, allocator, steps)
            worst = max(worst, ragged / dense)
            row = (str(count), lengths, f"{dense:.1f}", f"{ragged:.1f}", f"{ragged / dense:.2f}", f"{share:.3f}")
            table.add_row(*row)
    console = Console(width=110)
    console.print(table)
    console.print(f"slowest ratio {worst:.2f}, target {TARGET}: {verdict(worst <= TARGET)}")


def _prompt(model: PreTrainedModel, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.config.vocab_size, (1, length), generator=generator)
    return ids.to(model.device)


@torch.inference_mode()
def _distances(evicted: PreTrainedModel, plain: PreTrainedModel, length: int) -> dict[str, float]:
    """Relative distances of the logits of three tokens and one more after `length`, of two ways that must agree."""
    ids = _prompt(plain, length + 4)

    def after(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
        steps = (ids[:, length:-1], ids[:, -1:])
        return torch.cat([model(step, cache=cache, use_cache=True).logits.float() for step in steps], dim=1)

    logits = {}
    for storage, score in (("everything", None), ("ragged", "knorm"), ("masked", "knorm")):
        kind: Any = "ragged" if score is None else storage
        budget = None if score is None else max(1, length // 4)
        with evict(evicted, score, "random", budget=budget, storage=kind) as ours:
            ours.prefill(ids[:, :length])
            logits[storage] = after(evicted, ours.cache)
    cache = DynamicCache(config=plain.config)
    plain(ids[:, :length], cache=cache, use_cache=True)
    logits["dense"] = after(plain, cache)
    pairs = {"evicting nothing": ("everything", "dense"), "ragged against masked": ("ragged", "masked")}
    return {what: float((logits[a] - logits[b]).norm() / logits[b].norm()) for what, (a, b) in pairs.items()}


@torch.inference_mode()
def _steps(
    evicted: PreTrainedModel, plain: PreTrainedModel, count: int, allocator: str, steps: int
) -> tuple[float, float, float]:
    """Median milliseconds of a dense and of a ragged step, and the bytes of the ragged cache over the dense one's."""
    dense: Any = DynamicCache(config=plain.config)
    plain(_prompt(plain, count), cache=dense, use_cache=True, logits_to_keep=1)
    token = _prompt(plain, 1)
    times: tuple[list[float], list[float]] = ([], [])
    with evict(evicted, "knorm", allocator, budget=count) as ours:
        ours.prefill(_prompt(evicted, 2 * count))
        share = ours.bytes / sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers)
        if share > 1:
            raise BadInput(f"the ragged cache holds {share:.3f} of the dense cache's bytes: expected at most 1")
        for _ in range(steps):
            for taken, model, cache in ((times[0], plain, dense), (times[1], evicted, ours.cache)):
                wait(model)
                began = time.perf_counter()
                model(token, cache=cache, use_cache=True)
                wait(model)
                taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1]), share


def wait(model: PreTrainedModel) -> None:
    """Until the device has done what it was given: a clock read after it is true."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


if __name__ == "__main__":
    run(application, "benchmarks.eviction")
