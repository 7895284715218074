"""The capture as a user meets it: files, resumption, replacement, and what is refused with one clear line."""

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
import transformers
from filelock import FileLock
from safetensors.torch import load_file, save_file

from capture import checkpoints, documents, plan, stage, streaming
from capture.families import FAMILIES, family_named, family_of
from capture.plan import Request
from data import BadInput, Store, store
from data.schema import KV, ROWS, TOKENS
from data.store import CHECKOUT

EMBEDDED = CHECKOUT / "data" / "models"
AUSTEN = CHECKOUT / "data" / "text" / "austen-heldout.txt"
TINY = [name for name, family in FAMILIES.items() if family.folder is not None]


def prose(folder):
    """The first pages of the default text, beside the folder: a tokenizer is slow on the whole."""
    path = folder.with_name(f"{folder.name}.txt")
    path.write_text(AUSTEN.read_text("utf-8")[:10_000], encoding="utf-8")
    return path


def request(docs=2, length=160, rows=3, seed=0, text=(), dtype="float32", device="cpu"):
    return Request(list(text), docs, length, rows, device, dtype, seed)


def run(folder, model="qwen3", checkpoint=None, **kwargs):
    kwargs.setdefault("text", [prose(folder)])
    stage.capture(checkpoints.find(model, checkpoint), request(**kwargs), Store(folder))
    return Store(folder)


def files(folder):
    """Every file and when it was written; lock files are no outputs."""
    found = (path for path in Path(folder).rglob("*") if path.is_file() and not path.name.startswith(".lock-"))
    return {path: path.stat().st_mtime_ns for path in found}


def copy_of(name, folder):
    return Path(shutil.copytree(EMBEDDED / name, folder))


def never(*args, **kwargs):
    raise AssertionError("this should not have been called")


@pytest.mark.parametrize("family", TINY)
def test_tables_hold_what_a_reader_needs_to_recompute_every_row(tmp_path, family):
    held = run(tmp_path, family)
    label = FAMILIES[family].label
    assert held.models() == [label]
    config = json.loads((EMBEDDED / family / "config.json").read_text())
    layers, heads, kv_heads = (config[f"num_{x}"] for x in ("hidden_layers", "attention_heads", "key_value_heads"))
    for doc in range(2):
        rows = store.read(ROWS, held.rows(label, doc))
        assert rows.height == layers * heads * 3
        assert rows["family"].unique().to_list() == [family]
        assert rows["row_id"].n_unique() == rows.height
        at = rows.group_by("layer").agg(pl.col("position").unique().sort())
        assert (at["position"].list.len() == 3).all()  # the same for all heads of a layer
        notes = store.footer(ROWS, held.rows(label, doc))["notes"]
        for row in rows.iter_rows(named=True):
            q_head, kv_head = row["q_head"], row["kv_head"]
            assert kv_head == q_head // (heads // kv_heads)
            assert row["row_id"] == f"{label}:{doc}:{row['layer']}:{q_head}:{row['position']}"
            path = held.kv(label, doc, row["layer"])
            kv = store.read(KV, path).filter(kv_head=kv_head).sort("position")
            assert kv["position"].to_list() == list(range(160))
            span = slice(row["first_key"], row["first_key"] + row["n_keys"])
            assert span.stop == row["position"] + 1
            assert row["window"] == (128 if family == "gemma" and row["layer"] in (0, 2) else None)
            logits = kv["key"].to_numpy()[span].astype(float) @ np.array(row["query"]) * row["scale"]
            weights = np.exp(logits - logits.max())
            assert np.abs(weights / weights.sum() - np.array(row["weights"])).max() < 1e-5
            assert 0 <= row["worst_difference"] <= notes["worst_difference"] < 4e-3
        assert notes["kv"] == {str(x): store.sha256(held.kv(label, doc, x)) for x in range(layers)}
        tokens = store.read(TOKENS, held.tokens(label, doc))
        assert tokens["token_id"][0] == 1 and tokens["text"][0] == "<s>"
    one, two = ("".join(store.read(TOKENS, held.tokens(label, doc))["text"].to_list()[1:]) for doc in (0, 1))
    text = prose(tmp_path).read_text("utf-8")
    assert text.startswith(one) and text.find(two) >= len(one)  # stretches of the text that do not overlap


