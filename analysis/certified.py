"""The two-sided ceiling: what the search over every key of the row found, and what it proved that none can beat."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl
import scipy.stats

from analysis.bootstrap import LEVEL, Counts, Estimate, Flags, Reals, median, share
from analysis.frame import LABEL_RATIO, OPTIMAL_POOL, SAME_RELATIVE, TOP_MASS, Sample, as_table, exactly_one
from data.errors import BadInput
from data.schema import PROVED

NO_FLOOR, HALF, TENTH = 0.0, 0.5, 0.1  # mass floors that table certified speaks of; the first two must be there
LABEL_SLACK = (
    2e-9  # a label is no if the bound is below 0.9 e_top by no more than this share: proofs have a gap of 1e-9
)
BOUND_SLACK = 1e-9  # a bound may be above the error of a known subset by this share, and rounding, and no more
FLOOR_SLACK = 1.1e-12  # a subset whose mass is below a floor by no more than this share keeps it: 1e-12 in the search
IMPROVED = 0.01  # an optimum is improved if it is below the pool's by more than this share of it (P1, solver audit)
DECILES = 10
DROPPED_EDGES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0)  # bins of table proved by dropped mass


@dataclass(frozen=True)
class Pairs:
    """The certified rows of a sample, m of them, and the k mass floors that some of them were searched at.

    rows: indices into the sample, (m,). floors: falling, the last is 0, (k,). searched, proved: (m, k). error:
    of the best subset known that keeps the floor, lower: no subset that keeps it has a smaller error, both (m, k), in
    units of |v|, NaN where not searched. kept: mass of the best subset known of all, as a share of the top mass, (m,).
    seconds: until the last search of a row was done, (m,). clock: whether it stopped any of them, (m,).
    """

    sample: Sample
    rows: Counts
    floors: Reals
    searched: Flags
    proved: Flags
    error: Reals
    lower: Reals
    kept: Reals
    seconds: Reals
    clock: Flags

    @property
    def document(self) -> Counts:
        """Codes of the rows' documents, (m,)."""
        return self.sample.document[self.rows]

    @property
    def top(self) -> Reals:
        """e_s(top-mass), (m,)."""
        return self.sample.top[self.rows]

    @property
    def zero_top(self) -> Flags:
        """Rows whose top-mass error is zero within rounding, (m,)."""
        return self.sample.zero_top[self.rows]

    def place(self, floor: float) -> int:
        """Which column the mass floor is, one that some row was searched at."""
        return int(np.flatnonzero(self.floors == floor)[0])

    def closable(self, place: int) -> Reals:
        """1 - error / e_s(top-mass) at one floor, (m,); 0 where top-mass is exact; NaN where not searched."""
        return self._gain(self.error[:, place])

    def cap(self, place: int) -> Reals:
        """What closable() can at most be, (m,): 1 - lower / e_s(top-mass); the same number where it is proved."""
        found = self.closable(place)
        return np.where(self.proved[:, place], found, np.maximum(found, self._gain(self.lower[:, place])))

    def labels(self, place: int) -> tuple[Flags, Flags]:
        """At one floor, whether a subset with e_s <= 0.9 e_s(top-mass) is known, and whether none exists, both (m,)."""
        yes = (self.error[:, place] <= LABEL_RATIO * self.top) & ~self.zero_top
        refuted = self.lower[:, place] >= LABEL_RATIO * self.top * (1 - LABEL_SLACK)
        return yes, (refuted | self.zero_top) & ~yes

    def _gain(self, error: Reals) -> Reals:
        left = np.ones(len(self.rows))
        np.divide(error, self.top, out=left, where=~self.zero_top)
        return 1 - exactly_one(left)


