"""A method is four named parts: a score of every entry, an allocator of the budget, a selector of what stays, and the
state in which that is held.

Each part is one file in scores/, allocation/, selection/ or states/ with one class; `listed` and `named` find them by
themselves, so adding a method is adding a file. Options are the fields of the class.

What a part may look at is fixed by what it is handed. A score is handed the entries that the cache holds and the
query rows of what was read so far: ContextRows when only the context was read, ContextAndQuestionRows when the
question was part of it. Whether a run is query-agnostic or query-aware is therefore a fact about its rows and not
an option that a method could forget to look at.
"""

import importlib
import inspect
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import ClassVar, Literal, Self, TypeVar

import torch

from data import BadInput
from eviction.ragged import Padded, Page
from eviction.rotary import Rotary

Scope = Literal["layer", "model"]


@dataclass(frozen=True, eq=False)
class Cells:
    """What the KV heads of one layer hold, padded to the longest; every held entry is a candidate for eviction.

    keys (B, K, L, d) after QK-norm and RoPE, values (B, K, L, dv), in the model's dtype. positions (B, K, L) int64: the
    true position of each entry among its sequence's tokens (padding tokens not counted), ascending; -1 where nothing is
    held. seen: tokens read so far, per sequence. budget: entries that a KV head of this layer may keep on average; the
    nominal number, whatever a schedule says. layer, n_layers: which layer of how many. rotary: the layer's rotary
    embedding, for scores that need queries or keys as they were before it. output_weight: (H, d_model, dv), what the
    layer's output projection multiplies each query head's output with, None if unknown. memory: what the score itself
    put there in earlier passes over the same sequence; counted as side data of the cache. pinned: per sequence, how
    many of its first tokens stay whatever their score; () if none do. rows: the latest query rows, as many as the
    selector asks for; None in a score's cells. log_mass (B, K, L) float32: logarithm of how many tokens an entry stands
    for, which attention adds to its logit; its position is that of the latest of them; None: all stand for one. Values
    that are held as codes come decoded.
    """

    layer: int
    n_layers: int
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    seen: tuple[int, ...]
    budget: int
    rotary: Rotary | None = None
    output_weight: torch.Tensor | None = None
    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    pinned: tuple[int, ...] = ()
    rows: "Rows | None" = None
    log_mass: torch.Tensor | None = None

    @property
    def held(self) -> torch.Tensor:
        """(B, K, L) bool: where an entry is; the held entries of a cell come first."""
        return self.positions >= 0

    @property
    def lengths(self) -> torch.Tensor:
        """(B, K) int64: entries held by each cell."""
        return self.held.sum(-1)

    @property
    def ages(self) -> torch.Tensor:
        """(B, K, L) int64: tokens read after each entry, 0 for the latest; of no meaning where nothing is held."""
        return torch.tensor(self.seen, device=self.positions.device)[:, None, None] - 1 - self.positions

    def first(self, n: int) -> Self:
        """The first n entries of every cell."""
        log_mass = None if self.log_mass is None else self.log_mass[..., :n]
        keys, values, positions = self.keys[:, :, :n], self.values[:, :, :n], self.positions[..., :n]
        return replace(self, keys=keys, values=values, positions=positions, log_mass=log_mass)