def test_two_captures_of_one_model_at_once_are_refused_and_of_two_models_are_not(tmp_path):
    (tmp_path / "kv").mkdir()
    with FileLock(tmp_path / "kv" / ".lock-embedded-qwen3"):
        with pytest.raises(BadInput, match="another process is capturing embedded-qwen3 there"):
            run(tmp_path, docs=1)
        run(tmp_path, "olmo", docs=1)
    assert len(run(tmp_path, docs=1).row_files("embedded-qwen3")) == 1


def test_a_seed_gives_the_same_rows_again_and_another_seed_others(tmp_path):
    frames = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        held = run(tmp_path / name, docs=1, seed=seed)
        frames.append(store.read(ROWS, held.rows("embedded-qwen3", 0)))
    assert frames[0].equals(frames[1])
    assert not frames[0]["row_id"].equals(frames[2]["row_id"])


def test_a_second_run_loads_nothing_and_touches_nothing(tmp_path, monkeypatch, capsys):
    run(tmp_path)
    before = files(tmp_path)
    for name in ("load_model", "load_tokenizer", "load_config"):
        monkeypatch.setattr(checkpoints, name, never)
    run(tmp_path)
    assert files(tmp_path) == before
    assert "nothing to do" in capsys.readouterr().out


def test_more_documents_keep_the_earlier_ones_and_fewer_remove_the_rest(tmp_path, capsys):
    run(tmp_path, docs=2)
    before = files(tmp_path)
    held = run(tmp_path, docs=3)
    assert before.items() <= files(tmp_path).items()
    assert len(held.row_files()) == 3
    capsys.readouterr()
    run(tmp_path, docs=1)
    assert [path.name for path in held.row_files()] == ["doc-000.parquet"]
    assert "removed" in capsys.readouterr().out
    assert {path.parent.name for path in (tmp_path / "kv").rglob("*.parquet")} == {"doc-000"}
    assert len(list((tmp_path / "tokens").rglob("*.parquet"))) == 1


def test_other_settings_replace_every_document_of_the_model_and_of_no_other(tmp_path):
    run(tmp_path, "olmo", docs=1)
    held = run(tmp_path, docs=3)
    derived = {
        model: [held.subsets(model, s, rules, 0) for s in (4, 8) for rules in ("standard", "mine")]
        for model in ("embedded-qwen3", "embedded-olmo")
    }
    for path in [path for paths in derived.values() for path in paths]:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"graded before")
    run(tmp_path, docs=2, length=120)
    assert not any(path.exists() for path in derived["embedded-qwen3"])  # of rows that are no more
    assert all(path.exists() for path in derived["embedded-olmo"])
    assert len(held.row_files("embedded-qwen3")) == 2
    assert len(held.row_files("embedded-olmo")) == 1
    for doc in range(2):
        assert store.read(TOKENS, held.tokens("embedded-qwen3", doc)).height == 120


def test_a_document_whose_files_are_damaged_is_made_again(tmp_path):
    held = run(tmp_path)
    kv, tokens = held.kv("embedded-qwen3", 1, 2), held.tokens("embedded-qwen3", 0)
    digest = store.sha256(kv)
    kv.write_bytes(kv.read_bytes()[:-9])
    tokens.unlink()
    run(tmp_path)
    assert store.sha256(kv) == digest and tokens.is_file()


def test_a_run_that_stops_resumes_at_the_document_it_stopped_in(tmp_path, monkeypatch):
    calls = []
    real = streaming.capture_document

    def stops(model, ids, family, label, doc_id, *args):
        calls.append(doc_id)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(model, ids, family, label, doc_id, *args)

    monkeypatch.setattr(streaming, "capture_document", stops)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, docs=3)
    before = files(tmp_path / "rows")
    assert [path.name for path in before] == ["doc-000.parquet"]
    run(tmp_path, docs=3)
    assert calls == [0, 1, 1, 2]
    assert before.items() <= files(tmp_path / "rows").items()


@pytest.mark.parametrize("fails_at", [1, 7])
def test_a_full_disk_in_the_middle_keeps_what_was_whole(tmp_path, monkeypatch, fails_at):
    held = run(tmp_path, docs=2)
    before = files(tmp_path)
    count = 0

    def full(*args):
        nonlocal count
        count += 1
        if count == fails_at:
            raise OSError(28, "No space left on device", "somewhere")
        store.write(*args)

    monkeypatch.setattr(streaming, "write", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, docs=2, length=120)
    if fails_at == 1:  # in the first document: everything earlier is as it was
        assert files(tmp_path) == before
    else:  # in the second: the first is new and whole, and no old one is mixed in with it
        assert [path.name for path in held.row_files()] == ["doc-000.parquet"]
        assert store.read(TOKENS, held.tokens("embedded-qwen3", 0)).height == 120
    assert not list(tmp_path.rglob("*.partial")) and not list(tmp_path.rglob(".partial-*"))


