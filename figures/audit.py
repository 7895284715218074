"""What every eviction method holds at one nominal budget, and how many planted needles it still finds."""

from collections.abc import Mapping
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from data import published
from data.schema import AUDIT
from data.store import Store, read_all
from figures import style

INPUTS = (AUDIT,)
PUBLISHED_SHARE = {  # our method -> the published one whose share of the full cache is given
    "snapkv": "SnapKV, Compactor",
    "snapkv+contour": "ContourKV, enforced, retrieval",
    "snapkv+contour, padded": "ContourKV, not enforced",
}
_UNSEEN, _SEEN, _HELD = style.LOOKS[0], style.LOOKS[1], style.LOOKS[0]
_SEEN_MARK: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": _SEEN.colour, "markeredgewidth": 1.0}
_STARS: dict[str, Any] = {"markersize": 6, "markeredgewidth": 0}
_ROW = 0.2  # inches a method
_ASIDE = 0.16  # rows by which the two marks of a method stand apart
_LEAST, _MOST = 0.0007, 1.6  # shares of the full cache at the ends of the axis


def audited(store: Store) -> pl.DataFrame:
    """Table audit of every model in the house order, the methods in theirs; no rows if no audit was run.

    Raises BadInput for a file that is not readable.
    """
    files = store.audit_files()
    if not files:
        return pl.DataFrame(schema={name: column.dtype for name, column in AUDIT.columns.items()})
    return style.in_order(read_all(AUDIT, files))


def table(store: Store) -> pl.DataFrame:
    """Table audit of the first model, which is the real one wherever it was audited, at its smallest budget.

    With held_share = physical over full bytes and nominal_share likewise, and the published range of the former under
    the same conditions of enforcement (published_low, published_high; null where there is none).
    """
    own = style.of_first_model(audited(store))
    smallest = own["budget"].min()
    own = own.filter(pl.col("budget").is_null() | (pl.col("budget") == smallest))
    ranges = {ours: published.find("held_share", model=theirs) for ours, theirs in PUBLISHED_SHARE.items()}
    ends = {
        f"published_{end}": {ours: None if found is None else getattr(found, end) for ours, found in ranges.items()}
        for end in ("low", "high")
    }
    return own.with_columns(
        (pl.col("physical_bytes") / pl.col("full_bytes")).alias("held_share"),
        (pl.col("nominal_bytes") / pl.col("full_bytes")).alias("nominal_share"),
        *(
            pl.col("method").replace_strict(values, default=None, return_dtype=pl.Float64).alias(name)
            for name, values in ends.items()
        ),
    )


def draw(frame: pl.DataFrame, figure: Figure) -> None:
    """A row per method: on the left what it holds beside what it was told, on the right the share of needles hit."""
    methods = frame["method"].unique(maintain_order=True).to_list()
    figure.set_size_inches(style.PAGE_WIDTH, 1.1 + _ROW * len(methods))
    figure.set_layout_engine("constrained", w_pad=0.04, h_pad=0.04)
    held, hits = figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
    for place, method in enumerate(methods):
        own = {bool(row["question_seen"]): row for row in frame.filter(method=method).iter_rows(named=True)}
        _holds(held, place, own[min(own)])
        for seen, row in own.items():
            _hits(hits, place, seen, row)
    held.set_xscale("log")
    held.set_xlim(_LEAST, _MOST)
    held.set_xticks([0.001, 0.01, 0.1, 1], ["0.1%", "1%", "10%", "full"])
    held.xaxis.set_minor_locator(NullLocator())
    held.set_xlabel("bytes held after evicting, of the full cache's")
    nominal = frame["nominal_share"].drop_nulls()
    if len(nominal):
        held.axvline(nominal[0], color=style.MUTED, linewidth=0.8, zorder=0)
    hits.set_xlim(-0.03, 1.03)
    hits.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "50%", "", "100%"])
    hits.set_xlabel("planted needles hit")
    held.set_yticks(range(len(methods)), methods)
    held.set_ylim(len(methods) - 0.4, -0.6)
    for axes in (held, hits):
        axes.tick_params(axis="y", length=0)
        axes.hlines(range(len(methods)), *axes.get_xlim(), color=style.FAINT, linewidth=0.5, zorder=0)
    style.legend(figure, None, _handles())


def _holds(axes: Axes, place: int, row: Mapping[str, Any]) -> None:
    """What one method holds, with a square where that is the full cache; the published range in grey."""
    if row["published_low"] is not None:
        ends = [row["published_low"], row["published_high"]]
        axes.plot(ends, [place] * 2, **style.PUBLISHED.line(**_STARS))
    if row["logical_bytes"] < row["physical_bytes"]:
        axes.plot([row["logical_bytes"] / row["full_bytes"], row["held_share"]], [place] * 2, color=_HELD.colour)
        axes.plot(row["logical_bytes"] / row["full_bytes"], place, "|", color=_HELD.colour)
    axes.plot(row["held_share"], place, "s" if row["holds_full_cache"] else "o", color=_HELD.colour)


def _hits(axes: Axes, place: int, seen: bool, row: Mapping[str, Any]) -> None:
    """The share of needles hit, with its Wilson interval."""
    look, y = (_SEEN, place + _ASIDE) if seen else (_UNSEEN, place - _ASIDE)
    axes.hlines(y, row["hit_rate_low"], row["hit_rate_high"], color=look.colour, linewidth=0.7)
    axes.plot(row["hit_rate"], y, look.marker, color=look.colour, clip_on=False, **(_SEEN_MARK if seen else {}))


def _handles() -> list[Line2D]:
    def mark(label: str, colour: str, marker: str, **more: Any) -> Line2D:
        return Line2D([], [], label=label, color=colour, marker=marker, linestyle="none", **more)

    return [
        mark("held", _HELD.colour, "o"),
        mark("held: the full cache", _HELD.colour, "s"),
        Line2D([], [], label="from what is visible to what is held", color=_HELD.colour, marker="|"),
        Line2D([], [], label="nominal", color=style.MUTED, linewidth=0.8),
        Line2D([], [], label="published, other budgets", **style.PUBLISHED.line(**_STARS)),
        mark("hit, question unseen", _UNSEEN.colour, _UNSEEN.marker),
        mark("hit, question seen", _SEEN.colour, _SEEN.marker, **_SEEN_MARK),
    ]