@dataclass(frozen=True, eq=False)
class Rows:
    """The latest query rows of one layer, in the order they were read.

    queries (B, H, T, d) after QK-norm and RoPE. positions (B, T) int64: true positions, -1 for padding tokens. first
    (B, T) int64: the first position that each row sees (above 0 in a sliding window). scale: factor of the logits.
    softcap: c of c tanh(logit / c), or None. H query heads share K KV heads in groups of H / K, in order.
    """

    queries: torch.Tensor
    positions: torch.Tensor
    first: torch.Tensor
    scale: float
    softcap: float | None

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What they store."""
        return self.queries, self.positions, self.first

    def last(self, n: int) -> Self:
        """The n latest rows (all, if there are fewer)."""
        return self.between(max(0, self.queries.shape[2] - n), None)

    def between(self, begin: int, end: int | None) -> Self:
        """The rows of these numbers, oldest first; end None: to the latest."""
        rows = slice(begin, end)
        return replace(
            self, queries=self.queries[:, :, rows], positions=self.positions[:, rows], first=self.first[:, rows]
        )

    def followed_by(self, later: "Rows") -> Self:
        """These rows and then those."""
        return replace(
            self,
            queries=torch.cat([self.queries, later.queries], dim=2),
            positions=torch.cat([self.positions, later.positions], dim=1),
            first=torch.cat([self.first, later.first], dim=1),
        )

    def sequences(self, order: torch.Tensor) -> Self:
        """The rows of these sequences, in this order."""
        picked = (x[order.to(x.device)] for x in (self.queries, self.positions, self.first))
        queries, positions, first = picked
        return replace(self, queries=queries, positions=positions, first=first)

    def copy(self) -> Self:
        """The rows with storage of their own, so that they keep nothing else alive."""
        return replace(self, queries=self.queries.clone(), positions=self.positions.clone(), first=self.first.clone())

    def logits(
        self, cells: Cells, dtype: torch.dtype = torch.float32, among: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(B, K, G, T, L) logits of the rows over the held entries, in dtype, -inf where a row does not see one.

        among (B, K, L) bool: the entries that rows see at all; None: all.
        """
        batch, heads, rows, width = self.queries.shape
        if rows == 0:
            raise BadInput(f"layer {cells.layer}: no query rows to weigh with: rows_needed() said that none are read")
        kv_heads = cells.keys.shape[1]
        queries = self.queries.to(dtype).reshape(batch, kv_heads, -1, width)
        logits = (queries @ cells.keys.to(dtype).mT).mul_(self.scale)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        logits = logits.view(batch, kv_heads, heads // kv_heads, rows, -1)
        if cells.log_mass is not None:
            logits += cells.log_mass[:, :, None, None].to(dtype)
        from_here = self._certain(cells, among)  # the first entries are seen by all rows: most of a long context
        visible = self.visible(cells, from_here)
        if among is not None:
            visible &= among[:, :, None, from_here:]
        logits[..., from_here:].masked_fill_(~visible[:, :, None], -torch.inf)
        return logits

    def visible(self, cells: Cells, begin: int = 0) -> torch.Tensor:
        """(B, K, T, L - begin) bool: which held entries, from number `begin` of a cell on, each row sees: not after
        itself, and inside its window."""
        entries = cells.positions[:, :, None, begin:]
        mine = self.positions[:, None, :, None]
        return (entries >= self.first[:, None, :, None]) & (entries <= mine) & (entries >= 0)

    def _certain(self, cells: Cells, among: torch.Tensor | None) -> int:
        """How many entries from the first on every row of every cell sees."""
        earliest, latest = self.first.amax(1)[:, None, None], self.positions.amin(1)[:, None, None]
        sure = (cells.positions >= earliest) & (cells.positions <= latest) & cells.held
        if among is not None:
            sure &= among
        return int(sure.all(0).all(0).long().cumprod(0).sum())

    def weights(self, cells: Cells) -> torch.Tensor:
        """(B, K, G, T, L) float32 attention weights, the model's own softmax over what is held; 0 for padding rows."""
        weights = torch.softmax(self.logits(cells), dim=-1)
        return torch.where(self.visible(cells).any(-1)[:, :, None, :, None], weights, 0.0)


class ContextRows(Rows):
    """Rows of context tokens alone: whatever is scored with them knows no question."""


class ContextAndQuestionRows(Rows):
    """Rows of a prompt that the question is part of."""


class _Part(ABC):
    """What every part has: a name, under which it is listed, and where it is from."""

    name: ClassVar[str]
    source: ClassVar[str]

    def __init_subclass__(cls) -> None:
        """A part that is only handed over as an object goes by the name of its class."""
        kind = _Part in cls.__bases__
        for attribute, default in (("name", cls.__name__), ("source", "")):
            if not kind and not hasattr(cls, attribute):
                setattr(cls, attribute, default)


class Score(_Part):
    """How much each entry matters: higher is kept."""

    @abstractmethod
    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32; +inf: protected, kept before all others (the latest first, if not all fit).

        What stands where nothing is held is ignored. NaN at a held entry is refused by the caller.
        """

    @abstractmethod
    def rows_needed(self, budget: int) -> int | None:
        """How many of the latest query rows the score reads: 0 for none, None for all of the pass."""


@dataclass(frozen=True)
class Replay:
    """Tokens that are fed after a context, to see what they attend to: `lead`, then its tokens start to end again."""

    lead: tuple[int, ...]
    start: int
    end: int


class Reconstruction(Score):
    """A score that has the model read the context a second time, in full, before anything is evicted.

    The run feeds every replay on top of the whole context, shows the score what its rows attended to, forgets the
    replay again, and evicts after the last one.
    """

    @abstractmethod
    def replays(self, ids: torch.Tensor) -> Sequence[Replay]:
        """What to feed after a context of one sequence's tokens, ids (n,) without padding."""

    @abstractmethod
    def observe(self, cells: Cells, rows: Rows, spans: Sequence[tuple[int, int]]) -> None:
        """Note in cells.memory what the rows of a replay attended to.

        cells: the context's entries, then those of the replay itself. spans: per sequence, the true positions (from, up
        to) of the part of the context that was fed again.
        """

    def rows_needed(self, budget: int) -> int:
        """None: what it needs it was shown."""
        return 0


@dataclass(frozen=True, eq=False)
class Allocation:
    """counts: one (K,) int64 tensor per layer, entries that each KV head keeps. recent: latest entries of every cell
    that the selector must keep before all others (a recency floor); they are part of the counts."""

    counts: Sequence[torch.Tensor]
    recent: int = 0


class Allocator(_Part):
    """How a budget is shared among the KV heads of one sequence.

    scope: "layer" if each layer can be decided alone (then it is called with one layer at a time, as soon as that layer
    was computed), "model" if all layers must be known.
    """

    scope: ClassVar[Scope]

    @property
    def extra(self) -> int:
        """Entries per KV head that this allocator adds to the budget it was asked for; the caller hands it budgets that
        include them, min(budget + extra, what the layer can hold), and reports them."""
        return 0

    @abstractmethod
    def __call__(
        self,
        scores: Sequence[torch.Tensor],
        lengths: Sequence[torch.Tensor],
        budgets: Sequence[int],
        first_layer: int,
        n_layers: int,
    ) -> Allocation:
        """Counts for one sequence.

        scores: per layer (K, L) float32, -inf where nothing is held, +inf where the score protects; entries in order of
        position. lengths: per layer (K,) int64, entries held. budgets: per layer the average entries of a KV head,
        already cut to what the layer can hold. first_layer: number of scores[0]'s layer among n_layers. The counts sum
        to at most sum_l K_l budgets_l over all layers (a method that gives less holds less, and its bytes say so), and
        none exceeds its cell's length.
        Raises BadInput where the budget does not allow it.
        """


class Selector(_Part):
    """Which entries of each cell stay, given how many. scope as for an allocator."""

    @property
    @abstractmethod
    def scope(self) -> Scope:
        """ "layer" or "model"."""

    @property
    def rows_needed(self) -> int:
        """How many of the latest query rows it looks at; its cells have them then."""
        return 0

    @abstractmethod
    def __call__(
        self, cells: Sequence[Cells], scores: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Per layer (B, K, L) bool, what stays: exactly counts[l] (B, K) entries of each cell.

        scores: per layer (B, K, L) float32 with -inf where nothing is held and +inf where an entry is protected.
        """


class State(_Part):
    """How what is kept is held. Of ragged storage alone, where each entry is held by itself.

    Values: as they are, or as codes in a basis of each cell (eviction/basis.py). It is fitted to the values that a cell
    holds when the first compression of a text begins, before it evicts (at the end of the prompt, if nothing was
    compressed before), and does not change from then on; what is appended later is coded as it comes, before it is
    attended to. Entries: each one token, or some of them slots that stand for several.
    """

    @abstractmethod
    def value_rank(self, width: int) -> int | None:
        """In how many numbers a value of `width` numbers is coded; None: not at all. Raises BadInput."""

    @abstractmethod
    def pooled(self, counts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """(B, K) int64: of the counts (B, K) entries that a cell keeps of lengths (B, K), how many stand for others.

        The selector picks the rest. 0 where nothing is evicted; None: 0 everywhere. The caller may take fewer.
        """

    def page(self, held: Padded, keep: torch.Tensor, counts: Sequence[int], pooled: torch.Tensor | None) -> Page:
        """What C cells hold, counts[c] entries of cell c: those where keep (C, L) is true, as they are in `held`, and
        pooled[c] others, made of those where it is not. pooled (C,) or None: as `pooled` said, or fewer."""
        return held.page(keep, counts)


class Schedule(_Part):
    """To what level the cache is cut in each eviction round of an answer.

    A round is a pass after the prompt that finds a sequence above the level of its next round (and the slack), and
    evicts from it down to that level. Every sequence counts its own rounds, those of a question that is read in several
    passes among them. The prompt's own eviction is none: it is at the nominal budget under every schedule, so that what
    two schedules begin with is the same.
    """

    @abstractmethod
    def level(self, budget: int, number: int) -> int:
        """Entries per KV head on average, at least 1, that round `number` (0: the first) leaves of a nominal budget."""

    @abstractmethod
    def lowest(self, budget: int) -> int:
        """The lowest level of all rounds that there may be."""


class Anchors(_Part):
    """Which of the tokens that the model wrote stay in the cache, whatever their score."""

    @abstractmethod
    def __call__(self, written: torch.Tensor) -> torch.Tensor:
        """(B, n) bool: which tokens are pinned.

        written (B, n) int64: ids of all that was fed after the prompt, in order; -1 where the model did not write it (a
        question, padding): what stands there is not pinned whatever is returned. Pinned entries count in the budget.
        """


Part = TypeVar("Part", Score, Allocator, Selector, State, Schedule, Anchors)
_KINDS: dict[type, tuple[str, str]] = {
    Score: ("score", "eviction.scores"),
    Allocator: ("allocator", "eviction.allocation"),
    Selector: ("selector", "eviction.selection"),
    State: ("state", "eviction.states"),
    Schedule: ("schedule", "eviction.schedules"),
    Anchors: ("anchors", "eviction.decoding"),
}


def listed(kind: type[Part]) -> dict[str, type[Part]]:
    """Every part of a kind (Score, Allocator, Selector, State, Schedule or Anchors) that has a file, by name."""
    package = importlib.import_module(_KINDS[kind][1])
    found: dict[str, type[Part]] = {}
    for module_info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
        for _, part in inspect.getmembers(module, inspect.isclass):
            if issubclass(part, kind) and part.__module__ == module.__name__ and not inspect.isabstract(part):
                where = f"{_KINDS[kind][0]} {part.__qualname__} in {module.__name__}"
                if not is_dataclass(part) or not all(isinstance(x, str) for x in (part.name, part.source)):
                    raise BadInput(f"{where}: expected a frozen dataclass with class attributes name and source")
                if part.name in found:
                    raise BadInput(f"{where}: its name, {part.name!r}, is {found[part.name].__module__}'s already")
                found[part.name] = part
    return dict(sorted(found.items()))


def named(kind: type[Part], part: str | Part) -> Part:
    """The part of that name with its default options, or the part itself.

    "name:option=value,option=value" sets options. Raises BadInput with the names that there are, or with the options
    that the part takes.
    """
    if isinstance(part, kind):
        return part
    what = _KINDS[kind][0]
    if not isinstance(part, str):
        raise BadInput(f"{what} {part!r}: expected a name or a {kind.__name__}")
    name, _, options = part.partition(":")
    there = listed(kind)
    if name not in there:
        raise BadInput(f"unknown {what} {name!r}: expected one of {', '.join(there)}")
    return there[name](**_options(there[name], f"{what} {name}", options))


def _options(part: type, what: str, text: str) -> dict[str, object]:
    # an option whose name is a word of Python has an underscore behind it as a field: lambda_
    taken = {x.name.rstrip("_"): x.name for x in fields(part)} if is_dataclass(part) else {}
    chosen: dict[str, object] = {}
    for option in filter(None, text.split(",")):
        name, equals, value = option.partition("=")
        name = name.rstrip("_")
        if name not in taken or not equals:
            raise BadInput(f"{what}: option {option!r}: expected {', '.join(f'{x}=' for x in taken) or 'none'}")
        chosen[taken[name]] = _value(value)
    return chosen


def _value(text: str) -> object:
    for words, value in (("true", True), ("false", False), ("none", None)):
        if text.lower() == words:
            return value
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
