"""Nodes of branch and bound against the number of keys: rows that encode hard problems beside captured ones."""

import polars as pl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from data.schema import HARDNESS
from data.store import Store
from figures import style
from figures.fits import fit

INPUTS = (HARDNESS,)
KINDS = {  # (problem, whether it has a solution) in the order of the legend
    ("Partition", False): "Partition, unsolvable",
    ("Partition", True): "Partition, solvable",
    ("Exact Cover by 3-Sets", False): "Exact Cover, unsolvable",
    ("Exact Cover by 3-Sets", True): "Exact Cover, solvable",
    ("captured", None): "captured rows",
}
_ASIDE = 0.28  # keys between the marks of two kinds at one n
_TALLEST = 20.0  # times the largest count: the subsets are far more, and need not be on the axis whole


def table(store: Store) -> pl.DataFrame:
    """Per problem, answer and n: instances, those proved, and their nodes; subsets is C(n, s) of the largest s."""
    found = fit(store, HARDNESS).group_by("problem", "zero", "n", maintain_order=True)
    return found.agg(
        n_instances=pl.len(),
        n_proved=pl.col("proved").sum(),
        nodes=pl.col("nodes").median(),
        nodes_least=pl.col("nodes").min(),
        nodes_most=pl.col("nodes").max(),
        subsets=pl.col("subsets").max(),
    ).sort("problem", "zero", "n")


def draw(frame: pl.DataFrame, figure: Figure) -> None:
    """A line per kind through its medians, least to largest as whiskers; no nodes at all are drawn as one."""
    figure.set_size_inches(style.COLUMN_WIDTH, 3.3)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    top = max(10.0, _TALLEST * float(frame["nodes_most"].max() or 0))  # type: ignore[arg-type]
    halves = frame.group_by("n").agg(pl.col("subsets").max()).sort("n")
    axes.plot(halves["n"], halves["subsets"], color=style.MUTED, linewidth=0.8)
    handles = [Line2D([], [], color=style.MUTED, linewidth=0.8, label="all subsets of n / 2")]
    for number, ((problem, zero), label) in enumerate(KINDS.items()):
        own = frame.filter(pl.col("problem") == problem, pl.col("zero").eq_missing(zero)).sort("n")
        if own.is_empty():
            continue
        look = style.look(number)
        x = own["n"].to_numpy() + _ASIDE * (number - (len(KINDS) - 1) / 2)
        axes.plot(x, own["nodes"].clip(1), **look.line())
        axes.vlines(x, own["nodes_least"].clip(1), own["nodes_most"].clip(1), color=look.colour, linewidth=0.7)
        handles.append(Line2D([], [], label=label, **look.line()))
    sizes = [int(n) for n in halves["n"]]
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.set_yscale("log")
    axes.set_ylim(0.7, top)
    ticks = [10**power for power in range(13) if 10**power <= top]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("keys to choose from, n")
    axes.set_ylabel("nodes of branch and bound")
    style.legend(figure, None, handles)
