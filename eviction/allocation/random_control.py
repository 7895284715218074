"""Random shares: what an allocation is worth that looks at nothing."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from data import BadInput
from eviction.method import Allocation, Allocator, Scope
from eviction.options import check_whole
from eviction.shares import apportion, by_layer, flat, whole_budget

MOST_SEED = 2**63 - 1  # of torch.Generator
LINE = 2**40  # the line that is cut at random: shares are drawn to this precision


@dataclass(frozen=True)
class RandomControl(Allocator):
    """The budget is cut at random places into as many pieces as there are KV heads in the model.

    Every way of sharing is equally likely (a flat Dirichlet draw), with the same exact total as any other allocator, as
    a control for allocators that share unevenly. Each cell keeps its `floor` latest entries first; set it to that of
    the allocator compared with. The draw depends on the seed and the number of cells alone: all sequences and all
    compressions of a run share alike. What a cell cannot hold is shared again in the drawn proportions. Source: ours.
    """

    seed: int = 0
    floor: int = 0

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "ours"
    scope: ClassVar[Scope] = "model"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing."""
        check_whole("allocator random", "seed", self.seed, least=0, most=MOST_SEED)
        check_whole("allocator random", "floor", self.floor, least=0)

    def __call__(
        self,
        scores: Sequence[torch.Tensor],
        lengths: Sequence[torch.Tensor],
        budgets: Sequence[int],
        first_layer: int,
        n_layers: int,
    ) -> Allocation:
        """Counts that sum to the budget over all layers together; scores are not looked at."""
        most = flat(lengths)
        floors = [min(length, self.floor) for length in most]
        rest = whole_budget(budgets, lengths) - sum(floors)
        if rest < 0:
            raise BadInput(
                f"allocator random: a budget of {max(budgets)} entries per KV head is less than its floor={self.floor}"
            )
        generator = torch.Generator().manual_seed(self.seed)  # on the CPU: the same draw on every device
        cuts = torch.randint(LINE + 1, (len(most) - 1,), generator=generator).sort().values.tolist()
        pieces = [stop - start for start, stop in itertools.pairwise([0, *cuts, LINE])]
        room = [length - floor for length, floor in zip(most, floors, strict=True)]
        shares = apportion(pieces, room, rest)
        return Allocation(
            by_layer([floor + share for floor, share in zip(floors, shares, strict=True)], lengths), recent=self.floor
        )
