"""Types of whole numbers: all are int64 in a graph, and wrap around where the file's have fewer bits.

A name of a value carries the type of the file, into which results of arithmetic are brought back. Of uint64
the bits are kept: what compares, divides or makes them floating-point is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np

from oocdl.graph.ir.graph import Node, is_float
from oocdl.graph.onnx.bodies import bodies
from oocdl.graph.onnx.checks import schema_of
from oocdl.graph.onnx.context import Context, Entry

WIDE = np.dtype(np.int64)
_MOST = np.iinfo(WIDE).max
_UNSIGNED = np.dtype(np.uint64)
_LEAVING = frozenset({"Abs", "Add", "Div", "Einsum", "GatherGrad", "Mul", "Neg", "Pow", "ReduceSum", "Sub"})
"""Operators of a graph whose results may be outside of the type of their operands."""
_SIGNED = frozenset({"Abs", "Div", "Greater", "Less", "Max", "Min", "Mod", "ReduceMax", "Top"})
"""Operators of a graph that are others for numbers without a sign."""


class Typed(str):
    """The name of a value of whole numbers, with the type that these have in the file."""

    kind: np.dtype[Any]


def typed(value: str, kind: np.dtype[Any]) -> str:
    """Return the name of a value that has the type ``kind`` in the file."""
    if kind.kind not in "iu":
        return str(value)
    made = Typed(value)
    made.kind = kind
    return made


def kind_of(ctx: Context, entry: Entry) -> np.dtype[Any]:
    """Return the type that an entry has in the file, if it is one of whole numbers; a sequence has none."""
    if isinstance(entry, list):
        return np.dtype(object)
    if isinstance(entry, np.ndarray):
        return entry.dtype
    return entry.kind if isinstance(entry, Typed) else np.dtype(ctx.build.dtype(entry))


def kind_of_sums(ctx: Context, kind: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of running sums: PyTorch's are int64, and its exporters leave the Cast to that out."""
    promoted = kind.kind == "b" or (kind.kind in "iu" and (kind.itemsize < 4 or bool(ctx.facts)))
    return WIDE if promoted else kind


def cast(ctx: Context, value: str, source: np.dtype[Any], target: np.dtype[Any]) -> str:
    """Cast a value to a type of whole numbers."""
    # ONNX leaves open what becomes of a floating-point number outside of the type: here it is what PyTorch
    # and NumPy make of it, who go through int32 for types that this holds.
    made = str(value)
    if source.kind not in "iu":
        made = ctx.make("Cast", value, to=WIDE.name)
    if source.kind == "f" and target == _UNSIGNED:
        ctx.refuse("floating-point numbers made uint64; cast them to int64")
    if source.kind == "f" and target.itemsize < 8 and target != np.uint32:
        low, high = (ctx.number(getattr(np.iinfo(np.int32), end), made) for end in ("min", "max"))
        outside = ctx.make("Or", ctx.make("Less", made, low), ctx.make("Greater", made, high))
        made = ctx.make("Where", outside, low, made)
    safe = np.can_cast(np.int32 if source.kind == "f" else source, target, "safe")
    return typed(made if safe else _wrapped(ctx, made, target), target)


def _wrapped(ctx: Context, value: str, kind: np.dtype[Any]) -> str:
    """Bring numbers into a type of fewer bits, modulo the numbers that it has."""
    if kind.itemsize == WIDE.itemsize:
        return value
    low, count = int(np.iinfo(kind).min), 1 << 8 * kind.itemsize
    if low:
        value = ctx.make("Sub", value, ctx.number(low, value))
    value = ctx.make("Mod", value, ctx.number(count, value), fmod=0)
    return ctx.make("Add", value, ctx.number(low, value)) if low else value


def with_types(ctx: Context, outputs: Sequence[Entry], nodes: Sequence[Node]) -> Sequence[Entry]:
    """Return the outputs of the context's node in the types that ONNX says; ``nodes``: what it has become."""
    schema = schema_of(ctx.node.op, ctx.opset)
    if schema is None or bodies(ctx.node):
        return outputs
    kinds: dict[str, np.dtype[Any]] = {}
    for slot, name in zip(_each(schema.inputs), ctx.node.inputs, strict=False):
        if name:
            kind = kinds.setdefault(slot.type_str, kind_of(ctx, ctx.env[name]))
            _check_unsigned(ctx, ctx.env[name], kind, nodes)
    leaves = any(node.op in _LEAVING and ctx.build.dtype(node.outputs[0]) == WIDE.name for node in nodes)

    def of_type(made: Entry, kind: np.dtype[Any]) -> Entry:
        if not isinstance(made, str) or isinstance(made, Typed) or ctx.build.dtype(made) != WIDE.name:
            return made
        kind = kind if kind.kind in "iu" else WIDE
        return typed(_wrapped(ctx, made, kind) if leaves else made, kind)

    slots = zip(outputs, _each(schema.outputs), strict=False)
    return [of_type(made, kinds.get(slot.type_str, WIDE)) for made, slot in slots]


def _each(slots: Sequence[Any]) -> Iterable[Any]:
    """Return one slot for each operand: the last may take many."""
    return chain(slots, repeat(slots[-1])) if slots else ()


def _check_unsigned(ctx: Context, entry: Entry, kind: np.dtype[Any], nodes: Sequence[Node]) -> None:
    """Refuse what is wrong for numbers of uint64 of which the sign of int64 is a digit."""
    if kind != _UNSIGNED or (isinstance(entry, np.ndarray) and int(entry.max(initial=0)) <= _MOST):
        return
    casts = ctx.node.op in ("Cast", "CastLike")  # digits that are cut off are right, by Mod too
    for node in nodes:
        floats = node.op == "Cast" and is_float(str(node.attrs["to"]))
        if floats or (node.op in _SIGNED and not casts):
            ctx.refuse("numbers of uint64; cast them to int64 before it")
