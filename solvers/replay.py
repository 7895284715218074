"""Checks what a search claims, by other means: proof logs record by record, subsets in exact rationals.

Nothing here is shared with the search but the log's format. What a log claims is a statement about the given float64
weights w and values v taken at their exact value: with W = sum_j w_j, mu = sum_j w_j v_j / W and a_j = w_j (v_j - mu),
every subset A of s keys with w(A) >= rho w(top-mass set) has e(A) = |sum_A a_j| / w(A) >= lower.

The bound of a prune (ours). At a node that keeps F and may still pick r keys of the free set R, let |z| <= 1, nu >= 0,
c_j = z.a_j - (lower + nu) w_j, and

    f = sum_F c_j + nu rho w(top) + (sum of the r least c_j over R).

A completion A with e(A) < lower and enough mass has z.a(A) <= |a(A)| < lower w(A), hence sum_A c_j + nu rho w(top) < 0,
and f is at most that: f >= 0 excludes all of them. Forcing a key in or out changes f to a sum that is as simple, so the
same test on that child shows that an improving completion lacks, or has, the key. All keys of one fix are tested at the
node as it stood before it: an improving completion of that node has every kept key and no dropped one at once, so it is
a completion of the node that is left, and the tests need no order.

Each test is first made in floating point with the error bound at _Floats, and in exact integers where that leaves it
open.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from solvers.proof import BRANCH, FIX, KINDS, MASS, PRUNE, Indices, InvalidProof, Proof, Reals

if TYPE_CHECKING:
    from solvers.certificate import Certificate
    from solvers.problem import Instance

__all__ = ["InvalidProof", "Replay", "check_certificate", "exact_error_squared", "replay"]

Number = TypeVar("Number", int, float)

U = 2.0**-53  # unit roundoff of float64
SUM_TOLERANCE = 1e-6  # how far weights may sum from 1: farther off they are not a row's, and bounds below assume it
MASS_SLACK = Fraction(11, 10**13)  # a certificate's subset may miss its mass floor by 1e-12, and its rounding
ERROR_SLACK = Fraction(1, 10**12)  # and its error may be off by this much, relatively, beside the row's rounding
MOST_COMPLETIONS = 1 << 17  # a leaf that leaves three picks or more is enumerated up to here, and refused beyond
PAIR_ROWS = 128  # first keys whose pairs a leaf screens at once: bounds its memory
SUBSETS_AT_ONCE = 1 << 14  # subsets evaluated at once: bounds memory as well
SQUARES_LOST = 2.0**-500  # more than a norm can lose because squares of its entries underflow, per root of d


@dataclass(frozen=True)
class Replay:
    """A log that held: nodes of its tree, records, how many of these took exact arithmetic, seconds of it all."""

    nodes: int
    records: int
    exact: int
    seconds: float

    @property
    def nodes_per_second(self) -> float:
        """The checker's rate, setting up the row included."""
        return self.nodes / self.seconds


