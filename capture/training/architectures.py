"""Small models of four families, and the warm starts between them (derivations ours).

Only Qwen3 is trained from nothing: under the same curriculum the architectures without QK-norm, and OLMo-2,
learned retrieval late, partly or not at all. The others start from the trained Qwen3 checkpoint, rewritten
in their own terms. Write x for the residual stream, n(x) = x / rms(x), g for a norm's weight, E[.] for a
mean over a batch of task sequences. Qwen3 computes q = g_q n(W_q (g n(x))) per head, x <- x + W_o
attention, and with y = g' n(x) the MLP x <- x + W_down(silu(W_gate y) * W_up y).

Qwen2 has no QK-norm, but biases. n(W_q y) = W_q y / rms(W_q y), so W_q <- diag(g_q) W_q / E[rms(W_q y)]
head by head, and W_k likewise: exact but for the spread of the rms. Then the mean moves into the bias. With
w the vector of least E[(w.y)^2] among those with w.E[y] = 1, the change b = W E[y], W <- W - b w' leaves
E[W y + b] as it was; w = C^-1 E[y] / (E[y]' C^-1 E[y]) with C = E[y y']. Small noise is added to the
biases.

Gemma3 multiplies embeddings by sqrt(d): E <- E / sqrt(d), and the last norm becomes sqrt(d) g (tied, so the
logits do not change). Its norms use 1 + weight: weight <- g - 1. gelu(z / 1.702) is nearly silu(z) / 1.702,
so W_gate <- W_gate / 1.702 and W_down <- 1.702 W_down. Its norms after attention and MLP get 1 + weight =
E[rms(output)], exact but for the spread of the rms. query_pre_attn_scalar = head_dim leaves the scale.
Windows are imposed as they are.

Olmo2 has no norm before attention and MLP: every projection that reads y = g n(x) becomes W diag(g) /
E[rms(x)]. In q and k the QK-norm, which spans all heads, cancels rms(x), so they are exact but for the
ratio of a head's rms to that of all heads, which goes into the norm's weight: g_q E[rms of all / rms of the
head]. Norms after attention and MLP as for Gemma3. Key and value heads are repeated (this size has no
groups). The output matrix is untied: a copy of the embedding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from capture.training.tasks import PAD, START, STOP, VOCABULARY
from data.errors import BadInput

Seen = dict[str, tuple[torch.Tensor, torch.Tensor]]  # a module's input and output, both (batch, length, width)
State = dict[str, torch.Tensor]

FAMILIES = ("qwen", "qwen3", "olmo", "gemma")
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, CONTEXT, WINDOW = 4, 128, 4, 2, 64, 320, 1024, 128
GEMMA_LAYERS = ["sliding_attention", "full_attention"] * (LAYERS // 2)
GELU_SCALE = 1.702  # gelu(z / GELU_SCALE) is nearly silu(z) / GELU_SCALE
RIDGE = 1e-3  # share of the mean diagonal added to a second moment before it is inverted


def create(family: str) -> PreTrainedModel:
    """A new model of the family with its default initial weights, drawn from torch's generator.

    Raises BadInput for a family that is not one of FAMILIES.
    """
    rope = {"rope_theta": 1e4, "rope_type": "default"}
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": START,
        "eos_token_id": STOP,
        "pad_token_id": PAD,
        "rope_parameters": rope,
        "attn_implementation": "sdpa",
    }
    if family == "qwen":
        return Qwen2ForCausalLM(Qwen2Config(**common))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**common))
    if family == "olmo":
        own = {"num_key_value_heads": HEADS, "tie_word_embeddings": False}
        return Olmo2ForCausalLM(Olmo2Config(**common | own))
    if family == "gemma":
        windows = {
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": WINDOW,
            "layer_types": GEMMA_LAYERS,
            "rope_parameters": {kind: dict(rope) for kind in ("full_attention", "sliding_attention")},
        }
        return Gemma3ForCausalLM(Gemma3TextConfig(**common | windows))
    raise BadInput(f"no embedded family {family!r}: expected one of {', '.join(FAMILIES)}")


def convert(source: PreTrainedModel, family: str, ids: torch.Tensor, bias_noise: float = 0.05) -> PreTrainedModel:
    """The trained Qwen3 model as a model of family qwen, gemma or olmo (derivations above).

    ids (batch, length) are read to take the means; bias_noise is the scale of the noise on Qwen2's biases.
    """
    model = create(family)
    parts = ["input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj"]
    parts += ["self_attn.o_proj", "mlp"]
    seen = observe(source, ids, [f"model.layers.{i}.{part}" for i in range(LAYERS) for part in parts])
    old = {name: tensor.detach().clone().float() for name, tensor in source.state_dict().items()}
    new = dict(old)
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        if family == "qwen":
            _qwen_layer(at, old, new, seen, bias_noise)
        elif family == "gemma":
            _gemma_layer(at, old, new, seen)
        elif family == "olmo":
            _olmo_layer(at, old, new, seen)
    if family == "gemma":
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            new[name] = old["model.embed_tokens.weight"] / WIDTH**0.5
        new["model.norm.weight"] = old["model.norm.weight"] * WIDTH**0.5 - 1
    model.load_state_dict(new)
    model.tie_weights()
    return model


def _qwen_layer(at: str, old: State, new: State, seen: Seen, bias_noise: float) -> None:
    reads = seen[at + "self_attn.q_proj"][0][:, 1:].flatten(0, 1)
    mean = reads.mean(0)
    w = least_functional(mean, reads)
    for n in "qkv":
        weight = old[f"{at}self_attn.{n}_proj.weight"]
        if n != "v":
            heads = _heads(seen[f"{at}self_attn.{n}_proj"][1])
            gain = new.pop(f"{at}self_attn.{n}_norm.weight")
            weight = weight * (gain / rms(heads).mean((0, 1))[:, None]).reshape(-1, 1)
        bias = weight @ mean
        new[f"{at}self_attn.{n}_proj.weight"] = weight - torch.outer(bias, w)
        new[f"{at}self_attn.{n}_proj.bias"] = bias + bias_noise * torch.randn_like(bias)


def _gemma_layer(at: str, old: State, new: State, seen: Seen) -> None:
    new[at + "input_layernorm.weight"] = old[at + "input_layernorm.weight"] - 1
    new[at + "pre_feedforward_layernorm.weight"] = old[at + "post_attention_layernorm.weight"] - 1
    new[at + "post_attention_layernorm.weight"] = _output_scale(seen[at + "self_attn.o_proj"]) - 1
    new[at + "post_feedforward_layernorm.weight"] = _output_scale(seen[at + "mlp"]) - 1
    for n in "qk":
        new[f"{at}self_attn.{n}_norm.weight"] = old[f"{at}self_attn.{n}_norm.weight"] - 1
    new[at + "mlp.gate_proj.weight"] = old[at + "mlp.gate_proj.weight"] / GELU_SCALE
    new[at + "mlp.down_proj.weight"] = old[at + "mlp.down_proj.weight"] * GELU_SCALE


def _olmo_layer(at: str, old: State, new: State, seen: Seen) -> None:
    before_attention, before_mlp = (
        new.pop(at + "input_layernorm.weight"),
        old[at + "post_attention_layernorm.weight"],
    )
    for n in "qkv":
        weight = old[f"{at}self_attn.{n}_proj.weight"] * before_attention / rms(seen[at + "input_layernorm"][0]).mean()
        if n != "q":
            grouped = weight.unflatten(0, (KV_HEADS, HEAD_DIM))
            weight = grouped.repeat_interleave(HEADS // KV_HEADS, 0).flatten(0, 1)
        new[f"{at}self_attn.{n}_proj.weight"] = weight
    for n in "qk":
        heads = _heads(seen[f"{at}self_attn.{n}_proj"][1])
        ratio = (rms(heads.flatten(-2))[..., None] / rms(heads)).mean((0, 1))
        ratio = ratio.repeat_interleave(HEADS // len(ratio))
        gain = old[f"{at}self_attn.{n}_norm.weight"]
        new[f"{at}self_attn.{n}_norm.weight"] = torch.outer(ratio, gain).flatten()
    for n in ("gate", "up"):
        weight = old[f"{at}mlp.{n}_proj.weight"] * before_mlp / rms(seen[at + "post_attention_layernorm"][0]).mean()
        new[f"{at}mlp.{n}_proj.weight"] = weight
    new[at + "post_attention_layernorm.weight"] = _output_scale(seen[at + "self_attn.o_proj"])
    new[at + "post_feedforward_layernorm.weight"] = _output_scale(seen[at + "mlp"])


def rms(x: torch.Tensor) -> torch.Tensor:
    """Root mean square over the last axis."""
    return x.float().pow(2).mean(-1).sqrt()


def least_functional(target: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The vector w (d,) with w . target = 1 and least mean (w . y)^2 over the rows y of others (n, d)."""
    moment = others.T @ others / len(others)
    moment += RIDGE * moment.diagonal().mean() * torch.eye(len(moment))
    w: torch.Tensor = torch.linalg.solve(moment, target)
    return w / (w @ target)


def observe(model: PreTrainedModel, ids: torch.Tensor, wanted: Sequence[str]) -> Seen:
    """Input and output of the named modules while the model reads ids (batch, length)."""
    seen: Seen = {}

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def note(module: torch.nn.Module, given: tuple[torch.Tensor, ...], made: torch.Tensor) -> None:
            seen[name] = (given[0].detach().float(), made.detach().float())

        return model.get_submodule(name).register_forward_hook(note)

    hooks = [watch(name) for name in wanted]
    try:
        with torch.no_grad():
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _heads(projected: torch.Tensor) -> torch.Tensor:
    """(batch, length, heads * head_dim) as (batch, length, heads, head_dim)."""
    heads: torch.Tensor = projected.unflatten(-1, (-1, HEAD_DIM))
    return heads


def _output_scale(seen: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean rms of a module's output, as a norm's weight (WIDTH,)."""
    return torch.full((WIDTH,), rms(seen[1]).mean().item())
