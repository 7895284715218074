"""Command line: python -m capture.training corpus | tokenizer | train | measure."""

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from capture.training import architectures, corpus, make, measure, tasks
from data import command_line, store
from data.errors import BadInput

application = command_line.app(
    "How the embedded checkpoints were made: training text, tokenizer, training, measured figures."
)

TextOption = Annotated[Path | None, typer.Option("--text", help="The training text, as `corpus` writes it.")]


@application.command("corpus")
def corpus_command(
    deb: Annotated[Path, typer.Argument(help="The Debian package r-cran-janeaustenr 1.0.0-1.")],
    out: Annotated[Path, typer.Argument(help="The text to write.")],
) -> None:
    """Write the training text, six novels of Jane Austen, out of a Debian package."""
    text = corpus.read_corpus(deb).encode()
    if hashlib.sha256(text).hexdigest() != corpus.SHA256:
        raise BadInput(f"{deb}: its text is not the one that the checkpoints read; {corpus.HOW_TO_GET}")
    store.write_bytes(out, text)
    print(f"{out}: {len(text)} bytes")


@application.command("tokenizer")
def tokenizer_command(
    out: Annotated[Path, typer.Argument(help="The tokenizer.json to write.")],
    text: TextOption = None,
) -> None:
    """Train the tokenizer of 2048 tokens, in which every two-digit number is one."""
    store.write_text(out, tasks.build_tokenizer(make.read_text(text)).to_str(pretty=True))
    print(f"{out}: {tasks.VOCABULARY} tokens")


@application.command("train")
def train_command(
    families: Annotated[
        list[str] | None,
        typer.Argument(help=f"Of {', '.join(architectures.FAMILIES)}; none: all.", show_default=False),
    ] = None,
    text: TextOption = None,
    out: Annotated[Path, typer.Option(help="Where each family's folder goes.")] = make.OUT,
    init: Annotated[
        Path, typer.Option(help="Folder to start from: a qwen3 checkpoint, or one of the same family.")
    ] = make.SEED_MODEL,
    from_nothing: Annotated[
        bool,
        typer.Option("--from-nothing", help="Start from new weights instead; only qwen3 learned so in minutes."),
    ] = False,
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json to use.")] = make.TOKENIZER,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Training tokens; none: as the committed checkpoint.", show_default=False),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="AdamW's learning rate; none: 0.0015, or 0.003 from nothing.", show_default=False),
    ] = None,
    sink: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Weight of position 0 asked of a head; 0: no such loss; none: as the committed one.",
            show_default=False,
        ),
    ] = None,
    push: Annotated[float, typer.Option(min=0.0, help="Weight of that loss.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    every: Annotated[float, typer.Option(help="CPU seconds between two lines of progress.")] = 30.0,
) -> None:
    """Train embedded checkpoints again, into out/models; data/models is never written."""
    first = None if from_nothing else init
    recipes = [
        make.recipe(family, first, tokens, rate, sink, push, seed) for family in families or architectures.FAMILIES
    ]
    make.make(recipes, make.read_text(text), tokenizer, first, out, every)


@application.command("measure")
def measure_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Checkpoints; none: the four of data/models.", show_default=False),
    ] = None,
    text: TextOption = None,
    count: Annotated[int, typer.Option(min=2, help="Sequences per accuracy.")] = 64,
) -> None:
    """Print each checkpoint's figures as a line of JSON, those of data/models/README.md by default."""
    corpus_text = make.read_text(text)
    for folder in folders or [make.MODELS / family for family in architectures.FAMILIES]:
        if not (folder / "model.safetensors").is_file():
            raise BadInput(f"{folder}: expected a checkpoint's folder with model.safetensors in it")
        print(measure.to_json(measure.measure(folder, corpus_text, count)), flush=True)


if __name__ == "__main__":
    command_line.run(application, "capture.training")
