"""The tables of the analysis against numpy, scipy and scikit-learn, on small stores made up from a seed."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import scipy.stats
import sklearn.metrics

from analysis import stage
from analysis.__main__ import application
from analysis.bootstrap import draw
from analysis.ceiling import median_cap, published_cap_share
from analysis.frame import outdated
from analysis.predictor import thinned
from analysis.rules import OURS
from data import BadInput, Provenance, Store, store
from data.command_line import run
from data.schema import ROW_FACTS, SUBSETS, Table
from enumerate.rules import RULES

RESAMPLES = 40
TINY = 1e-12  # the rounding of every made-up row
MADE_UP = Provenance("made up", {}, 0, {}, "0" * 64)


def rows(documents=12, per_document=15, seed=0):
    """Columns of made-up rows: facts, and for each rule (error, kept mass, free error)."""
    rng, n = np.random.default_rng(seed), documents * per_document
    dropped = rng.beta(1, 3, n)
    top = rng.gamma(2.0, size=n)
    optimum = top / (1 + (rng.random(n) < 0.7) * rng.exponential(0.5 * dropped / dropped.mean()))
    balanced = np.where(rng.random(n) < 0.8, optimum, (top + optimum) / 2)
    free = optimum / rng.gamma(20, 0.06, n)
    kept = 1 - dropped
    return {
        "doc_id": np.arange(n) % documents,
        "layer": np.arange(n) // documents % 3,
        "q_head": np.arange(n) // documents % 2,
        "dropped_mass": dropped,
        "radius": 1 + rng.random(n),
        "spread": 0.1 + rng.random(n),
        "residual": top * kept,
        "rounding": np.full(n, TINY),
        "rules": {
            "top_mass": (top, kept, top / 2),
            "balancing": (balanced, kept, top / 2),
            "optimal_pool": (optimum, 0.9 * kept, top / 2),
            "geometric": (1.7 * top, 0.5 * kept, free),
            "frank_wolfe": (2.1 * top, 0.4 * kept, 1.1 * free),
            "least_free": (1.9 * top, 0.6 * kept, np.minimum(free, optimum)),
        },
    }


def put(where, made, model="qwen", s=8, user_rules=()):
    """Write made-up rows as enumeration does: a facts and a subsets file per document, user's rules apart."""
    n = len(made["doc_id"])
    ids = [
        f"{model}:{doc}:{layer}:0:{i}" for i, (doc, layer) in enumerate(zip(made["doc_id"], made["layer"], strict=True))
    ]
    facts = {name: made[name] for name in ROW_FACTS.columns if name in made}
    facts |= {"row_id": ids, "family": ["qwen"] * n, "model": [model] * n, "n_keys": [900] * n, "s": [s] * n}
    chosen = []
    for rule, (error, kept, free) in made["rules"].items():
        columns = {"row_id": ids, "s": [s] * n, "rule": [rule] * n, "search": ["made up"] * n}
        columns |= {"mass_floor": np.zeros(n), "n_searched": [28] * n, "subset": [list(range(s))] * n}
        columns |= {"error": error, "lower": np.zeros(n), "kept_mass": kept, "free_error": free}
        columns |= {
            "status": ["heuristic"] * n,
            "stopped_by": ["finished"] * n,
            "nodes": [1] * n,
            "seconds": np.zeros(n),
        }
        chosen.append(frame(SUBSETS, columns).with_columns(pl.Series("doc_id", made["doc_id"])))
    subsets = pl.concat(chosen)
    for doc in sorted(set(made["doc_id"].tolist())):
        own = frame(ROW_FACTS, facts).filter(pl.col("doc_id") == doc)
        store.write(ROW_FACTS, own, where.facts(model, s, doc), MADE_UP)
        for folder in ("standard", *user_rules):
            mine = pl.col("rule") == folder if folder in user_rules else ~pl.col("rule").is_in(user_rules)
            of_document = subsets.filter(pl.col("doc_id") == doc, mine).drop("doc_id")
            store.write(SUBSETS, of_document, where.subsets(model, s, folder, doc), MADE_UP)
    return where


