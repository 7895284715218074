"""The ROC: how well dropped mass, and two bounds on the error, tell rows where a better subset gains 10%."""

import polars as pl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from data.schema import PREDICTOR, ROC
from data.store import Store
from figures import style
from figures.fits import fit

INPUTS = (ROC, PREDICTOR)
STATISTICS = {  # in the order of the legend
    "dropped_mass": "dropped mass",
    "variance_bound": "variance bound",
    "diameter_bound": "diameter bound",
}


def table(store: Store) -> pl.DataFrame:
    """Points of the curves at the headline budget, with the area (auc) and counts of each curve beside them.

    Empty if no model has both rows that could gain and rows that could not: then there is no curve.
    """
    points = fit(store, ROC, may_be_empty=True)
    names = ["family", "model", "s", "statistic"]
    areas = fit(store, PREDICTOR).select(*names, "auc", "auc_low", "auc_high", "n_rows", "n_positive", "n_documents")
    chosen = points if points.is_empty() else points.filter(pl.col("s") == style.headline_budget(points))
    return style.in_order(chosen.join(areas, on=names, how="left", maintain_order="left"))


def draw(frame: pl.DataFrame, figure: Figure) -> None:
    """A panel per model: three curves, the diagonal of a coin, and each curve's area; a sentence if there are none."""
    if frame.is_empty():
        style.say(figure, "No curve: all rows gain at least 10%, or none does.")
        return
    groups = style.models(frame)
    axes_of, spare = style.panels(figure, len(groups), 2.45)
    s = int(frame["s"][0])
    for axes, (family, model) in zip(axes_of, groups, strict=True):
        own = frame.filter(pl.col("model") == model)
        axes.plot([0, 1], [0, 1], color=style.FAINT, linewidth=0.8)
        handles = []
        for number, statistic in enumerate(STATISTICS):
            curve = own.filter(pl.col("statistic") == statistic)
            if curve.is_empty():
                continue
            look = style.look(number)
            curve = curve.sort("false_positive_rate", "true_positive_rate")
            axes.plot(
                curve["false_positive_rate"], curve["true_positive_rate"], color=look.colour, linestyle=look.dashes
            )
            label = _area(curve["auc"][0])
            handles.append(Line2D([], [], color=look.colour, linestyle=look.dashes, label=label))
        axes.legend(handles=handles, loc="lower right", title="AUC", handlelength=2.6, borderaxespad=0.2)
        style.head(axes, family, model)
        axes.set_xlim(-0.01, 1.01)
        axes.set_ylim(-0.01, 1.01)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
    style.label_panels(axes_of, "false positive rate", "true positive rate")
    handles = [
        Line2D([], [], color=style.look(n).colour, linestyle=style.look(n).dashes, label=name)
        for n, name in enumerate(STATISTICS.values())
    ]
    style.legend(figure, spare, handles, f"s = {s}, positive:\na better subset removes\nat least 10% of the error")


def _area(auc: float | None) -> str:
    return "none" if auc is None or auc != auc else f"{auc:.2f}".lstrip("0")
