"""The command line of eviction: `python -m eviction list`, `python -m eviction audit`."""

import dataclasses

from rich.console import Console
from rich.table import Table

from data.command_line import app, run
from eviction.method import Allocator, Score, Selector, listed

application = app("Eviction inside a model: what there is, and what each method really holds.")


@application.command("list")
def names() -> None:
    """Every score, allocator and selector that can be named, with its options and its source."""
    console = Console()
    for title, parts in (("score", listed(Score)), ("allocator", listed(Allocator)), ("selector", listed(Selector))):
        table = Table(title=f"{title}s", title_justify="left")
        for heading in (title, "options", "source"):
            table.add_column(heading, overflow="fold")
        for name, part in parts.items():
            options = [f"{field.name}={field.default}" for field in dataclasses.fields(part)]  # type: ignore[arg-type]
            table.add_row(name, ", ".join(options), part.source)
        console.print(table)
    console.print("Options go with the name: snapkv:variant=kvpress,window=16")


if __name__ == "__main__":
    run(application, "eviction")
