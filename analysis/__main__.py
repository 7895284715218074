"""The command line of the analysis: python -m analysis."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from analysis import report, stage
from analysis.bootstrap import RESAMPLES
from analysis.frame import Sample, outdated
from data import Store, store
from data.command_line import app, run
from data.schema import CEILING, CERTIFIED, PENALTY, PREDICTOR, RULES

PLAIN_WIDTH = 130  # characters of a line where there is no terminal to ask
DATA = Store().root

application = app("What the subsets say: ceiling, penalty, predictor, rules, map; with bootstrap intervals.")


@application.command()
def analyse(
    data: Annotated[Path, typer.Option(help="Folder of the artefacts.")] = DATA,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    resamples: Annotated[int, typer.Option(min=1, help="Resamples of the bootstrap.")] = RESAMPLES,
) -> None:
    """Fit everything that the subsets of all models and budgets allow, and print it in short."""
    where = Store(data)
    for line in report.about_outdated(outdated(where)):
        _say(line)
    made = stage.provenance(where, seed, resamples)
    stale = stage.stale(where, made)
    for table in stage.FITS:
        if table not in stale:
            _say(f"{where.fit(table.name)}: current")
    if stale:
        frames = stage.compute(where, seed, resamples, _announce)
        for path in stage.write(where, frames, stale, made):
            _say(f"{path}: written")
    found = {
        table.name: store.read(table, where.fit(table.name))
        for table in (CEILING, PENALTY, PREDICTOR, RULES, CERTIFIED)
    }
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print(report.in_short(found, resamples), markup=False)
    for grid in (report.certified_in_short(found["certified"]), report.own_rules(found["rules"])):
        if grid is not None:
            console.print(grid, markup=False)
    for line in report.about_intervals(found["ceiling"]):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _announce(sample: Sample) -> None:
    _say(f"{sample.model}, s = {sample.s}: {sample.n_rows} rows of {sample.n_documents} documents")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(application, "analysis")