def replay(weights: npt.ArrayLike, values: npt.ArrayLike, proof: Proof) -> Replay:
    """Check that a log proves its claim about a row: weights (n,) that sum to about 1, values (n, d) (ours).

    Raises InvalidProof that names the first record that fails, its kind and what fails; ValueError for weights and
    values that are no row. A claim of lower <= 0 says nothing and needs no records.
    """
    began = time.perf_counter()
    w, v = _row(weights, values)
    _check_claim(w, proof)
    checker = _Checker(w, v, proof)
    nodes, number, exact = 1, -1, 0
    kept: Indices = np.empty(0, dtype=np.int64)
    free = np.asarray(proof.keys, dtype=np.int64)
    dropping: list[tuple[Indices, Indices]] = []  # the children that drop their key, still to come
    done = proof.lower <= 0 and proof.marks.size == 0
    for number, (step, nu, z) in enumerate(proof.records(v.shape[1])):
        where = f"record {number} ({KINDS[step.kind]})"
        if done:
            raise InvalidProof(f"{where}: the tree was complete before it")
        checker.used_exact = False
        try:
            if step.kind == BRANCH:
                if kept.size == proof.s:
                    raise InvalidProof(f"all {proof.s} keys are picked")
                rest = free[~_chosen(free, np.array([step.key]))[1]]
                dropping.append((kept, rest))
                kept, free = np.append(kept, step.key), rest
                nodes += 2
            elif step.kind == FIX:
                kept, free = checker.fix(kept, free, step.kept.astype(np.int64), step.dropped.astype(np.int64), z, nu)
            else:
                if step.kind == PRUNE:
                    checker.prune(kept, free, z, nu)
                elif step.kind == MASS:
                    checker.mass(kept, free)
                else:
                    checker.leaf(kept, free)
                done = not dropping
                if dropping:
                    kept, free = dropping.pop()
        except InvalidProof as error:
            raise InvalidProof(f"{where}: {error}") from None
        exact += checker.used_exact
    if not done:
        raise InvalidProof(f"after record {number}: {len(dropping) + 1} nodes are open")
    return Replay(nodes if number >= 0 else 0, number + 1, exact, time.perf_counter() - began)


def exact_error_squared(weights: npt.ArrayLike, values: npt.ArrayLike, subset: npt.ArrayLike) -> Fraction:
    """e(A)^2 of a subset, in the unit of the values squared, without any rounding (P1, section 2).

    Raises ValueError for weights and values that are no row, and for a subset that is not distinct keys of it with
    positive mass.
    """
    w, v = _row(weights, values)
    return _Integers(w, v).error_squared(_subset(w, subset))


def check_certificate(row: "Instance", certificate: "Certificate") -> None:
    """Check from indices alone, in exact rationals, what a certificate and each of its floors say of their subsets.

    That the subset's exact error is `error` within row.rounding and a relative 1e-12, that it is not below `lower`,
    and that the subset keeps the mass floor within a relative 1e-12. Raises InvalidProof that names what fails.
    Whether `lower` holds for all other subsets is for replay() to say.
    """
    integers = _Integers(row.weights, row.values)
    stated = [(f"floor {f.rho:g}", f.subset, f.error, f.lower, f.rho) for f in certificate.floors]
    last = certificate.floors[-1].rho if certificate.floors else 0.0
    stated.append(("certificate", certificate.subset, certificate.error, certificate.lower, last))
    for where, subset, error, lower, rho in stated:
        try:
            keys = _subset(row.weights, subset)
        except ValueError as problem:
            raise InvalidProof(f"{where}: {problem}") from None
        if keys.size != certificate.subset.size:
            raise InvalidProof(f"{where}: {keys.size} keys: expected {certificate.subset.size}")
        if not (math.isfinite(error) and math.isfinite(lower)):
            raise InvalidProof(f"{where}: error {error} and lower {lower}: expected finite numbers")
        squared = integers.error_squared(keys)
        off = Fraction(row.rounding) + ERROR_SLACK * Fraction(error)
        least, most = max(Fraction(0), Fraction(error) - off), Fraction(error) + off
        if not least**2 <= squared <= most**2:
            raise InvalidProof(f"{where}: error {error!r}: its subset has {_root(squared)!r}")
        if lower > 0 and squared < Fraction(lower) ** 2:
            raise InvalidProof(f"{where}: lower {lower!r}: its own subset has {_root(squared)!r}")
        if integers.mass(keys) < Fraction(rho) * _top_mass(row.weights, keys.size) * (1 - MASS_SLACK):
            raise InvalidProof(f"{where}: the subset keeps less than {rho:g} of the top-mass set's mass")


