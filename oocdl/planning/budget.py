"""What a budget allows: how memory is spent, and the limits that a plan has to keep."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from oocdl.config import Settings
from oocdl.engines.engine import get_engine, resolve, runtime_of
from oocdl.errors import BudgetError, InputError
from oocdl.graph.transforms.bfloat16 import may_be_bfloat16
from oocdl.host.heap import give_back_freed_memory
from oocdl.host.limits import anonymous_bytes, cores
from oocdl.ops import RULES
from oocdl.planning.calibrate import load_rates
from oocdl.planning.compiler import Compiled, Draft, Frozen
from oocdl.planning.cost_model import Rates
from oocdl.planning.nominal import NOMINAL
from oocdl.planning.pass_plan import PassPlan
from oocdl.planning.simulate import simulate
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.tile_search import Limits
from oocdl.planning.timeline import Simulated
from oocdl.storage.cache.direct_io import BOUNCE_BYTES
from oocdl.storage.cache.memory_tier import IO_THREADS
from oocdl.storage.dataset.dataset import Dataset

OVERHEAD_BYTES = 72 << 20
"""Python objects, compiled kernels and library caches of a run, beyond what is counted; and what the
kernel counts in a cgroup: page tables, shared memory, files being written."""
PLAN_BYTES = 32 << 20
"""Part of it that the plan itself may take."""
GRAPH_BYTES, LAYER_BYTES, TASK_BYTES = 24 << 20, 96 << 10, 16 << 10
"""Of the plan: by itself, for each layer and for each task. Measured: 25 and 34 MiB for 245 and 781 tasks of
a U-Net's 52 layers, 52 MiB for 373 of a GPT's 263, 58 MiB for 1520 of ResNet-50's 224."""
TRYING_BYTES = 256 << 10
"""What it may take to try units of half the size, for each task of the plan at hand: up to four times as
many tasks, of up to 70 KiB each while they are made (3072 of a perceptron's took 212 MiB)."""
LARGEST_TRIED_BYTES = 512 << 20
"""Where the search for the smallest budget begins, if the budget itself is not larger."""
SEARCH_SECONDS = 15.0
"""After so long it ends with what it has found."""
LARGEST_UNIT_BYTES = 1 << 30
"""Larger units are no faster, and what they reserve is more than they come to take."""
SLACK_BYTES = 16 << 20
"""What the same process may take more the next time; named budgets have it on top."""
LARGE = 0.25
"""Part of the capacity from which on weights and state are given up piece by piece."""
WORTH = 0.97
"""Smaller units are taken only if they are predicted to save at least this much of the time."""
SPARE_BYTES = 8 << 20
SPARE = 1.15
"""Memory beyond the simulated peak that a run may take: its units do not meet as in the simulation."""
BLOCK_BYTES = 1 << 20
"""What a unit reads of a dataset, or generates, at once, where chunks are not larger."""
KEPT_BYTES = 8 << 20
"""Of a batch, read already."""

CODEC_COPIES = 3
"""A chunk of a dataset while it is read: compressed, decoded, and the part that was asked for."""


@dataclass(frozen=True)
class Machine:
    """How a memory budget is spent."""

    engine: str
    threads: int
    base_bytes: int
    """The process before any array: engine loaded, buffers of input and output."""
    capacity_bytes: int
    """For arrays in the RAM tier, and for programs that run."""
    reserved_bytes: int = 0
    """Part of ``base_bytes`` that was not in use yet when it was measured."""
    workers: int = 0
    """Processes of a cluster, each with all of this; 0: it is this process that works."""
    device_unit_bytes: int | None = None
    """Larger units were found not to fit the engine's device; None: none were."""

    @property
    def slots(self) -> int:
        """Programs that run at once, wherever."""
        return self.threads * max(self.workers, 1)

    @property
    def unit_bytes(self) -> int:
        """What each unit may take if ``threads`` of them run while inputs of another are read."""
        # What comes from other processes, and goes to them, is smaller than units that read and make it.
        share = self.capacity_bytes // (self.threads + 1 + bool(self.workers))
        return max(share if self.device_unit_bytes is None else min(share, self.device_unit_bytes), 1)

    def limits(self, settings: Settings, unit_bytes: int) -> Limits:
        """What a plan has to keep where a unit may take so much."""
        parallel = None if settings.parallel == "auto" else settings.parallel
        return Limits(unit_bytes, self.slots, parallel)

    def room_bytes(self, plans: Iterable[PassPlan], travelling_bytes: int = 0) -> int:
        """What is left of the capacity, now that the process has grown by its plans.

        ``travelling_bytes``: kept free for messages between processes. Raises BudgetError if the largest
        unit would not find room.
        """
        give_back_freed_memory()
        grown = max(anonymous_bytes() - (self.base_bytes - self.reserved_bytes + PLAN_BYTES), 0)
        grown += travelling_bytes
        left = self.capacity_bytes - grown
        needed = max(plan.peak_unit_bytes for plan in plans)
        if needed > left:
            budget = self.base_bytes + grown + needed + SLACK_BYTES
            raise BudgetError(
                f"{max(left, 0) >> 20} MiB of the budget are left, a unit needs {needed >> 20} MiB beside "
                f"the process itself ({(self.base_bytes + grown) >> 20} MiB); "
                f"memory='{-(-budget >> 20)}MiB' would do"
            )
        return left


