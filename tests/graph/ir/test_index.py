"""Index expressions and regions against brute force, and a look at every piece."""

from __future__ import annotations

import random
from itertools import permutations, product

import pytest

from oocdl.graph.ir.index import (
    Around,
    Band,
    Inverse,
    Region,
    Shifted,
    Window,
    clip,
    hull,
    intersect,
    is_empty,
    pieces,
    region_size,
)
from oocdl.graph.ir.region_index import Parts, RegionIndex
from oocdl.graph.partition.tiling import boundaries
from tests.kit.each import for_each

SLIDES = [
    (kernel, stride, dilation, pad)
    for kernel in (1, 2, 3, 5)
    for stride in (1, 2, 3)
    for dilation in (1, 2)
    for pad in (0, 1, 2)
]


def reached(kernel: int, stride: int, dilation: int, pad: int, out: int) -> set[int]:
    """Input indices that output index ``out`` of a convolution reads."""
    return {stride * out + dilation * z - pad for z in range(kernel)}


@for_each(product(SLIDES, [(0, 1), (3, 4), (2, 7)]))
def test_window_is_the_hull_of_what_is_read(case: tuple[tuple[int, int, int, int], tuple[int, int]]) -> None:
    slide, wanted = case
    kernel, stride, dilation, pad = slide
    read = set().union(*(reached(*slide, out) for out in range(*wanted)))
    start, stop = Window("d", kernel, stride, dilation, pad).needs(wanted)
    assert (start, stop) == (min(read), max(read) + 1)


@for_each(product(SLIDES, [(0, 1), (3, 4), (2, 9)]))
def test_inverse_holds_all_that_read_and_no_more(
    case: tuple[tuple[int, int, int, int], tuple[int, int]],
) -> None:
    slide, wanted = case
    kernel, stride, dilation, pad = slide
    readers = {out for out in range(-20, 40) if reached(*slide, out) & set(range(*wanted))}
    start, stop = Inverse("d", kernel, stride, dilation, pad).needs(wanted)
    assert readers <= set(range(start, stop))
    if readers and dilation == 1:
        assert (start, stop) == (min(readers), max(readers) + 1)


@for_each(SLIDES)
def test_around_is_a_window_of_an_inverse(slide: tuple[int, int, int, int]) -> None:
    outs = Inverse("d", *slide).needs((4, 9))
    assert Around("d", *slide).needs((4, 9)) == Window("d", *slide).needs(outs)


def test_shifted_and_band() -> None:
    assert Shifted("c", -3, 2).needs((1, 4)) == (-1, 4)
    assert Band("d", (0, 0, 1, 1), (0, 1, 1, 2)).needs((1, 4)) == (0, 3)


def test_regions() -> None:
    assert clip((-2, 3), 10) == (0, 3)
    assert clip((-5, -1), 10) == (0, 0)
    assert hull(((0, 0), (0, 4)), ((2, 3), (1, 2))) == ((2, 3), (1, 2))
    assert hull(((0, 2),), ((5, 6),)) == ((0, 6),)
    assert intersect(((0, 5),), ((3, 9),)) == ((3, 5),)


@for_each(product(range(1, 30), range(1, 9)))
def test_pieces_are_a_regular_grid(case: tuple[int, int]) -> None:
    extent, count = case
    found = pieces(extent, count)
    assert [i for start, stop in found for i in range(start, stop)] == list(range(extent))
    assert len(found) <= count
    assert len({stop - start for start, stop in found[:-1]}) <= 1


@for_each(product(range(1, 12), range(1, 40)))
def test_boundaries_cover_finer_and_coarser_axes(case: tuple[int, int]) -> None:
    base, extent = case
    for count in range(1, base + 1):
        if extent < base:
            continue
        found = boundaries(extent, base, count)
        assert len(found) == len(pieces(base, count))
        assert [i for start, stop in found for i in range(start, stop)] == list(range(extent))
        assert all(start < stop for start, stop in found)


AXES = [[(0, 3), (3, 5)], [(0, 4), (4, 8), (8, 9)], [(0, 2)], [(1, 2), (2, 6)]]


def numbered(order: tuple[int, ...], falls: tuple[bool, ...]) -> list[Region]:
    """The pieces of ``AXES``, the last axis of ``order`` varying fastest, some from their end on."""
    along = [AXES[axis][::-1] if falls[axis] else AXES[axis] for axis in order]
    return [tuple(cell[order.index(axis)] for axis in range(len(AXES))) for cell in product(*along)]


def same_as_all(regions: list[Region], seed: int) -> None:
    """Compare some overlaps with those of a look at each piece."""
    choose, index = random.Random(seed), RegionIndex(regions)
    for _ in range(20):
        starts = [choose.randrange(-1, axis[-1][1] + 1) for axis in AXES]
        wanted = tuple((start, start + choose.randrange(7)) for start in starts)
        expected = [(n, intersect(held, wanted)) for n, held in enumerate(regions)]
        expected = [(n, part) for n, part in expected if not is_empty(part)]
        numbers, parts = index.overlaps(wanted)
        assert list(zip(numbers, parts, strict=True)) == expected
        sizes = [2 * region_size(part) for _, part in expected]
        assert (len(parts), parts.sizes(2), 2 * parts.size()) == (len(expected), sizes, sum(sizes))
        assert parts.is_one == (len(expected) == 1)


@pytest.mark.parametrize("order", [*permutations(range(4))])
def test_grids_in_any_order_and_direction(order: tuple[int, ...]) -> None:
    for seed, falls in enumerate(product((False, True), repeat=4)):
        same_as_all(numbered(order, falls), seed)


def test_pieces_in_no_order_and_pieces_of_no_grid() -> None:
    regions = numbered((0, 1, 2, 3), (False,) * 4)
    random.Random(0).shuffle(regions)
    same_as_all(regions, 1)
    same_as_all(regions[1:], 2)
    same_as_all([*regions, regions[0]], 3)


def test_a_number_and_no_pieces() -> None:
    numbers, parts = RegionIndex([()]).overlaps(())
    assert (numbers, list(parts)) == ([0], [()])
    numbers, parts = RegionIndex([]).overlaps(((0, 1),))
    assert (numbers, list(parts)) == ([], [])


def test_a_grid_of_parts_is_held_by_its_axes() -> None:
    """However many there are: this is what a plan of many units is made of."""
    _, parts = RegionIndex(numbered((0, 1, 2, 3), (True,) * 4)).overlaps(((0, 5), (0, 9), (0, 2), (1, 6)))
    assert len(parts) == 12 and parts.listed is None
    assert parts == Parts(None, tuple(tuple(ranges[::-1]) for ranges in AXES))
