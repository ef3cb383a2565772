"""Chooses how many workers of a cluster get work: fewer than all if a step of all would be hardly faster.

A pass is cut and placed for one worker, for two, for four, and so on, and each time the seconds of a step are
estimated with all that travels (``simulation/estimate``). The finest cuts take the longest to plan: no more
are tried once what a step takes beside its work would be too much on any number of workers. Weights that take
long to travel are cut as well (``weight_cuts``). Layers that are not cut at all, which follow each other over
workers as a pipeline, are one more way. By nominal rates, so that the same is chosen everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from oocdl.planning.choice.budget import Candidate, fastest_cut
from oocdl.planning.compiler import CompiledPass, Draft
from oocdl.planning.cost_model import NOMINAL
from oocdl.planning.hosts.assignment import NETWORK_BYTES_PER_SECOND
from oocdl.planning.hosts.exchange import exchanges_of
from oocdl.planning.machine import Machine
from oocdl.planning.simulation.estimate import estimated_seconds
from oocdl.planning.simulation.network import Cluster
from oocdl.planning.slot_search import (
    held_bytes,
    least_work_seconds,
    travelling_seconds,
    weight_bytes,
    weight_cuts,
)

WORTH_RATIO = 0.85
"""More workers get work if a step takes at most this share of the time of one on fewer: by estimates, which
are 4 to 30 % below what is simulated, most for many workers. So does a pass of whole layers."""
MOST_WEIGHT_HOSTS = 8
"""For more workers weights are not cut: each partial sum comes from all of them."""
MIN_HOST_SECONDS = 0.02
"""A pass that takes less on one worker is left to all of them: it takes longer to look at."""


def on_hosts(compiled: CompiledPass, hosts: int) -> CompiledPass:
    """The same pass, of which so many workers get work, however many more there are."""
    plan, graph = replace(compiled.plan, hosts=hosts), replace(compiled.graph, hosts=hosts)
    return replace(compiled, plan=plan, graph=graph)


class _Timed(NamedTuple):
    """A way to cut a pass, and what it takes."""

    compiled: CompiledPass
    hosts: int
    """Number of workers that get work."""
    seconds: float
    """Approximate seconds of a step on a machine's workers."""
    work_seconds: float
    """Predicted seconds of its work on one thread."""


def fastest_over_hosts(draft: Draft, machine: Machine) -> CompiledPass | None:
    """The pass as it is cut for all workers, or a faster one; None if nothing fits.

    That may be one for fewer workers, only where nothing is spilled, one whose weights are cut, or one of
    whole layers.
    """
    tried: list[_Timed] = []
    counts = [*(1 << power for power in range((machine.workers - 1).bit_length())), machine.workers]
    for place, hosts in enumerate(counts):
        if tried and _least_seconds(tried, counts[place:], machine) >= WORTH_RATIO * _best(tried).seconds:
            break
        if (found := _for_hosts(draft, machine, hosts)) is None:
            continue
        if not tried and found.work_seconds < MIN_HOST_SECONDS * machine.threads:
            every = _for_hosts(draft, machine, machine.workers)
            if every is not None and every.work_seconds < MIN_HOST_SECONDS * machine.threads:
                return every.compiled
        tried.append(_along_weights(draft, found, machine, hosts))
    if not tried:
        return None
    best = _best(tried)
    if best.work_seconds < WORTH_RATIO * best.seconds * machine.permits:
        whole = fastest_cut(draft, replace(machine, slots=1))
        best = best if whole is None else _better(best, _timed(whole, machine, machine.workers))
    return best.compiled


def _for_hosts(draft: Draft, machine: Machine, hosts: int) -> _Timed | None:
    """The pass as it is cut for so many workers; None if it does not fit, or spills on fewer than all."""
    fewer = hosts < machine.workers
    if fewer and held_bytes(draft.layering) > hosts * machine.capacity_bytes:
        return None
    found = fastest_cut(draft, machine.of(hosts))
    return None if found is None or fewer and found.moved_bytes else _timed(found, machine, hosts)


def _least_seconds(tried: Sequence[_Timed], counts: Sequence[int], machine: Machine) -> float:
    """About the least seconds of a step on any of the ``counts`` of workers, more than have been tried.

    The work is no less, and at best done by all of them. What is beside it, such as messages and waiting for
    them, grows at least as the share of all weights that comes from others, (n - 1) / n: with twice as many
    workers half as much as it did before.
    """
    last = tried[-1]
    beside = [one.seconds - one.work_seconds / (machine.threads * one.hosts) for one in tried[-2:]]
    grown = max(beside[-1] - beside[0], 0.0)
    return min(
        beside[-1] + grown * (1 - last.hosts / hosts) + last.work_seconds / (machine.threads * hosts)
        for hosts in counts
    )


def _best(tried: Sequence[_Timed]) -> _Timed:
    """The one on the fewest workers to which no other on more of them is worth it."""
    soonest = min(one.seconds for one in tried)
    return next(one for one in tried if WORTH_RATIO * one.seconds <= soonest)


def _better(best: _Timed, other: _Timed) -> _Timed:
    return other if other.seconds <= WORTH_RATIO * best.seconds else best


def _along_weights(draft: Draft, best: _Timed, machine: Machine, hosts: int) -> _Timed:
    """The best way, or a faster one on so many workers whose weights are cut along one of their axes."""
    layering = draft.layering
    # Without that cut each worker gets weights, and tells their gradients.
    least = 2 * weight_bytes(layering) / NETWORK_BYTES_PER_SECOND
    if not 1 < hosts <= MOST_WEIGHT_HOSTS or least < (1 - WORTH_RATIO) * best.seconds:
        return best
    found = []
    for side, cuts in enumerate(weight_cuts(layering)):
        # A layer's partial sums travel when its work is done, and the next layer waits for them.
        least = travelling_seconds(layering, cuts, hosts, NETWORK_BYTES_PER_SECOND)
        if least < WORTH_RATIO * best.seconds:
            least += least_work_seconds(layering, cuts, hosts) / (hosts * machine.threads)
        if least >= WORTH_RATIO * best.seconds:
            continue
        made = fastest_cut(replace(draft, side=side), machine.of(hosts))
        if made is not None and (hosts == machine.workers or not made.moved_bytes):
            found.append(_timed(made, machine, hosts))
    return _better(best, min(found, key=lambda one: one.seconds)) if found else best


def _timed(found: Candidate, machine: Machine, hosts: int) -> _Timed:
    """A way to cut a pass for so many of a machine's workers, and what it takes."""
    compiled = found.compiled if hosts == machine.workers else on_hosts(found.compiled, hosts)
    going = exchanges_of({"": compiled.graph}, machine.workers, machine.threads)[""]
    cluster = Cluster(hosts=machine.workers, bytes_per_second=NETWORK_BYTES_PER_SECOND)
    seconds, work = estimated_seconds(going, cluster, machine.threads)
    if found.moved_bytes:
        disk_seconds = found.simulated.read_bytes / NOMINAL.disk_read_bytes_per_second
        disk_seconds += found.simulated.written_bytes / NOMINAL.disk_write_bytes_per_second
        seconds += disk_seconds / machine.workers
    return _Timed(compiled, hosts, seconds, work)
