"""The definitions against exact fractions, and the laws that they obey."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import Instance, attention_weights, candidate_set, extra_keys, free_error, top_mass
from tests import oracle, strategies

FREE_ROUNDING = 1e-7  # of D: what a Gram matrix loses where values coincide to 1e-7 of an outlier's distance
EXAMPLE = Instance(np.array([0.45, 0.45, 0.10]), np.array([[-1.0], [1.0], [5.0]]))


def root(square: object) -> float:
    return math.sqrt(float(square))  # type: ignore[arg-type]


def test_published_example_two() -> None:
    # P1, example 2.2: ES(2) = 9/22 at keys 0 and 2, kappa = 11/9, EF = 0
    assert EXAMPLE.mean == pytest.approx([0.5])
    assert EXAMPLE.forced_error([0, 1]) == pytest.approx(1 / 2, rel=1e-14)
    assert EXAMPLE.forced_error([0, 2]) == pytest.approx(9 / 22, rel=1e-14)
    assert EXAMPLE.forced_error([1, 2]) == pytest.approx(27 / 22, rel=1e-14)
    assert top_mass(EXAMPLE, 2).tolist() == [0, 1]
    assert free_error(EXAMPLE, [0, 1]) <= EXAMPLE.rounding


def test_published_example_of_non_monotone_errors() -> None:
    # P1, example A.2: adding a key can raise, keep or lower the error
    row = Instance(np.full(4, 0.25), np.arange(4.0)[:, None])
    expected = {(2,): 1 / 2, (0, 2): 1 / 2, (1, 2): 0, (0, 1, 2): 1 / 2, (1,): 1 / 2, (0, 1): 1, (1, 3): 1 / 2}
    for keys, error in {**expected, (0, 1, 3): 1 / 6}.items():
        assert row.forced_error(keys) == pytest.approx(error, abs=1e-15)


def test_published_sizes_of_the_candidate_set() -> None:
    assert [extra_keys(s) for s in (4, 8, 16, 32)] == [24, 12, 6, 4]
    assert extra_keys(1) == 24
    assert all(math.comb(s + extra_keys(s), s) <= 200_000 for s in range(1, 200))


@given(strategies.rows(), st.data())
def test_errors_equal_exact_fractions(row: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    weights, values = row
    instance = Instance(weights, values)
    positive = np.flatnonzero(weights)
    keys = data.draw(st.lists(st.sampled_from(positive.tolist()), min_size=1, unique=True))
    exact = oracle.exact(instance.weights, instance.values)
    error = instance.forced_error(keys)
    assert abs(error - root(oracle.squared_error(exact, keys))) <= 2 * instance.rounding
    mass = sum(exact[0][j] for j in keys)
    assert instance.kept_mass(keys) == pytest.approx(float(mass), rel=1e-12)
    assert instance.dropped_mass(keys) == pytest.approx(float(1 - mass), rel=1e-12, abs=1e-15)


@given(strategies.rows(), st.data())
def test_laws(row: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    instance = Instance(*row)
    slack = 4 * instance.rounding
    n = instance.n
    assert np.linalg.norm(instance.residuals.sum(axis=0)) <= slack
    assert instance.forced_error(np.arange(n)) <= slack
    keys = data.draw(st.lists(st.sampled_from(np.flatnonzero(row[0]).tolist()), min_size=1, unique=True))
    kept, dropped = instance.kept_mass(keys), instance.dropped_mass(keys)
    error = instance.forced_error(keys)
    assert error * kept == pytest.approx(instance.residual_norm(keys), rel=1e-9, abs=slack)
    others = np.setdiff1d(np.flatnonzero(row[0]), keys)
    if others.size:  # Lemma 2.1: g_A = -g_{A^c}
        assert instance.residual_norm(others) == pytest.approx(instance.residual_norm(keys), rel=1e-9, abs=slack)
    assert error <= instance.spread * math.sqrt(dropped / kept) * (1 + 1e-9) + slack
    assert free_error(instance, keys) <= error * (1 + 1e-9) + FREE_ROUNDING * instance.radius + slack
    s = data.draw(st.integers(1, instance.n_positive))
    top = top_mass(instance, s)
    assert instance.forced_error(top) <= 2 * instance.radius * instance.dropped_mass(top) * (1 + 1e-9) + slack


@given(strategies.rows(most_keys=12), st.data())
def test_top_mass_and_candidates_follow_their_tie_rules(
    row: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    instance = Instance(*row)
    s = data.draw(st.integers(1, instance.n_positive))
    extra = data.draw(st.integers(0, 6))
    by_weight = sorted(range(instance.n), key=lambda j: (-instance.weights[j], j))
    assert top_mass(instance, s).tolist() == sorted(by_weight[:s])
    others = [j for j in range(instance.n) if j not in by_weight[:s] and instance.weights[j] > 0]
    others.sort(key=lambda j: (-instance.single_key_errors[j], j))
    assert candidate_set(instance, s, extra).tolist() == sorted(by_weight[:s] + others[:extra])


@given(strategies.rows(), st.integers(0, 2**32 - 1))
def test_free_error_of_small_supports_equals_every_face_tried(row: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    instance = Instance(*row)
    positive = np.flatnonzero(row[0])
    keys = np.random.default_rng(seed).permutation(positive)[:3]
    exact = oracle.exact(instance.weights, instance.values)
    mu = oracle.mean(exact, range(instance.n))
    points = [[x - m for x, m in zip(exact[1][j], mu, strict=True)] for j in keys]
    expected = root(oracle.squared_distance_to_segment_hull(points))
    found = free_error(instance, keys)
    assert found >= expected - 2 * instance.rounding
    assert found <= expected * (1 + 1e-6) + FREE_ROUNDING * instance.radius + 2 * instance.rounding


def test_attention_weights_with_and_without_a_soft_cap() -> None:
    random = np.random.default_rng(3)
    query, keys = random.standard_normal(8).astype(np.float32), random.standard_normal((5, 8)).astype(np.float32)
    logits = [0.25 * sum(float(a) * float(b) for a, b in zip(query, key, strict=True)) for key in keys]
    for softcap in (None, 1.5):
        capped = logits if softcap is None else [softcap * math.tanh(x / softcap) for x in logits]
        expected = [math.exp(x) for x in capped]
        expected = [x / sum(expected) for x in expected]
        assert attention_weights(query, keys, 0.25, softcap) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("weights", "values", "said"),
    [
        ([0.5, 0.5], [[1.0]], "shape"),
        ([[0.5, 0.5]], [[1.0], [2.0]], "shape"),
        ([], np.zeros((0, 2)), "shape"),
        ([0.5, 0.5], np.zeros((2, 0)), "shape"),
        ([0.5, np.nan], [[1.0], [2.0]], "weights have NaN"),
        ([0.5, 0.5], [[1.0], [np.inf]], "values have NaN"),
        ([1.5, -0.5], [[1.0], [2.0]], "negative"),
        ([0.5, 0.4], [[1.0], [2.0]], "sum to 0.9"),
        ([0.0, 0.0], [[1.0], [2.0]], "sum to 0"),
        ([0.5, 0.5], [[1.0], [1e200]], "exceed"),
    ],
)
def test_bad_rows_are_refused_by_name(weights: list[float], values: list[list[float]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Instance(np.array(weights), np.array(values))


@pytest.mark.parametrize(
    ("keys", "said"), [([], "shape"), ([0, 0], "twice"), ([3], "0 to 2"), ([-1], "0 to 2"), ([0.5], "integers")]
)
def test_bad_subsets_are_refused_by_name(keys: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EXAMPLE.forced_error(keys)


@pytest.mark.parametrize("s", [0, -1, 4])
def test_bad_budgets_are_refused(s: int) -> None:
    with pytest.raises(ValueError, match=f"s = {s}"):
        top_mass(EXAMPLE, s)


def test_keys_of_weight_zero_are_not_chosen() -> None:
    row = Instance(np.array([0.5, 0.0, 0.5]), np.array([[1.0], [0.0], [-1.0]]))
    assert top_mass(row, 2).tolist() == [0, 2]
    assert 1 not in candidate_set(row, 1)
    with pytest.raises(ValueError, match="only 2 keys have positive weight"):
        top_mass(row, 3)


def test_weights_are_renormalised_and_arrays_protected() -> None:
    row = Instance(np.array([0.5, 0.5 + 5e-7]), np.array([[1.0], [2.0]]))
    assert row.weights.sum() == pytest.approx(1, abs=1e-15)
    with pytest.raises(ValueError, match="read-only"):
        row.weights[0] = 1.0
