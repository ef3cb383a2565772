"""HTML for notebooks: what is printed, as it is printed, and a bar; nothing is loaded, and no script runs.

Every text is escaped, since names come from files that others wrote.
"""

from __future__ import annotations

from dataclasses import replace
from html import escape

from oocdl.errors import printable
from oocdl.report.tables import MOST_ROWS, Sheet, text_of

COLUMNS = 110
"""Characters of a line of a table."""


def page(*parts: Sheet | str) -> str:
    """Show tables and lines; of a table with more than ``MOST_ROWS`` rows the first."""
    shown: list[Sheet | str] = []
    for part in parts:
        more = len(part.rows) - MOST_ROWS if isinstance(part, Sheet) else 0
        if isinstance(part, Sheet) and more > 0:
            shown += [replace(part, rows=part.rows[:MOST_ROWS]), f"and {more} more"]
        else:
            shown.append(part)
    return lines(text_of(*shown, columns=COLUMNS), "white-space:pre;overflow-x:auto")


def lines(text: str, style: str) -> str:
    """Show lines as they are; ``style`` is that of their block."""
    return f'<pre style="{style};line-height:normal;margin:0">{escape(text)}</pre>'


def bar(share: float, text: str = "") -> str:
    """Show a bar that is full by a share of 0 to 1, and a text behind it."""
    return f'<div><progress value="{share:.4f}"></progress> {escape(printable(text))}</div>'
