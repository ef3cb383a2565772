"""What a call of a step acquires, reads and makes: for those who run it and those who only count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.index import Region, region_size
from oocdl.planning.task_graph import CombineCall, Read, UnitCall
from oocdl.planning.task_key import TaskKey, result_key


class Argument(Protocol):
    """What a call has to know of a chunk that is its argument."""

    @property
    def region(self) -> Region:
        """The part of its value that it is."""

    @property
    def footprint_bytes(self) -> int:
        """Bytes that it takes in RAM."""


A = TypeVar("A", bound=Argument)


@dataclass(frozen=True)
class Acquired(Generic[A]):
    """What a call needs before it touches anything."""

    pins: tuple[A, ...]
    """Arguments that are used where they lie, each once."""
    array_bytes: int
    """Bytes of the arrays that it reads and makes, beyond the pins."""
    scratch_bytes: int
    """Bytes that its program takes while it runs."""


def in_place(read: Read, arguments: Sequence[A]) -> A | None:
    """The piece that a read uses where it lies: its only one, and all of it. None: the read is a copy."""
    if read.overwritten or len(read.chunks) != 1:
        return None
    piece = arguments[read.chunks[0][0]]
    return piece if piece.region == read.region else None


def acquired(call: UnitCall | CombineCall, arguments: Sequence[A]) -> Acquired[A]:
    """What a call needs that has these ``arguments``."""
    if isinstance(call, CombineCall):
        return Acquired((), call.buffer_bytes, 0)
    found = (in_place(read, arguments) for read in call.reads)
    pins = tuple({id(piece): piece for piece in found if piece is not None}.values())
    pinned_bytes = sum(pin.footprint_bytes for pin in pins)
    return Acquired(pins, max(call.buffer_bytes - pinned_bytes, 0), call.scratch_bytes)


class Made(NamedTuple):
    """A result of a call."""

    key: TaskKey
    region: Region
    nbytes: int
    uses: tuple[int, ...]


def made_of(call: UnitCall | CombineCall) -> list[Made]:
    """The results of a call."""
    makes = call.unit.makes if isinstance(call, UnitCall) else [(name, call.region) for name in call.values]
    count = len(makes)
    return [
        Made(result_key(call.key, name, count), region, region_size(region) * itemsize(dtype), uses)
        for (name, region), dtype, uses in zip(makes, call.dtypes, call.uses, strict=True)
    ]


def parts_of(call: UnitCall | CombineCall) -> list[tuple[TaskKey, int]]:
    """(chunk, bytes that the call reads of it)."""
    if isinstance(call, CombineCall):
        sizes = [made.nbytes for made in made_of(call)]
        return [(key, sizes[n % len(sizes)]) for n, key in enumerate(call.arguments)]
    found = [
        (call.arguments[number], region_size(part) * itemsize(read.dtype))
        for read in call.reads
        for number, part in read.chunks
    ]
    for partial_sum, (_, region), dtype in zip(call.partial_sums, call.unit.makes, call.dtypes, strict=True):
        if partial_sum is not None:
            found.append((call.arguments[partial_sum[0]], region_size(region) * itemsize(dtype)))
    return found
