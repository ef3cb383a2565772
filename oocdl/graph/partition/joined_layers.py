"""Joins layers that are not cut, so that one unit runs several of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from oocdl.graph.partition.storage_cut import Layer
from oocdl.graph.partition.wiring import Wiring


def join_layers(wiring: Wiring, layers: Sequence[Layer], runs: Sequence[int]) -> tuple[Layer, ...]:
    """Join the layers of each run to one; ``runs`` has the number of each layer's run, from 0 on.

    A layer depends on none of a later run. What only layers of the same run read is not stored, and a node
    that several of them compute is computed once.
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
        name=f"{first.name} and {len(others)} more",
        index=run,
        cells=ordered,
        reads=tuple(sorted({name for layer in layers for name in layer.reads} - made)),
        stores=tuple(name for name in stores if last.get(name, -1) > run),
        partials=(),
        touched=frozenset(),
    )