class _Checker:
    """The row and the claim, ready to test records; used_exact says whether the last test left floating point."""

    def __init__(self, weights: Reals, values: Reals, proof: Proof) -> None:
        self.s = proof.s
        self.lower = Fraction(proof.lower)
        self.unit = Fraction(proof.unit)
        self.floor = Fraction(proof.mass_floor) * _top_mass(weights, proof.s)
        self.floats = _Floats(weights, values, proof, self.floor)
        self.integers = _Integers(weights, values)
        self.used_exact = False

    def prune(self, kept: Indices, free: Indices, z: Reals, nu: float) -> None:
        """f >= 0."""
        r = self.s - kept.size
        self._check_vector(z, nu)
        if free.size < r:
            return  # there are no completions
        costs = self.floats.costs(z, nu, kept, free)
        if math.fsum([*costs.constant, *_least(costs.low, r)]) >= 0:
            return
        constant, exact = self._exact_costs(z, nu, kept, free[costs.may_be_among(r)])
        if constant + sum(sorted(exact.values())[:r]) < 0:
            raise InvalidProof("its bound is below 0")

    def fix(
        self, kept: Indices, free: Indices, keep: Indices, drop: Indices, z: Reals, nu: float
    ) -> tuple[Indices, Indices]:
        """The node after the fix: f >= 0 with each kept key forced out, and with each dropped key forced in."""
        r = self.s - kept.size
        self._check_vector(z, nu)
        places, mask = _chosen(free, np.concatenate((keep, drop)))
        if keep.size > r:
            raise InvalidProof(f"it keeps {keep.size} keys: only {r} are to be picked")
        in_places, out_places = places[: keep.size], places[keep.size :]
        if free.size >= r > 0:  # with fewer free keys, or none to pick, no completion has a key to argue about
            self._check_fix(kept, free, in_places, out_places, z, nu)
        return np.concatenate((kept, keep)), free[~mask]

    def _check_fix(
        self, kept: Indices, free: Indices, in_places: Indices, out_places: Indices, z: Reals, nu: float
    ) -> None:
        r = self.s - kept.size
        costs = self.floats.costs(z, nu, kept, free)
        least = np.sort(_least(costs.low, min(r + 1, free.size)))
        # Forced in, a key of the r least changes nothing, and any other takes the place of the r-th.
        others = math.nextafter(math.fsum([*costs.constant, *least[: r - 1]]), -math.inf)
        open_out = out_places[~(np.maximum(costs.low[out_places], least[r - 1]) >= -others)]
        # Forced out, a key leaves the r least of the others; with exactly r free keys that leaves no completion.
        open_in = [
            place
            for place in (in_places.tolist() if free.size > r else [])
            if not math.fsum([*costs.constant, *_least_without(least.tolist(), costs.low[place], r)]) >= 0
        ]
        if not open_out.size and not open_in:
            return
        asked = costs.may_be_among(r + 1)
        asked[open_out] = True
        asked[open_in] = True
        constant, exact = self._exact_costs(z, nu, kept, free[asked])
        least_exact = sorted(exact.values())[: r + 1]
        for key in free[open_out].tolist():
            if constant + sum(least_exact[: r - 1]) + max(exact[key], least_exact[r - 1]) < 0:
                raise InvalidProof(f"the bound with the dropped key {key} forced in is below 0")
        for key in free[open_in].tolist():
            if constant + sum(_least_without(least_exact, exact[key], r)) < 0:
                raise InvalidProof(f"the bound with the kept key {key} forced out is below 0")

    def mass(self, kept: Indices, free: Indices) -> None:
        """The heaviest completion keeps less than the floor."""
        r = self.s - kept.size
        if free.size < r:
            return
        weights = self.floats.weights
        heaviest = [*weights[kept].tolist(), *(-_least(-weights[free], r)).tolist()]
        if math.fsum(heaviest) < self.floats.floor_low:  # fsum rounds monotonically
            return
        self.used_exact = True
        if sum(map(Fraction, heaviest)) >= self.floor:
            raise InvalidProof("the heaviest completion keeps the mass floor")

    def leaf(self, kept: Indices, free: Indices) -> None:
        """No completion has an error below the claim: one, two picks or few completions are all looked at."""
        r = self.s - kept.size
        if free.size < r:
            return
        if r > 2 and math.comb(free.size, r) > MOST_COMPLETIONS:
            raise InvalidProof(f"{free.size} free keys for {r} picks: expected at most {MOST_COMPLETIONS} completions")
        self._completions(kept, free)

    def _completions(self, kept: Indices, free: Indices) -> None:
        r = self.s - kept.size
        if r == free.size:
            kept, free, r = np.concatenate((kept, free)), free[:0], 0
        if r == 0:
            self._evaluate(kept, np.empty((1, 0), dtype=np.int64))
        elif r == 1:
            self._evaluate(kept, free[:, None])
        elif r == 2:
            for pairs in self.floats.open_pairs(kept, free):
                self._evaluate(kept, pairs)
        else:
            for place in range(free.size - r + 1):
                self._completions(np.append(kept, free[place]), free[place + 1 :])

    def _evaluate(self, kept: Indices, more: Indices) -> None:
        """Look at the subsets that kept (k,) makes with each row of more (m, s - k)."""
        for start in range(0, more.shape[0], SUBSETS_AT_ONCE):
            part = more[start : start + SUBSETS_AT_ONCE]
            for extra in part[~self.floats.above(kept, part)]:
                self.used_exact = True
                keys = np.concatenate((kept, extra))
                if self.integers.mass(keys) < self.floor:
                    continue
                squared = self.integers.error_squared(keys)
                if self.lower > 0 and squared < self.lower**2:
                    raise InvalidProof(f"keys {np.sort(keys).tolist()} have an error of {_root(squared)!r}")

    def _check_vector(self, z: Reals, nu: float) -> None:
        if not ((np.abs(z) <= 1).all() and math.isfinite(nu)):
            raise InvalidProof("its vector has an entry beyond 1, or it or its multiplier is not finite")
        if nu < 0:
            raise InvalidProof(f"nu = {nu}: expected at least 0")
        if float(z @ z) * (1 + (2 * z.size + 8) * U) > 1:
            places = _places(z)
            if sum(x * x for x in _integers(z, places).tolist()) > 1 << (2 * places):
                raise InvalidProof(f"|z| = {float(np.linalg.norm(z))!r}: expected at most 1")

    def _exact_costs(self, z: Reals, nu: float, kept: Indices, some: Indices) -> tuple[int, dict[int, int]]:
        """sum_F c_j + nu rho w(top), and c_j of some free keys, as integers of one common positive scale."""
        self.used_exact = True
        multiplier = Fraction(nu) * self.unit
        constant, costs = self.integers.costs(
            z, self.lower + multiplier, multiplier * self.floor, np.concatenate((kept, some)).tolist()
        )
        return constant + sum(costs[: kept.size]), dict(zip(some.tolist(), costs[kept.size :], strict=True))


