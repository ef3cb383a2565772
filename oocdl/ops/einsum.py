"""Einsum of two operands: every matrix product. The equation is the axis rule.

    Einsum(a, b){equation "abk,kc->abc"}

Letters are distinct within an operand; a letter that is not in the output is summed,
also if only one operand has it. Letters of an Einsum follow their extents exactly
(no broadcasting).
"""

from __future__ import annotations

from collections.abc import Sequence

from oocdl.graph.axes import AxisRule
from oocdl.graph.ir import Node, Shape, Value
from oocdl.graph.rule import Builder, OpRule, Spec
from oocdl.ops._broadcast import fail, is_float, plain, same_dtype, size, summed_dtype


def parse(node: Node) -> tuple[str, str, str]:
    """The letters of both operands and of the output."""
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
    """Letter -> extent, checked."""
    found: dict[str, int] = {}
    for term, shape in zip(parse(node)[:2], shapes, strict=True):
        if len(term) != len(shape):
            fail(node, f"term '{term}' does not fit an operand of shape {list(shape)}")
        for letter, extent in zip(term, shape, strict=True):
            if found.setdefault(letter, extent) != extent:
                fail(node, f"letter '{letter}' has extents {found[letter]} and {extent}")
    return found


def _infer(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    dtype = same_dtype(node, [value.dtype for value in inputs])
    if not is_float(dtype):
        fail(node, f"its operands must be floating point, not {dtype}")
    extents = _extents(node, [value.shape for value in inputs])
    return [(tuple(extents[letter] for letter in parse(node)[2]), summed_dtype(dtype))]


def _axes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    first, second, out = parse(node)
    extents = _extents(node, inputs)
    return AxisRule(
        inputs=tuple(tuple(plain(letter, extents[letter]) for letter in term) for term in (first, second)),
        outputs=(tuple(plain(letter, extents[letter]) for letter in out),),
        extents=extents,
        combine="sum",
    )


def _gradient(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    """``d a = einsum(g, b)`` with the letters exchanged; a letter of ``a`` alone that was summed
    is a broadcast of the result."""
    if grads[0] is None:
        return [None, None]
    terms, out = parse(node)[:2], parse(node)[2]
    found: list[str | None] = []
    for mine, (term, other) in enumerate((terms, terms[::-1])):
        shape = build.shape(node.inputs[mine])
        known = "".join(letter for letter in term if letter in out or letter in other)
        grad = build("Einsum", grads[0], node.inputs[1 - mine], equation=f"{out},{other}->{known}")
        if known != term:
            aligned = tuple(n if c in known else 1 for c, n in zip(term, shape, strict=True))
            grad = build("Expand", build("Reshape", grad, shape=aligned), shape=shape)
        found.append(grad)
    return found


def _flops(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """A multiply-add for each point of the space of all letters."""
    return 2 * size(list(_extents(node, inputs).values()))


def _workspace(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Permuted copies of operands and result, as a batched matrix product wants them."""
    return sum(size(shape) for shape in (*inputs, *outputs))


RULES: tuple[OpRule, ...] = (
    OpRule("Einsum", infer=_infer, gradient=_gradient, axes=_axes, flops=_flops, workspace=_workspace),
)
