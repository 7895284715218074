"""Levels by round, and what the model wrote that stays: against lists of entries kept by hand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from data import BadInput
from data.store import CHECKOUT
from eviction import Budget, BudgetExceeded, Decode, evict
from eviction.decoding.state_lines import StateLines
from eviction.listing import parts
from eviction.method import Anchors, Cells, Rows, Schedule, Score, listed, named
from eviction.schedules.constant import Constant
from eviction.schedules.steps import Steps

EMBEDDED = CHECKOUT / "data" / "models"
LAYERS, KV_HEADS = 2, 2


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=97,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=KV_HEADS,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=1,
        )
    ).eval()


def value(layer: int, head: int, position: int) -> int:
    """A score that nothing shares with any model: different in every cell, no two alike."""
    return (position * 37 + layer * 11 + head * 5) % 1009


@dataclass(frozen=True)
class Fixed(Score):
    """value() of every entry; the latest `recent` are protected."""

    name: ClassVar[str] = "fixed"
    source: ClassVar[str] = "test"
    recent: int = 0

    def rows_needed(self, budget: int) -> int:
        return 0

    def __call__(self, cells: Cells, rows: Rows) -> torch.Tensor:
        heads = torch.arange(cells.keys.shape[1])[:, None]
        scores = ((cells.positions * 37 + cells.layer * 11 + heads * 5) % 1009).float()
        return scores.masked_fill(cells.ages < self.recent, torch.inf)


# The oracle: what each cell holds, as a list


class Held:
    """One sequence's cells under a uniform budget; levels: of the rounds; anchors: positions that stay."""

    def __init__(self, prompt: int, budget: int, levels: Sequence[int], slack: int = 0, every: int = 1) -> None:
        self.budget, self.levels, self.slack, self.every = budget, levels, slack, every
        self.cells = {(i, h): list(range(prompt)) for i in range(LAYERS) for h in range(KV_HEADS)}
        self.seen, self.steps, self.rounds = prompt, 0, 0
        self.means: list[int] = []  # lengths after each round
        if prompt > budget:
            self.cut(budget, set())

    def cut(self, level: int, anchors: set[int]) -> None:
        for (layer, head), cell in self.cells.items():
            safe = sorted(set(cell) & anchors, reverse=True)[:level]
            others = sorted(set(cell) - anchors, key=lambda x: -value(layer, head, x))
            self.cells[layer, head] = sorted([*safe, *others][:level])

    def read(self, tokens: int, anchors: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        for cell in self.cells.values():
            cell.extend(range(self.seen, self.seen + tokens))
        self.seen += tokens
        self.steps += 1
        level = self.levels[min(self.rounds, len(self.levels) - 1)]
        if self.steps % self.every == 0 and len(self.cells[0, 0]) > level + self.slack:
            self.cut(level, anchors)
            self.means.append(len(self.cells[0, 0]))
            self.rounds += 1

    @property
    def lists(self) -> list[list[list[int]]]:
        return [[self.cells[i, h] for h in range(KV_HEADS)] for i in range(LAYERS)]


def held_by(run: Any, sequence: int = 0) -> list[list[list[int]]]:
    return [[head.tolist() for head in layer] for layer in run.kept_of(sequence)]


def feed(run: Any, ids: Sequence[Sequence[int]], real: torch.Tensor | None = None) -> None:
    """A pass over (B, T) tokens after those of the mask real, all of them tokens."""
    whole = torch.ones(len(ids), run.cache.get_seq_length() + len(ids[0])).long()
    if real is not None:
        whole[:, : real.shape[1]] = real
    feed_masked(run, ids, whole)


def feed_masked(run: Any, ids: Sequence[Sequence[int]], whole: torch.Tensor) -> None:
    """A pass over (B, T) tokens; whole (B, all that was fed): which are tokens."""
    positions = (whole.cumsum(-1) - 1).clamp(min=0)[:, -len(ids[0]) :]
    with torch.no_grad():
        run.model(torch.tensor(ids), attention_mask=whole, position_ids=positions, cache=run.cache)


# Schedules


@pytest.mark.parametrize(
    ("budget", "options", "levels"),
    [
        (10, {"rounds": 4}, [15, 15, 5, 5, 10, 10]),
        (10, {"rounds": 4, "direction": "up"}, [5, 5, 15, 15, 10, 10]),
        (10, {"rounds": 6, "stages": 3, "after": "last"}, [15, 15, 10, 10, 5, 5, 5, 5]),
        (7, {"rounds": 4, "stages": 4, "size": "1/3"}, [9, 7, 7, 5, 7]),
        (1, {"rounds": 2, "size": 0.99}, [1, 1, 1]),
        (100, {"rounds": 2, "size": 0.29}, [129, 71, 100]),  # 0.29 x 100 is 28.999... in floating point
    ],
)
def test_levels_of_steps(budget: int, options: dict[str, Any], levels: list[int]) -> None:
    steps = Steps(**options)
    assert [steps.level(budget, number) for number in range(len(levels))] == levels
    assert steps.lowest(budget) == min(levels)


@given(
    st.integers(1, 5000),
    st.fractions(0, Fraction(999, 1000), max_denominator=1000),
    st.integers(2, 6),
    st.integers(1, 5),
    st.sampled_from(["down", "up"]),
    st.sampled_from(["nominal", "last"]),
)
def test_steps_are_nominal_on_average(
    budget: int, size: Fraction, stages: int, each: int, direction: str, after: str
) -> None:
    steps = Steps(direction, size, stages, stages * each, after)
    levels = [steps.level(budget, number) for number in range(stages * each)]
    assert sum(levels) == budget * len(levels)
    assert levels == sorted(levels, reverse=direction == "down")
    assert min(levels) >= 1 and steps.lowest(budget) == min(levels)
    assert all(len(set(levels[i : i + each])) == 1 for i in range(0, len(levels), each))
    assert max(levels) - budget == (budget * size.numerator) // size.denominator
    for stage in range(stages):  # as near to a straight line as whole entries allow
        line = budget * (1 + size * Fraction(stages - 1 - 2 * stage, stages - 1) * (1 if direction == "down" else -1))
        assert abs(levels[stage * each] - line) < 1
    later = steps.level(budget, stages * each + 3)
    assert later == (budget if after == "nominal" else levels[-1])
    assert Constant().level(budget, 3) == Constant().lowest(budget) == budget


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("steps:direction=left", "direction=left: expected down or up"),
        ("steps:size=1", "expected 0 <= size < 1"),
        ("steps:size=-0.1", "expected 0 <= size < 1"),
        ("steps:size=half", "expected a number"),
        ("steps:size=true", "expected a number"),
        ("steps:size=1/0", "expected a number"),
        ("steps:size=nan", "expected a number"),
        ("steps:rounds=5", "rounds=5: expected a multiple of stages=2"),
        ("steps:rounds=0", "at least 1"),
        ("steps:stages=1", "at least 2"),
        ("steps:after=never", "expected nominal or last"),
        ("steps:up", "option 'up'"),
        ("rising", "unknown schedule 'rising': expected one of constant, steps"),
    ],
)
def test_schedules_that_mean_nothing_are_refused(options: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Decode(schedule=options)


SCHEDULES = {
    "constant": [10],
    "steps:direction=down,size=0.4,rounds=4": [14, 14, 6, 6, 10],
    "steps:direction=up,size=0.4,rounds=4": [6, 6, 14, 14, 10],
    "steps:direction=up,size=4/5,stages=3,rounds=3,after=last": [2, 10, 18],
}


@pytest.mark.parametrize(("slack", "every"), [(0, 1), (3, 1), (0, 4), (2, 3)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rounds_cut_to_their_levels(model: PreTrainedModel, schedule: str, slack: int, every: int) -> None:
    decode = Decode(slack, every, schedule=schedule)
    held = Held(30, 10, SCHEDULES[schedule], slack, every)
    used = []
    with evict(model, Fixed(), budget=10, decode=decode) as run:
        run.prefill(torch.arange(2, 32))
        assert held_by(run) == held.lists and len(held.cells[0, 0]) == 10  # the prompt's own eviction is nominal
        for step in range(45):
            tokens = 3 if step == 5 else 1
            used.append(len(held.cells[0, 0]) + tokens)
            feed(run, [[5] * tokens])
            held.read(tokens)
            assert held_by(run) == held.lists
        after_question = [step for step in run.ledger.steps[1:] if step.tokens == 1]
        assert [step.used[0][0] for step in run.ledger.steps[1:]] == used
        assert run.ledger.mean_length("decode") == sum(step.used[0][0] for step in after_question) / 44
    planned = len(SCHEDULES[schedule]) - ("rounds=4" in schedule)
    assert held.rounds > planned and sum(held.means[:planned]) == 10 * planned  # the mean cache is matched


def test_each_sequence_counts_its_own_rounds_and_takes_them_along(model: PreTrainedModel) -> None:
    levels = SCHEDULES["steps:direction=down,size=0.4,rounds=4"]
    ids = torch.full((2, 30), 7)
    real = torch.ones_like(ids)
    real[1, :26] = 0
    held = [Held(30, 10, levels, slack=2), Held(4, 10, levels, slack=2)]
    with evict(model, Fixed(), budget=10, decode=Decode(2, schedule="steps:size=0.4,rounds=4")) as run:
        run.prefill(ids, real)
        for step in range(34):
            feed(run, [[5], [6]], real)
            for sequence in held:
                sequence.read(1)
            assert [held_by(run, b) for b in range(2)] == [sequence.lists for sequence in held]
            if step in (11, 17):
                assert held[0].rounds != held[1].rounds
                order = [1, 0] if step == 11 else [1, 1]
                run.cache.reorder_cache(torch.tensor(order))
                real = real[order]
                held = [held[1], held[0]] if step == 11 else [held[1], copied(held[1])]
        assert held[0].rounds > 4


def copied(held: Held) -> Held:
    twin = Held(0, held.budget, held.levels, held.slack, held.every)
    twin.cells = {cell: list(entries) for cell, entries in held.cells.items()}
    twin.seen, twin.steps, twin.rounds = held.seen, held.steps, held.rounds
    return twin


def test_a_question_leaves_no_rounds_behind(model: PreTrainedModel) -> None:
    decode = Decode(1, schedule="steps:size=0.4,rounds=4")
    with evict(model, Fixed(), budget=10, decode=decode) as run:
        run.prefill(torch.arange(2, 32))
        lengths = []
        for _ in range(2):
            with run.question():
                feed(run, [[4, 5, 6]])
                run.generate(torch.tensor([5, 6]), max_new_tokens=9)
                lengths.append([step.kept[0][0] for step in run.ledger.steps[-10:]])
        assert lengths[0] == lengths[1] and {14, 6} <= set(lengths[0])


def test_rounds_of_several_answers(model: PreTrainedModel) -> None:
    decode = Decode(schedule="steps:size=0.4,rounds=4")
    with evict(model, Fixed(), budget=Budget(entries=10, spare=5), decode=decode) as run:
        run.prefill(torch.arange(2, 32))
        with run.question():
            run.generate(torch.tensor([5, 6]), max_new_tokens=7)
            alone = [step.kept[0][0] for step in run.ledger.steps[-7:]]
        with run.question():
            run.generate(torch.tensor([5, 6]), max_new_tokens=7, num_beams=3)
            for number, step in enumerate(run.ledger.steps[-7:]):
                assert set(step.kept[1]) == {alone[number]} and len(step.kept[1]) == 3 * KV_HEADS


def test_never_more_than_the_level_and_what_may_be_spared(model: PreTrainedModel) -> None:
    up, down = "steps:direction=up,size=0.5,rounds=2", "steps:size=0.5,rounds=2"
    for schedule in (up, down):
        with evict(model, Fixed(), budget=Budget(entries=8, spare=0), decode=Decode(schedule=schedule)) as run:
            run.prefill(torch.arange(2, 32))
            run.generate(torch.tensor([5]), max_new_tokens=30)
            lengths = [step.kept[0][0] for step in run.ledger.steps]
            assert max(lengths) == 12 and min(lengths) == 4 and lengths[-1] == 8
    # between two rounds of one level there is nothing to grow to
    options = {"budget": Budget(entries=8, spare=1), "decode": Decode(every=4, schedule=down)}
    with evict(model, Fixed(), **options) as run:
        run.prefill(torch.arange(2, 32))
        with pytest.raises(BudgetExceeded, match="held on average, the budget allows"):
            run.generate(torch.tensor([5]), max_new_tokens=60)


def test_what_a_question_raised_is_lowered_again(model: PreTrainedModel) -> None:
    budget = Budget(compression_ratio=0.5, spare=4)  # its limit grows with what is read
    with evict(model, Fixed(), budget=budget, decode=Decode(every=2)) as run:
        run.prefill(torch.arange(2, 22))
        with run.question():
            for _ in range(20):
                feed(run, [[5]])
            assert len(run.kept[0][0]) == 20
            feed(run, [[5] * 4])
        with run.question():
            feed(run, [[5] * 4])
        with pytest.raises(
            BudgetExceeded, match="15 entries a KV head held on average, the budget allows 10 and 4 to spare"
        ):
            feed(run, [[5] * 5])


def test_schedules_do_not_go_with_bytes_nor_below_a_pinned_prompt(model: PreTrainedModel) -> None:
    decode = Decode(schedule="steps:size=0.5,rounds=2")
    with (
        pytest.raises(BadInput, match="bytes with schedule steps"),
        evict(model, Fixed(), budget=Budget(nbytes=8192), decode=decode),
    ):
        pass
    with evict(model, Fixed(), budget=Budget(nbytes=8192), decode=Decode(schedule="constant")):
        pass
    pinned = Decode(prompt="pinned", schedule="steps:size=0.5,rounds=2")
    with evict(model, Fixed(), budget=20, decode=pinned) as run:
        with pytest.raises(BadInput, match="prompt of 10 tokens in a budget of 10"):
            run.prefill(torch.arange(2, 12))
        run.prefill(torch.arange(2, 11))
        run.generate(torch.tensor([5]), max_new_tokens=40)
        assert all(set(range(9)) <= set(head) for layer in held_by(run) for head in layer)
        assert {30, 10} <= {step.kept[0][0] for step in run.ledger.steps}
    on_top = Decode(prompt="on_top", schedule="steps:size=0.5,rounds=2")
    with evict(model, Fixed(), budget=8, decode=on_top) as run:
        run.prefill(torch.arange(2, 12))
        run.generate(torch.tensor([5]), max_new_tokens=30)
        lengths = [step.kept[0][0] for step in run.ledger.steps]
        assert max(lengths) == 10 + 12 and lengths[-1] == 10 + 8


@dataclass(frozen=True)
class Zigzag(Schedule):
    name: ClassVar[str] = "zigzag"
    source: ClassVar[str] = "test"

    def level(self, budget: int, number: int) -> int:
        return budget + (2 if number % 2 else -2) if budget > 2 else 0

    def lowest(self, budget: int) -> int:
        return budget - 2


def test_a_schedule_of_ones_own(model: PreTrainedModel) -> None:
    levels = [6, 10] * 20
    held = Held(30, 8, levels)
    with evict(model, Fixed(), budget=8, decode=Decode(schedule=Zigzag())) as run:
        run.prefill(torch.arange(2, 32))
        for _ in range(20):
            feed(run, [[5]])
            held.read(1)
            assert held_by(run) == held.lists
    with (
        evict(model, Fixed(), budget=2, decode=Decode(schedule=Zigzag())) as run,
        pytest.raises(BadInput, match="schedule zigzag: round 0 at 0: expected a whole number of at least 1"),
    ):
        run.prefill(torch.arange(2, 32))


def test_both_kinds_are_listed_by_name() -> None:
    assert list(listed(Schedule)) == ["constant", "steps"]
    assert list(listed(Anchors)) == ["state_lines"]
    assert named(Schedule, "steps:direction=up,size=1/4") == Steps("up", "1/4")
    there = {(kind, name): options for kind, name, options, _ in parts()}
    assert there["schedule", "steps"] == "direction=down, size=0.5, stages=2, rounds=16, after=nominal"
    assert there["anchors", "state_lines"] == "marker=State:, lines=None, tokens=None, texts=()"
    with pytest.raises(BadInput, match=r"StateLines.asking\(tokenizer\)"):
        Decode(anchors="state_lines")


# Anchors

PIECES = (
    "State",
    ":",
    "\n",
    " ",
    "St",
    "ate:",
    "x",
    "S",
    "State:",
    ".\n",
    "\n\n",
    "\nState",
    " State: y",
    "o\n St",
    "",
    "\t",
)
WORDS = tuple(PIECES[i] if i < len(PIECES) else f"w{i} " for i in range(97))


def pinned_by_hand(
    ids: Sequence[int], texts: Sequence[str], marker: str, lines: int | None, tokens: int | None
) -> list[int]:
    """Which tokens are pinned: characters of lines, each with the token that it is in."""
    found: list[tuple[str, list[int]]] = [("", [])]
    for token, i in enumerate(ids):
        for character in texts[i] if 0 <= i < len(texts) else "\n":
            if character == "\n":
                found.append(("", []))
            else:
                found[-1] = (found[-1][0] + character, [*found[-1][1], token])
    state = [owners for text, owners in found if text.lstrip(" \t").startswith(marker)]
    if lines is not None:
        state = state[len(state) - lines :] if lines < len(state) else state
    text, owners = found[-1]
    begun = text.lstrip(" \t")
    if begun and begun != marker and marker.startswith(begun):
        state.append(owners)
    pinned = sorted({token for owners in state for token in owners})
    return pinned if tokens is None else pinned[max(0, len(pinned) - tokens) :]


@given(
    st.lists(st.lists(st.integers(-1, len(PIECES) + 1), min_size=0, max_size=14), min_size=1, max_size=3),
    st.sampled_from(["State:", "x", "S", "oS x"]),
    st.sampled_from([None, 0, 1, 2]),
    st.sampled_from([None, 0, 1, 3]),
)
def test_lines_that_begin_with_the_marker_are_pinned(
    sequences: list[list[int]], marker: str, lines: int | None, tokens: int | None
) -> None:
    part = StateLines(marker, lines, tokens, PIECES)
    n = max(map(len, sequences))
    ids = torch.full((len(sequences), n), -1)
    for line, sequence in zip(ids, sequences, strict=True):
        line[: len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
    pinned = part(ids)
    assert pinned.shape == ids.shape and pinned.dtype == torch.bool
    for line, found in zip(ids.tolist(), pinned, strict=True):
        assert torch.nonzero(found).flatten().tolist() == pinned_by_hand(line, PIECES, marker, lines, tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"marker": ""}, "marker=''"),
        ({"marker": "State:\n"}, "in one line"),
        ({"marker": "a\nb"}, "in one line"),
        ({"marker": 3}, "marker=3"),
        ({"lines": -1}, "lines=-1"),
        ({"tokens": 1.5}, "tokens=1.5"),
        ({"texts": ()}, "asking"),
    ],
)
def test_anchors_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        StateLines(**{"texts": PIECES, **options})


def byte_level() -> PreTrainedTokenizerBase:
    """Byte by byte, with merges over line breaks and blanks, as GPT-2's tokenizer spells them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("S", "t"), ("a", "t"), ("St", "at"), ("Ġ", "Stat"), ("Ċ", "Stat"), (".", "Ċ"), ("e", ":"), ("Ċ", "Ċ")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges), "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentence_pieces() -> PreTrainedTokenizerBase:
    """Words that begin with a blank, bytes where there are none, as Llama's tokenizer spells them."""
    words = ["<end>", "▁", "▁State", "State", ":", "▁x", "x", "y", "a", "▁a", "S", "t", "e", "b", "."]
    vocabulary = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges = [("S", "t"), ("St", "a")]
    vocabulary |= {"St": len(vocabulary), "Sta": len(vocabulary) + 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    "tokenizer_of", [byte_level, sentence_pieces, lambda: AutoTokenizer.from_pretrained(EMBEDDED / "qwen")]
)
def test_the_marker_is_found_however_it_is_tokenized(tokenizer_of: Any) -> None:
    tokenizer = tokenizer_of()
    part = StateLines.asking(tokenizer)
    text = "State: x\nb State: x.\n\n  State: xé\nState x\nState:\n.State: y\nState: bab<end>x<end>State: y\nStat"
    text = text if "<end>" in tokenizer.get_vocab() else text.replace("<end>", "\n")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    end = tokenizer.get_vocab().get("<end>", -1)
    spelled = "".join("\n" if i == end else part.texts[i] for i in ids)
    if "é" in spelled or tokenizer_of is not sentence_pieces:  # one byte of a letter alone is no letter
        assert spelled.replace("�", "").replace("é", "").strip() == text.replace("<end>", "\n").replace("é", "")
    pinned = part(torch.tensor([ids]))[0].tolist()
    expected = pinned_by_hand(ids, part.texts, "State:", None, None)
    assert [token for token, stays in enumerate(pinned) if stays] == expected
    held = "".join(part.texts[i].strip("\n") for i, stays in zip(ids, pinned, strict=True) if stays)
    said = held.replace("�", "").replace("é", "").replace(" ", "")
    assert said in ("State:xState:xState:State:babState:yStat", "State:x.State:xState:State:babState:yStat")
    assert '"State:"' in part.instruction and '"Plan:"' in StateLines.asking(tokenizer, "Plan:").instruction


def test_a_token_keeps_the_blank_at_its_start() -> None:
    tokenizer = sentence_pieces()
    part, ids = StateLines.asking(tokenizer, "Sta:"), tokenizer.get_vocab()
    assert part.texts[ids["▁State"]] == " State" and part.texts[ids["<0x0A>"]] == part.texts[ids["<end>"]] == "\n"
    for second, pinned in (("a", True), ("▁a", False)):  # "Sta:" and "St a:"
        written = torch.tensor([[ids["St"], ids[second], ids[":"]]])
        assert part(written).tolist() == [[pinned] * 3]


class Dictated(LogitsProcessor):
    """Has the model write these tokens, of each sequence, whatever it would have written."""

    def __init__(self, lines: Sequence[Sequence[int]]) -> None:
        self.lines: list[Iterator[int]] = [iter(line) for line in lines]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = torch.tensor([[next(line)] for line in self.lines])
        return torch.full_like(scores, -torch.inf).scatter_(1, said, 0.0)


def state(*values: int) -> list[int]:
    """Tokens of a line."""
    return [0, 1, *values, 2]


TALK = [40, 41, 2, *state(50, 51), 42, 43, 44, 2, 3, 8, 52, 9, 45, 2, 4, 5, 53, 54, 2, 7, 6, 6, 2, *range(60, 80)]


def anchored(written: Sequence[int], start: int, **options: Any) -> set[int]:
    return {start + i for i in pinned_by_hand(written, WORDS, "State:", options.get("lines"), options.get("tokens"))}


@pytest.mark.parametrize("options", [{}, {"lines": 1}, {"tokens": 3}, {"lines": 0}])
@pytest.mark.parametrize(("slack", "schedule"), [(0, "constant"), (2, "constant"), (1, "steps:size=0.5,rounds=6")])
def test_state_lines_stay_in_the_cache(
    model: PreTrainedModel, options: dict[str, Any], slack: int, schedule: str
) -> None:
    talk = TALK
    levels = [24] if schedule == "constant" else [36] * 3 + [12] * 3 + [24]
    decode = Decode(slack, schedule=schedule, anchors=StateLines(texts=WORDS, **options))
    held = Held(30, 24, levels, slack)
    with evict(model, Fixed(), budget=24, decode=decode) as run:
        run.prefill(torch.arange(2, 32))
        run.generate(torch.tensor([0, 1, 5]), max_new_tokens=len(talk) + 1, logits_processor=[Dictated([[*talk, 7]])])
        # the question says "State:", too, and is not pinned
        held.read(3)
        safe: set[int] = set()
        for end, step in enumerate(run.ledger.steps[2:], start=1):
            now = anchored(talk[:end], 33, **options)
            held.read(1, now)
            assert [list(cells) for cells in step.kept] == [[len(x) for x in layer] for layer in held.lists]
            if not options and 12 not in levels:  # what is held once and pinned from then on
                safe = {x for x in now if all(x in cell for cell in held.cells.values())} | safe
                assert all(safe & now <= set(cell) for cell in held.cells.values())
        assert held_by(run) == held.lists
        if not options and 12 not in levels:
            # of the three lines; the blank before the second says nothing of what will follow
            assert len(now) == 12 and now - {33 + talk.index(3)} <= safe
            assert all(safe & now <= set(cell) for layer in held_by(run) for cell in layer)


def test_nothing_is_pinned_without_the_marker(model: PreTrainedModel) -> None:
    talk = [x for x in TALK if x > 12] * 2
    kept = []
    for anchors in (None, StateLines(texts=WORDS)):
        with evict(model, Fixed(), budget=8, decode=Decode(anchors=anchors)) as run:
            run.generate(torch.arange(2, 32), max_new_tokens=len(talk), logits_processor=[Dictated([talk])])
            kept.append(held_by(run))
    assert kept[0] == kept[1]


def test_anchors_crowd_out_all_else_unless_they_are_capped(model: PreTrainedModel) -> None:
    talk = [*state(*range(50, 70)), 30, 31, 32, 33]
    for tokens in (None, 5):
        with evict(model, Fixed(), budget=8, decode=Decode(anchors=StateLines(tokens=tokens, texts=WORDS))) as run:
            run.prefill(torch.arange(2, 32))
            run.generate(torch.tensor([30]), max_new_tokens=len(talk) + 1, logits_processor=[Dictated([[*talk, 30]])])
            last = 31 + 22  # the line's tokens are at 31 .. 52
            for layer in held_by(run):
                for cell in layer:
                    if tokens is None:
                        assert cell == list(range(last - 8, last))
                    else:
                        assert set(range(last - 5, last)) <= set(cell) and len(cell) == 8
                        assert not set(range(31, last - 8)) >= set(cell) - set(range(last - 5, last))


def test_a_pinned_prompt_is_not_crowded_out(model: PreTrainedModel) -> None:
    talk = [*state(*range(50, 70)), 30, 31, 32, 33]
    for score, prompt, budget in ((Fixed(), "pinned", 8), (Fixed(), "on_top", 3), (Fixed(recent=6), "pinned", 8)):
        anchors = None if score.recent else StateLines(texts=WORDS)
        with evict(model, score, budget=budget, decode=Decode(prompt=prompt, anchors=anchors)) as run:  # type: ignore[arg-type]
            run.prefill(torch.arange(2, 7))
            run.generate(torch.tensor([30]), max_new_tokens=len(talk) + 1, logits_processor=[Dictated([[*talk, 30]])])
            rest = [25, 26, 27] if anchors else [30, 31, 32]
            assert held_by(run) == [[[0, 1, 2, 3, 4, *rest]] * KV_HEADS] * LAYERS


def test_anchors_of_a_padded_batch_follow_their_sequences(model: PreTrainedModel) -> None:
    ids = torch.full((2, 30), 7)
    real = torch.ones_like(ids)
    real[1, :26] = 0
    lines, starts = [[*state(50, 51), 30, 31, 32], [33, 2, *state(52), 34, 35]], [30, 4]
    said: list[list[int]] = [[], []]
    held = [Held(30, 6, [6]), Held(4, 6, [6])]
    with evict(model, Fixed(), budget=6, decode=Decode(anchors=StateLines(texts=WORDS))) as run:
        run.prefill(ids, real)
        for step in range(24):
            if step == 9:
                run.cache.reorder_cache(torch.tensor([1, 0]))
                real, held, said, starts = real[[1, 0]], held[::-1], said[::-1], starts[::-1]
            new = [line[step % 7] for line in lines]
            feed(run, [[token] for token in new], real)
            for b in range(2):
                said[b].append(new[b])
                held[b].read(1, anchored(said[b], starts[b]))
            assert [held_by(run, b) for b in range(2)] == [sequence.lists for sequence in held]


def test_what_was_written_is_forgotten_with_the_question(model: PreTrainedModel) -> None:
    decode = Decode(slack=2, anchors=StateLines(texts=WORDS))
    talk = [*state(50), *range(30, 40)]
    with evict(model, Fixed(), budget=6, decode=decode) as run:
        run.prefill(torch.arange(2, 32))
        before, kept = run.side_bytes, []
        for _ in range(2):
            with run.question():
                run.generate(torch.tensor([30]), max_new_tokens=15, logits_processor=[Dictated([[*talk, 30]])])
                kept.append(held_by(run))
            assert run.side_bytes == before
        assert kept[0] == kept[1]
        assert all({31, 32, 33} <= set(cell) for layer in kept[0] for cell in layer)
        with run.question():  # the line that was written outside goes on to be what it is inside
            feed(run, [[0]])
            feed(run, [[1]])
            with run.question():
                feed(run, [[60]])
                assert run._passes._written is not None and run._passes._written.tolist() == [[0, 1, 60]]
            assert run._passes._written.tolist() == [[0, 1]]
        run.prefill(torch.arange(2, 32))
        assert run.side_bytes == before


def test_what_was_asked_is_not_pinned(model: PreTrainedModel) -> None:
    decode, rest = Decode(anchors=StateLines(texts=WORDS)), [30, *range(31, 50)]
    # a question of one token, and a prompt of which generate() feeds the last token alone
    with evict(model, Fixed(), budget=6, decode=decode) as run:
        for chunk in (None, 7):
            if chunk is None:
                run.prefill(torch.arange(2, 32))
                run.generate(torch.tensor([8]), max_new_tokens=21, logits_processor=[Dictated([[*rest, 5]])])
            else:
                run.reset()
                prompt = torch.tensor([*range(2, 32), 8])
                run.generate(prompt, chunk=chunk, max_new_tokens=21, logits_processor=[Dictated([[*rest, 5]])])
            held = Held(30, 6, [6])
            if chunk is not None:  # the prompt was cut after every chunk
                held.cells = {cell: list(range(31)) for cell in held.cells}
                held.cells = chunked(held, chunk)
            for _ in range(21):
                held.read(1)
            assert held_by(run) == held.lists
    # asked again: what is written then begins a line
    with evict(model, Fixed(), budget=6, decode=decode) as run:
        run.prefill(torch.arange(2, 32))
        run.generate(torch.tensor([30, 31]), max_new_tokens=3, logits_processor=[Dictated([[33, 34, 35]])])
        run.generate(torch.tensor([40]), max_new_tokens=12, logits_processor=[Dictated([[8, 60, 2, *rest]])])
        # the last token of the first answer was never fed, nor the last of the second
        assert run._passes._written is not None
        assert run._passes._written.tolist() == [[-1, -1, 33, 34, -1, 8, 60, 2, *rest[:8]]]
        assert all({35, 36} <= set(cell) and not {32, 33} & set(cell) for layer in held_by(run) for cell in layer)


def chunked(held: Held, chunk: int) -> dict[tuple[int, int], list[int]]:
    cells = {cell: list[int]() for cell in held.cells}
    for begin in range(0, 30, chunk):
        for (layer, head), cell in cells.items():
            now = [*cell, *range(begin, min(begin + chunk, 30))]
            cells[layer, head] = sorted(sorted(now, key=lambda x: -value(layer, head, x))[:6])
    return cells


def test_embeddings_are_not_taken_for_what_was_written(model: PreTrainedModel) -> None:
    decode = Decode(anchors=StateLines(texts=WORDS))
    with evict(model, Fixed(), budget=6, decode=decode) as run, torch.no_grad():
        embedded = model.get_input_embeddings()(torch.arange(2, 32)[None])
        model(inputs_embeds=embedded)
        model(inputs_embeds=embedded[:, :3], cache=run.cache)  # as much as was asked
        with pytest.raises(BadInput, match="expected token ids, not inputs_embeds"):
            model(inputs_embeds=embedded[:, :1], cache=run.cache)
        run.prefill(torch.arange(2, 32))


class Comparing(LogitsProcessor):
    """Notes whether what the run remembers is what the beams say, step by step."""

    def __init__(self, run: Any) -> None:
        self.run, self.seen = run, list[bool]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = input_ids.int().clone()
        said[:, :2] = -1  # what was asked
        self.seen.append(torch.equal(self.run._passes._written, said))
        self.orders = len({tuple(line) for line in said.tolist()})
        return scores


def test_beams_take_along_what_they_wrote(model: PreTrainedModel) -> None:
    with evict(model, Fixed(), budget=8, decode=Decode(anchors=StateLines(texts=WORDS))) as run:
        run.prefill(torch.arange(2, 32))
        with run.question():
            compared = Comparing(run)
            run.generate(torch.tensor([30, 31]), max_new_tokens=12, num_beams=4, logits_processor=[compared])
            assert compared.seen == [True] * 12 and compared.orders == 4


@dataclass(frozen=True)
class Odd(Anchors):
    name: ClassVar[str] = "odd"
    source: ClassVar[str] = "test"
    wrong: bool = False

    def __call__(self, written: torch.Tensor) -> torch.Tensor:
        return written if self.wrong else torch.ones_like(written, dtype=torch.bool)


def test_anchors_of_ones_own(model: PreTrainedModel) -> None:
    with evict(model, Fixed(), budget=6, decode=Decode(anchors=Odd())) as run:  # all that is written, and not the rest
        held = Held(30, 6, [6])
        run.prefill(torch.arange(2, 32))
        run.generate(torch.tensor([30, 31]), max_new_tokens=5)
        feed(run, [[5, 6]])
        for tokens, anchors in ((2, 32), (1, 33), (1, 34), (1, 35), (1, 36), (2, 36)):
            held.read(tokens, set(range(32, anchors)))
        assert held_by(run) == held.lists
        with pytest.raises(ValueError):  # before anything is fed: what is fed then is written, not asked
            run.generate(torch.tensor([30]), max_new_tokens=-3)
        feed(run, [[5]])
        held.read(1, {*range(32, 36), 38})
        assert held_by(run) == held.lists


def test_anchors_with_a_score_that_reads_every_pass(model: PreTrainedModel) -> None:
    talk = [*state(50, 51), *range(60, 75)]
    with evict(model, "h2o", budget=10, decode=Decode(slack=3, anchors=StateLines(texts=WORDS))) as run:
        run.prefill(torch.arange(2, 32))
        run.generate(torch.tensor([30]), max_new_tokens=len(talk) + 1, logits_processor=[Dictated([[*talk, 30]])])
        assert all({31, 32, 33, 34} <= set(cell) for layer in held_by(run) for cell in layer)


def test_padding_is_not_written(model: PreTrainedModel) -> None:
    real = torch.ones(2, 31, dtype=torch.int64)
    real[1, 30] = 0
    with evict(model, Fixed(), budget=6, decode=Decode(anchors=StateLines(texts=WORDS))) as run:
        run.prefill(torch.full((2, 30), 7))
        feed_masked(run, [[8], [8]], real)
        assert run._passes._written is not None and run._passes._written.tolist() == [[8], [-1]]


def test_what_is_remembered_is_counted(model: PreTrainedModel) -> None:
    sizes = []
    for anchors in (None, StateLines(texts=WORDS)):
        with evict(model, Fixed(), budget=6, decode=Decode(anchors=anchors)) as run:
            run.prefill(torch.arange(2, 32))
            run.generate(torch.tensor([30, 31]), max_new_tokens=9, logits_processor=[Dictated([range(60, 69)])])
            with run.question():
                feed(run, [[70]])
                sizes.append(run.side_bytes)
    assert sizes[1] - sizes[0] == 4 * (10 + 11)  # what the question falls back to, and what is written in it

    with (
        evict(model, Fixed(), budget=6, decode=Decode(anchors=Odd(wrong=True))) as run,
        pytest.raises(BadInput, match=r"anchors odd: expected a bool tensor \(1, 1\)"),
    ):
        run.prefill(torch.arange(2, 32))
        feed(run, [[5]])


@pytest.mark.parametrize("storage", ["padded", "masked"])
def test_anchors_stay_in_every_storage(model: PreTrainedModel, storage: Any) -> None:
    kept = []
    for where in ("ragged", storage):
        decode = Decode(1, schedule="steps:size=0.5,rounds=4", anchors=StateLines(texts=WORDS))
        with evict(model, Fixed(), "adakv", budget=8, storage=where, decode=decode) as run:
            run.prefill(torch.arange(2, 32))
            run.generate(torch.tensor([30]), max_new_tokens=len(TALK), logits_processor=[Dictated([TALK])])
            kept.append(held_by(run))
    assert kept[0] == kept[1]


def test_anchors_are_held_exactly_beside_pooled_slots(model: PreTrainedModel) -> None:
    talk = [*state(50, 51, 52, 53), *range(60, 75)]
    with evict(
        model, Fixed(), budget=8, state="span_mean:slots=4", decode=Decode(anchors=StateLines(texts=WORDS))
    ) as run:
        run.prefill(torch.arange(2, 32))
        run.generate(torch.tensor([30]), max_new_tokens=len(talk) + 1, logits_processor=[Dictated([[*talk, 30]])])
        for layer in run.cache.layers:
            held = [dict[int, int]() for _ in range(KV_HEADS)]
            for page in layer.pages:
                cells = zip(page.slots.split(page.lengths), page.masses.split(page.lengths), strict=True)
                for cell, (slots, masses) in zip(held, cells, strict=True):
                    cell.update(zip(slots.tolist(), masses.tolist(), strict=True))
            for cell in held:
                assert [cell.get(position) for position in range(31, 37)] == [1] * 6
                assert len(cell) == 8 and max(cell.values()) > 1


def test_a_model_that_was_trained_keeps_its_state_lines() -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED / "qwen").eval()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "qwen")
    text = "So it goes.\nState: the key is 7\nAnd so on, as long as it lasts, without a word of it."
    talk = tokenizer(text, add_special_tokens=False).input_ids
    prompt = tokenizer("It was a dark and stormy night; the rain fell in torrents. " * 4, return_tensors="pt").input_ids
    anchors = StateLines.asking(tokenizer)
    start = prompt.shape[1]
    expected = {start + i for i in pinned_by_hand(talk, anchors.texts, "State:", None, None)}
    held = {}
    for name, part in (("with", anchors), ("without", None)):
        with evict(model, "tova", budget=24, decode=Decode(anchors=part)) as run:
            run.generate(prompt, max_new_tokens=len(talk) + 1, logits_processor=[Dictated([[*talk, 5]])])
            held[name] = [set(head.tolist()) for layer in run.kept for head in layer]
    assert all(len(cell) == 24 for cells in held.values() for cell in cells)
    assert all(expected <= cell for cell in held["with"])
    assert not all(expected <= cell for cell in held["without"])
