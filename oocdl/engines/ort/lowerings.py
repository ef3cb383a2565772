"""The table of the onnxruntime engine: one record for each operator.

The records of elementwise operators are in ``pointwise``, those of reductions in ``reductions``. Lowerings of
convolutions and pooling are in ``windows``, that of Einsum is in ``einsum``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from oocdl.engines import numpy_attention, numpy_ctc, numpy_recurrent
from oocdl.engines.convolution import CONV, CONV_TRANSPOSE, CONV_WEIGHT_GRAD, Convolution, groups_of
from oocdl.engines.ort import ort_channels_last, ort_lookup, ort_pointwise, ort_reductions, ort_windows
from oocdl.engines.ort.emit import Emitter, Lowering, Val
from oocdl.engines.ort.nchwc import tiles
from oocdl.engines.ort.ort_einsum import einsum
from oocdl.engines.ort.ort_pointwise import left_to_numpy, left_to_sessions
from oocdl.engines.ort.ort_record import Bind, ChannelsLast, Into, Kernel, RunChannelsLast
from oocdl.fusion.blockwise import Blockwise
from oocdl.fusion.taps import weigh
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.operands import aligned, concat_axis, concat_pieces
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


def _resample(attrs: Mapping[str, Any]) -> Into:
    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        (x,), axis = args, int(attrs["axis"])
        weigh(x, axis % x.ndim, attrs["columns"], attrs["weights"], outs[0])

    return kernel


def _sequential(run: numpy_recurrent.Run) -> Bind:
    def bind(attrs: Mapping[str, Any]) -> Into:
        def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
            for out, result in zip(outs, run(list(map(aligned, args)), attrs), strict=True):
                out[...] = result

        return kernel

    return bind


def _unchanged(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [args[0]]


def _convolution(
    kind: Convolution,
    lowering: Lowering,
    run: RunChannelsLast,
    slots: Callable[[Instruction], Sequence[int]],
) -> Kernel:
    """A convolution; ``run`` and ``slots``: see ``ChannelsLast``."""
    tiled = ChannelsLast(run, slots, partial(_is_tiled_convolution, kind))
    unpadded = replace(left_to_sessions(lowering), takes_unpadded=True)
    return replace(unpadded, channels_last=tiled, convolution=kind)


def _is_tiled_convolution(kind: Convolution, item: Instruction) -> bool:
    large, small = item.operands[0].shape, kind.other_data(item)
    if kind.transposed:
        large, small = small, large
    return groups_of(item) == 1 and _is_tiled(item, large, small, kind.weights(item)[2:])


def _pooling(
    lowering: Lowering,
    kernel: ort_channels_last.Kernel,
    pooled: Callable[[Instruction], Shape],
    *,
    one_thread: bool,
) -> Kernel:
    """``pooled``: the shape of what has one place for each window."""

    def suits(item: Instruction) -> bool:
        large, small = item.operands[0].shape, pooled(item)
        # Of a gradient, a part may be wanted that does not end between two windows.
        whole = item.kernel_shapes[0] in (large, small)
        return whole and _is_tiled(item, large, small, item.attrs["kernel_shape"])

    tiled = ChannelsLast(ort_channels_last.on_numbered_axes(kernel), _all_slots, suits)
    unpadded = replace(left_to_sessions(lowering, one_thread=one_thread), takes_unpadded=True)
    return replace(unpadded, channels_last=tiled)


def _all_slots(item: Instruction) -> Sequence[int]:
    return [operand.slot for operand in item.operands] + list(item.outputs)


def _data_slots(item: Instruction) -> Sequence[int]:
    return item.operands[0].slot, item.outputs[0]


def _read_slots(item: Instruction) -> Sequence[int]:
    return [operand.slot for operand in item.operands]


def _are_volumes(item: Instruction) -> bool:
    return all(len(operand.shape) == 5 for operand in item.operands)


def _is_tiled(item: Instruction, large: Shape, small: Shape, kernel: Sequence[int]) -> bool:
    return item.dtypes[0] == "float32" and ort_channels_last.is_tiled(item, large, small, kernel)


def _moving(kernel: ort_channels_last.Kernel) -> ChannelsLast:
    return ChannelsLast(ort_channels_last.on_numbered_axes(kernel), _all_slots, _are_volumes)


KERNELS: Mapping[str, Kernel] = {
    **ort_pointwise.KERNELS,
    **ort_reductions.KERNELS,
    "Identity": left_to_sessions(_unchanged),
    "Transpose": left_to_sessions(_transpose),
    "Reshape": left_to_sessions(_reshape),
    "Expand": left_to_sessions(_expand),
    "Concat": replace(
        left_to_sessions(_concat), takes_unpadded=True, channels_last=_moving(ort_channels_last.concat)
    ),
    "Slice": replace(left_to_sessions(_slice), channels_last=_moving(ort_channels_last.cut)),
    "Reverse": left_to_sessions(_reverse),
    "Pad": left_to_sessions(_unchanged),  # the operand comes padded
    **{
        op: left_to_numpy(_sequential(run))
        for op, run in {**numpy_recurrent.KERNELS, **numpy_ctc.KERNELS, **numpy_attention.KERNELS}.items()
    },
    "Gather": left_to_sessions(ort_lookup.gather, indices=1),
    "GatherGrad": left_to_sessions(ort_lookup.gather_grad, one_thread=True, indices=0),
    "Top": left_to_sessions(ort_lookup.top),
    "LastAt": left_to_sessions(ort_lookup.last_at, one_thread=True, indices=0),
    "Einsum": left_to_sessions(einsum),
    "Resample": left_to_numpy(_resample),
    "Conv": _convolution(CONV, ort_windows.conv, tiles.run_conv, _data_slots),
    "ConvTranspose": _convolution(
        CONV_TRANSPOSE, ort_windows.conv_transpose, tiles.run_conv_transpose, _data_slots
    ),
    "ConvWeightGrad": _convolution(
        CONV_WEIGHT_GRAD, ort_windows.conv_weight_grad, tiles.run_conv_weight_grad, _read_slots
    ),
    "MaxPool": _pooling(
        ort_windows.max_pool,
        ort_channels_last.max_pool,
        lambda item: item.kernel_shapes[0],
        one_thread=False,
    ),
    "MaxPoolGrad": _pooling(
        ort_windows.max_pool_grad,
        ort_channels_last.max_pool_grad,
        lambda item: item.operands[1].shape,
        one_thread=True,
    ),
}
BLOCKWISE: Mapping[str, Blockwise[Array]] = {
    op: kernel.blocks for op, kernel in KERNELS.items() if kernel.blocks is not None
}
"""Operators that may be members of chains."""
