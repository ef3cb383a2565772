"""The cuts that give many slots work: several classes together, as finely as makes each layer faster.

Slots are the threads of all processes. For a few of them one class is cut (``Layering.best_cut``), which
all layers of a network have in common. Many slots need more pieces than one axis has, and layers that do not
have the axis at all, such as the update of a weight, are what the others then wait for. So classes are
added as long as a pass gets faster by the cost model: batch and space first, then whatever the layers
that keep slots waiting can be cut along. Each layer takes the grid by which it is done the soonest.

Where weights are more than activations, each is cut along one axis, so that neither it nor its gradient
travels: tensor parallelism. Layers take turns, one making a part of its channels on each worker, the next
partial sums of all (Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod

from oocdl.graph.ir.graph import Role
from oocdl.graph.partition.storage_cut import Layer
from oocdl.graph.partition.tiling import Grid, LayerCutter
from oocdl.planning.cost_model import NOMINAL, TASK_SECONDS, Costs
from oocdl.planning.tile_search import MAX_LAYER_SHARDS, SHARED_CLASSES, LayerCost, Layering

FEW_SLOTS = 4
"""For so many slots one class is cut, and no layer is asked by which grid it is fastest."""
WORTH_RATIO = 0.95
"""Twice as many pieces of a layer, or one more class that most layers have, are taken if that is done in at
most this share of the time."""
WORTH_CLASSES_RATIO = 0.9
"""Further classes have to take at most this share: where results become partial, there are more layers."""
MIN_PARALLEL_SECONDS = 6e-4
"""A layer that takes less is not cut for the sake of slots."""
MIN_CHANNELS = 8
"""Pieces of channels have so many at least: a vector's lanes, and what kernels are good at."""
MIN_SHARED = 2
"""Pieces of an axis of space have so many positions at least; what halos cost is asked of the rates."""
MOST_FAILURES = 2
"""Failed tries after which no further one is made: a gain may take two axes, or two rounds."""
COPIES_OF_SUM = 3
"""A partial sum is read to be added, and the total is read and written."""
COMBINED_AT_ONCE = 16
"""Partial sums of a value that are combined at once; more are combined in groups, and then these."""
SHORT_SHARE = 0.01
"""Layers that take less than this share of a pass add no class of cuts."""


