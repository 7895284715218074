"""A small store made up from a seed: plausible fits, rows, tokens and subsets for tests of the figures."""

import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from data.schema import AUDIT, LOSS, ROW_FACTS, ROWS, SUBSETS, TABLES, TOKENS, VECTOR, Table
from data.store import Provenance, Store, write

WIDTH = 4  # of the made-up queries
ESTIMATES = (("line_search", 0.9, 0.3), ("fully_corrective", 1.0, 0.2), ("least", 1.1, 0.0))
WORDS = [" Emma", " was", " in", " no", " danger", ".", "\n", " of", "\t", "<script>alert(1)</script>", " &amp;", "  "]


@dataclass(frozen=True)
class Model:
    family: str
    name: str
    layers: int
    heads: int
    closable: float


@dataclass(frozen=True)
class UserRule:
    """A user's rule: its median ratio to top-mass at the first budget, and where alone it was graded, if not all."""

    name: str
    ratio: float
    models: tuple[str, ...] = ()
    budgets: tuple[int, ...] = ()

    def graded(self, model: str, s: int) -> bool:
        return model in (self.models or (model,)) and s in (self.budgets or (s,))


RECENT_HALF = UserRule("recent_half", 1.8)
FIVE = (
    Model("qwen", "embedded-qwen", 4, 4, 0.03),
    Model("qwen3", "embedded-qwen3", 4, 4, 0.08),
    Model("llama", "SmolLM2-135M-Instruct-Q4_1", 30, 9, 0.05),
    Model("olmo", "embedded-olmo", 4, 4, 0.13),
    Model("gemma", "embedded-gemma", 4, 4, 0.02),
)
FLOORS = (0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.0)  # at which made-up pairs are searched
PROVENANCE = Provenance("synthetic", {"budgets": [4, 8, 16, 32]}, 0, {}, "0" * 64)


def build(
    root: Path,
    models: tuple[Model, ...] = FIVE,
    budgets: tuple[int, ...] = (4, 8, 16, 32),
    documents: int = 12,
    row_documents: int = 2,
    tokens: bool = True,
    users: tuple[UserRule, ...] = (RECENT_HALF,),
    certified: bool = True,
    audit: bool = True,
    loss: bool = True,
    seed: int = 0,
) -> Store:
    """Write every table that the figures read under root."""
    store, rng = Store(root), np.random.default_rng(seed)
    for name, rows in _fits(models, budgets, documents, users, rng).items():
        put(store, TABLES[name], rows)
    for name, rows in _certified(models, budgets, documents).items():
        put(store, TABLES[name], rows if certified else [])
    put(store, TABLES["hardness"], _hardness())
    for model in models if audit else ():
        write(AUDIT, frame(AUDIT, _audit(model)), store.audit(model.name), PROVENANCE)
    for model in models if loss else ():
        write(LOSS, frame(LOSS, _loss(model, documents)), store.loss(model.name), PROVENANCE)
    for model in models:
        for doc_id in range(row_documents):
            _document(store, model, doc_id, budgets, tokens, users, certified, rng)
    return store


def put(store: Store, table: Table, rows: list[dict[str, object]]) -> None:
    """Write one table of the analysis."""
    write(table, frame(table, rows), store.fit(table.name), PROVENANCE)


def frame(table: Table, rows: list[dict[str, object]]) -> pl.DataFrame:
    """Rows as a frame of the table; nullable columns that a row leaves out are null."""
    schema = {
        name: pl.Array(pl.Float32, WIDTH) if column.dtype == VECTOR else column.dtype
        for name, column in table.columns.items()
    }
    return pl.DataFrame([{name: row.get(name) for name in schema} for row in rows], schema=schema)


def _interval(name: str, value: float, half: float, documents: int) -> dict[str, float | None]:
    if documents < 10:
        return {name: value, f"{name}_low": None, f"{name}_high": None}
    return {name: value, f"{name}_low": value - half, f"{name}_high": value + half}


