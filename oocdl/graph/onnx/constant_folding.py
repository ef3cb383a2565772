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
from oocdl.graph.ir.graph import Array, Shape, normalize_axis
from oocdl.graph.onnx.bounds import MOST_CONSTANT_BYTES
from oocdl.graph.onnx.model_file import OnnxNode, shown, size_text

DATA_SHAPED = frozenset({"Compress", "ConstantOfShape", "NonMaxSuppression", "NonZero", "Range", "Unique"})
"""Operators whose result has a shape that depends on numbers: these have to be known before the run."""
REDUCTIONS: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}

Inputs = Sequence["Array | None"]
Fold = Callable[..., Sequence[Array]]
"""(node, its inputs, of which those that are left out are None) -> its outputs"""


def fold(node: OnnxNode, inputs: Inputs) -> tuple[Array, ...]:
    """Compute the outputs of a node of ``FOLDS`` whose inputs are all known."""
    with np.errstate(all="ignore"):
        try:
            return tuple(np.asarray(array) for array in FOLDS[node.op](node, *inputs))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            what = f"node {shown(node.name)} ({node.op})"
            raise ModelError(f"{what} does not work on its constants: {text}") from None


def allow(node: OnnxNode, shape: Sequence[int], itemsize: int) -> None:
    """Raise ModelError if a constant of ``shape`` would have more than ``MOST_CONSTANT_BYTES``."""
    nbytes = prod(int(extent) for extent in shape) * itemsize
    if nbytes > MOST_CONSTANT_BYTES:
        made = f"node {shown(node.name)} ({node.op}) would make a constant of {size_text(nbytes)}"
        raise ModelError(f"{made}; the limit is {size_text(MOST_CONSTANT_BYTES)}")


def numpy_type(code: int) -> np.dtype[Any]:
    """Return the NumPy dtype of an ONNX element type."""
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code))


def ints(node: OnnxNode, name: str, array: Array | None) -> tuple[int, ...] | None:
    """Return whole numbers from an attribute (old opsets) or an input (new ones); None if both are absent."""
    if name in node.attrs:
        array = np.asarray(node.attrs[name])
    return None if array is None else tuple(int(number) for number in array.reshape(-1))


def squeezed(shape: Shape, axes: Sequence[int] | None) -> Shape:
    """Return ``shape`` without ``axes``, which are of extent one (without all such axes if ``None``)."""
    return np.squeeze(np.broadcast_to(np.False_, shape), None if axes is None else tuple(axes)).shape


def unsqueezed(shape: Shape, axes: Sequence[int] | None) -> Shape:
    """Return ``shape`` with axes of extent one inserted, at ``axes`` of the result."""
    return np.expand_dims(np.broadcast_to(np.False_, shape), tuple(axes or ())).shape


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
    given = (*inputs[1:], None, None, None, None)
    starts, ends, axes, steps = map(ints, [node] * 4, ("starts", "ends", "axes", "steps"), given)
    if starts is None or ends is None:
        raise ValueError("starts or ends are missing")
    axes, steps = axes or tuple(range(len(starts))), steps or (1,) * len(starts)
    places = zip(axes, starts, ends, steps, strict=True)
    return [(normalize_axis(axis, rank), a, b, step) for axis, a, b, step in places]


def parts(node: OnnxNode, sizes: Array | None, extent: int) -> tuple[int, ...]:
    """Return the sizes into which Split divides an axis of ``extent``; ``sizes``: its input, if given."""
    wanted = ints(node, "split", sizes)
    if wanted is None:
        count = int(node.attrs.get("num_outputs", len(node.outputs)))
        if count != len(node.outputs):
            raise ValueError(f"{count} parts are not its {len(node.outputs)} outputs")
        piece = ceil(extent / count)
        wanted = (*(piece,) * (count - 1), extent - piece * (count - 1))
    if sum(wanted) != extent:
        raise ValueError(f"sizes {list(wanted)} do not sum to {extent}")
    return wanted


def wrapped(index: Array, extent: int, axis: str) -> Array:
    """Return indices counted from the start; raises ModelError for one outside of ``extent``."""
    where = np.where(index < 0, index + extent, index).astype(np.int64)
    if where.size and (where.min() < 0 or where.max() >= extent):
        worst = index.reshape(-1)[int(np.argmax((where < 0) | (where >= extent)))]
        raise ModelError(f"index {int(worst)} is outside {axis} of extent {extent}")
    return where


def flat_indices(index: Array, extents: Sequence[int]) -> Array:
    """Return indices ``[.., k]`` of ``k`` axes as numbers of elements in C order.

    >>> flat_indices(np.array([[1, 2], [0, -1]]), (2, 3))
    array([5, 2])
    """
    total = np.zeros(index.shape[:-1], np.int64)
    for axis, extent in enumerate(extents):
        total = total * extent + wrapped(index[..., axis], extent, f"axis {axis}")
    return total


