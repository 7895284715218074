"""What the model loses when every head attends to s keys a row, and how much of it better choices take back."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from analysis import bootstrap
from analysis.bootstrap import Counts, Estimate, Reals
from data import published
from data.schema import LOSS
from data.store import Store, read_all
from figures import style

INPUTS = (LOSS,)
DENSE, TOP_MASS, BALANCING, FLAT, RANDOM = "dense", "top_mass", "balancing", "balancing_flat", "balancing_random"
RULES = {  # in the order of the legend and the tables
    BALANCING: "balancing, all cells",
    FLAT: "balancing, flat cells",
    RANDOM: "balancing, as many random cells",
    "optimal_pool": "optimum, candidate set",
    "optimal_half": "optimum, whole row, floor ½",
}
_DENSE_MARK: dict[str, Any] = {"color": style.MUTED, "marker": "|", "linestyle": "none", "markersize": 9}
_PUBLISHED_LINE: dict[str, Any] = style.PUBLISHED.line(markersize=6, markeredgewidth=0)
_PUBLISHED_NAME = "published\nfive of eight families"
_MODEL_HEIGHT = 0.66  # inches
_ASIDE = 0.15  # models by which two rules' marks stand apart


def losses(store: Store) -> pl.DataFrame:
    """Table loss of every model in the house order; no rows if none was measured.

    Raises BadInput for a file that is not readable.
    """
    files = store.loss_files()
    if not files:
        return pl.DataFrame(schema={name: column.dtype for name, column in LOSS.columns.items()})
    return style.in_order(read_all(LOSS, files))


def table(store: Store) -> pl.DataFrame:
    """Each model's loss under each rule beside its loss under top-mass, on the same documents.

    nats: mean over documents, of random cells also over draws. difference: nats less top-mass's. recovered: the share
    of what top-mass costs over dense attention that the rule takes back. captured: its gain over top-mass as a share of
    balancing's in all cells. Intervals: cluster bootstrap of the paired differences over documents (P1, uncertainty).
    cells: in how many the rule chooses, of all_cells. published_low, published_high: of the difference, where given.
    """
    found = losses(store)
    records = [record for _, own in found.group_by("model", maintain_order=True) for record in _records(own)]
    saved = published.find("loss_saved", 8)
    ends = (None, None) if saved is None or saved.low is None or saved.high is None else (-saved.high, -saved.low)
    frame = pl.DataFrame(records, infer_schema_length=None)
    if frame.is_empty():
        return frame
    given = (pl.col("rule") == FLAT) & (pl.col("s") == 8)
    columns = zip(("published_low", "published_high"), ends, strict=True)
    return frame.with_columns(pl.when(given).then(pl.lit(end, dtype=pl.Float64)).alias(name) for name, end in columns)


def budgets(frame: pl.DataFrame) -> str:
    """The budgets of a frame, as a reader sees them: each model has one."""
    return " and ".join(str(s) for s in sorted(frame["s"].unique().to_list()))


def paired(frame: pl.DataFrame, rule: str, other: str) -> Reals:
    """Loss under one rule less that under another, document by document, (D,); draws are averaged first."""
    each = [
        frame.filter(rule=name).group_by("doc_id").agg(pl.col("nats_per_token").mean()).sort("doc_id")
        for name in (rule, other)
    ]
    both = each[0].join(each[1], on="doc_id", how="inner", suffix="_other", maintain_order="left")
    return (both["nats_per_token"] - both["nats_per_token_other"]).to_numpy()


def _records(own: pl.DataFrame) -> list[dict[str, object]]:
    """Of one model, a record per rule: dense and top-mass first."""
    first = own.row(0, named=True)
    documents = own["doc_id"].n_unique()
    drawn = bootstrap.draw(documents)
    cost = paired(own, TOP_MASS, DENSE)
    there = own["rule"].unique().to_list()
    all_cells = -paired(own, BALANCING, TOP_MASS) if BALANCING in there else None
    records = []
    for rule in (DENSE, TOP_MASS, *RULES):
        part = own.filter(rule=rule)
        if part.is_empty():
            continue
        difference = paired(own, rule, TOP_MASS)
        records.append(
            {
                **{name: first[name] for name in ("family", "model", "s")},
                "rule": rule,
                "n_documents": documents,
                "tokens": part["tokens"][0],
                "draws": part["draw"].n_unique() if rule == RANDOM else None,
                "nats": float(part["nats_per_token"].mean()),  # type: ignore[arg-type]  # a column of floats
                **_mean(difference, drawn).columns("difference"),
                **_ratio(-difference, cost, drawn).columns("recovered"),
                **(Estimate(None) if all_cells is None else _ratio(-difference, all_cells, drawn)).columns("captured"),
                "cells": part["cells"][0],
                "all_cells": part["all_cells"][0],
                "searched_rows": int(part["searched_rows"].sum()),
                "proved_rows": int(part["proved_rows"].sum()),
                "seconds": float(part["seconds"].mean()),  # type: ignore[arg-type]  # likewise
            }
        )
    return records


def _mean(values: Reals, drawn: Counts) -> Estimate:
    return bootstrap.mean(values, np.arange(len(values)), drawn)


def _ratio(gain: Reals, whole: Reals, drawn: Counts) -> Estimate:
    """Sum of the gains over the sum of the whole, where that is positive, and its interval."""
    document = np.arange(len(gain))
    if not whole.sum() > 0:
        return Estimate(None)
    gains, wholes = (bootstrap.resampled_mean(x, document, drawn) for x in (gain, whole))
    ratios = np.divide(gains, wholes, out=np.full(len(gains), np.nan), where=wholes > 0)
    return bootstrap.estimate(float(gain.sum() / whole.sum()), document, ratios)


def draw(frame: pl.DataFrame, figure: Figure) -> None:
    """A row per model: on the left the loss less top-mass's, on the right the share of top-mass's cost taken back.

    The published range has a row of its own, below.
    """
    models = style.models(frame)
    names = [family if family == model else f"{family}\n{style.name_lines(model, 20)}" for family, model in models]
    given = frame.drop_nulls("published_low").select("published_low", "published_high").unique().rows()
    names += [_PUBLISHED_NAME for _ in given]
    figure.set_size_inches(style.PAGE_WIDTH, 1.2 + _MODEL_HEIGHT * len(names))
    figure.set_layout_engine("constrained", w_pad=0.04, h_pad=0.04)
    nats, shares = figure.subplots(1, 2, sharey=True)
    rules = [rule for rule in RULES if rule in frame["rule"].unique().to_list()]
    for place, (_, model) in enumerate(models):
        own = {str(row["rule"]): row for row in frame.filter(model=model).iter_rows(named=True)}
        nats.plot(own[DENSE]["difference"], place, **_DENSE_MARK)
        for number, rule in enumerate(rules):
            if rule in own:
                y = place + (number - (len(rules) - 1) / 2) * _ASIDE
                _mark(nats, y, own[rule], "difference")
                _mark(shares, y, own[rule], "recovered")
    for place, ends in enumerate(given, len(models)):
        nats.plot(ends, [place] * 2, **_PUBLISHED_LINE)
    nats.axvline(0, color=style.INK, linewidth=0.6, zorder=0)
    shares.axvline(0, color=style.INK, linewidth=0.6, zorder=0)
    shares.axvline(1, color=style.MUTED, linewidth=0.8, zorder=0)
    for axes in (nats, shares):
        axes.tick_params(axis="y", length=0)
        low, high = axes.get_xlim()
        axes.set_xticks([tick for tick in axes.get_xticks() if low <= tick <= high])
        axes.set_xlim(low, high)
    nats.set_yticks(range(len(names)), names)
    nats.set_ylim(len(names) - 0.5, -0.5)
    nats.set_xlabel(f"loss less top-mass's at s = {budgets(frame)}, nats per token")
    shares.set_xlabel("share of top-mass's cost taken back")
    shares.xaxis.set_major_formatter(PercentFormatter(1.0))
    handles = [Line2D([], [], label=RULES[rule], **_look(rule).line(linestyle="none")) for rule in rules]
    handles.append(Line2D([], [], label="dense attention", **_DENSE_MARK))
    if given:
        handles.append(Line2D([], [], label="published, flat cells", **_PUBLISHED_LINE))
    style.legend(figure, None, handles)


def _look(rule: str) -> style.Look:
    return style.look(list(RULES).index(rule))


def _mark(axes: Axes, y: float, row: Mapping[str, Any], name: str) -> None:
    """A rule's number with its interval; nothing where it is not defined."""
    if row[name] is None:
        return
    look = _look(row["rule"])
    if row[f"{name}_low"] is not None:
        axes.hlines(y, row[f"{name}_low"], row[f"{name}_high"], color=look.colour, linewidth=0.8)
    axes.plot(row[name], y, **look.line(linestyle="none"))
