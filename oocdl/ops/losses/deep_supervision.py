"""Deep supervision: one loss of several outputs, each of its own size, with one array of labels.

Labels are made smaller in the graph as nnU-Net makes them (``DownsampleSegForDSTransform``: PyTorch's
``interpolate(mode="nearest-exact")``): place o of n takes the label at ``floor((o + 1/2) extent / n)``. Where
the extent is a multiple f of n, that is label ``f o + f // 2``: with f = 2 the second of each pair. Elsewhere
a place may lie just between two labels: it takes the second, where PyTorch in float32 may round to the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from oocdl.errors import InputError
from oocdl.graph.ir.graph import is_float
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.expression import apply, lift

MODES = ("exp", "two", "same")
_MODE = {"mode": "nearest", "coordinates": "half_pixel", "nearest_mode": "round_prefer_ceil"}
"""Attributes of a Resample that takes the nearest element."""


@dataclass(frozen=True)
class DeepSupervision:
    """The weighted sum of one loss over all outputs of the model, in their order, the largest first.

    All outputs are compared with the labels of the first, made smaller in the graph: the nearest voxel, as in
    nnU-Net. An output that ``targets=`` names, or whose name is that of an array of the dataset, is compared
    with that array.

    ``weight_mode`` has the weights of outputs i = 0, 1, ..: "exp" is nnU-Net's ``1 / 2^i``, 0 for the last,
    divided by their sum; "two" is 1 for the first and 0.5 for the others, "same" 1 for all, both as MONAI's
    ``DeepSupervisionLoss``. ``weights`` gives them one by one instead. An output of weight 0 is left out:
    weights of the model that only it needs stay as they are.

    >>> DeepSupervision().of_outputs(3), DeepSupervision("dice", weights=(1.0, 0.5)).of_outputs(2)
    ((0.6666666666666666, 0.3333333333333333, 0.0), (1.0, 0.5))
    """

    loss: Any = "dice_ce"
    """The loss of each output: a name or an object of ``oocdl.losses``."""
    weight_mode: str = "exp"
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.weight_mode not in MODES:
            known = ", ".join(MODES)
            raise InputError(f"weight_mode of deep supervision is {known}, not '{self.weight_mode}'")
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(self.weights))
            if not self.weights or not np.isfinite(self.weights).all() or not self.weights[0]:
                wanted = "weights of deep supervision are finite, the first not 0"
                raise InputError(f"{wanted}, got {self.weights}")
        if isinstance(self.loss, DeepSupervision):
            raise InputError("deep supervision takes the loss of one output, not another deep supervision")

    def of_outputs(self, count: int) -> tuple[float, ...]:
        """Return the weight of each of ``count`` outputs. Raises InputError if ``weights`` are others."""
        if self.weights is not None:
            if len(self.weights) != count:
                has = f"deep supervision has {len(self.weights)} weights for {count} outputs"
                raise InputError(f"{has}; give one each")
            return self.weights
        if self.weight_mode != "exp":
            return (1.0, *(0.5 if self.weight_mode == "two" else 1.0 for _ in range(count - 1)))
        halves = [0.5**level for level in range(count)]
        if count > 1:
            halves[-1] = 0.0
        return tuple(half / sum(halves) for half in halves)


def resized_target(build: Builder, target: str, output: str, widest: str) -> str:
    """Add the target of an output made from a larger one: the nearest element along each axis of space.

    The result has the extents of ``output`` from axis 2 on. ``widest`` is a dtype in which labels, where an
    extent is no multiple, are exact. Raises InputError where the output is larger than the target.
    """
    sizes = build.shape(output)[2:]
    shape = build.shape(target)
    first = len(shape) - len(sizes)
    if first < 1 or any(size > extent for size, extent in zip(sizes, shape[first:], strict=False)):
        takes = "deep supervision takes outputs from the largest to the smallest, with labels of the first"
        its = f"output '{output}' has shape {list(build.shape(output))}, its labels {list(shape)}"
        raise InputError(f"{its}; {takes}")
    for axis, size in enumerate(sizes, first):
        factor, rest = divmod(shape[axis], size)
        if rest:
            # Labels are whole, so their way through a float is exact.
            value, dtype = lift(build, target), build.dtype(target)
            value = value if is_float(dtype) else value.cast(widest)
            value = apply("Resample", value, axis=axis, size=size, transposed=False, **_MODE)
            target = value.cast(dtype).name
        elif factor > 1:
            start, stop = factor // 2, factor // 2 + factor * (size - 1) + 1
            target = build("Slice", target, axis=axis, start=start, stop=stop, step=factor)
    return target
