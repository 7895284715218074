"""Every rule beside top-mass and beside the pool optimum, a user's own rules included."""

import numpy as np
import polars as pl

from analysis.bootstrap import median, share
from analysis.frame import BALANCING, OPTIMAL_POOL, SAME_RELATIVE, TOP_MASS, Sample, exactly_one

OURS = (TOP_MASS, BALANCING, OPTIMAL_POOL, "frank_wolfe", "geometric", "least_free", "leverage")  # others are a user's


def users_rules(rules: pl.DataFrame) -> list[str]:
    """Names of the user's own rules in table rules, sorted; the same number means the same rule in every figure."""
    return sorted(str(rule) for rule in rules["rule"].unique() if rule not in OURS)


def rules(sample: Sample) -> list[dict[str, object]]:
    """The records of table rules for one model at one budget: one a rule, over the rows on which it ran.

    An error is better or worse than top-mass's only beyond rounding: the same keys summed in another order
    are neither. Source of the ratios: P1, Table 8.
    """
    records = []
    for rule in sample.rules():
        rows, chosen = sample.of_rule(rule)
        error, document = chosen["error"].to_numpy(), sample.document[rows]
        top, optimum, rounding = sample.top[rows], sample.optimum[rows], sample.rounding[rows]
        draws = sample.multiplicity
        gains, exists = ~sample.zero_top[rows], optimum > rounding
        to_top, to_optimum = exactly_one(error[gains] / top[gains]), exactly_one(error[exists] / optimum[exists])
        better = gains & (error < top * (1 - SAME_RELATIVE))
        worse = (error > rounding) & (error > top * (1 + SAME_RELATIVE))
        records.append(
            {
                **sample.identity,
                "rule": rule,
                "n_rows": len(rows),
                "n_documents": len(np.unique(document)),
                **median(to_top, document[gains], draws).columns("ratio"),
                **median(to_optimum, document[exists], draws).columns("ratio_to_optimum"),
                **median(chosen["kept_mass"].to_numpy(), document, draws).columns("kept_mass"),
                **share(better, document, draws).columns("better"),
                **share(worse, document, draws).columns("worse"),
            }
        )
    return records
