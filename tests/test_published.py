"""The published numbers: well formed, told apart, and consistent with one another where arithmetic ties them."""

import itertools
import math
import re
from fractions import Fraction
from pathlib import Path

import pytest

from data import published
from data.errors import BadInput
from data.schema import TABLES

PROFILE = ("kappa", "kappa_p99", "share", "geo_ratio", "leverage_ratio", "penalty", "penalty_p99", "spearman_phi")
PANEL = 10  # arms


def value(key: str, s: int | None = None, model: str | None = None) -> float:
    number = published.find(key, s, model)
    assert number is not None and number.value is not None, (key, s, model)
    return number.value


def of(key: str, s: int | None = None) -> list[published.Published]:
    return [number for number in published.load() if number.key == key and number.s == s]


def test_every_number_says_what_it_is_and_where_it_stands() -> None:
    for number in published.load():
        assert re.fullmatch(r"[a-zA-Z0-9_.]+", number.key)
        assert number.model and number.unit and number.condition
        assert number.place.startswith(("P1, ", "P2, "))
        assert number.tokens in (None, 4096, 16384)
        given = [x for x in (number.value, number.low, number.high) if x is not None]
        assert given and all(math.isfinite(x) and x >= 0 for x in given)
        if number.low is not None and number.high is not None:
            assert number.low <= number.high and number.value is None


def test_no_two_numbers_have_the_same_name() -> None:
    names = [(number.key, number.s, number.model) for number in published.load()]
    assert len(set(names)) == len(names)


def test_keys_are_those_of_our_tables_where_we_have_the_quantity() -> None:
    ours = {column for table in TABLES.values() for column in table.columns}
    keys = {number.key for number in published.load()}
    for key in (
        *("closable", "kappa", "kappa_p99", "share", "recovery", "closure", "balancing_exact", "cap", "cap_share"),
        *("penalty", "penalty_p99", "auc", "spearman_gap", "spearman_phi", "dropped_mass"),
    ):
        assert key in ours
        assert key in keys


@pytest.mark.parametrize("key", PROFILE)
def test_the_reference_profile_is_whole(key: str) -> None:
    for s in (4, 8, 16, 32):
        number = published.find(key, s, "Qwen2.5-1.5B")
        assert number is not None and number.value is not None and number.place == "P1, Table 8"


def test_the_panel_is_whole() -> None:
    assert sum(number.place == "P1, Table 6" for number in of("auc", 8)) == PANEL
    arms = {number.model for number in of("auc", 8) if number.place == "P1, Table 6"}
    for key in ("spearman_phi", "edge_over_interior", "rho_depth"):
        assert {number.model for number in of(key)} == arms
    span = published.find("auc", 8, "range over the panel")
    assert span is not None
    values = [value("auc", 8, arm) for arm in arms]
    assert (span.low, span.high) == (min(values), max(values))


@pytest.mark.parametrize("model", ["Qwen2.5-1.5B", "OLMo-2-1B", "pooled"])
def test_closure_runs_over_seven_budgets(model: str) -> None:
    assert all(0 < value("closure", s, model) < 0.2 for s in (4, 8, 16, 32, 64, 128, 256))


def test_dropped_mass_falls_with_the_budget() -> None:
    masses = [value("dropped_mass", s) for s in (4, 8, 16, 32, 64, 128, 256)]
    assert masses == sorted(masses, reverse=True)


def test_the_cap_is_at_least_the_median_it_caps() -> None:
    for s in (4, 8, 16, 32):
        assert value("cap", s) >= value("closable", s)


def test_counts_follow_from_heads_rows_and_budgets() -> None:
    heads = {number.model: number.value for number in of("heads")}
    # layers times query heads of the architectures
    assert heads == {
        "Qwen2.5-1.5B": 28 * 12,
        "Llama-3.2-1B": 16 * 32,
        "OLMo-2-1B": 16 * 16,
        "Qwen3-1.7B": 28 * 16,
        "Qwen2.5-7B": 28 * 28,
    }
    rows, budgets = value("rows_per_head"), 4
    large = heads.pop("Qwen2.5-7B") * rows
    small = sum(heads.values()) * rows
    assert small * budgets == value("instances", model="four models at 4,096 tokens") == 111_744
    assert large * budgets == value("instances", model="Qwen2.5-7B") == 56_448
    assert (small + large) * budgets == value("instances", model="all five models") == 168_192
    assert small * 20 / 3 == value("rows_of_twenty_documents") == 186_240
    assert heads["Qwen2.5-1.5B"] * rows * 3 * budgets == value("instances_content") == 72_576
    profile = published.find("kappa", 4, "Qwen2.5-1.5B")
    assert profile is not None and int(profile.rows.replace(",", "")) == heads["Qwen2.5-1.5B"] * rows


