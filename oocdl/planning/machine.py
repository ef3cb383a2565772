"""The machine: how a memory budget is spent, and whether a plan finds room in what is left of it.

What bits depend on beyond a plan is told as well: the kind of machine, and the version of its engine.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Protocol

from oocdl.config import Settings
from oocdl.engines.engine import get_engine, model_of, resolve, runtime_of
from oocdl.engines.engine_registry import ENGINES
from oocdl.errors import BudgetError, InputError
from oocdl.fusion.loop_ops import LOOPS_VERSION
from oocdl.graph.onnx.model_file import size_text
from oocdl.host.heap import MemoryGuard, give_back_freed_memory
from oocdl.host.limits import anonymous_bytes, available, cores, installed_version, processor
from oocdl.ops import RULES
from oocdl.planning.own_memory import larger_bytes, loaded_bytes, own_bytes, park_much, parked_slack_bytes
from oocdl.planning.pass_plan import PassPlan, PassSize
from oocdl.planning.tile_search import Limits
from oocdl.storage.cache.direct_io import BOUNCE_BYTES
from oocdl.storage.cache.io_threads import IO_THREADS
from oocdl.storage.dataset.dataset import Dataset

OVERHEAD_BYTES = 72 << 20
"""Python objects, compiled kernels and library caches of a run, beyond what is counted; and what the
kernel counts in a cgroup: page tables, shared memory, files being written."""
KERNEL_BYTES = 16 << 20
"""The part of ``OVERHEAD_BYTES`` for what the kernel counts in a cgroup: page tables, slabs, stacks."""
FILE_BYTES = 20 << 20
"""The part of ``OVERHEAD_BYTES`` for pages of mapped files: the code that a step runs through."""
PLAN_BYTES = 32 << 20
"""The part of ``OVERHEAD_BYTES`` that the plan itself may take."""
EMPTY_PLAN_BYTES, LAYER_BYTES, TASK_BYTES = 24 << 20, 96 << 10, 16 << 10
"""Bytes that a plan takes: by itself, for each layer and for each task. Measured: 25 and 34 MiB for 245
and 781 tasks of a U-Net's 52 layers, 52 MiB for 373 of a GPT's 263, 58 MiB for 1520 of ResNet-50's 224.
Members of a cluster have only their own tasks. Of a U-Net, beside 10 MiB that all know: 5.1 MiB for 296
tasks (1,977 calls) of one of 8 and 6.8 MiB for 537 (3,240) of one of 4, which is 13 to 17 KiB a task, 2.2
to 2.7 a call; 6.0 MiB for 159 (1,162) of one of 64, which reads most from others, 39 KiB a task: what a
plan takes by itself has room for that."""
UNEVEN_RATIO = 1.5
"""Largest ratio of the tasks of a member of a cluster to an even share of each layer. Measured: 0.94 to
1.00 on 2, 4 and 8 members, 1.35 on 64 of 16 threads."""
SLACK_BYTES, CREW_SLACK_BYTES = 1 << 20, 16 << 20
"""Bytes that the same process, or a worker of a cluster, may take more the next time; budgets that errors
name include them. Measured: 0.1 MiB between six processes that do the same."""
DISCARD_CAPACITY_SHARE = 0.25
"""Weights and state that take more than this share of the capacity are discarded as they are replaced."""
READ_BLOCK_BYTES = 1 << 20
"""Bytes that a unit reads of a dataset, or generates, at once, where chunks are not larger."""
BATCH_CACHE_BYTES = 8 << 20
"""What is already read of the current batch is kept up to this size."""
LEAST_READING_BYTES = 3 * READ_BLOCK_BYTES
"""Bytes that reading takes where chunks are smaller than a block."""
UNUSUAL_BYTES = 16 << 20
"""Excess over the usual memory for reading from which on errors give the reason."""

SAMPLE_BYTES = 24
"""Bytes for each sample of a dataset while an epoch is shuffled: two numbers, and one of the sorting."""


class PlanSize(Protocol):
    """Facts about a plan that a process has to know."""

    @property
    def peak_unit_bytes(self) -> int: ...

    @property
    def versioned_bytes(self) -> int: ...


@dataclass(frozen=True)
class Crew:
    """Processes of a cluster that do the work."""

    threads: int
    """Compute threads of each process."""
    processes: int
    """Processes that are there, or that are expected."""
    there: int
    """Processes that are there."""
    own_bytes: int
    """Bytes of the largest of them with the engine loaded, before any array."""


@dataclass(frozen=True)
class Machine:
    """A memory budget, and how it is spent."""

    engine: str
    threads: int
    base_bytes: int
    """Bytes of the process before any array: engine loaded, buffers of input and output."""
    capacity_bytes: int
    """Bytes for arrays in the RAM tier, and for programs that run."""
    reserved_bytes: int = 0
    """Part of ``base_bytes`` that was not in use yet when it was measured."""
    workers: int = 0
    """Processes of a cluster, each with all of this; 0: this process does the work."""
    sharing: int = 1
    """Number of workers sharing the plan; each holds only its own tasks."""
    driver_bytes: int | None = None
    """Bytes that the process with the whole plan may still use; None: as much as the plan takes."""
    batch_cache_bytes: int = BATCH_CACHE_BYTES
    """The most that is kept of what was already read of the current batch."""
    device_unit_bytes: int | None = None
    """Size above which units were found not to fit the engine's device; None: no unit was too large."""
    together: int = 1
    """Number of threads that run each program together."""
    slots: int | None = None
    """Number of threads that layers are cut for; None: all of them."""
    why_reading: str = field(default="", repr=False)
    """A clause of errors: why reading the dataset takes much of ``base_bytes``."""
    process_bytes: Callable[[], int] = field(default=anonymous_bytes, repr=False)
    """Measures the size of the process."""
    running_bytes: Callable[[], int] = field(default=anonymous_bytes, repr=False)
    """The same while units run, for the guard."""

    @property
    def programs(self) -> int:
        """Programs that run at once in a process."""
        return max(self.threads // self.together, 1)

    @property
    def permits(self) -> int:
        """Programs that run at once, in all processes together."""
        return self.programs * max(self.workers, 1)

    def of(self, workers: int) -> Machine:
        """The same where only so many of the workers get work."""
        return replace(self, workers=workers, sharing=min(self.sharing, workers))

    @property
    def unit_bytes(self) -> int:
        """Bytes that each unit may take if ``programs`` run while inputs of another are read."""
        # What comes from other processes, and goes to them, is smaller than units that read and make it.
        share = self.capacity_bytes // (self.programs + 1 + bool(self.workers))
        return max(share if self.device_unit_bytes is None else min(share, self.device_unit_bytes), 1)

    @property
    def least_bytes(self) -> int:
        """Bytes in which its process can begin; workers have begun."""
        return 0 if self.workers else loading_budget(self.engine)

    @property
    def slack_bytes(self) -> int:
        """Bytes that a process may take more by itself the next time."""
        return CREW_SLACK_BYTES if self.workers else SLACK_BYTES + parked_slack_bytes()

    @property
    def shares(self) -> int:
        """Processes that have a part of a plan when it begins."""
        return min(self.sharing, max(self.workers, 1))

    def guard(self) -> MemoryGuard:
        """Return the guard that keeps the process, its files and the kernel's share in the budget."""
        budget = self.base_bytes + self.capacity_bytes
        return MemoryGuard(
            budget, kernel_bytes=KERNEL_BYTES, file_bytes=FILE_BYTES, measure=self.running_bytes
        )

    def limits(self, settings: Settings, unit_bytes: int, units: int | None = None) -> Limits:
        """The limits that a plan of at most ``units`` has to keep, each of which may take ``unit_bytes``."""
        parallel = None if settings.parallel == "auto" else settings.parallel
        most_units = (self.capacity_bytes + PLAN_BYTES - EMPTY_PLAN_BYTES) // TASK_BYTES
        most_units = int(most_units * max(self.shares / UNEVEN_RATIO, 1))
        if self.driver_bytes is not None:
            most_units = min(most_units, self.driver_bytes // TASK_BYTES)
        most_units = min(most_units, units or most_units)
        slots, workers = self.slots or self.permits, max(self.workers, 1)
        return Limits(unit_bytes, slots, parallel, most_units=most_units, workers=workers)

    def growth_bytes(self, counts: Sequence[int], hosts: int | None = None) -> int:
        """Return the capacity that a plan takes beyond ``PLAN_BYTES``, in bytes; ``counts``: tasks by layer.

        ``hosts``: workers that get some of them; None: all.
        """
        share, shares = sum(counts), min(self.shares, hosts or self.shares)
        if shares > 1:
            share = min(int(UNEVEN_RATIO * sum(-(-count // shares) for count in counts)), share)
        return max(EMPTY_PLAN_BYTES + len(counts) * LAYER_BYTES + share * TASK_BYTES - PLAN_BYTES, 0)

    def room_bytes(self, plans: Iterable[PlanSize], travelling_bytes: int = 0) -> int:
        """Return what is left of the capacity, now that the process has grown by its plans.

        ``travelling_bytes`` are kept free for messages between processes. Raises BudgetError if the
        largest unit would not find room.
        """
        needed = max(plan.peak_unit_bytes for plan in plans)
        known = self.base_bytes - self.reserved_bytes + PLAN_BYTES
        for collect in (lambda: None, gc.collect):
            collect()
            give_back_freed_memory()
            grown = max(self.process_bytes() - known, 0) + travelling_bytes
            left = self.capacity_bytes - grown
            if needed <= left:
                return left
        budget = self.base_bytes + grown + needed + self.slack_bytes
        raise BudgetError(
            f"{max(left, 0) >> 20} MiB of the budget are left, a unit needs {-(-needed >> 20)} MiB "
            f"beside the process itself ({(self.base_bytes + grown) >> 20} MiB); "
            f"memory='{-(-budget >> 20)}MiB' would do"
        )


def machine_for(
    settings: Settings,
    dataset: Dataset,
    threads: int | None = None,
    crew: Crew | None = None,
    preparing_bytes: int = 0,
) -> Machine:
    """Spend the budget. Loads the engine first: it is part of the process, which is measured here.

    ``threads`` counts those of one process where the settings do not say; None: those of the crew, or one
    for each core, or one for a device. With a ``crew`` the budget is that of each of its processes, and this
    one's size is none of it but for what the plan takes here, as it will there. ``preparing_bytes`` is what
    it takes to normalise and transform samples.
    Raises InputError if the engine cannot compute or store as the settings ask.
    """
    engine = resolve(settings.engine)
    if crew is None:
        _check_loading(engine)
    loaded = get_engine(engine)
    if settings.spill_dtype is not None and runtime_of(engine) != "torch":
        raise InputError(f"spill_dtype needs engine='torch'; engine '{engine}' takes no 16-bit arrays")
    if settings.precision == "bfloat16" and not loaded.has_bfloat16:
        raise InputError(
            f"engine '{engine}' has no precision 'bfloat16' here; use engine='torch' on a processor with "
            "AVX-512 or engine='torch:cuda' on a device that has it, or precision='float32'"
        )
    alone = 1 if loaded.device else cores()  # kernels take turns on a device, so units need not be many
    threads = settings.threads or threads or (alone if crew is None else crew.threads)
    reading = _reading_bytes(dataset)
    cached = _batch_cache_bytes(dataset, settings.batch_size)
    reserved = OVERHEAD_BYTES + cached + reading + (threads + 1 + IO_THREADS) * BOUNCE_BYTES
    reserved += loaded.held_bytes + preparing_bytes
    if crew is None and loaded.device is None:
        park_much(engine, settings, PLAN_BYTES)
    here_bytes = own_bytes(engine, settings.memory_bytes - reserved, PLAN_BYTES)
    process_bytes = here_bytes if crew is None else crew.own_bytes
    base = process_bytes + reserved
    # A budget without any capacity is refused by the planner, which can tell which budget would do.
    may_begin = crew is not None or settings.memory_bytes >= loading_budget(engine)
    capacity = max(settings.memory_bytes - base, 1) if may_begin else 1
    why = _why_reading(dataset, reading)
    if crew is None:
        return Machine(engine, threads, base, capacity, reserved, batch_cache_bytes=cached, why_reading=why)
    there = partial(larger_bytes, process_bytes - here_bytes)
    return Machine(
        engine, threads, base, capacity, reserved, crew.processes, crew.there, batch_cache_bytes=cached,
        driver_bytes=max(available().nbytes - here_bytes, 0), process_bytes=there, why_reading=why,
    )  # fmt: skip


def loading_budget(engine: str) -> int:
    """Return the bytes in which a process with that engine can begin, before it parks what it hardly uses."""
    return loaded_bytes(engine) + KERNEL_BYTES + FILE_BYTES


def _check_loading(engine: str) -> None:
    """Refuse what would be killed as it loads the engine, in a cgroup of a small budget.

    Elsewhere the process is measured with the engine loaded, so that the error names a budget that would do.
    """
    runtime = runtime_of(engine)
    loading_bytes = ENGINES[runtime].least_loading_bytes(runtime)
    least_bytes = anonymous_bytes() + loading_bytes + KERNEL_BYTES + FILE_BYTES
    if runtime not in sys.modules and least_bytes > available().nbytes:
        raise BudgetError(
            f"with engine '{engine}' a process takes more than {least_bytes >> 20} MiB before it holds an "
            f"array, and this one may take {available().nbytes >> 20} MiB: give it more memory"
        )


def _reading_bytes(dataset: Dataset) -> int:
    """Return the bytes needed to read one chunk of a dataset at a time, and to shuffle its samples."""
    arrays = dataset.arrays.values()
    samples = max(array.shape[0] for array in arrays)
    return max(LEAST_READING_BYTES, *(array.reading_bytes for array in arrays)) + SAMPLE_BYTES * samples


def _batch_cache_bytes(dataset: Dataset, batch_size: int) -> int:
    """Return the most that is kept of a batch: all of it, if its numbers take eight bytes each and fit."""
    numbers = sum(prod(array.shape[1:]) for array in dataset.arrays.values())
    return min(BATCH_CACHE_BYTES, batch_size * numbers * 8)


def _why_reading(dataset: Dataset, reading_bytes: int) -> str:
    """Say why reading a dataset takes much of a budget; nothing if it does not."""
    if reading_bytes < LEAST_READING_BYTES + UNUSUAL_BYTES:
        return ""
    worst = max(dataset.arrays.values(), key=lambda array: array.reading_bytes)
    if worst.reading_bytes * 2 > reading_bytes:
        return (
            f"; array '{worst.name}' of {dataset.where} has chunks of {worst.chunk_bytes / 2**20:.0f} MiB, "
            f"and reading one takes {worst.reading_bytes / 2**20:.0f} MiB"
        )
    samples = max(array.shape[0] for array in dataset.arrays.values())
    return f"; {dataset.where} has {samples:,} samples, of which shuffling takes {SAMPLE_BYTES} bytes each"


def discards_old_weights(plan: PlanSize, machine: Machine) -> bool:
    """Whether a step discards weights and state as it replaces them.

    They are discarded where, beside the new ones, they would take memory or disk that matters. If such a
    step is broken off, the run goes back to its last commit.
    """
    return plan.versioned_bytes > DISCARD_CAPACITY_SHARE * machine.capacity_bytes


def check_capacity(plan: PassPlan, machine: Machine) -> None:
    """Raise BudgetError if the largest unit finds no room beside the plan itself."""
    worst = max(plan.layers, key=lambda layer: layer.peak_bytes)
    size = PassSize(plan.counts, worst.peak_bytes)
    check_size(size, machine, plan.hosts, f" of layer '{worst.layer.name}'")


def check_size(size: PassSize, machine: Machine, hosts: int | None = None, where: str = "") -> None:
    """Raise BudgetError if the largest unit of a plan of that size finds no room beside it."""
    left = max(machine.capacity_bytes - machine.growth_bytes(size.counts, hosts), 0)
    if size.peak_unit_bytes > left:
        raise BudgetError(
            f"a unit{where} needs {size_text(size.peak_unit_bytes)} and may take {size_text(left)}"
        )


def device_shortage(plan: PassPlan, machine: Machine) -> tuple[float, BudgetError] | None:
    """Return what the device lacks for the plan's largest unit; None: nothing, or there is no device.

    The share of what the unit needs that is free, and the error that tells the user.
    """
    device = get_engine(machine.engine).device
    if device is None:
        return None
    layers = {unit.program.key: (unit.program, layer) for layer in plan.layers for unit in layer.units}
    each = ((device.needed_bytes(program, RULES), layer) for program, layer in layers.values())
    needed, worst = max(each, key=lambda found: found[0])
    free = device.free_bytes()
    if needed <= free:
        return None
    return free / needed, BudgetError(
        f"units of layer '{worst.layer.name}' need {-(-needed >> 20)} MiB of engine '{machine.engine}' "
        f"({device.model}), where {free >> 20} MiB are free; free some of it, ask for smaller units "
        "(parallel=, or less memory=), or use engine='torch'"
    )


def check_device(plan: PassPlan, machine: Machine) -> None:
    """Raise BudgetError if the largest unit would not fit the device of the engine."""
    shortage = device_shortage(plan, machine)
    if shortage is not None:
        raise shortage[1]


def machine_facts(engine: str) -> dict[str, str]:
    """Return what bits depend on: processor, versions of engine and loops, the device if there is one."""
    model = model_of(engine)
    versions = {engine: installed_version(runtime_of(engine)), "loops": LOOPS_VERSION}
    return {"processor": processor(), **versions, **({"device": model} if model else {})}


def values_of(machines: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return each value that a fact has on one of these machines, in order, by the fact's name.

    >>> values_of([{"processor": "B", "torch": "2.13"}, {"processor": "A", "torch": "2.13"}])
    {'processor': ['A', 'B'], 'torch': ['2.13']}
    """
    found: dict[str, set[str]] = {}
    for facts in machines:
        for name, value in facts.items():
            found.setdefault(name, set()).add(value)
    return {name: sorted(values) for name, values in found.items()}


def as_one(machines: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the facts of machines that compute together, in words."""
    return {name: " or ".join(values) for name, values in values_of(machines).items()}
