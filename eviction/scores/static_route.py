"""Static route (P2, rejected): every KV head keeps by attention or evenly, as was found best for it beforehand."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from data import BadInput
from eviction.measured import is_witnessed
from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score
from eviction.routing import Routes, route_score, two_ways


@dataclass(frozen=True)
class StaticRoute(Score):
    """The score of attention in the KV heads routed to it, and the score `even` in the others.

    Hypothesis: some heads look for content and others spread over the text, always the same ones; so a choice per head
    between attention scoring and uniform scoring, made once offline, beats one score for all of them.
    Verdict (P2, family routing): rejected. Kill mode proxy-to-runtime drift: what the offline measure promised of the
    routes was not found when the model ran on them.

    What P2 leaves open, and the reading here. The offline measure: attention mass that later rows of held-out documents
    find kept, at one budget, after one eviction of a full cache (eviction.routing). That is the proxy, and it
    knows no decoding and no second eviction, so that it can drift as P2's did. Attention scoring: any score, `snapkv`
    unless another was measured; the routes' file names it, so that no other can be run. Uniform scoring: entries spread
    evenly over the text (`even`). Entries that the score of attention protects (SnapKV's window) are protected in every
    head: the routes differ in how the rest is ranked.

    routes: of eviction.routing, or their file. Heads on different routes have scores on different scales, so that an
    allocator that compares heads compares those, too; P2 gives every head the same budget. Raises BadInput without
    routes, and for those of a model of another shape or with another output projection.
    Source: P2 (arXiv 2605.14292), static_route.
    """

    routes: Routes | Path | str | None = None

    name: ClassVar[str] = "static_route"
    source: ClassVar[str] = "P2 (arXiv 2605.14292), rejected there: routing"

    def __post_init__(self) -> None:
        """Raises BadInput for a file that holds no routes, or routes to a score that there is not."""
        if self.routes is not None:
            assert self._attention  # read now, not in the middle of a run

    @cached_property
    def _routes(self) -> Routes:
        given = self.routes
        if isinstance(given, Routes):
            return given
        if isinstance(given, Path | str):
            return Routes.load(Path(given))
        raise BadInput(
            f"score {self.name}: routes={given}: expected the file of routes of this model that"
            " `python -m eviction routes` writes"
        )

    @cached_property
    def _attention(self) -> Score:
        return route_score(self._routes.score)

    def rows_needed(self, budget: int) -> int | None:
        """What the score of attention needs."""
        return self._attention.rows_needed(budget)

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32; +inf for what the score of attention protects."""
        routes, what = self._routes, f"score {self.name}, layer {cells.layer}"
        named = routes.model or "an unnamed model"
        made, here = tuple(routes.by_attention.shape), (cells.n_layers, cells.keys.shape[1])
        if made != here:
            raise BadInput(
                f"{what}: routes of {named}, of {made[0]} layers and {made[1]} KV heads: this model has {here[0]} and"
                f" {here[1]}"
            )
        if not is_witnessed(routes.witness, cells.layer, cells.output_weight):
            raise BadInput(
                f"{what}: routes of {named}: this model's weights are others: expected routes made of it by"
                " `python -m eviction routes`"
            )
        evenly, by_attention = two_ways(self._attention, cells, rows)
        mine = routes.by_attention[cells.layer].to(evenly.device)
        return torch.where(mine[:, None], by_attention, evenly)
