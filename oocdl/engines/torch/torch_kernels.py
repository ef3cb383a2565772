"""The table of PyTorch kernels: one record for each operator, on ONNX axes.

Operands come cropped, reshaped and padded, but for kernels that take them unpadded. Kernels of
convolutions and pooling are in ``conv.dispatch``, those of elementwise operators and reductions in
``pointwise``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from oocdl.engines.convolution import CONV, CONV_TRANSPOSE, CONV_WEIGHT_GRAD, Convolution
from oocdl.engines.torch import kernel_scratch, torch_lookup, torch_pointwise
from oocdl.engines.torch import landing as landings
from oocdl.engines.torch.conv import dispatch as windows
from oocdl.engines.torch.conv.dispatch import pad
from oocdl.engines.torch.linear import einsum, resample, resample_by_gathers
from oocdl.engines.torch.sequences import torch_attention, torch_ctc, torch_recurrent
from oocdl.engines.torch.torch_pooling import DEVICE_CHUNK_ELEMENTS
from oocdl.engines.torch.torch_record import Kernel, Landing, Result, Run
from oocdl.graph.ir.operands import concat_axis, concat_pieces
from oocdl.graph.ir.program import Instruction


def _same(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [args[0]]


def _transpose(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [args[0].permute(tuple(instruction.attrs["perm"]))]


def _reshape(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [args[0].reshape(instruction.kernel_shapes[0])]


def _expand(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [args[0].expand(instruction.kernel_shapes[0])]


def _concat(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    axis = concat_axis(instruction)
    pieces = []
    for index in concat_pieces(instruction):
        pads = instruction.operands[index].pads
        if pads is not None:
            other = tuple((0, 0) if i == axis else pair for i, pair in enumerate(pads))
            pieces.append(pad(args[index], other, instruction.fill))
        else:
            pieces.append(args[index])
    return [pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=axis)]


def _slice(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    # The operand holds just what is wanted, from the first element to the last.
    step = int(instruction.attrs.get("step", 1))
    axis = int(instruction.attrs["axis"]) % args[0].dim()
    index = [slice(None)] * args[0].dim()
    index[axis] = slice(None, None, step)
    return [args[0][tuple(index)]]


def _reverse(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [args[0].flip(int(instruction.attrs["axis"]))]


def _plain(run: Run, result: Result) -> Kernel:
    """A kernel that is the same on all devices, and takes the scratch that its operator's rule says."""
    return Kernel(
        run=run,
        on_device=run,
        takes_unpadded=False,
        convolution=None,
        result=result,
        planes=False,
        scratch=kernel_scratch.by_rule,
        device_scratch=kernel_scratch.no_more,
        blocks=None,
        landing=None,
    )


def _convolution(kind: Convolution, run: Run, on_device: Run, landing: Landing | None) -> Kernel:
    return Kernel(
        run=run,
        on_device=on_device,
        takes_unpadded=True,
        convolution=kind,
        result=Result.OWN,
        planes=not kind.makes_weights,  # of weights one copy is enough
        scratch=partial(kernel_scratch.convolution, kind),
        device_scratch=partial(kernel_scratch.device_convolution, kind),
        blocks=None,
        landing=landing,
    )


def _pooling(run: Run, on_device: Run, scratch: kernel_scratch.Scratch, landing: Landing | None) -> Kernel:
    return Kernel(
        run=run,
        on_device=on_device,
        takes_unpadded=True,
        convolution=None,
        result=Result.OWN,
        planes=True,
        scratch=scratch,
        device_scratch=kernel_scratch.device_pooling,
        blocks=None,
        landing=landing,
    )


KERNELS: Mapping[str, Kernel] = {
    **torch_pointwise.KERNELS,
    "Identity": _plain(_same, Result.VIEW),
    "Transpose": _plain(_transpose, Result.VIEW),
    "Reshape": _plain(_reshape, Result.EITHER),
    "Expand": _plain(_expand, Result.VIEW),
    "Concat": replace(_plain(_concat, Result.EITHER), takes_unpadded=True),
    "Slice": _plain(_slice, Result.VIEW),
    "Reverse": _plain(_reverse, Result.OWN),
    "Pad": _plain(_same, Result.VIEW),  # the operand comes padded
    **{op: _plain(run, Result.OWN) for op, run in torch_recurrent.KERNELS.items()},
    **{op: _plain(run, Result.OWN) for op, run in torch_ctc.KERNELS.items()},
    **{op: _plain(run, Result.OWN) for op, run in torch_attention.KERNELS.items()},
    "Gather": _plain(torch_lookup.gather, Result.EITHER),
    "GatherGrad": replace(
        _plain(torch_lookup.gather_grad, Result.EITHER), on_device=torch_lookup.gather_grad_in_order
    ),
    "Top": _plain(torch_lookup.top, Result.OWN),
    "LastAt": _plain(torch_lookup.last_at, Result.OWN),
    "Einsum": _plain(einsum, Result.EITHER),
    "Resample": replace(_plain(resample, Result.OWN), on_device=resample_by_gathers, planes=True),
    "Conv": _convolution(
        CONV,
        windows.conv,
        partial(windows.conv, tuned=False),
        Landing(windows.conv, partial(landings.convolution, CONV)),
    ),
    "ConvTranspose": _convolution(
        CONV_TRANSPOSE,
        windows.conv_transpose,
        partial(windows.conv_transpose, tuned=False),
        Landing(windows.conv_transpose, partial(landings.convolution, CONV_TRANSPOSE)),
    ),
    "ConvWeightGrad": _convolution(
        CONV_WEIGHT_GRAD,
        windows.conv_weight_grad,
        partial(windows.conv_weight_grad, tuned=False),
        None,
    ),
    "MaxPool": _pooling(
        windows.pool,
        partial(windows.pool, chunk=DEVICE_CHUNK_ELEMENTS),
        kernel_scratch.pooling,
        None,
    ),
    "MaxPoolGrad": _pooling(
        windows.pool_grad,
        partial(windows.pool_grad, chunk=DEVICE_CHUNK_ELEMENTS),
        kernel_scratch.pooling_gradient,
        Landing(windows.pool_grad, landings.pooling),
    ),
}
