"""The index notation, which relates the axes of a node's operands, and interval arithmetic on regions.

An ``AxisRule`` gives, for each axis of each operand, an index expression over
*letters*. Every output axis is one plain letter (or ``None`` where its extent is
one and it follows nothing). From the range of each letter, exact interval
arithmetic gives the region of every operand that is needed: ``index.needs(out)`` is
the range of the operand's axis for the range ``out`` of the letter. Ranges are half
open and *not* clipped: the part of a range that lies outside a value is padding.

>>> Window("d", kernel=3, stride=2, pad=1).needs((0, 4))
(-1, 8)
>>> Inverse("d", kernel=3, stride=2, pad=1).needs((0, 8))
(0, 5)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

Range = tuple[int, int]
Region = tuple[Range, ...]

BLOCK_BYTES = 256 << 10
"""Bytes of a large array in a file that are read at once, where it cannot be read to where it belongs."""


@dataclass(frozen=True)
class Plain:
    """The index is the letter."""

    letter: str

    def needs(self, out: Range) -> Range:
        return out


@dataclass(frozen=True)
class Shifted:
    """The index is ``step * letter + offset`` (Slice, Concat, Pad; Reverse, whose step is -1)."""

    letter: str
    offset: int
    step: int = 1

    def needs(self, out: Range) -> Range:
        first, last = out[0] * self.step + self.offset, (out[1] - 1) * self.step + self.offset
        return min(first, last), max(first, last) + 1


@dataclass(frozen=True)
class _Sliding:
    """A window that slides along an axis."""

    letter: str
    kernel: int
    stride: int = 1
    dilation: int = 1
    pad: int = 0


class Window(_Sliding):
    """The indices are ``stride * letter + dilation * z - pad`` for ``z`` in ``range(kernel)``."""

    def needs(self, out: Range) -> Range:
        start = out[0] * self.stride - self.pad
        return start, (out[1] - 1) * self.stride - self.pad + self.dilation * (self.kernel - 1) + 1


class Inverse(_Sliding):
    """The indices ``o`` that solve ``stride * o + dilation * z - pad = letter`` for some ``z``."""

    def needs(self, out: Range) -> Range:
        reach = self.dilation * (self.kernel - 1)
        start = -((reach - out[0] - self.pad) // self.stride)
        stop = (out[1] - 1 + self.pad) // self.stride + 1
        return start, max(stop, start + 1)


class Around(_Sliding):
    """All indices of every window that touches the letter: a ``Window`` of an ``Inverse`` (MaxPoolGrad)."""

    def needs(self, out: Range) -> Range:
        return Window(**vars(self)).needs(Inverse(**vars(self)).needs(out))


@dataclass(frozen=True)
class Band:
    """The indices from ``first[letter]`` up to and including ``last[letter]``, both monotone (Resize)."""

    letter: str
    first: tuple[int, ...]
    last: tuple[int, ...]

    def needs(self, out: Range) -> Range:
        return self.first[out[0]], self.last[out[1] - 1] + 1


@dataclass(frozen=True)
class Whole:
    """All indices of the axis, whatever the output region (kernels, tables that are looked up)."""

    extent: int

    def needs(self, out: Range) -> Range:
        return 0, self.extent


Index = Plain | Shifted | Window | Inverse | Around | Band | Whole


@dataclass(frozen=True)
class AxisRule:
    """The index expressions of one node, one for each axis; ``None`` marks a broadcast axis of extent one."""

    inputs: tuple[tuple[Index | None, ...], ...]
    outputs: tuple[tuple[Plain | None, ...], ...]
    extents: Mapping[str, int]
    """Letter -> extent."""
    uncut: frozenset[str] = field(default_factory=frozenset)
    """Letters that are never cut."""
    unsplit: frozenset[str] = field(default_factory=frozenset)
    """Letters whose axes are never made of factors: what is cut of them lies side by side, as bands count."""
    combine: str | None = None
    """The way to combine partial results over a cut reduced letter: ``sum``, ``moments``,
    ``logsumexp``; ``None`` where reduced letters are never cut."""


def clip(wanted: Range, extent: int) -> Range:
    """Return the part of ``wanted`` inside ``range(extent)``; ``(0, 0)`` if there is none."""
    start, stop = max(wanted[0], 0), min(wanted[1], extent)
    return (start, stop) if start < stop else (0, 0)


def hull(first: Region | None, second: Region) -> Region:
    """Return the smallest region that holds both; an empty region holds nothing."""
    if first is None or first == second or is_empty(first):
        return second
    if is_empty(second):
        return first
    return tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))


def is_empty(region: Region) -> bool:
    """Whether a region has no elements."""
    for start, stop in region:  # noqa: SIM110 (a generator takes twice as long, and this is asked most)
        if start >= stop:
            return True
    return False


def whole(shape: Sequence[int]) -> Region:
    """Return the region of a whole value of ``shape``."""
    return tuple((0, extent) for extent in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    """Return the extents of a region."""
    return tuple(stop - start for start, stop in region)


def region_size(region: Region) -> int:
    """Return the number of elements of a region."""
    size = 1
    for start, stop in region:
        size *= stop - start
    return size


def intersect(first: Region, second: Region) -> Region:
    """Return the common part of two regions, which may be empty."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))


def moved(region: Region, by: Sequence[int]) -> Region:
    """Return a region that is moved by so much along each axis."""
    return tuple((start + step, stop + step) for (start, stop), step in zip(region, by, strict=True))


def as_slices(region: Region) -> tuple[slice, ...]:
    """Return a region as slices."""
    return tuple(slice(start, stop) for start, stop in region)


def within(inner: Region, outer: Region) -> tuple[slice, ...]:
    """Return ``inner`` as slices relative to the start of ``outer``."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


def pieces(extent: int, count: int) -> tuple[Range, ...]:
    """Split ``range(extent)`` into at most ``count`` pieces, equal but for the last: a regular chunk grid.

    >>> pieces(7, 3)
    ((0, 3), (3, 6), (6, 7))
    """
    size = -(-extent // count)
    return tuple((start, min(start + size, extent)) for start in range(0, extent, size))


def grid_of(shape: Sequence[int], tile: Sequence[int]) -> tuple[Region, ...]:
    """Cut a value of ``shape`` into pieces of ``tile``, the last of each axis smaller; the last axis fastest.

    >>> grid_of((3, 4), (2, 4))
    (((0, 2), (0, 4)), ((2, 3), (0, 4)))
    """
    cut: list[list[Range]] = []
    for extent, size in zip(shape, tile, strict=True):
        starts = range(0, extent, size) if extent else (0,)
        cut.append([(start, min(start + size, extent)) for start in starts])
    return tuple(product(*cut))


def contiguous_blocks(region: Region, itemsize: int, most_bytes: int = BLOCK_BYTES) -> Iterator[Region]:
    """Cut a region into parts of at most ``most_bytes`` (or one element), each contiguous in C order.

    >>> list(contiguous_blocks(((0, 3), (2, 4)), 8, 32))
    [((0, 2), (2, 4)), ((2, 3), (2, 4))]
    """
    axis = next((n for n, (start, stop) in enumerate(region) if stop - start > 1), None)
    nbytes = region_size(region) * itemsize
    if nbytes <= most_bytes or axis is None:
        yield region
        return
    start, stop = region[axis]
    rows = max(most_bytes * (stop - start) // nbytes, 1)
    for first in range(start, stop, rows):
        part = (*region[:axis], (first, min(first + rows, stop)), *region[axis + 1 :])
        yield from contiguous_blocks(part, itemsize, most_bytes)
