"""The audit: bytes are what the methods really hold, hits are what they really answer, files are written once."""

import io
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl
import pytest
import scipy.stats
import torch
from rich.console import Console, RenderableType

from capture import checkpoints, documents
from data import BadInput, Store
from data.command_line import run
from data.schema import AUDIT
from data.store import footer, read
from eviction import audit as stage
from eviction import terminal
from eviction.__main__ import application
from eviction.audit import Request, ask_peer, audit
from eviction.calibration import Statistics, calibrated
from eviction.combinations import COMBINATIONS, FULL_CACHE, Method, methods, parsed
from eviction.method import Allocator, Score, Selector, State, listed, named
from eviction.replay import recorded, replayed
from eviction.run import evict
from eviction.scores.triattention import TriAttention
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
    plain = ("uniform", "top_mass", "ragged", "exact")
    alone = {x.score for x in found if (x.allocator, x.selector, x.storage, x.state) == plain}
    assert alone == {None, *listed(Score)}
    for method in found:
        if method.score is not None:
            named(Score, method.score)
        named(Allocator, method.allocator)
        named(Selector, method.selector)
        named(State, method.state)
    combined = [parsed(name) for name in COMBINATIONS]
    assert [x.name for x in combined] == list(COMBINATIONS)  # what stands in the table can be asked for
    assert {x.storage for x in combined} == {"ragged", "padded", "masked"}
    assert {x.selector.partition(":")[0] for x in combined} == set(listed(Selector))
    assert {x.state for x in combined} == set(listed(State))


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("knorm", Method("knorm", "knorm")),
        ("snapkv+uniform+top_mass, ragged, exact", Method("snapkv", "snapkv")),
        ("snapkv+alpha", Method("snapkv+alpha", "snapkv", selector="alpha")),
        ("knorm,masked", Method("knorm, masked", "knorm", storage="masked")),
        (
            "snapkv:variant=kvpress,window=16 + contour:mode=uniform + alpha:lambda=0.3,signature=global , padded",
            Method(
                "snapkv:variant=kvpress,window=16+contour:mode=uniform+alpha:lambda=0.3,signature=global, padded",
                "snapkv:variant=kvpress,window=16",
                "contour:mode=uniform",
                "alpha:lambda=0.3,signature=global",
                "padded",
            ),
        ),
        (
            "snapkv+adakv,subspace:rank=16",
            Method("snapkv+adakv, subspace:rank=16", "snapkv", "adakv", state="subspace:rank=16"),
        ),
    ],
)
def test_a_method_is_named_in_one_line(text: str, method: Method) -> None:
    assert parsed(text) == method == parsed(method.name)
    assert methods((text, method.name)) == (Method(FULL_CACHE, None), method)  # each once


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("snap", "unknown score 'snap': expected one of"),
        ("", "unknown score ''"),
        ("snapkv+ada", "unknown 'ada': expected allocator (adakv, "),
        ("snapkv+knorm", "unknown 'knorm': expected allocator (adakv, "),
        ("snapkv, mask", "unknown 'mask': expected storage (ragged, padded, masked) or state (exact, "),
        ("snapkv+masked", "unknown 'masked'"),
        ("snapkv+adakv+contour", "allocator contour beside allocator adakv"),
        ("snapkv+alpha+alpha", "selector alpha beside selector alpha"),
        ("snapkv, masked, padded", "storage padded beside storage masked"),
        ("snapkv, masked:all=1", "storage masked:all=1: expected no options"),
        ("snapkv:windows=3", "option 'windows=3': expected variant="),
        ("snapkv, span_mean:slots=few", "state span_mean: slots=few"),
        ("snapkv, padded, subspace", "state subspace: expected storage ragged"),
        ("triattention:statistics=no.safetensors", "no.safetensors"),
    ],
)
def test_unknown_methods_are_refused_before_anything_runs(
    tmp_path: Path, text: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoints, "find", lambda *_: pytest.fail("a checkpoint was looked for"))
    said = command("audit", "--method", "snapkv", "--method", text, "--data", str(tmp_path), capsys=capsys)
    assert said.code == 2 and said.error.count("\n") == 1 and said.out == ""
    assert said.error.startswith(f"eviction: --method {text}".strip()) and says in said.error


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    error: str


def command(*arguments: str, capsys: pytest.CaptureFixture[str]) -> Said:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(sys, "argv", ["eviction", *arguments])
        run(application, "eviction")
    code = caught.value.code
    assert isinstance(code, int)
    return Said(code, *capsys.readouterr())


