"""out/report.html: one page with the finding, the figures, the tables beside what is published, and a gallery."""

import base64
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import numpy as np
import polars as pl

from analysis.bootstrap import MIN_DOCUMENTS, RESAMPLES
from data import published
from data.errors import BadInput
from data.schema import CEILING, MAP, PREDICTOR, ROC, ROW_FACTS, ROWS, SUBSETS
from data.store import Store, code_digest, digest_of, footer, sha256, write_text
from figures import audit_page, certified, comparison, flat_map, loss, loss_page, own_rules, page_tables, style
from figures import ceiling as ceiling_figure
from figures.audit import audited
from figures.build import PICTURES, check_measured
from figures.fits import TABLES, analysed, fit
from figures.gallery import Entry, gallery
from figures.measured import EMBEDDED, QUANTISED, measured, reads_default_text
from figures.page_tables import NONE, count, number, percent, reach, span, with_interval

TEMPLATE = Path(__file__).with_name("report.html.j2")
MAY_BE_EMPTY = (ROC, *certified.TABLES)
HARDNESS = "hardness"  # the figure that has a section of its own, where it was drawn
APART = (*certified.STEMS, HARDNESS, audit_page.STEM, loss_page.STEM)  # figures that stand in sections of their own
COVERAGE = {3: 0.73, 5: 0.84, 10: 0.89, 20: 0.93}  # documents -> measured coverage for normal data, B = 1000
CSS_DOTS = 96  # CSS pixels an inch: a figure is shown at its printed size, or larger
_LARGER = 1.25  # how much larger than in print: a screen is read from further away
_PNG_WIDTH = slice(16, 20)  # where a PNG says how wide it is

EXTRA_KEYS = {4: 24, 8: 12, 16: 6, 32: 4}  # budget -> keys that the candidate set adds to the top-mass set (P1)
CANDIDATES = (
    f"The candidate set shrinks as s grows: {'/'.join(map(str, EXTRA_KEYS.values()))} keys beside the top-mass set at"
    f" s = {'/'.join(map(str, EXTRA_KEYS))}; trends over s partly reflect it."
)

CAPTIONS = {
    "ceiling": (
        "How much a better choice could gain",
        "Error of the attention output relative to top-mass, per model and budget: 1 is keeping the s largest"
        " weights, 0 is dense attention. The upper panel is the whole scale, the lower one its shaded part. Floor: the"
        " median of the best subset in the candidate set, a better one may exist outside it, so the floor may lie"
        " lower. Cap: how low that median could lie if as many optima improved as in the published solver runs."
        f" {CANDIDATES}",
    ),
    "flat_map": (
        "Where attention is flat",
        "Medians over each cell's rows, a cell being one query head of one layer. Above, the least dropped mass;"
        " below, κ̂, how many times top-mass's error is that of the best subset known. Light grey: no finite median.",
    ),
    "roc": (
        "Dropped mass tells which rows could gain",
        "A row is positive if the best subset of the candidate set removes at least a tenth of top-mass's error."
        " Dropped mass needs the weights alone; both rival bounds need the values.",
    ),
    "penalty": (
        "What forcing the weights costs",
        "Best forced error over free error, by three estimates of the free error. Over-estimates of the free error"
        " pull π̂ down, below 1 on some rows, which no true π can be; ours cannot fall below 1. Stars are published"
        " values of another model, for reference.",
    ),
    "rules": (
        "Other rules beside top-mass",
        "Median error of each selection rule divided by top-mass's on the same row; below 1 is better. Stars are"
        " published values of another model, for reference. The map, the ROC curves and the penalty are about the"
        " optimum: no rule, ours or yours, has a place in them.",
    ),
    HARDNESS: (
        "Why it is hard",
        "Nodes of branch and bound against the number of keys, median and range over five random instances or over the"
        " captured rows (their n heaviest keys). Partition rows and captured rows keep half of the keys; Exact Cover"
        " keeps about a fifth. Unsolvable: proved to have no subset of error 0. No nodes at all are drawn as one; the"
        " grey line counts the subsets of half the keys. The worst case is exponential; captured rows are far from it.",
    ),
    audit_page.STEM: audit_page.CAPTION,
    loss_page.STEM: loss_page.CAPTION,
    **certified.CAPTIONS,
}
NOTES = {
    "ceiling": (
        "ĉ = 1 − ES_pool / e_top, the closable fraction, and κ̂ = e_top / ES_pool are lower bounds: only the candidate"
        " set was searched. Cap: the (0.5 + f) quantile of ĉ, f the share of optima that the published solver runs"
        " improved, which bounds the median from above if our optima would improve as often."
    ),
    "balancing": (
        "Recovery: what it removes of the gap between top-mass and the pool optimum, over rows with a gap. Closure:"
        " 1 − e_bal / e_top, rows without a gap counting 0. Optimal: share of rows where it reaches the pool optimum."
        " No gap: the pool optimum equals top-mass. e_top = 0: top-mass is exact within rounding (ĉ = 0, label 0)."
        " κ̂ = ∞: the pool optimum alone is."
    ),
    "predictor": (
        "Label 1: ES_pool ≤ 0.9 e_top. p is two-sided, for no difference between the statistic's AUC and that of"
        " dropped mass on the same resamples. The table holds many p, none corrected for multiplicity: some would be"
        " small by chance alone."
    ),
    "penalty": (
        "Rows whose free error is zero within rounding have an infinite π and are counted under EF = 0 alone. The two"
        " Frank-Wolfe estimates are the published ones."
    ),
    "rules": "Better, worse: share of rows whose error is below, above that of top-mass. Your own rules come last.",
}


