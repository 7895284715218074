"""The loss under restricted attention: the operator, the choice of keys and cells, the pairing, and what is shown."""

import io
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from analysis.bootstrap import MIN_DOCUMENTS, RESAMPLES
from capture import checkpoints, documents
from capture.attention import LayerAttention, capturing
from data import BadInput, Store
from data.command_line import run
from data.schema import LOSS
from data.store import footer, read, write
from eviction import loss as stage
from eviction import terminal
from eviction.__main__ import application
from eviction.loss import (
    BALANCING,
    DENSE,
    FIRST_ROW,
    FLAT,
    POOL,
    RANDOM,
    RULES,
    TOP_MASS,
    WHOLE,
    Request,
    Restriction,
    balanced_keys,
    flat_cells,
    loss,
    nats_per_token,
    pool_keys,
    restricting,
    top_keys,
    weights_of,
    whole_keys,
)
from figures import loss as figure
from figures import loss_page, report
from solvers import Instance, balancing, candidate_set, certify, top_mass
from tests import strategies, synthetic_store

FAMILIES = ("qwen", "qwen3", "olmo", "gemma")
SMALL = Request(s=8, docs=2, calibration=2, length=80, draws=2, nodes=50)
TINY = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 12,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
# Against the model's own float32 attention, of logits up to some tens.
LOGIT_TOLERANCE = 2e-3


