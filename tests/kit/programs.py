"""Programs for tests, of instructions by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.index import Range
from oocdl.graph.ir.program import Instruction, Operand, Program

Pads = tuple[tuple[int, int], ...]


def operand(
    slot: int, shape: Shape, crop: Sequence[Range] | None = None, pads: Sequence[Range] | None = None
) -> Operand:
    """An operand, its sequences made tuples."""
    return Operand(
        slot,
        None if crop is None else tuple(tuple(pair) for pair in crop),  # type: ignore[misc]
        tuple(shape),
        None if pads is None else tuple(tuple(pair) for pair in pads),  # type: ignore[misc]
    )


def step(
    op: str,
    reads: Sequence[Operand | tuple[int, Shape]],
    made: int,
    shape: Shape,
    dtype: str = "float32",
    **attrs: Any,
) -> Instruction:
    """An instruction with one result; what it reads are operands, or whole slots with their shapes."""
    operands = tuple(one if isinstance(one, Operand) else operand(*one) for one in reads)
    return Instruction(op, operands, (made,), (shape,), (shape,), (dtype,), attrs)


def single(
    op: str,
    arrays: Sequence[Array],
    results: Sequence[tuple[Shape, str]],
    attrs: Mapping[str, Any] | None = None,
    pads: Sequence[Sequence[Range] | None] | None = None,
    fill: float = 0.0,
    key: str = "",
) -> Program:
    """A program of one instruction on whole arrays."""
    pads = pads or [None] * len(arrays)
    operands = tuple(
        operand(slot, array.shape, None, pad)
        for slot, (array, pad) in enumerate(zip(arrays, pads, strict=True))
    )
    first = len(arrays)
    slots = tuple(range(first, first + len(results)))
    shapes = tuple(tuple(shape) for shape, _ in results)
    dtypes = tuple(dtype for _, dtype in results)
    instruction = Instruction(op, operands, slots, shapes, shapes, dtypes, dict(attrs or {}), fill)
    return program(arrays, [instruction], list(zip(slots, shapes, strict=True)), key or op)


def program(
    arrays: Sequence[Array],
    instructions: Sequence[Instruction],
    outputs: Sequence[tuple[int, Shape]],
    key: str,
) -> Program:
    """A program whose first slots are ``arrays`` and whose outputs are whole slots."""
    return Program(
        tuple(range(len(arrays))),
        tuple(array.shape for array in arrays),
        tuple(array.dtype.name for array in arrays),
        tuple(instructions),
        tuple(operand(slot, shape) for slot, shape in outputs),
        key,
    )
