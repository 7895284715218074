"""Tokenizer and training tasks of the embedded checkpoints: copying, recall, key/value records, needles in
prose.

Every task returns an example (ids, weights): token ids that begin with <s>, so that position 0 always holds
the same token, and the weight of each token as a prediction target. Weights are at least ANSWER exactly at
the answers (the figures of a value that stands in the context), which is how accuracy() knows what to
count. Keys are English nouns from the package wonderwords (MIT). A fifth of them, and the last tenth of the
text, are never trained on and serve every reported accuracy.
"""

import importlib.util
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

from data.errors import BadInput

Example = tuple[list[int], list[float]]
Fact = tuple[str, list[int]]  # a key and the token ids of its value
Template = tuple[list[int], list[int], list[int]]  # token ids before the key, between key and value, after the value

VOCABULARY = 2048
PAD, START, STOP = 0, 1, 2
ANSWER = 1.0  # least weight of an answer token
NEWS = 0.02  # weight of what cannot be predicted: a new value, a random symbol
TRAINED_KEYS, TRAINED_TEXT = 0.8, 0.9  # shares of the nouns and of the text that training sees
SYMBOLS = 1700  # symbols that copying and recall draw from, once the pool has grown
INTRO = (
    "Some special magic numbers are hidden within the following text. "
    "Make sure to memorize it. I will quiz you about the numbers afterwards."
)
PHRASES = [  # sentences of retrieval prompts, so that the vocabulary covers them
    "The special magic number for {k} is: {v}.",
    "What is the special magic number for {k} mentioned in the provided text? "
    "The special magic number for {k} mentioned in the provided text is: {v}.",
    INTRO + "\n",
    "One of the special magic words for {k} is: {v}.",
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n",
    "VAR XQ = 12345 VAR AB = VAR XQ",
    "Question: Find all variables that are assigned the value 12345 in the text above.\nAnswer: XQ AB",
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
]


def nouns() -> list[str]:
    """Lower-case nouns of 3 to 9 letters from wonderwords' list, sorted; its code is not imported.

    Raises BadInput if wonderwords is not installed.
    """
    spec = importlib.util.find_spec("wonderwords")
    if spec is None or not spec.submodule_search_locations:
        raise BadInput(
            "package wonderwords is not installed: training draws its keys from it (pip install '.[models]')"
        )
    folder = Path(spec.submodule_search_locations[0])
    words = (folder / "assets" / "nounlist.txt").read_text("utf-8").split("\n")
    return sorted({word.strip() for word in words if re.fullmatch("[a-z]{3,9}", word.strip())})


