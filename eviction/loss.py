"""What eviction costs the model: its cross-entropy when every head attends to s keys, chosen row by row.

Each head's attention is replaced by the restricted operator m_A = sum_A p_j v_j / p(A) of P1 (section 2): the weights
of the kept keys, renormalised, over the head's own values. A is chosen by one rule for every row of every head that
sees more than s keys; the other rows stay dense. What a layer reads has thus been through the restricted layers below
it. Rules: top-mass; balancing in all cells (a cell is a layer and query head), in the flat ones alone, or in as many
drawn at random, top-mass in all others; the least forced error in each row's candidate set, proved; and the least in
the whole row among subsets that keep at least half of top-mass's mass, proved where a limit of nodes allows.

Source: P1, its cross-entropy on held-out text; section 2 for the rules. Departures: the optima are ours, P1 measures
none; P1 states neither how many random draws it takes nor from which cells, here they are drawn from all; flat cells
are told on documents that no loss is taken of (P1 does not say); text, lengths and models are ours.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from transformers import PreTrainedModel

from capture import checkpoints, documents
from capture.attention import LayerAttention, capturing, check_faithful
from capture.checkpoints import Source
from capture.documents import Ids
from capture.streaming import batch_of
from data import BadInput, Provenance, Store
from data.command_line import track
from data.schema import LOSS
from data.store import CHECKOUT, code_digest, refresh, sha256
from solvers import Instance, certify, extra_keys, kernels
from solvers.balancing import LARGEST_ENUMERATED_BUDGET
from solvers.branch_and_bound import NO_LIMIT, PROOF_GAP
from solvers.problem import SMALLEST_WEIGHT, UNIT_ROUNDOFF

COMMAND = "eviction loss"
TEXT = CHECKOUT / "data" / "text" / "austen-heldout.txt"
FIRST_ROW = 64  # rows before it predict nothing that counts: they see few keys. The rows of the capture start here too
FLAT_BUDGET = 8  # the budget at which P1 calls a cell flat
FLAT_ABOVE = 0.25  # a cell is flat if the median dropped mass of its rows at that budget exceeds this (P1)
HALF = 0.5  # the mass floor of the search over whole rows
NODES = 500  # a row of that search: on the embedded models 97 of 100 rows and more are proved with it

DENSE, TOP_MASS, BALANCING = "dense", "top_mass", "balancing"
FLAT, RANDOM = "balancing_flat", "balancing_random"
POOL, WHOLE = "optimal_pool", "optimal_half"
RULES = (DENSE, TOP_MASS, BALANCING, FLAT, RANDOM, POOL, WHOLE)  # dense and top-mass are what the others stand beside

Reals = npt.NDArray[np.float64]
Keys = npt.NDArray[np.int64]
Cells = frozenset[tuple[int, int]]  # layer, query head


@dataclass(frozen=True)
class Request:
    """What is measured, of every model.

    rules: of RULES; dense and top-mass always are. s: budget in keys. docs: documents whose loss is taken; calibration:
    further ones that tell which cells are flat. length: tokens of a document. draws: of as many random cells as are
    flat. nodes: limit a row of the search over whole rows. device, dtype: as capture takes them.
    """

    rules: tuple[str, ...] = RULES
    s: int = 8
    docs: int = 12
    calibration: int = 4
    length: int = 256
    draws: int = 3
    nodes: int = NODES
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    text: Path = TEXT

    def check(self) -> None:
        """Raises BadInput for numbers or names that mean nothing."""
        for name in ("docs", "calibration", "draws", "nodes"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name} {getattr(self, name)}: expected at least 1")
        if not 1 <= self.s <= LARGEST_ENUMERATED_BUDGET:
            raise BadInput(f"--s {self.s}: expected 1 to {LARGEST_ENUMERATED_BUDGET}, where the candidate set is P1's")
        if self.length < FIRST_ROW + 2:
            raise BadInput(f"--length {self.length}: expected at least {FIRST_ROW + 2}, as rows count from {FIRST_ROW}")
        unknown = [name for name in self.rules if name not in RULES]
        if unknown:
            raise BadInput(f"--rules {','.join(unknown)}: expected some of {', '.join(RULES)}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise BadInput(f"--dtype {self.dtype}: expected float32, bfloat16 or float16")


@dataclass
class Restriction:
    """How every row's keys are chosen, and a tally of the rows that were restricted.

    s: budget. search: the rule (TOP_MASS, BALANCING, POOL or WHOLE; DENSE restricts nothing) in the cells named, None
    being all; the others take top-mass. nodes: limit a row of WHOLE. restricted, searched, proved: rows of which A was
    taken, by search and not top-mass, with a proof that nothing it was looked for among is better.
    """

    s: int
    search: str
    cells: Cells | None = None
    nodes: int = NODES
    restricted: int = 0
    searched: int = 0
    proved: int = 0

    def replace_output(self, seen: LayerAttention) -> None:
        """Overwrite what the layer's attention returned, of a batch of one, with the restricted operator's output.

        Weights and sums are float64, from the queries, keys and values that the model used; the output is rounded to
        the model's dtype.
        """
        if seen.query.shape[0] != 1:
            raise BadInput(f"layer {seen.layer}: a batch of {seen.query.shape[0]}: restricted attention takes one")
        heads = seen.query.shape[1]
        for head in range(heads):
            weights, values = weights_of(seen, head), _of_head(seen.value, head, heads)
            output = weights @ values
            if self.search != DENSE:
                rows = torch.nonzero((seen.last[0] - seen.first[0] + 1) > self.s).flatten()
                kept = self._choose((seen.layer, head), weights[rows], values)
                output[rows] = restricted(weights[rows], values, kept)
            seen.output[0, :, head] = output.to(seen.output.dtype)

    def _choose(self, cell: tuple[int, int], weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self.restricted += len(weights)
        if len(weights) == 0 or self.search == TOP_MASS or (self.cells is not None and cell not in self.cells):
            return top_keys(weights, self.s)
        self.searched += len(weights)
        if self.search == BALANCING:
            return balanced_keys(weights, values, self.s)
        if self.search == POOL:
            self.proved += len(weights)
            return pool_keys(weights, values, self.s)
        kept, proved = whole_keys(weights, values, self.s, self.nodes)
        self.proved += proved
        return kept


@contextmanager
def restricting(model: PreTrainedModel, restriction: Restriction) -> Iterator[None]:
    """While open, every layer of the model attends as the restriction says; afterwards the model is as it was.

    Run the model on a batch of one with use_cache=False. Raises BadInput as capture.attention.capturing does.
    """
    # The capture hands over the very tensor that the attention function returns: what is written there is what is read.
    with capturing(model, restriction.replace_output):
        yield


def weights_of(seen: LayerAttention, head: int) -> torch.Tensor:
    """A head's attention weights in float64, (N, N): 0 where the mask hides a key, or where they are below 1e-130."""
    heads = seen.query.shape[1]
    logits = seen.query[0, head].double() @ _of_head(seen.key, head, heads).T * seen.scale
    if seen.softcap is not None:
        logits = seen.softcap * torch.tanh(logits / seen.softcap)
    slots = torch.arange(logits.shape[1], device=logits.device)
    visible = (slots >= seen.first[0, :, None]) & (slots <= seen.last[0, :, None])
    weights = torch.softmax(logits.masked_fill(~visible, -torch.inf), dim=-1)
    weights[weights < SMALLEST_WEIGHT] = 0.0  # as the solvers take them
    return weights / weights.sum(-1, keepdim=True)


