"""The attention function and mask that a model runs with while it is captured: exact q, k, v as the model used them.

transformers hands a registered attention function the queries and keys after QK-norm and RoPE and the values,
KV heads unrepeated. It hands over no mask unless one is registered too, and then causality is gone without a
word, so both are registered together here. The mask is kept as one interval of visible keys a query: the
model's own mask rule is evaluated in blocks of queries, so that nothing of size N x N is ever held, whatever
the document's length.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from data import BadInput

QUERY_BLOCK = 256  # queries whose mask (and, with a soft-cap, logits) are held at once
PROBE_TOKENS = 256  # tokens on which the captured model is held against the model's own eager attention

# Relative L2 distance of the last hidden states, captured against eager, above which the capture is refused:
# well above rounding (float32: 1e-6; bf16: a few per cent over 30 layers), well below a dropped feature (0.1
# to 1).
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}

# Tensors that a model may pass beside the mask without changing what attention computes; any other is
# refused.
HARMLESS_TENSORS = {"position_ids", "cache_position"}

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """What one layer's attention saw and returned, as torch tensors of the model's dtype on the model's device.

    query (B, H, N, d) and key (B, K, N, d) after QK-norm and RoPE, value (B, K, N, dv), output (B, N, H, dv)
    before the output projection. first, last (B, N): slots of the first and last key that each query sees;
    last < first where the mask leaves a query nothing (padding). scale: factor of the logits. softcap: c of c
    tanh(logit / c), or None. window: keys of the sliding window, or None.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    scale: float
    softcap: float | None
    window: int | None

    def document(self, batch: int) -> slice:
        """Slots of the batch element's real tokens: those that see themselves; padding on either side is left out."""
        slots = torch.arange(self.first.shape[1], device=self.first.device)
        real = torch.nonzero((self.last[batch] == slots) & (self.first[batch] <= slots)).flatten()
        if real.numel() == 0:
            raise BadInput(f"layer {self.layer}: batch element {batch} has no tokens but padding")
        return slice(int(real[0]), int(real[-1]) + 1)


@contextmanager
def capturing(model: PreTrainedModel, on_layer: Callable[[LayerAttention], None]) -> Iterator[None]:
    """While open, every layer of the model calls on_layer once a forward pass; afterwards the model is as it was.

    Run the model with use_cache=False. The tensors handed over are the model's own and not copies: take what
    is needed and let go. Raises BadInput if the model's attention cannot be replaced. Source: ours.
    """
    name = f"forced_weights_{next(_numbers)}"
    previous = model.config._attn_implementation
    AttentionInterface.register(name, partial(_attend, on_layer))
    AttentionMaskInterface.register(name, visible_intervals)
    try:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise BadInput(
                f"{type(model).__name__} does not let its attention function be replaced: it cannot be captured"
            )
        yield
    finally:
        model.set_attn_implementation(previous)
        # transformers has no way to unregister but its mapping
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


