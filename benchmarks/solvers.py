"""Ours beside general solvers, on the same instances in one run: `python -m benchmarks.solvers`.

Candidate sets of the paper's sizes (28, 20, 22, 36 keys at s = 4, 8, 16, 32) of captured rows spread evenly over their
lengths, one thread each, in seconds of processor time, so that a busy machine bears on none more than on another. Every
answer is a subset; its error is computed again from its indices, and what a peer said of it is compared with that. Ours
is the mean of some turns of certify(), the instance built; a peer's time is that of building its model and solving it.
Then whole rows: certify() for two seconds, and each peer once asked for a subset better by 1e-4 than the best that ours
found, or for the proof that there is none.
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.rows import BUDGETS, sample, verdict
from data import BadInput, Store
from data.command_line import app, run, track
from solvers import Instance, candidate_set, certify, exhaustive
from solvers.cp_sat import error_interval
from solvers.problem import Indices

TURNS = 20  # of ours, whose calls are short
AGREEMENT = 1e-9  # relative, between the optima of different solvers
FORMS = ("bisection", "direct", "homogeneous")
FASTER = {"scip": 300, "gurobi": 50}  # what the project holds itself to on candidate sets
COMMERCIAL = "gurobi"
PEERS = (
    "cp_sat",
    "scip:direct:default",
    "scip:direct",
    "scip:homogeneous",
    "gurobi:direct:default",
    "gurobi:direct",
    "gurobi:homogeneous",
)
CP_SAT, DEFAULT = "cp_sat", ":default"
TIGHT = 1e-9  # feasibility tolerance that peers are set to, unless their default (1e-6) is asked for
WRONG = 1e-4  # relative: a lower bound this far above the error of a subset that exists is wrong
CP_SAT_SECONDS = 10.0  # it is a check and no rival: at s = 32 it would take minutes
OURS_SECONDS = 2.0  # on whole rows
ROOT = Store().root

application = app("Time branch and bound beside exhaustive enumeration, CP-SAT, SCIP and Gurobi.")


@dataclass(frozen=True, eq=False)
class Answer:
    """One solver's answer: processor seconds, the error of its subset (from the indices), whether it says it is proved.

    lower: the bound that it claims. is_wrong: whether it claimed less of its own subset than the indices have.
    """

    seconds: float
    error: float
    proved: bool
    lower: float | None
    is_wrong: bool = False


Solve = Callable[[Instance, int, Indices, float], Answer]


@application.command()
def main(
    data: Annotated[Path, typer.Option(help="Folder of the artefacts, with captured rows.")] = ROOT,
    model: Annotated[str, typer.Option(help="Model whose rows are taken; empty: the first.")] = "",
    instances: Annotated[int, typer.Option(help="Candidate sets per budget.", min=1)] = 6,
    time_limit: Annotated[float, typer.Option(help="Seconds that a peer has for each instance.", min=0.1)] = 60.0,
    peers: Annotated[str, typer.Option(help="cp_sat, PEER:FORM or PEER:FORM:default, by commas (above).")] = ",".join(
        PEERS
    ),
    whole: Annotated[int, typer.Option(help="Whole rows, one budget each in turn; 0: none.", min=0)] = 4,
) -> None:
    """Print seconds, ratios to ours, agreement of the optima and wrong claims, per budget and over all.

    PEER is scip or gurobi; FORM is direct, homogeneous, or bisection, which is the paper's and the slowest. Peers run
    at a feasibility tolerance of 1e-9, with :default at their own of 1e-6.
    """
    parts = {peer: _parts(peer) for peer in peers.split(",")}
    modules = {name: _module(name) for name in dict.fromkeys(name for name, _, _ in parts.values() if name in FASTER)}
    solve: dict[str, Solve] = {"exhaustive": _exhaustive}
    for peer, (name, form, tolerance) in parts.items():
        if name == CP_SAT:
            solve[peer] = _cp_sat
        elif modules[name]:
            solve[peer] = _caller(modules[name], form, tolerance)
    label, _, rows = sample([data], model, instances)
    chosen = [row.instance for row in rows]
    results: dict[tuple[int, str], list[Answer]] = {}
    for s, row in track([(s, row) for s in BUDGETS for row in chosen], len(BUDGETS) * len(chosen), "candidate sets"):
        pool = candidate_set(row, s)
        results.setdefault((s, "ours"), []).append(_ours(row, s, pool))
        for peer, call in solve.items():
            results.setdefault((s, peer), []).append(call(row, s, pool, time_limit))
    lengths = [row.n for row in chosen]
    console = Console(width=120)
    console.print(
        f"{label}: {len(chosen)} rows of {min(lengths)} to {max(lengths)} keys, their candidate sets at each budget;"
        f" one core, {time_limit:g} s at most"
    )
    console.print(_pool_table(results, ["ours", *solve]))
    _targets(results, list(solve))
    if whole:
        _whole_rows(
            [row.instance for row in sample([data], model, whole)[2]],
            {name: module for name, module in modules.items() if module},
            time_limit,
            console,
        )


def _parts(peer: str) -> tuple[str, str, float | None]:
    """The solver, its form and its tolerance (None: its own) of one entry; raises BadInput for an unknown one."""
    if peer == CP_SAT:
        return CP_SAT, "", None
    name, _, form = peer.removesuffix(DEFAULT).partition(":")
    if name not in FASTER or form not in FORMS:
        raise BadInput(
            f"peer {peer!r}: expected {CP_SAT}, or scip or gurobi with a form ({', '.join(FORMS)}), as scip:direct or"
            f" scip:direct{DEFAULT}"
        )
    return name, form, None if peer.endswith(DEFAULT) else TIGHT


def _caller(module: Any, form: str, tolerance: float | None) -> Solve:
    def call(row: Instance, s: int, pool: Indices, time_limit: float) -> Answer:
        began = time.process_time()
        found = module.solve(row, s, pool, time_limit, form, tolerance=tolerance)
        return Answer(
            time.process_time() - began,
            found.error,
            found.status == "optimal",
            found.claimed_lower,
            found.wrong > 0,
        )

    return call


def _module(peer: str) -> Any:
    """The peer's module, None if its package is not installed."""
    try:
        return importlib.import_module(f"benchmarks.peers.{peer}")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("benchmarks", "solvers"):
            raise
        print(f"{peer}: package {error.name} is not installed, left out; pip install -c constraints.txt -e '.[peers]'")
        return None


