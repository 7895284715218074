"""What the best subset gains against the mass floor: from any subset (0) to top-mass itself (1)."""

import polars as pl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from data.schema import MASS_FLOORS
from data.store import Store
from figures import style
from figures.fits import fit

INPUTS = (MASS_FLOORS,)


def table(store: Store) -> pl.DataFrame:
    """Table mass_floors of the first model, which is the real one wherever it was certified."""
    return style.of_first_model(fit(store, MASS_FLOORS, may_be_empty=True), "s", "rho")


def draw(frame: pl.DataFrame, figure: Figure) -> None:
    """A line per budget, and above it, shaded, what the median can at most be."""
    figure.set_size_inches(style.COLUMN_WIDTH, 3.0)
    figure.set_layout_engine("constrained", h_pad=0.04)
    axes = figure.subplots()
    style.share_axis(axes, float(frame["cap"].to_numpy().max()))
    budgets = [int(s) for s in frame["s"].unique().sort()]
    for number, s in enumerate(budgets):
        own, look = frame.filter(pl.col("s") == s), style.look(number)
        axes.fill_between(own["rho"], own["closable"], own["cap"], color=look.colour, alpha=0.15, linewidth=0)
        axes.plot(own["rho"], own["cap"], color=look.colour, linestyle=look.dashes, linewidth=0.6)
        axes.plot(own["rho"], own["closable"], clip_on=False, **look.line())
    axes.set_xlim(-0.02, 1.02)
    axes.set_xticks([0, 0.1, 0.25, 0.5, 0.75, 1], ["0", "0.1", "0.25", "0.5", "0.75", "1"])
    axes.set_xlabel("mass floor ρ: kept mass is at least ρ times top-mass's")
    axes.set_ylabel("share of the error removed, median")
    handles = [Line2D([], [], label=f"s = {s}", **style.look(n).line()) for n, s in enumerate(budgets)]
    style.legend(figure, None, handles)
