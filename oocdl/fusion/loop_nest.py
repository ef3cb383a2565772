"""Runs a chain as one compiled loop, which reads every operand once and writes every result once.

The loop and the order of its sums depend on the chain alone: not on threads, and not on how operands
happen to lie. A chain with a member that is not in the tables of ``loop_ops`` runs block by block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from oocdl.fusion.codegen import FIELDS_PER_ARRAY, OUTER_AXES, Loop, Op, Step, Stream, Sum, knows
from oocdl.fusion.grouping import Chain, Key, Member, members_of
from oocdl.fusion.jit import Code, compiled
from oocdl.fusion.loop_ops import ATTRIBUTES
from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Instruction

MOST_ROW_LANES = 1024
"""Maximum elements of an innermost axis that is one row; a longer one is cut into rows."""
CUT_ROW_LANES = 256
"""Lanes of each row that a longer axis is cut into."""
SUMS = frozenset({"ReduceSum", "Moments"})
"""Reductions that loops compute."""


class View(NamedTuple):
    """The address, shape and strides of an array."""

    address: int
    shape: Shape
    strides: tuple[int, ...]
    """Bytes between neighbours along each axis."""

    def holds(self, offset: int) -> bool:
        """Whether ``offset`` bytes from the first element is within the array."""
        last = sum((extent - 1) * step for extent, step in zip(self.shape, self.strides, strict=True))
        return 0 <= offset <= last


class Placed(NamedTuple):
    """The address of an array, and its strides along the axes of the loop."""

    address: int
    steps: tuple[int, ...]
    """Bytes between neighbours along each group of axes."""


@dataclass(frozen=True)
class _Group:
    """Neighbouring axes of the domain that the loop iterates over as one."""

    axes: tuple[int, ...]
    extent: int


@dataclass(frozen=True)
class _Nest:
    """The loops over the domain: up to ``OUTER_AXES`` around the rows, rows, and lanes."""

    outer: tuple[_Group, ...]
    rows: _Group | None
    """None: the axis of the lanes is cut into rows."""
    lanes: _Group


@dataclass(frozen=True, eq=False)
class _Total:
    """A reduction, and the column that it sums."""

    item: Instruction
    column: int
    kept: tuple[bool, ...]
    """Whether the result has it, for each axis of the domain."""


def _groups(domain: Shape, alike: Sequence[tuple[bool, ...]], cropped: bool) -> list[_Group]:
    """Join neighbouring axes of the domain where each of ``alike`` has the same flag for both.

    None are joined where an operand is ``cropped``.
    """
    groups: list[list[int]] = []
    for axis in (axis for axis, extent in enumerate(domain) if extent > 1):
        if groups and not cropped and all(flags[axis] == flags[groups[-1][-1]] for flags in alike):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return [_Group(tuple(axes), prod(domain[a] for a in axes)) for axes in groups]


def _nest(groups: list[_Group], totals: Sequence[_Total]) -> _Nest | None:
    """Choose outer axes, rows and lanes; None where each row and lane would need a sum of its own."""
    *before, lanes = groups or [_Group((), 1)]
    keeps = [total.kept for total in totals]
    inside = bool(lanes.axes) and any(kept[lanes.axes[0]] for kept in keeps)
    row_kept = bool(before) and any(kept[before[-1].axes[0]] for kept in keeps)
    if row_kept and inside:
        return None
    if row_kept or (lanes.extent > MOST_ROW_LANES and not inside):
        nest = _Nest(tuple(before), None, lanes)
    else:
        nest = _Nest(tuple(before[:-1]), before[-1] if before else _Group((), 1), lanes)
    return nest if len(nest.outer) <= OUTER_AXES else None


def _steps(view: View, groups: Iterable[_Group], domain: Shape) -> tuple[int, ...] | None:
    """Return the stride in bytes along each group; None where a group has no single stride."""
    found = []
    lead = len(domain) - len(view.shape)
    for group in groups:
        axes = [axis - lead for axis in group.axes if axis >= lead and view.shape[axis - lead] > 1]
        if not axes:
            found.append(0)
            continue
        for axis, inner in zip(axes, axes[1:], strict=False):
            if view.strides[axis] != view.strides[inner] * view.shape[inner]:
                return None
        found.append(view.strides[axes[-1]])
    return tuple(found)


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of the loop: over all full rows, or over the shorter last one."""

    rows: int
    lanes: int
    start: int
    """Position on the axis of the lanes at which the call begins."""


