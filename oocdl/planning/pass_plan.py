"""The plan of a pass: how many pieces each layer is cut into, so that every unit fits.

Each layer gets the fewest, largest shards that keep the limits (``tile_search``). Adding a class of cuts
can turn a local reduction into one that crosses shards, so layers are formed again each time a
class is added.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from oocdl.errors import BudgetError, InputError, printable
from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.index import region_size
from oocdl.graph.ir.program_cost import ProgramScratch
from oocdl.graph.onnx.model_file import size_text
from oocdl.graph.partition.cut_classes import Classes
from oocdl.graph.partition.joined_layers import JoinSize, choose_joined, join_layers
from oocdl.graph.partition.layer_kinds import Cut, LayerKind
from oocdl.graph.partition.storage_cut import Layer
from oocdl.graph.partition.tiling import LayerCutter
from oocdl.graph.partition.unit import Unit, bytes_of
from oocdl.graph.transforms.factorize import Factored
from oocdl.planning.slot_search import COMBINED_AT_ONCE, FEW_SLOTS, SlotSearch
from oocdl.planning.tile_search import (
    MIN_PARALLEL_SECONDS,
    Layering,
    Limits,
    TileSearch,
    requested_cuts,
)

PARTIAL_SUM_BYTES = 16 << 20
"""Memory for the partial sums of one value; more shards than fit in it share partial sums."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerPlan:
    """A layer, its cuts, and the bytes and FLOPs of its units."""

    layer: Layer
    grid: Mapping[int, int]
    """Cut class -> number of pieces along it."""
    units: tuple[Unit, ...]
    buffer_bytes: int
    """Bytes of the arrays that the largest unit reads and makes."""
    scratch_bytes: int
    """Bytes that the largest program takes beside its arrays while it runs."""
    read_bytes: int
    """Bytes that all units read together."""
    written_bytes: int
    """Bytes that all units write together."""
    flops: int
    """Floating-point operations of all units together."""
    scratch: Mapping[str, ProgramScratch]
    """Key of each program -> the scratch that it takes while it runs."""

    def __repr__(self) -> str:
        return f"<LayerPlan of {printable(self.layer.name)[:100]}: {len(self.units)} units>"

    @property
    def peak_bytes(self) -> int:
        """Memory of the largest unit: arrays and scratch."""
        return self.buffer_bytes + self.scratch_bytes


