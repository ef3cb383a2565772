"""Tables that follow the width they are printed at: names are shortened, what matters least goes first."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite, nan, prod
from statistics import fmean
from typing import Any, Literal

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from oocdl.errors import printable
from oocdl.report.units import shape_text, size_text

MOST_ROWS = 40
"""Tables of layers with more rows are grouped by blocks."""
LEAST_COLUMNS: Mapping[str, int] = {"name": 16, "words": 24}
"""Kind of column -> minimum characters, as long as another column can be left out instead."""
BARS = "▁▂▃▄▅▆▇█"
FRAME = 3
"""Characters that the line and the spaces of a column take; one more line stands behind the last."""
NARROWEST = 8
"""Minimum characters of a shortened column."""


@dataclass(frozen=True)
class Column:
    """A column of a ``Sheet``."""

    key: str
    """Name of the value, where rows are data."""
    title: str
    text: Callable[[Any], str] = str
    rank: int = 0
    """Order of leaving out columns where room is short: the highest rank goes first, rank 0 stays."""
    kind: Literal["name", "words", "number"] = "number"
    """Names are shortened in the middle, words are wrapped, numbers stay as they are."""
    of: Callable[[Sequence[Any]], Any] | None = None
    """Makes the value of a row of several records; None: the sum of their values."""

    def value(self, records: Sequence[Any]) -> Any:
        """Return the value of a row of some records."""
        return self.of(records) if self.of else sum(getattr(record, self.key) for record in records)


@dataclass(frozen=True, eq=False)
class Sheet:
    """Rows of values, which rich prints as a table as wide as the console is."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    total: Sequence[Any] | None = None
    """A further row, below a line: values, or texts as they are shown."""
    ends: Set[int] = field(default_factory=frozenset)
    """Rows with a line below them, by number."""

    def records(self) -> list[dict[str, Any]]:
        """Return the rows as plain data."""
        return [dict(zip((column.key for column in self.columns), row, strict=True)) for row in self.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts = [self._texts(row) for row in self.rows]
        texts += [] if self.total is None else [self._texts(self.total)]
        natural = [
            max(cell_len(text) for text in (column.title, *(row[at] for row in texts)))
            for at, column in enumerate(self.columns)
        ]
        chosen = self._chosen(natural, options.max_width)
        widths = self._widths(chosen, natural, options.max_width)
        table = Table(
            title=Text(printable(self.title)) if self.title else None,
            title_justify="left",
            show_header=any(column.title for column in self.columns),
        )
        for at in chosen:
            column = self.columns[at]
            justify: Literal["left", "right"] = "right" if column.kind == "number" else "left"
            table.add_column(Text(column.title), justify=justify, overflow="fold", max_width=widths[at])
        for number, row in enumerate(texts):
            last = self.total is not None and number == len(self.rows) - 1
            names = {at for at in chosen if self.columns[at].kind == "name"}
            cells = [Text(shortened(row[at], widths[at]) if at in names else row[at]) for at in chosen]
            table.add_row(*cells, end_section=last or number in self.ends)
        yield table
        if missing := [column.title for at, column in enumerate(self.columns) if at not in chosen]:
            yield Text(f"no room for: {', '.join(missing)}")

    def _texts(self, row: Sequence[Any]) -> list[str]:
        return [
            printable(value if isinstance(value, str) else column.text(value))
            for column, value in zip(self.columns, row, strict=True)
        ]

    def _chosen(self, natural: Sequence[int], width: int) -> list[int]:
        """The columns for which there is room."""
        chosen, ranks = list(range(len(natural))), [column.rank for column in self.columns]
        least = [min(size, LEAST_COLUMNS.get(self.columns[at].kind, size)) for at, size in enumerate(natural)]
        while sum(least[at] + FRAME for at in chosen) >= width:
            last = max(chosen, key=lambda at: (ranks[at], at))
            if not ranks[last]:
                break
            chosen.remove(last)
        return chosen

    def _widths(self, chosen: Sequence[int], natural: Sequence[int], width: int) -> dict[int, int]:
        """The width of each column: the widest that may be narrower give what is missing."""
        widths = {at: natural[at] for at in chosen}
        soft = [at for at in chosen if self.columns[at].kind != "number"]
        while soft and sum(size + FRAME for size in widths.values()) >= width:
            widest = max(soft, key=lambda at: widths[at])
            if widths[widest] <= NARROWEST:
                break
            widths[widest] -= 1
        return widths


def shortened(text: str, width: int) -> str:
    """Leave out the middle of a name that is too long: update/b…ht/next."""
    if cell_len(text) <= width:
        return text
    head, tail = text[:width], text[-width:]  # names of files may be very long
    while cell_len(head) > width // 2:
        head = head[:-1]
    while cell_len(tail) > width - 1 - cell_len(head):
        tail = tail[1:]
    return f"{head}…{tail}"


def key_values(title: str, pairs: Sequence[tuple[str, Any]]) -> Sheet:
    """Make a table of two columns without a head: what something is, and its value."""
    return Sheet(title, (Column("what", "", kind="words"), Column("value", "", kind="words")), pairs)


def array_table(title: str, arrays: Mapping[str, Any]) -> Sheet:
    """Make a table of arrays by name, with shape, type and size."""
    columns = (
        Column("name", "name", kind="name"),
        Column("shape", "shape", shape_text, kind="words"),
        Column("dtype", "type", rank=1),
        Column("nbytes", "size", size_text),
    )
    return Sheet(title, columns, [tuple(row.values()) for row in array_data(arrays)])


def array_data(arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return name, shape, type and size of arrays, or of what describes them, as plain data."""
    return [
        {
            "name": name,
            "shape": list(array.shape),
            "dtype": str(np.dtype(array.dtype)),
            "nbytes": prod(array.shape) * np.dtype(array.dtype).itemsize,
        }
        for name, array in arrays.items()
    ]


def sparkline(numbers: Sequence[float], most: int) -> str:
    """Draw numbers as bars of a character each, at most so many: means of equal parts where there are more.

    A part whose mean is not finite is a blank.
    """
    count = min(len(numbers), most)
    edges = [len(numbers) * at // count for at in range(count + 1)] if count else []
    parts = [numbers[start:stop] for start, stop in pairwise(edges)]
    means = [fmean(part) if all(map(isfinite, part)) else nan for part in parts]
    known = [mean for mean in means if isfinite(mean)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    levels, span = len(BARS) - 1, (high - low) or 1.0
    return "".join(BARS[round((mean - low) / span * levels)] if isfinite(mean) else " " for mean in means)


def block_sheet(
    title: str,
    columns: Sequence[Column],
    records: Sequence[Any],
    every: bool = False,
    total: Sequence[str] = (),
) -> Sheet:
    """Make a table of records that have a ``name``: a row each, or of many one for each block.

    ``every``: a row each, however many they are. ``total``: how a last row begins, which sums up all of them.
    """
    names = [printable(record.name) for record in records]
    rows = [
        (label, *(column.value([records[at] for at in places]) for column in columns[1:]))
        for label, places in blocks(names, len(names) if every else MOST_ROWS)
    ]
    sums = (*total, *(column.value(records) for column in columns[len(total) :])) if total else None
    return Sheet(title, columns, rows, sums)


def blocks(names: Sequence[str], most: int = MOST_ROWS) -> list[tuple[str, list[int]]]:
    """Group layers by the blocks of a network so that there are at most so many groups.

    Returns the label and the places of each group. Layers of one pass (forward, ``grad/``, ``update/``) are
    together that have the longest beginnings of their names in common; where names tell nothing, those are
    that follow one another. Each is a group of its own where they are few.

    >>> blocks(["down.conv1", "down.conv2", "grad/down.conv2", "grad/down.conv1"], most=2)
    [('down × 2', [0, 1]), ('grad/down × 2', [2, 3])]
    """
    if len(names) <= most:
        return [(name, [at]) for at, name in enumerate(names)]
    parts = [_parts(name) for name in names]
    for depth in range(max(map(len, parts)) - 1, 1, -1):
        groups: dict[tuple[str, ...], list[int]] = {}
        for at, part in enumerate(parts):
            groups.setdefault(part[:depth], []).append(at)
        if len(groups) <= most:
            return [(_label("".join(part), places, names), places) for part, places in groups.items()]
    size = -(-len(names) // most)
    runs = [list(range(start, min(start + size, len(names)))) for start in range(0, len(names), size)]
    return [(_label(f"{names[run[0]]} to {names[run[-1]]}", run, names), run) for run in runs]


def _parts(name: str) -> tuple[str, ...]:
    """The pass of a layer ("" for forward), and the parts of its name with the signs between them."""
    match = re.match(r"(grad/|update/)?(.*)", name, re.DOTALL)
    assert match is not None
    return (match[1] or "", *re.findall(r"[./]*[^./]+|[./]+", match[2]))


def _label(label: str, places: Sequence[int], names: Sequence[str]) -> str:
    return names[places[0]] if len(places) == 1 else f"{label} × {len(places)}"


def text_of(*parts: Sheet | Table | str, columns: int | None = None) -> str:
    """Print tables and lines as text, with one line break at its end.

    It is at most so many columns wide; None: as wide as the terminal, or 80 where there is none.
    """
    out = io.StringIO()
    width = Console().width if columns is None else columns
    # In a notebook rich would show the text itself.
    plain: Any = {"force_terminal": False, "force_jupyter": False, "highlight": False, "markup": False}
    console = Console(file=out, width=width, **plain)
    for part in parts:
        console.print(part)
    lines = out.getvalue().removesuffix("\n").split("\n")
    return "\n".join(printable(line.rstrip()) for line in lines) + "\n"
