"""The plan: how many pieces each layer is cut into, so that every unit fits.

The fewest, largest shards that keep the budget (``graph/fitting.py``). Adding a class of cuts
can turn a local reduction into one that crosses shards, so layers are formed again each time a
class is added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oocdl.errors import BudgetError, InputError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.program_cost import ProgramScratch, program_flops
from oocdl.graph.partition.cut_classes import Classes
from oocdl.graph.partition.storage_cut import Layer
from oocdl.graph.partition.tiling import LayerCutter, Unit
from oocdl.graph.transforms.factorize import Factored
from oocdl.planning.tile_search import MOST_TASKS, Fitter, Layering, Limits, asked_cuts
from oocdl.planning.unit_cost import made_bytes, read_bytes

PARTIAL_SUM_BYTES = 16 << 20
"""Partial results of one value that may be kept side by side before shards share lanes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerPlan:
    """A layer with its cuts and what they cost."""

    layer: Layer
    grid: Mapping[int, int]
    units: tuple[Unit, ...]
    buffer_bytes: int
    """Arrays that its largest unit reads and makes."""
    scratch_bytes: int
    """What its largest program takes beside them while it runs."""
    read_bytes: int
    written_bytes: int
    flops: int
    scratch: Mapping[str, ProgramScratch]
    """Key of each program -> what it wants while it runs."""

    @property
    def peak_bytes(self) -> int:
        """Of its largest unit."""
        return self.buffer_bytes + self.scratch_bytes


@dataclass(frozen=True, eq=False)
class PassPlan:
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
    def scratch_bytes(self) -> int:
        """Work space of the program that takes most."""
        return max((layer.scratch_bytes for layer in self.layers), default=0)

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


def plan_pass(layering: Layering, limits: Limits) -> PassPlan:
    """Layers and grids such that every unit fits; BudgetError if none do."""
    cuts, fitted = _grids(layering, limits, settle=True)
    planned = tuple(_finish(cutter, layering) for cutter, _ in fitted)
    return PassPlan(layering.factored, layering.classes, cuts, planned)


def look_at_pass(layering: Layering, limits: Limits) -> tuple[int, int, int]:
    """(layers, tasks, bytes of the largest unit) of ``plan_pass``'s plan, by few of its units: much faster.

    A unit that was not looked at may be larger. BudgetError if nothing fits.
    """
    _, fitted = _grids(layering, limits, settle=False)
    return len(fitted), sum(cutter.count for cutter, _ in fitted), max(peak for _, peak in fitted)


def _grids(
    layering: Layering, limits: Limits, settle: bool
) -> tuple[tuple[int, ...], list[tuple[LayerCutter, int]]]:
    """Cut classes, and each layer's cutter with the memory of its largest unit."""
    classes = layering.classes
    asked = asked_cuts(classes, limits)
    cuts = list(asked)
    if limits.threads > 1 and not cuts:
        cuts = layering.best_cut(limits.threads)
    fitter = Fitter(layering, limits, asked)
    while True:
        fitted = _fitted(fitter, layering.layers(cuts), settle)
        if not isinstance(fitted, _Worst):
            return tuple(cuts), fitted
        added = _next_cut(fitted.layer, layering, cuts)
        if added is None:
            raise BudgetError(
                f"no cut of layer '{fitted.layer.name}' fits: one unit needs "
                f"{fitted.peak_bytes / 2**20:.1f} MiB and may take {limits.unit_bytes / 2**20:.1f} MiB"
            )
        cuts.append(added)


@dataclass(frozen=True, eq=False)
class _Worst:
    """A layer that does not fit however fine it is cut, and what a unit of it needs."""

    layer: Layer
    peak_bytes: int


def _fitted(fitter: Fitter, layers: Sequence[Layer], settle: bool) -> list[tuple[LayerCutter, int]] | _Worst:
    """Each layer in units that fit, or the first of which there are none.

    All layers are looked at by a few of their units first: to make all takes most of the time.
    """
    found: list[tuple[LayerCutter, int]] = []
    for layer in layers:
        cutter, most = fitter.fit(layer)
        if most > fitter.limits.unit_bytes:
            return _Worst(layer, most)
        found.append((cutter, most))
        if sum(cutter.count for cutter, _ in found) > MOST_TASKS:
            raise BudgetError(
                f"a step would be cut into more than {MOST_TASKS} units of at most "
                f"{fitter.limits.unit_bytes / 2**20:.1f} MiB"
            )
    for number, (rough, _) in enumerate(found if settle else ()):
        found[number] = cutter, most = fitter.settle(rough)
        if most > fitter.limits.unit_bytes:
            return _Worst(cutter.layer, most)
    return found


def frozen_cuts(plan: PassPlan) -> dict[str, object]:
    """What is needed to make the same plan again: plain data for ``plan.json``."""
    return {
        "cuts": list(plan.cuts),
        "grids": [{str(cut): count for cut, count in p.grid.items()} for p in plan.layers],
    }


def replan_pass(layering: Layering, frozen: Mapping[str, Any]) -> PassPlan:
    """The plan that ``frozen_cuts`` was taken of."""
    cuts = [int(cut) for cut in frozen["cuts"]]
    layers = layering.layers(cuts)
    if len(layers) != len(frozen["grids"]):
        raise InputError("the stored plan belongs to another model or version; pass replan=True")
    grids = [{int(cut): int(count) for cut, count in grid.items()} for grid in frozen["grids"]]
    planned = [
        _finish(layering.cutter(layer, grid), layering) for layer, grid in zip(layers, grids, strict=True)
    ]
    return PassPlan(layering.factored, layering.classes, tuple(cuts), tuple(planned))


def _next_cut(layer: Layer, layering: Layering, cuts: Sequence[int]) -> int | None:
    """The best class not yet cut that cuts something this layer makes."""
    order, cut_letter = layering.by_waste(layering.order, [layer]), layering.classes.cut_letter
    sinks = {*layer.stores, *layer.partials}
    makers = [cell for cell in layer.cells if any(view.value in sinks for view in cell.outputs)]
    for cut in order:
        if cut not in cuts and all(cut_letter(cell, cut) is not None for cell in makers):
            return cut
    some = (cut for cut in order if any(cut_letter(cell, cut) is not None for cell in makers))
    return next((cut for cut in some if cut not in cuts), None)


def _finish(cutter: LayerCutter, layering: Layering) -> LayerPlan:
    units = [cutter.unit(shard) for shard in cutter.shards()]
    if cutter.layer.index % 2:
        # Serpentine: start with the shard that the layer before has just written.
        units.reverse()
    one_of_each = {unit.program.key: unit for unit in units}
    flops = {key: program_flops(unit.program, layering.rules) for key, unit in one_of_each.items()}

    def total(count: Callable[[Unit, Factored], dict[str, int]]) -> int:
        return sum(sum(count(unit, layering.factored).values()) for unit in units)

    buffer_bytes, scratch_bytes = layering.largest(cutter)
    return LayerPlan(
        layer=cutter.layer,
        grid=cutter.grid,
        units=tuple(units),
        buffer_bytes=buffer_bytes,
        scratch_bytes=scratch_bytes,
        read_bytes=total(read_bytes),
        written_bytes=total(made_bytes),
        flops=sum(flops[unit.program.key] for unit in units),
        scratch={key: layering.scratch(unit.program) for key, unit in one_of_each.items()},
    )
