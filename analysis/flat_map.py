"""The flat-cell map: per layer and query head, the median dropped mass and the median kappa-hat."""

import numpy as np
import polars as pl

from analysis.frame import Sample, as_table
from data.schema import MAP

FLAT_BUDGET = 8  # the budget at which P1 calls a cell flat
FLAT_ABOVE = 0.25  # a cell is flat if the median dropped mass of its rows at that budget exceeds this


def cells(sample: Sample) -> pl.DataFrame:
    """One row per cell (layer, query head) of one model at one budget, in that order; without flat."""
    rows = sample.facts.select("layer", "q_head", "doc_id", "dropped_mass").with_columns(
        pl.Series("kappa", sample.kappa),
        pl.Series("closable_mean", sample.closable),
        pl.Series("share", sample.label.astype(np.float64)),
    )
    return (
        rows.group_by("layer", "q_head")
        .agg(
            pl.len().cast(pl.Int64).alias("n_rows"),
            pl.col("doc_id").n_unique().cast(pl.Int64).alias("n_documents"),
            pl.col("dropped_mass").median(),
            pl.col("kappa").median(),
            pl.col("closable_mean").mean(),
            pl.col("share").mean(),
        )
        .sort("layer", "q_head")
        .with_columns(
            pl.lit(sample.family).alias("family"),
            pl.lit(sample.model).alias("model"),
            pl.lit(sample.s, dtype=pl.Int32).alias("s"),
        )
    )


def flat_map(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """Table map from the cells of every model and budget. flat is null for cells that were not run at s = 8.

    Source: P1, the flat-cell map.
    """
    if not parts:
        return as_table(MAP, [])
    found = pl.concat(parts)
    flat = found.filter(pl.col("s") == FLAT_BUDGET).select(
        "model", "layer", "q_head", (pl.col("dropped_mass") > FLAT_ABOVE).alias("flat")
    )
    return MAP.select(
        found.join(flat, on=["model", "layer", "q_head"], how="left").sort("model", "s", "layer", "q_head")
    )
