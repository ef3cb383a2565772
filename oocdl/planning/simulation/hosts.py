"""A step over many hosts before it runs: each goes through its own tasks, and what crosses travels.

Every host orders its tasks, lets units in and spills as one process does. Bundles are asked for and sent from
host to host, as in a run (``runtime/cluster/transfers``), through event loops, interfaces and the network. To
that comes the time of the tasks that a crew's pass has on Dask (``runtime/cluster/pass_tasks``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from oocdl.planning.calls import CombineCall, PickCall, UnitCall
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.cost_model import Costs, Rates
from oocdl.planning.hosts.exchange import (
    DIRECT_BYTES,
    GROUPS_AHEAD,
    MOST_ASKED,
    SMALL_BYTES,
    Bundle,
    Exchange,
    exchanges_of,
)
from oocdl.planning.hosts.local_order import LocalOrder, Work, local_order
from oocdl.planning.hosts.segments import segment_counts
from oocdl.planning.hosts.share import shares_of
from oocdl.planning.simulation.network import Clock, Cluster, Cores, Network
from oocdl.planning.simulation.one_process import after, before, regions_of
from oocdl.planning.simulation.process import Process, Step
from oocdl.planning.simulation.tasks import Chunk, Tasks
from oocdl.planning.task_key import TaskKey

BUSY_SHARE = 0.5
"""A resource that is busy for at least this share of a step is what limits it."""


@dataclass(frozen=True, kw_only=True)
class SimulatedHosts:
    """One step over many hosts as it is expected to go."""

    hosts: int
    seconds: float
    busy_shares: tuple[float, ...]
    """For each host, the share of the step for which its compute slots are busy."""
    sent_bytes: tuple[int, ...]
    """For each host, the bytes that it sends."""
    received_bytes: tuple[int, ...]
    peak_tier_bytes: tuple[int, ...]
    """The most that chunks and units of each host take at once."""
    spilled_bytes: tuple[int, ...]
    """For each host, the bytes moved from and to its disk."""
    tasks: int
    """Number of tasks of the cluster's scheduler."""
    shares: Mapping[str, float]
    """"compute", "network", "disk", "messages" (event loops of workers), "scheduler" -> the share of the step
    for which that is busy, of the host where it is busiest."""

    @property
    def limit(self) -> str:
        """The resource that is busiest; "dependencies" where hosts mostly wait for each other."""
        busiest = max(self.shares, key=self.shares.__getitem__)
        return busiest if self.shares[busiest] >= BUSY_SHARE else "dependencies"


class _Host:
    """A host's part of a pass: the bundles that it asks for."""

    def __init__(self, order: LocalOrder) -> None:
        self.left = list(order.calls_of_group)
        """Calls of each group of layers that are not over."""
        self.ready: deque[Bundle] = deque()
        """Large bundles that are made: they come one at a time."""
        self.coming = False
        self.arriving = deque(order.arriving)
        self.asked = 0
        self.direct: dict[TaskKey, int] = {}
        """Bytes of bundles that will come as soon as they are made."""


