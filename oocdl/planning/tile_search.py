"""Fitting: the coarsest grid of one layer whose units keep the limits.

Cuts prefer the batch (no halo), then slabs along the outermost spatial axis, then further
axes, then channels; cuts that leave most of what a layer reads to be read by each piece
come last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.program_cost import ScratchOf, most_scratch, program_flops
from oocdl.graph.partition.cut_classes import Classes, find_classes
from oocdl.graph.partition.layers import group
from oocdl.graph.partition.storage_cut import Layer, choose_stored
from oocdl.graph.partition.tiling import Grid, LayerCutter, Unit
from oocdl.graph.transforms.factorize import Factored
from oocdl.planning.unit_cost import combine_buffer_bytes, made_bytes, unit_buffer_bytes

THIN_SLAB = 4
"""A slab thinner than this reads as much halo as body: another axis is cut first."""
WORTH_CUTTING_FLOPS = 5e7
"""A layer with less work than this is not cut for the sake of threads (about a millisecond)."""
FEW = 4
"""Of a layer in so many pieces a thread, what is missing for all threads is made up for: three units of
a large layer take as long as four on two threads."""
MOST_SHARDS = 1024
"""A layer in more pieces than this spends its time on overhead: the budget is too small."""
MOST_TASKS = 4096
"""The same for all layers of a step together."""


@dataclass(frozen=True)
class Limits:
    """What a plan has to keep."""

    unit_bytes: int
    """Memory that one unit may take."""
    threads: int = 1
    """Heavy layers are cut into at least this many pieces."""
    parallel: Mapping[str, int | tuple[int, ...]] | None = None
    """At least these many pieces: ``{"batch": 2, "space": (3, 2, 1), "channels": 2}``."""
    cuts: Mapping[int, int] | None = None
    """At least these many pieces of cut classes given by number."""


def asked_cuts(classes: Classes, limits: Limits) -> dict[int, int]:
    """Pieces that the user asked for, a class each."""
    wanted: dict[str, int] = {}
    for name, count in (limits.parallel or {}).items():
        if name == "space":
            counts = (count,) if isinstance(count, int) else tuple(count)
            wanted |= {f"space{axis}": number for axis, number in enumerate(counts)}
        else:
            assert isinstance(count, int)
            wanted[name] = count
    found: dict[int, int] = {
        number: min(count, classes.extents[number])
        for number, count in (limits.cuts or {}).items()
        if classes.extents.get(number, 1) > 1
    }
    for number, name in classes.names.items():
        kind = "channels" if name.startswith("channels") else name
        count = wanted.get(kind, 1)
        if count > 1 and classes.extents[number] > 1:
            found[number] = min(count, classes.extents[number])
    return found


def preference(classes: Classes) -> list[int]:
    """All classes, those that are best to cut first."""
    rank = {"batch": 0, "space0": 1, "space1": 2, "space2": 3}
    numbers = [number for number in classes.names if classes.extents[number] > 1]
    return sorted(numbers, key=lambda n: (rank.get(classes.names[n], 4), -classes.extents[n], n))


def memory(
    cutter: LayerCutter, units: Sequence[Unit], factored: Factored, needs_of: ScratchOf
) -> tuple[int, int]:
    """(arrays, work) of the largest of ``units``; combining their partial results counts as arrays."""
    buffers = [unit_buffer_bytes(unit, cutter.layer, factored) for unit in units]
    work = max(needs_of(unit.program).scratch_bytes for unit in units)
    for unit in units:
        made = made_bytes(unit, factored)
        for cell in cutter.layer.cells:
            names = [view.value for view in cell.outputs if view.value in cutter.layer.partials]
            if names and cell.combine:
                buffers.append(combine_buffer_bytes([made[name] for name in names], cell.combine))
    return max(buffers), work


def uncut_bytes(layer: Layer, factored: Factored, classes: Classes, cut: int) -> tuple[int, int]:
    """Bytes that the layer reads and makes of values without an axis of class ``cut``, and of all.

    The first are read, or made and combined, by each piece again.
    """
    uncut = every = 0
    for name in (*layer.reads, *layer.stores, *layer.partials):
        nbytes = factored.graph.values[name].nbytes
        every += nbytes
        axes = range(len(factored.shapes[name]))
        if all(classes.of_axis.get((name, axis)) != cut for axis in axes):
            uncut += nbytes
    return uncut, every


class Layering:
    """A step's graph with its cut classes, and the layers that each choice of cuts makes.

    Layers take long to find and are the same for every budget: they are kept, with what units of
    each grid that was tried take.
    """

    def __init__(self, factored: Factored, rules: Rules, scratch: ScratchOf | None = None) -> None:
        """``scratch``: of programs with the engine; None: a bound for any."""
        self.factored, self.rules = factored, rules
        self.scratch: ScratchOf = scratch or partial(most_scratch, rules=rules)
        self.classes = find_classes(factored)
        self.order = preference(self.classes)
        self._layers: dict[tuple[int, ...], tuple[Layer, ...]] = {}
        self._telling: dict[object, tuple[int, int]] = {}
        self._largest: dict[object, tuple[int, int]] = {}

    def layers(self, cuts: Sequence[int]) -> tuple[Layer, ...]:
        """The layers of the step where these classes may be cut."""
        key = tuple(cuts)
        if key not in self._layers:
            grouping = group(self.factored, self.classes, self.rules, cuts)
            self._layers[key] = choose_stored(self.factored, grouping, self.classes, cuts)
        return self._layers[key]

    def best_cut(self, pieces: int) -> list[int]:
        """The class that is best to cut first, if there is one of so many pieces."""
        roomy = [cut for cut in self.order if self.classes.extents[cut] >= pieces]
        return self.by_waste(roomy, self.layers([]))[:1]

    def cutter(self, layer: Layer, grid: Grid) -> LayerCutter:
        """Cuts ``layer`` by ``grid``."""
        return LayerCutter(self.factored, self.classes, self.rules, layer, grid)

    def by_waste(self, order: Sequence[int], layers: Sequence[Layer]) -> list[int]:
        """``order``, with classes last whose cuts leave most of what layers read to be read by each piece.

        Cutting the batch of a layer that is mostly weights reads all weights once for each sample.
        """

        def wasteful(cut: int) -> bool:
            found = [uncut_bytes(layer, self.factored, self.classes, cut) for layer in layers]
            return 2 * sum(uncut for uncut, _ in found) > sum(every for _, every in found)

        return sorted(order, key=wasteful)

    def telling(self, cutter: LayerCutter) -> tuple[int, int]:
        """Memory and total work of the layer by a few telling shards: first, middle, last."""
        key = _key(cutter)
        if key not in self._telling:
            shards = cutter.shards()
            units = [cutter.unit(shard) for shard in {shards[0], shards[len(shards) // 2], shards[-1]}]
            flops = max(program_flops(unit.program, self.rules) for unit in units)
            self._telling[key] = sum(memory(cutter, units, self.factored, self.scratch)), flops * len(shards)
        return self._telling[key]

    def largest(self, cutter: LayerCutter) -> tuple[int, int]:
        """(arrays, work) of the layer's largest unit of all: one of each program is enough."""
        key = _key(cutter)
        if key not in self._largest:
            units = {unit.program.key: unit for unit in map(cutter.unit, cutter.shards())}
            self._largest[key] = memory(cutter, list(units.values()), self.factored, self.scratch)
        return self._largest[key]