def restricted(weights: torch.Tensor, values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """m_A of each row, (R, dv): weights (R, N), values (N, dv), kept (R, s) indices."""
    own = weights.gather(1, kept)
    return torch.einsum("rs,rsd->rd", own / own.sum(-1, keepdim=True), values[kept])


def top_keys(weights: torch.Tensor, s: int) -> torch.Tensor:
    """The top-mass set of each row of (R, N), ties to the lowest index; sorted indices (R, s)."""
    return weights.argsort(dim=-1, descending=True, stable=True)[:, :s].sort(dim=-1).values


def balanced_keys(weights: torch.Tensor, values: torch.Tensor, s: int) -> torch.Tensor:
    """What solvers.balancing keeps of each row: weights (R, N), values (N, dv) float64; sorted indices (R, s).

    The candidate sets of all rows are made at once; the swaps of a row are the solvers' own.
    """
    return _searched(weights, values, s, _balanced)


def pool_keys(weights: torch.Tensor, values: torch.Tensor, s: int) -> torch.Tensor:
    """What solvers.certify keeps of each row's candidate set, the least error there, proved: as balanced_keys()."""
    return _searched(weights, values, s, _optimal)


def whole_keys(weights: torch.Tensor, values: torch.Tensor, s: int, nodes: int) -> tuple[torch.Tensor, int]:
    """The best subset of each whole row that keeps half of top-mass's mass, and of how many rows it is proved.

    As balanced_keys(); solvers.certify with mass_floor = 0.5 and so many nodes, after which the best one found is kept.
    """
    kept, proved = top_keys(weights, s).cpu().numpy(), 0
    own, points = weights.cpu().numpy(), values.cpu().numpy()
    for row in range(len(own)):
        keys = np.flatnonzero(own[row])
        if keys.size <= s:  # nothing is left out
            proved += 1
            continue
        found = certify(Instance(own[row, keys], points[keys]), s, mass_floor=HALF, node_limit=nodes)
        kept[row] = keys[found.subset]
        proved += found.status == "optimal"
    return torch.from_numpy(kept).to(weights.device), proved


def dropped_mass(weights: torch.Tensor, s: int) -> torch.Tensor:
    """The weight beyond the s largest of each row, (R,), from weights (R, N) (P1, section 2)."""
    return weights.sort(dim=-1, descending=True).values[:, s:].sum(-1)


def flat_cells(model: PreTrainedModel, texts: Sequence[Ids]) -> Cells:
    """Cells whose median dropped mass at s = 8 exceeds 0.25, over the rows from 64 on of dense passes over the texts.

    Source: P1, the flat-cell map. Rows that see 8 keys or fewer are left out (ours).
    """
    found: dict[tuple[int, int], list[torch.Tensor]] = {}

    def note(seen: LayerAttention) -> None:
        late = torch.arange(seen.query.shape[2], device=seen.query.device) >= FIRST_ROW
        rows = torch.nonzero(late & (seen.last[0] - seen.first[0] + 1 > FLAT_BUDGET)).flatten()
        for head in range(seen.query.shape[1]):
            found.setdefault((seen.layer, head), []).append(dropped_mass(weights_of(seen, head)[rows], FLAT_BUDGET))

    with torch.inference_mode(), capturing(model, note):
        for ids in texts:
            model.get_decoder()(input_ids=batch_of(model, ids), use_cache=False)
    medians = {cell: float(np.median(torch.cat(parts).cpu().numpy())) for cell, parts in found.items()}
    return frozenset(cell for cell, median in medians.items() if median > FLAT_ABOVE)


def nats_per_token(model: PreTrainedModel, ids: Ids) -> float:
    """Mean cross-entropy of the tokens of ids (N,) that rows FIRST_ROW to N - 2 predict."""
    batch = batch_of(model, ids)
    with torch.inference_mode():
        logits = model(input_ids=batch, use_cache=False, logits_to_keep=len(ids) - FIRST_ROW).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits.float(), batch[0, FIRST_ROW + 1 :], reduction="none")
    return float(each.double().mean())


