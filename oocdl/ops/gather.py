"""Operators that read or write at places named by data: Gather, its gradient, LastAt for scatters, and Top.

``Gather(table, ids){batch, padding_idx}`` takes rows of a table: ``result[b, i] = table[b, ids[b, i]]``,
where ``b`` stands for the first ``batch`` axes (0 if it is left out: an embedding lookup). Negative ids
count from the end, as in ONNX since opset 11 and in PyTorch's ``table[ids]``; ``nn.Embedding``, which
alone has a ``padding_idx``, takes none.

Its gradient is a scatter-add: ``GatherGrad(ids, dy){rows, batch}``; over cut ids the partial tables are
summed. With ``padding_idx`` places of that id add nothing to it. ``LastAt(ids){rows, batch}`` says of each
row at which place it is named last, or -1. ``Top(x){axis, k, largest}`` has the places of the ``k`` largest
(or smallest) along an axis, the best first; of equal ones that with the lower index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oocdl.graph.ir.graph import Graph, Node, Role, Shape, Value
from oocdl.graph.ir.index import AxisRule, Whole
from oocdl.graph.ir.op_rule import Builder, OpRule, Spec, no_cost, no_gradient
from oocdl.graph.ir.speed import Given, Probe
from oocdl.ops._broadcast import axis_of, extents_of, fail, letters, operand_size, plain, size
from oocdl.ops._speed import MOVING, probe, streaming

WIDE_ROW = 4
"""Elements of a row beside which what is computed of its id does not count."""


def _batch(node: Node) -> int:
    return int(node.attrs.get("batch", 0))


def _as_batch(batch: int) -> dict[str, int]:
    return {"batch": batch} if batch else {}


_MOVES = ("Reshape", "Transpose", "Cast")
"""Operators whose result has each number of their first operand."""


@dataclass(frozen=True)
class Rows:
    """The ids that may stand in an input: all of them are looked up in a table."""

    table: str
    rows: int
    """The smallest of the tables, by name, and its number of rows."""
    negative: bool
    """Whether ids from ``-rows`` on are rows too, counted from the end."""


def rows_of(graph: Graph, negative: bool) -> dict[str, Rows]:
    """Return which ids may stand in those inputs and targets of a graph that are looked up as they are;
    with ``negative`` ids below 0 count from the end."""
    makers = {name: node for node in graph.nodes for name in node.outputs}
    found: dict[str, Rows] = {}
    for node in graph.nodes:
        if node.op != "Gather":
            continue
        table, ids = node.inputs
        while ids in makers and makers[ids].op in _MOVES and graph.values[ids].dtype == "int64":
            ids = makers[ids].inputs[0]
        value = graph.values[ids]
        if value.role not in (Role.INPUT, Role.TARGET) or value.dtype != "int64":
            continue
        rows = graph.values[table].shape[_batch(node)]
        here = Rows(table, rows, negative and "padding_idx" not in node.attrs)
        known = found.get(ids, here)
        smaller = here if here.rows < known.rows else known
        found[ids] = Rows(smaller.table, smaller.rows, here.negative and known.negative)
    return found


def _infer(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    (table, ids), batch = inputs, _batch(node)
    if ids.dtype != "int64" or len(table.shape) <= batch:
        fail(node, f"ids must be int64, not {ids.dtype}, for a table of shape {list(table.shape)}")
    if table.shape[:batch] != ids.shape[:batch]:
        fail(node, f"ids {list(ids.shape)} do not begin as the table {list(table.shape)} does")
    return [(ids.shape + table.shape[batch + 1 :], table.dtype)]


def _infer_grad(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    (ids, dy), rank = inputs, len(inputs[0].shape)
    if dy.shape[:rank] != ids.shape:
        fail(node, f"gradient {list(dy.shape)} does not begin with the shape {list(ids.shape)}")
    return [((*ids.shape[: _batch(node)], node.attrs["rows"], *dy.shape[rank:]), dy.dtype)]


def _infer_last(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    if inputs[0].dtype != "int64":
        fail(node, f"ids must be int64, not {inputs[0].dtype}")
    return [((*inputs[0].shape[: _batch(node)], node.attrs["rows"]), "int64")]


def _infer_top(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    shape, axis, k = inputs[0].shape, axis_of(node, inputs[0].shape), int(node.attrs["k"])
    if not 1 <= k <= shape[axis]:
        fail(node, f"there are no {k} elements along axis {axis} of a value of shape {list(shape)}")
    return [((*shape[:axis], k, *shape[axis + 1 :]), "int64")]


def _axes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    """The rule of Gather and, with table and result exchanged, of its gradient."""
    grad, batch = node.op == "GatherGrad", _batch(node)
    ids, table = (inputs[0], outputs[0]) if grad else (inputs[1], inputs[0])
    places, row = letters(ids, "i"), letters(table[batch + 1 :], "e")
    extents = {**extents_of(ids, "i"), **extents_of(table[batch + 1 :], "e")}
    if not grad:
        looked_up = (*places[:batch], Whole(table[batch]), *row)
        return AxisRule((looked_up, places), ((*places, *row),), extents)
    made, extents = (*places[:batch], plain("v", table[batch]), *row), {"v": table[batch], **extents}
    return AxisRule((places, (*places, *row)), (made,), extents, uncut=frozenset({"v"}), combine="sum")


def _axes_last(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    ids, rows, batch = inputs[0], outputs[0][-1], _batch(node)
    places, extents = letters(ids[:batch], "i"), {"v": rows, **extents_of(ids[:batch], "i")}
    read, made = (*places, *map(Whole, ids[batch:])), (*places, plain("v", rows))
    return AxisRule((read,), (made,), extents, uncut=frozenset({"v"}))


def _axes_top(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    axis, out = int(node.attrs["axis"]), letters(outputs[0])
    read = (*out[:axis], Whole(inputs[0][axis]), *out[axis + 1 :])
    return AxisRule((read,), (out,), extents_of(outputs[0]), uncut=frozenset({f"a{axis}"}))


def _gradient(build: Builder, node: Node, g: str) -> Sequence[str | None]:
    (table, ids), batch = node.inputs, _batch(node)
    if "padding_idx" in node.attrs:
        row = build.constant(node.attrs["padding_idx"], "int64")
        outside = build("Cast", build("Not", build("Equal", ids, row)), to=build.dtype(g))
        ones = (1,) * (len(build.shape(table)) - 1)
        g = build("Mul", g, build("Reshape", outside, shape=(*build.shape(ids), *ones)))
    return [build("GatherGrad", ids, g, rows=build.shape(table)[batch], **_as_batch(batch)), None]


def _scratch(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count ids made positive, and counted through all tables, in 64 bits; of the gradient a table, too."""
    ids, rows, table, each = (inputs[1], outputs[0], 0, 6)
    if node.op == "GatherGrad":
        ids, rows, table, each = (*inputs, size(outputs[0]), 8)
    narrow = _batch(node) or size(rows) < WIDE_ROW * size(ids)
    return table + (each * size(ids) if narrow else 0)


