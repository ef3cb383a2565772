"""A step over many hosts before it runs: each goes through its own tasks, and what crosses travels.

Every host orders its tasks, lets units in and spills as one process does. Beside that a pass has the tasks
that a crew's pass has on Dask (``runtime/cluster/pass_tasks``): some begin and end a host's part of it, some
last as long as it works at layers; one scheduler handles them all. Bundles are asked for and sent from host
to host, as in a run (``runtime/cluster/transfers``), through event loops, interfaces and the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from oocdl.graph.ir.op_rule import Rules
from oocdl.planning.calls import CombineCall, PickCall, UnitCall
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.cost_model import Rates
from oocdl.planning.hosts.exchange import (
    DIRECT_BYTES,
    GROUPS_AHEAD,
    MOST_ASKED,
    SMALL_BYTES,
    Bundle,
    Exchange,
    exchange,
    homes_of,
)
from oocdl.planning.hosts.local_order import LocalOrder, local_orders
from oocdl.planning.hosts.placement import place
from oocdl.planning.hosts.shown_groups import Groups, shown_groups
from oocdl.planning.simulation.costs import Costs
from oocdl.planning.simulation.network import Clock, Cluster, Cores, Network, Scheduler
from oocdl.planning.simulation.one_process import after
from oocdl.planning.simulation.process import Process, Step
from oocdl.planning.simulation.tasks import Chunk, Entry, Tasks, entries_of, items_of
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
    peak_spill_bytes: tuple[int, ...]
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
    """A host's part of a pass: the tasks that the cluster has of it, and the bundles that it asks for.

    The tasks of the cluster follow each other: one begins, some last as long as it works at groups of layers,
    one ends. The scheduler hears of the end of each and has the next one begin.
    """

    def __init__(self, cast: _Pass, order: LocalOrder, step: Step, shown: Sequence[Groups]) -> None:
        self.cast, self.step, self.left, self.shown = cast, step, list(order.calls_of_group), shown
        self.heard = 0
        """Number of its tasks of whose end the scheduler has heard."""
        self.going = False
        """Whether the task that follows has begun."""
        self.ready: deque[Bundle] = deque()
        """Large bundles that are made: they come one at a time."""
        self.coming = False
        self.arriving = deque(order.arriving)
        self.asked = 0
        self.direct: dict[TaskKey, int] = {}
        """Bytes of bundles that will come as soon as they are made."""

    def called(self, group: int) -> None:
        """A call of a group is over."""
        self.left[group] -= 1
        if not self.left[group]:
            self.cast.ask(self)

    def begin(self) -> None:
        """The host is told to go on."""
        if self.step.process.cores is not None:
            self.step.process.cores.spend(self.cast.run.cluster.task_seconds)
        self.going = True
        self.look()

    def look(self) -> None:
        """End the task that has begun, if what it lasts for is over."""
        if self.going and self._is_over():
            self.going = False
            self.cast.tell(self._hear)

    def _is_over(self) -> bool:
        """Whether what the task lasts for is over: nothing, some groups, or all."""
        if self.heard > len(self.shown):
            return self.step.order.over
        return not self.heard or not any(self.left[group] for group in self.shown[self.heard - 1])

    def _hear(self) -> None:
        self.heard += 1
        if self.heard < len(self.shown) + 2:
            self.cast.answer(self.begin)


class _Pass:
    """One pass over all hosts."""

    def __init__(self, run: _Run, held: list[dict[TaskKey, Chunk]]) -> None:
        self.run = run
        self.half: set[TaskKey] = set()
        """Bundles that are either made or asked for: of the two, whichever is later sets them going."""
        alone = run.cluster.hosts == 1
        self.steps = [
            Step(process, tasks, mine, wanted, self.made, None if alone else partial(self._finished, host))
            for host, (process, tasks, mine, wanted) in enumerate(
                zip(run.processes, run.tasks, held, run.wanted, strict=True)
            )
        ]
        self.hosts = [
            _Host(self, order, step, shown)
            for order, step, shown in zip(run.orders, self.steps, run.shown, strict=True)
        ]

    def _finished(self, number: int, entry: Entry) -> None:
        host = self.hosts[number]
        if isinstance(entry, UnitCall | CombineCall | PickCall):
            host.called(self.run.orders[number].group_of[entry.key])
        host.look()

    def tell(self, call: Callable[[], None]) -> None:
        """A host tells the scheduler that a task is over: ``call`` follows when that has been handled."""
        run = self.run

        def heard() -> None:
            run.clock.at(run.scheduler.handle(run.clock.now), call)

        run.clock.at(run.clock.now + run.cluster.notice_seconds, heard)

    def answer(self, call: Callable[[], None]) -> None:
        """The scheduler tells a host to do something."""
        self.run.clock.at(self.run.clock.now + self.run.cluster.notice_seconds, call)

    def begin(self) -> None:
        """Hand the tasks in; each host starts as soon as it is told to."""
        run = self.run
        alone = run.cluster.hosts == 1  # there is no scheduler between a process and itself
        tasks = run.task_count * run.cluster.submit_seconds + run.cluster.notice_seconds
        submitted = 0.0 if alone else run.cluster.pass_seconds / 2 + tasks
        for step, host in zip(self.steps, self.hosts, strict=True):
            step.process.step = step
            run.clock.at(run.clock.now + submitted, step.start)
            if not alone:
                run.clock.at(run.clock.now + submitted, host.begin)
                run.clock.at(run.clock.now + submitted, partial(self.ask, host))

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
        for key in bundle.items:
            item = self.run.items[key]
            step.arrive(key, Chunk(item.region, item.nbytes, uses[key]))
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
        self.network, self.scheduler = Network(cluster), Scheduler(cluster)
        self.shown = shown_groups(pass_, cluster.hosts, processes[0].slots)
        found = local_orders(pass_, range(cluster.hosts))
        self.orders = [found[host] for host in range(cluster.hosts)]
        self.items = items_of(pass_)
        self.tasks = [
            Tasks(entries_of(order), order.uses.keys() - set(order.stored)) for order in self.orders
        ]
        renewed, outputs = pass_.renewed, set(pass_.graph.outputs)
        self.wanted = [
            {key for key in order.stored if keeps_old or key not in renewed}
            | {key for key in outputs & order.group_of.keys() if key not in renewed.values()}
            | {renewed[key] for key in order.stored if key in renewed}
            for order in self.orders
        ]

    @property
    def task_count(self) -> int:
        """Tasks of the cluster: of each host one that begins, some that show its layers, one that ends."""
        return sum(2 + len(shown) for shown in self.shown)

    def first(self) -> list[dict[TaskKey, Chunk]]:
        """Weights and state as they are before any step."""
        found = []
        for process, order in zip(self.processes, self.orders, strict=True):
            items = [(key, self.items[key]) for key in order.stored]
            process.spilled = sum(item.nbytes for _, item in items)
            found.append({key: Chunk(i.region, i.nbytes, order.uses[key], spilled=True) for key, i in items})
        return found

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
        self.network, self.scheduler = Network(self.cluster), Scheduler(self.cluster)
        return [
            after(step, order.stored, self.exchange.renewed, order.uses)
            for step, order in zip(steps, self.orders, strict=True)
        ]


def simulate_hosts(
    compiled: CompiledPass,
    cluster: Cluster,
    tier_bytes: int,
    slots: int,
    rates: Rates,
    rules: Rules,
    keeps_old: bool = True,
) -> SimulatedHosts:
    """Simulate a pass over ``cluster.hosts`` hosts that follows another.

    Each host has a tier of ``tier_bytes``, runs ``slots`` programs at once, and has a disk as ``rates`` say.
    One host is simulated as ``one_process`` simulates it, but that its cores are shared.
    """
    placed = place(compiled.graph, cluster.hosts, slots)
    homes = homes_of({"": compiled}, {"": placed})
    going = exchange(compiled, placed, homes, cluster.hosts)
    factors = compiled.plan.factored.factors
    feeds = {name: len(factors[name][0]) for name in compiled.feeds}
    return simulate_exchange(going, cluster, tier_bytes, slots, rates, rules, keeps_old, feeds)


def simulate_exchange(
    going: Exchange,
    cluster: Cluster,
    tier_bytes: int,
    slots: int,
    rates: Rates,
    rules: Rules,
    keeps_old: bool = True,
    feeds: Mapping[str, int] | None = None,
) -> SimulatedHosts:
    """The same where it is known which host runs what, and what travels.

    ``feeds``, as ``Costs`` has them: each sample that is read takes its time.
    """
    clock, costs = Clock(), Costs(rates, rules, feeds)
    processes = [
        Process(clock, tier_bytes, slots, slots + 1, costs, timeline=False, cores=cores)
        for cores in [Cores(clock, slots) if cluster.shares_cores else None for _ in range(cluster.hosts)]
    ]
    run = _Run(going, cluster, keeps_old, processes)
    held = run.between(run.pass_over(run.first()))
    begun = clock.now
    steps = run.pass_over(held)
    # On a cluster a pass is over when the scheduler has heard of all its tasks, and has told the driver.
    told = clock.now + cluster.notice_seconds + cluster.pass_seconds / 2
    ended = max(step.ended for step in steps) if cluster.hosts == 1 else told
    found = _told(run, ended - begun, slots)
    for process in processes:
        del process.books  # which write by the process: this would be a circle
    return found


def _told(run: _Run, seconds: float, slots: int) -> SimulatedHosts:
    processes, network = run.processes, run.network
    busy = tuple(process.compute_seconds / slots / seconds for process in processes)
    most = max(*network.sent_bytes, *network.received_bytes) / run.cluster.bytes_per_second
    return SimulatedHosts(
        hosts=run.cluster.hosts,
        seconds=seconds,
        busy_shares=busy,
        sent_bytes=tuple(network.sent_bytes),
        received_bytes=tuple(network.received_bytes),
        peak_tier_bytes=tuple(process.books.peak_bytes for process in processes),
        peak_spill_bytes=tuple(process.peak_spilled for process in processes),
        spilled_bytes=tuple(p.books.read_bytes + p.books.written_bytes for p in processes),
        tasks=run.task_count,
        shares={
            "compute": max(busy),
            "network": most / seconds,
            "disk": max(process.disk_seconds for process in processes) / seconds,
            "messages": max(network.loop_seconds) / seconds,
            "scheduler": run.scheduler.busy_seconds / seconds,
        },
    )