def build_tokenizer(text: str) -> Tokenizer:
    """Train the byte-level BPE of 2048 tokens in which each two-digit number is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    numbers = [f"{i:02d}" for i in range(100)]
    tokenizer.train_from_iterator([text] + [" " + " ".join(nouns())] * 8 + PHRASES * 200 + numbers * 300, trainer)
    return tokenizer


class Tasks:
    """Draws training and test examples of a given length.

    pool is the number of symbols that copy() and associate() draw from; training from nothing grows it.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, seed: int = 0) -> None:
        """Read the text with the tokenizer; seed is of the training batches alone."""

        def encode(part: str) -> list[int]:
            return list(tokenizer.encode(part).ids)

        self.random = random.Random(seed)
        words = nouns()
        random.Random(7).shuffle(words)
        cut = int(TRAINED_KEYS * len(words))
        self.train_keys, self.test_keys = words[:cut], words[cut:]
        ids = np.array(encode(text))
        cut = int(TRAINED_TEXT * len(ids))
        self.train_text, self.test_text = ids[:cut], ids[cut:]
        self.key_ids = {word: encode(" " + word) for word in words}
        self.pairs = [encode(f"{i:02d}")[0] for i in range(100)]
        self.space = encode(" 11")[:-1]  # what the tokenizer puts between "is:" and the figures
        self.record: Template = (encode("\nThe special magic number for"), encode(" is:"), encode("."))
        self.query: Template = (
            encode("\nWhat is the special magic number for"),
            encode("? It is:"),
            encode("."),
        )
        self.intro = encode(INTRO)
        self.symbols = list(range(300, VOCABULARY))
        random.Random(5).shuffle(self.symbols)
        self.pool = SYMBOLS
        self._draw: Mapping[str, Callable[[random.Random, int, bool], Example]] = {
            "copy": self._copy,
            "associate": self._associate,
            "kv": self._kv,
            "needle": self._needle,
            "prose": self._prose,
        }

    def batch(self, size: int, length: int, mix: Mapping[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
        """A training batch: ids and weights, both (size, length); mix gives each task's share."""
        names = self.random.choices(list(mix), weights=list(mix.values()), k=size)
        return stack([self._draw[name](self.random, length, False) for name in names], length)

    def test_set(self, name: str, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `count` test sequences of one task: held-out keys and text, the same for every model."""
        r = random.Random(f"{name} {length} 99")
        return stack([self._draw[name](r, length, True) for _ in range(count)], length)

    def _copy(self, r: random.Random, length: int, held_out: bool) -> Example:
        """A random string of symbols, repeated (nothing to hold out)."""
        pool = self.symbols[: self.pool]
        size = r.randint(6, 20) if self.pool <= 64 else r.randint(6, max(8, min(length // 3, 96)))
        piece = [r.choice(pool) for _ in range(size)]
        rounds = length // size + 1
        return [START] + piece * rounds, [0.0] + [NEWS] * size + [1.0] * (size * (rounds - 1))

    def _associate(self, r: random.Random, length: int, held_out: bool) -> Example:
        """Pairs of symbols, then the same pairs again and again in random order (nothing to hold out)."""
        n = r.randint(4, max(5, min(24, length // 6)))
        pool = r.sample(self.symbols[: self.pool], 2 * n)
        pairs = list(zip(pool[:n], pool[n:], strict=True))
        ids, weights = [START], [0.0]
        answer = NEWS
        while len(ids) < length:
            for key, value in pairs:
                ids += [key, value]
                weights += [NEWS, answer]
            r.shuffle(pairs)
            answer = ANSWER
        return ids, weights

    def _kv(self, r: random.Random, length: int, held_out: bool) -> Example:
        """Records "The special magic number for KEY is: NNNN.", then queries in random order to the end."""
        n = r.randint(2, max(2, int(length / 28 * 0.45)))
        facts = self._facts(r, n, held_out)
        ids, weights = [START], [0.0]
        template, answer, known = self.record, NEWS, 0.2
        while len(ids) < length:
            for fact in facts:
                more_ids, more_weights = self._sentence(template, fact, answer, known)
                ids += more_ids
                weights += more_weights
            r.shuffle(facts)
            template, answer, known = self.query, ANSWER, 0.1
        return ids, weights

    def _needle(self, r: random.Random, length: int, held_out: bool) -> Example:
        """One to four records hidden in prose, each asked for at the end."""
        facts = self._facts(r, r.randint(1, 4), held_out)
        hidden = [self._sentence(self.record, fact, NEWS, 0.2) for fact in facts]
        asked = [self._sentence(self.query, fact, 1.5, 0.1) for fact in r.sample(facts, len(facts))]
        room = length - 1 - len(self.intro) - sum(len(ids) for ids, _ in hidden + asked)
        prose = self._passage(r, max(room, 4), held_out)
        cuts = [*sorted(r.randrange(len(prose)) for _ in facts), len(prose)]
        ids, weights, at = [START, *self.intro], [0.0] + [0.05] * len(self.intro), 0
        nothing: Example = ([], [])
        for cut, (more_ids, more_weights) in zip(cuts, [*hidden, nothing], strict=True):
            ids += prose[at:cut] + more_ids
            weights += [0.3] * (cut - at) + more_weights
            at = cut
        for more_ids, more_weights in asked:
            ids += more_ids
            weights += more_weights
        return ids, weights

    def _prose(self, r: random.Random, length: int, held_out: bool) -> Example:
        """A passage of the text."""
        return [START, *self._passage(r, length - 1, held_out)], [0.0] + [0.6] * (length - 1)

    def _facts(self, r: random.Random, n: int, held_out: bool) -> list[Fact]:
        """Distinct keys, each with a random number of four figures."""
        keys = r.sample(self.test_keys if held_out else self.train_keys, n)
        return [(key, self.space + [r.choice(self.pairs) for _ in range(2)]) for key in keys]

    def _passage(self, r: random.Random, length: int, held_out: bool) -> list[int]:
        text = self.test_text if held_out else self.train_text
        start = r.randrange(len(text) - length - 1)
        passage: list[int] = text[start : start + length].tolist()
        return passage

    def _sentence(self, template: Template, fact: Fact, answer: float, known: float) -> Example:
        """A record (answer = NEWS: the value is news) or a query (answer >= ANSWER) as ids and weights."""
        before, between, end = template
        key, value = self.key_ids[fact[0]], fact[1]
        blank = len(self.space)
        ids = before + key + between + value + end
        weights = [known] * len(before) + [0.05] * len(key) + [known] * len(between)
        weights += [min(answer, 0.1)] * blank + [answer] * (len(value) - blank) + [known] * len(end)
        return ids, weights


def stack(examples: Sequence[Example], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut or pad examples to one length: ids and weights, both (examples, length); padding has weight 0."""
    ids = torch.tensor([(ids + [PAD] * length)[:length] for ids, _ in examples])
    weights = torch.tensor([(weights + [0.0] * length)[:length] for _, weights in examples])
    return ids, weights


def accuracy(model: PreTrainedModel, ids: torch.Tensor, weights: torch.Tensor, batch: int = 4) -> float:
    """Share of the answer tokens that argmax predicts, the true tokens before each being given."""
    hit = total = 0
    with torch.no_grad():
        for x, w in zip(ids.split(batch), weights.split(batch), strict=True):
            asked = w[:, 1:] >= ANSWER
            hit += int(((model(x).logits[:, :-1].argmax(-1) == x[:, 1:]) & asked).sum())
            total += int(asked.sum())
    return hit / total
