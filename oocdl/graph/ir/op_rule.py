"""The contract of an operator, and the builder through which all nodes are made.

An operator is one ``OpRule``: shape, axes, gradient, cost, and the facts by which transforms and
the cost model tell operators apart. ``graph/`` knows no operator by name; every transform takes the
table of rules as an argument, so it can be tested with two toy operators. Kernels live with the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np

from oocdl.errors import ModelError, printable
from oocdl.graph.ir.graph import Array, Graph, Node, Role, Shape, Value, is_float
from oocdl.graph.ir.index import AxisRule, Region
from oocdl.graph.ir.speed import Speed

Spec = tuple[Shape, str]
"""Shape and dtype of a value."""

Infer = Callable[[Node, Sequence[Value]], Sequence[Spec]]
Axes = Callable[[Node, Sequence[Shape], Sequence[Shape]], AxisRule]
Gradient = Callable[..., Sequence["str | None"]]
Expand = Callable[["Builder", Node], Sequence[str]]
Localize = Callable[[Node, Region, Sequence[Region], Sequence[Shape]], Mapping[str, Any]]
Cost = Callable[[Node, Sequence[Shape], Sequence[Shape]], int]
T = TypeVar("T")


def no_gradient(build: Builder, node: Node, *grads: str | None) -> Sequence[str | None]:
    """The gradient rule of an operator whose gradient is zero for every input."""
    return [None] * len(node.inputs)


def no_cost(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """The cost of an operator that computes nothing, or takes no memory beyond its operands and results."""
    return 0


@dataclass(frozen=True)
class Product:
    """Marks a matrix product or a convolution, for transforms that choose precisions and memory orders.

    Products may read operands of bfloat16, and sum in float32. A convolution whose node has the attribute
    ``grouped`` has an axis of groups before the channels of each operand: data [batch, groups, channels, ..].

    >>> Product(data=(0,)).weights(["x", "w"], ["y"]), Product(data=(0, 1)).weights(["x", "dy"], ["dw"])
    ('w', 'dw')
    """

    data: tuple[int, ...] = ()
    """The numbers of a convolution's operands that are data [batch, channels, ..]. If one is, the other is
    the weights, and the result is data; if both are, the result is weights. Empty: a matrix product."""
    exact: tuple[int, ...] = ()
    """The numbers of operands that are never read in bfloat16, such as statistics of a gradient."""

    @property
    def makes_data(self) -> bool:
        """Whether the result is data: it is then rounded to the operands' bfloat16, and never cut into
        partial sums."""
        return len(self.data) == 1

    def weights(self, inputs: Sequence[T], outputs: Sequence[T]) -> T:
        """Return the item of the weights among ``inputs`` (one for each operand) and ``outputs``."""
        others = [item for place, item in enumerate(inputs) if place not in self.data]
        return others[0] if others else outputs[0]


@dataclass(frozen=True, kw_only=True)
class OpRule:
    """Everything the compiler knows of one operator.

    Exactly one of ``axes`` and ``expand`` is given: an operator is either cut as it is, or rewritten
    into others after gradients and before anything is cut. An operator that is cut also runs, and has a
    ``speed``. Defaults are right for an elementwise operator of one floating-point operation for an element.
    """

    op: str
    infer: Infer
    """Shapes and dtypes of the outputs from those of the inputs; raises ModelError."""
    gradient: Gradient
    """(builder, node, the gradient of each output) -> gradients of the inputs, as names of values of exactly
    the inputs' shapes. None is zero; not all outputs have that."""
    axes: Axes | None = None
    expand: Expand | None = None
    speed: Speed | None = None
    flops: Cost = lambda node, inputs, outputs: sum(map(prod, outputs))
    """(node, shapes of inputs, shapes of outputs) -> floating-point operations, 2 for a multiply-add; the
    shapes are those of one shard."""
    scratch_elements: Cost
    """The same arguments -> an upper bound of the elements of scratch space that any engine takes beyond
    operands, their padded copies, and results. Memory budgets rely on it, so it has no default."""
    fill: float = 0.0
    """The padding of an operand where a window reaches beyond the value."""
    joins: bool = False
    """Whether operands fill disjoint parts of the output: outside of one lies another (Concat)."""
    localize: Localize | None = None
    """(node, ranges of the output's own axes, for each input the ranges of its own axes, whole shapes of
    the inputs) -> further attributes of the instruction, which depend on the position of the shard."""
    onnx: Mapping[str, Any] | None = None
    """Attributes, with their defaults, of the ONNX operator that has the same name and does the same;
    None: there is none, or reading it takes more than that."""
    domain: str = ""
    """The domain of the ONNX operator, such as "com.microsoft"; none: ONNX's own."""
    product: Product | None = None
    """Given for matrix products and convolutions only."""
    moves_only: bool = False
    """Whether every element of the result is an element of an operand, at a place that shapes and attributes
    determine: rounding operands or rounding the result then gives the same."""
    keeps_axes: bool = True
    """Whether the result has the axes of the operands, so that one memory order suits all of them."""
    prefers_planes: bool = False
    """Whether the operator, when it reduces channels, is faster if these do not lie last in memory."""


