"""Subspace: values as coordinates along the principal directions of their KV head."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from data import BadInput
from eviction.method import State
from eviction.options import check_whole


@dataclass(frozen=True)
class Subspace(State):
    """Each value v_j held as r = `rank` numbers, C_j = (v_j - m) B^T, B (r, d) a KV head's principal directions.

    The head's output is m + (w C) B: weights w sum to 1, so that the basis comes in once, after the sum, and no value
    is ever put together again to be attended to.

    Hypothesis (P2, family state, gate "subspace-moeKV"): the values of a head lie near a subspace of rank 32, so that
    at head dimension d = 128 an entry takes d + 32 numbers where it took 2 d, about 1.6 times less memory, which buys
    1.6 times the entries. Verdict (P2): rejected; kill mode proxy-to-runtime drift: what a proxy of the state promised
    was not there when the model generated with it.

    P2 leaves open, and here it is: one basis for each KV head of each layer and each sequence ("per-head"); fitted to
    the values held when the first compression begins, before it evicts, and kept (a basis fitted offline on other text
    would be another reading); centred, as principal components are; eigenvectors of the float64 scatter matrix, stored
    in the model's dtype; keys untouched; nothing of the "moe" in the gate's name. What is appended is coded as it
    comes, before the pass attends to it, so that answers live in the directions of their context; later compressions
    score decoded values. A first chunk of a few tokens gives a basis of those few directions and arbitrary ones beside.

    A budget in bytes counts an entry at d + r numbers. The basis, (r + 1) d numbers a KV head, is side data on top, as
    much as 26 entries at d = 128 and r = 32: counted with it, n entries a head take 2 d n / ((d + r) n + (r + 1) d)
    times less memory, which is 1.13 at n = 64, 1.33 at 128 and 1.52 at 512.
    Source: P2 (arXiv 2605.14292), its rejected mechanisms; formulas ours.
    """

    rank: int = 32

    name: ClassVar[str] = "subspace"
    source: ClassVar[str] = "P2 (arXiv 2605.14292), rejected there: state"

    def __post_init__(self) -> None:
        """Raises BadInput for a rank that is none."""
        check_whole("state subspace", "rank", self.rank, least=1)

    def value_rank(self, width: int) -> int:
        """The rank. Raises BadInput if values have fewer numbers."""
        if self.rank > width:
            raise BadInput(f"state subspace: rank={self.rank}: expected at most {width}, what a value of the model has")
        return self.rank

    def pooled(self, counts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Every entry is one token."""
        return None
