"""The published numbers that we compare with, read from published.toml beside this file."""

import tomllib
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

from data.errors import BadInput

PATH = Path(__file__).with_name("published.toml")
_REQUIRED = ("key", "model", "unit", "condition", "place")
_OPTIONAL = ("s", "value", "low", "high", "text", "tokens", "rows")


@dataclass(frozen=True)
class Published:
    """One published number: a value, or a range from low to high (one end alone is a bound).

    s: budget in keys; None: not of one budget. unit: "1" for a pure number, a share or a ratio. tokens: of a
    document; None, like an empty text or rows: not stated, or not one. place: where in the paper.
    """

    key: str
    s: int | None
    model: str
    value: float | None
    low: float | None
    high: float | None
    unit: str
    text: str
    tokens: int | None
    rows: str
    condition: str
    place: str


@cache
def load(path: Path = PATH) -> tuple[Published, ...]:
    """Every number, in the order of the file.

    Raises BadInput that names the entry, if one lacks a field, has an unknown one, or lists of unequal length.
    """
    groups = tomllib.loads(path.read_text("utf-8"))["numbers"]
    return tuple(number for place, group in enumerate(groups, 1) for number in _expand(group, f"{path}: entry {place}"))


def find(key: str, s: int | None = None, model: str | None = None) -> Published | None:
    """The first number of that key at that budget (None: not of one budget), of that model (None: of any)."""
    for number in load():
        if number.key == key and number.s == s and model in (None, number.model):
            return number
    return None


def _expand(group: dict[str, object], where: str) -> list[Published]:
    """The numbers of one [[numbers]] entry, which may run over budgets or over models, not over both."""
    for name in _REQUIRED:
        if not isinstance(group.get(name), str | list):
            raise BadInput(f"{where} ({group.get('key')}): field {name!r} is missing or no text")
    for name in group:
        if name not in _REQUIRED + _OPTIONAL:
            raise BadInput(f"{where} ({group['key']}): unknown field {name!r}")
    if not {"value", "low", "high"} & set(group):
        raise BadInput(f"{where} ({group['key']}): expected a value, or low and high")
    listed = [name for name in ("s", "model") if isinstance(group.get(name), list)]
    if len(listed) > 1:
        raise BadInput(f"{where} ({group['key']}): expected a list of budgets or of models, not both")
    length = len(_as_list(group[listed[0]])) if listed else 1
    columns = {}
    for name in ("s", "model", "value", "low", "high"):
        given = group.get(name)
        over = _as_list(given) if isinstance(given, list) else [given] * (length if name in ("s", "model") else 1)
        if name in group and len(over) != length:
            raise BadInput(f"{where} ({group['key']}): {name} has {len(over)} entries, expected {length}")
        columns[name] = over if name in group else [None] * length
    tokens = group.get("tokens")
    return [
        Published(
            key=str(group["key"]),
            s=None if s is None else int(str(s)),
            model=str(model),
            value=_number(value),
            low=_number(low),
            high=_number(high),
            unit=str(group["unit"]),
            text=str(group.get("text", "")),
            tokens=None if tokens is None else int(str(tokens)),
            rows=str(group.get("rows", "")),
            condition=str(group["condition"]),
            place=str(group["place"]),
        )
        for s, model, value, low, high in zip(*columns.values(), strict=True)
    ]


def _as_list(given: object) -> list[object]:
    return list(given) if isinstance(given, list) else [given]


def _number(given: object) -> float | None:
    """A TOML number, or a fraction written as text, as float64."""
    return None if given is None else float(Fraction(str(given)))