class _Ready(NamedTuple):
    """A call with all but the addresses of arrays."""

    code: Code
    arguments: Array
    addresses: Array
    """Indices of the arguments that are addresses; they hold offsets to be added to those of the arrays."""


@dataclass(frozen=True, eq=False)
class Fused:
    """A chain as a loop, which is compiled for the strides of its operands when they are first seen."""

    chain: Chain
    dtypes: Mapping[int, str]
    """Column -> dtype."""
    ops: tuple[Op, ...]
    reads: tuple[int, ...]
    """Columns that the loop reads."""
    writes: tuple[int, ...]
    """Columns that the loop writes."""
    totals: tuple[_Total, ...]
    nest: _Nest
    ready: dict[tuple[tuple[int, ...], ...], tuple[_Ready, ...]] = field(default_factory=dict)
    """Strides of all columns -> the calls for arrays that lie so."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes for sums, and for the results that are computed from them."""
        return 3 * sum(8 * prod(shape) for shape in self._kept_shapes)

    @cached_property
    def _calls(self) -> tuple[_Call, ...]:
        nest = self.nest
        if nest.rows is not None:
            return (_Call(nest.rows.extent, nest.lanes.extent, 0),)
        lanes = min(CUT_ROW_LANES, nest.lanes.extent)
        rows, rest = divmod(nest.lanes.extent, lanes)
        first = _Call(rows, lanes, 0)
        return (first, _Call(1, rest, rows * lanes)) if rest else (first,)

    @cached_property
    def _kept_shapes(self) -> tuple[Shape, ...]:
        """The shape of the sums of each total: planes, outer axes (one where reduced), lanes."""
        lanes = self._calls[0].lanes
        return tuple(
            (
                3 if total.item.op == "Moments" else 1,
                *(group.extent if total.kept[group.axes[0]] else 1 for group in self.nest.outer),
                lanes,
            )
            for total in self.totals
        )

    @cached_property
    def _axes(self) -> tuple[_Group, ...]:
        rows = () if self.nest.rows is None else (self.nest.rows,)
        return (*self.nest.outer, *rows, self.nest.lanes)

    def place(self, view: View) -> Placed | None:
        """Return an array's strides along the axes of the loop; None if the array must be copied first."""
        steps = _steps(view, self._axes, self.chain.domain)
        return None if steps is None else Placed(view.address, steps)

    def run(self, arrays: Mapping[int, Placed]) -> list[tuple[Instruction, list[Array]]]:
        """Run the loop over ``arrays``, which has each column that is read or written.

        Returns each reduction with its results, as float64 in the shape that the chain gives them.
        """
        sums = [np.zeros(shape) for shape in self._kept_shapes]
        placed = [arrays[column] for column in (*self.reads, *self.writes)]
        addresses = [array.address for array in placed]
        for array in sums:
            address, step = array.ctypes.data, array.strides[0]
            addresses += range(address, address + step * len(array), step)
        for ready in self._ready([array.steps for array in placed], sums):
            arguments = ready.arguments.copy()
            arguments[ready.addresses] += addresses
            ready.code(arguments.ctypes.data)
        return [
            (total.item, self._result(total, array)) for total, array in zip(self.totals, sums, strict=True)
        ]

    def _ready(self, steps: Sequence[tuple[int, ...]], sums: Sequence[Array]) -> tuple[_Ready, ...]:
        """Return the calls for columns with these strides, worked out once: a loop runs many times."""
        key = tuple(steps)
        if key not in self.ready:
            self.ready[key] = tuple(self._call(call, steps, sums) for call in self._calls)
        return self.ready[key]

    def _call(self, call: _Call, steps: Sequence[tuple[int, ...]], sums: Sequence[Array]) -> _Ready:
        extents = [group.extent for group in self.nest.outer]
        head = [[1] * (OUTER_AXES - len(extents)) + extents + [call.rows]]
        lines = [self._fields(each, call) for each in steps]
        for array in sums:
            outer = [
                step if n > 1 else 0 for step, n in zip(array.strides[1:-1], array.shape[1:-1], strict=True)
            ]
            lines += [[0, *[0] * (OUTER_AXES - len(outer)), *outer, 0, 8]] * len(array)
        arguments = np.array([number for line in head + lines for number in line], np.int64)
        addresses = len(head[0]) + FIELDS_PER_ARRAY * np.arange(len(lines))
        return _Ready(self._code(call, arguments), arguments, addresses)

    def _fields(self, steps: tuple[int, ...], call: _Call) -> list[int]:
        """Return where a call begins in an array, and the array's strides along all axes that a loop has."""
        *outer, lane = steps
        row = lane * call.lanes if self.nest.rows is None else outer.pop()
        return [call.start * lane, *[0] * (OUTER_AXES - len(outer)), *outer, row, lane]

    def _code(self, call: _Call, arguments: Array) -> Code:
        """Return the code for arrays with strides like these."""
        streams = []
        for number, column in enumerate((*self.reads, *self.writes)):
            fields = arguments[OUTER_AXES + 1 + FIELDS_PER_ARRAY * number :][:FIELDS_PER_ARRAY]
            single = call.lanes == 1 or fields[-1] == itemsize(self.dtypes[column])
            step: Step = "one" if fields[-1] == 0 else "next" if single else "far"
            streams.append(Stream(column, self.dtypes[column], step, bool(fields[-2])))
        reads, writes = tuple(streams[: len(self.reads)]), tuple(streams[len(self.reads) :])
        sums = tuple(Sum(total.column, total.item.op == "Moments") for total in self.totals)
        return compiled(Loop(self.ops, reads, writes, sums, call.lanes))

    def _result(self, total: _Total, sums: Array) -> list[Array]:
        """Compute the results of a reduction from the sums of the lanes."""
        lanes = self.nest.lanes.axes
        over = self.nest.rows is None or not (lanes and total.kept[lanes[0]])
        shape = total.item.kernel_shapes[0]
        if total.item.op == "ReduceSum":
            return [(sums[0].sum(-1) if over else sums[0]).reshape(shape)]
        counts, means, squares = sums
        if over:
            count = counts.sum(-1, keepdims=True)
            mean = (counts * means).sum(-1, keepdims=True) / count
            squares = (squares + counts * (means - mean) ** 2).sum(-1, keepdims=True)
            counts, means = count, mean
        return [means.reshape(shape), (squares / counts).reshape(shape)]