def _fits(
    models: tuple[Model, ...],
    budgets: tuple[int, ...],
    documents: int,
    users: tuple[UserRule, ...],
    rng: np.random.Generator,
) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = {
        name: [] for name in ("ceiling", "rules", "penalty", "predictor", "roc", "map")
    }
    for model in models:
        for place, s in enumerate(budgets):
            key = {"family": model.family, "model": model.name, "s": s}
            counts = {**key, "n_rows": 72 * model.layers * model.heads, "n_documents": documents}
            closable = model.closable * (0.7 + 0.15 * place)

            def ci(name: str, value: float, half: float) -> dict[str, float | None]:
                return _interval(name, value, half, documents)

            found["ceiling"].append(
                counts
                | {
                    "n_zero_gap": 31,
                    "n_zero_top": 2,
                    "n_infinite": 1,
                    "coverage": 0.9 if documents >= 10 else None,
                    "closable_q25": 0.2 * closable,
                    "closable_q75": 3 * closable,
                }
                | {"cap": closable + 0.01 * 2**place, "cap_share": 0.01 * (place + 1)}
                | ci("closable", closable, 0.2 * closable)
                | ci("closable_mean", 3 * closable, 0.3 * closable)
                | ci("kappa", 1 / (1 - closable), 0.01)
                | ci("kappa_p99", 2.2, 0.2)
                | ci("share", 0.3, 0.03)
                | ci("recovery", 1.0, 0.0)
                | ci("closure", 0.97 * closable, 0.2 * closable)
                | ci("balancing_exact", 0.9, 0.01)
            )
            ratios = {"top_mass": 1.0, "optimal_pool": 1 - closable, "balancing": 1 - 0.98 * closable}
            ratios |= {"geometric": 1.3 + 0.2 * place, "leverage": 6.0 + 4 * place}
            ratios |= {user.name: user.ratio * (1 - 0.05 * place) for user in users if user.graded(model.name, s)}
            for rule, ratio in ratios.items():
                found["rules"].append(
                    counts
                    | {"rule": rule}
                    | ci("ratio", ratio, 0.05 * ratio)
                    | ci("ratio_to_optimum", ratio / (1 - closable), 0.05)
                    | ci("kept_mass", 0.7, 0.02)
                    | ci("better", 0.2, 0.02)
                    | ci("worse", 0.5, 0.02)
                )
            for estimate, factor, below in (
                ("line_search", 0.9, 0.3),
                ("fully_corrective", 1.0, 0.2),
                ("least", 1.1, 0.0),
            ):
                found["penalty"].append(
                    counts
                    | {"estimate": estimate, "n_zero_free": 4}
                    | ci("penalty", 1 + factor * 0.12 * 2**place * (1 + 5 * model.closable), 0.05)
                    | ci("penalty_p99", 3.0 + place, 0.3)
                    | ci("below_one", below, 0.0)
                )
            for statistic, power in (("dropped_mass", 3.5), ("diameter_bound", 1.7), ("variance_bound", 2.2)):
                rate = np.linspace(0, 1, 40)
                key_of = key | {"statistic": statistic}
                found["roc"] += [
                    key_of
                    | {
                        "threshold": float("inf") if x == 0 else float(1 - x),
                        "false_positive_rate": float(x),
                        "true_positive_rate": float(1 - (1 - x) ** power),
                    }
                    for x in rate
                ]
                auc = 1 - 1 / (1 + power)
                found["predictor"].append(
                    counts
                    | {"statistic": statistic, "n_positive": 500}
                    | {"p_value": None if statistic == "dropped_mass" else 0.0 if place else 0.034}
                    | ci("auc", auc, 0.02)
                    | ci("auc_lead", 3.5 / 4.5 - auc, 0.01)
                    | ci("spearman_gap", 0.6, 0.03)
                    | ci("spearman_phi", 0.93, 0.01)
                )
            for layer in range(model.layers):
                for head in range(model.heads):
                    mass = float(rng.beta(1.2, 4) * (1.4 - 0.15 * place))
                    found["map"].append(
                        counts
                        | {"layer": layer, "q_head": head, "n_rows": 72, "dropped_mass": mass}
                        | {"kappa": 1 + 0.4 * mass * float(rng.random()), "flat": mass > 0.25}
                        | {"closable_mean": 0.3 * mass, "share": 0.5 if layer < model.layers / 3 else 0.125}
                    )
    return found


