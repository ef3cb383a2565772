"""Bfloat16: values that are stored in it, and products that are computed in it.

A stored value ``v`` gets a Cast to the value ``v/bfloat16``, and nodes that read ``v`` read a Cast of that
back to float32. Both casts are cheap nodes as any other: the first becomes an epilogue of the layer that
makes ``v``, the second a prologue of the layers that read it, and only the bfloat16 between them is stored.
Every reader gets the rounded value, so results do not depend on what is spilled.

Where products are computed in bfloat16 (``precision="bfloat16"``), convolutions and matrix products read
their operands in bfloat16; everything between them is in float32, as are weights, their gradients,
sums over many elements, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from math import prod

from oocdl.graph.ir.graph import Graph, Node, Role, Value, needed
from oocdl.graph.ir.op_rule import Product, Rules, taken

STORED = "bfloat16"
LEAST_BYTES = 1 << 16
"""Smaller values (statistics, gradients of biases) stay in float32."""
LEAST_ONE_TAP_CHANNELS = 8
"""A convolution of one tap with fewer channels takes no less time in bfloat16."""


def may_be_bfloat16(graph: Graph, stored: Iterable[str]) -> frozenset[str]:
    """Select, of the ``stored`` values, large activations and their gradients: these may be bfloat16."""
    results = {*graph.outputs, *graph.updates.values()}
    names = set()
    for name in stored:
        value = graph.values[name]
        inner = value.role in (Role.ACTIVATION, Role.GRADIENT) and name not in results
        if inner and value.dtype == "float32" and value.nbytes >= LEAST_BYTES:
            names.add(name)
    return frozenset(names)


def bfloat16_of(name: str) -> str:
    """The name of the value that holds ``name`` in bfloat16."""
    return f"{name}/{STORED}"


class _Rewriting:
    def __init__(self, graph: Graph, rules: Rules, names: Collection[str], products: bool) -> None:
        self.graph, self.rules, self.names, self.products = graph, rules, names, products
        self.values = dict(graph.values)
        self.nodes: list[Node] = []
        self.made_in_bfloat16: set[str] = set()
        """Values of ``graph`` that the new graph has in bfloat16, too."""
        self.maker = {name: node for node in graph.nodes for name in node.outputs}
        self.multiplied = {
            name for node in graph.nodes if self._is_bfloat16_product(node) for name in self._rounded(node)
        }

    def in_bfloat16(self, name: str) -> str:
        """The value that holds ``name`` in bfloat16; its node is added when it is first asked for."""
        if name not in self.made_in_bfloat16:
            maker = self.maker.get(name)
            if (
                maker is not None
                and self.rules[maker.op].moves_only
                and all(self.graph.values[item].dtype == "float32" for item in maker.inputs)
                and name not in self.names
            ):
                inputs = tuple(self.in_bfloat16(item) for item in maker.inputs)
                node = Node(bfloat16_of(name), maker.op, inputs, (bfloat16_of(name),), maker.attrs)
            else:
                node = Node(bfloat16_of(name), "Cast", (name,), (bfloat16_of(name),), {"to": STORED})
            self._add_bfloat16(node, name)
        return bfloat16_of(name)

    def add(self, node: Node) -> None:
        """Add a node of the old graph; a product reads bfloat16."""
        if self._is_bfloat16_product(node):
            rounded = self._rounded(node)
            inputs = tuple(
                self.in_bfloat16(name) if name in rounded else self._in_float32(name) for name in node.inputs
            )
            if self._makes_data(node):
                [output] = node.outputs
                attrs = {**node.attrs, "precision": STORED}
                result = replace(node, inputs=inputs, outputs=(bfloat16_of(output),), attrs=attrs)
                self._add_bfloat16(result, output)
                self._cast_back(output, output)
                return
            self.nodes.append(replace(node, inputs=inputs))
        else:
            inputs = tuple(self._in_float32(name) for name in node.inputs)
            self.nodes.append(replace(node, inputs=inputs))
        for name in node.outputs:
            if name in self.names:
                self.in_bfloat16(name)
                self._cast_back(name, self._in_float32(name))
            elif name in self.multiplied and not self.rules[node.op].moves_only:
                self.in_bfloat16(name)  # at once: the Cast joins the chain that makes the value

    def _is_bfloat16_product(self, node: Node) -> bool:
        """Whether a node becomes a product on operands of bfloat16."""
        product = self.rules[node.op].product
        return (
            self.products
            and product is not None
            and all(self.graph.values[name].dtype in ("float32", "bool") for name in node.inputs)
            and not self._is_small(node, product)
        )

    def _rounded(self, node: Node) -> list[str]:
        """The operands that a product reads in bfloat16."""
        product = self.rules[node.op].product
        exact = () if product is None else product.exact
        return [
            name
            for place, name in enumerate(node.inputs)
            if place not in exact and self.graph.values[name].dtype == "float32"
        ]

    def _makes_data(self, node: Node) -> bool:
        """Whether a node's result is data of a convolution."""
        product = self.rules[node.op].product
        return product is not None and product.makes_data

    def _is_small(self, node: Node, product: Product) -> bool:
        """Whether a convolution has one tap and so few channels that float32 takes no longer."""
        if not product.data:
            return False
        weights = self.graph.values[product.weights(node.inputs, node.outputs)].shape
        first, second, *taps = weights[1:] if node.attrs.get("grouped") else weights
        return prod(taps) == 1 and min(first, second) < LEAST_ONE_TAP_CHANNELS

    def _in_float32(self, name: str) -> str:
        """The float32 value that nodes read for ``name``."""
        maker = self.maker.get(name)
        # The result of a convolution in bfloat16 is rounded already.
        exact = maker is not None and self._makes_data(maker) and self._is_bfloat16_product(maker)
        return f"{name}/rounded" if name in self.names and not exact else name

    def _add_bfloat16(self, node: Node, name: str) -> None:
        """Add a node whose result is ``name`` in bfloat16."""
        value = self.graph.values[name]
        # Of a weight or an input, too: what is computed from it is neither.
        role = Role.GRADIENT if value.role is Role.GRADIENT else Role.ACTIVATION
        [output] = node.outputs
        for made in (output, f"{name}/rounded"):
            if made in self.graph.values:
                raise taken(made)
        self.values[output] = Value(output, value.shape, STORED, role)
        self.made_in_bfloat16.add(name)
        self.nodes.append(node)

    def _cast_back(self, name: str, wide: str) -> None:
        """Cast ``name`` in bfloat16 back to float32, as the value ``wide``."""
        source = bfloat16_of(name)
        self.values[wide] = Value(wide, self.values[source].shape, "float32", self.values[source].role)
        self.nodes.append(Node(f"{source}/float32", "Cast", (source,), (wide,), {"to": "float32"}))


def use_bfloat16(graph: Graph, rules: Rules, names: Collection[str], products: bool = False) -> Graph:
    """The graph with each of ``names`` rounded to bfloat16 for all nodes that read it.

    ``products``: whether convolutions and matrix products read operands of bfloat16.
    """
    draft = _Rewriting(graph, rules, names, products)
    for node in graph.nodes:
        draft.add(node)
    made = {name for node in draft.nodes for name in node.outputs}
    new = replace(graph, values=draft.values, nodes=tuple(draft.nodes))
    return needed(new, draft.values.keys() - made)