@dataclass(frozen=True, eq=False)
class _Costs:
    """Of one node and vector: lower estimates of the summands of f that are certain, bounds (m,) of the free c_j."""

    constant: list[float]
    low: Reals
    high: Reals

    def may_be_among(self, r: int) -> npt.NDArray[np.bool_]:
        """Free keys that may be among the r of least c_j; all keys that are not have r keys surely below them."""
        if r < 1 or r >= self.high.size:
            return np.full(self.high.size, r > 0)
        return np.asarray(self.low <= np.partition(self.high, r - 1)[r - 1])


class _Floats:
    """The float filter: c_j and errors with bounds that hold whatever the order of summation (ours).

    Values are taken in a power of two, so that the largest entry is in [1/2, 1); with u = 2^-53:
    - any m0 near mu. delta = mu - m0 = sum_j w_j (v_j - m0) / W is computed in whatever order, and is off by at most
      (n + 5) u sigma in norm, sigma = sum_j w_j |v_j - m0| / W.
    - y_j = fl(fl(v_j - m0) - delta) is then off from v_j - mu by at most 2.1 u |y_j| + u |delta| + (n + 5) u sigma, and
      a_j = fl(w_j y_j) by w_j (3.2 u |y_j| + drift), drift = (n + 8) u (sigma + |delta|).
    - z.a_j, in any order and with or without fused operations, is off by at most d u |z| |a_j| (1 + d u), the price
      lower + nu and its product with w_j by 2 u of it, and differences by u of their parts.
    So c_j is off by at most off_j + 8 u (lower + nu) w_j, off_j = (d + s + 16) u w_j |y_j| + w_j drift + tiny: that has
    8 u of each part to spare for computing the bounds themselves, and s u for the sum of s of the a_j. tiny bounds
    what underflow takes. d + s and n are far below 2^20, so that products of errors do not matter.
    """

    def __init__(self, weights: Reals, values: Reals, proof: Proof, floor: Fraction) -> None:
        n, d = values.shape
        self.weights = weights
        self.s = proof.s
        exponent = math.frexp(float(np.abs(values).max()))[1]
        self.nu_exponent = math.frexp(proof.unit)[1] - 1 - exponent
        self.lower = _shifted(proof.lower, -exponent)
        self.floor_low = math.nextafter(float(floor), -math.inf)
        scaled = np.ldexp(values, -exponent)
        total = math.fsum(weights.tolist())
        centred = scaled - (weights @ scaled) / total
        delta = (weights @ centred) / total
        spread = float(weights @ self._norms(centred)) / total
        drift = (n + 8) * U * (1 + 1e-6) * (spread + float(self._norms(delta[None, :])[0]))
        centred -= delta
        self.steps = weights[:, None] * centred
        self.tiny = (4 * d + 64) * 2.0**-1074
        self.off = (d + proof.s + 16) * U * weights * self._norms(centred) + weights * drift + self.tiny
        self.sizes = weights * self._norms(centred) + self.tiny

    @staticmethod
    def _norms(vectors: Reals) -> Reals:
        """Upper estimates of the norms of the rows of (m, d)."""
        d = vectors.shape[1]
        found: Reals = np.sqrt(np.einsum("ij,ij->i", vectors, vectors)) * (1 + (2 * d + 16) * U)
        return found + math.sqrt(d) * SQUARES_LOST

    def costs(self, z: Reals, nu: float, kept: Indices, free: Indices) -> _Costs:
        """Bounds of every part of f at a node, for |z| <= 1 and nu >= 0 in the log's unit."""
        multiplier = _shifted(nu, self.nu_exponent)
        price = self.lower + multiplier
        keys = np.concatenate((kept, free))
        if not math.isfinite(price):  # beyond float64 in this unit: nothing is known of the costs
            low = np.full(keys.size, -math.inf)
            return _Costs(low[: kept.size].tolist(), low[kept.size :], -low[kept.size :])
        weights = self.weights[keys]
        if 2 * keys.size > self.weights.size:
            moved = (self.steps @ z)[keys]
        else:
            moved = self.steps[keys] @ z
        cost = moved - price * weights
        off = self.off[keys] + (8 * U * abs(price)) * weights
        low, high = cost - off, cost + off
        for_mass = max(0.0, multiplier * self.floor_low * (1 - 4 * U) - self.tiny)
        return _Costs([*low[: kept.size].tolist(), for_mass], low[kept.size :], high[kept.size :])

    def above(self, kept: Indices, more: Indices) -> npt.NDArray[np.bool_]:
        """Which of the subsets that kept (k,) makes with each row of more (m, s - k) surely need no closer look.

        Their error is at least the claim, or they keep less than the floor.
        """
        d = self.steps.shape[1]
        moved = self.steps[kept].sum(axis=0) + self.steps[more].sum(axis=1)
        mass = self.weights[kept].sum() + self.weights[more].sum(axis=1)
        off = self.off[kept].sum() + self.off[more].sum(axis=1)
        norm = np.sqrt(np.einsum("ij,ij->i", moved, moved)) * (1 - (d + 8) * U) - math.sqrt(d) * SQUARES_LOST
        needed = (self.lower * mass + off) * (1 + (2 * self.s + 32) * U)
        light = mass * (1 + (2 * self.s + 8) * U) < self.floor_low
        return np.asarray((norm >= needed) | light)

    def open_pairs(self, kept: Indices, free: Indices) -> Iterable[Indices]:
        """Pairs (m, 2) of free keys that two screens leave open: all others make, with kept, no improving subset.

        The first is the bound of a prune with z along the kept residual, which a pair must bring below 0; the second
        is |p + a_i|^2 + 2 (p + a_i).a_j + |a_j|^2, p the kept residual, with the rounding of its cancellation.
        """
        d = self.steps.shape[1]
        residual = self.steps[kept].sum(axis=0)
        size = float(np.linalg.norm(residual))
        z = residual / size * (1 - (d + 8) * U) if size > SQUARES_LOST * 2 * d else np.zeros(d)
        costs = self.costs(z, 0.0, kept, free)
        others = math.nextafter(math.fsum(costs.constant), -math.inf)
        heaviest = self.weights[kept].sum() + self.weights[free] + self.weights[free].max()
        open_ = ~(heaviest * (1 + (2 * self.s + 8) * U) < self.floor_low)
        open_ &= costs.low < math.nextafter(-(others + float(costs.low.min())), math.inf)
        order = np.argsort(costs.low[open_])
        keys, low = free[open_][order], costs.low[open_][order]
        # A pair i < j in this order is open only if low_j < -(others + low_i): up to ends[i].
        ends = np.searchsorted(low, np.nextafter(-(others + low), math.inf), side="left")
        firsts = int(np.count_nonzero(ends > np.arange(1, keys.size + 1)))  # ends fall, so these are a prefix
        steps, weights, off, sizes = (x[keys] for x in (self.steps, self.weights, self.off, self.sizes))
        kept_mass, kept_off, kept_size = (float(x[kept].sum()) for x in (self.weights, self.off, self.sizes))
        squares = np.einsum("ij,ij->i", steps, steps)
        for start in range(0, firsts, PAIR_ROWS):
            stop, end = min(start + PAIR_ROWS, firsts), int(ends[start])
            one, two = slice(start, stop), slice(start + 1, end)
            near = residual + steps[one]
            squared = np.einsum("ij,ij->i", near, near)[:, None] + 2 * (near @ steps[two].T) + squares[None, two]
            span = kept_size + sizes[one, None] + sizes[None, two]
            needed = self.lower * (kept_mass + weights[one, None] + weights[None, two])
            needed = (needed + kept_off + off[one, None] + off[None, two]) * (1 + (2 * self.s + 32) * U)
            unsure = ~(squared - (4 * d + 2 * self.s + 32) * U * span**2 - SQUARES_LOST**2 >= needed**2)
            columns = np.arange(start + 1, end)
            unsure &= (columns[None, :] > np.arange(start, stop)[:, None]) & (columns[None, :] < ends[one, None])
            first, second = np.nonzero(unsure)
            yield np.stack((keys[one][first], keys[two][second]), axis=1)


