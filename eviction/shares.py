"""Whole numbers of entries shared among cells, to the last one.

Shares are computed in Python's integers: there are as many numbers as KV heads in the model and not as entries, and
no product of them can overflow.
"""

from collections.abc import Sequence

import torch


def apportion(weights: Sequence[int], most: Sequence[int], total: int) -> list[int]:
    """Whole numbers in proportion to the weights that sum to exactly min(total, sum(most)), none above its `most`.

    Where a share would exceed its `most`, that is given, and what is left is shared again among the others in
    proportion to their weights; cells of weight 0 come into it, in equal shares, only when no other can take more.
    Fractions are settled by largest remainder (Hamilton's method), among equal remainders the first cell.
    Source: ours.
    """
    shares = [0] * len(weights)
    for group in ([i for i, w in enumerate(weights) if w > 0], [i for i, w in enumerate(weights) if w == 0]):
        worth = {i: weights[i] or 1 for i in group}
        rest, whole = total - sum(shares), sum(worth.values())
        # filling some cells only raises the shares of the others: what is full stays full
        while full := [i for i, w in worth.items() if most[i] * whole <= rest * w]:
            for i in full:
                shares[i] = most[i]
                rest, whole = rest - most[i], whole - worth.pop(i)
        left = rest
        for i, w in worth.items():
            shares[i] = rest * w // whole
            left -= shares[i]
        for i in sorted(worth, key=lambda i: (-(rest * worth[i] % whole), i))[:left]:
            shares[i] += 1
    return shares


def whole_budget(budgets: Sequence[int], lengths: Sequence[torch.Tensor]) -> int:
    """Entries that these layers may keep together: sum_l K_l budgets_l, or all that they hold if that is less."""
    allowed = sum(budget * length.numel() for budget, length in zip(budgets, lengths, strict=True))
    return min(allowed, sum(flat(lengths)))


def flat(numbers: Sequence[torch.Tensor]) -> list[int]:
    """Per layer (K,) whole numbers as one list, in the order of (layer, head)."""
    return [int(x) for x in torch.cat(list(numbers)).tolist()]


def by_layer(numbers: Sequence[int], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of flat: one int64 tensor per layer, of the shapes and on the device of `like`."""
    together = torch.tensor(numbers, dtype=torch.int64, device=like[0].device)
    return list(together.split([layer.numel() for layer in like]))
