"""How many workers of a cluster get work: all of them, or fewer if a step of all would be hardly faster.

A pass is cut and placed for all workers, for half as many, and so on, and each time the seconds of a step are
estimated with all that travels (``simulation/estimate``). Layers that are not cut at all, which follow each
other over workers as a pipeline, are one more way. By nominal rates, so that the same is chosen everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from oocdl.ops import RULES
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.cost_model import NOMINAL
from oocdl.planning.hosts.assignment import NETWORK_BYTES_PER_SECOND
from oocdl.planning.hosts.exchange import exchange, homes_of
from oocdl.planning.hosts.placement import place
from oocdl.planning.machine import Machine
from oocdl.planning.simulation.estimate import estimated_seconds, work_seconds
from oocdl.planning.simulation.network import Cluster
from oocdl.planning.simulation.timeline import Simulated

WORTH_RATIO = 0.85
"""More workers get work if a step takes at most this share of the time of one on fewer: by estimates, which
are 4 to 30 % below what is simulated, most for many workers. So does a pass of whole layers."""
MIN_HOST_SECONDS = 0.02
"""A pass that takes less on one worker is left to all of them: it takes longer to look at."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to cut a pass, and how the pass is predicted to go."""

    compiled: CompiledPass
    simulated: Simulated


def on_hosts(compiled: CompiledPass, hosts: int) -> CompiledPass:
    """The same pass, of which so many workers get work, however many more there are."""
    plan, graph = replace(compiled.plan, hosts=hosts), replace(compiled.graph, hosts=hosts)
    return replace(compiled, plan=plan, graph=graph)


def fastest_over_hosts(
    every: Candidate, machine: Machine, cut: Callable[[Machine], Candidate | None]
) -> CompiledPass:
    """The pass as it is cut for ``every`` worker, or a faster one: for fewer workers, or of whole layers.

    ``cut``: cuts the pass for a machine. For fewer workers only where nothing is spilled.
    """
    least, work = _seconds(every.compiled, every.simulated, machine)
    if work < MIN_HOST_SECONDS * machine.threads:
        return every.compiled
    best, hosts = every.compiled, 1 << (machine.workers - 1).bit_length() - 1
    while hosts and WORTH_RATIO * work < least * hosts * machine.threads:
        found = cut(machine.of(hosts))
        if found is None or found.simulated.moved_bytes:
            break
        fewer = on_hosts(found.compiled, hosts)
        seconds, work = _seconds(fewer, found.simulated, machine)  # coarser pieces are less work
        if WORTH_RATIO * seconds > least:
            break
        best, least, hosts = fewer, min(least, seconds), hosts // 2
    whole = cut(replace(machine, slots=1)) if work < WORTH_RATIO * least * machine.permits else None
    if whole is not None:
        seconds, _ = _seconds(whole.compiled, whole.simulated, machine)
        best = whole.compiled if seconds <= WORTH_RATIO * least else best
    return best


def _seconds(compiled: CompiledPass, simulated: Simulated, machine: Machine) -> tuple[float, float]:
    """About the seconds of a step on a machine's workers, and those of its work on one thread."""
    hosts = machine.workers
    placed = place(compiled.graph, hosts, machine.threads)
    going = exchange(compiled, placed, homes_of({"": compiled}, {"": placed}), hosts)
    cluster = Cluster(hosts=hosts, bytes_per_second=NETWORK_BYTES_PER_SECOND)
    disk_seconds = simulated.read_bytes / NOMINAL.disk_read_bytes_per_second
    disk_seconds += simulated.written_bytes / NOMINAL.disk_write_bytes_per_second
    seconds = estimated_seconds(going, cluster, machine.threads, NOMINAL, RULES) + disk_seconds / hosts
    return seconds, sum(work_seconds(going, NOMINAL, RULES))
