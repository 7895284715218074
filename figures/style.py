"""The house style: sizes, colours and marks that survive grey printing and a column's width."""

import colorsys
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import matplotlib
import numpy as np
import polars as pl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

COLUMN_WIDTH = 3.35  # inches: one column of a two-column page
PAGE_WIDTH = 6.9  # inches: both columns
RESOLUTION = 200  # dots per inch of the PNGs
SMALLEST = 7.0  # points: nothing in a figure is set smaller
_NARROW_LETTERS = 46  # letters of two labels that fit side by side below a figure of one column
HEADLINE_BUDGET = 8  # the budget at which the paper draws its map and its ROC
FAMILIES = ("llama", "qwen", "qwen3", "olmo", "gemma")  # order of panels; other families follow by name
OWN = "own"  # family of the rows that a user brings: they come last and are never counted among our models
INK, MUTED, FAINT = "#16181d", "#6b7280", "#d4d7dd"
MAP_COLOURS = "cividis"  # its lightness rises evenly, so it reads the same in grey

RC: Any = MappingProxyType(
    {
        "font.family": "DejaVu Sans",
        "font.size": SMALLEST,
        "axes.titlesize": SMALLEST + 0.5,
        "axes.titleweight": "bold",
        "axes.labelsize": SMALLEST,
        "xtick.labelsize": SMALLEST,
        "ytick.labelsize": SMALLEST,
        "legend.fontsize": SMALLEST,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
        "lines.linewidth": 1.2,
        "lines.markersize": 4,
        "pdf.fonttype": 42,
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
    }
)


