"""Every compiled loop. They stand in one file because numba's cache does not see an edit to a callee elsewhere.

Arrays: a (n, d) holds the steps a_j = p_j (v_j - mu) and c (n, d) the centred values v_j - mu, both divided by the
row's unit; w (n,) the weights. Everything is float64 and C-contiguous. Subsets are index arrays into the arrays given.

A corral (Wolfe's word) is a set of at most d + 2 points of R^d with convex weights beta over it: rows of `points`,
with the Gram matrix `gram` and with `ids[k]`, the keys that point k stands for.
"""

import math
import time

import numba as nb
import numpy as np

MATRIX = nb.types.Array(nb.float64, 2, "C", readonly=True)
VECTOR = nb.types.Array(nb.float64, 1, "C", readonly=True)
KEYS = nb.types.Array(nb.int64, 1, "C", readonly=True)
FOUND, MEAN, REAL, COUNT, MARKS = nb.int64[::1], nb.float64[::1], nb.float64, nb.int64, nb.int32[::1]

# Wolfe's method. These steer the search and decide nothing: a bound is proved from its vector z, however z was found.
LARGER = 100.0  # by how much the mean of the Gram diagonal may move before the corral's factor is made anew
RIDGE = 1e-14  # times the mean of the Gram diagonal: keeps the Cholesky factor of a degenerate corral alive
VANISHING = 1e-9  # a convex weight below it leaves the corral
FACE_TOLERANCE = 1e-3  # a node's relaxation ends when no kept mean lies deeper than this, relative to |x|^2
FEW_TOLERANCE = 1e-7  # the same among few keys, where a step costs next to nothing
POINT_TOLERANCE = 1e-12  # the same for a free error, which is a result and not a step of a search
# A relaxation below tau cannot prune, but it goes on for a few steps or to so many times tau: its z and nu then fix
# more keys, and its split keys are better ones to branch on.
EARLY_STOP, STEPS_BELOW = 0.95, 4
FEW_KEYS = 64  # among so few keys there is little to fix: a relaxation ends at tau
POLISHING = 10  # steps at most; each but the last lowers |x|
MOST_STEPS = 60  # oracle calls per node
MOST_OFFERED = 24  # keys among which the one to branch on is chosen
ROUNDED_NODES, ROUNDED_EVERY = 300, 8  # relaxations are rounded at so many first nodes, and then at every so many-th
NEAR_KEYS = 256  # keys of largest reach among which rounded relaxations are improved by swaps
SPANNED = 0.2  # where the growth expected lies, on a log scale, between that if no other key moves and that if all do
CONSTANT, SPAN_RIDGE = 10.0, 1e-7  # times the mean square of the points: a constant coordinate and its ridge
LEAF_SUBSETS = 400  # a node with at most so many completions is enumerated: that costs no more than a relaxation
MOST_FEW = 64  # so many keys at most are searched by the products of their steps
PRODUCT_ROWS = 300  # there, a node is enumerated that has at most so many rows of completions: 20 ns or so each
SHARP = 0.01  # products serve where their rounding is below this share of the least |y_A|^2 of interest
TOO_SHORT = 1e-3  # times tau: a shorter point of a relaxation has lost its direction, and cannot prune anyway

# Floating point. These decide, and are derived where they are used.
U = 2.0**-53
INFLATION = 1.0 + 1e-12  # covers the rounding of a computed norm of up to 4,096 entries
ABSOLUTE = 1e-300  # added to every reach: covers products that underflow
UNDERFLOWN = 1e-150  # added to a length: covers squares that underflow
SQUARE_ABSOLUTE = 1e-290  # the same for sums of a_i . a_j

# Records of a proof log; what each says is told at solvers.proof.
BRANCH, FIX, PRUNE, MASS, LEAF = range(5)

# Why branch and bound stopped.
DONE, OUT_OF_NODES, OUT_OF_TIME, FOUND_ONE = 0, 1, 2, 3
CLOCK_WORK = 1 << 20  # multiplications between two looks at the clock: a millisecond or so
FLOOR_SCALE = 30.0  # times tau: how much a point's shortfall weighs in its norm; the more, the nearer is nu to the best
PAST = 64  # so many vectors of relaxations are remembered: a power of two
SHORTFALL = 1e-6  # a relaxed point that keeps less than the floor by more than this share lets the floor in
LARGEST_NU = 1e3  # times tau: a larger multiplier of the floor only costs digits

IMPROVED = 1.0 - 1e-12  # a swap must lower e_s below this share of it (P1: a swap that decreases e_s)
LESS_FREE = 1.0 - 1e-9  # a change of support must lower the free error below this share of it
MOST_SWAPS = 200  # from one kick: rounding must not let them circle
NEAR_BUDGETS, NEAR_TENTHS = 2, 7  # so many tenths of a kick's keys come from the first 2 s keys: few others are kept
WORSE = 0.1  # at first, a kicked subset may be worse than the current one by this share of its error
CLOCK_KICKS = 8  # kicks between two looks at the clock: a millisecond or so
REFRESH = 1024  # enumeration recomputes its running sum from scratch every so many subsets