@torch.inference_mode()
def check_faithful(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Hold the captured model against its own eager attention on ids (1, N); the relative distance of their states.

    Raises BadInput if they differ: then the model's attention has a part that this capture does not know, and
    every row would be wrong. States that are not finite are left for the capture to report, by layer.
    """
    ids = ids[:, :PROBE_TOKENS]
    with capturing(model, lambda layer: None):
        captured = model(input_ids=ids, use_cache=False).last_hidden_state.double()
    previous = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        eager = model(input_ids=ids, use_cache=False).last_hidden_state.double()
    finally:
        model.set_attn_implementation(previous)
    if not (captured.isfinite().all() and eager.isfinite().all()):
        return 0.0
    distance = float((captured - eager).norm() / eager.norm())
    tolerance = PROBE_TOLERANCE[model.dtype]
    if distance > tolerance:
        raise BadInput(
            f"{type(model).__name__} with the capture's attention differs from its own eager attention by"
            f" {distance:.2g} (relative), tolerance {tolerance:g}: it cannot be captured faithfully"
        )
    return distance


def visible_intervals(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., object] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: object,
) -> torch.Tensor:
    """The mask, as transformers asks for it: slots of the first and last visible key, (B, 1, q_length, 2) int64.

    A query that sees nothing (left padding) has first = kv_length, last = -1. Raises BadInput if some query's
    visible keys are not one interval, or reach beyond the query.
    """
    slots = torch.arange(q_length, device=device) + q_offset
    unpadded = attention_mask is None or bool(attention_mask.all())
    if mask_function is causal_mask_function and unpadded and kv_offset == 0:
        plain = torch.stack([torch.zeros_like(slots), slots], dim=-1)
        return plain.expand(batch_size, 1, q_length, 2)
    blocks = []
    for start in range(0, q_length, QUERY_BLOCK):
        rows = slots[start : start + QUERY_BLOCK]
        visible = sdpa_mask(
            batch_size=batch_size,
            q_length=rows.numel(),
            kv_length=kv_length,
            q_offset=q_offset + start,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        if visible is None:
            raise BadInput("the model asked for a mask that is not causal: it cannot be captured")
        count = visible.sum(-1)
        first = visible.int().argmax(-1)
        last = kv_length - 1 - visible.int().flip(-1).argmax(-1)
        first = torch.where(count > 0, first, kv_length)
        last = torch.where(count > 0, last, -1)
        if bool(((count > 0) & (last - first + 1 != count)).any()):
            raise BadInput("a query's visible keys are not one interval: this kind of mask cannot be captured")
        if bool((last + kv_offset > rows).any()):
            raise BadInput("a query sees keys after its own: a mask that is not causal cannot be captured")
        blocks.append(torch.stack([first, last], dim=-1))
    return torch.cat(blocks, dim=2)


def _attend(
    on_layer: Callable[[LayerAttention], None],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **other: object,
) -> tuple[torch.Tensor, None]:
    """The registered attention function: attention in row blocks, handed to on_layer with what went into it."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # every attention module of transformers has it
    unknown = sorted(name for name, x in other.items() if isinstance(x, torch.Tensor) and name not in HARMLESS_TENSORS)
    if unknown:
        raise BadInput(f"layer {layer}: attention takes {', '.join(unknown)}, which this capture does not know")
    length = key.shape[2]
    if attention_mask is None or attention_mask.shape[1:] != (1, query.shape[2], 2):
        raise BadInput(f"layer {layer}: the model did not use the registered mask: it cannot be captured")
    if query.shape[2] != length:
        raise BadInput(f"layer {layer}: {query.shape[2]} queries over {length} keys: capture runs without a cache")
    first, last = attention_mask[:, 0, :, 0], attention_mask[:, 0, :, 1]
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    output = attention_over_intervals(module, query, key, value, first, last, scale, softcap)
    on_layer(
        LayerAttention(
            layer=layer,
            query=query,
            key=key,
            value=value,
            output=output,
            first=first,
            last=last,
            scale=scale,
            softcap=softcap,
            window=_window(layer, first, last, sliding_window),
        )
    )
    return output, None


def attention_over_intervals(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention over the intervals, (B, N, H, dv): torch's own kernel, or row blocks of eager with a soft-cap."""
    length = query.shape[2]
    slots = torch.arange(length, device=query.device)
    if softcap is None and bool((first == 0).all()) and bool((last == slots).all()):
        return sdpa_attention_forward(module, query, key, value, None, scaling=scale)[0]
    # A query that sees nothing reads its own key, so that padding stays finite; no real query ever sees
    # padding.
    nothing = last < first
    first, last = torch.where(nothing, slots, first), torch.where(nothing, slots, last)
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        rows = slice(start, start + QUERY_BLOCK)
        low, high = int(first[:, rows].min()), int(last[:, rows].max()) + 1
        columns = slots[low:high]
        visible = (columns >= first[:, rows, None]) & (columns <= last[:, rows, None])
        part = query[:, :, rows], key[:, :, low:high], value[:, :, low:high], visible[:, None]
        if softcap is None:
            blocks.append(sdpa_attention_forward(module, *part, scaling=scale)[0])
        else:
            blocks.append(_soft_capped(*part, scale, softcap))
    return torch.cat(blocks, dim=1)


def _soft_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Eager attention with a soft-cap: no fused kernel has it, and sdpa would drop it. (B, n, H, dv)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    weights = emitted_weights(query, key, visible, scale, softcap)
    return (weights @ value).transpose(1, 2).contiguous()


def emitted_weights(
    query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """Weights as an eager model emits them: logits in the model's dtype, softmax in float32, back to the dtype.

    query (..., n, d), key (..., m, d), visible broadcasting to (..., n, m); returns (..., n, m).
    """
    logits = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~visible, -torch.inf)
    return torch.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)


def _window(layer: int, first: torch.Tensor, last: torch.Tensor, declared: int | None) -> int | None:
    """The layer's sliding window, from the mask; the declared one only where the document is too short to show it."""
    slots = torch.arange(first.shape[1], device=first.device)
    real = (last == slots) & (first <= slots)
    start = torch.where(real, slots, first.shape[1]).min(dim=1, keepdim=True).values
    cut = real & (first > start)
    if not bool(cut.any()):
        return declared if declared is not None and declared >= first.shape[1] else None
    widths = (last - first + 1)[cut]
    if bool((widths != widths[0]).any()):
        raise BadInput(f"layer {layer}: queries see windows of different sizes: this mask cannot be captured")
    return int(widths[0])
