"""Needle prompts: a fact planted in public-domain prose, and the question that asks for it.

The form is that of RULER's single needle (arXiv 2404.06654): a sentence that gives a noun a magic number, hidden in
prose, and asked for at the end. Departures, all ours: the prose is a stretch of public-domain fiction, not essays; the
number has four figures, as the embedded checkpoints were trained to read (RULER: seven); the needle's depths are spread
evenly over the prompts instead of drawn; the answer is graded by its exact tokens, not by a substring of the text.
Models with a chat template are asked in it, with RULER's beginning of the answer; all others in the short form that the
embedded checkpoints know.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from capture.training.tasks import INTRO, TRAINED_KEYS, nouns
from data import BadInput

FIGURES = 4  # of a planted number
LEAST_PROSE = 32  # tokens of prose below which there is nothing to hide a fact in
TRIES = 200  # stretches of prose tried for one whose cuts leave the tokens as they are
_SHUFFLED_BY = 7  # seed by which training parts the nouns: what follows its share was never trained on
_WORD_STARTS = ("Ġ", "▁", "Ċ")  # how tokenizers mark a token that begins with white space
_FACT = "\nThe special magic number for {key} is: {number}."
_ASKED = "\nWhat is the special magic number for {key}? It is:"
_ASKED_IN_CHAT = "\nWhat is the special magic number for {key} mentioned in the provided text?"
_ANSWER_BEGINS = "The special magic number for {key} mentioned in the provided text is:"
_HERE = "THE TEXT STANDS HERE"  # where a chat template is cut in two


@dataclass(frozen=True)
class Needle:
    """A prompt: ids of its context (the fact somewhere in it), of the question, and of the answer that is right.

    context + question are the tokens of the whole text: cutting it before the question changes none. The question ends
    where the figures begin: where a tokenizer writes the space before them as a token of its own, that is the
    question's last, so that the last row of the prompt is the one that must find the number. depth: share of the prose
    that stands before the fact.
    """

    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]
    key: str
    depth: float

    def hit(self, generated: Sequence[int]) -> bool:
        """Whether the first tokens generated are exactly the answer's."""
        return tuple(generated[: len(self.answer)]) == self.answer


def needles(
    tokenizer: PreTrainedTokenizerBase, begin: Sequence[int], text: Path, count: int, length: int, seed: int = 0
) -> list[Needle]:
    """count prompts, each of exactly length tokens (context and question), of one model; the same for the same seed.

    begin: ids that open every document of the model (capture.documents.begin_ids). Needle i stands at depth
    (i + 1/2) / count. All contexts have one length and all questions another, as the keys are nouns of one number of
    tokens, that of most of them: a fifth of the nouns that no embedded checkpoint was trained on. Raises BadInput if
    length is too short for the sentences, the text too short for length, or the tokenizer such that no stretch of the
    text can be cut without changing its tokens.
    """
    if count < 1:
        raise BadInput(f"{count} prompts: expected at least 1")
    form = _Form(tokenizer, begin)
    keys = _keys_of_one_width(tokenizer)
    try:
        prose = form.encode(text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{text}: cannot be read as UTF-8 text ({error})") from error
    return [
        form.needle(random.Random(f"needle {seed} {i}"), keys, prose, (i + 0.5) / count, length) for i in range(count)
    ]


def held_out_nouns() -> list[str]:
    """Nouns that the embedded checkpoints were never trained on, in the order in which training parted them off."""
    words = nouns()
    random.Random(_SHUFFLED_BY).shuffle(words)
    return words[int(TRAINED_KEYS * len(words)) :]


def _keys_of_one_width(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The held-out nouns that are as many tokens long as most of them (the fewer, if two widths are as common)."""
    widths = {word: len(tokenizer(f" {word}", add_special_tokens=False).input_ids) for word in held_out_nouns()}
    common = Counter(widths.values())
    width = min(common, key=lambda one: (-common[one], one))
    return [word for word in widths if widths[word] == width]


class _Form:
    """How one model is asked: what stands before the prose, in it, and after it, as token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, begin: Sequence[int]) -> None:
        self.tokenizer, self.begin = tokenizer, list(begin)
        if tokenizer.chat_template:
            message = [{"role": "user", "content": _HERE}]
            whole = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
            before, _, after = whole.partition(_HERE)
            self.before, self.asked = before + INTRO, _ASKED_IN_CHAT + after + _ANSWER_BEGINS
        else:
            self.before, self.asked = INTRO, _ASKED
        marks = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.starts_word = [str(mark).startswith(_WORD_STARTS) for mark in marks]

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no BOS of the tokenizer's own."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def needle(
        self, draw: random.Random, keys: Sequence[str], prose: Sequence[int], depth: float, length: int
    ) -> Needle:
        """One prompt; the first stretch of prose drawn that can be cut without changing its tokens."""
        key, number = draw.choice(keys), str(draw.randrange(10 ** (FIGURES - 1), 10**FIGURES))
        before = self.encode(self.before)
        if before[: len(self.begin)] != self.begin:  # a chat template may write the beginning itself
            before = self.begin + before
        fact = self.encode(_FACT.format(key=key, number=number))
        question, answer = self.encode(self.asked.format(key=key)), self.encode(f" {number}")
        while answer and not self._decode(answer[:1]).strip():
            question.append(answer.pop(0))
        room = length - len(before) - len(fact) - len(question)
        if room < LEAST_PROSE:
            raise BadInput(
                f"prompts of {length} tokens: expected at least {length - room + LEAST_PROSE} for this model"
            )
        if len(prose) <= room:
            raise BadInput(
                f"the text has {len(prose)} tokens: expected more than {room} for prompts of {length} tokens"
            )
        for _ in range(TRIES):
            start = self._word_from(prose, draw.randrange(len(prose) - room))
            passage = list(prose[start : start + room])
            cut = self._word_from(passage, round(depth * room))
            context = before + passage[:cut] + fact + passage[cut:]
            if len(passage) == room and self._stays(context, question, answer):
                return Needle(tuple(context), tuple(question), tuple(answer), key, cut / room)
        raise BadInput(
            f"no stretch of {room} tokens can be cut from the text: this tokenizer joins tokens across every cut"
        )

    def _word_from(self, ids: Sequence[int], place: int) -> int:
        """The first place from there on where a word begins; the place itself if none does."""
        return next((at for at in range(place, len(ids)) if self.starts_word[ids[at]]), place)

    def _stays(self, context: list[int], question: list[int], answer: list[int]) -> bool:
        """Whether the parts are the tokens of the whole text, read apart or together."""
        whole = context + question + answer
        return all(self.encode(self._decode(part)) == part for part in (context, question, whole))

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
