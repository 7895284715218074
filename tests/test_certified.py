"""The two-sided ceiling: tables against plain Python on made-up rows whose subsets are all known, and their laws."""

import math
import statistics
from dataclasses import dataclass

import numpy as np
import polars as pl
import pytest

from analysis import stage
from data import BadInput, Store, store
from data.schema import SUBSETS
from tests.test_analysis import MADE_UP, expanded_interval, fits, frame, put, rows
from tests.test_analysis import one as record_of

FLOORS = (0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.0)
TABLES = ("certified", "mass_floors", "proved", "open")


@dataclass
class Search:
    rho: float
    kept: float  # share of the top mass
    error: float
    lower: float
    proved: bool
    stopped_by: str = "finished"
    seconds: float = 0.0


def searches(made, every=5, seed=0):
    """Row -> its searches, of rows whose subsets are a handful of made-up (kept share, error) points."""
    rng = np.random.default_rng(seed)
    top, optimum = made["rules"]["top_mass"][0], made["rules"]["optimal_pool"][0]
    found = {}
    for row in range(0, len(top), every):
        points = [(1.0, top[row]), (0.9, optimum[row])]  # the pool optimum keeps 0.9 of the top mass, see rows()
        points += [(rng.random(), top[row] * rng.uniform(0.6, 1.6)) for _ in range(4)]
        found[row] = []
        for rho in FLOORS:
            keeping = [point for point in points if point[0] >= rho]
            least = min(keeping, key=lambda point: point[1])
            proved = bool(rng.random() < 0.3 + 0.7 * rho)
            kept, error = least if proved else keeping[rng.integers(len(keeping))]
            lower = error if proved else least[1] * rng.choice([0.0, 0.5, 0.95])
            stop = "finished" if proved else str(rng.choice(["node_limit", "time_limit"], p=[0.9, 0.1]))
            found[row].append(Search(rho, kept, error, lower, proved, stop, float(rng.random())))
    return found


def put_certified(where, made, found, model="qwen", s=8):
    """Write searches as the stage does: a file per document, a row per pair and floor."""
    for doc in sorted(set(made["doc_id"][list(found)].tolist())):
        own = [(row, one) for row, several in found.items() if made["doc_id"][row] == doc for one in several]
        columns = {
            "row_id": [f"{model}:{doc}:{made['layer'][row]}:0:{row}" for row, _ in own],
            "s": [s] * len(own),
            "rule": ["optimal_floor" if one.rho else "optimal_full" for _, one in own],
            "search": ["branch_and_bound"] * len(own),
            "mass_floor": [one.rho for _, one in own],
            "n_searched": [900] * len(own),
            "subset": [list(range(s))] * len(own),
            "error": [one.error for _, one in own],
            "lower": [one.lower for _, one in own],
            "kept_mass": [one.kept * made["rules"]["top_mass"][1][row] for row, one in own],
            "free_error": [0.0] * len(own),
            "status": ["optimal" if one.proved else "bracketed" for _, one in own],
            "stopped_by": [one.stopped_by for _, one in own],
            "nodes": [7] * len(own),
            "seconds": [one.seconds for _, one in own],
        }
        store.write(SUBSETS, frame(SUBSETS, columns), where.subsets(model, s, "certified", doc), MADE_UP)
    return where


def expected(made, found, row):
    """What is known of one row, in plain Python: floor -> (closable, cap, label), and more."""
    top, pool = (float(made["rules"][rule][0][row]) for rule in ("top_mass", "optimal_pool"))
    known = [(one.kept, one.error) for one in found[row]] + [(0.9, pool)]
    gains = {}
    for one in found[row]:
        error = min(e for kept, e in known if kept >= one.rho - 1e-12)
        lower = max(other.lower for other in found[row] if other.rho <= one.rho)
        cap = 1 - error / top if one.proved else 1 - lower / top
        label = "yes" if error <= 0.9 * top else "no" if lower >= 0.9 * top * (1 - 1e-9) else "open"
        gains[one.rho] = (1 - error / top, cap, label)
    least = min(e for _, e in known)
    own = found[row][-1]
    kept = own.kept if own.error <= least * (1 + 1e-12) else next(kept for kept, e in known if e == least)
    return {
        "gains": gains,
        "kept": kept,
        "improvement": 1 - least / pool,
        "proved": {one.rho: one.proved for one in found[row]},
        "seconds": max(one.seconds for one in found[row]),
        "clock": any(one.stopped_by == "time_limit" for one in found[row]),
        "pool": 1 - pool / top,
    }


