"""The context in which an ONNX operator becomes nodes of our vocabulary.

A lowering reads its node and operands from it, grows the graph, and returns one operand for each output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, NoReturn, TypeVar

import numpy as np

from oocdl.errors import ModelError, Refusal, UnsupportedError
from oocdl.graph.ir.graph import Array, Shape, normalize_axis
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.onnx.bounds import MOST_NODES, check_shape, check_taps
from oocdl.graph.onnx.constant_folding import ints
from oocdl.graph.onnx.metadata import ExactNumbers, Fact
from oocdl.graph.onnx.model_file import OnnxNode, shown

Operand = str | Array
"""The name of a value of the graph, or an array known at import."""
Entry = Operand | list[Operand]
"""The same, or a sequence of them, which no operator of ours ever sees."""


class Sized(np.ndarray[Any, np.dtype[Any]]):
    """A known array that follows the bound sizes: it comes of a Shape."""


@dataclass(kw_only=True)
class Context:
    """Operands, attributes and builder for the lowering of ``node``."""

    build: Builder
    precision: str
    training: bool
    opset: int
    frozen: Callable[[str], bool]
    """Whether ``freeze`` names this initializer."""
    evaluated: frozenset[str]
    """First outputs of the BatchNorms that use their running statistics in training, too."""
    is_of_pytorch: bool
    """Whether PyTorch is where the file comes from."""
    facts: Mapping[str, Fact]
    traced: Mapping[str, Shape]
    """Shapes under the sizes that are fixed in the file, where these were re-bound; else empty."""
    batch: tuple[int, int] | None
    """Traced and new extent of the leading axis of all inputs, where that was re-bound.

    Numbers of the file are then read as the batch, and what comes of it is compared with the file as it is
    (``planning/rebatched``)."""
    alone: bool
    """Whether no size was re-bound but that of the batch."""
    read: frozenset[str]
    """ONNX names that some node reads, and the model's outputs."""
    lower: Callable[[Sequence[OnnxNode]], Sequence[Refusal]]
    """Lowers the nodes of a body; returns what of them is refused."""
    exact: ExactNumbers | None = None
    env: dict[str, Entry] = field(default_factory=dict)
    single_biases: set[str] = field(default_factory=set)
    """Initializers of recurrent biases whose second half is zeros that are no parameters."""
    tiles: set[str] = field(default_factory=set)
    """Values that a Tile has made by copies along axes of their own."""
    resized: set[tuple[int, ...]] = field(default_factory=set)
    """Extents of the trace, value by value, of the axes that have others now."""
    rebatched: bool = False
    """Whether a number of the file was read as the size of the batch."""
    node: OnnxNode = OnnxNode("", "", (), ())
    stored: dict[str, str] = field(default_factory=dict)
    """ONNX names of known arrays -> the values of the graph that they became."""
    lowered: int = 0
    """Nodes that were lowered, those of bodies each time."""
    folded_bytes: int = 0

    def refuse(self, reason: str) -> NoReturn:
        raise UnsupportedError(f"{self.node.op} with {reason}")

    def has(self, index: int) -> bool:
        return index < len(self.node.inputs) and self.node.inputs[index] != ""

    def entry(self, index: int) -> Entry:
        """Return an input, which may be a value, a known array, or a sequence of these."""
        if not self.has(index):
            raise ModelError(f"input {index} is missing")
        return self.env[self.node.inputs[index]]

    def operand(self, index: int) -> Operand:
        """Return an input that is a value or a known array; refuses a sequence."""
        found = self.entry(index)
        if isinstance(found, list):
            self.refuse("a sequence among its operands")
        return found

    def known(self, index: int) -> Array | None:
        found = self.entry(index) if self.has(index) else None
        return found if isinstance(found, np.ndarray) else None

    def constants(self, what: str, *indices: int) -> list[Array | None]:
        """Return all inputs; refuses the node if one at ``indices`` is given but not known."""
        for index in indices:
            if self.has(index) and self.known(index) is None:
                self.refuse(f"{what} that are not constant")
        return [self.known(index) for index in range(len(self.node.inputs))]

    def ints(self, what: str, name: str, index: int) -> tuple[int, ...] | None:
        """Return whole numbers from an attribute or a known input; None if both are absent."""
        self.constants(what, index)
        return ints(self.node, name, self.known(index))

    def scalar(self, what: str, index: int) -> Any:
        """Return the number of a known input; None if it is left out."""
        self.constants(what, index)
        array = self.known(index)
        return None if array is None else array.reshape(-1)[0].item()

    def value(self, index: int) -> str:
        found, name = self.operand(index), self.node.inputs[index]
        if isinstance(found, str):
            return str(found)
        if name not in self.stored:
            self.stored[name] = self.store(found)
        return self.stored[name]

    def values(self) -> list[str]:
        return [self.value(index) for index in range(len(self.node.inputs))]

    def store(self, array: Array) -> str:
        """Add a constant to the graph: floats in the run's precision, whole numbers as int64."""
        kind = array.dtype.kind
        dtype = "bool" if kind == "b" else "int64" if kind in "iu" else self.precision
        return self.build.constant(array, dtype)

    def shape(self, index: int) -> Shape:
        found = self.operand(index)
        return self.build.shape(found) if isinstance(found, str) else found.shape

    def is_sized(self, index: int) -> bool:
        """Whether a known input follows the bound sizes."""
        return self.has(index) and isinstance(self.entry(index), Sized)

    def was(self, index: int) -> Shape | None:
        """Return the traced shape of an input if it differs from its shape now, else ``None``."""
        before = self.traced.get(self.node.inputs[index])
        return None if before is None or before == self.shape(index) else before

    def attr(self, name: str, default: Any = None) -> Any:
        return self.node.attrs.get(name, default)

    def axis(self, default: int | None = None, more: int = 0) -> int:
        """Return the attribute ``axis``, counted from the first of the axes of input 0 and ``more``."""
        return normalize_axis(self.attr("axis", default), len(self.shape(0)) + more)

    def need_floats(self, *indices: int) -> None:
        """Raise ModelError if an input at ``indices`` holds whole numbers or booleans."""
        for index in indices:
            found = self.operand(index)
            dtype = self.build.dtype(found) if isinstance(found, str) else found.dtype.name
            if np.dtype(dtype).kind in "iub":
                raise ModelError(f"input '{self.node.inputs[index]}' is {dtype}; training needs float")

    def many(self, op: str, *inputs: str, **attrs: Any) -> tuple[str, ...]:
        """Add a node; its name is that of the ONNX node where it is the same operator."""
        base = self.build.scope.removesuffix("/")
        label = base if op == self.node.op and base not in self.build.values else None
        self.make_room(1)
        if op == "Resample":
            extent, kernel = self.build.shape(inputs[0])[attrs["axis"]], attrs.get("window", (0,))[0]
            check_taps(extent, attrs["size"], kernel)
        made = self.build.node(op, [str(name) for name in inputs], attrs, label=label)
        for value in made:
            check_shape(self.build.shape(value), "its result")
        return made

    def make(self, op: str, *inputs: str, **attrs: Any) -> str:
        return self.many(op, *inputs, **attrs)[0]

    def scaled(self, value: str, factor: float) -> str:
        """Multiply ``value``, unless it is by 1."""
        return value if factor == 1.0 else self.make("Mul", value, self.number(factor, value))

    def transpose(self, value: str, perm: Sequence[int]) -> str:
        """Transpose ``value``, unless its axes stay where they are."""
        same = tuple(perm) == tuple(range(len(self.build.shape(value))))
        return value if same else self.make("Transpose", value, perm=tuple(perm))

    def concat(self, values: Sequence[str], axis: int) -> str:
        """Concatenate ``values``, unless there is but one."""
        return self.make("Concat", *values, axis=axis) if len(values) > 1 else values[0]

    def make_room(self, count: int) -> None:
        """Raise ModelError if the graph cannot take so many more nodes."""
        if len(self.build.nodes) + count > MOST_NODES:
            raise ModelError(f"the model makes more than {MOST_NODES} nodes, which is the most that is read")

    def number(self, number: float, like: str) -> str:
        """Add a scalar constant of the dtype of ``like``; returns its name."""
        return self.build.like(number, like)

    def reshape(self, value: str, shape: Sequence[int]) -> str:
        """Reshape ``value``; returns the result's name."""
        # A Reshape of a Reshape is one, so that axes that come back are never merged.
        shape = tuple(int(extent) for extent in shape)
        value = self.unreshaped(value)
        return value if self.build.shape(value) == shape else self.make("Reshape", value, shape=shape)

    def unreshaped(self, value: str) -> str:
        """Return the value that ``value`` is a Reshape of, else ``value``."""
        maker = self.build.makers.get(value)
        return maker.inputs[0] if maker is not None and maker.op == "Reshape" else value

    def per_channel(self, vector: str, rank: int) -> str:
        """Reshape a vector of channels so that it broadcasts along axis 1."""
        return self.reshape(vector, (1, prod(self.build.shape(vector)), *(1,) * (rank - 2)))


