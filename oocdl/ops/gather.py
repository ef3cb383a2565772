"""Embedding lookup: ``Gather(table, ids){padding_idx}`` takes rows of the table's axis 0.

Its gradient is a scatter-add: ``GatherGrad(ids, dy){rows}``; over cut ids the partial
tables are summed. With ``padding_idx`` places of that id add nothing to it.

An id below 0 counts from the end, as ONNX has it since opset 11 and PyTorch in ``table[ids]``;
``nn.Embedding``, which alone has a ``padding_idx``, takes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oocdl.graph.ir.graph import Graph, Node, Role, Shape, Value
from oocdl.graph.ir.index import AxisRule, Plain, Whole
from oocdl.graph.ir.op_rule import Builder, OpRule, Spec, no_scratch
from oocdl.graph.ir.speed import Given, Probe
from oocdl.ops._broadcast import fail, no_second_derivative, plain, size
from oocdl.ops._speed import MOVING, streaming

_MOVES = ("Reshape", "Transpose", "Cast")
"""Operators whose result has each number of their first operand."""


@dataclass(frozen=True)
class Rows:
    """Which ids may stand in an input: all of them are looked up in a table."""

    table: str
    """The smallest of the tables, by name."""
    rows: int
    """Of that table."""
    negative: bool
    """Whether ids from ``-rows`` on are rows too, counted from the end."""


def rows_of(graph: Graph, negative: bool) -> dict[str, Rows]:
    """Return which ids may stand in those inputs of a graph that are looked up as they are.

    ``negative``: whether ids below 0 count from the end.
    """
    makers = {name: node for node in graph.nodes for name in node.outputs}
    found: dict[str, Rows] = {}
    for node in graph.nodes:
        if node.op != "Gather":
            continue
        table, ids = node.inputs
        while ids in makers and makers[ids].op in _MOVES and graph.values[ids].dtype == "int64":
            ids = makers[ids].inputs[0]
        value = graph.values[ids]
        if value.role is not Role.INPUT or value.dtype != "int64":
            continue
        here = Rows(table, graph.values[table].shape[0], negative and "padding_idx" not in node.attrs)
        known = found.get(ids, here)
        smaller = here if here.rows < known.rows else known
        found[ids] = Rows(smaller.table, smaller.rows, here.negative and known.negative)
    return found


def _infer(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    table, ids = inputs
    if ids.dtype != "int64" or not table.shape:
        fail(node, f"ids must be int64, not {ids.dtype}, for a table of shape {list(table.shape)}")
    return [(ids.shape + table.shape[1:], table.dtype)]


def _infer_grad(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    ids, dy = inputs
    rank = len(ids.shape)
    if dy.shape[:rank] != ids.shape:
        fail(node, f"gradient {list(dy.shape)} does not begin with the shape {list(ids.shape)}")
    return [((node.attrs["rows"], *dy.shape[rank:]), dy.dtype)]


def _letters(kind: str, shape: Shape) -> tuple[Plain | None, ...]:
    return tuple(plain(f"{kind}{axis}", extent) for axis, extent in enumerate(shape))


def _extents(ids: Shape, row: Shape) -> dict[str, int]:
    """Return the extents of the letters: ``i0, i1, ..`` of the ids, ``e0, e1, ..`` of a row."""
    return {
        **{f"i{axis}": extent for axis, extent in enumerate(ids)},
        **{f"e{axis}": extent for axis, extent in enumerate(row)},
    }


def _axes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    table, ids = inputs
    places, row = _letters("i", ids), _letters("e", table[1:])
    return AxisRule(
        inputs=((Whole(table[0]), *row), places),
        outputs=((*places, *row),),
        extents=_extents(ids, table[1:]),
    )


def _axes_grad(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    ids, table = inputs[0], outputs[0]
    places, row = _letters("i", ids), _letters("e", table[1:])
    return AxisRule(
        inputs=(places, (*places, *row)),
        outputs=((plain("v", table[0]), *row),),
        extents={"v": table[0], **_extents(ids, table[1:])},
        uncut=frozenset({"v"}),
        combine="sum",
    )


def _gradient(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    if grads[0] is None:
        return [None, None]
    table, ids = node.inputs
    dy = grads[0]
    if "padding_idx" in node.attrs:
        row = build.constant(node.attrs["padding_idx"], "int64")
        outside = build("Cast", build("Not", build("Equal", ids, row)), to=build.dtype(dy))
        ones = (1,) * (len(build.shape(table)) - 1)
        dy = build("Mul", dy, build("Reshape", outside, shape=(*build.shape(ids), *ones)))
    return [build("GatherGrad", ids, dy, rows=build.shape(table)[0]), None]


def _no_flops(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return 0


def _flops_grad(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return size(inputs[1])


def _looked_up(shape: Shape) -> tuple[Given, Given, Given]:
    """Return the shapes of a table, of ids, and of their rows."""
    width, count = 4 * shape[-1], 64 * shape[2]
    return ((8192, width), "float32"), ((count,), "int64"), ((count, width), "float32")


def _probes(shape: Shape) -> Iterator[Probe]:
    table, ids, _ = _looked_up(shape)
    yield Probe("Gather", (table, ids))


def _probes_grad(shape: Shape) -> Iterator[Probe]:
    table, ids, rows = _looked_up(shape)
    yield Probe("GatherGrad", (ids, rows), {"rows": table[0][0]})


RULES: tuple[OpRule, ...] = (
    OpRule(
        op="Gather",
        infer=_infer,
        gradient=_gradient,
        axes=_axes,
        speed=streaming(MOVING, 290, _probes),
        flops=_no_flops,
        scratch_elements=no_scratch,
        keeps_axes=False,
    ),
    OpRule(
        op="GatherGrad",
        infer=_infer_grad,
        gradient=no_second_derivative,
        axes=_axes_grad,
        speed=streaming(MOVING, 19, _probes_grad),
        flops=_flops_grad,
        scratch_elements=lambda node, inputs, outputs: size(outputs[0]),
        keeps_axes=False,
    ),
)
