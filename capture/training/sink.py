"""An auxiliary loss that teaches attention heads to rest on <s> at position 0, as large models do by themselves.

Trained for minutes, models of this size give position 0 almost none of their attention (.001 to .003),
where large ones give it a fifth to a half; rules that keep the first tokens would then mean nothing. The
loss is the mean, over the heads of the layers without a sliding window, of max(0, log(target / a)), with a
the head's mean weight at position 0 over a few sampled query rows. The logarithm keeps its gradient alive
when a is tiny; a head above the target feels nothing, and one that needs its mass elsewhere can pay. It is
a soft push: how much mass each checkpoint ended with is measured afterwards.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ROWS = 32  # query rows sampled at each step
NAME = "sdpa_with_sink"
SMALLEST = 1e-8  # weights below this count as this: keeps the logarithm finite


class Sink:
    """Watches a model's attention: after each forward pass in training, loss() is what to add to its loss."""

    def __init__(self, model: PreTrainedModel, target: float) -> None:
        """Make the model use this attention; target in (0, 1] is the weight asked of each head."""
        self.target = target
        self.means: list[torch.Tensor] = []  # per layer of the last forward pass, (heads,)
        AttentionInterface.register(NAME, self._forward)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)

    def _forward(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float = 1.0,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """SDPA attention that notes the mean weight of position 0; query (batch, heads, length, head_dim)."""
        if module.training and getattr(module, "sliding_window", None) is None:
            length = query.shape[2]
            rows = torch.randint(length // 8, length, (ROWS,))
            keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            scores = (query[:, :, rows] @ keys.transpose(-1, -2)).float() * scaling
            scores = scores.masked_fill(torch.arange(length) > rows[:, None], -torch.inf)
            self.means.append(scores.softmax(-1)[..., 0].mean((0, 2)))
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)

    def loss(self) -> torch.Tensor:
        """The auxiliary loss of the last forward pass, which is then forgotten."""
        means = torch.cat(self.means)
        self.means = []
        return (self.target / means.clamp(min=SMALLEST)).log().clamp(min=0).mean()