@dataclass(frozen=True)
class Look:
    """How one series is drawn: no two looks share a marker or a dash pattern, so colour is never needed to read."""

    colour: str
    marker: str
    dashes: Literal["-"] | tuple[float, tuple[float, ...]]

    def line(self, **more: Any) -> dict[str, Any]:
        """Keyword arguments of Axes.plot."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dashes,
            "markeredgecolor": "white",
            "markeredgewidth": 0.5,
            **more,
        }


LOOKS = (
    Look("#14213d", "o", "-"),
    Look("#d98c21", "s", (0, (4.5, 1.5))),
    Look("#1f6fa8", "^", (0, (1.2, 1.2))),
    Look("#8a2f3b", "D", (0, (5, 1.5, 1, 1.5))),
    Look("#11836b", "P", (0, (7, 2))),
    Look("#a99be0", "X", (0, (3, 1, 1, 1, 1, 1))),
    Look("#5c5f1f", "h", (0, (2.5, 2.5))),
    Look("#dba3bb", ">", (0, (9, 1.5, 1, 1.5))),
)
FIRST_OWN = 4  # from here on the looks are for a user's own rules, the same in every figure
PUBLISHED = Look(MUTED, "*", (0, (0.8, 1.6)))  # published numbers never share a look with ours


def luminance(colour: str) -> float:
    """How light a colour is once printed in grey: 0 black, 1 white (weights of ITU-R BT.601)."""
    red, green, blue = to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def look(number: int) -> Look:
    """The look of series `number`; after the last one the looks come round again, a shade lighter."""
    return _lighter(LOOKS[number % len(LOOKS)], number // len(LOOKS))


def own_look(number: int) -> Look:
    """The look of a user's own rule `number`, which no rule of ours has; they too come round again, lighter."""
    looks = LOOKS[FIRST_OWN:]
    return _lighter(looks[number % len(looks)], number // len(looks))


def _lighter(base: Look, turns: int) -> Look:
    """The look in a lighter shade for each turn; unchanged at none."""
    if not turns:
        return base
    hue, light, saturation = colorsys.rgb_to_hls(*to_rgb(base.colour))
    red, green, blue = colorsys.hls_to_rgb(hue, light + (1 - light) * turns / (turns + 2), saturation)
    colour = f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
    return Look(colour, base.marker, base.dashes)


def short(name: str, width: int = 28) -> str:
    """A name for a legend: as it is, or cut to `width` characters with an ellipsis."""
    return name if len(name) <= width else f"{name[: width - 1]}…"


def in_order(frame: pl.DataFrame, *then: str) -> pl.DataFrame:
    """The frame's rows by family (FAMILIES in their order, others by name, OWN last), model, and further columns."""
    ranks = {family: rank for rank, family in enumerate(FAMILIES)} | {OWN: len(FAMILIES) + 1}
    rank = pl.col("family").replace_strict(ranks, default=len(FAMILIES), return_dtype=pl.Int32)
    return frame.sort(rank, "family", "model", *then, maintain_order=True)


def models(frame: pl.DataFrame) -> list[tuple[str, str]]:
    """(family, model) of a frame, each once, in the frame's order."""
    pairs = frame.select("family", "model").unique(maintain_order=True)
    return [(str(family), str(model)) for family, model in pairs.iter_rows()]


def of_first_model(frame: pl.DataFrame, *then: str) -> pl.DataFrame:
    """The rows of the first model in_order, which is the real one wherever it was measured, sorted by `then`."""
    ordered = in_order(frame, *then)
    return ordered.filter(pl.col("model") == ordered["model"][0]) if len(ordered) else ordered


def name_lines(model: str, width: int) -> str:
    """A model's name over as many lines as it takes to keep each to `width` characters.

    Broken after dashes and underscores, and anywhere in a part that is longer than a line.
    """
    lines = [""]
    for part in re.split(r"(?<=[-_])", model):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        while len(part) > width:
            lines[-1], part = part[:width], part[width:]
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def head(axes: Axes, family: str, model: str, width: int = 28) -> None:
    """A panel's title: the family in bold and, where it is called otherwise, the model below it."""
    if model == family:
        axes.set_title(family)
        return
    below = name_lines(model, width)
    axes.set_title(family, pad=5 + 9 * len(below.splitlines()))
    axes.annotate(below, (0.5, 1), (0, 3), "axes fraction", "offset points", color=MUTED, ha="center", va="bottom")


def say(figure: Figure, sentence: str) -> None:
    """A figure that has nothing to draw says why."""
    figure.set_size_inches(COLUMN_WIDTH, 0.6)
    figure.text(0.5, 0.5, sentence, ha="center", va="center")


def headline_budget(frame: pl.DataFrame) -> int:
    """The budget 8 if the frame has it, else its smallest."""
    budgets = sorted(int(s) for s in frame["s"].unique())
    return HEADLINE_BUDGET if HEADLINE_BUDGET in budgets else budgets[0]


def panels(figure: Figure, count: int, height: float) -> tuple[list[Axes], Axes | None]:
    """count panels on a grid at most three wide, `height` inches each, and a spare cell for the legend.

    One panel is a column wide; more fill the page. The spare cell is None where the grid has none: then the
    legend goes below.
    """
    columns = min(count, 3)
    rows = -(-count // columns)
    below = 0.0 if rows * columns > count else 0.6
    figure.set_size_inches(COLUMN_WIDTH if columns == 1 else PAGE_WIDTH, rows * height + below)
    figure.set_layout_engine("constrained", w_pad=0.03, h_pad=0.04)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[count:]:
        axes.set_axis_off()
    return list(grid[:count]), grid[count] if len(grid) > count else None


def legend(figure: Figure, spare: Axes | None, handles: Sequence[Artist], heading: str = "") -> None:
    """One legend for all panels: in the spare cell, else below them."""
    if spare is not None:
        box = spare.legend(handles=handles, loc="center", title=heading or None, handlelength=3.2, labelspacing=0.7)
        box.get_title().set_fontsize(SMALLEST + 0.5)
        box.get_title().set_fontweight("bold")
        return
    narrow = figure.get_figwidth() < PAGE_WIDTH
    widest = sorted(len(str(handle.get_label())) for handle in handles)[-2:]
    box = figure.legend(
        handles=handles,
        loc="outside lower center",
        title=heading.replace("\n", " ") or None,
        ncols=3 if not narrow else 2 if sum(widest) <= _NARROW_LETTERS else 1,
        handlelength=3.2,
    )
    box.get_title().set_fontsize(SMALLEST)


def label_panels(panels: Sequence[Axes], x: str, y: str) -> None:
    """The x label below the lowest panel of each column, the y label beside the first of each row."""
    columns = min(len(panels), 3)
    for place, axes in enumerate(panels):
        if place + columns >= len(panels):
            axes.set_xlabel(x)
        if place % columns == 0:
            axes.set_ylabel(y)


def log_axis(axes: Axes, low: float, high: float) -> None:
    """A logarithmic y axis from low to high with plain numbers: the wider it is, the fewer."""
    steps = (1, 1.5, 2, 3, 5) if high / low < 12 else (1, 3) if high / low < 300 else (1,)
    ticks = [step * 10.0**power for power in range(-9, 10) for step in steps]
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.set_yticks([], minor=True)


def budget_axis(axes: Axes, budgets: Sequence[int]) -> None:
    """A logarithmic axis of budgets with a tick at each of ours and nowhere else."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(budgets), [str(s) for s in budgets])
    low, high = min(budgets), max(budgets)
    axes.set_xlim(low / 2**0.4, high * 2**0.4)


def share_axis(axes: Axes, highest: float) -> None:
    """A y axis of shares from 0 to just above the highest; a square root gives the small ones room."""
    top = min(1.0, max(highest, 0.01)) * 1.06
    axes.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
    axes.set_ylim(0, top)
    steps = (0, 0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1)
    shown = [tick for tick in steps if tick == 0 or 0.004 * top <= tick <= top]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.set_yticks([], minor=True)


def save(figure: Figure) -> tuple[bytes, bytes]:
    """The figure as (PNG, PDF); the same figure gives the same bytes, as no time of day goes in."""
    png, pdf = io.BytesIO(), io.BytesIO()
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout is found once and holds for both files
    figure.savefig(png, format="png", dpi=RESOLUTION, metadata={"Software": None})
    figure.savefig(pdf, format="pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})
    return png.getvalue(), pdf.getvalue()


def blank() -> Figure:
    """An empty figure that belongs to no window and no global state."""
    return Figure()


def applied() -> Any:
    """A context in which the house style holds; it is undone on leaving."""
    return matplotlib.rc_context(RC)