GLOSSARY = (  # term, and its meaning; p: the weights of a row, v: its values, mu: the dense output
    (
        "e_s(A)",
        "forced error of a set A of s keys: |g_A| / p(A), with g_A = Σ_A p_j (v_j − μ), p(A) = Σ_A p_j, μ = Σ p_j v_j",
    ),
    ("ES_pool, κ̂, ĉ", "least e_s over the candidate set; κ̂ = e_top / ES_pool; ĉ = 1 − ES_pool / e_top = 1 − 1 / κ̂"),
    ("dropped mass m̄_s, Φ", "m̄_s = 1 − p(A_top), A_top the s heaviest keys; Φ = |g_A| of A_top"),
    ("balancing selector", "from A_top, the single swap that lowers e_s most, again until none does; A_bal, e_bal"),
    (
        "geometric",
        "the s keys that fully corrective Frank–Wolfe picks to come near μ with free weights, used with forced ones",
    ),
    ("leverage", "the s keys of largest k_j′ (K′K + λI)⁻¹ k_j, λ = 10⁻³ tr(K′K) / d, whatever the query"),
    (
        "free error EF, price π",
        "EF(s) = min over |A| = s of dist(μ, conv{v_j : j in A}); π(s) = ES(s) / EF(s), π̂ = ES_pool / EF",
    ),
    ("rival bounds", "diameter: 2 D m̄_s, D = max |v_j − μ|; variance: σ √(m̄_s / (1 − m̄_s)), σ² = Σ p_j |v_j − μ|²"),
)


@dataclass(frozen=True)
class Shown:
    """A figure on the page: its image as a data URI, its width in CSS pixels, its title and caption."""

    stem: str
    image: str
    width: int
    title: str
    caption: str


@dataclass(frozen=True)
class Certified:
    """The section on the search over whole rows: lines of text, figures, ours beside published."""

    about: list[str]
    figures: list[Shown]
    table: page_tables.PageTable


@dataclass(frozen=True)
class Audit:
    """The section on what methods hold: lines of text, the figure, every method, ours beside published."""

    about: list[str]
    figure: Shown
    notes: list[str]
    methods: page_tables.PageTable
    published: page_tables.PageTable


@dataclass(frozen=True)
class Loss:
    """The section on the model's loss: lines of text, the figure, every rule, ours beside published."""

    about: list[str]
    figure: Shown
    note: str
    rules: page_tables.PageTable
    published: page_tables.PageTable


