"""What choosing costs beside the model itself: `python -m benchmarks.methods`.

Two ratios, each of times that alternate in one run. Alpha's selection (its whole call, P2's one order of positions for
all layers and KV heads) and the balancing selector's, beside a decode step on the cache that they leave. KVzip's score,
with the passes in which the model reads the text again, beside a dense prefill of the same text.
"""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from benchmarks.eviction import wait
from benchmarks.rows import verdict
from capture import checkpoints, documents
from data import BadInput
from data.command_line import app, run
from data.store import CHECKOUT
from eviction import evict
from eviction.method import Cells, Scope, Selector, named
from eviction.scores.kvzip import KVzip

MOST_STEPS, MOST_PREFILLS = 1.0, 3.0
SELECTORS = ("top_mass", "alpha", "balancing")
TEXT = CHECKOUT / "data" / "text" / "austen-heldout.txt"

application = app("Time selectors beside a decode step, and KVzip's score beside a dense prefill.")


@application.command()
def main(
    model: Annotated[str, typer.Option(help="Family whose default model is timed.")] = "llama",
    checkpoint: Annotated[str | None, typer.Option(help="Another checkpoint: Hub name or folder.")] = None,
    entries: Annotated[int, typer.Option(help="Entries of every KV head before the selection (n).")] = 4096,
    budget: Annotated[int, typer.Option(help="Entries of every KV head after it (k).")] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens of the text that KVzip's score is timed on.")] = 2048,
    steps: Annotated[int, typer.Option(help="Decode steps and selections timed.")] = 15,
    prefills: Annotated[int, typer.Option(help="Dense prefills and KVzip runs timed.")] = 3,
    device: Annotated[str, typer.Option(help="Device, as torch names it.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Print the milliseconds of each and their ratios."""
    if not 1 <= budget < entries or min(tokens, steps, prefills) < 1:
        raise BadInput(f"--budget {budget} --entries {entries}: expected 1 <= budget < entries, and all else from 1 up")
    source = checkpoints.find(model, checkpoint)
    tokenizer = checkpoints.load_tokenizer(source)
    begin = documents.begin_ids(tokenizer, source.model_type, source.begins)
    ids = torch.from_numpy(documents.cut([TEXT], tokenizer, begin, 1, max(entries, tokens))[0])[None].to(device)
    timed = checkpoints.load_causal(source, device, dtype)
    table = Table(title=f"{source.label}, {dtype} on {device}: medians")
    for heading in ("", "ms", "of", "ms", "ratio", "target"):
        table.add_column(heading, justify="right")
    reached = True
    for name in SELECTORS:
        chosen, step = _selection(timed, ids[:, :entries], named(Selector, name), budget, steps)
        reached &= name != "alpha" or chosen <= MOST_STEPS * step
        target = f"{MOST_STEPS:g}" if name == "alpha" else ""
        what = f"{name}, n = {entries}, k = {budget}"
        table.add_row(what, f"{chosen:.1f}", "decode step", f"{step:.1f}", f"{chosen / step:.2f}", target)
    score, dense = _reading_again(timed, ids[:, :tokens], KVzip.asking(tokenizer), budget, prefills)
    reached &= score <= MOST_PREFILLS * dense
    row = (f"{score:.0f}", "dense prefill", f"{dense:.0f}", f"{score / dense:.2f}", f"{MOST_PREFILLS:g}")
    table.add_row(f"kvzip, {tokens} tokens", *row)
    console = Console(width=110)
    console.print(table)
    console.print(f"no more than the targets: {verdict(reached)}")


class _Noted(Selector):
    """Another selector, and what it was last called with."""

    name = "noted"
    source = "ours"

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.called: list[tuple[Sequence[Cells], list[torch.Tensor], list[torch.Tensor]]] = []

    @property
    def scope(self) -> Scope:
        return self.selector.scope

    @property
    def rows_needed(self) -> int:
        return self.selector.rows_needed

    def __call__(
        self, cells: Sequence[Cells], scores: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        self.called.append((cells, list(scores), list(counts)))
        return self.selector(cells, scores, counts)


def _selection(
    model: PreTrainedModel, ids: torch.Tensor, selector: Selector, budget: int, steps: int
) -> tuple[float, float]:
    """Median milliseconds of the selection in all layers and of a decode step on what it leaves."""
    noted, chosen, decoded = _Noted(selector), [], []
    with evict(model, "snapkv", selector=noted, budget=budget) as ours:
        ours.prefill(ids)
        with torch.inference_mode():
            for _ in range(steps):
                chosen.append(_milliseconds(model, lambda: [selector(*call) for call in noted.called]))
                decoded.append(_milliseconds(model, lambda: model(ids[:, :1], cache=ours.cache, use_cache=True)))
    return statistics.median(chosen), statistics.median(decoded)


def _reading_again(
    model: PreTrainedModel, ids: torch.Tensor, score: KVzip, budget: int, times: int
) -> tuple[float, float]:
    """Median milliseconds that the score takes beyond a dense prefill, and of a dense prefill."""
    whole, dense = [], []
    with torch.inference_mode():
        for _ in range(times):
            cache: Any = DynamicCache(config=model.config)
            read = {"cache": cache, "use_cache": True, "logits_to_keep": 1}
            dense.append(_milliseconds(model, partial(model, ids, **read)))
            with evict(model, score, budget=budget) as ours:
                whole.append(_milliseconds(model, lambda: ours.prefill(ids)))
    return statistics.median(whole) - statistics.median(dense), statistics.median(dense)


def _milliseconds(model: PreTrainedModel, what: Any) -> float:
    wait(model)
    began = time.perf_counter()
    what()
    wait(model)
    return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    run(application, "benchmarks.methods")