Rules = Mapping[str, OpRule]


def taken(name: str) -> ModelError:
    """Return the error of a file that has a tensor of the name of a value that is added to its graph."""
    why = "but a value that is added to the graph has that name; rename it in the file"
    return ModelError(f"the file has a tensor '{printable(name)}', {why}")


class Builder:
    """Grows a graph node by node, inferring shapes and dtypes.

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
        self.makers = {name: node for node in self.nodes for name in node.outputs}
        """Value -> the node that makes it, of those that were given or are added here."""

    def unique(self, stem: str) -> str:
        """Return a name that no value or node has yet: ``stem``, or ``stem`` with a number."""
        while True:
            count = self._counts.get(stem, 0)
            self._counts[stem] = count + 1
            name = f"{stem}.{count}" if count else stem
            if name not in self.values and name not in self._labels:
                return name

    def value(self, name: str, shape: Shape, dtype: str, role: Role) -> str:
        """Declare a value that no node makes; returns its name."""
        if name in self.values:
            raise taken(name)
        self.values[name] = Value(name, tuple(shape), dtype, role)
        return name

    def constant(self, data: Any, dtype: str | None = None, stem: str = "const") -> str:
        """Add a constant; returns its name. Python floats become float32 unless ``dtype`` says otherwise.

        Raises ModelError for one number that a dtype of whole numbers cannot hold.
        """
        given = np.asarray(data)
        if dtype is None and given.dtype == np.float64 and not isinstance(data, np.ndarray):
            dtype = "float32"
        with np.errstate(invalid="ignore"):  # what is no number becomes some number, and is refused
            array = np.ascontiguousarray(given, dtype=dtype).reshape(given.shape)
        if not array.ndim and array.dtype.kind in "iu" and array.item() != given.item():
            raise ModelError(f"{given.item()} is no number of {array.dtype}, the type of its operand")
        name = self.unique(self.scope + stem)
        self.values[name] = Value(name, array.shape, array.dtype.name, Role.CONSTANT)
        self.constants[name] = array
        return name

    def like(self, number: float, value: str) -> str:
        """Add a scalar constant of the dtype of ``value``; returns its name."""
        return self.constant(number, self.dtype(value))

    def zeros_like(self, value: str) -> str:
        """Add zeros of the shape and dtype of ``value``, as an expanded scalar; returns their name."""
        return self("Expand", self.like(0.0, value), shape=self.shape(value))

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        attrs: Mapping[str, Any] | None = None,
        names: Sequence[str] | None = None,
        label: str | None = None,
    ) -> tuple[str, ...]:
        """Add a node; returns the names of its outputs, which are ``names`` where given.

        Raises ModelError if the rule refuses the inputs.
        """
        rule = self.rules.get(op)
        if rule is None:
            raise ModelError(
                f"there is no operator '{op}' to build with; docs/reference/operators.md lists all"
            )
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
        self.makers |= dict.fromkeys(outputs, self.nodes[-1])
        return outputs

    def __call__(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Add a node; returns the name of its first output."""
        return self.node(op, inputs, attrs)[0]

    def may_be_trained(self, value: str) -> bool:
        """Return whether a value follows, by floating-point values, from a weight or an input."""
        roles = {self.values[name].role for name in self.sources(value)}
        return is_float(self.dtype(value)) and not roles.isdisjoint((Role.WEIGHT, Role.INPUT))

    def sources(self, value: str) -> set[str]:
        """Return what ``value`` is computed from by floating-point numbers alone, whatever their slopes are.

        PyTorch gives these gradients, if only zeros (behind a ``round``, say); all others have none.
        """
        names = {value}
        for node in reversed(self.nodes):
            if not names.isdisjoint(node.outputs):
                names.update(name for name in node.inputs if is_float(self.dtype(name)))
        return names

    def shape(self, value: str) -> Shape:
        """Return the shape of a value."""
        return self.values[value].shape

    def dtype(self, value: str) -> str:
        """Return the dtype of a value."""
        return self.values[value].dtype

    def graph(self) -> Graph:
        """Return the graph as it is now, frozen."""
        return Graph(
            values=dict(self.values),
            nodes=tuple(self.nodes),
            outputs=tuple(self.outputs),
            constants=dict(self.constants),
            updates=dict(self.updates),
        )
