"""The search over whole rows on the page: the finding in three sentences, how it was made, ours beside published."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from analysis.frame import CERTIFIED_FOLDER
from data import published
from data.schema import CERTIFIED, MANIFEST, MASS_FLOORS, OPEN, PROVED, SUBSETS
from data.store import Store, digest_of, footer, read
from figures import style
from figures.measured import EMBEDDED
from figures.page_tables import NONE, Cell, PageTable, count, number, percent, reach, span, with_interval

TABLES = (CERTIFIED, MASS_FLOORS, PROVED, OPEN)
STEMS = ("certified_ceiling", "mass_floor", "proved")  # the figures of this section, in order
OF_ONE = ("mass_floor", "proved")  # those of the first model alone
MOST_OPEN = 40  # pairs without a proof that the page lists
COMMAND = "make certify S=16"
MISSING = (
    f"The best subset of all keys was not searched for here: {COMMAND} does it for a sample of the rows, with proofs,"
    " and bounds the ceiling from above too."
)
CAPTIONS = {
    "certified_ceiling": (
        "The ceiling from both sides",
        "Median share of top-mass's error that the best subset removes, over the certified rows: within the candidate"
        " set, which is the paper's lower bound; over every key of the row with at least half of top-mass's weight;"
        " over every key without a floor, from what was found to what was proved to be the most. The scale is that of"
        " a square root, which gives small shares room.",
    ),
    "mass_floor": (
        "What a mass floor costs",
        "Median share of the error that the best subset known removes among subsets that keep at least ρ of top-mass's"
        " weight; shaded, up to what that median can at most be. At ρ = 1 only top-mass is left, at ρ = 0 all subsets"
        " compete. The scale is that of a square root.",
    ),
    "proved": (
        "How often the optimum is proved",
        "Share of the certified pairs, a row and a budget, whose best subset over every key is proved, against the"
        " dropped mass, the number of keys and the budget; the first two over all budgets together. Lines: Wilson 95%"
        " intervals, which take pairs for independent although documents share them.",
    ),
}
NOTES = {
    "ceiling": (
        "Medians over the certified rows of 1 − e / e_top; under the pool's, its median over all rows. Floor ½: the"
        " best subset known that keeps at least half of top-mass's weight; no floor: of all subsets. At most: 1 − lower"
        " bound / e_top, equal to what was found where it is proved. Keeps < ½, < ⅒: share of rows whose best subset"
        " known, without a floor, keeps less than that of top-mass's weight. Changed: share of rows of which a subset"
        " with e ≤ 0.9 e_top is known, but none exists at floor ½; + rows where one of the two is still open."
    ),
    "search": (
        "Proved: within 10⁻⁹ of the least error. Label: whether a subset with e ≤ 0.9 e_top exists, yes, no, undecided."
        " Improved: rows whose best subset known is more than 1% below the pool optimum; improvement over these rows."
        " Seconds of a row: all its floors together. Clock: rows of which the clock stopped a search; they alone are"
        " not repeatable."
    ),
    "floors": (
        "Proved: share of rows whose optimum at the floor is proved. Smallest: rows of which this is the smallest floor"
        " that is proved; at ρ = 1, where only top-mass is left, those of which none below is."
    ),
}


def left_open(found: pl.DataFrame) -> tuple[str, pl.DataFrame]:
    """A note on the pairs whose optimum without a floor is not proved, and those of them that the page lists.

    Listed are MOST_OPEN of the first model: the ones that need the largest floor for a proof, then the widest brackets.
    """
    own = style.of_first_model(found, "s")
    listed = own.sort(["smallest", pl.col("error") - pl.col("lower")], descending=True).head(MOST_OPEN)
    some = f"{count(listed.height)} of them: the largest smallest floors, then the widest brackets; all are"
    return (
        f"Pairs whose optimum without a floor is not proved, {count(own.height)} of this model."
        f" {some if listed.height < own.height else 'All are'} in table open. Row: document, layer, head and position."
        " Bracket: no subset leaves a smaller share of top-mass's error than the first number, a known one leaves the"
        " second. Kept: mass of that one, as a share of top-mass's. Proved from: the smallest mass floor at which the"
        " optimum is proved; 1: at none below, where only top-mass is left. Label: whether a subset with e ≤ 0.9 e_top"
        " exists. Stopped: by the limit of nodes, or by the clock.",
        listed.sort("s", "dropped_mass"),
    )


def sentences(certified: pl.DataFrame) -> list[str]:
    """The finding, on the first certified model, which is the real one wherever it was certified; none without it."""
    own = style.of_first_model(certified, "s")
    if own.is_empty():
        return []
    records, total = own.to_dicts(), int(own["n_rows"].sum())
    model, budgets = own["model"][0], _budgets(own)

    def of(name: str) -> str:
        return part(int(own[name].sum()), total)

    half, cap = (reach(records, name, 1, share=True) for name in ("half", "half_cap"))
    most = "" if half == cap else f" (at most {cap})"
    undecided = int(own["n_change_undecided"].sum())
    more = f", open on {count(undecided)} more," if undecided else ""
    return [
        f"On {count(total)} certified pairs of a row and a budget of {model} ({budgets}), the candidate set gives at"
        f" least {reach(records, 'pool', 1, share=True)} (median; over all rows"
        f" {span(own['pool_all'].to_list(), 1, share=True)}).",
        "Searched over every key of the row, the best subset that keeps at least half of top-mass's weight is proved on"
        f" {of('n_proved_half')} and removes a median of {half}{most}.",
        f"Without a mass floor the optimum is proved on {of('n_proved')}; the best subset known keeps less than half of"
        f" top-mass's weight on {of('n_below_half')}, less than a tenth on {of('n_below_tenth')}, and on"
        f" {of('n_changed')}{more} a tenth of the error can be removed without the floor but not with it. The"
        f" unconstrained ceiling (median of {_ends(own['n_rows'].to_list())} rows a budget, whose sampling error comes"
        f" on top): {brackets(records)}.",
    ]


def part(some: int, total: int) -> str:
    """So many of all pairs, in words that rounding cannot make false."""
    if some in (0, total):
        return f"{'none' if some == 0 else 'all'} of {count(total)} pairs"
    share = percent(some / total)
    return f"{count(some)} of {count(total)} pairs ({'> 99%' if share == '100%' else share})"


def brackets(records: Sequence[Mapping[str, Any]]) -> str:
    """The unconstrained ceiling at each budget: what was found, and what it can at most be if that reads otherwise."""
    shown = []
    for row in records:
        low, high = (percent(row[name], 1) for name in ("full", "full_cap"))
        shown.append(f"{low if low == high else f'{low} to {high}'} at s = {row['s']}")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def whose(certified: pl.DataFrame) -> str:
    """What the captions of figures of one model add: which model, and how many pairs."""
    own = style.of_first_model(certified, "s")
    return f" Of {own['model'][0]}, {count(int(own['n_rows'].sum()))} pairs, {_budgets(own)}."


def about(store: Store, certified: pl.DataFrame) -> list[str]:
    """How many rows, which ones, made how, and what to keep in mind, for the certified models at hand.

    Raises BadInput if a certified file is not readable.
    """
    own = style.of_first_model(certified, "s")
    if own.is_empty():
        return []
    rows, documents, all_rows = (_ends(own[name].to_list()) for name in ("n_rows", "n_documents", "n_of"))
    each = number((own["n_rows"] / own["n_documents"]).to_numpy().max(), 1)
    lines = [
        f"{own['model'][0]}: {rows} of {all_rows} rows at {_budgets(own)}, from {documents} documents (at most {each}"
        f" rows a document and budget).{_spread(certified)}"
    ]
    lines += _drawn(store, int(certified["n_rows"].sum()))
    if limits := _limits(store, str(own["model"][0])):
        lines.append(limits)
    others = style.in_order(certified).filter(pl.col("model") != own["model"][0])
    if not others.is_empty():
        total = int(others["n_rows"].sum())
        tiny = all(str(model).startswith(EMBEDDED) for model in others["model"])
        lines.append(
            f"On {', '.join(others['model'].unique(maintain_order=True))}: the optimum at floor ½ is proved on"
            f" {part(int(others['n_proved_half'].sum()), total)}, without a floor on"
            f" {part(int(others['n_proved'].sum()), total)}."
            + (" They are tiny and say nothing about large ones." if tiny else "")
        )
    stopped = int(certified["n_time_limit"].sum())
    if stopped:
        lines.append(f"The clock stopped a search of {count(stopped)} pairs: these are not repeatable.")
    lines.append(
        "Why a floor: on rows whose attention is flat, some subset of next to no weight happens to average to the dense"
        " output. It counts as the optimum without saying anything of the keys that matter."
    )
    return lines


def beside_published(certified: pl.DataFrame) -> PageTable:
    """Ours beside the paper's solver audit: a group of rows per quantity, by budget where the paper gives budgets."""
    first = style.of_first_model(certified, "s")
    others = certified.filter((pl.col("model") != first["model"][0]) & (pl.col("family") != style.OWN))
    columns = [first, others] if not others.is_empty() else [first]
    everywhere = [str(first["s"][0])] if first.height == 1 else [f"{first['s'][0]} to {first['s'][-1]}"]

    def counted(name: str, digits: int = 0) -> list[Cell]:
        cells = []
        for frame in columns:
            some, total = int(frame[name].sum()), int(frame["n_rows"].sum())
            cells.append(Cell(f"{count(some)} of {count(total)}", percent(some / total, digits)))
        return cells

    def numbers(name: str, digits: int, share: bool = False) -> list[Cell]:
        return [Cell(span(frame[name].to_list(), digits, share)) for frame in columns]

    rows: list[list[Cell]] = []
    groups: list[int] = []

    def add(name: str, lines: Sequence[tuple[str, list[Cell], str]], differs: str) -> None:
        groups.append(len(rows))
        for place, (s, ours, theirs) in enumerate(lines):
            start = [Cell(name, rows=len(lines), text=True)] if place == 0 else []
            end = [Cell(differs, rows=len(lines), text=True)] if place == 0 else []
            rows.append([*start, Cell(s), *ours, Cell(theirs), *end])

    whole = everywhere[0]
    pairs = [Cell(count(int(frame["n_rows"].sum()))) for frame in columns]
    add("pairs of a row and a budget", [(whole, pairs, _theirs("solver_manifest", 0))], _there("solver_manifest"))
    add(
        "optimum proved, no floor",
        [(whole, counted("n_proved"), _theirs("solver_proved", 0, share=True))],
        f"{_there('solver_proved')}. Ours: of all pairs",
    )
    add("optimum proved, floor ½", [(whole, counted("n_proved_half"), NONE)], "a mass floor is ours")
    improved = [
        (str(s), [_improved(frame, int(s)) for frame in columns], _theirs("solver_improved", 0, int(s)))
        for s in first["s"]
    ]
    improved.append((whole, counted("n_improved", 1), _theirs("solver_improved_share", 1, share=True)))
    add("improved beyond the pool by more than 1%", improved, f"{_there('solver_improved_share')}. Ours: of all pairs")
    for name, column, key in (
        ("median improvement, by budget", "improvement", "solver_median_improvement"),
        ("largest improvement, by budget", "improvement_largest", "solver_largest_improvement"),
    ):
        add(name, [(whole, numbers(column, 1, share=True), _theirs(key, 1, share=True))], _there(key))
    for name, column, floored in (
        ("cap of the median, floor ½", "half_cap", True),
        ("cap of the median, no floor", "full_cap", False),
    ):
        caps = [
            (
                str(row["s"]),
                [
                    Cell(with_interval(row, column)),
                    *(Cell(span(frame.filter(pl.col("s") == row["s"])[column].to_list())) for frame in columns[1:]),
                ],
                NONE if floored else _theirs("cap", 3, int(row["s"])),
            )
            for row in first.iter_rows(named=True)
        ]
        ours = "Ours: from proved lower bounds, row by row"
        add(name, caps, f"a mass floor is ours. {ours}" if floored else f"{_there('cap', int(first['s'][0]))}. {ours}")
    seconds = [
        Cell(f"{number(frame['seconds'].to_numpy().max(), 3)}", f"longest {number(frame['seconds_largest'].max(), 1)}")
        for frame in columns
    ]
    add("seconds a pair, median", [(whole, seconds, NONE)], "all floors together, one core; largest of the budgets")
    beside = ["our other models"] if len(columns) > 1 else []
    return PageTable(["quantity", "s", str(first["model"][0]), *beside, "published", "what differs"], rows, groups)


