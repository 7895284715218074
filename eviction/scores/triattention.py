"""TriAttention: what typical queries at positions to come would make of the key, from statistics of the model."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from data import BadInput
from eviction.calibration import Statistics, components
from eviction.measured import is_witnessed
from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Score
from eviction.options import check_flag, check_whole
from eviction.rotary import Rotary

LEAST_DEVIATION = 1e-6  # of the code's z-score: heads whose scores differ by less say nothing


@dataclass(frozen=True)
class TriAttention(Score):
    """The highest of the group's query heads' z-scores of S_j, statistics and offsets as follows.

    Per query head and rotary frequency f, E q_f and E |q_f| are the statistics of the model's queries before RoPE. With
    k_f the key before it, Delta = t - p_j + delta its distance to a query delta tokens ahead (t: tokens read so far)
    and c_f the squared scaling of the rotary embedding (yarn),
      S_j = mean over delta of sum_f c_f |E q_f| |k_f| cos(omega_f Delta + arg(E q_f conj k_f))
            + sum_f c_f (E |q_f| - |E q_f|) |k_f|,    delta in {1, 2, 4, ..., furthest}.
    The first sum is a dot product of the key as it is in the cache, turned at its own position p_j, with the mean query
    turned on by t + delta and averaged over delta; |k_f| is the same before and after. So no key is turned back, and
    evicting, which leaves keys as they are, changes nothing. S and its z-score (mean and standard deviation over what
    the head holds, pinned tokens aside; deviations below 1e-6 count as 1e-6) are float64.

    statistics: of eviction.calibration, or their file. normalise: False leaves S as it is.

    The modes of the code are what selects by this score, with the allocator uniform:
      per layer and head: top_mass;
      per head, its command line's default: shared:across=layers, mean over the layers of a KV head's scores;
      global: shared, the maximum over all heads and layers. (The code's top k of every head, then their union, then the
        top k of it by the maximum, is the top k by the maximum: an entry of that is in the top k of the head in which
        it has its maximum.) P2's gain on that scale is alpha:score_scale=raw.
    When and with what pinned it evicts is the run's `decode`.

    Departures: no random noise of 1e-6 on the z-scores, by which the code breaks ties; angles in float64, where the
    code's float32 is off by up to 4e-3 at its furthest offset; coordinates that RoPE does not turn (the code has none)
    count as components of frequency 0 and scaling 1; soft-caps do not enter; in a sliding window, offsets beyond it
    count like all others. Where frequencies change with the length that was read (dynamic, longrope), keys cached under
    earlier ones are read by the latest. Raises BadInput without statistics, for those of a model of another shape or
    with another output projection, and where the rotary embedding is unknown. Source: WeianMao/triattention.
    """

    statistics: Statistics | Path | str | None = None
    furthest: int = 65536
    normalise: bool = True

    name: ClassVar[str] = "triattention"
    source: ClassVar[str] = "TriAttention (WeianMao/triattention)"

    def __post_init__(self) -> None:
        """Raises BadInput for options that mean nothing and for a file that holds no statistics."""
        check_whole(f"score {self.name}", "furthest", self.furthest, least=1)
        check_flag(f"score {self.name}", "normalise", self.normalise)
        if self.statistics is not None:
            assert self._statistics  # read now, not in the middle of a run

    @cached_property
    def _statistics(self) -> Statistics:
        given = self.statistics
        if isinstance(given, Statistics):
            return given
        if isinstance(given, Path | str):
            return Statistics.load(Path(given))
        raise BadInput(
            f"score {self.name}: statistics={given}: expected the file of statistics of this model that"
            " `python -m eviction calibrate` writes"
        )

    def rows_needed(self, budget: int) -> int:
        """None: the statistics stand for all queries."""
        return 0

    def __call__(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> torch.Tensor:
        """(B, K, L) float32."""
        rotary = self._check(cells, rows)
        scores = self._by_query_head(cells, rotary)
        if self.normalise:
            scores = _z_scores(scores, _competing(cells)[:, :, None])
        return torch.where(cells.held, scores.amax(2), 0.0).float()

    def _by_query_head(self, cells: Cells, rotary: Rotary) -> torch.Tensor:
        """S, (B, K, G, L) float64; of no meaning where nothing is held."""
        found, device = self._statistics, cells.keys.device
        frequencies, scaling = rotary.parameters()
        turning, passed = found.turning, found.d - 2 * found.turning
        omega = torch.cat([frequencies.to(device).double(), torch.zeros(passed, device=device)])
        scale = torch.where(torch.arange(turning + passed, device=device) < turning, scaling, 1.0).double()
        offsets = 2.0 ** torch.arange(self.furthest.bit_length(), device=device, dtype=torch.float64)
        ahead = torch.tensor(cells.seen, device=device)[:, None, None] + offsets[:, None]
        turn = torch.polar(torch.ones_like(ahead * omega), ahead * omega).mean(1)  # (B, F), over the offsets
        # a factor of the scaling is in the key already
        mean = found.mean[cells.layer].to(device=device, dtype=torch.complex128)
        query = mean * scale * turn[:, None]  # (B, H, F)
        by_coordinate = torch.cat([query.real[..., :turning], query.imag[..., :turning], query.real[..., turning:]], -1)
        spread = (found.magnitude[cells.layer].to(device).double() - mean.abs()) * scale
        groups = (cells.keys.shape[1], -1)
        keys = cells.keys.double()
        expected = by_coordinate.unflatten(1, groups) @ keys.transpose(-1, -2)
        sizes = components(keys, turning).abs().transpose(-1, -2)
        scores: torch.Tensor = expected + spread.unflatten(0, groups) @ sizes
        return scores

    def _check(self, cells: Cells, rows: ContextRows | ContextAndQuestionRows) -> Rotary:
        found = self._statistics
        what = f"score {self.name}, layer {cells.layer}"
        if cells.rotary is None:
            raise BadInput(f"{what}: needs the layer's rotary embedding, and the model has none that is known here")
        made = (*found.mean.shape[:2], found.d, found.turning)
        here = cells.n_layers, rows.queries.shape[1], cells.keys.shape[-1], len(cells.rotary.parameters()[0])
        if made != here:
            raise BadInput(
                f"{what}: statistics of {_named(found)}, of {made[0]} layers, {made[1]} query heads, {made[2]}"
                f" coordinates and {made[3]} frequencies: this model has {', '.join(map(str, here))}"
            )
        if not is_witnessed(found.witness, cells.layer, cells.output_weight):
            raise BadInput(
                f"{what}: statistics of {_named(found)}: this model's weights are others: expected statistics made"
                " of it by `python -m eviction calibrate`"
            )
        return cells.rotary


def _competing(cells: Cells) -> torch.Tensor:
    """(B, K, L) bool: entries that may be evicted."""
    if not cells.pinned:
        return cells.held
    return cells.held & (cells.positions >= torch.tensor(cells.pinned, device=cells.positions.device)[:, None, None])


def _z_scores(scores: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """(..., L): distance from the mean of those `among` in their standard deviations."""
    count = among.sum(-1, keepdim=True).clamp(min=1)
    centred = scores - torch.where(among, scores, 0.0).sum(-1, keepdim=True) / count
    deviation = (torch.where(among, centred, 0.0).square().sum(-1, keepdim=True) / count).sqrt()
    return centred / deviation.clamp(min=LEAST_DEVIATION)


def _named(statistics: Statistics) -> str:
    return statistics.model or "an unnamed model"
