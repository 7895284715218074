"""A layer's rotary embedding, forwards and backwards: queries and keys as they were before it, or elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

# Architectures whose rotary embedding was held against their own projections: coordinate i is paired with
# coordinate i + r/2, every layer has it, and it lives in the decoder's rotary_emb.
KNOWN = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "gemma2", "gemma3_text", "phi3")


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotary embedding of one layer: the first r coordinates turn with the position, the other d - r pass.

    Coordinates i and i + r/2 are the pair that angle i turns. parameters: called at each use, gives the angles a
    position adds, (r/2,), and the factor that multiplies cosine and sine (yarn, longrope; 1 elsewhere), which does
    not reach the coordinates that pass. It is a call because frequencies may change with the length that was read
    (dynamic, longrope): what a pass used is what stands in the model after it.

    All results are float32, whatever the model's dtype: in bf16 the model rounds cosine, sine and product, and
    `unrotate` gives its queries back to that rounding. Source: RoFormer (arXiv 2104.09864), with the pairing of
    transformers.
    """

    parameters: Callable[[], tuple[torch.Tensor, float]]

    def rotate(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Vectors (..., n, d) before the embedding, as they are after it at positions (..., n), which broadcast."""
        cosine, sine, scaling = self._angles(positions)
        return _turned(vectors.float(), cosine * scaling, sine * scaling)

    def unrotate(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Inverse of `rotate`: vectors (..., n, d) after the embedding at positions (..., n), as they were before."""
        cosine, sine, scaling = self._angles(positions)
        return _turned(vectors.float(), cosine / scaling, -sine / scaling)

    def mean_matrix(self, positions: torch.Tensor, d: int) -> torch.Tensor:
        """(..., d, d): mean over positions (..., n) of the matrices M with rotate(x) = M x, the scaling among them."""
        cosine, sine, scaling = self._angles(positions)
        cosine, sine = (cosine * scaling).mean(-2, keepdim=True), (sine * scaling).mean(-2, keepdim=True)
        unit = torch.eye(d, device=positions.device)
        return _turned(unit, cosine, sine).transpose(-1, -2)  # row i of the turned unit matrix is M e_i

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Cosine and sine of (..., n, r/2), and the scaling."""
        frequencies, scaling = self.parameters()
        angles = positions[..., None].float() * frequencies.to(device=positions.device, dtype=torch.float32)
        return angles.cos(), angles.sin(), scaling


def rotary_of(model: PreTrainedModel, layer: int) -> Rotary | None:
    """The rotary embedding of a layer of the model, whole or decoder alone; None: it has none, or one unknown here.

    Models with an embedding per type of layer (Gemma 3: full and sliding) give the one of this layer's type.
    """
    config = model.config.get_text_config()
    module = getattr(model.get_decoder(), "rotary_emb", None)
    if module is None or config.model_type not in KNOWN:
        return None
    prefix = f"{config.layer_types[layer]}_" if isinstance(module.rope_type, dict) else ""

    def parameters() -> tuple[torch.Tensor, float]:
        return getattr(module, f"{prefix}inv_freq"), float(getattr(module, f"{prefix}attention_scaling"))

    return Rotary(parameters)


def _turned(vectors: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Each pair of the leading coordinates turned; cosine and sine (..., n, r/2) broadcast."""
    half = cosine.shape[-1]
    first, second, passed = vectors[..., :half], vectors[..., half : 2 * half], vectors[..., 2 * half :]
    turned = first * cosine - second * sine, second * cosine + first * sine
    return torch.cat([*turned, passed.expand(*turned[0].shape[:-1], passed.shape[-1])], dim=-1)
