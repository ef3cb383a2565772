"""Tables that read well as text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        texts = [c.rjust(w) if n else c.ljust(w) for n, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(texts) + " |"

    rule = "|" + "|".join("-" * (width + 1) + (":" if n else "-") for n, width in enumerate(widths)) + "|"
    return "\n".join([line(heads), rule, *(line(row) for row in rows)])
