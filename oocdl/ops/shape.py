"""Operators that only move elements: Transpose, Reshape, Expand, Concat, Split, Slice, Reverse, Pad."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from oocdl.graph.ir.graph import Node, Shape, Value
from oocdl.graph.ir.index import AxisRule, Index, Plain, Shifted, Whole
from oocdl.graph.ir.op_rule import Builder, OpRule, Spec, no_scratch
from oocdl.graph.ir.speed import Probe
from oocdl.ops._broadcast import (
    broadcast,
    broadcast_axes,
    fail,
    plain,
    reduce_to,
    same_dtype,
    size,
)
from oocdl.ops._speed import MOVING, rows_of, streaming


def _no_flops(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return 0


def _axis(node: Node, shape: Shape) -> int:
    """Return the checked attribute ``axis``."""
    axis = int(node.attrs["axis"])
    if not 0 <= axis < len(shape):
        fail(node, f"axis {axis} is not an axis of a value of rank {len(shape)}")
    return axis


def _with(shape: Shape, axis: int, extent: int) -> Shape:
    """Return ``shape`` with another extent on one axis."""
    return (*shape[:axis], extent, *shape[axis + 1 :])


def _along(axis: int, shape: Shape, moved: Sequence[Shifted]) -> AxisRule:
    """Return the axis rule with all axes plain but one, on which each operand is shifted."""
    others: list[Index | None] = [plain(f"a{place}", n) for place, n in enumerate(shape)]
    out = tuple(
        Plain(f"a{place}") if place == axis else plain(f"a{place}", n) for place, n in enumerate(shape)
    )
    return AxisRule(
        inputs=tuple((*others[:axis], index, *others[axis + 1 :]) for index in moved),
        outputs=(out,),
        extents={f"a{place}": extent for place, extent in enumerate(shape)},
    )


# Transpose -----------------------------------------------------------------------------------


def _infer_transpose(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    shape, perm = inputs[0].shape, node.attrs["perm"]
    if sorted(perm) != list(range(len(shape))):
        fail(node, f"perm {list(perm)} does not permute a value of rank {len(shape)}")
    return [(tuple(shape[axis] for axis in perm), inputs[0].dtype)]


def _axes_transpose(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    out = tuple(plain(f"a{axis}", inputs[0][axis]) for axis in node.attrs["perm"])
    return AxisRule(
        inputs=(tuple(plain(f"a{axis}", extent) for axis, extent in enumerate(inputs[0])),),
        outputs=(out,),
        extents={f"a{axis}": extent for axis, extent in enumerate(inputs[0])},
    )


def _gradient_transpose(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    if grads[0] is None:
        return [None]
    perm = node.attrs["perm"]
    return [build("Transpose", grads[0], perm=tuple(perm.index(i) for i in range(len(perm))))]


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
    out: list[Plain | None] = []
    uncut: set[str] = set()
    product = 1
    for axis, extent in enumerate(outputs[0]):
        out.append(plain(f"a{axis}", extent))
        if (product, extent) in places:
            operand[places[product, extent]] = Plain(f"a{axis}")
        else:
            uncut.add(f"a{axis}")
        product *= extent
    return AxisRule(
        inputs=(tuple(operand),),
        outputs=(tuple(out),),
        extents={f"a{axis}": extent for axis, extent in enumerate(outputs[0])},
        uncut=frozenset(uncut),
    )


def _gradient_reshape(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    if grads[0] is None:
        return [None]
    return [build("Reshape", grads[0], shape=build.shape(node.inputs[0]))]


def _infer_expand(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    shape = tuple(node.attrs["shape"])
    if broadcast(node, [inputs[0].shape, shape]) != shape:
        fail(node, f"shape {list(inputs[0].shape)} does not broadcast to {list(shape)}")
    return [(shape, inputs[0].dtype)]


def _gradient_expand(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    if grads[0] is None:
        return [None]
    return [reduce_to(build, grads[0], build.shape(node.inputs[0]))]


# Concat, Split -------------------------------------------------------------------------------


def _infer_concat(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    if not inputs:
        fail(node, "has no operands")
    axis = _axis(node, inputs[0].shape)
    if len({(len(v.shape), _with(v.shape, axis, 0)) for v in inputs}) != 1:
        fail(node, f"shapes {[list(v.shape) for v in inputs]} differ outside axis {axis}")
    total = sum(value.shape[axis] for value in inputs)
    dtype = same_dtype(node, [value.dtype for value in inputs])
    return [(_with(inputs[0].shape, axis, total), dtype)]


def _axes_concat(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    axis = node.attrs["axis"]
    offsets = accumulate((shape[axis] for shape in inputs[:-1]), initial=0)
    return _along(axis, outputs[0], [Shifted(f"a{axis}", -offset) for offset in offsets])


def _gradient_concat(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    if grads[0] is None:
        return [None] * len(node.inputs)
    axis, start = node.attrs["axis"], 0
    found: list[str | None] = []
    for name in node.inputs:
        stop = start + build.shape(name)[axis]
        found.append(build("Slice", grads[0], axis=axis, start=start, stop=stop, step=1))
        start = stop
    return found


def _infer_split(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, sizes = inputs[0], node.attrs["sizes"]
    axis = _axis(node, x.shape)
    if sum(sizes) != x.shape[axis] or min(sizes, default=0) < 1:
        fail(node, f"sizes {list(sizes)} do not split an extent of {x.shape[axis]}")
    return [(_with(x.shape, axis, extent), x.dtype) for extent in sizes]


def _expand_split(build: Builder, node: Node) -> Sequence[str]:
    axis = node.attrs["axis"]
    marks = list(accumulate(node.attrs["sizes"], initial=0))
    return [
        build("Slice", node.inputs[0], axis=axis, start=start, stop=stop, step=1)
        for start, stop in pairwise(marks)
    ]


def _gradient_split(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    if all(grad is None for grad in grads):
        return [None]
    parts = [
        build.zeros_like(name) if grad is None else grad
        for name, grad in zip(node.outputs, grads, strict=True)
    ]
    return [build("Concat", *parts, axis=node.attrs["axis"])]


# Slice, Reverse, Pad -------------------------------------------------------------------------


def _infer_slice(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, attrs = inputs[0], node.attrs
    axis = _axis(node, x.shape)
    start, stop, step = attrs["start"], attrs["stop"], attrs["step"]
    if not 0 <= start < stop <= x.shape[axis] or step < 1:
        fail(node, f"{start}:{stop}:{step} is not a non-empty part of an extent of {x.shape[axis]}")
    return [(_with(x.shape, axis, -((start - stop) // step)), x.dtype)]


def _axes_slice(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    axis = node.attrs["axis"]
    index = Shifted(f"a{axis}", node.attrs["start"], node.attrs["step"])
    return _along(axis, outputs[0], [index])


def _gradient_slice(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    """Pad with zeros around; for a step also between elements, by padding an axis of extent one."""
    grad = grads[0]
    if grad is None:
        return [None]
    axis, start, step = (node.attrs[name] for name in ("axis", "start", "step"))
    shape, extent = build.shape(grad), build.shape(node.inputs[0])[axis]
    if step > 1:
        grad = build("Reshape", grad, shape=(*shape[: axis + 1], 1, *shape[axis + 1 :]))
        grad = build("Pad", grad, axis=axis + 1, before=0, after=step - 1)
        grad = build("Reshape", grad, shape=_with(shape, axis, shape[axis] * step))
        if shape[axis] * step > extent - start:
            grad = build("Slice", grad, axis=axis, start=0, stop=extent - start, step=1)
    after = extent - start - build.shape(grad)[axis]
    if start or after:
        grad = build("Pad", grad, axis=axis, before=start, after=after)
    return [grad]


def _infer_reverse(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    _axis(node, inputs[0].shape)
    return [(inputs[0].shape, inputs[0].dtype)]


def _axes_reverse(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    axis = node.attrs["axis"]
    return _along(axis, outputs[0], [Shifted(f"a{axis}", outputs[0][axis] - 1, -1)])


def _gradient_reverse(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    return [None if grads[0] is None else build("Reverse", grads[0], axis=node.attrs["axis"])]


def _infer_pad(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, before, after = inputs[0], node.attrs["before"], node.attrs["after"]
    axis = _axis(node, x.shape)
    if min(before, after) < 0:
        fail(node, f"pads {before} and {after} must not be negative; use Slice")
    return [(_with(x.shape, axis, before + x.shape[axis] + after), x.dtype)]


def _axes_pad(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    axis = node.attrs["axis"]
    return _along(axis, outputs[0], [Shifted(f"a{axis}", -node.attrs["before"])])


def _gradient_pad(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    if grads[0] is None:
        return [None]
    axis, start = node.attrs["axis"], node.attrs["before"]
    stop = start + build.shape(node.inputs[0])[axis]
    return [build("Slice", grads[0], axis=axis, start=start, stop=stop, step=1)]


# Speed ---------------------------------------------------------------------------------------


def _probes_transpose(shape: Shape) -> Iterator[Probe]:
    _, many, deep, _, last = shape
    yield Probe("Transpose", ((rows_of(shape), "float32"),), {"perm": (1, 0)})
    yield Probe("Transpose", (((many, last, deep, last), "float32"),), {"perm": (0, 2, 1, 3)})


def _probes_reshape(shape: Shape) -> Iterator[Probe]:
    """Yield a probe of extents without common refinement: any other Reshape is a renaming and never runs."""
    many, last = shape[1], shape[-1] // 2 * 2
    target = (4 * many * last, last // 2 * 3)
    yield Probe("Reshape", (((6 * many * last, last), "float32"),), {"shape": target})


def _probes_expand(shape: Shape) -> Iterator[Probe]:
    yield Probe("Expand", (((*shape[:2], 1, 1, 1), "float32"),), {"shape": shape})


def _probes_concat(shape: Shape) -> Iterator[Probe]:
    yield Probe("Concat", ((shape, "float32"), (shape, "float32")), {"axis": 1})


def _probes_slice(shape: Shape) -> Iterator[Probe]:
    half = {"axis": 2, "start": 0, "stop": shape[2] // 2, "step": 1}
    yield Probe("Slice", ((shape, "float32"),), half)


def _probes_reverse(shape: Shape) -> Iterator[Probe]:
    for axis in (2, 4):
        yield Probe("Reverse", ((shape, "float32"),), {"axis": axis})


def _probes_pad(shape: Shape) -> Iterator[Probe]:
    yield Probe("Pad", ((shape, "float32"),), {"axis": 3, "before": 1, "after": 1})


RULES: tuple[OpRule, ...] = (
    OpRule(
        op="Transpose",
        infer=_infer_transpose,
        gradient=_gradient_transpose,
        axes=_axes_transpose,
        speed=streaming(MOVING, 13, _probes_transpose),
        flops=_no_flops,
        scratch_elements=no_scratch,
        moves_only=True,
        keeps_axes=False,
    ),
    OpRule(
        op="Reshape",
        infer=_infer_reshape,
        gradient=_gradient_reshape,
        axes=_axes_reshape,
        speed=streaming(MOVING, 140, _probes_reshape),
        flops=_no_flops,
        scratch_elements=no_scratch,
        moves_only=True,
        keeps_axes=False,
    ),
    OpRule(
        op="Expand",
        infer=_infer_expand,
        gradient=_gradient_expand,
        axes=broadcast_axes,
        speed=streaming(MOVING, 1000, _probes_expand),
        flops=_no_flops,
        scratch_elements=no_scratch,
        moves_only=True,
    ),
    OpRule(
        op="Concat",
        infer=_infer_concat,
        gradient=_gradient_concat,
        axes=_axes_concat,
        speed=streaming(MOVING, 22, _probes_concat),
        flops=_no_flops,
        scratch_elements=no_scratch,
        joins=True,
        moves_only=True,
    ),
    OpRule(
        op="Split",
        infer=_infer_split,
        gradient=_gradient_split,
        expand=_expand_split,
        flops=_no_flops,
        scratch_elements=no_scratch,
        moves_only=True,
    ),
    OpRule(
        op="Slice",
        infer=_infer_slice,
        gradient=_gradient_slice,
        axes=_axes_slice,
        speed=streaming(MOVING, 180, _probes_slice),
        flops=_no_flops,
        scratch_elements=no_scratch,
        moves_only=True,
    ),
    OpRule(
        op="Reverse",
        infer=_infer_reverse,
        gradient=_gradient_reverse,
        axes=_axes_reverse,
        speed=streaming(MOVING, None, _probes_reverse),
        flops=_no_flops,
        scratch_elements=no_scratch,
        moves_only=True,
    ),
    OpRule(
        op="Pad",
        infer=_infer_pad,
        gradient=_gradient_pad,
        axes=_axes_pad,
        speed=streaming(MOVING, 18, _probes_pad),
        flops=_no_flops,
        scratch_elements=no_scratch,
    ),
)