def random_model(name: str) -> PreTrainedModel:
    """GQA with a window of 12 in the first layer; gemma2 with a soft-cap that bites."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    if name == "gemma2":
        more = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 24}
        model: PreTrainedModel = Gemma2ForCausalLM(Gemma2Config(**TINY, **more, layer_types=kinds))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**TINY, use_sliding_window=True, layer_types=kinds))
    with torch.no_grad():
        for parameter in model.parameters():  # wider weights: peaked rows
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model.eval()


def load(name: str) -> PreTrainedModel:
    if name in ("gemma2", "qwen2_window"):
        return random_model(name)
    return checkpoints.load_causal(checkpoints.find(name, None), "cpu", "float32")


def random_ids(model: PreTrainedModel, length: int) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))


def naive_row(seen: LayerAttention, head: int, row: int) -> tuple[list[int], list[float], list[list[float]]]:
    """Visible slots, weights and values of one row, in loops from the formula of attention."""
    group = seen.query.shape[1] // seen.key.shape[1]
    query, slots = seen.query[0, head, row].tolist(), range(int(seen.first[0, row]), int(seen.last[0, row]) + 1)
    logits = []
    for j in slots:
        logit = sum(a * b for a, b in zip(query, seen.key[0, head // group, j].tolist(), strict=True)) * seen.scale
        logits.append(logit if seen.softcap is None else seen.softcap * math.tanh(logit / seen.softcap))
    powers = [math.exp(x - max(logits)) for x in logits]
    values = [seen.value[0, head // group, j].tolist() for j in slots]
    return list(slots), [x / sum(powers) for x in powers], values


def naive_output(weights: list[float], values: list[list[float]], s: int) -> list[float]:
    """m_A of the s heaviest keys."""
    kept = sorted(range(len(weights)), key=lambda j: (-weights[j], j))[:s]
    mass = sum(weights[j] for j in kept)
    return [sum(weights[j] * values[j][i] for j in kept) / mass for i in range(len(values[0]))]


@pytest.mark.parametrize("name", ["gemma2", "qwen2_window", "qwen3"])
def test_the_operator_is_the_naive_loop_over_rows_and_the_model_reads_it(name: str) -> None:
    model, s, length = load(name), 5, 30
    restriction = Restriction(s, TOP_MASS)
    seen: dict[int, LayerAttention] = {}
    read_by_model: dict[int, torch.Tensor] = {}

    def on_layer(layer: LayerAttention) -> None:
        restriction.replace_output(layer)
        seen[layer.layer] = layer

    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, inputs, number=number: read_by_model.update({number: inputs[0].clone()})
        )
        for number, layer in enumerate(model.get_decoder().layers)
    ]
    with torch.inference_mode(), capturing(model, on_layer):
        model(input_ids=random_ids(model, length), use_cache=False)
    for hook in hooks:
        hook.remove()
    expected_rows = 0
    for number, layer in seen.items():
        heads = layer.query.shape[1]
        output = read_by_model[number].reshape(length, heads, -1)
        for head in range(heads):
            for row in range(length):
                slots, weights, values = naive_row(layer, head, row)
                expected_rows += len(slots) > s
                expected = torch.tensor(naive_output(weights, values, s))
                torch.testing.assert_close(output[row, head], expected, rtol=1e-4, atol=1e-5)
    assert restriction.restricted == expected_rows


@pytest.mark.parametrize("name", [*FAMILIES, "gemma2", "qwen2_window"])
@pytest.mark.parametrize("search", [DENSE, TOP_MASS, BALANCING, POOL, WHOLE])
def test_a_budget_of_the_whole_row_is_the_models_own_dense_pass(name: str, search: str) -> None:
    model = load(name)
    ids = random_ids(model, 24)
    restriction = Restriction(24, search)
    with torch.inference_mode():
        own = model(input_ids=ids, use_cache=False).logits
        with restricting(model, restriction):
            found = model(input_ids=ids, use_cache=False).logits
        again = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, own, rtol=1e-3, atol=LOGIT_TOLERANCE)
    assert restriction.restricted == 0
    assert torch.equal(again, own)  # the model is as it was


def test_rows_that_see_few_keys_stay_dense_and_windows_count_what_they_see() -> None:
    model, length = random_model("qwen2_window"), 30
    for s, rows in ((12, 4 * (length - 12)), (11, 4 * (2 * (length - 11)))):  # the window of 12 never sees more
        restriction = Restriction(s, TOP_MASS)
        with torch.inference_mode(), restricting(model, restriction):
            model(input_ids=random_ids(model, length), use_cache=False)
        assert restriction.restricted == rows


def test_a_batch_is_refused() -> None:
    model = random_model("qwen2_window")
    with (
        torch.inference_mode(),
        pytest.raises(BadInput, match="a batch of 2"),
        restricting(model, Restriction(4, TOP_MASS)),
    ):
        model(input_ids=random_ids(model, 12).expand(2, -1), use_cache=False)


@pytest.fixture(scope="module")
def real_rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(weights (R, N), values (N, d)) of a few heads on real text, one family with windows among them."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name in ("qwen", "gemma"):
        source = checkpoints.find(name, None)
        tokenizer = checkpoints.load_tokenizer(source)
        begin = documents.begin_ids(tokenizer, source.model_type, source.begins)
        ids = documents.cut([stage.TEXT], tokenizer, begin, 1, 200)[0]

        def keep(seen: LayerAttention) -> None:
            for head in (0, 3):
                weights = weights_of(seen, head)[10::19]
                found.append((weights.clone(), seen.value[0, head * seen.value.shape[1] // 4].double().clone()))

        model = load(name)
        with torch.inference_mode(), capturing(model, keep):
            model(input_ids=torch.from_numpy(ids)[None], use_cache=False)
    return found


@pytest.mark.parametrize("s", [4, 8, 16])
def test_the_choices_are_the_solvers_own_and_ordered_by_their_error(
    real_rows: list[tuple[torch.Tensor, torch.Tensor]], s: int
) -> None:
    better = 0
    for weights, values in real_rows:
        long = (weights > 0).sum(-1) > s
        weights = weights[long]
        chosen = [function(weights, values, s).tolist() for function in (balanced_keys, pool_keys)]
        for row, balanced, best in zip(weights.numpy(), *chosen, strict=True):
            instance = Instance(row, values.numpy())
            top = top_mass(instance, s)
            assert balanced == balancing(instance, s).tolist()
            pool = certify(instance, s, candidates=candidate_set(instance, s))
            errors = [instance.forced_error(keys) for keys in (best, balanced, top)]
            assert errors[0] == pytest.approx(pool.error, rel=1e-9, abs=instance.rounding)
            assert errors[0] <= errors[1] * (1 + 1e-9) + instance.rounding
            assert errors[1] <= errors[2] * (1 + 1e-9) + instance.rounding
            better += errors[1] < 0.99 * errors[2]
    assert better > 10  # the order is not one of equals


def test_the_whole_rows_choice_keeps_its_mass_and_is_no_worse_than_top_mass(
    real_rows: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    s = 6
    for weights, values in real_rows[:4]:
        weights = weights[(weights > 0).sum(-1) > s][:4]
        kept, proved = whole_keys(weights, values, s, 500)
        assert 0 < proved <= len(weights)
        for row, keys in zip(weights.numpy(), kept.tolist(), strict=True):
            instance = Instance(row, values.numpy())
            top = top_mass(instance, s)
            assert instance.forced_error(keys) <= instance.forced_error(top) * (1 + 1e-9) + instance.rounding
            assert instance.kept_mass(keys) >= 0.5 * instance.kept_mass(top) * (1 - 1e-9)
    few = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    kept, proved = whole_keys(few, torch.eye(4, dtype=torch.float64), 2, 5)
    assert kept.tolist() == [[0, 1]] and proved == 1


@given(strategies.rows(), st.integers(1, 8))
def test_ties_zeros_and_scales_leave_the_order_of_errors(row: tuple[np.ndarray, np.ndarray], s: int) -> None:
    instance = Instance(*row)
    weights, values = torch.tensor(instance.weights)[None], torch.tensor(instance.values)
    if s >= instance.n:
        return
    tops, balanced, best = (
        f[0].tolist() for f in (top_keys(weights, s), *(g(weights, values, s) for g in (balanced_keys, pool_keys)))
    )
    if instance.n_positive <= s:  # nothing is left out
        assert tops == balanced == best and set(np.flatnonzero(instance.weights)) <= set(tops)
        return
    assert tops == top_mass(instance, s).tolist()
    assert all(instance.weights[keys].min() > 0 for keys in (balanced, best))
    errors = [instance.forced_error(keys) for keys in (best, balanced, tops)]
    slack = 8 * instance.rounding
    assert errors[0] == pytest.approx(certify(instance, s, candidates=np.arange(instance.n)).error, rel=1e-8, abs=slack)
    assert errors[0] <= errors[1] * (1 + 1e-8) + slack
    assert errors[1] <= errors[2] * (1 + 1e-8) + slack


def test_a_key_of_weight_zero_is_never_kept_in_place_of_one_that_counts() -> None:
    # The first key alone makes no error, so that a key that weighs nothing would be its best company.
    weights = torch.tensor([[0.5, 0.2, 0.2, 0.1, 0.0]], dtype=torch.float64)
    values = torch.tensor([[0.0], [1.0], [1.0], [-4.0], [7.0]], dtype=torch.float64)
    for function in (balanced_keys, pool_keys):
        assert function(weights, values, 2).tolist() == [[0, 1]]


def test_cells_choose_for_themselves_and_the_others_take_top_mass() -> None:
    model, length, s = load("qwen"), 40, 4
    ids = random_ids(model, length)

    def first_layer(search: str, cells: frozenset[tuple[int, int]] | None) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        restriction = Restriction(s, search, cells)

        def on_layer(seen: LayerAttention) -> None:
            restriction.replace_output(seen)
            if seen.layer == 0:
                kept.append(seen.output[0].clone())

        with torch.inference_mode(), capturing(model, on_layer):
            model(input_ids=ids, use_cache=False)
        per_cell = length - s
        assert restriction.searched == (0 if search == TOP_MASS else per_cell * (16 if cells is None else len(cells)))
        return kept[0]

    top, every = first_layer(TOP_MASS, None), first_layer(BALANCING, None)
    some = first_layer(BALANCING, frozenset({(0, 1), (2, 3)}))
    assert torch.equal(some[:, 1], every[:, 1]) and not torch.equal(some[:, 1], top[:, 1])
    assert torch.equal(some[:, [0, 2, 3]], top[:, [0, 2, 3]])


def test_flat_cells_are_those_of_large_median_dropped_mass() -> None:
    model = load("qwen")
    texts = [random_ids(model, 70 + n)[0].numpy() for n in range(2)]
    dropped: dict[tuple[int, int], list[float]] = {}

    def note(seen: LayerAttention) -> None:
        for head in range(4):
            for row in range(FIRST_ROW, seen.query.shape[2]):
                weights = naive_row(seen, head, row)[1]
                dropped.setdefault((seen.layer, head), []).append(1 - sum(sorted(weights)[-8:]))

    with torch.inference_mode(), capturing(model, note):
        for ids in texts:
            model(input_ids=torch.from_numpy(ids)[None], use_cache=False)
    expected = {cell for cell, masses in dropped.items() if sorted(masses)[len(masses) // 2] > 0.25}
    assert 0 < len(expected) < 16
    assert flat_cells(model, texts) == expected


def test_nats_are_of_the_tokens_after_the_first_rows() -> None:
    model = load("qwen")
    ids = random_ids(model, FIRST_ROW + 12)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0].double()
    total = 0.0
    for row in range(FIRST_ROW, FIRST_ROW + 11):
        total += math.log(sum(math.exp(x) for x in logits[row].tolist())) - float(logits[row, ids[0, row + 1]])
    assert nats_per_token(model, ids[0].numpy()) == pytest.approx(total / 11, rel=1e-5)


@pytest.fixture(scope="module")
def texts_read(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, list[list[int]], list[list[int]]]:
    """A store with the loss of one model, what calibrated it, and what its loss was taken of."""
    found, calibrating, measuring = Store(tmp_path_factory.mktemp("data")), [], []

    def noting_cells(model: PreTrainedModel, texts: list[np.ndarray]) -> frozenset[tuple[int, int]]:
        calibrating.extend(ids.tolist() for ids in texts)
        return flat_cells(model, texts)

    def noting_nats(model: PreTrainedModel, ids: np.ndarray) -> float:
        measuring.append(ids.tolist())
        return nats_per_token(model, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "flat_cells", noting_cells)
        patch.setattr(stage, "nats_per_token", noting_nats)
        loss(found, [checkpoints.find("qwen", None)], SMALL)
    return found, calibrating, measuring


def test_flat_cells_are_told_on_other_documents(texts_read: tuple[Store, list[list[int]], list[list[int]]]) -> None:
    _, calibrating, measuring = texts_read
    assert len(calibrating) == 2 and len({tuple(ids) for ids in measuring}) == 2
    assert not {tuple(ids) for ids in calibrating} & {tuple(ids) for ids in measuring}


def test_the_table_has_a_row_per_document_rule_and_draw(
    texts_read: tuple[Store, list[list[int]], list[list[int]]],
) -> None:
    frame = read(LOSS, texts_read[0].loss("embedded-qwen"))
    arms = [(rule, draw) for rule in RULES for draw in ((0, 1) if rule == RANDOM else (None,))]
    assert [(row["doc_id"], row["rule"], row["draw"]) for row in frame.iter_rows(named=True)] == [
        (doc_id, *arm) for doc_id in range(2) for arm in arms
    ]
    assert set(frame["tokens"]) == {80 - 1 - FIRST_ROW} and set(frame["all_cells"]) == {16}
    per_cell = 80 - 8
    for row in frame.iter_rows(named=True):
        assert row["rows"] == (0 if row["rule"] == DENSE else 16 * per_cell)
        assert row["searched_rows"] == row["cells"] * per_cell
        assert row["proved_rows"] <= row["searched_rows"] and row["seconds"] > 0
    cells = {str(rule): set(own["cells"].to_list()) for (rule,), own in frame.group_by("rule")}
    assert cells[DENSE] == cells[TOP_MASS] == {0} and cells[BALANCING] == cells[POOL] == cells[WHOLE] == {16}
    assert cells[FLAT] == cells[RANDOM] and 0 < min(cells[FLAT]) < 16
    pool = frame.filter(rule=POOL)
    assert pool["proved_rows"].to_list() == pool["searched_rows"].to_list()
    assert len(set(frame.filter(doc_id=0)["nats_per_token"])) == len(arms)  # no two rules are the same here


def test_random_cells_are_as_many_seeded_and_drawn_anew() -> None:
    cells = [(layer, head) for layer in range(6) for head in range(5)]
    flat = frozenset(cells[:7])

    def draws(request: Request) -> list[frozenset[tuple[int, int]]]:
        return [arm.cells for arm in stage._arms(request, cells, flat) if arm.rule == RANDOM]

    found = draws(replace(SMALL, draws=4))
    assert len(found) == len(set(found)) == 4 and all(len(x) == 7 and x <= set(cells) for x in found)
    assert found == draws(replace(SMALL, draws=4)) and found != draws(replace(SMALL, draws=4, seed=1))


def test_with_no_flat_cells_or_all_flat_a_rule_is_the_one_that_it_equals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = replace(SMALL, docs=1, rules=(BALANCING, FLAT, RANDOM))
    every = frozenset((layer, head) for layer in range(4) for head in range(4))
    for cells, same in ((frozenset(), TOP_MASS), (every, BALANCING)):
        monkeypatch.setattr(stage, "flat_cells", lambda model, texts, cells=cells: cells)
        store = Store(tmp_path / same)
        loss(store, [checkpoints.find("qwen", None)], request)
        frame = read(LOSS, store.loss("embedded-qwen"))
        nats = {str(rule): set(own["nats_per_token"]) for (rule,), own in frame.group_by("rule")}
        assert nats[FLAT] == nats[RANDOM] == nats[same] and nats[TOP_MASS] != nats[BALANCING]
        assert figure.table(store).filter(rule=FLAT)["cells"].to_list() == [len(cells)]


def test_files_are_written_once_and_again_where_the_request_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, sources = Store(tmp_path), [checkpoints.find("qwen3", None)]
    request = replace(SMALL, docs=1, rules=(BALANCING,))
    (path,) = loss(store, sources, request)
    assert path == store.loss("embedded-qwen3") and store.loss_files() == [path]
    made = footer(LOSS, path)
    assert made["command"] == "eviction loss" and made["parameters"]["rules"] == [DENSE, TOP_MASS, BALANCING]
    capsys.readouterr()
    loss(store, sources, request)
    assert capsys.readouterr().out == f"{path}: current, nothing to do\n"
    loss(store, sources, replace(request, s=4))
    assert capsys.readouterr().out == f"{path}: written\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"docs": 0}, "--docs 0: expected at least 1"),
        ({"calibration": 0}, "--calibration 0: expected at least 1"),
        ({"draws": 0}, "--draws 0: expected at least 1"),
        ({"nodes": 0}, "--nodes 0: expected at least 1"),
        ({"s": 33}, "--s 33: expected 1 to 32"),
        ({"length": 65}, "--length 65: expected at least 66"),
        ({"rules": ("balancing", "best")}, "--rules best: expected some of dense"),
        ({"dtype": "int8"}, "--dtype int8: expected float32"),
        ({"length": 2000}, "--length 2000: embedded-qwen has positions for 1024 tokens"),
        ({"docs": 100_000}, "documents of 80 need"),
        ({"text": Path("no.txt")}, "no.txt"),
    ],
)
def test_bad_requests_are_refused_in_one_line(tmp_path: Path, change: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says) as raised:
        loss(Store(tmp_path), [checkpoints.find("qwen", None)], replace(SMALL, **change))
    assert "\n" not in str(raised.value)
    assert not Store(tmp_path).loss_files()


def made_up(documents: int, model: str = "embedded-qwen", family: str = "qwen") -> pl.DataFrame:
    """Documents of very different loss; top-mass costs each 0.5, of which balancing takes back 0.2, flat cells 0.15.

    Random cells: 0.05 or 0.15 by draw, 0.1 on average.
    """
    saved = [(DENSE, None, 0.5), (TOP_MASS, None, 0.0), (BALANCING, None, 0.2), (FLAT, None, 0.15)]
    saved += [(RANDOM, 0, 0.05), (RANDOM, 1, 0.15)]
    rows = [
        {"family": family, "model": model, "doc_id": doc_id, "rule": rule, "s": 8, "draw": draw}
        | {"nats_per_token": 3 + doc_id % 7 - gain, "tokens": 100, "rows": 50, "searched_rows": 20, "proved_rows": 0}
        | {"cells": 3, "all_cells": 16, "seconds": 1.0}
        for doc_id in reversed(range(documents))
        for rule, draw, gain in saved
    ]
    return synthetic_store.frame(LOSS, rows)


def test_intervals_are_of_differences_paired_by_document(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write(LOSS, made_up(12), store.loss("embedded-qwen"), synthetic_store.PROVENANCE)
    found = {row["rule"]: row for row in figure.table(store).iter_rows(named=True)}
    for rule, difference in ((DENSE, -0.5), (TOP_MASS, 0), (BALANCING, -0.2), (FLAT, -0.15), (RANDOM, -0.1)):
        for end in ("", "_low", "_high"):  # unpaired, the spread of 0 to 6 among documents would widen them
            assert found[rule][f"difference{end}"] == pytest.approx(difference, abs=1e-12)
            assert found[rule][f"recovered{end}"] == pytest.approx(-difference / 0.5, abs=1e-12)
            assert found[rule][f"captured{end}"] == pytest.approx(-difference / 0.2, abs=1e-12)
    assert (found[FLAT]["published_low"], found[FLAT]["published_high"]) == (-0.243, -0.122)
    assert found[BALANCING]["published_low"] is None and found[RANDOM]["draws"] == 2


def test_an_interval_is_the_bootstrap_over_documents(tmp_path: Path) -> None:
    frame = made_up(10).with_columns(
        pl.when(rule=BALANCING)
        .then(pl.col("nats_per_token") + pl.col("doc_id") % 2)
        .otherwise(pl.col("nats_per_token"))
    )
    store = Store(tmp_path)
    write(LOSS, frame, store.loss("embedded-qwen"), synthetic_store.PROVENANCE)
    row = figure.table(store).filter(rule=BALANCING).row(0, named=True)
    # Each document adds 0 or 1 with equal chance: the mean of ten is binomial, whose central 95% is 2 to 8 of 10.
    assert row["difference"] == pytest.approx(0.3)
    assert (row["difference_low"], row["difference_high"]) == pytest.approx((0.0, 0.6))
    write(LOSS, frame.filter(pl.col("doc_id") < 9), store.loss("embedded-qwen"), synthetic_store.PROVENANCE)
    row = figure.table(store).filter(rule=BALANCING).row(0, named=True)
    assert row["difference"] is not None and row["difference_low"] is row["difference_high"] is None


def test_the_page_says_what_was_measured_and_what_is_published(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for family, model in (("llama", "SmolLM2-135M-Instruct-Q4_1"), ("qwen3", "embedded-qwen3")):
        write(LOSS, made_up(12, model, family), store.loss(model), synthetic_store.PROVENANCE)
    frame = figure.table(store)
    about = " ".join(loss_page.about(frame))
    assert "12 documents, 100 predicted tokens each, 2 draws of random cells" in about and "embedded models" in about
    assert "None is given" not in about and "s = 8" in about
    (sentence,) = loss_page.finding(frame)
    assert "top-mass costs 0.5000 nats" in sentence and "no finding in words" not in about
    table = loss_page.rules(frame)
    assert len(table.rows) == 2 * 5
    beside = {(row[0].main, row[1].main): (row[2].main, row[3].main) for row in loss_page.beside_published(frame).rows}
    smollm2, qwen3 = "SmolLM2-135M-Instruct-Q4_1", "embedded-qwen3"
    assert beside == {
        ("loss, balancing in flat cells less top-mass", smollm2): ("-0.150", "-0.122 to -0.243"),
        ("captured by flat cells", smollm2): ("75%", "88% to 98%"),
        ("captured by flat cells", qwen3): ("75%", "15% to 55%"),
        ("captured by random cells", qwen3): ("50%", "77%"),
    }


def test_few_documents_make_no_headline(tmp_path: Path) -> None:
    store, model = Store(tmp_path), "SmolLM2-135M-Instruct-Q4_1"
    for count, sentences in ((9, 0), (10, 1)):
        write(LOSS, made_up(count, model, "llama"), store.loss(model), synthetic_store.PROVENANCE)
        frame = figure.table(store)
        assert len(loss_page.finding(frame)) == sentences
        about = " ".join(loss_page.about(frame))
        assert ("None is given below 10 documents, and no finding in words." in about) == (sentences == 0)


@pytest.mark.parametrize("documents", [9, 10, 25])
def test_the_table_on_the_terminal_is_the_pages(tmp_path: Path, documents: int) -> None:
    noise = np.random.default_rng(documents).normal(size=6 * documents)
    frame = made_up(documents).with_columns(pl.col("nats_per_token") + pl.Series(0.3 * noise))
    write(LOSS, frame, Store(tmp_path).loss("embedded-qwen"), synthetic_store.PROVENANCE)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(terminal.lost(frame))
    lines = console.export_text().splitlines()
    assert (terminal.MIN_DOCUMENTS, terminal.RESAMPLES) == (MIN_DOCUMENTS, RESAMPLES)
    assert ("no interval below 10" in lines[0]) == (documents < 10)
    for row in figure.table(Store(tmp_path)).iter_rows(named=True):
        cells = [row["rule"], f"{row['nats']:.4f}"]
        told = f"{row['difference']:+.4f}"
        if documents >= 10:
            told += f" [{row['difference_low']:+.4f}, {row['difference_high']:+.4f}]"
        cells += ["-"] if row["rule"] == TOP_MASS else told.split()
        cells.append("-" if row["rule"] in (DENSE, TOP_MASS) else f"{row['captured']:.0%}")
        assert cells in [line.split() for line in lines]


def test_without_balancing_nothing_is_captured() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(terminal.lost(made_up(3).filter(pl.col("rule") != BALANCING)))
    assert [line.split()[-1] for line in console.export_text().splitlines() if line.split()[:1] == [FLAT]] == ["-"]


def test_the_command_checks_first_and_shows_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["eviction", "loss", *arguments, "--data", str(tmp_path)])
        with pytest.raises(SystemExit) as caught:
            run(application, "eviction")
        return (caught.value.code, *capsys.readouterr())

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "find", lambda *_: pytest.fail("a checkpoint was looked for"))
        code, out, error = said("--length", "64")
    assert (code, out) == (2, "") and error == "eviction: --length 64: expected at least 66, as rows count from 64\n"
    arguments = ("--model", "qwen3", "--docs", "1", "--calibration", "1", "--length", "72", "--rules", "balancing")
    (_, written, _), (_, current, _) = said(*arguments), said(*arguments)
    assert "embedded-qwen3: 1 document (no interval below 10) of 7 predicted tokens, s = 8" in written
    assert current.splitlines()[1:] == written.splitlines()[1:]
    assert "at least 66" in str(said("--help"))


def test_a_store_without_losses_has_no_figure_and_no_section(tmp_path: Path) -> None:
    assert figure.table(Store(tmp_path)).is_empty()
    assert report._loss(Store(tmp_path), {}) is None
