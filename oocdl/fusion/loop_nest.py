"""Runs a chain as one compiled loop, which reads every operand once and writes every result once.

The loop and the order of its sums depend on the chain and on the number of its parts alone: not on threads
that run, and not on how operands happen to lie.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from oocdl.fusion.chain import Chain, Crop
from oocdl.fusion.codegen import FIELDS_PER_ARRAY, OUTER_AXES, Loop, Op, Step, Stream, Sum
from oocdl.fusion.jit import Code, compiled
from oocdl.fusion.loop_axes import REDUCTIONS, Nest, Reduction
from oocdl.fusion.loop_ops import ATTRIBUTES
from oocdl.fusion.team import ALONE, SPLIT_ELEMENTS, Team, bounds_of
from oocdl.fusion.totals import PLANES
from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Instruction

CUT_ROW_LANES = 256
"""Lanes of each row that a longer axis is cut into."""
STREAMED_ROW_LANES, STREAMED_LANES = 64, 1024
"""The same, and lanes of all rows of a chunk, where nothing is reduced: memory is read nearly in its order.
With chunks of 64 rows a norm of 96 channels took 1.9 times as long."""

LEAST_PLACES = 8
"""Fewest places for each thread of an outer axis that is cut, if another has as many."""

Key = tuple[int, Crop | None, Shape]
"""Slot, crop and shape of an operand."""


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
    """The address of an array, and its strides in bytes along the axes of the loop."""

    address: int
    steps: tuple[int, ...]


class _Call(NamedTuple):
    """One call of the loop: over all full rows, or over the shorter last one."""

    rows: int
    lanes: int
    start: int
    """Position on the axis of the lanes at which the call begins."""


class _Ready(NamedTuple):
    """A call with all but the addresses of arrays."""

    code: Code
    arguments: Array
    """A row for each part of the call."""
    addresses: Array
    """Indices of the arguments that are addresses; they hold offsets to be added to those of the arrays."""


class Fused:
    """A chain as a loop, which is compiled for the strides of its operands when they are first seen."""

    def __init__(
        self,
        chain: Chain,
        full: Collection[int],
        dtype_of: Mapping[int, str],
        team: Team = ALONE,
    ) -> None:
        """``full``: slots of elementwise members that are read after it. ``dtype_of``: slot -> dtype.

        ``team``: the threads that the loop is cut for.
        """
        self.chain, self.nest, self.team = chain, chain.nest, team
        self.columns: dict[Key | int, int] = {}
        """Operand from outside, or slot that a member makes -> its column: slots are no matter of a loop."""
        totals, ops = list[Reduction](), list[Op]()
        for item in chain.members:
            ins, outs = self._number(item)
            if item.op in REDUCTIONS:
                totals.append(Reduction(item, ins[0], outs))
            else:
                known = sorted((name, value) for name, value in item.attrs.items() if name in ATTRIBUTES)
                ops.append(Op(item.op, tuple(known), ins, outs[0], item.dtypes[0]))
        self.ops, self.totals = tuple(ops), totals
        keys = [(key[0] if isinstance(key, tuple) else key, column) for key, column in self.columns.items()]
        self.dtypes = {column: dtype_of[slot] for slot, column in keys}
        self.reads = tuple(column for key, column in self.columns.items() if isinstance(key, tuple))
        self.writes = tuple(column for key, column in self.columns.items() if key in full)
        """Columns that the loop reads, and that it writes element by element."""
        self.completed = tuple(column for t in totals if self.nest.completes(t) for column in t.outs)
        """Columns of reductions' results that the loop writes."""
        self._in_memory = [total for total in totals if not self.nest.completes(total)]
        rows = () if self.nest.rows is None else (self.nest.rows,)
        self._axes = (*self.nest.outer, *rows, self.nest.lanes)
        self._calls = _calls(self.nest, bool(totals))
        outer = [tuple(g.extent if t.keeps(g) else 1 for g in self.nest.outer) for t in self._in_memory]
        kept, lanes = zip(self._in_memory, outer, strict=True), self._calls[0].lanes
        self._cut, self._bounds = self._parts(team.threads)
        joint = all(t.keeps(self._axes[self._cut]) for t in self._in_memory)
        self._copies = 1 if joint else len(self._bounds) - 1
        """Number of parts that have totals of their own in memory."""
        self._kept_shapes: list[Shape] = [
            (self._copies, PLANES[t.item.op], *extents, lanes) for t, extents in kept
        ]
        """The shape of each total in memory: parts, planes, outer axes (one where reduced), lanes."""
        self.scratch_bytes = 3 * sum(8 * prod(shape) for shape in self._kept_shapes)
        """Bytes for sums in memory, and for the results that are computed from them."""
        self.ready: dict[tuple[tuple[int, ...], ...], list[_Ready]] = {}
        """Strides of all columns -> the calls for arrays that lie so."""

    def _parts(self, threads: int) -> tuple[int, list[int]]:
        """Return the axis of the loop that is cut, of the outer ones and the rows, and the parts' bounds."""
        extents = [*(group.extent for group in self.nest.outer), self._calls[0].rows]
        if self.completed and not self.nest.across:
            extents[-1] = 1  # all rows are reduced at once
        if prod(self.chain.domain) < SPLIT_ELEMENTS:
            threads = 1
        enough = (axis for axis, extent in enumerate(extents) if extent >= LEAST_PLACES * threads)
        cut = next(enough, extents.index(max(extents)))
        return cut, bounds_of(extents[cut], threads)

    def _number(self, item: Instruction) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the columns of a member's operands and results."""
        columns, ins = self.columns, list[int]()
        for o in item.operands:
            key = o.slot if o.slot in columns else (o.slot, o.crop, o.shape)
            ins.append(columns.setdefault(key, len(columns)))
        return tuple(ins), tuple([columns.setdefault(slot, len(columns)) for slot in item.outputs])

    def place(self, view: View) -> Placed | None:
        """Return an array's strides along the axes of the loop; None if the array must be copied first."""
        found, lead = list[int](), len(self.chain.domain) - len(view.shape)
        for group in self._axes:
            axes = [axis - lead for axis in group.axes if axis >= lead and view.shape[axis - lead] > 1]
            for axis, inner in zip(axes, axes[1:], strict=False):
                if view.strides[axis] != view.strides[inner] * view.shape[inner]:
                    return None
            found.append(view.strides[axes[-1]] if axes else 0)
        return Placed(view.address, tuple(found))

    def run(self, arrays: Mapping[int, Placed]) -> list[tuple[Instruction, list[Array]]]:
        """Run the loop over ``arrays``, which has each column that is read or written.

        Returns each reduction that is added up in memory with its results, as float64 in the shape that the
        chain gives them.
        """
        sums = [np.zeros(shape) for shape in self._kept_shapes]
        placed = [arrays[column] for column in (*self.reads, *self.writes, *self.completed)]
        addresses = [array.address for array in placed]
        for array in sums:
            address, step = array.ctypes.data, array.strides[1]
            addresses += range(address, address + step * array.shape[1], step)
        steps = tuple([array.steps for array in placed])
        if steps not in self.ready:  # worked out once: a loop runs many times
            self.ready[steps] = [self._call(call, steps, sums) for call in self._calls]
        for ready in self.ready[steps]:
            arguments = ready.arguments.copy()
            arguments[:, ready.addresses] += addresses
            self.team.run(ready.code, arguments, range(len(arguments) + 1))
        return [
            (t.item, self._result(t, _joined(t, array)))
            for t, array in zip(self._in_memory, sums, strict=True)
        ]

    def _call(self, call: _Call, steps: Sequence[tuple[int, ...]], sums: Sequence[Array]) -> _Ready:
        extents = [group.extent for group in self.nest.outer]
        head = [1] * (OUTER_AXES - len(extents)) + extents + [call.rows]
        lines, copies = [self._fields(each, call) for each in steps], [0] * len(steps)
        for array in sums:
            steps_and_extents = zip(array.strides[2:-1], array.shape[2:-1], strict=True)
            outer = [step if n > 1 else 0 for step, n in steps_and_extents]
            lines += [[0, *[0] * (OUTER_AXES - len(outer)), *outer, 0, 8]] * array.shape[1]
            copies += [array.strides[0] if self._copies > 1 else 0] * array.shape[1]
        arguments = np.array([*head, *(number for line in lines for number in line)], np.int64)
        addresses = len(head) + FIELDS_PER_ARRAY * np.arange(len(lines))
        code = self._code(call, arguments)
        # What is left of an axis that is cut into rows is short, and is one part.
        bounds = self._bounds if call is self._calls[0] else [0, call.rows]
        parts = np.tile(arguments, (len(bounds) - 1, 1))
        place = OUTER_AXES - len(extents) + self._cut
        if len(parts) > 1:
            parts[:, place] = np.diff(bounds)
            parts[:, addresses] += np.outer(bounds[:-1], arguments[addresses + 1 + place])
            parts[:, addresses] += np.outer(np.arange(len(parts)), copies)
        return _Ready(code, parts, addresses)

    def _fields(self, steps: tuple[int, ...], call: _Call) -> list[int]:
        """Return where a call begins in an array, and the array's strides along all axes that a loop has."""
        *outer, lane = steps
        row = lane * call.lanes if self.nest.rows is None else outer.pop()
        return [call.start * lane, *[0] * (OUTER_AXES - len(outer)), *outer, row, lane]

    def _code(self, call: _Call, arguments: Array) -> Code:
        streams: dict[int, Stream] = {}
        for number, column in enumerate((*self.reads, *self.writes, *self.completed)):
            fields = arguments[OUTER_AXES + 1 + FIELDS_PER_ARRAY * number :][:FIELDS_PER_ARRAY]
            single = call.lanes == 1 or fields[-1] == itemsize(self.dtypes[column])
            step: Step = "one" if fields[-1] == 0 else "next" if single else "far"
            streams[column] = Stream(column, self.dtypes[column], step, bool(fields[-2]))
        reads, writes = (tuple(streams[column] for column in some) for some in (self.reads, self.writes))
        made = [tuple(streams[c] for c in total.outs if c in self.completed) for total in self.totals]
        sums = tuple(Sum(t.column, t.item.op, outs) for t, outs in zip(self.totals, made, strict=True))
        rows = self.nest.chunk_rows if sums else max(STREAMED_LANES // call.lanes, 1)
        return compiled(Loop(self.ops, reads, writes, sums, call.lanes, self.nest.across, rows))

    def _result(self, total: Reduction, sums: Array) -> list[Array]:
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


def _joined(total: Reduction, sums: Array) -> Array:
    """Join the totals of parts; moments as Chan, Golub and LeVeque (1983) do."""
    if len(sums) == 1:
        return np.asarray(sums[0])
    if total.item.op == "ReduceSum":
        return np.asarray(sums.sum(0))
    counts, means, squares = sums.swapaxes(0, 1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    return np.stack([count, mean, (squares + counts * (means - mean) ** 2).sum(0)])


def _calls(nest: Nest, reduces: bool) -> list[_Call]:
    if nest.rows is not None:
        return [_Call(nest.rows.extent, nest.lanes.extent, 0)]
    lanes = min(CUT_ROW_LANES if reduces else STREAMED_ROW_LANES, nest.lanes.extent)
    rows, rest = divmod(nest.lanes.extent, lanes)
    return [_Call(rows, lanes, 0), *[_Call(1, rest, rows * lanes)] * (rest > 0)]