def pairs(sample: Sample) -> Pairs | None:
    """The certified rows of one model at one budget; None if there are none.

    What is known of one floor is used at the others: a subset, the pool optimum too, counts at every floor that its
    mass keeps, and a lower bound at every higher floor, where there are fewer subsets. Raises BadInput if a row lacks
    the search without a floor or the one at half the top mass, or if a bound is above the error of a known subset.
    """
    found = sample.searches.filter(pl.col("mass_floor") < 1)  # at 1 nothing but top-mass is left: no search to count
    if found.is_empty():
        return None
    rows = np.unique(found["row"].to_numpy())
    floors = np.unique(found["mass_floor"].to_numpy())[::-1]
    cell = np.searchsorted(rows, found["row"].to_numpy()), np.searchsorted(-floors, -found["mass_floor"].to_numpy())
    columns = {name: np.full((len(rows), len(floors)), np.nan) for name in ("error", "lower", "kept_mass", "seconds")}
    for name, values in columns.items():
        values[cell] = found[name].to_numpy()
    searched, proved, clock = (np.zeros((len(rows), len(floors)), dtype=bool) for _ in range(3))
    searched[cell] = True
    proved[cell] = (found["status"] == "optimal").to_numpy()
    clock[cell] = (found["stopped_by"] == "time_limit").to_numpy()
    _check_floors(sample, rows, floors, searched)
    top_mass, pool = (sample.of_rule(rule)[1]["kept_mass"].to_numpy()[rows] for rule in (TOP_MASS, OPTIMAL_POOL))
    known_error = np.column_stack([columns["error"], sample.optimum[rows]])
    known_kept = np.column_stack([columns["kept_mass"], pool]) / top_mass[:, None]
    keeps = known_kept[:, None, :] >= floors[:, None] * (1 - FLOOR_SLACK)
    error = np.where(keeps, known_error[:, None, :], np.inf).min(axis=2)
    lower = np.fmax.accumulate(columns["lower"][:, ::-1], axis=1)[:, ::-1]
    for values in (error, lower):
        values[~searched] = np.nan
    _check_bounds(sample, rows, error, lower)
    everyone, last = np.arange(len(rows)), len(floors) - 1
    least = np.nanargmin(known_error, axis=1)
    beaten = known_error[everyone, least] < known_error[:, last] * (1 - SAME_RELATIVE)
    kept = known_kept[everyone, np.where(beaten, least, last)]  # ties go to the search without a floor
    return Pairs(
        sample=sample,
        rows=rows,
        floors=floors,
        searched=searched,
        proved=proved,
        error=error,
        lower=lower,
        kept=np.where(sample.zero_top[rows], 1.0, kept),
        seconds=np.nanmax(columns["seconds"], axis=1),
        clock=np.asarray(clock.any(axis=1)),
    )


def certified(found: Pairs) -> dict[str, object]:
    """The record of table certified for one model at one budget.

    Proved and improved as in P1's solver audit (section B.4, Table 7); mass floors and brackets are ours. The ends of
    a bracket are medians over rows, of 1 - error / e_top and of 1 - lower / e_top.
    """
    sample, rows, document = found.sample, found.rows, found.document
    draws = sample.multiplicity
    full, half = found.place(NO_FLOOR), found.place(HALF)
    yes, no = found.labels(full)
    yes_half, no_half = found.labels(half)
    open_label, open_half = ~yes & ~no, ~yes_half & ~no_half
    gain = improvements(found)
    improved = gain > IMPROVED
    flags = {
        "below_half": found.kept < HALF * (1 - FLOOR_SLACK),
        "below_tenth": found.kept < TENTH * (1 - FLOOR_SLACK),
        "changed": yes & no_half,
        "proved_half": found.proved[:, half],
        "proved": found.proved[:, full],
        "improved": improved,
    }
    medians = {
        "pool": sample.closable[rows],
        "half": found.closable(half),
        "half_cap": found.cap(half),
        "full": found.closable(full),
        "full_cap": found.cap(full),
    }
    counts = np.bincount(_decile(sample.statistic("dropped_mass"))[rows], minlength=DECILES)
    return {
        **sample.identity,
        "n_rows": len(rows),
        "n_documents": len(np.unique(document)),
        "n_of": sample.n_rows,
        "decile_least": int(counts.min()),
        "decile_most": int(counts.max()),
        "n_zero_top": int(found.zero_top.sum()),
        "pool_all": float(np.median(sample.closable)),
        **_columns({name: median(values, document, draws) for name, values in medians.items()}),
        **_columns({name: share(flag, document, draws) for name, flag in flags.items()}),
        **{f"n_{name}": int(flag.sum()) for name, flag in flags.items()},
        **_tenth(found),
        "n_label_yes": int(yes.sum()),
        "n_label_no": int(no.sum()),
        "n_label_undecided": int(open_label.sum()),
        "n_change_undecided": int((yes & open_half | open_label & ~yes_half).sum()),
        "improvement": float(np.median(gain[improved])) if improved.any() else None,
        "improvement_largest": float(gain[improved].max()) if improved.any() else None,
        "seconds": float(np.median(found.seconds)),
        "seconds_largest": float(found.seconds.max()),
        "n_time_limit": int(found.clock.sum()),
    }


