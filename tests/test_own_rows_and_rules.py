"""A user's rows and rules from the file to the page: graded, analysed, drawn and told, with few documents or enough."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from analysis.__main__ import application as analysis
from data.command_line import run
from enumerate import pool
from enumerate.__main__ import application as enumeration
from figures import style
from figures.__main__ import application as figures
from solvers import Instance, top_mass
from tests import synthetic_store

RULES = '''
import numpy as np


def lightest(weights, keys, values, query, s):
    return np.argsort(weights)[:s]


def improved(weights, keys, values, query, s):
    """Top-mass, or that with its lightest key exchanged for the next one, whichever is better."""
    order = np.argsort(-weights)
    exchanged = np.concatenate([order[: s - 1], order[s : s + 1]])

    def error(kept):
        return np.linalg.norm(weights[kept] @ values[kept] / weights[kept].sum() - weights @ values)

    return min((order[:s], exchanged), key=error)
'''


class InThisProcess(ThreadPoolExecutor):
    """Spawned workers have tests of their own; here starting them would take most of the time."""

    def __init__(self, workers: int, **of_processes: object) -> None:
        super().__init__(workers)


def rows(documents: int, each: int = 6, n: int = 24, d: int = 12) -> dict[str, np.ndarray]:
    random = np.random.default_rng(documents)
    weights = np.exp(1.5 * random.standard_normal((documents * each, n)))
    return {
        "weights": weights / weights.sum(axis=1, keepdims=True),
        "values": random.standard_normal((documents * each, n, d)),
        "doc_id": np.repeat(np.arange(documents), each),
    }


def medians(arrays: dict[str, np.ndarray], s: int) -> dict[str, float]:
    """Median error over top-mass's of both rules, from the definition alone."""
    ratios: dict[str, list[float]] = {"lightest": [], "improved": []}
    for weights, values in zip(arrays["weights"], arrays["values"], strict=True):
        row, order = Instance(weights, values), np.argsort(-weights)
        top = row.forced_error(top_mass(row, s))
        ratios["lightest"].append(row.forced_error(order[-s:]) / top)
        ratios["improved"].append(min(top, row.forced_error([*order[: s - 1], order[s]])) / top)
    return {name: float(np.median(found)) for name, found in ratios.items()}


@pytest.mark.parametrize("documents", [3, 12])
def test_own_rows_and_two_rules_reach_every_table_and_figure(
    tmp_path: Path, documents: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = rows(documents)
    np.savez(tmp_path / "mine.npz", **arrays)
    (tmp_path / "rules.py").write_text(RULES)
    monkeypatch.setattr(style, "save", synthetic_store.quick_save)
    monkeypatch.setattr(pool, "ProcessPoolExecutor", InThisProcess)
    place = ("--data", str(tmp_path / "data"))

    def call(application: object, name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as stopped:
            run(application, name)  # type: ignore[arg-type]
        said = capsys.readouterr()
        assert stopped.value.code == 0, said.err
        return said.out

    optima = ("optima", "--rows", str(tmp_path / "mine.npz"), "--workers", "1", *place)
    call(enumeration, "enumerate", *optima, "--s", "4,6", "--rule", f"{tmp_path / 'rules.py'}:lightest")
    call(enumeration, "enumerate", *optima, "--s", "4", "--rule", f"{tmp_path / 'rules.py'}:improved")
    in_short = call(analysis, "analysis", "--resamples", "50", *place)
    assert re.search(r"lightest +mine +6", in_short) and not re.search(r"improved +mine +6", in_short)
    call(figures, "figures", *place, "--out", str(tmp_path / "out"), "report")

    drawn = {
        name: pl.read_csv(tmp_path / "out" / "figures" / f"{name}.csv").filter(pl.col("model") == "mine")
        for name in ("ceiling", "rules")
    }
    for s in (4, 6):
        wanted = medians(arrays, s)
        if s == 6:
            wanted.pop("improved")
        shown = drawn["rules"].filter(pl.col("s") == s, pl.col("rule").is_in(["lightest", "improved"]))
        assert dict(zip(shown["rule"], shown["ratio"], strict=True)) == pytest.approx(wanted, rel=1e-9)
        (record,) = drawn["ceiling"].filter(pl.col("s") == s).to_dicts()
        marks = {name: record[f"ratio:{name}"] for name in ("lightest", "improved")}
        assert {name: mark for name, mark in marks.items() if mark is not None} == pytest.approx(wanted, rel=1e-9)
        assert (record["ratio_low:lightest"] is not None) == (documents >= 10)

    page = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", (tmp_path / "out" / "report.html").read_text()))
    wanted = medians(arrays, 4)
    assert f"Your rule improved leaves {wanted['improved']:.3f} times top-mass" in page
    assert "improved was not graded on mine at s = 6." in page
    assert "what your rule lightest keeps" in page
    assert ("Below 10 documents no interval is given" in page) == (documents < 10)