def machine_for(
    settings: Settings, dataset: Dataset, threads: int | None = None, workers: int = 0
) -> Machine:
    """Spend the budget. Loads the engine first: it is part of the process, which is measured here.

    ``threads``: of a process, where the settings do not say; None: one a core.
    """
    engine = resolve(settings.engine)
    loaded = get_engine(engine)
    if settings.spill_dtype is not None and runtime_of(engine) != "torch":
        raise InputError(f"spill_dtype needs engine='torch'; engine '{engine}' takes no 16-bit arrays")
    if settings.precision == "bfloat16" and not loaded.has_bfloat16:
        raise InputError(
            f"engine '{engine}' has no precision 'bfloat16' here; use engine='torch' on a processor with "
            "AVX-512 or engine='torch:cuda' on a device that has it, or precision='float32'"
        )
    threads = settings.threads or threads or cores()
    give_back_freed_memory()
    codecs = CODEC_COPIES * max(BLOCK_BYTES, *(array.chunk_bytes for array in dataset.arrays.values()))
    reserved = OVERHEAD_BYTES + KEPT_BYTES + codecs + (threads + 1 + IO_THREADS) * BOUNCE_BYTES
    reserved += loaded.held_bytes
    base = anonymous_bytes() + reserved
    # Nothing left is refused by whoever plans: he can tell which budget would do.
    capacity = max(settings.memory_bytes - base, 1)
    return Machine(engine, threads, base, capacity, reserved, workers)


@dataclass(frozen=True, eq=False)
class Chosen:
    """A way to cut, and how a step of it is expected to go."""

    compiled: Compiled
    simulated: Simulated


def gives_up(plan: PassPlan, machine: Machine) -> bool:
    """Whether a step gives up its weights and state as it replaces them: beside the new ones they would
    take memory or disk that matters. If such a step is broken off, the run goes back to its last commit."""
    return plan.versioned_bytes > LARGE * machine.capacity_bytes


def rates_of(engine: str) -> Rates:
    """What was measured on this machine, else nominal rates."""
    return load_rates(engine) or NOMINAL


def grown_bytes(layers: int, tasks: int) -> int:
    """What a plan of so many takes of the capacity itself."""
    return max(GRAPH_BYTES + layers * LAYER_BYTES + tasks * TASK_BYTES - PLAN_BYTES, 0)


def expected(graph: TaskGraph, machine: Machine, room_bytes: int, keeps_old: bool) -> Simulated:
    """How a step goes, after another has been, where arrays and programs have so much room."""
    rates = rates_of(machine.engine)
    processes = max(machine.workers, 1)  # taken for one that has all of their memory
    slots = machine.slots
    return simulate(graph, room_bytes * processes, slots, slots + processes, rates, RULES, keeps_old)


def compile_within(
    draft: Draft, settings: Settings, machine: Machine, frozen: Frozen | None = None
) -> Compiled:
    """Cut a training step; if nothing fits, say which budget would do.

    Large units read fewer halos, small ones leave more memory for the tier: of units that are as large
    as may be, of half that size and so on, those with the fewest predicted seconds are taken.
    """
    if frozen is not None:
        compiled = draft.with_bfloat16(frozen.get("rounded", ())).recut(frozen)
        try:
            _check_room(compiled.plan, machine)
        except BudgetError as error:
            raise BudgetError(f"{error} by the run's plan; give more memory, or pass replan=True") from None
        check_device(compiled.plan, machine)
        return compiled
    found = _best_on_device(draft, settings, machine)
    if found is not None and settings.spill_dtype is not None and found.simulated.moved_bytes:
        names = may_be_bfloat16(
            found.compiled.plan.factored.graph,
            (name for planned in found.compiled.plan.layers for name in planned.layer.stores),
        )
        other = _best_on_device(draft.with_bfloat16(names), settings, machine)
        found = min((found, other or found), key=lambda chosen: chosen.simulated.seconds)
    if found is None:
        worst = _cut(draft, settings, machine, machine.capacity_bytes)
        assert isinstance(worst, BudgetError)
        needed = smallest_budget(draft, settings, machine)
        raise BudgetError(
            f"{worst} beside the process itself ({machine.base_bytes >> 20} MiB with engine "
            f"'{machine.engine}'); memory='{-(-needed >> 20)}MiB' would do"
        ) from None
    gc.collect()  # what was tried and not taken is large, and full of cycles
    return found.compiled


@dataclass(frozen=True)
class Overfull:
    """A device on which the largest unit has no room."""

    device: str
    layer: str
    needed_bytes: int
    free_bytes: int

    def error(self) -> BudgetError:
        """What is told to the user."""
        return BudgetError(
            f"units of layer '{self.layer}' need {self.needed_bytes >> 20} MiB of {self.device}, where "
            f"{self.free_bytes >> 20} MiB are free; free some of it, ask for smaller units (parallel=, or "
            "less memory=), or use engine='torch'"
        )


