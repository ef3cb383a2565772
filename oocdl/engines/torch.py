"""The torch engine: instructions run one after another on PyTorch's CPU kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from oocdl.engines.engine import Cache, Compiled
from oocdl.engines.operands import (
    PAD_THEMSELVES,
    aligned,
    check_known,
    fill_of,
    last_uses,
    output_dtypes,
    pads_of,
)
from oocdl.engines.torch_kernels import KERNELS
from oocdl.engines.torch_windows import pad
from oocdl.graph.ir import Array
from oocdl.graph.program import Instruction, Operand, Program

Prepare = Callable[[Tensor], Tensor]
_thread = threading.local()


class _Writable:
    """An array as NumPy sees it, said to be writable.

    PyTorch has no read-only tensors and warns of read-only arrays. No kernel writes
    to an input, so the warning would be noise; switching it off is not thread-safe.
    """

    def __init__(self, array: Array) -> None:
        self.array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def to_torch(array: Array) -> Tensor:
    """The same memory as a tensor; a copy where PyTorch cannot have it as it lies."""
    array = aligned(array)
    if any(stride < 0 for stride in array.strides):
        array = np.array(array, order="C")
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    return torch.from_numpy(array)


def use_threads(count: int) -> None:
    """Let kernels called from this thread use ``count`` threads."""
    if getattr(_thread, "count", None) != count:
        torch.set_num_threads(count)
        _thread.count = count


def _crop(tensor: Tensor, crop: tuple[tuple[int, int], ...] | None) -> Tensor:
    if crop is None:
        return tensor
    for axis, (start, stop) in enumerate(crop):
        if (start, stop) != (0, tensor.shape[axis]):
            tensor = tensor.narrow(axis, start, stop - start)
    return tensor


def _preparation(instruction: Instruction, index: int) -> Prepare:
    """How slot becomes operand: crop, reshape, pad."""
    operand = instruction.operands[index]
    fill = fill_of(instruction, index)
    pads = None if instruction.op in PAD_THEMSELVES else pads_of(operand)

    def prepare(tensor: Tensor) -> Tensor:
        tensor = _crop(tensor, operand.crop)
        if tensor.shape != operand.shape:
            tensor = tensor.reshape(operand.shape)
        return tensor if pads is None else pad(tensor, pads, fill)

    return prepare


class _Step:
    """One instruction, with all that can be decided before it runs."""

    def __init__(self, instruction: Instruction, dying: tuple[int, ...]) -> None:
        self.instruction = instruction
        self.dying = dying
        self.kernel = KERNELS[instruction.op]
        self.slots = [operand.slot for operand in instruction.operands]
        self.prepare = [_preparation(instruction, i) for i in range(len(instruction.operands))]
        self.dtypes = [getattr(torch, dtype) for dtype in instruction.dtypes]

    def run(self, slots: dict[int, Tensor]) -> None:
        """Read operands from ``slots``, put results there, drop what is not read again."""
        item = self.instruction
        args = [make(slots[slot]) for make, slot in zip(self.prepare, self.slots, strict=True)]
        results = self.kernel(args, item)
        del args
        for index, result in enumerate(results):
            if result.shape != item.kernel_shapes[index] or result.dtype != self.dtypes[index]:
                raise ValueError(
                    f"{item.op} gave {result.dtype} {tuple(result.shape)}, "
                    f"wanted {item.dtypes[index]} {item.kernel_shapes[index]}"
                )
            slots[item.outputs[index]] = result.reshape(item.shapes[index])
        for slot in self.dying:
            slots.pop(slot)


def _result(tensor: Tensor, operand: Operand, out: Array) -> Array:
    """Put an output where it belongs."""
    torch.from_numpy(out).copy_(_crop(tensor, operand.crop).reshape(operand.shape))
    return out


class TorchEngine:
    """Runs programs with PyTorch on the CPU."""

    name = "torch"

    def __init__(self, threads_per_kernel: int = 1) -> None:
        self.threads_per_kernel = threads_per_kernel
        self._cache = Cache()

    def compile(self, program: Program) -> Compiled:
        """See ``Engine.compile``."""
        return self._cache.get(program.key, lambda: self._make(program))

    def _make(self, program: Program) -> Compiled:
        check_known(program, frozenset(KERNELS), self.name)
        dying = last_uses(program)
        dtypes = output_dtypes(program)
        steps = [_Step(*pair) for pair in zip(program.instructions, dying, strict=True)]

        def call(arrays: Sequence[Array], outs: Sequence[Array] | None = None) -> list[Array]:
            if outs is None:
                outs = [
                    np.empty(item.shape, dtype) for item, dtype in zip(program.outputs, dtypes, strict=True)
                ]
            use_threads(self.threads_per_kernel)
            with torch.inference_mode():
                slots = {
                    slot: to_torch(np.asarray(array))
                    for slot, array in zip(program.inputs, arrays, strict=True)
                }
                for step in steps:
                    step.run(slots)
                return [
                    _result(slots[item.slot], item, out)
                    for item, out in zip(program.outputs, outs, strict=True)
                ]

        return call


def make_engine(threads_per_kernel: int) -> TorchEngine:
    """For ``get_engine``."""
    return TorchEngine(threads_per_kernel)
