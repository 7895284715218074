"""The ceiling: what the best subset of the candidate set leaves of top-mass's error, and what a user's rules leave."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import ConnectionPatch

from analysis.rules import users_rules
from data.schema import CEILING, RULES
from data.store import Store
from figures import style
from figures.fits import fit

INPUTS = (CEILING, RULES)
_FLOOR, _CAP, _BALANCING = style.LOOKS[0].colour, "#8a2f3b", "#d98c21"
_RIM: dict[str, Any] = {
    "markeredgecolor": style.INK,
    "markeredgewidth": 0.5,
}  # sets the mark off from the bar behind it in grey
_GAP = 1.2  # empty places between two models' groups
_RATIO = "ratio:"  # begins the columns of a user's rules; no rule's name can hold a colon
_SIDE, _APART = 0.3, 0.14  # places: how far the marks of a user's rules stand aside of ours, and from each other
_LETTER = 0.064  # inches: a letter of a heading, the bold ones too
_SIDES = 0.5  # inches beside the panels: labels of the y axis
_FEW_LETTERS = 8  # headings of fewer letters a line take the page's width, and if that is too narrow stand upright
_UPRIGHT_LETTERS = 26  # of an upright heading
_OPEN_TOP = 1.24  # end of the whole scale while nothing lies above it
_ABOVE = 0.9  # length of the logarithmic part above 1, where there is one, in units of the linear part


def table(store: Store) -> pl.DataFrame:
    """Errors as fractions of top-mass's, a row per model and budget (Unit 1; top-mass is 1, dense is 0).

    floor = 1 - median c-hat, its 95% interval (null below ten documents) and the quartiles of 1 - c-hat over
    rows; cap = 1 - the median that c-hat would have if as many optima improved as were published (P1);
    balancing = 1 - its median closure. ratio:NAME, ratio_low:NAME, ratio_high:NAME = median e_s(rule) /
    e_s(top-mass) of each rule of the user's and its interval, null where the rule was not graded.
    """
    share = {
        "floor": 1 - pl.col("closable"),
        "floor_low": 1 - pl.col("closable_high"),
        "floor_high": 1 - pl.col("closable_low"),
        "floor_q25": 1 - pl.col("closable_q75"),
        "floor_q75": 1 - pl.col("closable_q25"),
        "cap": 1 - pl.col("cap"),
        "balancing": 1 - pl.col("closure"),
    }
    names = ["family", "model", "s", "n_rows", "n_documents"]
    frame = style.in_order(fit(store, CEILING).select(*names, **share, cap_share="cap_share"), "s")
    rules = fit(store, RULES)
    for rule in users_rules(rules):
        own = rules.filter(pl.col("rule") == rule).select(
            "family",
            "model",
            "s",
            *(pl.col(name).alias(f"{name}:{rule}") for name in ("ratio", "ratio_low", "ratio_high")),
        )
        frame = frame.join(own, on=["family", "model", "s"], how="left", maintain_order="left")
    return frame


def draw(frame: pl.DataFrame, figure: Figure) -> None:
    """Two views of the same marks: the whole scale from dense (0) to top-mass (1), and its top magnified.

    Where a user's rule is worse than top-mass, the whole scale goes on above 1 as a logarithmic one.
    """
    groups = style.models(frame)
    places = _places(frame)
    crowded = len(places) > 24 or min(_letters(frame, places, style.COLUMN_WIDTH)) < _FEW_LETTERS
    width = style.PAGE_WIDTH if crowded else style.COLUMN_WIDTH
    letters = _letters(frame, places, width)
    names = [_name(family, model, fits) for (family, model), fits in zip(groups, letters, strict=True)]
    lines = max(len(name.splitlines()) for name in names)
    longest = max((len(name) for name, fits in zip(names, letters, strict=True) if fits < _FEW_LETTERS), default=0)
    taller = 0.7 if goes_on_above(frame) else 0.0
    higher = max(0.125 * (lines - 4), _LETTER * (longest - 8), 0.0)
    figure.set_size_inches(width, 3.9 + taller + higher + 0.08 * len(users(frame)))
    figure.set_layout_engine("constrained", h_pad=0.04, w_pad=0.02, hspace=0.04)
    whole, near = figure.subplots(2, 1, sharex=True, height_ratios=[1 + taller, 2.1])
    low = _lowest(frame)
    for axes in (whole, near):
        axes.axhline(1, color=style.INK, linewidth=0.8)
        axes.set_xlim(-0.9, places[-1] + 0.9)
        axes.tick_params(axis="x", length=0)
        _marks(axes, frame, places, small=axes is whole)
        for left, right in _boundaries(frame, places):
            axes.axvline((left + right) / 2, color=style.FAINT, linewidth=0.6)
    whole.axhline(0, color=style.INK, linewidth=0.8, linestyle=(0, (4, 2)))
    whole.axhspan(low, _near_top(frame, low), color=style.FAINT, alpha=0.45, linewidth=0)
    _whole_scale(whole, frame)
    if users(frame):  # whose marks would be under a text above 1
        whole.text(places[-1] + 0.8, 0.04, "top-mass = 1, dense = 0", ha="right", va="bottom")
    else:
        whole.text(places[-1] + 0.8, 1.04, "top-mass = 1", ha="right", va="bottom")
        whole.text(places[-1] + 0.8, 0.04, "dense = 0", ha="right", va="bottom")
    near.set_ylim(low, _near_top(frame, low))
    figure.supylabel("error relative to top-mass", fontsize=style.SMALLEST)
    near.set_xticks(places, [str(s) for s in frame["s"]], rotation=0 if crowded or len(places) <= 10 else 90)
    near.set_xlabel("budget s (keys kept)")
    for (family, _), below, fits, (first, last) in zip(groups, names, letters, _spans(frame, places), strict=True):
        upright = fits < _FEW_LETTERS
        turned: dict[str, Any] = {"rotation": 90} if upright else {}
        rise = 4 + 9 * len(below.splitlines())
        headings: list[tuple[str, int, dict[str, Any]]] = [(below, 3, {"color": style.MUTED, **turned})]
        headings += [] if upright else [(family, rise, {"fontweight": "bold"})]
        for text, height, look in headings:
            whole.annotate(
                text,
                ((first + last) / 2, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, height),
                textcoords="offset points",
                ha="center",
                va="bottom",
                **look,
            )
    for side in (0, 1):
        joint = ConnectionPatch(
            (side, low), (side, 1), whole.get_yaxis_transform(), near.transAxes, color=style.FAINT, linewidth=0.6
        )
        figure.add_artist(joint)
    figure.legend(handles=_handles(frame), loc="outside lower center", ncols=2, handlelength=1.8, columnspacing=1.2)


def _marks(axes: Axes, frame: pl.DataFrame, places: list[float], small: bool) -> None:
    """Whiskers (quartiles over rows), interval of the median, floor, cap and balancing mark of each budget."""
    size = 0.7 if small else 1.0
    for x, row in zip(places, frame.iter_rows(named=True), strict=True):
        if _known(row["floor_q25"], row["floor_q75"]):
            axes.plot([x, x], [row["floor_q25"], row["floor_q75"]], color=style.MUTED, linewidth=0.7)
        if _known(row["floor_low"], row["floor_high"]):
            axes.plot(
                [x, x],
                [row["floor_low"], row["floor_high"]],
                color=_FLOOR,
                linewidth=3 * size,
                alpha=0.45,
                solid_capstyle="butt",
            )
        if _known(row["floor"]):
            axes.plot(x, row["floor"], "_", color=_FLOOR, markersize=6 * size, markeredgewidth=1.6 * size)
        if _known(row["cap"]):
            axes.plot(x, row["cap"], "v", color=_CAP, markersize=3 * size, markerfacecolor="white", markeredgewidth=0.7)
        if _known(row["balancing"]):
            axes.plot(x, row["balancing"], "o", color=_BALANCING, markersize=2.8 * size, **_RIM)
        rules = users(frame)
        for number, rule in enumerate(rules):
            at, look = x + _aside(number, len(rules)), style.own_look(number)
            low, ratio, high = (row[f"{name}:{rule}"] for name in ("ratio_low", "ratio", "ratio_high"))
            if _known(low, high):
                axes.plot([at, at], [low, high], color=look.colour, linewidth=0.9 * size)
            if _known(ratio):
                axes.plot(at, ratio, look.marker, color=look.colour, markersize=4 * size, **_RIM)


def _handles(frame: pl.DataFrame) -> list[Line2D]:
    """The legend's entries, only for what is in the frame."""

    def mark(label: str, colour: str, marker: str, **more: Any) -> Line2D:
        return Line2D([], [], label=label, color=colour, marker=marker, linestyle="none", **more)

    handles = [mark("floor: best known subset", _FLOOR, "_", markeredgewidth=1.6)]
    if frame["floor_low"].is_not_null().any():
        handles.append(Line2D([], [], color=_FLOOR, linewidth=3, alpha=0.45, label="95% interval of the floor"))
    handles.append(Line2D([], [], color=style.MUTED, linewidth=0.7, label="middle half of the rows"))
    handles.append(mark("balancing selector", _BALANCING, "o", markersize=3, **_RIM))
    if frame["cap"].is_not_null().any():
        handles.append(mark("cap (published share)", _CAP, "v", markersize=3.5, markerfacecolor="white"))
    for number, rule in enumerate(users(frame)):
        look = style.own_look(number)
        handles.append(mark(style.short(rule, 24), look.colour, look.marker, **_RIM))
    return handles


