"""Lines for a person: results on stdout, what else there is to know on stderr."""

from __future__ import annotations

import typer

from oocdl.errors import printable


def say(text: str, aside: bool = False) -> None:
    """Print a result on stdout, or on stderr what is said aside; names in it come from files of others."""
    typer.echo("\n".join(printable(line) for line in text.split("\n")), err=aside)
