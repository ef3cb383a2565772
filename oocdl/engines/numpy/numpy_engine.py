"""Programs on NumPy: one instruction after another, each value whole, as its kernel's definition says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from oocdl.engines.convolution import without_group_axes
from oocdl.engines.engine import Engine, Run
from oocdl.engines.numpy.numpy_kernels import KERNELS
from oocdl.engines.numpy_moves import operand_of
from oocdl.errors import UnsupportedError
from oocdl.fusion.chain import crop
from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.operands import endings, slot_dtypes
from oocdl.graph.ir.program import Instruction, Operand, Program, padded_shape
from oocdl.graph.ir.program_cost import HEAP_QUARTERS, ProgramScratch


def _operand(slots: dict[int, Array], item: Instruction, operand: Operand) -> Array:
    """A new array of an operand as its kernel takes it; floating-point operands are in float64."""
    array = operand_of(slots[operand.slot], item, operand, KERNELS[item.op].takes_unpadded)
    return array.astype(np.float64 if array.dtype.kind == "f" else array.dtype)


def _run(program: Program, ends: list[list[int]], arrays: Sequence[Array], outs: Sequence[Array]) -> None:
    slots = dict(zip(program.inputs, arrays, strict=True))
    for item, ending in zip(program.instructions, ends, strict=True):
        args = [_operand(slots, item, operand) for operand in item.operands]
        results = KERNELS[item.op].run(args, item)
        made = zip(item.outputs, results, item.kernel_shapes, item.shapes, item.dtypes, strict=True)
        for slot, result, kernel_shape, shape, dtype in made:
            if result.shape != kernel_shape:
                raise ValueError(f"{item.op} gave {result.shape}, wanted {kernel_shape}")
            slots[slot] = result.astype(dtype, order="C").reshape(shape)
        for slot in ending:
            del slots[slot]
    for operand, out in zip(program.outputs, outs, strict=True):
        out[...] = crop(slots[operand.slot], operand.crop).reshape(operand.shape)


def _scratch_bytes(program: Program) -> int:
    """Bytes at the instruction that takes most: values alive, its operands padded and again in float64, its
    results in float64, and its kernel's scratch."""
    size: dict[int, int] = {}
    live = peak = 0
    for item, ending in zip(program.instructions, endings(program), strict=True):
        for slot, shape, dtype in zip(item.outputs, item.shapes, item.dtypes, strict=True):
            size[slot] = prod(shape) * itemsize(dtype)
            live += size[slot]
        elements = 2 * sum(prod(padded_shape(operand)) for operand in item.operands)
        elements += sum(map(prod, item.kernel_shapes)) + KERNELS[item.op].scratch(item)
        peak = max(peak, live + itemsize("float64") * elements)
        live -= sum(size.get(slot, 0) for slot in ending)  # inputs are not counted
    return peak * HEAP_QUARTERS // 4


class NumpyEngine(Engine):
    """Runs programs with NumPy on the CPU, in float64, and rounds each value to its dtype."""

    name = "numpy"
    operators = frozenset(KERNELS)

    def scratch_of(self, program: Program, rules: Rules) -> ProgramScratch:
        return ProgramScratch(_scratch_bytes(without_group_axes(program)))

    def _make(self, program: Program) -> Run:
        if "bfloat16" in slot_dtypes(program).values():
            raise UnsupportedError("engine 'numpy' takes no bfloat16 arrays; use engine='torch'")
        ends = endings(program)

        def run(arrays: Sequence[Array], outs: Sequence[Array], rooms: Mapping[int, Array]) -> None:
            # Infinities and what is not a number are values like others here.
            with np.errstate(all="ignore"):
                _run(program, ends, arrays, outs)

        return run


def make_engine() -> NumpyEngine:
    """Make the engine for ``get_engine``; NumPy runs on as many threads as its own libraries take."""
    return NumpyEngine()
