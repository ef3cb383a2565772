"""Operators that only move elements: Transpose, Reshape, Expand, Concat, Split, Slice, Reverse, Pad."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from oocdl.graph.ir.graph import Node, Shape, Value
from oocdl.graph.ir.index import AxisRule, Index, Plain, Shifted, Whole
from oocdl.graph.ir.op_rule import Builder, OpRule, Spec, no_cost
from oocdl.graph.ir.speed import Probe
from oocdl.ops._broadcast import (
    axis_of,
    broadcast,
    broadcast_axes,
    cure,
    extents_of,
    fail,
    letters,
    reduce_to,
    same_dtype,
    size,
)
from oocdl.ops._speed import MOVING, probe, rows_of, streaming


def _with(shape: Shape, axis: int, extent: int) -> Shape:
    return (*shape[:axis], extent, *shape[axis + 1 :])


def _along(node: Node, outputs: Sequence[Shape], *moved: tuple[int, int]) -> AxisRule:
    """Return the axis rule with all axes plain but one, on which operands are shifted by (offset, step)."""
    axis, axes = node.attrs["axis"], letters(outputs[0])
    before, letter, after = axes[:axis], f"a{axis}", axes[axis + 1 :]
    inputs = tuple((*before, Shifted(letter, *one), *after) for one in moved)
    return AxisRule(inputs, ((*before, Plain(letter), *after),), extents_of(outputs[0]))


# Transpose -----------------------------------------------------------------------------------


def _infer_transpose(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    shape, perm = inputs[0].shape, node.attrs["perm"]
    if sorted(perm) != list(range(len(shape))):
        fail(node, f"perm {list(perm)} does not permute a value of rank {len(shape)}")
    return [(tuple(shape[axis] for axis in perm), inputs[0].dtype)]


def _axes_transpose(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    operand = letters(inputs[0])
    return AxisRule((operand,), (tuple(operand[a] for a in node.attrs["perm"]),), extents_of(inputs[0]))


# Reshape, Expand -----------------------------------------------------------------------------


def _infer_reshape(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    shape = tuple(node.attrs["shape"])
    if size(shape) != inputs[0].size or min(shape, default=1) < 0:
        fail(node, f"shape {list(inputs[0].shape)} cannot be reshaped to {list(shape)}")
    return [(shape, inputs[0].dtype)]


def _axes_reshape(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    """Return the axis rule of a Reshape that factors cannot express: only unchanged axes may be cut."""
    before = list(accumulate(inputs[0], lambda a, b: a * b, initial=1))
    places = {(before[i], n): i for i, n in enumerate(inputs[0]) if n > 1}
    operand: list[Index | None] = [Whole(n) if n > 1 else None for n in inputs[0]]
    uncut: set[str] = set()
    product = 1
    for axis, extent in enumerate(outputs[0]):
        if (product, extent) in places:
            operand[places[product, extent]] = Plain(f"a{axis}")
        else:
            uncut.add(f"a{axis}")
        product *= extent
    return AxisRule((tuple(operand),), (letters(outputs[0]),), extents_of(outputs[0]), uncut=frozenset(uncut))


def _infer_expand(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    shape = tuple(node.attrs["shape"])
    if broadcast(node, [inputs[0].shape, shape]) != shape:
        fail(node, f"shape {list(inputs[0].shape)} does not broadcast to {list(shape)}")
    return [(shape, inputs[0].dtype)]


# Concat, Split -------------------------------------------------------------------------------


def _infer_concat(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    if not inputs:
        fail(node, "has no operands")
    axis = axis_of(node, inputs[0].shape)
    if len({(len(v.shape), _with(v.shape, axis, 0)) for v in inputs}) != 1:
        pair = max(v.shape for v in inputs), min(v.shape for v in inputs)
        fail(node, f"shapes {[list(v.shape) for v in inputs]} differ outside axis {axis}{cure(*pair)}")
    total = sum(value.shape[axis] for value in inputs)
    return [(_with(inputs[0].shape, axis, total), same_dtype(node, [value.dtype for value in inputs]))]


def _parts(build: Builder, value: str, axis: int, sizes: Sequence[int]) -> list[str]:
    marks = pairwise(accumulate(sizes, initial=0))
    return [build("Slice", value, axis=axis, start=start, stop=stop, step=1) for start, stop in marks]


def _axes_concat(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    offsets = accumulate((shape[node.attrs["axis"]] for shape in inputs[:-1]), initial=0)
    return _along(node, outputs, *((-offset, 1) for offset in offsets))


def _gradient_concat(build: Builder, node: Node, g: str) -> Sequence[str | None]:
    axis = node.attrs["axis"]
    return _parts(build, g, axis, [build.shape(name)[axis] for name in node.inputs])


def _infer_split(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, sizes, axis = inputs[0], node.attrs["sizes"], axis_of(node, inputs[0].shape)
    if sum(sizes) != x.shape[axis] or min(sizes, default=0) < 1:
        fail(node, f"sizes {list(sizes)} do not split an extent of {x.shape[axis]}")
    return [(_with(x.shape, axis, extent), x.dtype) for extent in sizes]


def _gradient_split(build: Builder, node: Node, *grads: str | None) -> Sequence[str | None]:
    parts = [grad or build.zeros_like(name) for name, grad in zip(node.outputs, grads, strict=True)]
    return [build("Concat", *parts, axis=node.attrs["axis"])]


# Slice, Reverse, Pad -------------------------------------------------------------------------


def _infer_slice(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, axis = inputs[0], axis_of(node, inputs[0].shape)
    start, stop, step = (node.attrs[name] for name in ("start", "stop", "step"))
    if not 0 <= start < stop <= x.shape[axis] or step < 1:
        fail(node, f"{start}:{stop}:{step} is not a non-empty part of an extent of {x.shape[axis]}")
    return [(_with(x.shape, axis, -((start - stop) // step)), x.dtype)]


def _gradient_slice(build: Builder, node: Node, g: str) -> Sequence[str | None]:
    """Pad with zeros around; for a step also between elements, by padding an axis of extent one."""
    axis, start, step = (node.attrs[name] for name in ("axis", "start", "step"))
    shape, extent = build.shape(g), build.shape(node.inputs[0])[axis]
    if step > 1:
        g = build("Reshape", g, shape=(*shape[: axis + 1], 1, *shape[axis + 1 :]))
        g = build("Pad", g, axis=axis + 1, before=0, after=step - 1)
        g = build("Reshape", g, shape=_with(shape, axis, shape[axis] * step))
        if shape[axis] * step > extent - start:
            g = build("Slice", g, axis=axis, start=0, stop=extent - start, step=1)
    after = extent - start - build.shape(g)[axis]
    if start or after:
        g = build("Pad", g, axis=axis, before=start, after=after)
    return [g]


def _infer_reverse(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    axis_of(node, inputs[0].shape)
    return [(inputs[0].shape, inputs[0].dtype)]


def _infer_pad(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, axis = inputs[0], axis_of(node, inputs[0].shape)
    before, after = node.attrs["before"], node.attrs["after"]
    if min(before, after) < 0:
        fail(node, f"pads {before} and {after} must not be negative; use Slice")
    return [(_with(x.shape, axis, before + x.shape[axis] + after), x.dtype)]


def _gradient_pad(build: Builder, node: Node, g: str) -> Sequence[str | None]:
    axis, start = node.attrs["axis"], node.attrs["before"]
    stop = start + build.shape(node.inputs[0])[axis]
    return [build("Slice", g, axis=axis, start=start, stop=stop, step=1)]


# Rules ---------------------------------------------------------------------------------------


def _probes_transpose(shape: Shape) -> Sequence[Probe]:
    _, many, deep, _, last = shape
    turned = probe("Transpose", (many, last, deep, last), perm=(0, 2, 1, 3))
    return [probe("Transpose", rows_of(shape), perm=(1, 0)), turned]


def _probes_reshape(shape: Shape) -> Sequence[Probe]:
    """Return a probe of extents without common refinement: any other Reshape is a renaming and never runs."""
    many, last = shape[1], shape[-1] // 2 * 2
    return [probe("Reshape", (6 * many * last, last), shape=(4 * many * last, last // 2 * 3))]


def _moving(op: str, **facts: Any) -> OpRule:
    return OpRule(op=op, flops=no_cost, scratch_elements=no_cost, **{"moves_only": True, **facts})


RULES: tuple[OpRule, ...] = (
    _moving(
        "Transpose", infer=_infer_transpose, axes=_axes_transpose, keeps_axes=False,
        gradient=lambda b, n, g: [b("Transpose", g, perm=tuple(np.argsort(n.attrs["perm"]).tolist()))],
        speed=streaming(MOVING, 13, _probes_transpose),
    ),
    _moving(
        "Reshape", infer=_infer_reshape, axes=_axes_reshape, keeps_axes=False,
        gradient=lambda b, n, g: [b("Reshape", g, shape=b.shape(n.inputs[0]))],
        speed=streaming(MOVING, 140, _probes_reshape),
    ),
    _moving(
        "Expand", infer=_infer_expand, axes=broadcast_axes,
        gradient=lambda b, n, g: [reduce_to(b, g, b.shape(n.inputs[0]))],
        speed=streaming(MOVING, 1000, lambda shape: [probe("Expand", (*shape[:2], 1, 1, 1), shape=shape)]),
    ),
    _moving(
        "Concat", infer=_infer_concat, gradient=_gradient_concat, axes=_axes_concat, joins=True,
        speed=streaming(MOVING, 22, lambda shape: [probe("Concat", shape, shape, axis=1)]),
    ),
    _moving(
        "Split", infer=_infer_split, gradient=_gradient_split,
        expand=lambda b, n: _parts(b, n.inputs[0], n.attrs["axis"], n.attrs["sizes"]),
    ),
    _moving(
        "Slice", infer=_infer_slice, gradient=_gradient_slice,
        axes=lambda node, _, outputs: _along(node, outputs, (node.attrs["start"], node.attrs["step"])),
        speed=streaming(
            MOVING, 180, lambda shape: [probe("Slice", shape, axis=2, start=0, stop=shape[2] // 2, step=1)]
        ),
    ),
    _moving(
        "Reverse", infer=_infer_reverse,
        gradient=lambda b, n, g: [b("Reverse", g, axis=n.attrs["axis"])],
        axes=lambda node, _, outputs: _along(node, outputs, (outputs[0][node.attrs["axis"]] - 1, -1)),
        speed=streaming(MOVING, None, lambda shape: [probe("Reverse", shape, axis=axis) for axis in (2, 4)]),
    ),
    _moving(
        "Pad", infer=_infer_pad, gradient=_gradient_pad, moves_only=False,
        axes=lambda node, _, outputs: _along(node, outputs, (-node.attrs["before"], 1)),
        speed=streaming(MOVING, 18, lambda shape: [probe("Pad", shape, axis=3, before=1, after=1)]),
    ),
)  # fmt: skip