def overfull(plan: PassPlan, machine: Machine) -> Overfull | None:
    """The engine's device, if it has one and the largest unit would not fit its free memory."""
    device = get_engine(machine.engine).device
    if device is None:
        return None
    layers = {unit.program.key: (unit.program, layer) for layer in plan.layers for unit in layer.units}
    each = ((device.needed_bytes(program, RULES), layer) for program, layer in layers.values())
    needed, worst = max(each, key=lambda found: found[0])
    name, free = f"engine '{machine.engine}' ({device.model})", device.free_bytes()
    return Overfull(name, worst.layer.name, needed, free) if needed > free else None


def check_device(plan: PassPlan, machine: Machine) -> None:
    """BudgetError if the largest unit would not fit the device of the engine."""
    found = overfull(plan, machine)
    if found is not None:
        raise found.error()


def _best_on_device(draft: Draft, settings: Settings, machine: Machine) -> Chosen | None:
    """``_best``, of units that fit the engine's device, if it has one. BudgetError if there are none."""
    lacking: Overfull | None = None
    while (found := _best(draft, settings, machine)) is not None:
        plan = found.compiled.plan
        lacking = overfull(plan, machine)
        if lacking is None:
            return found
        share = min(lacking.free_bytes / lacking.needed_bytes, 0.5)
        machine = replace(machine, device_unit_bytes=int(plan.peak_unit_bytes * share))
    if lacking is not None:
        raise lacking.error()
    return None


def _best(draft: Draft, settings: Settings, machine: Machine) -> Chosen | None:
    """The fastest way to cut, by simulation."""
    found = None
    at_once = machine.threads + 1
    largest = min(machine.unit_bytes, LARGEST_UNIT_BYTES)
    for share in (1, 2, 4, 8):
        chosen = _chosen(draft, settings, machine, max(largest // share, 1))
        if chosen is None or (found and chosen.simulated.seconds > WORTH * found.simulated.seconds):
            break
        found = chosen
        if found.simulated.moved_bytes == 0:
            break  # all of it fits: smaller units would only read more halos
        if found.compiled.plan.tasks * TRYING_BYTES > machine.capacity_bytes:
            break
    # Where not even that many have room, fewer units run at once.
    for divisor in range(at_once - 1, 0, -1) if machine.device_unit_bytes is None else ():
        found = found or _chosen(draft, settings, machine, max(machine.capacity_bytes // divisor, 1))
    return found


def _chosen(draft: Draft, settings: Settings, machine: Machine, unit_bytes: int) -> Chosen | None:
    compiled = _cut(draft, settings, machine, unit_bytes)
    if isinstance(compiled, BudgetError):
        return None
    plan = compiled.plan
    room = machine.capacity_bytes - grown_bytes(len(plan.layers), plan.tasks)
    return Chosen(compiled, expected(compiled.graph, machine, room, not gives_up(plan, machine)))


def _cut(draft: Draft, settings: Settings, machine: Machine, unit_bytes: int) -> Compiled | BudgetError:
    """Units of at most so much; or why there are none."""
    try:
        compiled = draft.cut(machine.limits(settings, unit_bytes))
        _check_room(compiled.plan, machine)
        return compiled
    except BudgetError as error:
        return error


def _check_room(plan: PassPlan, machine: Machine) -> None:
    """BudgetError if the largest unit finds no room beside the plan itself."""
    left = machine.capacity_bytes - grown_bytes(len(plan.layers), plan.tasks)
    worst = max(plan.layers, key=lambda layer: layer.peak_bytes)
    if worst.peak_bytes > left:
        raise BudgetError(
            f"a unit of layer '{worst.layer.name}' needs {worst.peak_bytes / 2**20:.2f} MiB and may take "
            f"{max(left, 0) / 2**20:.2f} MiB"
        )


def smallest_budget(draft: Draft, settings: Settings, machine: Machine) -> int:
    """The smallest budget that a plan fits, closely (less so if that takes too long)."""

    def fits(unit: int) -> bool:
        try:
            layers, tasks, most = draft.look(machine.limits(settings, unit))
        except BudgetError:
            return False
        return most <= unit - grown_bytes(layers, tasks)

    def really_fits(unit: int) -> bool:
        roomy = replace(machine, capacity_bytes=unit)
        return not isinstance(_cut(draft, settings, roomy, unit), BudgetError)

    high = max(LARGEST_TRIED_BYTES, machine.capacity_bytes)
    while not fits(high):
        high *= 2
    began, low = time.monotonic(), high // 2

    def goes_on() -> bool:
        # Small units are many, and take long to cut: the search ends in time, if not at the very smallest.
        close = max(high // 8, (machine.base_bytes + high) // 64)
        return high - low > close and time.monotonic() - began < SEARCH_SECONDS

    while low > machine.capacity_bytes and goes_on() and fits(low):
        low, high = low // 2, low
    while goes_on():
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    while not really_fits(high):
        high += high // 8
    # What the process takes by itself differs a little each time.
    return machine.base_bytes + high + SLACK_BYTES