def write_report(store: Store, out: Path) -> tuple[Path, bool]:
    """Write out/report.html unless it is current; returns its path and whether it was written.

    The figures must lie in out/figures. Raises BadInput if nothing was measured, if only a part of the analysis' tables
    is there, and if a table or a figure is missing or not readable.
    """
    path = out / "report.html"
    mark = f'<meta name="made-from" content="{_made_from(store, out / "figures")}">'
    if path.is_file() and mark in path.read_text(encoding="utf-8")[:1000]:
        return path, False
    write_text(path, render(store, out / "figures", mark))
    return path, True


def render(store: Store, figures: Path, mark: str = "") -> str:
    """The page as HTML that loads nothing from anywhere; every text that comes from data is escaped.

    Sections of which nothing was measured are left out. Raises BadInput as write_report does.
    """
    check_measured(store)
    applies = {picture.stem: picture.applies(store) for picture in PICTURES}
    tables = _tables(store) if analysed(store) else None
    shown = {stem: _shown(store, figures, stem, tables or {}) for stem, there in applies.items() if there}
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        mark=markupsafe.Markup(mark),
        analysis=None if tables is None else _analysis(store, tables, shown),
        missing=_missing(tables, shown),
        hardness=shown.get(HARDNESS),
        audit=_audit(store, shown),
        loss=_loss(store, shown),
        number=number,
    )


def _tables(store: Store) -> dict[str, pl.DataFrame]:
    """The analysis' tables by name; raises BadInput if one is missing."""
    return {table.name: fit(store, table, may_be_empty=table in MAY_BE_EMPTY) for table in TABLES}


def _analysis(store: Store, tables: Mapping[str, pl.DataFrame], shown: Mapping[str, Shown]) -> dict[str, object]:
    """What the page shows of the analysis, by the names that the template knows."""
    ceiling = style.in_order(tables["ceiling"], "s")
    resamples = _resamples(store)
    first, *more = _finding(tables)
    entries = gallery(store)
    predictor = page_tables.predictor(tables["predictor"], resamples)
    return {
        "finding": [first, *certified.sentences(tables["certified"]), *more],
        "aside": _aside(ceiling),
        "own_rows": _own_rows(ceiling),
        "own_finding": own_rules.sentences(tables["rules"]),
        "figures": [figure for stem, figure in shown.items() if stem not in APART],
        "certified": _certified(store, tables["certified"], shown),
        "own_rules": own_rules.own_rules(tables["rules"]),
        "own_rules_note": " ".join([own_rules.NOTE, *own_rules.not_graded(tables["rules"])]),
        "measured": measured(store, ceiling),
        "captured": bool(store.row_files()),
        "limits": _limits(store, ceiling, resamples),
        "glossary": GLOSSARY,
        "comparison": comparison.compare(store, tables),
        "tables": [
            ("ceiling", "The ceiling", NOTES["ceiling"], page_tables.ceiling(ceiling)),
            ("balancing", "The balancing selector", NOTES["balancing"], page_tables.balancing(ceiling)),
            ("predictor", "Predicting who gains", NOTES["predictor"], predictor),
            ("penalty", "The price of forced weights", NOTES["penalty"], page_tables.penalty(tables["penalty"])),
            ("rules", "Rules beside top-mass", NOTES["rules"], page_tables.rules(tables["rules"])),
            *_certified_tables(tables),
        ],
        "gallery": entries,
        "gallery_choice": _gallery_choice(entries),
    }


def _missing(tables: Mapping[str, pl.DataFrame] | None, shown: Mapping[str, Shown]) -> list[str]:
    """A line per section that is left out as nothing was measured for it, with the command that measures it."""
    lines = []
    if tables is None:
        lines.append(
            "Left out: how much a better choice could gain. Run make, or make capture, make enumerate and make analysis"
            " for models and budgets of your choice; then make report."
        )
    elif tables["certified"].is_empty():
        lines.append(certified.MISSING)
    for stem, command in ((HARDNESS, "make hardness"), (audit_page.STEM, "make audit"), (loss_page.STEM, "make loss")):
        if stem not in shown:
            title = CAPTIONS[stem][0]
            lines.append(f"Left out: {title[0].lower()}{title[1:]}. Run {command}; then make report.")
    return lines


