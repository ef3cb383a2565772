"""Chooses how many workers of a cluster get work: fewer than all if a step of all would be hardly faster.

A pass is cut and placed for all workers, for half of them, and so on, and each time the seconds of a step are
estimated with all that travels (``simulation/estimate``). Weights that take long to travel are cut as well
(``weight_cuts``). Layers that are not cut at all, which follow each other over workers as a pipeline, are one
more way. By nominal rates, so that the same is chosen everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from oocdl.planning.choice.budget import Candidate, fastest_cut
from oocdl.planning.compiler import CompiledPass, Draft
from oocdl.planning.cost_model import NOMINAL
from oocdl.planning.hosts.assignment import NETWORK_BYTES_PER_SECOND
from oocdl.planning.hosts.exchange import exchanges_of
from oocdl.planning.machine import Machine
from oocdl.planning.simulation.estimate import estimated_seconds, work_seconds
from oocdl.planning.simulation.network import Cluster
from oocdl.planning.slot_search import travelling_seconds, weight_bytes, weight_cuts

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
    seconds: float
    """Approximate seconds of a step on a machine's workers."""
    work_seconds: float
    """Predicted seconds of its work on one thread."""


def fastest_over_hosts(draft: Draft, every: Candidate, machine: Machine) -> CompiledPass:
    """The pass as it is cut for ``every`` worker, or a faster one.

    That may be one for fewer workers, only where nothing is spilled, one whose weights are cut, or one of
    whole layers.
    """
    best = _timed(every, machine, machine.workers)
    if best.work_seconds < MIN_HOST_SECONDS * machine.threads:
        return every.compiled
    best, hosts = _along_weights(draft, best, machine, machine.workers), _half(machine.workers)
    while hosts and WORTH_RATIO * best.work_seconds < best.seconds * hosts * machine.threads:
        found = fastest_cut(draft, machine.of(hosts))
        if found is None or found.moved_bytes:
            break
        fewer = _along_weights(draft, _timed(found, machine, hosts), machine, hosts)
        if WORTH_RATIO * fewer.seconds > best.seconds:
            break
        best, hosts = fewer._replace(seconds=min(best.seconds, fewer.seconds)), _half(hosts)
    if best.work_seconds < WORTH_RATIO * best.seconds * machine.permits:
        whole = fastest_cut(draft, replace(machine, slots=1))
        best = best if whole is None else _better(best, _timed(whole, machine, machine.workers))
    return best.compiled


def _half(hosts: int) -> int:
    """The largest power of two that is less; 0 if there is none."""
    return 1 << (hosts - 1).bit_length() - 1 if hosts > 1 else 0


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
        travels = travelling_seconds(layering, cuts, hosts, NETWORK_BYTES_PER_SECOND)
        if travels >= WORTH_RATIO * best.seconds:
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
    work = work_seconds(going)
    seconds = estimated_seconds(going, cluster, machine.threads, work)
    if found.moved_bytes:
        disk_seconds = found.simulated.read_bytes / NOMINAL.disk_read_bytes_per_second
        disk_seconds += found.simulated.written_bytes / NOMINAL.disk_write_bytes_per_second
        seconds += disk_seconds / machine.workers
    return _Timed(compiled, seconds, sum(work))