def _ours(row: Instance, s: int, pool: Indices) -> Answer:
    certify(row, s, candidates=pool)  # what the instance keeps for all budgets is computed before the clock starts
    began = time.process_time()
    for _ in range(TURNS):
        found = certify(row, s, candidates=pool)
    seconds = (time.process_time() - began) / TURNS
    return Answer(seconds, row.forced_error(found.subset), found.status == "optimal", found.lower)


def _exhaustive(row: Instance, s: int, pool: Indices, time_limit: float) -> Answer:
    began = time.process_time()
    found = exhaustive(row, s, pool)  # at most 200,000 subsets: no limit is needed
    return Answer(time.process_time() - began, row.forced_error(found.subset), True, found.lower)


def _cp_sat(row: Instance, s: int, pool: Indices, time_limit: float) -> Answer:
    began = time.process_time()
    found = error_interval(row, s, pool, time_limit=min(time_limit, CP_SAT_SECONDS))
    return Answer(time.process_time() - began, row.forced_error(found.subset), found.finished, found.lower)


def _pool_table(results: dict[tuple[int, str], list[Answer]], names: list[str]) -> Table:
    table = Table(title="candidate sets: processor seconds an instance; errors computed again from the indices")
    for heading in ("s", "solver", "median", "mean", "longest", "x ours", "proved", "same optimum", "largest", "wrong"):
        table.add_column(heading, justify="left" if heading == "solver" else "right")
    for s in BUDGETS:
        ours = results[s, "ours"]
        for name in names:
            found = results[s, name]
            seconds = [one.seconds for one in found]
            differences = [abs(one.error / best.error - 1) for one, best in zip(found, ours, strict=True)]
            table.add_row(
                str(s) if name == "ours" else "",
                name,
                f"{np.median(seconds):.2g}",
                f"{np.mean(seconds):.2g}",
                f"{max(seconds):.2g}",
                f"{_ratio(found, ours):,.0f}",
                f"{sum(one.proved for one in found)} of {len(found)}",
                str(sum(difference <= AGREEMENT for difference in differences)),
                f"{max(differences):.0e}",
                str(sum(_is_wrong(one, best) for one, best in zip(found, ours, strict=True))),
                end_section=name == names[-1],
            )
    table.caption = (
        "x ours: ratio of the mean seconds. same optimum: within 1e-9 of ours; largest: relative difference.\n"
        "wrong: a claimed error more than 1e-4 below that of the indices, or a claimed lower bound as far above the\n"
        f"optimum. CP-SAT has {CP_SAT_SECONDS:g} s at most."
    )
    return table


