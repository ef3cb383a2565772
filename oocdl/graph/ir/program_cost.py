"""Cost of a program: bytes of scratch while it runs, and floating-point operations.

Engines and the planner share these bounds; the bytes of a unit's inputs and results stand in
``planning/tile_search``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from oocdl.graph.ir.array_layout import array_bytes, itemsize
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.operands import endings, slot_dtypes
from oocdl.graph.ir.program import Program, padded_shape


class ProgramScratch(NamedTuple):
    """Memory that a run of a program takes beside its inputs and the arrays that its results go to."""

    scratch_bytes: int
    overwrites: frozenset[int] = frozenset()
    """Numbers of the inputs that the run writes over: each must be an array that nobody else reads."""


ScratchOf = Callable[[Program], ProgramScratch]
HEAP_QUARTERS = 5
"""Quarters of the sum of its blocks that a program takes of the heap: blocks of several sizes leave holes."""


def program_flops(program: Program, rules: Rules) -> int:
    """Return the floating-point operations of one run of the program."""
    return sum(
        rules[step.op].flops(step.node, list(map(padded_shape, step.operands)), list(step.kernel_shapes))
        for step in program.instructions
    )


def program_scratch_bytes(program: Program, rules: Rules) -> int:
    """Return an upper bound of the bytes of one run, in an engine that makes every intermediate as a whole.

    It counts the intermediates alive at the worst instruction (results among them, before they are
    copied to their arrays), padded copies of that instruction's operands, and its scratch space.
    """
    size: dict[int, int] = {}
    dtype_of = slot_dtypes(program)
    live = peak = 0
    for step, ending in zip(program.instructions, endings(program), strict=True):
        for slot, shape, dtype in zip(step.outputs, step.shapes, step.dtypes, strict=True):
            size[slot] = array_bytes(shape, dtype)
            live += size[slot]
        shapes = [padded_shape(operand) for operand in step.operands]
        elements = rules[step.op].scratch_elements(step.node, shapes, list(step.kernel_shapes))
        scratch = elements * itemsize(step.dtypes[0])
        for operand, shape in zip(step.operands, shapes, strict=True):
            if operand.pads is not None or operand.crop is not None:
                scratch += array_bytes(shape, dtype_of[operand.slot])
        peak = max(peak, live + scratch)
        live -= sum(size.get(slot, 0) for slot in ending)  # inputs are not counted
    return peak * HEAP_QUARTERS // 4


def most_scratch(program: Program, rules: Rules) -> ProgramScratch:
    """Return the scratch of a program in an engine that overwrites no input."""
    return ProgramScratch(program_scratch_bytes(program, rules))
