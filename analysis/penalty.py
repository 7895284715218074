"""The price of forced weights, pi(s) = ES(s) / EF(s), under three estimates of the free error EF."""

import numpy as np

from analysis.bootstrap import median, quantile, share
from analysis.frame import Sample

ESTIMATES = {  # estimate -> the rule whose free error it is
    "line_search": "frank_wolfe",  # the plain line-search iterate
    "fully_corrective": "geometric",  # weights re-solved on the Frank-Wolfe support
    "least": "least_free",  # the least free error over several supports, improved by swaps
}
BELOW_ONE = 1 - 1e-9  # a pi-hat under this is below one by more than rounding: its EF is too large


def penalty(sample: Sample) -> list[dict[str, object]]:
    """The records of table penalty for one model at one budget: one an estimate that was run.

    pi-hat = ES_pool / EF-hat (P1, section 2). Rows with EF-hat zero within rounding have an infinite pi; they
    are counted in n_zero_free and go into no other number.
    """
    records = []
    for estimate, rule in ESTIMATES.items():
        rows, chosen = sample.of_rule(rule)
        if len(rows) == 0:
            continue
        free = chosen["free_error"].to_numpy()
        positive = free > sample.rounding[rows]
        document, draws = sample.document[rows][positive], sample.multiplicity
        price = sample.optimum[rows][positive] / free[positive]
        records.append(
            {
                **sample.identity,
                "estimate": estimate,
                "n_rows": len(price),
                "n_documents": len(np.unique(document)),
                "n_zero_free": int((~positive).sum()),
                **median(price, document, draws).columns("penalty"),
                **quantile(price, document, draws, 0.99).columns("penalty_p99"),
                **share(price < BELOW_ONE, document, draws).columns("below_one"),
            }
        )
    return records
