"""The audit on the page: what was run, every method's bytes and hits in one table, and ours beside published."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import scipy.stats

from data import BadInput, published
from data.store import Store
from figures import style
from figures.audit import PUBLISHED_SHARE
from figures.measured import EMBEDDED
from figures.page_tables import NONE, Cell, PageTable, by_model, count, number, percent, span

STEM = "audit"
FULL = "full cache"
CAPTION = (
    "What each method holds, and what it buys",
    "Left: bytes of the storages behind the cache once it was evicted from, as a share of the full cache's; where they"
    " are more than the entries that are still visible, a line joins the two. Right: share of planted needles whose"
    " number the model still gives, with Wilson 95% intervals; the question unseen or seen by what was evicted on."
    " Published ranges run over other budgets, lengths and models.",
)
NOTE = (
    "Bytes are of one sequence: of the unique storages, right after evicting. Below the budget, what it names of the"
    " full cache: its entries times all KV heads."
    " Visible: entries that queries still see. Within budget after evicting: on every prompt; what question and answer"
    " append comes on top. Hits: prompts whose first tokens are exactly the planted number; below, the Wilson 95%"
    " interval. With the question seen, the first of these tokens is still the full pass's own, so that those hit rates"
    " flatter. Entries while answering: in memory a KV head, mean over the decode steps. Side: positions, bases of"
    " values, whatever else is kept for the cache. All but the hits with the question seen is of the question unseen."
)
PEAK = (
    "Peak: the most that keys and values took, with the padded copies that attention makes for a moment. It is large"
    " for the allocators contour, pyramid and random and the selectors alpha and shared, which decide only once all"
    " layers are known, so that the whole prompt is held until then; and for kvzip, which has it read again."
)
COST = (
    "Cost: seconds of scoring, allocating and selecting over those of a dense prefill; of each the median of the"
    " batches of one process, whatever else the machine did meanwhile."
)
PEER_PRESSES = {  # our method -> the press of kvpress that is the same
    **{name: name for name in ("snapkv", "streaming_llm", "tova", "knorm", "keydiff", "expected_attention")},
    "snapkv+pyramid": "pyramidkv",
    "snapkv+adakv": "adakv(snapkv)",
    "snapkv+adakv, masked": "adakv(snapkv)",
    "expected_attention+adakv": "adakv(expected_attention)",
}
_PEER_FIELDS = ("model", "press", "budget", "question_seen", "hit", "n_tokens", "physical_bytes", "full_bytes")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """kvpress's answers: which version, and per (model, press, budget, question seen) its rows."""

    version: str
    window: object
    rows: Mapping[tuple[str, str, int, bool], list[Row]]

    def of(self, row: Row, seen: bool) -> list[Row]:
        """The answers to the same prompts as this row of ours, as far as their number and length tell; else none."""
        press = PEER_PRESSES.get(str(row["method"]))
        if press is None or row["budget"] is None:
            return []
        found = self.rows.get((row["model"], press, row["budget"], seen), [])
        whole = self.rows.get((row["model"], press, row["budget"], True), [])
        same = len(found) == row["prompts"] and {one["n_tokens"] for one in whole} == {row["tokens"]}
        return [one for one in found if one["hit"] is not None] if same else []


def peer(store: Store) -> Peer | None:
    """What kvpress answered, or None if it was not asked; raises BadInput for a file that is not its answer."""
    path = store.peer_audit()
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version, window = str(found["versions"]["kvpress"]), found["window"]
        rows: dict[tuple[str, str, int, bool], list[Row]] = {}
        for row in found["rows"]:
            model, press, budget, seen = (row[name] for name in _PEER_FIELDS[:4])
            rows.setdefault((model, press, budget, seen), []).append({name: row[name] for name in _PEER_FIELDS})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{path}: not an answer of peers/kvpress/audit.py ({error}): delete it and run it again"
        ) from error
    return Peer(version, window, rows)


def whose(audit: pl.DataFrame) -> str:
    """What the caption adds: of which model, at which budget, on how many prompts."""
    first = style.of_first_model(audit)
    smallest = min(first["budget"].drop_nulls().to_list())
    return f" Of {first['model'][0]} at budget {smallest}, {count(int(first['prompts'][0]))} prompts."


