"""When a cache is evicted from while the model answers, down to what, and what of the answer stays."""

from dataclasses import dataclass
from typing import Literal

from data import BadInput
from eviction.method import Anchors, Schedule, named
from eviction.options import check_one_of, check_whole

PROMPTS = ("free", "pinned", "on_top")


@dataclass(frozen=True)
class Decode:
    """Evict also while decoding: down to the budget, as soon as the cache exceeds it by more than `slack`.

    slack: entries per KV head, on average; 0 evicts at every step. every: only at steps whose number after the prompt
    is divisible by it. prompt: "free", its entries compete as all others, and it is evicted from when it is read;
    "pinned", all of it stays and counts in the budget, which must be larger (TriAttention's code, where it is not,
    keeps the first tokens of the prompt and drops everything generated: here that is refused); "on_top", all of it
    stays and the budget is for what follows. schedule: to what level each round of eviction cuts, a name (`python -m
    eviction list`) with options or an object; the default is the budget. anchors: which of the tokens that the model
    writes stay, an object such as `StateLines.asking(tokenizer)`, or None. Written is what run.generate feeds after
    what it was given; where the model is called otherwise, every token that is fed by itself after the prompt.

    A step attends to what it appended before anything is evicted, so with slack 0 and every 1 a budget of b means steps
    over b + 1 entries: the ledger's mean length is the matched mean cache of P2.
    Source: P2 (arXiv 2605.14292) on matched mean cache; TriAttention's code has slack 128 or every 128; ours.
    """

    slack: int = 0
    every: int = 1
    prompt: Literal["free", "pinned", "on_top"] = "free"
    schedule: str | Schedule = "constant"
    anchors: str | Anchors | None = None

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_whole("decode", "slack", self.slack, least=0)
        check_whole("decode", "every", self.every, least=1)
        check_one_of("decode", "prompt", self.prompt, PROMPTS)
        named(Schedule, self.schedule)
        if self.anchors is not None:
            named(Anchors, self.anchors)


def refuse_pinned(prompt: int, budget: int) -> None:
    """Raises BadInput if a pinned prompt of that many tokens leaves nothing of a budget for what is generated."""
    if prompt >= budget:
        raise BadInput(
            f"decode: a pinned prompt of {prompt} tokens in a budget of {budget} entries per KV head leaves nothing for"
            ' what is generated: expected a larger budget, or prompt="on_top" or "free"'
        )
