"""One dense pass of a model, handed to many methods: evicting changes nothing about the pass that it follows.

While a prompt is read in one pass, every layer attends to all of it, and whatever a method then evicts is evicted from
the cache alone. The queries, keys and values of that pass are therefore the same for every method, and so are its
logits. `recorded` keeps them; inside `replayed` the model's layers hand them on instead of computing them again, so
that a run on it holds what it would have held, but for the rounding of one attention function against another.
Source: ours.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from capture.attention import LayerAttention, capturing
from data import BadInput


@dataclass(frozen=True, eq=False)
class Recording:
    """A dense pass over (B, N) tokens without padding: what each layer's attention saw, and the last layer's output.

    layers: one LayerAttention per layer, without its output; output (B, N, width): the last layer's, before the last
    norm.
    """

    layers: tuple[LayerAttention, ...]
    output: torch.Tensor

    def first(self, tokens: int) -> "Recording":
        """The pass over the first `tokens` tokens alone: nothing in it depends on later ones."""
        cut = tuple(
            replace(x, query=x.query[:, :, :tokens], key=x.key[:, :, :tokens], value=x.value[:, :, :tokens])
            for x in self.layers
        )
        return Recording(cut, self.output[:, :tokens])


@torch.inference_mode()
def recorded(model: PreTrainedModel, ids: torch.Tensor) -> Recording:
    """Read ids (B, N), no padding, with the model as it is; raises BadInput if its attention cannot be replaced."""
    layers: list[LayerAttention] = []
    outputs: list[torch.Tensor] = []

    def keep(seen: LayerAttention) -> None:
        layers.append(replace(seen, output=seen.output.new_empty(0)))

    decoder = _decoder(model)
    hook = decoder.layers[-1].register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        with capturing(model, keep):
            decoder(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    return Recording(tuple(layers), outputs[0])


@contextmanager
def replayed(model: PreTrainedModel, recording: Recording) -> Iterator[None]:
    """While open, the model reads the recorded tokens, and only these, without computing; then it is as it was.

    Raises BadInput, when the model is run, for a pass over another number of tokens or sequences.
    """
    decoder = _decoder(model)
    own = decoder.layers
    stand_ins = [_StandIn(layer, seen, recording.output) for layer, seen in zip(own, recording.layers, strict=True)]
    decoder.layers = nn.ModuleList(stand_ins)
    try:
        yield
    finally:
        decoder.layers = own


class _StandIn(nn.Module):
    """A decoder layer that knows its queries, keys and values, and what the last layer will say."""

    def __init__(self, layer: nn.Module, seen: LayerAttention, output: torch.Tensor) -> None:
        super().__init__()
        self._held = (layer, seen, output)  # in a tuple: the layer is no part of this module

    def __getattr__(self, name: str) -> Any:
        """What a model asks of its layers beside running them, such as their kind of attention."""
        held = self.__dict__.get("_held")
        return super().__getattr__(name) if held is None else getattr(held[0], name)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
        """Store the recorded keys and values, call the attention function, and answer with the last layer's output."""
        layer, seen, output = self._held
        if hidden.shape[:2] != output.shape[:2]:
            raise BadInput(f"a pass over {tuple(hidden.shape[:2])} tokens: {tuple(output.shape[:2])} were recorded")
        module: Any = layer.self_attn
        cache: Any = others["cache"] if "cache" in others else others["past_key_values"]
        key, value = cache.update(seen.key, seen.value, seen.layer)
        attend = AttentionInterface()[module.config._attn_implementation]
        given = {"attended": seen.output} | ({} if seen.softcap is None else {"softcap": seen.softcap})
        attend(module, seen.query, key, value, attention_mask, scaling=seen.scale, sliding_window=seen.window, **given)
        return output


def _decoder(model: PreTrainedModel) -> Any:
    return model.get_decoder()
