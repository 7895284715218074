"""What a cache held, pass by pass: lengths of every layer and KV head, bytes, peak."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import polars as pl

from data import BadInput

Phase = Literal["prefill", "question", "decode"]
PHASES = get_args(Phase)

COLUMNS = (
    "step",
    "phase",
    "tokens",
    "layer",
    "sequence",
    "kv_head",
    "used",
    "kept",
    "nbytes",
    "side_bytes",
    "peak_bytes",
)


@dataclass(frozen=True)
class Step:
    """One forward pass. phase: prefill (its tokens are evicted from), question (several tokens after it), decode (one).

    batch: sequences. tokens: slots fed in it. used: entries in memory of every cell that the pass ran over, layer by
    layer, those that a mask hides included (after the append, before eviction); kept: the same after eviction. nbytes,
    side_bytes: of the cache afterwards. peak_bytes: the most that the cache's keys and values took during the pass,
    with the transient copies that attention and eviction make of them; the model's own projections and outputs are not
    counted.
    """

    phase: Phase
    batch: int
    tokens: int
    used: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[int, ...], ...]
    nbytes: int
    side_bytes: int
    peak_bytes: int


@dataclass
class Ledger:
    """The passes of a run, oldest first."""

    steps: list[Step] = field(default_factory=list)

    def mean_length(self, phase: Phase | None = None) -> float:
        """Mean over passes of n_t, the mean over layers, KV heads and sequences of the entries a pass attended to.

        Source: P2, matched mean cache. NaN if there was no such pass.
        """
        means = [float(np.mean(np.concatenate(step.used))) for step in self._of(phase)]
        return float(np.mean(means)) if means else float("nan")

    def mean_bytes(self, phase: Phase | None = None) -> float:
        """Mean over passes of the bytes of keys and values held after each; NaN if there was no such pass."""
        steps = self._of(phase)
        return float(np.mean([step.nbytes for step in steps])) if steps else float("nan")

    @property
    def peak_bytes(self) -> int:
        """The most bytes that keys and values ever took, transient copies included."""
        return max((step.peak_bytes for step in self.steps), default=0)

    @property
    def peak_length(self) -> float:
        """The largest mean length over cells that a pass attended to."""
        return max((float(np.mean(np.concatenate(step.used))) for step in self.steps), default=0.0)

    def table(self) -> pl.DataFrame:
        """One row a step, layer, sequence and KV head: used and kept entries; bytes are those of the whole cache."""
        rows = []
        for number, step in enumerate(self.steps):
            sizes = step.nbytes, step.side_bytes, step.peak_bytes
            for layer, (used, kept) in enumerate(zip(step.used, step.kept, strict=True)):
                kv_heads = len(used) // step.batch
                for cell, (before, after) in enumerate(zip(used, kept, strict=True)):
                    sequence, kv_head = divmod(cell, kv_heads)
                    rows.append((number, step.phase, step.tokens, layer, sequence, kv_head, before, after, *sizes))
        return pl.DataFrame(rows, schema=[*COLUMNS], orient="row")

    def _of(self, phase: Phase | None) -> list[Step]:
        if phase not in (None, *PHASES):
            raise BadInput(f"ledger: phase {phase!r}: expected one of {', '.join(PHASES)}")
        return [step for step in self.steps if phase is None or step.phase == phase]