@dataclass(frozen=True, eq=False)
class PassPlan:
    """All layers of one pass, in order."""

    factored: Factored
    classes: Classes
    cuts: tuple[int, ...]
    """The classes that are cut, by number, in the order in which they were added."""
    layers: tuple[LayerPlan, ...]
    slots: int = 1
    """Threads of all processes that it was cut for, if these are many: each may add to a sum of its own."""
    workers: int = 1
    """Processes that it was cut for: each has partial sums of its own."""
    hosts: int | None = None
    """Workers of a cluster that get work, where more would be hardly faster; None: all that there are."""
    joined: tuple[int, ...] = ()
    """For each layer of these cuts the number of that which it is joined into; empty if none are joined."""
    threads: int = 1
    """Threads that run each unit together."""

    def __repr__(self) -> str:
        return f"<PassPlan: {len(self.layers)} layers, {self.tasks} tasks>"

    @property
    def peak_unit_bytes(self) -> int:
        """Memory of the largest unit: arrays and scratch."""
        return max((layer.peak_bytes for layer in self.layers), default=0)

    @property
    def read_bytes(self) -> int:
        """Bytes that all units read in a pass; from disk when nothing fits in RAM."""
        return sum(layer.read_bytes for layer in self.layers)

    @property
    def written_bytes(self) -> int:
        """Bytes that all units write in a pass; to disk when nothing fits in RAM."""
        return sum(layer.written_bytes for layer in self.layers)

    @property
    def versioned_bytes(self) -> int:
        """Bytes of weights and state."""
        return sum(value.nbytes for value in self.factored.graph.of_role(Role.WEIGHT, Role.STATE))

    @property
    def flops(self) -> int:
        """Floating-point operations of a pass."""
        return sum(layer.flops for layer in self.layers)

    @property
    def tasks(self) -> int:
        """Number of units of the pass."""
        return sum(len(layer.units) for layer in self.layers)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of units of each layer."""
        return tuple(len(layer.units) for layer in self.layers)

    def numerics(self) -> str:
        """A digest, in hexadecimal, of everything in the plan that the bits of the result depend on."""
        digest = hashlib.blake2b(digest_size=16)
        if (self.slots, self.workers) != (1, 1):
            digest.update(repr((self.slots, self.workers)).encode())
        for planned in self.layers:
            for unit in planned.units:
                digest.update(repr((unit.layer, unit.shard, unit.reads, unit.makes)).encode())
                digest.update(unit.program.key.encode())
        return digest.hexdigest()


class PassSize(NamedTuple):
    """The size of a plan."""

    counts: tuple[int, ...]
    """Number of units of each layer."""
    peak_unit_bytes: int
    """Memory of the largest unit."""


def plan_pass(layering: Layering, limits: Limits) -> PassPlan:
    """Choose layers and grids such that every unit fits; BudgetError if there are none."""
    cuts, fitted = _grids(layering, limits, every_unit=True)
    cutters = [cutter for cutter, _ in fitted]
    joined = _choose_joined(cutters, layering, limits)
    layers = _plan_layers(_join(cutters, joined, layering), layering)
    if joined and max(planned.peak_bytes for planned in layers) > limits.unit_bytes:
        # The program of joined layers may copy an array that those of its members read as they want it.
        joined, layers = (), _plan_layers(cutters, layering)
    plan = PassPlan(
        layering.factored, layering.classes, cuts, layers, joined=joined, threads=layering.threads
    )
    if not any(_shares_sums(plan, planned) for planned in layers):
        return plan
    return replace(plan, slots=limits.threads if limits.threads > FEW_SLOTS else 1, workers=limits.workers)


def _choose_joined(cutters: Sequence[LayerCutter], layering: Layering, limits: Limits) -> tuple[int, ...]:
    """Return for each layer the number of the joined layer that it goes into; nothing if none are joined."""
    if limits.workers > 1:  # more units, to have work for each
        return ()
    sizes = [_join_size(cutter, layering) for cutter in cutters]
    return choose_joined([cutter.layer for cutter in cutters], sizes, limits.unit_bytes)


def _join(cutters: Sequence[LayerCutter], joined: Sequence[int], layering: Layering) -> Sequence[LayerCutter]:
    """Join layers as ``joined`` says; those that are cut stay by themselves, and keep their grids."""
    if not joined:
        return cutters
    grids = {number: cutter.grid for number, cutter in zip(joined, cutters, strict=True)}
    layers = join_layers(layering.wiring, [cutter.layer for cutter in cutters], joined)
    return [layering.cutter(layer, grids[layer.index]) for layer in layers]


def _join_size(cutter: LayerCutter, layering: Layering) -> JoinSize | None:
    """Return the bytes that a layer takes; None if it is cut, or takes ``MIN_PARALLEL_SECONDS`` or more."""
    if cutter.count > 1 or layering.middle_unit(cutter)[0] > MIN_PARALLEL_SECONDS:
        return None
    values = layering.factored.graph.values
    weights = [values[name] for name in cutter.layer.reads if values[name].role == Role.WEIGHT]
    return JoinSize(*layering.largest_unit(cutter), sum(weight.nbytes for weight in weights))


def estimate_pass(layering: Layering, limits: Limits) -> PassSize:
    """The size of ``plan_pass``'s plan by a few sample units of each layer, which is much faster.

    A unit that is no sample may be larger. BudgetError if nothing fits.
    """
    _, fitted = _grids(layering, limits, every_unit=False)
    counts = tuple(cutter.count for cutter, _ in fitted)
    return PassSize(counts, max(peak for _, peak in fitted))


def _grids(
    layering: Layering, limits: Limits, every_unit: bool
) -> tuple[tuple[int, ...], list[tuple[LayerCutter, int]]]:
    """The classes that are cut, and each layer's cutter with the memory of its largest unit.

    ``every_unit``: whether every unit is made sure to fit, or only the sample units of each layer.
    """
    slots = limits.threads
    while True:
        try:
            return _grids_for(slots, layering, limits, every_unit)
        except _TooManyUnits:
            if slots <= FEW_SLOTS:
                raise
            slots = max(slots // 2, FEW_SLOTS)  # slower, but it finds room


def _grids_for(
    slots: int, layering: Layering, limits: Limits, every_unit: bool
) -> tuple[tuple[int, ...], list[tuple[LayerCutter, int]]]:
    """The same, cut for so many slots."""
    requested = requested_cuts(layering.classes, limits)
    cuts, many = list(requested), slots > FEW_SLOTS
    spread, limits = SlotSearch(layering, slots), replace(limits, threads=slots)
    if slots > 1 and not cuts:
        cuts = spread.cuts() if many else layering.best_cut(slots)
    cuts = [*cuts, *(cut for cut in limits.classes if cut not in cuts)]
    search = TileSearch(layering, limits, requested, spread.cutter if many else None)
    while True:
        try:
            return tuple(cuts), _fitted(search, layering.layers(cuts), every_unit)
        except _TooLarge as error:
            added = _next_cut(error.layer, layering, cuts)
            if added is None:
                raise
            cuts.append(added)


class _TooManyUnits(BudgetError):
    """A plan of so many units finds no room."""


class _TooLarge(BudgetError):
    """A layer does not fit however fine it is cut."""

    def __init__(self, layer: Layer, peak_bytes: int, limits: Limits) -> None:
        super().__init__(
            f"no cut of layer '{layer.name}' fits: one unit needs {size_text(peak_bytes)} and may take "
            f"{size_text(limits.unit_bytes)}"
        )
        self.layer = layer


def _fitted(search: TileSearch, layers: Sequence[Layer], every_unit: bool) -> list[tuple[LayerCutter, int]]:
    """Each layer's cutter into units that fit and the memory of the largest; raises ``_TooLarge``.

    A few sample units of all layers are tried first: to make all units takes most of the time.
    """
    found: list[tuple[LayerCutter, int]] = []
    limits, count = search.limits, 0
    for layer in layers:
        cutter, peak = search.fit_samples(layer)
        if peak > limits.unit_bytes:
            raise _TooLarge(layer, peak, limits)
        found.append((cutter, peak))
        count += cutter.count
        if limits.most_units is not None and count > limits.most_units:
            raise _TooManyUnits(
                f"a step would be cut into more than {limits.most_units} units of at most "
                f"{size_text(limits.unit_bytes)}, and a plan of so many finds no room"
            )
    for number, (rough, _) in enumerate(found if every_unit else ()):
        found[number] = cutter, peak = search.fit_every_unit(rough)
        if peak > limits.unit_bytes:
            raise _TooLarge(cutter.layer, peak, limits)
    return found


def _shares_sums(plan: PassPlan, planned: LayerPlan) -> bool:
    """Whether it matters to the partial sums of a layer for how many slots and workers it is cut."""
    values, partials = plan.factored.graph.values, set(planned.layer.partials)
    shards = Counter(made for unit in planned.units for made in unit.makes if made[0] in partials)
    return any(
        count > COMBINED_AT_ONCE
        or count > 2
        and count * region_size(region) * itemsize(values[name].dtype) > PARTIAL_SUM_BYTES
        for (name, region), count in shards.items()
    )


def frozen_cuts(plan: PassPlan) -> dict[str, object]:
    """Return what ``replan_pass`` needs to make the same plan again: plain data for ``plan.json``.

    ``slots``, ``workers`` and ``threads`` only where they are not 1, ``hosts`` only where some workers get no
    work, ``joined`` only where layers are.
    """
    found: dict[str, object] = {
        "cuts": list(plan.cuts),
        "grids": [{str(cut): count for cut, count in p.grid.items()} for p in plan.layers],
    }
    counts = {"slots": plan.slots, "workers": plan.workers, "threads": plan.threads}
    found |= {name: count for name, count in counts.items() if count != 1}
    found |= {"joined": list(plan.joined)} if plan.joined else {}
    return found if plan.hosts is None else found | {"hosts": plan.hosts}


def replan_pass(layering: Layering, frozen: Mapping[str, Any]) -> PassPlan:
    """Make the plan again that ``frozen_cuts`` was taken from; InputError if it is not of this network."""
    cuts = [int(cut) for cut in frozen["cuts"]]
    joined = tuple(map(int, frozen.get("joined", ())))
    layers = layering.layers(cuts)
    if len(joined) == len(layers):
        layers = join_layers(layering.wiring, layers, joined)
    if len(layers) != len(frozen["grids"]):
        raise InputError("the stored plan belongs to another model or version; pass replan=True")
    grids = [{int(cut): int(count) for cut, count in grid.items()} for grid in frozen["grids"]]
    cutters = [layering.cutter(layer, grid) for layer, grid in zip(layers, grids, strict=True)]
    return PassPlan(
        layering.factored,
        layering.classes,
        tuple(cuts),
        _plan_layers(cutters, layering),
        int(frozen.get("slots", 1)),
        int(frozen.get("workers", 1)),
        int(frozen["hosts"]) if "hosts" in frozen else None,
        joined,
        layering.threads,
    )


def _next_cut(layer: Layer, layering: Layering, cuts: Sequence[int]) -> int | None:
    """The best class that is not cut yet and cuts something this layer makes."""
    order, cut_letter = layering.by_repeated_bytes(layering.cut_order, [layer]), layering.classes.cut_letter
    sinks = {*layer.stores, *layer.partials}
    makers = [cell for cell in layer.cells if any(view.value in sinks for view in cell.outputs)]
    for cut in order:
        if cut not in cuts and all(cut_letter(cell, cut) is not None for cell in makers):
            return cut
    some = (cut for cut in order if any(cut_letter(cell, cut) is not None for cell in makers))
    return next((cut for cut in some if cut not in cuts), None)


def _plan_layers(cutters: Sequence[LayerCutter], layering: Layering) -> tuple[LayerPlan, ...]:
    known: dict[Cut, tuple[LayerKind, Sequence[Unit]]] = {}
    return tuple(_plan_layer(cutter, layering, layering.units(cutter, known)) for cutter in cutters)


def _plan_layer(cutter: LayerCutter, layering: Layering, units: list[Unit]) -> LayerPlan:
    """A layer with its ``units`` in the order in which they run, and what they cost."""
    if cutter.layer.index % 2:
        # Serpentine: start with the shard that the layer before has just written.
        units.reverse()
    kinds = {unit.program.key: unit for unit in units}  # units with equal programs have equal arrays
    counts = Counter(unit.program.key for unit in units)
    each = [(counts[key], unit) for key, unit in kinds.items()]
    buffer_bytes, scratch_bytes = layering.largest_unit(cutter)
    return LayerPlan(
        layer=cutter.layer,
        grid=cutter.grid,
        units=tuple(units),
        buffer_bytes=buffer_bytes,
        scratch_bytes=scratch_bytes,
        read_bytes=sum(n * sum(bytes_of(unit.reads, layering.factored).values()) for n, unit in each),
        written_bytes=sum(n * sum(bytes_of(unit.makes, layering.factored).values()) for n, unit in each),
        flops=sum(n * layering.flops(unit.program) for n, unit in each),
        scratch={key: layering.scratch(unit.program) for key, unit in kinds.items()},
    )