def _certified(
    models: tuple[Model, ...], budgets: tuple[int, ...], documents: int
) -> dict[str, list[dict[str, object]]]:
    """Tables certified, mass_floors, proved and open, of 40 pairs per model and budget."""
    found: dict[str, list[dict[str, object]]] = {"certified": [], "mass_floors": [], "proved": [], "open": []}
    for model in models:

        def ci(name: str, value: float, half: float) -> dict[str, float | None]:
            return _interval(name, value, half, documents)

        for place, s in enumerate(budgets):
            counts = {"family": model.family, "model": model.name, "s": s, "n_rows": 40, "n_documents": documents}
            closable = model.closable * (0.7 + 0.15 * place)
            n = {"proved_half": 39, "proved": 32 - 3 * place, "below_half": 8 + place, "below_tenth": 3 + place}
            n |= {"changed": 2 * place, "improved": 6 + 3 * place}
            record: dict[str, object] = {**counts, "n_of": 648, "decile_least": 4, "decile_most": 4, "n_zero_top": 1}
            record["pool_all"] = 0.9 * closable
            record |= {"n_tenth": 40, "n_proved_tenth": 36, **ci("proved_tenth", 0.9, 0.05)}
            for name, count in n.items():
                record |= {f"n_{name}": count, **ci(name, count / 40, 0.02)}
            factors = {"pool": 1.0, "half": 1.1, "half_cap": 1.15, "full": 1.5}
            for name, factor in factors.items():
                record |= ci(name, factor * closable, 0.1 * closable)
            record |= ci("full_cap", 0.1 + 3 * closable, 0.1 * closable)
            record |= {"n_label_yes": 14, "n_label_no": 25, "n_label_undecided": 1, "n_change_undecided": 1}
            record |= {"improvement": 0.06, "improvement_largest": 0.71, "n_time_limit": 0}
            found["certified"].append(record | {"seconds": 0.012, "seconds_largest": 0.49})
            for rank in range(8 + 3 * place):  # those without a proof
                found["open"].append(
                    {
                        "family": model.family,
                        "model": model.name,
                        "s": s,
                        "row_id": f"{model.name}:0:1:{place}:{rank}",
                    }
                    | {"n_keys": 400 + rank, "dropped_mass": 0.4 + 0.01 * rank, "lower": 0.05 * (rank % 4)}
                    | {"error": 0.8 - 0.01 * rank, "kept": 0.3, "smallest": (0.1, 0.5, 1.0)[rank % 3]}
                    | {"label": "yes", "stopped_by": ("node_limit", "time_limit")[rank % 2]}
                )
            for rank, rho in enumerate((1.0, *FLOORS)):
                gain = 1.5 * closable * (1 - rho**2)
                found["mass_floors"].append(
                    {**counts, "rho": rho, "n_proved": 40 - rank, "n_smallest": 1 if rho else 33}
                    | {**ci("closable", gain, 0.01), **ci("cap", gain * (1 + 0.2 * rank), 0.01)}
                    | ci("proved", 1 - rank / 40, 0.01)
                )
        bins = [("dropped_mass", low, low + 0.1) for low in (0.0, 0.1, 0.3)] + [("n_keys", 128.0, 256.0)]
        bins += [("n_keys", 512.0, 1024.0), *(("s", float(s), float(s)) for s in budgets)]
        for number, (by, low, high) in enumerate(bins):
            for floor in (0.5, 0.0):
                share = 1 - (0.05 if floor == 0 else 0.0) * number
                found["proved"].append(
                    {"family": model.family, "model": model.name, "by": by, "bin_low": low, "bin_high": high}
                    | {"mass_floor": floor, "n_pairs": 40, "n_proved": round(40 * share), "share": share}
                    | {"share_low": share - 0.1, "share_high": min(1.0, share + 0.02)}
                )
    return found


