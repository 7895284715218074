"""Published numbers in the shape that the figures draw: never mixed with ours, always under their own model."""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from data import published

PROFILE_MODEL = "Qwen2.5-1.5B"  # the paper's reference profile (P1, Table 8)
_PROFILE_FAMILY = "qwen"


def profile(key: str, budgets: Sequence[int], column: str) -> pl.DataFrame:
    """The published profile of one quantity at our budgets: family, model, s and `column`; empty if there is none."""
    found = {s: published.find(key, s=s, model=PROFILE_MODEL) for s in budgets}
    rows = [
        {"family": _PROFILE_FAMILY, "model": PROFILE_MODEL, "s": s, column: value}
        for s, value in found.items()
        if value is not None
    ]
    return pl.DataFrame(rows, schema={"family": pl.String, "model": pl.String, "s": pl.Int32, column: pl.Float64})


@dataclass(frozen=True)
class Published:
    """A published number, the model it is for, and where it stands and was measured."""

    value: float
    model: str
    where: str
    tokens: str
    text: str
    rows: str


def lookup(key: str, s: int) -> Published | None:
    """The published number nearest to ours: of the reference profile, else pooled over families; None if there is none."""
    return None