def test_the_solver_audit_adds_up() -> None:
    improved = [value("solver_improved", s) for s in (4, 8, 16, 32)]
    solved = value("solver_solved")
    assert sum(improved) == 46
    assert round(sum(improved) / solved, 3) == value("solver_improved_share")
    assert solved < value("solver_manifest")
    for s, count in zip((4, 8, 16, 32), improved, strict=True):
        assert value("cap_share", s) == pytest.approx(count / (solved / 4), abs=1e-15)


def test_the_pool_is_the_largest_within_its_limit_and_24_keys() -> None:
    for s in (4, 8, 16, 32):
        extra = max(e for e in range(25) if math.comb(s + e, s) <= value("pool_limit"))
        assert extra == value("pool_extra", s)


def forced_errors(points: list[int], masses: list[Fraction]) -> dict[tuple[int, ...], Fraction]:
    """Distance of each subset's weighted mean from that of all points, on a line, in exact arithmetic."""
    keys = range(len(points))
    total = sum(p * v for p, v in zip(masses, points, strict=True))
    return {
        subset: abs(sum(masses[j] * points[j] for j in subset) / sum(masses[j] for j in subset) - total)
        for size in range(1, len(points) + 1)
        for subset in itertools.combinations(keys, size)
    }


def test_example_2_2() -> None:
    errors = forced_errors([-1, 1, 5], [Fraction(45, 100), Fraction(45, 100), Fraction(10, 100)])
    pairs = {subset: error for subset, error in errors.items() if len(subset) == 2}
    assert float(min(pairs.values())) == float(errors[0, 2]) == value("toy_2.2_optimum", 2)
    assert float(errors[0, 1]) == value("toy_2.2_top_mass", 2)
    assert float(errors[1, 2]) == value("toy_2.2_worst", 2)
    assert float(errors[0, 1] / errors[0, 2]) == value("toy_2.2_kappa", 2)
    assert value("toy_2.2_free", 2) == 0  # the mean 1/2 lies between the first two points


def test_example_a_2() -> None:
    errors = forced_errors([0, 1, 2, 3], [Fraction(1, 4)] * 4)
    numbers = of("toy_A.2_error")
    assert len(numbers) == 8
    for number in numbers:
        subset = tuple(int(key) for key in re.findall(r"\d", number.model))
        assert number.value == float(errors[subset])


def test_find_tells_budgets_and_models_apart() -> None:
    assert value("spearman_phi", 8, "Qwen2.5-1.5B") == 0.94
    assert value("spearman_phi", None, "Qwen2.5-1.5B") == 0.91
    assert value("spearman_phi", None, "OLMo-2-1B") == 0.80
    assert value("closable", 16) == 0.047
    assert published.find("closable", 5) is None
    assert published.find("closable", 16, "no such model") is None
    assert published.find("no such key") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("value = [1.0]", "value has 1 entries, expected 2"),
        ("value = [1.0, 2.0]\nunits = 'x'", "unknown field 'units'"),
        ("", "expected a value, or low and high"),
        ("value = [1.0, 2.0]\nplace = 3", "field 'place' is missing or no text"),
    ],
)
def test_an_entry_off_the_schema_is_refused_by_name(change: str, message: str, tmp_path: Path) -> None:
    place = "" if "place" in change else "place = 'P1, text'"
    path = tmp_path / "published.toml"
    path.write_text(f"[[numbers]]\nkey = 'k'\ns = [4, 8]\nmodel = 'm'\nunit = '1'\ncondition = 'c'\n{place}\n{change}")
    with pytest.raises(BadInput, match=re.escape(message)) as raised:
        published.load(path)
    assert "entry 1 (k)" in str(raised.value)
