"""Lines for a person, also after a signal: results on stdout, all else on stderr; and data for a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any

import typer
from rich.console import Console

from oocdl.errors import printable
from oocdl.host.plain_json import json_text
from oocdl.training.signals import Stopped

INTERRUPTED_EXIT_CODE = 130
UNCHANGED = "nothing was changed"
Json = Annotated[bool, typer.Option("--json", help="Print JSON, not tables; null: a number is not finite.")]


def say(text: str, aside: bool = False) -> None:
    """Print a result on stdout, or on stderr what is said aside; names in it come from files of others."""
    typer.echo("\n".join(printable(line) for line in text.split("\n")), err=aside)


def say_json(data: Any) -> None:
    """Print data as JSON, in which no character commands a terminal; a number that is not finite is null."""
    typer.echo(json_text(data))


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show on a terminal what is done meanwhile; nothing of it stays."""
    console = Console(stderr=True)
    with console.status(text, spinner="dots") if console.is_terminal else nullcontext():
        yield


class Ended(Exception):
    """A command was ended from outside; the message says what is true now."""

    def __init__(self, how: str, text: str, code: int) -> None:
        super().__init__(f"{how}; {text}" if text else how)
        self.exit_code = code


@contextmanager
def ending(truth: Callable[[], str]) -> Iterator[None]:
    """Turn what ends the block from outside into ``Ended``, with what ``truth`` says then."""
    try:
        yield
    except KeyboardInterrupt:
        raise Ended("interrupted", truth(), INTERRUPTED_EXIT_CODE) from None
    except Stopped as stop:
        raise Ended(f"stopped by {stop.signal}", truth(), int(stop.code or 0)) from None
