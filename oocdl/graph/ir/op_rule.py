"""The contract of an operator, and the builder through which all nodes are made.

An operator is one ``OpRule``: shape, axes, gradient, cost, and the facts by which transforms and
the cost model tell operators apart. ``graph/`` knows no operator by name; every transform takes the
table of rules as an argument, so it can be tested with two toy operators. Kernels live with the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Array, Graph, Node, Role, Shape, Value
from oocdl.graph.ir.index import AxisRule, Region
from oocdl.graph.ir.speed import Speed

Spec = tuple[Shape, str]
"""Shape and dtype of a value."""

Infer = Callable[[Node, Sequence[Value]], Sequence[Spec]]
Axes = Callable[[Node, Sequence[Shape], Sequence[Shape]], AxisRule]
Gradient = Callable[["Builder", Node, Sequence["str | None"]], Sequence["str | None"]]
Expand = Callable[["Builder", Node], Sequence[str]]
Localize = Callable[[Node, Region, Sequence[Region], Sequence[Shape]], Mapping[str, Any]]
Cost = Callable[[Node, Sequence[Shape], Sequence[Shape]], int]
T = TypeVar("T")


def no_gradient(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    """The gradient rule of an operator that has none: zero to every input."""
    return [None] * len(node.inputs)


def no_scratch(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """The scratch_elements of an operator that takes nothing beyond its operands and results."""
    return 0


@dataclass(frozen=True)
class Product:
    """What a matrix product or a convolution is to those that choose precisions and memory orders.

    Products take operands of bfloat16 and add up in float32.

    >>> Product(data=(0,)).weights(["x", "w"], ["y"]), Product(data=(0, 1)).weights(["x", "dy"], ["dw"])
    ('w', 'dw')
    """

    data: tuple[int, ...] = ()
    """The operands of a convolution that are data [batch, channels, ..]. Of one, the other operand is
    weights, and the result is data; of two, the result is weights. Empty: a matrix product."""

    @property
    def makes_data(self) -> bool:
        """Whether the result is data: it is then rounded to the operands' bfloat16, and never cut into
        partial sums."""
        return len(self.data) == 1

    def weights(self, inputs: Sequence[T], outputs: Sequence[T]) -> T:
        """Of what is given of a convolution's operands and results, that of its weights."""
        others = [item for place, item in enumerate(inputs) if place not in self.data]
        return others[0] if others else outputs[0]


@dataclass(frozen=True, kw_only=True)
class OpRule:
    """Everything the compiler knows of one operator.

    Exactly one of ``axes`` and ``expand`` is given: an operator is either cut as it is, or rewritten
    into others before anything is cut (after gradients). What is cut runs, and has a ``speed``.
    Defaults are right for an elementwise operator of one floating-point operation an element.
    """

    op: str
    infer: Infer
    """Shapes and dtypes of the outputs from those of the inputs; raises ModelError."""
    gradient: Gradient
    """(builder, node, gradients of the outputs, None = zero) -> gradients of the inputs,
    as names of values of exactly the inputs' shapes; None = zero."""
    axes: Axes | None = None
    expand: Expand | None = None
    speed: Speed | None = None
    flops: Cost = lambda node, inputs, outputs: sum(_size(shape) for shape in outputs)
    """Floating-point operations for operands of the given (local) shapes, 2 for a multiply-add."""
    scratch_elements: Cost
    """Upper bound of the elements of scratch space that the slowest engine takes beyond operands,
    padded copies of them, and results. Budgets are kept by it, so that it has no default."""
    fill: float = 0.0
    """What lies outside a value where a window reaches beyond it."""
    joins: bool = False
    """Operands fill disjoint parts of the output: what lies outside one belongs to another (Concat)."""
    localize: Localize | None = None
    """Attributes that depend on the shard's position: (node, ranges of the output's own axes,
    for each input the ranges of its own axes, whole shapes of the inputs) -> further attributes
    of the instruction."""
    onnx: Mapping[str, Any] | None = None
    """Attributes, with their defaults, of the ONNX operator that has the same name and does the same;
    None: there is none, or reading it takes more than that."""
    product: Product | None = None
    """Given for matrix products and convolutions."""
    moves_only: bool = False
    """Whether every element of the result is one of an operand's, from a place that shapes and attributes
    say: rounded before or after, the result is the same."""
    keeps_axes: bool = True
    """Whether axes of the result lie as those of the operands do, so that one memory order suits them all."""
    prefers_planes: bool = False
    """Whether the operator, run over the channels of each place, is faster if channels do not lie last."""