def _budgets(records: pl.DataFrame) -> str:
    found = [int(s) for s in records["s"]]
    return f"s = {found[0]}" if len(found) == 1 else f"s = {found[0]} to {found[-1]}"


def _spread(certified: pl.DataFrame) -> str:
    """Whether the certified rows represent all rows: how many come from each tenth of them by dropped mass."""
    least, most = int(certified["decile_least"].to_numpy().min()), int(certified["decile_most"].to_numpy().max())
    if (certified["decile_most"] - certified["decile_least"]).to_numpy().max() <= 1:
        each = count(least) if least == most else f"{count(least)} to {count(most)}"
        return (
            f" They are spread evenly over the dropped mass: {each} from each tenth of the rows of a model and budget."
            " Shares and medians are those of an even sample, uncertain as one of its size is: how far the candidate"
            " set's median over it is from that over all rows says how much."
        )
    return (
        f" They are not spread evenly over the dropped mass: {count(least)} to {count(most)} from a tenth of the rows"
        " of a model and budget, so that shares and medians lean to the tenths with more."
    )


def _drawn(store: Store, certified: int) -> list[str]:
    """The manifests that the store holds, each with its size, its seed and the beginning of the hash of its pairs."""
    lines, largest = [], 0
    for path in sorted(store.manifest("").parent.glob("*.parquet")):
        pairs, made = read(MANIFEST, path, ["row_id", "s"]), footer(MANIFEST, path)
        digest = digest_of(f"{row_id} {s}" for row_id, s in pairs.iter_rows())
        lines.append(
            f"Manifest {path.stem}: {count(pairs.height)} pairs over all its models, seed {made['seed']}, sha256 of the"
            f" pairs {digest[:16]}."
        )
        largest = max(largest, pairs.height)
    if lines and certified > largest:
        lines.append(f"In all {count(certified)} pairs are certified, of these and of earlier draws.")
    return lines


