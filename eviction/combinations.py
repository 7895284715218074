"""What is audited: a score, an allocator, a selector, a storage and a state, in one name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from data import BadInput
from data.store import sha256
from eviction.method import Allocator, Score, Selector, State, listed, named
from eviction.ragged import Storage
from eviction.run import STORAGES

FULL_CACHE = "full cache"
SYNTAX = "score[+allocator][+selector][,storage][,state]"

_ADDED: dict[str, type[Any] | None] = {"allocator": Allocator, "selector": Selector}
_HELD: dict[str, type[Any] | None] = {"storage": None, "state": State}  # a storage is a word and no part

# Beside every score with the uniform allocator. Masked and padded are how methods are published: the selection is made,
# and the memory is held all the same.
COMBINATIONS = (
    "snapkv+pyramid",
    "snapkv+adakv",
    "snapkv+adakv, masked",
    "expected_attention+adakv",
    "snapkv+contour",
    "snapkv+contour:mode=uniform",
    "snapkv+contour, padded",
    "snapkv+random",
    "snapkv+alpha",
    "snapkv+balancing",
    "snapkv, subspace",
    "snapkv, span_mean",
    "kvzip+contour",
    "triattention+shared",
    "triattention+alpha:score_scale=raw",
    "Q_stats+shared",
    "variant_b+shared",
)


@dataclass(frozen=True)
class Method:
    """A row's method; score None evicts nothing. Parts are named with their options, as evict() takes them."""

    name: str
    score: str | None
    allocator: str = "uniform"
    selector: str = "top_mass"
    storage: Storage = "ragged"
    state: str = "exact"


def methods(chosen: Sequence[str] = ()) -> tuple[Method, ...]:
    """The full cache, then the methods of these names, each once; of none: every score there is with the uniform
    allocator, then COMBINATIONS. Raises BadInput as parsed() does."""
    names = chosen or (*listed(Score), *COMBINATIONS)
    return (Method(FULL_CACHE, None), *dict.fromkeys(map(parsed, names)))


def parsed(text: str) -> Method:
    """The method of a name such as "snapkv", "snapkv:window=16+adakv", "snapkv+alpha", "knorm, masked" or
    "snapkv, subspace:rank=32": SYNTAX. What is left out is uniform, top_mass, ragged, exact.

    Its own name leaves these out, too. Raises BadInput, one line, for a part or an option that there is not, and for a
    state in a storage that cannot hold it.
    """
    main, *held = _pieces(text)
    score, *parts = (part.strip() for part in main.split("+"))
    _check(text, Score, score)
    chosen: dict[str, str] = {}
    for part in parts:
        _take(text, part, _ADDED, chosen)
    for part in held:
        _take(text, part, _HELD, chosen)
    allocator, selector = chosen.get("allocator", "uniform"), chosen.get("selector", "top_mass")
    storage, state = cast(Storage, chosen.get("storage", "ragged")), chosen.get("state", "exact")
    if _name(state) != "exact" and storage != "ragged":
        raise BadInput(f"--method {text}: state {state}: expected storage ragged")
    name = score
    name += "" if allocator == "uniform" else f"+{allocator}"
    name += "" if selector == "top_mass" else f"+{selector}"
    name += "" if storage == "ragged" else f", {storage}"
    name += "" if state == "exact" else f", {state}"
    return Method(name, score, allocator, selector, storage, state)


def files(chosen: Sequence[Method]) -> dict[str, str]:
    """sha256 of every file that an option of a method names, by the file's name."""
    values = [value for one in chosen for value in re.findall(r"=([^=,;+]+)", one.name)]
    return {value: sha256(Path(value)) for value in values if Path(value).is_file()}


def _pieces(text: str) -> list[str]:
    """The name cut at its commas, but not before an option: name=value."""
    pieces: list[str] = []
    for piece in text.split(","):
        if pieces and re.match(r"\s*\w+=", piece):
            pieces[-1] += f",{piece.strip()}"
        else:
            pieces.append(piece.strip())
    return pieces


def _name(part: str) -> str:
    return part.partition(":")[0]


def _take(text: str, part: str, kinds: Mapping[str, type[Any] | None], chosen: dict[str, str]) -> None:
    """Put the part under its kind in `chosen`; raises BadInput if it is of none of the kinds, or the second of one."""
    names = {what: STORAGES if kind is None else tuple(listed(kind)) for what, kind in kinds.items()}
    fits = [what for what, there in names.items() if _name(part) in there]
    if not fits:
        expected = " or ".join(f"{what} ({', '.join(there)})" for what, there in names.items())
        raise BadInput(f"--method {text}: unknown {_name(part)!r}: expected {expected}")
    what, kind = fits[0], kinds[fits[0]]
    if what in chosen:
        raise BadInput(f"--method {text}: {what} {part} beside {what} {chosen[what]}: expected {SYNTAX}")
    if kind is not None:
        _check(text, kind, part)
    elif part not in STORAGES:
        raise BadInput(f"--method {text}: storage {part}: expected no options")
    chosen[what] = part


def _check(text: str, kind: type[Any], part: str) -> None:
    try:
        named(kind, part)
    except BadInput as error:
        raise BadInput(f"--method {text}: {error}") from None