Rules = Mapping[str, OpRule]


def _size(shape: Shape) -> int:
    return int(np.prod(shape, dtype=np.int64))


class Builder:
    """Grows a graph; the only mutable thing in ``graph/``.

    >>> from oocdl.ops import RULES
    >>> build = Builder(RULES)
    >>> x = build.value("x", (2, 3), "float32", Role.INPUT)
    >>> build.shape(build("Mul", x, build.constant(2.0)))
    (2, 3)
    """

    def __init__(self, rules: Rules, graph: Graph | None = None) -> None:
        self.rules = rules
        self.values: dict[str, Value] = dict(graph.values) if graph else {}
        self.nodes: list[Node] = list(graph.nodes) if graph else []
        self.constants: dict[str, Array] = dict(graph.constants) if graph else {}
        self.updates: dict[str, str] = dict(graph.updates) if graph else {}
        self.outputs: list[str] = list(graph.outputs) if graph else []
        self.role = Role.ACTIVATION
        """Role of the values that nodes make from now on."""
        self.scope = ""
        """Prefix of the names of nodes and values made from now on."""
        self._counts: dict[str, int] = {}
        self._labels = {node.name for node in self.nodes}

    def unique(self, stem: str) -> str:
        """A name that no value or node has yet."""
        while True:
            count = self._counts.get(stem, 0)
            self._counts[stem] = count + 1
            name = f"{stem}.{count}" if count else stem
            if name not in self.values and name not in self._labels:
                return name

    def value(self, name: str, shape: Shape, dtype: str, role: Role) -> str:
        """Declare a value that no node makes; returns its name."""
        if name in self.values:
            raise ModelError(f"value '{name}' is defined twice")
        self.values[name] = Value(name, tuple(shape), dtype, role)
        return name

    def constant(self, data: Any, dtype: str | None = None, stem: str = "const") -> str:
        """A constant value. Python floats become float32 unless ``dtype`` says otherwise."""
        array = np.asarray(data)
        if dtype is None and array.dtype == np.float64 and not isinstance(data, np.ndarray):
            dtype = "float32"
        array = np.ascontiguousarray(array, dtype=dtype).reshape(array.shape)
        name = self.unique(self.scope + stem)
        self.values[name] = Value(name, array.shape, array.dtype.name, Role.CONSTANT)
        self.constants[name] = array
        return name

    def like(self, number: float, value: str) -> str:
        """A scalar constant of the dtype of ``value``."""
        return self.constant(number, self.dtype(value))

    def zeros_like(self, value: str) -> str:
        """Zeros of the shape and dtype of ``value``, as an expanded scalar."""
        return self("Expand", self.like(0.0, value), shape=self.shape(value))

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        attrs: Mapping[str, Any] | None = None,
        names: Sequence[str] | None = None,
        label: str | None = None,
    ) -> tuple[str, ...]:
        """Add a node; returns the names of its outputs (``names`` where given)."""
        rule = self.rules[op]
        name = self.unique(label or self.scope + op.lower())
        draft = Node(name, op, tuple(inputs), (), dict(attrs or {}))
        self._labels.add(name)
        specs = rule.infer(draft, [self.values[value] for value in inputs])
        stems = [name] if len(specs) == 1 else [f"{name}:{index}" for index in range(len(specs))]
        outputs = (
            tuple(names)
            if names
            else tuple(self.unique(stem) if stem in self.values else stem for stem in stems)
        )
        for output, (shape, dtype) in zip(outputs, specs, strict=True):
            self.values[output] = Value(output, tuple(int(d) for d in shape), dtype, self.role)
        self.nodes.append(Node(name, op, tuple(inputs), outputs, draft.attrs))
        return outputs

    def __call__(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Add a node with one output (or whose first output is wanted); returns its name."""
        return self.node(op, inputs, attrs)[0]

    def shape(self, value: str) -> Shape:
        """Shape of a value."""
        return self.values[value].shape

    def dtype(self, value: str) -> str:
        """Dtype of a value."""
        return self.values[value].dtype

    def graph(self) -> Graph:
        """The graph as it is now, frozen."""
        return Graph(
            values=dict(self.values),
            nodes=tuple(self.nodes),
            outputs=tuple(self.outputs),
            constants=dict(self.constants),
            updates=dict(self.updates),
        )