Lower = Callable[[Context], Sequence[Entry]]
LOWERINGS: dict[str, Lower] = {}
"""All lowerings, by the ONNX operator: one that is not here is read as its rule says, or not at all."""
LowerT = TypeVar("LowerT", bound=Callable[..., Sequence[Entry]])


def lowers(*ops: str, **fixed: Any) -> Callable[[LowerT], LowerT]:
    """Let the function below lower nodes of ONNX operators; ``fixed`` are its further arguments."""

    def enter(function: LowerT) -> LowerT:
        LOWERINGS.update(dict.fromkeys(ops, partial(function, **fixed)))
        return function

    return enter


def in_body(refused: Sequence[Refusal], node: str) -> list[Refusal]:
    """Return refusals of nodes in the body of the node of a name, with that in their reasons."""
    return [replace(item, reason=f"{item.reason} in the body of {shown(node)}") for item in refused]


def all_of(refused: Sequence[Refusal], unknown: bool) -> str:
    """Write that a model is refused, for all of it, and the ways out; ``unknown``: for operators, too."""
    count = "1 node is" if len(refused) == 1 else f"{len(refused)} nodes are"
    own = ", and oocdl.ops.register adds operators of your own" if unknown else ""
    return f"{count} not supported: {grouped(refused)}; docs/reference/operators.md lists what is{own}"


def grouped(refused: Sequence[Refusal]) -> str:
    """Write what is refused, by reason: how often, and the first node.

    >>> grouped([Refusal("/a/act", "PRelu", "PRelu"), Refusal("/b/act", "PRelu", "PRelu")])
    "PRelu × 2, first '/a/act'"
    """
    nodes: dict[str, list[str]] = {}
    for refusal in refused:
        nodes.setdefault(refusal.reason, []).append(refusal.node)
    return "; ".join(
        f"{reason} × {len(found)}, first {shown(found[0])}" if found[1:] else f"{shown(found[0])} ({reason})"
        for reason, found in nodes.items()
    )
