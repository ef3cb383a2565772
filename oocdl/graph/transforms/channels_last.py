"""How values lie in memory: channels last where a convolution reads or makes them.

Kernels of convolutions want all channels of a place side by side; given planes, they sort the
operands first and the result afterwards (16 to 16 channels, 3x3x3: 255 GFLOP/s, not 429). So values
lie that way from the convolution that makes them to the one that reads them. The order is a matter of
memory alone: regions, cuts and programs name axes as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.op_rule import OpRule, Product, Rules
from oocdl.graph.transforms.factorize import Cell, Factored, View

LEAST_CHANNELS, CHANNELS_MULTIPLE = 8, 4
"""Fewer channels, or no multiple of so many, do not fill the registers: they stay planes."""
SPATIAL_RANKS = (4, 5)
"""Ranks of values with a batch, channels, and two or three axes of space."""


def has_enough(channels: int) -> bool:
    """Whether so many channels are worth lying side by side."""
    return channels >= LEAST_CHANNELS and channels % CHANNELS_MULTIPLE == 0


def order_of(view: View, ranks: Collection[int] = SPATIAL_RANKS) -> Order:
    """The order that has the channels of a view last; empty if it is none, or would not do."""
    if len(view.shape) not in ranks or not view.positions[1] or not has_enough(view.shape[1]):
        return ()
    channels = view.positions[1]
    stored = sum(len(positions) for positions in view.positions)
    order = (*(axis for axis in range(stored) if axis not in channels), *channels)
    return () if order == tuple(range(stored)) else order


def _data(cell: Cell, product: Product) -> Iterator[View]:
    """What is data of a convolution, and not weights."""
    yield from (cell.inputs[place] for place in product.data)
    if product.makes_data:
        yield cell.outputs[0]


def _wants_planes(cell: Cell, rule: OpRule) -> bool:
    rank = len(cell.inputs[0].shape) if cell.inputs else 0
    return rule.prefers_planes and 1 in {axis % rank for axis in cell.node.attrs["axes"]}


def channels_last(factored: Factored, rules: Rules, ranks: Collection[int] = SPATIAL_RANKS) -> Factored:
    """The same graph, its values of ``ranks`` ordered for convolutions.

    What a convolution reads or makes has its channels last, and so has what is computed from
    it, or it from, element by element.
    """
    found: dict[str, Order] = {}
    alike = []
    planes = {cell.inputs[0].value for cell in factored.cells if _wants_planes(cell, rules[cell.node.op])}

    def add(views: Iterable[View]) -> None:
        for view in views:
            if view.value not in planes and view.value not in found and (order := order_of(view, ranks)):
                found[view.value] = order

    for cell in factored.cells:
        rule = rules[cell.node.op]
        if rule.product is not None and rule.product.data:
            add(_data(cell, rule.product))
        elif rule.keeps_axes:
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
