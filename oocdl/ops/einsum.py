"""Einsum of two operands: every matrix product. The equation is the axis rule.

    Einsum(a, b){equation "abk,kc->abc"}

Letters are distinct within an operand; a letter that is not in the output is summed,
also if only one operand has it. Letters of an Einsum follow their extents exactly
(no broadcasting).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from oocdl.graph.ir.graph import Node, Shape, Value
from oocdl.graph.ir.index import AxisRule
from oocdl.graph.ir.op_rule import Builder, OpRule, Product, Spec
from oocdl.graph.ir.operands import Letters
from oocdl.graph.ir.program import Instruction
from oocdl.graph.ir.speed import Computing, Heavy, Scale
from oocdl.ops._broadcast import extents_by, fail, plain_by, same_float, size, summed_dtype
from oocdl.ops._speed import MOVING, READING, probe

EXTENTS, FEW_EXTENTS = (1, 4, 16, 64, 256, 1024), (16, 256, 1024)
"""Smallest extents that are measured, in float32 and in bfloat16."""


def parse(node: Node) -> tuple[str, str, str]:
    """Return the letters of both operands and of the output."""
    left, arrow, out = node.attrs["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != 2:
        fail(node, f"equation '{node.attrs['equation']}' does not have two operands and an output")
    for term in (*terms, out):
        if len(set(term)) != len(term):
            fail(node, f"equation '{node.attrs['equation']}' repeats a letter in '{term}'")
    if not set(out) <= set(left):
        fail(node, f"equation '{node.attrs['equation']}' has an output letter that no operand has")
    return terms[0], terms[1], out


def _extents(node: Node, shapes: Sequence[Shape]) -> dict[str, int]:
    return extents_by(node, parse(node)[:2], shapes)


def _infer(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    dtype, extents = same_float(node, inputs), _extents(node, [value.shape for value in inputs])
    return [(tuple(extents[letter] for letter in parse(node)[2]), summed_dtype(dtype))]


def _axes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    *terms, out = parse(node)
    return AxisRule(plain_by(terms, inputs), plain_by([out], outputs), _extents(node, inputs), combine="sum")


def _gradient(build: Builder, node: Node, g: str) -> Sequence[str | None]:
    """``d a = einsum(g, b)`` with the letters exchanged; a letter of ``a`` alone that was summed
    is a broadcast of the result."""
    terms, out = parse(node)[:2], parse(node)[2]
    found: list[str | None] = []
    for mine, (term, other) in enumerate((terms, terms[::-1])):
        shape = build.shape(node.inputs[mine])
        known = "".join(letter for letter in term if letter in out or letter in other)
        grad = build("Einsum", g, node.inputs[1 - mine], equation=f"{out},{other}->{known}")
        if known != term:
            aligned = tuple(n if c in known else 1 for c, n in zip(term, shape, strict=True))
            grad = build("Expand", build("Reshape", grad, shape=aligned), shape=shape)
        found.append(grad)
    return found


# Speed ---------------------------------------------------------------------------------------


def _kind(step: Instruction, shapes: Sequence[Shape], thin_slab_elements: int) -> tuple[str, int]:
    letters, extents = Letters(step.attrs["equation"]), _extents(step.node, shapes)
    sides = letters.inner, letters.rows, letters.columns
    inner, rows, columns = (prod(extents[x] for x in side) for side in sides)
    smallest = max(min(inner, rows, columns), 1)
    if any(extents[x] > 1 for x in letters.batch):
        return "Einsum batched", smallest
    return f"Einsum {'inner' if inner == smallest else 'outer'}", smallest


def _transposed(step: Instruction) -> Sequence[str]:
    """Return the Transpose that follows, unless the result has the rows of the left operand first."""
    letters = Letters(step.attrs["equation"])
    return () if letters.batch + letters.rows + letters.columns == letters.out else (MOVING,)


def _probes(scale: Scale) -> Iterator[Heavy]:
    for small in FEW_EXTENTS if scale.few else EXTENTS:
        # A matrix that meets few rows comes from memory, not from the caches. No powers of two: rows of
        # whole pages fall into the same few sets of a cache, and take up to twice as long.
        wide = max(int((4000 if small < 64 else 2000) * scale.share), 8)
        rows: Shape = (small, wide)
        yield "Einsum outer", small, probe("Einsum", rows, (wide, wide), equation="ab,bc->ac")
        yield "Einsum outer", small, probe("Einsum", rows, (wide, wide), equation="ab,cb->ac")
        yield "Einsum inner", small, probe("Einsum", rows, rows, equation="ab,ac->bc")
        other = max(int(max(256, small) * scale.share), 4)
        batch = max(int(64 * scale.share * min(1, 256 / small) ** 2), 2)
        shapes = (batch, other, other), (batch, other, small)
        yield "Einsum batched", small, probe("Einsum", *shapes, equation="nab,nbc->nac")


RULES: tuple[OpRule, ...] = (
    OpRule(
        op="Einsum", infer=_infer, gradient=_gradient, axes=_axes, product=Product(), keeps_axes=False,
        speed=Computing(like=READING, kind=_kind, probes=_probes, then=_transposed),
        # a multiply-add for each point of the space of all letters
        flops=lambda node, inputs, outputs: 2 * prod(_extents(node, inputs).values()),
        # permuted copies of operands and result, as a batched matrix product needs them
        scratch_elements=lambda node, inputs, outputs: sum(map(size, (*inputs, *outputs))),
    ),
)  # fmt: skip