@pytest.fixture(scope="module")
def made():
    return rows(12, 40)


@pytest.fixture(scope="module")
def found(made):
    return searches(made)


@pytest.fixture(scope="module")
def tables(made, found, tmp_path_factory):
    return fits(put_certified(put(Store(tmp_path_factory.mktemp("certified")), made), made, found))


def test_certified_against_plain_python(made, found, tables):
    record = record_of(tables["certified"])
    by_row = {row: expected(made, found, row) for row in found}
    among = np.isin(np.arange(len(made["doc_id"])), list(found))
    assert (record["n_rows"], record["n_of"], record["n_documents"]) == (
        len(found),
        480,
        len(set(made["doc_id"][among])),
    )
    top, optimum = made["rules"]["top_mass"][0], made["rules"]["optimal_pool"][0]
    assert record["pool_all"] == pytest.approx(statistics.median(1 - optimum / top))
    columns = {
        "pool": lambda x: x["pool"],
        "half": lambda x: x["gains"][0.5][0],
        "half_cap": lambda x: x["gains"][0.5][1],
        "full": lambda x: x["gains"][0.0][0],
        "full_cap": lambda x: x["gains"][0.0][1],
    }
    for name, of in columns.items():
        assert record[name] == pytest.approx(statistics.median(of(x) for x in by_row.values()), abs=1e-12), name
    shares = {
        "below_half": lambda x: x["kept"] < 0.5,
        "below_tenth": lambda x: x["kept"] < 0.1,
        "changed": lambda x: (x["gains"][0.0][2], x["gains"][0.5][2]) == ("yes", "no"),
        "proved_half": lambda x: x["proved"][0.5],
        "proved_tenth": lambda x: x["proved"][0.1],
        "proved": lambda x: x["proved"][0.0],
        "improved": lambda x: x["improvement"] > 0.01,
    }
    for name, of in shares.items():
        count = sum(of(x) for x in by_row.values())
        assert 0 < count < len(found), name
        assert (record[f"n_{name}"], record[name]) == (count, pytest.approx(count / len(found))), name
    for name, label in (("yes", "yes"), ("no", "no"), ("undecided", "open")):
        assert record[f"n_label_{name}"] == sum(x["gains"][0.0][2] == label for x in by_row.values()) > 0
    possible = [
        x
        for x in by_row.values()
        if "open" in (x["gains"][0.0][2], x["gains"][0.5][2])
        and x["gains"][0.5][2] != "yes"
        and x["gains"][0.0][2] != "no"
    ]
    assert record["n_change_undecided"] == len(possible) > 0
    gained = [x["improvement"] for x in by_row.values() if x["improvement"] > 0.01]
    assert record["improvement"] == pytest.approx(statistics.median(gained))
    assert record["improvement_largest"] == pytest.approx(max(gained))
    assert record["seconds"] == pytest.approx(statistics.median(x["seconds"] for x in by_row.values()))
    assert record["seconds_largest"] == pytest.approx(max(x["seconds"] for x in by_row.values()))
    assert record["n_time_limit"] == sum(x["clock"] for x in by_row.values()) > 0
    for name, of, statistic in (
        ("full_cap", columns["full_cap"], np.median),
        ("half", columns["half"], np.median),
        ("below_half", shares["below_half"], np.mean),
    ):
        values = np.array([float(of(by_row[row])) if row in by_row else np.nan for row in range(480)])
        ends = expanded_interval(made, lambda i, v=values, f=statistic: f(v[i]), among)
        np.testing.assert_allclose([record[f"{name}_low"], record[f"{name}_high"]], ends, rtol=1e-9, err_msg=name)