class _Pass:
    """One pass over all hosts."""

    def __init__(self, run: _Run, held: list[dict[TaskKey, Chunk]]) -> None:
        self.run = run
        self.half: set[TaskKey] = set()
        """Bundles that are either made or asked for: of the two, whichever is later sets them going."""
        self.contents: dict[TaskKey, list[Chunk]] = {}
        """Bundle that is made, and has not arrived -> its chunks."""
        alone = run.cluster.hosts == 1
        self.steps = [
            Step(process, tasks, mine, wanted, self.made, None if alone else partial(self._finished, host))
            for host, (process, tasks, mine, wanted) in enumerate(
                zip(run.processes, run.tasks, held, run.wanted, strict=True)
            )
        ]
        self.hosts = list(map(_Host, run.orders))

    def _finished(self, number: int, work: Work) -> None:
        if isinstance(work, UnitCall | CombineCall | PickCall):
            host, group = self.hosts[number], self.run.orders[number].group_of[work.key]
            host.left[group] -= 1
            if not host.left[group]:
                self.ask(host)

    def begin(self) -> None:
        """Have each host start; the tasks of the cluster take of its cores."""
        run = self.run
        for step, host, tasks in zip(self.steps, self.hosts, run.tasks_of_cluster, strict=True):
            step.process.step = step
            if run.cluster.hosts > 1 and step.process.cores is not None:
                step.process.cores.spend(tasks * run.cluster.task_seconds)
            step.start()
            self.ask(host)

    def ask(self, host: _Host) -> None:
        """Ask for the bundles that are read next: some groups of layers ahead, and not too many at once."""
        while host.arriving and host.asked < MOST_ASKED:
            before = host.arriving[0].reader - GROUPS_AHEAD
            if before >= 0 and host.left[before]:
                return
            bundle = host.arriving.popleft()
            host.asked += 1
            if bundle.nbytes <= max(DIRECT_BYTES - sum(host.direct.values()), SMALL_BYTES):
                host.direct[bundle.key] = bundle.nbytes
            self._message(bundle.receiver, bundle.sender, 0, partial(self._half, bundle))

    def made(self, bundle: Bundle) -> None:
        """A host has made all of a bundle; what it has spilled of it is read."""
        step = self.steps[bundle.sender]
        chunks = [step.chunks[step.tasks.number[key]] for key in bundle.items]
        self.contents[bundle.key] = chunks
        spilled = [chunk.nbytes for chunk in chunks if not step.process.books.is_resident(chunk)]
        self.run.clock.at(step.process.disk(sum(spilled), 0, len(spilled)), partial(self._half, bundle))

    def _half(self, bundle: Bundle) -> None:
        if bundle.key not in self.half:
            self.half.add(bundle.key)
        elif bundle.key in self.hosts[bundle.receiver].direct:
            self._send(bundle)
        else:
            self._message(bundle.sender, bundle.receiver, 0, partial(self._is_there, bundle))

    def _is_there(self, bundle: Bundle) -> None:
        host = self.hosts[bundle.receiver]
        host.ready.append(bundle)
        self._next_large(host)

    def _next_large(self, host: _Host) -> None:
        if host.ready and not host.coming:
            host.coming = True
            bundle = host.ready.popleft()
            self._message(bundle.receiver, bundle.sender, 0, partial(self._send, bundle))

    def _send(self, bundle: Bundle) -> None:
        self._message(bundle.sender, bundle.receiver, bundle.nbytes, partial(self._arrived, bundle))

    def _message(self, sender: int, receiver: int, nbytes: int, then: Callable[[], None]) -> None:
        """Send a message from host to host; ``then`` follows when that has taken it in."""
        clock, network = self.run.clock, self.run.network

        def leaves() -> None:
            clock.at(network.transfer(clock.now, sender, receiver, nbytes), comes)

        def comes() -> None:
            clock.at(self._woken(receiver, nbytes), then)

        clock.at(self._woken(sender, nbytes), leaves)

    def _woken(self, host: int, nbytes: int) -> float:
        """Return when the event loop of a host has handled a message of which it hears now."""
        run = self.run
        process = run.processes[host]
        wakes = 0.0 if process.slots else run.cluster.wake_seconds
        if process.cores is not None:
            process.cores.spend(run.network.loop_takes(nbytes))
        return run.network.handle(run.clock.now, host, nbytes) + wakes

    def _arrived(self, bundle: Bundle) -> None:
        host, uses = self.hosts[bundle.receiver], self.run.orders[bundle.receiver].uses
        step = self.steps[bundle.receiver]
        for key, sent in zip(bundle.items, self.contents.pop(bundle.key), strict=True):
            step.wait_for_room(step.tasks.number[key], Chunk(sent.region, sent.nbytes, uses[key]))
        host.asked -= 1
        if host.direct.pop(bundle.key, None) is None:
            host.coming = False
            self._next_large(host)
        self.ask(host)
        step.acquire()


