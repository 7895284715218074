"""Values in fewer numbers: each cell has a mean and orthonormal directions, and holds coordinates along them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from data import BadInput

BLOCK = 1024  # entries of every cell that are widened to float64 at once


@dataclass(frozen=True, eq=False)
class Basis:
    """What the values of C cells are coded in: value = mean + code @ directions, as near as r directions come.

    mean (C, dv), directions (C, r, dv), in the dtype of the values. fitted: which cells have theirs; a cell that held
    nothing when the others were fitted is fitted to the first values that it is given.
    """

    mean: torch.Tensor
    directions: torch.Tensor
    fitted: tuple[bool, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is stored."""
        return self.mean, self.directions

    def coded(self, values: torch.Tensor) -> torch.Tensor:
        """(C, L, r) codes of values (C, L, dv), in their dtype; at least float32 in between."""
        wide = torch.promote_types(values.dtype, torch.float32)
        centred = values.to(wide) - self.mean.to(wide)[:, None]
        return (centred @ self.directions.to(wide).transpose(1, 2)).to(values.dtype)

    def decoded(self, codes: torch.Tensor) -> torch.Tensor:
        """(C, L, dv) values of codes (C, L, r); of an average of codes, with weights that sum to 1, the average."""
        wide = torch.promote_types(codes.dtype, torch.float32)
        whole = torch.baddbmm(self.mean.to(wide)[:, None], codes.to(wide), self.directions.to(wide))
        return whole.to(codes.dtype)

    def completed(self, values: torch.Tensor, lengths: Sequence[int]) -> "Basis":
        """With those cells fitted that were not, and have something among values (C, L, dv) of these lengths."""
        late = [cell for cell, length in enumerate(lengths) if length and not self.fitted[cell]]
        if not late:
            return self
        where = torch.tensor(late, device=values.device)
        new = fit(values[where], [lengths[cell] for cell in late], self.directions.shape[1])
        fitted = tuple(was or cell in late for cell, was in enumerate(self.fitted))
        return Basis(
            self.mean.index_copy(0, where, new.mean), self.directions.index_copy(0, where, new.directions), fitted
        )

    def of_cells(self, cells: Sequence[int]) -> "Basis":
        """The basis of these cells, in this order."""
        where = torch.tensor(cells, device=self.mean.device)
        return Basis(self.mean[where], self.directions[where], tuple(self.fitted[cell] for cell in cells))


def fit(values: torch.Tensor, lengths: Sequence[int], rank: int) -> Basis:
    """The mean and the `rank` principal directions of each cell's values (C, L, dv), the first lengths[c] of cell c.

    Largest variance first: eigenvectors of the scatter matrix, in float64. A cell with fewer values than directions is
    given orthonormal ones of no variance beside its own. Raises BadInput for values that are not finite.
    """
    cells, longest, width = values.shape
    count = torch.tensor(lengths, device=values.device)
    there = (torch.arange(longest, device=values.device) < count[:, None])[..., None]
    mean = values.new_zeros(cells, width, dtype=torch.float64)
    for begin in range(0, longest, BLOCK):
        block = slice(begin, begin + BLOCK)
        mean += torch.where(there[:, block], values[:, block].double(), 0.0).sum(1)
    mean /= count.clamp(min=1)[:, None]
    scatter = values.new_zeros(cells, width, width, dtype=torch.float64)
    for begin in range(0, longest, BLOCK):
        block = slice(begin, begin + BLOCK)
        centred = torch.where(there[:, block], values[:, block].double() - mean[:, None], 0.0)
        scatter += centred.transpose(1, 2) @ centred
    try:
        vectors = torch.linalg.eigh(scatter).eigenvectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # documented, and not in __all__
        raise BadInput("values that are not finite: no basis can be fitted to them") from None
    directions = vectors[..., width - rank :].flip(-1).transpose(1, 2)
    fitted = tuple(length > 0 for length in lengths)
    return Basis(mean.to(values.dtype), directions.to(values.dtype).contiguous(), fitted)