def frame(table: Table, columns):
    return pl.DataFrame(
        {name: pl.Series(name, list(columns[name]), dtype=c.dtype) for name, c in table.columns.items()}
    )


def fits(where, seed=0, resamples=RESAMPLES):
    return stage.compute(where, seed, resamples)


def one(table, **key):
    (found,) = table.filter(**key).to_dicts()
    return found


def expanded_interval(made, statistic, among=None, seed=0):
    """2.5 and 97.5 percentiles of a statistic of row numbers, over samples that are physically repeated."""
    document = made["doc_id"]
    some = np.arange(len(document)) if among is None else np.flatnonzero(among)
    found = []
    for drawn in draw(int(document.max()) + 1, RESAMPLES, seed):
        found.append(statistic(np.repeat(some, drawn[document[some]])))
    return np.percentile(found, [2.5, 97.5])


def check(record, name, made, statistic, among=None):
    everyone = np.arange(len(made["doc_id"])) if among is None else np.flatnonzero(among)
    assert record[name] == pytest.approx(statistic(everyone), rel=1e-9), name
    interval = [record[f"{name}_low"], record[f"{name}_high"]]
    np.testing.assert_allclose(interval, expanded_interval(made, statistic, among), rtol=1e-9, err_msg=name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    made = rows()
    return made, fits(put(Store(tmp_path_factory.mktemp("plain")), made))


def test_tables_fit_their_schemas(plain):
    for table in stage.FITS:
        table.check(plain[1][table.name])
        assert plain[1][table.name].is_empty() == (table.name in ("certified", "mass_floors", "proved", "open"))


def test_ceiling(plain):
    made, tables = plain
    record = one(tables["ceiling"])
    top, optimum, balanced = (made["rules"][rule][0] for rule in ("top_mass", "optimal_pool", "balancing"))
    gap = optimum < top
    assert 20 < gap.sum() < len(gap) - 20
    assert (record["n_rows"], record["n_documents"], record["n_zero_gap"]) == (180, 12, (~gap).sum())
    assert (record["n_zero_top"], record["n_infinite"]) == (0, 0)
    check(record, "closable", made, lambda i: np.median(1 - optimum[i] / top[i]))
    check(record, "closable_mean", made, lambda i: np.mean(1 - optimum[i] / top[i]))
    check(record, "kappa", made, lambda i: np.median(top[i] / optimum[i]))
    check(record, "kappa_p99", made, lambda i: np.percentile(top[i] / optimum[i], 99))
    check(record, "share", made, lambda i: np.mean(top[i] / optimum[i] >= 10 / 9))
    check(record, "closure", made, lambda i: np.median(1 - balanced[i] / top[i]))
    check(record, "balancing_exact", made, lambda i: np.mean(balanced[i] == optimum[i]))
    check(record, "recovery", made, lambda i: np.median((top - balanced)[i] / (top - optimum)[i]), gap)
    assert record["closable_q25"] == pytest.approx(np.percentile(1 - optimum / top, 25))
    assert record["closable_q75"] == pytest.approx(np.percentile(1 - optimum / top, 75))
    assert 0.85 < record["coverage"] < 0.95


def test_rules(plain):
    made, tables = plain
    assert tables["rules"]["rule"].to_list() == sorted(made["rules"])
    top, optimum = made["rules"]["top_mass"][0], made["rules"]["optimal_pool"][0]
    for rule, (error, kept, _) in made["rules"].items():
        record = one(tables["rules"], rule=rule)
        check(record, "ratio", made, lambda i, error=error: np.median(error[i] / top[i]))
        check(record, "ratio_to_optimum", made, lambda i, error=error: np.median(error[i] / optimum[i]))
        check(record, "kept_mass", made, lambda i, kept=kept: np.median(kept[i]))
        check(record, "better", made, lambda i, error=error: np.mean(error[i] < top[i]))
        check(record, "worse", made, lambda i, error=error: np.mean(error[i] > top[i]))


def test_penalty(plain):
    made, tables = plain
    optimum = made["rules"]["optimal_pool"][0]
    for estimate, rule in (("line_search", "frank_wolfe"), ("fully_corrective", "geometric"), ("least", "least_free")):
        record = one(tables["penalty"], estimate=estimate)
        price = optimum / made["rules"][rule][2]
        assert (record["n_rows"], record["n_documents"], record["n_zero_free"]) == (180, 12, 0)
        check(record, "penalty", made, lambda i, price=price: np.median(price[i]))
        check(record, "penalty_p99", made, lambda i, price=price: np.percentile(price[i], 99))
        check(record, "below_one", made, lambda i, price=price: np.mean(price[i] < 1))
    assert one(tables["penalty"], estimate="least")["below_one"] == 0
    assert one(tables["penalty"], estimate="line_search")["below_one"] > 0.1


def test_predictor(plain):
    made, tables = plain
    top, optimum, mass = made["rules"]["top_mass"][0], made["rules"]["optimal_pool"][0], made["dropped_mass"]
    label = top / optimum >= 10 / 9
    scores = {
        "dropped_mass": mass,
        "diameter_bound": 2 * made["radius"] * mass,
        "variance_bound": made["spread"] * np.sqrt(mass / (1 - mass)),
    }

    def auc(i, score):
        return sklearn.metrics.roc_auc_score(label[i], score[i])

    def with_gap(i, score):
        return scipy.stats.spearmanr(score[i], (top - optimum)[i]).statistic

    resampled = [np.repeat(np.arange(180), drawn[made["doc_id"]]) for drawn in draw(12, RESAMPLES, 0)]
    for name, score in scores.items():
        record = one(tables["predictor"], statistic=name)
        assert record["n_positive"] == label.sum()
        check(record, "auc", made, lambda i, score=score: auc(i, score))
        check(record, "spearman_gap", made, lambda i, score=score: with_gap(i, score))
        if name == "dropped_mass":
            assert (record["auc_lead"], record["p_value"]) == (None, None)
            check(record, "spearman_phi", made, lambda i: scipy.stats.spearmanr(made["residual"][i], optimum[i])[0])
            phi = record["spearman_phi"]
        else:
            leads = np.array([auc(i, mass) - auc(i, score) for i in resampled])
            assert record["auc_lead"] == pytest.approx(auc(slice(None), mass) - auc(slice(None), score))
            assert record["auc_lead_low"] == pytest.approx(np.percentile(leads, 2.5))
            assert record["auc_lead_high"] == pytest.approx(np.percentile(leads, 97.5))
            assert record["p_value"] == pytest.approx(min(1, 2 * min(np.mean(leads <= 0), np.mean(leads >= 0))))
            assert record["spearman_phi"] == phi


def test_roc_is_the_exact_curve_when_it_is_short(plain):
    made, tables = plain
    label = made["rules"]["top_mass"][0] / made["rules"]["optimal_pool"][0] >= 10 / 9
    curve = tables["roc"].filter(statistic="dropped_mass")
    false, true, threshold = sklearn.metrics.roc_curve(label, made["dropped_mass"])
    np.testing.assert_array_equal(curve["false_positive_rate"], false)
    np.testing.assert_array_equal(curve["true_positive_rate"], true)
    np.testing.assert_array_equal(curve["threshold"], threshold)


def test_long_roc_is_thinned_to_corners_of_the_exact_curve(tmp_path):
    made = rows(12, 400)
    curve = fits(put(Store(tmp_path), made), resamples=2)["roc"].filter(statistic="variance_bound")
    label = made["rules"]["top_mass"][0] / made["rules"]["optimal_pool"][0] >= 10 / 9
    score = made["spread"] * np.sqrt(made["dropped_mass"] / (1 - made["dropped_mass"]))
    exact = set(zip(*sklearn.metrics.roc_curve(label, score), strict=True))
    points = list(curve.select("false_positive_rate", "true_positive_rate", "threshold").iter_rows())
    assert 150 < len(points) <= 202 < len(exact)
    assert set(points) <= exact
    assert points[0] == (0.0, 0.0, np.inf)
    assert points[-1][:2] == (1.0, 1.0)
    area = np.trapezoid(curve["true_positive_rate"], curve["false_positive_rate"])
    assert area == pytest.approx(sklearn.metrics.roc_auc_score(label, score), abs=0.005)


def test_thinned_takes_the_nearest_places_and_both_ends():
    assert thinned(np.array([0.0, 0.1, 0.9, 2.0]), 10) == [0, 1, 2, 3]
    assert thinned(np.array([0.0, 0.1, 0.2, 0.9, 1.2, 2.0]), 3) == [0, 3, 5]


def test_map(tmp_path):
    made = rows()
    where = put(put(Store(tmp_path), made, s=4), made, s=8)
    eight = rows(seed=1)
    cell = (eight["layer"] == 1) & (eight["q_head"] == 1)
    eight["dropped_mass"][cell] = 0.25  # exactly at the threshold: not flat
    put(where, eight, s=8)
    found = fits(where, resamples=2)["map"]
    assert found.select("s", "layer", "q_head").rows() == sorted(found.select("s", "layer", "q_head").rows())
    assert len(found) == 2 * 6
    kappa = {s: m["rules"]["top_mass"][0] / m["rules"]["optimal_pool"][0] for s, m in ((4, made), (8, eight))}
    for record in found.to_dicts():
        mine = made if record["s"] == 4 else eight
        own = (made["layer"] == record["layer"]) & (made["q_head"] == record["q_head"])
        assert (record["n_rows"], record["n_documents"]) == (own.sum(), len(set(made["doc_id"][own])))
        assert record["dropped_mass"] == np.median(mine["dropped_mass"][own])
        assert record["kappa"] == np.median(kappa[record["s"]][own])
        assert record["closable_mean"] == pytest.approx(np.mean(1 - 1 / kappa[record["s"]][own]))
        assert record["share"] == pytest.approx(np.mean(kappa[record["s"]][own] >= 10 / 9))
        assert record["flat"] == (np.median(eight["dropped_mass"][own]) > 0.25)
    assert not one(found, s=8, layer=1, q_head=1)["flat"]
    assert 0 < found["flat"].sum() < len(found)


def test_map_does_not_say_flat_without_the_budget_that_decides(tmp_path):
    found = fits(put(Store(tmp_path), rows(), s=16), resamples=2)["map"]
    assert found["flat"].null_count() == len(found)


def test_ratios_of_one_are_exact(tmp_path):
    made = rows()
    top, optimum = made["rules"]["top_mass"][0], made["rules"]["optimal_pool"][0]
    optimum[:] = top * (1 - 2.0**-52)  # the same keys, summed in another order
    made["rules"]["balancing"][0][:] = optimum
    found = fits(put(Store(tmp_path), made), resamples=2)
    record = one(found["ceiling"])
    assert [record[name] for name in ("closable", "closable_mean", "closable_q25", "closable_q75")] == [0, 0, 0, 0]
    assert (record["kappa"], record["kappa_p99"], one(found["rules"], rule="balancing")["ratio"]) == (1, 1, 1)
    assert set(found["map"]["kappa"]) == {1.0}


def test_label_threshold_is_ten_ninths(tmp_path):
    made = rows(12, 1)
    top, optimum = made["rules"]["top_mass"][0], made["rules"]["optimal_pool"][0]
    top[:] = 1.0
    optimum[:] = 1.0
    optimum[0] = 0.9  # kappa-hat = 10/9: label 1
    optimum[1] = 0.9005  # kappa-hat above 1.11, below 10/9: label 0
    made["rules"]["balancing"][0][:] = top
    assert one(fits(put(Store(tmp_path), made))["ceiling"])["share"] == pytest.approx(1 / 12)


def test_rows_at_the_edges_are_counted_not_hidden(tmp_path):
    made = rows(12, 10)
    n = 120
    top, optimum, balanced = (made["rules"][rule][0] for rule in ("top_mass", "optimal_pool", "balancing"))
    top[:] = 1.0
    optimum[:] = 0.5
    optimum[:30] = 1.0  # no gap
    optimum[30:36] = 1 - 1e-14  # a gap of rounding alone
    optimum[36:96] = 1e-15  # an optimum of zero: kappa-hat infinite, c-hat one
    top[96:100], optimum[96:100] = 1e-13, 1e-14  # top-mass itself is exact
    balanced[:] = optimum
    balanced[36:46] = 0.5
    free = made["rules"]["least_free"][2]
    free[:] = 0.25
    free[:7] = 1e-13
    tables = fits(put(Store(tmp_path), made))
    record = one(tables["ceiling"])
    assert (record["n_rows"], record["n_zero_gap"], record["n_zero_top"], record["n_infinite"]) == (n, 40, 4, 60)
    assert record["kappa"] == pytest.approx(2.0) or record["kappa"] == np.inf
    assert record["kappa"] == np.median([1.0] * 40 + [np.inf] * 60 + [2.0] * 20)
    assert record["kappa_p99"] == record["kappa_p99_high"] == np.inf
    assert record["closable"] == pytest.approx(np.median([0.0] * 40 + [1.0] * 60 + [0.5] * 20))
    assert record["share"] == pytest.approx(80 / n)
    assert record["recovery"] == pytest.approx(1.0)
    assert record["closure"] == pytest.approx(np.median([0.0] * 40 + [0.5] * 10 + [1.0] * 50 + [0.5] * 20))
    assert record["balancing_exact"] == pytest.approx(110 / n)
    least = one(tables["penalty"], estimate="least")
    assert (least["n_rows"], least["n_zero_free"]) == (n - 7, 7)
    price = (optimum / free)[7:]
    assert least["penalty"] == pytest.approx(np.median(price))
    assert least["below_one"] == pytest.approx(np.mean(price < 1))
    top_mass = one(tables["rules"], rule="top_mass")
    assert (top_mass["ratio"], top_mass["better"], top_mass["worse"]) == (1.0, 0.0, 0.0)
    assert one(tables["rules"], rule="optimal_pool")["better"] == pytest.approx(80 / n)
    assert one(tables["rules"], rule="optimal_pool")["worse"] == 0.0


def test_recovery_where_no_row_has_a_gap_and_all_labels_are_zero(tmp_path):
    made = rows()
    for rule in ("optimal_pool", "balancing"):
        made["rules"][rule][0][:] = made["rules"]["top_mass"][0]
    tables = fits(put(Store(tmp_path), made))
    record = one(tables["ceiling"])
    assert (record["recovery"], record["recovery_low"], record["n_zero_gap"]) == (None, None, 180)
    assert (record["closure"], record["kappa_p99"], record["balancing_exact"]) == (0.0, 1.0, 1.0)
    for found in tables["predictor"].to_dicts():
        assert [found[name] for name in ("auc", "auc_low", "auc_lead", "p_value", "spearman_gap")] == [None] * 5
        assert found["n_positive"] == 0
        assert found["spearman_phi"] is not None
    assert tables["roc"].is_empty()


def test_intervals_from_ten_documents_on(tmp_path):
    where = put(put(Store(tmp_path), rows(9), model="nine"), rows(10), model="ten")
    tables = fits(where)
    ends = [name for table in stage.FITS for name in table.columns if name.endswith(("_low", "_high"))]
    assert len(ends) > 20
    for name, table in (
        (name, tables[t.name]) for t in stage.FITS for name in t.columns if name in ends and len(tables[t.name])
    ):
        assert table.filter(model="nine")[name].null_count() == len(table.filter(model="nine"))
        if not name.startswith("auc_lead"):
            assert table.filter(model="ten")[name].null_count() == 0
    assert one(tables["ceiling"], model="nine")["n_documents"] == 9
    assert one(tables["ceiling"], model="nine")["coverage"] is None
    assert tables["predictor"].filter(model="nine")["p_value"].null_count() == 3
    assert tables["predictor"].filter(model="nine")["auc"].null_count() == 0


def test_a_single_row(tmp_path):
    made = rows(1, 1)
    tables = fits(put(Store(tmp_path), made))
    record = one(tables["ceiling"])
    top, optimum = made["rules"]["top_mass"][0][0], made["rules"]["optimal_pool"][0][0]
    assert record["closable"] == record["closable_q25"] == pytest.approx(1 - optimum / top)
    assert tables["predictor"]["spearman_gap"].null_count() == 3
    assert len(tables["map"]) == 1


def test_a_users_rule_and_leverage_where_present(tmp_path):
    made = rows()
    top = made["rules"]["top_mass"][0]
    made["rules"]["mine"] = (top * 0.8, made["dropped_mass"], top)
    tables = fits(put(Store(tmp_path / "with"), made, user_rules=("mine",)))
    assert one(tables["rules"], rule="mine")["ratio"] == pytest.approx(0.8)
    assert one(tables["rules"], rule="mine")["better"] == 1.0
    assert "leverage" not in tables["rules"]["rule"].to_list()
    made["rules"]["leverage"] = (top * 9, made["dropped_mass"], top)
    assert one(fits(put(Store(tmp_path / "more"), made))["rules"], rule="leverage")["ratio"] == pytest.approx(9)


def test_a_rule_that_ran_on_some_rows_only(tmp_path):
    where, made = Store(tmp_path), rows()
    put(where, made)
    path = where.subsets("qwen", 8, "standard", 3)
    fewer = store.read(SUBSETS, path).filter(~pl.col("rule").is_in(["balancing", "least_free"]))
    store.write(SUBSETS, fewer, path, MADE_UP)
    tables = fits(where)
    assert one(tables["rules"], rule="balancing")["n_rows"] == 165
    assert one(tables["rules"], rule="balancing")["n_documents"] == 11
    assert one(tables["penalty"], estimate="least")["n_rows"] == 165
    kept = made["doc_id"] != 3
    top, balanced = made["rules"]["top_mass"][0][kept], made["rules"]["balancing"][0][kept]
    assert one(tables["ceiling"])["closure"] == pytest.approx(np.median(1 - balanced / top))


def test_estimates_and_rules_that_never_ran_are_absent(tmp_path):
    made = rows()
    for rule in ("balancing", "geometric", "frank_wolfe", "least_free"):
        del made["rules"][rule]
    tables = fits(put(Store(tmp_path), made))
    assert tables["penalty"].is_empty()
    record = one(tables["ceiling"])
    assert (record["recovery"], record["closure"], record["balancing_exact"]) == (None, None, None)
    assert tables["rules"]["rule"].to_list() == ["optimal_pool", "top_mass"]


def test_results_depend_on_the_seed_but_not_on_the_order_of_rows_or_files(tmp_path):
    made = rows()
    first = fits(put(Store(tmp_path / "a"), made))
    again = put(Store(tmp_path / "b"), made)
    facts = store.read_all(ROW_FACTS, again.fact_files()).sample(fraction=1, shuffle=True, seed=1)
    subsets = store.read_all(SUBSETS, again.subset_files()).sample(fraction=1, shuffle=True, seed=2)
    for path in (*again.fact_files()[1:], *again.subset_files()[1:]):
        path.unlink()
    store.write(ROW_FACTS, facts, again.fact_files()[0], MADE_UP)
    store.write(SUBSETS, subsets, again.subset_files()[0], MADE_UP)
    second, other = fits(again), fits(again, seed=1)
    for table in stage.FITS:
        assert first[table.name].equals(second[table.name]), table.name
    assert first["ceiling"]["closable"].equals(other["ceiling"]["closable"])
    assert not first["ceiling"]["closable_low"].equals(other["ceiling"]["closable_low"])


@pytest.mark.parametrize(("n", "raised"), [(7, 0.0), (7, 1 / 7), (8, 0.25), (8, 0.3), (6, 0.49), (5, 0.8)])
def test_median_cap_is_the_largest_median_that_raising_can_reach(n, raised):
    values = np.random.default_rng(n).random(n)
    count = int(raised * n + 1e-9)
    reached = []
    for chosen in itertools.combinations(range(n), count):
        changed = values.copy()
        changed[list(chosen)] = 1.0
        reached.append(np.median(changed))
    assert median_cap(values, raised) == pytest.approx(max(reached))


def test_cap_follows_the_published_shares_and_is_null_elsewhere(tmp_path):
    made = rows(12, 40)
    where = Store(tmp_path)
    for s in (4, 32, 64):
        put(where, made, s=s)
    found = fits(where, resamples=2)["ceiling"]
    assert one(found, s=4)["cap"] == one(found, s=4)["closable"]
    closable = 1 - made["rules"]["optimal_pool"][0] / made["rules"]["top_mass"][0]
    share = one(found, s=32)["cap_share"]
    assert share == pytest.approx(36 * 4 / 939, rel=0.01)
    assert one(found, s=32)["cap"] == pytest.approx(np.quantile(closable, 0.5 + share), abs=0.01)
    assert one(found, s=32)["cap"] > one(found, s=32)["closable"] + 0.01
    assert (one(found, s=64)["cap"], one(found, s=64)["cap_share"]) == (None, None)
    assert published_cap_share(7) is None


# The stage: what is current, and what is refused.


OPTIONS = ("--resamples", "50")


@pytest.fixture
def analyse(monkeypatch, capsys):
    """The command line, run in this process: exit code, standard output, standard error."""

    def run_in_process(folder):
        monkeypatch.setattr(sys, "argv", ["analysis", "--data", str(folder), *OPTIONS])
        with pytest.raises(SystemExit) as stopped:
            run(application, "analysis")
        return stopped.value.code, *capsys.readouterr()

    return run_in_process


def test_command_writes_then_finds_everything_current(tmp_path, analyse):
    where = put(Store(tmp_path), rows())
    code, first, said = analyse(tmp_path)
    assert code == 0, said
    assert said.count(": written") == len(stage.FITS)
    assert "qwen" in first and "180" in first
    assert "from 12 documents covers 91% of the time" in first
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "fits").iterdir()}
    assert len(stamps) == len(stage.FITS)
    code, second, said = analyse(tmp_path)
    assert (code, second) == (0, first)
    assert said.count(": current") == len(stage.FITS) and "written" not in said
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "fits").iterdir()} == stamps
    assert stage.stale(where, stage.provenance(where, 0, 50)) == []
    assert len(stage.stale(where, stage.provenance(where, 1, 50))) == len(stage.FITS)
    assert len(stage.stale(where, stage.provenance(where, 0, 51))) == len(stage.FITS)
    where.fit("roc").write_bytes(where.fit("roc").read_bytes()[:-20])
    assert [table.name for table in stage.stale(where, stage.provenance(where, 0, 50))] == ["roc"]
    put(where, rows(seed=3))
    assert len(stage.stale(where, stage.provenance(where, 0, 50))) == len(stage.FITS)


