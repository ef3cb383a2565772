"""Joins layers that are not cut, so that one unit runs several of them.

A unit costs a millisecond beside its program: as much as many a layer's program takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from oocdl.graph.partition.storage_cut import Layer, phase_of
from oocdl.graph.partition.wiring import Wiring

JOINED_WEIGHT_BYTES = 4 << 20
"""Maximum bytes of weights of layers that are joined: units with large weights are done at the same time."""


@dataclass(frozen=True)
class JoinSize:
    """Counts the bytes that a layer, or layers that are joined to one, take in a unit."""

    buffer_bytes: int = 0
    """Bytes of the arrays that the layers read or make."""
    scratch_bytes: int = 0
    """Bytes of scratch of the layer that takes the most."""
    weight_bytes: int = 0

    def __add__(self, other: JoinSize) -> JoinSize:
        return JoinSize(
            self.buffer_bytes + other.buffer_bytes,
            max(self.scratch_bytes, other.scratch_bytes),
            self.weight_bytes + other.weight_bytes,
        )

    def fits(self, unit_bytes: int) -> bool:
        """Whether one unit may have all of this."""
        return (
            self.buffer_bytes + self.scratch_bytes <= unit_bytes and self.weight_bytes <= JOINED_WEIGHT_BYTES
        )


def choose_joined(
    layers: Sequence[Layer], sizes: Sequence[JoinSize | None], unit_bytes: int
) -> tuple[int, ...]:
    """Return for each layer the number of the joined layer that it goes into; nothing if none are joined.

    ``sizes`` has None for a layer that is to stay by itself. A layer follows the one that makes the last of
    what it reads, if no other does and all that it reads is made there or earlier: so joined layers depend
    on earlier ones only. Branches stay apart, and updates, for which nothing waits: they may be done at the
    same time. Reports tell forward from backward layers, so none is both.
    """
    read = {name for layer in layers for name in layer.reads}
    maker: dict[str, int] = {}
    numbers: list[int] = []
    ends: list[int] = []
    totals: list[JoinSize | None] = []
    for place, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        size = None if read.isdisjoint(layer.makes) else size
        makers = {maker[name] for name in layer.reads if name in maker}
        number, last = max((numbers[one] for one in makers), default=-1), max(makers, default=place)
        is_next = (
            bool(makers) and last == ends[number] and phase_of(layers[last].name) == phase_of(layer.name)
        )
        total = totals[number] if is_next else None
        if size is not None and total is not None and (total + size).fits(unit_bytes):
            ends[number], totals[number] = place, total + size
        else:
            number = len(ends)
            ends.append(place)
            totals.append(size)
        numbers.append(number)
        maker |= dict.fromkeys(layer.makes, place)
    return tuple(numbers) if len(ends) < len(layers) else ()


def join_layers(wiring: Wiring, layers: Sequence[Layer], joined: Sequence[int]) -> tuple[Layer, ...]:
    """Join layers as ``choose_joined`` says.

    What only members of one joined layer read is not stored, and what several of them compute is made once.
    """
    members: defaultdict[int, list[Layer]] = defaultdict(list)
    last: dict[str, int] = {}
    for layer, number in zip(layers, joined, strict=True):
        members[number].append(layer)
        last |= {name: max(number, last.get(name, 0)) for name in layer.reads}
    last |= dict.fromkeys(wiring.finals, len(members))
    return tuple(_join(wiring, members[number], number, last) for number in range(len(members)))


def _join(wiring: Wiring, layers: Sequence[Layer], index: int, last: Mapping[str, int]) -> Layer:
    """``last``: value -> the last joined layer that reads it."""
    first, *others = layers
    if not others:
        return replace(first, index=index)
    cells = {cell.node.name: cell for layer in layers for cell in layer.cells}
    ordered = tuple(sorted(cells.values(), key=lambda cell: wiring.place[cell.node.name]))
    made = {view.value for cell in ordered for view in cell.outputs}
    stores = dict.fromkeys(name for layer in layers for name in (*layer.stores, *layer.partials))
    return Layer(
        name=f"{first.name} … {others[-1].name}",
        index=index,
        cells=ordered,
        reads=tuple(sorted({name for layer in layers for name in layer.reads} - made)),
        stores=tuple(name for name in stores if last.get(name, -1) > index),
        partials=(),
        touched=frozenset(),
        members=tuple(layer.name for layer in layers),
    )