def _key(cutter: LayerCutter) -> object:
    # Layers live as long as the layering; each choice of cuts has its own.
    return id(cutter.layer), tuple(cutter.grid.items())


@dataclass(frozen=True, eq=False)
class Fitter:
    """Finds the grid of each layer."""

    layering: Layering
    limits: Limits
    asked: Mapping[int, int]

    def fit(self, layer: Layer) -> tuple[LayerCutter, int]:
        """The coarsest grid whose telling units fit, and memory of the largest of these."""
        order = self.order(layer)
        for turn in range(max(len(order), 1)):
            cutter, most = self.fit_in(layer, order[turn:] + order[:turn])
            if most <= self.limits.unit_bytes or 2 * cutter.count <= MOST_SHARDS:
                break
            # Fine pieces of one class left no shards for another, which may be the one that helps.
        return cutter, most

    def fit_in(self, layer: Layer, order: Sequence[int]) -> tuple[LayerCutter, int]:
        """The same, where classes are cut to the end in the given order."""
        cutter = self.layering.cutter(layer, {cut: self.asked.get(cut, 1) for cut in layer.touched})
        peak, flops = self.layering.telling(cutter)
        pieces = cutter.count
        if pieces < self.limits.threads and flops > WORTH_CUTTING_FLOPS:
            step = self.grow(cutter, self.limits.threads / pieces, order)
            if step is not None:
                cutter = step
                peak, _ = self.layering.telling(cutter)
        while peak > self.limits.unit_bytes:
            step = self.grow(cutter, peak / self.limits.unit_bytes, order)
            if step is None:
                break
            cutter = step
            peak, _ = self.layering.telling(cutter)
        return cutter, peak

    def settle(self, cutter: LayerCutter) -> tuple[LayerCutter, int]:
        """The same or a finer grid all of whose units fit: a ragged shard may be the largest after all."""
        order = self.order(cutter.layer)
        while (peak := sum(self.layering.largest(cutter))) > self.limits.unit_bytes:
            step = self.grow(cutter, peak / self.limits.unit_bytes, order)
            if step is None:
                break
            cutter = step
        even = self.evened(cutter, order)
        return even, sum(self.layering.largest(even))

    def evened(self, cutter: LayerCutter, order: Sequence[int]) -> LayerCutter:
        """The same, or as many pieces more as there are threads for: all end at about the same time."""
        threads, count = self.limits.threads, cutter.count
        missing = -count % threads
        few = threads < count <= FEW * threads
        if not missing or not few or self.layering.telling(cutter)[1] <= threads * WORTH_CUTTING_FLOPS:
            return cutter
        step = self.grow(cutter, (count + missing) / count, order)
        if step is None or step.count != count + missing:
            return cutter
        fits = sum(self.layering.largest(step)) <= self.limits.unit_bytes
        return step if fits else cutter

    def order(self, layer: Layer) -> list[int]:
        """The classes that the layer may be cut along, those that are best to cut first."""
        touched = [cut for cut in self.layering.order if cut in layer.touched]
        return self.layering.by_waste(touched, [layer])

    def grow(self, cutter: LayerCutter, factor: float, order: Sequence[int]) -> LayerCutter | None:
        """The same layer in about ``factor`` times as many pieces; None if it is cut to the end."""
        for thin in (THIN_SLAB, 1):
            for cut in order:
                count, base = cutter.grid.get(cut, 0), cutter.base.get(cut, 0)
                least = 1 if self.layering.classes.names[cut] == "batch" else thin
                most = base // least
                if count == 0 or count >= most:
                    continue
                wanted = min(max(count + 1, ceil(count * factor)), most)
                while wanted < base and ceil(base / wanted) == ceil(base / count):
                    wanted += 1
                step = self.layering.cutter(cutter.layer, {**cutter.grid, cut: wanted})
                if cutter.count < step.count <= MOST_SHARDS:
                    return step
        return None
