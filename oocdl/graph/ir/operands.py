"""Facts that all engines read from a program: padding, crops, pieces of a Concat, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from oocdl.errors import UnsupportedError
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Instruction, Operand, Program

Pads = tuple[tuple[int, int], ...]

ALIGNMENT = 16
"""Bytes; the allocators of NumPy and PyTorch align to at least so many."""


def aligned(array: Array) -> Array:
    """Return ``array``, copied if its address is not aligned as allocators align; its axes keep their order.

    Some kernels (MKL's matrix by vector) add in another order elsewhere, and equal
    inputs must give equal bits.
    """
    return array if array.ctypes.data % ALIGNMENT == 0 else array.copy(order="K")


def pads_of(operand: Operand) -> Pads | None:
    """Return the pads of an operand; None where all are zero."""
    if operand.pads is None or not any(before or after for before, after in operand.pads):
        return None
    return operand.pads


def is_empty(operand: Operand) -> bool:
    """Whether an operand has no element of its slot, so that all of it is padding."""
    return prod(operand.shape) == 0


def spatial_pads(operand: Operand) -> Pads:
    """Return the pads (before, after) of the axes after batch and channels; zeros if there are none."""
    if operand.pads is None:
        return ((0, 0),) * (len(operand.shape) - 2)
    return operand.pads[2:]


def crop_of(instruction: Instruction) -> tuple[int, ...]:
    """Return the ``crop`` attribute; zeros if there is none."""
    crop: Sequence[int] = instruction.attrs.get("crop") or (0,) * len(instruction.kernel_shapes[0])
    return tuple(crop)


def concat_axis(instruction: Instruction) -> int:
    """Return the axis of a Concat, non-negative."""
    return int(instruction.attrs["axis"]) % len(instruction.kernel_shapes[0])


def concat_pieces(instruction: Instruction) -> list[int]:
    """Return the numbers of the operands of a Concat that have a part of the wanted region.

    An operand that is wanted in part lies in a region of the result's extent, padded
    on the other operands' side; so the operands, unpadded, follow each other.
    """
    axis = concat_axis(instruction)
    pieces = [index for index, item in enumerate(instruction.operands) if item.shape[axis] > 0]
    extent = sum(instruction.operands[index].shape[axis] for index in pieces)
    if extent != instruction.kernel_shapes[0][axis]:
        wanted = instruction.kernel_shapes[0]
        raise ValueError(f"Concat: pieces have {extent} on axis {axis}, the result is {wanted}")
    return pieces


def slot_dtypes(program: Program) -> dict[int, str]:
    """Return slot -> dtype."""
    dtypes = dict(zip(program.inputs, program.input_dtypes, strict=True))
    for instruction in program.instructions:
        dtypes.update(zip(instruction.outputs, instruction.dtypes, strict=True))
    return dtypes


def slot_shapes(program: Program) -> dict[int, Shape]:
    """Return slot -> shape of the array it holds."""
    shapes = dict(zip(program.inputs, program.input_shapes, strict=True))
    for instruction in program.instructions:
        shapes.update(zip(instruction.outputs, instruction.shapes, strict=True))
    return shapes


def empty_outputs(program: Program) -> list[Array]:
    """Make arrays for the outputs of a program, their axes in the order in memory that it asks for."""
    dtypes, outputs = slot_dtypes(program), zip(program.outputs, program.output_orders, strict=True)
    return [ordered(np.empty, item.shape, dtypes[item.slot], order) for item, order in outputs]


def endings(program: Program) -> list[list[int]]:
    """Return for each instruction the slots that nothing reads after it, no output among them."""
    last: dict[int, int] = {}
    for number, item in enumerate(program.instructions):
        last |= dict.fromkeys((*(operand.slot for operand in item.operands), *item.outputs), number)
    kept = {operand.slot for operand in program.outputs}
    found: list[list[int]] = [[] for _ in program.instructions]
    for slot in last.keys() - kept:
        found[last[slot]].append(slot)
    return found


def check_known(program: Program, known: frozenset[str], engine: str) -> None:
    """Raise UnsupportedError, which names all operators of the program that the engine has no kernel for."""
    missing = sorted({item.op for item in program.instructions} - known)
    if missing:
        names = ", ".join(f"'{op}'" for op in missing)
        raise UnsupportedError(f"engine '{engine}' has no kernel for {names}")


class Letters:
    """The letters of an einsum of two operands, sorted by the operands that have them.

    >>> letters = Letters("bik,bjkl->bij")
    >>> letters.batch, letters.rows, letters.inner, letters.columns, letters.right_kept
    ('b', 'i', 'k', 'j', 'bjk')
    """

    def __init__(self, equation: str) -> None:
        terms, out = equation.replace(" ", "").split("->")
        left, right = terms.split(",")
        self.left, self.right, self.out = left, right, out
        self.left_kept = "".join(x for x in left if x in right or x in out)
        """Letters of the left operand, without those that only it has and that are summed."""
        self.right_kept = "".join(x for x in right if x in left or x in out)
        self.batch = "".join(x for x in left if x in right and x in out)
        """Letters of both operands and the result."""
        self.rows = "".join(x for x in left if x not in right and x in out)
        """Letters of the left operand and the result."""
        self.inner = "".join(x for x in left if x in right and x not in out)
        """Letters of both operands but not the result, which the product sums over."""
        self.columns = "".join(x for x in right if x not in left and x in out)
        """Letters of the right operand and the result."""