def _looked_up(shape: Shape) -> tuple[Given, Given, Given]:
    """Return the shapes of a table, of ids, and of their rows."""
    width, count = 4 * shape[-1], 64 * shape[2]
    return ((8192, width), "float32"), ((count,), "int64"), ((count, width), "float32")


RULES: tuple[OpRule, ...] = (
    OpRule(
        op="Gather", infer=_infer, gradient=_gradient, axes=_axes, flops=no_cost, scratch_elements=_scratch,
        speed=streaming(MOVING, 290, lambda shape: [Probe("Gather", _looked_up(shape)[:2])]),
        keeps_axes=False,
    ),
    OpRule(
        op="GatherGrad", infer=_infer_grad,
        # Gather the gradient: an element that was added at a place has the gradient of that place.
        gradient=lambda b, n, g: [None, b("Gather", g, n.inputs[0], **_as_batch(_batch(n)))],
        axes=_axes,
        speed=streaming(MOVING, 19, lambda s: [Probe("GatherGrad", _looked_up(s)[1:], {"rows": 8192})]),
        flops=lambda node, inputs, outputs: size(inputs[1]), scratch_elements=_scratch, keeps_axes=False,
    ),
    OpRule(
        op="LastAt", infer=_infer_last, gradient=no_gradient, axes=_axes_last,
        speed=streaming(
            MOVING, None, lambda s: [Probe("LastAt", (((size(s),), "int64"),), {"rows": size(s)})]
        ),
        flops=lambda node, inputs, outputs: max(size(inputs[0]), size(outputs[0])),
        scratch_elements=operand_size(3), keeps_axes=False,
    ),
    OpRule(
        op="Top", infer=_infer_top, gradient=no_gradient, axes=_axes_top,
        speed=streaming(MOVING, 0.2, lambda s: [probe("Top", s, axis=1, k=min(s[1], 5), largest=True)]),
        flops=operand_size(1), scratch_elements=operand_size(12),
    ),
)  # fmt: skip
