"""Rows that break things: ties, equal and collinear values, one heavy key, zeros, huge and tiny scales."""

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

Reals = npt.NDArray[np.float64]

KINDS = (
    "gaussian",
    "integers",
    "equal values",
    "collinear",
    "one heavy key",
    "tied weights",
    "zero weights",
    "outlier",
    "near ties",
)
SPREADS = (0.0, 1.0, 4.0)
OFFSETS = (0.0, 3.0)
SCALES = (1e-12, 1e-6, 1.0, 1e6, 1e12)


def row_of(
    kind: str, n: int, d: int, spread: float, offset: float, scale: float, random: np.random.Generator
) -> tuple[Reals, Reals]:
    """Weights (n,) that sum to 1 and values (n, d) of one of KINDS."""
    weights = np.exp(spread * random.standard_normal(n))
    values = random.standard_normal((n, d)) + offset
    if kind == "integers":
        weights, values = random.integers(1, 4, n).astype(float), random.integers(-2, 3, (n, d)).astype(float)
    elif kind == "equal values":
        values[:] = values[0]
    elif kind == "collinear":
        values = np.outer(random.integers(-3, 4, n), values[0])
    elif kind == "one heavy key":
        weights[random.integers(n)] *= 1e6
    elif kind == "tied weights":
        weights[:] = 1.0
    elif kind == "zero weights":
        weights[random.random(n) < 0.4] = 0.0
        weights[random.integers(n)] = 1.0
    elif kind == "outlier":
        values[random.integers(n)] *= 1e6
    elif kind == "near ties":
        values = values[random.integers(0, min(n, 2), n)] + 1e-12 * random.standard_normal((n, d))
    return weights / weights.sum(), values * scale


@st.composite
def rows(draw: st.DrawFn, most_keys: int = 9, most_dimensions: int = 4) -> tuple[Reals, Reals]:
    """Weights (n,) that sum to 1 and values (n, d)."""
    return row_of(
        kind=draw(st.sampled_from(KINDS)),
        n=draw(st.integers(1, most_keys)),
        d=draw(st.integers(1, most_dimensions)),
        spread=draw(st.sampled_from(SPREADS)),
        offset=draw(st.sampled_from(OFFSETS)),
        scale=draw(st.sampled_from(SCALES)),
        random=np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
    )