def test_the_command_shows_what_it_wrote_and_what_is_current(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--model", FAMILY, "--prompts", "2", "--length", "160", "--budget", "40", "--data", str(tmp_path))
    chosen = ("--method", "knorm, masked", "--method", "snapkv:window=16+alpha,span_mean:slots=4")
    written, current = (command("audit", *small, *chosen, capsys=capsys) for _ in range(2))
    assert written.code == current.code == 0
    first, *table = written.out.splitlines()
    assert first.endswith("embedded-qwen3.parquet: written")
    assert current.out.splitlines() == [first.replace("written", "current, nothing to do"), *table]
    frame = read(AUDIT, Store(tmp_path).audit("embedded-qwen3"))
    assert set(frame["method"]) == {FULL_CACHE, "knorm, masked", "snapkv:window=16+alpha, span_mean:slots=4"}
    assert frame.filter(method=FULL_CACHE)["state"].to_list() == [None, None]
    assert set(frame.filter(score="snapkv:window=16")["state"]) == {"span_mean:slots=4"}
    shown = "\n".join(table)
    assert "embedded-qwen3: 2 prompts of 160 tokens, budget 40 entries a KV head" in shown
    assert all(name in shown for name in set(frame["method"]))
    assert "nothing is evicted" not in shown


def test_the_table_on_the_terminal_holds_the_numbers(frame: pl.DataFrame) -> None:
    lines = printed(terminal.audited(frame))
    for row in frame.filter(~pl.col("question_seen")).iter_rows(named=True):
        (seen,) = frame.filter("question_seen", method=row["method"])["hits"].to_list()
        cost = row["compression_seconds"] / row["dense_prefill_seconds"]
        within = "full" if row["storage"] == "masked" else "no" if row["storage"] == "padded" else "yes"
        numbers = [
            *f"{row['hits']} of 3 {seen} of 3".split(),
            f"{row['physical_bytes'] / row['full_bytes']:.1%}",
            f"{row['peak_bytes'] / row['full_bytes']:.0%}",
            f"{row['mean_cache_len']:.1f}",
            *(["-", "-"] if row["budget"] is None else [f"{cost:.1%}", within]),
        ]
        assert [*row["method"].split(), *numbers] in [line.split() for line in lines], row["method"]


def printed(table: RenderableType) -> list[str]:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text().splitlines()


def test_budgets_that_evict_nothing_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = replace(SMALL, budgets=(40, 150, 160), prompts=1, methods=("snapkv",))
    audit(Store(tmp_path), [checkpoints.find(FAMILY, None)], request)
    said = capsys.readouterr().out
    assert said.startswith("--budget 160: prompts of 160 tokens fit into it: nothing is evicted at that budget\n")
    assert said.count("nothing is evicted") == 1
    found = read(AUDIT, Store(tmp_path).audit("embedded-qwen3"))
    (line,) = terminal.about_audit(found)  # of 150, which the context alone fits into
    assert "at budget 150 nothing is evicted with the question unseen" in line
    rows = [line.split()[:3] for line in printed(terminal.audited(found)) if line.split()[:1] == ["snapkv"]]
    assert [row[1] for row in rows] == ["40", "150", "160"]
    assert "full" not in " ".join(printed(terminal.audited(found))).replace("full cache", "")


def test_values_in_a_subspace_take_less_than_the_budget_names(tmp_path: Path) -> None:
    audit(Store(tmp_path), [checkpoints.find(FAMILY, None)], replace(SMALL, methods=("snapkv, subspace:rank=16",)))
    own = read(AUDIT, Store(tmp_path).audit("embedded-qwen3")).filter(~pl.col("score").is_null())
    cells = 4 * 2
    assert set(own["nominal_bytes"]) == {40 * cells * 2 * 64 * 4}  # of keys and values as the model makes them
    assert set(own["physical_bytes"]) == {40.0 * cells * (64 + 16) * 4}
    assert own["enforced"].all()


def test_a_file_that_a_method_names_is_an_input(tmp_path: Path) -> None:
    source, file = checkpoints.find(FAMILY, None), tmp_path / "statistics.safetensors"
    request = replace(SMALL, prompts=1, methods=(f"triattention:statistics={file}+shared",))
    digests = set()
    for docs in (1, 2):
        calibrated(source, [stage.TEXT], docs, 64).save(file)
        (path,) = audit(Store(tmp_path), [source], request)
        digests.add(footer(AUDIT, path)["inputs"][str(file)])  # type: ignore[index]
    assert len(digests) == 2


def test_only_what_the_methods_need_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def measuring(*arguments: object, **options: object) -> Statistics:
        asked.append(options.get("generation"))
        return calibrated(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "calibrated", measuring)
    source = checkpoints.find(FAMILY, None)
    for names, generations in ((("snapkv", "kvzip+contour"), []), (("triattention:furthest=64", "variant_b"), [None])):
        asked.clear()
        found = stage._prepared(source, SMALL, methods(names))
        assert asked == generations and set(found) == {parsed(name).score for name in names}
    shared = found["triattention:furthest=64"]
    assert isinstance(shared, TriAttention) and shared.furthest == 64 and isinstance(shared.statistics, Statistics)


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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path)
    few = replace(SMALL, budgets=(8,), prompts=1, methods=("snapkv", "snapkv+contour"))
    audit(store, [checkpoints.find(FAMILY, None)], few)
    assert capsys.readouterr().out.count("embedded-qwen3: snapkv+contour at 8 left out (") == 1
    assert set(read(AUDIT, store.audit("embedded-qwen3"))["method"]) == {FULL_CACHE, "snapkv"}
    with pytest.raises(BadInput, match="embedded-qwen3: none of the methods could be run at budget 8"):
        audit(store, [checkpoints.find(FAMILY, None)], replace(few, methods=("snapkv+contour", "kvzip+balancing")))
    assert "kvzip+balancing at 8 left out (selector balancing: needs query rows" in capsys.readouterr().out


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
    with pytest.raises(BadInput, match="--ask-peer with --method"):
        ask_peer(store, [source], replace(SMALL, methods=("snapkv",)))
    assert [one["answer_ids"] for one in entry["prompts"]] == [list(one.answer) for one in ours]
