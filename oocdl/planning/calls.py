"""Tells what a call of a step acquires, reads and makes: for those who run it and those who only count."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from oocdl.graph.ir.array_layout import Order, itemsize
from oocdl.graph.ir.index import Region, region_size
from oocdl.graph.ir.region_index import Parts
from oocdl.graph.partition.unit import Unit
from oocdl.planning.task_key import TaskKey


@dataclass(frozen=True, eq=False, slots=True)
class Read:
    """One input of a unit's program. Units of a layer that share the object read the same chunks by it."""

    value: str
    region: Region
    dtype: str
    parts: Parts = Parts()
    """Parts of the region, one for each argument, in order; empty for a source."""
    first: int = 0
    """Number of the first of these arguments."""
    order: Order = ()
    """Order of its axes in memory that the program wants."""
    overwritten: bool = False
    """Whether the program writes over it, so that it needs a copy that nobody else reads."""

    @property
    def chunks(self) -> Iterator[tuple[int, Region]]:
        """(argument number, part of it) that together make the region."""
        return enumerate(self.parts, self.first)

    def __reduce__(self) -> tuple[Any, ...]:  # a pass has a million: the usual way takes four times as long
        return Read, tuple([getattr(self, name) for name in self.__slots__])


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class UnitCall:
    """Run one unit."""

    key: TaskKey
    position: int
    """Place in the plan's order."""
    unit: Unit
    arguments: tuple[TaskKey, ...]
    reads: tuple[Read, ...]
    partial_sums: tuple[tuple[int, int] | None, ...]
    """For each made value: (argument number, elements so far) of the partial sum that it is added to."""
    combines: tuple[str | None, ...]
    """For each made value: the way in which it is combined."""
    dtypes: tuple[str, ...]
    uses: tuple[tuple[int, ...], ...] = ()
    """For each made value: positions of the calls that read it; known once all calls are."""
    buffer_bytes: int
    """Bytes of the arrays that are read and made."""
    scratch_bytes: int
    """Bytes that the program needs while it runs."""

    @property
    def values(self) -> tuple[str, ...]:
        """The made values, in order."""
        return tuple(name for name, _ in self.unit.makes)


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class CombineCall:
    """Combine the partial sums of the outputs of one partial node, for one piece."""

    key: TaskKey
    position: int
    combine: str
    arguments: tuple[TaskKey, ...]
    """One partial sum after the other, each with all outputs."""
    values: tuple[str, ...]
    counts: tuple[int, ...]
    """Elements that went into each partial sum."""
    region: Region
    dtypes: tuple[str, ...]
    uses: tuple[tuple[int, ...], ...] = ()
    buffer_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class PickCall:
    """One result of a call that makes several."""

    key: TaskKey
    source: TaskKey
    number: int


Call = UnitCall | CombineCall | PickCall


class Argument(Protocol):
    """The facts that a call needs of a chunk that is its argument."""

    @property
    def region(self) -> Region:
        """The part of its value that it is."""

    @property
    def footprint_bytes(self) -> int:
        """Bytes that it takes in RAM."""


A = TypeVar("A", bound=Argument)


@dataclass(frozen=True)
class Acquired(Generic[A]):
    """The memory and chunks that a call acquires before it touches anything."""

    pins: tuple[A, ...]
    """Arguments that are used where they lie, each once."""
    array_bytes: int
    """Bytes of the arrays that it reads and makes, beyond the pins."""
    scratch_bytes: int
    """Bytes that its program takes while it runs."""


def in_place(read: Read, arguments: Sequence[A]) -> A | None:
    """The piece that a read uses where it lies: its only one, and all of it. None: the read is a copy."""
    if read.overwritten or not read.parts.is_one:
        return None
    piece = arguments[read.first]
    return piece if piece.region == read.region else None


def read_bytes(call: UnitCall) -> int:
    """Return the bytes of the inputs of a unit's program."""
    return sum(region_size(read.region) * itemsize(read.dtype) for read in call.reads)


def acquired(
    call: UnitCall | CombineCall, arguments: Sequence[A], elsewhere: Collection[int] = ()
) -> Acquired[A]:
    """Return the memory and chunks that a call with these ``arguments`` acquires.

    Arguments with the numbers ``elsewhere`` are on a device, and are not wanted in RAM.
    """
    if isinstance(call, CombineCall):
        return Acquired((), call.buffer_bytes, 0)
    found = ((read.first, in_place(read, arguments)) for read in call.reads)
    whole = {id(piece): (number, piece) for number, piece in found if piece is not None}
    array_bytes = max(call.buffer_bytes - sum(piece.footprint_bytes for _, piece in whole.values()), 0)
    pins = tuple(piece for number, piece in whole.values() if number not in elsewhere)
    return Acquired(pins, array_bytes, call.scratch_bytes)


class Made(NamedTuple):
    """A result of a call."""

    region: Region
    nbytes: int
    uses: tuple[int, ...]


def made_regions(call: UnitCall | CombineCall) -> list[Region]:
    """The region of each result of a call, in order."""
    if isinstance(call, UnitCall):
        return [region for _, region in call.unit.makes]
    return [call.region] * len(call.values)


def made_of(call: UnitCall | CombineCall) -> list[Made]:
    """The results of a call, in order."""
    return [
        Made(region, region_size(region) * itemsize(dtype), uses)
        for region, dtype, uses in zip(made_regions(call), call.dtypes, call.uses, strict=True)
    ]


def parts_of(call: UnitCall | CombineCall) -> Iterator[tuple[int, int]]:
    """(argument number, bytes that the call reads of it)."""
    if isinstance(call, CombineCall):
        sizes = [region_size(call.region) * itemsize(dtype) for dtype in call.dtypes]
        yield from ((number, sizes[number % len(sizes)]) for number in range(len(call.arguments)))
        return
    for read in call.reads:
        yield from enumerate(read.parts.sizes(itemsize(read.dtype)), read.first)
    yield from _added_to(call)


def _added_to(call: UnitCall) -> Iterator[tuple[int, int]]:
    """The same of the partial sums that a unit adds to."""
    for partial_sum, (_, region), dtype in zip(call.partial_sums, call.unit.makes, call.dtypes, strict=True):
        if partial_sum is not None:
            yield partial_sum[0], region_size(region) * itemsize(dtype)


def copied(call: UnitCall | CombineCall, arguments: Sequence[A], pins: Collection[A]) -> tuple[int, int]:
    """The parts of inputs that are put together, and the bytes of all ``parts_of``, without the pins."""
    if isinstance(call, CombineCall):
        return 0, sum(nbytes for _, nbytes in parts_of(call))
    # A unit reads a value once: a piece that is used where it lies is part of no other read.
    reads = [read for read in call.reads if not (read.parts.is_one and arguments[read.first] in pins)]
    nbytes = sum(read.parts.size() * itemsize(read.dtype) for read in reads)
    return sum(len(read.parts) for read in reads), nbytes + sum(size for _, size in _added_to(call))