@nb.njit(cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def dot(x, y):
    """x . y in any order of summation."""
    total = 0.0
    for i in range(x.shape[0]):
        total += x[i] * y[i]
    return total


@nb.njit(cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def squared_sum(x, y):
    """|x + y|^2, with no cancellation but that of x + y itself."""
    total = 0.0
    for i in range(x.shape[0]):
        t = x[i] + y[i]
        total += t * t
    return total


@nb.njit(cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def distance(x, y):
    """|x - y| of vectors of length at most 1, rounded up."""
    total = 0.0
    for i in range(x.shape[0]):
        t = x[i] - y[i]
        total += t * t
    return math.sqrt(total) * INFLATION + UNDERFLOWN


@nb.njit(cache=True, error_model="numpy")
def now():
    """The clock of time.perf_counter, in seconds."""
    with nb.objmode(seconds="f8"):
        seconds = time.perf_counter()
    return seconds


@nb.njit(cache=True, error_model="numpy")
def error_of(a, w, subset, total):
    """e_s of a subset from its steps, into `total` (d,) as work space; exact where p(A) is tiny."""
    mass = 0.0
    total[:] = 0.0
    for k in range(subset.shape[0]):
        j = subset[k]
        mass += w[j]
        for i in range(total.shape[0]):
            total[i] += a[j, i]
    for i in range(total.shape[0]):
        total[i] /= mass
    return math.sqrt(dot(total, total))


@nb.njit(cache=True, error_model="numpy")
def shortfall(w, subset, least_mass):
    """h = least_mass / p(A) - 1: above 0 where the subset keeps too little."""
    mass = 0.0
    for j in subset:
        mass += w[j]
    return least_mass / mass - 1.0


@nb.njit(MEAN(VECTOR, MATRIX, VECTOR), cache=True, error_model="numpy")
def weighted_offset(w, v, centre):
    """sum_j w_j (v_j - centre), (d,), by compensated summation (Neumaier): its error does not grow with n."""
    n, d = v.shape
    total, lost = np.zeros(d), np.zeros(d)
    for j in range(n):
        for i in range(d):
            term = w[j] * (v[j, i] - centre[i])
            new = total[i] + term
            if abs(total[i]) >= abs(term):
                lost[i] += (total[i] - new) + term
            else:
                lost[i] += (term - new) + total[i]
            total[i] = new
    return total + lost


# ----------------------------------------------------------------------------------------------------------------
# Candidate set


@nb.njit(FOUND(VECTOR, VECTOR, KEYS, COUNT), cache=True, error_model="numpy")
def candidates(w, single_key_errors, top, wanted):
    """The top-mass set and the `wanted` other keys of positive weight with the largest single-key errors; sorted.

    Ties go to the lowest index. There must be that many.
    """
    chosen = np.empty(wanted, np.int64)
    inside = np.zeros(w.shape[0], np.bool_)
    inside[top] = True
    m = 0
    for j in range(w.shape[0]):
        if w[j] > 0 and not inside[j]:
            if m < wanted:
                i = m
                m += 1
            elif wanted > 0 and single_key_errors[j] > single_key_errors[chosen[m - 1]]:
                i = m - 1
            else:
                continue
            while i > 0 and single_key_errors[chosen[i - 1]] < single_key_errors[j]:
                chosen[i] = chosen[i - 1]
                i -= 1
            chosen[i] = j
    return np.sort(np.concatenate((top, chosen)))


@nb.njit(nb.boolean(VECTOR, KEYS), cache=True, error_model="numpy")
def ascending_positive(w, keys):
    """Whether the keys are ascending, distinct, in range and of positive weight."""
    for k in range(keys.shape[0]):
        j = keys[k]
        if j < 0 or j >= w.shape[0] or not w[j] > 0.0 or (k > 0 and j <= keys[k - 1]):
            return False
    return True


# ----------------------------------------------------------------------------------------------------------------
# Balancing selector


@nb.njit(nb.types.Tuple((FOUND, REAL, COUNT))(MATRIX, VECTOR, KEYS, REAL, REAL), cache=True, error_model="numpy")
def balance(a, w, start, least_mass, deadline):
    """From `start`, the swap (drop i, add j) that lowers e_s most, until none lowers it (P1, section 2).

    Swaps that would keep less than least_mass are passed over (0: none is). Ties go to the smallest (i, j). Every e_s
    is summed from the steps, so no swap is accepted on cancellation noise. The clock (`deadline`, of time.perf_counter;
    infinite: none) is looked at before each swap. Returns the subset, its error and the number of swaps.
    """
    n, d = a.shape
    s = start.shape[0]
    subset = np.sort(start)
    inside = np.zeros(n, np.bool_)
    inside[subset] = True
    rest, mean = np.empty(d), np.empty(d)
    after, mass_after = np.zeros((s + 1, d)), np.zeros(s + 1)  # sums over subset[k:]
    before = np.empty(d)
    swaps = 0
    error = error_of(a, w, subset, mean)
    while deadline == np.inf or now() <= deadline:
        for k in range(s - 1, -1, -1):
            after[k] = after[k + 1] + a[subset[k]]
            mass_after[k] = mass_after[k + 1] + w[subset[k]]
        before[:] = 0.0
        mass_before = 0.0
        best, out, into = error * IMPROVED, -1, -1
        for k in range(s):
            # Sums over the others, not a difference: a heavy key that leaves would take the digits of the light ones.
            for t in range(d):
                rest[t] = before[t] + after[k + 1, t]
            mass = mass_before + mass_after[k + 1]
            for j in range(n):
                if not inside[j] and mass + w[j] >= least_mass:
                    bound = best * (mass + w[j])
                    square = squared_sum(rest, a[j])
                    if square < bound * bound:
                        offered = math.sqrt(square) / (mass + w[j])
                        if offered < best:
                            best, out, into = offered, k, j
            before += a[subset[k]]
            mass_before += w[subset[k]]
        if out < 0:
            break
        trial = subset.copy()
        trial[out] = into
        trial = np.sort(trial)
        after_swap = error_of(a, w, trial, mean)
        if not after_swap < error * IMPROVED:  # the errors strictly fall, so this ends
            break
        inside[subset[out]] = False
        inside[into] = True
        subset, error = trial, after_swap
        swaps += 1
    return subset, error, swaps


# ----------------------------------------------------------------------------------------------------------------
# Exhaustive enumeration


@nb.njit(cache=True, error_model="numpy")
def revolve(chosen, r):
    """The next r-subset in revolving-door order: the element that leaves and the one that enters; (-1, -1) at the end.

    Knuth, The Art of Computer Programming 4A, section 7.2.1.3, Algorithm R, steps R3 to R5. chosen[:r] is ascending and
    chosen[r] = n its sentinel; the first subset is 0, ..., r - 1.
    """
    if r % 2 == 1:
        if chosen[0] + 1 < chosen[1]:
            chosen[0] += 1
            return chosen[0] - 1, chosen[0]
        raising = False
    else:
        if chosen[0] > 0:
            chosen[0] -= 1
            return chosen[0] + 1, chosen[0]
        raising = True
    for k in range(1, r):
        if raising:
            if chosen[k] + 1 < chosen[k + 1]:
                out = chosen[k - 1]
                chosen[k - 1] = chosen[k]
                chosen[k] += 1
                return out, chosen[k]
        elif chosen[k] > k:
            out = chosen[k]
            chosen[k] = chosen[k - 1]
            chosen[k - 1] = k - 1
            return out, k - 1
        raising = not raising
    return -1, -1


@nb.njit(cache=True, error_model="numpy")
def best_completion(a, w, kept, n_kept, free, n_free, r, least_mass, best, best_set, total, fresh):
    """Visit every way to complete the kept keys by r of the free ones (n_free >= r >= 1).

    The running sum and mass drift by at most 2 REFRESH u times the sizes added between two refreshes; a subset whose
    error could be below the best within that drift is summed afresh, so the answer is that of summing each subset
    from its own steps. Subsets of less than least_mass are passed over. Updates best_set in place; returns the least
    error (at most `best`) and the number of subsets visited.
    """
    d, s = a.shape[1], n_kept + r
    chosen = np.arange(r + 1)
    chosen[r] = n_free
    trial = np.empty(s, np.int64)
    trial[:n_kept] = kept[:n_kept]
    largest, heaviest = 0.0, 0.0
    for t in range(n_free):
        largest = max(largest, dot(a[free[t]], a[free[t]]))
        heaviest = max(heaviest, w[free[t]])
    for k in range(n_kept):
        largest = max(largest, dot(a[kept[k]], a[kept[k]]))
        heaviest = max(heaviest, w[kept[k]])
    drift = 4.0 * (REFRESH + s + d) * U * (s + 2) * (math.sqrt(largest) + best * heaviest)
    mass, visited = 0.0, 0
    while True:
        if visited % REFRESH == 0:
            total[:] = 0.0
            mass = 0.0
            for k in range(n_kept):
                total += a[kept[k]]
                mass += w[kept[k]]
            for i in range(r):
                total += a[free[chosen[i]]]
                mass += w[free[chosen[i]]]
        visited += 1
        limit = best * mass * INFLATION + drift
        if dot(total, total) <= limit * limit:
            for i in range(r):
                trial[n_kept + i] = free[chosen[i]]
            error = error_of(a, w, trial, fresh)
            if error < best and (least_mass <= 0.0 or shortfall(w, trial, least_mass) <= 0.0):
                best = error
                best_set[:] = trial
        out, into = revolve(chosen, r)
        if out < 0:
            return best, visited
        entering, leaving = a[free[into]], a[free[out]]
        for i in range(d):
            total[i] += entering[i] - leaving[i]
        mass += w[free[into]] - w[free[out]]


@nb.njit(nb.types.Tuple((FOUND, REAL, COUNT))(MATRIX, VECTOR, COUNT), cache=True, error_model="numpy")
def enumerate_subsets(a, w, s):
    """The best s-subset of all n keys, by visiting every one; the subset, its error and the number visited."""
    n, d = a.shape
    best_set = np.arange(s)
    none, every = np.empty(0, np.int64), np.arange(n).astype(np.int32)
    total, fresh = np.empty(d), np.empty(d)
    first = error_of(a, w, best_set, fresh)
    best, visited = best_completion(a, w, none, 0, every, n, s, 0.0, first, best_set, total, fresh)
    return best_set, best, visited


@nb.njit(cache=True, error_model="numpy")
def few_subsets(n, r, limit):
    """Whether C(n, r) <= limit, without forming a large binomial."""
    count = 1.0
    for k in range(min(r, n - r)):
        count *= (n - k) / (k + 1)
        if count > limit + 0.5:
            return False
    return True


# ----------------------------------------------------------------------------------------------------------------
# Minimum-norm points


@nb.njit(cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def affine_minimiser(gram, size, factor, known, u):
    """Weights u, summing to 1, of the least-norm point of the affine hull; False where the corral is degenerate.

    Wolfe: solve (Q + t ee') u = e by Cholesky and divide by the sum of u. known: how many rows of the factor are those
    of the present Gram matrix, and t; the factor is made anew where the points have left the size of t.
    """
    first, shift, mean = int(known[0]), known[1], 0.0
    for i in range(size):
        mean += gram[i, i] / size
    if first == 0 or not shift / LARGER < mean < shift * LARGER:
        first, shift = 0, mean if mean > 0 else 1.0
        known[1] = shift
    for i in range(first, size):
        for j in range(i + 1):
            r = gram[i, j] + shift
            if i == j:
                r += RIDGE * shift
            for k in range(j):
                r -= factor[i, k] * factor[j, k]
            if i == j:
                if r <= 0:
                    known[0] = i
                    return False
                factor[i, i] = math.sqrt(r)
            else:
                factor[i, j] = r / factor[j, j]
    known[0] = size
    for i in range(size):
        r = 1.0
        for k in range(i):
            r -= factor[i, k] * u[k]
        u[i] = r / factor[i, i]
    total = 0.0
    for i in range(size - 1, -1, -1):
        u[i] /= factor[i, i]
        for k in range(i):
            u[k] -= factor[i, k] * u[i]
        total += u[i]
    if not total > 0:
        return False
    for i in range(size):
        u[i] /= total
    return True


@nb.njit(cache=True, error_model="numpy")
def leave(k, size, beta, points, ids, gram, known):
    """Take point k out of the corral (the last one takes its place); the new size."""
    last = size - 1
    known[0] = min(known[0], k)
    if k != last:
        beta[k] = beta[last]
        points[k] = points[last]
        ids[k] = ids[last]
        for i in range(size):
            gram[k, i] = gram[last, i]
        for i in range(size):
            gram[i, k] = gram[i, last]
        gram[k, k] = gram[last, last]
    return last


@nb.njit(cache=True, error_model="numpy")
def normalise(beta, size):
    """Scale convex weights to sum 1 (equal ones if they vanished)."""
    total = 0.0
    for k in range(size):
        total += beta[k]
    for k in range(size):
        beta[k] = beta[k] / total if total > 1e-12 else 1.0 / size


@nb.njit(cache=True, error_model="numpy")
def minor_cycles(size, beta, points, ids, gram, factor, known, u):
    """Move beta to the least-norm point of the corral's hull, dropping points that it does not use; the new size."""
    while size > 1:
        if not affine_minimiser(gram, size, factor, known, u):
            k = 0
            for i in range(1, size):
                if beta[i] < beta[k]:
                    k = i
            size = leave(k, size, beta, points, ids, gram, known)
            normalise(beta, size)
            continue
        theta, blocking = 1.0, -1
        for i in range(size):
            if u[i] < VANISHING:
                ratio = beta[i] / (beta[i] - u[i]) if beta[i] > u[i] else 0.0
                if ratio < theta or blocking < 0:
                    theta, blocking = min(ratio, theta), i
        if blocking < 0:
            for i in range(size):
                beta[i] = u[i]
            return size
        for i in range(size):
            beta[i] += theta * (u[i] - beta[i])
        beta[blocking] = 0.0
        i = 0
        while i < size:
            if beta[i] <= VANISHING and size > 1:
                size = leave(i, size, beta, points, ids, gram, known)
            else:
                i += 1
        normalise(beta, size)
    beta[0] = 1.0
    return size


@nb.njit(cache=True, error_model="numpy")
def enter(point, size, beta, points, gram):
    """Append a point with weight 0 (its row of ids is the caller's); the new size."""
    points[size] = point
    beta[size] = 0.0
    for k in range(size + 1):
        gram[size, k] = dot(points[size], points[k])
        gram[k, size] = gram[size, k]
    return size + 1


@nb.njit(cache=True, error_model="numpy")
def combine(size, beta, points, x):
    """x = sum_k beta_k points_k."""
    x[:] = 0.0
    for k in range(size):
        for i in range(x.shape[0]):
            x[i] += beta[k] * points[k, i]


@nb.njit(cache=True, error_model="numpy")
def nearest_over(c, members, size, beta, points, ids, gram, factor, known, u, x):
    """Wolfe's algorithm: from the corral given, the least-norm point x of the hull of c[members]; the new size.

    The corral must be part of the members, and not empty; ids[k, 0] is the key of point k.
    """
    room = points.shape[0]
    for _ in range(4 * members.shape[0] + 20):  # Wolfe needs about as many; the corral is valid at any stop
        size = minor_cycles(size, beta, points, ids, gram, factor, known, u)
        combine(size, beta, points, x)
        square = dot(x, x)
        deepest, least = -1, square * (1.0 - POINT_TOLERANCE)
        for j in members:
            depth = dot(c[j], x)
            if depth < least:
                deepest, least = j, depth
        for k in range(size):
            if ids[k, 0] == deepest:
                deepest = -1  # rounding: the deepest point is in the corral already
        if deepest < 0 or size == room:
            break
        size = enter(c[deepest], size, beta, points, gram)
        ids[size - 1, 0] = deepest
    polish(size, beta, points, gram, factor, known, u, x)
    return size


@nb.njit(cache=True, error_model="numpy")
def polish(size, beta, points, gram, factor, known, u, x):
    """Iterative refinement of the corral's weights, from x itself rather than the Gram matrix, while |x| falls.

    The Gram matrix squares the values, so a distance below 1e-8 of their size is lost in it; the gradient points.x is
    not. A step is kept only if it leaves all weights positive and lowers |x|.
    """
    if size < 2:
        return
    ones, moved = np.empty(size), np.empty(x.shape[0])
    for _ in range(POLISHING):
        if not affine_minimiser(gram, size, factor, known, u):
            return
        for i in range(size):  # u = (Q + t ee')^-1 gradient, ones = (Q + t ee')^-1 e, by the factor just made
            u[i] = dot(points[i], x)
            ones[i] = 1.0
        for v in (u, ones):
            for i in range(size):
                for k in range(i):
                    v[i] -= factor[i, k] * v[k]
                v[i] /= factor[i, i]
            for i in range(size - 1, -1, -1):
                for k in range(i + 1, size):
                    v[i] -= factor[k, i] * v[k]
                v[i] /= factor[i, i]
        total, total_ones = 0.0, 0.0
        for i in range(size):
            total += u[i]
            total_ones += ones[i]
        for i in range(size):
            u[i] = beta[i] - u[i] + total / total_ones * ones[i]
            if u[i] < 0:
                return
        normalise(u, size)
        combine(size, u, points, moved)
        if dot(moved, moved) >= dot(x, x):
            return
        beta[:size] = u[:size]
        x[:] = moved


@nb.njit(cache=True, error_model="numpy")
def workspace(room, width, n_ids):
    """Arrays of a corral of at most `room` points: beta, points, ids, gram, factor, known, u."""
    return (
        np.empty(room),
        np.empty((room, width)),
        np.empty((room, n_ids), np.int64),
        np.empty((room, room)),
        np.empty((room, room)),
        np.zeros(2),
        np.empty(room),
    )


@nb.njit(cache=True, error_model="numpy")
def nearest_to(c, members, beta, points, ids, gram, factor, known, u, x):
    """The least-norm point of the hull of c[members] from the nearest member; the corral's size."""
    first, least = members[0], dot(c[members[0]], c[members[0]])
    for j in members:
        square = dot(c[j], c[j])
        if square < least:
            first, least = j, square
    size = enter(c[first], 0, beta, points, gram)
    beta[0] = 1.0
    ids[0, 0] = first
    return nearest_over(c, members, size, beta, points, ids, gram, factor, known, u, x)


@nb.njit(REAL(MATRIX, KEYS), cache=True, error_model="numpy")
def free_error_of(c, members):
    """e_f: the distance of mu from the hull of the members' values. A point of the hull attains what is returned."""
    d = c.shape[1]
    x = np.empty(d)
    beta, points, ids, gram, factor, known, u = workspace(min(members.shape[0], d + 1) + 1, d, 1)
    nearest_to(c, members, beta, points, ids, gram, factor, known, u, x)
    return math.sqrt(dot(x, x))


@nb.njit(cache=True, error_model="numpy")
def deepest_key(c, w, x):
    """The linear oracle of Frank-Wolfe: argmin_j (v_j - mu) . x over keys of positive weight, lowest index first."""
    found, least = -1, np.inf
    for j in range(c.shape[0]):
        if w[j] > 0:
            depth = dot(c[j], x)
            if depth < least:
                found, least = j, depth
    return found, least


@nb.njit(cache=True, error_model="numpy")
def nearest_key(c, w):
    """argmin_j |v_j - mu| over keys of positive weight, lowest index first."""
    found, least = -1, np.inf
    for j in range(c.shape[0]):
        if w[j] > 0:
            square = dot(c[j], c[j])
            if square < least:
                found, least = j, square
    return found


@nb.njit(nb.types.Tuple((FOUND, REAL))(MATRIX, VECTOR, COUNT), cache=True, error_model="numpy")
def frank_wolfe_line_search(c, w, s):
    """Plain Frank-Wolfe: the nearest value, then s - 1 steps to the oracle's vertex with exact line search.

    Returns the support (at most s keys, sorted) and the distance of the last iterate.
    """
    x = c[nearest_key(c, w)].copy()
    support = np.zeros(c.shape[0], np.bool_)
    support[nearest_key(c, w)] = True
    for _ in range(s - 1):
        j, depth = deepest_key(c, w, x)
        square = dot(x, x)
        gap = square - depth  # <x, x - v>
        if gap <= 0:
            break
        length = square - 2 * depth + dot(c[j], c[j])
        if length <= 0:
            break
        gamma = min(1.0, gap / length)
        for i in range(x.shape[0]):
            x[i] += gamma * (c[j, i] - x[i])
        support[j] = True
    return np.flatnonzero(support), math.sqrt(dot(x, x))


@nb.njit(nb.types.Tuple((FOUND, REAL))(MATRIX, VECTOR, COUNT), cache=True, error_model="numpy")
def frank_wolfe_fully_corrective(c, w, s):
    """Fully corrective Frank-Wolfe: after every vertex, the least-norm point of the hull of all vertices so far.

    Returns the support (at most s keys that carry weight, sorted) and its distance.
    """
    d = c.shape[1]
    x = np.empty(d)
    beta, points, ids, gram, factor, known, u = workspace(min(s, d + 1) + 1, d, 1)
    j = nearest_key(c, w)
    size = enter(c[j], 0, beta, points, gram)
    beta[0] = 1.0
    ids[0, 0] = j
    x[:] = c[j]
    for _ in range(s - 1):
        j, depth = deepest_key(c, w, x)
        if depth >= dot(x, x) * (1.0 - POINT_TOLERANCE) or size == points.shape[0]:
            break
        taken = False
        for k in range(size):
            taken = taken or ids[k, 0] == j
        if taken:
            break
        size = enter(c[j], size, beta, points, gram)
        ids[size - 1, 0] = j
        size = minor_cycles(size, beta, points, ids, gram, factor, known, u)
        combine(size, beta, points, x)
    return np.sort(ids[:size, 0]), math.sqrt(dot(x, x))


@nb.njit(cache=True, error_model="numpy")
def copy_corral(size, source, target):
    """Copy the corral's weights, points, ids and Gram matrix: the first four arrays of a workspace."""
    for k in range(size):
        target[0][k] = source[0][k]
        target[1][k] = source[1][k]
        target[2][k, 0] = source[2][k, 0]
        target[3][k, :size] = source[3][k, :size]
    target[5][0] = 0.0  # the factor is not copied


@nb.njit(nb.types.Tuple((FOUND, REAL, COUNT))(MATRIX, VECTOR, KEYS, COUNT), cache=True, error_model="numpy")
def improve_support(c, w, start, rounds):
    """From a support of s keys, add the deepest key and drop the least used one while the free error falls.

    Each round offers the two deepest keys, and for each the two least used keys to drop (those without weight first).
    Every trial starts from the corral at hand, so it costs a few minor cycles. Returns the support (s keys, sorted),
    its free error and the rounds made.
    """
    d, s = c.shape[1], start.shape[0]
    x, tried = np.empty(d), np.empty(d)
    room = min(s + 1, d + 1) + 1
    now, wide, narrow = workspace(room, d, 1), workspace(room, d, 1), workspace(room, d, 1)
    support = np.sort(start)
    inside = np.zeros(c.shape[0], np.bool_)
    inside[support] = True
    size = nearest_to(c, support, now[0], now[1], now[2], now[3], now[4], now[5], now[6], x)
    best = math.sqrt(dot(x, x))
    wider, share = np.empty(s + 1, np.int64), np.empty(s)
    for done in range(rounds):
        first, second = -1, -1
        depth1, depth2 = dot(x, x) * LESS_FREE, dot(x, x) * LESS_FREE
        for j in range(c.shape[0]):
            if w[j] > 0 and not inside[j]:
                depth = dot(c[j], x)
                if depth < depth1:
                    second, depth2, first, depth1 = first, depth1, j, depth
                elif depth < depth2:
                    second, depth2 = j, depth
        moved = False
        for j in (first, second):
            if j < 0 or moved or size == room:
                continue
            copy_corral(size, now, wide)
            wider[:s] = support
            wider[s] = j
            wide_size = enter(c[j], size, wide[0], wide[1], wide[3])
            wide[2][wide_size - 1, 0] = j
            wide_size = nearest_over(
                c, wider, wide_size, wide[0], wide[1], wide[2], wide[3], wide[4], wide[5], wide[6], tried
            )
            share[:] = 0.0  # of the support's keys in the wider solution
            for k in range(wide_size):
                for i in range(s):
                    if support[i] == wide[2][k, 0]:
                        share[i] = wide[0][k]
            for _ in range(2):
                out = np.argmin(share)
                narrower = support.copy()
                narrower[out] = j
                copy_corral(wide_size, wide, narrow)
                trial_size = wide_size
                for k in range(wide_size):
                    if wide[2][k, 0] == support[out]:
                        trial_size = leave(k, wide_size, narrow[0], narrow[1], narrow[2], narrow[3], narrow[5])
                if trial_size == 0:
                    break
                normalise(narrow[0], trial_size)
                trial_size = nearest_over(
                    c,
                    narrower,
                    trial_size,
                    narrow[0],
                    narrow[1],
                    narrow[2],
                    narrow[3],
                    narrow[4],
                    narrow[5],
                    narrow[6],
                    tried,
                )
                error = math.sqrt(dot(tried, tried))
                if error < best * LESS_FREE:
                    inside[support[out]] = False
                    inside[j] = True
                    support, best, moved, size = narrower, error, True, trial_size
                    x[:] = tried
                    copy_corral(size, narrow, now)
                    break
                share[out] = np.inf
        if not moved:
            return np.sort(support), best, done
    return np.sort(support), best, rounds


# ----------------------------------------------------------------------------------------------------------------------
# Better subsets to start from


@nb.njit(cache=True, error_model="numpy")
def drawn(state, below):
    """The next state of a linear congruential generator (Knuth's MMIX), and a number from 0 to below - 1."""
    state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    return state, np.int64(state >> np.uint64(33)) % below


@nb.njit(cache=True, error_model="numpy")
def products_of(a):
    """The Gram matrix of the steps, (n, n): a_i . a_j to within d u |a_i| |a_j|."""
    n = a.shape[0]
    products = np.empty((n, n))
    for i in range(n):
        for j in range(i + 1):
            products[i, j] = dot(a[i], a[j])
            products[j, i] = products[i, j]
    return products


@nb.njit(cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def count_better(along, costs, w, entering, without, rest, least, need):
    """How many keys j would, entering, leave a squared error below `least` and a mass of at least rest + need.

    Without branches, so that several keys are looked at in one instruction. entering[j] is w_j, or -inf for a member.
    """
    count = 0
    for j in range(along.shape[0]):
        whole = rest + w[j]
        change = without + costs[j] - 2.0 * along[j] - least * whole * whole
        count += (change < 0.0) & (entering[j] >= need)
    return count


@nb.njit(cache=True, error_model="numpy")
def best_swaps(gram, w, subset, inside, least_mass, moved, costs, entering):
    """Swaps of largest decrease of e_s, as balance() makes them, by the Gram matrix of the steps; changes `subset`.

    With it a swap costs s n instead of s n d. A subset of less than least_mass gains the mass first, if one swap can do
    that. Its squares lose digits where y_A is far smaller than the steps, so what it finds is to be evaluated from its
    keys. moved, costs and entering (n,) are work space: a_j . y_A, |a_j|^2 + 2 a_j . y_A, and w_j or, of a member,
    -inf. Returns the number of swaps.
    """
    n, s = w.shape[0], subset.shape[0]
    swaps = 0
    moved[:] = 0.0
    for i in subset:
        for j in range(n):
            moved[j] += gram[i, j]
    for j in range(n):
        entering[j] = -np.inf if inside[j] else w[j]
    for _ in range(MOST_SWAPS):
        square, mass = 0.0, 0.0
        for i in subset:
            square += moved[i]
            mass += w[i]
        for j in range(n):
            costs[j] = gram[j, j] + 2.0 * moved[j]
        least, out, into = square / (mass * mass) * LESS_FREE, -1, -1
        if mass < least_mass:
            least = np.inf  # the first swaps restore the mass
        for k in range(s):
            i = subset[k]
            without, rest = square - 2.0 * moved[i] + gram[i, i], mass - w[i]
            need = least_mass - rest
            if count_better(gram[i], costs, w, entering, without, rest, least, need) == 0:
                continue
            for j in range(n):
                whole = rest + w[j]
                offered = without + costs[j] - 2.0 * gram[i, j]
                if entering[j] >= need and offered < least * whole * whole:
                    least, out, into = offered / (whole * whole), k, j
        if out < 0 or not square > 0:
            break
        swaps += 1
        i = subset[out]
        inside[i], inside[into] = False, True
        entering[i], entering[into] = w[i], -np.inf
        subset[out] = into
        for j in range(n):
            moved[j] += gram[into, j] - gram[i, j]
    return swaps


@nb.njit(nb.types.Tuple((FOUND, REAL))(MATRIX, VECTOR, KEYS, REAL, COUNT, REAL), cache=True, error_model="numpy")
def kicked(a, w, start, least_mass, kicks, deadline):
    """The best subset that swaps find from kicked copies of a current one (iterated local search).

    Keys should come by falling reach: a kick puts keys drawn at random, mostly from the first ones, in the place of 1
    to s / 4 drawn members. What the swaps then reach becomes the current subset unless its error is larger by more than
    a share that falls from WORSE to 0 (threshold accepting: Dueck and Scheuer 1990). The draws are the same each time,
    so the result is repeatable unless the clock (`deadline`) ends it. Returns the best subset and its error.
    """
    n, s = a.shape[0], start.shape[0]
    gram = products_of(a)
    best_set, current, trial, total = start.copy(), start.copy(), start.copy(), np.empty(a.shape[1])
    best = error_of(a, w, best_set, total)
    reached = best
    state = np.uint64(20_081_110)
    inside, moved, costs, entering = np.zeros(n, np.bool_), np.empty(n), np.empty(n), np.empty(n)
    for kick in range(kicks):
        if deadline < np.inf and kick % CLOCK_KICKS == 0 and now() > deadline:
            break
        trial[:] = current
        inside[:] = False
        inside[trial] = True
        state, changes = drawn(state, max(2, s // 4))
        for _ in range(1 + changes):
            state, place = drawn(state, s)
            state, tenth = drawn(state, 10)
            state, key = drawn(state, min(n, NEAR_BUDGETS * s) if tenth < NEAR_TENTHS else n)
            if not inside[key]:
                inside[trial[place]] = False
                inside[key] = True
                trial[place] = key
        best_swaps(gram, w, trial, inside, least_mass, moved, costs, entering)
        if shortfall(w, trial, least_mass) > 0.0:
            continue
        error = error_of(a, w, trial, total)
        if error < reached * (1.0 + WORSE * (1.0 - kick / kicks)):
            reached = error
            current[:] = trial
        if error < best:
            best = error
            best_set[:] = trial
    return best_set, best


@nb.njit(nb.types.Tuple((FOUND, REAL))(MATRIX, VECTOR, COUNT, COUNT, COUNT, REAL), cache=True, error_model="numpy")
def search_windows(a, w, s, most, tries, deadline):
    """The best subset that swaps find among keys of like weight: subsets of little mass whose mean happens to hit mu.

    Keys must come by falling weight. Windows of at most `most` keys begin at ranks 0, 1, 2, 4, 8, ...; in each, swaps
    start from every first, every second, every third, ... of its keys (`tries` starts). Returns the subset and its
    error.
    """
    n = a.shape[0]
    best, best_set = np.inf, np.arange(s)
    first = 0
    while first + s <= n:
        last = min(n, first + most)
        for stride in range(1, tries + 1):
            if (s - 1) * stride >= last - first:
                break
            subset, error, _ = balance(a[first:last], w[first:last], stride * np.arange(s), 0.0, deadline)
            if error < best:
                best, best_set = error, subset + first
        first = max(1, 2 * first)
    return best_set, best


# ----------------------------------------------------------------------------------------------------------------------
# Branch and bound


@nb.njit(cache=True, error_model="numpy")
def lowered(tau, target, gap, error):
    """tau after a better subset was found: it follows the best error, or stays at the target of a decision."""
    return tau if target > 0.0 else min(tau, (1.0 - gap) * error)


@nb.njit(cache=True, error_model="numpy")
def select_least(keys, free, n_free, z, nu, tau, k, chosen, least, m, memory, last):
    """The k free keys of least c_j = z.a_j - (tau + nu) w_j, by lower estimates that hold in floating point.

    keys: a, w, reach, lengths and heaviest_after; memory: dots, stamps, past and away, which it brings up to date.

    The computed c_j is off by at most (d + 5) u (|a_j| + (tau + nu) w_j); slack = (d + 8) u covers that and this
    subtraction, so c_j - slack (reach_j + nu w_j), as computed, is below the exact c_j. Keys come by falling
    reach >= |a_j| + tau w_j; heaviest_after[j] is the largest weight from key j on, so the scan stops at the first key
    whose -(1 + slack) (reach + nu heaviest_after) cannot enter.

    dots[j] is the product of a_j with an earlier vector z', one of the last PAST if stamps[j] > stamp - PAST, and then
    past[stamps[j] % PAST]. From c_j >= z'.a_j - |z - z'| |a_j| - (tau + nu) w_j most keys are seen not to enter
    without their product with z. The sizes added up there are at most 3 |a_j| + (tau + nu) w_j, and its rounding below
    (d + 12) u times |a_j| + (tau + nu) w_j, which 2 slack covers; lengths[j] >= |a_j|.

    chosen[:m], m <= k, are free keys that are likely to be chosen. Returns the stamp of z, the number of keys scanned
    and of keys chosen; away[i] is |z - past[i]| rounded up, or -1 where it was not needed; least[i] is the lower
    estimate of key chosen[i], ascending.
    """
    a, w, reach, lengths, heaviest_after = keys
    dots, stamps, past, away = memory
    slack, stamp = (a.shape[1] + 8) * U, last + 1
    past[stamp % PAST] = z
    away[:] = -1.0
    for i in range(m):
        j = chosen[i]
        dots[j] = dot(a[j], z)
        stamps[j] = stamp
        estimate = dots[j] - (tau + nu) * w[j] - slack * (reach[j] + nu * w[j])
        while i > 0 and least[i - 1] > estimate:
            least[i] = least[i - 1]
            chosen[i] = chosen[i - 1]
            i -= 1
        least[i] = estimate
        chosen[i] = j
    threshold = least[k - 1] if m == k else np.inf
    scanned = n_free
    for t in range(n_free):
        j = np.uint64(free[t])  # unsigned: numba then looks for no negative index
        if -(1.0 + slack) * (reach[j] + nu * heaviest_after[j]) >= threshold:
            scanned = t
            break
        stamped = stamps[j]
        if stamped == stamp:
            continue
        size = reach[j] + nu * w[j]
        if stamped > stamp - PAST:
            slot = np.uint64(stamped % PAST)
            if away[slot] < 0.0:
                away[slot] = distance(z, past[slot])
            if dots[j] - away[slot] * lengths[j] - (tau + nu) * w[j] - 2.0 * slack * size >= threshold:
                continue
        elif -(1.0 + slack) * size >= threshold:
            continue
        product = dot(a[j], z)
        dots[j] = product
        stamps[j] = stamp
        estimate = product - (tau + nu) * w[j] - slack * size
        if estimate >= threshold:
            continue
        if m < k:
            i = m
            m += 1
        else:
            i = k - 1
        while i > 0 and least[i - 1] > estimate:
            least[i] = least[i - 1]
            chosen[i] = chosen[i - 1]
            i -= 1
        least[i] = estimate
        chosen[i] = j
        if m == k:
            threshold = least[k - 1]
    return stamp, scanned, m


@nb.njit(cache=True, error_model="numpy")
def most_mass(w, free, n_free, r, largest):
    """The sum of the r largest free weights; `largest` is work space for r of them."""
    m = 0
    for t in range(n_free):
        weight = w[free[t]]
        if m < r:
            i = m
            m += 1
        elif r > 0 and weight > largest[r - 1]:
            i = r - 1
        else:
            continue
        while i > 0 and largest[i - 1] < weight:
            largest[i] = largest[i - 1]
            i -= 1
        largest[i] = weight
    total = 0.0
    for i in range(r):
        total += largest[i]
    return total


@nb.njit(cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def square_distances(points, size, gram, inverse, distances):
    """The squared distances of the first `size` points from the affine hulls of the others.

    They are 1 / (G^-1)_ii, with G the Gram matrix of the points and a constant coordinate that is large beside them; a
    ridge keeps it regular. They steer the choice of a key, nothing more. gram and inverse are work space.
    """
    constant = 0.0
    for i in range(size):
        for j in range(i + 1):
            gram[i, j] = dot(points[i], points[j])
        constant += CONSTANT * gram[i, i] / size
    for i in range(size):  # Cholesky: G = L L'
        distances[i] = 0.0
        for j in range(i + 1):
            r = gram[i, j] + constant
            for k in range(j):
                r -= gram[i, k] * gram[j, k]
            if i == j:
                gram[i, i] = math.sqrt(max(r, 0.0) + SPAN_RIDGE * constant) + ABSOLUTE
            else:
                gram[i, j] = r / gram[j, j]
    for j in range(size):  # (G^-1)_jj is the squared length of column j of L^-1
        for i in range(j, size):
            r = 1.0 if i == j else 0.0
            for k in range(j, i):
                r -= gram[i, k] * inverse[k]
            inverse[i] = r / gram[i, i]
            distances[j] += inverse[i] * inverse[i]
    for i in range(size):
        distances[i] = 1.0 / distances[i]


@nb.njit(cache=True, error_model="numpy")
def exchanged(subset, out, into):
    """Put key `into` in the place of key `out`; False, and no change, where `out` is no member or `into` is one."""
    place = -1
    for i in range(subset.shape[0]):
        if subset[i] == into:
            return False
        if subset[i] == out:
            place = i
    if place < 0:
        return False
    subset[place] = into
    return True


@nb.njit(cache=True, error_model="numpy")
def rounded(kept, n_kept, free, n_free, shares, split, n_split, near, subset, inside):
    """The subset of the keys that a relaxation keeps whole and, of those that it splits, the ones of largest share.

    shares[j] is that of key j; `split` has the split keys by falling share. Only keys below `near` are wanted: False
    where there are too few of them. Fills subset (s,) and inside (near,).
    """
    s = subset.shape[0]
    inside[:] = False
    m = 0
    for k in range(n_kept):
        if kept[k] >= near:
            return False
        subset[m] = kept[k]
        m += 1
    for t in range(n_free):
        if shares[free[t]] >= 1.0 - VANISHING and m < s:
            if free[t] >= near:
                return False
            subset[m] = free[t]
            m += 1
    for i in range(n_split):
        if split[i] < near and m < s:
            subset[m] = split[i]
            m += 1
    if m < s:
        return False
    for i in subset:
        inside[i] = True
    return True


@nb.njit(cache=True, error_model="numpy")
def with_room(buffer, used, more):
    """The buffer, or a copy of what it holds in one that has room for `more` entries after the `used` ones."""
    if used + more <= buffer.shape[0]:
        return buffer
    longer = np.empty(2 * (used + more), buffer.dtype)
    longer[:used] = buffer[:used]
    return longer


@nb.njit(
    nb.types.Tuple((COUNT, FOUND, REAL, REAL, COUNT, MARKS, MEAN))(
        MATRIX, VECTOR, VECTOR, KEYS, REAL, REAL, REAL, REAL, REAL, COUNT, REAL, KEYS, nb.boolean
    ),
    cache=True,
    error_model="numpy",
)
def branch_and_bound(a, w, reach, start, error, target, gap, floor, least_mass, node_limit, deadline, names, logged):
    """The s-subset of least forced error among those with p(A) >= least_mass, or the best one within the limits.

    reach (n,) must not rise and must be at least (|a_j| + T w_j) INFLATION + ABSOLUTE, T the larger of `error` and
    `target`. `start` is a subset that keeps enough and `error` its e_s. Depth-first, the child that keeps the branching
    key first, so the stack holds at most s + 2 nodes. An error at or below `floor` is zero within rounding: nothing
    better can be told apart, and the search is over. With target > 0 the search decides: it ends at the first subset
    with an error of at most the target. The clock (`deadline`, of time.perf_counter; infinite: none) is looked at every
    so many nodes and pairs; node_limit alone keeps a run repeatable.

    Node: F is kept, r keys are still to be picked from the free ones, p = sum_F a_j, W = sum_F w_j. For |z| <= 1 and
    nu >= 0,

        f(z, nu) = z.p - (tau + nu) W + nu least_mass + sum of the r least (z.a_j - (tau + nu) w_j), j free,  >= 0

    proves that no completion with p(A) >= least_mass has |y_A| < tau p(A), that is e_s < tau (ours; weak duality for a
    linear-fractional minimum). The best z points to the least-norm point of the hull of the kept means m_A, which
    Wolfe's algorithm finds with the same selection as its oracle; where that point keeps too little, kappa h_A is
    appended to every m_A, and nu follows from the least-norm point again. tau = (1 - gap) times the best error so far,
    or the target. A free key whose forced exclusion (inclusion) would lift f to 0 is kept (dropped) in the whole
    subtree; f is then the least sum of the lower estimates over selections without (with) that key, so the rule is as
    valid in floating point as the bound.

    Returns (DONE, OUT_OF_NODES, OUT_OF_TIME or FOUND_ONE; subset; its error; tau; nodes; log). DONE: no subset that
    keeps enough has an error below tau - (n + d + 8) u max |v_j - mu|, the rounding of the errors that leaves compute.
    The log, if `logged`, is that of solvers.proof: integers with names[j] (n,) for key j, and the vectors.
    """
    n, d = a.shape
    s = start.shape[0]
    floored = least_mass > 0.0
    width = d + 1 if floored else d  # the last coordinate is kappa h_A once the mass floor binds at a node, else 0
    room, depth = min(width, n) + 2, s + 4
    slack = (d + 8) * U
    early = 1.0 if n <= FEW_KEYS else EARLY_STOP
    best, best_set = error, start.copy()
    tau = target if target > 0.0 else (1.0 - gap) * best
    kappa = FLOOR_SCALE * tau  # scales h against m; it steers, for every nu >= 0 is valid
    heaviest_after = w.copy()
    for j in range(n - 2, -1, -1):
        heaviest_after[j] = max(heaviest_after[j], heaviest_after[j + 1])

    stack_free, stack_n_free = np.empty((depth, n), np.int32), np.zeros(depth, np.int64)
    stack_kept, stack_n_kept = np.empty((depth, s), np.int64), np.zeros(depth, np.int64)
    stack_size, stack_beta = np.zeros(depth, np.int64), np.empty((depth, room))
    stack_points, stack_ids = np.empty((depth, room, width)), np.empty((depth, room, s), np.int64)
    stack_binding = np.zeros(depth, np.bool_)
    free, kept = np.empty(n, np.int32), np.empty(s, np.int64)
    beta, points, ids, gram, factor, known, u = workspace(room, width, s)
    x, y = np.empty(width), np.zeros(width)
    z, z_best, p, mean = np.empty(d), np.empty(d), np.empty(d), np.empty(d)
    low, chosen, least = np.empty(n), np.empty(s + 2, np.int64), np.empty(s + 2)
    lengths = np.empty(n)
    for j in range(n):
        lengths[j] = min(reach[j], math.sqrt(dot(a[j], a[j])) * INFLATION + UNDERFLOWN)
    dots, stamps, stamp = np.empty(n), np.full(n, -PAST), 0
    past, away = np.empty((PAST, d)), np.empty(PAST)
    keys, memory = (a, w, reach, lengths, heaviest_after), (dots, stamps, past, away)
    mark, split = np.zeros(n), np.empty(n, np.int64)
    offered, growths = np.empty(MOST_OFFERED, np.int64), np.empty(MOST_OFFERED)
    inverse, distances = np.empty(MOST_OFFERED), np.empty(MOST_OFFERED)
    spans, span_gram = np.empty((MOST_OFFERED, d + 1)), np.empty((MOST_OFFERED, MOST_OFFERED))
    near, products = min(n, NEAR_KEYS), np.empty((0, 0))
    inside, moved, costs, entering = np.empty(near, np.bool_), np.empty(near), np.empty(near), np.empty(near)
    trial = np.empty(s, np.int64)
    marks, n_marks = np.empty(1024 if logged else 0, np.int32), 0
    reals, n_reals = np.empty(16 * d if logged else 0), 0

    for j in range(n):
        stack_free[0, j] = j
    stack_n_free[0] = n
    top, nodes, work = 1, 0, 0
    while top > 0:
        if best <= floor:
            break
        if target > 0.0 and best <= target:
            return FOUND_ONE, best_set, best, tau, nodes, marks[:n_marks], reals[:n_reals]
        if nodes >= node_limit:
            return OUT_OF_NODES, best_set, best, tau, nodes, marks[:n_marks], reals[:n_reals]
        work += n + d
        if deadline < np.inf and work > CLOCK_WORK:
            work = 0
            if now() > deadline:
                return OUT_OF_TIME, best_set, best, tau, nodes, marks[:n_marks], reals[:n_reals]
        top -= 1
        nodes += 1
        n_free, n_kept, size = stack_n_free[top], stack_n_kept[top], stack_size[top]
        free[:n_free] = stack_free[top, :n_free]
        kept[:n_kept] = stack_kept[top, :n_kept]
        for k in range(size):
            beta[k] = stack_beta[top, k]
            points[k] = stack_points[top, k]
            ids[k] = stack_ids[top, k]
        binding = stack_binding[top]
        stale_gram, closed, closing = True, True, LEAF
        while True:  # bound and fix; again if that left a leaf or no corral; every break but the last closes the node
            r = s - n_kept
            if n_free < r:
                break
            p[:] = 0.0
            mass, path = 0.0, 0.0  # path bounds the magnitudes added up in p
            for k in range(n_kept):
                p += a[kept[k]]
                mass += w[kept[k]]
                path += reach[kept[k]]
            if floored and (mass + most_mass(w, free, n_free, r, least)) * INFLATION < least_mass:
                closing = MASS
                break

            # Leaves: few completions, or one or two keys to pick from many.
            if r == 0:
                e = error_of(a, w, kept, mean)
                if e < best and mass >= least_mass:
                    best, tau = e, lowered(tau, target, gap, e)
                    best_set[:] = kept
                break
            if r > 2 and few_subsets(n_free, r, LEAF_SUBSETS):
                e, visited = best_completion(a, w, kept, n_kept, free, n_free, r, least_mass, best, best_set, mean, z)
                work += 2 * visited * d
                if e < best:
                    best, tau = e, lowered(tau, target, gap, e)
                break
            if r == 1:
                length = math.sqrt(dot(p, p))
                for t in range(n_free):
                    j = free[t]
                    # |p + a_j| >= |p| - |a_j|, and reach falls: no later key can come below tau
                    if length - reach[j] - tau * mass > 1e-12 * (path + tau * mass):
                        break
                    e = math.sqrt(squared_sum(p, a[j])) / (mass + w[j])
                    if e < best and mass + w[j] >= least_mass:
                        trial[:n_kept] = kept[:n_kept]
                        trial[n_kept] = j
                        best, tau = e, lowered(tau, target, gap, e)
                        best_set[:] = trial
                break
            if r == 2:
                length = math.sqrt(dot(p, p))
                for i in range(d):  # a length whose square is denormal is not known well enough for |z| <= 1
                    z[i] = p[i] / (length * INFLATION) if length > 1e-140 else 0.0
                stamp, scanned, m = select_least(keys, free, n_free, z, 0.0, tau, 2, chosen, least, 0, memory, stamp)
                work += scanned * d
                margin = (n_kept + d + 12) * U * (path + reach[free[0]] + reach[free[1]])
                need = margin - (dot(z, p) - tau * mass)  # a pair must have low_i + low_j < need
                if least[0] + least[1] >= need:
                    break
                m = 0
                for t in range(n_free):
                    j = free[t]
                    if -(1.0 + slack) * reach[j] + least[0] >= need:
                        break
                    if stamps[j] != stamp:
                        dots[j] = dot(a[j], z)
                        stamps[j] = stamp
                    low[m] = dots[j] - tau * w[j] - slack * reach[j]
                    if low[m] + least[0] < need:
                        free[m] = j
                        m += 1
                by_low = np.argsort(low[:m])
                for t1 in range(m):
                    i = free[by_low[t1]]
                    for k in range(d):
                        mean[k] = p[k] + a[i, k]
                    for t2 in range(t1 + 1, m):
                        if low[by_low[t1]] + low[by_low[t2]] >= need:
                            break
                        work += d
                        if deadline < np.inf and work > CLOCK_WORK:
                            work = 0
                            if now() > deadline:
                                return OUT_OF_TIME, best_set, best, tau, nodes, marks[:n_marks], reals[:n_reals]
                        j = free[by_low[t2]]
                        whole = mass + w[i] + w[j]
                        e = math.sqrt(squared_sum(mean, a[j])) / whole
                        if e < best and whole >= least_mass:
                            trial[:n_kept] = kept[:n_kept]
                            trial[n_kept], trial[n_kept + 1] = i, j
                            best, tau = e, lowered(tau, target, gap, e)
                            best_set[:] = trial
                break

            # Relaxation: the least-norm point of the hull of the kept means, until it prunes or cannot.
            if size == 0:
                for k in range(n_kept):
                    ids[0, k] = kept[k]
                mean[:] = p
                whole = mass
                for t in range(r):
                    ids[0, n_kept + t] = free[t]
                    mean += a[free[t]]
                    whole += w[free[t]]
                y[:d] = mean / whole
                if floored:
                    y[d] = kappa * (least_mass / whole - 1.0) if binding else 0.0
                size = enter(y, 0, beta, points, gram)
                beta[0] = 1.0
                known[0] = 0.0
                stale_gram = False
            elif stale_gram:
                for k in range(size):
                    for i in range(k + 1):
                        gram[k, i] = dot(points[k], points[i])
                        gram[i, k] = gram[k, i]
                known[0] = 0.0
                stale_gram = False
            # The keys that the heaviest point of the corral picks are likely to be the least ones.
            heaviest, hints = 0, 0
            for k in range(1, size):
                if beta[k] > beta[heaviest]:
                    heaviest = k
            for k in range(n_kept):
                mark[kept[k]] = 1.0
            for j in ids[heaviest]:
                if mark[j] == 0.0:
                    chosen[hints] = j
                    hints += 1
            for k in range(n_kept):
                mark[kept[k]] = 0.0
            pruned, inherited, settled, f_best, nu_best, below = False, binding, False, -np.inf, 0.0, 0
            z_best[:] = 0.0
            for step in range(MOST_STEPS):
                size = minor_cycles(size, beta, points, ids, gram, factor, known, u)
                combine(size, beta, points, x)
                square = dot(x, x)
                excess = x[d] / kappa if binding else 0.0
                if floored and not binding and (settled or square < tau * tau):
                    for k in range(size):
                        excess += beta[k] * shortfall(w, ids[k], least_mass)
                lets_in = not binding and excess > SHORTFALL  # the point keeps too little: let the floor in
                if lets_in or (inherited and excess <= 0.0):  # and out again where the parent's does not bind here
                    binding, inherited, settled = lets_in, False, False
                    for k in range(size):
                        points[k, d] = kappa * shortfall(w, ids[k], least_mass) if binding else 0.0
                    for k in range(size):
                        for i in range(k + 1):
                            gram[k, i] = dot(points[k], points[i])
                            gram[i, k] = gram[k, i]
                    known[0] = 0.0
                    continue
                if settled or (binding and excess <= 0.0):
                    break
                below += square < tau * tau
                last = math.sqrt(square) < early * tau or below > STEPS_BELOW
                if step > 0 and last and f_best > -np.inf:
                    break
                for i in range(d):
                    mean[i] = x[i]
                length = math.sqrt(dot(mean, mean))
                nu = 0.0
                if length > 1e-14 * tau:
                    for i in range(d):
                        z[i] = mean[i] / (length * INFLATION)
                    if binding:
                        nu = min(kappa * kappa * excess / length, LARGEST_NU * tau)
                else:
                    z[:] = 0.0
                    if binding:
                        nu = 10.0 * tau
                stamp, scanned, m = select_least(keys, free, n_free, z, nu, tau, r, chosen, least, hints, memory, stamp)
                hints = r
                work += scanned * d + size * size * (size + d)
                if deadline < np.inf and work > CLOCK_WORK:
                    work = 0
                    if now() > deadline:
                        return OUT_OF_TIME, best_set, best, tau, nodes, marks[:n_marks], reals[:n_reals]
                f = dot(z, p) - (tau + nu) * mass + nu * least_mass
                size_of_sum = path + nu * (mass + least_mass)
                for i in range(r):
                    j = chosen[i]
                    f += least[i]
                    size_of_sum += reach[j] + nu * w[j]
                if f >= (n_kept + r + d + 16) * U * size_of_sum:
                    pruned, nu_best = True, nu
                    z_best[:] = z
                    break
                if f > f_best:
                    f_best, nu_best = f, nu
                    z_best[:] = z
                whole = mass
                mean[:] = p
                for k in range(n_kept):
                    trial[k] = kept[k]
                for i in range(r):
                    j = chosen[i]
                    trial[n_kept + i] = j
                    whole += w[j]
                    for k in range(d):
                        mean[k] += a[j, k]
                for k in range(d):
                    mean[k] /= whole
                    y[k] = mean[k]
                if floored:
                    y[d] = kappa * (least_mass / whole - 1.0) if binding else 0.0
                e = math.sqrt(dot(mean, mean))  # the selection is a subset like any other
                if e < best and whole >= least_mass:
                    best, tau = e, lowered(tau, target, gap, e)
                    best_set[:] = trial
                if size == room or last:
                    break
                if dot(x, y) >= square * (1.0 - FACE_TOLERANCE):
                    if binding or not floored:
                        break
                    settled = True
                    continue
                size = enter(y, size, beta, points, gram)
                ids[size - 1] = trial
            if pruned:
                closing = PRUNE
                break

            # Fixing with the best z: keys that every improving completion keeps, or that none keeps.
            nu = nu_best
            stamp, scanned, m = select_least(
                keys, free, n_free, z_best, nu, tau, r + 1, chosen, least, hints, memory, stamp
            )
            f = dot(z_best, p) - (tau + nu) * mass + nu * least_mass
            size_of_sum = path + reach[free[0]] + nu * (mass + least_mass + heaviest_after[free[0]])
            for i in range(r):
                j = chosen[i]
                f += least[i]
                size_of_sum += reach[j] + nu * w[j]
            margin = (n_kept + r + d + 20) * U * size_of_sum
            if f >= margin:
                closing = PRUNE
                break
            n_fixed = 0
            for i in range(r):
                if f - least[i] + least[r] >= margin:
                    mark[chosen[i]] = 1.0
                    n_fixed += 1
            if logged:
                marks = with_room(marks, n_marks, n_free + 3)
                marks[n_marks], marks[n_marks + 1] = FIX, n_fixed
                at_kept, at_dropped = n_marks + 2, n_marks + 3 + n_fixed
            threshold = least[r - 1] - f + margin
            before, m = n_free, 0
            for t in range(before):
                j = free[t]
                if mark[j] == 1.0:
                    mark[j] = 0.0
                    kept[n_kept] = j
                    n_kept += 1
                    if logged:
                        marks[at_kept] = names[j]
                        at_kept += 1
                    continue
                extent = reach[j] + nu * w[j]
                # c_j is seen to be above the threshold, or below: a key is then dropped or stays without its product.
                surely_in, least_cost = False, -(1.0 + slack) * extent
                if least_cost < threshold:
                    stamped = stamps[j]
                    exact = stamped == stamp
                    if not exact and stamped > stamp - PAST:
                        slot = stamped % PAST
                        if away[slot] < 0.0:
                            away[slot] = distance(z_best, past[slot])
                        middle, way = dots[j] - (tau + nu) * w[j] - 2.0 * slack * extent, away[slot] * lengths[j]
                        least_cost, surely_in = middle - way, middle + way < threshold
                    if least_cost < threshold and not surely_in:
                        if not exact:
                            dots[j] = dot(a[j], z_best)
                            stamps[j] = stamp
                        least_cost = dots[j] - (tau + nu) * w[j] - slack * extent
                if least_cost < threshold:
                    free[m] = j
                    m += 1
                elif logged:
                    marks[at_dropped] = names[j]
                    at_dropped += 1
            n_free = m
            if logged and n_free < before:
                marks[at_kept] = at_dropped - at_kept - 1
                n_marks = at_dropped
                reals = with_room(reals, n_reals, d + 1)
                reals[n_reals] = nu
                reals[n_reals + 1 : n_reals + d + 1] = z_best
                n_reals += d + 1
            if n_free < before:
                # A kept mean stays in the corral if it is one of a completion of the node as fixed.
                for t in range(n_free):
                    mark[free[t]] = 1.0
                for k in range(n_kept):
                    mark[kept[k]] = 2.0
                k = 0
                while k < size:
                    held, valid = 0, True
                    for i in range(s):
                        held += mark[ids[k, i]] == 2.0
                        valid = valid and mark[ids[k, i]] > 0.0
                    if valid and held == n_kept:
                        k += 1
                    else:
                        size = leave(k, size, beta, points, ids, gram, known)
                for t in range(n_free):
                    mark[free[t]] = 0.0
                for k in range(n_kept):
                    mark[kept[k]] = 0.0
                normalise(beta, size)
                r = s - n_kept
                if size == 0 or r <= 2 or n_free <= r or few_subsets(n_free, r, LEAF_SUBSETS):
                    continue
            closed = False
            break
        if closed:
            if logged:
                marks = with_room(marks, n_marks, 1)
                marks[n_marks] = closing
                n_marks += 1
                if closing == PRUNE:
                    reals = with_room(reals, n_reals, d + 1)
                    reals[n_reals] = nu_best
                    reals[n_reals + 1 : n_reals + d + 1] = z_best
                    n_reals += d + 1
            continue

        # Branch on a key that the relaxation splits into x and 1 - x (the first free key if it splits none). Its point
        # moves by x b_j / W without the key and by (1 - x) b_j / W with it, b_j = a_j - m w_j, and |x|^2 grows by the
        # square of that part of the move which the other keys do not take back: all of it if none of them moves, and
        # the distance of b_j from what the other split keys span if all of these may. Take the key whose two growths
        # have the largest product, each between those extremes.
        for k in range(size):
            for i in range(s):
                mark[ids[k, i]] += beta[k]
        n_split, n_offered = 0, 0
        for t in range(n_free):
            share = mark[free[t]]
            if VANISHING < share < 1.0 - VANISHING:
                i = n_split
                n_split += 1
                while i > 0 and mark[split[i - 1]] < share:
                    split[i] = split[i - 1]
                    i -= 1
                split[i] = free[t]
                growth = lengths[free[t]] * math.sqrt(share * (1.0 - share))
                i = n_offered
                n_offered = min(n_offered + 1, MOST_OFFERED)
                while i > 0 and growths[i - 1] < growth:
                    if i < MOST_OFFERED:
                        offered[i], growths[i] = offered[i - 1], growths[i - 1]
                    i -= 1
                if i < MOST_OFFERED:
                    offered[i], growths[i] = t, growth
        at, most = 0, 0.0
        if n_offered > 0:
            for i in range(n_offered):
                j = free[offered[i]]
                for k in range(d):
                    spans[i, k] = a[j, k] - x[k] * w[j]
                spans[i, d] = -(kappa + x[d]) * w[j] if binding else 0.0
            square_distances(spans, n_offered, span_gram, inverse, distances)
            for i in range(n_offered):
                growth = growths[i] * growths[i] * (distances[i] / lengths[free[offered[i]]] ** 2) ** SPANNED
                if growth > most:
                    at, most = offered[i], growth
        # Its rounding, improved by swaps, is often a better subset.
        if (nodes <= ROUNDED_NODES or nodes % ROUNDED_EVERY == 0) and rounded(
            kept, n_kept, free, n_free, mark, split, n_split, near, trial, inside
        ):
            if products.shape[0] == 0:
                products = products_of(a[:near])
                work += near * near * d
            swaps = best_swaps(products, w[:near], trial, inside, least_mass, moved, costs, entering)
            work += (swaps + 2) * s * near
            e = error_of(a, w, trial, mean)
            if e < best and shortfall(w, trial, least_mass) <= 0.0:
                best, tau = e, lowered(tau, target, gap, e)
                best_set[:] = trial
        for k in range(size):
            for i in range(s):
                mark[ids[k, i]] = 0.0
        key = free[at]
        if logged:
            marks = with_room(marks, n_marks, 2)
            marks[n_marks], marks[n_marks + 1] = BRANCH, names[key]
            n_marks += 2
        for keeps in (False, True):
            stack_free[top, :at] = free[:at]
            stack_free[top, at : n_free - 1] = free[at + 1 : n_free]
            stack_n_free[top] = n_free - 1
            stack_kept[top, :n_kept] = kept[:n_kept]
            stack_n_kept[top] = n_kept
            if keeps:
                stack_kept[top, n_kept] = key
                stack_n_kept[top] += 1
            m = 0
            for k in range(size):
                has = False
                for i in range(s):
                    has = has or ids[k, i] == key
                stack_ids[top, m] = ids[k]
                if has == keeps:
                    stack_points[top, m] = points[k]
                else:  # the other child's mean becomes one of this child's by an exchange of split keys
                    fits = False
                    for i in range(n_split):
                        if keeps:
                            fits = exchanged(stack_ids[top, m], split[n_split - 1 - i], key)
                        else:
                            fits = exchanged(stack_ids[top, m], key, split[i])
                        if fits:
                            break
                    if not fits:
                        continue
                    whole = 0.0
                    mean[:] = 0.0
                    for j in stack_ids[top, m]:
                        whole += w[j]
                        for i in range(d):
                            mean[i] += a[j, i]
                    for i in range(d):
                        mean[i] /= whole
                        stack_points[top, m, i] = mean[i]
                    if floored:
                        stack_points[top, m, d] = kappa * (least_mass / whole - 1.0) if binding else 0.0
                    e = math.sqrt(dot(mean, mean))
                    if e < best and whole >= least_mass:
                        best, tau = e, lowered(tau, target, gap, e)
                        best_set[:] = stack_ids[top, m]
                stack_beta[top, m] = beta[k]
                m += 1
            stack_size[top] = m
            stack_binding[top] = binding
            normalise(stack_beta[top], m)
            top += 1
    if target > 0.0 and best <= target:
        return FOUND_ONE, best_set, best, tau, nodes, marks[:n_marks], reals[:n_reals]
    return DONE, best_set, best, tau, nodes, marks[:n_marks], reals[:n_reals]


@nb.njit(
    nb.types.Tuple((COUNT, FOUND, REAL, REAL, COUNT, MARKS, MEAN))(
        MATRIX, VECTOR, VECTOR, KEYS, REAL, REAL, REAL, REAL, COUNT, REAL, KEYS, nb.boolean
    ),
    cache=True,
    error_model="numpy",
)
def search(a, w, distances, start, target, gap, floor, least_mass, node_limit, deadline, names, logged):
    """branch_and_bound from a subset, with the keys ordered by reach.

    distances (n,) are |v_j - mu| in the row's unit: p_j times them is |a_j| even where the square of a_j underflows.
    names (n,) are what the log calls the keys. Returns (why it stopped, subset, its error, tau, nodes, log).
    """
    error = error_of(a, w, start, np.empty(a.shape[1]))
    reach = (w * distances + max(error, target) * w) * INFLATION + ABSOLUTE
    order = np.argsort(-reach, kind="mergesort")
    place = np.empty_like(order)
    place[order] = np.arange(order.shape[0])
    stop, subset, error, tau, nodes, marks, reals = branch_and_bound(
        a[order],
        w[order],
        reach[order],
        place[start],
        error,
        target,
        gap,
        floor,
        least_mass,
        node_limit,
        deadline,
        names[order],
        logged,
    )
    return stop, order[subset], error, tau, nodes, marks, reals


# ----------------------------------------------------------------------------------------------------------------
# Branch and bound among few keys


@nb.njit(cache=True, error_model="numpy")
def best_completion_by_products(
    a, w, products, kept, n_kept, free, n_free, r, drift, best, best_set, last, square, mass, cost, pair, b
):
    """best_completion() by the products a_i . a_j of the steps: a subset costs a few operations instead of d.

    The fewer keys are picked: the r to keep, b_j = a_j, or, of all free ones, the n_free - r to leave out, b_j = -a_j;
    at least two, at most n_free - 2. With y the sum before any pick,

        |y + sum b_j|^2 = |y|^2 + sum_j (|b_j|^2 + 2 b_j.y) + sum_{i < j} 2 b_i.b_j,

    depth first: a pick adds its row of 2 b_i.b_j to the costs of the free keys before it. `drift` is what rounding may
    take from such a square; a subset whose square could be below the best one's within that is summed from its own
    steps, so the answer is that of best_completion(). Work space: last (n,), square (n,), mass (n,), cost (n, n),
    pair (n, n), b (n,), the signed weights. Updates best_set in place; returns the least error (at most `best`).
    """
    sign, picks = (1.0, r) if 2 * r <= n_free else (-1.0, n_free - r)
    square[0], mass[0] = 0.0, 0.0
    for k in range(n_kept):
        along = 0.0
        for i in range(n_kept):
            along += products[kept[k], kept[i]]
        square[0] += along  # row by row: no term goes through more than 2 n additions
        mass[0] += w[kept[k]]
    for t in range(n_free):
        j, along = free[t], 0.0
        for k in range(n_kept):
            along += products[j, kept[k]]
        for i in range(n_free):
            pair[t, i] = 2.0 * products[j, free[i]]
        b[t] = sign * w[j]
        if sign < 0.0:
            rest = 0.0
            for i in range(n_free):
                rest += products[j, free[i]]
            square[0] += 2.0 * along + rest
            mass[0] += w[j]
            along += rest
        cost[0, t] = products[j, j] + sign * 2.0 * along
    trial, total = np.empty(n_kept + r, np.int64), np.empty(a.shape[1])
    limit = (best * INFLATION) ** 2
    level, last[0] = 0, n_free
    while level >= 0:
        last[level] -= 1
        t = last[level]
        if t < picks - 1 - level:  # too few are left to pick
            level -= 1
            continue
        square_t, mass_t, row, added = square[level] + cost[level, t], mass[level] + b[t], cost[level], pair[t]
        if level < picks - 2:
            level += 1
            square[level], mass[level], last[level] = square_t, mass_t, t
            longer = cost[level]
            for i in range(t):
                longer[i] = row[i] + added[i]
            continue
        for i in range(t):
            whole = mass_t + b[i]
            if square_t + (row[i] + added[i]) < limit * whole * whole + drift:
                trial[:n_kept] = kept[:n_kept]
                m = n_kept
                for k in range(n_free):
                    picked = k == i
                    for q in range(level + 1):
                        picked = picked or k == last[q]
                    if picked == (sign > 0.0):
                        trial[m] = free[k]
                        m += 1
                error = error_of(a, w, trial, total)
                if error < best:
                    best = error
                    best_set[:] = trial
                    limit = (best * INFLATION) ** 2
    return best


@nb.njit(cache=True, error_model="numpy")
def square_rounding(reach, d):
    """What rounding may take from |y_A|^2 as best_completion_by_products() has it, less (best p(A))^2 (ours).

    With M the sum of reaches, no sum has terms a_i . a_j of more than 4 M^2 in size altogether; each is off by d u of
    itself and goes through at most 4 n additions: 4 (d + 4 n + 4) u M^2. Masses are off by 4 n u of the sum of weights,
    which times the best error is at most M: 9 n u M^2. A sum of the subset's own steps may lie n u M below |y_A|: 3 n u
    M^2.
    """
    whole = 0.0
    for j in range(reach.shape[0]):
        whole += reach[j]
    return 32.0 * (reach.shape[0] + d + 8) * U * whole * whole + SQUARE_ABSOLUTE


@nb.njit(cache=True, error_model="numpy")
def compatible(size, kept, n_kept, free, n_free, beta, alongs, shares, gram, known):
    """Leave in the corral the means that keep all kept keys and, besides, free ones only; the new size."""
    n = shares.shape[1]
    k = 0
    while k < size:
        held, members, fits = 0, 0, True
        for i in range(n_kept):
            fits = fits and shares[k, kept[i]] > 0.0
        for t in range(n_free):
            held += shares[k, free[t]] > 0.0
        for j in range(n):
            members += shares[k, j] > 0.0
        if fits and held + n_kept == members:
            k += 1
        else:
            size = leave(k, size, beta, alongs, shares, gram, known)
    normalise(beta, size)
    return size


@nb.njit(cache=True, error_model="numpy")
def take_least(value, n, r, places, taken):
    """taken[t] = whether value[t] is among the r least of value[:n]; `places` (n,) is work space."""
    sign, m = (1.0, r) if 2 * r <= n else (-1.0, n - r)  # the fewer are picked: the least, or the largest
    found = 0
    for t in range(n):
        taken[t] = sign < 0.0
        if found < m:
            i = found
            found += 1
        elif m > 0 and sign * value[t] < sign * value[places[m - 1]]:
            i = m - 1
        else:
            continue
        while i > 0 and sign * value[places[i - 1]] > sign * value[t]:
            places[i] = places[i - 1]
            i -= 1
        places[i] = t
    for i in range(m):
        taken[places[i]] = sign > 0.0


@nb.njit(cache=True, error_model="numpy")
def branch_and_bound_few(a, w, products, reach, start, error, gap, floor, node_limit):
    """branch_and_bound() without a mass floor, target, clock or log, for few keys with sharp products a_i . a_j.

    Here the relaxation steers by the products alone. A vector x = sum_j share_j a_j is known by its shares and by
    along_j = a_j . x, so a step of Wolfe's method costs a few operations per key and point, not d. Its rounding decides
    nothing: where f looks to be 0 or more, z = x / |x| is summed from the steps, and the bound and the fixing rule of
    branch_and_bound() are computed from z and the steps as there. Each lower estimate of z.a_j - tau w_j holds and is
    at most (1 + 2 slack) reach_j in size, so a sum of s of them is off by at most s u times the sum of their reaches.

    Returns (DONE or OUT_OF_NODES; subset; its error; tau; nodes).
    """
    n, d = a.shape
    s = start.shape[0]
    room, depth = min(d, n) + 2, s + 4
    slack = (d + 8) * U
    best, best_set = error, start.copy()
    tau = (1.0 - gap) * best
    stack_free, stack_n_free = np.empty((depth, n), np.int64), np.zeros(depth, np.int64)
    stack_kept, stack_n_kept = np.empty((depth, s), np.int64), np.zeros(depth, np.int64)
    stack_size, stack_beta = np.zeros(depth, np.int64), np.empty((depth, room))
    stack_shares, stack_along = np.empty((depth, room, n)), np.empty((depth, room, n))
    beta, alongs, _, gram, factor, known, u = workspace(room, n, 0)
    shares = np.empty((room, n))
    share, along, share_best, z, total = np.empty(n), np.empty(n), np.empty(n), np.empty(d), np.empty(d)
    low, places, taken = np.empty(n), np.empty(n, np.int64), np.empty(n, np.bool_)
    last, square_at, mass_at = np.empty(n, np.int64), np.empty(n), np.empty(n)
    cost, pair = np.empty((n, n)), np.empty((n, n))
    trial = np.empty(s, np.int64)

    stack_free[0] = np.arange(n)
    stack_n_free[0] = n
    top, nodes = 1, 0
    while top > 0 and best > floor:
        if nodes >= node_limit:
            return OUT_OF_NODES, best_set, best, tau, nodes
        top -= 1
        nodes += 1
        n_free, n_kept, size = stack_n_free[top], stack_n_kept[top], stack_size[top]
        free, kept = stack_free[top].copy(), stack_kept[top].copy()
        for k in range(size):
            beta[k] = stack_beta[top, k]
            shares[k] = stack_shares[top, k]
            alongs[k] = stack_along[top, k]
            for i in range(k + 1):
                gram[k, i] = dot(shares[k], alongs[i])
                gram[i, k] = gram[k, i]
        known[0] = 0.0
        closed = True
        while True:  # bound, fix, and again if fixing changed anything; every break but the last closes the node
            r = s - n_kept
            if n_free < r:
                break
            if r == 0:
                e = error_of(a, w, kept, total)
                if e < best:
                    best, tau = e, (1.0 - gap) * e
                    best_set[:] = kept
                break
            picks = min(r, n_free - r)
            if picks < 2 or few_subsets(n_free - 1, picks - 1, PRODUCT_ROWS):
                if picks < 2:
                    e, _ = best_completion(a, w, kept, n_kept, free, n_free, r, 0.0, best, best_set, total, z)
                else:
                    e = best_completion_by_products(
                        a,
                        w,
                        products,
                        kept,
                        n_kept,
                        free,
                        n_free,
                        r,
                        square_rounding(reach, d),
                        best,
                        best_set,
                        last,
                        square_at,
                        mass_at,
                        cost,
                        pair,
                        low,
                    )
                if e < best:
                    best, tau = e, (1.0 - gap) * e
                break

            # Relaxation: the least-norm point of the hull of the kept means, until it prunes or cannot.
            f_best = -np.inf
            for _ in range(MOST_STEPS):
                if size > 0:
                    size = minor_cycles(size, beta, alongs, shares, gram, factor, known, u)
                    combine(size, beta, alongs, along)
                    combine(size, beta, shares, share)
                    square = dot(share, along)
                    if not square > (TOO_SHORT * tau) ** 2 or (square < tau * tau and f_best > -np.inf):
                        break
                    length = math.sqrt(square)
                    f = 0.0
                    for k in range(n_kept):
                        f += along[kept[k]] / length - tau * w[kept[k]]
                    for t in range(n_free):
                        low[t] = along[free[t]] / length - tau * w[free[t]]
                    take_least(low, n_free, r, places, taken)
                    for t in range(n_free):
                        f += low[t] if taken[t] else 0.0
                    if f > f_best:
                        f_best = f
                        share_best[:] = share
                    if f >= 0.0:
                        break
                else:
                    for t in range(n_free):
                        taken[t] = t < r
                if size == room:
                    break
                m, whole = n_kept, 0.0
                trial[:m] = kept[:m]
                for t in range(n_free):
                    if taken[t]:
                        trial[m] = free[t]
                        m += 1
                for j in trial:
                    whole += w[j]
                shares[size, :] = 0.0
                alongs[size, :] = 0.0
                for j in trial:
                    shares[size, j] = 1.0 / whole
                    for i in range(n):
                        alongs[size, i] += products[j, i]
                for i in range(n):
                    alongs[size, i] /= whole
                for k in range(size + 1):
                    gram[size, k] = dot(shares[size], alongs[k])
                    gram[k, size] = gram[size, k]
                if gram[size, size] < best * best:  # the selection is a subset like any other
                    e = error_of(a, w, trial, total)
                    if e < best:
                        best, tau = e, (1.0 - gap) * e
                        best_set[:] = trial
                if size > 0 and dot(share, alongs[size]) >= square * (1.0 - FEW_TOLERANCE):
                    break
                beta[size] = 1.0 if size == 0 else 0.0
                size += 1

            # The bound and the fixing rule with the best z, from the steps.
            if f_best > -np.inf:
                z[:] = 0.0
                for j in range(n):
                    if share_best[j] != 0.0:
                        for i in range(d):
                            z[i] += share_best[j] * a[j, i]
                length = math.sqrt(dot(z, z)) * INFLATION
                for i in range(d):  # a length whose square is denormal is not known well enough for |z| <= 1
                    z[i] = z[i] / length if length > 1e-140 else 0.0
                f, sizes = 0.0, 0.0
                for k in range(n_kept):
                    j = kept[k]
                    f += dot(a[j], z) - tau * w[j] - slack * reach[j]
                    sizes += reach[j]
                for t in range(n_free):
                    j = free[t]
                    low[t] = dot(a[j], z) - tau * w[j] - slack * reach[j]
                take_least(low, n_free, r, places, taken)
                largest_in, least_out = -np.inf, np.inf
                for t in range(n_free):
                    if taken[t]:
                        f += low[t]
                        sizes += reach[free[t]]
                        largest_in = max(largest_in, low[t])
                    else:
                        least_out = min(least_out, low[t])
                margin = (s + 20) * U * (sizes + 2.0 * reach[free[0]])
                if f >= margin:
                    break
                before, m = n_free, 0
                for t in range(before):
                    j = free[t]
                    if taken[t] and f - low[t] + least_out >= margin:
                        kept[n_kept] = j
                        n_kept += 1
                    elif taken[t] or f - largest_in + low[t] < margin:
                        free[m] = j
                        m += 1
                n_free = m
                if n_free < before:
                    size = compatible(size, kept, n_kept, free, n_free, beta, alongs, shares, gram, known)
                    continue
            closed = False
            break
        if closed:
            continue

        # Branch on the key of largest reach that the relaxation splits (the first free key if it splits none).
        at = 0
        for t in range(n_free):
            part = 0.0
            for k in range(size):
                part += beta[k] if shares[k, free[t]] > 0.0 else 0.0
            if VANISHING < part < 1.0 - VANISHING:
                at = t
                break
        key = free[at]
        for keeps in (False, True):
            stack_free[top, :at] = free[:at]
            stack_free[top, at : n_free - 1] = free[at + 1 : n_free]
            stack_n_free[top] = n_free - 1
            stack_kept[top, :n_kept] = kept[:n_kept]
            stack_n_kept[top] = n_kept
            if keeps:
                stack_kept[top, n_kept] = key
                stack_n_kept[top] += 1
            m = 0
            for k in range(size):
                if (shares[k, key] > 0.0) == keeps:
                    stack_beta[top, m] = beta[k]
                    stack_shares[top, m] = shares[k]
                    stack_along[top, m] = alongs[k]
                    m += 1
            stack_size[top] = m
            normalise(stack_beta[top], m)
            top += 1
    return DONE, best_set, best, tau, nodes


@nb.njit(
    nb.types.Tuple((COUNT, FOUND, REAL, REAL, COUNT))(MATRIX, VECTOR, VECTOR, REAL, KEYS, COUNT, REAL, REAL, COUNT),
    cache=True,
    error_model="numpy",
)
def search_candidates(steps, weights, distances, unit, keys, s, gap, floor, node_limit):
    """search among some keys of a row without a mass floor, from swaps of the heaviest: one call for a small problem.

    Few keys whose products are sharp, as those of a candidate set nearly always are, go to branch_and_bound_few(). Both
    searches ask for a reach of at least |a_j| + T w_j, T at least the error they start from: that is the heaviest keys'
    or less, but for the order in which it is summed, which `floor` (of a computed error's rounding or more) covers.
    Returns (why it stopped, subset as sorted keys of the row, its error, tau, nodes).
    """
    total = np.empty(steps.shape[1])
    w = weights[keys]
    heaviest = np.argsort(-w, kind="mergesort")[:s]
    largest = error_of(steps, weights, keys[heaviest], total) + 2.0 * floor
    reach = (w * distances[keys] / unit + largest * w) * INFLATION + ABSOLUTE
    order = np.argsort(-reach, kind="mergesort")
    place = np.empty_like(order)
    place[order] = np.arange(order.shape[0])
    start = place[heaviest]
    names, reach = keys[order], reach[order]
    a, w = steps[names], weights[names]
    if w.shape[0] <= MOST_FEW:
        products = products_of(a)
        subset = start.copy()
        inside = np.zeros(w.shape[0], np.bool_)
        inside[start] = True
        best_swaps(products, w, subset, inside, 0.0, np.empty_like(w), np.empty_like(w), np.empty_like(w))
        error = error_of(a, w, start, total)
        swapped = error_of(a, w, subset, total)
        if swapped < error:
            start, error = subset, swapped
        least_mass = np.sort(w)[:s].sum()
        if square_rounding(reach, a.shape[1]) <= SHARP * (error * least_mass) ** 2:
            stop, subset, error, tau, nodes = branch_and_bound_few(
                a, w, products, reach, start, error, gap, floor, node_limit
            )
            return stop, np.sort(names[subset]), error, tau, nodes
    start, error, _ = balance(a, w, start, 0.0, np.inf)
    stop, subset, error, tau, nodes, _, _ = branch_and_bound(
        a, w, reach, start, error, 0.0, gap, floor, 0.0, node_limit, np.inf, names, False
    )
    return stop, np.sort(names[subset]), error, tau, nodes