class _Integers:
    """The row in integers: weights times 2^weight_places, values times 2^value_places."""

    def __init__(self, weights: Reals, values: Reals) -> None:
        self.float_weights, self.values = weights, values
        self._of_key: dict[int, list[int]] = {}

    @cached_property
    def weight_places(self) -> int:
        return _places(self.float_weights)

    @cached_property
    def value_places(self) -> int:
        return _places(self.values)

    @cached_property
    def weights(self) -> list[int]:
        found: list[int] = _integers(self.float_weights, self.weight_places).tolist()
        return found

    @cached_property
    def total(self) -> int:
        """W."""
        return sum(self.weights)

    @cached_property
    def sums(self) -> list[int]:
        """W mu = sum_j w_j v_j, in both scales at once."""
        weights = np.array(self.weights, dtype=object)
        found = np.zeros(self.values.shape[1], dtype=object)
        for start in range(0, weights.size, 1024):  # the integers of all values at once could fill the memory
            part = slice(start, start + 1024)
            found = found + weights[part] @ _integers(self.values[part], self.value_places)
        return [int(x) for x in found]

    def value(self, key: int) -> list[int]:
        """v_j."""
        if key not in self._of_key:
            self._of_key[key] = _integers(self.values[key], self.value_places).tolist()
        return self._of_key[key]

    def costs(self, z: Reals, price: Fraction, constant: Fraction, keys: list[int]) -> tuple[int, list[int]]:
        """The constant and c_j = z.a_j - price w_j of the keys, all times W and one power of two.

        W c_j = w_j (W z.v_j - z.(W mu)) - price W w_j: no division is left. The price and the constant come from
        floats by sums and products, so that their denominators are powers of two.
        """
        z_places = _places(z)
        direction = _integers(z, z_places).tolist()
        along_sums = sum(a * b for a, b in zip(direction, self.sums, strict=True))
        moved_places = z_places + self.value_places + 2 * self.weight_places
        price_places = price.denominator.bit_length() - 1 + 2 * self.weight_places
        constant_places = constant.denominator.bit_length() - 1 + self.weight_places
        places = max(moved_places, price_places, constant_places)
        found = []
        for key in keys:
            along = sum(a * b for a, b in zip(direction, self.value(key), strict=True))
            moved = self.weights[key] * (self.total * along - along_sums)
            paid = price.numerator * self.total * self.weights[key]
            found.append((moved << (places - moved_places)) - (paid << (places - price_places)))
        return constant.numerator * self.total << (places - constant_places), found

    def mass(self, keys: Indices) -> Fraction:
        """w(A)."""
        return sum((Fraction(x) for x in self.float_weights[keys].tolist()), Fraction(0))

    def error_squared(self, keys: Indices) -> Fraction:
        """e(A)^2, from (w(A) W) m_A = W sum_A w_j v_j - w(A) (W mu)."""
        chosen = keys.tolist()
        mass = sum(self.weights[j] for j in chosen)
        kept = (sum(self.weights[j] * self.value(j)[i] for j in chosen) for i in range(len(self.sums)))
        moved = [self.total * a - mass * b for a, b in zip(kept, self.sums, strict=True)]
        scale = Fraction(2) ** (-2 * self.value_places)
        return Fraction(sum(x * x for x in moved), (self.total * mass) ** 2) * scale


