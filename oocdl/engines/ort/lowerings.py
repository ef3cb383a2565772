"""The table of the onnxruntime engine: one record for each operator.

The records of elementwise operators and reductions are in ``ort_pointwise``. Lowerings of convolutions and
pooling are in ``ort_windows``, those of lookups in ``ort_lookup``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from oocdl.engines import numpy_attention, numpy_ctc, numpy_recurrent
from oocdl.engines.convolution import CONV, CONV_TRANSPOSE, CONV_WEIGHT_GRAD, Convolution
from oocdl.engines.ort import ort_channels_last, ort_lookup, ort_pointwise, ort_windows
from oocdl.engines.ort.block_volumes import in_blocks
from oocdl.engines.ort.emit import Emitter, Lowering, Val
from oocdl.engines.ort.ort_channels_last import is_tiled, with_channels_last
from oocdl.engines.ort.ort_record import Into, Kernel, Orders, by_numpy, left_to_sessions
from oocdl.fusion.grouping import Blockwise
from oocdl.fusion.taps import weigh
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.operands import aligned, classify, concat_axis, concat_pieces
from oocdl.graph.ir.program import Instruction


def _transpose(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [emit.transpose(args[0], instruction.attrs["perm"])]


def _reshape(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [emit.reshape(args[0], instruction.kernel_shapes[0])]


def _expand(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    shape = instruction.kernel_shapes[0]
    if args[0].shape == shape:
        return [args[0]]
    return [emit.node("Expand", [args[0], emit.ints(shape)], shape)]


def _concat(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    axis = concat_axis(instruction)
    pieces = []
    for index in concat_pieces(instruction):
        pads = instruction.operands[index].pads or ((0, 0),) * len(args[index].shape)
        other = [(0, 0) if i == axis else pair for i, pair in enumerate(pads)]
        pieces.append(emit.pad(args[index], other, instruction.fill))
    if len(pieces) == 1:
        return pieces
    return [emit.node("Concat", pieces, instruction.kernel_shapes[0], axis=axis)]


def _slice(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    # The operand holds just what is wanted, from the first element to the last.
    x = args[0]
    steps = [1] * len(x.shape)
    steps[int(instruction.attrs["axis"]) % len(x.shape)] = int(instruction.attrs.get("step", 1))
    return [emit.slice(x, [(0, extent) for extent in x.shape], steps)]


def _reverse(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [emit.flip(args[0], [int(instruction.attrs["axis"])])]


def _sum_lone(emit: Emitter, value: Val, term: str, kept: str) -> Val:
    """The operand with the letters that nothing else has summed away."""
    lone = [axis for axis, letter in enumerate(term) if letter not in kept]
    summed = emit.sum(value, lone)
    return emit.reshape(summed, [n for axis, n in enumerate(value.shape) if axis not in lone])


def _grouped(emit: Emitter, value: Val, term: str, *groups: str) -> Val:
    """The operand with one axis a group of letters."""
    ordered = emit.transpose(value, [term.index(letter) for letter in "".join(groups)])
    extents = dict(zip(term, value.shape, strict=True))
    return emit.reshape(ordered, [prod(extents[x] for x in group) for group in groups])


def _einsum(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """Einsum of two operands as one matrix product between reshapes and transposes; see ``Letters``.

    onnxruntime's own Einsum is less than half as fast (`docs/explanation/kernel-measurements.md`, section 2).
    """
    letters = classify(instruction.attrs["equation"])
    left, right = letters.left_kept, letters.right_kept
    a = _sum_lone(emit, args[0], letters.left, left)
    b = _sum_lone(emit, args[1], letters.right, right)
    batch = (letters.batch,) if letters.batch else ()
    if letters.inner:
        first = _grouped(emit, a, left, *batch, letters.rows, letters.inner)
        second = _grouped(emit, b, right, *batch, letters.inner, letters.columns)
        product = emit.matmul(first, second)
    else:
        first = _grouped(emit, a, left, *batch, letters.rows, "")
        product = emit("Mul", first, _grouped(emit, b, right, *batch, "", letters.columns))
    extents = dict(zip(letters.out, instruction.kernel_shapes[0], strict=True))
    ordered = letters.batch + letters.rows + letters.columns
    product = emit.reshape(product, [extents[letter] for letter in ordered])
    return [emit.transpose(product, [ordered.index(letter) for letter in letters.out])]


def _top(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    # ONNX takes the lower index of equal ones, too.
    shape, attrs = instruction.kernel_shapes[0], instruction.attrs
    k, specs = emit.ints([int(attrs["k"])]), [(shape, args[0].dtype), (shape, "int64")]
    axis, largest = int(attrs["axis"]), int(attrs["largest"])
    return [emit.many("TopK", [args[0], k], specs, axis=axis, largest=largest)[1]]


def _unchanged(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [args[0]]


def _resample(item: Instruction) -> Into:
    axis, columns, weights = (item.attrs[name] for name in ("axis", "columns", "weights"))
    return lambda args, outs: weigh(args[0], int(axis) % args[0].ndim, columns, weights, outs[0])


def _sequential(run: numpy_recurrent.Run) -> Kernel:
    def bind(item: Instruction) -> Into:
        def kernel(args: list[Array], outs: list[Array]) -> None:
            for out, result in zip(outs, run(list(map(aligned, args)), item.attrs), strict=True):
                out[...] = result

        return kernel

    return by_numpy(bind)


def _with_channels_last(
    lowering: Lowering,
    kernel: ort_channels_last.Kernel,
    suits: Callable[[Instruction], bool] = lambda item: True,
) -> Kernel:
    """An operator that ``kernel`` computes of volumes with their channels last where that ``suits``."""

    def on_arrays(item: Instruction, orders: Orders) -> Into | None:
        found = with_channels_last(kernel, item, orders, None)
        return found if found is not None and suits(item) else None

    return replace(left_to_sessions(lowering), on_arrays=on_arrays)


def _pooling(
    lowering: Lowering, kernel: ort_channels_last.Kernel, pooled: Callable[[Instruction], Shape]
) -> Kernel:
    """``pooled``: the shape of what has one place for each window."""

    def suits(item: Instruction) -> bool:
        large, small = item.operands[0].shape, pooled(item)
        # Of a gradient, a part may be wanted that does not end between two windows.
        return item.kernel_shapes[0] in (large, small) and is_tiled(
            item, large, small, item.attrs["kernel_shape"]
        )

    return replace(_with_channels_last(lowering, kernel, suits), takes_unpadded=True)


def _convolution(kind: Convolution, lowering: Lowering, tiled: ort_channels_last.Kernel) -> Kernel:
    """A convolution; ``tiled`` computes it where windows lie side by side."""

    def on_arrays(item: Instruction, orders: Orders) -> Into | None:
        found = in_blocks(kind, item, orders)
        if found is not None:
            return found
        found = with_channels_last(tiled, item, orders, kind)
        large, small = item.operands[0].shape, kind.other_data(item)
        if kind.transposed:
            large, small = small, large
        return found if found is not None and is_tiled(item, large, small, kind.weights(item)[2:]) else None

    made = replace(left_to_sessions(lowering), on_arrays=on_arrays, takes_unpadded=True)
    return replace(made, convolution=kind)


KERNELS: Mapping[str, Kernel] = {
    **ort_pointwise.KERNELS,
    "Identity": left_to_sessions(_unchanged),
    "Pad": left_to_sessions(_unchanged),  # the operand comes padded
    "Transpose": left_to_sessions(_transpose),
    "Reshape": left_to_sessions(_reshape),
    "Expand": left_to_sessions(_expand),
    "Reverse": left_to_sessions(_reverse),
    "Concat": replace(_with_channels_last(_concat, ort_channels_last.concat), takes_unpadded=True),
    "Slice": _with_channels_last(_slice, ort_channels_last.cut),
    "Gather": replace(left_to_sessions(ort_lookup.gather), on_arrays=ort_lookup.take, indices=1),
    "GatherGrad": replace(left_to_sessions(ort_lookup.gather_grad), indices=0),
    "LastAt": replace(left_to_sessions(ort_lookup.last_at), indices=0),
    **{
        op: _sequential(run)
        for op, run in {**numpy_recurrent.KERNELS, **numpy_ctc.KERNELS, **numpy_attention.KERNELS}.items()
    },
    "Resample": by_numpy(_resample),
    "Top": left_to_sessions(_top),
    "Einsum": left_to_sessions(_einsum),
    "Conv": _convolution(CONV, ort_windows.conv, ort_channels_last.convolve),
    "ConvTranspose": _convolution(CONV_TRANSPOSE, ort_windows.conv_transpose, ort_channels_last.spread),
    "ConvWeightGrad": _convolution(
        CONV_WEIGHT_GRAD, ort_windows.conv_weight_grad, ort_channels_last.weight_gradient
    ),
    "MaxPool": _pooling(ort_windows.max_pool, ort_channels_last.max_pool, lambda item: item.kernel_shapes[0]),
    "MaxPoolGrad": _pooling(
        ort_windows.max_pool_grad, ort_channels_last.max_pool_grad, lambda item: item.operands[1].shape
    ),
}
BLOCKWISE: Mapping[str, Blockwise[Array]] = {
    op: kernel.blocks for op, kernel in KERNELS.items() if kernel.blocks is not None
}
"""Operators that may be members of chains."""
