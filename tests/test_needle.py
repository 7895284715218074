"""Needle prompts: of exactly the length asked, cut without changing a token, answered by the models they are for."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from capture import checkpoints, documents
from capture.checkpoints import Source
from capture.training.tasks import Tasks
from data import BadInput
from eviction.audit import TEXT
from eviction.tasks.needle import FIGURES, LEAST_PROSE, Needle, held_out_nouns, needles

EMBEDDED = ("qwen", "qwen3", "olmo", "gemma")
FAMILIES = (*EMBEDDED, "llama")
HIGH = 0.9  # hit rate of the full cache below which the prompts, or the model, are not what they should be


@cache
def source(family: str) -> Source:
    return checkpoints.find(family, None)


@cache
def tokenizer(family: str) -> PreTrainedTokenizerBase:
    return checkpoints.load_tokenizer(source(family))


def drawn(family: str, count: int = 4, length: int = 256, seed: int = 0, text: Path = TEXT) -> list[Needle]:
    begin = documents.begin_ids(tokenizer(family), source(family).model_type, source(family).begins)
    return needles(tokenizer(family), begin, text, count, length, seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_have_the_length_asked_and_one_width(family: str) -> None:
    prompts = drawn(family, 6)
    assert {len(one.context) + len(one.question) for one in prompts} == {256}
    assert len({len(one.question) for one in prompts}) == len({len(one.answer) for one in prompts}) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_are_the_tokens_of_the_whole_text(family: str) -> None:
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(family)(text, add_special_tokens=False).input_ids)

    for one in drawn(family):
        whole = one.context + one.question + one.answer
        text = [tokenizer(family).decode(part) for part in (one.context, one.question, one.answer)]
        assert encode("".join(text)) == whole
        assert encode(text[0]) == one.context and encode(text[1]) == one.question
        assert text[2].isdigit() and len(text[2]) == FIGURES
        fact = f"\nThe special magic number for {one.key} is: {text[2]}."
        assert text[0].count(fact) == 1 and text[0].count(text[2]) == 1
        assert "What is the special magic number for " + one.key in text[1] and text[2] not in text[1]


def test_prompts_begin_as_the_model_expects() -> None:
    for family in EMBEDDED:
        assert all(one.context[0] == 1 and 1 not in one.context[1:] for one in drawn(family))
    chat = tokenizer("llama").decode(drawn("llama")[0].context)
    assert chat.startswith("<|im_start|>system") and "<|im_start|>user\n" in chat


def test_the_embedded_models_are_asked_in_the_words_they_were_trained_on() -> None:
    words = held_out_nouns()
    tasks = Tasks(Tokenizer.from_file(str(source("qwen3").folder / "tokenizer.json")), TEXT.read_text("utf-8")[:20_000])
    assert words == tasks.test_keys and not set(words) & set(tasks.train_keys)
    for one in drawn("qwen3"):
        assert one.key in words
        before, between, _ = tasks.query
        assert list(one.question) == before + tasks.key_ids[one.key] + between + tasks.space


def test_depths_are_spread_evenly_and_the_fact_stands_there() -> None:
    prompts = drawn("gemma", 5, 512)
    for place, one in enumerate(prompts):
        assert one.depth == pytest.approx((place + 0.5) / 5, abs=0.05)  # a few tokens on, to where a word begins
    ends = [tokenizer("gemma").decode(one.context).index("The special magic number") for one in prompts]
    assert ends == sorted(ends)


def test_the_seed_decides_and_nothing_else() -> None:
    random.seed(1)
    first = drawn("olmo", seed=3)
    random.seed(2)
    assert drawn("olmo", seed=3) == first
    assert drawn("olmo", seed=4) != first


def test_a_hit_is_the_exact_beginning() -> None:
    one = Needle((1, 2), (3,), (7, 8), "key", 0.5)
    assert one.hit([7, 8]) and one.hit([7, 8, 9])
    assert not one.hit([7]) and not one.hit([8, 7]) and not one.hit([0, 7, 8]) and not one.hit([])


@pytest.mark.parametrize("family", EMBEDDED)
def test_the_full_cache_finds_the_fact(family: str) -> None:
    model = checkpoints.load_causal(source(family), "cpu", "float32")
    prompts = drawn(family, 10, 384)
    ids = torch.tensor([one.context + one.question for one in prompts])
    count = len(prompts[0].answer)
    said = model.generate(  # type: ignore[operator]  # transformers' mixin
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    hits = sum(one.hit(row[ids.shape[1] :].tolist()) for one, row in zip(prompts, said, strict=True))
    assert hits / len(prompts) >= HIGH


def test_what_does_not_fit_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"0 prompts: expected at least 1"):
        drawn("qwen", 0)
    with pytest.raises(BadInput, match=r"prompts of 40 tokens: expected at least \d+ for this model"):
        drawn("qwen", 1, 40)
    short = tmp_path / "short.txt"
    short.write_text("It is a truth universally acknowledged.", "utf-8")
    with pytest.raises(BadInput, match=r"the text has \d+ tokens: expected more than \d+ for prompts of 256"):
        drawn("qwen", 1, 256, text=short)
    with pytest.raises(BadInput, match=r"missing\.txt: cannot be read"):
        drawn("qwen", 1, 256, text=tmp_path / "missing.txt")
    short.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(BadInput, match=r"short\.txt: cannot be read"):
        drawn("qwen", 1, 256, text=short)


def test_the_least_length_is_allowed() -> None:
    with pytest.raises(BadInput) as raised:
        drawn("qwen3", 1, 10)
    least = int(str(raised.value).split("at least ")[1].split()[0])
    (one,) = drawn("qwen3", 1, least)
    assert len(one.context) + len(one.question) == least > LEAST_PROSE
