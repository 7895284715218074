"""Balancing: from the highest-scored set, swaps that bring the kept entries' output closer to the step's own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from data import BadInput
from eviction.method import Cells, Rows, Scope, Selector
from eviction.options import check_whole
from eviction.ranking import best_first, keep_best

IMPROVED = 1 - 1e-12  # a swap must lower the error at least by this factor, as in solvers.balancing


@dataclass(frozen=True)
class Balancing(Selector):
    """The balancing selector of P1 on what the cell holds, for the outputs of the latest query rows.

    For row r of the group's query heads, with weights w_j over the held entries (softmax, as the model has it) and
    output mu = sum_j w_j v_j, keeping A changes the output by the forced error e_r(A) = |sum_A w_j (v_j - mu)| /
    sum_A w_j. From the `counts` highest-scored entries, the single swap that lowers (sum_r e_r^2)^(1/2) most is made
    until none lowers it by a relative 1e-12; ties go to the smallest (dropped, added). Entries that may come in are the
    `extra` next in the order of scores (P1's candidate set, when the scores are the row's weights); protected entries
    never leave. rows: how many of the latest rows, of every query head; 1 is the step's own output.

    With one query head, one row and its weights as scores this is A_bal of P1. Departures: P1 chooses for each row and
    head alone and forgets nothing; here one set serves the query heads of a KV head, and what is dropped is dropped for
    all rows to come. P1 takes 24 candidates beside A*_s for budgets where it enumerates few, which is the default here
    at every budget. Weights and sums are float64; a swap is found by inner products and made only if the error, summed
    anew, is lower. Source: P1 (arXiv 2608.25230), section 2; its use while decoding is ours.
    """

    rows: int = 1
    extra: int = 24

    name: ClassVar[str] = "balancing"
    source: ClassVar[str] = "P1 (arXiv 2608.25230), section 2"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_whole(f"selector {self.name}", "rows", self.rows, least=1)
        check_whole(f"selector {self.name}", "extra", self.extra, least=0)

    @property
    def scope(self) -> Scope:
        """Each layer by itself."""
        return "layer"

    @property
    def rows_needed(self) -> int:
        """The rows whose outputs it keeps."""
        return self.rows

    def __call__(
        self, cells: Sequence[Cells], scores: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Per layer (B, K, L) bool. Raises BadInput where there are no query rows to keep the output of."""
        layers = zip(cells, scores, counts, strict=True)
        return [self._balanced(mine, score, count) for mine, score, count in layers]

    def _balanced(self, cells: Cells, scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if cells.rows is None or cells.rows.queries.shape[2] == 0:
            raise BadInput(f"selector {self.name}: layer {cells.layer}: no query rows to keep the output of")
        free = torch.minimum(cells.lengths - counts, torch.as_tensor(self.extra, device=counts.device))
        inside, outside = int(counts.max()), int(free.max())
        if inside == 0 or outside <= 0:
            return keep_best(scores, counts)
        order, protected = best_first(scores)
        weights, values, outputs = weights_of(cells, cells.rows.last(self.rows))
        kept, offered = order[..., :inside], counts[..., None] + torch.arange(outside, device=counts.device)
        offered = order.gather(-1, offered.clamp(max=order.shape[-1] - 1))
        number = torch.arange(max(inside, outside), device=counts.device)
        real = number[:inside] < counts[..., None]
        swap = _Swaps(
            kept=kept.flatten(0, 1),
            offered=offered.flatten(0, 1),
            real=real.flatten(0, 1),
            movable=(real & (number[:inside] >= protected)).flatten(0, 1),
            there=(number[:outside] < free[..., None]).flatten(0, 1),
            weights=weights.flatten(0, 1),
            values=values.flatten(0, 1),
            outputs=outputs.flatten(0, 1),
        )
        chosen = swap.settled().view(*counts.shape, inside)
        # what only fills a shorter cell up is written to a column of its own
        chosen = torch.where(real, chosen, scores.shape[-1])
        blank = torch.zeros(*counts.shape, scores.shape[-1] + 1, dtype=torch.bool, device=scores.device)
        return blank.scatter(-1, chosen, True)[..., :-1]


def weights_of(cells: Cells, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights w (B, K, R, L), values v (B, K, L, dv) and outputs mu (B, K, R, dv) of R = group * rows rows, float64.

    Weights are zero where a row does not see an entry, and in rows of padding; values where nothing is held.
    """
    visible = rows.visible(cells)[:, :, None]
    weights = torch.softmax(rows.logits(cells, torch.float64), dim=-1)
    weights = torch.where(visible, weights, 0.0).flatten(2, 3)
    values = torch.where(cells.held[..., None], cells.values, 0.0).double()
    return weights, values, weights @ values


class _Swaps:
    """Swaps in C cells at once.

    kept (C, n), offered (C, m): entries. real (C, n), there (C, m): which are, and do not only fill a cell up. movable
    (C, n): which may leave. weights (C, R, L), values (C, L, dv): of all entries. outputs (C, R, dv): of the rows.
    """

    def __init__(
        self,
        kept: torch.Tensor,
        offered: torch.Tensor,
        real: torch.Tensor,
        movable: torch.Tensor,
        there: torch.Tensor,
        weights: torch.Tensor,
        values: torch.Tensor,
        outputs: torch.Tensor,
    ) -> None:
        self.kept, self.offered, self.n_entries = kept.clone(), offered.clone(), weights.shape[-1]
        self.possible = movable[:, :, None] & there[:, None, :]
        self.w_in, self.w_out = (weights.gather(2, _rows(at, weights.shape[1])) for at in (kept, offered))
        self.w_in *= real[:, None]
        # the steps w_j (v_j - mu)
        self.a_in, self.a_out = (
            w[..., None]
            * (values.gather(1, at[..., None].expand(-1, -1, values.shape[-1]))[:, None] - outputs[:, :, None])
            for w, at in ((self.w_in, kept), (self.w_out, offered))
        )
        # a row of padding has no output to keep
        self.counts = (weights.sum(-1) > 0)[:, :, None, None]

    def settled(self) -> torch.Tensor:
        """(C, n): what is kept once no swap lowers the error of any cell."""
        error = self._square()
        going = self.possible.flatten(1).any(1)
        while bool(going.any()):
            drop, add, lower = self._best(error)
            going &= lower
            self._exchange(drop, add, going)
            after = self._square()
            worse = going & ~(after < error * IMPROVED**2)
            self._exchange(drop, add, worse)
            going &= ~worse
            error = torch.where(going, after, error)
        return self.kept

    def _square(self) -> torch.Tensor:
        """(C,) sum over rows of e_r^2, from the sums themselves."""
        mass = self.w_in.sum(-1)[..., None, None]
        return _squares(self.a_in.sum(2).square().sum(-1)[..., None, None], mass, self.counts).flatten()

    def _best(self, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(C,) places in kept and offered of the best swap, and whether it seems to lower the error."""
        total, mass = self.a_in.sum(2), self.w_in.sum(-1)[..., None, None]
        along_in, along_out = (x @ total[..., None] for x in (self.a_in, self.a_out))
        of_in = self.a_in.square().sum(-1, keepdim=True) - 2 * along_in
        of_out = self.a_out.square().sum(-1, keepdim=True) + 2 * along_out
        square = total.square().sum(-1)[..., None, None] + of_in + of_out.mT - 2 * self.a_in @ self.a_out.mT
        after = _squares(square.clamp(min=0), mass - self.w_in[..., None] + self.w_out[:, :, None], self.counts)
        after = after.masked_fill(~self.possible, math.inf)
        least = after.flatten(1).amin(1)
        place = self.kept[:, :, None] * self.n_entries + self.offered[:, None, :]
        place = place.masked_fill(after > least[:, None, None], self.n_entries**2).flatten(1).argmin(1)
        return place // after.shape[2], place % after.shape[2], least < error * IMPROVED**2

    def _exchange(self, drop: torch.Tensor, add: torch.Tensor, where: torch.Tensor) -> None:
        cell = torch.nonzero(where).flatten()
        i, j = drop[cell], add[cell]
        self.kept[cell, i], self.offered[cell, j] = self.offered[cell, j], self.kept[cell, i]
        self.w_in[cell, :, i], self.w_out[cell, :, j] = self.w_out[cell, :, j], self.w_in[cell, :, i]
        self.a_in[cell, :, i], self.a_out[cell, :, j] = self.a_out[cell, :, j], self.a_in[cell, :, i]


def _squares(square: torch.Tensor, mass: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Sum over rows (dimension 1) of |sum_A a|^2 / (sum_A w)^2, infinite where a row that counts keeps no mass."""
    return torch.where(counts, torch.where(mass > 0, square / mass.square(), math.inf), 0.0).sum(1)


def _rows(at: torch.Tensor, rows: int) -> torch.Tensor:
    """(C, R, n) of (C, n): the same in every row."""
    return at[:, None].expand(-1, rows, -1)
