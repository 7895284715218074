"""State lines: short lines in which the model keeps its own record stay in the cache."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from data import BadInput
from eviction.method import Anchors
from eviction.options import check_tokenizer, check_whole

MARKER = "State:"
BLANKS = " \t"  # may stand before the marker: some tokenizers write one at the start of every line
BREAK = "\n"
_LEAD = "a"  # decoded before a token: by itself a token may lose the blank at its start


@dataclass(frozen=True)
class _Tables:
    """What each kind of token does to the line it stands in; C kinds, S states.

    States: i < m, the line so far is the first i characters of the marker of m characters (blanks at its start aside);
    m, it begins with the marker; m + 1, it begins otherwise. kinds (V + 1,): of each token id, the last for all other
    ids. head (C, S): state after the characters before a token's first line break. whole (C, S): after all of it.
    breaks, has_head, has_tail (C,) bool: whether it has a line break, characters before the first, after the last.
    """

    kinds: torch.Tensor
    head: torch.Tensor
    whole: torch.Tensor
    breaks: torch.Tensor
    has_head: torch.Tensor
    has_tail: torch.Tensor


@dataclass(frozen=True)
class StateLines(Anchors):
    """Every token with a character of a line that begins with the marker is pinned, its line break aside.

    Lines are those of the decoded text, token by token, so that it does not matter in which tokens the marker is
    written. What the model writes begins a line, and so does what it writes after being asked again. A line still open
    that may yet become one (it is a beginning of the marker) is pinned until it is known; special tokens end a line.
    lines: at most so many lines, the latest (one that may yet become one comes on top); tokens: at most so many tokens,
    the latest; None: all. If more are pinned than a cell may keep, the latest stay, and crowd out all else: that is the
    method (what the score protects, such as a window, is among them; a pinned prompt comes before them). marker: what a
    line begins with, blanks before it aside. texts: what each token id is in text, from `asking(tokenizer)`, which is
    how to make one. A token that holds a whole line between two line breaks of its own is not pinned for that line.

    Hypothesis: a model that is asked to write down its state in short lines, which are then kept, can do with less
    cache for the rest. P2's verdict: rejected; kill mode: anchors crowd out reasoning. P2 states neither its prompt nor
    what ends a line, whether anchors count in the budget (here they do: it is what the cache holds), or any limit to
    them: all of that is read here, and the limits are ours, to see what is left of the kill mode without the crowding.
    Source: P2 (arXiv 2605.14292), the rejected gate "state_emit" of its family decoding.
    """

    marker: str = MARKER
    lines: int | None = None
    tokens: int | None = None
    texts: tuple[str, ...] = field(default=(), repr=False)

    name: ClassVar[str] = "state_lines"
    source: ClassVar[str] = "P2 (arXiv 2605.14292), rejected: decoding"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        what = f"anchors {self.name}"
        words = self.marker
        if not isinstance(words, str) or not words or words != words.strip() or BREAK in words:
            raise BadInput(f"{what}: marker={words!r}: expected text in one line, no blanks around it")
        for option in ("lines", "tokens"):
            if getattr(self, option) is not None:
                check_whole(what, option, getattr(self, option), least=0)
        if not isinstance(self.texts, tuple) or not self.texts or not all(isinstance(x, str) for x in self.texts):
            raise BadInput(f"{what}: needs the text of each token: expected StateLines.asking(tokenizer)")

    @classmethod
    def asking(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        marker: str = MARKER,
        lines: int | None = None,
        tokens: int | None = None,
    ) -> "StateLines":
        """The rule for a model that reads and writes with this tokenizer; put its `instruction` in the prompt."""
        check_tokenizer("anchors state_lines", tokenizer)
        return cls(marker, lines, tokens, texts_of(tokenizer))

    @property
    def instruction(self) -> str:
        """What to ask of the model; the words are ours."""
        return (
            f"While you work, keep a record: as soon as something is known that you will need later, write it down in a"
            f' short line of its own that begins with "{self.marker}".'
        )

    def __call__(self, written: torch.Tensor) -> torch.Tensor:
        """(B, n) bool: which of the tokens written (B, n) are pinned."""
        tables, done, n = self._tables_on(written.device), len(self.marker), written.shape[1]
        known = (written >= 0) & (written < len(self.texts))
        kinds = tables.kinds[torch.where(known, written, len(self.texts))].long()
        breaks = tables.breaks[kinds]
        # what is written begins a line, in state 0
        states = torch.nn.functional.pad(_states_after(tables.whole[kinds]), (1, 0))
        at_break, at_end = tables.head[kinds].gather(2, states[:, :n, None])[..., 0], states[:, n:]
        line = torch.nn.functional.pad(breaks.cumsum(1), (1, 0))  # the number of the line that each token finds open
        before, after, last = line[:, :n], line[:, 1:], line[:, n:]
        ended = torch.zeros_like(line).scatter_add_(1, before, (breaks & (at_break == done)).long())
        begins = (ended > 0).scatter_(1, last, at_end == done)  # which lines begin with the marker
        if self.lines is not None:
            begins &= _rank_from_end(begins) <= self.lines
        begins.scatter_(1, last, begins.gather(1, last) | (at_end > 0) & (at_end < done))
        pinned = tables.has_head[kinds] & begins.gather(1, before)
        pinned |= tables.has_tail[kinds] & begins.gather(1, after)
        if self.tokens is not None:
            pinned &= _rank_from_end(pinned) <= self.tokens
        return pinned

    @cached_property
    def _tables(self) -> dict[torch.device, _Tables]:
        found: dict[tuple[tuple[int, ...], tuple[int, ...], bool, bool, bool], int] = {}
        kinds = []
        for text in (*self.texts, BREAK):
            head, *rest = text.split(BREAK)
            first = self._moves(head)
            whole = (self._moves(rest[-1])[0],) * len(first) if rest else first
            kind = first, whole, bool(rest), bool(head), bool(rest and rest[-1])
            kinds.append(found.setdefault(kind, len(found)))
        columns = [torch.tensor(column) for column in zip(*found, strict=True)]
        return {torch.device("cpu"): _Tables(torch.tensor(kinds, dtype=torch.int32), *columns)}

    def _tables_on(self, device: torch.device) -> _Tables:
        there = self._tables
        if device not in there:
            there[device] = _Tables(*(x.to(device) for x in vars(there[torch.device("cpu")]).values()))
        return there[device]

    def _moves(self, text: str) -> tuple[int, ...]:
        """(S,) the state after characters of one line, from each state."""
        done, other = len(self.marker), len(self.marker) + 1
        moves = []
        for state in range(done):
            more, missing = text.lstrip(BLANKS) if state == 0 else text, self.marker[state:]
            if missing.startswith(more):
                moves.append(state + len(more))
            else:
                moves.append(done if more.startswith(missing) else other)
        return (*moves, done, other)


def _states_after(moves: torch.Tensor) -> torch.Tensor:
    """(B, n) the state after each token, from state 0 before the first; moves (B, n, S): what each token does.

    Moves are composed by doubling: n tokens in log2(n) steps.
    """
    step = 1
    while step < moves.shape[1]:
        moves = torch.cat([moves[:, :step], moves[:, step:].gather(2, moves[:, :-step])], dim=1)
        step *= 2
    return moves[..., 0]


def _rank_from_end(marked: torch.Tensor) -> torch.Tensor:
    """(B, n) of those marked: 1 for the last, 2 for the one before it, and so on."""
    return marked.flip(1).cumsum(1).flip(1)


def texts_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """What each token id adds to a text that it stands in; a line break for special tokens, which end a line."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    lead = tokenizer(_LEAD, add_special_tokens=False).input_ids
    special = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}

    def decoded(lines: list[list[int]]) -> list[str]:
        return tokenizer.batch_decode(lines, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    before = decoded([lead])[0]
    texts = [""] * (ids[-1] + 1)
    for token, text, alone in zip(ids, decoded([[*lead, i] for i in ids]), decoded([[i] for i in ids]), strict=True):
        texts[token] = text[len(before) :] if text.startswith(before) else alone
        if token in special:
            texts[token] = BREAK
    return tuple(texts)