def loss(store: Store, models: Sequence[Source], request: Request) -> list[Path]:
    """Bring table loss up to date for each model, one file a model; returns the files. Current ones are left alone.

    Files of models not named stay. Raises BadInput for a request, a text, a tokenizer or a model that does not fit.
    """
    request.check()
    paths = []
    for source in models:
        path = store.loss(source.label)
        written = refresh(LOSS, path, _provenance(source, request), partial(_measured, source, request))
        print(f"{path}: {'written' if written else 'current, nothing to do'}")
        paths.append(path)
    return paths


def _provenance(source: Source, request: Request) -> Provenance:
    parameters = {
        name: getattr(request, name)
        for name in ("s", "docs", "calibration", "length", "draws", "nodes", "device", "dtype")
    } | {"rules": _rules(request)}
    inputs = {"checkpoint": source.digest, "text": sha256(request.text)}
    return Provenance(COMMAND, parameters, request.seed, inputs, code_digest("data", "solvers", "capture", "eviction"))


def _rules(request: Request) -> list[str]:
    return [name for name in RULES if name in (DENSE, TOP_MASS, *request.rules)]


@dataclass(frozen=True)
class _Arm:
    """A rule in the cells that it works in; draw numbers random ones."""

    rule: str
    search: str
    cells: Cells
    draw: int | None = None


