"""Programs for tests: one instruction by hand, or a whole graph without any cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oocdl.graph.ir.graph import Array, Graph, Node, Shape
from oocdl.graph.ir.index import Around, AxisRule, Index, Inverse, Range, clip
from oocdl.graph.ir.program import Instruction, Operand, Program

Pads = tuple[tuple[int, int], ...]
AxesOf = Callable[[Node, Sequence[Shape], Sequence[Shape]], AxisRule]


def operand(
    slot: int,
    shape: Shape,
    crop: Sequence[Range] | None = None,
    pads: Sequence[Range] | None = None,
) -> Operand:
    """An operand, its sequences made tuples."""
    return Operand(
        slot,
        None if crop is None else tuple(tuple(pair) for pair in crop),  # type: ignore[misc]
        tuple(shape),
        None if pads is None else tuple(tuple(pair) for pair in pads),  # type: ignore[misc]
    )


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


def whole_program(
    graph: Graph,
    axes_of: Mapping[str, AxesOf],
    fills: Mapping[str, float],
    taps_of: Callable[[Node, int], Mapping[str, Array]] | None = None,
    outputs: Sequence[str] | None = None,
) -> tuple[Program, list[str]]:
    """All of ``graph`` as one program, and the names of its inputs in order.

    ``axes_of`` and ``fills`` are those of the operators' rules, ``taps_of`` gives
    the columns and weights of a Resample from its node and the extent of its input.
    """
    made = {name for node in graph.nodes for name in node.outputs}
    inputs = [name for name in graph.values if name not in made]
    slots = {name: slot for slot, name in enumerate(graph.values)}
    instructions = []
    for node in graph.nodes:
        shapes = [graph.values[name].shape for name in node.inputs]
        results = tuple(graph.values[name].shape for name in node.outputs)
        rule = axes_of[node.op](node, shapes, results)
        attrs = dict(node.attrs)
        if node.op == "Resample" and taps_of is not None:
            attrs |= taps_of(node, shapes[0][int(attrs["axis"])])
        crop = whole_crop(rule)
        if crop is not None:
            attrs["crop"] = crop
        operands = tuple(
            whole_operand(slots[name], shape, indices, rule)
            for name, shape, indices in zip(node.inputs, shapes, rule.inputs, strict=True)
        )
        outs = tuple(slots[name] for name in node.outputs)
        dtypes = tuple(graph.values[name].dtype for name in node.outputs)
        fill = fills.get(node.op, 0.0)
        instructions.append(Instruction(node.op, operands, outs, results, results, dtypes, attrs, fill))
    wanted = tuple(outputs or graph.outputs)
    return (
        Program(
            tuple(slots[name] for name in inputs),
            tuple(graph.values[name].shape for name in inputs),
            tuple(graph.values[name].dtype for name in inputs),
            tuple(instructions),
            tuple(operand(slots[name], graph.values[name].shape) for name in wanted),
            "whole:" + ",".join(wanted) + f":{id(graph)}",
        ),
        inputs,
    )


def whole_operand(slot: int, shape: Shape, indices: Sequence[Index | None], rule: AxisRule) -> Operand:
    """The operand of a node that is not cut: what its axes need, clipped and padded."""
    crop, pads = [], []
    for extent, index in zip(shape, indices, strict=True):
        wanted = (0, extent)
        if index is not None:
            letter = getattr(index, "letter", None)
            wanted = index.needs((0, rule.extents[letter]) if letter else (0, extent))
        start, stop = clip(wanted, extent)
        crop.append((start, stop))
        pads.append((start - wanted[0], wanted[1] - stop))
    seen = tuple(stop - start for start, stop in crop)
    return operand(
        slot,
        seen,
        None if seen == tuple(shape) else crop,
        pads if any(map(any, pads)) else None,
    )


def whole_crop(rule: AxisRule) -> tuple[int, ...] | None:
    """What comes before the wanted region in a kernel's uncropped result, whole node."""
    found: dict[str, int] = {}
    for indices in rule.inputs:
        for index in indices:
            if isinstance(index, Inverse):
                start = index.needs((0, rule.extents[index.letter]))[0]
                found.setdefault(index.letter, -(start * index.stride - index.pad))
            elif isinstance(index, Around):
                found[index.letter] = -index.needs((0, rule.extents[index.letter]))[0]
    if not found:
        return None
    return tuple(found.get(axis.letter, 0) if axis else 0 for axis in rule.outputs[0])
