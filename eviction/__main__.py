"""The command line of eviction: `python -m eviction list`, `audit`, `loss`, `calibrate`, `routes`."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.table import Table

from capture import checkpoints, documents
from capture.families import FAMILIES
from data import BadInput, Store
from data.command_line import app, run
from data.schema import AUDIT, LOSS
from data.store import read
from eviction import audit as audits
from eviction import listing, terminal
from eviction import loss as losses
from eviction.calibration import Generation, calibrated
from eviction.combinations import SYNTAX
from eviction.routing import routed

ROOT = Store().root
PLAIN_WIDTH = 100  # characters, where there is no terminal whose width could be asked for

application = app("Eviction inside a model: what there is, and what each method really holds.")


@application.command("list")
def names(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="As the table of the README.")] = False,
) -> None:
    """Every score, allocator and selector that can be named, with its options and its source."""
    if as_markdown:
        print(listing.markdown(), end="")
        return
    table = Table()
    for heading in ("", "name", "options", "source"):
        table.add_column(heading, overflow="fold")
    for part in listing.parts():
        table.add_row(*part)
    console = Console()
    console.print(table)
    console.print("Options go with the name: snapkv:variant=kvpress,window=16")


@application.command()
def audit(
    model: Annotated[str, typer.Option(help=f"Families: {', '.join(FAMILIES)}; empty: all, or --checkpoint.")] = "",
    checkpoint: Annotated[str | None, typer.Option(help="Another checkpoint: Hub name, folder or .gguf file.")] = None,
    budget: Annotated[str, typer.Option(help="Nominal budgets: entries a KV head, such as 64 or 32,64.")] = "64",
    prompts: Annotated[int, typer.Option(help="Planted-needle prompts of each model.")] = 24,
    length: Annotated[int, typer.Option(help="Tokens of a prompt, question included.")] = 384,
    batch: Annotated[int, typer.Option(help="Prompts that are run together.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    device: Annotated[str, typer.Option(help="Device, as torch names it.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    text: Annotated[Path, typer.Option(help="Prose around the needles.", show_default="Austen")] = audits.TEXT,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Audit these alone; may be repeated. {SYNTAX}, parts with options as in `list`:"
            " snapkv:window=16+adakv or knorm+alpha or snapkv,masked or snapkv,subspace:rank=32.",
            show_default="every score with the uniform allocator, and a fixed list of combinations",
        ),
    ] = None,
    ask_peer: Annotated[bool, typer.Option("--ask-peer", help="Only write the prompts for kvpress.")] = False,
    data: Annotated[Path, typer.Option(help="Folder that holds the artefacts.")] = ROOT,
) -> None:
    """Write data/audit and show it: bytes, peak, seconds and needles found of each method at one nominal budget.

    Methods: every score with the uniform allocator, and a fixed list of combinations; or those of --method, and then
    the model's file holds these alone. The full cache is always among them.
    """
    request = audits.Request(_numbers(budget), prompts, length, seed, batch, device, dtype, text, tuple(method or ()))
    request.check()  # before the checkpoints are looked at, which takes a while
    sources = _sources(model, checkpoint)
    if ask_peer:
        print(audits.ask_peer(Store(data), sources, request))
        return
    frames = [read(AUDIT, path) for path in audits.audit(Store(data), sources, request)]
    idle = [line for frame in frames for line in terminal.about_audit(frame)]
    _show(map(terminal.audited, frames), [terminal.AUDIT_NOTE, *idle])


@application.command()
def loss(
    model: Annotated[str, typer.Option(help=f"Families: {', '.join(FAMILIES)}; empty: all, or --checkpoint.")] = "",
    checkpoint: Annotated[str | None, typer.Option(help="Another checkpoint: Hub name, folder or .gguf file.")] = None,
    rules: Annotated[str, typer.Option(help="Rules beside dense and top_mass.")] = ",".join(losses.RULES[2:]),
    s: Annotated[int, typer.Option("--s", help="Keys that a row keeps.")] = 8,
    docs: Annotated[int, typer.Option(help="Documents whose loss is taken.")] = 12,
    calibration: Annotated[int, typer.Option(help="Further documents, that tell which cells are flat.")] = 4,
    length: Annotated[int, typer.Option(help=f"Tokens of a document, at least {losses.FIRST_ROW + 2}.")] = 256,
    draws: Annotated[int, typer.Option(help="Draws of as many random cells as are flat.")] = 3,
    nodes: Annotated[int, typer.Option(help="Nodes a row of the search over whole rows.")] = losses.NODES,
    seed: Annotated[int, typer.Option(help="Seed of the random cells.")] = 0,
    device: Annotated[str, typer.Option(help="Device, as torch names it.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    text: Annotated[Path, typer.Option(help="Held-out text.", show_default="Austen")] = losses.TEXT,
    data: Annotated[Path, typer.Option(help="Folder that holds the artefacts.")] = ROOT,
) -> None:
    """Write data/loss and show it: the model's cross-entropy when every head attends to s keys, chosen row by row."""
    request = losses.Request(
        tuple(rules.split(",")), s, docs, calibration, length, draws, nodes, seed, device, dtype, text
    )
    request.check()  # before the checkpoints are looked at, which takes a while
    paths = losses.loss(Store(data), _sources(model, checkpoint), request)
    _show((terminal.lost(read(LOSS, path)) for path in paths), [terminal.LOSS_NOTE])


