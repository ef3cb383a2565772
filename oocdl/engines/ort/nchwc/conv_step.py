"""Convolutions of volumes that run on blocks of channels: which, and how slots become their operands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

import numpy as np

from oocdl.engines.convolution import groups_of
from oocdl.engines.ort.lowerings import KERNELS
from oocdl.engines.ort.nchwc import block_volumes
from oocdl.engines.ort.nchwc.blocks import block
from oocdl.engines.ort.steps import Kinds
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.operands import Pads, crop_of, pads_of, spatial_pads
from oocdl.graph.ir.program import Instruction

_MAX_PADDED_RATIO, _MAX_PADDED_GRADIENT_RATIO = 2.0, 1.6
"""Products made for each that is wanted, above which onnxruntime's Conv of volumes is faster; the same of
a gradient of weights."""


def _is_plain(item: Instruction) -> bool:
    """Whether a convolution of a volume has strides and dilations of one, and pads only axes of space."""
    rank = len(item.kernel_shapes[0])
    steps = (*(item.attrs.get("strides") or ()), *(item.attrs.get("dilations") or ()))
    first, second = item.operands
    outer = first.pads is not None and any(any(pair) for pair in first.pads[:2])
    sizes = [prod(shape) for shape in (first.shape, second.shape, *item.kernel_shapes)]
    return rank == 5 and set(steps) <= {1} and not outer and pads_of(second) is None and min(sizes) > 0


def suits_blocks(item: Instruction, channels_last: Collection[int]) -> bool:
    """Whether an instruction is faster on blocks of channels; slots in ``channels_last`` lie so."""
    kind = KERNELS[item.op].convolution
    if (
        kind is None
        or groups_of(item) > 1
        or not _is_plain(item)
        or item.dtypes[0] != "float32"
        or block() == 1
    ):
        return False
    inner, outer = item.operands[0].shape[1], kind.other_data(item)[1]
    gradient = kind.makes_weights
    data = [item.operands[0].slot, item.operands[1].slot if gradient else item.outputs[0]]
    if any(slot in channels_last and n % 4 for slot, n in zip(data, (inner, outer), strict=True)):
        return False  # not known to the operators that sort
    if prod(kind.weights(item)[2:]) == 1:
        # A matrix product where all has its channels last (``tiles``); else sorting counts.
        return not all(slot in channels_last for slot in data)
    # Few channels are not blocked, and the gradient takes rows for channels.
    lone = gradient or (data[0] not in channels_last and inner <= 2)
    padded = block_volumes.padded_channels(*((outer,) if lone else (inner, outer)))
    if gradient:
        padded *= block_volumes.padded_rows(item.operands[0].shape[3])
    return padded <= (_MAX_PADDED_GRADIENT_RATIO if gradient else _MAX_PADDED_RATIO)


def _transposed_pads(item: Instruction) -> tuple[list[slice], Pads]:
    """The box of its operand that a ConvTranspose at stride one sees, and the padding of that.

    Output i sees inputs i + crop - reach to i + crop.
    """
    given = spatial_pads(item.operands[0])
    seen, pads = [], []
    for axis, (start, (before, _)) in enumerate(zip(crop_of(item)[2:], given, strict=True), start=2):
        have, reach = item.operands[0].shape[axis], item.operands[1].shape[axis] - 1
        low = start - before - reach
        high = start - before + item.kernel_shapes[0][axis]
        first, last = max(low, 0), min(high, have)
        seen.append(slice(first, max(last, first)))
        pads.append((first - low, high - max(last, first)))
    return seen, tuple(pads)


class BlockConvolution:
    """The kernel of one convolution, or gradient of one, on blocks of channels."""

    def __init__(self, item: Instruction, kinds: Kinds) -> None:
        kind = KERNELS[item.op].convolution
        assert kind is not None, f"{item.op} is no convolution"
        self._item, self._kinds, self._kind = item, kinds, kind
        self._pads = spatial_pads(item.operands[0])
        self._seen: Sequence[slice] = (slice(None),) * len(self._pads)
        if self._kind.transposed:
            self._seen, self._pads = _transposed_pads(item)

    def __call__(self, args: Sequence[Array], outs: Sequence[Array]) -> None:
        """Compute the result of two operands, without their padding."""
        compute = self._gradient if self._kind.makes_weights else self._convolve
        compute(args[0], args[1], outs[0])

    def _convolve(self, x: Array, w: Array, out: Array) -> None:
        x = x[:, :, self._seen[0], self._seen[1], self._seen[2]]
        if x.size == 0:
            out[...] = 0
            return
        if self._kind.transposed:
            w = block_volumes.transposed(w)
        orders = self._kinds.orders
        x_channels_last = self._item.operands[0].slot in orders
        # A result whose channels lie side by side, but not all of it without gaps, is made elsewhere.
        out_channels_last = np.moveaxis(out, 1, -1).flags.c_contiguous and out.shape[1] % 4 == 0
        for sample, made in zip(x, out, strict=True):
            if x_channels_last:
                sample = np.ascontiguousarray(np.moveaxis(sample, 0, -1))
            if out_channels_last:
                made = np.moveaxis(made, 0, -1)
            block_volumes.convolve(sample, w, self._pads, made, x_channels_last, out_channels_last)

    def _gradient(self, x: Array, dy: Array, out: Array) -> None:
        gradient = block_volumes.WeightGradient(out.shape, self._pads)
        for sample, change in zip(x, dy, strict=True):
            gradient.add(np.moveaxis(sample, 0, -1), np.moveaxis(change, 0, -1))
        out[...] = gradient.result()
