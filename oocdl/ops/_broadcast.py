"""Helpers of the operator files: broadcasting, undoing it, and its axis rule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NoReturn

import numpy as np

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.ir.graph import Node, Shape, Value, is_float
from oocdl.graph.ir.index import AxisRule, Plain
from oocdl.graph.ir.op_rule import Builder, Cost

size = prod
"""Number of elements of a shape."""


def fail(node: Node, why: str) -> NoReturn:
    """Raise ModelError for a node that is being built."""
    raise ModelError(f"node '{node.name}' ({node.op}): {why}")


def no_second_derivative(build: Builder, node: Node, *grads: str | None) -> NoReturn:
    """The gradient rule of operators that occur in gradients only: an error, never a silent zero."""
    raise UnsupportedError(f"node '{node.name}' ({node.op}) has no derivative: remove it from the model")


def summed_dtype(dtype: str) -> str:
    """Return the dtype in which products of ``dtype`` are summed: those of bfloat16 in float32."""
    return "float32" if dtype == "bfloat16" else dtype


def plain(letter: str, extent: int) -> Plain | None:
    """Return the index of an axis: its letter, or ``None`` for an extent of one, which follows nothing."""
    return None if extent == 1 else Plain(letter)


def letters(shape: Shape, kind: str = "a", first: int = 0) -> tuple[Plain | None, ...]:
    """Return the indices of the axes of a shape, with letters ``a0, a1, ..`` or of another kind."""
    return tuple(plain(f"{kind}{axis}", extent) for axis, extent in enumerate(shape, first))


def extents_of(shape: Shape, kind: str = "a") -> dict[str, int]:
    """Return the extents of these letters."""
    return {f"{kind}{axis}": extent for axis, extent in enumerate(shape)}


def extents_by(
    node: Node,
    terms: Sequence[str],
    shapes: Sequence[Shape],
    known: Mapping[str, int] = MappingProxyType({}),
    stretched: Collection[int] = (),
) -> dict[str, int]:
    """Return letter -> extent of operands whose axes are ``terms``, checked; ``known`` ones are given.

    Operands whose numbers are in ``stretched`` broadcast: their extents may be 1.
    """
    extents = dict(known)
    for place, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        if len(term) != len(shape):
            fail(node, f"an operand of shape {list(shape)} does not have the axes '{term}'")
        for letter, extent in zip(term, shape, strict=True):
            if extents.setdefault(letter, extent) != extent and not (extent == 1 and place in stretched):
                fail(node, f"axis '{letter}' has extents {extents[letter]} and {extent}")
    return extents


def plain_by(terms: Iterable[str], shapes: Iterable[Shape]) -> tuple[tuple[Plain | None, ...], ...]:
    """Return the indices of values whose axes are ``terms``."""
    return tuple(tuple(map(plain, term, shape)) for term, shape in zip(terms, shapes, strict=False))


def broadcast(node: Node, shapes: Sequence[Shape]) -> Shape:
    """Return the shape that NumPy broadcasts all shapes to."""
    if len(wide := {tuple(shape) for shape in shapes} - {()}) <= 1:
        return next(iter(wide), ())
    try:
        return tuple(int(extent) for extent in np.broadcast_shapes(*shapes))
    except ValueError:
        listed = " and ".join(str(list(shape)) for shape in shapes)
        fail(node, f"shapes {listed} cannot be broadcast together")


def broadcast_axes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    """The rule of every elementwise operator: letters ``a0, a1, ..`` aligned from the right."""
    read = tuple(letters(shape, first=len(outputs[0]) - len(shape)) for shape in inputs)
    return AxisRule(read, tuple(map(letters, outputs)), extents_of(outputs[0]))


def reduce_to(build: Builder, grad: str, shape: Shape) -> str:
    """Undo a broadcast: sum ``grad`` over the broadcast axes, so that it has ``shape``.

    The adjoint of ``Expand``. A gradient that is itself smaller is expanded first.
    """
    full = tuple(int(extent) for extent in np.broadcast_shapes(build.shape(grad), shape))
    if full != build.shape(grad):
        grad = build("Expand", grad, shape=full)
    missing = len(full) - len(shape)
    pairs = zip(full, (1,) * missing + tuple(shape), strict=True)
    if axes := tuple(axis for axis, (extent, wanted) in enumerate(pairs) if extent != wanted):
        grad = build("ReduceSum", grad, axes=axes)
    if missing:
        grad = build("Reshape", grad, shape=tuple(shape))
    return grad


def cure(target: Shape, output: Shape) -> str:
    """Say what to do where a network makes a stack, or other sizes in space than its target has.

    >>> cure((2, 33, 32), (2, 4, 32, 32))
    '; the network makes 32 of 33: crop or pad samples to sizes that it halves evenly: multiples of 16'
    >>> cure((2, 48, 48), (2, 4, 46, 46))
    '; the network makes 46 of 48: give its convolutions padding, or crop the larger one'
    >>> cure((2, 32, 32), (2, 3, 4, 32, 32))
    '; return outputs y that are stacked for deep supervision one by one: torch.unbind(y, 1)'
    """
    if output[3:] and target in ((*output[:1], *output[3:]), (*output[:1], 1, *output[3:])):
        return "; return outputs y that are stacked for deep supervision one by one: torch.unbind(y, 1)"
    space = max(len(output) - 2, 0)
    pairs = [(t, o) for t, o in zip(target[-space:], output[2:], strict=False) if t != o]
    if not pairs or not all(t > 1 and o > 1 and t / 2 < o < 2 * t for t, o in pairs):
        return ""
    way_out = "crop or pad samples to sizes that it halves evenly: multiples of 16"
    if all(t % 16 == 0 > o - t for t, o in pairs):
        way_out = "give its convolutions padding, or crop the larger one"
    return f"; the network makes {pairs[0][1]} of {pairs[0][0]}: {way_out}"


def operand_size(times: int) -> Cost:
    """Return a cost of so much for each element of the first operand."""
    return lambda node, inputs, outputs: times * size(inputs[0])


def same_dtype(node: Node, dtypes: Sequence[str]) -> str:
    """Return the dtype of all operands; raises ModelError if they differ."""
    if len(set(dtypes)) != 1:
        fail(node, f"operands have different dtypes {', '.join(dtypes)}; cast them to one")
    return dtypes[0]


def same_float(node: Node, operands: Sequence[Value]) -> str:
    """Return the floating-point dtype of all operands; raises ModelError if there is no such."""
    dtype = same_dtype(node, [value.dtype for value in operands])
    if not is_float(dtype):
        fail(node, f"its operands must be floating point, not {dtype}")
    return dtype


def axis_of(node: Node, shape: Shape) -> int:
    """Return the attribute ``axis``; raises ModelError unless it is an axis of the shape."""
    axis = int(node.attrs["axis"])
    if not 0 <= axis < len(shape):
        fail(node, f"axis {axis} is not an axis of a value of rank {len(shape)}")
    return axis
