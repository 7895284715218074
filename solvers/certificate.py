"""What a search returns: a subset, its error, a bound that holds, and why it stopped."""

from dataclasses import dataclass

from solvers.problem import Indices
from solvers.proof import Proof


@dataclass(frozen=True, eq=False)
class Floor:
    """The least error among subsets that keep at least rho of the top-mass set's mass.

    subset: sorted row-local indices (s,). error: its e_s. lower: no subset that keeps as much has a smaller error.
    proved: whether error is the least within PROOF_GAP, or within the gap that was asked for. proof: the log of the
    search tree behind `lower`, if one was asked for and lower > 0. stopped_by: as of a Certificate. nodes, seconds:
    spent since the search began, at its highest floor, until this floor was done.
    """

    rho: float
    subset: Indices
    error: float
    lower: float
    proved: bool
    proof: Proof | None = None
    stopped_by: str = "finished"
    nodes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Certificate:
    """The answer of an exact search; `error` and `lower` hold whenever it stops.

    subset: sorted row-local indices (s,). error: its forced error e_s, in the unit of the values. lower: no subset
    of those searched has a smaller error, rounding of the row included. status: "optimal" (error is within
    PROOF_GAP of the least, or zero within rounding), "within_gap" (within the gap asked for), "bracketed" (neither).
    floors: the searches made on the way, from the highest mass floor to the one asked for. searched: number of keys
    that the subsets were drawn from. nodes: subsets visited by enumeration, nodes by branch and bound. seconds: time
    of the search alone. stopped_by: "finished", "node_limit" or "time_limit". search: which method.
    """

    subset: Indices
    error: float
    lower: float
    status: str
    floors: tuple[Floor, ...]
    searched: int
    nodes: int
    seconds: float
    stopped_by: str
    search: str
