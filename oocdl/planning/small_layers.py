"""Chooses the layers that one unit runs together: a unit costs a millisecond beside its program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oocdl.graph.ir.graph import Role
from oocdl.graph.partition.tiling import LayerCutter
from oocdl.planning.tile_search import MIN_PARALLEL_SECONDS, Layering, Limits

RUN_WEIGHT_BYTES = 4 << 20
"""Maximum bytes of weights of layers that are joined: those of large weights are spread over workers."""


@dataclass
class _Run:
    """Small layers that are joined, so far."""

    buffer_bytes: int = 0
    """Bytes of the arrays that each of them reads or makes."""
    scratch_bytes: int = 0
    """The most bytes of scratch of one of them."""
    weight_bytes: int = 0

    def takes(self, cutter: LayerCutter, layering: Layering, limits: Limits) -> bool:
        """Add a layer, if all of them fit a unit together; else return False."""
        values = layering.factored.graph.values
        buffers, scratch = layering.largest_unit(cutter)
        weights = sum(values[name].nbytes for name in cutter.layer.reads if values[name].role == Role.WEIGHT)
        buffers, scratch = self.buffer_bytes + buffers, max(self.scratch_bytes, scratch)
        weights += self.weight_bytes
        fits = buffers + scratch <= limits.unit_bytes and weights <= RUN_WEIGHT_BYTES
        if fits:
            self.buffer_bytes, self.scratch_bytes, self.weight_bytes = buffers, scratch, weights
        return fits


def small_runs(cutters: Sequence[LayerCutter], layering: Layering, limits: Limits) -> tuple[int, ...]:
    """Return the number of the run of layers that each layer is joined into; nothing if each stays by itself.

    A layer that is not cut, for it takes less than ``MIN_PARALLEL_SECONDS``, joins a run whose last layer
    makes the last of what it reads. Branches, and updates, for which nothing waits, stay apart: they may be
    done at the same time. On several workers all layers stay apart, to have work for each.
    """
    if limits.workers > 1:
        return ()
    read = {name for cutter in cutters for name in cutter.layer.reads}
    numbers: list[int] = []
    open_runs: dict[int, tuple[int, _Run]] = {}
    """Number of the last layer of a run -> the number of the run, and the run."""
    maker: dict[str, int] = {}
    count = 0
    for place, cutter in enumerate(cutters):
        layer = cutter.layer
        is_small = cutter.count == 1 and layering.middle_unit(cutter)[0] <= MIN_PARALLEL_SECONDS
        is_small = is_small and not read.isdisjoint(layer.makes)
        before = max((maker.get(name, -1) for name in layer.reads), default=-1)
        number, run = open_runs.get(before, (count, None))
        if not is_small or run is None or not run.takes(cutter, layering, limits):
            number, run = count, _Run()
            count += 1
            is_small = is_small and run.takes(cutter, layering, limits)
        else:
            del open_runs[before]
        if is_small:
            open_runs[place] = number, run
        numbers.append(number)
        maker |= dict.fromkeys(layer.makes, place)
    return tuple(numbers) if count < len(cutters) else ()
