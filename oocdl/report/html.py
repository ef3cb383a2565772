"""HTML for notebooks: facts, tables, bars and curves, as small pieces that a page of any colour may hold.

Every text is escaped, since names come from files that others wrote; nothing is loaded, and no script runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from oocdl.errors import printable
from oocdl.report.tables import Sheet, shortened

MOST_ROWS = 40
"""Rows of a table that are shown."""
MOST_LETTERS = 60
"""Letters of a cell; longer ones are shortened in the middle."""
CURVE_WIDE, CURVE_HIGH, CURVE_POINTS = 420, 90, 210
"""Pixels of a curve, and the points that it is drawn through."""
BLUE, VERMILION = "#0072b2", "#d55e00"
"""Two colours of Okabe and Ito's palette, which colour-blind people can tell apart."""
_CELL = "padding:1px 8px;text-align:"


def safe(text: object) -> str:
    """Return a text as HTML that shows it.

    >>> safe("<script>")
    '&lt;script&gt;'
    """
    return escape(shortened(printable(str(text)), MOST_LETTERS))


def block(title: str, *parts: str) -> str:
    """Put parts below a title."""
    head = escape(printable(title)[:300])
    return f'<div style="max-width:60em"><b>{head}</b>{"".join(parts)}</div>'


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Make a table of names and what is known of them."""
    rows = "".join(
        f'<tr><td style="{_CELL}left;opacity:.7">{safe(name)}</td>'
        f'<td style="{_CELL}left">{escape(printable(str(value))[:1000])}</td></tr>'
        for name, value in pairs
    )
    return f'<table style="border-collapse:collapse">{rows}</table>'


def table(sheet: Sheet, all_of_them: str = "") -> str:
    """Make a table; of more than ``MOST_ROWS`` rows it has the first, and a line that says so.

    ``all_of_them`` says what shows them all.
    """
    justify = ["right" if column.kind == "number" else "left" for column in sheet.columns]

    def line(values: Sequence[Any], tag: str) -> str:
        texts = (
            value if isinstance(value, str) else column.text(value)
            for column, value in zip(sheet.columns, values, strict=True)
        )
        cells = "".join(
            f'<{tag} style="{_CELL}{side}">{safe(text)}</{tag}>'
            for side, text in zip(justify, texts, strict=True)
        )
        return f"<tr>{cells}</tr>"

    lines = "".join(line(row, "td") for row in sheet.rows[:MOST_ROWS])
    lines += "" if sheet.total is None else line(sheet.total, "th")
    left = len(sheet.rows) - MOST_ROWS
    words = ([f"and {left} more"] if left > 0 else []) + ([all_of_them] if all_of_them else [])
    head = line([column.title for column in sheet.columns], "th")
    return (
        f"<div>{escape(printable(sheet.title))}</div>"
        f'<table style="border-collapse:collapse"><thead>{head}</thead>'
        f'<tbody>{lines}</tbody></table><div style="opacity:.7">{safe("; ".join(words))}</div>'
    )


def bar(share: float, text: str = "") -> str:
    """Make a bar that is full by a share of 0 to 1, and a text behind it."""
    full = 100 * min(max(share, 0.0), 1.0)
    return (
        '<div style="display:flex;align-items:center;gap:8px"><div style="flex:none;width:16em;height:.7em;'
        'border-radius:.35em;overflow:hidden;background:rgba(128,128,128,.25)">'
        f'<div style="width:{full:.1f}%;height:100%;background:{BLUE}"></div></div>'
        f"<span>{escape(printable(text))}</span></div>"
    )


def curve(name: str, points: Sequence[tuple[float, float]], limit: float | None = None) -> str:
    """Draw numbers over time or steps, and a line at ``limit``; empty below two points.

    Of points that are close together it keeps the least and the largest, so that no peak is lost.
    """
    finite = [(x, y) for x, y in points if abs(y) < float("inf")]
    if len(finite) < 2 or finite[0][0] == finite[-1][0]:
        return ""
    left, right = finite[0][0], finite[-1][0]
    heights = [y for _, y in finite] + ([] if limit is None else [limit])
    low, high = (0.0 if limit is not None else min(heights)), max(heights)
    tall = (high - low) or 1.0

    def place(x: float, y: float) -> str:
        across = (x - left) / (right - left) * CURVE_WIDE
        return f"{across:.1f},{(CURVE_HIGH - 4) * (1 - (y - low) / tall) + 2:.1f}"

    line = " ".join(place(x, y) for x, y in _fewer(finite))
    marks = ""
    if limit is not None:
        marks = (
            f'<polyline points="{place(left, limit)} {place(right, limit)}" fill="none" stroke="{VERMILION}" '
            'stroke-dasharray="5 3"/>'
        )
    return (
        f'<figure style="margin:6px 0"><svg width="{CURVE_WIDE}" height="{CURVE_HIGH}" role="img" '
        f'aria-label="{escape(name)}"><polyline points="{line}" fill="none" stroke="{BLUE}" '
        f'stroke-width="1.5"/>{marks}</svg>'
        f'<figcaption style="opacity:.7">{escape(name)}</figcaption></figure>'
    )


def _fewer(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep the lowest and the highest of each part, in order, and both ends."""
    size = -(-2 * len(points) // CURVE_POINTS)
    if size <= 2:
        return list(points)
    kept = [points[0]]
    for start in range(0, len(points), size):
        part = points[start : start + size]
        kept += sorted({min(part, key=lambda one: one[1]), max(part, key=lambda one: one[1])})
    return [*kept, points[-1]]
