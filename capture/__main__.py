"""The command line of the capture: `python -m capture --model qwen`."""

from pathlib import Path
from typing import Annotated

import typer

from capture import checkpoints, documents, stage
from capture.families import FAMILIES
from capture.plan import Request
from data import BadInput, Store
from data.command_line import app, run
from data.store import CHECKOUT

application = app("Capture attention rows of a model: queries, keys and values exactly as it used them.")


@application.command()
def main(
    model: Annotated[
        str | None,
        typer.Option(help=f"Family: {', '.join(FAMILIES)}; its default model unless --checkpoint. Or several: a,b."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="A Hub name, a local folder (safetensors or GGUF) or a .gguf file.")
    ] = None,
    text: Annotated[
        list[Path],
        typer.Option(help="Text file, or folder of *.txt; may be repeated.", show_default="Austen"),
    ] = [CHECKOUT / "data" / "text" / "austen-heldout.txt"],  # noqa: B006  typer reads it and copies it
    docs: Annotated[int, typer.Option(help="Documents: non-overlapping stretches of the text.")] = 12,
    length: Annotated[int | None, typer.Option(help="Tokens of a document.", show_default="the model's record")] = None,
    rows: Annotated[int, typer.Option(help="Positions drawn a document and layer, from 64 on.")] = 6,
    device: Annotated[str, typer.Option(help="Device, as torch names it: cpu, cuda, cuda:1.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the draw of positions.")] = 0,
    gemma_terms: Annotated[
        str | None,
        typer.Option(help="`accept` the Gemma Terms of Use: the real Gemma 3 270M for --model gemma."),
    ] = None,
    data: Annotated[Path, typer.Option(help="Folder that holds the artefacts.")] = CHECKOUT / "data",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and estimate only.")] = False,
) -> None:
    """Write data/kv, data/tokens and data/rows of one model."""
    files = documents.text_files(text)
    request = Request(files, docs, length, rows, device, dtype, seed)
    names = model.split(",") if model else [None]
    if checkpoint is not None and len(names) > 1:
        raise BadInput(f"--model {model} with --checkpoint: expected one family")
    for name in names:
        stage.capture(checkpoints.find(name, checkpoint, gemma_terms), request, Store(data), dry_run)


if __name__ == "__main__":
    run(application, "capture")