def improvements(found: Pairs) -> Reals:
    """1 - (error of the best subset known) / ES_pool of each certified row, (m,); 0 where ES_pool is zero."""
    pool = found.sample.optimum[found.rows]
    error = found.error[:, found.place(NO_FLOOR)]
    left = np.ones(len(pool))
    exists = pool > found.sample.rounding[found.rows]
    np.divide(error, pool, out=left, where=exists & ~found.zero_top)
    return 1 - exactly_one(left)


def mass_floors(found: Pairs) -> list[dict[str, object]]:
    """The records of table mass_floors for one model at one budget, from floor 0 to 1.

    At 1 only top-mass is left, but for ties: nothing to gain, and nothing to prove. A row's smallest proved floor is 1
    where no search of it ended in a proof.
    """
    draws = found.sample.multiplicity
    height = found.proved.shape[0]
    floors = np.concatenate([found.floors, [1.0]])
    proved = np.column_stack([found.proved, np.ones(height, dtype=bool)])
    smallest = np.where(proved, floors, np.inf).min(axis=1)
    records: list[dict[str, object]] = []
    for place in np.argsort(floors):
        below_one = place < len(found.floors)
        among = found.searched[:, place] if below_one else np.ones(height, dtype=bool)
        gain, cap = np.zeros((2, height))
        if below_one:
            gain, cap = found.closable(place), found.cap(place)
        document = found.document[among]
        records.append(
            {
                **found.sample.identity,
                "rho": float(floors[place]),
                "n_rows": int(among.sum()),
                "n_documents": len(np.unique(document)),
                **median(gain[among], document, draws).columns("closable"),
                **median(cap[among], document, draws).columns("cap"),
                "n_proved": int(proved[among, place].sum()),
                **share(proved[among, place], document, draws).columns("proved"),
                "n_smallest": int((smallest == floors[place]).sum()),
            }
        )
    return records


def open_pairs(found: Pairs) -> list[dict[str, object]]:
    """The records of table open for one model at one budget, in the order of the rows."""
    full = found.place(NO_FLOOR)
    error, lower = (1 - share for share in (found.closable(full), found.cap(full)))
    smallest = np.where(found.proved, found.floors, 1.0).min(axis=1)
    yes, no = found.labels(full)
    facts = found.sample.facts[found.rows]
    return [
        {
            **found.sample.identity,
            "row_id": facts["row_id"][row],
            "n_keys": facts["n_keys"][row],
            "dropped_mass": min(max(facts["dropped_mass"][row], 0.0), 1.0),  # rounding can take it outside
            "lower": float(lower[row]),
            "error": float(error[row]),
            "kept": float(found.kept[row]),
            "smallest": float(smallest[row]),
            "label": "yes" if yes[row] else "no" if no[row] else "open",
            "stopped_by": "time_limit" if found.clock[row] else "node_limit",
        }
        for row in np.flatnonzero(~found.proved[:, full]).tolist()
    ]


def features(found: Pairs) -> pl.DataFrame:
    """A row per certified pair: its model, the features by which table proved counts, and whether it is proved."""
    facts = found.sample.facts[found.rows]
    return facts.select(
        "family",
        "model",
        pl.col("dropped_mass").clip(0.0, 1.0),  # rounding can take it outside
        pl.col("n_keys").cast(pl.Float64),
        pl.col("s").cast(pl.Float64),
        *(pl.Series(_of(floor), found.proved[:, found.place(floor)]) for floor in (HALF, NO_FLOOR)),
    )