def _certified(store: Store, found: pl.DataFrame, shown: Mapping[str, Shown]) -> Certified | None:
    """The section on the search over whole rows; None if nothing was certified."""
    if found.is_empty():
        return None
    figures = [shown[stem] for stem in certified.STEMS if stem in shown]
    return Certified(certified.about(store, found), figures, certified.beside_published(found))


def _audit(store: Store, shown: Mapping[str, Shown]) -> Audit | None:
    """The section on what methods hold; None if no audit was run."""
    found = audited(store)
    if found.is_empty():
        return None
    answers = audit_page.peer(store)
    return Audit(
        audit_page.about(found, answers),
        shown[audit_page.STEM],
        [audit_page.NOTE, audit_page.PEAK, audit_page.COST],
        audit_page.methods(found, answers),
        audit_page.beside_published(found),
    )


def _loss(store: Store, shown: Mapping[str, Shown]) -> Loss | None:
    """The section on the model's loss; None if it was not measured."""
    found = loss.table(store)
    if found.is_empty():
        return None
    return Loss(
        [*loss_page.finding(found), *loss_page.about(found)],
        shown[loss_page.STEM],
        loss_page.NOTE,
        loss_page.rules(found),
        loss_page.beside_published(found),
    )


def _certified_tables(tables: Mapping[str, pl.DataFrame]) -> list[tuple[str, str, str, page_tables.PageTable]]:
    """All numbers of the search over whole rows; none if nothing was certified."""
    found = tables["certified"]
    if found.is_empty():
        return []
    floors = page_tables.mass_floors(tables["mass_floors"])
    made = [
        ("certified", "The ceiling from both sides", certified.NOTES["ceiling"], page_tables.certified(found)),
        ("search", "The search over every key", certified.NOTES["search"], page_tables.search(found)),
        ("floors", "Mass floors", certified.NOTES["floors"], floors),
    ]
    if not tables["open"].is_empty():
        note, listed = certified.left_open(tables["open"])
        made.append(("open", "Pairs left open", note, page_tables.left_open(listed)))
    return made


def _finding(tables: Mapping[str, pl.DataFrame]) -> list[str]:
    """The sentences of the head, on the first model, which is the real one wherever it was measured."""
    ceiling = style.in_order(tables["ceiling"], "s")
    model = ceiling["model"][0]

    def of(name: str, **fixed: str) -> list[dict[str, Any]]:
        chosen = tables[name].filter(pl.col("model") == model, *(pl.col(c) == v for c, v in fixed.items()))
        return chosen.sort("s").to_dicts()

    records = of("ceiling")
    budgets = [int(record["s"]) for record in records]
    budget = f"s = {budgets[0]}" if len(budgets) == 1 else f"s = {budgets[0]} to {budgets[-1]}"
    rows, documents = (max(int(record[name]) for record in records) for name in ("n_rows", "n_documents"))
    bracketed = " In brackets: 95% intervals." if any(r["closable_low"] is not None for r in records) else ""
    sentences = [
        f"On {count(rows)} attention rows of {model}, from {_documents(documents)}, the best subset that the candidate"
        f" set holds removes a median of {reach(records, 'closable', 1, share=True)} and a mean of"
        f" {reach(records, 'closable_mean', 1, share=True)} of the error that keeping the largest weights leaves"
        f" ({budget}), and at least a tenth of it on {reach(records, 'share', 0, share=True)} of the rows.{bracketed}",
    ]
    areas = reach(of("predictor", statistic="dropped_mass"), "auc", 2)
    if areas != NONE:
        sentences.append(
            "The dropped mass alone tells the rows with at least a tenth to gain from the others with an area under the"
            " ROC curve of"
            f" {areas} ({_documents(documents)})."
        )
    exact = reach(records, "balancing_exact", 0, share=True)
    if exact != NONE:
        sentences.append(
            f"The balancing selector reaches the candidate set's optimum on {exact} of the rows"
            f" ({_documents(documents)})."
        )
    prices = of("penalty", estimate="least")
    if prices:
        first, last = (with_interval(record, "penalty", 2) for record in (prices[0], prices[-1]))
        ends = f"{first} at s = {prices[0]['s']}"
        ends += f" and {last} at s = {prices[-1]['s']}" if len(prices) > 1 else ""
        sentences.append(
            f"Using the weights as they are, instead of re-solving them for the kept keys, costs a factor: the median"
            f" π̂(s), best forced error over least free error, is {ends} ({_documents(documents)})."
        )
    return sentences


