"""What notebooks show: HTML of what is printed elsewhere, and progress as one output, rewritten in place.

Nothing is imported for it: where code runs in a notebook, IPython is there already. No script runs, and every
text is escaped, since names come from files that others wrote.
"""

from __future__ import annotations

import io
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import Any

from rich.console import Console

from oocdl.errors import printable
from oocdl.events import RunStarted, StepDone
from oocdl.report.progress import Progress
from oocdl.report.tables import MOST_ROWS, Sheet, text_of

MOST_LINES = 200
"""Maximum number of lines that are kept; beyond it the first ones go."""
COLUMNS = 110
"""Characters of a line of a table."""


def page(*parts: Sheet | str) -> str:
    """Show tables and lines; of a table with more than ``MOST_ROWS`` rows the first."""
    shown: list[Sheet | str] = []
    for part in parts:
        if isinstance(part, Sheet) and len(part.rows) > MOST_ROWS:
            more = f"and {len(part.rows) - MOST_ROWS} more"
            shown += [replace(part, rows=part.rows[:MOST_ROWS]), more]
        else:
            shown.append(part)
    return lines(text_of(*shown, columns=COLUMNS), "white-space:pre;overflow-x:auto")


def lines(text: str, style: str) -> str:
    """Show lines as they are; ``style`` is that of their block."""
    return f'<pre style="{style};line-height:normal;margin:0">{escape(text)}</pre>'


def bar(share: float, text: str = "") -> str:
    """Show a bar that is full by a share of 0 to 1, and a text behind it."""
    return f'<div><progress value="{share:.4f}"></progress> {escape(printable(text))}</div>'


class Block:
    """Lines of text and a bar, as one output of a notebook's cell. ``publish`` is IPython's."""

    def __init__(self, publish: Callable[..., Any]) -> None:
        self.publish = publish
        self.ident = uuid.uuid4().hex
        self.lines: deque[str] = deque(maxlen=MOST_LINES)
        self.share: float | None = None
        self.status = ""
        self.is_shown = False

    def line(self, text: str) -> None:
        """Add lines that stay."""
        self.lines.extend(map(printable, text.splitlines()))
        self._show()

    def bar(self, share: float, status: str) -> None:
        """Fill the bar to a share of 0 to 1, with a text behind it in the place of the one before."""
        self.share, self.status = share, printable(status)
        self._show()

    def _show(self) -> None:
        plain = "\n".join((*self.lines, *([self.status] if self.status else [])))
        page = lines("\n".join(self.lines), "white-space:pre-wrap")
        if self.share is not None:
            page += bar(self.share, self.status)
        self.publish(
            data={"text/plain": plain, "text/html": page},
            transient={"display_id": self.ident},
            update=self.is_shown,
        )
        self.is_shown = True


class NotebookProgress(Progress):
    """Progress of runs as one output of a cell."""

    def __init__(self, block: Block, budget_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        # A kernel says of itself that it is a terminal (FORCE_COLOR).
        nowhere = Console(file=io.StringIO(), force_jupyter=False, force_terminal=False)
        super().__init__(budget_bytes, nowhere, clock)
        self.block = block

    def _start(self, event: RunStarted) -> None:
        super()._start(event)
        if event.done < event.steps:
            self.block.bar(event.done / event.steps, "the first step ..")

    def _write(self, event: StepDone) -> None:
        self.written_at = self.clock()
        self.block.bar(self.done / self.steps, self._text(event))

    def _move(self, done: float, text: str) -> None:
        self.block.bar(done / self.steps, text)

    def _print(self, text: str) -> None:
        self.block.line(text)


def block_here() -> Block | None:
    """Return a block for the cell that runs; None where this is no notebook."""
    library = sys.modules.get("IPython")
    shell = None if library is None else library.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):  # IPython on a terminal has none
        return None
    return Block(shell.display_pub.publish)


def progress_here(budget_bytes: int) -> Progress:
    """Return the listener of ``fit(progress=True)``, for a notebook or a terminal."""
    block = block_here()
    return Progress(budget_bytes) if block is None else NotebookProgress(block, budget_bytes)