def test_spread_over_tenths_of_dropped_mass(made, found, tables):
    order = sorted(range(480), key=lambda row: made["dropped_mass"][row])
    counts = [sum(row in found for row in order[48 * tenth : 48 * tenth + 48]) for tenth in range(10)]
    record = record_of(tables["certified"])
    assert (record["decile_least"], record["decile_most"]) == (min(counts), max(counts))


def test_mass_floors_against_plain_python(made, found, tables):
    by_row = [expected(made, found, row) for row in found]
    assert tables["mass_floors"]["rho"].to_list() == [*reversed(FLOORS), 1.0]
    for rho in FLOORS:
        record = record_of(tables["mass_floors"], rho=rho)
        assert record["n_rows"] == len(found)
        for place, name in enumerate(("closable", "cap")):
            assert record[name] == pytest.approx(statistics.median(x["gains"][rho][place] for x in by_row), abs=1e-12)
        assert record["n_proved"] == sum(x["proved"][rho] for x in by_row)
        smallest = [min((r for r, proved in x["proved"].items() if proved), default=1.0) for x in by_row]
        assert record["n_smallest"] == smallest.count(rho)
    last = record_of(tables["mass_floors"], rho=1.0)
    assert (last["closable"], last["cap"], last["proved"]) == (0.0, 0.0, 1.0)
    assert last["n_smallest"] == smallest.count(1.0)
    assert tables["mass_floors"]["n_smallest"].sum() == len(found)


def test_open_against_plain_python(made, found, tables):
    wanted = {f"qwen:{made['doc_id'][r]}:{made['layer'][r]}:0:{r}": r for r in found if not found[r][-1].proved}
    assert len(wanted) > 20
    assert sorted(tables["open"]["row_id"]) == sorted(wanted)
    for record in tables["open"].to_dicts():
        row = wanted[record["row_id"]]
        known = expected(made, found, row)
        closable, cap, label = known["gains"][0.0]
        assert (record["error"], record["lower"]) == pytest.approx((1 - closable, 1 - cap), abs=1e-12)
        assert record["kept"] == pytest.approx(known["kept"])
        assert record["smallest"] == min((rho for rho, proved in known["proved"].items() if proved), default=1.0)
        assert record["label"] == label
        assert record["stopped_by"] == ("time_limit" if known["clock"] else "node_limit")
        assert record["dropped_mass"] == pytest.approx(made["dropped_mass"][row])


def test_the_ends_of_the_ceiling_are_in_order(tables):
    record = record_of(tables["certified"])
    assert record["pool"] <= record["full"] <= record["full_cap"] <= 1
    assert record["half"] <= record["half_cap"] <= record["full_cap"] + 1e-9
    assert record["half"] <= record["full"]
    floors = tables["mass_floors"].sort("rho")
    assert floors["closable"].is_sorted(descending=True) and floors["cap"].is_sorted(descending=True)
    assert (floors["closable"] <= floors["cap"]).all()


def test_proved_against_plain_python(made, found, tables):
    for record in tables["proved"].to_dicts():
        if record["by"] == "dropped_mass":
            inside = [r for r in found if record["bin_low"] <= made["dropped_mass"][r] < record["bin_high"]]
        else:
            assert (record["bin_low"], record["bin_high"]) == ((8, 8) if record["by"] == "s" else (512, 1024))
            inside = list(found)
        proved = sum(one.proved for r in inside for one in found[r] if one.rho == record["mass_floor"])
        n, z = len(inside), statistics.NormalDist().inv_cdf(0.975)
        share = proved / n
        half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        centre = (share + z * z / (2 * n)) / (1 + z * z / n)
        assert (record["n_pairs"], record["n_proved"], record["share"]) == (n, proved, share)
        assert record["share_low"] == pytest.approx(max(centre - half, 0), abs=1e-12)
        assert record["share_high"] == pytest.approx(min(centre + half, 1), abs=1e-12)
    by_mass = tables["proved"].filter(by="dropped_mass", mass_floor=0.0)
    assert by_mass["n_pairs"].sum() == len(found) and len(by_mass) > 4


