"""Published numbers in the shape that the figures and the page show: never mixed with ours."""

from collections.abc import Sequence

import polars as pl

from data import published
from data.published import Published

PROFILE_MODEL = "Qwen2.5-1.5B"  # the paper's reference profile (P1, Table 8)
_PROFILE_FAMILY = "qwen"
_SAME_FAMILY = {  # the model of each family that the paper measured
    "qwen": "Qwen2.5-1.5B",
    "qwen3": "Qwen3-1.7B",
    "llama": "Llama-3.2-1B",
    "olmo": "OLMo-2-1B",
    "gemma": "gemma-3-1b-pt",
}


def profile(key: str, budgets: Sequence[int], column: str) -> pl.DataFrame:
    """The published profile of one quantity at our budgets: family, model, s and `column`; empty if there is none."""
    found = {s: published.find(key, s=s, model=PROFILE_MODEL) for s in budgets}
    rows = [
        {"family": _PROFILE_FAMILY, "model": PROFILE_MODEL, "s": s, column: number.value}
        for s, number in found.items()
        if number is not None
    ]
    return pl.DataFrame(rows, schema={"family": pl.String, "model": pl.String, "s": pl.Int32, column: pl.Float64})


def nearest(key: str, s: int, family: str) -> Published | None:
    """The published number to hold ours against: at this budget, else of no budget; None if there is none.

    Of the family's own model if there is one, else pooled, else of the reference profile, else the first.
    """
    for budget in (s, None):
        for model in (_SAME_FAMILY.get(family, "pooled"), "pooled", PROFILE_MODEL, None):
            number = published.find(key, budget, model)
            if number is not None:
                return number
    return None
