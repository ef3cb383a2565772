"""Folds the constants that exporters leave in files: shapes, masks, position numbers.

Small arrays known at import are computed here with NumPy, so that only nodes that work on tensors remain.
Nothing larger than ``MOST_CONSTANT_BYTES`` is ever made: a few bytes of ONNX can ask for petabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import ceil, prod
from typing import Any

import numpy as np
import onnx

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.onnx.bounds import MOST_CONSTANT_BYTES
from oocdl.graph.onnx.folding.known_arrays import (
    along,
    flat_indices,
    scatter,
)
from oocdl.graph.onnx.model_file import OnnxNode, shown, size_text

DATA_SHAPED = frozenset({"Compress", "ConstantOfShape", "NonMaxSuppression", "NonZero", "Range", "Unique"})
"""Operators whose result has a shape that depends on numbers: these have to be known before the run."""

Inputs = Sequence["Array | None"]
Fold = Callable[[OnnxNode, Inputs], Sequence[Array]]


def fold(node: OnnxNode, inputs: Inputs) -> tuple[Array, ...]:
    """Compute the outputs of a node of ``FOLDS`` whose inputs are all known."""
    with np.errstate(all="ignore"):
        try:
            return tuple(np.asarray(array) for array in FOLDS[node.op](node, inputs))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(
                f"node {shown(node.name)} ({node.op}) does not work on its constants: {text}"
            ) from None


def allow(node: OnnxNode, shape: Sequence[int], itemsize: int) -> None:
    """Raise ModelError if a constant of ``shape`` would have more than ``MOST_CONSTANT_BYTES``."""
    if prod(int(extent) for extent in shape) * itemsize > MOST_CONSTANT_BYTES:
        size = size_text(prod(int(extent) for extent in shape) * itemsize)
        raise ModelError(
            f"node {shown(node.name)} ({node.op}) would make a constant of {size}; "
            f"the limit is {size_text(MOST_CONSTANT_BYTES)}"
        )


def numpy_type(code: int) -> np.dtype[Any]:
    """Return the NumPy dtype of an ONNX element type."""
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code))


def given(inputs: Inputs, index: int) -> Array:
    """Return an input that must not be left out."""
    array = inputs[index] if index < len(inputs) else None
    if array is None:
        raise ValueError(f"input {index} is missing")
    return array


def ints(node: OnnxNode, inputs: Inputs, name: str, index: int) -> tuple[int, ...] | None:
    """Return whole numbers from an attribute (old opsets) or an input (new ones); None if both are absent."""
    if name in node.attrs:
        found = node.attrs[name]
        return tuple(found) if isinstance(found, tuple) else (int(found),)
    array = inputs[index] if index < len(inputs) else None
    return None if array is None else tuple(int(number) for number in array.reshape(-1))


def squeezed(shape: Shape, axes: Sequence[int] | None) -> Shape:
    """Return ``shape`` without ``axes`` of extent one (without all such axes if ``None``)."""
    if axes is None:
        return tuple(extent for extent in shape if extent != 1)
    drop = {axis % len(shape) for axis in axes}
    if any(shape[axis] != 1 for axis in drop):
        raise ValueError(f"axes {sorted(drop)} of shape {list(shape)} are not all 1")
    return tuple(extent for axis, extent in enumerate(shape) if axis not in drop)


def unsqueezed(shape: Shape, axes: Sequence[int]) -> Shape:
    """Return ``shape`` with axes of extent one inserted, at ``axes`` of the result."""
    return np.expand_dims(np.broadcast_to(np.False_, shape), tuple(axes)).shape


def reshaped(shape: Shape, target: Sequence[int], zero_is_zero: bool = False) -> Shape:
    """Return the shape that Reshape makes of ``shape``; raises ValueError if it cannot."""
    result = [
        shape[axis] if extent == 0 and not zero_is_zero and axis < len(shape) else int(extent)
        for axis, extent in enumerate(target)
    ]
    if result.count(-1) == 1:
        rest = -prod(result)
        result[result.index(-1)] = prod(shape) // rest if rest else 0
    if prod(result) != prod(shape) or min(result, default=0) < 0:
        raise ValueError(f"shape {list(target)} does not fit an input of shape {list(shape)}")
    return tuple(result)


def slices(node: OnnxNode, inputs: Inputs, rank: int) -> list[tuple[int, int, int, int]]:
    """Return the slices of a Slice as (axis, start, end, step), as they are written."""
    starts, ends = ints(node, inputs, "starts", 1), ints(node, inputs, "ends", 2)
    if starts is None or ends is None:
        raise ValueError("starts or ends are missing")
    axes = ints(node, inputs, "axes", 3) or tuple(range(len(starts)))
    steps = ints(node, inputs, "steps", 4) or (1,) * len(starts)
    return [(axis % rank, a, b, step) for axis, a, b, step in zip(axes, starts, ends, steps, strict=True)]


def parts(node: OnnxNode, inputs: Inputs, extent: int) -> tuple[int, ...]:
    """Return the sizes into which Split divides an axis of ``extent``."""
    sizes = ints(node, inputs, "split", 1)
    if sizes is None:
        count = int(node.attrs.get("num_outputs", len(node.outputs)))
        if count != len(node.outputs):
            raise ValueError(f"{count} parts are not its {len(node.outputs)} outputs")
        piece = ceil(extent / count)
        sizes = (*(piece,) * (count - 1), extent - piece * (count - 1))
    if sum(sizes) != extent:
        raise ValueError(f"sizes {list(sizes)} do not sum to {extent}")
    return sizes


def _broadcast(function: Callable[..., Any]) -> Fold:
    def run(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
        arrays = [array for array in inputs if array is not None]
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
        allow(node, shape, max(array.itemsize for array in arrays))
        result = np.asarray(reduce(function, arrays) if len(arrays) > 1 else function(*arrays))
        return [
            result
            if result.dtype.kind != "f" or arrays[0].dtype.kind != "f"
            else result.astype(arrays[0].dtype)
        ]

    return run


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu":  # ONNX rounds towards zero, NumPy down
        return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)), a.dtype)
    return np.asarray(a / b)


def _power(a: Array, b: Array) -> Array:
    return np.asarray(np.power(a.astype(np.float64), b)).astype(a.dtype)


def _constant(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    for name, found in node.attrs.items():
        if name == "value" and found is not None:
            return [found]
        if name in ("value_int", "value_ints", "value_float", "value_floats"):
            return [np.asarray(found, np.int64 if "int" in name else np.float32)]
    raise UnsupportedError("Constant of an element type other than numbers")


def _constant_of_shape(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    shape = [int(extent) for extent in given(inputs, 0).reshape(-1)]
    value = node.attrs.get("value")
    filler = np.zeros(1, np.float32) if value is None else value
    allow(node, shape, filler.itemsize)
    return [np.full(shape, filler.reshape(-1)[0], filler.dtype)]


def _expand(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    data = given(inputs, 0)
    shape = np.broadcast_shapes(data.shape, tuple(int(extent) for extent in given(inputs, 1).reshape(-1)))
    allow(node, shape, data.itemsize)
    return [np.broadcast_to(data, shape).copy()]


def _tile(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    data, repeats = given(inputs, 0), [int(count) for count in given(inputs, 1)]
    allow(node, [a * b for a, b in zip(data.shape, repeats, strict=True)], data.itemsize)
    return [np.tile(data, repeats)]


def _range(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    start, limit, delta = (given(inputs, index).reshape(()) for index in range(3))
    count = max(ceil((limit - start) / delta), 0)
    allow(node, [count], start.itemsize)
    return [(start + np.arange(count) * delta).astype(start.dtype)]


def _gather(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    data, index = given(inputs, 0), given(inputs, 1)
    axis = node.attrs.get("axis", 0)
    allow(node, [index.size, data.size // max(data.shape[axis], 1)], data.itemsize)
    return [np.take(data, index.astype(np.int64), axis=axis)]


def _gather_elements(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    data, index, axis = given(inputs, 0), given(inputs, 1), node.attrs.get("axis", 0)
    return [data[along(index, data.shape[axis], axis % data.ndim)]]


def _gather_nd(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    data, index, batch = given(inputs, 0), given(inputs, 1), int(node.attrs.get("batch_dims", 0))
    extents = data.shape[batch : batch + index.shape[-1]]
    samples = prod(data.shape[:batch])
    row = data.shape[batch + index.shape[-1] :]
    table = data.reshape(samples, prod(extents), *row)
    flat = flat_indices(index, extents).reshape(samples, -1)
    allow(node, (*flat.shape, *row), data.itemsize)
    return [table[np.arange(samples)[:, None], flat].reshape(*index.shape[:-1], *row)]


def _scatter_elements(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    data, index, axis = given(inputs, 0), given(inputs, 1), node.attrs.get("axis", 0)
    places = along(index, data.shape[axis], axis % data.ndim)
    return [scatter(data, places, given(inputs, 2), node.attrs.get("reduction", "none"))]


def _scatter_nd(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    data, index, updates = (given(inputs, place) for place in range(3))
    extents, row = data.shape[: index.shape[-1]], data.shape[index.shape[-1] :]
    flat = flat_indices(index, extents).reshape(-1)
    table, rows = data.reshape(prod(extents), *row), updates.reshape(flat.size, *row)
    return [scatter(table, (flat,), rows, node.attrs.get("reduction", "none")).reshape(data.shape)]


def _slice(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    data = given(inputs, 0)
    where = [slice(None)] * data.ndim
    for axis, start, end, step in slices(node, inputs, data.ndim):
        stop = None if step < 0 and end < -data.shape[axis] else end
        where[axis] = slice(start, stop, step)
    return [data[tuple(where)].copy()]


def _split(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    data, axis = given(inputs, 0), node.attrs.get("axis", 0)
    marks = np.cumsum(parts(node, inputs, data.shape[axis]))[:-1]
    return np.split(data, marks, axis=axis)


def _concat(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    arrays = [given(inputs, index) for index in range(len(inputs))]
    allow(node, [sum(array.size for array in arrays)], arrays[0].itemsize)
    return [np.concatenate(arrays, axis=node.attrs["axis"])]


def _trilu(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    k = int(given(inputs, 1).reshape(-1)[0]) if len(inputs) > 1 and inputs[1] is not None else 0
    return [(np.triu if node.attrs.get("upper", 1) else np.tril)(given(inputs, 0), k)]


def _reduction(function: Callable[..., Any]) -> Fold:
    def run(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
        data, axes = given(inputs, 0), ints(node, inputs, "axes", 1)
        if axes is None and node.attrs.get("noop_with_empty_axes"):
            return [data]
        keep = bool(node.attrs.get("keepdims", 1))
        return [np.asarray(function(data, axis=axes, keepdims=keep)).astype(data.dtype)]

    return run


def _unsqueeze(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    data = given(inputs, 0)
    return [data.reshape(unsqueezed(data.shape, ints(node, inputs, "axes", 1) or ()))]


def _squeeze(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    data = given(inputs, 0)
    return [data.reshape(squeezed(data.shape, ints(node, inputs, "axes", 1)))]


def _reshape(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    data = given(inputs, 0)
    target = [int(extent) for extent in given(inputs, 1)]
    return [data.reshape(reshaped(data.shape, target, bool(node.attrs.get("allowzero", 0))))]


def _where(node: OnnxNode, inputs: Inputs) -> Sequence[Array]:
    condition, yes, no = (given(inputs, index) for index in range(3))
    allow(node, np.broadcast_shapes(condition.shape, yes.shape, no.shape), yes.itemsize)
    return [np.where(condition, yes, no).astype(yes.dtype)]


NAMED_SO = ("Abs", "Add", "Ceil", "Cos", "Equal", "Exp", "Floor", "Greater", "Less", "Log", "Sin", "Sqrt")
"""Operators that NumPy has by these names."""
LOGIC = ("And", "Not", "Or", "Xor")
FOLDS: dict[str, Fold] = {
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Tile": _tile,
    "Range": _range,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterElements": _scatter_elements,
    "Scatter": _scatter_elements,
    "ScatterND": _scatter_nd,
    "NonZero": lambda node, inputs: [np.stack(np.nonzero(given(inputs, 0))).astype(np.int64)],
    "Slice": _slice,
    "Split": _split,
    "Concat": _concat,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Mod": lambda node, inputs: _broadcast(np.fmod if node.attrs.get("fmod") else np.mod)(node, inputs),
    "Identity": lambda node, inputs: [given(inputs, 0)],
    "Transpose": lambda node, inputs: [np.transpose(given(inputs, 0), node.attrs.get("perm"))],
    "Cast": lambda node, inputs: [given(inputs, 0).astype(numpy_type(node.attrs["to"]))],
    "CastLike": lambda node, inputs: [given(inputs, 0).astype(given(inputs, 1).dtype)],
    **{op: _broadcast(getattr(np, op.lower())) for op in NAMED_SO},
    **{op: _broadcast(getattr(np, f"logical_{op.lower()}")) for op in LOGIC},
    "Sub": _broadcast(np.subtract),
    "Mul": _broadcast(np.multiply),
    "Div": _broadcast(_divide),
    "Pow": _broadcast(_power),
    "Min": _broadcast(lambda *arrays: reduce(np.minimum, arrays)),  # of one, too
    "Max": _broadcast(lambda *arrays: reduce(np.maximum, arrays)),
    "Neg": _broadcast(np.negative),
    "IsNaN": _broadcast(np.isnan),
    "Reciprocal": _broadcast(lambda a: 1 / a),
    "LessOrEqual": _broadcast(np.less_equal),
    "GreaterOrEqual": _broadcast(np.greater_equal),
    "Where": _where,
    **{f"Reduce{op}": _reduction(getattr(np, op.lower())) for op in ("Prod", "Sum", "Max", "Min", "Mean")},
}
"""Operators that are computed at import where all their inputs are known."""