def users(frame: pl.DataFrame) -> list[str]:
    """The user's rules that the frame has columns for."""
    return [name.removeprefix(_RATIO) for name in frame.columns if name.startswith(_RATIO)]


def goes_on_above(frame: pl.DataFrame) -> bool:
    """Whether a user's rule is so much worse than top-mass that the whole scale goes on above it, logarithmically."""
    return max(_users_values(frame), default=1.0) > _OPEN_TOP


def _users_values(frame: pl.DataFrame) -> list[float]:
    """Every median of a user's rule and every end of its interval."""
    columns = [f"{name}:{rule}" for rule in users(frame) for name in ("ratio_low", "ratio", "ratio_high")]
    return [value for name in columns for value in frame[name] if _known(value)]


def _aside(number: int, count: int) -> float:
    """How far from its budget's place the mark of a user's rule stands, half left and half right of ours."""
    left = count // 2
    side, among, of = (-1, number, left) if number < left else (1, number - left, count - left)
    return side * _SIDE + _APART * (among - (of - 1) / 2)


def _whole_scale(axes: Axes, frame: pl.DataFrame) -> None:
    """Linear from dense (0) to top-mass (1); above 1 logarithmic up to the user's highest mark, if it lies far up."""
    if not goes_on_above(frame):
        axes.set_ylim(-0.1, _OPEN_TOP)
        axes.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
        return
    top = max(1.6, 1.2 * max(_users_values(frame)))
    stretch = _ABOVE / math.log(top)

    def place(y: np.ndarray) -> np.ndarray:
        return np.where(y <= 1, y, 1 + stretch * np.log(np.maximum(y, 1)))

    def value(z: np.ndarray) -> np.ndarray:
        return np.where(z <= 1, z, np.exp(np.maximum(z - 1, 0) / stretch))

    axes.set_yscale("function", functions=(place, value))
    axes.set_ylim(-0.1, top)
    steps = (1, 1.5, 2, 3, 5) if top < 4 else (1, 2, 5) if top < 40 else (1,)
    above = [step * 10.0**power for power in range(9) for step in steps if 1 < step * 10.0**power <= top]
    axes.set_yticks([0, 0.5, 1, *above], ["0", "0.5", "1", *(f"{tick:g}" for tick in above)])
    axes.set_yticks([], minor=True)


