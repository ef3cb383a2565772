"""The plan: how many pieces each layer is cut into, so that every unit fits.

The fewest, largest shards that keep the budget. Cuts prefer the batch (no halo),
then slabs along the outermost spatial axis, then further axes, then channels.
Adding a class of cuts can turn a local reduction into one that crosses shards,
so layers are formed again each time a class is added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from oocdl.errors import BudgetError, InputError
from oocdl.graph.classes import Classes, find_classes
from oocdl.graph.cost import (
    combine_buffer_bytes,
    made_bytes,
    program_flops,
    program_work_bytes,
    read_bytes,
    unit_buffer_bytes,
)
from oocdl.graph.cut import LayerCutter, Unit
from oocdl.graph.factorize import Factored
from oocdl.graph.ir import Role
from oocdl.graph.layers import group
from oocdl.graph.rule import Rules
from oocdl.graph.traffic import Layer, choose_stored

THIN_SLAB = 4
"""A slab thinner than this reads as much halo as body: another axis is cut first."""
WORTH_CUTTING_FLOPS = 5e7
"""A layer with less work than this is not cut for the sake of threads (about a millisecond)."""
MOST_SHARDS = 1024
"""A layer in more pieces than this spends its time on overhead: the budget is too small."""
MOST_TASKS = 4096
"""The same for all layers of a step together."""
LANE_BYTES = 16 << 20
"""Partial results of one value that may be kept side by side before shards share lanes."""


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """A layer with its cuts and what they cost."""

    layer: Layer
    grid: Mapping[int, int]
    units: tuple[Unit, ...]
    buffer_bytes: int
    """Arrays that its largest unit reads and makes."""
    work_bytes: int
    """What its largest program takes beside them while it runs."""
    read_bytes: int
    written_bytes: int
    flops: int

    @property
    def peak_bytes(self) -> int:
        """Of its largest unit."""
        return self.buffer_bytes + self.work_bytes


@dataclass(frozen=True, eq=False)
class StepPlan:
    """All layers of one training step, in order."""

    factored: Factored
    classes: Classes
    cuts: tuple[int, ...]
    layers: tuple[LayerPlan, ...]

    @property
    def peak_unit_bytes(self) -> int:
        """Of the largest unit."""
        return max((layer.peak_bytes for layer in self.layers), default=0)

    @property
    def buffer_bytes(self) -> int:
        """Arrays of the unit that has most."""
        return max((layer.buffer_bytes for layer in self.layers), default=0)

    @property
    def work_bytes(self) -> int:
        """Work space of the program that takes most."""
        return max((layer.work_bytes for layer in self.layers), default=0)

    @property
    def read_bytes(self) -> int:
        """Bytes that all units read in a step; from disk when nothing fits in RAM."""
        return sum(layer.read_bytes for layer in self.layers)

    @property
    def written_bytes(self) -> int:
        """Bytes that all units write in a step; to disk when nothing fits in RAM."""
        return sum(layer.written_bytes for layer in self.layers)

    @property
    def versioned_bytes(self) -> int:
        """Weights and state, which a step starts from."""
        return sum(value.nbytes for value in self.factored.graph.of_role(Role.WEIGHT, Role.STATE))

    @property
    def flops(self) -> int:
        """Floating-point operations of a step."""
        return sum(layer.flops for layer in self.layers)

    @property
    def tasks(self) -> int:
        """Number of units."""
        return sum(len(layer.units) for layer in self.layers)

    def numerics(self) -> str:
        """A digest of everything in the plan that the bits of the result depend on."""
        digest = hashlib.blake2b(digest_size=16)
        for planned in self.layers:
            for unit in planned.units:
                digest.update(repr((unit.layer, unit.shard, unit.reads, unit.makes)).encode())
                digest.update(unit.program.key.encode())
        return digest.hexdigest()


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


def memory(cutter: LayerCutter, units: Sequence[Unit], factored: Factored, rules: Rules) -> tuple[int, int]:
    """(arrays, work) of the largest of ``units``; combining their partial results counts as arrays."""
    buffers = [unit_buffer_bytes(unit, cutter.layer, factored) for unit in units]
    work = max(program_work_bytes(unit.program, rules) for unit in units)
    for unit in units:
        made = made_bytes(unit, factored)
        for cell in cutter.layer.cells:
            names = [view.value for view in cell.outputs if view.value in cutter.layer.partials]
            if names and cell.combine:
                buffers.append(combine_buffer_bytes([made[name] for name in names], cell.combine))
    return max(buffers), work


def largest(cutter: LayerCutter, factored: Factored, rules: Rules) -> tuple[int, int]:
    """Memory of the largest unit of all: one of each program is enough."""
    units = {unit.program.key: unit for unit in map(cutter.unit, cutter.shards())}
    return memory(cutter, list(units.values()), factored, rules)


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


def by_waste(
    order: Sequence[int], layers: Sequence[Layer], factored: Factored, classes: Classes
) -> list[int]:
    """``order``, with classes last whose cuts leave most of what the layers read to be read by each piece.

    Cutting the batch of a layer that is mostly weights reads all weights once for each sample.
    """

    def wasteful(cut: int) -> bool:
        found = [uncut_bytes(layer, factored, classes, cut) for layer in layers]
        return 2 * sum(uncut for uncut, _ in found) > sum(every for _, every in found)

    return sorted(order, key=wasteful)


class _Fitter:
    """Finds the grid of each layer for one choice of cut classes."""

    def __init__(
        self, factored: Factored, classes: Classes, rules: Rules, limits: Limits, asked: Mapping[int, int]
    ) -> None:
        self.factored, self.classes, self.rules = factored, classes, rules
        self.limits, self.asked = limits, asked
        self.order = preference(classes)

    def peak(self, cutter: LayerCutter) -> tuple[int, int]:
        """Largest memory and total work over a few telling shards: first, middle, last."""
        shards = cutter.shards()
        units = [cutter.unit(shard) for shard in {shards[0], shards[len(shards) // 2], shards[-1]}]
        flops = max(program_flops(unit.program, self.rules) for unit in units)
        return sum(memory(cutter, units, self.factored, self.rules)), flops * len(shards)

    def fit(self, layer: Layer) -> tuple[LayerCutter, tuple[int, int]]:
        """The coarsest grid whose units fit, and (arrays, work) of the largest unit."""
        order = [cut for cut in self.order if cut in layer.touched]
        order = by_waste(order, [layer], self.factored, self.classes)
        for turn in range(max(len(order), 1)):
            cutter, most = self.fit_in(layer, order[turn:] + order[:turn])
            if sum(most) <= self.limits.unit_bytes or 2 * cutter.count <= MOST_SHARDS:
                break
            # Fine pieces of one class left no shards for another, which may be the one that helps.
        return cutter, most

    def fit_in(self, layer: Layer, order: Sequence[int]) -> tuple[LayerCutter, tuple[int, int]]:
        """The same, where classes are cut to the end in the given order."""
        grid = {cut: self.asked.get(cut, 1) for cut in layer.touched}
        cutter = LayerCutter(self.factored, self.classes, self.rules, layer, grid)
        peak, flops = self.peak(cutter)
        pieces = cutter.count
        if pieces < self.limits.threads and flops > WORTH_CUTTING_FLOPS:
            step = self.grow(cutter, self.limits.threads / pieces, order)
            if step is not None:
                cutter = step
                peak, flops = self.peak(cutter)
        while True:
            if peak <= self.limits.unit_bytes:
                # A ragged shard elsewhere may be the largest after all.
                most = largest(cutter, self.factored, self.rules)
                peak = sum(most)
                if peak <= self.limits.unit_bytes:
                    return cutter, most
            step = self.grow(cutter, peak / self.limits.unit_bytes, order)
            if step is None:
                return cutter, largest(cutter, self.factored, self.rules)
            cutter = step
            peak, _ = self.peak(cutter)

    def grow(self, cutter: LayerCutter, factor: float, order: Sequence[int]) -> LayerCutter | None:
        """The same layer in about ``factor`` times as many pieces; None if it is cut to the end."""
        for thin in (THIN_SLAB, 1):
            for cut in order:
                count, base = cutter.grid.get(cut, 0), cutter.base.get(cut, 0)
                least = 1 if self.classes.names[cut] == "batch" else thin
                most = base // least
                if count == 0 or count >= most:
                    continue
                wanted = min(max(count + 1, ceil(count * factor)), most)
                while wanted < base and ceil(base / wanted) == ceil(base / count):
                    wanted += 1
                grid = {**cutter.grid, cut: wanted}
                step = LayerCutter(self.factored, self.classes, self.rules, cutter.layer, grid)
                if cutter.count < step.count <= MOST_SHARDS:
                    return step
        return None


def plan_step(factored: Factored, rules: Rules, limits: Limits) -> StepPlan:
    """Layers and grids such that every unit fits; BudgetError if none do."""
    classes = find_classes(factored)
    asked = asked_cuts(classes, limits)
    order = preference(classes)
    cuts = list(asked)
    if limits.threads > 1 and not cuts:
        roomy = [cut for cut in order if classes.extents[cut] >= limits.threads]
        layers = choose_stored(factored, group(factored, classes, rules, []), classes, [])
        cuts = by_waste(roomy, layers, factored, classes)[:1]
    while True:
        grouping = group(factored, classes, rules, cuts)
        layers = choose_stored(factored, grouping, classes, cuts)
        fitter = _Fitter(factored, classes, rules, limits, asked)
        fitted: list[tuple[LayerCutter, tuple[int, int]]] = []
        for layer in layers:
            cutter, most = fitter.fit(layer)
            if sum(most) > limits.unit_bytes:
                break
            fitted.append((cutter, most))
            if sum(cutter.count for cutter, _ in fitted) > MOST_TASKS:
                raise BudgetError(
                    f"a step would be cut into more than {MOST_TASKS} units of at most "
                    f"{limits.unit_bytes / 2**20:.1f} MiB"
                )
        else:
            planned = tuple(_finish(cutter, factored, rules, most) for cutter, most in fitted)
            return StepPlan(factored, classes, tuple(cuts), planned)
        added = _next_cut(layer, factored, classes, order, cuts)
        if added is None:
            raise BudgetError(
                f"no cut of layer '{layer.name}' fits: one unit needs "
                f"{sum(most) / 2**20:.1f} MiB and may take {limits.unit_bytes / 2**20:.1f} MiB"
            )
        cuts.append(added)


def frozen_cuts(plan: StepPlan) -> dict[str, object]:
    """What is needed to make the same plan again: plain data for ``plan.json``."""
    return {
        "cuts": list(plan.cuts),
        "grids": [{str(cut): count for cut, count in p.grid.items()} for p in plan.layers],
    }


def replan_step(factored: Factored, rules: Rules, frozen: Mapping[str, Any]) -> StepPlan:
    """The plan that ``frozen_cuts`` was taken of."""
    classes = find_classes(factored)
    cuts = [int(cut) for cut in frozen["cuts"]]
    layers = choose_stored(factored, group(factored, classes, rules, cuts), classes, cuts)
    if len(layers) != len(frozen["grids"]):
        raise InputError("the stored plan belongs to another model or version; pass replan=True")
    planned = []
    for layer, grid in zip(layers, frozen["grids"], strict=True):
        cutter = LayerCutter(factored, classes, rules, layer, {int(c): int(n) for c, n in grid.items()})
        planned.append(_finish(cutter, factored, rules, largest(cutter, factored, rules)))
    return StepPlan(factored, classes, tuple(cuts), tuple(planned))


def _next_cut(
    layer: Layer, factored: Factored, classes: Classes, order: Sequence[int], cuts: Sequence[int]
) -> int | None:
    """The best class not yet cut that cuts something this layer makes."""
    order = by_waste(order, [layer], factored, classes)
    sinks = {*layer.stores, *layer.partials}
    makers = [cell for cell in layer.cells if any(view.value in sinks for view in cell.outputs)]
    for cut in order:
        if cut not in cuts and all(classes.cut_letter(cell, cut) is not None for cell in makers):
            return cut
    some = (cut for cut in order if any(classes.cut_letter(cell, cut) is not None for cell in makers))
    return next((cut for cut in some if cut not in cuts), None)


def _finish(cutter: LayerCutter, factored: Factored, rules: Rules, most: tuple[int, int]) -> LayerPlan:
    units = [cutter.unit(shard) for shard in cutter.shards()]
    if cutter.layer.index % 2:
        # Serpentine: start with the shard that the layer before has just written.
        units.reverse()
    one_of_each = {unit.program.key: unit for unit in units}
    flops = {key: program_flops(unit.program, rules) for key, unit in one_of_each.items()}

    def total(count: Callable[[Unit, Factored], dict[str, int]]) -> int:
        return sum(sum(count(unit, factored).values()) for unit in units)

    return LayerPlan(
        cutter.layer,
        cutter.grid,
        tuple(units),
        *most,
        total(read_bytes),
        total(made_bytes),
        sum(flops[unit.program.key] for unit in units),
    )
