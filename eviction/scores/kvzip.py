"""KVzip: what the model attends to when it is made to write the context again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from data import BadInput
from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Reconstruction, Replay, Rows
from eviction.options import check_tokenizer, check_whole

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
NO_TEMPLATE = "\n"  # between a request and its answer, for a model that was taught no chat
OVERLAP = 8  # tokens of the chunk before that a later chunk's request quotes

OBSERVED = "reconstruction"
ROWS = 64  # query rows whose weights are in memory at once


@dataclass(frozen=True)
class KVzip(Reconstruction):
    """The largest weight that any row of the reconstruction pays to the entry, over the group's query heads.

    After the context has been read, its chunks are fed again, each after a request to repeat it. In each pass a row's
    weights are a softmax over the first `sinks` tokens, the chunk's own entries in the cache, and the pass itself up to
    the row (causal there alone), not over the rest of the context, although the pass itself attends to all of it. The
    rows are those of the request and of the chunk. Every context token belongs to one chunk and is scored once. The
    first `sinks` tokens are protected.

    chunk: context tokens fed again in one pass. first, before, after: token ids of the requests; the request of a later
    chunk is before + the last 8 tokens of the chunk ahead of it + after. `asking(tokenizer)` makes them from words.
    Without ids (default, the only form that a name alone can have) chunks are fed again without a request: a departure.

    Departures. The system prompt that the code always keeps is here the first `sinks` tokens, 4 as in kvpress, which
    gives them the highest score plus 1 instead. kvpress leaves the rest of a template's prefix unscored, so that it is
    evicted first; here it is context. Scale, soft-cap and sliding window of a row are the model's own (the codes divide
    by sqrt(d) and let a row see all): a token that no row of its pass could see scores 0. Where lines of a batch are
    padded, a window counts the padding of the replay, as transformers' windows do, and may reach less far than it does
    in the line alone. The code's threshold over all layers and heads is the allocator contour with floor 0.
    Source: KVzip (arXiv 2505.23416); snu-mllab/KVzip, whose chunk is 2,000 tokens; NVIDIA/kvpress 0.5.5, 2,048.
    """

    chunk: int = 2000
    sinks: int = 4
    first: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    name: ClassVar[str] = "kvzip"
    source: ClassVar[str] = "KVzip (arXiv 2505.23416); snu-mllab/KVzip; NVIDIA/kvpress 0.5.5"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_whole("score kvzip", "chunk", self.chunk, least=1)
        check_whole("score kvzip", "sinks", self.sinks, least=0)
        for option in ("first", "before", "after"):
            ids = getattr(self, option)
            if not isinstance(ids, tuple) or any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in ids):
                raise BadInput(f"score {self.name}: {option}={ids!r}: expected a tuple of token ids")

    @classmethod
    def asking(
        cls, tokenizer: PreTrainedTokenizerBase, chunk: int = 2000, sinks: int = 4, suffix: str | None = None
    ) -> "KVzip":
        """The score with the code's requests, in tokens of this tokenizer.

        suffix: what stands between a request and the chunk. None: what the tokenizer's chat template puts between a
        user's message and the answer, or a line break if it has none, as in kvpress (KVzip's own code has a template a
        model, "Answer:" for models it does not know, and a blank after the later request's words).
        """
        check_tokenizer("score kvzip", tokenizer)
        if suffix is None:
            suffix = _turn(tokenizer)
        first, before, after = (
            tuple(tokenizer(words, add_special_tokens=False).input_ids) for words in (FIRST, LATER, suffix)
        )
        return cls(chunk, sinks, (*first, *after), before, after)

    def replays(self, ids: torch.Tensor) -> list[Replay]:
        """One pass a chunk."""
        tokens = ids.tolist()
        found = []
        for start in range(0, len(tokens), self.chunk):
            lead = self.first
            if start and (self.before or self.after):
                lead = self.before + tuple(tokens[start - min(OVERLAP, self.chunk) : start]) + self.after
            found.append(Replay(lead, start, min(start + self.chunk, len(tokens))))
        return found

    def observe(self, cells: Cells, rows: Rows, spans: Sequence[tuple[int, int]]) -> None:
        """Raise what is noted of the chunk's positions, (B, K, N) float32, to the largest weight of this pass."""
        batch, kv_heads = cells.keys.shape[:2]
        device = cells.keys.device
        fed = (rows.positions >= 0).sum(1)  # none in a line of which the chunk holds padding alone
        own = (torch.tensor(cells.seen, device=device) - fed)[:, None, None]  # where the pass itself begins
        start, end = torch.tensor(spans, device=device).T[..., None, None]
        positions = cells.positions
        chunk = (positions >= start) & (positions < end)
        among = chunk | ((positions >= 0) & (positions < self.sinks)) | (positions >= own)
        # of a long context the pass looks at its chunk alone, so only that is multiplied
        at = torch.nonzero(among.any(0).any(0)).flatten()
        chunk, among, positions = chunk[..., at], among[..., at], positions[..., at]
        looked_at = replace(cells, keys=cells.keys[:, :, at], values=cells.values[:, :, :0], positions=positions)
        largest = torch.zeros(positions.shape, device=device)
        for begin in range(0, rows.queries.shape[2], ROWS):
            some = rows.between(begin, begin + ROWS)
            # entries come in the order of their positions: those after the block's rows are the last
            seen = int(((positions >= 0) & (positions <= some.positions.max())).any(0).any(0).sum())
            weights = torch.softmax(some.logits(looked_at.first(seen), among=among[..., :seen]), dim=-1)
            if bool((some.positions < 0).any()):  # a row of padding sees nothing
                weights = weights.nan_to_num_(0.0)
            largest[..., :seen] = torch.maximum(largest[..., :seen], weights.flatten(2, 3).amax(2))
        noted = cells.memory.get(OBSERVED)
        noted = torch.zeros(batch, kv_heads, int(own.max()), device=device) if noted is None else noted.clone()
        at = torch.where(chunk, positions, 0)
        cells.memory[OBSERVED] = noted.scatter_reduce(-1, at, torch.where(chunk, largest, 0.0), reduce="amax")

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32; +inf for the first tokens. Raises BadInput if no replay was shown."""
        noted = cells.memory.get(OBSERVED)
        if noted is None:
            raise BadInput(f"score {self.name}, layer {cells.layer}: was shown no replay of the context")
        scores = noted.gather(-1, cells.positions.clamp(min=0, max=noted.shape[-1] - 1))
        return torch.where(cells.held & (cells.positions < self.sinks), torch.inf, scores)


def _turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template puts between a user's message and the answer to it."""
    if not tokenizer.chat_template:
        return NO_TEMPLATE
    message = "CONTEXT"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert isinstance(text, str)
    return text.rpartition(message)[2]
