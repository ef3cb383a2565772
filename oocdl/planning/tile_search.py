"""The tile search: finds the coarsest grid of one layer whose units keep the limits.

Cuts prefer the batch (no halo), then slabs along the outermost spatial axis, then further
axes, then channels; cuts after which each piece still reads most of what the whole layer reads
come last.

The peak of a unit is bounded by construction. Its inputs and results are arrays of the memory tier
(``unit_buffer_bytes``); the scratch of its program lies on the heap (``graph/ir/program_cost``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import NamedTuple

from oocdl.graph.ir.array_layout import footprint
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.program_cost import ScratchOf, most_scratch, program_flops
from oocdl.graph.partition.cut_classes import Classes, find_classes
from oocdl.graph.partition.layer_kinds import Cut, LayerKind, LayerKinds, renamed
from oocdl.graph.partition.layers import group, heavy_nodes
from oocdl.graph.partition.operand_regions import Operands
from oocdl.graph.partition.storage_cut import Layer, choose_stored
from oocdl.graph.partition.tiling import Grid, LayerCutter
from oocdl.graph.partition.unit import Unit, bytes_of, combined_together
from oocdl.graph.partition.wiring import Wiring
from oocdl.graph.transforms.factorize import Factored
from oocdl.planning.cost_model import NOMINAL, Costs, Rates, by_key

MIN_SLAB_POSITIONS = 4
"""A slab with fewer positions along its cut axis reads as much halo as body: another axis is cut first."""
MIN_PARALLEL_SECONDS = 6e-3
"""A layer that takes less is not cut for the sake of threads: Python runs in one of them at a time."""
MIN_SHARED_FLOPS = 5e7
"""A layer with fewer operations is not cut for the sake of processes, each with an interpreter of its own."""
MANY_FLOPS = 2e9
"""A layer of so many operations takes longer than that, and need not be derived to know it."""
MAX_EVENED_UNITS_PER_THREAD = 4
"""A layer in at most so many pieces a thread is cut until all threads have equally many: three units of
a large layer take as long as four on two threads."""
SHARED_CLASSES = ("batch", "space0", "space1", "space2")
"""The classes that (nearly) all layers of a network have in common, the best to cut first."""
MAX_LAYER_SHARDS = 1024
"""A layer in more pieces than this spends its time on overhead: the budget is too small."""


@dataclass(frozen=True)
class Limits:
    """The limits that a plan has to keep."""

    unit_bytes: int
    """Memory that one unit may take: arrays and scratch."""
    threads: int = 1
    """Heavy layers are cut into at least this many pieces: the slots of all processes together."""
    parallel: Mapping[str, int | tuple[int, ...]] | None = None
    """Least numbers of pieces: ``{"batch": 2, "space": (3, 2, 1), "channels": 2}``."""
    cuts: Mapping[int, int] | None = None
    """Number of a cut class -> least number of pieces along it."""
    classes: Sequence[int] = ()
    """Further classes along which layers may be cut, whether or not that is needed."""
    most_units: int | None = None
    """Maximum number of units, as the plan of more needs too much memory; None: there is enough."""
    workers: int = 1
    """Processes that share the units; each has partial sums of its own."""


class LayerCost(NamedTuple):
    """The predicted cost of a cut layer on a number of slots."""

    units_seconds: float
    """Seconds until its units are done, if it begins on idle slots."""
    combining_seconds: float
    """Seconds until their partial sums are combined, after that."""
    work_seconds: float
    """Seconds of work of all slots together."""


def requested_cuts(classes: Classes, limits: Limits) -> dict[int, int]:
    """Cut class -> pieces that the user asked for, where that is more than one."""
    wanted: dict[str, int] = {}
    for name, count in (limits.parallel or {}).items():
        if name == "space":
            counts = (count,) if isinstance(count, int) else count
            wanted |= {f"space{axis}": number for axis, number in enumerate(counts)}
        else:
            assert isinstance(count, int)
            wanted[name] = count
    pieces = dict(limits.cuts or {})
    for number, name in classes.names.items():
        if (count := wanted.get("channels" if name.startswith("channels") else name, 1)) > 1:
            pieces[number] = count
    extents = classes.extents
    return {
        number: min(count, extents[number]) for number, count in pieces.items() if extents.get(number, 1) > 1
    }


def cut_preference(classes: Classes) -> list[int]:
    """All classes that can be cut, the best first."""
    rank = {name: place for place, name in enumerate(SHARED_CLASSES)}
    numbers = [number for number in classes.names if classes.extents[number] > 1]
    return sorted(numbers, key=lambda n: (rank.get(classes.names[n], 4), -classes.extents[n], n))


def unit_buffer_bytes(unit: Unit, layer: Layer, factored: Factored) -> int:
    """Bytes of the arrays that a unit reads and makes, and of the partial sums that it adds to."""
    read, made = bytes_of(unit.reads, factored), bytes_of(unit.makes, factored)
    sums = [made[name] for name in layer.partials]
    return sum(map(footprint, [*read.values(), *made.values(), *sums]))


def combine_buffer_bytes(sizes: Sequence[int], how: str) -> int:
    """Bytes that it takes to combine partial sums with results of ``sizes`` bytes.

    Partial sums are read one by one: there are the total, one of them, and float64 temporaries of formulas.
    """
    arrays = 2 * sum(footprint(nbytes) for nbytes in sizes)
    return arrays + (0 if how in ("sum", "max") else 14 * sum(sizes))


def units_memory(
    cutter: LayerCutter, units: Sequence[Unit], factored: Factored, scratch_of: ScratchOf
) -> tuple[int, int]:
    """The most bytes of arrays and of scratch of any of ``units``.

    Combining their partial results counts as a unit, too.
    """
    kinds = {unit.program.key: unit for unit in units}.values()  # equal programs take equal memory
    buffers = [unit_buffer_bytes(unit, cutter.layer, factored) for unit in kinds]
    scratch = max(scratch_of(unit.program).scratch_bytes for unit in kinds)
    partial = [cell for cell in cutter.sinks if cell.combine] if cutter.layer.partials else []
    for unit in kinds if partial else ():
        made = bytes_of(unit.makes, factored)
        for cell in partial:
            for names in combined_together(cell, cutter.layer.partials):
                buffers.append(combine_buffer_bytes([made[name] for name in names], str(cell.combine)))
    return max(buffers), scratch


def _sampled(count: int) -> list[int]:
    """The numbers of those of so many units that are samples: the first, the middle, the last."""
    return sorted({0, count // 2, count - 1})


class Layering:
    """A pass's graph with its cut classes, and the layers that each choice of cuts makes.

    Layers take long to find and are the same for every budget: they are cached, and so is what units of
    each grid that was tried take, for all layers that are equal but for names.
    """

    def __init__(
        self, factored: Factored, rules: Rules, scratch: ScratchOf | None = None, rates: Rates = NOMINAL
    ) -> None:
        """``scratch`` bounds what a program takes with the engine; None: a bound for any engine."""
        self.factored, self.rules, self.rates, self.threads = factored, rules, rates, 1
        self.scratch = by_key(scratch or partial(most_scratch, rules=rules))
        self.flops = by_key(partial(program_flops, rules=rules))
        self.costs = Costs(rates)
        self.classes = find_classes(factored)
        self.wiring = Wiring(factored, heavy_nodes(factored, rules))
        self.cut_order = {cut: place for place, cut in enumerate(cut_preference(self.classes))}
        self._axes_of = {
            name: (factored.graph.values[name].nbytes, frozenset(classes))
            for name, classes in self.classes.of_axes.items()
        }
        """Stored value -> its bytes, and the classes of its axes."""
        self._layers: dict[frozenset[int], tuple[Layer, ...]] = {}
        self._operands = Operands(factored)
        self._kinds = LayerKinds(factored, self.classes)
        self._begin()

    def _begin(self) -> None:
        self._sampled: dict[Cut, tuple[LayerKind, Sequence[Unit]]] = {}
        self._samples: dict[Cut, int] = {}
        self._largest: dict[Cut, tuple[int, int]] = {}
        self._middle: dict[Cut, tuple[float, list[int]]] = {}
        self.slot_cuts: dict[int, list[int]] = {}
        """Number of slots -> the classes that ``slot_search`` has found for them."""
        self.slot_grids: dict[object, tuple[int, ...]] = {}
        """Number of slots, and a layer whatever its names -> the grid that it has found."""
        self.slot_costs: dict[object, LayerCost] = {}
        """Number of slots, and a cut layer whatever its names -> what it takes there."""

    def on(self, threads: int) -> Layering:
        """The same with so many threads that run each unit together."""
        if threads == self.threads:
            return self
        other = copy(self)
        other.threads = threads
        other._begin()
        return other

    def layers(self, cuts: Sequence[int]) -> tuple[Layer, ...]:
        """The layers of the pass if the classes ``cuts`` may be cut."""
        key = frozenset(cuts)
        if key not in self._layers:
            self._layers[key] = choose_stored(self.wiring, group(self.wiring, self.classes, key))
        return self._layers[key]

    def best_cut(self, pieces: int) -> list[int]:
        """The class that is best to cut first among those that allow ``pieces`` pieces, if there is one."""
        roomy = [cut for cut in self.cut_order if self.classes.extents[cut] >= pieces]
        return self.by_repeated_bytes(roomy, self.layers([]))[:1]

    def cutter(self, layer: Layer, grid: Grid) -> LayerCutter:
        """The cutter of ``layer`` by ``grid``."""
        return LayerCutter(self._operands, self.classes, self.rules, layer, grid, self.threads)

    def by_repeated_bytes(self, order: Iterable[int], layers: Sequence[Layer]) -> list[int]:
        """Put the classes of ``order`` last after whose cut each piece repeats most of what layers read.

        A value without an axis of the class is read, or made and combined, by each piece again. Cutting the
        batch of a layer that is mostly weights reads all weights once for each sample.
        """
        cut_bytes: Counter[int] = Counter()
        every = 0
        for layer in layers:
            for name in (*layer.reads, *layer.stores, *layer.partials):
                nbytes, cuts = self._axes_of[name]
                every += nbytes
                for cut in cuts:
                    cut_bytes[cut] += nbytes
        return sorted(order, key=lambda cut: 2 * (every - cut_bytes[cut]) > every)

    def samples(self, cutter: LayerCutter) -> Sequence[Unit]:
        """Three sample units: first, middle, last."""
        self._reuse(cutter)
        shards = cutter.shards()
        units = tuple([cutter.unit(shards[number]) for number in _sampled(cutter.count)])
        self._sampled.setdefault(self.cut_key(cutter), (self._kinds.kind_of(cutter.layer), units))
        return units

    def _reuse(self, cutter: LayerCutter) -> None:
        """Give a cutter the sample units of an equal one."""
        before, units = self._sampled.get(self.cut_key(cutter), (None, ()))
        kind, layer = self._kinds.kind_of(cutter.layer), cutter.layer.index
        if before is not None and before is not kind:
            shards = [cutter.shards()[number] for number in _sampled(cutter.count)]
            units = renamed(units, layer, shards, before, kind)
        cutter.known |= {unit.shard: unit for unit in units}

    def sample_bytes(self, cutter: LayerCutter) -> int:
        """Bytes of the arrays and the scratch of the largest of three sample units."""
        key = self.cut_key(cutter)
        if key not in self._samples:
            memory = units_memory(cutter, self.samples(cutter), self.factored, self.scratch)
            self._samples[key] = sum(memory)
            if cutter.count <= 3:
                self._largest[key] = memory
        return self._samples[key]

    def is_worth_cutting(self, cutter: LayerCutter, workers: int, times: int = 1) -> bool:
        """Whether a layer has enough to do, so many times over, to be cut for the sake of threads."""
        for cell in cutter.sinks if cutter.count == 1 else ():  # one unit makes at least all of these
            shapes = ([view.shape for view in views] for views in (cell.inputs, cell.outputs))
            if self.rules[cell.node.op].flops(cell.node, *shapes) > MANY_FLOPS:
                return True
        if workers > 1:
            most = max(self.flops(unit.program) for unit in self.samples(cutter))
            return cutter.count * most > times * MIN_SHARED_FLOPS
        return cutter.count * self.middle_unit(cutter)[0] > times * MIN_PARALLEL_SECONDS

    def middle_unit(self, cutter: LayerCutter) -> tuple[float, list[int]]:
        """Predicted seconds of the unit in the middle, and the bytes that it makes of each partial value."""
        key = self.cut_key(cutter)
        if key not in self._middle:
            unit = cutter.unit(tuple(count // 2 for count in cutter.grid.values()))
            seconds, made = self.costs.program_seconds(unit.program), bytes_of(unit.makes, self.factored)
            self._middle[key] = seconds, [made[name] for name in cutter.layer.partials]
        return self._middle[key]

    def largest_unit(self, cutter: LayerCutter) -> tuple[int, int]:
        """The most bytes of arrays and of scratch of any unit of the layer."""
        key = self.cut_key(cutter)
        if key not in self._largest:
            self._reuse(cutter)
            units = cutter.distinct_units()
            self._largest[key] = units_memory(cutter, units, self.factored, self.scratch)
        return self._largest[key]

    def units(self, cutter: LayerCutter, known: dict[Cut, tuple[LayerKind, Sequence[Unit]]]) -> list[Unit]:
        """All units of a layer; ``known``: those of others, by which equal layers need not be cut again."""
        kind, key = self._kinds.kind_of(cutter.layer), self.cut_key(cutter)
        if key in known:
            before, units = known[key]
            return renamed(units, cutter.layer.index, cutter.shards(), before, kind)
        self._reuse(cutter)
        units = cutter.units()
        known[key] = kind, tuple(units)
        return units

    def touch_key(self, layer: Layer) -> Cut:
        """Equal for layers that are equal but for names, and may be cut along the same letters."""
        return self._kinds.cut_of(layer, dict.fromkeys(sorted(layer.touched), 2))

    def cut_key(self, cutter: LayerCutter) -> Cut:
        """Equal for layers that are equal but for names, and equally cut."""
        return self._kinds.cut_of(cutter.layer, cutter.grid)


@dataclass(frozen=True, eq=False)
class TileSearch:
    """Finds the grid of each layer."""

    layering: Layering
    limits: Limits
    requested: Mapping[int, int]
    """Cut class -> least number of pieces."""
    for_slots: Callable[[Layer, Grid], LayerCutter] | None = None
    """Cuts a layer for many slots, given the least pieces of each class; None: there are few."""

    def fit_samples(self, layer: Layer) -> tuple[LayerCutter, int]:
        """The coarsest grid whose sample units fit, and the bytes of the largest of these.

        If no grid fits, the bytes are larger than the limit.
        """
        order = self.cut_order(layer)
        for turn in range(max(len(order), 1)):
            cutter, peak = self._fit_samples_in(layer, order[turn:] + order[:turn])
            if peak <= self.limits.unit_bytes or 2 * cutter.count <= MAX_LAYER_SHARDS:
                break
            # Fine pieces of one class left no shards for another, which may be the one that helps.
        return cutter, peak

    def _fit_samples_in(self, layer: Layer, order: Sequence[int]) -> tuple[LayerCutter, int]:
        """``fit_samples`` where each class is cut to the end before the next, in the given order."""
        least = {cut: self.requested.get(cut, 1) for cut in layer.touched}
        cutter = (self.for_slots or self.layering.cutter)(layer, least)
        pieces, threads = cutter.count, self.limits.threads
        if (
            self.for_slots is None
            and pieces < threads
            and self.layering.is_worth_cutting(cutter, self.limits.workers)
        ):
            cutter = self.finer(cutter, threads / pieces, order) or cutter
        while (peak := self.layering.sample_bytes(cutter)) > self.limits.unit_bytes:
            finer = self.finer(cutter, peak / self.limits.unit_bytes, order)
            if finer is None:
                break
            cutter = finer
        return cutter, peak

    def fit_every_unit(self, cutter: LayerCutter) -> tuple[LayerCutter, int]:
        """The same or a finer grid whose units all fit, and the bytes of the largest.

        A ragged shard may be larger than the samples. If no grid fits, the bytes are larger than the limit.
        """
        order = self.cut_order(cutter.layer)
        while (peak := sum(self.layering.largest_unit(cutter))) > self.limits.unit_bytes:
            finer = self.finer(cutter, peak / self.limits.unit_bytes, order)
            if finer is None:
                break
            cutter = finer
        even = self._evened(cutter, order)
        return even, sum(self.layering.largest_unit(even))

    def _evened(self, cutter: LayerCutter, order: Sequence[int]) -> LayerCutter:
        """The same grid, or one with equally many pieces for each thread: all end at about the same time."""
        threads, count = self.limits.threads, cutter.count
        missing = -count % threads
        few = threads < count <= MAX_EVENED_UNITS_PER_THREAD * threads
        if not missing or not few:
            return cutter
        if not self.layering.is_worth_cutting(cutter, self.limits.workers, threads):
            return cutter
        finer = self.finer(cutter, (count + missing) / count, order)
        if finer is None or finer.count != count + missing:
            return cutter
        fits = sum(self.layering.largest_unit(finer)) <= self.limits.unit_bytes
        return finer if fits else cutter

    def cut_order(self, layer: Layer) -> list[int]:
        """The classes that the layer may be cut along, the best first."""
        touched = sorted(layer.touched, key=self.layering.cut_order.__getitem__)
        return self.layering.by_repeated_bytes(touched, [layer])

    def finer(self, cutter: LayerCutter, factor: float, order: Sequence[int]) -> LayerCutter | None:
        """The same layer in about ``factor`` times as many pieces; None if it is cut to the end."""
        for min_slab in (MIN_SLAB_POSITIONS, 1):
            for cut in order:
                count, base = cutter.grid.get(cut, 0), cutter.base.get(cut, 0)
                most = base // (1 if self.layering.classes.names[cut] == "batch" else min_slab)
                if count == 0 or count >= most:
                    continue
                wanted = min(max(count + 1, ceil(count * factor)), most)
                while wanted < base and ceil(base / wanted) == ceil(base / count):
                    wanted += 1
                found = self.layering.cutter(cutter.layer, {**cutter.grid, cut: wanted})
                if cutter.count < found.count <= MAX_LAYER_SHARDS:
                    return found
        return None
