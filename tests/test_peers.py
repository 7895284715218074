"""General solvers on the cone model: their subsets are the optima, and what they claim beyond that is checked."""

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import solvers as benchmark
from benchmarks.peers.cone import FORMS, Cone, Question, Reply, answer, cone
from solvers import Instance, exhaustive

PACKAGES = {"scip": "pyscipopt", "gurobi": "gurobipy"}
MINIMISING = ("bisection", "direct", "homogeneous")


def peer(name: str) -> ModuleType:
    pytest.importorskip(PACKAGES[name])
    return importlib.import_module(f"benchmarks.peers.{name}")


def small_row(seed: int, n: int = 9, d: int = 4) -> Instance:
    random = np.random.default_rng(seed)
    weights = np.exp(random.standard_normal(n))
    return Instance(weights / weights.sum(), 50 * random.standard_normal((n, d)) + 20)


def row_with_light_keys(seed: int) -> Instance:
    random = np.random.default_rng(seed)
    weights = np.concatenate([np.exp(random.normal(size=4)), 1e-4 * np.exp(random.normal(size=6))])
    return Instance(weights / weights.sum(), random.normal(size=(10, 3)))


@pytest.mark.parametrize("form", MINIMISING)
@pytest.mark.parametrize("name", PACKAGES)
def test_a_peer_finds_the_optimum(name: str, form: str) -> None:
    module = peer(name)
    for seed, s in ((0, 2), (1, 3)):
        row = small_row(seed, n=7, d=3)
        best = exhaustive(row, s, np.arange(row.n))
        found = module.solve(row, s, None, 30.0, form)
        assert found.status == "optimal"
        assert found.subset.size == s
        assert found.error == row.forced_error(found.subset)
        assert found.error == pytest.approx(best.error, rel=2e-4)  # its tolerance: 1e-4 of bisection, 1e-6 of squares
        assert found.claimed_lower <= best.error * (1 + 1e-3)
        assert found.claimed_lower >= best.error * (1 - 1e-3)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_peer_draws_from_the_candidates_alone(name: str) -> None:
    row = small_row(5, n=12)
    pool = np.array([1, 3, 4, 7, 8, 11])
    found = peer(name).solve(row, 3, pool, 30.0, "direct", tolerance=1e-9)
    assert set(found.subset) <= set(pool)
    assert found.error == pytest.approx(exhaustive(row, 3, pool).error, rel=1e-9)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_peer_refutes_what_does_not_exist_and_finds_what_does(name: str) -> None:
    module = peer(name)
    row = small_row(3)
    best = exhaustive(row, 3, np.arange(row.n))
    refuted = module.solve(row, 3, None, 30.0, "refutation", best.subset)
    assert refuted.status == "infeasible"
    assert refuted.claimed_lower == pytest.approx(best.error, rel=2e-4)
    worse = next(keys for keys in ([0, 1, 2], [3, 4, 5]) if row.forced_error(keys) > 1.01 * best.error)
    found = module.solve(row, 3, None, 30.0, "refutation", worse)
    assert found.status == "feasible"
    assert found.error < row.forced_error(worse)


def test_scip_accepts_subsets_of_little_mass_and_the_indices_tell() -> None:
    # Both sides of |y|^2 <= tau^2 W^2 are below its tolerance where the mass is small: it then says that a subset beats
    # an optimum which enumeration has proved. The error that the answer carries is that of the indices all the same.
    module = peer("scip")
    accepted = 0
    for seed in range(4):
        row = row_with_light_keys(seed)
        best = exhaustive(row, 2, np.arange(row.n))
        found = module.solve(row, 2, None, 20.0, "refutation", best.subset)
        assert found.error >= best.error * (1 - 1e-12)
        if found.status == "feasible":
            accepted += 1
            assert found.claimed_error < best.error
            assert found.wrong == 1
    assert accepted > 0


def test_gurobi_says_when_its_licence_is_too_small() -> None:
    module = peer("gurobi")
    random = np.random.default_rng(0)
    row = Instance(np.full(400, 1 / 400), random.standard_normal((400, 8)))
    found = module.solve(row, 4, None, 5.0, "direct")
    assert found.status == "too_large"
    assert found.claimed_error is None and found.claimed_lower is None
    assert found.error == row.forced_error(found.subset)


def test_scaled_data_keep_errors() -> None:
    for row in (small_row(0, n=6, d=9), small_row(1, n=12, d=3)):  # fewer keys than dimensions, and more
        data = cone(row, 3, None)
        assert data.points.shape[1] <= min(row.n, row.d)
        assert np.linalg.norm(data.points, axis=1).max() == pytest.approx(1)
        for keys in ([0, 1, 2], [1, 3, 5]):
            scaled = np.linalg.norm(data.points[keys].sum(axis=0)) / data.masses[keys].sum()
            assert scaled * data.unit / data.heaviest == pytest.approx(row.forced_error(keys), rel=1e-12)


def test_a_false_claim_is_counted_and_not_believed() -> None:
    row = small_row(4)
    best = exhaustive(row, 3, np.arange(row.n))

    def liar(data: Cone, question: Question) -> Reply:
        return Reply(question.start, 1e-9, 1e-9, "optimal")

    found = answer(liar, row, 3, None, 1.0, "direct", best.subset, None)
    assert found.wrong == 1
    assert found.error == row.forced_error(best.subset)
    assert found.claimed_error < found.error


def test_bisection_ends_where_the_peer_says() -> None:
    row = small_row(6)
    best = exhaustive(row, 3, np.arange(row.n))

    def oracle(data: Cone, question: Question) -> Reply:
        assert question.tau is not None
        if question.tau * data.unit / data.heaviest < best.error:
            return Reply(None, None, None, "infeasible")
        return Reply(np.isin(data.keys, best.subset).astype(float), None, None, "optimal")

    found = answer(oracle, row, 3, None, 1.0, "bisection", None, None)
    assert found.status == "optimal"
    assert found.wrong == 0
    assert found.subset.tolist() == best.subset.tolist()
    assert best.error * (1 - 2e-4) <= found.claimed_lower <= best.error <= found.claimed_error * (1 + 1e-12)


def test_bad_use_is_told() -> None:
    row = small_row(0)
    with pytest.raises(ValueError, match=f"form 'other': expected one of {FORMS[0]}"):
        answer(None, row, 3, None, 1.0, "other", None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start: expected 3 of the candidates"):
        answer(None, row, 3, [0, 1, 2, 3], 1.0, "direct", [3, 4, 5], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 candidates of positive weight"):
        cone(row, 3, [0, 1])


def test_the_benchmark_goes_on_without_a_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError("none", name="pyscipopt")

    monkeypatch.setattr(benchmark.importlib, "import_module", missing)
    assert benchmark._module("scip") is None
    assert "pyscipopt is not installed, left out" in capsys.readouterr().out


def test_the_benchmark_refuses_an_unknown_peer(tmp_path: Path) -> None:
    result = CliRunner().invoke(benchmark.application, ["--peers", "scip:other", "--data", str(tmp_path)])
    assert result.exit_code
    assert "expected cp_sat, or scip or gurobi" in str(result.exception)
