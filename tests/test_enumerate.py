"""The stage: what it writes against the definitions, what it refuses, and what survives a fault."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from data import BadInput, Store, command_line
from data.schema import ROW_FACTS, SUBSETS
from data.store import read, sha256
from enumerate import work
from enumerate.__main__ import application
from enumerate.documents import documents_in, documents_of, forget_others
from enumerate.rows import captured_rows, own_rows
from enumerate.rules import RULES
from enumerate.user_rule import UserRule, apply, load, parse
from solvers import Instance, candidate_set, certify
from solvers import load as load_row
from tests import oracle
from tests.small_store import small_store, write_document

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = work.Settings((4,), "branch_and_bound")
FIRST_KEYS = "def first_keys(weights, keys, values, query, s):\n    return list(range(s))\n"


def run(store: Store, settings: work.Settings = SETTINGS) -> int:
    return sum(count for _, count in work.run(store, documents_of(store, None), settings, 1))


def command(*arguments: str, data: Path) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "enumerate", *arguments, "--data", str(data)]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = small_store(tmp_path_factory.mktemp("graded"))
    assert run(store) == 32
    return store


def test_every_rule_is_graded_on_every_row(graded: Store) -> None:
    found = read(SUBSETS, graded.subsets("toy", 4, "standard", 0))
    assert found.height == 16 * len(RULES)
    assert set(found["rule"]) == set(RULES)
    assert found["subset"].list.len().unique().to_list() == [4]
    facts = read(ROW_FACTS, graded.facts("toy", 4, 0))
    assert facts.height == 16
    assert facts["row_id"].n_unique() == 16


def test_records_equal_the_definitions(graded: Store) -> None:
    found = read(SUBSETS, graded.subsets("toy", 4, "standard", 1))
    rows = {row.row_id: row for layer in (0, 1) for row in captured_rows(graded, "toy", 1, layer)}
    for record in found.iter_rows(named=True):
        row = rows[record["row_id"]]
        keys = [position - row.first_key for position in record["subset"]]
        exact = oracle.exact(row.instance.weights, row.instance.values)
        assert record["error"] == pytest.approx(math.sqrt(oracle.squared_error(exact, keys)), rel=1e-10)
        assert record["kept_mass"] == pytest.approx(float(sum(exact[0][j] for j in keys)), rel=1e-12)
        assert record["free_error"] <= record["error"] * (1 + 1e-9) or record["rule"] == "frank_wolfe"
    by_rule = {rule: part for (rule,), part in found.partition_by("rule", as_dict=True).items()}
    pool, top = by_rule["optimal_pool"], by_rule["top_mass"]
    for rule in ("top_mass", "balancing"):
        assert (pool["error"] <= by_rule[rule]["error"] * (1 + 1e-12)).all()
    assert (by_rule["balancing"]["error"] <= top["error"] * (1 + 1e-12)).all()
    assert (pool["lower"] <= pool["error"]).all()
    assert (pool["status"] == "optimal").all()
    # ours is a lower bound of the penalty's denominator as estimated by any other rule, so pi-hat >= 1
    least = by_rule["least_free"]["free_error"]
    assert (least <= pool["error"] * (1 + 1e-12)).all()
    for rule in ("geometric", "frank_wolfe", "top_mass", "balancing", "optimal_pool"):
        assert (least <= by_rule[rule]["free_error"] * (1 + 1e-9) + 1e-12).all()


def test_positions_are_true_ones_on_window_layers(graded: Store) -> None:
    found = read(SUBSETS, graded.subsets("toy", 4, "standard", 0))
    windowed = found.filter(pl.col("row_id").str.starts_with("toy:0:1:") & pl.col("row_id").str.ends_with(":33"))
    positions = windowed["subset"].explode()
    assert positions.min() >= 33 - 15
    assert positions.max() <= 33
    row_id = windowed["row_id"][0]
    instance = load_row(row_id, graded.root)
    assert instance.n == 16
    best = certify(instance, 4, candidates=candidate_set(instance, 4))
    stored = windowed.filter((pl.col("row_id") == row_id) & (pl.col("rule") == "optimal_pool"))
    assert (best.subset + 18).tolist() == stored["subset"][0].to_list()


def test_both_searches_agree(graded: Store, tmp_path: Path) -> None:
    other = small_store(tmp_path)
    run(other, work.Settings((4,), "exhaustive"))
    for doc_id in (0, 1):
        pools = [
            read(SUBSETS, store.subsets("toy", 4, "standard", doc_id)).filter(pl.col("rule") == "optimal_pool")
            for store in (graded, other)
        ]
        assert pools[0]["search"].unique().to_list() == ["branch_and_bound"]
        assert pools[1]["search"].unique().to_list() == ["exhaustive"]
        assert pools[0]["row_id"].equals(pools[1]["row_id"])
        assert pools[0]["error"].to_numpy() == pytest.approx(pools[1]["error"].to_numpy(), rel=1e-9)


def test_a_second_run_finds_everything_current_and_a_stale_document_is_redone(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    assert run(store) == 32
    assert run(store) == 0
    write_document(store, doc_id=1, seed=5)
    kept = store.subsets("toy", 4, "standard", 0).stat().st_mtime_ns
    assert run(store) == 16
    assert store.subsets("toy", 4, "standard", 0).stat().st_mtime_ns == kept
    path = store.subsets("toy", 4, "standard", 0)
    path.write_bytes(path.read_bytes()[:-9])  # a damaged output is made again
    assert run(store) == 16
    assert run(store, work.Settings((4, 6), "branch_and_bound")) == 32  # only the new budget


def test_results_do_not_depend_on_the_number_of_workers(graded: Store, tmp_path: Path) -> None:
    store = small_store(tmp_path)
    list(work.run(store, documents_of(store, "toy"), SETTINGS, 2))
    for doc_id in (0, 1):
        frames = [read(SUBSETS, s.subsets("toy", 4, "standard", doc_id)).drop("seconds") for s in (graded, store)]
        assert frames[0].equals(frames[1])


def test_kv_that_is_not_what_was_captured_is_refused(tmp_path: Path) -> None:
    store = small_store(tmp_path, 1)
    before = sha256(store.rows("toy", 0))
    other = small_store(tmp_path / "other", 1)
    write_document(other, seed=9)
    store.kv("toy", 0, 1).write_bytes(other.kv("toy", 0, 1).read_bytes())
    with pytest.raises(BadInput, match="not the file that was captured"):
        run(store)
    store.kv("toy", 0, 1).unlink()
    with pytest.raises(BadInput, match="cannot be read"):
        run(store)
    assert sha256(store.rows("toy", 0)) == before
    assert not store.subsets("toy", 4, "standard", 0).exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("optima", "--s", "17"), "16 of 32 rows have fewer keys of positive weight"),
        (("optima", "--s", "35"), "expected S <= 16"),
        (("optima", "--s", "0"), "expected a whole number of at least 1"),
        (("optima", "--s", "four"), "expected a whole number"),
        (("optima", "--s", "4", "--model", "qwen9"), "no captured rows of qwen9"),
        (("optima", "--s", "4", "--search", "gurobi"), "expected branch_and_bound or exhaustive"),
        (("optima", "--s", "4", "--rows", "absent.npz"), "no such file"),
        (("optima", "--s", "4", "--rule", "absent.py:f"), "there is no file absent.py"),
        (("optima", "--s", "4", "--rule", "nonsense"), "expected FILE.py:FUNCTION"),
        (("optima", "--s", "4", "--workers", "-1"), "expected 0 or more"),
        (("optima",), "Missing option"),
        (("optima", "--s", "4", "--bogus"), "No such option"),
        (("show", "toy:0:0:0:1"), "is not in"),
        (("show", "toy:9:0:0:1"), "captured models: toy"),
        (("show", "toy"), "expected MODEL:doc_id:layer:q_head:position"),
        (("show", "toy:0:0:0:20", "--s", "99"), "s = 99: expected 1 <= s <= 21"),
    ],
)
def test_bad_use_gives_one_line_and_code_two(
    graded: Store,
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["enumerate", *arguments, "--data", str(graded.root)])
    with pytest.raises(SystemExit) as left:
        command_line.run(application, "enumerate")
    assert left.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_show_prints_tokens_weights_and_rules(graded: Store) -> None:
    done = command("show", "toy:0:0:3:33", "--s", "4", data=graded.root)
    assert done.returncode == 0, done.stderr
    heaviest = int(np.argmax(load_row("toy:0:0:3:33", graded.root).weights))
    assert f"' t{heaviest}'" in done.stdout
    for rule in RULES:
        assert rule in done.stdout


def test_show_puts_a_users_rule_beside_ours(graded: Store, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FIRST_KEYS)
    rule = f"{tmp_path / 'mine.py'}:first_keys"
    done = command("show", "toy:0:0:3:33", "--s", "4", "--rule", rule, data=graded.root)
    assert done.returncode == 0, done.stderr
    row = load_row("toy:0:0:3:33", graded.root)
    error, top = row.forced_error([0, 1, 2, 3]), row.forced_error(np.argsort(-row.weights)[:4])
    (line,) = (line.split("│") for line in done.stdout.splitlines() if line.startswith("│ first_keys"))
    assert [cell.strip() for cell in line[2:5]] == ["user", f"{error:.6g}", f"{error / top:.4f}"]
    keys = done.stdout[done.stdout.index("keys that a rule keeps") :].splitlines()
    marked = {int(line.split("│")[1]) for line in keys if line.startswith("│") and "x" in line.split("│")[-2]}
    assert marked == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("absent.py:f", "there is no file absent.py"),
        ("short.py:short", "rule short kept 1 keys of row toy:0:0:3:33: expected s = 4"),
    ],
)
def test_show_refuses_a_rule_that_is_none(graded: Store, tmp_path: Path, rule: str, said: str) -> None:
    (tmp_path / "short.py").write_text("def short(w, k, v, q, s):\n    return [0]\n")
    path = str(tmp_path / rule) if rule.startswith("short") else rule
    done = command("show", "toy:0:0:3:33", "--s", "4", "--rule", path, data=graded.root)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert said in done.stderr


def test_short_rows_can_be_left_out(tmp_path: Path) -> None:
    store = small_store(tmp_path, 1)
    settings = work.Settings((18,), "branch_and_bound", drop_short=True)
    assert work.check_budgets(store, documents_of(store, None), settings) == {18: 8}
    assert run(store, settings) == 8
    assert read(SUBSETS, store.subsets("toy", 18, "standard", 0))["row_id"].n_unique() == 8


def test_a_killed_worker_is_one_clear_line_and_finished_documents_stay(tmp_path: Path) -> None:
    store = small_store(tmp_path, 2)
    rule = tmp_path / "deadly.py"
    rule.write_text("import os, signal\ndef deadly(w, k, v, q, s):\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    run(store)
    before = sha256(store.subsets("toy", 4, "standard", 0))
    done = command("optima", "--s", "4", "--rule", f"{rule}:deadly", data=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("enumerate: a worker process died")
    assert sha256(store.subsets("toy", 4, "standard", 0)) == before


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    store = small_store(tmp_path, 3)
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ndef slow(w, k, v, q, s):\n    time.sleep(0.05)\n    return list(range(s))\n")
    settings = work.Settings((4,), "branch_and_bound", parse(f"{slow}:slow", RULES))
    call = [sys.executable, "-m", "enumerate", "optima", "--s", "4", "--rule", f"{slow}:slow", "--workers", "1"]
    process = subprocess.Popen(
        [*call, "--data", str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
    )
    first = store.subsets("toy", 4, "slow", 0)
    watchdog = threading.Timer(120, lambda: os.killpg(process.pid, signal.SIGKILL))
    watchdog.start()
    while not first.exists() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    watchdog.cancel()
    assert first.exists()
    made = first.stat().st_mtime_ns
    assert run(store, settings) in (16, 32)
    assert first.stat().st_mtime_ns == made
    assert not list(tmp_path.rglob("*.partial")) or all(p.parent != first.parent for p in tmp_path.rglob("*.partial"))


def test_a_users_rule_is_graded_beside_ours(tmp_path: Path) -> None:
    store = small_store(tmp_path, 1)
    (tmp_path / "mine.py").write_text(FIRST_KEYS)
    done = command("optima", "--s", "4", "--rule", f"{tmp_path / 'mine.py'}:first_keys", data=tmp_path)
    assert done.returncode == 0, done.stderr
    found = read(SUBSETS, store.subsets("toy", 4, "first_keys", 0))
    for record in found.iter_rows(named=True):
        row = load_row(record["row_id"], tmp_path)
        assert record["error"] == pytest.approx(row.forced_error([0, 1, 2, 3]), rel=1e-12)
    assert store.subsets("toy", 4, "standard", 0).exists()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [0, 0, 1, 2]", "twice"),
        ("return [0, 1]", "kept 2 keys"),
        ("return [0, 1, 2, 10**6]", "expected them in 0 to"),
        ("return None", "failed on row"),
        ("return 1 / 0", "ZeroDivisionError"),
        ("weights[0] = 1", "read-only"),
    ],
)
def test_a_users_rule_that_misbehaves_is_named_with_its_row(tmp_path: Path, body: str, said: str) -> None:
    store = small_store(tmp_path, 1)
    path = tmp_path / "mine.py"
    path.write_text(f"def mine(weights, keys, values, query, s):\n    {body}\n")
    rule = UserRule(path, "mine")
    row = next(iter(captured_rows(store, "toy", 0, 0)))
    with pytest.raises(BadInput, match=said) as caught:
        apply(rule, load(rule), row, 4)
    assert row.row_id in str(caught.value)


def test_names_of_ours_are_not_free_for_a_users_rule(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def top_mass(*a): pass\ndef facts(*a): pass\n")
    for name in ("top_mass", "facts"):
        with pytest.raises(BadInput, match="is a name of ours"):
            parse(f"{path}:{name}", RULES)


def own(n_rows: int = 3, n: int = 30, d: int = 4) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    weights = random.random((n_rows, n))
    return {"weights": weights / weights.sum(axis=1, keepdims=True), "values": random.standard_normal((n_rows, n, d))}


def test_a_users_rows_from_npz_and_parquet_agree(tmp_path: Path) -> None:
    arrays = own()
    np.savez(tmp_path / "mine.npz", **arrays)
    frame = pl.DataFrame({"weights": arrays["weights"].tolist(), "values": arrays["values"].tolist()})
    frame.write_parquet(tmp_path / "mine.parquet")
    errors = []
    for name in ("mine.npz", "mine.parquet"):
        data = tmp_path / name.replace(".", "_")
        done = command("optima", "--s", "4,8", "--rows", str(tmp_path / name), data=data)
        assert done.returncode == 0, done.stderr
        found = read(SUBSETS, Store(data).subsets("mine", 8, "standard", 0))
        assert set(found["rule"]) == set(RULES) - {"leverage"}  # there are no keys to take leverage of
        errors.append(found.sort("row_id", "rule")["error"].to_list())
        again = command("optima", "--s", "4,8", "--rows", str(tmp_path / name), data=data)
        assert "everything is current" in again.stdout
    assert errors[0] == pytest.approx(errors[1], rel=1e-12)
    top = Instance(arrays["weights"][0], arrays["values"][0])
    assert any(
        top.forced_error(np.argsort(-arrays["weights"][0])[:8]) == pytest.approx(e, rel=1e-12) for e in errors[0]
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": None}, "no array 'weights'"),
        ({"values": np.zeros((2, 30, 4))}, "expected 3 rows"),
        ({"values": np.full((3, 30, 4), np.nan)}, "row 0: values have NaN"),
        ({"weights": np.ones((3, 30))}, "row 0: weights sum to 30"),
        ({"keys": np.zeros((3, 29, 4))}, r"keys have shape \(29, 4\)"),
    ],
)
def test_bad_rows_of_a_user_are_named(tmp_path: Path, change: dict[str, np.ndarray | None], said: str) -> None:
    arrays = {name: array for name, array in (own() | change).items() if array is not None}
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(BadInput, match=said):
        own_rows(tmp_path / "mine.npz")


def test_files_that_are_no_rows_are_refused(tmp_path: Path) -> None:
    for name in ("mine.npz", "mine.parquet"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 not a file")
        with pytest.raises(BadInput, match="not readable"):
            own_rows(tmp_path / name)
    (tmp_path / "mine.csv").write_text("a,b\n")
    with pytest.raises(BadInput, match=r"ends in \.npz or \.parquet"):
        own_rows(tmp_path / "mine.csv")


def test_a_users_file_that_changed_leaves_nothing_of_its_earlier_rows(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    store = Store(tmp_path)
    for arrays in (own(3) | {"doc_id": np.array([0, 1, 2])}, own(2) | {"doc_id": np.array(["b", "a"])}):
        np.savez(path, **arrays)
        documents = documents_in(store, path)
        forget_others(store, documents)
        for s in (4, 8) if len(documents) == 3 else (8,):
            list(work.run(store, documents, work.Settings((s,), "branch_and_bound"), 1))
    left = sorted(p.name for p in (tmp_path / "subsets" / "mine").rglob("standard/*.parquet"))
    assert left == ["doc-000.parquet", "doc-001.parquet"]
    assert not list((tmp_path / "subsets" / "mine" / "s-004").rglob("*.parquet"))


def test_a_users_file_named_like_a_captured_model_is_refused(tmp_path: Path) -> None:
    store = small_store(tmp_path, 1)
    np.savez(tmp_path / "toy.npz", **own())
    with pytest.raises(BadInput, match="toy is the name of a captured model"):
        documents_in(store, tmp_path / "toy.npz")


@pytest.mark.parametrize(("dtype", "off"), [(np.float16, 3e-3), (np.float32, 2e-5)])
def test_weights_of_low_precision_are_renormalised(tmp_path: Path, dtype: type, off: float) -> None:
    arrays = own()
    np.savez(tmp_path / "mine.npz", weights=(arrays["weights"] * (1 + off)).astype(dtype), values=arrays["values"])
    assert own_rows(tmp_path / "mine.npz")[0].instance.weights.sum() == pytest.approx(1, abs=1e-12)
    np.savez(tmp_path / "mine.npz", weights=arrays["weights"] * (1 + off), values=arrays["values"])
    with pytest.raises(BadInput, match="row 0: weights sum to 1"):
        own_rows(tmp_path / "mine.npz")


@pytest.mark.parametrize("doc_id", [np.array([0.5, 1, 2]), np.array([True, False, True])])
def test_documents_are_named_by_whole_numbers_or_names(tmp_path: Path, doc_id: np.ndarray) -> None:
    np.savez(tmp_path / "mine.npz", **own(), doc_id=doc_id)
    with pytest.raises(BadInput, match="expected a whole number or a name"):
        own_rows(tmp_path / "mine.npz")


def test_a_rule_that_needs_keys_is_told_that_there_are_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **own())
    path = tmp_path / "rule.py"
    path.write_text("def by_key(weights, keys, values, query, s):\n    return (keys @ query).argsort()[:s]\n")
    rule = UserRule(path, "by_key")
    with pytest.raises(BadInput, match="this row has no keys or query"):
        apply(rule, load(rule), own_rows(tmp_path / "mine.npz")[0], 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": np.ones((3, 30), complex)}, "'weights' is not an array of real numbers"),
        ({"weights": np.float64(1.0)}, "expected 3 rows|weights is a single number"),
        ({"keys": np.full((3, 30, 4), "k")}, "'keys' is not an array of real numbers"),
        ({"keys": np.ones((3, 30, 0))}, "keys have shape"),
        ({"keys": np.full((3, 30, 4), 1e300)}, "all below 1e\\+150"),
        ({"keys": np.ones((3, 30, 4)), "queries": np.ones((3, 5))}, r"query has shape \(5,\)"),
        ({"doc_id": np.array([0, 1, np.nan])}, "expected a whole number or a name"),
    ],
)
def test_arrays_of_the_wrong_kind_are_named(tmp_path: Path, change: dict[str, np.ndarray], said: str) -> None:
    np.savez(tmp_path / "mine.npz", **(own() | change))
    with pytest.raises(BadInput, match=said):
        own_rows(tmp_path / "mine.npz")


@pytest.mark.parametrize("name", ["...", "-", "x" * 200])
def test_a_file_name_that_makes_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / f"{name}.npz", **own())
    with pytest.raises(BadInput, match="expected a file name"):
        own_rows(tmp_path / f"{name}.npz")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import sys; sys.exit(0)", "SystemExit"),
        ("raise type('Mine', (BaseException,), {})('no')", "Mine: no"),
        ("values.base.setflags(write=True)", "failed on row"),
    ],
)
def test_a_rule_cannot_leave_quietly_or_change_its_row(tmp_path: Path, body: str, said: str) -> None:
    np.savez(tmp_path / "mine.npz", **own())
    path = tmp_path / "rule.py"
    path.write_text(f"def rule(weights, keys, values, query, s):\n    {body}\n    return range(s)\n")
    row = own_rows(tmp_path / "mine.npz")[0]
    with pytest.raises(BadInput, match=said):
        apply(UserRule(path, "rule"), load(UserRule(path, "rule")), row, 4)
