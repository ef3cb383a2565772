"""The table of PyTorch kernels: one record for each operator, on ONNX axes.

Operands come cropped, reshaped and padded, but for kernels that take them unpadded. Kernels of
convolutions and pooling are in ``conv.dispatch``, those of elementwise operators and reductions in
``pointwise``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from oocdl.engines.convolution import CONV, CONV_TRANSPOSE, CONV_WEIGHT_GRAD, Convolution
from oocdl.engines.torch import kernel_scratch, torch_lookup, torch_pointwise
from oocdl.engines.torch.conv import conv_scratch
from oocdl.engines.torch.conv import dispatch as windows
from oocdl.engines.torch.conv.dispatch import pad
from oocdl.engines.torch.linear import einsum, resample, resample_by_gathers
from oocdl.engines.torch.sequences import torch_attention, torch_ctc, torch_recurrent
from oocdl.engines.torch.torch_pooling import DEVICE_CHUNK_ELEMENTS
from oocdl.engines.torch.torch_record import Kernel, Result, Run
from oocdl.graph.ir.operands import concat_axis, concat_pieces, crop_of
from oocdl.graph.ir.program import Instruction, padded_shape
from oocdl.graph.transforms.channels_last import SPATIAL_RANKS


def _concat(args: list[Tensor], item: Instruction) -> list[Tensor]:
    axis, pieces = concat_axis(item), []
    for index in concat_pieces(item):
        pads = item.operands[index].pads or ((0, 0),) * args[index].dim()
        other = [(0, 0) if i == axis else pair for i, pair in enumerate(pads)]
        pieces.append(pad(args[index], other, item.fill))
    return [pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=axis)]


def _slice(args: list[Tensor], item: Instruction) -> list[Tensor]:
    # The operand holds just what is wanted, from the first element to the last.
    axis = int(item.attrs["axis"]) % args[0].dim()
    return [args[0][(slice(None),) * axis + (slice(None, None, int(item.attrs.get("step", 1))),)]]


def _convolution(kind: Convolution, run: Run) -> Kernel:
    return Kernel(
        run,
        Result.OWN,
        on_device=partial(run, tuned=False),
        takes_unpadded=True,
        convolution=kind,
        planes=not kind.makes_weights,  # of weights one copy is enough
        scratch=partial(conv_scratch.convolution, kind),
        device_scratch=partial(conv_scratch.device_convolution, kind),
        lands=None if kind.makes_weights else partial(conv_scratch.lands, kind),
    )


def _pooling(run: Run, lands: Callable[[Instruction], bool] | None) -> Kernel:
    return Kernel(
        run,
        Result.OWN,
        on_device=partial(run, chunk=DEVICE_CHUNK_ELEMENTS),
        takes_unpadded=True,
        planes=True,
        scratch=kernel_scratch.pooling,
        device_scratch=kernel_scratch.device_pooling,
        lands=lands,
    )


def _pooling_lands(item: Instruction) -> bool:
    """Whether all of a pooling's gradient is wanted, and channels lie last."""
    made = item.kernel_shapes[0]
    whole = made == padded_shape(item.operands[0]) and not any(crop_of(item))
    return whole and len(made) in SPATIAL_RANKS and made[1] > 1


KERNELS: Mapping[str, Kernel] = {
    **torch_pointwise.KERNELS,
    "Identity": Kernel(lambda args, item: args, Result.VIEW),
    "Transpose": Kernel(lambda args, item: [args[0].permute(tuple(item.attrs["perm"]))], Result.VIEW),
    "Reshape": Kernel(lambda args, item: [args[0].reshape(item.kernel_shapes[0])], Result.EITHER),
    "Expand": Kernel(lambda args, item: [args[0].expand(item.kernel_shapes[0])], Result.VIEW),
    "Concat": Kernel(_concat, Result.EITHER, takes_unpadded=True),
    "Slice": Kernel(_slice, Result.VIEW),
    "Reverse": Kernel(lambda args, item: [args[0].flip(int(item.attrs["axis"]))], Result.OWN),
    "Pad": Kernel(lambda args, item: args, Result.VIEW),  # the operand comes padded
    **{
        op: Kernel(run, Result.OWN, placed=torch_recurrent.PLACED[op])
        for op, run in torch_recurrent.KERNELS.items()
    },
    **{op: Kernel(run, Result.OWN) for op, run in torch_attention.KERNELS.items()},
    "Ctc": Kernel(torch_ctc.ctc, Result.OWN),
    "CtcGrad": Kernel(torch_ctc.ctc_grad, Result.OWN, on_host=True),
    "Gather": Kernel(torch_lookup.gather, Result.EITHER),
    "GatherGrad": Kernel(
        torch_lookup.gather_grad, Result.EITHER, on_device=partial(torch_lookup.gather_grad, ordered=True)
    ),
    "Top": Kernel(torch_lookup.top, Result.OWN),
    "LastAt": Kernel(torch_lookup.last_at, Result.OWN),
    "Einsum": Kernel(einsum, Result.EITHER),
    "Resample": Kernel(resample, Result.OWN, on_device=resample_by_gathers, planes=True),
    "Conv": _convolution(CONV, windows.conv),
    "ConvTranspose": _convolution(CONV_TRANSPOSE, windows.conv_transpose),
    "ConvWeightGrad": _convolution(CONV_WEIGHT_GRAD, windows.conv_weight_grad),
    "MaxPool": _pooling(windows.pool, None),
    "MaxPoolGrad": _pooling(windows.pool_grad, _pooling_lands),
}
