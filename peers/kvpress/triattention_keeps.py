"""What TriAttention's own code scores and keeps of small made-up keys. Imports nothing of ours.

.venv-kvpress/bin/python peers/kvpress/triattention_keeps.py TRIATTENTION tests/data/triattention.json

TRIATTENTION: a checkout of github.com/WeianMao/triattention (at the commit that the target names). The inputs are those
of `made`, which tests/test_triattention.py makes again. Output: {"versions": {package or repository: version or
commit}, "scores": [layer][query head][entry] before the z-score, 7 significant digits, "kept": {mode: [layer][KV head]
of the entries that stay, the pinned prompt's among them}}.
"""

import importlib
import importlib.metadata
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

LAYERS, KV_HEADS, GROUP, D, ENTRIES = 2, 2, 2, 8, 30
PROMPT, BUDGET, SEEN, FURTHEST, SCALING = 5, 14, 71, 64, 1.25
OMEGA = (1.0, 0.1, 0.01, 0.001)
MODES = {"global": {}, "head": {"per_head_pruning": True}, "layer_head": {"per_layer_perhead_pruning": True}}


def made(offset: int, *shape: int) -> torch.Tensor:
    """Numbers between -1.5 and 1.5 that look random and are the same everywhere."""
    i = torch.arange(math.prod(shape), dtype=torch.int64) + offset
    return ((((i * i * 7919 + 13 * i) % 1009).double() / 1009 - 0.5) * 3).float().reshape(shape)


def positions() -> list[int]:
    """Of the entries: a prompt without gaps, and then gaps."""
    return [i if i < PROMPT else PROMPT + 2 * (i - PROMPT) + i % 2 for i in range(ENTRIES)]


def main(checkout: Path, target: Path) -> None:
    """Write scores and what the three modes keep."""
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    sys.path.insert(0, str(checkout))
    code = importlib.import_module("triattention.methods.triattention")
    caches = cache()
    kept, scores = {}, []
    for mode, flags in MODES.items():
        one = compressor(code, flags)
        keep = one.compute_keep_indices(tuple((keys, keys) for keys in caches), prefix_length=PROMPT)
        keep = keep.sort(-1).values.expand(LAYERS, KV_HEADS, BUDGET) if keep.dim() < 3 else keep.sort(-1).values
        kept[mode] = keep.tolist()
    for layer, keys in enumerate(caches):
        found = one._compute_layer_head_scores(keys, torch.tensor(positions()), layer)
        scores.append([[float(f"{x:.7g}") for x in head] for head in found.tolist()])
    versions = {"torch": importlib.metadata.version("torch").partition("+")[0]}
    answer = {
        "versions": {**versions, "WeianMao/triattention": commit.stdout.strip()},
        "scores": scores,
        "kept": kept,
    }
    target.write_text(json.dumps(answer, separators=(",", ":")) + "\n", "utf-8")


def rotary(_: torch.Tensor, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine as transformers' modules give them, scaled."""
    angles = where[..., None].float() * torch.tensor(OMEGA)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * SCALING, angles.sin() * SCALING


def cache() -> list[torch.Tensor]:
    """Keys (1, K, L, d) of each layer, turned at their positions."""
    keys = made(1, LAYERS, 1, KV_HEADS, ENTRIES, D)
    cosine, sine = rotary(keys, torch.tensor(positions()))
    half = torch.cat([-keys[..., D // 2 :], keys[..., : D // 2]], dim=-1)
    return list(keys * cosine + half * sine)


def statistics() -> tuple[torch.Tensor, torch.Tensor]:
    """Mean (layers, H, F) complex and mean magnitude of the queries."""
    shape = (LAYERS, KV_HEADS * GROUP, D // 2)
    mean = torch.complex(made(5000, *shape), made(7000, *shape))
    return mean, mean.abs() + made(9000, *shape).abs()


def compressor(code: Any, flags: dict[str, bool]) -> Any:
    """The code's class with what its constructor would read from a model's folder and a file."""
    mean, magnitude = statistics()
    one = object.__new__(code.TriAttention)
    heads = [(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS * GROUP)]
    one.config = SimpleNamespace(
        device=torch.device("cpu"),
        dtype=torch.float32,
        layer_perhead_aggregation="max",
        allow_prefill_compression=False,
    )
    vars(one).update(
        budget=BUDGET,
        allow_prefill_compression=False,
        normalize_scores=True,
        generator=None,  # no noise
        per_head_pruning=False,
        per_layer_perhead_pruning=False,
        disable_mlr=False,
        disable_trig=False,
        score_aggregation="mean",
        sampled_heads=heads,
        head_stats={
            (layer, head): code.HeadFrequencyStats(mean[layer, head], magnitude[layer, head]) for layer, head in heads
        },
        rotary=rotary,
        rope_style="half",
        attention_scale=SCALING,
        head_dim=D,
        omega=torch.tensor(OMEGA),
        offsets=code.build_geometric_offsets(FURTHEST, torch.device("cpu")),
        freq_scale_sq=torch.full((D // 2,), SCALING**2),
        num_attention_heads=KV_HEADS * GROUP,
        num_key_value_heads=KV_HEADS,
        num_key_value_groups=GROUP,
        cache_positions=positions(),
        cache_positions_per_head=None,
        cache_positions_per_layer_perhead=None,
        absolute_position=SEEN,
    )
    vars(one).update(flags)
    return one


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
