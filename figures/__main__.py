"""Command line of the figures: `python -m figures` draws them, `python -m figures report` writes the page."""

from pathlib import Path
from typing import Annotated

import typer

from data.command_line import app, run
from data.store import Store
from figures.build import PICTURES, build
from figures.report import write_report

DataOption = Annotated[Path, typer.Option("--data", help="Folder of the analysis' tables (data/fits) and the rows.")]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for figures/ and report.html.")]
ROOT = Store().root
application = app("Draw the figures as PNG and PDF with their data as CSV; `report` also writes the page.")


@application.callback(invoke_without_command=True)
def figures(
    context: typer.Context,
    data: DataOption = ROOT,
    out: OutOption = Path("out"),
) -> None:
    """Draw every figure into OUT/figures: PNG, PDF and CSV; figures that are current are left alone."""
    context.obj = (data, out)
    if context.invoked_subcommand is None:
        _draw(data, out)


@application.command()
def report(
    context: typer.Context,
    data: Annotated[Path | None, typer.Option(help="As above; by default what was given before `report`.")] = None,
    out: Annotated[Path | None, typer.Option(help="As above; by default what was given before `report`.")] = None,
) -> None:
    """Draw what is not current, then write OUT/report.html: one file that needs no other and no network."""
    data, out = data or context.obj[0], out or context.obj[1]
    _draw(data, out)
    path, written = write_report(Store(data), out)
    print(f"{path}: {'written' if written else 'current, nothing to do'}")


def _draw(data: Path, out: Path) -> None:
    store = Store(data)
    drawn = build(store, out / "figures")
    if drawn:
        print(f"{out / 'figures'}: drew {', '.join(drawn)}")
    else:
        total = sum(picture.applies(store) for picture in PICTURES)
        print(f"{out / 'figures'}: all {total} figures current, nothing to do")


if __name__ == "__main__":
    run(application, "figures")