class _Run:
    """The hosts, and all that is the same from pass to pass."""

    def __init__(self, pass_: Exchange, cluster: Cluster, keeps_old: bool, processes: list[Process]) -> None:
        self.exchange, self.cluster, self.processes = pass_, cluster, processes
        self.clock = processes[0].clock
        self.network = Network(cluster)
        self.tasks_of_cluster = segment_counts(pass_, cluster.hosts, processes[0].slots)
        self.orders = list(map(local_order, shares_of(pass_, range(cluster.hosts))))
        self.tasks = [
            Tasks(
                [*((key, None) for key in order.stored), *(step[:2] for step in order.steps)],
                order.uses.keys() - set(order.stored),
            )
            for order in self.orders
        ]
        renewed, outputs = pass_.graph.replaced, set(pass_.graph.outputs)
        self.wanted = [
            {key for key in order.stored if keeps_old or key not in renewed}
            | {key for key in outputs & order.group_of.keys() if key not in renewed.values()}
            | {renewed[key] for key in order.stored if key in renewed}
            for order in self.orders
        ]

    def first(self) -> list[dict[TaskKey, Chunk]]:
        """Weights and state as they are before any step."""
        graph, regions = self.exchange.graph, regions_of(self.exchange.graph)
        return [
            before(process, graph, regions, order.stored, order.uses)
            for process, order in zip(self.processes, self.orders, strict=True)
        ]

    def pass_over(self, held: list[dict[TaskKey, Chunk]]) -> list[Step]:
        """Run one pass."""
        going = _Pass(self, held)
        going.begin()
        self.clock.run()
        for process in self.processes:
            process.end()
        return going.steps

    def between(self, steps: list[Step]) -> list[dict[TaskKey, Chunk]]:
        """Return what the next pass starts from; counts begin anew."""
        self.network = Network(self.cluster)
        return [
            after(step, order.stored, self.exchange.graph.replaced, order.uses)
            for step, order in zip(steps, self.orders, strict=True)
        ]


def simulate_hosts(
    compiled: CompiledPass,
    cluster: Cluster,
    tier_bytes: int,
    slots: int,
    rates: Rates,
    keeps_old: bool = True,
) -> SimulatedHosts:
    """Simulate a pass over ``cluster.hosts`` hosts that follows another.

    Each host has a tier of ``tier_bytes``, runs ``slots`` programs at once, and has a disk as ``rates`` say.
    One host is simulated as ``one_process`` simulates it, but that its cores are shared.
    """
    going = exchanges_of({"": compiled.graph}, cluster.hosts, slots)[""]
    factors = compiled.plan.factored.factors
    feeds = {name: len(factors[name][0]) for name in compiled.feeds}
    return simulate_exchange(going, cluster, tier_bytes, slots, rates, keeps_old, feeds)


def simulate_exchange(
    going: Exchange,
    cluster: Cluster,
    tier_bytes: int,
    slots: int,
    rates: Rates,
    keeps_old: bool = True,
    feeds: Mapping[str, int] | None = None,
) -> SimulatedHosts:
    """The same where it is known which host runs what, and what travels.

    ``feeds``, as ``Costs`` has them: each sample that is read takes its time.
    """
    clock, costs = Clock(), Costs(rates, feeds)
    processes = [
        Process(clock, tier_bytes, slots, slots + 1, costs, timeline=False, cores=cores)
        for cores in [Cores(clock, slots) if cluster.shares_cores else None for _ in range(cluster.hosts)]
    ]
    run = _Run(going, cluster, keeps_old, processes)
    held = run.between(run.pass_over(run.first()))
    begun = clock.now
    ended = max(step.ended for step in run.pass_over(held))
    found = _told(run, cluster.seconds(ended - begun, run.tasks_of_cluster), slots)
    for process in processes:
        del process.books  # which write by the process: this would be a circle
    return found


def _told(run: _Run, seconds: float, slots: int) -> SimulatedHosts:
    processes, network, tasks = run.processes, run.network, sum(run.tasks_of_cluster)
    scheduling_seconds = tasks * run.cluster.scheduler_seconds if run.cluster.hosts > 1 else 0.0
    busy = tuple(process.compute_seconds / slots / seconds for process in processes)
    most = max(*network.sent_bytes, *network.received_bytes) / run.cluster.bytes_per_second
    return SimulatedHosts(
        hosts=run.cluster.hosts,
        seconds=seconds,
        busy_shares=busy,
        sent_bytes=tuple(network.sent_bytes),
        received_bytes=tuple(network.received_bytes),
        peak_tier_bytes=tuple(process.books.peak_bytes for process in processes),
        spilled_bytes=tuple(p.books.read_bytes + p.books.written_bytes for p in processes),
        tasks=tasks,
        shares={
            "compute": max(busy),
            "network": most / seconds,
            "disk": max(process.disk_seconds for process in processes) / seconds,
            "messages": max(network.loop_seconds) / seconds,
            "scheduler": scheduling_seconds / seconds,
        },
    )