def proved(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Table proved from the features of every model and budget; bins without pairs are left out.

    Bins: DROPPED_EDGES by dropped mass, powers of two by number of keys, one a budget by s.
    """
    records: list[dict[str, object]] = []
    for (family, model), own in pl.concat(parts).group_by("family", "model", maintain_order=True) if parts else ():
        budgets = sorted(set(own["s"]))
        longest = float(own["n_keys"].to_numpy().max())
        doubling = [2.0**power for power in range(int(np.log2(longest)) + 2)]
        bins = [("dropped_mass", low, high) for low, high in pairwise(DROPPED_EDGES)]
        bins += [("n_keys", low, high) for low, high in pairwise(doubling)]
        bins += [("s", s, s) for s in budgets]
        for by, low, high in bins:
            closed = low == high or high == DROPPED_EDGES[-1]
            inside = own.filter(pl.col(by).is_between(low, high, closed="both" if closed else "left"))
            if inside.is_empty():
                continue
            for floor in (HALF, NO_FLOOR):
                n_proved = int(inside[_of(floor)].sum())
                wilson = scipy.stats.binomtest(n_proved, inside.height).proportion_ci(LEVEL, method="wilson")
                records.append(
                    {
                        "family": family,
                        "model": model,
                        "by": by,
                        "bin_low": low,
                        "bin_high": high,
                        "mass_floor": floor,
                        "n_pairs": inside.height,
                        "n_proved": n_proved,
                        "share": n_proved / inside.height,
                        "share_low": float(wilson.low),
                        "share_high": float(wilson.high),
                    }
                )
    return as_table(PROVED, records)


def _check_floors(sample: Sample, rows: Counts, floors: Reals, searched: Flags) -> None:
    """Raise BadInput unless every certified row was searched without a floor and at half the top mass."""
    for floor in (NO_FLOOR, HALF):
        there = searched[:, floors == floor].any(axis=1)
        if not there.all():
            row_id = sample.facts["row_id"][int(rows[~there][0])]
            raise BadInput(
                f"row {row_id} at s = {sample.s} was certified without a search at mass floor {floor:g}:"
                " run certify again with that floor"
            )


def _check_bounds(sample: Sample, rows: Counts, error: Reals, lower: Reals) -> None:
    """Raise BadInput if a bound is above the error of a subset that it speaks of, or no known subset keeps a floor."""
    above = lower > error * (1 + BOUND_SLACK) + sample.rounding[rows, None]
    for row, place in np.argwhere(above | np.isinf(error)):
        named = f"row {sample.facts['row_id'][int(rows[row])]} at s = {sample.s}"
        if np.isinf(error[row, place]):
            raise BadInput(f"{named}: the subset found at a mass floor keeps less than it: run make certify again")
        raise BadInput(
            f"{named}: a lower bound {lower[row, place]:.9g} is above the error {error[row, place]:.9g} of a known"
            " subset: expected a valid bound; run make certify again"
        )


def _decile(values: Reals) -> Counts:
    """Which tenth of the values each is in, 0 to 9, ties by place, (n,)."""
    rank = np.empty(len(values), dtype=np.int64)
    rank[np.argsort(values, kind="stable")] = np.arange(len(values))
    return rank * DECILES // len(values)


def _columns(estimates: dict[str, Estimate]) -> dict[str, float | None]:
    return {column: end for name, found in estimates.items() for column, end in found.columns(name).items()}


def _tenth(found: Pairs) -> dict[str, object]:
    """Rows searched at the floor of a tenth, and how many of them are proved: it is not asked of every row."""
    at = np.flatnonzero(found.floors == TENTH)
    among = np.flatnonzero(found.searched[:, at].any(axis=1))
    flag = np.asarray(found.proved[among][:, at].any(axis=1))
    estimate = share(flag, found.document[among], found.sample.multiplicity)
    return {"n_tenth": len(among), "n_proved_tenth": int(flag.sum()), **estimate.columns("proved_tenth")}


def _of(floor: float) -> str:
    """Column of features() that says what is proved at this floor."""
    return f"proved_{floor:g}"
