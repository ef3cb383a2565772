"""What a unit costs: bytes of memory, bytes moved, floating-point operations.

The peak of a unit is bounded by construction: its inputs and outputs, what is
alive at the worst instruction, the padded copies of that instruction's operands,
and the scratch space that the operator's rule states.
"""

from __future__ import annotations

from math import prod

import numpy as np

from oocdl.graph.axes import region_size
from oocdl.graph.cut import Unit
from oocdl.graph.factorize import Factored
from oocdl.graph.ir import Node
from oocdl.graph.program import Instruction, Program
from oocdl.graph.rule import Rules
from oocdl.graph.traffic import Layer


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return int(np.dtype(dtype).itemsize)


def _node(step: Instruction) -> Node:
    return Node("", step.op, (), (), step.attrs)


def _operand_shapes(step: Instruction) -> list[tuple[int, ...]]:
    return [
        tuple(
            extent + sum(pad)
            for extent, pad in zip(op.shape, op.pads or ((0, 0),) * len(op.shape), strict=True)
        )
        for op in step.operands
    ]


def program_flops(program: Program, rules: Rules) -> int:
    """Floating-point operations of one run of the program."""
    return sum(
        rules[step.op].flops(_node(step), _operand_shapes(step), list(step.kernel_shapes))
        for step in program.instructions
    )


def program_peak_bytes(program: Program, rules: Rules) -> int:
    """Upper bound of the memory that one run takes, inputs and outputs included."""
    size: dict[int, int] = {}
    for slot, shape, dtype in zip(program.inputs, program.input_shapes, program.input_dtypes, strict=True):
        size[slot] = prod(shape) * itemsize(dtype)
    last: dict[int, int] = {}
    for number, step in enumerate(program.instructions):
        for operand in step.operands:
            last[operand.slot] = number
    held = {operand.slot for operand in program.outputs} | set(program.inputs)
    dtype_of = dict(zip(program.inputs, program.input_dtypes, strict=True))
    live = sum(size.values())
    peak = live
    for number, step in enumerate(program.instructions):
        made = 0
        for slot, shape, dtype in zip(step.outputs, step.shapes, step.dtypes, strict=True):
            size[slot] = prod(shape) * itemsize(dtype)
            dtype_of[slot] = dtype
            made += size[slot]
        shapes = _operand_shapes(step)
        scratch = rules[step.op].workspace(_node(step), shapes, list(step.kernel_shapes)) * itemsize(
            step.dtypes[0]
        )
        for operand, shape in zip(step.operands, shapes, strict=True):
            if operand.pads is not None or operand.crop is not None:
                scratch += prod(shape) * itemsize(dtype_of[operand.slot])
        live += made
        peak = max(peak, live + scratch)
        for slot in {operand.slot for operand in step.operands} | set(step.outputs):
            if last.get(slot, -1) <= number and slot not in held:
                live -= size[slot]
                held.add(slot)
    copies = sum(
        prod(out.shape) * itemsize(dtype_of[out.slot]) for out in program.outputs if out.crop is not None
    )
    return max(peak, live + copies)


def unit_peak_bytes(unit: Unit, layer: Layer, factored: Factored, rules: Rules) -> int:
    """Upper bound of the memory of a unit: its program, and the lanes it adds its partial results to."""
    made = made_bytes(unit, factored)
    return program_peak_bytes(unit.program, rules) + sum(made[name] for name in layer.partials)


def combine_peak_bytes(nbytes: int, how: str) -> int:
    """Upper bound of the memory that combining partial results of ``nbytes`` takes.

    Lanes are read one by one: the total, a lane, and for formulas their float64 temporaries.
    """
    return nbytes * (3 if how in ("sum", "max") else 16) + 4096


def read_bytes(unit: Unit, factored: Factored) -> dict[str, int]:
    """Bytes that the unit reads of each value."""
    values = factored.graph.values
    return {name: region_size(region) * itemsize(values[name].dtype) for name, region in unit.reads}


def made_bytes(unit: Unit, factored: Factored) -> dict[str, int]:
    """Bytes that the unit makes of each value."""
    values = factored.graph.values
    return {name: region_size(region) * itemsize(values[name].dtype) for name, region in unit.makes}
