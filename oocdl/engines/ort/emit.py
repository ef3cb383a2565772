"""The emitter, which writes ONNX nodes and knows the shape of every tensor.

Only operators of the standard domain are written, at an opset that onnxruntime
1.19 and newer have alike. Shapes are static, so are all slices and reshapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Instruction


@dataclass(frozen=True)
class Val:
    """The name, shape and dtype of a tensor in the model."""

    name: str
    shape: Shape
    dtype: str

    @property
    def info(self) -> onnx.ValueInfoProto:
        """The tensor as an input or output of a model."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        return helper.make_tensor_value_info(self.name, kind, self.shape)


Lowering = Callable[["Emitter", list[Val], Instruction], list[Val]]


class Emitter:
    """Collects nodes. Methods return the result, and add no node where that equals the operand."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._constants: dict[tuple[str, Shape, bytes], Val] = {}
        self._count = 0

    def constant(self, array: Array) -> Val:
        """Add an initializer, or return the equal one that there is."""
        array = np.asarray(array, order="C")
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"c{len(self._constants)}"
            self.initializers.append(numpy_helper.from_array(array, name))
            self._constants[key] = Val(name, array.shape, array.dtype.name)
        return self._constants[key]

    def ints(self, numbers: Sequence[int]) -> Val:
        """Add a constant vector of int64."""
        return self.constant(np.asarray(numbers, dtype=np.int64))

    def scalar(self, number: float, like: Val) -> Val:
        """Add a constant number of the dtype of ``like``."""
        return self.constant(np.asarray(number, dtype=like.dtype))

    def many(
        self,
        kind: str,
        inputs: Sequence[Val | None],
        specs: Sequence[tuple[Shape, str]],
        **attrs: Any,
    ) -> list[Val]:
        """Add a node with several outputs; an input of None is left out."""
        outputs = []
        for shape, dtype in specs:
            outputs.append(Val(f"v{self._count}", tuple(shape), dtype))
            self._count += 1
        names = [value.name if value else "" for value in inputs]
        # onnxruntime's fusions name what they make after the nodes, and refuse two of one name.
        results = [value.name for value in outputs]
        self.nodes.append(helper.make_node(kind, names, results, name=results[0], **attrs))
        return outputs

    def node(
        self, kind: str, inputs: Sequence[Val], shape: Shape, dtype: str | None = None, **attrs: Any
    ) -> Val:
        """Add a node with one output."""
        return self.many(kind, inputs, [(shape, dtype or inputs[0].dtype)], **attrs)[0]

    def __call__(self, kind: str, *inputs: Val | float, dtype: str | None = None, **attrs: Any) -> Val:
        """Add an elementwise node that broadcasts; numbers get the dtype of the first tensor."""
        like = next(value for value in inputs if isinstance(value, Val))
        values = [v if isinstance(v, Val) else self.scalar(v, like) for v in inputs]
        shape = np.broadcast_shapes(*(value.shape for value in values))
        return self.node(kind, values, shape, dtype or like.dtype, **attrs)

    def reshape(self, value: Val, shape: Sequence[int]) -> Val:
        """Reshape ``value``."""
        shape = tuple(shape)
        if shape == value.shape:
            return value
        return self.node("Reshape", [value, self.ints(shape)], shape, allowzero=int(0 in shape))

    def transpose(self, value: Val, perm: Sequence[int]) -> Val:
        """Transpose ``value``; where only axes of extent one move, by a reshape."""
        shape = tuple(value.shape[axis] for axis in perm)
        moved = [axis for axis in perm if value.shape[axis] != 1]
        if moved == sorted(moved):
            return self.reshape(value, shape)
        return self.node("Transpose", [value], shape, perm=list(perm))

    def slice(self, value: Val, ranges: Sequence[tuple[int, int]], steps: Sequence[int] | None = None) -> Val:
        """Take ``value[start:stop:step]`` on every axis, all non-negative."""
        steps = steps or (1,) * len(value.shape)
        axes = [
            axis
            for axis, ((start, stop), step) in enumerate(zip(ranges, steps, strict=True))
            if (start, stop) != (0, value.shape[axis]) or step != 1
        ]
        if not axes:
            return value
        shape = tuple(
            max(0, -((start - stop) // step)) for (start, stop), step in zip(ranges, steps, strict=True)
        )
        bounds = [self.ints([ranges[axis][side] for axis in axes]) for side in (0, 1)]
        rest = [self.ints(axes), self.ints([steps[axis] for axis in axes])]
        return self.node("Slice", [value, *bounds, *rest], shape)

    def flip(self, value: Val, axes: Sequence[int]) -> Val:
        """Reverse ``value`` along ``axes``."""
        axes = [axis for axis in axes if value.shape[axis] > 1]
        if not axes:
            return value
        starts, stops = [-1] * len(axes), [-value.shape[axis] - 1 for axis in axes]
        numbers = [self.ints(v) for v in (starts, stops, axes, [-1] * len(axes))]
        return self.node("Slice", [value, *numbers], value.shape)

    def pad(self, value: Val, pads: Sequence[tuple[int, int]], fill: float = 0.0) -> Val:
        """Add (before, after) elements of ``fill`` on every axis."""
        if not any(before or after for before, after in pads):
            return value
        shape = tuple(b + n + a for n, (b, a) in zip(value.shape, pads, strict=True))
        if prod(value.shape) == 0:
            return self.full(shape, fill, value.dtype)
        flat = [before for before, _ in pads] + [after for _, after in pads]
        return self.node("Pad", [value, self.ints(flat), self.scalar(fill, value)], shape)

    def take(self, value: Val, crop: Sequence[int], shape: Shape) -> Val:
        """Take the box of ``shape`` that starts at ``crop``; zeros where ``value`` has nothing."""
        ranges, pads = [], []
        for start, extent, have in zip(crop, shape, value.shape, strict=True):
            first, last = max(start, 0), min(start + extent, have)
            if last <= first:
                return self.full(shape, 0.0, value.dtype)
            ranges.append((first, last))
            pads.append((first - start, start + extent - last))
        return self.pad(self.slice(value, ranges), pads)

    def full(self, shape: Shape, fill: float, dtype: str) -> Val:
        """Fill a tensor with one number when the model runs: as a constant it would make the model large."""
        number = self.constant(np.asarray(fill, dtype=dtype))
        return self.node("Expand", [number, self.ints(shape)], tuple(shape))

    def matmul(self, a: Val, b: Val) -> Val:
        """Matrix product of the last two axes; the others broadcast."""
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return self.node("MatMul", [a, b], (*batch, a.shape[-2], b.shape[-1]))

    def sum(self, value: Val, axes: Sequence[int]) -> Val:
        """Sum over ``axes``, which are kept.

        Long sums are added up in two stages, as onnxruntime adds one by one: the error
        grows with the square root of their length then. Neighbouring axes are taken as one,
        since three axes with the reduced one in the middle are what its fast paths know.
        """
        shape = list(value.shape)
        for first, last in reversed(runs(axes)):
            length = prod(shape[first : last + 1])
            before, after = prod(shape[:first]), prod(shape[last + 1 :])
            part = inner_length(length)
            # No axis of extent one at the end: it would hide that the reduced one is the last.
            tail = (after,) if after > 1 else ()
            if 1 < part < length:
                value = self.reshape(value, (before, length // part, part, *tail))
                value = self._sum(value, 2)
                length //= part
            value = self._sum(self.reshape(value, (before, length, *tail)), 1)
            shape[first : last + 1] = [1] * (last + 1 - first)
            value = self.reshape(value, shape)
        return value

    def _sum(self, value: Val, axis: int) -> Val:
        shape = tuple(1 if i == axis else n for i, n in enumerate(value.shape))
        return self.node("ReduceSum", [value, self.ints([axis])], shape, keepdims=1)


def runs(axes: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring axes together, as (first, last).

    >>> runs((0, 2, 3))
    [(0, 0), (2, 3)]
    """
    found: list[tuple[int, int]] = []
    for axis in sorted(axes):
        if found and found[-1][1] == axis - 1:
            found[-1] = (found[-1][0], axis)
        else:
            found.append((axis, axis))
    return found


def inner_length(length: int) -> int:
    """The divisor of a long sum's length that is nearest above its square root; 1 for a short sum.

    >>> inner_length(4096 * 16), inner_length(100), inner_length(8191)
    (256, 1, 8191)
    """
    if length < 1024:
        return 1
    root = int(length**0.5)
    return next(n for n in range(max(root, 1), length + 1) if length % n == 0)
