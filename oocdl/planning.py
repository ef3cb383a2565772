"""What a budget allows: how memory is spent, and the limits that a plan has to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oocdl.bind import Binding
from oocdl.compile import Compiled, Frozen, Part, compile_training
from oocdl.config import Settings
from oocdl.engines.engine import get_engine, resolve
from oocdl.errors import BudgetError
from oocdl.graph.plan import Limits
from oocdl.graph.read_onnx import OnnxModel
from oocdl.machine import cores, give_back_freed_memory, resident_bytes
from oocdl.ops import RULES

OVERHEAD_BYTES = 48 << 20
"""Python objects, I/O buffers and library caches beyond what is counted."""


@dataclass(frozen=True)
class Machine:
    """How a memory budget is spent."""

    engine: str
    threads: int
    base_bytes: int
    """The process before any array, engine loaded."""
    capacity_bytes: int
    """For arrays: the RAM tier."""

    def limits(self, settings: Settings) -> Limits:
        """What each unit may take, so that ``threads`` run while inputs of another are read."""
        parallel = None if settings.parallel == "auto" else settings.parallel
        return Limits(self.capacity_bytes // (self.threads + 1), self.threads, parallel)


def machine_for(settings: Settings) -> Machine:
    """Spend the budget. Loads the engine first: it is part of the process, which is measured here."""
    engine = resolve(settings.engine)
    get_engine(engine)
    threads = settings.threads or cores()
    give_back_freed_memory()
    base = resident_bytes() + OVERHEAD_BYTES
    capacity = settings.memory_bytes - base
    if capacity <= 0:
        raise BudgetError(
            f"memory={settings.memory_bytes >> 20} MiB is less than the process itself takes with engine "
            f"'{engine}' ({base >> 20} MiB); give more memory"
        )
    return Machine(engine, threads, base, capacity)


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
