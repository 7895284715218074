"""What kvpress's and R-KV's own code gives for small made-up inputs. Runs in the environment of `make peers`.

.venv-kvpress/bin/python peers/kvpress/scores.py R-KV tests/data/peer-scores.json

R-KV: a checkout of github.com/Zefan-Cai/R-KV (at the commit that the target names). Imports nothing of ours; the inputs
are those of `made`, which tests/test_scores_more.py makes again. Output: {"versions": {package: version or commit},
"compactor": [KV head][entry], those between the 8 first and the 4 last alone; "criticalkv": [KV head][entry], null
where the first stage chose; "rkv": [KV head][entry], those before the window}, rounded to 7 significant digits.
"""

import importlib
import importlib.metadata
import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch
from kvpress import CompactorPress, CriticalKVPress
from kvpress.presses import leverage_press, non_causal_attention_press
from kvpress.presses.scorer_press import ScorerPress
from transformers.models.llama.modeling_llama import rotate_half

PACKAGES = ("kvpress", "transformers", "torch")
TOKENS, KV_HEADS, GROUP, D, MODEL = 45, 2, 2, 6, 7
SKETCH, CHUNK, RATIO = 4, 14, 0.6
BUDGET, WINDOW, LAMBDA = 20, 8, 0.1
SINKS, RECENT = 8, 4


def main(checkout: Path, target: Path) -> None:
    """Write the numbers of the three methods."""
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    versions = {
        name: importlib.metadata.version(name).partition("+")[0] for name in ("kvpress", "transformers", "torch")
    }
    answer = {
        "versions": {**versions, "Zefan-Cai/R-KV": commit.stdout.strip()},
        "compactor": compactor(),
        "criticalkv": criticalkv(),
        "rkv": rkv(checkout),
    }
    target.write_text(json.dumps(answer, separators=(",", ":")) + "\n", "utf-8")


def made(offset: int, *shape: int) -> torch.Tensor:
    """Numbers between -1.5 and 1.5 that look random and are the same everywhere."""
    i = torch.arange(math.prod(shape), dtype=torch.int64) + offset
    return ((((i * i * 7919 + 13 * i) % 1009).double() / 1009 - 0.5) * 3).float().reshape(shape)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values; queries and keys before RoPE."""
    queries, keys = made(5000, 1, KV_HEADS * GROUP, TOKENS, D), made(1, 1, KV_HEADS, TOKENS, D)
    return queries, keys, made(9000, 1, KV_HEADS, TOKENS, D)


def compactor() -> list[list[float | None]]:
    """CompactorPress with the sketch and the projections handed to it."""
    queries, keys, values = inputs()
    angles = torch.arange(TOKENS)[:, None].float() * torch.tensor([1.0, 0.1, 0.01])
    cosine, sine = (torch.cat([x, x], -1)[None] for x in (angles.cos(), angles.sin()))
    turned = keys * cosine[:, None] + rotate_half(keys) * sine[:, None]
    middle = slice(SINKS, TOKENS - RECENT)
    leverage_press.get_prerope_key_states = lambda module, hidden: keys[:, :, middle]
    non_causal_attention_press.get_prerope_query_states = lambda module, hidden: queries[:, :, middle]
    own, torch.randn = torch.randn, lambda *shape, **options: made(12000, 1, KV_HEADS, D, SKETCH)
    press = CompactorPress(compression_ratio=RATIO, chunk_size=CHUNK, sketch_dimension=SKETCH)
    try:
        found = press.score(
            None, torch.zeros(1, TOKENS, 1), turned, values, None, {"position_embeddings": (cosine, sine)}
        )
    finally:
        torch.randn = own
    return rounded(found[0, :, middle])


def criticalkv() -> list[list[float | None]]:
    """CriticalKVPress over a base of made-up scores."""

    class Base(ScorerPress):
        def score(self, *_: Any, **__: Any) -> torch.Tensor:
            return made(700, 1, KV_HEADS, TOKENS).abs()

    press = CriticalKVPress(Base(1 - BUDGET / TOKENS))
    heads = KV_HEADS * GROUP
    module = types.SimpleNamespace(
        config=types.SimpleNamespace(num_attention_heads=heads, head_dim=D, hidden_size=MODEL),
        o_proj=types.SimpleNamespace(weight=made(3000, MODEL, heads * D)),
        num_key_value_groups=GROUP,
    )
    _, keys, values = inputs()
    return rounded(press.score(module, None, keys, values, None, {})[0])


def rkv(checkout: Path) -> list[list[float | None]]:
    """What R1KV ranks the entries before the window by; queries and keys count as they are."""
    root, package = types.ModuleType("rkv_code"), types.ModuleType("rkv_code.compression")
    root.__path__ = [str(checkout / "rkv")]
    package.__path__ = [str(checkout / "rkv" / "compression")]
    # under other names: its own __init__ files import what is not installed, and a module that is not there
    sys.modules |= {"rkv_code": root, "rkv_code.compression": package}
    utils = importlib.import_module("rkv_code.utils")
    package.cal_similarity = utils.cal_similarity
    package.compute_attention_scores = utils.compute_attention_scores
    method = importlib.import_module("rkv_code.compression.r1_kv").R1KV(BUDGET, WINDOW, mix_lambda=LAMBDA)
    queries, keys, values = inputs()
    seen: list[torch.Tensor] = []
    own = torch.Tensor.topk

    def watched(scores: torch.Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(scores)
        return own(scores, *rest, **options)

    torch.Tensor.topk = watched
    try:
        method.update_kv(keys, queries, values)
    finally:
        torch.Tensor.topk = own
    return rounded(seen[0][0])


def rounded(scores: torch.Tensor) -> list[list[float | None]]:
    """(K, L) as lists; None for the largest number there is."""
    largest = torch.finfo(torch.float32).max
    return [[None if x == largest else float(f"{x:.7g}") for x in head] for head in scores.tolist()]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
