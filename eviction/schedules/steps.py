"""Steps: the budget steps down, or up, from round to round, and is nominal on average."""

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from data import BadInput
from eviction.method import Schedule
from eviction.options import check_one_of, check_whole

DIRECTIONS = ("down", "up")
AFTER = ("nominal", "last")


@dataclass(frozen=True)
class Steps(Schedule):
    """The level of round r of the first R, in stages of R / S rounds each; i = floor(r S / R) is the stage:

        b + d_i (down) or b - d_i (up),  d_i = sign(S - 1 - 2 i) floor(b x |S - 1 - 2 i| / (S - 1))

    b: the nominal budget. x, `size`: by what share of it the first and the last stage differ from it, taken at its
    decimal value (or as "1/4"). S: `stages`. R: `rounds`, which stages must divide. As d_i = -d_(S-1-i), levels are
    whole entries and their mean over the R rounds is exactly b; none is below 1. `after` the R rounds: "nominal", every
    round is at b, so that the mean over the rounds stays b; "last", the last stage goes on, and the mean drifts off.

    Hypothesis: early and late reasoning need differently much cache, so that what is spent on one and saved on the
    other makes more answers right at the same mean. P2's verdict: rejected, neither direction does; kill mode:
    phase-independent class kill. P2 states no sizes, numbers of rounds or stages, nor whether the prompt's eviction is
    a round: all of that is read here. Matched is what P2 matches, the mean over decode steps (the ledger's mean
    length); the mean over rounds that is exact here is near it, not equal: an answer may end before its R rounds do,
    after a step up the cache needs passes to grow (it never holds more than the round's level and the slack), and
    windows or short texts cut a level to what a layer can hold. With a compression ratio, b is that of each round.
    Source: P2 (arXiv 2605.14292), the rejected gate "schedule" of its family cadence; the formula is ours.
    """

    direction: str = "down"
    size: float | str | Fraction = 0.5
    stages: int = 2
    rounds: int = 16
    after: str = "nominal"

    name: ClassVar[str] = "steps"
    source: ClassVar[str] = "P2 (arXiv 2605.14292), rejected: cadence"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        what = f"schedule {self.name}"
        check_one_of(what, "direction", self.direction, DIRECTIONS)
        check_one_of(what, "after", self.after, AFTER)
        check_whole(what, "stages", self.stages, least=2)
        check_whole(what, "rounds", self.rounds, least=1)
        if self.rounds % self.stages:
            raise BadInput(f"{what}: rounds={self.rounds}: expected a multiple of stages={self.stages}")
        if not 0 <= self._share() < 1:
            raise BadInput(f"{what}: size={self.size}: expected 0 <= size < 1")

    def level(self, budget: int, number: int) -> int:
        """Exact, in whole entries."""
        if number >= self.rounds and self.after == "nominal":
            return budget
        stage = min(number, self.rounds - 1) * self.stages // self.rounds
        steps = self.stages - 1 - 2 * stage
        difference = int(budget * self._share() * abs(steps) / (self.stages - 1))
        return budget + difference if (steps > 0) == (self.direction == "down") else budget - difference

    def lowest(self, budget: int) -> int:
        """That of the last stage down, or of the first one up."""
        return budget - int(budget * self._share())

    def _share(self) -> Fraction:
        try:
            return Fraction(str(self.size))
        except (ValueError, ZeroDivisionError):
            raise BadInput(f"schedule {self.name}: size={self.size!r}: expected a number") from None
