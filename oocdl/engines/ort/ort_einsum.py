"""Einsum of two operands as one matrix product between reshapes and transposes.

onnxruntime's own Einsum is less than half as fast (`docs/explanation/kernel-measurements.md`, section 2).
"""

from __future__ import annotations

from math import prod

from oocdl.engines.ort.emit import Emitter, Val
from oocdl.graph.ir.operands import classify
from oocdl.graph.ir.program import Instruction


def _sum_lone(emit: Emitter, value: Val, term: str, kept: str) -> Val:
    """The operand with the letters that nothing else has summed away."""
    lone = [axis for axis, letter in enumerate(term) if letter not in kept]
    summed = emit.sum(value, lone)
    return emit.reshape(summed, [n for axis, n in enumerate(value.shape) if axis not in lone])


def _grouped(emit: Emitter, value: Val, term: str, *groups: str) -> Val:
    """The operand with one axis a group of letters."""
    ordered = emit.transpose(value, [term.index(letter) for letter in "".join(groups)])
    extents = dict(zip(term, value.shape, strict=True))
    return emit.reshape(ordered, [prod(extents[x] for x in group) for group in groups])


def einsum(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """See ``Letters`` for the classes."""
    letters = classify(instruction.attrs["equation"])
    left, right = letters.left_kept, letters.right_kept
    a = _sum_lone(emit, args[0], letters.left, left)
    b = _sum_lone(emit, args[1], letters.right, right)
    batch = (letters.batch,) if letters.batch else ()
    if letters.inner:
        first = _grouped(emit, a, left, *batch, letters.rows, letters.inner)
        second = _grouped(emit, b, right, *batch, letters.inner, letters.columns)
        product = emit.matmul(first, second)
    else:
        first = _grouped(emit, a, left, *batch, letters.rows, "")
        product = emit("Mul", first, _grouped(emit, b, right, *batch, "", letters.columns))
    extents = dict(zip(letters.out, instruction.kernel_shapes[0], strict=True))
    ordered = letters.batch + letters.rows + letters.columns
    product = emit.reshape(product, [extents[letter] for letter in ordered])
    return [emit.transpose(product, [ordered.index(letter) for letter in letters.out])]
