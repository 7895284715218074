"""The audit: bytes are what the methods really hold, hits are what they really answer, files are written once."""

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import scipy.stats
import torch

from capture import checkpoints, documents
from data import BadInput, Store
from data.schema import AUDIT
from data.store import footer, read
from eviction import audit as stage
from eviction.audit import COMBINATIONS, FULL_CACHE, Method, Request, ask_peer, audit, methods
from eviction.method import Allocator, Score, Selector, listed, named
from eviction.replay import recorded, replayed
from eviction.run import evict
from eviction.tasks.needle import needles

SMALL = Request(budgets=(40,), prompts=3, length=160, batch=2)
FAMILY = "qwen3"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    found = Store(tmp_path_factory.mktemp("data"))
    audit(found, [checkpoints.find(FAMILY, None)], SMALL)
    return found


@pytest.fixture(scope="module")
def frame(store: Store) -> pl.DataFrame:
    return read(AUDIT, store.audit("embedded-qwen3"))


def test_every_score_there_is_appears_and_every_name_is_known() -> None:
    found = methods()
    assert len({method.name for method in found}) == len(found)
    alone = {x.score for x in found if (x.allocator, x.selector, x.storage) == ("uniform", "top_mass", "ragged")}
    assert alone == {None, *listed(Score)}
    for method in found:
        if method.score is not None:
            named(Score, method.score)
        named(Allocator, method.allocator)
        named(Selector, method.selector)
    assert {x.storage for x in COMBINATIONS} == {"ragged", "padded", "masked"}


def test_a_row_for_every_method_and_way_of_reading(frame: pl.DataFrame) -> None:
    rows = set(frame.select("method", "budget", "question_seen").iter_rows())
    budgets = {method.name: None if method.score is None else 40 for method in methods()}
    assert rows == {(name, budget, seen) for name, budget in budgets.items() for seen in (False, True)}
    assert set(frame["prompts"]) == {3} and set(frame["tokens"]) == {160}


def test_bytes_follow_from_the_entries(frame: pl.DataFrame) -> None:
    entry, cells = 2 * 64 * 4, 4 * 2  # key and value of 64 float32; layers times KV heads
    assert set(frame["nominal_entries"].drop_nulls()) == {40 * cells}
    assert set(frame["nominal_bytes"].drop_nulls()) == {40 * cells * entry}
    seen = frame.filter("question_seen")
    assert set(seen["full_bytes"]) == {160 * cells * entry}
    assert frame["full_bytes"].max() > frame.filter(~pl.col("question_seen"))["full_bytes"][0]  # the context alone
    for row in frame.iter_rows(named=True):
        assert row["logical_bytes"] <= row["physical_bytes"] <= row["peak_bytes"]
        assert row["side_bytes"] > 0
        if row["storage"] == "ragged" and row["budget"] is not None:
            assert row["physical_bytes"] == row["logical_bytes"] <= row["nominal_bytes"], row["method"]
            assert row["enforced"] and not row["holds_full_cache"]
        assert row["mean_cache_len"] * cells * entry >= row["physical_bytes"]  # one entry a head more, each step
        assert row["decode_bytes"] > row["physical_bytes"]
        assert row["dense_prefill_seconds"] > 0 and (row["compression_seconds"] > 0) == (row["budget"] is not None)


def test_who_holds_the_full_cache_says_so(frame: pl.DataFrame) -> None:
    full = frame.filter("holds_full_cache")
    assert set(full["method"]) == {FULL_CACHE, "snapkv+adakv, masked"}
    assert full["physical_bytes"].to_list() == full["full_bytes"].to_list()
    assert not full["enforced"].any()
    masked = full.filter(method="snapkv+adakv, masked")
    assert masked["logical_bytes"].to_list() == masked["nominal_bytes"].to_list()
    padded = frame.filter(storage="padded")
    assert (padded["physical_bytes"] > padded["nominal_bytes"]).all() and not padded["enforced"].any()


def test_hits_and_their_wilson_interval(frame: pl.DataFrame) -> None:
    assert frame.filter(method=FULL_CACHE)["hits"].to_list() == [3, 3]
    for row in frame.iter_rows(named=True):
        assert row["hit_rate"] == row["hits"] / row["prompts"]
        interval = scipy.stats.binomtest(row["hits"], 3).proportion_ci(0.95, method="wilson")
        assert (row["hit_rate_low"], row["hit_rate_high"]) == (interval.low, interval.high)


