"""Splits paddings of windows into what kernels do, and what is computed apart at the ends of a volume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from oocdl.engines.convolution import Slide
from oocdl.graph.ir.operands import Pads


def shared(pads: Pads) -> tuple[list[int], Pads]:
    """The padding that both sides of each axis have in common, and what is left."""
    common = [min(pair) for pair in pads]
    return common, tuple((b - c, a - c) for (b, a), c in zip(pads, common, strict=True))


def evened(pads: Pads, extents: Sequence[int], taps: Sequence[int], slide: Slide) -> Pads:
    """``pads`` with as much after an axis as before it, where no window sees it.

    A region ends with the last place that a stride lets a window see, so it has less padding there.
    """
    found = []
    axes = zip(pads, extents, taps, slide.strides, slide.dilations, strict=True)
    for (before, after), extent, kernel, stride, dilation in axes:
        free = extent + before + after - dilation * (kernel - 1) - 1
        more = max(before - after, 0)
        found.append((before, after + more if free % stride + more < stride else after))
    return tuple(found)


def rows_alone(shape: Sequence[int], taps: int, pads: Pads, slide: Slide) -> bool:
    """Whether rows are computed apart, because only the outermost axis is padded on one side more than on
    the other, as at the ends of a volume: no operand is padded by a copy.

    ``shape`` of the operand, ``taps`` along that axis: each of these rows sees some of the operand.
    """
    alone, *others = [abs(before - after) for before, after in pads]
    plain = shape[0] == 1 and set(slide.strides) == {1} and slide.dilations[0] == 1 and not any(others)
    seen = max(pads[0]) < taps <= shape[2]
    return plain and seen and 0 < alone < shape[2] + sum(pads[0]) - taps + 1


class Row(NamedTuple):
    """One row of the result that is computed apart, with those taps that see the operand."""

    place: int
    start: int
    """First row of the operand that it sees."""
    tap: int
    """First tap that sees the operand."""
    seen: int


def end_rows(ends: tuple[int, int], extent: int, taps: int, rows: int) -> tuple[int, list[Row]]:
    """The first of the rows that are computed together, and the rows that are computed apart.

    ``ends``: padding before and after of the outermost axis, where the operand has ``extent`` rows.

    >>> end_rows((0, 1), 8, 3, 7)
    (0, [Row(place=6, start=6, tap=0, seen=2)])
    """
    before, after = ends
    found = []
    for place in range(before - after) if before > after else range(rows - 1, rows - 1 - after + before, -1):
        start, stop = max(place - before, 0), min(place - before + taps, extent)
        found.append(Row(place, start, max(before - place, 0), stop - start))
    return max(before - after, 0), found


def surplus(pads: Pads, extents: Sequence[int], taps: Sequence[int], slide: Slide) -> int:
    """Rows too many that are computed if both ends are padded alike; 0 where they would be too many."""
    before, after = pads[0]
    more = abs(before - after)
    wanted = extents[0] + before + after - slide.dilations[0] * (taps[0] - 1)
    return more if slide.strides[0] == 1 and more <= wanted // 8 else 0