def _hardness() -> list[dict[str, object]]:
    """Table hardness: nodes that grow with n on reduced instances and hardly on captured rows."""
    kinds = [("Partition", False), ("Partition", True), ("Exact Cover by 3-Sets", False)]
    kinds += [("Exact Cover by 3-Sets", True)]
    found: list[dict[str, object]] = []
    for n in (8, 16, 24):
        same = {"n": n, "s": n // 2, "subsets": float(math.comb(n, n // 2)), "proved": True, "seconds": 0.01}
        for draw in range(3):
            record = {**same, "draw": draw, "d": 1, "error": 1.0, "lower": 1.0}
            for place, (problem, zero) in enumerate(kinds):
                nodes = (1 + draw) * 2 ** (n // (1 + place)) // 32
                found.append({**record, "problem": problem, "zero": zero, "nodes": nodes})
            row_id = f"embedded-qwen:0:0:{draw}:100"
            found.append({**record, "problem": "captured", "row_id": row_id, "nodes": 3 + draw})
    return found


METHODS = (  # name, score, allocator, storage, share of the full cache held, needles hit with the question unseen, seen
    ("full cache", None, None, "ragged", 1.0, 24, 24),
    ("snapkv", "snapkv", "uniform", "ragged", 0.125, 3, 23),
    ("snapkv+adakv, masked", "snapkv", "adakv", "masked", 1.0, 4, 24),
    ("snapkv+contour", "snapkv", "contour", "ragged", 0.125, 5, 22),
    ("snapkv+contour, padded", "snapkv", "contour", "padded", 0.4, 5, 22),
)


def _audit(model: Model) -> list[dict[str, object]]:
    """Table audit of one model at a nominal budget of 64, an eighth of the full cache, on 24 prompts."""
    found: list[dict[str, object]] = []
    full = 8192 * model.layers
    for name, score, allocator, storage, held, *hits in METHODS:
        evicts = score is not None
        record: dict[str, object] = {"family": model.family, "model": model.name, "method": name, "score": score}
        record |= {"allocator": allocator, "selector": "top_mass" if evicts else None, "storage": storage}
        record |= {"state": "exact" if evicts else None}
        record |= {"budget": 64 if evicts else None, "tokens": 512, "prompts": 24, "full_bytes": float(full)}
        record |= {"nominal_entries": 64 * model.layers if evicts else None}
        record |= {"nominal_bytes": full // 8 if evicts else None, "logical_bytes": full / 8 if evicts else float(full)}
        record |= {"physical_bytes": held * full, "decode_bytes": held * full + 100, "side_bytes": 50.0}
        record |= {"peak_bytes": 1.1 * full, "mean_cache_len": 512 * held + 1, "dense_prefill_seconds": 2.0}
        record |= {"compression_seconds": 0.1 if evicts else 0.0}
        record |= {"enforced": held == 0.125, "holds_full_cache": held == 1}
        for seen, hit in zip((False, True), hits, strict=True):
            rate = hit / 24
            ends = {"hit_rate": rate, "hit_rate_low": 0.9 * rate, "hit_rate_high": min(1.0, rate + 0.1)}
            found.append(record | ends | {"question_seen": seen, "hits": hit})
    return found


SAVED = (  # rule, draw, nats a token less than top-mass on an average document
    ("dense", None, 0.3),
    ("top_mass", None, 0.0),
    ("balancing", None, 0.1),
    ("balancing_flat", None, 0.09),
    ("balancing_random", 0, 0.03),
    ("balancing_random", 1, 0.05),
    ("optimal_pool", None, 0.11),
    ("optimal_half", None, 0.12),
)


def _loss(model: Model, documents: int) -> list[dict[str, object]]:
    """Table loss of one model at s = 8, a fifth of its cells flat; gains differ by a third among documents."""
    cells = model.layers * model.heads
    rows: list[dict[str, object]] = []
    for doc_id in range(documents):
        for rule, draw, saved in SAVED:
            chosen = 0 if rule in ("dense", "top_mass") else cells // 5 if rule.startswith("balancing_") else cells
            record: dict[str, object] = {"family": model.family, "model": model.name, "doc_id": doc_id, "rule": rule}
            record |= {"s": 8, "draw": draw, "nats_per_token": 4 + 0.1 * doc_id - saved * (1 + (doc_id % 3 - 1) / 3)}
            record |= {"tokens": 191, "rows": 0 if rule == "dense" else 248 * cells, "searched_rows": 248 * chosen}
            record |= {"proved_rows": 240 * chosen if "optimal" in rule else 0, "cells": chosen, "all_cells": cells}
            rows.append(record | {"seconds": 1.5})
    return rows


def _document(
    store: Store,
    model: Model,
    doc_id: int,
    budgets: tuple[int, ...],
    tokens: bool,
    users: tuple[UserRule, ...],
    certified: bool,
    rng: np.random.Generator,
) -> None:
    length = 160
    if tokens:
        write(
            TOKENS,
            frame(
                TOKENS,
                [
                    {
                        "model": model.name,
                        "doc_id": doc_id,
                        "position": i,
                        "token_id": i,
                        "text": "<s>" if i == 0 else WORDS[int(rng.integers(len(WORDS)))],
                    }
                    for i in range(length)
                ],
            ),
            store.tokens(model.name, doc_id),
            PROVENANCE,
        )
    rows: list[dict[str, object]] = []
    subsets: dict[int, list[dict[str, object]]] = {s: [] for s in budgets}
    facts: dict[int, list[dict[str, object]]] = {s: [] for s in budgets}
    searches: dict[int, list[dict[str, object]]] = {s: [] for s in budgets}
    for layer in range(min(model.layers, 3)):
        for head in range(2):
            position = int(rng.integers(100, length))
            first = 40 if model.family == "gemma" else 0  # a window layer: local and true positions differ
            n = position + 1 - first
            weights = rng.dirichlet(np.full(n, 0.1))
            row_id = f"{model.name}:{doc_id}:{layer}:{head}:{position}"
            same = {"row_id": row_id, "family": model.family, "model": model.name, "doc_id": doc_id}
            same |= {"layer": layer, "q_head": head, "n_keys": n}
            rows.append(
                same
                | {"kv_head": 0, "position": position, "first_key": first, "scale": 0.5}
                | {"query": [0.0] * WIDTH, "weights": weights.astype(np.float32).tolist()}
                | {"worst_difference": 2e-6, "source_dtype": "float32"}
            )
            order = np.argsort(-weights, kind="stable")
            for s in budgets:
                top = np.sort(order[:s])
                best = np.sort(np.concatenate([order[: s - 2], order[s : s + 2]]))
                kappa = float(1 + rng.exponential(0.6))
                recent = np.arange(n - s, n)
                own = [(user.name, recent, 0.8 * user.ratio) for user in users if user.graded(model.name, s)]
                for rule, subset, error in (("top_mass", top, 0.8), ("optimal_pool", best, 0.8 / kappa), *own):
                    subsets[s].append(
                        {"row_id": row_id, "s": s, "rule": rule, "search": "exhaustive", "mass_floor": 0.0}
                        | {"n_searched": s + 12, "subset": (subset + first).tolist(), "error": error}
                        | {"lower": 0.0, "kept_mass": float(weights[subset].sum()), "free_error": 0.1}
                        | {"status": "optimal", "stopped_by": "finished", "nodes": 1, "seconds": 0.0}
                    )
                for floor in FLOORS if layer == 0 else ():  # the manifest takes some of the rows
                    error, proved = (0.8 if floor > 0.5 else 0.4), floor > 0.2
                    searches[s].append(
                        subsets[s][-1]
                        | {"rule": "optimal_floor" if floor else "optimal_full", "search": "branch_and_bound"}
                        | {
                            "mass_floor": floor,
                            "n_searched": n,
                            "subset": (top + first).tolist(),
                            "error": error / kappa,
                        }
                        | {"lower": error / kappa if proved else 0.0, "kept_mass": float(weights[top].sum())}
                        | {"status": "optimal" if proved else "bracketed", "nodes": 40, "seconds": 0.01}
                        | {"stopped_by": "finished" if proved else "node_limit"}
                    )
                facts[s].append(
                    same
                    | {"s": s, "dropped_mass": 1 - float(weights[top].sum()), "radius": 1.0}
                    | {"spread": 1.0, "residual": 0.1, "rounding": 1e-12}
                )
    for s in budgets:
        names = {user.name for user in users}
        for name in ("standard", *(user.name for user in users if user.graded(model.name, s))):
            records = [r for r in subsets[s] if r["rule"] == name or (name == "standard" and r["rule"] not in names)]
            write(SUBSETS, frame(SUBSETS, records), store.subsets(model.name, s, name, doc_id), PROVENANCE)
        if certified:
            write(SUBSETS, frame(SUBSETS, searches[s]), store.subsets(model.name, s, "certified", doc_id), PROVENANCE)
        write(ROW_FACTS, frame(ROW_FACTS, facts[s]), store.facts(model.name, s, doc_id), PROVENANCE)
    write(ROWS, frame(ROWS, rows), store.rows(model.name, doc_id), PROVENANCE)


def quick_save(figure: Figure) -> tuple[bytes, bytes]:
    """What style.save gives, but coarse and with no true PDF, whose fonts take a second a figure."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=20)
    return png.getvalue(), b"%PDF of " + png.getvalue()
