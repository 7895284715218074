"""The attention function and mask that a model runs with on a ragged cache.

transformers' mask tells, for every query, the first and last slot that it sees, whatever rule (causality, windows,
padding) it comes from; the entries that a cache still holds are looked up in that interval by their own slot. So
windows are true distances and positions are true positions however much was evicted.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import scaled_dot_product_attention

from capture.attention import QUERY_BLOCK, emitted_weights
from eviction.basis import Basis
from eviction.ragged import Padded


@dataclass(frozen=True, eq=False)
class Queries:
    """The tokens of a pass.

    first, last (B, T) int64: slots of the first and last key that each sees; last < first for padding. start: slot of
    the first of them. plain: every one sees all slots up to its own, so nothing has to be looked up.
    real: (B, T) bool, which are tokens and not padding, or None if all are.
    """

    first: torch.Tensor
    last: torch.Tensor
    start: int
    plain: bool
    real: torch.Tensor | None

    @cached_property
    def slots(self) -> torch.Tensor:
        """(T,) int32."""
        end = self.start + self.first.shape[1]
        return torch.arange(self.start, end, dtype=torch.int32, device=self.first.device)


def queries_of(mask: torch.Tensor, start: int, plain: bool) -> Queries:
    """From the registered mask (B, 1, T, 2); start: slot of the first query."""
    first, last = mask[:, 0, :, 0], mask[:, 0, :, 1]
    if plain:
        return Queries(first, last, start, plain=True, real=None)
    slots = torch.arange(start, start + first.shape[1], device=mask.device)
    real = (last == slots) & (first <= slots)
    return Queries(first, last, start, plain=False, real=None if bool(real.all()) else real)


def ragged_attention(
    query: torch.Tensor,
    held: Padded,
    all_seen: bool,
    queries: Queries,
    scale: float,
    softcap: float | None,
    basis: Basis | None = None,
) -> tuple[torch.Tensor, int]:
    """Attention over held entries, those of the pass included; with the bytes of the mask it needed.

    query (B, H, T, d); held: B * K cells; all_seen: no slot of a held entry is negative. Returns (B, T, H, dv). An
    entry that stands for N tokens weighs as N entries of its key: log N is added to its logit, after the soft-cap.
    basis: what the held values are codes in; the codes are averaged, and the average alone is decoded.
    """
    batch, heads, count, width = query.shape
    cells, longest = held.keys.shape[:2]
    kv_heads = cells // batch
    groups = heads // kv_heads
    keys = held.keys.view(batch, kv_heads, longest, -1)
    values = held.values.view(batch, kv_heads, longest, -1)
    equal = len(set(held.lengths)) == 1
    everything = count == 1 and queries.plain and all_seen and equal
    slots = None if everything else held.slots.view(batch, kv_heads, 1, longest)
    log_mass = None if held.mass is None else held.mass.float().log().view(batch, kv_heads, 1, longest)
    # a padding query reads its own slot, so that its row stays finite; no token ever sees it
    nothing = None if queries.plain else queries.last < queries.first
    outputs, mask_bytes = [], 0
    mass_bytes = 0 if log_mass is None else log_mass.nbytes
    for begin in range(0, count, QUERY_BLOCK):
        rows = slice(begin, begin + QUERY_BLOCK)
        # where the pass's own entries are the last of every cell, those after the block's own no row of it sees
        end = longest - max(0, count - begin - QUERY_BLOCK) if equal and queries.real is None else longest
        key, value = keys[:, :, :end], values[:, :, :end]
        visible = None
        if slots is not None:
            first, last = queries.first[:, None, rows, None], queries.last[:, None, rows, None]
            visible = (slots[..., :end] >= first) & (slots[..., :end] <= last)
            if nothing is not None:
                visible |= nothing[:, None, rows, None]
        part = query[:, :, rows].reshape(batch, kv_heads, groups, -1, width)
        if softcap is None and log_mass is None:
            output, made = _by_torch(part, key, value, visible, scale)
        else:
            part = part.flatten(2, 3)  # a KV head's queries, group by group
            shown, made = torch.ones((), dtype=torch.bool, device=keys.device), 0
            if visible is not None:
                shown = visible[:, :, None].expand(-1, -1, groups, -1, -1).reshape(batch, kv_heads, -1, end)
                made = shown.nbytes
            if log_mass is None:
                output = emitted_weights(part, key, shown, scale, softcap) @ value
            else:
                output = _weights(part, key, shown, scale, softcap, log_mass[..., :end]) @ value
        mask_bytes = max(mask_bytes, made)
        if basis is not None:
            output = basis.decoded(output.flatten(0, 1))
        outputs.append(output.reshape(batch, heads, -1, output.shape[-1]))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), mask_bytes + mass_bytes


def _by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, int]:
    """Attention (B, K, G * T, dv) of query (B, K, G, T, d) by torch's kernel, and the bytes of the mask made for it.

    visible (B, K, T, L) bool, None: everything. The mask is made of numbers here: of booleans the kernel makes it anew
    for each query head.
    """
    mask = None
    if visible is not None:
        mask = torch.where(visible, query.new_zeros(()), query.new_full((), -torch.inf))
    made = 0 if mask is None else mask.nbytes
    if query.shape[3] == 1:  # the group's query heads are rows of one product
        return scaled_dot_product_attention(query.flatten(2, 3), key, value, attn_mask=mask, scale=scale), made
    batch, kv_heads, groups = query.shape[:3]
    keys, values = (x.flatten(0, 1)[:, None].expand(-1, groups, -1, -1) for x in (key, value))
    by_head = None if mask is None else mask.flatten(0, 1)[:, None]
    output = scaled_dot_product_attention(query.flatten(0, 1), keys, values, attn_mask=by_head, scale=scale)
    return output.reshape(batch, kv_heads, -1, output.shape[-1]), made


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float | None,
    log_mass: torch.Tensor,
) -> torch.Tensor:
    """emitted_weights with log_mass (..., 1, m) float32 added to the logits; (..., n, m)."""
    # float32: in bf16 the logarithm of a few hundred is off by a hundredth, and so is the logit that it is added to
    logits = query.float() @ key.float().transpose(-1, -2) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = (logits + log_mass).masked_fill(~visible, -torch.inf)
    return torch.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)
