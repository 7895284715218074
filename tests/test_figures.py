"""The figures: files, data beside them, readable in grey and at a column's width, drawn again only when needed."""

import io
import itertools
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Annotation, Text
from PIL import Image

from data.errors import BadInput
from data.schema import AUDIT, CEILING, MAP, PENALTY, PREDICTOR, ROC, TABLES
from data.store import Store, read, write
from figures import audit, ceiling, flat_map, penalty, roc, rules, style
from figures.build import PICTURES, Picture, build, to_csv
from tests import synthetic_store
from tests.synthetic_store import Model, UserRule

TWO = (Model("llama", "SmolLM2-135M-Instruct-Q4_1", 30, 9, 0.05), Model("gemma", "embedded-gemma", 4, 4, 0.02))


CERTIFIED_STEMS = ("certified_ceiling", "mass_floor", "proved")


def drawable(store: Store) -> list[Picture]:
    """The figures that this store has tables for."""
    return [picture for picture in PICTURES if picture.applies(store)]


def named(stem: str) -> Picture:
    return next(picture for picture in PICTURES if picture.stem == stem)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return synthetic_store.build(tmp_path_factory.mktemp("data"), TWO, row_documents=0)


@pytest.fixture(scope="module")
def drawn(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "figures"
    assert build(store, folder) == [picture.stem for picture in drawable(store)]
    return folder


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn in full but saved coarsely, for tests that look at other things."""
    monkeypatch.setattr(style, "save", synthetic_store.quick_save)


def changed(store: Store, name: str, change: pl.Expr) -> None:
    """Write a table of the analysis again with some columns changed."""
    frame = read(TABLES[name], store.fit(name)).with_columns(change)
    synthetic_store.put(store, TABLES[name], frame.to_dicts())


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_png_pdf_and_the_same_data_as_csv(store: Store, drawn: Path, picture: Picture) -> None:
    stem = picture.stem
    if not picture.applies(store):
        pytest.skip("no table for it")
    frame = picture.table(store)
    assert not frame.is_empty()
    text = (drawn / f"{stem}.csv").read_text()
    back = pl.read_csv(io.StringIO(text), schema=frame.schema)
    assert back.equals(frame)
    floats = [name for name, dtype in frame.schema.items() if dtype == pl.Float64]
    columns = pl.read_csv(io.StringIO(text), infer_schema=False).select(floats)
    assert not any("e" in value.lower().replace("inf", "") for column in columns for value in column.drop_nulls())
    assert (drawn / f"{stem}.pdf").read_bytes().startswith(b"%PDF")
    grey = np.asarray(Image.open(drawn / f"{stem}.png").convert("L"), dtype=float)
    width = grey.shape[1] / style.RESOLUTION
    assert any(math.isclose(width, wanted, abs_tol=0.01) for wanted in (style.COLUMN_WIDTH, style.PAGE_WIDTH))
    assert grey.var() > 100
    assert 0.01 < (grey < 128).mean() < 0.75


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_no_letter_is_too_small_for_print(store: Store, picture: Picture) -> None:
    if not picture.applies(store):
        pytest.skip("no table for it")
    with style.applied():
        figure = style.blank()
        picture.draw(picture.table(store), figure)
        figure.draw_without_rendering()
    sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(sizes) >= 7


@pytest.mark.usefixtures("coarse")
def test_a_second_build_draws_nothing_and_a_new_table_only_its_figures(tmp_path: Path) -> None:
    store = synthetic_store.build(tmp_path / "data", TWO[1:], budgets=(8,), row_documents=0)
    folder = tmp_path / "figures"
    build(store, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert build(store, folder) == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    changed(store, "predictor", pl.col("auc") - 0.1)
    assert build(store, folder) == ["roc"]
    (folder / "penalty.csv").write_text("edited")
    (folder / "map.png").unlink(missing_ok=True)
    (folder / "flat_map.png").unlink()
    assert build(store, folder) == ["flat_map", "penalty"]
    assert build(store, folder) == []
    (folder / "made-from.json").write_text("{")
    assert len(build(store, folder)) == len(drawable(store))


def test_the_same_table_gives_the_same_bytes(store: Store) -> None:
    def once() -> tuple[bytes, bytes]:
        with style.applied():
            figure = style.blank()
            ceiling.draw(ceiling.table(store), figure)
            return style.save(figure)

    assert once() == once()


@pytest.mark.usefixtures("coarse")
def test_a_missing_table_is_one_clear_line_and_leaves_the_rest(tmp_path: Path) -> None:
    store = synthetic_store.build(tmp_path / "data", TWO[1:], budgets=(8,), row_documents=0)
    build(store, tmp_path / "figures")
    before = (tmp_path / "figures" / "ceiling.png").read_bytes()
    store.fit("ceiling").unlink()
    with pytest.raises(BadInput, match=r"fits/ceiling\.parquet: no such file.*make analysis"):
        build(store, tmp_path / "figures")
    assert (tmp_path / "figures" / "ceiling.png").read_bytes() == before
    synthetic_store.put(store, CEILING, [])
    with pytest.raises(BadInput, match="no rows"):
        build(store, tmp_path / "figures")


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("budgets", [(8,), (16, 32)])
def test_one_model_few_documents_other_budgets(tmp_path: Path, budgets: tuple[int, ...]) -> None:
    own = (Model("own", "own-rows", 1, 1, 0.4),)
    store = synthetic_store.build(tmp_path, own, budgets=budgets, documents=3, row_documents=0)
    assert len(build(store, tmp_path / "figures")) == len(drawable(store))
    assert flat_map.table(store)["s"].unique().to_list() == [min(budgets)]
    assert ceiling.table(store)["floor_low"].null_count() == len(budgets)


@pytest.mark.usefixtures("coarse")
def test_infinite_and_missing_numbers_are_drawn_round(tmp_path: Path) -> None:
    store = synthetic_store.build(tmp_path, TWO, row_documents=0)
    changed(store, "ceiling", pl.lit(None, dtype=pl.Float64).alias("cap"))
    changed(store, "ceiling", pl.lit(None, dtype=pl.Float64).alias("closure"))
    changed(store, "map", pl.when(pl.col("layer") == 0).then(math.inf).otherwise(pl.col("kappa")).alias("kappa"))
    changed(store, "map", pl.lit(None, dtype=pl.Boolean).alias("flat"))
    changed(store, "predictor", pl.lit(None, dtype=pl.Float64).alias("auc"))
    infinite = pl.when(pl.col("s") == 32).then(math.inf).otherwise(pl.col("penalty")).alias("penalty")
    changed(store, "penalty", infinite)
    assert len(build(store, tmp_path / "figures")) == len(drawable(store))


def test_the_ceiling_draws_one_minus_the_closable_fraction(store: Store) -> None:
    fit = read(CEILING, store.fit("ceiling"))
    with style.applied():
        figure = style.blank()
        ceiling.draw(ceiling.table(store), figure)
    near = figure.axes[1]
    marks = sorted(float(y) for line in near.lines if line.get_marker() == "_" for y in line.get_ydata())
    assert marks == pytest.approx(sorted(1 - c for c in fit["closable"]), abs=1e-12)
    low, high = near.get_ylim()
    assert low <= 1 - fit["closable_q75"].max() and high > 1
    whole = figure.axes[0]
    assert whole.get_ylim()[0] < 0 < 1 < whole.get_ylim()[1]


def test_families_come_in_the_house_order(tmp_path: Path) -> None:
    models = (Model("gemma", "g", 1, 1, 0.1), Model("mistral", "m", 1, 1, 0.1), Model("llama", "l", 1, 1, 0.1))
    store = synthetic_store.build(tmp_path, models, budgets=(4,), row_documents=0)
    assert ceiling.table(store)["model"].to_list() == ["l", "g", "m"]


def test_flat_cells_are_the_marked_ones(store: Store) -> None:
    frame = flat_map.table(store)
    assert frame["s"].unique().to_list() == [8]
    with style.applied():
        figure = style.blank()
        flat_map.draw(frame, figure)
    for axes, (_, model) in zip(figure.axes[:2], style.models(frame), strict=False):
        dots = {(int(y), int(x)) for x, y in axes.collections[0].get_offsets()}
        own = frame.filter((pl.col("model") == model) & pl.col("flat"))
        assert dots == set(zip(own["layer"], own["q_head"], strict=True))
    shape = read(MAP, store.fit("map")).filter(pl.col("s") == 8).height
    assert frame.height == shape == 30 * 9 + 4 * 4


def test_each_roc_curve_has_its_area(store: Store) -> None:
    areas = read(PREDICTOR, store.fit("predictor")).filter(pl.col("s") == 8)
    points = read(ROC, store.fit("roc")).filter(pl.col("s") == 8)
    frame = roc.table(store)
    assert frame.height == points.height
    for record in areas.iter_rows(named=True):
        same = frame.filter(pl.col("model") == record["model"], pl.col("statistic") == record["statistic"])
        assert set(same["auc"]) == {record["auc"]}


def test_the_audit_draws_what_is_held_and_hit(store: Store) -> None:
    frame = audit.table(store)
    assert set(frame["model"]) == {TWO[0].name}  # the real one
    assert frame["method"].unique(maintain_order=True).to_list() == [method[0] for method in synthetic_store.METHODS]
    with style.applied():
        figure = style.blank()
        audit.draw(frame, figure)
    held, hits = figure.axes
    marked = {line.get_marker(): [] for line in held.lines}
    for line in held.lines:
        marked[line.get_marker()].append((line.get_xdata()[-1], line.get_ydata()[-1]))
    assert marked["o"] == [(0.125, 1), (0.125, 3), (0.4, 4)]
    assert marked["s"] == [(1.0, 0), (1.0, 2)]  # who holds the full cache has a mark of its own
    assert marked["|"] == [(0.125, 2), (0.125, 4)]
    assert sorted(marked["*"]) == sorted([(0.036, 1), (0.053, 3), (0.96, 4)])
    assert all(held.get_xlim()[0] < x < held.get_xlim()[1] for marks in marked.values() for x, _ in marks)
    rates = sorted(float(line.get_xdata()[0]) for line in hits.lines)
    assert rates == sorted(hit / 24 for method in synthetic_store.METHODS for hit in method[5:])


@pytest.mark.usefixtures("coarse")
def test_a_new_audit_draws_its_figure_alone_and_none_removes_it(tmp_path: Path) -> None:
    store = synthetic_store.build(tmp_path / "data", TWO, budgets=(8,), row_documents=0)
    folder = tmp_path / "figures"
    build(store, folder)
    frame = read(AUDIT, store.audit("embedded-gemma")).with_columns(pl.col("hits") - 1)
    write(AUDIT, frame, store.audit("embedded-gemma"), synthetic_store.PROVENANCE)
    assert build(store, folder) == ["audit"]
    for path in store.audit_files():
        path.unlink()
    assert build(store, folder) == []
    assert not list(folder.glob("audit.*"))


def test_published_values_are_marked_and_never_under_our_models(store: Store) -> None:
    for frame in (penalty.table(store), rules.table(store)):
        published = frame.filter(pl.col("source") == "published")
        assert set(published["model"]) == {"Qwen2.5-1.5B"}
        assert published["n_rows"].null_count() == published.height > 0
        assert set(frame.filter(pl.col("source") == "ours")["model"]) == {model.name for model in TWO}
    price = penalty.table(store).filter(pl.col("source") == "published").sort("s")
    assert price["penalty"].to_list() == [1.07, 1.16, 1.39, 1.79]
    ours = read(PENALTY, store.fit("penalty"))
    assert penalty.table(store).filter(pl.col("source") == "ours").height == ours.height


WINS, LOSES = UserRule("wins", 0.93), UserRule("loses", 7.5)


def drawn_figure(picture: Picture, store: Store) -> Figure:
    with style.applied():
        figure = style.blank()
        FigureCanvasAgg(figure)
        picture.draw(picture.table(store), figure)
        figure.draw_without_rendering()
    return figure


def marks(figure: Figure, panel: int, number: int) -> list[float]:
    """Heights of the marks of user's rule `number` in a panel, from left to right."""
    look = style.own_look(number)
    lines = [x for x in figure.axes[panel].lines if (x.get_marker(), x.get_color()) == (look.marker, look.colour)]
    return [float(line.get_ydata()[0]) for line in sorted(lines, key=lambda line: line.get_xdata()[0])]


def test_a_rule_that_wins_and_one_that_loses_stand_in_the_ceiling(tmp_path: Path) -> None:
    store = synthetic_store.build(tmp_path, TWO, row_documents=0, users=(WINS, LOSES))
    figure = drawn_figure(PICTURES[0], store)
    once = [1, 0.95, 0.9, 0.85]  # the made-up ratios fall with the budget
    assert marks(figure, 0, 0) == pytest.approx([7.5 * x for x in once] * 2)  # users' rules come by name: loses, wins
    assert marks(figure, 0, 1) == pytest.approx([0.93 * x for x in once] * 2)
    whole, near = figure.axes[:2]
    assert whole.get_ylim()[0] < 0 and whole.get_ylim()[1] > 7.5
    assert near.get_ylim()[0] < 0.93 * 0.85 < 0.93 < near.get_ylim()[1] < 1.1
    heights = [whole.transData.transform((0, y))[1] for y in (0, 0.25, 0.5, 1, 2, 4, 7.5)]
    assert np.diff(heights[:4]) == pytest.approx([(heights[3] - heights[0]) * x for x in (0.25, 0.25, 0.5)])
    assert heights[5] - heights[4] == pytest.approx(heights[4] - heights[3])  # from 1 on a doubling has one length
    assert {"wins", "loses"} <= {text.get_text() for text in figure.findobj(Text)}
    columns = pl.read_csv(io.StringIO(to_csv(ceiling.table(store))))
    assert columns["ratio:loses"].to_list() == pytest.approx([7.5 * x for x in once] * 2)
    assert (columns["ratio_low:wins"] < columns["ratio:wins"]).all()


def test_without_a_users_rule_nothing_of_it_is_drawn(tmp_path: Path) -> None:
    store = synthetic_store.build(tmp_path, TWO, row_documents=0, users=())
    figure = drawn_figure(PICTURES[0], store)
    assert not any("ratio" in name for name in ceiling.table(store).columns)
    assert marks(figure, 0, 0) == []
    assert figure.axes[0].get_ylim() == (-0.1, 1.24)


@pytest.mark.usefixtures("coarse")
def test_rules_graded_at_one_budget_or_on_one_model_only(tmp_path: Path) -> None:
    users = (UserRule("floor_low", 1.1, budgets=(8,)), UserRule("gemmas", 0.9, models=("embedded-gemma",)))
    store = synthetic_store.build(tmp_path, TWO, row_documents=0, users=users)
    assert len(build(store, tmp_path / "figures")) == len(drawable(store))
    frame = ceiling.table(store)
    assert frame.filter(pl.col("ratio:floor_low").is_not_null())["s"].to_list() == [8, 8]
    assert frame["floor_low"].null_count() == 0  # a rule of that name leaves our column alone
    assert set(frame.filter(pl.col("ratio:gemmas").is_not_null())["model"]) == {"embedded-gemma"}
    figure = drawn_figure(PICTURES[0], store)
    assert (len(marks(figure, 0, 0)), len(marks(figure, 0, 1))) == (2, 4)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_marks_of_users_rules_stand_beside_ours_and_apart(tmp_path: Path, count: int) -> None:
    users = tuple(UserRule(f"rule_{n}", 0.95) for n in range(count))
    store = synthetic_store.build(tmp_path, TWO[1:], budgets=(4, 8), row_documents=0, users=users)
    figure = drawn_figure(PICTURES[0], store)
    looks = [style.own_look(number) for number in range(count)]
    lines = [line for line in figure.axes[1].lines if line.get_marker() in {look.marker for look in looks}]
    places = sorted(float(line.get_xdata()[0]) for line in lines)
    assert len(places) == 2 * count
    assert all(abs(x - place) > 0.2 for x in places for place in (0, 1))
    assert (np.diff(places) > 0.1).all()


def test_a_users_rule_has_one_look_and_none_of_ours(tmp_path: Path) -> None:
    users = (UserRule("second", 0.9), UserRule("first", 1.4, models=("embedded-gemma",)))
    store = synthetic_store.build(tmp_path, TWO, row_documents=0, users=users)
    looks = []
    for picture in (PICTURES[0], named("rules")):
        legend = {
            line.get_label(): (line.get_marker(), line.get_color())
            for box in drawn_figure(picture, store).findobj(Legend)
            for line in box.get_lines()
        }
        looks.append((legend["first"], legend["second"]))
        assert not {marker for marker, _ in looks[-1]} & {
            marker for label, (marker, _) in legend.items() if label not in ("first", "second")
        }
    assert looks[0] == looks[1]


@pytest.mark.parametrize("models", [(Model("own", "own-rows", 1, 1, 0.4),), TWO[1:], TWO], ids=["own", "one", "two"])
def test_nothing_is_cut_off_at_the_figures_edge(tmp_path: Path, models: tuple[Model, ...]) -> None:
    users = (UserRule("a_rule_whose_name_is_really_much_too_long", 6.5), UserRule("another_quite_long_name", 0.9))
    store = synthetic_store.build(tmp_path, models, row_documents=0, users=users)
    for picture in drawable(store):
        figure = drawn_figure(picture, store)
        for thing in [*figure.findobj(Legend), *(t for t in figure.findobj(Text) if t.get_text() and t.get_visible())]:
            box = thing.get_window_extent()
            assert box.width == 0 or (box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1), (picture.stem, str(thing))


@pytest.mark.parametrize("budgets", [(8,), (4, 8, 16, 32)])
def test_the_ceilings_headings_stand_apart(tmp_path: Path, budgets: tuple[int, ...]) -> None:
    own = tuple(Model("own", f"rows_of_{name}_that_have_a_long_name", 1, 1, 0.2) for name in "abc")
    store = synthetic_store.build(tmp_path, (*synthetic_store.FIVE, *own), budgets, row_documents=0)
    for count in (1, 3, 5, 8):
        frame = ceiling.table(store)
        kept = [model for _, model in style.models(frame)[-count:]]
        with style.applied():
            figure = style.blank()
            FigureCanvasAgg(figure)
            ceiling.draw(frame.filter(pl.col("model").is_in(kept)), figure)
            figure.draw_without_rendering()
        whole = figure.axes[0]
        boxes = [text.get_window_extent() for text in whole.texts if isinstance(text, Annotation) and text.get_text()]
        assert len(boxes) >= count
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other), (count, one, other)
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 + 1 for box in boxes)
        assert whole.get_window_extent().height > 0.5 * figure.dpi


