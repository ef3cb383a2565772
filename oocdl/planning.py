"""What a run will need, before it runs: budgets into limits, and the plan people read."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from oocdl.bind import Binding
from oocdl.compile import Compiled, Frozen, compile_training
from oocdl.config import Settings
from oocdl.engines.engine import resolve
from oocdl.errors import BudgetError
from oocdl.graph.plan import LayerPlan, Limits
from oocdl.graph.read_onnx import OnnxModel
from oocdl.machine import cores, resident_bytes
from oocdl.ops import RULES

OVERHEAD_BYTES = 48 << 20
"""Python objects, I/O buffers and library caches beyond what is counted."""
ENGINE_BYTES = {"torch": 190 << 20, "onnxruntime": 40 << 20}
"""What loading an engine adds to the process (measured, rounded up)."""


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


def machine_for(settings: Settings, loaded: bool) -> Machine:
    """Spend the budget. ``loaded``: the engine is imported already, so the process is as large as it gets."""
    engine = resolve(settings.engine)
    threads = settings.threads or cores()
    base = resident_bytes() + OVERHEAD_BYTES + (0 if loaded else ENGINE_BYTES[engine])
    capacity = settings.memory_bytes - base
    if capacity <= 0:
        raise BudgetError(
            f"memory={settings.memory_bytes / 2**20:.0f} MiB is less than the process itself takes with engine "
            f"'{engine}' ({base / 2**20:.0f} MiB); give more memory"
        )
    return Machine(engine, threads, base, capacity)


def compile_within(
    model: OnnxModel, binding: Binding, settings: Settings, machine: Machine, batch: int,
    frozen: Frozen | None = None, pieces: Any = None,
) -> Compiled:
    """Compile a training step; if nothing fits, say which budget would do."""
    limits = machine.limits(settings)
    try:
        return compile_training(model, binding, settings, batch, RULES, limits, frozen, pieces)
    except BudgetError as error:
        if frozen is not None:
            raise
        needed = smallest_budget(model, binding, settings, machine, batch)
        raise BudgetError(f"{error}; memory='{-(-needed >> 20)}MiB' would do") from None


def smallest_budget(
    model: OnnxModel, binding: Binding, settings: Settings, machine: Machine, batch: int
) -> int:
    """The smallest budget that a plan fits, within an eighth."""
    unit = machine.limits(settings).unit_bytes
    while True:
        unit = max(unit * 9 // 8, unit + 1)
        limits = Limits(unit, machine.threads, machine.limits(settings).parallel)
        try:
            compile_training(model, binding, settings, batch, RULES, limits)
        except BudgetError:
            continue
        return machine.base_bytes + unit * (machine.threads + 1)


@dataclass(frozen=True, eq=False)
class Plan:
    """What one step will do and need. Made by ``oocdl.plan``; nothing has run.

    ``str(plan)`` is a table. Bytes read and written are those that units move when
    nothing fits in RAM; what stays in the tier is neither read nor written.
    """

    compiled: Compiled
    settings: Settings
    machine: Machine
    model: str
    ragged: Compiled | None = None
    """The smaller last batch of an epoch, if there is one."""

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """All layers in order."""
        return self.compiled.plan.layers

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the process: base, and everything the tier may hold."""
        units = self.compiled.plan.peak_unit_bytes * (self.machine.threads + 1)
        stored = sum(layer.written_bytes for layer in self.layers) + self.weight_bytes
        return self.machine.base_bytes + min(self.machine.capacity_bytes, units + stored)

    @property
    def weight_bytes(self) -> int:
        """Weights and state."""
        values = self.compiled.plan.factored.graph.values
        return sum(values[name].nbytes for name in self.compiled.pieces)

    @property
    def disk_bytes(self) -> int:
        """At most this much spill and run store: all that a step stores, and three versions of the weights."""
        return sum(layer.written_bytes for layer in self.layers) + 3 * self.weight_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that units read in a step."""
        return self.compiled.plan.read_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes that units write in a step."""
        return self.compiled.plan.written_bytes

    @property
    def flops(self) -> int:
        """Floating-point operations of a step."""
        return self.compiled.plan.flops

    @property
    def seconds(self) -> float:
        """A rough prediction of the seconds of a step."""
        return self.compiled.plan.seconds

    @property
    def tasks(self) -> int:
        """Units of a step."""
        return self.compiled.plan.tasks

    def table(self) -> Table:
        """Layers with their cuts and costs."""
        table = Table(title=f"{self.model}: one step of batch {self.settings.batch_size}")
        for name in ("layer", "shards", "unit MiB", "read MiB", "write MiB", "GFLOP"):
            table.add_column(name, justify="left" if name == "layer" else "right")
        names = self.compiled.plan.classes.names
        for layer in self.layers:
            cut = " ".join(f"{names[c]}:{n}" for c, n in layer.grid.items() if n > 1)
            table.add_row(
                layer.layer.name, cut or "1", f"{layer.peak_bytes / 2**20:.1f}", f"{layer.read_bytes / 2**20:.1f}",
                f"{layer.written_bytes / 2**20:.1f}", f"{layer.flops / 1e9:.2f}",
            )
        return table

    def summary(self) -> str:
        """One line."""
        return (
            f"{len(self.layers)} layers, {self.tasks} tasks a step, peak {self.peak_bytes / 2**20:.0f} MiB of "
            f"{self.settings.memory_bytes / 2**20:.0f} MiB, reads {self.read_bytes / 1e9:.2f} GB and writes "
            f"{self.written_bytes / 1e9:.2f} GB if nothing fits, {self.flops / 1e9:.1f} GFLOP, "
            f"engine {self.machine.engine}, {self.machine.threads} threads"
        )

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=110, force_terminal=False)
        console.print(self.table())
        console.print(self.summary(), soft_wrap=True)
        return out.getvalue()


def semaphore(machine: Machine) -> threading.Semaphore:
    """Compute slots of a process."""
    return threading.Semaphore(machine.threads)


__all__ = ["Machine", "Mapping", "Plan", "compile_within", "machine_for", "semaphore", "smallest_budget"]
