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
    """What a layer, or joined layers, take in one unit."""

    buffer_bytes: int = 0
    """Bytes of the arrays that each layer reads or makes."""
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


def choose_runs(
    layers: Sequence[Layer], sizes: Sequence[JoinSize | None], unit_bytes: int
) -> tuple[int, ...]:
    """Return for each layer the number of the run that it is joined into; nothing if each stays by itself.

    ``sizes`` has None for a layer that is to stay by itself. A layer joins a run whose last layer makes the
    last of what it reads, if that run or earlier ones make all of it: so a run depends on earlier ones only.
    Branches stay apart, and updates, for which nothing waits: they may be done at the same time. Reports tell
    forward from backward layers, so no run has both.
    """
    read = {name for layer in layers for name in layer.reads}
    maker: dict[str, int] = {}
    numbers: list[int] = []
    ends: list[int] = []
    totals: list[JoinSize | None] = []
    for place, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        size = None if read.isdisjoint(layer.makes) else size
        makers = {maker[name] for name in layer.reads if name in maker}
        run, last = max((numbers[one] for one in makers), default=-1), max(makers, default=place)
        is_next = bool(makers) and last == ends[run] and phase_of(layers[last].name) == phase_of(layer.name)
        total = totals[run] if is_next else None
        if size is not None and total is not None and (total + size).fits(unit_bytes):
            ends[run], totals[run] = place, total + size
        else:
            run = len(ends)
            ends.append(place)
            totals.append(size)
        numbers.append(run)
        maker |= dict.fromkeys(layer.makes, place)
    return tuple(numbers) if len(ends) < len(layers) else ()


def join_layers(wiring: Wiring, layers: Sequence[Layer], runs: Sequence[int]) -> tuple[Layer, ...]:
    """Join the layers of each run, as ``choose_runs`` numbers them.

    What only layers of one run read is not stored, and a node that several of them compute is computed once.
    """
    members: defaultdict[int, list[Layer]] = defaultdict(list)
    last: dict[str, int] = {}
    for layer, run in zip(layers, runs, strict=True):
        members[run].append(layer)
        last |= {name: max(run, last.get(name, 0)) for name in layer.reads}
    last |= dict.fromkeys(wiring.finals, len(members))
    return tuple(_join(wiring, members[run], run, last) for run in range(len(members)))


def _join(wiring: Wiring, layers: Sequence[Layer], run: int, last: Mapping[str, int]) -> Layer:
    """``last``: value -> the last run that reads it."""
    first, *others = layers
    if not others:
        return replace(first, index=run)
    cells = {cell.node.name: cell for layer in layers for cell in layer.cells}
    ordered = tuple(sorted(cells.values(), key=lambda cell: wiring.place[cell.node.name]))
    made = {view.value for cell in ordered for view in cell.outputs}
    stores = dict.fromkeys(name for layer in layers for name in (*layer.stores, *layer.partials))
    return Layer(
        name=f"{first.name} … {others[-1].name}",
        index=run,
        cells=ordered,
        reads=tuple(sorted({name for layer in layers for name in layer.reads} - made)),
        stores=tuple(name for name in stores if last.get(name, -1) > run),
        partials=(),
        touched=frozenset(),
        members=tuple(layer.name for layer in layers),
    )