def about(audit: pl.DataFrame, answers: Peer | None) -> list[str]:
    """What was run, what holds more than its budget, and what to keep in mind."""
    first = style.of_first_model(audit)
    model, prompts, tokens = first["model"][0], int(first["prompts"][0]), int(first["tokens"][0])
    budgets = " and ".join(str(s) for s in sorted(first["budget"].drop_nulls().unique().to_list()))
    unseen, seen = (
        span(_shares(first.filter(question_seen=one), "nominal_bytes"), 1, share=True) for one in (False, True)
    )
    nominal = f"{unseen} of the full cache"
    if seen not in (unseen, NONE):
        nominal += f" with the question unseen, {seen} with it seen, when the full cache is longer"
    lines = [
        f"{model}: {count(prompts)} prompts of {count(tokens)} tokens, a fact planted in public-domain prose at depths"
        f" spread evenly; nominal budget {budgets} entries a KV head, {nominal}. Every method read the same prompts."
    ]
    evicting = audit.filter(pl.col("budget").is_not_null())
    full = evicting.filter("holds_full_cache", ~pl.col("enforced"))["method"].unique(maintain_order=True).to_list()
    over = evicting.filter(~pl.col("enforced") & ~pl.col("holds_full_cache"))
    held = f"Hold the full cache whatever the budget says: {', '.join(full)}." if full else ""
    if not over.is_empty():
        names = ", ".join(over["method"].unique(maintain_order=True))
        ratios = (over["physical_bytes"] / over["nominal_bytes"]).to_list()
        held += f" Hold more than it: {names} ({span(ratios, 2)} times)."
    lines.append(f"{held} All others hold at most their budget after evicting, on every prompt and model.".strip())
    if all(str(name).startswith(EMBEDDED) for name in audit["model"].unique().to_list() if name != model):
        lines.append("The embedded models are tiny: their hit rates show that the measurement works, no more.")
    if answers is not None:
        lines.append(
            f"kvpress {answers.version}, in an environment of its own, read the same prompts (observation window of"
            f" {answers.window} for its SnapKV; window layers held whole; batches of one)."
        )
    return lines


def methods(audit: pl.DataFrame, answers: Peer | None) -> PageTable:
    """A row per model, budget and method; the two ways of reading the question side by side."""
    headings = [
        "method", "budget", "visible", "held", "within budget after evicting", "hits, question unseen",
        "hits, question seen", "peak", "entries while answering", "cost", "side",
    ]  # fmt: skip
    theirs = [] if answers is None else [f"kvpress {answers.version} holds", "hits, unseen", "hits, seen"]
    both = {key: {bool(one["question_seen"]): one for one in part} for key, part in _grouped(audit).items()}

    def cells(row: Row) -> list[Cell]:
        seen = both[_key(row)].get(True)
        held = "yes" if row["enforced"] else "full cache" if row["holds_full_cache"] else "no"
        budget = row["budget"]
        nominal = "" if budget is None else percent(row["nominal_bytes"] / row["full_bytes"], 1)
        own = [
            Cell(str(row["method"]), text=True),
            Cell(NONE if budget is None else str(budget), nominal),
            *(_bytes(row, f"{name}_bytes") for name in ("logical", "physical")),
            Cell(NONE if budget is None else held),
            _hits(row),
            Cell(NONE) if seen is None else _hits(seen),
            _bytes(row, "peak_bytes"),
            Cell(number(row["mean_cache_len"], 1)),
            Cell(NONE if budget is None else percent(row["compression_seconds"] / row["dense_prefill_seconds"], 1)),
            _bytes(row, "side_bytes"),
        ]
        return own if answers is None else [*own, *_peers(answers, row)]

    unseen = pl.DataFrame([part[min(part)] for part in both.values()], schema=audit.schema)
    return by_model(unseen, [*headings, *theirs], cells)