@pytest.mark.usefixtures("coarse")
def test_rows_that_all_gain_have_no_curve_and_own_rows_no_map(tmp_path: Path) -> None:
    own = (Model("own", "own-rows", 1, 1, 0.4),)
    store = synthetic_store.build(tmp_path, own, budgets=(8,), documents=3, row_documents=0)
    synthetic_store.put(store, ROC, [])
    assert len(build(store, tmp_path / "figures")) == len(drawable(store))
    assert roc.table(store).is_empty()
    said = {t.get_text() for p in PICTURES[1:3] for t in drawn_figure(p, store).findobj(Text)}
    assert any(text.startswith("No curve") for text in said) and any(text.startswith("No map") for text in said)


def test_a_users_rule_stands_in_the_figure_of_rules(store: Store) -> None:
    frame = rules.table(store)
    assert "recent_half" in set(frame["rule"]) and "top_mass" not in set(frame["rule"])
    with style.applied():
        figure = style.blank()
        rules.draw(frame, figure)
        figure.draw_without_rendering()
    assert "recent_half" in {text.get_text() for text in figure.findobj(Text)}


@pytest.mark.usefixtures("coarse")
def test_without_certified_rows_their_figures_are_left_out_and_old_ones_removed(tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    store = synthetic_store.build(tmp_path / "data", TWO[1:], budgets=(8,), row_documents=0)
    assert set(CERTIFIED_STEMS) <= set(build(store, folder))
    for name in ("certified", "mass_floors", "proved", "open"):
        synthetic_store.put(store, TABLES[name], [])
    assert build(store, folder) == []
    assert not any((folder / f"{stem}.{end}").exists() for stem in CERTIFIED_STEMS for end in ("png", "pdf", "csv"))
    assert (folder / "ceiling.png").exists()
    store.fit("proved").unlink()
    assert build(store, folder) == []


def test_the_csv_of_certified_figures_holds_the_tables(store: Store, drawn: Path) -> None:
    for stem, name in (("certified_ceiling", "certified"), ("mass_floor", "mass_floors"), ("proved", "proved")):
        table = read(TABLES[name], store.fit(name))
        if stem != "certified_ceiling":  # of the first model alone
            table = table.filter(pl.col("model") == TWO[0].name)
        shown = pl.read_csv(drawn / f"{stem}.csv", schema=named(stem).table(store).schema)
        assert shown.height == table.height > 0
        keys = [key for key in ("model", "s", "rho", "by", "bin_low", "mass_floor") if key in shown.columns]
        assert shown.sort(keys).equals(table.select(shown.columns).sort(keys))


def test_the_ceiling_from_both_sides_draws_its_numbers(store: Store) -> None:
    frame = named("certified_ceiling").table(store)
    figure = drawn_figure(named("certified_ceiling"), store)
    for axes, (_, model) in zip(figure.axes, style.models(frame), strict=False):
        own = frame.filter(pl.col("model") == model).sort("s")
        drawn = {
            marker: [float(line.get_ydata()[0]) for line in axes.lines if line.get_marker() == marker]
            for marker in ("o", "s", "D")
        }
        assert drawn["o"] == own["pool"].to_list() and drawn["D"] == own["full"].to_list()
        assert drawn["s"] == [value for pair in own.select("half_cap", "half").rows() for value in pair]
        bars = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in axes.patches]
        assert bars == [pytest.approx(pair) for pair in own.select("full", "full_cap").rows()]
        assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > own["full_cap_high"].max()


