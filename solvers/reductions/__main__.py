"""The command line of the hardness reductions: python -m solvers.reductions."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from data import Store, store
from data.command_line import app, run, track
from data.schema import HARDNESS
from solvers.reductions import growth, story

PLAIN_WIDTH = 130  # characters of a line where there is no terminal to ask
DATA = Store().root

application = app("Hardness, running: what makes the least forced error hard to find, shown and checked.")


@application.command()
def hardness(
    data: Annotated[Path, typer.Option(help="Folder of the artefacts: captured rows, fits/hardness.parquet.")] = DATA,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random instances and of the captured rows.")] = 0,
    only_table: Annotated[
        bool, typer.Option("--only-table", help="Write the figure's table and tell nothing.")
    ] = False,
) -> None:
    """Turn NP-complete problems into rows and back, and count the nodes that such rows take beside captured ones."""
    where = Store(data)
    path = where.fit(HARDNESS.name)
    row_ids = growth.captured(where, seed)
    made = growth.provenance(where, seed, row_ids)
    if store.is_current(HARDNESS, path, made):
        print(f"{path}: current", file=sys.stderr)
        frame = store.read(HARDNESS, path)
    else:
        problems = track(growth.problems(where, seed, row_ids), growth.count(row_ids), "searching")
        frame = growth.as_frame([growth.searched(problem) for problem in problems])
        store.write(HARDNESS, frame, path, made)
        print(f"{path}: written", file=sys.stderr)
    if only_table:
        return
    story.show(Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH), frame)


if __name__ == "__main__":
    run(application, "solvers.reductions")
