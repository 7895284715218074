"""The search over whole rows as a stage: which pairs it takes, what it keeps and writes, what it prints and proves."""

import hashlib
import itertools
import json
import math
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import polars as pl
import pytest

from data import BadInput, Store, command_line, published
from data.schema import MANIFEST, PROOF, ROW_FACTS, SUBSETS
from data.store import Provenance, footer, read, write
from enumerate import certify, manifest, pool, work
from enumerate.__main__ import application
from enumerate.documents import documents_in, documents_of
from enumerate.rows import captured_rows
from enumerate.user_rule import parse
from solvers.proof import load, save
from tests import oracle
from tests.small_store import small_store, write_document

FLOORS = (0.9, 0.5, 0.1)
LOOSE = certify.Settings(FLOORS, 100_000, 100.0)
BUDGETS = (4, 6)
ROUNDING = 1e-12


def grade(store: Store, budgets: tuple[int, ...] = BUDGETS) -> None:
    list(work.run(store, documents_of(store, None), work.Settings(budgets, "branch_and_bound"), 1))


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker processes, which take seconds to start."""
    for module in (certify, work):
        monkeypatch.setattr(module, "spread", one_by_one)


def one_by_one(pieces, call, workers):  # type: ignore[no-untyped-def]
    for key, parts in pieces.items():
        yield key, [call(part) for part in parts]


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = small_store(tmp_path_factory.mktemp("graded"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "spread", one_by_one)
        grade(store)
    return store


@pytest.fixture
def store(graded: Store, tmp_path: Path) -> Store:
    shutil.copytree(graded.root, tmp_path, dirs_exist_ok=True)
    return Store(tmp_path)


def pairs_of(store: Store, budgets: tuple[int, ...] = BUDGETS) -> pl.DataFrame:
    return manifest.candidates(store, documents_of(store, None), budgets)


def run(store: Store, pairs: pl.DataFrame, settings: certify.Settings = LOOSE) -> int:
    return sum(count for _, count in certify.run(store, documents_of(store, None), pairs, settings, 1))


def certified(store: Store, doc_id: int = 0, s: int = 4) -> pl.DataFrame:
    return read(SUBSETS, store.subsets("toy", s, "certified", doc_id))


def command(monkeypatch: pytest.MonkeyPatch, root: Path, *arguments: str) -> int:
    call = ["enumerate", "certify", *arguments, "--data", str(root), "--workers", "1"]
    monkeypatch.setattr("sys.argv", call)
    with pytest.raises(SystemExit) as left:
        command_line.run(application, "enumerate")
    return int(str(left.value.code))


# ---- the manifest ----


def made_up(rows: dict[tuple[str, int, int], int]) -> pl.DataFrame:
    """So many candidates of a family, budget and decile."""
    entries = [
        {
            "row_id": f"{family}:0:0:{decile}:{i}",
            "family": family,
            "model": family,
            "doc_id": 0,
            "s": s,
            "decile": decile,
        }
        for (family, s, decile), count in rows.items()
        for i in range(count)
    ]
    schema = {name: column.dtype for name, column in MANIFEST.columns.items()}
    return pl.DataFrame([entry | {"dropped_mass": 0.5} for entry in entries], schema=schema)


def everywhere(count: int, families: str = "abcde", budgets: tuple[int, ...] = (4, 8, 16, 32)) -> pl.DataFrame:
    return made_up({key: count for key in itertools.product(families, budgets, range(10))})


@pytest.mark.parametrize(("size", "families"), [(200, "abcde"), (960, "abcde"), (960, "abc"), (200, "abc"), (37, "ab")])
def test_a_draw_is_even_at_every_level(size: int, families: str) -> None:
    drawn = manifest.draw(everywhere(40, families), size, 0)
    assert drawn.height == size
    assert not drawn.select("row_id", "s").is_duplicated().any()

    def spread(counts: list[int], places: int) -> int:
        return max(counts) - (min(counts) if len(counts) == places else 0)

    assert spread(list(Counter(drawn["family"]).values()), len(families)) <= 1
    for _, part in drawn.group_by("family"):
        assert spread(list(Counter(part["s"]).values()), 4) <= 1
        for _, cell in part.group_by("s"):
            assert spread(list(Counter(cell["decile"]).values()), 10) <= 1


def test_where_a_decile_runs_out_the_others_take_its_share() -> None:
    held = {key: 40 for key in itertools.product("ab", (4, 8), range(10))}
    held["a", 4, 0] = 1
    held |= {("b", 8, decile): 2 for decile in range(10)}
    drawn = manifest.draw(made_up(held), 200, 3)
    assert drawn.height == 200
    found = Counter(drawn.select("family", "s", "decile").iter_rows())
    assert Counter(drawn["family"]) == {"a": 100, "b": 100}
    assert found["a", 4, 0] == 1
    assert sum(found["a", 4, decile] for decile in range(10)) == 50
    assert [found["b", 8, decile] for decile in range(10)] == [2] * 10
    assert sum(found["b", 4, decile] for decile in range(10)) == 80
    assert manifest.draw(made_up({("a", 4, 0): 3}), 200, 0).height == 3


def test_a_draw_depends_on_the_rows_and_the_seed_alone_and_grows() -> None:
    found = everywhere(20)
    shuffled = found.sample(fraction=1.0, shuffle=True, seed=1)

    def drawn(frame: pl.DataFrame, size: int, seed: int) -> set[tuple[str, int]]:
        return set(manifest.draw(frame, size, seed).select("row_id", "s").iter_rows())

    small = drawn(found, 200, 0)
    assert small == drawn(shuffled, 200, 0)
    assert small != drawn(found, 200, 1)
    assert small < drawn(found, 960, 0)


def test_deciles_rank_the_dropped_mass_within_a_model_and_budget(store: Store) -> None:
    write_document(store, model="other", seed=7)
    grade(store)
    found = pairs_of(store)
    assert found.height == 48 * len(BUDGETS)
    for model, documents in (("toy", (0, 1)), ("other", (0,))):
        for s in BUDGETS:
            facts = pl.concat([read(ROW_FACTS, store.facts(model, s, doc_id)) for doc_id in documents])
            ranked = sorted(zip(facts["dropped_mass"], facts["row_id"], strict=True))
            expected = {row_id: rank * 10 // len(ranked) for rank, (_, row_id) in enumerate(ranked)}
            here = found.filter((pl.col("model") == model) & (pl.col("s") == s))
            assert dict(zip(here["row_id"], here["decile"], strict=True)) == expected


def test_the_manifest_is_written_with_the_hash_that_is_told(store: Store) -> None:
    documents = documents_of(store, None)
    drawn, digest = manifest.make(store, documents, BUDGETS, "all", "", 0)
    assert drawn.equals(read(MANIFEST, store.manifest("all")))
    text = json.dumps([f"{row_id} {s}" for row_id, s in zip(drawn["row_id"], drawn["s"], strict=True)])
    assert digest == hashlib.sha256(text.encode()).hexdigest()
    assert drawn.height == 32 * len(BUDGETS)
    made = store.manifest("all").stat().st_mtime_ns
    assert manifest.make(store, documents, BUDGETS, "all", "", 0)[1] == digest
    assert store.manifest("all").stat().st_mtime_ns == made


def test_rows_that_were_not_graded_are_named(store: Store) -> None:
    with pytest.raises(BadInput, match=r"toy has not been graded at s = 5 .*run make enumerate S=5 first"):
        pairs_of(store, (4, 5))
    write_document(store, doc_id=1, seed=5)  # captured anew
    with pytest.raises(BadInput, match="is of other rows"):
        pairs_of(store)


# ---- what is written ----


def test_laws_of_the_written_rows(store: Store) -> None:
    assert run(store, pairs_of(store)) == 32 * len(BUDGETS)
    rows = {row.row_id: row for layer in (0, 1) for row in captured_rows(store, "toy", 0, layer)}
    for s in BUDGETS:
        found = certified(store, s=s)
        pool = read(SUBSETS, store.subsets("toy", s, "standard", 0)).filter(pl.col("rule") == "optimal_pool")
        pool_errors = dict(zip(pool["row_id"], pool["error"], strict=True))
        assert set(found["row_id"]) == set(rows)
        for row_id, records in found.group_by("row_id"):
            row = rows[str(row_id[0])]
            assert records["mass_floor"].to_list() == [*FLOORS, 0.0]
            assert records["rule"].to_list() == ["optimal_floor"] * len(FLOORS) + ["optimal_full"]
            assert set(records["status"]) == {"optimal"} and set(records["stopped_by"]) == {"finished"}
            top = float(np.sort(row.instance.weights)[-s:].sum())
            for record in records.iter_rows(named=True):
                keys = [position - row.first_key for position in record["subset"]]
                assert len(set(keys)) == s and min(keys) >= 0 and max(keys) < row.instance.n
                exact = oracle.exact(row.instance.weights, row.instance.values)
                assert record["error"] == pytest.approx(math.sqrt(oracle.squared_error(exact, keys)), rel=1e-9)
                assert record["lower"] <= record["error"]
                assert record["kept_mass"] >= record["mass_floor"] * top * (1 - 2e-12)
            errors = records["error"].to_list()
            assert all(later <= earlier * (1 + ROUNDING) for earlier, later in itertools.pairwise(errors))
            assert errors[-1] <= pool_errors[row.row_id] * (1 + ROUNDING)
            for spent in (records["seconds"].to_list(), records["nodes"].to_list()):  # from the highest floor on
                assert spent == sorted(spent) and spent[0] > 0


def test_optima_are_those_of_brute_force(store: Store) -> None:
    pairs = pairs_of(store, (4,)).filter(pl.col("row_id").str.starts_with("toy:0:1:"))  # the window: 16 keys
    run(store, pairs)
    rows = {row.row_id: row.instance for row in captured_rows(store, "toy", 0, 1)}
    found = certified(store)
    for row_id in sorted(rows)[:1]:
        row = oracle.exact(rows[row_id].weights, rows[row_id].values)
        top = sum(sorted(row[0])[-4:])
        errors = {keys: oracle.squared_error(row, keys) for keys in itertools.combinations(range(16), 4)}
        for record in found.filter(pl.col("row_id") == row_id).iter_rows(named=True):
            heavy = [e for keys, e in errors.items() if sum(row[0][j] for j in keys) >= record["mass_floor"] * top]
            least = math.sqrt(min(heavy))
            assert record["error"] == pytest.approx(least, rel=2e-9)
            assert record["lower"] <= least


def test_limits_are_marked_and_bounds_hold(store: Store) -> None:
    pairs = pairs_of(store, (6,))
    run(store, pairs)
    proved = certified(store, s=6)
    shutil.rmtree(store.root / "subsets" / "toy" / "s-006" / "certified")
    run(store, pairs, replace(LOOSE, node_limit=20))
    few = certified(store, s=6)
    open_ = few.filter(pl.col("status") == "bracketed")
    assert open_.height > 0 and set(open_["stopped_by"]) == {"node_limit"}
    assert set(few.filter(pl.col("status") == "optimal")["stopped_by"]) == {"finished"}
    both = few.join(proved, on=["row_id", "mass_floor"], suffix="_least")
    assert both.height == few.height
    assert (both["lower"] <= both["error_least"] * (1 + ROUNDING)).all()
    assert (both["error"] >= both["error_least"] * (1 - 2e-9)).all()
    run(
        store, pairs, replace(LOOSE, node_limit=20, time_limit=1e-7)
    )  # nothing that the nodes stopped is repeated for it
    assert certified(store, s=6).equals(few)
    shutil.rmtree(store.root / "subsets" / "toy" / "s-006" / "certified")
    run(store, pairs, replace(LOOSE, time_limit=1e-7))
    clocked = certified(store, s=6)
    assert set(clocked.filter(pl.col("status") == "bracketed")["stopped_by"]) == {"time_limit"}


def test_a_refuted_label_raises_the_bound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(iter(captured_rows(store, "toy", 0, 0))).instance
    top = row.forced_error(row.order[:4])
    open_floor = certify.Floor(0.0, np.sort(row.order[:4]), top, 0.0, False)
    for answer, expected in ((False, 0.9 * top * (1 - 1e-9)), (None, None), (True, None)):
        monkeypatch.setattr(certify, "decide", lambda *_, answer=answer, **__: answer)
        assert certify.refuted_label(row, 4, open_floor, 10, 1.0) == expected
    monkeypatch.setattr(certify, "decide", lambda *_, **__: pytest.fail("the label was known"))
    assert certify.refuted_label(row, 4, replace(open_floor, error=0.9 * top), 10, 1.0) is None
    assert certify.refuted_label(row, 4, replace(open_floor, lower=0.9 * top), 10, 1.0) is None


# ---- what a run keeps ----


def test_a_second_run_is_current_and_other_manifests_pairs_stay(store: Store) -> None:
    pairs = pairs_of(store)
    some = pairs.filter(pl.col("row_id").str.contains(":33$"))
    assert run(store, some) == 32
    first = certified(store)
    assert run(store, some) == 0
    assert run(store, pairs) == 32  # the others alone
    whole = certified(store)
    assert whole.filter(pl.col("row_id").is_in(first["row_id"].to_list())).equals(first)  # seconds, too
    made = store.subsets("toy", 4, "certified", 0).stat().st_mtime_ns
    assert run(store, some, replace(LOOSE, node_limit=5)) == 0  # searched under larger limits before
    assert store.subsets("toy", 4, "certified", 0).stat().st_mtime_ns == made
    assert run(store, some, replace(LOOSE, node_limit=10**6)) == 0  # no limit stopped them
    assert run(store, some, replace(LOOSE, floors=(0.5,))) == 32
    assert certified(store)["mass_floor"].unique().sort().to_list() == [0.0, 0.5]
    assert set(certified(store)["row_id"]) == {r for r in some["row_id"] if r.startswith("toy:0:")}


def test_pairs_that_a_smaller_limit_stopped_are_searched_again(store: Store) -> None:
    pairs = pairs_of(store, (6,))
    run(store, pairs, replace(LOOSE, node_limit=20))
    stopped = {
        row_id
        for doc_id in (0, 1)
        for row_id in certified(store, doc_id, 6).filter(pl.col("status") == "bracketed")["row_id"]
    }
    assert 0 < len(stopped) < 32
    assert run(store, pairs) == len(stopped)
    assert set(certified(store, s=6)["status"]) == {"optimal"}
    limits = footer(SUBSETS, store.subsets("toy", 6, "certified", 0))["notes"]["limits"]  # type: ignore[index]
    assert {row_id: nodes for row_id, (nodes, _) in limits.items()} == {
        row_id: LOOSE.node_limit if row_id in stopped else 20 for row_id in certified(store, s=6)["row_id"]
    }


def test_worker_processes_give_the_same(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = pairs_of(store, (4,))
    run(store, pairs)
    found = [certified(store, doc_id).drop("seconds") for doc_id in (0, 1)]
    shutil.rmtree(store.root / "subsets" / "toy" / "s-004" / "certified")
    monkeypatch.setattr(certify, "spread", pool.spread)
    assert sum(count for _, count in certify.run(store, documents_of(store, None), pairs, LOOSE, 2)) == 32
    assert all(certified(store, doc_id).drop("seconds").equals(found[doc_id]) for doc_id in (0, 1))


def test_stale_and_damaged_files_are_made_again_and_finished_documents_stay(store: Store) -> None:
    pairs = pairs_of(store, (4,))
    one = certify.run(store, documents_of(store, None), pairs, LOOSE, 1)
    document, count = next(one)
    one.close()
    assert count == 16
    done = store.subsets("toy", 4, "certified", document.doc_id)
    made = done.stat().st_mtime_ns
    assert run(store, pairs) == 16
    assert done.stat().st_mtime_ns == made
    done.write_bytes(done.read_bytes()[:-9])
    other = store.subsets("toy", 4, "certified", 1 - document.doc_id)
    entry = footer(SUBSETS, other)
    earlier = Provenance("certify", entry["parameters"], 0, entry["inputs"], "earlier code", entry["notes"])  # type: ignore[arg-type]
    write(SUBSETS, read(SUBSETS, other), other, earlier)
    assert run(store, pairs) == 32


def test_a_users_own_rows_are_certified(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    weights = draw.random((3, 30))
    arrays = {"weights": weights / weights.sum(axis=1, keepdims=True), "values": draw.standard_normal((3, 30, 4))}
    np.savez(tmp_path / "mine.npz", **arrays)
    store = Store(tmp_path)
    documents = documents_in(store, tmp_path / "mine.npz")
    list(work.run(store, documents, work.Settings((4,), "branch_and_bound"), 1))
    pairs, _ = manifest.make(store, documents, (4,), "small", "mine", 0)
    assert set(pairs["family"]) == {"own"} and pairs.height == 3
    list(certify.run(store, documents, pairs, LOOSE, 1))
    found = read(SUBSETS, store.subsets("mine", 4, "certified", 0)).filter(pl.col("rule") == "optimal_full")
    row = oracle.exact(arrays["weights"][0], arrays["values"][0])
    kept = found.filter(pl.col("row_id") == "mine:0:0:0:0")["subset"][0].to_list()
    heaviest = sorted(range(30), key=lambda j: row[0][j])[-4:]
    assert oracle.squared_error(row, kept) <= oracle.squared_error(row, heaviest)


def test_our_rules_names_are_not_free(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def certified(*a): pass\n")
    with pytest.raises(BadInput, match="is a name of ours"):
        parse(f"{tmp_path / 'mine.py'}:certified", ())


# ---- what is printed ----


def test_what_is_printed_is_what_the_files_say(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ("--s", "4,6", "--manifest", "small", "--node-limit", "20", "--time-limit", "100", "--floors", "0.9 0.5 0.1")
    assert command(monkeypatch, store.root, *call) == 0
    out = capsys.readouterr().out
    digest = manifest.make(store, documents_of(store, None), BUDGETS, "small", "", 0)[1]
    assert f"sha256 {digest[:12]}" in out
    assert "64 pairs searched, 0 were current" in out
    lines = [line.strip("│|").split("│") for line in out.splitlines() if "│" in line]
    printed: dict[str, list[list[str]]] = {}
    for line in lines:
        name, *cells = (cell.strip() for cell in line)
        last = name or last  # noqa: F821  (a cell of several lines)
        printed.setdefault(last, []).append(cells)

    parts: dict[int, list[dict[str, float]]] = {4: [], 6: []}
    smallest: dict[int, list[str]] = {4: [], 6: []}
    for s, doc_id in itertools.product(parts, (0, 1)):
        standard = read(SUBSETS, store.subsets("toy", s, "standard", doc_id))
        for row_id, records in certified(store, doc_id, s).group_by("row_id"):
            mine = standard.filter(pl.col("row_id") == row_id[0])
            errors = dict(zip(mine["rule"], mine["error"], strict=True))
            full = records.row(-1, named=True)
            parts[s].append(full | {"top": errors["top_mass"], "pool": errors["optimal_pool"]})
            proved = records.filter(pl.col("status") == "optimal")["mass_floor"].to_list()
            smallest[s].append(f"{min(proved):g}" if proved else "none")
    columns = [(parts[4], smallest[4]), (parts[6], smallest[6]), (parts[4] + parts[6], smallest[4] + smallest[6])]
    for place, (part, floors) in enumerate(columns):
        gains = [1 - x["error"] / x["pool"] for x in part if x["error"] < 0.99 * x["pool"]]
        yes = sum(x["error"] <= 0.9 * x["top"] for x in part)
        no = sum(x["error"] > 0.9 * x["top"] and x["lower"] >= 0.9 * x["top"] * (1 - 1e-9) for x in part)
        open_ = [x["lower"] / x["error"] for x in part if x["status"] != "optimal"]
        proved = len(part) - len(open_)

        def cell(name: str, place: int = place) -> str:
            return printed[name][0][place]

        assert cell("pairs") == str(len(part)) == str(64 if place == 2 else 32)
        assert cell("improved beyond the pool by > 1%") == f"{len(gains)} ({len(gains) / len(part):.1%})"
        assert cell("proved optimal") == f"{proved} ({proved / len(part):.1%})"
        assert cell("label yes / no / undecided") == f"{yes} / {no} / {len(part) - yes - no}"
        found = [line[place] for line in printed["smallest proved floor: pairs"]]
        assert {x for x in found if x} == {f"{rho}: {count}" for rho, count in Counter(floors).items()}
        assert cell("unproved: median lower / error") == f"{median(open_):.3f}"
        assert cell("improved: median improvement") == (f"{median(gains):.1%}" if gains else "-")
        assert cell("improved: largest") == (f"{max(gains):.1%}" if gains else "-")
        assert cell("seconds: median") == f"{median(x['seconds'] for x in part):.3f}"
        assert cell("seconds: largest") == f"{max(x['seconds'] for x in part):.2f}"
        assert cell("touched by the clock") == "0"
    there = published.find("solver_improved_share")
    assert there is not None and printed["improved beyond the pool by > 1%"][0][3] == f"{there.value:.1%}"
    assert command(monkeypatch, store.root, *call) == 0
    assert "0 pairs searched, 64 were current" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--s", "4", "--manifest", "huge"), "MANIFEST=huge: expected small, paper, all"),
        (("--s", "4", "--floors", "0"), "FLOORS=0: expected numbers above 0 and up to 1"),
        (("--s", "4", "--floors", "0.5,1.2"), "expected numbers above 0"),
        (("--s", "4", "--floors", "half"), "expected numbers above 0"),
        (("--s", "4", "--floors", "nan"), "expected numbers above 0"),
        (("--s", "4", "--node-limit", "-1"), "NODE_LIMIT=-1: expected 1 to"),
        (("--s", "4", "--time-limit", "-1"), "TIME_LIMIT=-1.0: expected seconds"),
        (("--s", "4", "--time-limit", "nan"), "TIME_LIMIT=nan: expected seconds"),
        (("--s", "4", "--replay-all"), "--replay-all without --proof"),
        (("--s", "4", "--model", "qwen9"), "no captured rows of qwen9"),
        (("--s", "4", "--model", "toy", "--rows", "a.npz"), "ROWS and MODEL together"),
        (("--s", "5"), "run make enumerate S=5 first"),
        (("--s", "0"), "expected a whole number of at least 1"),
        (("--bogus",), "No such option"),
    ],
)
def test_bad_use_gives_one_line_and_code_two(
    graded: Store,
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, graded.root, *arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0]
    assert not (graded.root / "manifests").exists()


# ---- proofs ----


def test_proofs_are_written_replayed_and_a_false_one_is_fatal(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ("--s", "4", "--manifest", "small", "--floors", "0.5")
    assert command(monkeypatch, store.root, *call) == 0
    assert not (store.root / "proofs").exists()
    capsys.readouterr()
    assert command(monkeypatch, store.root, *call, "--proof") == 0  # what has no proof is searched again
    out = capsys.readouterr().out
    assert "32 pairs searched" in out
    said = re.search(r"(\d+) proof logs \(.*\), (\d+) replayed \((\d+) nodes, \d+ nodes a second\), (\d+) errors", out)
    assert said is not None
    logs, replayed, nodes, errors = map(int, said.groups())
    assert logs == replayed == errors == 64 == len(list((store.root / "proofs").rglob("*.parquet")))
    assert nodes >= logs

    path = store.proof("toy", 4, certified(store)["row_id"][0], 0.5)
    proof, entry = load(path), footer(PROOF, path)
    provenance = Provenance("certify", entry["parameters"], 0, entry["inputs"], str(entry["code"]))  # type: ignore[arg-type]
    for broken, why in (
        (replace(proof, lower=2 * proof.lower), "record"),
        (replace(proof, lower=proof.lower / 2), "expected the bound of the table"),
        (replace(proof, keys=proof.keys[1:]), "expected all"),
        (replace(proof, mass_floor=0.9), "expected those of its name"),
    ):
        save(broken, path, provenance)
        assert command(monkeypatch, store.root, *call, "--proof") == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "certify: replaying" not in line]
        assert str(path) in line and why in line
    path.unlink()
    assert command(monkeypatch, store.root, *call, "--proof") == 0
    assert "1 pairs searched, 31 were current" in capsys.readouterr().out

    table = certify.path_of(store, documents_of(store, None)[0], 4)
    entry, honest = footer(SUBSETS, table), read(SUBSETS, table)
    provenance = Provenance(
        "certify",
        entry["parameters"],
        0,
        entry["inputs"],
        str(entry["code"]),
        entry["notes"],  # type: ignore[arg-type]
    )
    forged = honest.with_columns(lower=pl.lit(0.0))  # called optimal, with no bound and so no log
    write(SUBSETS, forged, table, provenance)
    assert command(monkeypatch, store.root, *call, "--proof") == 1
    assert "called optimal, but the bound does not say so" in capsys.readouterr().err
    floor = pl.when(pl.col("mass_floor") > 0).then(1.0).otherwise(0.0)
    light = honest.with_columns(mass_floor=floor, lower=pl.lit(0.0), status=pl.lit("bracketed"))
    write(SUBSETS, light, table, provenance)
    assert command(monkeypatch, store.root, *call, "--proof") == 1
    assert "its 4 keys are not 4 that keep the floor" in capsys.readouterr().err
    write(SUBSETS, honest, table, provenance)


def test_logs_of_rows_that_read_alike_lie_apart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    names = ("r:1", "r-1", "r/1", "r" * 300, "r" * 299 + "s")
    assert len({store.proof("m", 4, name, rho) for name in names for rho in (1 / 3, 0.33333331)}) == 10
    assert all(len(store.proof("m", 4, name, 0.5).name) < 200 for name in names)


def test_an_error_that_its_subset_does_not_have_is_fatal(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ("--s", "4", "--manifest", "small", "--floors", "0.5", "--proof")
    assert command(monkeypatch, store.root, *call) == 0
    path = store.subsets("toy", 4, "certified", 0)
    entry, found = footer(SUBSETS, path), read(SUBSETS, path)
    factor = pl.when(pl.int_range(pl.len()) == 3).then(1.001).otherwise(1.0)
    wrong = found.with_columns((pl.col("error") * factor).alias("error"))
    provenance = Provenance("certify", entry["parameters"], 0, entry["inputs"], str(entry["code"]), entry["notes"])  # type: ignore[arg-type]
    write(SUBSETS, wrong, path, provenance)
    capsys.readouterr()
    assert command(monkeypatch, store.root, *call) == 1
    err = capsys.readouterr().err
    assert found["row_id"][3] in err and "but its subset has" in err
