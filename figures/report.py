"""out/report.html: one page with the finding, the figures, the tables beside what is published, and a gallery."""

import base64
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2
import markupsafe
import polars as pl

from analysis.bootstrap import MIN_DOCUMENTS, RESAMPLES
from data import published
from data.errors import BadInput
from data.schema import CEILING, MAP, PENALTY, PREDICTOR, ROC, ROW_FACTS, ROWS, RULES, SUBSETS
from data.store import Store, code_digest, digest_of, footer, sha256, write_text
from figures import ceiling as ceiling_figure
from figures import comparison, own_rules, page_tables, style
from figures.build import PICTURES
from figures.fits import fit
from figures.gallery import gallery
from figures.measured import EMBEDDED, QUANTISED, measured
from figures.page_tables import NONE, number, span

TEMPLATE = Path(__file__).with_name("report.html.j2")
FITS = (CEILING, RULES, PENALTY, PREDICTOR, ROC, MAP)
COVERAGE = {3: 0.73, 5: 0.84, 10: 0.89, 20: 0.93}  # documents -> measured coverage for normal data, B = 1000
CSS_DOTS = 96  # CSS pixels an inch: a figure is shown at its printed size, or larger
_LARGER = 1.25  # how much larger than in print: a screen is read from further away
_PNG_WIDTH = slice(16, 20)  # where a PNG says how wide it is

CAPTIONS = {
    "ceiling": (
        "How much a better choice could gain",
        "Error of the attention output relative to top-mass, per model and budget: 1 is keeping the s largest"
        " weights, 0 is dense attention. The upper panel is the whole scale, the lower one its shaded part. Floor: the"
        " median of the best subset in the candidate set, a better one may exist outside it, so the floor may lie"
        " lower. Cap: how low that median could lie if as many optima improved as in the published solver runs.",
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
        " dropped mass on the same resamples."
    ),
    "penalty": (
        "Rows whose free error is zero within rounding have an infinite π and are counted under EF = 0 alone. The two"
        " Frank-Wolfe estimates are the published ones."
    ),
    "rules": "Better, worse: share of rows whose error is below, above that of top-mass. Your own rules come last.",
}


@dataclass(frozen=True)
class Shown:
    """A figure on the page: its image as a data URI, its width in CSS pixels, its title and caption."""

    stem: str
    image: str
    width: int
    title: str
    caption: str


def write_report(store: Store, out: Path) -> tuple[Path, bool]:
    """Write out/report.html unless it is current; returns its path and whether it was written.

    The figures must lie in out/figures. Raises BadInput if a table or a figure is missing or not readable.
    """
    path = out / "report.html"
    mark = f'<meta name="made-from" content="{_made_from(store, out / "figures")}">'
    if path.is_file() and mark in path.read_text(encoding="utf-8")[:1000]:
        return path, False
    write_text(path, render(store, out / "figures", mark))
    return path, True


def render(store: Store, figures: Path, mark: str = "") -> str:
    """The page as HTML that loads nothing from anywhere; every text that comes from data is escaped.

    Raises BadInput as write_report does.
    """
    tables = {table.name: fit(store, table, may_be_empty=table is ROC) for table in FITS}
    ceiling = style.in_order(tables["ceiling"], "s")
    resamples = _resamples(store)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        mark=markupsafe.Markup(mark),
        finding=_finding(tables),
        aside=_aside(ceiling),
        own_finding=own_rules.sentences(tables["rules"]),
        figures=[_shown(store, figures, picture.stem) for picture in PICTURES],
        own_rules=own_rules.own_rules(tables["rules"]),
        own_rules_note=" ".join([own_rules.NOTE, *own_rules.not_graded(tables["rules"])]),
        measured=measured(store, ceiling),
        captured=bool(store.row_files()),
        limits=_limits(ceiling, resamples),
        comparison=comparison.compare(store, tables),
        tables=[
            ("ceiling", "The ceiling", NOTES["ceiling"], page_tables.ceiling(ceiling)),
            ("balancing", "The balancing selector", NOTES["balancing"], page_tables.balancing(ceiling)),
            (
                "predictor",
                "Predicting who gains",
                NOTES["predictor"],
                page_tables.predictor(tables["predictor"], resamples),
            ),
            ("penalty", "The price of forced weights", NOTES["penalty"], page_tables.penalty(tables["penalty"])),
            ("rules", "Rules beside top-mass", NOTES["rules"], page_tables.rules(tables["rules"])),
        ],
        gallery=gallery(store),
        number=number,
    )