def fuse(
    chain: Chain,
    members: Sequence[Member],
    columns: Mapping[Key | int, int],
    full: Collection[int],
    dtype_of: Mapping[int, str],
) -> Fused | None:
    """Build the loop of a chain; None where loops cannot compute it.

    ``full``: slots of elementwise members that are read after the chain. ``dtype_of``: slot -> dtype.
    """
    rank = len(chain.domain)
    dtypes = {column: dtype_of[key[0] if isinstance(key, tuple) else key] for key, column in columns.items()}
    totals, ops = [], []
    summed: set[int] = set()
    for member in members:
        item = member.item
        if summed & set(member.ins):
            return None
        if item.op in SUMS and dtypes[member.ins[0]] in ("float32", "float64"):
            over = {axis % rank for axis in item.attrs["axes"]}
            kept = tuple(axis not in over for axis in range(rank))
            totals.append(_Total(item, member.ins[0], kept))
            summed.update(member.outs)
            continue
        attrs = tuple(sorted((name, value) for name, value in item.attrs.items() if name in ATTRIBUTES))
        op = Op(item.op, attrs, member.ins, member.outs[0], item.dtypes[0])
        if item.kernel_shapes[0] != chain.domain or not knows(op, dtypes):
            return None
        ops.append(op)
    if any(total.item.operands[0].shape != chain.domain for total in totals):
        return None
    outside = {column: key for key, column in columns.items() if isinstance(key, tuple)}
    varies = (((1,) * (rank - len(key[2])) + key[2]) for key in outside.values())
    alike = [tuple(extent > 1 for extent in shape) for shape in varies] + [total.kept for total in totals]
    cropped = any(key[1] is not None for key in outside.values())
    nest = _nest(_groups(chain.domain, alike, cropped), totals)
    if nest is None or any(len(key[2]) > rank for key in outside.values()):
        return None
    writes = tuple(columns[slot] for item in chain.members for slot in item.outputs if slot in full)
    return Fused(chain, dtypes, tuple(ops), tuple(outside), writes, tuple(totals), nest)


def is_loop(chain: Chain, dtype_of: Mapping[int, str]) -> bool:
    """Whether a chain can run as one loop."""
    members, columns = members_of(chain, lambda op: 0)
    return fuse(chain, members, columns, (), dtype_of) is not None