def beside_published(audit: pl.DataFrame) -> PageTable:
    """Ours beside what the paper says of bytes, cost and needles."""
    first = style.of_first_model(audit)
    others = audit.filter(pl.col("model") != first["model"][0])
    frames = [first, others] if not others.is_empty() else [first]
    rows: list[list[Cell]] = []
    groups: list[int] = []

    def add(
        name: str, ours: Sequence[str | Cell], key: str, model: str, share: bool, differs: str, s: int | None = None
    ) -> None:
        found = published.find(key, s, model)
        own = [Cell(one) if isinstance(one, str) else one for one in ours]
        if found is None or all(one.main == NONE for one in own):
            return
        if not rows or rows[-1][0].main != name:
            groups.append(len(rows))
        ends = [found.value] if found.value is not None else [found.low, found.high]
        theirs = [percent(end, 2 if (end or 0) < 0.1 else 1) if share else number(end, 2) for end in ends]
        there = f"There ({found.place}): {found.condition}."
        rows.append(
            [
                Cell(name, text=True),
                Cell(model, text=True),
                *own,
                Cell(" to ".join(theirs)),
                Cell(f"{there} {differs}", text=True),
            ]
        )

    def of(method: str) -> list[pl.DataFrame]:
        return [frame.filter(method=method, question_seen=False) for frame in frames]

    for ours, theirs in PUBLISHED_SHARE.items():
        values = [span(_shares(part, "physical_bytes"), 1, share=True) for part in of(ours)]
        add(
            "held, of the full cache", values, "held_share", theirs, True, f"Ours: {ours}, one length, budgets as above"
        )
    values = [
        span((part["physical_bytes"] / part["nominal_bytes"]).to_list(), 2) for part in of("snapkv+contour, padded")
    ]
    scored = "Ours scores as SnapKV, there as KVzip or SnapKV"
    add("held over nominal", values, "held_over_nominal", "ContourKV, not enforced", False, scored)
    values = [span((part["full_bytes"] / part["physical_bytes"]).to_list(), 1) for part in of("snapkv")]
    add("full cache over SnapKV", values, "full_over_snapkv", "KVzip", False, "Ours: the full cache; shorter contexts")
    for ours, theirs in (("snapkv", "SnapKV"), ("kvzip", "KVzip's reconstruction score")):
        times = [(1 + part["compression_seconds"] / part["dense_prefill_seconds"]).to_list() for part in of(ours)]
        values = [span(one, 2) for one in times]
        timed = "each time the median of the batches of one process, whatever else the machine did"
        differs = f"Ours: {ours}, shorter contexts, another machine; {timed}"
        add("prefill that scores, over dense", values, "prefill_cost", theirs, False, differs)
    values = [_span_of_hits(frame.filter(pl.col("budget") == 128, ~pl.col("question_seen"))) for frame in frames]
    for model in ("higher of two methods", "lower of two methods"):
        differs = "Ours: every method, question unseen; shorter contexts"
        add("needles hit at s = 128", values, "hit_rate", model, True, differs, 128)
    lost = [_lost_unseen(frame) for frame in frames]
    for model in ("ranked by rows of the document alone", "evicted at the end of the document"):
        differs = (
            "Ours: snapkv, hits with the question seen less hits with it unseen, of all prompts; the former flatter"
        )
        add("needles lost with the question unseen", lost, "hit_rate_lost_unseen", model, True, differs)
    beside = ["our other models"] if len(frames) > 1 else []
    headings = ["quantity", "of", str(first["model"][0]), *beside, "published", "what differs"]
    return PageTable(headings, rows, groups)


def _key(row: Row) -> tuple[object, ...]:
    return row["model"], row["budget"], row["method"]


def _grouped(audit: pl.DataFrame) -> dict[tuple[object, ...], list[Row]]:
    """The rows by model, budget and method, in the order of model and budget; the full cache first."""
    ordered = style.in_order(audit, pl.col("budget").fill_null(0))  # type: ignore[arg-type]  # polars sorts by it
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in ordered.iter_rows(named=True):
        found.setdefault(_key(row), []).append(row)
    return found


def _shares(frame: pl.DataFrame, name: str) -> list[float | None]:
    """The column over the full cache's bytes."""
    return (frame[name] / frame["full_bytes"]).to_list()


def _bytes(row: Row, name: str) -> Cell:
    """Bytes as a share of the full cache's, and below in kB."""
    return Cell(percent(row[name] / row["full_bytes"], 1), f"{number(row[name] / 1000, 1)} kB")


def _hits(row: Row) -> Cell:
    return _share(row["hits"], row["prompts"], row["hit_rate_low"], row["hit_rate_high"])


def _share(hits: int, prompts: int, low: float, high: float) -> Cell:
    return Cell(f"{hits} of {prompts}", f"[{percent(low)}, {percent(high)}]")


def _peers(answers: Peer, row: Row) -> list[Cell]:
    """What kvpress held and hit on the same prompts; the dash where it was not asked or did not answer."""
    cells = []
    for seen in (False, True):
        found = answers.of(row, seen)
        if not found:
            cells.append(Cell(NONE))
            continue
        hits = sum(bool(one["hit"]) for one in found)
        interval = scipy.stats.binomtest(hits, len(found)).proportion_ci(0.95, method="wilson")
        cells.append(_share(hits, len(found), float(interval.low), float(interval.high)))
    found = answers.of(row, False)
    held = sum(one["physical_bytes"] / one["full_bytes"] for one in found) / len(found) if found else None
    return [Cell(percent(held, 1)), *cells]


def _span_of_hits(frame: pl.DataFrame) -> str:
    return span(frame["hit_rate"].to_list(), 0, share=True)


def _lost_unseen(frame: pl.DataFrame) -> Cell:
    """Prompts that snapkv hits with the question seen less those with it unseen; least and most of models and budgets.

    As a share of all prompts, and below as k of n.
    """
    lost = []
    for _, part in frame.filter(method="snapkv").group_by("model", "budget"):
        hits = dict(zip(part["question_seen"], part["hits"], strict=True))
        if len(hits) == 2:
            lost.append((int(hits[True] - hits[False]), int(part["prompts"][0])))
    if not lost:
        return Cell(NONE)
    ends = [min(lost, key=_rate), max(lost, key=_rate)]
    counts = dict.fromkeys(f"{k} of {n}" for k, n in ends)
    return Cell(span([_rate(one) for one in lost], 0, share=True), " to ".join(counts))


def _rate(counted: tuple[int, int]) -> float:
    return counted[0] / counted[1]
