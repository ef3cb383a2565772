"""The search for the cuts that a budget allows and that take the fewest predicted seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from oocdl.engines.engine import get_engine
from oocdl.errors import BudgetError
from oocdl.graph.transforms.bfloat16 import may_be_bfloat16
from oocdl.host.heap import uncollected
from oocdl.planning.calibrate import known_rates
from oocdl.planning.compiler import CompiledPass, Draft
from oocdl.planning.cost_model import Costs, together_share
from oocdl.planning.machine import (
    Machine,
    check_capacity,
    check_size,
    device_shortage,
    discards_old_weights,
)
from oocdl.planning.own_memory import TIGHT_BYTES
from oocdl.planning.simulation.one_process import simulate, stays
from oocdl.planning.simulation.timeline import Simulated
from oocdl.planning.slot_search import FEW_SLOTS
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.tile_search import MIN_PARALLEL_SECONDS

LARGEST_UNIT_BYTES = 1 << 30
"""Larger units are no faster on a processor, and what they reserve is more than they come to take."""
OTHER_UNITS_TIME_RATIO = 0.95
"""Units of another size are taken only if their predicted time is at most this share: beside larger ones,
smaller take up to 1.2 times as long as predicted."""
TRIAL_TASK_BYTES = 256 << 10
"""Memory for a trial with units of half the size, for each task of the plan at hand: up to twice as
many tasks, of up to 70 KiB each while they are made (3072 of a perceptron's took 212 MiB). A trial with
larger units takes half of it."""
FEW_MORE_UNITS = 100
"""Units of half the size are tried only if they are at most twice as many, and so many more. Of 50 plans of
ten networks none with more was predicted to be faster, nor any in units of a quarter of the size."""
PIECE_SECONDS = 5.5e-3
"""Time that a pass takes more for each further piece of a layer that is cut for the sake of threads: some ten
calls, for each of which Python runs in one thread, and threads that wait for the last one. Measured in core
on two cores with AVX2: it told six networks of short layers from four of long ones."""
SEARCH_START_BYTES = 512 << 20
"""Budget at which the search for the smallest one begins, if the given one is not larger."""
CLOSE_BYTES = 1 << 20
"""Precision of the search for the smallest budget."""
LARGEST_BUDGET_BYTES = 1 << 50
"""No budget above this is looked for."""
SEARCH_SECONDS = 15.0
"""Time after which the search for the smallest budget ends with what it has found."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to cut a pass, and how the pass is predicted to go."""

    compiled: CompiledPass
    stays: bool
    """Whether nothing is spilled, by a bound: to simulate that takes long."""
    simulate: Callable[[], Simulated]

    @cached_property
    def simulated(self) -> Simulated:
        """A step of it."""
        return self.simulate()

    @property
    def moved_bytes(self) -> int:
        """Bytes moved from and to the spill in a step."""
        return 0 if self.stays else self.simulated.moved_bytes


@uncollected()
def predict_pass(graph: TaskGraph, machine: Machine, room_bytes: int, keeps_old: bool) -> Simulated:
    """Simulate a pass that follows another, where arrays and programs have ``room_bytes``.

    ``keeps_old``: weights and state of before the pass stay until its end.
    """
    costs, shared = Costs(known_rates(machine.engine)), _as_one(graph, machine, room_bytes)
    return simulate(graph, *shared, costs, keeps_old)


def _as_one(graph: TaskGraph, machine: Machine, room_bytes: int) -> tuple[int, int, int]:
    """Room, programs that run at once, and units under way, of all processes that get work.

    They are taken for one that has all of their memory.
    """
    processes = max(min(machine.workers, graph.hosts or machine.workers), 1)
    permits = machine.programs * processes
    return room_bytes * processes, permits, permits + processes


def fastest_cut(draft: Draft, machine: Machine) -> Candidate | None:
    """The fastest way to cut on a number of workers; None if nothing fits.

    Each thread runs units of its own, or all threads run each unit together, if that is predicted to be
    faster and finds room.
    """
    if _run_together(draft, machine):
        found = _fastest_stored(draft.on(machine.threads), replace(machine, together=machine.threads))
        if found is not None:
            return found
    return _fastest_stored(draft, machine)


def _run_together(draft: Draft, machine: Machine) -> bool:
    """Whether threads are to run units together.

    Then a pass has fewer calls and nobody waits at norms, but kernels of many threads are slower than as many
    kernels of one. Layers are looked at uncut: nothing is planned twice.
    """
    layering, threads = draft.layering, machine.threads
    able = threads > 1 and not machine.workers and get_engine(machine.engine).runs_together
    if not able or layering.threads > 1 or draft.pieces or draft.request.settings.parallel != "auto":
        return False
    whole = [layering.cutter(layer, {}) for layer in layering.layers(layering.best_cut(threads))]
    seconds = [layering.middle_unit(cutter)[0] for cutter in whole]
    cut = sum(1 for one in seconds if one > MIN_PARALLEL_SECONDS)
    lost_seconds = (1 / together_share(threads) - 1) * sum(seconds) / threads
    return cut * (threads - 1) * PIECE_SECONDS > lost_seconds


def _fastest_stored(draft: Draft, machine: Machine) -> Candidate | None:
    """The fastest way to cut, also with values stored in bfloat16 where that is allowed."""
    found = _fastest_on_device(draft, machine)
    if found is not None and draft.request.settings.spill_dtype is not None and found.moved_bytes:
        names = may_be_bfloat16(
            found.compiled.plan.factored.graph,
            (name for planned in found.compiled.plan.layers for name in planned.layer.stores),
        )
        other = _fastest_on_device(draft.storing_bfloat16(names), machine)
        found = min((found, other or found), key=lambda candidate: candidate.simulated.seconds)
    return found


def _fastest_on_device(draft: Draft, machine: Machine) -> Candidate | None:
    """``_fastest``, of units that fit the engine's device, if it has one; BudgetError if none do."""
    error = None
    while (found := _fastest(draft, machine)) is not None:
        plan = found.compiled.plan
        shortage = device_shortage(plan, machine)
        if shortage is None:
            return found
        share, error = shortage
        machine = replace(machine, device_unit_bytes=int(plan.peak_unit_bytes * min(share, 0.5)))
    if error is not None:
        raise error
    return None


def _fastest(draft: Draft, machine: Machine) -> Candidate | None:
    """The fastest way to cut, by simulation; None if nothing fits."""
    large, *others = _unit_sizes(machine)
    found = _candidate(draft, machine, large)
    if found is None:
        return next(filter(None, (_candidate(draft, machine, unit_bytes) for unit_bytes in others)), None)
    # Where all of it fits, smaller units would only read more halos.
    if found.moved_bytes == 0:
        return found
    tasks, half, other = found.compiled.plan.tasks, max(large // 2, 1), None
    trial_bytes, room_bytes = tasks * TRIAL_TASK_BYTES, machine.capacity_bytes
    if trial_bytes <= room_bytes:
        most_units = 2 * tasks + FEW_MORE_UNITS if machine.permits <= FEW_SLOTS else None
        other = _candidate(draft, machine, half, most_units)
        if other and set(found.compiled.plan.cuts) < set(other.compiled.plan.cuts):
            # Classes that only smaller units need may suit large ones as well.
            again = _candidate(draft, machine, large, classes=other.compiled.plan.cuts)
            found = min((found, again or found), key=lambda candidate: candidate.simulated.seconds)
    is_tight = trial_bytes > room_bytes or (other is None and _misfit(draft, machine, half) is not None)
    if others and is_tight and trial_bytes <= 2 * room_bytes:
        # Units of a size that hardly fits are many: rather one for each thread, and none is read ahead.
        other = _candidate(draft, machine, others[0])
    most_seconds = OTHER_UNITS_TIME_RATIO * found.simulated.seconds
    return other if other and other.simulated.seconds <= most_seconds else found


def _unit_sizes(machine: Machine) -> list[int]:
    """Return the bytes of a unit if each thread has one while another is read, and if fewer run at once."""
    largest = machine.unit_bytes
    if get_engine(machine.engine).device is None:
        largest = min(largest, LARGEST_UNIT_BYTES)
    divisors = range(machine.programs, 0, -1) if machine.device_unit_bytes is None else ()
    return [largest, *(max(machine.capacity_bytes // divisor, 1) for divisor in divisors)]


def _candidate(
    draft: Draft,
    machine: Machine,
    unit_bytes: int,
    most_units: int | None = None,
    classes: Sequence[int] = (),
) -> Candidate | None:
    """The pass in units of at most ``unit_bytes``, and at most so many; None if that cannot be.

    Layers may be cut along ``classes``, whether or not that is needed.
    """
    compiled = cut(draft, machine, unit_bytes, most_units, classes)
    if isinstance(compiled, BudgetError):
        return None
    plan = compiled.plan
    room = machine.capacity_bytes - machine.growth_bytes(plan.counts)
    keeps_old = not discards_old_weights(plan, machine)
    tier_bytes, permits, workers = _as_one(compiled.graph, machine, room)
    shared = tier_bytes, permits, workers, draft.layering.costs
    simulated = partial(simulate, compiled.graph, *shared, keeps_old, timeline=False)
    return Candidate(compiled, stays(compiled.graph, tier_bytes, workers), simulated)


def cut(
    draft: Draft,
    machine: Machine,
    unit_bytes: int,
    most_units: int | None = None,
    classes: Sequence[int] = (),
) -> CompiledPass | BudgetError:
    """The pass in units of at most ``unit_bytes``, and at most so many, or why there are none."""
    # Cut in vain, it would leave less room.
    if machine.capacity_bytes < TIGHT_BYTES and (error := _misfit(draft, machine, unit_bytes)):
        return error
    try:
        limits = machine.limits(draft.request.settings, unit_bytes, most_units)
        compiled = draft.cut(replace(limits, classes=classes))
        check_capacity(compiled.plan, machine)
        return compiled
    except BudgetError as error:
        return error


def smallest_budget(draft: Draft, machine: Machine) -> int:
    """The smallest budget in bytes that is accepted, closely (less so if that takes too long)."""
    began = time.monotonic()

    def goes_on() -> bool:
        # Small units are many, and take long to cut: the search ends in time, if not at the very smallest.
        return time.monotonic() - began < SEARCH_SECONDS

    def fits(capacity_bytes: int, seems: bool = False) -> bool:
        roomy, refused = replace(machine, capacity_bytes=capacity_bytes), _misfit if seems else cut
        sizes = _unit_sizes(roomy)[::-1]
        return not all(isinstance(refused(draft, roomy, unit), BudgetError) for unit in sizes)

    high = max(SEARCH_START_BYTES, machine.capacity_bytes)
    while not fits(high, seems=True):
        high *= 2
        if high > LARGEST_BUDGET_BYTES:
            raise BudgetError(
                "the network cannot be cut so at any budget; ask for fewer pieces (parallel=, threads=)"
            )
    low = high // 2
    while low > machine.capacity_bytes and goes_on() and fits(low, seems=True):
        low, high = low // 2, low
    while high - low > CLOSE_BYTES and goes_on():
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle, seems=True) else (middle, high)
    # An estimate may be off either way.
    if fits(high):
        while high > CLOSE_BYTES and goes_on() and fits(high - CLOSE_BYTES):
            high -= CLOSE_BYTES
    else:
        high += CLOSE_BYTES
        while not fits(high):
            high += max(CLOSE_BYTES, high // 16)
    # What the process takes by itself differs a little each time.
    return max(machine.base_bytes + high, machine.least_bytes) + machine.slack_bytes


def _misfit(draft: Draft, machine: Machine, unit_bytes: int) -> BudgetError | None:
    """Return why ``cut`` is likely to find no pass, which is seen much faster; None if it is not."""
    try:
        check_size(draft.estimate(machine.limits(draft.request.settings, unit_bytes)), machine)
    except BudgetError as error:
        return error
    return None