def test_command_refuses_a_truncated_file_and_leaves_earlier_tables(tmp_path, analyse):
    where = put(Store(tmp_path), rows())
    made = stage.provenance(where, 0, 50)
    stage.write(where, fits(where), list(stage.FITS), made)
    before = {path: path.read_bytes() for path in (tmp_path / "fits").iterdir()}
    path = where.subset_files()[4]
    path.write_bytes(path.read_bytes()[:200])
    code, shown, said = analyse(tmp_path)
    assert (code, shown) == (2, "")
    last = said.splitlines()[-1]
    assert last.startswith("analysis: ") and str(path) in last
    assert {path: path.read_bytes() for path in (tmp_path / "fits").iterdir()} == before


def test_command_without_subsets_says_what_to_run(tmp_path):
    command = [sys.executable, "-m", "analysis", "--data", str(tmp_path / "nowhere"), *OPTIONS]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert (found.returncode, found.stdout) == (2, "")
    assert len(found.stderr.splitlines()) == 1
    assert "run make enumerate" in found.stderr
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("rule", ["top_mass", "optimal_pool"])
def test_subsets_without_a_rule_that_the_ceiling_needs(tmp_path, rule):
    where = put(Store(tmp_path), rows())
    path = where.subsets("qwen", 8, "standard", 5)
    store.write(SUBSETS, store.read(SUBSETS, path).filter(pl.col("rule") != rule), path, MADE_UP)
    with pytest.raises(BadInput, match=rf"rule {rule} is missing for 15 of 180 rows"):
        fits(where)


