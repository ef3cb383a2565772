"""What a unit costs: bytes of memory, bytes moved, floating-point operations.

The peak of a unit is bounded by construction. Its inputs and results are arrays of the
RAM tier (``unit_buffer_bytes``); what its program takes while it runs is the heap's
(``program_work_bytes``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from oocdl.graph.axes import region_size
from oocdl.graph.cut import Unit
from oocdl.graph.factorize import Factored
from oocdl.graph.ir import Shape
from oocdl.graph.memory import footprint
from oocdl.graph.program import Program, padded_shape
from oocdl.graph.rule import Rules
from oocdl.graph.traffic import Layer


class Needs(NamedTuple):
    """What a run of a program wants beside its inputs and the arrays its results go to."""

    work_bytes: int
    own: frozenset[int] = frozenset()
    """Numbers of the inputs that it writes over: arrays of its own, which nobody else reads."""


NeedsOf = Callable[[Program], Needs]
HOLES = 5
"""Quarters of its blocks' sum that a program takes of the heap: blocks of several sizes leave holes."""


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return int(np.dtype(dtype).itemsize)


def array_bytes(shape: Shape, dtype: str) -> int:
    """Bytes of an array.

    >>> array_bytes((2, 3), "bfloat16")
    12
    """
    return prod(shape) * itemsize(dtype)


def program_flops(program: Program, rules: Rules) -> int:
    """Floating-point operations of one run of the program."""
    return sum(
        rules[step.op].flops(step.node, list(map(padded_shape, step.operands)), list(step.kernel_shapes))
        for step in program.instructions
    )


def program_work_bytes(program: Program, rules: Rules) -> int:
    """Upper bound of what one run takes, for an engine that makes every intermediate as a whole.

    Intermediates alive at the worst instruction (results among them, before they are put
    where they belong), padded copies of that instruction's operands, and its scratch space.
    """
    size: dict[int, int] = {}
    dtype_of = dict(zip(program.inputs, program.input_dtypes, strict=True))
    last: dict[int, int] = {}
    for number, step in enumerate(program.instructions):
        for operand in step.operands:
            last[operand.slot] = number
    held = {operand.slot for operand in program.outputs} | set(program.inputs)
    live = peak = 0
    for number, step in enumerate(program.instructions):
        for slot, shape, dtype in zip(step.outputs, step.shapes, step.dtypes, strict=True):
            size[slot] = array_bytes(shape, dtype)
            dtype_of[slot] = dtype
            live += size[slot]
        shapes = [padded_shape(operand) for operand in step.operands]
        elements = rules[step.op].workspace(step.node, shapes, list(step.kernel_shapes))
        scratch = elements * itemsize(step.dtypes[0])
        for operand, shape in zip(step.operands, shapes, strict=True):
            if operand.pads is not None or operand.crop is not None:
                scratch += array_bytes(shape, dtype_of[operand.slot])
        peak = max(peak, live + scratch)
        for slot in {operand.slot for operand in step.operands} | set(step.outputs):
            if last.get(slot, -1) <= number and slot not in held:
                live -= size[slot]
                held.add(slot)
    return peak * HOLES // 4


def most_needs(program: Program, rules: Rules) -> Needs:
    """For any engine that overwrites no input."""
    return Needs(program_work_bytes(program, rules))


def unit_buffer_bytes(unit: Unit, layer: Layer, factored: Factored) -> int:
    """Bytes of the arrays that a unit reads and makes, and of the lanes it adds its partial results to."""
    read, made = read_bytes(unit, factored), made_bytes(unit, factored)
    lanes = [made[name] for name in layer.partials]
    return sum(footprint(nbytes) for nbytes in [*read.values(), *made.values(), *lanes])


def combine_buffer_bytes(sizes: Sequence[int], how: str) -> int:
    """Bytes that combining partial results of ``sizes`` takes.

    Lanes are read one by one: the total, a lane, and for formulas their float64 temporaries.
    """
    arrays = 2 * sum(footprint(nbytes) for nbytes in sizes)
    return arrays + (0 if how in ("sum", "max") else 14 * sum(sizes))


def read_bytes(unit: Unit, factored: Factored) -> dict[str, int]:
    """Bytes that the unit reads of each value."""
    values = factored.graph.values
    return {name: region_size(region) * itemsize(values[name].dtype) for name, region in unit.reads}


def made_bytes(unit: Unit, factored: Factored) -> dict[str, int]:
    """Bytes that the unit makes of each value."""
    values = factored.graph.values
    return {name: region_size(region) * itemsize(values[name].dtype) for name, region in unit.makes}
