"""Tables that read well as text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    return "\n".join([top(heads, widths), *(line(row, widths) for row in rows)])


def top(heads: Sequence[str], widths: Sequence[int]) -> str:
    """The heads, and the rule below them."""
    rule = "|" + "|".join("-" * (width + 1) + (":" if n else "-") for n, width in enumerate(widths)) + "|"
    return f"{line(heads, widths)}\n{rule}"


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """One row; a cell that is wider than its column makes the row longer."""
    texts = [c.rjust(w) if n else c.ljust(w) for n, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "| " + " | ".join(texts) + " |"
