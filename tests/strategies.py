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
)
SCALES = (1e-12, 1e-6, 1.0, 1e6, 1e12)


@st.composite
def rows(draw: st.DrawFn, most_keys: int = 9, most_dimensions: int = 4) -> tuple[Reals, Reals]:
    """Weights (n,) that sum to 1 and values (n, d)."""
    n = draw(st.integers(1, most_keys))
    d = draw(st.integers(1, most_dimensions))
    kind = draw(st.sampled_from(KINDS))
    scale = draw(st.sampled_from(SCALES))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights = np.exp(draw(st.sampled_from((0.0, 1.0, 4.0))) * random.standard_normal(n))
    values = random.standard_normal((n, d)) + draw(st.sampled_from((0.0, 3.0)))
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
    return weights / weights.sum(), values * scale
