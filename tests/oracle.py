"""The definitions once more, in exact fractions and by brute force. Imports nothing of ours."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import combinations

Row = tuple[list[Fraction], list[list[Fraction]]]  # weights (n) that sum to 1, values (n, d)


def exact(weights: Sequence[float], values: Sequence[Sequence[float]]) -> Row:
    """The row as fractions: floats are taken at their exact value and weights divided by their exact sum."""
    p = [Fraction(float(x)) for x in weights]
    total = sum(p)
    return [x / total for x in p], [[Fraction(float(x)) for x in v] for v in values]


def mean(row: Row, keys: Iterable[int]) -> list[Fraction]:
    p, v = row
    chosen = list(keys)
    mass = sum(p[j] for j in chosen)
    return [sum((p[j] * v[j][i] for j in chosen), Fraction(0)) / mass for i in range(len(v[0]))]


def squared_error(row: Row, keys: Iterable[int]) -> Fraction:
    """e_s(A)^2."""
    mu, kept = mean(row, range(len(row[0]))), mean(row, keys)
    return sum(((a - b) ** 2 for a, b in zip(mu, kept, strict=True)), Fraction(0))


def least_squared_error(row: Row, s: int, pool: Sequence[int] | None = None) -> tuple[Fraction, set[tuple[int, ...]]]:
    """ES(s)^2 over subsets of the pool, and every subset that attains it. Keys of weight 0 are not chosen."""
    keys = [j for j in (range(len(row[0])) if pool is None else pool) if row[0][j] > 0]
    found: dict[tuple[int, ...], Fraction] = {A: squared_error(row, A) for A in combinations(keys, s)}
    best = min(found.values())
    return best, {A for A, value in found.items() if value == best}


def squared_distance_to_segment_hull(points: list[list[Fraction]]) -> Fraction:
    """|nearest point of the hull to the origin|^2, for at most three points, by trying every face."""
    best = min(sum((x * x for x in p), Fraction(0)) for p in points)
    for a, b in combinations(points, 2):
        edge = [y - x for x, y in zip(a, b, strict=True)]
        length = sum((x * x for x in edge), Fraction(0))
        if length > 0:
            t = -sum((x * y for x, y in zip(a, edge, strict=True)), Fraction(0)) / length
            if 0 < t < 1:
                best = min(best, sum(((x + t * y) ** 2 for x, y in zip(a, edge, strict=True)), Fraction(0)))
    if len(points) == 3:
        a, b, c = points
        u = [y - x for x, y in zip(a, b, strict=True)]
        w = [y - x for x, y in zip(a, c, strict=True)]
        uu, ww, uw = (sum((x * y for x, y in zip(g, h, strict=True)), Fraction(0)) for g, h in ((u, u), (w, w), (u, w)))
        au, aw = (sum((x * y for x, y in zip(a, g, strict=True)), Fraction(0)) for g in (u, w))
        determinant = uu * ww - uw * uw
        if determinant > 0:
            x, y = (-au * ww + aw * uw) / determinant, (-aw * uu + au * uw) / determinant
            if x >= 0 and y >= 0 and x + y <= 1:
                point = [p + x * g + y * h for p, g, h in zip(a, u, w, strict=True)]
                best = min(best, sum((t * t for t in point), Fraction(0)))
    return best