def test_an_estimate_beyond_the_free_space_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10**5))
    monkeypatch.setattr(checkpoints, "load_model", never)
    with pytest.raises(BadInput, match=r"needs about 1\.4 MB of disk and 100 kB are free"):
        run(tmp_path)
    assert not files(tmp_path)


def test_the_estimate_of_disk_is_what_is_written_before_compression():
    shape = plan.Shape(30, 9, 3, 64, 576, 8192, 134.5e6, 28.3e6)
    cost = plan.estimate(shape, 1, 2048, "float32")
    assert 95e6 < cost.disk < 102e6  # 30 layers x 2 x 3 heads x 2,048 keys x 64 x 4 bytes = 94.4 MB
    assert 0.8e9 < cost.memory < 2e9
    assert cost.seconds > 0


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    asked = request(text=[prose(tmp_path)])
    stage.capture(checkpoints.find("qwen", None), asked, Store(tmp_path), dry_run=True)
    assert not files(tmp_path)
    assert "MB of disk" in capsys.readouterr().out


def test_a_model_with_nan_stops_with_its_layer_and_keeps_earlier_rows(tmp_path):
    folder = copy_of("olmo", tmp_path / "broken")
    held = run(tmp_path / "out", None, str(folder))
    before = files(tmp_path / "out")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"][3] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"not finite .* at layer 1, head 0"):
        run(tmp_path / "out", None, str(folder))
    assert files(tmp_path / "out") == before
    assert held.models() == ["broken"]


def test_nan_after_the_last_attention_is_seen_too(tmp_path):
    folder = copy_of("qwen3", tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"][3] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match="after its last layer"):
        run(tmp_path / "out", None, str(folder))


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    folder = copy_of("qwen3", tmp_path / "mixed")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:500].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 500}))
    with pytest.raises(BadInput, match="its model knows 500"):
        run(tmp_path / "out", None, str(folder))


def test_bf16_runs_and_says_so(tmp_path):
    held = run(tmp_path, docs=1, dtype="bfloat16")
    rows = store.read(ROWS, held.rows("embedded-qwen3", 0))
    assert rows["source_dtype"].unique().to_list() == ["bfloat16"]
    assert rows["worst_difference"].max() > 1e-4


# documents


class WhitespaceTokenizer:
    """Words as tokens; BOS, if it has one, written by itself only if told so."""

    def __init__(self, bos=None, writes=False, size=1000, token="<bos>"):
        self.bos_token_id, self.bos_token, self.writes, self.size = (
            bos,
            token if bos is not None else None,
            writes,
            size,
        )

    def __len__(self):
        return self.size

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [5 + len(word) for word in text.split()]
        start = [self.bos_token_id] if self.writes and add_special_tokens else []
        return namedtuple("Encoding", "input_ids")(start + ids)

    def convert_tokens_to_ids(self, token):
        return self.bos_token_id if token == self.bos_token else 0

    def convert_ids_to_tokens(self, number):
        return self.bos_token if number == self.bos_token_id else "?"


@pytest.mark.parametrize(
    ("tokenizer", "model_type", "begins", "expected"),
    [
        (WhitespaceTokenizer(2), "gemma3_text", "<bos>", [2]),  # a Hub default: its record decides
        (WhitespaceTokenizer(2, writes=True), "qwen2", "", []),
        (WhitespaceTokenizer(2, writes=True), "llama", None, [2]),  # others: what the tokenizer writes by itself
        (WhitespaceTokenizer(2), "llama", None, []),
        (WhitespaceTokenizer(None), "qwen2", None, []),
        (WhitespaceTokenizer(2), "gemma2", None, [2]),  # Gemma: always
        (WhitespaceTokenizer(1, size=2048, token="<s>"), "mistral", None, [1]),  # the embedded models' tokenizer
        (WhitespaceTokenizer(1, size=32000, token="<s>"), "mistral", None, []),
    ],
)
def test_the_rule_for_the_beginning_of_a_document(tokenizer, model_type, begins, expected):
    assert documents.begin_ids(tokenizer, model_type, begins) == expected