def _measured(source: Source, request: Request) -> pl.DataFrame:
    """Table loss of one model."""
    tokenizer = checkpoints.load_tokenizer(source)
    begin = documents.begin_ids(tokenizer, source.model_type, source.begins)
    config = checkpoints.load_config(source)
    longest = config.max_position_embeddings
    if request.length > longest:
        raise BadInput(f"--length {request.length}: {source.label} has positions for {longest} tokens")
    count = request.docs + request.calibration
    texts = documents.cut([request.text], tokenizer, begin, count, request.length)
    model = checkpoints.load_causal(source, request.device, request.dtype)
    check_faithful(model.get_decoder(), batch_of(model, texts[0]))
    cells = [(i, head) for i in range(config.num_hidden_layers) for head in range(config.num_attention_heads)]
    flat = flat_cells(model, texts[request.docs :]) if {FLAT, RANDOM} & set(request.rules) else frozenset()
    arms = _arms(request, cells, flat)
    rows: list[dict[str, object]] = []
    for doc_id in track(range(request.docs), request.docs, source.label):
        known: dict[tuple[str, Cells], dict[str, object]] = {}  # no flat cells, or all flat: rules that are the same
        for arm in arms:
            same = (arm.search, arm.cells) if arm.cells or arm.search == DENSE else (TOP_MASS, frozenset())
            if same not in known:
                known[same] = _run(model, texts[doc_id], *same, request)
            rows.append(
                {
                    "family": source.family,
                    "model": source.label,
                    "doc_id": doc_id,
                    "rule": arm.rule,
                    "s": request.s,
                    "draw": arm.draw,
                    "cells": len(arm.cells),
                    "all_cells": len(cells),
                    **known[same],
                }
            )
    return pl.DataFrame(rows, schema={name: column.dtype for name, column in LOSS.columns.items()})


def _arms(request: Request, cells: Sequence[tuple[int, int]], flat: Cells) -> list[_Arm]:
    """What is run, in the order of RULES."""
    every, none = frozenset(cells), frozenset[tuple[int, int]]()
    arms = []
    for rule in _rules(request):
        if rule in (DENSE, TOP_MASS):
            arms.append(_Arm(rule, rule, none))
        elif rule == FLAT:
            arms.append(_Arm(rule, BALANCING, flat))
        elif rule == RANDOM:
            for draw in range(request.draws):
                places = np.random.default_rng([request.seed, draw]).permutation(len(cells))[: len(flat)]
                arms.append(_Arm(rule, BALANCING, frozenset(cells[place] for place in places.tolist()), draw))
        else:
            arms.append(_Arm(rule, rule, every))
    return arms


