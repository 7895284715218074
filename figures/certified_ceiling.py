"""The two-sided ceiling: the paper's lower bound, and beside it what the search over every key found and proved."""

from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from data.schema import CERTIFIED
from data.store import Store
from figures import style
from figures.fits import fit

INPUTS = (CERTIFIED,)
_POOL, _HALF, _FULL = style.LOOKS[0], style.LOOKS[1], style.LOOKS[3]
_ASIDE = 2**0.24  # how far the first and the last mark of a budget stand from the middle one, as a factor
_EDGE = 2**0.55  # how far the axis goes beyond the first and the last budget, as a factor
_WIDE = 2**0.09  # half the width of the bar, as a factor
_BAR: dict[str, Any] = {"facecolor": style.FAINT, "edgecolor": style.MUTED, "hatch": "//////", "linewidth": 0.6}
_OPEN: dict[str, Any] = {"markerfacecolor": "white", "markersize": 5}
_NUMBERS = ("pool", "half", "half_cap", "full", "full_cap")


def table(store: Store) -> pl.DataFrame:
    """Median closable fractions over the certified rows, a row per model and budget (Unit 1).

    pool: of the candidate set's optimum. half: of the best subset known that keeps half the top mass, half_cap: what
    it can at most be. full, full_cap: the same without a floor. Each with its 95% interval, null below ten documents.
    """
    ends = [f"{name}{end}" for name in _NUMBERS for end in ("", "_low", "_high")]
    frame = fit(store, CERTIFIED, may_be_empty=True)
    return style.in_order(frame.select("family", "model", "s", "n_rows", "n_documents", "n_of", *ends), "s")


def draw(frame: pl.DataFrame, figure: Figure) -> None:
    """A panel per model; per budget a mark for the pool, one for the floor of a half, a bar for no floor."""
    groups = style.models(frame)
    axes_of, spare = style.panels(figure, len(groups), 2.1)
    budgets = [int(s) for s in frame["s"].unique().sort()]
    highest = max(v for name in _NUMBERS for end in ("", "_high") for v in frame[f"{name}{end}"].drop_nulls())
    for axes, (family, model) in zip(axes_of, groups, strict=True):
        style.budget_axis(axes, budgets)
        axes.set_xlim(min(budgets) / _EDGE, max(budgets) * _EDGE)
        style.share_axis(axes, highest)
        for row in frame.filter(pl.col("model") == model).iter_rows(named=True):
            _marks(axes, row)
        style.head(axes, family, model)
    style.label_panels(axes_of, "budget s (keys kept)", "share of the error removed")
    style.legend(figure, spare, _handles(), "best subset known, median")


def _marks(axes: Axes, row: dict[str, Any]) -> None:
    """What is known at one budget: thin lines are 95% intervals, an open mark is what a number can at most be."""
    first, middle, last = row["s"] / _ASIDE, row["s"], row["s"] * _ASIDE
    for x, low, high in ((first, "pool", "pool"), (middle, "half", "half_cap"), (last, "full", "full_cap")):
        if row[f"{low}_low"] is not None and row[f"{high}_high"] is not None:
            axes.vlines(x, row[f"{low}_low"], row[f"{high}_high"], color=style.MUTED, linewidth=0.7)
    axes.plot(first, row["pool"], _POOL.marker, color=_POOL.colour, clip_on=False)
    axes.vlines(middle, row["half"], row["half_cap"], color=_HALF.colour, linewidth=1.6)
    axes.plot(middle, row["half_cap"], _HALF.marker, color=_HALF.colour, clip_on=False, **_OPEN)
    axes.plot(middle, row["half"], _HALF.marker, color=_HALF.colour, clip_on=False)
    left, right = last / _WIDE, last * _WIDE
    axes.bar(left, row["full_cap"] - row["full"], right - left, row["full"], align="edge", zorder=0.5, **_BAR)
    axes.plot(last, row["full"], _FULL.marker, color=_FULL.colour, clip_on=False)


def _handles() -> list[Line2D | Patch]:
    def mark(label: str, look: style.Look, **more: Any) -> Line2D:
        return Line2D([], [], label=label, color=look.colour, marker=look.marker, linestyle="none", **more)

    return [
        mark("in the candidate set", _POOL),
        mark("keeps half the top mass", _HALF),
        mark("at most, where open", _HALF, **_OPEN),
        mark("no mass floor", _FULL),
        Patch(label="up to what it can at most be", **_BAR),
    ]