def _near_top(frame: pl.DataFrame, low: float) -> float:
    """The upper end of the magnified view: just above 1, or above those marks of a user's rules that are not far up."""
    close = [value for value in _users_values(frame) if value <= 1 + (1 - low) / 3]
    return max(1 + (1 - low) * 0.04, max(close, default=0.0) + (1 - low) * 0.03)


def _places(frame: pl.DataFrame) -> list[float]:
    """Where each row of the frame stands on the x axis: side by side, with a gap between models."""
    places, at, previous = [], -1.0, None
    for model in frame["model"]:
        at += 1.0 if previous in (None, model) else 1.0 + _GAP
        places.append(at)
        previous = model
    return places


def _letters(frame: pl.DataFrame, places: list[float], width: float) -> list[int]:
    """How many letters fit beside each other above each model's group, in a figure so many inches wide.

    0 where the family's name, which is not broken, would not fit.
    """
    unit = (width - _SIDES) / (places[-1] - places[0] + 1.8)
    found = []
    for (family, _), (first, last) in zip(style.models(frame), _spans(frame, places), strict=True):
        letters = int(unit * (last - first + 1 + _GAP) / _LETTER)
        found.append(letters if letters >= len(family) else 0)
    return found


def _name(family: str, model: str, letters: int) -> str:
    """What stands above a model's group: its name over lines that fit, or, upright, cut and with its family."""
    if letters < _FEW_LETTERS:
        return style.short(model if model == family else f"{family}: {model}", _UPRIGHT_LETTERS)
    return "" if model == family else style.name_lines(model, min(letters, 20))


def _spans(frame: pl.DataFrame, places: list[float]) -> list[tuple[float, float]]:
    """First and last place of each model."""
    spans = []
    for _, model in style.models(frame):
        own = [x for x, name in zip(places, frame["model"], strict=True) if name == model]
        spans.append((own[0], own[-1]))
    return spans


def _boundaries(frame: pl.DataFrame, places: list[float]) -> list[tuple[float, float]]:
    """Last place of each model and first place of the next."""
    spans = _spans(frame, places)
    return [(left[1], right[0]) for left, right in pairwise(spans)]


def _lowest(frame: pl.DataFrame) -> float:
    """The lower end of the magnified view: below every mark, on a tenth, at most 0.9."""
    columns = ["floor", "floor_low", "floor_q25", "cap", "balancing"]
    values = [v for name in columns for v in frame[name] if _known(v)] + _users_values(frame)
    return max(0.0, min(0.9, math.floor(10 * min(values, default=0.9) - 1e-9) / 10))


def _known(*values: float | None) -> bool:
    return all(value is not None and math.isfinite(value) for value in values)
