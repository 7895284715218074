"""What parts there are, as the command line and the README show them."""

import dataclasses
from typing import Any

from eviction.method import Allocator, Anchors, Schedule, Score, Selector, State, listed

KINDS: tuple[tuple[str, type[Any]], ...] = (
    ("score", Score),
    ("allocator", Allocator),
    ("selector", Selector),
    ("state", State),
    ("schedule", Schedule),
    ("anchors", Anchors),
)


def parts() -> list[tuple[str, str, str, str]]:
    """(kind, name, options with their defaults, source) of every part that has a file."""
    return [
        (kind, name, ", ".join(_options(part)), part.source)
        for kind, base in KINDS
        for name, part in listed(base).items()
    ]


def markdown() -> str:
    """The same as a table of Markdown."""
    lines = ["| | name | options | source |", "|---|---|---|---|"]
    for kind, name, options, source in parts():
        lines.append(f"| {kind} | `{name}` | {f'`{options}`' if options else ''} | {source} |")
    return "\n".join(lines) + "\n"


def _options(part: Any) -> list[str]:
    return [f"{option.name.strip('_')}={option.default}" for option in dataclasses.fields(part)]
