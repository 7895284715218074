"""Every table's columns, types, units and version: the only place where a column name is first spelt."""

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from data.errors import BadInput

VECTOR = pl.Array(pl.Float32, 0)  # an Array[f32, d] of any width d >= 1
TEXT, REAL, FLAG, COUNT, SMALL = pl.String(), pl.Float64(), pl.Boolean(), pl.Int64(), pl.Int32()


@dataclass(frozen=True)
class Column:
    """A column: its polars type, its unit ("1" for a pure number, "" for a label), and its meaning."""

    dtype: pl.DataType
    unit: str
    meaning: str
    nullable: bool = False

    def admits(self, dtype: pl.DataType) -> bool:
        """Whether a frame's column of this polars type fits; an Array of any width fits VECTOR."""
        if self.dtype == VECTOR:
            return isinstance(dtype, pl.Array) and dtype.inner == pl.Float32 and dtype.size > 0
        return dtype == self.dtype


@dataclass(frozen=True)
class Table:
    """A table's name, version, what one row of it is, and its columns in order."""

    name: str
    version: int
    one_row_is: str
    columns: Mapping[str, Column]

    def check(self, frame: pl.DataFrame, where: str = "") -> None:
        """Raise BadInput that names the first column in which the frame departs from this schema."""
        place = f"{where}: " if where else ""
        for name, column in self.columns.items():
            if name not in frame.columns:
                raise BadInput(f"{place}column {name!r} of table {self.name} is missing: expected {column.dtype}")
            dtype = frame.schema[name]
            if not column.admits(dtype):
                expected = "Array(Float32, d)" if column.dtype == VECTOR else column.dtype
                raise BadInput(f"{place}column {name!r} of table {self.name} is {dtype}: expected {expected}")
            if not column.nullable and frame[name].null_count() > 0:
                raise BadInput(f"{place}column {name!r} of table {self.name} has nulls: expected none")
        for name in frame.columns:
            if name not in self.columns:
                raise BadInput(f"{place}column {name!r} is not in table {self.name}")

    def select(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The frame with this table's columns in this table's order (the frame must have them all)."""
        return frame.select(list(self.columns))


_MODEL = {
    "family": Column(TEXT, "", "qwen, qwen3, llama, olmo, gemma, or the checkpoint's model_type; own: a user's rows"),
    "model": Column(TEXT, "", "the model's short name, which is also its folder's name"),
}
_DOCUMENT = {"model": _MODEL["model"], "doc_id": Column(SMALL, "1", "number of the document, from 0")}
_BUDGET = {"s": Column(SMALL, "keys", "budget: how many keys the subset keeps")}
_COUNTS = {
    "n_rows": Column(COUNT, "rows", "rows that went into the number"),
    "n_documents": Column(COUNT, "documents", "documents that they come from: the clusters of the bootstrap"),
}


def _interval(name: str, unit: str, meaning: str) -> dict[str, Column]:
    """A number and the ends of its interval; the ends are null below ten documents."""
    return {
        name: Column(REAL, unit, meaning, nullable=True),
        f"{name}_low": Column(REAL, unit, f"lower end of the 95% interval of {name}", nullable=True),
        f"{name}_high": Column(REAL, unit, f"upper end of the 95% interval of {name}", nullable=True),
    }


KV = Table(
    "kv",
    1,
    "a key of a document, as one layer and KV head of the model used it",
    {
        **_DOCUMENT,
        "layer": Column(SMALL, "1", "layer, from 0"),
        "kv_head": Column(SMALL, "1", "KV head, from 0"),
        "position": Column(SMALL, "tokens", "true position in the document, from 0"),
        "key": Column(VECTOR, "1", "key after QK-norm and RoPE"),
        "value": Column(VECTOR, "1", "value before the output projection"),
    },
)

TOKENS = Table(
    "tokens",
    1,
    "a token of a document",
    {
        **_DOCUMENT,
        "position": Column(SMALL, "tokens", "true position in the document, from 0"),
        "token_id": Column(SMALL, "1", "the tokenizer's id"),
        "text": Column(TEXT, "", "the token as text"),
    },
)

ROWS = Table(
    "rows",
    1,
    "an attention row: one query of one query head",
    {
        "row_id": Column(TEXT, "", "MODEL:doc_id:layer:q_head:position"),
        **_MODEL,
        "doc_id": _DOCUMENT["doc_id"],
        "layer": Column(SMALL, "1", "layer, from 0"),
        "kv_head": Column(SMALL, "1", "KV head that the query head reads"),
        "q_head": Column(SMALL, "1", "query head, from 0"),
        "position": Column(SMALL, "tokens", "true position of the query"),
        "n_keys": Column(SMALL, "keys", "keys that the mask lets the query see"),
        "first_key": Column(SMALL, "tokens", "true position of the first of them"),
        "scale": Column(REAL, "1", "factor of the logits q.k"),
        "softcap": Column(REAL, "1", "c of c tanh(logit / c); null: none", nullable=True),
        "window": Column(SMALL, "keys", "sliding window of the layer; null: none", nullable=True),
        "query": Column(VECTOR, "1", "query after QK-norm and RoPE"),
        "weights": Column(pl.List(pl.Float32), "1", "as the model emitted them; stages recompute them in float64"),
        "worst_difference": Column(REAL, "1", "largest entry of |model's output - float64 output| of this row"),
        "source_dtype": Column(TEXT, "", "dtype in which the model ran"),
    },
)

SUBSETS = Table(
    "subsets",
    2,
    "the subset that one rule keeps of one row at one budget",
    {
        "row_id": ROWS.columns["row_id"],
        **_BUDGET,
        "rule": Column(TEXT, "", "top_mass, balancing, optimal_pool, ..., or a user's rule"),
        "search": Column(TEXT, "", "how the subset was found: sort, swap, exhaustive, branch_and_bound, ..."),
        "mass_floor": Column(REAL, "1", "rho: only subsets with p(A) >= rho p(top-mass) were searched"),
        "n_searched": Column(SMALL, "keys", "size of the candidate set that the rule drew from"),
        "subset": Column(pl.List(pl.UInt32), "tokens", "true positions of the kept keys, ascending"),
        "error": Column(REAL, "|v|", "forced error e_s(A)"),
        "lower": Column(REAL, "|v|", "valid lower bound of e_s over what was searched; 0 if none is claimed"),
        "kept_mass": Column(REAL, "1", "p(A)"),
        "free_error": Column(REAL, "|v|", "free error: e_f(A), or that of the iterate for Frank-Wolfe"),
        "status": Column(TEXT, "", "optimal, bracketed, or heuristic"),
        "stopped_by": Column(TEXT, "", "finished, node_limit, or time_limit: such a row is not repeatable"),
        "nodes": Column(COUNT, "nodes", "subsets or nodes visited"),
        "seconds": Column(REAL, "s", "time of the rule alone"),
    },
)

MANIFEST = Table(
    "manifest",
    1,
    "a row and a budget that the search over whole rows is to take",
    {
        "row_id": ROWS.columns["row_id"],
        **_MODEL,
        "doc_id": _DOCUMENT["doc_id"],
        **_BUDGET,
        "dropped_mass": Column(REAL, "1", "least dropped mass mbar_s of the row"),
        "decile": Column(SMALL, "1", "its decile among the model's rows at this budget, 0 to 9"),
    },
)

PROOF = Table(
    "proof",
    1,
    "a step of the search tree, depth first, the child that keeps the branching key first",
    {
        "kind": Column(TEXT, "", "branch, fix, prune, mass or leaf"),
        "key": Column(SMALL, "1", "row-local index of the key that a branch keeps, then drops", nullable=True),
        "nu": Column(REAL, "|v|", "multiplier of the mass floor of a fix or prune", nullable=True),
        "z": Column(pl.List(pl.Float64), "1", "vector of a fix or prune, |z| <= 1", nullable=True),
        "kept": Column(pl.List(pl.Int32), "1", "row-local indices that a fix keeps", nullable=True),
        "dropped": Column(pl.List(pl.Int32), "1", "row-local indices that a fix drops", nullable=True),
    },
)

ROW_FACTS = Table(
    "row_facts",
    1,
    "what the analysis needs of an attention row beside its subsets, at one budget",
    {
        "row_id": ROWS.columns["row_id"],
        **_MODEL,
        "doc_id": _DOCUMENT["doc_id"],
        "layer": ROWS.columns["layer"],
        "q_head": ROWS.columns["q_head"],
        "n_keys": ROWS.columns["n_keys"],
        **_BUDGET,
        "dropped_mass": Column(REAL, "1", "least dropped mass mbar_s = 1 - p(top-mass set)"),
        "radius": Column(REAL, "|v|", "D = max |v_j - mu|"),
        "spread": Column(REAL, "|v|", "sigma = sqrt(sum p_j |v_j - mu|^2)"),
        "residual": Column(REAL, "|v|", "Phi = |g_A| of the top-mass set"),
        "rounding": Column(REAL, "|v|", "errors up to this are zero within rounding"),
    },
)

CEILING = Table(
    "ceiling",
    1,
    "a model at one budget: how much a better subset of the candidate set gains",
    {
        **_MODEL,
        **_BUDGET,
        **_COUNTS,
        "n_zero_gap": Column(COUNT, "rows", "rows whose pool optimum equals top-mass: no recovery is defined"),
        "n_zero_top": Column(COUNT, "rows", "rows whose top-mass error is zero within rounding: label 0, c-hat 0"),
        "n_infinite": Column(
            COUNT,
            "rows",
            "rows whose pool optimum alone is zero within rounding: kappa-hat infinite",
            nullable=True,
        ),
        **_interval("closable", "1", "median closable fraction c-hat = 1 - ES_pool / e_s(top-mass)"),
        **_interval("closable_mean", "1", "mean c-hat"),
        **_interval("kappa", "1", "median kappa-hat"),
        **_interval("kappa_p99", "1", "99th percentile of kappa-hat"),
        **_interval("share", "1", "share of rows with ES_pool <= 0.9 e_s(top-mass)"),
        **_interval("recovery", "1", "median recovery of the balancing selector over rows with a gap"),
        **_interval("closure", "1", "median balancing closure 1 - e_bal / e_top, zero-gap rows included as 0"),
        **_interval("balancing_exact", "1", "share of rows where balancing reaches the pool optimum"),
        "closable_q25": Column(REAL, "1", "lower quartile of c-hat"),
        "closable_q75": Column(REAL, "1", "upper quartile of c-hat"),
        "cap": Column(
            REAL,
            "1",
            "cap of the median c-hat: its (0.5 + f) quantile, f the published share of improved optima; null: none",
            nullable=True,
        ),
        "cap_share": Column(REAL, "1", "that share f, published, not ours", nullable=True),
        "coverage": Column(
            REAL,
            "1",
            "how often such an interval covers, measured on normal data, at n_documents",
            nullable=True,
        ),
    },
)

RULES = Table(
    "rules",
    1,
    "a model at one budget and one rule, beside top-mass",
    {
        **_MODEL,
        **_BUDGET,
        "rule": SUBSETS.columns["rule"],
        **_COUNTS,
        **_interval("ratio", "1", "median e_s(rule) / e_s(top-mass) over rows with e_s(top-mass) > 0"),
        **_interval("ratio_to_optimum", "1", "median e_s(rule) / ES_pool over rows with ES_pool > 0"),
        **_interval("kept_mass", "1", "median kept mass p(A)"),
        **_interval("better", "1", "share of rows where the rule's error is below top-mass's"),
        **_interval("worse", "1", "share of rows where the rule's error is above top-mass's"),
    },
)

PENALTY = Table(
    "penalty",
    1,
    "a model at one budget: the price pi(s) of forced weights, for one estimate of the free error",
    {
        **_MODEL,
        **_BUDGET,
        "estimate": Column(TEXT, "", "line_search, fully_corrective (both published) or least (ours)"),
        **_COUNTS,
        "n_zero_free": Column(COUNT, "rows", "rows with EF zero within rounding: pi is infinite, not in the median"),
        **_interval("penalty", "1", "median pi-hat(s) = ES_pool / EF"),
        **_interval("penalty_p99", "1", "99th percentile of pi-hat(s)"),
        **_interval("below_one", "1", "share of rows with pi-hat < 1, which no true pi can be"),
    },
)

PREDICTOR = Table(
    "predictor",
    1,
    "a model at one budget: how well one statistic predicts that a better subset removes 10% of the error",
    {
        **_MODEL,
        **_BUDGET,
        "statistic": Column(
            TEXT, "", "dropped_mass, diameter_bound 2 D mbar, variance_bound sigma sqrt(mbar/(1-mbar))"
        ),
        **_COUNTS,
        "n_positive": Column(COUNT, "rows", "rows with label 1: ES_pool <= 0.9 e_s(top-mass)"),
        **_interval("auc", "1", "area under the ROC curve"),
        **_interval("auc_lead", "1", "AUC of dropped mass minus AUC of this statistic"),
        "p_value": Column(REAL, "1", "two-sided bootstrap p of auc_lead = 0; 0 means below 2/B", nullable=True),
        **_interval("spearman_gap", "1", "Spearman correlation with the gap e_s(top-mass) - ES_pool"),
        **_interval("spearman_phi", "1", "Spearman correlation of Phi with ES_pool (the same for each statistic)"),
    },
)

ROC = Table(
    "roc",
    1,
    "a point of a ROC curve",
    {
        **_MODEL,
        **_BUDGET,
        "statistic": PREDICTOR.columns["statistic"],
        "threshold": Column(REAL, "1", "rows at or above it are called positive"),
        "false_positive_rate": Column(REAL, "1", "share of label-0 rows called positive"),
        "true_positive_rate": Column(REAL, "1", "share of label-1 rows called positive"),
    },
)

MAP = Table(
    "map",
    1,
    "a cell: one query head of one layer, at one budget",
    {
        **_MODEL,
        **_BUDGET,
        "layer": ROWS.columns["layer"],
        "q_head": ROWS.columns["q_head"],
        **_COUNTS,
        "dropped_mass": Column(REAL, "1", "median least dropped mass mbar_s of the cell's rows"),
        "kappa": Column(REAL, "1", "median kappa-hat of the cell's rows"),
        "closable_mean": Column(REAL, "1", "mean c-hat of the cell's rows"),
        "share": Column(REAL, "1", "share of the cell's rows with ES_pool <= 0.9 e_s(top-mass)"),
        "flat": Column(FLAG, "", "whether the median dropped mass at s = 8 exceeds 0.25", nullable=True),
    },
)

CERTIFIED = Table(
    "certified",
    1,
    "a model at one budget: what the search over every key of the row found and proved, over the certified rows",
    {
        **_MODEL,
        **_BUDGET,
        **_COUNTS,
        "n_of": Column(COUNT, "rows", "rows of the model at this budget, certified or not"),
        "decile_least": Column(
            COUNT, "rows", "certified rows in that tenth of all rows by dropped mass which has fewest"
        ),
        "decile_most": Column(COUNT, "rows", "certified rows in that tenth which has most"),
        "n_zero_top": Column(
            COUNT, "rows", "rows whose top-mass error is zero within rounding: nothing to gain, label no"
        ),
        "pool_all": Column(REAL, "1", "median closable fraction of the pool optimum over all rows, certified or not"),
        **_interval("pool", "1", "the same over the certified rows"),
        **_interval("half", "1", "median closable fraction of the best subset known that keeps half the top mass"),
        **_interval(
            "half_cap", "1", "median of what it can at most be: 1 - lower / e_s(top-mass), where proved itself"
        ),
        **_interval("full", "1", "median closable fraction of the best subset known, whatever mass it keeps"),
        **_interval("full_cap", "1", "median of what it can at most be"),
        "n_below_half": Column(COUNT, "rows", "rows whose best subset known keeps less than half the top mass"),
        **_interval("below_half", "1", "share of such rows"),
        "n_below_tenth": Column(COUNT, "rows", "rows whose best subset known keeps less than a tenth of the top mass"),
        **_interval("below_tenth", "1", "share of such rows"),
        "n_label_yes": Column(COUNT, "rows", "rows of which a subset with e_s <= 0.9 e_s(top-mass) is known"),
        "n_label_no": Column(COUNT, "rows", "rows proved to have none"),
        "n_label_undecided": Column(COUNT, "rows", "rows of which neither is known"),
        "n_changed": Column(
            COUNT, "rows", "rows labelled yes, but proved no among subsets that keep half the top mass"
        ),
        **_interval("changed", "1", "share of such rows"),
        "n_change_undecided": Column(
            COUNT, "rows", "rows whose label the floor may yet change: one of the two is open"
        ),
        "n_proved_half": Column(
            COUNT, "rows", "rows whose optimum among subsets that keep half the top mass is proved"
        ),
        **_interval("proved_half", "1", "share of such rows"),
        "n_tenth": Column(COUNT, "rows", "rows that were searched at the floor of a tenth of the top mass"),
        "n_proved_tenth": Column(COUNT, "rows", "rows among them whose optimum at this floor is proved"),
        **_interval("proved_tenth", "1", "share of such rows"),
        "n_proved": Column(COUNT, "rows", "rows whose optimum over all subsets is proved"),
        **_interval("proved", "1", "share of such rows"),
        "n_improved": Column(COUNT, "rows", "rows whose best subset known beats the pool optimum by more than 1%"),
        **_interval("improved", "1", "share of such rows"),
        "improvement": Column(REAL, "1", "median of 1 - e_s / ES_pool over the improved rows", nullable=True),
        "improvement_largest": Column(REAL, "1", "largest 1 - e_s / ES_pool of the improved rows", nullable=True),
        "seconds": Column(REAL, "s", "median time of a row, all its floors together"),
        "seconds_largest": Column(REAL, "s", "longest time of a row"),
        "n_time_limit": Column(COUNT, "rows", "rows of which some search was stopped by the clock: not repeatable"),
    },
)

MASS_FLOORS = Table(
    "mass_floors",
    1,
    "a model, a budget and a mass floor rho: what the best subset gains that keeps at least rho of the top mass",
    {
        **_MODEL,
        **_BUDGET,
        "rho": Column(REAL, "1", "mass floor; 1 is top-mass itself, but for ties, and 0 no floor"),
        **_COUNTS,
        **_interval("closable", "1", "median closable fraction of the best subset known at this floor"),
        **_interval("cap", "1", "median of what it can at most be, where proved itself"),
        "n_proved": Column(COUNT, "rows", "rows whose optimum at this floor is proved"),
        **_interval("proved", "1", "share of such rows"),
        "n_smallest": Column(COUNT, "rows", "rows of which this is the smallest floor that is proved"),
    },
)

PROVED = Table(
    "proved",
    1,
    "a model and a bin of rows and budgets by one of their features: how often the optimum is proved at one floor",
    {
        **_MODEL,
        "by": Column(TEXT, "", "the feature: dropped_mass, n_keys, or s; the first two over all budgets together"),
        "bin_low": Column(REAL, "1", "the feature is at least this"),
        "bin_high": Column(REAL, "1", "and below this, or equal to it where the bin is the last or a single number"),
        "mass_floor": Column(REAL, "1", "rho: 0.5, or 0 for no floor"),
        "n_pairs": Column(COUNT, "pairs", "certified pairs of a row and a budget in the bin"),
        "n_proved": Column(COUNT, "pairs", "pairs among them whose optimum is proved"),
        "share": Column(REAL, "1", "share of such pairs"),
        "share_low": Column(REAL, "1", "lower end of its Wilson 95% interval, which takes pairs for independent"),
        "share_high": Column(REAL, "1", "upper end of it"),
    },
)

OPEN = Table(
    "open",
    1,
    "a certified pair of a row and a budget whose optimum over every key, without a mass floor, is not proved",
    {
        **_MODEL,
        **_BUDGET,
        "row_id": Column(TEXT, "", "which row, as in table rows"),
        "n_keys": Column(COUNT, "keys", "keys of the row"),
        "dropped_mass": Column(REAL, "1", "weight outside the top-mass set"),
        "lower": Column(REAL, "1", "no subset has a smaller share of top-mass's error"),
        "error": Column(REAL, "1", "the least share of top-mass's error that a known subset leaves"),
        "kept": Column(REAL, "1", "mass of that subset, as a share of top-mass's"),
        "smallest": Column(REAL, "1", "smallest mass floor at which the optimum is proved; 1: at none below"),
        "label": Column(TEXT, "", "whether a subset with e <= 0.9 e_top exists: yes, no or open"),
        "stopped_by": Column(TEXT, "", "node_limit, or time_limit where the clock stopped any of its searches"),
    },
)

HARDNESS = Table(
    "hardness",
    1,
    "an instance that branch and bound has searched: a reduced one, or the heaviest keys of a captured row",
    {
        "problem": Column(TEXT, "", "Partition or Exact Cover by 3-Sets, reduced; captured: a model's row"),
        "draw": Column(SMALL, "1", "number of the random instance, or of the captured row"),
        "row_id": Column(TEXT, "", "the captured row; null: a reduced instance", nullable=True),
        "zero": Column(
            FLAG, "", "whether a subset of error 0 exists, decided in integers; null: captured", nullable=True
        ),
        "n": Column(SMALL, "keys", "keys that the subset is drawn from"),
        "d": Column(SMALL, "1", "coordinates of a value"),
        **_BUDGET,
        "subsets": Column(REAL, "subsets", "how many subsets of s keys there are: what enumeration would visit"),
        "error": Column(REAL, "|v|", "least forced error found"),
        "lower": Column(REAL, "|v|", "valid lower bound of it"),
        "proved": Column(FLAG, "", "whether the search ended within its node limit"),
        "nodes": Column(COUNT, "nodes", "nodes of the search tree"),
        "seconds": Column(REAL, "s", "time of the search"),
    },
)

AUDIT = Table(
    "audit",
    2,
    "a model, an eviction method, a budget, and whether the question was read before evicting: bytes held, prompts hit",
    {
        **_MODEL,
        "method": Column(
            TEXT, "", "score, allocator, selector, storage, state in one name; full cache: evicts nothing"
        ),
        "score": Column(TEXT, "", "how entries are scored, with options; null: nothing is evicted", nullable=True),
        "allocator": Column(TEXT, "", "how the budget is shared among KV heads; null as above", nullable=True),
        "selector": Column(TEXT, "", "which entries stay, given how many; null as above", nullable=True),
        "storage": Column(TEXT, "", "ragged: what was selected; padded: each layer as its widest head; masked: all"),
        "state": Column(TEXT, "", "how what is kept is held, with options; null as above", nullable=True),
        "budget": Column(SMALL, "entries", "nominal budget: entries a KV head, on average; null: none", nullable=True),
        "question_seen": Column(FLAG, "", "whether the question was part of what was read before evicting"),
        "tokens": Column(SMALL, "tokens", "tokens of a prompt, question included"),
        "prompts": Column(COUNT, "prompts", "needle prompts that were run"),
        "hits": Column(COUNT, "prompts", "prompts whose first generated tokens are exactly the planted answer's"),
        "hit_rate": Column(REAL, "1", "share of such prompts"),
        "hit_rate_low": Column(REAL, "1", "lower end of its Wilson 95% interval"),
        "hit_rate_high": Column(REAL, "1", "upper end of it"),
        "nominal_entries": Column(
            COUNT,
            "entries",
            "what the budget names: its entries times KV heads, windows counting what they can hold; null: none",
            nullable=True,
        ),
        "nominal_bytes": Column(
            COUNT, "B", "keys and values of so many entries, as the model makes them; null: no budget", nullable=True
        ),
        "logical_bytes": Column(REAL, "B", "keys and values of the entries that queries still see, after evicting"),
        "physical_bytes": Column(REAL, "B", "storages behind all keys and values, after evicting"),
        "decode_bytes": Column(REAL, "B", "the same, mean over the decode steps"),
        "side_bytes": Column(REAL, "B", "all else that is kept for the cache, after evicting: positions, query rows"),
        "peak_bytes": Column(REAL, "B", "the most that keys and values ever took, transient copies included"),
        "full_bytes": Column(REAL, "B", "what the full cache holds at the same point, windows holding what they can"),
        "mean_cache_len": Column(
            REAL, "entries", "entries in memory a KV head, mean over the decode steps, after the append"
        ),
        "compression_seconds": Column(REAL, "s", "scoring, allocating and selecting, a prompt, median over batches"),
        "dense_prefill_seconds": Column(REAL, "s", "the model's own pass over the whole prompt, likewise"),
        "enforced": Column(FLAG, "", "whether the storages after evicting were within nominal_bytes on every prompt"),
        "holds_full_cache": Column(FLAG, "", "whether they were as large as the full cache on every prompt"),
    },
)

LOSS = Table(
    "loss",
    1,
    "a document of a model under one rule (and draw of cells): its loss when every head attends to s keys a row",
    {
        **_MODEL,
        "doc_id": _DOCUMENT["doc_id"],
        "rule": Column(
            TEXT,
            "",
            "dense: nothing dropped; top_mass, balancing, optimal_pool, optimal_half: in every cell;"
            " balancing_flat, balancing_random: in the flat cells, in as many random ones, top_mass in the others",
        ),
        **_BUDGET,
        "draw": Column(SMALL, "1", "number of the draw of random cells, from 0; null: not random", nullable=True),
        "nats_per_token": Column(REAL, "nats", "mean cross-entropy of the tokens that rows from 64 on predict"),
        "tokens": Column(SMALL, "tokens", "tokens that were predicted"),
        "rows": Column(COUNT, "rows", "attention rows of all heads that see more than s keys and were restricted"),
        "searched_rows": Column(COUNT, "rows", "those of them whose keys were chosen otherwise than by top-mass"),
        "proved_rows": Column(COUNT, "rows", "those whose choice is proved the best of what was searched"),
        "cells": Column(SMALL, "1", "cells (layer, query head) in which the rule chooses otherwise than top-mass"),
        "all_cells": Column(SMALL, "1", "cells of the model"),
        "seconds": Column(REAL, "s", "the pass over the document, all choices included"),
    },
)

TABLES = {
    table.name: table
    for table in (
        KV,
        TOKENS,
        ROWS,
        SUBSETS,
        MANIFEST,
        PROOF,
        ROW_FACTS,
        CEILING,
        RULES,
        PENALTY,
        PREDICTOR,
        ROC,
        MAP,
        HARDNESS,
        CERTIFIED,
        MASS_FLOORS,
        PROVED,
        OPEN,
        AUDIT,
        LOSS,
    )
}
