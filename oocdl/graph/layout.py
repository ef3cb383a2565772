"""How values lie in memory: channels last where a convolution reads or makes them.

Kernels of convolutions want all channels of a place side by side; given planes, they sort the
operands first and the result afterwards (16 to 16 channels, 3x3x3: 255 GFLOP/s, not 429). So values
lie that way from the convolution that makes them to the one that reads them. The order is a matter of
memory alone: regions, cuts and programs name axes as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from oocdl.graph.factorize import Cell, Factored, View
from oocdl.graph.memory import Order

LEAST, MULTIPLE = 8, 4
"""Fewer channels, or no multiple of so many, do not fill the registers: they stay planes."""
DATA: Mapping[str, tuple[int, ...]] = {"Conv": (0,), "ConvTranspose": (0,), "ConvWeightGrad": (0, 1)}
"""Of convolutions: the operands that are data. Of two, the result is weights; of one, it is data, too."""
WINDOWED = frozenset(DATA)
_OVER_CHANNELS = frozenset({"LogSumExp", "ReduceMax"})
"""Operators that run over the channels of a place, as losses do, and are faster plane by plane."""
_ELSEWHERE = frozenset({"Einsum", "Gather", "GatherGrad", "Reshape", "Transpose"})
"""Operators whose result's axes are not those of their operands."""
SPACED = (4, 5)
"""Ranks of values with a batch, channels, and two or three axes of space."""


def has_enough(channels: int) -> bool:
    """Whether so many channels are worth lying side by side."""
    return channels >= LEAST and channels % MULTIPLE == 0


def order_of(view: View, ranks: Collection[int] = SPACED) -> Order:
    """The order that has the channels of a view last; empty if it is none, or would not do."""
    if len(view.shape) not in ranks or not view.positions[1] or not has_enough(view.shape[1]):
        return ()
    channels = view.positions[1]
    stored = sum(len(positions) for positions in view.positions)
    order = (*(axis for axis in range(stored) if axis not in channels), *channels)
    return () if order == tuple(range(stored)) else order


def _data(cell: Cell) -> Iterator[View]:
    """What is data of a convolution, and not weights."""
    data = DATA.get(cell.node.op, (0,))
    yield from (view for place, view in enumerate(cell.inputs) if place in data)
    if len(data) == 1:
        yield cell.outputs[0]


def _is_over_channels(cell: Cell) -> bool:
    rank = len(cell.inputs[0].shape) if cell.inputs else 0
    return cell.node.op in _OVER_CHANNELS and 1 in {axis % rank for axis in cell.node.attrs["axes"]}


def channels_last(factored: Factored, ranks: Collection[int] = SPACED) -> Factored:
    """The same graph, its values of ``ranks`` ordered for convolutions.

    What a convolution reads or makes has its channels last, and so has what is computed from
    it, or it from, element by element.
    """
    found: dict[str, Order] = {}
    alike = []
    planes = {cell.inputs[0].value for cell in factored.cells if _is_over_channels(cell)}

    def add(views: Iterable[View]) -> None:
        for view in views:
            if view.value not in planes and view.value not in found and (order := order_of(view, ranks)):
                found[view.value] = order

    for cell in factored.cells:
        if cell.node.op in WINDOWED:
            add(_data(cell))
        elif cell.node.op not in _ELSEWHERE:
            alike.append(cell)
    known = -1
    while known != len(found):
        known = len(found)
        for cell in (*alike, *reversed(alike)):
            views = (*cell.inputs, *cell.outputs)
            if any(found.get(view.value) == order_of(view, ranks) != () for view in views):
                add(views)
    return replace(factored, orders=found)


def slot_orders(slots: Mapping[str, int], orders: Mapping[str, Order]) -> tuple[tuple[int, Order], ...]:
    """(slot, order) of the slots whose values do not lie as their axes are numbered."""
    return tuple((slot, orders[name]) for name, slot in slots.items() if name in orders)
