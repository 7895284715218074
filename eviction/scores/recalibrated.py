"""Recalibrated statistics (P2, rejected): TriAttention by the queries of what the model writes."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from data import BadInput
from eviction.calibration import TEXT, Statistics
from eviction.scores.triattention import TriAttention


@dataclass(frozen=True)
class QStats(TriAttention):
    """TriAttention with query statistics of traces that the model itself generated; formula and options are its.

    Hypothesis: a cache that is evicted from while the model reasons is read by the queries of reasoning, so statistics
    of such traces tell better what will be wanted than those of a text that the model reads.
    Verdict (P2, family scoring): rejected. Its sign is inconsistent, some +6 points at a budget of 128 and -2 at 64,
    and what the first n = 50 problems promised evaporated at n = 200.

    What P2 leaves open, and the reading here. Its traces are of mathematics; which, how many and how drawn is not said.
    Here they are what the model writes after prompts cut from a text (`python -m eviction calibrate --generate`,
    greedily or at a temperature, with the full cache, statistics over generated positions alone), or traces of one's
    own in text files (`--traces`, which is taken as said). P2's come of problems of mathematics as prompts. Statistics
    of a text that was only read are refused: with these it is the score triattention.
    Source: P2 (arXiv 2605.14292), Q_stats; WeianMao/triattention for the score.
    """

    name: ClassVar[str] = "Q_stats"
    source: ClassVar[str] = "P2 (arXiv 2605.14292), rejected there: scoring; WeianMao/triattention"

    @cached_property
    def _statistics(self) -> Statistics:
        found = super()._statistics
        if found.of == TEXT:
            raise BadInput(
                f"score {self.name}: statistics of a text that {found.model or 'the model'} only read: expected those"
                " of traces, from `python -m eviction calibrate` with --generate or --traces"
            )
        return found