def _run(model: PreTrainedModel, ids: Ids, search: str, cells: Cells, request: Request) -> dict[str, object]:
    """The columns that are measured: one pass over a document."""
    restriction = Restriction(request.s, search, cells, request.nodes)
    start = time.perf_counter()
    with restricting(model, restriction):
        nats = nats_per_token(model, ids)
    if not math.isfinite(nats):
        raise BadInput(f"the loss under {search} is not finite (NaN or infinite): the model's output is not")
    return {
        "nats_per_token": nats,
        "tokens": len(ids) - 1 - FIRST_ROW,
        "rows": restriction.restricted,
        "searched_rows": restriction.searched,
        "proved_rows": restriction.proved,
        "seconds": time.perf_counter() - start,
    }


class _Row(NamedTuple):
    """A row's m candidates by rising index: a_j (m, dv), p_j and |v_j - mu| (m,), and where in them top-mass stands.

    largest: the largest entry of the values.
    """

    steps: Reals
    weights: Reals
    distances: Reals
    top: Keys
    largest: float


def _balanced(row: _Row) -> Keys:
    subset, _, _ = kernels.balance(row.steps, row.weights, row.top, 0.0, math.inf)
    return np.asarray(subset)


def _optimal(row: _Row) -> Keys:
    m, d = row.steps.shape
    # How far a computed error may be off: solvers.exhaustive.leaf_rounding and Instance.rounding, in one.
    slack = UNIT_ROUNDOFF * ((m + d + 8) * float(row.distances.max()) + 16 * math.sqrt(d) * row.largest)
    _, subset, *_ = kernels.search_candidates(
        row.steps, row.weights, row.distances, 1.0, np.arange(m), len(row.top), PROOF_GAP, slack, NO_LIMIT
    )
    return np.asarray(subset)


def _searched(weights: torch.Tensor, values: torch.Tensor, s: int, search: Callable[[_Row], Keys]) -> torch.Tensor:
    """Sorted indices (R, s) of what the search keeps of each row's candidate set (solvers.candidate_set, P1)."""
    mean = weights @ values
    # not by products: they would lose the digits of a value near mu
    distances = torch.cdist(mean, values, compute_mode="donot_use_mm_for_euclid_dist")
    top = top_keys(weights, s)
    single = (weights * distances).masked_fill(weights == 0, -1.0).scatter(1, top, -1.0)
    extra = min(extra_keys(s), weights.shape[1] - s)
    offered, others = (x[:, :extra] for x in single.sort(dim=-1, descending=True, stable=True))
    # what is no candidate (weight 0) goes to the end of its row, beyond its width
    keys = torch.cat([top, others.masked_fill(offered < 0, weights.shape[1])], dim=1)
    keys, order = keys.sort(dim=-1, stable=True)
    places = order.argsort(dim=-1)[:, :s]
    widths = s + (offered >= 0).sum(-1)
    enough = (weights > 0).sum(-1) > s  # else nothing is left out
    keys = keys.clamp(max=weights.shape[1] - 1)
    own = weights.gather(1, keys)
    steps = own[..., None] * (values[keys] - mean[:, None])
    arrays = [x.cpu().numpy() for x in (keys, steps, own, distances.gather(1, keys), places)]
    kept, largest = top.cpu().numpy().copy(), float(values.abs().max())
    for number, width in enumerate(widths.tolist()):
        if enough[number]:
            names, a, w, reach, start = (x[number] for x in arrays)
            kept[number] = names[search(_Row(a[:width], w[:width], reach[:width], start, largest))]
    return torch.from_numpy(kept).to(weights.device)


def _of_head(tensor: torch.Tensor, head: int, heads: int) -> torch.Tensor:
    """Keys or values (1, K, N, d) as query head `head` of `heads` reads them, (N, d) float64."""
    return tensor[0, head * tensor.shape[1] // heads].double()
