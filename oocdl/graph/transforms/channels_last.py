"""Chooses the order of axes in memory: channels last for values that convolutions read or make.

Kernels of convolutions want all channels of a place side by side; given one plane after the other, they
reorder the operands first and the result afterwards (16 to 16 channels, 3x3x3: 255 GFLOP/s, not 429). So
values have their channels last from the convolution that makes them to the one that reads them. Only
memory is concerned: regions, cuts and programs name axes as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.op_rule import OpRule, Product, Rules
from oocdl.graph.transforms.factorize import Cell, Factored, View

LEAST_CHANNELS, CHANNELS_MULTIPLE = 8, 4
"""Fewer channels, or a number that is no multiple, do not fill the registers: such values stay in C order."""
SPATIAL_RANKS = (4, 5)
"""Ranks of values with a batch, channels, and two or three spatial axes."""


def has_enough(channels: int) -> bool:
    """Whether a value of so many channels is worth having them last."""
    return channels >= LEAST_CHANNELS and channels % CHANNELS_MULTIPLE == 0


def order_of(view: View, ranks: Collection[int] = SPATIAL_RANKS) -> Order:
    """Return the order with the channels of a view last; empty if that is C order, or not worth it."""
    if len(view.shape) not in ranks or not view.positions[1] or not has_enough(view.shape[1]):
        return ()
    channels = view.positions[1]
    stored = sum(len(positions) for positions in view.positions)
    order = (*(axis for axis in range(stored) if axis not in channels), *channels)
    return () if order == tuple(range(stored)) else order


def _data(cell: Cell, product: Product) -> Iterator[View]:
    """Yield the views of a convolution that are data, not weights; groups are part of the channels."""
    views = [cell.inputs[place] for place in product.data] + [*cell.outputs] * product.makes_data
    yield from map(_without_groups, views) if cell.node.attrs.get("grouped") else views


def _without_groups(view: View) -> View:
    """Return a view ``[n, g, c, space]`` as ``[n, g c, space]``."""
    batch, groups, channels, *space = view.positions
    shape = (view.shape[0], view.shape[1] * view.shape[2], *view.shape[3:])
    return replace(view, shape=shape, positions=(batch, (*groups, *channels), *space))


def _wants_planes(cell: Cell, rule: OpRule) -> bool:
    rank = len(cell.inputs[0].shape) if cell.inputs else 0
    return rule.prefers_planes and 1 in {axis % rank for axis in cell.node.attrs["axes"]}


def channels_last(factored: Factored, rules: Rules, ranks: Collection[int] = SPATIAL_RANKS) -> Factored:
    """Return the same graph, with an order in memory for its values of ``ranks``.

    Data that a convolution reads or makes have their channels last, and so have values that are computed
    from them, or from which they are computed, element by element.
    """
    orders: dict[str, Order] = {}
    alike: list[list[tuple[str, Order]]] = []
    planes = {cell.inputs[0].value for cell in factored.cells if _wants_planes(cell, rules[cell.node.op])}

    def ordered(views: Iterable[View]) -> list[tuple[str, Order]]:
        return [(view.value, order) for view in views if (order := order_of(view, ranks))]

    def add(pairs: Iterable[tuple[str, Order]]) -> None:
        for value, order in pairs:
            if value not in planes:
                orders.setdefault(value, order)

    for cell in factored.cells:
        rule = rules[cell.node.op]
        if rule.product is not None and rule.product.data:
            add(ordered(_data(cell, rule.product)))
        elif rule.keeps_axes and (pairs := ordered((*cell.inputs, *cell.outputs))):
            alike.append(pairs)
    known = -1
    while known != len(orders):
        known = len(orders)
        for pairs in (*alike, *reversed(alike)):
            if any(orders.get(value) == order for value, order in pairs):
                add(pairs)
    return replace(factored, orders=orders)
