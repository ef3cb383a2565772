"""Sizes of a model's inputs: those that are given, and those under which a file is its network.

An axis of an input is open if its size in the file is a name. A module may compare sizes in its code; the
file holds the path that was taken when it was written, so each comparison is kept as a condition: a Python
expression of names of axes. A file may come from anywhere, so the expression is read by a parser of its own,
with few operators, and never run.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Shape
from oocdl.graph.onnx.bounds import check_shape
from oocdl.graph.onnx.model_file import Port, shown

_MOST_CHARACTERS = 20_000
_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError, SyntaxError, MemoryError)
"""Errors of a text that is no condition."""
_BINARY: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_COMPARED: Mapping[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLED: Mapping[str, Callable[..., Any]] = {
    "max": max,
    "min": min,
    "abs": abs,
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")},
}


@dataclass(frozen=True)
class Condition:
    """A condition on the sizes of inputs."""

    text: str
    """An expression of names of axes."""
    place: str = ""
    """The line of the module's code at which it was compared; may be empty."""

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is true; ModelError if the text is no condition on these names."""
        try:
            return bool(_value(_parsed(self.text), sizes))
        except ArithmeticError:
            return False
        except _UNREADABLE as error:
            raise ModelError(f"the file's condition '{self.text[:80]}' cannot be read: {error}") from None


@dataclass(frozen=True, kw_only=True)
class OpenAxes:
    """Facts of a file about the sizes of its inputs, beside their names."""

    conditions: tuple[Condition, ...] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)
    """``INPUT.AXIS`` -> why its size is fixed."""
    least_batch: int = 1
    """Smallest batch that can be trained: smaller ones may have a norm over one number, say."""

    def check(self, inputs: Sequence[Port], shapes: Mapping[str, Shape], training: bool) -> None:
        """Raise ModelError if inputs of such shapes would make another network than the file is of."""
        sizes: dict[str, int] = {}
        least = self.least_batch if training else 1
        for port in inputs:
            for axis, (dim, size) in enumerate(zip(port.dims, shapes[port.name], strict=True)):
                if isinstance(dim, str):
                    sizes[dim] = size
                elif dim != size:
                    why = self.fixed.get(f"{port.name}.{axis}", "")
                    raise ModelError(
                        f"input {shown(port.name)} is given {size} along axis {axis}, where the network is "
                        f"for {dim} only{f': {why}' if why else ''}; give it {dim}, or train one for {size}"
                    )
                smallest = 2 if axis else least
                if isinstance(dim, str) and size < smallest:
                    given = f"input {shown(port.name)} is given {size} along axis {axis}"
                    raise ModelError(f"{given}; the network takes {smallest} or more")
        # Conditions come from a call in which no size was 1.
        asked = {dim: max(size, 2) for dim, size in sizes.items()}
        for item in self.conditions:
            if not item.holds(asked):
                told = ", ".join(f"{dim}={size}" for dim, size in sizes.items() if dim in item.text)
                broken = f"'{item.text[:200]}' is not true{f' ({item.place})' if item.place else ''}"
                raise ModelError(
                    f"for {told} the module takes another path than its file holds: {broken}; "
                    "write the file again for these sizes"
                )


def is_readable(text: str) -> bool:
    """Whether ``Condition`` can read an expression, whatever the names in it stand for."""
    try:
        names = {node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name)}
        Condition(text).holds(dict.fromkeys(names, 2))
    except (ModelError, *_UNREADABLE):
        return False
    return True


def _parsed(text: str) -> ast.expr:
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters")
    return ast.parse(text, mode="eval").body


def _value(node: ast.expr, sizes: Mapping[str, int]) -> Any:
    """Compute an expression of numbers; ValueError for anything that is none."""
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, sizes)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, sizes)
        case ast.BoolOp(op=op, values=values):
            found = [bool(_value(item, sizes)) for item in values]
            return all(found) if isinstance(op, ast.And) else any(found)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARED for op in ops):
            found = [_value(item, sizes) for item in (left, *others)]
            pairs = zip(ops, found[:-1], found[1:], strict=True)
            return all(_COMPARED[type(op)](first, second) for op, first, second in pairs)
        case ast.Call(func=function, args=args, keywords=[]) if ast.unparse(function) in _CALLED:
            return _CALLED[ast.unparse(function)](*(_value(item, sizes) for item in args))
    raise ValueError(f"{type(node).__name__} is not part of a condition")


def sizes_of(
    inputs: Sequence[Port], shapes: Mapping[str, Shape]
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the shapes to bind the inputs to, and the same with the extents that the file fixes.

    ``shapes`` are those that are given, by input. Raises ModelError where they do not fit the file.
    """
    unknown = sorted(set(shapes) - {port.name for port in inputs})
    if unknown:
        known = ", ".join(shown(port.name) for port in inputs)
        raise ModelError(f"the model has no input {shown(unknown[0])}; its inputs are {known}")
    bound, traced, sizes = {}, {}, dict[str, int]()
    for port in inputs:
        shape = tuple(shapes.get(port.name, port.dims))
        if len(shape) != len(port.dims):
            raise ModelError(
                f"input {shown(port.name)} has {len(port.dims)} axes {list(port.dims)}, "
                f"but is given {list(shape)}"
            )
        extents = []
        for dim, extent in zip(port.dims, shape, strict=True):
            if not isinstance(extent, int | np.integer):
                extent = sizes.get(str(dim), 0)
                if not extent:
                    raise ModelError(
                        f"dim '{dim}' of input {shown(port.name)} has no size; pass dims={{'{dim}': ...}}"
                    )
            if extent < 1:
                raise ModelError(
                    f"input {shown(port.name)} is given the extent {extent}; it has to be positive"
                )
            if isinstance(dim, str) and sizes.setdefault(dim, int(extent)) != extent:
                raise ModelError(f"dim '{dim}' is {sizes[dim]}, but {extent} in input {shown(port.name)}")
            extents.append(int(extent))
        check_shape(extents, f"input {shown(port.name)}")
        bound[port.name] = tuple(extents)
        traced[port.name] = tuple(
            dim if isinstance(dim, int) else extent for dim, extent in zip(port.dims, extents, strict=True)
        )
    return bound, traced


def other_sizes(inputs: Sequence[Port], shapes: Mapping[str, Shape]) -> str:
    """Say which inputs are given other sizes than the file fixes, but for the batch; '' if none is.

    What an exporter leaves no trace of cannot be seen in a file: a window that an adaptive pooling had, a
    branch that was taken for a size, an amount of padding.
    """
    for port in inputs:
        pairs = list(zip(port.dims, shapes.get(port.name, port.dims), strict=True))
        if any(isinstance(dim, int) and dim != extent for dim, extent in pairs[1:]):
            sizes, given = [dim for dim, _ in pairs], [int(extent) for _, extent in pairs]
            return (
                f"the file fixes input {shown(port.name)} to {sizes}, and it is given {given}: windows, "
                "branches and paddings that the exporter chose by its sizes stay those of the file"
            )
    return ""


EXPORT_OPEN = "export it with these axes open (dynamic axes, dynamic shapes)"
"""The cure of that."""
