"""``RegionIndex`` and ``Parts`` against a look at every piece."""

from __future__ import annotations

import random
from itertools import permutations, product

import pytest

from oocdl.graph.ir.index import Region, intersect, is_empty, region_size
from oocdl.graph.ir.region_index import Parts, RegionIndex

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
