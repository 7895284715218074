"""Command line of the stage; see --help."""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from data import BadInput, Store
from data.command_line import app, run, track
from enumerate import certify, work
from enumerate.audit import difference, gather, table
from enumerate.certify import FLOOR, FLOORS, FULL, NODE_LIMITS, TIME_LIMITS
from enumerate.documents import documents_in, documents_of, forget_others
from enumerate.manifest import SIZES
from enumerate.manifest import make as make_manifest
from enumerate.pool import cores
from enumerate.proofs import Replays
from enumerate.rules import RULES, SEARCHES
from enumerate.show import show as show_row
from enumerate.user_rule import parse
from enumerate.work import parse_budgets
from solvers.branch_and_bound import NO_LIMIT

application = app("Forced-weight optima of attention rows, and every rule beside them.")
DataFolder = Annotated[Path, typer.Option("--data", help="Folder of the artefacts.")]
ROOT = Store().root
TAKEN = (*RULES, FLOOR, FULL)  # names that no rule of a user may have
_SIZES = ", ".join(name if size is None else f"{name} ({size})" for name, size in SIZES.items())
_FLOORS = ",".join(f"{rho:g}" for rho in FLOORS)


def _of_manifest(limits: Mapping[str, float]) -> str:
    return ", ".join(f"{limit:g} for {name}" for name, limit in limits.items())


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
    documents = documents_in(store, Path(rows)) if rows else documents_of(store, model or None)
    jobs = [work.Settings(budgets, search, None, drop_short)]
    for budget, short in work.check_budgets(store, documents, jobs[0]).items():
        if short:
            print(f"enumerate: {short} rows of fewer than {budget} keys are left out at s = {budget}", flush=True)
    if rows and (removed := forget_others(store, documents)):
        print(f"enumerate: {removed} files that were made from an earlier {rows} are removed", flush=True)
    if rule:
        jobs.append(work.Settings(budgets, search, parse(rule, TAKEN), drop_short))
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


@application.command("certify")
def certify_rows(
    s: Annotated[str, typer.Option("--s", help="Budgets: keys that a subset keeps, such as 16 or 4,8,16,32.")],
    manifest: Annotated[str, typer.Option(help=f"How many pairs of a row and a budget: {_SIZES}.")] = "small",
    model: Annotated[str, typer.Option(help="Only this model or family; empty: all that were captured.")] = "",
    rows: Annotated[str, typer.Option(help="Your own rows, once they have been graded: .npz or .parquet.")] = "",
    seed: Annotated[int, typer.Option(help="Of the draw of the manifest.")] = 0,
    floors: Annotated[str, typer.Option(help="Mass floors rho: p(A) >= rho p(top-mass); 0.5 is always one.")] = _FLOORS,
    node_limit: Annotated[int, typer.Option(help=f"Nodes of a pair; 0: {_of_manifest(NODE_LIMITS)}.")] = 0,
    time_limit: Annotated[
        float, typer.Option(help=f"Seconds of a pair, a safety; 0: {_of_manifest(TIME_LIMITS)}.")
    ] = 0,
    proof: Annotated[
        bool, typer.Option("--proof", help="Log every proof, and replay logs of up to 5,000 nodes.")
    ] = False,
    replay_all: Annotated[bool, typer.Option("--replay-all", help="With --proof: replay longer logs, too.")] = False,
    workers: Annotated[int, typer.Option(help="Processes; 0: one per core.")] = 0,
    data: DataFolder = ROOT,
) -> None:
    """Search every key of a row, with and without mass floors, and prove the optimum or bracket it."""
    store = Store(data)
    budgets = parse_budgets(s)
    if manifest not in SIZES:
        raise BadInput(f"MANIFEST={manifest}: expected {', '.join(SIZES)}")
    if workers < 0:
        raise BadInput(f"WORKERS={workers}: expected 0 or more")
    if rows and model:
        raise BadInput("ROWS and MODEL together: expected one of them")
    if not 0 <= node_limit <= NO_LIMIT:
        raise BadInput(f"NODE_LIMIT={node_limit}: expected 1 to {NO_LIMIT}, or 0 for the manifest's own limit")
    if not 0 <= time_limit < math.inf:
        raise BadInput(f"TIME_LIMIT={time_limit}: expected seconds, or 0 for the manifest's own limit")
    if replay_all and not proof:
        raise BadInput("--replay-all without --proof: expected both")
    limits = (node_limit or NODE_LIMITS[manifest], time_limit or TIME_LIMITS[manifest])
    settings = certify.Settings(certify.parse_floors(floors), *limits, proof)
    documents = documents_in(store, Path(rows)) if rows else documents_of(store, model or None)
    pairs, digest = make_manifest(store, documents, budgets, manifest, rows or model, seed)
    label = f"certify: {pairs.height} pairs (manifest {manifest}, seed {seed}, sha256 {digest[:12]})"
    print(f"{label}: {store.manifest(manifest)}", flush=True)
    n_documents = pairs.n_unique(["model", "doc_id"])
    done = list(track(certify.run(store, documents, pairs, settings, workers or cores()), n_documents, label))
    searched = sum(count for _, count in done)
    print(f"certify: {searched} pairs searched, {pairs.height - searched} were current", flush=True)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table(gather(store, documents, pairs)))
    console.print(difference(pairs["model"].unique().sort().to_list(), settings), soft_wrap=True, highlight=False)
    if proof:
        checks = certify.check_proofs(store, documents, pairs, replay_all, workers or cores())
        found = Replays.total(part for _, part in track(checks, n_documents, "certify: replaying proofs"))
        _say_replays(found)


def _say_replays(found: Replays) -> None:
    """Print how many logs held; exit code 1 and the first line of what did not, if any did not."""
    rate = f", {found.nodes / found.seconds:.0f} nodes a second" if found.seconds else ""
    print(
        f"certify: {found.logs} proof logs ({found.n_bytes / 1e6:.1f} MB), {found.replayed} replayed"
        f" ({found.nodes} nodes{rate}), {found.subsets} errors computed again in exact rationals",
        flush=True,
    )
    if found.failures:
        more = f" (and {len(found.failures) - 1} more)" if len(found.failures) > 1 else ""
        print(f"certify: {found.failures[0]}{more}", file=sys.stderr)
        raise typer.Exit(1)


@application.command()
def show(
    row_id: Annotated[str, typer.Argument(help="MODEL:doc_id:layer:q_head:position, from the rows table.")],
    s: Annotated[int, typer.Option("--s", help="Budget.")] = 8,
    rule: Annotated[str, typer.Option(help="Your own rule, FILE.py:FUNCTION, beside ours.")] = "",
    data: DataFolder = ROOT,
) -> None:
    """Print one row: tokens, weights, what each rule keeps, errors."""
    mine = parse(rule, TAKEN) if rule else None
    try:
        show_row(Store(data), row_id, s, Console(width=None if sys.stdout.isatty() else 150), mine)
    except ValueError as error:
        raise BadInput(str(error)) from error


if __name__ == "__main__":
    run(application, "enumerate")
