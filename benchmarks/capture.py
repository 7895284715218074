"""What a capture costs beside the model's own forward pass: `python -m benchmarks.capture`.

Timed on one document of each length, best of a few runs: the decoder's forward pass with its own sdpa
attention and no logits; the whole capture of the document; and, inside it, the writing of its kv files. The
ratio that the project holds itself to is (capture - writing) / forward <= 1.5 at 4,096 tokens of SmolLM2.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import typer

from capture import checkpoints, documents, streaming
from data import Provenance, Store, store
from data.command_line import app, run
from data.store import CHECKOUT

TARGET = 1.5

application = app("Time the capture of one document beside the model's own forward pass.")


@application.command()
def main(
    model: Annotated[str, typer.Option(help="Family whose default model is timed.")] = "llama",
    checkpoint: Annotated[str | None, typer.Option(help="Another checkpoint: Hub name or folder.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of the document.")] = 4096,
    rows: Annotated[int, typer.Option(help="Positions a layer.")] = 6,
    repeats: Annotated[int, typer.Option(help="Runs of each; the fastest counts.")] = 3,
    device: Annotated[str, typer.Option(help="Device, as torch names it.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Print forward, capture and writing seconds, and their ratios."""
    source = checkpoints.find(model, checkpoint)
    tokenizer = checkpoints.load_tokenizer(source)
    begin = documents.begin_ids(tokenizer, source.model_type, source.begins)
    files = [CHECKOUT / "data" / "text" / "austen-heldout.txt"]
    ids = documents.cut(files, tokenizer, begin, 1, length)[0]
    decoder = checkpoints.load_model(source, device, dtype)
    decoder.set_attn_implementation("sdpa")
    batch = streaming.batch_of(decoder, ids)

    def forward() -> None:
        with torch.inference_mode():
            decoder(input_ids=batch, use_cache=False)

    written = 0.0

    def timed_write(*args: object) -> None:
        nonlocal written
        start = time.perf_counter()
        store.write(*args)  # type: ignore[arg-type]  # the arguments of data.store.write, passed on
        written += time.perf_counter() - start

    forwards, captures, writes = [], [], []
    with tempfile.TemporaryDirectory() as folder, mock.patch("capture.streaming.write", timed_write):
        provenance = Provenance("benchmark", {}, 0, {}, "")

        def capture() -> None:
            streaming.capture_document(
                decoder, ids, source.family, source.label, 0, rows, provenance, Store(Path(folder))
            )

        forward()
        for _ in range(repeats):  # turn by turn, so that a slow minute of the machine hits all alike
            forwards.append(_seconds(forward, device))
            written = 0.0
            captures.append(_seconds(capture, device))
            writes.append(written)
    best = min(range(repeats), key=lambda run: captures[run] - writes[run])
    ratio = (captures[best] - writes[best]) / min(forwards)
    threads = torch.get_num_threads()
    print(f"{source.label}, {length} tokens, {rows} positions a layer, {dtype} on {device}, {threads} threads")
    print(f"forward pass           {min(forwards):8.2f} s")
    print(f"capture                {captures[best]:8.2f} s")
    print(f"  of it, writing kv    {writes[best]:8.2f} s")
    print(f"(capture - writing) / forward = {ratio:.2f} (target: at most {TARGET})")


def _seconds(action: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    action()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    run(application, "benchmarks.capture")
