"""How much a cache may hold, counted entry by entry."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral

from data import BadInput
from eviction.method import Schedule
from eviction.ragged import LayerShape


class BudgetExceeded(RuntimeError):
    """The cache would hold more than its budget says."""


@dataclass(frozen=True)
class Budget:
    """Exactly one of three limits, for each sequence.

    entries: on average over all KV heads of all layers; a layer with a sliding window counts with what it can hold.
    nbytes: of keys and values together (spread evenly over the KV heads; what rounding leaves is not used).
    compression_ratio: share of the tokens read that is evicted, taken at its decimal value and rounded down to whole
    entries kept, at least one (100 tokens at 0.9 keep 10).
    spare: entries that question and answer may add per KV head, on average, before BudgetExceeded is raised; None: any
    number (the ledger counts them). Source: ours; P1, appendix C, on why nominal ratios do not do.
    """

    entries: int | None = None
    nbytes: int | None = None
    compression_ratio: float | str | Fraction | None = None
    spare: int | None = None

    def __post_init__(self) -> None:
        given = [x for x in (self.entries, self.nbytes, self.compression_ratio) if x is not None]
        if len(given) != 1:
            raise BadInput("budget: expected exactly one of entries, nbytes and compression_ratio")
        for name, number, least in (("entries", self.entries, 1), ("nbytes", self.nbytes, 1), ("spare", self.spare, 0)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
                raise BadInput(f"budget: {name} = {number!r}: expected an integer of at least {least}")
        if self.compression_ratio is not None and not 0 <= self._ratio() < 1:
            raise BadInput(f"budget: compression_ratio = {self.compression_ratio}: expected 0 <= ratio < 1")

    def _ratio(self) -> Fraction:
        try:
            return Fraction(str(self.compression_ratio))
        except (ValueError, ZeroDivisionError):
            raise BadInput(f"budget: compression_ratio = {self.compression_ratio!r}: expected a number") from None

    def per_head(self, shapes: Sequence[LayerShape], seen: int) -> int:
        """Entries a KV head may keep on average after `seen` tokens, before windows and short texts cut it.

        Raises BadInput if the budget does not reach for one entry in each KV head.
        """
        if self.entries is not None:
            return self.entries
        if self.compression_ratio is not None:
            return max(1, int(seen * (1 - self._ratio())))
        assert self.nbytes is not None
        low, high = 0, max((shape.holds(seen) for shape in shapes), default=0)
        if high == 0:  # nothing was read of this sequence yet
            return 1
        while low < high:  # the largest level whose cache fits
            middle = (low + high + 1) // 2
            size = sum(shape.kv_heads * min(middle, shape.holds(seen)) * shape.entry_bytes for shape in shapes)
            low, high = (middle, high) if size <= self.nbytes else (low, middle - 1)
        if low == 0:
            least = sum(shape.kv_heads * shape.entry_bytes for shape in shapes)
            raise BadInput(f"budget: {self.nbytes} bytes: one entry in every KV head takes {least}")
        return low


def as_budget(budget: int | Budget) -> Budget:
    """A budget from an integer (entries per KV head) or as it is; anything else is BadInput."""
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, Integral):
        raise BadInput(f"budget {budget!r}: expected entries per KV head (an integer) or a Budget")
    return Budget(entries=int(budget))


class Account:
    """What the sequences of one cache hold against their budget; every change of the cache is reported here.

    shapes: of the layers. extra: entries per KV head that an allocator states to keep on top of the budget. Counted
    is what queries see, in storage that holds more by design (padded, masked), too: what that holds whoever reports the
    run must say. schedule: levels of the rounds of an answer; the prompt's own compressions are at the nominal budget.
    """

    def __init__(self, budget: Budget | None, shapes: Sequence[LayerShape], extra: int, schedule: Schedule) -> None:
        self.budget, self.shapes, self.extra = budget, tuple(shapes), extra
        self.schedule = schedule
        self.reset()

    def reset(self) -> None:
        """A new sequence begins."""
        self._held: list[tuple[int, ...]] = [()] * len(self.shapes)  # per layer, per sequence
        self._limits: list[int] = []  # per sequence, once something was compressed
        self._rounds: list[int] = []  # per sequence, of the answer that are done; empty: none of any

    def state(self) -> tuple[list[int], list[int]]:
        """What is known of the sequences beside what they hold, for putting it back later."""
        return list(self._limits), list(self._rounds)

    def put_back(self, state: tuple[list[int], list[int]]) -> None:
        """What is known of the sequences is what was known then."""
        limits, rounds = state
        self._limits, self._rounds = list(limits), list(rounds)

    def reorder(self, order: Sequence[int]) -> None:
        """Sequence b becomes the former sequence order[b]."""
        self._limits = [self._limits[b] for b in order] if self._limits else []
        self._rounds = [self._rounds[b] for b in order] if self._rounds else []

    def rounds(self, batch: int) -> list[int]:
        """Which round of the answer is next, for each sequence."""
        return list(self._rounds) or [0] * batch

    def layer_budgets(self, seen: int, number: int | None = None) -> list[int]:
        """Average entries of a KV head, layer by layer, after `seen` tokens.

        number: at the level of this round of the answer; None: at the nominal budget.
        """
        assert self.budget is not None
        level = self.budget.per_head(self.shapes, seen)
        if number is not None:
            level = self.schedule.level(level, number)
            if not isinstance(level, int) or level < 1:
                name = self.schedule.name
                raise BadInput(f"schedule {name}: round {number} at {level}: expected a whole number of at least 1")
        return [min(level, shape.holds(seen)) for shape in self.shapes]

    def layer_limits(self, seen: int, on_top: int = 0, number: int | None = None) -> list[int]:
        """layer_budgets with what the allocator and a pinned prompt add to them, as far as the layer can hold it."""
        pairs = zip(self.shapes, self.layer_budgets(seen, number), strict=True)
        return [min(budget + self.extra + on_top, shape.holds(seen)) for shape, budget in pairs]

    def limit(self, seen: int, on_top: int = 0, number: int | None = None) -> int:
        """Entries that one sequence may hold after a compression."""
        limits = self.layer_limits(seen, on_top, number)
        return sum(shape.kv_heads * limit for shape, limit in zip(self.shapes, limits, strict=True))

    def hold(self, layer: int, lengths: Sequence[int]) -> None:
        """Layer `layer` holds these many entries in its cells now."""
        kv_heads = self.shapes[layer].kv_heads
        self._held[layer] = tuple(sum(lengths[i : i + kv_heads]) for i in range(0, len(lengths), kv_heads))

    def exceeding(self, seen: Sequence[int], coming: int, on_top: Sequence[int], slack: int) -> tuple[bool, ...]:
        """Which sequences `coming` tokens more would leave above the limit of their next round by over `slack` entries
        per KV head."""
        spare, found = slack * sum(shape.kv_heads for shape in self.shapes), []
        for sequence, (n, number) in enumerate(zip(seen, self.rounds(len(seen)), strict=True)):
            after = n + coming
            held = sum(
                min(layer[sequence] + coming * shape.kv_heads, shape.kv_heads * shape.holds(after))
                for layer, shape in zip(self._held, self.shapes, strict=True)
            )
            found.append(held > self.limit(after, on_top[sequence], number) + spare)
        return tuple(found)

    def close(self, seen: Sequence[int], on_top: Sequence[int], due: Sequence[bool] | None) -> None:
        """A compression of all layers ended: of the prompt (due None) or, a round, of the sequences that were due.

        Raises BudgetExceeded if one of them holds more than its budget, or the level of its round, says.
        """
        if self.budget is None:
            return
        rounds = self.rounds(len(seen))
        cut_to = [None] * len(seen) if due is None else rounds
        self._check([self.limit(*sequence) for sequence in zip(seen, on_top, cut_to, strict=True)], 0, due)
        self._rounds = rounds if due is None else [done + was_due for done, was_due in zip(rounds, due, strict=True)]
        # up to its next round a sequence may hold what the last one left, and grow to what the next one will leave
        self._limits = [
            max(self.limit(n, more, number - 1 if number else None), self.limit(n, more, number))
            for n, more, number in zip(seen, on_top, self._rounds, strict=True)
        ]

    def appended(self, seen: Sequence[int], evicting: bool) -> None:
        """Tokens were added that nothing is evicted for. Raises BudgetExceeded if they are more than the budget allows:
        its spare on top of the last compression's limit, or (evicting False) whatever was read on top of the budget."""
        if self.budget is None:
            return
        if not evicting:
            self._limits = [self.limit(n) for n in seen]
        elif self.budget.spare is None or not self._limits:
            return
        self._check(self._limits, (self.budget.spare or 0) * sum(shape.kv_heads for shape in self.shapes))

    def _check(self, limits: Sequence[int], spare: int, due: Sequence[bool] | None = None) -> None:
        for sequence, limit in enumerate(limits):
            if due is not None and not due[sequence]:
                continue
            held = sum(layer[sequence] for layer in self._held if layer)
            if held > limit + spare:
                cells = sum(shape.kv_heads for shape in self.shapes)
                allowed = f"{limit / cells:g}" + (f" and {spare / cells:g} to spare" if spare else "")
                raise BudgetExceeded(
                    f"sequence {sequence}: {held / cells:g} entries a KV head held on average, the budget allows"
                    f" {allowed} ({held} of {limit + spare} in {cells} KV heads)"
                )