def _is_wrong(one: Answer, best: Answer) -> bool:
    return one.is_wrong or (one.lower is not None and one.lower > best.error * (1 + WRONG))


def _ratio(found: list[Answer], ours: list[Answer]) -> float:
    return float(np.mean([one.seconds for one in found]) / np.mean([one.seconds for one in ours]))


def _targets(results: dict[tuple[int, str], list[Answer]], names: list[str]) -> None:
    ours = [one for s in BUDGETS for one in results[s, "ours"]]
    proved = sum(one.proved for one in ours)
    print(f"all candidate sets proved by ours: {proved} of {len(ours)}: {verdict(proved == len(ours))}")
    for peer, factor in FASTER.items():
        forms = [name for name in names if name.startswith(f"{peer}:")]
        if not forms:
            print(f"{peer}: not measured")
            continue
        # Each budget by the form that is the fastest there: the peer at its best.
        ratios = [min(_ratio(results[s, name], results[s, "ours"]) for name in forms) for s in BUDGETS]
        kind = "the best commercial solver at hand" if peer == COMMERCIAL else "the paper's solver"
        listed = " / ".join(f"{ratio:,.0f}" for ratio in ratios)
        print(
            f"times faster than {peer} ({kind}) in its fastest form, s = 4 / 8 / 16 / 32: {listed};"
            f" target {factor}: {verdict(min(ratios) >= factor)}"
        )
    worst: dict[str, float] = {}
    for name in names:
        pairs = [pair for s in BUDGETS for pair in zip(results[s, name], results[s, "ours"], strict=True)]
        worst[name] = max((abs(one.error / best.error - 1) for one, best in pairs if one.proved), default=0.0)
    for name, difference in worst.items():
        said = f"optimum of {name} beside ours, where it says that it is proved: {difference:.1e} apart at most"
        if name.endswith(":default"):
            print(f"{said} (at its default tolerance: no target)")
        else:
            print(f"{said}; target {AGREEMENT:.0e}: {verdict(difference <= AGREEMENT)}")


def _whole_rows(rows: list[Instance], peers: dict[str, Any], time_limit: float, console: Console) -> None:
    """Ours and each peer on whole rows, one budget each in turn."""
    table = Table(title=f"whole rows: ours for {OURS_SECONDS:g} s; peers for {time_limit:g} s below (1 - 1e-4) of ours")
    for heading in ("keys", "s", "dropped", "ours", "seconds", "nodes", "error", "lower", *peers):
        table.add_column(heading, justify="right")
    for place, row in enumerate(track(rows, len(rows), "whole rows")):
        s = BUDGETS[place % len(BUDGETS)]
        began = time.perf_counter()
        ours = certify(row, s, time_limit=OURS_SECONDS)
        seconds = time.perf_counter() - began
        top = row.forced_error(row.order[:s])
        said = []
        for module in peers.values():
            found = module.solve(row, s, None, time_limit, "refutation", ours.subset, TIGHT)
            word = {"infeasible": "proved", "feasible": "found a better one"}.get(found.status, found.status)
            if found.wrong:
                word = f"WRONG: subset of {found.claimed_error / ours.error:.4f} claimed"
            said.append(f"{word}, {found.seconds:.1f} s")
        table.add_row(
            f"{row.n:,}",
            str(s),
            f"{row.dropped_mass(row.order[:s]):.2f}",
            ours.status,
            f"{seconds:.3f}",
            f"{ours.nodes:,}",
            f"{ours.error / top:.4f}",
            f"{ours.lower / top:.4f}",
            *said,
        )
    table.caption = "error and lower bound relative to top-mass. A claim is WRONG when its indices have a larger error."
    console.print(table)


if __name__ == "__main__":
    run(application, "benchmarks.solvers")