def test_proved_pools_budgets_and_bins_keys_by_doubling(made, found, tmp_path):
    where = put(Store(tmp_path), made)
    for s in (4, 16):
        put_certified(put(where, made, s=s), made, found, s=s)
    tables = fits(where)
    assert record_of(tables["proved"], by="n_keys", mass_floor=0.5)["n_pairs"] == 2 * len(found)
    assert tables["proved"].filter(by="s", mass_floor=0.0)["bin_low"].to_list() == [4.0, 16.0]
    assert tables["certified"]["s"].to_list() == [4, 16]  # not 8, which was not certified


def test_certified_files_change_no_other_table(made, found, tables, tmp_path):
    without = fits(put(Store(tmp_path), made))
    for table in stage.FITS:
        if table.name in TABLES:
            assert without[table.name].is_empty() and not tables[table.name].is_empty()
        else:
            assert without[table.name].equals(tables[table.name]), table.name


def test_rows_without_error_and_rows_without_a_pool_error(tmp_path):
    made = rows(12, 5)
    top, optimum = made["rules"]["top_mass"][0], made["rules"]["optimal_pool"][0]
    top[:], optimum[:] = 1.0, 0.95
    top[:6], optimum[:6] = 1e-13, 1e-14  # top-mass is exact: nothing to gain
    optimum[6:12] = 1e-14  # the pool optimum alone is
    found = {
        row: [Search(0.5, 0.9, optimum[row], optimum[row], True), Search(0.0, 0.01, 0.9 * optimum[row], 0.0, False)]
        for row in range(60)
    }
    record = record_of(fits(put_certified(put(Store(tmp_path), made), made, found))["certified"])
    assert record["n_zero_top"] == 6
    assert (record["n_label_yes"], record["n_label_no"], record["n_label_undecided"]) == (54, 6, 0)
    assert (record["n_below_half"], record["n_improved"]) == (54, 48)
    assert record["improvement_largest"] == pytest.approx(0.1)
    assert record["n_changed"] == 48 and record["n_change_undecided"] == 0
    assert record["half"] == record["half_cap"] == pytest.approx(0.05)
    assert record["full"] == pytest.approx(1 - 0.9 * 0.95) and record["full_cap"] == 1
    assert (record["n_tenth"], record["proved_tenth"]) == (0, None)


def test_all_proved_has_one_ceiling_and_nothing_proved_is_open_to_one(made, tmp_path):
    top, optimum = made["rules"]["top_mass"][0], made["rules"]["optimal_pool"][0]
    for name, proved in (("all", True), ("none", False)):
        found = {
            # a proof is within a relative gap, and its bound a little below the optimum
            row: [Search(rho, 0.9, optimum[row], optimum[row] * proved * (1 - 1e-9), proved) for rho in (0.5, 0.1, 0.0)]
            for row in range(0, 480, 5)
        }
        record = record_of(fits(put_certified(put(Store(tmp_path / name), made), made, found))["certified"])
        gain = statistics.median(1 - optimum[row] / top[row] for row in found)
        assert record["full"] == record["half"] == record["pool"] == pytest.approx(gain)
        assert record["full_cap"] == record["half_cap"] == (record["full"] if proved else 1.0)
        assert (record["n_proved"], record["proved_tenth"]) == (96 * proved, float(proved))
        assert (record["improvement"], record["improvement_largest"], record["n_improved"]) == (None, None, 0)