@dataclass(frozen=True, eq=False)
class SlotSearch:
    """Finds classes and grids for a number of slots; knows no limit of memory."""

    layering: Layering
    slots: int

    def cuts(self) -> list[int]:
        """The classes to cut, the best first."""
        if self.slots not in self.layering.slot_cuts:
            self.layering.slot_cuts[self.slots] = self._find_cuts()
        return list(self.layering.slot_cuts[self.slots])

    def _find_cuts(self) -> list[int]:
        layering = self.layering
        order = layering.by_repeated_bytes(layering.cut_order, layering.layers([]))
        shared = [cut for cut in order if layering.classes.names[cut] in SHARED_CLASSES]
        best: list[int] = []
        soonest, late = self._time(best)
        for cut in shared:
            seconds, waiting = self._time([*best, cut])
            if seconds <= WORTH_RATIO * soonest:
                best, soonest, late = [*best, cut], seconds, waiting
        more, failed = best, 0
        while failed < MOST_FAILURES:
            added = {number for layer in late if (number := self._next(layer, more)) is not None}
            if not added:
                break
            more = [*more, *sorted(added)]
            seconds, late = self._time(more)
            failed += 1
            if seconds <= WORTH_CLASSES_RATIO * soonest:
                best, soonest, failed = more, seconds, 0
        return best

    def cutter(self, layer: Layer, least: Grid) -> LayerCutter:
        """The layer, cut by the grid by which it is done the soonest, of at least ``least`` pieces."""
        layering = self.layering
        cutter = layering.cutter(layer, least)
        key = self.slots, layering.touch_key(layer), tuple(cutter.grid.values())
        if key not in layering.slot_grids:
            layering.slot_grids[key] = tuple(self._fastest(cutter).grid.values())
        return layering.cutter(layer, dict(zip(cutter.grid, layering.slot_grids[key], strict=True)))

    def _fastest(self, cutter: LayerCutter) -> LayerCutter:
        """Double the pieces along whatever class makes it fastest, until that has failed twice."""
        best, soonest = cutter, self._layer_seconds(cutter)
        failed = 0
        while cutter.count < self.slots and soonest > MIN_PARALLEL_SECONDS and failed < MOST_FAILURES:
            finer = [found for cut in cutter.grid if (found := self._finer(cutter, cut)) is not None]
            if not finer:
                break
            cutter = min(finer, key=self._layer_seconds)
            seconds = self._layer_seconds(cutter)
            failed += 1
            if seconds <= WORTH_RATIO * soonest:
                best, soonest, failed = cutter, seconds, 0
        return best

    def _finer(self, cutter: LayerCutter, cut: int) -> LayerCutter | None:
        """The layer in about twice as many pieces along a class, in no more than there are slots."""
        count, name = cutter.grid[cut], self.layering.classes.names[cut]
        least = 1 if name == "batch" else MIN_SHARED if name in SHARED_CLASSES else MIN_CHANNELS
        factor = min(2, self.slots / cutter.count)
        wanted = min(max(ceil(count * factor), count + 1), cutter.base[cut] // least)
        if wanted <= count:
            return None
        found = self.layering.cutter(cutter.layer, {**cutter.grid, cut: wanted})
        return found if cutter.count < found.count <= MAX_LAYER_SHARDS else None

    def _layer_seconds(self, cutter: LayerCutter) -> float:
        """Return the seconds until a layer that begins on idle slots is done, partial sums combined."""
        cost = self._cost(cutter)
        return cost.units_seconds + cost.combining_seconds

    def _cost(self, cutter: LayerCutter) -> LayerCost:
        layering = self.layering
        key = self.slots, layering.cut_key(cutter)
        if key not in layering.slot_costs:
            seconds, made = layering.middle_unit(cutter)
            seconds += TASK_SECONDS
            longest, together = self._combining(cutter, made)
            layering.slot_costs[key] = LayerCost(
                units_seconds=ceil(cutter.count / self.slots) * seconds,
                combining_seconds=max(longest, together / self.slots),
                work_seconds=cutter.count * seconds + together,
            )
        return layering.slot_costs[key]

    def _combining(self, cutter: LayerCutter, made: Sequence[int]) -> tuple[float, float]:
        """Seconds to combine the partial sums of the value that takes longest, and of all one after another.

        ``made``: bytes that a unit makes of each partial value.
        """
        layering, slots = self.layering, self.slots
        longest = together = 0.0
        for name, nbytes in zip(cutter.layer.partials, made, strict=True):
            along = layering.classes.of_axes[name]
            regions = prod(count for cut, count in cutter.grid.items() if cut in along)
            sums = min(cutter.count // regions, -(-slots // regions))
            if sums > 1:
                one_by_one = sums if sums <= COMBINED_AT_ONCE else 2 * sums**0.5
                copied = COPIES_OF_SUM * nbytes / layering.rates.copy_bytes_per_second
                longest = max(longest, one_by_one * copied + TASK_SECONDS)
                together += regions * (sums * copied + TASK_SECONDS)
        return longest, together

    def _time(self, cuts: Sequence[int]) -> tuple[float, list[Layer]]:
        """Seconds of a pass in which each layer waits for those that it reads of, and all for the slots.

        With the layers that take long although slots are idle.
        """
        ready: dict[str, float] = {}
        few: list[tuple[Layer, float]] = []
        work_seconds = 0.0
        for layer in self.layering.layers(cuts):
            cutter = self.cutter(layer, {})
            cost = self._cost(cutter)
            made = max((ready.get(name, 0.0) for name in layer.reads), default=0.0) + cost.units_seconds
            ready |= dict.fromkeys(layer.stores, made)
            ready |= dict.fromkeys(layer.partials, made + cost.combining_seconds)
            work_seconds += cost.work_seconds
            if cutter.count < self.slots:
                few.append((layer, cost.units_seconds + cost.combining_seconds))
        end = max(*ready.values(), work_seconds / self.slots)
        least = max(SHORT_SHARE * end, MIN_PARALLEL_SECONDS)
        return end, [layer for layer, seconds in few if seconds > least]

    def _next(self, layer: Layer, cuts: Sequence[int]) -> int | None:
        """The class to cut so that a layer has more pieces, if there is one."""
        classes = self.layering.classes
        order = self.layering.by_repeated_bytes(self.layering.cut_order, [layer])
        sinks = {*layer.stores, *layer.partials}
        makers = [cell for cell in layer.cells if any(view.value in sinks for view in cell.outputs)]
        shares: dict[int, float] = {}
        for cut in order:
            roomy = classes.names[cut] in SHARED_CLASSES or classes.extents[cut] >= 2 * MIN_CHANNELS
            if roomy and cut not in cuts:
                having = sum(classes.cut_letter(cell, cut) is not None for cell in makers)
                shares[cut] = having / len(makers)
        most = max(shares.values(), default=0.0)
        return next((cut for cut, share in shares.items() if share == most > 0), None)


def weight_bytes(layering: Layering) -> int:
    """Bytes of all weights."""
    return sum(value.nbytes for value in layering.factored.graph.of_role(Role.WEIGHT))


def held_bytes(layering: Layering) -> int:
    """Bytes of weights and state, and of what layers read of others, that are there at once at least.

    Layers are taken to follow one another; what replaces weights and state may take their place.
    """
    graph, layers = layering.factored.graph, layering.layers([])
    last = {name: layer.index for layer in layers for name in layer.reads}
    change = [0] * (len(layers) + 1)
    for layer in layers:
        for name in last.keys() & {*layer.stores, *layer.partials}:
            change[layer.index] += graph.values[name].nbytes
            change[last[name] + 1] -= graph.values[name].nbytes
    return max(accumulate(change)) + sum(value.nbytes for value in graph.of_role(Role.WEIGHT, Role.STATE))


def weight_cuts(layering: Layering) -> tuple[tuple[int, ...], ...]:
    """Two sets of classes, or fewer: no weight has two axes of the first, which has those of most bytes.

    Of a perceptron the first has, for instance, the columns of its first weight, which are the rows of the
    second, and so on; the second set has all others.
    """
    classes, nbytes = layering.classes, Counter[int]()
    beside: defaultdict[int, set[int]] = defaultdict(set)
    for value in layering.factored.graph.of_role(Role.WEIGHT):
        cuts = {
            cut
            for cut in classes.of_axes.get(value.name, ())
            if classes.names[cut].startswith("channels") and classes.extents[cut] >= 2 * MIN_CHANNELS
        }
        for cut in cuts:
            nbytes[cut] += value.nbytes
            beside[cut] |= cuts - {cut}
    first: list[int] = []
    for cut in sorted(nbytes, key=lambda cut: (-nbytes[cut], cut)):
        if beside[cut].isdisjoint(first):
            first.append(cut)
    second = [cut for cut in sorted(nbytes) if cut not in first]
    return tuple(tuple(found) for found in (first, second) if found)


def travelling_seconds(
    layering: Layering, cuts: tuple[int, ...], workers: int, bytes_per_second: float
) -> float:
    """The least seconds in which one worker gets the others' partial sums of what it combines."""
    values, of_axes = layering.factored.graph.values, layering.classes.of_axes
    nbytes = 0.0
    for layer in layering.layers(cuts):
        for name in layer.partials:
            shared = workers if not set(of_axes[name]).isdisjoint(cuts) else 1
            nbytes += values[name].nbytes * (workers - 1) / shared
    return nbytes / bytes_per_second


def least_work_seconds(layering: Layering, cuts: tuple[int, ...], pieces: int) -> float:
    """About the least nominal seconds of all units, one by one, if classes are cut in so many pieces."""
    found, costs = 0.0, Costs(NOMINAL)
    middle_seconds: dict[object, float] = {}
    for layer in layering.layers(cuts):
        cutter = layering.cutter(layer, dict.fromkeys(cuts, pieces))
        key = layering.cut_key(cutter)
        if key not in middle_seconds:
            unit = cutter.unit(tuple(count // 2 for count in cutter.grid.values()))
            middle_seconds[key] = costs.program_seconds(unit.program)
        found += cutter.count * middle_seconds[key]
    return found
