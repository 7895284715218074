"""Command line of the stage; see --help."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from data import BadInput, Store
from data.command_line import app, run, track
from enumerate import work
from enumerate.rules import RULES, SEARCHES
from enumerate.show import show as show_row
from enumerate.user_rule import parse
from enumerate.work import cores, parse_budgets

application = app("Forced-weight optima of attention rows, and every rule beside them.")
DataFolder = Annotated[Path, typer.Option("--data", help="Folder of the artefacts.")]
ROOT = Store().root


@application.command()
def optima(
    s: Annotated[str, typer.Option("--s", help="Budgets: keys that a subset keeps, such as 16 or 4,8,16,32.")],
    model: Annotated[str, typer.Option(help="Only this model or family; empty: all that were captured.")] = "",
    rows: Annotated[str, typer.Option(help="Your own rows: .npz or .parquet with weights and values.")] = "",
    rule: Annotated[str, typer.Option(help="Your own rule, FILE.py:FUNCTION, graded beside ours.")] = "",
    search: Annotated[str, typer.Option(help=f"How the pool optimum is found: {' or '.join(SEARCHES)}.")] = SEARCHES[0],
    drop_short: Annotated[bool, typer.Option("--drop-short", help="Leave out rows of fewer than S keys.")] = False,
    workers: Annotated[int, typer.Option(help="Processes; 0: one per core.")] = 0,
    data: DataFolder = ROOT,
) -> None:
    """Grade every rule on every row at each budget: top-mass, balancing, the pool optimum, and the rivals."""
    store = Store(data)
    budgets = parse_budgets(s)
    if search not in SEARCHES:
        raise BadInput(f"SEARCH={search}: expected {' or '.join(SEARCHES)}")
    if workers < 0:
        raise BadInput(f"WORKERS={workers}: expected 0 or more")
    if rows and model:
        raise BadInput("ROWS and MODEL together: expected one of them")
    documents = work.documents_in(store, Path(rows)) if rows else work.documents_of(store, model or None)
    jobs = [work.Settings(budgets, search, None, drop_short)]
    for budget, short in work.check_budgets(store, documents, jobs[0]).items():
        if short:
            print(f"enumerate: {short} rows of fewer than {budget} keys are left out at s = {budget}", flush=True)
    if rows and (removed := work.forget_others(store, documents)):
        print(f"enumerate: {removed} files that were made from an earlier {rows} are removed", flush=True)
    if rule:
        jobs.append(work.Settings(budgets, search, parse(rule, RULES), drop_short))
    for job in jobs:
        label = f"enumerate s = {', '.join(map(str, budgets))}" + (f", rule {job.rule.name}" if job.rule else "")
        done = list(track(work.run(store, documents, job, workers or cores()), len(documents), label))
        fresh = sum(count > 0 for _, count in done)
        if fresh:
            print(
                f"{label}: {sum(count for _, count in done)} (row, budget) pairs of {fresh} documents graded",
                flush=True,
            )
        else:
            print(f"{label}: everything is current ({len(documents)} documents)", flush=True)


@application.command()
def show(
    row_id: Annotated[str, typer.Argument(help="MODEL:doc_id:layer:q_head:position, from the rows table.")],
    s: Annotated[int, typer.Option("--s", help="Budget.")] = 8,
    rule: Annotated[str, typer.Option(help="Your own rule, FILE.py:FUNCTION, beside ours.")] = "",
    data: DataFolder = ROOT,
) -> None:
    """Print one row: tokens, weights, what each rule keeps, errors."""
    mine = parse(rule, RULES) if rule else None
    try:
        show_row(Store(data), row_id, s, Console(width=None if sys.stdout.isatty() else 150), mine)
    except ValueError as error:
        raise BadInput(str(error)) from error


if __name__ == "__main__":
    run(application, "enumerate")
