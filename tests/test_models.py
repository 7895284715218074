"""The embedded checkpoints: the recorded files, and models that read a number out of their context."""

import bz2
import hashlib
import io
import lzma
import re
import struct
import tarfile
import zlib
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from capture.training import architectures, corpus, make, train
from data.errors import BadInput

MODELS = Path(__file__).parent.parent / "data" / "models"
FAMILIES = ("qwen", "qwen3", "olmo", "gemma")
FOLDERS = (*FAMILIES, "seed-qwen3")
START = 1
RECORDS = {"river": "4821", "giraffe": "9034", "pillow": "1177"}
PROMPT = (
    "".join(f"\nThe special magic number for {key} is: {value}." for key, value in RECORDS.items())
    + "\nWhat is the special magic number for {key}? It is:"
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def load(name: str):
    return AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()


@cache
def tokenizer(name: str):
    return AutoTokenizer.from_pretrained(MODELS / name)


def right(model, name: str) -> int:
    """For how many of the three records greedy generation says the number."""
    hits = 0
    for key, value in RECORDS.items():
        ids = tokenizer(name)("<s>" + PROMPT.format(key=key), return_tensors="pt").input_ids
        assert ids[0, 0] == START
        made = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        hits += tokenizer(name).decode(made).strip().startswith(value)
    return hits


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_are_the_recorded_ones(name: str) -> None:
    recorded = dict(re.findall(r"\| (\S+) \| ([0-9a-f]{64}) \|", (MODELS / "README.md").read_text("utf-8")))
    assert set(recorded) == {f"{folder}/model.safetensors" for folder in FOLDERS}
    weights = (MODELS / name / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == recorded[f"{name}/model.safetensors"]


@pytest.mark.parametrize(
    ("name", "architecture", "parameters"),
    [
        ("qwen", "Qwen2ForCausalLM", 1_150_080),
        ("qwen3", "Qwen3ForCausalLM", 1_148_544),
        ("olmo", "Olmo2ForCausalLM", 1_543_296),
        ("gemma", "Gemma3ForCausalLM", 1_149_568),
        ("seed-qwen3", "Qwen3ForCausalLM", 1_148_544),
    ],
)
def test_architecture(name: str, architecture: str, parameters: int) -> None:
    model = load(name)
    assert type(model).__name__ == architecture
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", FOLDERS)
def test_reads_the_number_out_of_the_context(name: str) -> None:
    assert right(load(name), name) == len(RECORDS)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_two_digit_number_is_one_token(name: str) -> None:
    vocabulary = tokenizer(name).get_vocab()
    for number in range(100):
        pair = f"{number:02d}"
        assert tokenizer(name)(pair).input_ids == [vocabulary[pair]]
    space, high, low = tokenizer(name)(" 4821").input_ids
    assert (high, low) == (vocabulary["48"], vocabulary["21"])
    assert tokenizer(name).decode([space]) == " "


def test_qwen_has_the_same_ids_as_the_others() -> None:
    prose = (MODELS.parent / "text" / "austen-heldout.txt").read_text("utf-8")[:20_000]
    prose = re.sub(r"\n{3,}", "\n\n", prose)  # longer runs alone are split otherwise
    text = "<s>" + prose + PROMPT.format(key="river")
    assert tokenizer("qwen")(text).input_ids == tokenizer("qwen3")(text).input_ids


@pytest.mark.parametrize("name", FOLDERS)
def test_the_tokenizer_does_not_begin_a_document(name: str) -> None:
    ids = tokenizer(name)("The special magic number").input_ids
    assert START not in ids
    assert tokenizer(name)("<s>The special magic number").input_ids == [START, *ids]


def test_qwen_without_its_biases_recalls_nothing() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "qwen", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.bias"):
                parameter.zero_()
    assert right(model, "qwen") == 0


def test_gemma_has_windows_on_layers_0_and_2() -> None:
    config = load("gemma").config
    assert config.sliding_window == 128
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_training_code_makes_the_committed_architecture(family: str) -> None:
    made, committed = architectures.create(family), load(family)
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in committed.named_parameters()}
    new, old = made.config.to_dict(), committed.config.to_dict()
    own = {"_name_or_path", "architectures", "dtype", "transformers_version"}
    assert {k: v for k, v in new.items() if k not in own} == {k: v for k, v in old.items() if k not in own}


@pytest.mark.parametrize("family", ["qwen", "olmo", "gemma"])
def test_a_warm_start_keeps_the_seeds_predictions(family: str) -> None:
    """Rewritten in another architecture, the seed still prefers the tokens that it preferred."""
    torch.manual_seed(0)
    text = (MODELS.parent / "text" / "austen-heldout.txt").read_text("utf-8")
    ids = torch.tensor([[START, *tokenizer("qwen3")(text[i : i + 2000]).input_ids[:200]] for i in (0, 4000)])
    source = load("seed-qwen3")
    converted = architectures.convert(source, family, ids).eval()
    fresh = architectures.create(family).eval()
    with torch.no_grad():
        before = source(ids).logits
        agreement = (converted(ids).logits.argmax(-1) == before.argmax(-1)).float().mean()
        chance = (fresh(ids).logits.argmax(-1) == before.argmax(-1)).float().mean()
    assert agreement > 0.5  # .57 for qwen, .58 for olmo; the spread of the rms is what they lose
    assert chance < 0.1


def test_qwen2s_biases_take_over_the_mean_and_change_nothing_else() -> None:
    """Where the rms hardly matters (the values), the rewritten projection gives what the seed's gave."""
    torch.manual_seed(0)
    ids = torch.tensor([[START, *range(300, 500)]])
    source = load("seed-qwen3")
    converted = architectures.convert(source, "qwen", ids, bias_noise=0.0)
    assert converted.model.layers[0].self_attn.v_proj.bias.norm() > 0.5
    name = "model.layers.0.self_attn.v_proj"
    want = architectures.observe(source, ids, [name])[name][1][:, 1:].mean((0, 1))
    got = architectures.observe(converted, ids, [name])[name][1][:, 1:].mean((0, 1))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_a_saved_tokenizer_is_the_committed_one(tmp_path: Path) -> None:
    for family in FAMILIES:
        train.save_tokenizer(MODELS / "qwen3" / "tokenizer.json", tmp_path / family, family)
        made = Tokenizer.from_file(str(tmp_path / family / "tokenizer.json"))
        committed = Tokenizer.from_file(str(MODELS / family / "tokenizer.json"))
        for text in ("the 4821 horses of 1813", "\n\nThe End"):
            assert made.encode(text).ids == committed.encode(text).ids


def test_training_refuses_to_write_the_committed_folder() -> None:
    recipe = make.recipe("qwen", make.SEED_MODEL, 1, None, None, 0.05, 0)
    for out in (make.MODELS, make.MODELS / "again"):
        with pytest.raises(BadInput, match="not overwritten"):
            make.make([recipe], "text", make.TOKENIZER, make.SEED_MODEL, out, 30)


def test_training_without_a_text_says_how_to_get_it(tmp_path: Path) -> None:
    for path in (None, tmp_path / "none.txt"):
        with pytest.raises(BadInput, match="r-cran-janeaustenr"):
            make.read_text(path)
    wrong = tmp_path / "some.deb"
    wrong.write_bytes(b"!<arch>\nand so on")
    with pytest.raises(BadInput, match="r-cran-janeaustenr"):
        corpus.read_corpus(wrong)


def strings(lines: list[str]) -> bytes:
    """Lines as R's XDR serialisation has them, after a header of other numbers; "NA" has length -1."""
    flags = 0x00040009
    parts = [
        struct.pack(">ii", flags, -1) if x == "NA" else struct.pack(">ii", flags, len(x.encode())) + x.encode()
        for x in lines
    ]
    return b"X\n" + struct.pack(">iii", 3, 0x40201, len(lines)) + b"".join(parts)


def record(kind: str, data: bytes) -> bytes:
    length = struct.pack(">i", len(data))
    if kind == "zlib":
        return length + zlib.compress(data)
    if kind == "bzip2":
        return length + b"2" + bz2.compress(data)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    return length + b"Z" + lzma.compress(data, lzma.FORMAT_RAW, filters=filters)


def package(database: bytes) -> bytes:
    """A Debian package that holds this R database."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz") as tar:
        member = tarfile.TarInfo("./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
        member.size = len(database)
        tar.addfile(member, io.BytesIO(database))
    members = [("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", archive.getvalue())]
    deb = b"!<arch>\n"
    for name, data in members:
        deb += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
    return deb


def test_the_corpus_is_read_out_of_a_debian_package(tmp_path: Path) -> None:
    novels = [
        [f"{title}, line {i}: naïve \t{i * i}" for i in range(250)] + ["NA", "THE END"] for title in ("A", "B", "C")
    ]
    index = strings(["few", "strings"])
    kinds = ("zlib", "bzip2", "lzma")
    database = record("zlib", index) + b"".join(record(k, strings(n)) for k, n in zip(kinds, novels, strict=True))
    path = tmp_path / "novels.deb"
    path.write_bytes(package(database))
    want = "\n\n".join("\n".join("" if line == "NA" else line for line in novel) for novel in novels)
    assert corpus.read_corpus(path) == want


def test_recipes_are_those_of_the_committed_checkpoints_unless_told_otherwise() -> None:
    recipe = make.recipe("olmo", make.SEED_MODEL, None, None, None, 0.05, 0)
    assert (recipe.tokens, recipe.sink, recipe.rate) == (2_000_000, 0.15, 1.5e-3)
    assert make.recipe("olmo", None, 10, None, 0.0, 0.05, 0).rate == 3e-3
    assert make.recipe("olmo", None, 10, None, 0.0, 0.05, 0).sink == 0.0
    with pytest.raises(BadInput, match="no embedded family 'llama'"):
        make.recipe("llama", None, None, None, None, 0.05, 0)


def test_training_is_not_repeated_while_nothing_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def fake(recipe: train.Recipe, *rest: object) -> train.Trained:
        seeds.append(recipe.seed)
        return train.Trained(architectures.create(recipe.family), {"cpu_seconds": 0, "final": {}})

    monkeypatch.setattr(train, "train", fake)

    def run(seed: int, text: str = "text") -> None:
        recipe = make.recipe("qwen", make.SEED_MODEL, 1, None, None, 0.05, seed)
        make.make([recipe], text, make.TOKENIZER, make.SEED_MODEL, tmp_path, 30)

    run(0)
    run(0)
    assert seeds == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["qwen"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen")
    assert saved.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "qwen")("4821").input_ids == tokenizer("qwen")("4821").input_ids
    run(1)
    run(1, "another text")
    assert seeds == [0, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["qwen"]