def _row(weights: npt.ArrayLike, values: npt.ArrayLike) -> tuple[Reals, Reals]:
    w, v = np.asarray(weights, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if w.ndim != 1 or v.ndim != 2 or v.shape[0] != w.size or 0 in v.shape:
        raise ValueError(f"weights and values have shapes {w.shape} and {v.shape}: expected (n,) and (n, d)")
    if not (np.isfinite(w).all() and np.isfinite(v).all()):
        raise ValueError("weights or values have NaN or infinite entries: expected finite ones")
    if (w < 0).any() or not abs(math.fsum(w.tolist()) - 1) <= SUM_TOLERANCE:
        raise ValueError(f"weights are not of one sign with sum 1 within {SUM_TOLERANCE:g}: expected a row's")
    return w, v


def _subset(weights: Reals, subset: npt.ArrayLike) -> Indices:
    keys = np.asarray(subset)
    if keys.ndim != 1 or keys.size == 0 or keys.dtype.kind not in "iu":
        raise ValueError(f"a subset of shape {keys.shape} and type {keys.dtype}: expected (s,) integers, s >= 1")
    keys = keys.astype(np.int64)
    if np.unique(keys).size != keys.size or keys.min() < 0 or keys.max() >= weights.size:
        raise ValueError(f"subset {keys.tolist()}: expected distinct keys in 0 to {weights.size - 1}")
    if not weights[keys].any():
        raise ValueError("a subset whose keys all have weight 0: expected positive mass")
    return keys


def _check_claim(weights: Reals, proof: Proof) -> None:
    keys = proof.keys
    for name, dtype in (("keys", np.int64), ("marks", np.int32), ("reals", np.float64)):
        array = getattr(proof, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            raise InvalidProof(f"claim: {name}: expected a one-dimensional array of {np.dtype(dtype)}")
    for name, kinds in (("s", (int, np.integer)), ("mass_floor", float), ("lower", float), ("unit", float)):
        if not isinstance(getattr(proof, name), kinds):
            raise InvalidProof(f"claim: {name} = {getattr(proof, name)!r}: not of its type")
    if not 1 <= proof.s <= weights.size:
        raise InvalidProof(f"claim: s = {proof.s}: expected 1 to {weights.size}, the number of keys")
    if not 0 <= proof.mass_floor <= 1:
        raise InvalidProof(f"claim: mass_floor = {proof.mass_floor}: expected 0 to 1")
    if not math.isfinite(proof.lower):
        raise InvalidProof(f"claim: lower = {proof.lower}: expected a finite number")
    if not (0 < proof.unit < math.inf and math.frexp(proof.unit)[0] == 0.5):
        raise InvalidProof(f"claim: unit = {proof.unit}: expected a power of two")
    if keys.ndim != 1 or keys.size == 0 or keys[0] < 0 or keys[-1] >= weights.size or (np.diff(keys) <= 0).any():
        raise InvalidProof(f"claim: keys: expected ascending indices in 0 to {weights.size - 1}")
    if not (weights[keys] > 0).all():
        raise InvalidProof("claim: some of its keys have weight 0: expected positive weights")


def _top_mass(weights: Reals, s: int) -> Fraction:
    """Mass of the s heaviest keys of the whole row, exact."""
    return sum(map(Fraction, np.sort(weights)[-s:].tolist()), Fraction(0))


def _chosen(free: Indices, ids: Indices) -> tuple[Indices, npt.NDArray[np.bool_]]:
    """Where ids stand in the ascending free keys, and a mask of them; InvalidProof if not free or named twice."""
    places = np.searchsorted(free, ids)
    found = places < free.size
    found[found] = free[places[found]] == ids[found]
    if not found.all():
        raise InvalidProof(f"key {ids[~found][0]} is not free")
    mask = np.zeros(free.size, dtype=bool)
    mask[places] = True
    if np.count_nonzero(mask) != places.size:
        raise InvalidProof("it names a key twice")
    return places, mask


def _least(numbers: Reals, r: int) -> Reals:
    """The r least of them, in no order."""
    return np.partition(numbers, r - 1)[:r] if 0 < r < numbers.size else numbers[:r]


def _least_without(least: list[Number], one: Number, r: int) -> list[Number]:
    """The r least numbers but one of them, given the r + 1 least in order."""
    rest = list(least)
    if one in rest:
        rest.remove(one)
    return rest[:r]


def _shifted(number: float, exponent: int) -> float:
    """Times 2^exponent; infinite where that is beyond float64."""
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.copysign(math.inf, number)


def _places(numbers: Reals) -> int:
    """Binary places after the point that hold all of the float64 numbers exactly."""
    exponents = np.frexp(numbers[numbers != 0])[1]
    return 53 - int(exponents.min()) if exponents.size else 0


def _integers(numbers: Reals, places: int) -> npt.NDArray[np.object_]:
    """The numbers times 2^places, as Python integers."""
    mantissas, exponents = np.frexp(numbers)
    shifts = np.where(numbers == 0, 0, exponents - 53 + places)
    found: npt.NDArray[np.object_] = np.ldexp(mantissas, 53).astype(np.int64).astype(object) << shifts.astype(object)
    return found


def _root(squared: Fraction) -> float:
    """The square root, to the digits of a message, where the square itself may be beyond float64."""
    half = (squared.numerator.bit_length() - squared.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(squared / Fraction(4) ** half), half)