def _broadcast(function: Callable[..., Any]) -> Fold:
    def run(node: OnnxNode, *arrays: Array) -> Sequence[Array]:
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
        allow(node, shape, max(array.itemsize for array in arrays))
        result = np.asarray(reduce(function, arrays) if len(arrays) > 1 else function(*arrays))
        floats = result.dtype.kind == arrays[0].dtype.kind == "f"
        return [result.astype(arrays[0].dtype) if floats else result]

    return run


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind not in "iu":
        return np.asarray(a / b)
    if not b.all():
        raise ZeroDivisionError("whole numbers are divided by 0")
    return np.asarray((a - np.fmod(a, b)) // b, a.dtype)  # ONNX rounds towards zero, NumPy down


def _power(a: Array, b: Array) -> Array:
    exact = a.dtype.kind in "iu" and b.dtype.kind in "iu"
    return np.asarray(np.power(a if exact else a.astype(np.float64), b)).astype(a.dtype)


def _mod(node: OnnxNode, a: Array, b: Array) -> Sequence[Array]:
    if a.dtype.kind in "iu" and not b.all():
        raise ZeroDivisionError("whole numbers are divided by 0")
    return _broadcast(np.fmod if node.attrs.get("fmod") else np.mod)(node, a, b)


def _mean(data: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Array:
    if data.dtype.kind not in "iu":
        return np.asarray(np.mean(data, axis=axis, keepdims=keepdims))
    total = np.asarray(np.sum(data, axis=axis, keepdims=keepdims))
    return _divide(total, np.asarray(data.size // max(total.size, 1), total.dtype))


def _constant(node: OnnxNode) -> Sequence[Array]:
    for name, found in node.attrs.items():
        if name == "value" and found is not None:
            return [found]
        if name in ("value_int", "value_ints", "value_float", "value_floats"):
            return [np.asarray(found, np.int64 if "int" in name else np.float32)]
    raise UnsupportedError("Constant of an element type other than numbers")


def _constant_of_shape(node: OnnxNode, extents: Array) -> Sequence[Array]:
    shape, value = [int(extent) for extent in extents.reshape(-1)], node.attrs.get("value")
    filler = np.zeros(1, np.float32) if value is None else value
    allow(node, shape, filler.itemsize)
    return [np.full(shape, filler.reshape(-1)[0], filler.dtype)]


def _expand(node: OnnxNode, data: Array, target: Array) -> Sequence[Array]:
    shape = np.broadcast_shapes(data.shape, tuple(int(extent) for extent in target.reshape(-1)))
    allow(node, shape, data.itemsize)
    return [np.broadcast_to(data, shape).copy()]


def _tile(node: OnnxNode, data: Array, counts: Array) -> Sequence[Array]:
    repeats = [int(count) for count in counts]
    allow(node, [a * b for a, b in zip(data.shape, repeats, strict=True)], data.itemsize)
    return [np.tile(data, repeats)]


def _range(node: OnnxNode, *inputs: Array) -> Sequence[Array]:
    start, limit, delta = (array.reshape(()) for array in inputs)
    if start.dtype.kind in "iu":
        count = len(range(start.item(), limit.item(), delta.item()))
    else:
        count = max(ceil((limit - start) / delta), 0)
    allow(node, [count], start.itemsize)
    return [(start + np.arange(count) * delta).astype(start.dtype)]


def _gather(node: OnnxNode, data: Array, index: Array) -> Sequence[Array]:
    axis = node.attrs.get("axis", 0)
    allow(node, [index.size, data.size // max(data.shape[axis], 1)], data.itemsize)
    return [np.take(data, index.astype(np.int64), axis=axis)]


def _along(node: OnnxNode, data: Array, index: Array) -> tuple[Array, ...]:
    """Return the places that indices along one axis mean, as an index of NumPy."""
    axis = normalize_axis(node.attrs.get("axis", 0), data.ndim)
    places: list[Array] = list(np.indices(index.shape, sparse=True))
    places[axis] = wrapped(index, data.shape[axis], f"axis {axis}")
    return tuple(places)


def _gather_nd(node: OnnxNode, data: Array, index: Array) -> Sequence[Array]:
    batch = int(node.attrs.get("batch_dims", 0))
    extents = data.shape[batch : batch + index.shape[-1]]
    samples = prod(data.shape[:batch])
    row = data.shape[batch + index.shape[-1] :]
    table = data.reshape(samples, prod(extents), *row)
    flat = flat_indices(index, extents).reshape(samples, -1)
    allow(node, (*flat.shape, *row), data.itemsize)
    return [table[np.arange(samples)[:, None], flat].reshape(*index.shape[:-1], *row)]


def _scattered(node: OnnxNode, data: Array, places: tuple[Array, ...], updates: Array) -> Array:
    """Return ``data`` with ``updates`` written at ``places``, or joined to what is there."""
    result, reduction = data.copy(), node.attrs.get("reduction", "none")
    if reduction == "none":
        result[places] = updates
    else:
        REDUCTIONS[reduction].at(result, places, updates)
    return result


def _scatter_nd(node: OnnxNode, data: Array, index: Array, updates: Array) -> Sequence[Array]:
    extents, row = data.shape[: index.shape[-1]], data.shape[index.shape[-1] :]
    flat = flat_indices(index, extents).reshape(-1)
    table, rows = data.reshape(prod(extents), *row), updates.reshape(flat.size, *row)
    return [_scattered(node, table, (flat,), rows).reshape(data.shape)]


def _slice(node: OnnxNode, *inputs: Array | None) -> Sequence[Array]:
    data = np.asarray(inputs[0])
    where = [slice(None)] * data.ndim
    for axis, *ends in slices(node, inputs, data.ndim):
        where[axis] = slice(*ends)
    return [data[tuple(where)].copy()]


def _split(node: OnnxNode, data: Array, sizes: Array | None = None) -> Sequence[Array]:
    axis = node.attrs.get("axis", 0)
    return np.split(data, np.cumsum(parts(node, sizes, data.shape[axis]))[:-1], axis=axis)


def _concat(node: OnnxNode, *arrays: Array) -> Sequence[Array]:
    allow(node, [sum(array.size for array in arrays)], arrays[0].itemsize)
    return [np.concatenate(arrays, axis=node.attrs["axis"])]


def _reduction(function: Callable[..., Any]) -> Fold:
    def run(node: OnnxNode, data: Array, given: Array | None = None) -> Sequence[Array]:
        axes = ints(node, "axes", given) or None
        if axes is None and node.attrs.get("noop_with_empty_axes"):
            return [data]
        keep = bool(node.attrs.get("keepdims", 1))
        return [np.asarray(function(data, axis=axes, keepdims=keep)).astype(data.dtype)]

    return run


def _where(node: OnnxNode, condition: Array, yes: Array, no: Array) -> Sequence[Array]:
    allow(node, np.broadcast_shapes(condition.shape, yes.shape, no.shape), yes.itemsize)
    return [np.where(condition, yes, no).astype(yes.dtype)]


_SAME = ("Abs", "Add", "Ceil", "Cos", "Equal", "Exp", "Floor", "Greater", "IsNaN", "Less", "Log", "Sin")
_NAMES = {
    **{op: op.lower() for op in (*_SAME, "Sqrt")},
    **{op: f"logical_{op.lower()}" for op in ("And", "Not", "Or", "Xor")},
    **{"Sub": "subtract", "Mul": "multiply", "Neg": "negative"},
    **{"LessOrEqual": "less_equal", "GreaterOrEqual": "greater_equal"},
}
FOLDS: dict[str, Fold] = {
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Tile": _tile,
    "Range": _range,
    "Gather": _gather,
    "GatherElements": lambda node, data, index: [data[_along(node, data, index)]],
    "GatherND": _gather_nd,
    **dict.fromkeys(
        ("Scatter", "ScatterElements"),
        lambda node, data, index, updates: [_scattered(node, data, _along(node, data, index), updates)],
    ),
    "ScatterND": _scatter_nd,
    "NonZero": lambda node, data: [np.stack(np.nonzero(data)).astype(np.int64)],
    "Slice": _slice,
    "Split": _split,
    "Concat": _concat,
    "Trilu": lambda node, data, diagonal=0: [
        (np.triu if node.attrs.get("upper", 1) else np.tril)(data, int(np.reshape(diagonal, -1)[0]))
    ],
    "Unsqueeze": lambda node, data, axes=None: [np.expand_dims(data, ints(node, "axes", axes) or ())],
    "Squeeze": lambda node, data, axes=None: [np.squeeze(data, ints(node, "axes", axes))],
    "Reshape": lambda node, data, target: [
        data.reshape(reshaped(data.shape, target.tolist(), bool(node.attrs.get("allowzero", 0))))
    ],
    "Mod": _mod,
    "Identity": lambda node, data: [data],
    "Transpose": lambda node, data: [np.transpose(data, node.attrs.get("perm"))],
    "Cast": lambda node, data: [data.astype(numpy_type(node.attrs["to"]))],
    "CastLike": lambda node, data, like: [data.astype(like.dtype)],
    **{op: _broadcast(getattr(np, name)) for op, name in _NAMES.items()},
    "Div": _broadcast(_divide),
    "Pow": _broadcast(_power),
    "Min": _broadcast(lambda *arrays: reduce(np.minimum, arrays)),  # of one, too
    "Max": _broadcast(lambda *arrays: reduce(np.maximum, arrays)),
    "Reciprocal": _broadcast(lambda a: 1 / a),
    "Where": _where,
    **{f"Reduce{op}": _reduction(getattr(np, op.lower())) for op in ("Prod", "Sum", "Max", "Min")},
    "ReduceMean": _reduction(_mean),
}
"""Operators that are computed at import where all their inputs are known."""
