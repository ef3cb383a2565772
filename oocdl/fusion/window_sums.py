"""The loop of a convolution's weight gradient: for each tap of the window, sums over all places.

``dw[t, c, d] = sum over places p of x[p * stride + t, c] * dy[p, d]``, and of a depthwise convolution
``dw[t, c] = sum over p of x[p * stride + t, c] * dy[p, c]``, of arrays whose channels lie side by side. A few
rows are taken at a time, for all taps, so that they stay in the cache; their sums are made in registers, and
added to those of the rows before. Places whose tap lies in the padding are left out, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.fusion.jit import compiled
from oocdl.fusion.llvm_ir import Builder
from oocdl.fusion.team import ALONE, Team, bounds_of
from oocdl.graph.ir.graph import Array

LEAST_PLACES = 64
"""Places that a sum in registers has at least, where a plane has as many."""
ITEMSIZE = 4
"""Bytes of a float32."""
MOST_SUMS = 12
"""Sums in registers at once, of the sixteen that a processor has at least."""
_ARGUMENTS = ("jobs", "x", "dy", "dw", "count", "x_row", "x_step", "dy_row", "dy_step", "inputs", "outputs")
_JOB = ("x", "dy", "dw", "rows", "columns")
"""Numbers of a job, which is one tap and the rectangle of places where it sees ``x``: where it begins in each
array, and how large the rectangle is."""


@dataclass(frozen=True)
class SumLoop:
    """See ``jit.Source``."""

    lanes: int
    vectors: int
    """Vectors of output channels that are summed at once."""
    block: int
    """Input channels that are multiplied by each of these; 0: each by its own alone, as if depthwise."""

    def write(self, name: str) -> str:
        """See ``jit.Source``."""
        b = Builder()
        b.lanes = self.lanes
        reads = [b.pointer] * 4 + [b.argument] * 7
        given = {_ARGUMENTS[number]: read(number) for number, read in enumerate(reads)}
        outputs = partial(b.loop, "0", given["outputs"], self.lanes * self.vectors)
        jobs = partial(b.loop, "0", given["count"], 1)
        if self.block:
            with jobs() as number, outputs() as output, b.loop("0", given["inputs"], self.block) as first:
                self._sum(b, given, self._job(b, given, number), first, output)
        else:  # of all channels, not even a few rows would stay in the cache
            with outputs() as output, jobs() as number:
                self._sum(b, given, self._job(b, given, number), output, output)
        return b.function(name)

    def _job(self, b: Builder, given: dict[str, str], number: str) -> dict[str, str]:
        at = b.new(f"getelementptr [{len(_JOB)} x i64], ptr {given['jobs']}, i64 {number}")
        places = {word: b.new(f"getelementptr i64, ptr {at}, i64 {place}") for place, word in enumerate(_JOB)}
        return {word: b.new(f"load i64, ptr {place}") for word, place in places.items()}

    def _sum(self, b: Builder, given: dict[str, str], job: dict[str, str], first: str, output: str) -> None:
        """Add the sums of a job to ``dw``, for inputs from ``first`` and outputs from ``output`` on."""
        totals = {place: b.slot(b.type) for place in product(range(self.block or 1), range(self.vectors))}
        starts = {"x": b.add(job["x"], first), "dy": b.add(job["dy"], output)}
        with b.loop("0", job["rows"], 1) as row:
            rows = {name: _along(b, given, name, "row", row, starts[name]) for name in starts}
            with b.loop("0", job["columns"], 1) as column:
                at = {name: _along(b, given, name, "step", column, rows[name]) for name in starts}
                x, dy = (b.element(given[name], "float", at[name]) for name in starts)
                grads = [_load(b, dy, vector * self.lanes, "next") for vector in range(self.vectors)]
                for (channel, vector), total in totals.items():
                    if not self.block or vector == 0:
                        first_one, step = (channel, "one") if self.block else (vector * self.lanes, "next")
                        seen = _load(b, x, first_one, step)
                    before = b.new(f"load {b.type}, ptr {total}")
                    made = b.call("fma", b.type, [seen, grads[vector], before])
                    b.do(f"store {b.type} {made}, ptr {total}")
        for (channel, vector), total in totals.items():
            line = b.new(f"mul i64 {b.add(first, str(channel))}, {given['outputs']}") if self.block else "0"
            weight = b.add(b.add(job["dw"], line), b.add(output, str(vector * self.lanes)))
            address = b.element(given["dw"], "float", weight)
            before, more = b.load("float32", address, "next"), b.new(f"load {b.type}, ptr {total}")
            b.store("float32", b.two("fadd", before, more), address, "next")


def _load(b: Builder, address: str, element: int, step: str) -> str:
    return b.load("float32", b.element(address, "float", str(element)), step)


def _along(b: Builder, given: dict[str, str], name: str, axis: str, index: str, start: str) -> str:
    """Return the number of the element that is ``index`` rows or steps behind ``start``."""
    return b.add(start, b.new(f"mul i64 {index}, {given[f'{name}_{axis}']}"))


@dataclass(frozen=True)
class Taps:
    """How a window slides along an axis: see ``element``."""

    count: int
    stride: int
    dilation: int
    pad: int

    def element(self, tap: Any, place: Any) -> Any:
        """Return the number of the element that a tap of a place sees."""
        return place * self.stride + tap * self.dilation - self.pad

    def all_seen(self, extent: int, places: int) -> npt.NDArray[np.int64]:
        """Return for each tap the first of ``places`` that see one of ``extent`` elements, and their end."""
        offsets = self.element(np.arange(self.count), 0)
        ends = np.stack([-(offsets // self.stride), (extent - 1 - offsets) // self.stride + 1], 1)
        return ends.clip(0, places)


def loop_for(inputs: int, outputs: int, depthwise: bool, lanes: int) -> SumLoop | None:
    """Return the loop for so many channels; None if there is none whose vectors they fill.

    ``lanes``: numbers in the processor's largest vectors. Where two vectors are multiplied in a cycle, and
    each takes four, eight sums at once keep it busy.
    """
    lanes = next((n for n in (lanes, lanes // 2) if outputs % n == 0), 0)
    if not lanes:
        return None
    block = 0 if depthwise else next(n for n in (4, 6, 5, 3, 7, 2, 1) if inputs % n == 0)
    most = MOST_SUMS // max(block, 3)
    vectors = next(n for n in range(most, 0, -1) if outputs % (n * lanes) == 0)
    return SumLoop(lanes, vectors, block)


def add_window_sums(
    loop: SumLoop, x: Array, dy: Array, dw: Array, window: Sequence[Taps], team: Team = ALONE
) -> None:
    """Add the gradient of weights to ``dw``.

    ``x[n, d, h, w, c]`` and ``dy[n, d, h, w, o]`` are float32 arrays whose last axis has no gaps, and
    ``dw[kd, kh, kw, c, o]``, of a depthwise convolution ``dw[kd, kh, kw, o]``, has none at all; ``window``
    tells of the three axes of space. Threads of the ``team`` take equally many planes each, and have sums of
    their own.
    """
    jobs, (deep, down, right) = _jobs(x, dy, dw, window), window
    if not len(jobs):
        return
    seen = enumerate(deep.all_seen(x.shape[1], dy.shape[1]))
    planes = [
        (x[sample, deep.element(tap, place)], dy[sample, place], tap)
        for tap, (first, last) in seen
        for sample, place in product(range(len(x)), range(first, last))
    ]
    bounds = bounds_of(len(planes), team.threads)
    sums = [dw, *np.zeros((len(bounds) - 2, *dw.shape), dw.dtype)]
    x_row, x_step, dy_row, dy_step = (n // ITEMSIZE for n in (*x.strides[2:4], *dy.strides[2:4]))
    steps = x_row * down.stride, x_step * right.stride, dy_row, dy_step
    made = np.repeat(np.arange(len(sums)), np.diff(bounds)).tolist()
    rows = [
        (jobs.ctypes.data, a.ctypes.data, b.ctypes.data, sums[part][tap].ctypes.data, len(jobs), *steps,
         x.shape[4], dy.shape[4])
        for (a, b, tap), part in zip(planes, made, strict=True)
    ]  # fmt: skip
    team.run(compiled(loop), np.array(rows, np.int64), bounds)
    for more in sums[1:]:
        dw += more


def _jobs(x: Array, dy: Array, dw: Array, window: Sequence[Taps]) -> npt.NDArray[np.int64]:
    """Return the jobs of one plane of ``x`` and one of ``dy``, for all taps of one plane of the window."""
    (_, down, right), (rows, columns) = window, dy.shape[2:4]
    high, wide = down.all_seen(x.shape[2], rows), right.all_seen(x.shape[3], columns)
    together = max(-(-LEAST_PLACES // columns), 1)
    tiles = np.arange(0, rows, together)[:, None, None]
    first = np.maximum(high[:, 0][:, None], tiles)  # [tile, tap down, tap to the right]
    last = np.minimum(high[:, 1][:, None], tiles + together)
    i, j = np.arange(down.count)[:, None], np.arange(right.count)
    top, left = down.element(i, first), right.element(j, wide[:, 0])
    grid = np.broadcast_arrays(
        *(row * array.strides[2] + column * array.strides[3] for array, row, column in (
            (x, top, left), (dy, first, wide[:, 0]))),
        i * dw.strides[1] + j * dw.strides[2],
        last - first,
        wide[:, 1] - wide[:, 0],
    )  # fmt: skip
    jobs = np.stack(grid, -1).reshape(-1, len(_JOB))
    jobs[:, :3] //= ITEMSIZE
    return np.ascontiguousarray(jobs[(jobs[:, 3:] > 0).all(1)], np.int64)
