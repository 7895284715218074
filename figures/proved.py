"""How often the optimum over every key is proved: against dropped mass, number of keys and budget."""

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.certified import HALF, NO_FLOOR
from data.schema import PROVED
from data.store import Store
from figures import style
from figures.fits import fit

INPUTS = (PROVED,)
FLOORS = {HALF: "keeps half the top mass", NO_FLOOR: "no mass floor"}
_AXES = {"dropped_mass": "dropped mass", "n_keys": "keys of the row, N", "s": "budget s (keys kept)"}


def table(store: Store) -> pl.DataFrame:
    """Table proved of the first model, which is the real one wherever it was certified."""
    return style.of_first_model(fit(store, PROVED, may_be_empty=True))


def draw(frame: pl.DataFrame, figure: Figure) -> None:
    """A panel per feature; a mark stands in the middle of its bin, with its Wilson interval."""
    figure.set_size_inches(style.COLUMN_WIDTH, 5.4)
    figure.set_layout_engine("constrained", h_pad=0.05)
    for axes, (by, label) in zip(figure.subplots(3, 1), _AXES.items(), strict=True):
        own = frame.filter(pl.col("by") == by).sort("bin_low")
        for number, floor in enumerate(FLOORS):
            _line(axes, own.filter(pl.col("mass_floor") == floor), by, number)
        _scale(axes, own, by)
        axes.set_xlabel(label)
        axes.set_ylim(-0.03, 1.03)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    figure.supylabel("share of rows with a proved optimum", fontsize=style.SMALLEST)
    handles = [Line2D([], [], label=name, **style.look(n).line()) for n, name in enumerate(FLOORS.values())]
    style.legend(figure, None, handles)


def _line(axes: Axes, own: pl.DataFrame, by: str, number: int) -> None:
    """One floor's marks, the second floor's a little aside so that intervals do not hide each other."""
    look, aside = style.look(number), 0.06 * (number - 0.5)
    low, high = own["bin_low"].to_numpy(), own["bin_high"].to_numpy()
    x = (low + high) / 2 + aside / 5 if by == "dropped_mass" else (low * high) ** 0.5 * 2**aside
    axes.plot(x, own["share"], **look.line())
    axes.vlines(x, own["share_low"], own["share_high"], color=look.colour, linewidth=0.7)


def _scale(axes: Axes, own: pl.DataFrame, by: str) -> None:
    """Ends of bins as ticks; budgets and numbers of keys double."""
    if by == "dropped_mass":
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.1, 0.2, 0.3, 0.4, 0.6, 1], ["0", "0.1", "0.2", "0.3", "0.4", "0.6", "1"])
        return
    ends = sorted({int(end) for name in ("bin_low", "bin_high") for end in own[name]})
    style.budget_axis(axes, ends)
