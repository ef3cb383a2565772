"""The table of the onnxruntime engine, a record each operator.

Elementwise operators are in ``numpy_into``, reductions in ``numpy_reduce``, windows in ``onnx_windows``,
Einsum in ``onnx_einsum``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from oocdl.engines.ort import channels_last, pointwise, reductions, windows
from oocdl.engines.ort.einsum import einsum
from oocdl.engines.ort.emit import Emitter, Lowering, Val
from oocdl.engines.ort.nchwc import tiles
from oocdl.engines.ort.pointwise import left_to_sessions
from oocdl.engines.ort.record import Kernel, Last
from oocdl.fusion.blockwise import Blockwise
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.operands import concat_axis, concat_pieces
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


def _gather(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [emit.node("Gather", args, instruction.kernel_shapes[0], axis=0)]


def _gather_grad(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    ids, dy = args
    shape = instruction.kernel_shapes[0]
    count, row = math.prod(ids.shape), math.prod(shape[1:])
    zeros = emit.full((shape[0], row), 0.0, dy.dtype)
    places, rows = emit.reshape(ids, (count, 1)), emit.reshape(dy, (count, row))
    table = emit.node("ScatterND", [zeros, places, rows], zeros.shape, reduction="add")
    return [emit.reshape(table, shape)]


def _resample(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    x = args[0]
    axis = int(instruction.attrs["axis"]) % len(x.shape)
    matrix = np.asarray(instruction.attrs["matrix"], dtype=x.dtype)
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    if after == 1:
        y = emit.matmul(emit.reshape(x, (before, x.shape[axis])), emit.constant(matrix.T))
    else:
        y = emit.matmul(emit.constant(matrix), emit.reshape(x, (before, x.shape[axis], after)))
    return [emit.reshape(y, instruction.kernel_shapes[0])]


def _unchanged(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [args[0]]


def _volume_kernel(lowering: Lowering, last: Last) -> Kernel:
    """A convolution."""
    return Kernel(lowering=lowering, blocks=None, last=last, volumes=True, one_thread=False)


def _all_slots(item: Instruction) -> Sequence[int]:
    return [operand.slot for operand in item.operands] + list(item.outputs)


def _data_slots(item: Instruction) -> Sequence[int]:
    return item.operands[0].slot, item.outputs[0]


def _read_slots(item: Instruction) -> Sequence[int]:
    return [operand.slot for operand in item.operands]


def _are_volumes(item: Instruction) -> bool:
    return all(len(operand.shape) == 5 for operand in item.operands)


def _tiles(item: Instruction) -> bool:
    return item.dtypes[0] == "float32" and channels_last.is_tiled(item)


def _moving(kernel: channels_last.Kernel) -> Last:
    return Last(channels_last.turned(kernel), _all_slots, _are_volumes)


def _pooling(kernel: channels_last.Kernel) -> Last:
    return Last(channels_last.turned(kernel), _all_slots, _tiles)


KERNELS: Mapping[str, Kernel] = {
    **pointwise.KERNELS,
    **reductions.KERNELS,
    "Identity": left_to_sessions(_unchanged),
    "Transpose": left_to_sessions(_transpose),
    "Reshape": left_to_sessions(_reshape),
    "Expand": left_to_sessions(_expand),
    "Concat": replace(left_to_sessions(_concat), last=_moving(channels_last.concat)),
    "Slice": replace(left_to_sessions(_slice), last=_moving(channels_last.cut)),
    "Pad": left_to_sessions(_unchanged),  # the operand comes padded
    "Gather": left_to_sessions(_gather),
    "GatherGrad": left_to_sessions(_gather_grad, one_thread=True),
    "Einsum": left_to_sessions(einsum),
    "Resample": left_to_sessions(_resample),
    "Conv": _volume_kernel(windows.conv, Last(tiles.run_conv, _data_slots, _tiles)),
    "ConvTranspose": _volume_kernel(
        windows.conv_transpose, Last(tiles.run_conv_transpose, _data_slots, _tiles)
    ),
    "ConvWeightGrad": _volume_kernel(
        windows.conv_weight_grad, Last(tiles.run_conv_weight_grad, _read_slots, _tiles)
    ),
    "MaxPool": replace(left_to_sessions(windows.max_pool), last=_pooling(channels_last.max_pool)),
    "MaxPoolGrad": replace(
        left_to_sessions(windows.max_pool_grad, one_thread=True),
        last=_pooling(channels_last.max_pool_grad),
    ),
}
BLOCKWISE: Mapping[str, Blockwise[Array]] = {
    op: kernel.blocks for op, kernel in KERNELS.items() if kernel.blocks is not None
}
"""Operators that may be members of chains."""
LOWERINGS: Mapping[str, Lowering] = {op: kernel.lowering for op, kernel in KERNELS.items()}
