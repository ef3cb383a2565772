"""Cells as loops: one call for all that is computed between products, of a step or of a tile of scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from oocdl.fusion.codegen import FIELDS_PER_ARRAY, OUTER_AXES, Loop, Op, Stream, Sum
from oocdl.fusion.jit import Code, compiled
from oocdl.fusion.loop_nest import STREAMED_LANES
from oocdl.ops.expression import Cell, steps_of_cell

FLOAT = "float32"
"""The dtype that cells are computed in."""
_TESTS = ("Less", "LessOrEqual", "Greater", "Equal")


class Rows(NamedTuple):
    """How the rows of an array lie that a cell reads or writes, one for each sample or query."""

    lanes: int
    """Numbers of a row; one is that of all lanes."""
    row_bytes: int
    """Distance between rows; 0: all are the same one."""
    dtype: str = FLOAT


class CellLoop:
    """A cell that is bound to its arrays. Each thread that calls it needs one of its own."""

    def __init__(
        self,
        code: Code,
        rows: Sequence[Rows],
        samples: int,
        fresh: Sequence[int | None],
        addresses: npt.NDArray[np.int64],
    ) -> None:
        """Bind the code of ``cell_code``.

        ``fresh``: for arrays that are parts of what is made for a step alone, which stand side by side, how
        many bytes behind its start they begin; None for others, whose ``addresses`` are [step, array].
        """
        head = [*[1] * OUTER_AXES, samples]
        fields = [[0] * (OUTER_AXES + 1) + [row.row_bytes, 0] for row in rows]
        self._arguments = np.array([*head, *(number for each in fields for number in each)], np.int64)
        self._code, self._address = code, self._arguments.ctypes.data
        places = self._arguments[len(head) :: FIELDS_PER_ARRAY]
        made = [place for place, offset in enumerate(fresh) if offset is not None]
        self._fresh = places[made[0] : made[-1] + 1]
        self._offsets = np.array([offset for offset in fresh if offset is not None], np.int64)
        self._places, self._kept = places, np.setdiff1d(np.arange(len(rows)), made)
        self._addresses = addresses

    def __call__(self, t: int, fresh: int) -> None:
        """Compute step ``t``; ``fresh``: the address of what is made for it alone."""
        self._places[self._kept] = self._addresses[t]
        np.add(self._offsets, fresh, out=self._fresh)
        self._code(self._address)


def bound(
    code: Code, extents: Sequence[int], rows: Sequence[Rows], outer: Sequence[int]
) -> Callable[[Sequence[int]], None]:
    """Return the code of ``cell_code`` for ``extents`` [outer, rows], as a function of addresses.

    ``outer``: for each array, bytes along the first of these axes.
    """
    head = [*[1] * (OUTER_AXES + 1 - len(extents)), *extents]
    fields = [[0] * OUTER_AXES + [step, row.row_bytes, 0] for step, row in zip(outer, rows, strict=True)]
    known = np.array([*head, *(number for line in fields for number in line)], np.int64)

    def run(addresses: Sequence[int]) -> None:
        arguments = known.copy()
        arguments[len(head) :: FIELDS_PER_ARRAY] = addresses
        code(arguments.ctypes.data)

    return run


@cache
def cell_code(
    cell: Cell,
    attrs: tuple[tuple[str, Any], ...],
    reads: tuple[Rows, ...],
    writes: tuple[Rows, ...],
    reduction: str = "",
) -> Code:
    """Compile a cell whose arrays lie like these.

    With a ``reduction`` the last result is reduced over the lanes of each row, and written so.
    """
    steps, results = steps_of_cell(cell, dict(attrs), len(reads))
    # Numbers of formulas are columns behind those of all values.
    known = sorted({arg for step in steps for arg in step.args if isinstance(arg, float)})
    numbers = {number: len(reads) + len(steps) + place for place, number in enumerate(known)}
    ops = []
    for place, step in enumerate(steps, len(reads)):
        ins = tuple(arg if isinstance(arg, int) else numbers[arg] for arg in step.args)
        ops.append(Op(step.op, (), ins, place, "bool" if step.op in _TESTS else FLOAT))
    lanes = max(row.lanes for row in (*reads, *writes))
    streams = tuple(
        Stream(column, row.dtype, "next" if row.lanes == lanes else "one", bool(row.row_bytes))
        for column, row in zip((*range(len(reads)), *results), (*reads, *writes), strict=True)
    )
    made = streams[len(reads) :]
    sums = (Sum(made[-1].column, reduction, made[-1:]),) if reduction else ()
    return compiled(
        Loop(
            tuple(ops), streams[: len(reads)], made[:-1] if reduction else made, sums, lanes, bool(reduction),
            max(STREAMED_LANES // lanes, 1), tuple((column, number) for number, column in numbers.items()),
        )
    )  # fmt: skip
