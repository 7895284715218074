"""The map: median dropped mass and median kappa-hat of every layer and head, flat cells marked (P1)."""

import math

import numpy as np
import polars as pl
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from data.schema import MAP
from data.store import Store
from figures import style
from figures.fits import fit

INPUTS = (MAP,)
_HIGH_SHARE = 0.98  # share of the cells that the scale of kappa-hat covers; the few above are drawn as its top
_LEAST_RANGE = 0.02  # the scale of kappa-hat spans at least this, or rounding would look like structure


def table(store: Store) -> pl.DataFrame:
    """A row per model, layer and query head at the headline budget: medians over rows, and whether it is flat."""
    frame = fit(store, MAP)
    return style.in_order(frame.filter(pl.col("s") == style.headline_budget(frame)), "layer", "q_head")


def draw(frame: pl.DataFrame, figure: Figure) -> None:
    """Two rows of heat maps, a model a column: dropped mass above, kappa-hat below; each row shares a scale.

    A model of a single cell, such as rows of one's own, which name no layer or head, has no map.
    """
    frame = frame.filter(pl.len().over("family", "model") > 1)
    if frame.is_empty():
        style.say(figure, "No map: these rows name no layers and heads.")
        return
    groups = style.models(frame)
    figure.set_size_inches(style.COLUMN_WIDTH if len(groups) == 1 else style.PAGE_WIDTH, 4.3)
    figure.set_layout_engine("constrained", w_pad=0.03, h_pad=0.04)
    widths = [max(3.0, math.sqrt(_heads(frame, model))) for _, model in groups]
    grid = figure.subplots(2, len(groups), squeeze=False, width_ratios=widths)
    s = int(frame["s"][0])
    rows = (
        ("dropped_mass", f"median dropped mass\nat s = {s}", _mass_scale(frame)),
        ("kappa", f"median $\\hat{{\\kappa}}$ at s = {s}", _kappa_scale(frame)),
    )
    for upper, line, (column, label, scale) in zip((True, False), grid, rows, strict=True):
        for axes, (family, model) in zip(line, groups, strict=True):
            image = _heat(axes, frame.filter(pl.col("model") == model), column, scale)
            if upper:
                style.head(axes, family, model, 14)
            else:
                axes.set_xlabel("query head")
        line[0].set_ylabel("layer")
        bar = figure.colorbar(
            image, ax=list(line), aspect=22, pad=0.015, extend="max" if column == "kappa" else "neither"
        )
        bar.set_label(label)
        bar.outline.set_linewidth(0.4)
        if column == "dropped_mass":
            bar.ax.axhline(0.25, color="white", linewidth=1.2)
    broken = "\n" if len(groups) == 1 else " "  # the line is longer than a column is wide
    if frame["flat"].is_not_null().any():
        below = f"dot: flat cell, median dropped mass at s = 8 above 0.25{broken}(white line on the scale)"
    else:
        below = f"no flat cells are marked: they are told at s = 8,{broken}which was not run"
    figure.supxlabel(below, fontsize=style.SMALLEST)


def _heat(axes: Axes, frame: pl.DataFrame, column: str, scale: Normalize) -> AxesImage:
    """One model's heat map; a cell without a finite median stays light grey."""
    cells = np.full((int(frame["layer"].max()) + 1, int(frame["q_head"].max()) + 1), np.nan)  # type: ignore[arg-type]
    cells[frame["layer"], frame["q_head"]] = frame[column]
    colours = colormaps[style.MAP_COLOURS].with_extremes(bad="#eeeeee")
    image = axes.imshow(
        np.ma.masked_invalid(cells), cmap=colours, norm=scale, aspect="auto", origin="lower", interpolation="nearest"
    )
    flat = frame.filter(pl.col("flat").fill_null(False))
    shades = np.nan_to_num(scale(np.asarray(flat[column], dtype=float)), nan=1.0)
    size = 9 if cells.size <= 64 else 2.2
    ink = ["white" if shade < 0.55 else "black" for shade in np.clip(np.asarray(shades), 0, 1)]
    axes.scatter(flat["q_head"], flat["layer"], s=size, c=ink, linewidths=0)
    layers, heads = cells.shape
    axes.set_xticks(_ticks(heads))
    axes.set_yticks(_ticks(layers))
    axes.spines[:].set_visible(False)
    return image


def _ticks(count: int) -> list[int]:
    """Every number where few, else every fifth."""
    if count <= 6:
        return list(range(count))
    step = 2 if count <= 10 else 5 if count <= 40 else 10
    return list(range(0, count, step))


def _heads(frame: pl.DataFrame, model: str) -> int:
    return frame.filter(pl.col("model") == model)["q_head"].n_unique()


def _mass_scale(frame: pl.DataFrame) -> Normalize:
    """From 0 to the largest median, at least to 0.5 so that 0.25 is on it."""
    top = max((v for v in frame["dropped_mass"] if math.isfinite(v)), default=0.5)
    return Normalize(0, min(1.0, max(0.5, math.ceil(10 * top) / 10)))


def _kappa_scale(frame: pl.DataFrame) -> Normalize:
    """From 1 to a value that all but a few cells keep below."""
    finite = np.array([v for v in frame["kappa"] if math.isfinite(v)] or [1.0])
    return Normalize(1, max(1 + _LEAST_RANGE, float(np.quantile(finite, _HIGH_SHARE))))
