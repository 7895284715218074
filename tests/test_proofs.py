"""Proof logs: what holds is accepted, and whatever was tampered with, or claims too much, is refused."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from data import BadInput, Provenance
from data.schema import PROOF
from data.store import footer
from solvers import Instance, certify, exhaustive
from solvers.proof import BRANCH, FIX, KINDS, LEAF, MASS, PRUNE, Proof, load, save
from solvers.replay import InvalidProof, _Floats, check_certificate, exact_error_squared, replay
from tests import oracle
from tests.strategies import rows

Reals = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

CLAIM = 1 - 1e-6  # of the optimum: what the reference proves
MADE = Provenance("test", {"row_id": "m:0:0:0:5", "s": 3}, 0, {}, "code", {"note": 1})


# A reference branch and bound that writes logs: floats with generous margins, no care for speed.


class Reference:
    """Emits the log of a claim; leaves are closed unseen, so that it "proves" false claims too."""

    def __init__(self, weights: Reals, values: Reals, s: int, floor: float, lower: float) -> None:
        p, v = oracle.exact(weights.tolist(), values.tolist())
        mu = oracle.mean((p, v), range(len(p)))
        self.weights, self.s, self.rho, self.lower = weights, s, floor, lower
        self.steps = np.array(
            [[float(a * (x - m)) for x, m in zip(b, mu, strict=True)] for a, b in zip(p, v, strict=True)]
        )
        self.keys = np.flatnonzero(weights > 0)
        self.floor = floor * float(np.sort(weights)[-s:].sum())
        self.unit = 2.0 ** (np.frexp(np.abs(values).max())[1] - 3)
        self.marks: list[int] = []
        self.reals: list[float] = []

    def proof(self) -> Proof:
        self.close([], self.keys.tolist())
        return Proof(
            self.s,
            self.rho,
            self.keys,
            self.lower,
            self.unit,
            np.array(self.marks, dtype=np.int32),
            np.array(self.reals),
        )

    def vector(self, z: Reals, nu: float) -> None:
        self.reals += [nu / self.unit, *z.tolist()]

    def close(self, kept: list[int], free: list[int]) -> None:
        r = self.s - len(kept)
        w = self.weights
        if len(free) >= r and w[kept].sum() + np.sort(w[free])[len(free) - r :].sum() < self.floor * (1 - 1e-9):
            self.marks.append(MASS)
            return
        if len(free) <= r or r <= 1 or (r == 2 and len(free) <= 4):
            self.marks.append(LEAF)
            return
        z, nu, f, cost = self.bound(kept, free)
        size = np.abs(self.steps).sum() * 1e-13  # far more than f can be off
        if f >= size:
            self.marks.append(PRUNE)
            self.vector(z, nu)
            return
        order = sorted(free, key=lambda j: cost[j])
        last, after = cost[order[r - 1]], cost[order[r]]
        keep = [j for j in order[:r] if f - cost[j] + after >= size]
        drop = [j for j in order[r:] if f - last + cost[j] >= size]
        if keep or drop:
            self.marks += [FIX, len(keep), *keep, len(drop), *drop]
            self.vector(z, nu)
            self.close(kept + keep, [j for j in free if j not in keep and j not in drop])
            return
        key = max(free, key=lambda j: float(np.linalg.norm(self.steps[j])))
        self.marks += [BRANCH, key]
        rest = [j for j in free if j != key]
        self.close([*kept, key], rest)
        self.close(kept, rest)

    def bound(self, kept: list[int], free: list[int]) -> tuple[Reals, float, float, Reals]:
        """A good vector by steps towards the least kept mean, its multiplier and bound, and the costs of all keys."""
        r, w, a = self.s - len(kept), self.weights, self.steps
        tau = self.lower * (1 + 1e-7)
        chosen = sorted(free, key=lambda j: -w[j])[:r]
        x = a[kept + chosen].sum(axis=0) / w[kept + chosen].sum()
        best = None
        for nu in (0.0, 0.3 * tau, tau) if self.floor > 0 else (0.0,):
            for _ in range(12):
                size = np.linalg.norm(x)
                z = x / size * (1 - 1e-15) if size > 0 else 0 * x
                cost = a @ z - (tau + nu) * w
                chosen = sorted(free, key=lambda j, c=cost: c[j])[:r]
                f = float(cost[kept].sum() + cost[chosen].sum() + nu * self.floor)
                if best is None or f > best[2]:
                    best = (z, nu, f, cost)
                step = a[kept + chosen].sum(axis=0) / w[kept + chosen].sum() - x
                along = float(step @ step)
                x = x + step * min(1.0, max(0.0, -float(x @ step) / along)) if along > 0 else x
        assert best is not None
        return best


def least(weights: Reals, values: Reals, s: int, rho: float) -> tuple[float, tuple[int, ...]]:
    """The least error with a mass floor, by brute force in fractions, and a subset that has it."""
    row = oracle.exact(weights.tolist(), values.tolist())
    keys = np.flatnonzero(weights > 0).tolist()
    floor = Fraction(rho) * sum(sorted(row[0])[-s:])
    found = {A: oracle.squared_error(row, A) for A in combinations_of(keys, s) if sum(row[0][j] for j in A) >= floor}
    best = min(found, key=lambda A: found[A])
    return root(found[best]), best


def root(squared: Fraction) -> float:
    """Within a relative 1e-15 at any scale; the square may be beyond float64."""
    scale = Fraction(2) ** ((squared.denominator.bit_length() - squared.numerator.bit_length()) // 2)
    return float(Fraction(float(squared * scale**2) ** 0.5) / scale)


def combinations_of(keys: Sequence[int], s: int) -> list[tuple[int, ...]]:
    return list(combinations(keys, s))


def gaussian(n: int, d: int, seed: int, offset: float = 1.0) -> tuple[Reals, Reals]:
    random = np.random.default_rng(seed)
    weights = np.exp(1.5 * random.standard_normal(n))
    return weights / weights.sum(), random.standard_normal((n, d)) + offset


def record_ends(proof: Proof) -> list[tuple[int, int, int]]:
    """(kind, first mark, end) of every record."""
    found, at = [], 0
    for step in proof.steps():
        size = 1 + (step.kind == BRANCH) + (step.kind == FIX) * (2 + step.kept.size + step.dropped.size)
        found.append((step.kind, at, at + size))
        at += size
    return found


def with_vectors(proof: Proof, d: int, change: Callable[[Reals], None]) -> Proof:
    vectors = proof.reals.reshape(-1, d + 1).copy()
    change(vectors)
    return replace(proof, reals=vectors.reshape(-1))


# What holds is accepted; what does not is refused, whatever its records say.


@given(rows(most_keys=8), st.integers(1, 5), st.sampled_from((0.0, 0.5, 0.9, 1.0)))
def test_true_claims_are_accepted_and_false_ones_refused(row: tuple[Reals, Reals], s: int, rho: float) -> None:
    weights, values = row
    assume(s <= np.count_nonzero(weights))
    error, _ = least(weights, values, s, rho)
    assume(error > 1e-9 * np.abs(values).max())  # below, the reference's margins say nothing
    proof = Reference(weights, values, s, rho, error * CLAIM).proof()
    found = replay(weights, values, proof)
    assert found.records == len(record_ends(proof))
    assert found.nodes == 1 + 2 * sum(kind == BRANCH for kind, _, _ in record_ends(proof))
    for lower in (error * (1 + 1e-12), error * 1.01, error * 2):  # the same log claims more than is true
        with pytest.raises(InvalidProof):
            replay(weights, values, replace(proof, lower=lower))
    for lower in (error * 1.001, error * 2):  # and so does a log that was made for the false claim
        with pytest.raises(InvalidProof):
            replay(weights, values, Reference(weights, values, s, rho, lower).proof())


def test_every_kind_of_record_and_both_kinds_of_fix_occur() -> None:
    kinds, kept, dropped, multipliers = set(), 0, 0, 0
    for seed in range(6):
        weights, values = gaussian(11, 3, seed)
        for rho in (0.0, 0.8):
            error, _ = least(weights, values, 4, rho)
            proof = Reference(weights, values, 4, rho, error * CLAIM).proof()
            assert replay(weights, values, proof).exact == 0  # the float filter decides ordinary records
            kinds |= {step.kind for step in proof.steps()}
            kept += sum(step.kept.size for step in proof.steps())
            dropped += sum(step.dropped.size for step in proof.steps())
            multipliers += int((proof.reals.reshape(-1, 4)[:, 0] > 0).sum())
    assert kinds == set(range(len(KINDS)))
    assert min(kept, dropped, multipliers) > 0


@pytest.mark.parametrize("scale", [1e-300, 1e-12, 1e12, 1e150])
def test_scales_do_not_matter(scale: float) -> None:
    weights, values = gaussian(12, 3, 7)
    error, _ = least(weights, values * scale, 4, 0.5)
    proof = Reference(weights, values * scale, 4, 0.5, error * CLAIM).proof()
    replay(weights, values * scale, proof)
    with pytest.raises(InvalidProof):
        replay(weights, values * scale, replace(proof, lower=error * (1 + 1e-9)))


def test_weights_that_all_but_vanish_and_one_that_is_all() -> None:
    for light in (1e-130, 1e-20):
        weights, values = gaussian(10, 2, 3)
        weights[3:] *= light
        weights /= weights.sum()
        error, _ = least(weights, values, 3, 0.0)
        proof = Reference(weights, values, 3, 0.0, error * CLAIM).proof()
        replay(weights, values, proof)
        with pytest.raises(InvalidProof):
            replay(weights, values, replace(proof, lower=error * (1 + 1e-9)))


def test_an_empty_claim_needs_no_log() -> None:
    weights, values = gaussian(5, 2, 0)
    empty = Proof(2, 0.0, np.arange(5), 0.0, 1.0, np.empty(0, np.int32), np.empty(0))
    assert replay(weights, values, empty).records == 0
    with pytest.raises(InvalidProof, match="1 nodes are open"):
        replay(weights, values, replace(empty, lower=1e-30))


# The bound itself, against fractions, at claims on both sides of where it turns.


ExactSteps = tuple[list[Fraction], list[list[Fraction]]]


def exact_steps(weights: Reals, values: Reals) -> ExactSteps:
    p = [Fraction(x) for x in weights.tolist()]
    v = [[Fraction(x) for x in u] for u in values.tolist()]
    mu = [sum((a * u[i] for a, u in zip(p, v, strict=True)), Fraction(0)) / sum(p) for i in range(len(v[0]))]
    return p, [[a * (x - m) for x, m in zip(u, mu, strict=True)] for a, u in zip(p, v, strict=True)]


def turning_point(
    row: ExactSteps, s: int, rho: float, z: Reals, nu: float, forced: set[int], banned: set[int]
) -> float:
    """The largest float at which a bound is not negative, of subsets with all forced keys and no banned one.

    The bound is the least z.a(A) - (t + nu) w(A) + nu rho w(top), concave and falling in the claim t: Newton's steps
    from the right reach its root exactly.
    """
    p, a = row
    along = [sum((Fraction(x) * y for x, y in zip(z.tolist(), b, strict=True)), Fraction(0)) for b in a]
    floor = Fraction(rho) * sum(sorted(p)[-s:])
    rest = [j for j in range(len(p)) if j not in forced | banned]
    claim = Fraction(10) ** 15
    while True:
        price = claim + Fraction(nu)
        chosen = [*forced, *sorted(rest, key=lambda j: along[j] - price * p[j])[: s - len(forced)]]
        mass = sum(p[j] for j in chosen)
        bound = sum(along[j] for j in chosen) - price * mass + Fraction(nu) * floor
        if bound == 0:
            break
        claim += bound / mass
    found = float(claim)
    return found if Fraction(found) <= claim else float(np.nextafter(found, -np.inf))


def holds(row: tuple[Reals, Reals], proof: Proof, number: int) -> bool:
    """Whether a record passes, whatever becomes of the rest of an unfinished log."""
    with pytest.raises(InvalidProof) as caught:
        replay(*row, proof)
    return f"record {number} (" not in str(caught.value)


KINDS_OF_ROW = ("gaussian", "outlier", "light outlier", "ties", "far from the origin", "light keys", "at the mean")


@pytest.mark.parametrize("kind", KINDS_OF_ROW)
def test_a_prune_and_a_fix_are_decided_as_in_fractions(kind: str) -> None:
    turned = 0
    for seed in range(10):
        random = np.random.default_rng(seed)
        n, d, s, rho, nu = 8, 3, 4, 0.5, (0.0, 0.4)[seed % 2]
        weights = np.exp(random.standard_normal(n))
        values = random.standard_normal((n, d))
        if kind == "ties":
            weights[:], values = 1.0, random.integers(-1, 2, (n, d)).astype(float)
        elif kind == "light keys":
            weights[4:] *= 1e-20
        weights /= weights.sum()
        centred = values - weights @ values
        # Keep the two keys that point most alike, so that there is something to prove.
        alike = np.triu((weights[:, None] * centred) @ (weights[:, None] * centred).T, 1)
        kept = [int(j) for j in np.unravel_index(alike.argmax(), alike.shape)]
        z = weights[kept] @ centred[kept]
        free = next(j for j in range(n) if j not in kept)
        if "outlier" in kind:  # of huge size, all but orthogonal to z
            outlier = random.standard_normal(d) * 1e6
            values[free] += outlier - z * (outlier @ z) / (z @ z)
        if kind == "light outlier":
            weights[free] *= 1e-9
            weights /= weights.sum()
        elif kind == "far from the origin":
            values += 1e9
        elif kind == "at the mean":  # all of its residual is rounding
            weights[free] = 0
            values[free] = weights @ values / weights.sum()
            weights[free] = 0.3
            weights /= weights.sum()
        z *= 0.999 / np.linalg.norm(z)
        row, exact = (weights, values), exact_steps(weights, values)
        marks = [part for key in kept for part in (BRANCH, key)]
        base = Proof(s, rho, np.arange(n), 1.0, 0.25, np.array([*marks, PRUNE], dtype=np.int32), np.array([4 * nu, *z]))
        cases = [(base, set(), set())]
        for key in set(range(n)) - set(kept):
            for ids, forced, banned in (([0, 1, key], {key}, set()), ([1, key, 0], set(), {key})):
                fixed = replace(base, marks=np.array([*marks, FIX, *ids], dtype=np.int32))
                cases.append((fixed, forced, banned))
        for proof, forced, banned in cases:
            turn = turning_point(exact, s, rho, z, nu, {*kept, *forced}, banned)
            for lower in (turn, np.nextafter(turn, np.inf), turn * (1 + 1e-6)):
                if turn > 0:
                    turned += 1
                    assert holds(row, replace(proof, lower=lower), 2) == (lower == turn), (seed, forced, banned)
    assert turned > 30


def test_float_bounds_of_every_key_hold_where_each_kind_of_rounding_leads() -> None:
    # Each key by itself: in a sum, the bounds of some keys could make up for those of others.
    for seed in range(20):
        random = np.random.default_rng(seed)
        n, d = 12, 40
        weights = random.random(n)
        values = random.standard_normal((n, d)) + 10.0
        values[0] *= 1e6  # rounding of z.a_j, far above the row's spread
        weights[0] *= 1e-12
        weights[2] *= 1e-3
        weights[1] = 0.0
        values[1] = weights @ values / weights.sum()  # rounding of mu, far above the key's own residual
        weights[1] = 0.2
        weights /= weights.sum()
        z = random.standard_normal(d)
        z *= 0.99 / np.linalg.norm(z)
        price = (1e-9, 0.3, 1e7)[seed % 3]  # the last: rounding of the price
        p, a = exact_steps(weights, values)
        proof = Proof(3, 0.0, np.arange(n), price, 1.0, np.empty(0, np.int32), np.empty(0))
        floats = _Floats(weights, values, proof, Fraction(0))
        costs = floats.costs(z, 0.0, np.empty(0, dtype=np.int64), np.arange(n))
        unit = Fraction(2) ** int(np.frexp(np.abs(values).max())[1])
        for j in range(n):
            along = sum((Fraction(x) * y for x, y in zip(z.tolist(), a[j], strict=True)), Fraction(0))
            cost = (along - Fraction(price) * p[j]) / unit
            assert Fraction(float(costs.low[j])) <= cost <= Fraction(float(costs.high[j])), (seed, j)
            size = Fraction(float(np.linalg.norm([float(x) for x in a[j]]))) + Fraction(price) * p[j]
            assert costs.high[j] - costs.low[j] < 1e-12 * (size / unit + p[j] / 100), (seed, j)  # and say something


def test_bounds_of_exactly_zero_are_decided_in_integers() -> None:
    weights = np.array([0.25, 0.25, 0.25, 0.125, 0.125])
    values = np.array([[0.0], [1.0], [2.0], [6.0], [6.0]])  # mu = 9/4; the pairs of 0 and 6 have 2
    error, _ = least(weights, values, 2, 0.0)
    assert error == 0.25
    leaf = Proof(2, 0.0, np.arange(5), 0.25, 1.0, np.array([LEAF], dtype=np.int32), np.empty(0))
    assert replay(weights, values, leaf).exact == 1
    with pytest.raises(InvalidProof, match=r"record 0 \(leaf\): keys \[0, [34]\] have an error of 0.25"):
        replay(weights, values, replace(leaf, lower=float(np.nextafter(0.25, 1))))
    # Of the first three keys 1 and 2 come nearest, 3/4 below mu: there z = -1 has f = 0.
    prune = replace(
        leaf, keys=np.arange(3), lower=0.75, marks=np.array([PRUNE], dtype=np.int32), reals=np.array([0.0, -1.0])
    )
    assert replay(weights, values, prune).exact == 1
    for changed in (replace(prune, reals=np.array([0.0, -1 + 2**-53])), replace(prune, lower=0.75 + 2**-53)):
        with pytest.raises(InvalidProof, match=r"record 0 \(prune\): its bound is below 0"):
            replay(weights, values, changed)
    # A floor that is met exactly excludes nothing: keys 1 and 2 keep all of what the heaviest two do.
    with pytest.raises(InvalidProof, match="keeps the mass floor"):
        replay(
            weights, values, replace(prune, mass_floor=1.0, marks=np.array([MASS], dtype=np.int32), reals=leaf.reals)
        )


# Leaves: one, two and few picks.


@pytest.mark.parametrize(
    ("n", "s", "kept"), [(40, 2, []), (300, 2, []), (300, 3, [17]), (200, 2, [5]), (20, 3, []), (9, 8, [])]
)
def test_a_leaf_looks_at_every_completion(n: int, s: int, kept: list[int]) -> None:
    random = np.random.default_rng(n + s)
    weights = np.exp(random.standard_normal(n))
    weights /= weights.sum()
    row = Instance(weights, random.standard_normal((n, 4)))
    rest = [j for j in range(n) if j not in kept]
    found = np.array([[*kept, *more] for more in combinations_of(rest, s - len(kept))])
    mass = row.weights[found].sum(axis=1)
    errors = np.linalg.norm(row.steps[found].sum(axis=1), axis=1) * row.unit / mass
    for rho in (0.0, 0.3):
        heavy = mass >= rho * np.sort(row.weights)[-s:].sum()
        best = found[heavy][np.argmin(errors[heavy])].tolist()
        error = float(exact_error_squared(row.weights, row.values, best)) ** 0.5
        # Branching leads to the leaf; the children that drop a key stay open.
        marks = [part for key in kept for part in (BRANCH, key)] + [LEAF]
        proof = Proof(s, rho, np.arange(n), error * (1 - 1e-12), 1.0, np.array(marks, dtype=np.int32), np.empty(0))
        if kept:
            with pytest.raises(InvalidProof, match=f"{len(kept)} nodes are open"):
                replay(row.weights, row.values, proof)
        else:
            replay(row.weights, row.values, proof)
        with pytest.raises(InvalidProof, match=r"\(leaf\): keys \[" + ", ".join(map(str, sorted(best)))):
            replay(row.weights, row.values, replace(proof, lower=error * (1 + 1e-12)))


def test_a_leaf_of_too_many_completions_is_refused() -> None:
    weights, values = gaussian(100, 2, 0)
    proof = Proof(4, 0.0, np.arange(100), 1e-9, 1.0, np.array([LEAF], dtype=np.int32), np.empty(0))
    with pytest.raises(InvalidProof, match="100 free keys for 4 picks"):
        replay(weights, values, proof)


# Tampering.


@pytest.fixture(scope="module")
def proved() -> tuple[Reals, Reals, Proof, tuple[int, ...]]:
    """A row of 14 keys with a proof that has several records of each kind."""
    weights, values = gaussian(14, 3, 1)
    error, best = least(weights, values, 4, 0.7)
    proof = Reference(weights, values, 4, 0.7, error * CLAIM).proof()
    kinds = [step.kind for step in proof.steps()]
    assert set(kinds) == set(range(5))
    assert min(map(kinds.count, range(5))) >= 2
    replay(weights, values, proof)
    return weights, values, proof, best


Proved = tuple[Reals, Reals, Proof, tuple[int, ...]]


def test_a_record_or_a_subtree_taken_out(proved: Proved) -> None:
    weights, values, proof, _ = proved
    ends = record_ends(proof)
    vector = 0
    for place, (kind, start, end) in enumerate(ends):
        # A fix may be more than the rest needs; every other record holds the tree together.
        width = 4 if kind in (FIX, PRUNE) else 0
        if kind != FIX:
            marks = np.delete(proof.marks, np.s_[start:end])
            reals = np.delete(proof.reals, np.s_[vector : vector + width])
            with pytest.raises(InvalidProof):
                replay(weights, values, replace(proof, marks=marks, reals=reals))
        if kind == BRANCH:  # the subtree of the child that keeps the key
            open_nodes, last, reals_end = 1, place + 1, vector
            while open_nodes:
                open_nodes += {BRANCH: 1, FIX: 0}.get(ends[last][0], -1)
                reals_end += 4 if ends[last][0] in (FIX, PRUNE) else 0
                last += 1
            marks = np.delete(proof.marks, np.s_[end : ends[last - 1][2]])
            reals = np.delete(proof.reals, np.s_[vector:reals_end])
            with pytest.raises(InvalidProof):
                replay(weights, values, replace(proof, marks=marks, reals=reals))
        vector += width


def test_streams_cut_short_or_too_long(proved: Proved) -> None:
    weights, values, proof, _ = proved
    for size in range(proof.marks.size):
        with pytest.raises(InvalidProof):
            replay(weights, values, replace(proof, marks=proof.marks[:size]))
    for reals in (proof.reals[:-1], proof.reals[:0], np.append(proof.reals, 0.5)):
        with pytest.raises(InvalidProof):
            replay(weights, values, replace(proof, reals=reals))
    for mark in (*range(5), 5, -1):
        with pytest.raises(InvalidProof):
            replay(weights, values, replace(proof, marks=np.append(proof.marks, np.int32(mark))))


def test_vectors_turned_lengthened_or_not_finite(proved: Proved) -> None:
    weights, values, proof, _ = proved
    kinds = [step.kind for step in proof.steps() if step.kind in (FIX, PRUNE)]

    def scaled(place: int, factor: float) -> Callable[[Reals], None]:
        def change(vectors: Reals) -> None:
            vectors[place, 1:] *= factor

        return change

    def largest_turned(place: int) -> Callable[[Reals], None]:
        def change(vectors: Reals) -> None:
            vectors[place, 1 + np.abs(vectors[place, 1:]).argmax()] *= -1

        return change

    def set_to(place: int, entry: int, number: float) -> Callable[[Reals], None]:
        def change(vectors: Reals) -> None:
            vectors[place, entry] = number

        return change

    for place, kind in enumerate(kinds):
        for change in (scaled(place, 1 + 1e-14), scaled(place, 2.0)):
            with pytest.raises(InvalidProof, match=r"\|z\| = .*: expected at most 1|an entry beyond 1"):
                replay(weights, values, with_vectors(proof, 3, change))
        for change in (set_to(place, 2, np.nan), set_to(place, 0, np.inf), set_to(place, 0, -1e-3)):
            with pytest.raises(InvalidProof, match=r"not finite|expected at least 0"):
                replay(weights, values, with_vectors(proof, 3, change))
        if kind == PRUNE:
            for change in (scaled(place, -1.0), largest_turned(place), scaled(place, 0.0)):
                with pytest.raises(InvalidProof, match="its bound is below 0"):
                    replay(weights, values, with_vectors(proof, 3, change))


def test_dropping_a_key_of_the_optimum_from_a_claim_above_it(proved: Proved) -> None:
    weights, values, proof, best = proved
    error, _ = least(weights, values, 4, 0.7)
    vectors = proof.reals.reshape(-1, 4)
    for key in best:
        for vector in vectors:
            marks = np.array([FIX, 0, 1, key, LEAF], dtype=np.int32)
            false = replace(proof, lower=error * (1 + 1e-9), marks=marks, reals=vector)
            with pytest.raises(
                InvalidProof, match=rf"record 0 \(fix\): the bound with the dropped key {key} forced in"
            ):
                replay(weights, values, false)


def test_forcing_in_a_key_that_the_optimum_lacks_from_a_claim_above_it(proved: Proved) -> None:
    weights, values, proof, best = proved
    error, _ = least(weights, values, 4, 0.7)
    for key in set(range(14)) - set(best):
        for vector in proof.reals.reshape(-1, 4):
            marks = np.array([FIX, 1, key, 0, LEAF], dtype=np.int32)
            false = replace(proof, lower=error * (1 + 1e-9), marks=marks, reals=vector)
            with pytest.raises(InvalidProof, match=rf"record 0 \(fix\): the bound with the kept key {key} forced out"):
                replay(weights, values, false)


def test_keys_that_are_not_free(proved: Proved) -> None:
    weights, values, proof, _ = proved
    z = [0.0, 0.0, 0.0, 0.0]

    def said(marks: list[int], reals: list[float]) -> str:
        with pytest.raises(InvalidProof) as caught:
            replay(weights, values, replace(proof, marks=np.array(marks, dtype=np.int32), reals=np.array(reals)))
        return str(caught.value)

    assert said([BRANCH, 14, LEAF, LEAF], []) == "record 0 (branch): key 14 is not free"
    assert said([BRANCH, -1, LEAF, LEAF], []) == "record 0 (branch): key -1 is not free"
    assert said([BRANCH, 2, BRANCH, 2, LEAF, LEAF, LEAF], []) == "record 1 (branch): key 2 is not free"
    assert said([FIX, 0, 2, 3, 3, LEAF], z) == "record 0 (fix): it names a key twice"
    assert said([FIX, 1, 3, 1, 3, LEAF], z) == "record 0 (fix): it names a key twice"
    assert said([FIX, 5, 0, 1, 2, 3, 4, 0, LEAF], z) == "record 0 (fix): it keeps 5 keys: only 4 are to be picked"
    assert (
        said([BRANCH, 0, BRANCH, 1, BRANCH, 2, BRANCH, 3, BRANCH, 4], []) == "record 4 (branch): all 4 keys are picked"
    )
    assert said([FIX, -1, 0, LEAF], z) == "record 0 (fix): -1 keys: expected at least 0"
    assert said([FIX, 30, 0, LEAF], z) == "record 0 (fix): the stream of marks ends within it"


def test_claims_that_are_not_of_this_row(proved: Proved) -> None:
    weights, values, proof, _ = proved
    shorter = weights[:-1] / weights[:-1].sum()
    for changed, row in (
        (proof, (shorter, values[:-1])),
        (proof, (weights, values[:, :2])),
        (proof, (weights, np.hstack((values, values)))),
        (proof, (weights[::-1].copy(), values)),
        (replace(proof, s=5), (weights, values)),
        (replace(proof, s=0), (weights, values)),
        (replace(proof, s=15), (weights, values)),
        (replace(proof, mass_floor=0.0), (weights, values)),
        (replace(proof, mass_floor=1.5), (weights, values)),
        (replace(proof, mass_floor=np.nan), (weights, values)),
        (replace(proof, lower=np.nan), (weights, values)),
        (replace(proof, lower=np.inf), (weights, values)),
        (replace(proof, unit=3.0), (weights, values)),
        (replace(proof, unit=0.0), (weights, values)),
        (replace(proof, keys=proof.keys[::-1]), (weights, values)),
        (replace(proof, keys=proof.keys[:-1]), (weights, values)),
        (replace(proof, keys=np.append(proof.keys, 13)), (weights, values)),
        (replace(proof, keys=proof.keys[:0]), (weights, values)),
    ):
        with pytest.raises(InvalidProof):
            replay(*row, changed)
    none = weights.copy()
    none[4] = 0.0
    with pytest.raises(InvalidProof, match="weight 0"):
        replay(none / none.sum(), values, proof)
    for row in ((weights * 2, values), (-weights, values), (weights, values[:5]), (weights, values * np.nan)):
        with pytest.raises(ValueError, match="expected"):
            replay(*row, proof)


# Files.


def test_a_log_survives_its_table_and_its_file(proved: Proved, tmp_path: Path) -> None:
    weights, values, proof, _ = proved
    frame = proof.frame()
    PROOF.check(frame)
    assert frame.height == len(record_ends(proof))
    back = Proof.from_frame(frame, proof.s, proof.mass_floor, proof.keys, proof.lower)
    assert np.array_equal(back.marks, proof.marks)
    assert np.array_equal(back.reals.reshape(-1, 4)[:, 1:], proof.reals.reshape(-1, 4)[:, 1:])
    assert np.array_equal(back.reals[::4], proof.reals[::4] * proof.unit)
    path = tmp_path / "proof.parquet"
    save(proof, path, MADE)
    loaded = load(path)
    assert (loaded.s, loaded.mass_floor, loaded.lower) == (proof.s, proof.mass_floor, proof.lower)
    assert np.array_equal(loaded.keys, proof.keys)
    assert replay(weights, values, loaded).records == frame.height
    found = footer(PROOF, path)
    assert found["parameters"] == {"row_id": "m:0:0:0:5", "s": 3}
    assert found["notes"]["note"] == 1  # type: ignore[index]


@pytest.mark.parametrize("keys", [[0], [3, 4, 5], [0, 2, 4], [0, 1, 5, 6, 9]])
def test_searched_keys_and_empty_logs_survive(keys: list[int], tmp_path: Path) -> None:
    empty = Proof(1, 0.25, np.array(keys), 0.0, 1.0, np.empty(0, np.int32), np.empty(0))
    save(empty, tmp_path / "proof.parquet", MADE)
    loaded = load(tmp_path / "proof.parquet")
    assert loaded.keys.tolist() == keys
    assert (loaded.marks.size, loaded.reals.size) == (0, 0)


def test_damaged_files_are_bad_input(proved: Proved, tmp_path: Path) -> None:
    _, _, proof, _ = proved
    path = tmp_path / "proof.parquet"
    with pytest.raises(BadInput, match="no such file"):
        load(path)
    with pytest.raises(ValueError, match="row_id"):
        save(proof, path, Provenance("test", {}, 0, {}, "code"))
    save(proof, path, MADE)
    whole = path.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(BadInput):
            load(path)
    proof.frame().write_parquet(path)
    with pytest.raises(BadInput, match="no provenance"):
        load(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (pl.lit("twig").alias("kind"), "row 0 of a proof has kind 'twig'"),
        (pl.lit(None, dtype=pl.Int32).alias("key"), "a branch: key is None"),
        (pl.lit(3, dtype=pl.Int32).alias("key"), "key is 3"),
        (pl.lit(None, dtype=pl.List(pl.Float64)).alias("z"), "z is None"),
        (pl.lit(None, dtype=pl.Float64).alias("nu"), "nu is None"),
        (pl.lit(None, dtype=pl.List(pl.Int32)).alias("kept"), "kept is None"),
    ],
)
def test_tables_that_make_no_sense_are_bad_input(proved: Proved, change: pl.Expr, said: str) -> None:
    proof = proved[2]
    with pytest.raises(BadInput, match=said):
        Proof.from_frame(proof.frame().with_columns(change), 4, 0.7, proof.keys, proof.lower)


# Subsets from their indices.


@given(rows(), st.integers(1, 4))
def test_exact_errors_are_those_of_the_oracle(row: tuple[Reals, Reals], s: int) -> None:
    weights, values = row
    keys = np.flatnonzero(weights)[:s][::-1]
    fractions = oracle.exact(weights.tolist(), values.tolist())
    assert exact_error_squared(weights, values, keys) == oracle.squared_error(fractions, keys.tolist())


@given(rows(), st.integers(1, 4), st.sampled_from((0.0, 0.5)))
def test_certificates_of_the_searches_hold(row: tuple[Reals, Reals], s: int, rho: float) -> None:
    instance = Instance(*row)
    assume(s <= instance.n_positive)
    check_certificate(instance, certify(instance, s, mass_floor=rho))
    check_certificate(instance, exhaustive(instance, s))


def test_certificates_that_say_too_much_are_refused() -> None:
    row = Instance(*gaussian(12, 3, 2))
    found = certify(row, 3)
    check_certificate(row, found)
    floor = found.floors[0]
    off = 1 + 1e-9
    light = np.sort(row.order[-3:])
    light_error = row.forced_error(light)
    for changed, said in (
        (replace(found, error=found.error * off), "error"),
        (replace(found, error=found.error / off), "error"),
        (replace(found, error=np.nan), "finite"),
        (replace(found, lower=found.error * off), "its own subset"),
        (replace(found, subset=found.subset[::-1] * 0), "distinct"),
        (replace(found, subset=np.array([0, 1, 12])), "distinct"),
        (replace(found, floors=(replace(floor, error=floor.error * off),)), "floor 0.5: error"),
        (replace(found, floors=(replace(floor, lower=floor.error * off),)), "floor 0.5: lower"),
        (replace(found, floors=(replace(floor, subset=floor.subset[:2]),)), "2 keys: expected 3"),
        (replace(found, floors=(replace(floor, subset=light, error=light_error, lower=0.0),)), "keeps less than 0.5"),
    ):
        with pytest.raises(InvalidProof, match=said):
            check_certificate(row, changed)


# Logs of the search itself.


@given(rows(most_keys=9), st.integers(1, 5), st.sampled_from((0.0, 0.5, 0.9)))
def test_logs_of_the_search_hold(row: tuple[Reals, Reals], s: int, rho: float) -> None:
    instance = Instance(*row)
    assume(s <= instance.n_positive)
    found = certify(instance, s, mass_floor=rho, proof=True)
    best = least(instance.weights, instance.values, s, rho)[0]
    for floor in found.floors:
        if floor.proof is None:
            assert floor.lower == 0
            continue
        assert (floor.proof.s, floor.proof.mass_floor, floor.proof.lower) == (s, floor.rho, floor.lower)
        assert floor.proof.keys.tolist() == np.flatnonzero(instance.weights).tolist()
        replay(instance.weights, instance.values, floor.proof)
    last = found.floors[-1].proof
    if last is not None:
        with pytest.raises(InvalidProof):
            replay(instance.weights, instance.values, replace(last, lower=best * (1 + 1e-12)))


def test_logs_of_a_candidate_set_and_of_a_lower_bound_alone_hold() -> None:
    row = Instance(*gaussian(60, 4, 5))
    pool = np.sort(row.order[:20])
    found = certify(row, 5, candidates=pool, proof=True).floors[-1].proof
    assert found is not None
    assert found.keys.tolist() == pool.tolist()
    replay(row.weights, row.values, found)
    stopped = certify(row, 5, node_limit=40, proof=True)
    logs = [floor.proof for floor in stopped.floors if floor.proof is not None]
    assert stopped.status == "bracketed"
    assert logs
    for log in logs:
        replay(row.weights, row.values, log)


def test_logs_of_a_row_of_300_keys_hold_from_their_file(tmp_path: Path) -> None:
    weights, values = gaussian(300, 16, 0, offset=0.3)
    row = Instance(weights, values)
    found = certify(row, 4, mass_floor=0.1, proof=True)
    check_certificate(row, found)
    for floor in found.floors:
        assert floor.proved
        assert floor.proof is not None
        save(floor.proof, tmp_path / "proof.parquet", MADE)
        log = load(tmp_path / "proof.parquet")
        replayed = replay(row.weights, row.values, log)
        assert replayed.records == log.frame().height
        with pytest.raises(InvalidProof, match=r"record \d+ \("):
            replay(row.weights, row.values, replace(log, lower=floor.error * (1 + 1e-9)))


# The checker stands apart.


def test_the_checker_shares_nothing_with_the_search_but_the_log() -> None:
    root = Path(__file__).resolve().parent.parent / "solvers"
    allowed = {"replay.py": {"solvers.proof"}, "proof.py": {"data", "data.schema", "data.store"}}
    for name, ours in allowed.items():
        tree = ast.parse((root / name).read_text("utf-8"))
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        found = set()
        for node in ast.walk(tree):
            if id(node) in for_types:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                found.add(node.module or "")
        assert {module for module in found if module.split(".")[0] in ("solvers", "data", "enumerate")} == ours
        assert not {module.split(".")[0] for module in found} & {"numba", "scipy", "ortools"}


def test_a_log_of_other_number_types_is_refused() -> None:
    # integers wrap around in z @ z, half precision rounds more than the filter allows for
    row = Instance(np.full(6, 1 / 6), np.random.default_rng(1).standard_normal((6, 2)))
    proof = certify(row, 2, proof=True).floors[-1].proof
    assert proof is not None
    replay(row.weights, row.values, proof)
    for field, dtype in (
        ("reals", np.int64),
        ("reals", np.float16),
        ("reals", np.float32),
        ("reals", object),
        ("marks", np.int64),
        ("keys", np.uint64),
        ("keys", np.float64),
    ):
        with pytest.raises(InvalidProof, match=field):
            replay(row.weights, row.values, replace(proof, **{field: getattr(proof, field).astype(dtype)}))
    for field, value in (("s", 2.0), ("lower", 1), ("unit", 1)):
        with pytest.raises(InvalidProof, match=field):
            replay(row.weights, row.values, replace(proof, **{field: value}))  # type: ignore[arg-type]


def test_a_vector_far_beyond_the_unit_ball_is_refused() -> None:
    row = Instance(np.full(30, 1 / 30), np.random.default_rng(1).standard_normal((30, 3)))
    proof = certify(row, 4, proof=True).floors[-1].proof
    assert proof is not None
    for entry in (1e200, 1e308, np.inf, np.nan, -1e160):
        reals = proof.reals.copy()
        reals[1] = entry
        with pytest.raises(InvalidProof, match="beyond 1"):
            replay(row.weights, row.values, replace(proof, reals=reals))
