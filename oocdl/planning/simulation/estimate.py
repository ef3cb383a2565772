"""Estimates quickly how long a step over many hosts takes: calls in the plan's order, and what they read.

The planner compares ways to cut a pass by it, of which each may have 100,000 calls; ``simulation/hosts``
tells more of one, and takes some twenty times as long. Memory is taken to be enough. A host does its calls in
the plan's order, each as soon as a thread is free and all that it reads is there. Messages queue where one
layer makes several; a step takes no less than an interface, an event loop, or the scheduler, is busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapreplace

import numpy as np

from oocdl.graph.ir.array_layout import itemsize
from oocdl.planning.calls import CombineCall, PickCall
from oocdl.planning.cost_model import NOMINAL, Costs
from oocdl.planning.hosts.exchange import Exchange
from oocdl.planning.hosts.segments import segment_counts
from oocdl.planning.simulation.network import Cluster, Network


def _work_seconds(going: Exchange) -> list[float]:
    """Return nominal seconds of each call on one thread, with putting its inputs together; 0 for picks."""
    costs, found = Costs(NOMINAL), []
    for call in going.graph.calls:
        if isinstance(call, PickCall):
            found.append(0.0)
            continue
        several = [] if isinstance(call, CombineCall) else [one for one in call.reads if not one.parts.is_one]
        nbytes = sum(one.parts.size() * itemsize(one.dtype) for one in several)
        parts = sum(len(one.parts) for one in several)
        found.append(costs.shared_seconds(call) + costs.gathering_seconds(parts, nbytes))
    return found


def estimated_seconds(going: Exchange, cluster: Cluster, threads: int) -> tuple[float, float]:
    """About the seconds of a pass over ``cluster.hosts`` hosts of so many threads, and of its work on one."""
    estimate, work = _Estimate(going, cluster, threads), _work_seconds(going)
    waiting = estimate.send([], 0)
    for begin, end in estimate.blocks():
        estimate.do(begin, end, work)
        waiting = estimate.send(waiting, end)
    network = estimate.network
    passed_seconds = max(*network.sent_bytes, *network.received_bytes, 0) / cluster.bytes_per_second
    ended = max(*map(max, estimate.free), *estimate.arrived.values(), *network.loop_seconds, passed_seconds)
    return cluster.seconds(ended, segment_counts(going, cluster.hosts, threads)), sum(work)


class _Estimate:
    """The calls so far, and a clock for each thread. Calls go by place; chunks, strips, bundles by number."""

    def __init__(self, going: Exchange, cluster: Cluster, threads: int) -> None:
        placed, flat = going.placed, going.placed.flat
        self.going, self.cluster, self.network, self.flat = going, cluster, Network(cluster), flat
        self.first, self.results = flat.first.tolist(), flat.results.tolist()
        self.workers, self.source = placed.workers.tolist(), flat.source.tolist()
        item = flat.source.copy()
        item[placed.strip_arguments] = len(flat.keys) + placed.strip_of
        self.item = item.tolist()
        """The chunk or strip that each argument is."""
        self.chunk = going.item_chunks.tolist()
        homes = [going.homes[key] for key in going.graph.inputs]
        self.where = [*homes, *placed.workers[flat.maker[flat.inputs :]].tolist()]
        self.made_at = [0.0] * len(flat.keys)
        """Chunk -> when it is there where it is made."""
        self.arrived: dict[tuple[int, int], float] = {}
        """(chunk or strip, host that it was sent to) -> when it has come."""
        self.free = [[0.0] * threads for _ in range(cluster.hosts)]
        """Host -> when each of its threads is free, as a heap."""
        made_by = np.maximum.reduceat(flat.maker[going.item_chunks], going.first[:-1])
        order = np.lexsort((going.columns[-1], made_by))
        self.unsent = list(zip(made_by[order].tolist(), order.tolist(), strict=True))[::-1]
        """(last of the calls that make it, bundle), the first to be sent last."""

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Calls of one layer that follow each other, none of which reads what another one makes."""
        flat, last = self.flat, np.full(len(self.workers), -1)
        np.maximum.at(last, flat.readers(np.arange(len(flat.source))), flat.maker[flat.source])
        begin, layers = 0, flat.task_of.tolist()
        for place, read in enumerate(last.tolist()):
            if layers[place] != layers[begin] or read >= begin:
                yield begin, place
                begin = place
        yield begin, len(self.workers)

    def do(self, begin: int, end: int, work: Sequence[float]) -> None:
        """Do the calls of a block: those first that can be first."""
        if begin and self.flat.task_of[begin] != self.flat.task_of[begin - 1]:
            self.network.clear()
        ready = []
        for place in range(begin, end):
            mine, arguments = self.workers[place], slice(self.first[place], self.first[place + 1])
            there = (
                self.arrived.get((item, mine), self.made_at[source])
                for item, source in zip(self.item[arguments], self.source[arguments], strict=True)
            )
            ready.append((max(there, default=0.0), place))
        for when, place in sorted(ready):
            threads = self.free[self.workers[place]]
            done = max(when, threads[0]) + work[place]
            if work[place]:
                heapreplace(threads, done)
            for result in range(self.results[place], self.results[place + 1]):
                self.made_at[result] = done

    def send(self, waiting: list[int], end: int) -> list[int]:
        """Send the bundles that calls before ``end`` have made; return those that wait for an item."""
        while self.unsent and self.unsent[-1][0] < end:
            waiting.append(self.unsent.pop()[1])
        while ready := sorted((when, one) for one in waiting if (when := self._ready(one)) is not None):
            for when, bundle in ready:
                self._travel(bundle, when)
            sent = {bundle for _, bundle in ready}
            waiting = [one for one in waiting if one not in sent]
        return waiting

    def _ready(self, bundle: int) -> float | None:
        """Return when all of a bundle is there, where it is sent from; None: it has not been sent there."""
        sender, items = int(self.going.columns[0, bundle]), slice(*self.going.first[bundle : bundle + 2])
        found = []
        for item, chunk in zip(self.going.items[items].tolist(), self.chunk[items], strict=True):
            when = self.made_at[chunk] if self.where[chunk] == sender else self.arrived.get((item, sender))
            if when is None:
                return None
            found.append(when)
        return max(found)

    def _travel(self, bundle: int, when: float) -> None:
        """Send a bundle that is ready at ``when``: it is asked for, sent and taken in.

        The event loop of either host takes a part of a core for each message.
        """
        network, wake_seconds = self.network, self.cluster.wake_seconds
        sender, receiver, nbytes = self.going.columns[:3, bundle].tolist()
        at = network.handle(when, sender, nbytes) + wake_seconds * (self.free[sender][0] > when)
        at = network.transfer(at, sender, receiver, nbytes)
        wakes = wake_seconds * (self.free[receiver][0] > at)
        at = network.handle(at, receiver, nbytes) + wakes
        for host in (sender, receiver):
            network.handle(0.0, host, 0)  # the bundle was asked for
            took = network.loop_takes(nbytes) + network.loop_takes(0)
            heapreplace(self.free[host], self.free[host][0] + took)
        for item in self.going.items[slice(*self.going.first[bundle : bundle + 2])].tolist():
            self.arrived[item, receiver] = at