def _limits(store: Store, model: str) -> str:
    """The least and the largest limits under which the pairs of a model were searched; nothing if that is not noted."""
    files = [path for path in store.subset_files() if path.parent.name == CERTIFIED_FOLDER]
    notes = [footer(SUBSETS, path)["notes"] for path in files if path.parent.parent.parent.name == model]
    pairs = [pair for note in notes if isinstance(note, dict) for pair in note.get("limits", {}).values()]
    if not pairs:
        return ""
    nodes, seconds = zip(*pairs, strict=True)
    return (
        f"Limits of a pair: {_ends(nodes)} nodes, half as many again for the bound of an open one; by the clock"
        f" {_ends(seconds)} s, a third of it again for an open label."
    )


def _ends(values: Sequence[float]) -> str:
    low, high = f"{min(values):,g}", f"{max(values):,g}"
    return low if low == high else f"{low} to {high}"


def _improved(frame: pl.DataFrame, s: int) -> Cell:
    own = frame.filter(pl.col("s") == s)
    return (
        Cell(f"{count(int(own['n_improved'].sum()))} of {count(int(own['n_rows'].sum()))}")
        if own.height
        else Cell(NONE)
    )


def _theirs(key: str, digits: int, s: int | None = None, share: bool = False) -> str:
    """A published number as the table has it; the dash where there is none."""
    found = published.find(key, s)
    if found is None:
        return NONE
    return percent(found.value, digits) if share else number(found.value, digits)


def _there(key: str, s: int | None = None) -> str:
    """Where and under what condition a number was published."""
    found = published.find(key, s)
    return "not published at this budget" if found is None else f"There ({found.place}): {found.condition}"
