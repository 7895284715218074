"""How nodes and seconds of the whole-row search grow: `python -m benchmarks.growth`.

Against row length, budget, dropped mass and mass floor, on captured rows spread evenly over their lengths; one core.
Each (row, budget) is searched at the floors 0.5, 0.1 and 0, each with its own time limit, and its label is asked: is
there a subset of at most 0.9 times the top-mass error? Rows left open are listed with their bracket. Every call's time
is compared with its limit, and the memory of one row of 16,384 keys with what is promised. Writes growth.csv,
growth.png and growth.pdf.
"""

import io
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import polars as pl
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.memory import peak_of_long_row
from benchmarks.rows import BUDGETS, sample, share_of_a_core, verdict
from data import Store, published
from data.command_line import app, run, track
from data.store import CHECKOUT, write_bytes, write_text
from solvers import Instance, certify, decide

LIMITS = {0.5: 0.5, 0.1: 2.0, 0.0: 2.0}  # mass floor: seconds
LABEL, LABEL_SECONDS = 0.9, 2.0  # the label: a subset of at most so much of the top-mass error
FLOOR_TARGET, LABEL_TARGET = 0.97, 0.98
OPTIMUM_AIM = {4: 0.90, 8: 0.80, 16: 0.75, 32: 0.75}  # at the paper's median dropped mass
SHORT, SHORT_AIM = 1500, 0.95  # keys, and the share of shorter rows whose optimum is to be proved
OVER_SHARE, OVER_SECONDS = 0.1, 0.2  # a call may exceed its limit by the larger of the two
MEMORY_LIMIT = 2**30
LENGTHS = (0, 512, 1024, 1536, 2048, 3072, 4096)  # ends of the groups of rows
MASSES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)  # ends of the groups of dropped mass
MOST_LISTED = 40
ROOT = Store().root

INK, MUTED = "#16181d", "#6b7280"
LOOKS = {0.5: ("#14213d", "o", "-"), 0.1: ("#d98c21", "s", "--"), 0.0: ("#1f6fa8", "^", ":")}
RC: Any = {
    "font.size": 7.0,
    "axes.titlesize": 7.5,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "text.color": INK,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "pdf.fonttype": 42,
}

application = app("Measure how the whole-row search grows with the row, the budget and the mass floor.")


@application.command()
def main(
    data: Annotated[list[Path] | None, typer.Option(help="Folder with captured rows; may be given again.")] = None,
    model: Annotated[str, typer.Option(help="Model whose rows are taken; empty: the first.")] = "",
    rows: Annotated[int, typer.Option(help="Rows taken, each at four budgets.", min=1)] = 60,
    out: Annotated[Path, typer.Option(help="Where the table and the figure go.")] = CHECKOUT / "out" / "bench",
) -> None:
    """Print shares, nodes and seconds, the targets and the rows left open; write the table and the figure."""
    peak, seconds, limit = peak_of_long_row()
    name, total, chosen = sample(data or [ROOT], model, rows)
    pairs = [(row.row_id, row.instance, s) for row in chosen for s in BUDGETS]
    began, began_cpu = time.perf_counter(), time.process_time()
    frame = pl.DataFrame([_measure(*pair) for pair in track(pairs, len(pairs), "row, budget")])
    busy = share_of_a_core(began, began_cpu)
    console = Console(width=120)
    console.print(
        f"{name}: {len(chosen)} of {total:,} rows, {chosen[0].instance.n} to {chosen[-1].instance.n} keys; one core"
    )
    console.print(_by_budget(frame))
    console.print(_by_length(frame))
    print(busy)
    _targets(frame)
    calls = [(float(x), limit) for rho, limit in LIMITS.items() for x in frame[f"seconds_{rho:g}"]]
    calls += [(float(x), LABEL_SECONDS) for x in frame["label_seconds"]]
    print(f"longest overrun of a time limit on these rows: {_overrun(calls)}")
    print(f"longest overrun of a time limit at 16,384 keys of 128 dimensions: {_overrun([(seconds, limit)])}")
    print(
        f"peak memory there: {peak / 2**20:,.0f} MiB, everything imported included; allowed 1 GiB:"
        f" {verdict(peak <= MEMORY_LIMIT)}"
    )
    _open_rows(frame, console)
    write_text(out / "growth.csv", frame.write_csv(float_precision=9))
    for suffix, content in _figure(frame).items():
        write_bytes(out / f"growth.{suffix}", content)
    print(f"{out}: growth.csv, growth.png, growth.pdf")


