"""Selection rules beside top-mass: the balancing selector, the pool optimum, two rivals, and a user's own."""

import polars as pl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.rules import users_rules
from data.schema import RULES
from data.store import Store
from figures import style
from figures.fits import fit
from figures.published_values import PROFILE_MODEL, profile

INPUTS = (RULES,)
NAMES = {  # in the order of the legend; a user's rules follow under their own names
    "optimal_pool": "pool optimum",
    "balancing": "balancing",
    "geometric": "geometric",
    "leverage": "leverage",
}
SUPPORTS = ("frank_wolfe", "least_free")  # kept keys of free-weight searches: the penalty's matter, not rules to use
_PUBLISHED = {"geometric": "geo_ratio", "leverage": "leverage_ratio"}


def table(store: Store) -> pl.DataFrame:
    """Median e(rule) / e(top-mass) per model, budget and rule, ours first and then what is published.

    Column source is "ours" or "published"; top-mass itself, 1 throughout, is left out, and so are the
    supports of free-weight searches.
    """
    kept = ["ratio", "ratio_low", "ratio_high", "ratio_to_optimum", "kept_mass", "better", "worse"]
    kept += ["n_rows", "n_documents"]
    ours = fit(store, RULES).filter(~pl.col("rule").is_in(["top_mass", *SUPPORTS]))
    ours = ours.select("family", "model", "s", "rule", pl.lit("ours").alias("source"), *kept)
    rank = pl.col("rule").replace_strict({name: n for n, name in enumerate(NAMES)}, default=len(NAMES))
    ours = style.in_order(ours.sort(rank, "rule", "s", maintain_order=True))
    budgets = [int(s) for s in ours["s"].unique().sort()]
    published = [
        profile(key, budgets, "ratio").with_columns(rule=pl.lit(rule), source=pl.lit("published"))
        for rule, key in _PUBLISHED.items()
        if rule in ours["rule"]
    ]
    return pl.concat([ours, *published], how="diagonal").select(ours.columns)


def draw(frame: pl.DataFrame, figure: Figure) -> None:
    """A panel per model on a logarithmic scale; the line at 1 is top-mass, below it is better."""
    ours = frame.filter(pl.col("source") == "ours")
    published = frame.filter(pl.col("source") == "published")
    groups = style.models(ours)
    axes_of, spare = style.panels(figure, len(groups), 2.0)
    budgets = [int(s) for s in ours["s"].unique().sort()]
    rules = ours["rule"].unique(maintain_order=True).to_list()
    looks = {rule: style.look(number) for number, rule in enumerate(NAMES)}
    looks |= {rule: style.own_look(number) for number, rule in enumerate(users_rules(ours))}
    rules.sort(key=list(looks).index)
    for axes, (family, model) in zip(axes_of, groups, strict=True):
        axes.axhline(1, color=style.INK, linewidth=0.6)
        for (rule,), values in published.sort("s").group_by("rule", maintain_order=True):
            axes.plot(values["s"], values["ratio"], **style.PUBLISHED.line(markersize=6, linewidth=0.8))
            axes.annotate(
                str(rule),
                (values["s"][-1], values["ratio"][-1]),
                xytext=(0, 6),
                textcoords="offset points",
                ha="right",
                color=style.MUTED,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.85},
            )
        for rule in rules:
            own = ours.filter((pl.col("model") == model) & (pl.col("rule") == rule)).sort("s")
            own = own.filter(pl.col("ratio").is_finite() & (pl.col("ratio") > 0))
            size = 6.5 if rule == "optimal_pool" else 3.5 if rule in NAMES else 6  # the optimum rings what reaches it
            axes.plot(own["s"], own["ratio"], **looks[rule].line(markersize=size))
            own = own.drop_nulls(["ratio_low", "ratio_high"])
            axes.vlines(own["s"], own["ratio_low"], own["ratio_high"], color=looks[rule].colour, linewidth=0.7)
        style.head(axes, family, model)
        style.budget_axis(axes, budgets)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        style.log_axis(axes, low, high * 1.35)  # room for the name of the uppermost published curve
    style.label_panels(axes_of, "budget s (keys kept)", "median error / top-mass's")
    handles = [Line2D([], [], label=NAMES.get(rule, style.short(rule)), **looks[rule].line()) for rule in rules]
    if not published.is_empty():
        handles.append(
            Line2D([], [], label=f"published, {PROFILE_MODEL}", **style.PUBLISHED.line(markersize=6, linewidth=0.8))
        )
    style.legend(figure, spare, handles, "rule (top-mass is the line at 1)")