def _finding(tables: Mapping[str, pl.DataFrame]) -> list[str]:
    """Three sentences with the numbers of the first model, which is the real one wherever it was measured."""
    ceiling = style.in_order(tables["ceiling"], "s")
    model = ceiling["model"][0]

    def of(name: str, column: str, **fixed: str) -> list[float | None]:
        chosen = tables[name].filter(pl.col("model") == model, *(pl.col(c) == v for c, v in fixed.items()))
        return chosen.sort("s")[column].to_list()

    budgets = [int(s) for s in ceiling.filter(pl.col("model") == model)["s"]]
    budget = f"s = {budgets[0]}" if len(budgets) == 1 else f"s = {budgets[0]} to {budgets[-1]}"
    areas = span(of("predictor", "auc", statistic="dropped_mass"), digits=2)
    told = (
        f"The dropped mass alone tells those rows from the others with an area under the ROC curve of {areas}, and the"
        if areas != NONE
        else "The"
    )
    rows = max(r for r in of("ceiling", "n_rows") if r is not None)
    gains = span(of("ceiling", "closable"), share=True, digits=1)
    prices = of("penalty", "penalty", estimate="least")
    sentences = [
        f"On {rows:,.0f} attention rows of {model}, the best subset that the candidate set holds removes a median of"
        f" {gains} of the error that keeping the largest weights leaves ({budget}), and at least a tenth of it on"
        f" {span(of('ceiling', 'share'), share=True, digits=0)} of the rows.",
        f"{told} balancing selector recovers a median of {span(of('ceiling', 'recovery'), share=True, digits=0)} of"
        " what there is to gain.",
    ]
    if prices:
        ends = (
            f"{number(prices[0], 2)} at {budget}"
            if len(prices) == 1
            else f"{number(prices[0], 2)} at s = {budgets[0]} and {number(prices[-1], 2)} at s = {budgets[-1]}"
        )
        sentences.append(
            f"Using the weights as they are, instead of re-solving them for the kept keys, costs a factor: the median"
            f" π̂(s), best forced error over least free error, is {ends}."
        )
    return sentences


def _aside(ceiling: pl.DataFrame) -> str:
    """One line on the other models, with the caution that belongs to it."""
    others = ceiling.filter(pl.col("model") != ceiling["model"][0])
    if others.is_empty():
        return ""
    tiny = all(str(model).startswith(EMBEDDED) for model in others["model"])
    named = f"The {others['model'].n_unique()} other models" if others["model"].n_unique() > 1 else "The other model"
    caution = " They are tiny and say nothing about large ones." if tiny else ""
    return (
        f"{named}: median gain {span(others['closable'].to_list(), share=True, digits=1)}, at least a tenth on"
        f" {span(others['share'].to_list(), share=True, digits=0)} of the rows.{caution}"
    )


def _limits(ceiling: pl.DataFrame, resamples: int) -> list[str]:
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
        " than s, not of all keys."
    )
    documents = sorted({int(n) for n in ceiling["n_documents"]})
    known = ", ".join(f"{cover:.2f} at {n}" for n, cover in COVERAGE.items())
    lines.append(
        f"An interval is a percentile 95% cluster bootstrap over documents, B = {resamples:,}. For normal data its"
        f" measured coverage is {known} documents, not 0.95.{_coverage_here(ceiling)}"
    )
    if documents[0] < MIN_DOCUMENTS:
        few = ceiling.filter(pl.col("n_documents") < MIN_DOCUMENTS)["model"].unique(maintain_order=True)
        lines.append(f"Below {MIN_DOCUMENTS} documents no interval is given, only counts: {', '.join(few)}.")
    lines.append("Published numbers are copied from the paper, each with its place there; nothing here reran them.")
    return lines


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


def _shown(store: Store, figures: Path, stem: str) -> Shown:
    path = figures / f"{stem}.png"
    if not path.is_file():
        raise BadInput(f"{path}: no such file: expected a figure; run python -m figures first")
    png = path.read_bytes()
    dots = struct.unpack(">I", png[_PNG_WIDTH])[0]
    title, caption = CAPTIONS[stem]
    if stem == "ceiling":
        caption += _on_users_marks(ceiling_figure.table(store))
    image = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return Shown(stem, image, round(dots / style.RESOLUTION * CSS_DOTS * _LARGER), title, caption)


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
    parts += [sha256(store.fit(table.name)) for table in FITS if store.fit(table.name).is_file()]
    parts += [sha256(path) for path in sorted(figures.glob("*.png"))]
    for table, paths in ((ROWS, store.row_files()), (SUBSETS, store.subset_files()), (ROW_FACTS, store.fact_files())):
        parts += [str(path) + json.dumps(footer(table, path), sort_keys=True) for path in paths]
    return digest_of(parts)