@application.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="File of the statistics, .safetensors.")],
    model: Annotated[str, typer.Option(help=f"Family: {', '.join(FAMILIES)}; or --checkpoint.")] = "",
    checkpoint: Annotated[str | None, typer.Option(help="A Hub name, a folder or a .gguf file.")] = None,
    text: Annotated[
        list[Path], typer.Option(help="Text file, or folder of *.txt; may be repeated.", show_default="Austen")
    ] = [audits.TEXT],  # noqa: B006  typer reads it and copies it
    docs: Annotated[int, typer.Option(help="Documents: non-overlapping stretches of the text.")] = 8,
    length: Annotated[int | None, typer.Option(help="Tokens of a document.", show_default="the model's record")] = None,
    skip: Annotated[int, typer.Option(help="First tokens of a document that are not counted.")] = 0,
    traces: Annotated[bool, typer.Option("--traces", help="The text was generated by the model.")] = False,
    generate: Annotated[int, typer.Option(help="Tokens to generate after each document; only they count.")] = 0,
    temperature: Annotated[float, typer.Option(help="Of what is generated; 0: greedily.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is generated at a temperature.")] = 0,
    device: Annotated[str, typer.Option(help="Device, as torch names it.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Write the query statistics that the score triattention needs: score="triattention:statistics=FILE".

    With --generate or --traces they are of what the model writes, and the score Q_stats takes them, too.
    """
    if generate == 0 and (temperature or seed):
        raise BadInput("--temperature, --seed: nothing is generated: expected --generate N")
    generation = None if generate == 0 else Generation(generate, temperature, seed)
    source = checkpoints.find(model or None, checkpoint)
    files = documents.text_files(text)
    calibrated(source, files, docs, length, device, dtype, skip, traces, generation).save(out)
    print(f"{out}: written")


@application.command()
def routes(
    out: Annotated[Path, typer.Option(help="File of the routes, .safetensors.")],
    model: Annotated[str, typer.Option(help=f"Family: {', '.join(FAMILIES)}; or --checkpoint.")] = "",
    checkpoint: Annotated[str | None, typer.Option(help="A Hub name, a folder or a .gguf file.")] = None,
    score: Annotated[str, typer.Option(help="Score of the heads that keep by attention, with its options.")] = "snapkv",
    budget: Annotated[int, typer.Option(help="Entries that a KV head keeps of a document.")] = 64,
    later: Annotated[int, typer.Option(help="Last tokens of a document: the rows that look for what was kept.")] = 64,
    text: Annotated[
        list[Path], typer.Option(help="Text file, or folder of *.txt; may be repeated.", show_default="Austen")
    ] = [audits.TEXT],  # noqa: B006  typer reads it and copies it
    docs: Annotated[int, typer.Option(help="Documents: non-overlapping stretches of the text.")] = 8,
    length: Annotated[int | None, typer.Option(help="Tokens of a document.", show_default="the model's record")] = None,
    device: Annotated[str, typer.Option(help="Device, as torch names it.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Write which KV heads keep by attention and which evenly: score="static_route:routes=FILE"."""
    source = checkpoints.find(model or None, checkpoint)
    found = routed(source, documents.text_files(text), score, budget, docs, length, later, device, dtype)
    found.save(out)
    print(f"{out}: written; {int(found.by_attention.sum())} of {found.by_attention.numel()} KV heads by {score}")


def _show(tables: Iterable[RenderableType], lines: list[str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    for one in (*tables, *lines):
        console.print(one, markup=False, highlight=False)


def _sources(model: str, checkpoint: str | None) -> list[checkpoints.Source]:
    if checkpoint is not None:
        return [checkpoints.find(model or None, checkpoint)]
    return [checkpoints.find(name, None) for name in (model.split(",") if model else FAMILIES)]


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise BadInput(f"--budget {text}: expected whole numbers, such as 64 or 32,64") from None


if __name__ == "__main__":
    run(application, "eviction")