def _measure(row_id: str, row: Instance, s: int) -> dict[str, object]:
    """One (row, budget): what each floor and the label took, errors relative to that of top-mass."""
    heaviest = row.order[:s]
    top = row.forced_error(heaviest)
    found: dict[str, object] = {
        "row_id": row_id,
        "n_keys": row.n,
        "s": s,
        "dropped_mass": row.dropped_mass(heaviest),
        "top_mass_error": top,
    }
    for rho, limit in LIMITS.items():
        began = time.perf_counter()
        answer = certify(row, s, mass_floor=rho, time_limit=limit)
        seconds = time.perf_counter() - began
        found |= {
            f"proved_{rho:g}": answer.status == "optimal",
            f"nodes_{rho:g}": answer.nodes,
            f"seconds_{rho:g}": seconds,
            f"error_{rho:g}": answer.error / top if top > 0 else 1.0,
            f"lower_{rho:g}": answer.lower / top if top > 0 else 1.0,
        }
    proved = [floor.rho for floor in answer.floors if floor.proved]
    began = time.perf_counter()
    label = decide(row, s, LABEL * top, time_limit=LABEL_SECONDS) if top > row.rounding else False
    return found | {
        "least_floor_proved": min(proved, default=None),
        "kept_share": row.kept_mass(answer.subset) / row.kept_mass(heaviest),
        "label": label,
        "label_seconds": time.perf_counter() - began,
    }


def _by_budget(frame: pl.DataFrame) -> Table:
    table = Table(title="by budget: share proved within the limit; milliseconds and nodes of a call")
    for heading in (
        "s",
        "dropped",
        "floor",
        "limit s",
        "proved",
        "ms median",
        "p95",
        "nodes median",
        "p95",
        "label",
        "ms",
    ):
        table.add_column(heading, justify="right")
    for (s,), part in frame.group_by("s", maintain_order=True):
        for rho, limit in LIMITS.items():
            last = rho == 0.0
            table.add_row(
                str(s) if rho == 0.5 else "",
                f"{_median(part['dropped_mass']):.2f}" if rho == 0.5 else "",
                f"{rho:g}",
                f"{limit:g}",
                f"{_mean(part[f'proved_{rho:g}']):.3f}",
                *_quantiles(part[f"seconds_{rho:g}"] * 1e3, "{:.2f}"),
                *_quantiles(part[f"nodes_{rho:g}"], "{:,.0f}"),
                f"{_mean(part['label'].is_not_null()):.3f}" if last else "",
                f"{_median(part['label_seconds']) * 1e3:.2f}" if last else "",
                end_section=last,
            )
    return table


def _by_length(frame: pl.DataFrame) -> Table:
    table = Table(title="by row length, all budgets")
    headings = ["keys", "rows, budgets", "dropped"]
    headings += [f"{what} {rho:g}" for rho in LIMITS for what in ("proved", "ms", "nodes")]
    for heading in headings:
        table.add_column(heading, justify="right")
    for low, high in pairwise(LENGTHS):
        part = frame.filter(pl.col("n_keys").is_between(low + 1, high))
        if part.height:
            cells = [
                text
                for rho in LIMITS
                for text in (
                    f"{_mean(part[f'proved_{rho:g}']):.2f}",
                    f"{_median(part[f'seconds_{rho:g}']) * 1e3:.2f}",
                    f"{_median(part[f'nodes_{rho:g}']):,.0f}",
                )
            ]
            table.add_row(f"{low + 1:,}-{high:,}", str(part.height), f"{_median(part['dropped_mass']):.2f}", *cells)
    table.caption = "ms and nodes: medians"
    return table


def _quantiles(values: pl.Series, form: str) -> tuple[str, str]:
    return form.format(_median(values)), form.format(float(np.quantile(values.to_numpy(), 0.95)))


def _mean(values: pl.Series) -> float:
    return float(values.to_numpy().mean())


def _median(values: pl.Series) -> float:
    return float(np.median(values.to_numpy()))


def _targets(frame: pl.DataFrame) -> None:
    share = _mean(frame["proved_0.5"])
    print(f"floor 0.5 proved within 0.5 s: {share:.3f}; target {FLOOR_TARGET}: {verdict(share >= FLOOR_TARGET)}")
    share = _mean(frame["label"].is_not_null())
    print(f"label decided within 2 s: {share:.3f}; target {LABEL_TARGET}: {verdict(share >= LABEL_TARGET)}")
    for s, aim in OPTIMUM_AIM.items():
        part = frame.filter(pl.col("s") == s)
        paper = published.find("dropped_mass", s)
        median = paper.value if paper else None
        like = _with_median(part, median) if median is not None else part
        share = _mean(like["proved_0"])
        print(
            f"optimum proved within 2 s, s = {s}: {_mean(part['proved_0']):.2f} of all rows (median dropped mass"
            f" {_median(part['dropped_mass']):.2f}); {share:.2f} of the {like.height} rows left with the paper's median"
            f" of {median:g}; aim {aim:.2f}: {verdict(share >= aim)}"
        )
    short = frame.filter(pl.col("n_keys") <= SHORT)
    if short.height:
        share = _mean(short["proved_0"])
        print(f"optimum proved within 2 s at N <= {SHORT}: {share:.2f}; aim {SHORT_AIM}: {verdict(share >= SHORT_AIM)}")


