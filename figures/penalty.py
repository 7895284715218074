"""The price of forced weights: pi-hat(s) against s for three estimates of the free error (two of P1, one ours)."""

import polars as pl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from data.schema import PENALTY
from data.store import Store
from figures import style
from figures.fits import fit
from figures.published_values import PROFILE_MODEL, profile

INPUTS = (PENALTY,)
ESTIMATES = {  # in the order of the legend
    "least": "least over supports (ours)",
    "fully_corrective": "fully corrective Frank-Wolfe",
    "line_search": "line-search Frank-Wolfe",
}


def table(store: Store) -> pl.DataFrame:
    """Median pi-hat per model, budget and estimate, ours first and then the published profile.

    Column source is "ours" or "published"; a published row has no estimate of ours and no counts.
    """
    kept = ["penalty", "penalty_low", "penalty_high", "penalty_p99", "below_one"]
    kept += ["n_rows", "n_documents", "n_zero_free"]
    ours = fit(store, PENALTY).select("family", "model", "s", "estimate", pl.lit("ours").alias("source"), *kept)
    rank = pl.col("estimate").replace_strict({name: n for n, name in enumerate(ESTIMATES)}, default=9)
    ours = style.in_order(ours.sort(rank, maintain_order=True))
    published = profile("penalty", [int(s) for s in ours["s"].unique().sort()], "penalty").with_columns(
        estimate=pl.lit("published"), source=pl.lit("published")
    )
    return pl.concat([ours, published], how="diagonal").select(ours.columns)


def draw(frame: pl.DataFrame, figure: Figure) -> None:
    """A panel per model; pi = 1, which no true pi can be below, is a line; published values are stars."""
    ours = frame.filter(pl.col("source") == "ours")
    published = frame.filter(pl.col("source") == "published")
    groups = style.models(ours)
    axes_of, spare = style.panels(figure, len(groups), 2.0)
    budgets = [int(s) for s in ours["s"].unique().sort()]
    for axes, (family, model) in zip(axes_of, groups, strict=True):
        axes.axhline(1, color=style.INK, linewidth=0.6)
        published = published.sort("s")
        axes.plot(published["s"], published["penalty"], **style.PUBLISHED.line(markersize=6, linewidth=0.8))
        for number, estimate in reversed(list(enumerate(ESTIMATES))):
            own = ours.filter((pl.col("model") == model) & (pl.col("estimate") == estimate)).sort("s")
            own = own.filter(pl.col("penalty").is_finite())
            look = style.look(number)
            axes.plot(own["s"], own["penalty"], **look.line())
            own = own.drop_nulls(["penalty_low", "penalty_high"])
            axes.vlines(own["s"], own["penalty_low"], own["penalty_high"], color=look.colour, linewidth=0.7)
        style.head(axes, family, model)
        style.budget_axis(axes, budgets)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        style.log_axis(axes, min(low, 0.92), max(high, 2.2))
    style.label_panels(axes_of, "budget s (keys kept)", "median $\\hat{\\pi}(s)$")
    handles = [Line2D([], [], label=name, **style.look(n).line()) for n, name in enumerate(ESTIMATES.values())]
    if not published.is_empty():
        handles.append(
            Line2D([], [], label=f"published, {PROFILE_MODEL}", **style.PUBLISHED.line(markersize=6, linewidth=0.8))
        )
    style.legend(figure, spare, handles, "free error by")