def test_the_cap_is_a_band_above_each_line_of_mass_floors(store: Store) -> None:
    frame = named("mass_floor").table(store)
    axes = drawn_figure(named("mass_floor"), store).axes[0]
    caps, lines = axes.lines[::2], axes.lines[1::2]
    for s, cap, line, band in zip((4, 8, 16, 32), caps, lines, axes.collections, strict=True):
        own = frame.filter(pl.col("s") == s)
        assert own["rho"].to_list() == sorted(own["rho"]) and own["rho"][0] == 0 and own["rho"][-1] == 1
        assert list(line.get_ydata()) == own["closable"].to_list() and list(cap.get_ydata()) == own["cap"].to_list()
        heights = band.get_paths()[0].vertices[:, 1]
        assert {round(y, 12) for y in heights} == {round(y, 12) for y in (*own["closable"], *own["cap"])}


@pytest.mark.parametrize("proved", [True, False])
def test_certified_figures_of_all_and_nothing_proved(tmp_path: Path, proved: bool) -> None:
    store = synthetic_store.build(tmp_path, TWO[1:], budgets=(8,), documents=3, row_documents=0)
    for name in ("half", "full"):
        changed(store, "certified", (pl.col(name) if proved else pl.lit(1.0)).alias(f"{name}_cap"))
    changed(store, "mass_floors", (pl.col("closable") if proved else pl.lit(1.0)).alias("cap"))
    figures = [drawn_figure(named(stem), store) for stem in CERTIFIED_STEMS]
    highest = [figure.axes[0].get_ylim()[1] for figure in figures[:2]]
    assert all(top < 0.1 if proved else top > 1 for top in highest)
    assert named("certified_ceiling").table(store)["full_low"].null_count() == 1


