"""Numbers of entries that a score carries from pass to pass, while entries come and go."""

import torch

from eviction.method import Cells


def carried(cells: Cells, name: str) -> torch.Tensor:
    """(B, K, L) float32: what `carry` left under that name for each held entry, 0 for those it knows nothing of."""
    if name not in cells.memory:
        return torch.zeros(cells.positions.shape, device=cells.positions.device)
    numbers, positions = cells.memory[name], cells.memory[f"{name}_positions"].long()
    slots = max(cells.seen)  # one more, at the end, for what is not held
    spread = numbers.new_zeros(*numbers.shape[:2], slots + 1)
    spread.scatter_(-1, torch.where(positions >= 0, positions, slots), numbers)
    found = spread.gather(-1, torch.where(cells.held, cells.positions, slots))
    return torch.where(cells.held, found, 0.0)


def carry(cells: Cells, name: str, numbers: torch.Tensor) -> None:
    """Keep (B, K, L) numbers of the held entries, and where these are: 8 bytes an entry."""
    cells.memory[name] = numbers.float()
    cells.memory[f"{name}_positions"] = cells.positions.int()
