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

Ints = npt.NDArray[np.int64]
Attrs = tuple[tuple[str, Any], ...]
FLOAT = "float32"
"""The dtype that cells are computed in."""
_TESTS = ("Less", "LessOrEqual", "Greater", "Equal")


class Rows(NamedTuple):
    """How the rows of an array lie that a cell reads or writes, one for each sample or query."""

    lanes: int
    """One number is that of all lanes."""
    row_bytes: int
    """Distance between rows; 0: all are the same one."""
    dtype: str = FLOAT


def _arguments(extents: Sequence[int], rows: Sequence[Rows], outer: Sequence[int]) -> Ints:
    """Return the arguments of a loop over ``extents`` [outer, rows], without the arrays' addresses."""
    fields = [[0] * OUTER_AXES + [step, row.row_bytes, 0] for step, row in zip(outer, rows, strict=True)]
    head = [1] * (OUTER_AXES - 1) + [*extents]
    return np.array([*head, *(number for line in fields for number in line)], np.int64)


_ADDRESSES = slice(OUTER_AXES + 1, None, FIELDS_PER_ARRAY)
"""Those of the arguments that are addresses."""


def bind(
    code: Code, extents: Sequence[int], rows: Sequence[Rows], outer: Sequence[int]
) -> Callable[[Sequence[int]], None]:
    """Return the code of ``cell_code`` for ``extents`` [outer, rows], as a function of addresses.

    ``outer``: for each array, bytes along the first of these axes.
    """
    known = _arguments(extents, rows, outer)

    def run(addresses: Sequence[int]) -> None:
        arguments = known.copy()
        arguments[_ADDRESSES] = addresses
        code(arguments.ctypes.data)

    return run


def bind_steps(
    code: Code, rows: Sequence[Rows], samples: int, fresh: Sequence[int | None], addresses: Ints
) -> Callable[[int, int], None]:
    """Return the code as a function of a step and of the address of what is made for it alone.

    One thread at a time may call it. ``fresh``: for arrays that are parts of what is made for a step, which
    stand side by side, how many bytes behind its start they begin; None for others, whose ``addresses`` are
    [step, array].
    """
    arguments = _arguments((1, samples), rows, [0] * len(rows))
    places, address = arguments[_ADDRESSES], arguments.ctypes.data
    made = [place for place, offset in enumerate(fresh) if offset is not None]
    offsets = np.array([offset for offset in fresh if offset is not None], np.int64)
    kept, parts = np.setdiff1d(np.arange(len(rows)), made), places[made[0] : made[-1] + 1]

    def run(step: int, start: int) -> None:
        places[kept] = addresses[step]
        np.add(offsets, start, out=parts)
        code(address)

    return run


@cache
def cell_code(
    cell: Cell, attrs: Attrs, reads: tuple[Rows, ...], writes: tuple[Rows, ...], reduction: str = ""
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
