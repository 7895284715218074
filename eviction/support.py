"""Which models can be evicted from, and the shape of what their caches hold."""

import inspect

import torch
from transformers import PreTrainedModel

from data import BadInput
from eviction.method import State
from eviction.ragged import LayerShape

CACHE_NAMES = ("cache", "past_key_values")  # what transformers calls and called the argument of a model's forward
PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # weights that are what they say, unquantised
LAYER_TYPES = {"full_attention", "sliding_attention"}


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module whose forward is handed the cache. Raises BadInput if the model is not one to evict from."""
    if not isinstance(model, PreTrainedModel):
        raise BadInput(f"{type(model).__name__}: expected a model of transformers")
    if model.config.is_encoder_decoder:
        raise BadInput(f"{type(model).__name__}: encoder-decoder models are not supported")
    decoder = model.base_model
    if not isinstance(decoder, PreTrainedModel) or not any(takes(decoder, name) for name in CACHE_NAMES):
        raise BadInput(f"{type(model).__name__}: its forward takes no cache: it is not supported")
    return decoder


def layer_shapes(model: PreTrainedModel, state: State) -> list[LayerShape]:
    """What every layer will hold an entry of, from the configuration; held against the tensors when they come.

    Raises BadInput for layers that are neither full nor sliding-window attention, and for a state that they do not fit.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise BadInput(f"{type(model).__name__}: it has no attention layers that keep keys and values")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    unknown = sorted(set(kinds) - LAYER_TYPES)
    if unknown:
        raise BadInput(f"{type(model).__name__}: layers of type {', '.join(unknown)} are not supported")
    if window is not None and window < 2 and "sliding_attention" in kinds:
        raise BadInput(f"{type(model).__name__}: a sliding window of {window}: its layers have nothing to keep")
    rank, size = state.value_rank(width), model.dtype.itemsize
    read = 2 * width * size
    held = read if rank is None else (width + rank) * size
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return [LayerShape(kv_heads, held, mine, None if rank is None else read) for mine in windows]


def output_weight_of(model: PreTrainedModel, layer: int) -> torch.Tensor | None:
    """(H, d_model, dv): a view of what the layer's output projection multiplies each query head's output with.

    None where the attention has no plain `o_proj` that takes the heads side by side (a quantised one, another name).
    """
    layers = getattr(model.get_decoder(), "layers", None)
    attention = None if layers is None else getattr(layers[layer], "self_attn", None)
    weight = getattr(getattr(attention, "o_proj", None), "weight", None)
    heads = model.config.get_text_config().num_attention_heads
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or weight.dtype not in PLAIN or weight.shape[1] % heads:
        return None
    by_head: torch.Tensor = weight.detach().unflatten(1, (heads, -1))
    return by_head.transpose(0, 1)


def takes(model: PreTrainedModel, argument: str) -> bool:
    """Whether the model's forward has an argument of that name."""
    return argument in inspect.signature(model.forward).parameters