def _aside(ceiling: pl.DataFrame) -> str:
    """One line on the other models, rows of a user's own left out, with the caution that belongs to it."""
    others = ceiling.filter((pl.col("model") != ceiling["model"][0]) & (pl.col("family") != style.OWN))
    if others.is_empty():
        return ""
    tiny = all(str(model).startswith(EMBEDDED) for model in others["model"])
    named = f"The {others['model'].n_unique()} other models" if others["model"].n_unique() > 1 else "The other model"
    caution = " They are tiny and say nothing about large ones." if tiny else ""
    return f"{named} {_gain(others)}{caution}"


def _own_rows(ceiling: pl.DataFrame) -> list[str]:
    """A line on each set of rows of a user's own, but for the one that the finding is about."""
    own = ceiling.filter((pl.col("model") != ceiling["model"][0]) & (pl.col("family") == style.OWN))
    return [f"Your rows {model} {_gain(part)}" for (model,), part in own.group_by("model", maintain_order=True)]


def _gain(records: pl.DataFrame) -> str:
    """Documents, median and mean gain, and the share of rows with a tenth, over the records' budgets and models."""
    least, most = (int(n) for n in (records["n_documents"].min(), records["n_documents"].max()))  # type: ignore[arg-type]
    spread = f"{least} to " if least < most else ""
    each = " each" if records["model"].n_unique() > 1 else ""
    dicts = records.to_dicts()
    if records["model"].n_unique() == 1:
        gains = [reach(dicts, name, 1, share=True) for name in ("closable", "closable_mean")]
        share = reach(dicts, "share", 0, share=True)
    else:
        gains = [span(records[name].to_list(), 1, share=True) for name in ("closable", "closable_mean")]
        share = span(records["share"].to_list(), 0, share=True)
    return (
        f"({spread}{_documents(most)}{each}): median gain {gains[0]}, mean {gains[1]}, at least a tenth on {share} of"
        " the rows."
    )


def _documents(number: int) -> str:
    return f"{count(number)} document{'' if number == 1 else 's'}"


def _where_it_gains(cells: pl.DataFrame) -> str:
    """Where on the map the gain is: per third of the first model's layers, the share of rows with a tenth to gain."""
    cells = style.in_order(cells.filter(pl.len().over("family", "model") > 1), "layer", "q_head")
    if cells.is_empty():
        return ""
    model = cells["model"][0]
    own = cells.filter(pl.col("model") == model)
    layers = own["layer"].unique().sort().to_list()
    if len(layers) < 3:
        return ""
    bounds = [round(len(layers) * k / 3) for k in range(4)]
    parts = []
    for first, beyond in pairwise(bounds):
        third = own.filter(pl.col("layer").is_in(layers[first:beyond]))
        rows = third["n_rows"].cast(pl.Float64).to_numpy()
        share, mean = (float(np.average(third[name].to_numpy(), weights=rows)) for name in ("share", "closable_mean"))
        named = f"layer {layers[first]}" if beyond - first == 1 else f"layers {layers[first]} to {layers[beyond - 1]}"
        parts.append(f"{percent(share)} of the rows of {named} (mean ĉ {number(mean, 2)})")
    return (
        f" Where the gain is: on {model} at s = {own['s'][0]}, a better subset removes at least a tenth of the error on"
        f" {', on '.join(parts[:-1])} and on {parts[-1]}."
    )