def test_masking_changes_memory_and_no_answer(frame: pl.DataFrame) -> None:
    for seen in (False, True):
        own = frame.filter(question_seen=seen)
        hits = dict(zip(own["method"], own["hits"], strict=True))
        assert hits["snapkv+adakv"] == hits["snapkv+adakv, masked"]
        assert hits["snapkv+contour"] == hits["snapkv+contour, padded"]


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
@pytest.mark.parametrize(
    "method",
    [Method("snapkv", "snapkv"), Method("contour", "snapkv", "contour"), Method("ea", "expected_attention", "adakv")],
    ids=lambda method: method.name,
)
def test_a_replayed_pass_leaves_what_the_pass_itself_leaves(family: str, method: Method) -> None:
    source = checkpoints.find(family, None)
    tokenizer = checkpoints.load_tokenizer(source)
    begin = documents.begin_ids(tokenizer, source.model_type, source.begins)
    prompts = needles(tokenizer, begin, stage.TEXT, 2, 200)
    model = checkpoints.load_causal(source, "cpu", "float32")
    whole = torch.tensor([one.context + one.question for one in prompts])
    context, question = whole[:, : len(prompts[0].context)], whole[:, len(prompts[0].context) :]
    recording = recorded(model, whole)
    layers = model.get_decoder().layers

    def left(replay: bool) -> tuple[list[list[list[int]]], list[list[int]], torch.Tensor]:
        with evict(model, method.score, method.allocator, budget=40) as run:
            if replay:
                with replayed(model, recording.first(context.shape[1])):
                    logits = run.prefill(context)
            else:
                logits = run.prefill(context)
            kept = [[cell.tolist() for cell in layer] for layer in run.kept_of(1)]
            with run.question():
                tokens = run.generate(question, max_new_tokens=2, pad_token_id=0)
        return kept, tokens.tolist(), logits

    (kept, tokens, logits), (replayed_kept, replayed_tokens, replayed_logits) = left(False), left(True)
    assert replayed_kept == kept and replayed_tokens == tokens
    assert torch.allclose(logits, replayed_logits, atol=1e-3)  # float32, one attention function against another
    assert model.get_decoder().layers is layers


def test_a_replay_is_of_the_recorded_tokens_alone_and_is_undone() -> None:
    model = checkpoints.load_causal(checkpoints.find(FAMILY, None), "cpu", "float32")
    ids = torch.arange(40)[None]
    before = model(ids).logits
    recording = recorded(model, ids).first(30)
    with (
        pytest.raises(BadInput, match="were recorded"),
        evict(model, budget=8) as run,
        replayed(model, recording),
    ):
        run.prefill(ids)
    assert torch.equal(model(ids).logits, before)


def test_a_second_audit_finds_all_current(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    path = store.audit("embedded-qwen3")
    before = path.read_bytes()
    assert audit(store, [checkpoints.find(FAMILY, None)], SMALL) == [path]
    assert "current, nothing to do" in capsys.readouterr().out
    assert path.read_bytes() == before
    made = footer(AUDIT, path)
    assert made["seed"] == 0 and made["command"] == "eviction audit"


def test_a_method_that_the_budget_does_not_allow_is_left_out_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = (Method(FULL_CACHE, None), Method("snapkv", "snapkv"), Method("contour", "snapkv", "contour"))
    monkeypatch.setattr(stage, "methods", lambda: few)
    store = Store(tmp_path)
    audit(store, [checkpoints.find(FAMILY, None)], replace(SMALL, budgets=(8,), prompts=1))
    assert "embedded-qwen3: contour at 8 left out (" in capsys.readouterr().out
    assert set(read(AUDIT, store.audit("embedded-qwen3"))["method"]) == {FULL_CACHE, "snapkv"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": 0}, "--prompts 0: expected at least 1"),
        ({"batch": 0}, "--batch 0: expected at least 1"),
        ({"budgets": ()}, "--budget : expected different numbers from 1 up"),
        ({"budgets": (8, 8)}, "--budget 8,8: expected different numbers from 1 up"),
        ({"dtype": "int8"}, "--dtype int8: expected float32, bfloat16 or float16"),
        ({"length": 1024}, "--length 1024: embedded-qwen3 has positions for 1024 tokens, answer included"),
    ],
)
def test_bad_requests_are_one_clear_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput) as raised:
        audit(Store(tmp_path), [checkpoints.find(FAMILY, None)], replace(SMALL, **change))  # type: ignore[arg-type]
    assert str(raised.value) == message
    assert not list(tmp_path.rglob("*.parquet"))


def test_the_peer_is_asked_about_the_same_prompts(tmp_path: Path) -> None:
    store, source = Store(tmp_path), checkpoints.find(FAMILY, None)
    question = json.loads(ask_peer(store, [source], SMALL).read_text("utf-8"))
    assert question["budgets"] == [40] and question["window"] == stage.PEER_WINDOW
    assert question["window"] == named(Score, "snapkv").rows_needed(40)
    (entry,) = question["models"]
    assert entry["label"] == "embedded-qwen3"
    tokenizer = checkpoints.load_tokenizer(source)
    begin = documents.begin_ids(tokenizer, source.model_type, source.begins)
    ours = needles(tokenizer, begin, SMALL.text, 3, 160, 0)
    assert [one["context_ids"] + one["question_ids"] for one in entry["prompts"]] == [
        [*one.context, *one.question] for one in ours
    ]
    assert [one["answer_ids"] for one in entry["prompts"]] == [list(one.answer) for one in ours]