def _with_median(part: pl.DataFrame, median: float) -> pl.DataFrame:
    """The rows without the flattest, or the sharpest, so that the median of their dropped mass is this one."""
    ordered = part.sort("dropped_mass")
    below = ordered.filter(pl.col("dropped_mass") < median).height
    above = ordered.height - below
    return ordered.head(2 * below) if below < above else ordered.tail(2 * above)


def _overrun(calls: list[tuple[float, float]]) -> str:
    """The call of these (seconds, limit) that went the furthest beyond what it may take, and the verdict."""
    seconds, limit = max(calls, key=lambda call: call[0] - call[1] - max(OVER_SHARE * call[1], OVER_SECONDS))
    over = max(0.0, seconds - limit)
    reached = over <= max(OVER_SHARE * limit, OVER_SECONDS)
    return f"{over:.3f} s of {limit:g} s; allowed 10% or {OVER_SECONDS} s: {verdict(reached)}"


def _open_rows(frame: pl.DataFrame, console: Console) -> None:
    left = frame.filter(~pl.col("proved_0"))
    table = Table(title=f"{left.height} of {frame.height} left open: errors and bounds relative to top-mass")
    for heading in (
        "doc:layer:head:position",
        "keys",
        "s",
        "dropped",
        "bracket",
        "least floor proved",
        "kept of top mass",
        "label",
    ):
        table.add_column(heading, justify="right")
    labels = {True: "yes", False: "no", None: "undecided"}
    for one in left.sort("s", "dropped_mass").head(MOST_LISTED).iter_rows(named=True):
        least = one["least_floor_proved"]
        table.add_row(
            one["row_id"].split(":", 1)[-1],
            f"{one['n_keys']:,}",
            str(one["s"]),
            f"{one['dropped_mass']:.2f}",
            f"{one['lower_0']:.3f} to {one['error_0']:.3f}",
            "none" if least is None else f"{least:g}",
            f"{one['kept_share']:.3f}",
            labels[one["label"]],
        )
    if left.height > MOST_LISTED:
        table.caption = f"the first {MOST_LISTED}; growth.csv has all"
    if left.height:
        console.print(table)


def _figure(frame: pl.DataFrame) -> dict[str, bytes]:
    """Medians of seconds and nodes and the share proved against length, budget and dropped mass, a line per floor."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(6.9, 5.2), layout="constrained")
        grid = figure.subplots(3, 3, sharey="row", sharex="col")
        middle = [(low + high) / 2 for low, high in pairwise(LENGTHS)]
        columns = (
            ("keys N", _groups(frame, "n_keys", LENGTHS, middle)),
            ("budget s", [(float(s), frame.filter(pl.col("s") == s)) for s in BUDGETS]),
            (
                "dropped mass of the top-mass set",
                _groups(frame, "dropped_mass", MASSES, [(a + b) / 2 for a, b in pairwise(MASSES)]),
            ),
        )
        for column, (label, groups) in enumerate(columns):
            for row, (what, unit) in enumerate((("seconds", 1e3), ("nodes", 1.0), ("proved", 1.0))):
                _lines(grid[row, column], groups, what, unit)
            grid[2, column].set_xlabel(label)
        grid[0, 1].set_xscale("log", base=2)
        grid[0, 1].set_xticks(list(BUDGETS), [str(s) for s in BUDGETS])
        for row, label in enumerate(("median milliseconds", "median nodes", "share proved in time")):
            grid[row, 0].set_ylabel(label)
        for axes in grid[:2].flat:
            axes.set_yscale("log")
        grid[2, 0].set_ylim(0, 1.05)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, handlelength=3.2)
        found = {}
        for suffix, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None, "Producer": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix, dpi=200, metadata=metadata)
            found[suffix] = buffer.getvalue()
    return found


def _groups(
    frame: pl.DataFrame, column: str, ends: tuple[float, ...], at: list[float]
) -> list[tuple[float, pl.DataFrame]]:
    """The rows between the ends (low, high], each group at its place on the axis; empty ones left out."""
    bounds = pairwise(ends)
    parts = [frame.filter((pl.col(column) > low) & (pl.col(column) <= high)) for low, high in bounds]
    return [(x, part) for x, part in zip(at, parts, strict=True) if part.height]


def _lines(axes: Axes, groups: list[tuple[float, pl.DataFrame]], what: str, unit: float) -> None:
    for rho, limit in LIMITS.items():
        colour, marker, dashes = LOOKS[rho]
        parts = [(x, part[f"{what}_{rho:g}"]) for x, part in groups]
        values = [_mean(part) if what == "proved" else _median(part) * unit for _, part in parts]
        axes.plot(
            [x for x, _ in parts],
            values,
            color=colour,
            marker=marker,
            linestyle=dashes,
            markeredgecolor="white",
            markeredgewidth=0.5,
            label=f"mass floor {rho:g}, {limit:g} s" if rho else f"no floor, {limit:g} s",
        )


if __name__ == "__main__":
    run(application, "benchmarks.growth")
