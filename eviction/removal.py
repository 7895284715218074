"""What leaving out one entry alone does to the output of a row."""

import torch

from eviction.method import Cells, ContextAndQuestionRows, ContextRows


def removal_errors(cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
    """(B, K, G, T, L) float64: e_j = ||o - o_{-j}||_2 for the output o of each row, and o_{-j} without entry j.

    The other weights a_i are divided by 1 - a_j, as softmax does it, and the closed form is
      e_j = a_j / (1 - a_j) ||o - v_j||_2 = e_s of P1 for all entries but j (Lemma 2.1).
    +inf where a row sees j alone (nothing is left to attend to); 0 where it does not see j, and for padding rows.

    For the entry of largest weight, whose 1 - a_j may round to 0, e_j = a_j ||v_j - o_{-j}||_2 with o_{-j} computed
    without it; all others have 1 - a_j >= 1/2. Source: P1, section 2; the computation is ours.
    """
    logits = rows.logits(cells, torch.float64)
    visible = rows.visible(cells)[:, :, None].expand_as(logits)
    values = torch.where(cells.held[..., None], cells.values.double(), 0.0)[:, :, None]
    weights = _softmax(logits, visible)
    errors = weights / (1 - weights).clamp(min=0.5) * _distances(weights @ values, values)
    heaviest = weights.argmax(-1, keepdim=True)
    others = visible.scatter(-1, heaviest, False)
    without = _softmax(logits, others) @ values
    heaviest_values = values.expand(*without.shape[:3], -1, -1).gather(-2, heaviest.expand_as(without))
    moved = torch.linalg.vector_norm(heaviest_values - without, dim=-1, keepdim=True)
    moved = torch.where(others.any(-1, keepdim=True), weights.gather(-1, heaviest) * moved, torch.inf)
    return torch.where(visible, errors.scatter(-1, heaviest, moved), 0.0)


def _softmax(logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Over the entries that are seen; 0 for the others, and in rows that see none."""
    weights = torch.softmax(logits.masked_fill(~seen, -torch.inf), dim=-1)
    return torch.where(seen, weights, 0.0)


def _distances(outputs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(B, K, G, T, L): of outputs (B, K, G, T, dv) from values (B, K, 1, L, dv), without cancellation."""
    batch, kv_heads, group, rows, _ = outputs.shape
    found = torch.cdist(
        outputs.flatten(2, 3).flatten(0, 1),
        values[:, :, 0].flatten(0, 1),
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    return found.view(batch, kv_heads, group, rows, -1)