def _limits(store: Store, ceiling: pl.DataFrame, resamples: int) -> list[str]:
    """What a reader must keep in mind, for the models and documents at hand."""
    found = [str(model) for model in ceiling["model"].unique(maintain_order=True)]
    lines = []
    tiny = [model for model in found if model.startswith(EMBEDDED)]
    if tiny:
        lines.append(
            f"{', '.join(tiny)}: checkpoints of about 1.2 million parameters each, trained by this project in minutes"
            " on six novels. Their figures show that the measurement works on each architecture; they say nothing"
            " about large models."
        )
    lines += [
        f"{model}: the 4-bit weights of a published file, dequantised; not the original bf16 model."
        for model in found
        if QUANTISED in model
    ]
    lines.append(
        "ĉ and κ̂ are lower bounds: they compare top-mass with the best subset of a candidate set of a few keys more"
        f" than s, not of all keys. {CANDIDATES}"
    )
    read = [model for model in found if reads_default_text(store, model)]
    if read:
        lines.append(
            "The default text is one stretch of public-domain prose by Jane Austen, the documents spread evenly over it"
            " without overlap. Documents of one book are not independent: the intervals say nothing about other text,"
            " and their coverage, measured for independent normal data, is optimistic. The text was held out for the"
            " embedded models only; any other model may have seen it."
        )
    documents = sorted({int(n) for n in ceiling["n_documents"]})
    known = ", ".join(f"{cover:.2f} at {n}" for n, cover in COVERAGE.items())
    lines.append(
        f"An interval is a percentile 95% cluster bootstrap over documents, B = {resamples:,}. For normal data its"
        f" measured coverage is {known} documents, not 0.95.{_coverage_here(ceiling)}"
    )
    if documents[0] < MIN_DOCUMENTS:
        few = ceiling.filter(pl.col("n_documents") < MIN_DOCUMENTS)["model"].unique(maintain_order=True)
        lines.append(
            f"Below {MIN_DOCUMENTS} documents no interval is given, point estimates and counts only: {', '.join(few)}."
        )
    lines.append("Published numbers are copied from the paper, each with its place there; nothing here reran them.")
    return lines


def _gallery_choice(entries: list[Entry]) -> str:
    """How the rows of the gallery were chosen, with the counts that came of it."""
    if not entries:
        return ""
    first = entries[0].model
    own = sum(entry.model == first for entry in entries)
    if own == len(entries):
        return f"Chosen: the {own} rows of {first} with the largest finite κ̂ over all budgets."
    return (
        f"Chosen: the {own} rows of {first} with the largest finite κ̂ over all budgets, then the {len(entries) - own}"
        " with the largest among all else that was measured; by κ̂ within a model."
    )


def _coverage_here(ceiling: pl.DataFrame) -> str:
    """The measured coverage at the document counts of this page, or nothing where no interval is given."""
    pairs = ceiling.drop_nulls("coverage").select("n_documents", "coverage").unique().sort("n_documents")
    if pairs.is_empty():
        return ""
    here = ", ".join(f"{cover:.2f} at {n}" for n, cover in pairs.iter_rows())
    return f" Here: {here} documents."


def _resamples(store: Store) -> int:
    """B of the bootstrap, as the analysis noted it."""
    parameters = footer(CEILING, store.fit(CEILING.name))["parameters"]
    found = parameters.get("resamples", RESAMPLES) if isinstance(parameters, dict) else RESAMPLES
    return int(found)


def _shown(store: Store, figures: Path, stem: str, tables: Mapping[str, pl.DataFrame]) -> Shown:
    path = figures / f"{stem}.png"
    if not path.is_file():
        raise BadInput(f"{path}: no such file: expected a figure; run python -m figures first")
    png = path.read_bytes()
    dots = struct.unpack(">I", png[_PNG_WIDTH])[0]
    title, caption = CAPTIONS[stem]
    if stem == "ceiling":
        caption += _on_users_marks(ceiling_figure.table(store))
    elif stem == "flat_map":
        caption += _where_it_gains(flat_map.table(store)) + _left_out_of_map(tables[MAP.name])
    elif stem == "roc":
        caption += _left_out_of_roc(tables[ROC.name], tables[PREDICTOR.name])
    elif stem in certified.OF_ONE:
        caption += certified.whose(tables["certified"])
    elif stem == audit_page.STEM:
        caption += audit_page.whose(audited(store))
    image = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return Shown(stem, image, round(dots / style.RESOLUTION * CSS_DOTS * _LARGER), title, caption)


