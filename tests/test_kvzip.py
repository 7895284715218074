"""KVzip's score against the model's own eager attention on the context and its replay, and against kvpress's."""

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from data import BadInput
from data.store import CHECKOUT
from eviction import Decode, evict
from eviction.method import Cells, Score, named
from eviction.scores.kvzip import KVzip
from tests.test_run import CONFIGS, TOLERANCE, Oracle, read, small_model
from tests.test_scores import case_of, loop_weights

ROUNDING = 1e-6  # relative to the largest score of the cell, float32 against loops in float64
# The same against kvpress, both float32 and with other kernels: relative to the largest score of the cell, which is
# below 1, while logits reach 30, whose rounding is 2e-6.
PEER_ROUNDING = 1e-5
EMBEDDED = ["qwen", "qwen3", "olmo", "gemma"]
FIRST, BEFORE, AFTER = (31, 32, 33), (41, 42), (51,)
PEER_FILE = Path(__file__).parent / "data" / "kvzip-kvpress-0.5.5.json"


@dataclass(frozen=True)
class Watched(KVzip):
    """KVzip that remembers what it was handed last and what it said."""

    said: dict[int, tuple[Cells, torch.Tensor]] = field(default_factory=dict, compare=False)

    def __call__(self, cells: Cells, rows: Any) -> torch.Tensor:
        scores = super().__call__(cells, rows)
        self.said[cells.layer] = cells, scores
        return scores


def double(name: str) -> PreTrainedModel:
    if name.startswith("embedded_"):
        folder = CHECKOUT / "data" / "models" / name.removeprefix("embedded_")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    return small_model(name, torch.float64)


def lead_of(ids: torch.Tensor, start: int, chunk: int) -> list[int]:
    """The request ahead of the chunk from `start` on: the code's rule, with made-up words."""
    return [*BEFORE, *ids[0, max(start - 8, start - chunk) : start].tolist(), *AFTER] if start else list(FIRST)


@contextmanager
def softmax_in_double() -> Iterator[None]:
    """Eager attention casts its logits to float32, whatever the model's dtype: not here."""
    own = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda logits, dim, dtype=None: own(logits, dim=dim)
    try:
        yield
    finally:
        torch.nn.functional.softmax = own


@torch.inference_mode()
def oracle_scores(model: PreTrainedModel, ids: torch.Tensor, pads: list[int], chunk: int, sinks: int) -> list[Any]:
    """scores[layer][sequence][KV head][position], from one eager pass over context, request and chunk, a chunk."""
    model.set_attn_implementation("eager")
    config = model.config.get_text_config()
    group = config.num_attention_heads // config.num_key_value_heads
    batch, slots = ids.shape
    scores = [
        [[[0.0] * (slots - pad) for _ in range(config.num_key_value_heads)] for pad in pads]
        for _ in range(config.num_hidden_layers)
    ]
    for start in range(0, slots, chunk):
        end = min(start + chunk, slots)
        lead = lead_of(ids, start, chunk)
        width = len(lead) + max(end - max(start, min(pad, end)) for pad in pads)
        lines, masks = [], []
        for b, pad in enumerate(pads):
            again = ids[b, max(start, min(pad, end)) : end].tolist()
            gap = width - len(lead) - len(again)
            lines.append(ids[b].tolist() + [0] * gap + lead + again)
            masks.append([0] * pad + [1] * (slots - pad) + [0] * gap + [1] * (len(lead) + len(again)))
        mask = torch.tensor(masks)
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        given = {"attention_mask": mask, "position_ids": places, "use_cache": False, "output_attentions": True}
        with softmax_in_double():
            everything = model(torch.tensor(lines), **given).attentions
        for layer, weights in enumerate(everything):
            for b, pad in enumerate(pads):
                own = [slot for slot in range(slots, slots + width) if masks[b][slot]]
                part = list(range(max(start, pad), max(end, pad)))
                among = sorted({*range(pad, pad + sinks), *part, *own})
                for head in range(config.num_attention_heads):
                    mine = scores[layer][b][head // group]
                    for row in own:
                        line = weights[b, head, row].tolist()  # nothing after the row itself
                        total = sum(line[slot] for slot in among)
                        for slot in part:
                            mine[slot - pad] = max(mine[slot - pad], line[slot] / total)
    return scores


def assert_said(said: dict[int, Any], wanted: list[Any], sinks: int, tolerance: float = ROUNDING) -> int:
    """What the score said of every held entry is the oracle's; how many entries were compared."""
    compared = 0
    for layer, (cells, scores) in said.items():
        for b, of_sequence in enumerate(wanted[layer]):
            for k, line in enumerate(of_sequence):
                n = int(cells.lengths[b, k])
                positions = cells.positions[b, k, :n].tolist()
                largest = max((line[p] for p in positions), default=0.0)
                for entry, position in enumerate(positions):
                    got = float(scores[b, k, entry])
                    if position < sinks:
                        assert got == torch.inf
                        continue
                    assert abs(got - line[position]) <= tolerance * largest, (layer, b, k, position)
                    compared += 1
    return compared


@pytest.mark.parametrize("name", [*CONFIGS, *(f"embedded_{x}" for x in EMBEDDED)])
def test_scores_are_the_models_own_weights_on_a_replay(name: str) -> None:
    chunk, sinks, pads = 13, 4, [0, 9]
    ids = torch.randint(60, 97, (2, 34), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, : pads[1]] = 0
    model = double(name)
    wanted = oracle_scores(model, ids, pads, chunk, sinks)
    score = Watched(chunk, sinks, FIRST, BEFORE, AFTER)
    with evict(model, score, "contour:floor=0", budget=6) as run:
        run.prefill(ids, mask)
    assert len(score.said) == model.config.get_text_config().num_hidden_layers
    assert assert_said(score.said, wanted, sinks) > 100