def test_a_beginning_that_the_tokenizer_lacks_is_refused():
    with pytest.raises(BadInput, match="<bos>"):
        documents.begin_ids(WhitespaceTokenizer(None), "gemma3_text", "<bos>")
    with pytest.raises(BadInput, match="defines no BOS"):
        documents.begin_ids(WhitespaceTokenizer(None), "gemma2", None)


@pytest.mark.parametrize("family", TINY)
def test_embedded_checkpoints_begin_with_s_as_default_and_as_a_copy(tmp_path, family):
    sources = [checkpoints.find(family, None), checkpoints.find(None, str(copy_of(family, tmp_path / "own")))]
    assert [source.begins for source in sources] == ["<s>", None]
    for source in sources:
        tokenizer = checkpoints.load_tokenizer(source)
        begin = documents.begin_ids(tokenizer, source.model_type, source.begins)
        ids = documents.cut([prose(tmp_path)], tokenizer, begin, 2, 100)
        assert [x[0] for x in ids] == [1, 1] and all(len(x) == 100 for x in ids)


def test_documents_are_cut_across_files_and_spread_over_the_text(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(" ".join("x" * (i % 9 + 1) for i in range(70)))
    (tmp_path / "note.md").write_text("not text of ours")
    paths = documents.text_files([tmp_path])
    assert [path.name for path in paths] == ["a.txt", "b.txt", "c.txt"]
    whole = [5 + i % 9 + 1 for i in range(70)] * 3
    cut = documents.cut(paths, WhitespaceTokenizer(2), [2], 3, 51)
    assert [len(x) for x in cut] == [51, 51, 51] and all(x[0] == 2 for x in cut)
    for slot, x in zip((0, 2, 1), cut, strict=True):  # four slots, in the order 0, 2, 1, 3
        assert x[1:].tolist() == whole[50 * slot : 50 * (slot + 1)]
    more = documents.cut(paths, WhitespaceTokenizer(2), [2], 4, 51)
    assert all((a == b).all() for a, b in zip(cut, more[:3], strict=True))
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(BadInput, match=r"d\.txt: not UTF-8"):
        documents.cut(documents.text_files([tmp_path]), WhitespaceTokenizer(2), [2], 3, 51)


@pytest.mark.parametrize("slots", [1, 2, 3, 12, 48, 97, 128])
def test_every_prefix_of_the_slots_is_spread(slots):
    order = documents.spread_order(slots)
    assert sorted(order) == list(range(slots))
    for count in (1, 3, 12):
        taken = [*sorted(order[:count]), slots]
        widest = max(b - a for a, b in pairwise([0, *taken]))
        assert widest <= 2 * slots / min(count, slots) + 1 or count == 1


def test_a_text_too_short_says_what_there_is_and_what_is_needed(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("word " * 250)
    with pytest.raises(BadInput, match=r"250 tokens.* 3 documents of 101 need 300: 2 would fit"):
        documents.cut([short], WhitespaceTokenizer(2), [2], 3, 101)
    with pytest.raises(BadInput, match="0 would fit"):
        run(tmp_path / "out", text=[short], docs=1, length=1000)


# bad input


def test_families_and_their_architectures():
    assert [family_of(x) for x in ("qwen2", "qwen3", "llama", "olmo2", "gemma3_text")] == list(FAMILIES)
    assert family_of("mistral") == "mistral"
    assert all(family_named(name).name == name for name in FAMILIES)
    with pytest.raises(BadInput, match="'gpt': expected one of qwen, qwen3, llama, olmo, gemma"):
        family_named("gpt")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"docs": 0}, "--docs 0"),
        ({"rows": 0}, "--rows 0"),
        ({"seed": -1}, "--seed -1"),
        ({"length": 66}, "--length 66: expected at least 67"),
        ({"length": 1025}, "--length 1025: .* 1024 tokens"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"device": "nowhere"}, "--device nowhere"),
        ({"text": [Path("missing.txt")]}, "missing.txt"),
    ],
)
def test_numbers_that_cannot_be_are_named(tmp_path, changes, said):
    with pytest.raises(BadInput, match=said):
        run(tmp_path, **changes)
    assert not files(tmp_path)


