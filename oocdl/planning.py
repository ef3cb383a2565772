"""What a budget allows: how memory is spent, and the limits that a plan has to keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from oocdl.bind import Binding
from oocdl.compile import Compiled, Frozen, Part, compile_training
from oocdl.config import Settings
from oocdl.engines.engine import get_engine, resolve
from oocdl.errors import BudgetError
from oocdl.graph.plan import Limits, StepPlan
from oocdl.graph.read_onnx import OnnxModel
from oocdl.heap import give_back_freed_memory
from oocdl.machine import anonymous_bytes, cores
from oocdl.ops import RULES
from oocdl.sources import BLOCK_BYTES
from oocdl.storage.dataset import Dataset
from oocdl.storage.direct import BOUNCE_BYTES
from oocdl.storage.tier import IO_THREADS

OVERHEAD_BYTES = 48 << 20
"""Python objects, compiled kernels and library caches of a run, beyond what is counted."""
PLAN_BYTES = 16 << 20
"""Part of it that the plan itself may take."""
HOLES, MOST_HOLES = 1.25, 2.0
"""Heap for each byte of work space, at least and at most: blocks of several sizes leave holes."""
CODEC_COPIES = 3
"""A chunk of a dataset while it is read: compressed, decoded, and the part that was asked for."""


@dataclass(frozen=True)
class Machine:
    """How a memory budget is spent: ``base + tier + threads x work = budget``."""

    engine: str
    threads: int
    base_bytes: int
    """The process before any array: engine loaded, buffers of input and output."""
    capacity_bytes: int
    """For arrays in the RAM tier, and for programs that run."""
    reserved_bytes: int = 0
    """Part of ``base_bytes`` that was not in use yet when it was measured."""

    def limits(self, settings: Settings) -> Limits:
        """What each unit may take, so that ``threads`` run while inputs of another are read."""
        parallel = None if settings.parallel == "auto" else settings.parallel
        return Limits(self.capacity_bytes // (self.threads + 1), self.threads, parallel)

    def share(self, needs: Needs) -> Share:
        """Divide the capacity: as many programs at once as there are threads, if that leaves room.

        Measures how much the process has grown since it was planned. Raises BudgetError if
        not even one unit has room.
        """
        grown = anonymous_bytes() - (self.base_bytes - self.reserved_bytes + PLAN_BYTES)
        left = self.capacity_bytes - max(grown, 0)
        for slots in range(self.threads, 0, -1):
            work = slots * needs.work_bytes
            tier = min(left - int(HOLES * work), needs.stored_bytes)
            if tier >= needs.buffer_bytes:
                # What the tier can never fill is better kept by the heap.
                return Share(tier, min(left - tier, int(MOST_HOLES * work)), slots)
        raise BudgetError(
            f"{left >> 20} MiB of the budget are left, a unit needs "
            f"{(needs.work_bytes + needs.buffer_bytes) >> 20} MiB: the process has grown by "
            f"{max(grown, 0) >> 20} MiB since it was planned; give more memory"
        )


@dataclass(frozen=True)
class Needs:
    """What the largest units of some plans need."""

    buffer_bytes: int
    work_bytes: int
    stored_bytes: int
    """At most so much is in the tier at a time, running units included."""


def needs_of(plans: Iterable[StepPlan], threads: int) -> Needs:
    """The largest of each."""
    plans = list(plans)
    buffers = max(plan.buffer_bytes for plan in plans)
    # Everything that a step makes, beside what it starts from: more is never there.
    stored = max(2 * (plan.written_bytes + plan.versioned_bytes) for plan in plans)
    return Needs(buffers, max(plan.work_bytes for plan in plans), stored + (threads + 1) * buffers)


@dataclass(frozen=True)
class Share:
    """The capacity, divided."""

    tier_bytes: int
    heap_bytes: int
    """For programs that run."""
    slots: int
    """How many at once."""


def machine_for(settings: Settings, dataset: Dataset) -> Machine:
    """Spend the budget. Loads the engine first: it is part of the process, which is measured here."""
    engine = resolve(settings.engine)
    get_engine(engine)
    threads = settings.threads or cores()
    give_back_freed_memory()
    codecs = CODEC_COPIES * max(BLOCK_BYTES, *(array.chunk_bytes for array in dataset.arrays.values()))
    reserved = OVERHEAD_BYTES + codecs + (threads + 1 + IO_THREADS) * BOUNCE_BYTES
    base = anonymous_bytes() + reserved
    capacity = settings.memory_bytes - base
    if capacity <= 0:
        raise BudgetError(
            f"memory={settings.memory_bytes >> 20} MiB is less than the process itself takes with engine "
            f"'{engine}' ({base >> 20} MiB); give more memory"
        )
    return Machine(engine, threads, base, capacity, reserved)


def compile_within(
    model: OnnxModel,
    binding: Binding,
    settings: Settings,
    machine: Machine,
    batch: int,
    frozen: Frozen | None = None,
    pieces: Any = None,
    part: Part = Part.WHOLE,
) -> Compiled:
    """Compile a training step; if nothing fits, say which budget would do."""
    limits = machine.limits(settings)
    try:
        return compile_training(model, binding, settings, batch, RULES, limits, frozen, pieces, part)
    except BudgetError as error:
        if frozen is not None:
            raise
        needed = smallest_budget(model, binding, settings, machine, batch, part)
        raise BudgetError(f"{error}; memory='{-(-needed >> 20)}MiB' would do") from None


def smallest_budget(
    model: OnnxModel, binding: Binding, settings: Settings, machine: Machine, batch: int, part: Part
) -> int:
    """The smallest budget that a plan fits, within a tenth or so."""
    given = machine.limits(settings)

    def fits(unit: int) -> bool:
        try:
            limits = Limits(unit, given.threads, given.parallel)
            compile_training(model, binding, settings, batch, RULES, limits, part=part)
        except BudgetError:
            return False
        return True

    low = high = max(given.unit_bytes, 1 << 16)
    while not fits(high):
        low, high = high, 2 * high
    for _ in range(3):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return machine.base_bytes + high * (machine.threads + 1)