def _left_out_of_map(cells: pl.DataFrame) -> str:
    """What the map leaves out and why: a budget that was not run, a model without it, rows that name no heads."""
    s = style.headline_budget(cells)
    lines = _without_budget(cells, "map")
    if s != style.HEADLINE_BUDGET:
        lines.append(f"No cell is marked flat: that is decided at s = {style.HEADLINE_BUDGET}.")
    shown = cells.filter(pl.col("s") == s)
    single = style.in_order(shown.filter(pl.len().over("family", "model") == 1))["model"].to_list()
    if single:
        lines.append(f"Left out: {', '.join(single)}, whose rows name no layers and heads.")
    return "".join(f" {line}" for line in lines)


def _left_out_of_roc(points: pl.DataFrame, areas: pl.DataFrame) -> str:
    """What the curves leave out and why: a budget that was not run, a model without it, rows of one label alone."""
    if points.is_empty():
        return ""  # the figure itself says so
    lines = _without_budget(points, "curves", areas)
    s = style.headline_budget(points)
    drawn = points.filter(pl.col("s") == s)["model"].unique().to_list()
    run = style.in_order(areas.filter(pl.col("s") == s)).filter(~pl.col("model").is_in(drawn))
    if not run.is_empty():
        named = ", ".join(run["model"].unique(maintain_order=True))
        lines.append(f"Left out: {named}, where all rows gain at least a tenth, or none does.")
    return "".join(f" {line}" for line in lines)


def _without_budget(frame: pl.DataFrame, named: str, run: pl.DataFrame | None = None) -> list[str]:
    """Lines on the budget of a figure that shows one alone: which, if not the usual, and which models lack it."""
    s, run = style.headline_budget(frame), frame if run is None else run
    lines = []
    if s != style.HEADLINE_BUDGET:
        usual = style.HEADLINE_BUDGET
        why = "has none" if (run["s"] == usual).any() else "was not run"
        lines.append(f"The {named} {'are' if named[-1] == 's' else 'is'} at s = {s}, as s = {usual} {why}.")
    models = style.in_order(run)["model"].unique(maintain_order=True)
    with_it = run.filter(pl.col("s") == s)["model"].unique().to_list()
    lacking = [str(model) for model in models if model not in with_it]
    if lacking:
        lines.append(f"Left out: {', '.join(lacking)}, not run at s = {s}.")
    return lines


def _on_users_marks(frame: pl.DataFrame) -> str:
    """What the caption of the ceiling adds where a user's rules are in it."""
    users = ceiling_figure.users(frame)
    if not users:
        return ""
    scale = ", where the scale is logarithmic above 1" if ceiling_figure.goes_on_above(frame) else ""
    return (
        f" Your rule{'s' if len(users) > 1 else ''} {', '.join(users)}: median over rows, beside the other marks of the"
        f" budget; what is far above top-mass stands in the upper panel alone{scale}."
    )


def _made_from(store: Store, figures: Path) -> str:
    """Digest of all that the page shows: code, template, published numbers, tables, figures, rows and subsets.

    Rows and subsets count by their footers, which say how each file was made, as they may hold gigabytes.
    """
    parts = [code_digest("data", "analysis", "figures"), sha256(TEMPLATE), sha256(published.PATH)]
    parts += [sha256(store.fit(table.name)) for table in TABLES if store.fit(table.name).is_file()]
    parts += [
        sha256(path) for path in (*store.audit_files(), store.peer_audit(), *store.loss_files()) if path.is_file()
    ]
    parts += [sha256(path) for path in sorted(figures.glob("*.png"))]
    for table, paths in ((ROWS, store.row_files()), (SUBSETS, store.subset_files()), (ROW_FACTS, store.fact_files())):
        parts += [str(path) + json.dumps(footer(table, path), sort_keys=True) for path in paths]
    return digest_of(parts)