def test_facts_or_subsets_alone(tmp_path):
    where = put(Store(tmp_path), rows(2, 3))
    for path in where.fact_files():
        path.unlink()
    with pytest.raises(BadInput, match="no facts files: run make enumerate"):
        fits(where)


def test_two_subsets_of_one_row_by_one_rule(tmp_path):
    where = put(Store(tmp_path), rows(2, 3))
    source = where.subsets("qwen", 8, "standard", 0)
    target = where.subsets("qwen", 8, "copied", 0)
    target.parent.mkdir()
    target.write_bytes(source.read_bytes())
    with pytest.raises(BadInput, match="has two subsets of row qwen:0"):
        fits(where)


# A user's own rules.


def test_the_names_of_our_rules_are_those_that_are_enumerated():
    assert set(OURS) == set(RULES)


def test_the_command_shows_a_users_rules_in_short(tmp_path, analyse):
    made = rows()
    put(Store(tmp_path), made)
    assert "Your rules" not in analyse(tmp_path)[1]
    top = made["rules"]["top_mass"][0]
    made["rules"] |= {"mine": (top * 0.8125, made["dropped_mass"], top), "other": (top * 7, made["dropped_mass"], top)}
    put(Store(tmp_path), made, user_rules=("mine", "other"))
    code, shown, _ = analyse(tmp_path)
    assert code == 0
    lines = shown[shown.index("Your rules beside top-mass") :].splitlines()
    mine, other = (next(line.split() for line in lines if rule in line.split()) for rule in ("mine", "other"))
    assert mine[:6] == ["mine", "qwen", "8", "180", "12", "0.812"] and mine[-2:] == ["100%", "0%"]
    assert other[5] == "7.000" and other[-2:] == ["0%", "100%"]


def test_subsets_of_rows_that_were_replaced_since_are_left_out_and_named(tmp_path, analyse):
    made = rows()
    top = made["rules"]["top_mass"][0]
    made["rules"]["mine"] = (top * 0.5, made["dropped_mass"], top)
    where = put(Store(tmp_path), made, user_rules=("mine",))
    anew = Provenance("made up", {}, 0, {"rows": "1" * 64}, "0" * 64)
    for document in (2, 7):
        for table, path in (
            (ROW_FACTS, where.facts("qwen", 8, document)),
            (SUBSETS, where.subsets("qwen", 8, "standard", document)),
        ):
            store.write(table, store.read(table, path), path, anew)
    assert outdated(where) == [where.subsets("qwen", 8, "mine", document) for document in (2, 7)]
    assert one(fits(where)["rules"], rule="mine")["n_documents"] == 10
    assert one(fits(where)["rules"], rule="top_mass")["n_documents"] == 12
    code, _, said = analyse(tmp_path)
    assert code == 0
    assert "qwen, s-008, mine: 2 documents left out, as their rows were replaced since" in said
