"""Lines for a person: results on stdout, what else there is to know on stderr; and data for a program."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from oocdl.errors import printable

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def say(text: str, aside: bool = False) -> None:
    """Print a result on stdout, or on stderr what is said aside; names in it come from files of others."""
    typer.echo("\n".join(printable(line) for line in text.split("\n")), err=aside)


def say_json(data: Any) -> None:
    """Print data as JSON, in which no character commands a terminal."""
    typer.echo(json.dumps(data, indent=1, default=str))


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show on a terminal what is done meanwhile; nothing of it stays."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text, spinner="dots"):
        yield