def damaged(folder, how):
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "config of no use":
        (folder / "config.json").write_text("{ not json")
    elif how == "no weights":
        (folder / "model.safetensors").unlink()
    elif how == "weights cut short":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100_000])
    elif how == "a weight missing":
        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.2.self_attn.k_proj.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    elif how == "a weight of another shape":
        weights = load_file(folder / "model.safetensors")
        name = "model.layers.2.self_attn.k_proj.weight"
        weights[name] = weights[name][:64].clone()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    elif how == "no tokenizer":
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    elif how == "an unknown architecture":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))


@pytest.mark.parametrize(
    "how",
    [
        "no config",
        "config of no use",
        "no weights",
        "weights cut short",
        "a weight missing",
        "a weight of another shape",
        "no tokenizer",
        "an unknown architecture",
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused_with_its_folder_named(tmp_path, how):
    folder = copy_of("qwen3", tmp_path / "own")
    damaged(folder, how)
    with pytest.raises(BadInput, match="own") as caught:
        run(tmp_path / "out", None, str(folder))
    assert "\n" not in str(caught.value)
    assert not files(tmp_path / "out")


def test_a_checkpoint_that_is_not_there(tmp_path):
    with pytest.raises(BadInput, match="no such folder or file"):
        checkpoints.find(None, str(tmp_path / "nothing"))
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(BadInput, match=r"expected a folder, a \.gguf file or a Hub name"):
        checkpoints.find(None, str(tmp_path / "weights.bin"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(BadInput, match=r"broken\.gguf: not readable as a GGUF model"):
        checkpoints.find(None, str(tmp_path / "broken.gguf"))


def test_a_model_and_a_checkpoint_that_disagree_are_refused():
    with pytest.raises(BadInput, match=r"gemma3_text model \(gemma\), not of the family qwen"):
        checkpoints.find("qwen", str(EMBEDDED / "gemma"))
    with pytest.raises(BadInput, match="give --model"):
        checkpoints.find(None, None)
    for model, checkpoint, terms in (("gemma", None, "yes"), ("qwen", None, "accept"), ("gemma", "x/y", "accept")):
        with pytest.raises(BadInput, match="--gemma-terms"):
            checkpoints.find(model, checkpoint, terms)


def test_a_hub_name_without_a_network_is_one_line(monkeypatch, tmp_path):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        assert kwargs["timeout"] <= 10
        raise ConnectionError("Name or service not known\nand more")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match=r"Qwen/Qwen2.5-1.5B: .*Hub cannot be reached.*not known"):
        checkpoints.find("qwen", "Qwen/Qwen2.5-1.5B")


def test_a_hub_default_begins_as_its_record_says(monkeypatch):
    monkeypatch.setattr(checkpoints, "_from_hub", lambda name: EMBEDDED / "gemma")
    source = checkpoints.find("gemma", "google/gemma-3-1b-pt")
    assert (source.begins, source.label, source.family) == ("<bos>", "gemma-3-1b-pt", "gemma")
    assert checkpoints.find("gemma", "someone/gemma-mine").begins is None


@pytest.mark.parametrize(("prefix", "window"), [("Gemma2", 32), ("Mistral", 32)])
def test_an_architecture_outside_the_five_is_captured_under_its_own_name(tmp_path, prefix, window):
    folder = tmp_path / "Own model (v1)"
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=window,
        max_position_embeddings=512,
    )
    getattr(transformers, f"{prefix}ForCausalLM")(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / "gemma" / name, folder / name)
    held = run(tmp_path / "out", None, str(folder), docs=1)
    rows = store.read(ROWS, held.rows("Own-model-v1", 0))
    assert rows["family"].unique().to_list() == [prefix.lower()]
    assert rows["softcap"].unique().to_list() == ([50.0] if prefix == "Gemma2" else [None])
    assert rows.filter(layer=0)["n_keys"].max() == window
    assert store.read(TOKENS, held.tokens("Own-model-v1", 0))["token_id"][0] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt"], "unknown model 'gpt'"),
        (["--model", "qwen", "--docs", "many"], "--docs"),
        (["--checkpoint", "/no/such/folder"], "no such folder"),
    ],
)
def test_the_command_line_ends_with_one_line_and_code_2(tmp_path, arguments, said):
    command = [sys.executable, "-m", "capture", *arguments, "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, check=False)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and said in done.stderr