def test_series_are_told_apart_without_colour() -> None:
    looks = [*style.LOOKS, style.PUBLISHED]
    for one, other in itertools.combinations(looks, 2):
        assert one.marker != other.marker and one.dashes != other.dashes
    for one, other in itertools.combinations(style.LOOKS[:3], 2):  # a figure of three curves has no markers
        assert abs(grey(one.colour) - grey(other.colour)) > 0.1
    assert all(grey(one.colour) < 0.8 for one in looks)
    assert style.look(len(style.LOOKS)).colour != style.look(0).colour
    own = [style.own_look(number) for number in range(8)]
    assert len(set(own)) == 8 and not set(own) & set(style.LOOKS[: style.FIRST_OWN])


def grey(colour: str) -> float:
    """What a grey printer makes of a colour, by Pillow's conversion: 0 black, 1 white."""
    rgb = tuple(round(255 * part) for part in to_rgb(colour))
    return float(Image.new("RGB", (1, 1), rgb).convert("L").getpixel((0, 0))) / 255


def test_the_maps_colours_rise_evenly_in_grey() -> None:
    from matplotlib import colormaps

    colours = (255 * colormaps[style.MAP_COLOURS](np.linspace(0, 1, 11))[:, :3]).astype(np.uint8)
    shades = np.asarray(Image.fromarray(colours[None]).convert("L"), dtype=float)[0]
    assert (np.diff(shades) > 10).all()


def test_csv_is_plain() -> None:
    text = to_csv(pl.DataFrame({"a": [1e-7, 1e22, None], "b": ["x,y", "<b>", ""]}))
    assert text.splitlines()[1] == '0.0000001,"x,y"'
    assert "e" not in text.splitlines()[2]
