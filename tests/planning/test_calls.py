"""What a call acquires: which of its arguments are used where they lie, and how much more it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from oocdl.graph.ir.index import Region
from oocdl.graph.ir.region_index import Parts
from oocdl.planning.calls import CombineCall, Read, UnitCall, acquired, in_place


@dataclass(frozen=True)
class Piece:
    """A chunk, as a call sees it."""

    region: Region
    footprint_bytes: int


WHOLE = Piece(((0, 8),), 100)
HALF = Piece(((0, 4),), 50)


def read(region: Region, *numbers: int, overwritten: bool = False) -> Read:
    """A read of arguments ``numbers``, which follow each other."""
    parts = Parts((region,) * len(numbers))
    return Read("x", region, "float32", parts, min(numbers, default=0), overwritten=overwritten)


@pytest.mark.parametrize(
    ("wanted", "pinned"),
    [
        (read(((0, 8),), 0), WHOLE),
        (read(((0, 4),), 1), HALF),
        (read(((0, 4),), 0), None),  # a part of it is copied
        (read(((0, 8),), 0, overwritten=True), None),  # the program writes over it
        (read(((0, 8),), 0, 1), None),  # put together of several
        (read(((0, 8),)), None),  # from a source
    ],
)
def test_a_read_is_in_place_if_it_is_all_of_one_chunk(wanted: Read, pinned: Piece | None) -> None:
    assert in_place(wanted, [WHOLE, HALF]) is pinned


def unit(*reads: Read, buffer_bytes: int) -> UnitCall:
    """A call with these reads; it never runs."""
    program: Any = None
    facts = dict.fromkeys(("partial_sums", "combines", "dtypes", "uses"), ())
    place = {"key": ("layer", 0), "position": 0, "unit": program, "arguments": (("a", 0), ("b", 0))}
    return UnitCall(**place, **facts, reads=reads, buffer_bytes=buffer_bytes, scratch_bytes=7)


def test_a_chunk_read_twice_is_pinned_and_counted_once() -> None:
    found = acquired(unit(read(((0, 8),), 0), read(((0, 8),), 0), buffer_bytes=130), [WHOLE, HALF])
    assert (found.pins, found.array_bytes, found.scratch_bytes) == ((WHOLE,), 30, 7)


def test_pins_beyond_the_buffers_do_not_make_it_negative() -> None:
    found = acquired(unit(read(((0, 8),), 0), read(((0, 4),), 1), buffer_bytes=120), [WHOLE, HALF])
    assert (found.pins, found.array_bytes) == ((WHOLE, HALF), 0)


def test_combining_copies_all_it_reads() -> None:
    call = CombineCall(
        key=("c", 0), position=1, combine="sum", arguments=(("a", 0),), values=("x",), counts=(1,),
        region=WHOLE.region, dtypes=("float32",), buffer_bytes=60,
    )  # fmt: skip
    found = acquired(call, [WHOLE])
    assert (found.pins, found.array_bytes, found.scratch_bytes) == ((), 60, 0)
