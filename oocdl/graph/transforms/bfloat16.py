"""16 bits: values that are stored as bfloat16, and products that are computed in it.

A stored value ``v`` becomes ``v/bfloat16``, a Cast of it, and what read ``v`` reads a Cast back.
Both casts are cheap nodes as any other: the first is an epilogue of the layer that makes ``v``,
the second a prologue of those that read it, and only the 16 bits between them are stored. Every
reader gets the rounded value, so results do not depend on what is spilled.

Where products are computed in bfloat16 (``precision="bfloat16"``), convolutions and matrix products read
such twins of their operands; everything between them is in float32, as are weights, their gradients,
sums over many elements, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from math import prod

from oocdl.graph.ir.graph import Graph, Node, Role, Value
from oocdl.graph.ir.op_rule import Product, Rules
from oocdl.graph.partition.storage_cut import Layer

STORED = "bfloat16"
LEAST_BYTES = 1 << 16
"""Smaller values (statistics, biases' gradients) stay as they are."""
LEAST_CHANNELS = 8
"""Of a convolution of one tap, to be worth it."""


def may_be_bfloat16(graph: Graph, layers: Iterable[Layer]) -> frozenset[str]:
    """Stored values that may be rounded: large activations, and gradients of such."""
    results = {*graph.outputs, *graph.updates.values()}
    found = set()
    for layer in layers:
        for name in layer.stores:
            value = graph.values[name]
            inner = value.role in (Role.ACTIVATION, Role.GRADIENT) and name not in results
            if inner and value.dtype == "float32" and value.nbytes >= LEAST_BYTES:
                found.add(name)
    return frozenset(found)


def bfloat16_of(name: str) -> str:
    """The name of the value of 16 bits that stands for ``name``."""
    return f"{name}/{STORED}"


class _Rewriting:
    """A graph in the making, with the twins of its values."""

    def __init__(self, graph: Graph, rules: Rules, names: Collection[str], products: bool) -> None:
        self.graph, self.rules, self.names, self.products = graph, rules, names, products
        self.values = dict(graph.values)
        self.nodes: list[Node] = []
        self.twins: dict[str, str] = {}
        self.maker = {name: node for node in graph.nodes for name in node.outputs}
        self.multiplied = {name for node in graph.nodes if self._is_low(node) for name in node.inputs}

    def twin(self, name: str) -> str:
        """The value of 16 bits that stands for ``name``; made when it is first asked for."""
        if name not in self.twins:
            maker = self.maker.get(name)
            if (
                maker is not None
                and self.rules[maker.op].moves_only
                and self._is_wide(maker)
                and name not in self.names
            ):
                inputs = tuple(self.twin(item) for item in maker.inputs)
                self._make(Node(bfloat16_of(name), maker.op, inputs, (bfloat16_of(name),), maker.attrs))
            else:
                self._make(Node(bfloat16_of(name), "Cast", (name,), (bfloat16_of(name),), {"to": STORED}))
        return self.twins[name]

    def add(self, node: Node) -> None:
        """A node of the graph, on twins where it is a product."""
        if self._is_low(node):
            inputs = tuple(self.twin(name) for name in node.inputs)
            if self._makes_data(node):
                [made] = node.outputs
                attrs = {**node.attrs, "precision": STORED}
                self._make(replace(node, inputs=inputs, outputs=(bfloat16_of(made),), attrs=attrs))
                self._back(bfloat16_of(made), made)
                return
            self.nodes.append(replace(node, inputs=inputs))
        else:
            inputs = tuple(self._read(name) for name in node.inputs)
            self.nodes.append(replace(node, inputs=inputs))
        for name in node.outputs:
            if name in self.names:
                self._back(self.twin(name), self._read(name))
            elif name in self.multiplied and not self.rules[node.op].moves_only:
                self.twin(name)  # at once: it becomes part of the chain that makes the value

    def _is_low(self, node: Node) -> bool:
        """Whether a node is a product of 16 bits."""
        product = self.rules[node.op].product
        return (
            self.products
            and product is not None
            and self._is_wide(node)
            and not self._is_small(node, product)
        )

    def _makes_data(self, node: Node) -> bool:
        """Whether a node's result is data of a convolution."""
        product = self.rules[node.op].product
        return product is not None and product.makes_data

    def _is_small(self, node: Node, product: Product) -> bool:
        """Whether a convolution of one tap has so few channels that it takes no longer in 32 bits."""
        if not product.data:
            return False
        first, second, *taps = self.graph.values[product.weights(node.inputs, node.outputs)].shape
        return prod(taps) == 1 and min(first, second) < LEAST_CHANNELS

    def _is_wide(self, node: Node) -> bool:
        return all(self.graph.values[name].dtype == "float32" for name in node.inputs)

    def _read(self, name: str) -> str:
        """What reads ``name`` in 32 bits reads."""
        maker = self.maker.get(name)
        # A convolution's result is rounded already.
        exact = maker is not None and self._makes_data(maker) and self._is_low(maker)
        return f"{name}/rounded" if name in self.names and not exact else name

    def _make(self, node: Node) -> None:
        """A node whose result is a twin."""
        [low] = node.outputs
        name = low.removesuffix(f"/{STORED}")
        value = self.graph.values[name]
        # Of weights and inputs, too, a twin is made: it is no weight and no input.
        role = Role.GRADIENT if value.role is Role.GRADIENT else Role.ACTIVATION
        self.values[low] = Value(low, value.shape, STORED, role)
        self.twins[name] = low
        self.nodes.append(node)

    def _back(self, low: str, name: str) -> None:
        """Cast a twin back to 32 bits, as ``name``."""
        self.values[name] = Value(name, self.values[low].shape, "float32", self.values[low].role)
        self.nodes.append(Node(f"{low}/float32", "Cast", (low,), (name,), {"to": "float32"}))


def rounded(graph: Graph, rules: Rules, names: Collection[str], products: bool = False) -> Graph:
    """``graph``, where each of ``names`` is rounded to bfloat16 for all that read it.

    ``products``: convolutions and matrix products take operands of 16 bits.
    """
    draft = _Rewriting(graph, rules, names, products)
    for node in graph.nodes:
        draft.add(node)
    kept = _needed(draft.nodes, {*graph.outputs, *graph.updates.values()})
    dropped = {name for node in draft.nodes for name in node.outputs}
    dropped.difference_update(name for node in kept for name in node.outputs)
    values = {name: value for name, value in draft.values.items() if name not in dropped}
    return replace(graph, values=values, nodes=tuple(kept))


def _needed(nodes: Iterable[Node], results: Iterable[str]) -> list[Node]:
    """The nodes that results depend on."""
    wanted, kept = set(results), []
    for node in reversed(list(nodes)):
        if any(name in wanted for name in node.outputs):
            wanted.update(node.inputs)
            kept.append(node)
    return kept[::-1]