def test_an_optimum_of_just_nine_tenths_is_a_yes_and_no_other_label(tmp_path):
    made = rows(12, 1)
    made["rules"]["top_mass"][0][:] = 1.0
    made["rules"]["optimal_pool"][0][:] = 0.95
    errors = [0.9] * 5 + [0.9 * (1 + 1e-6)] * 7
    found = {row: [Search(rho, 0.9, e, e * (1 - 1e-9), True) for rho in (0.5, 0.0)] for row, e in enumerate(errors)}
    record = record_of(fits(put_certified(put(Store(tmp_path), made), made, found))["certified"])
    assert (record["n_label_yes"], record["n_label_no"], record["n_label_undecided"]) == (5, 7, 0)
    assert (record["n_changed"], record["n_change_undecided"]) == (0, 0)


def test_intervals_from_ten_certified_documents_on(made, found, tmp_path):
    few = {row: several for row, several in found.items() if made["doc_id"][row] < 9}
    assert len(set(made["doc_id"][list(few)])) < 10
    tables = fits(put_certified(put(Store(tmp_path), made), made, few))
    for table in (tables["certified"], tables["mass_floors"]):
        ends = [name for name in table.columns if name.endswith(("_low", "_high"))]
        assert len(ends) > 5 and all(table[name].null_count() == len(table) for name in ends)
    gains = [expected(made, few, row)["gains"][0.0][0] for row in few]
    assert record_of(tables["certified"])["full"] == pytest.approx(statistics.median(gains), abs=1e-12)


@pytest.mark.parametrize(
    ("several", "said"),
    [
        ([Search(0.5, 0.9, 1.0, 0.0, False)], "without a search at mass floor 0"),
        ([Search(0.1, 0.9, 1.0, 0.0, False), Search(0.0, 0.9, 1.0, 0.0, False)], "without a search at mass floor 0.5"),
        ([Search(0.5, 0.9, 0.5, 0.0, False), Search(0.0, 0.9, 0.6, 0.55, False)], "above the error 0.5 of a known"),
        ([Search(0.95, 0.3, 0.5, 0, False), Search(0.5, 0.9, 1, 0, False), Search(0, 0.9, 1, 0, False)], "keeps less"),
        ([Search(0.5, 0.9, 1, 0, False), Search(0.0, 0.9, 1, 0, False), Search(0.0, 0.9, 1, 0, False)], "two searches"),
    ],
)  # fmt: skip
def test_searches_that_cannot_be_are_refused(tmp_path, several, said):
    made = rows(2, 3)
    made["rules"]["top_mass"][0][:] = 1.0
    made["rules"]["optimal_pool"][0][:] = 0.8
    with pytest.raises(BadInput, match=rf"qwen:0:0:0:0.*{said}|{said}.*qwen:0:0:0:0"):
        fits(put_certified(put(Store(tmp_path), made), made, {0: several}))


def test_searches_of_rows_that_were_replaced_are_left_out(made, found, tmp_path):
    where = put_certified(put(Store(tmp_path), made), made, found)
    anew = store.Provenance("made up", {}, 0, {"rows": "1" * 64}, "0" * 64)
    path = where.subsets("qwen", 8, "certified", 3)
    lost = store.read(SUBSETS, path)["row_id"].n_unique()
    store.write(SUBSETS, store.read(SUBSETS, path), path, anew)
    assert record_of(fits(where)["certified"])["n_rows"] == len(found) - lost < len(found)


def test_the_results_do_not_depend_on_the_order_of_the_searches(made, found, tables, tmp_path):
    where = put_certified(put(Store(tmp_path), made), made, found)
    for path in (p for p in where.subset_files() if p.parent.name == "certified"):
        store.write(SUBSETS, store.read(SUBSETS, path).sample(fraction=1, shuffle=True, seed=1), path, MADE_UP)
    again = fits(where)
    assert all(again[name].equals(tables[name]) for name in TABLES)
    assert isinstance(again["proved"], pl.DataFrame)
