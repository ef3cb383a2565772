"""Estimates quickly how long a step over many hosts takes: calls in the plan's order, and what they read.

The planner compares ways to cut a pass by it, of which each may have 100,000 calls; ``simulation/hosts``
tells more of one. Memory is taken to be enough. A host does its calls in the plan's order, each as soon as a
thread is free and all that it reads is there. Messages queue where several are made by the same calls; a step
takes no less than an interface, the event loop of a host, or the scheduler, is busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapreplace

import numpy as np

from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.op_rule import Rules
from oocdl.planning.calls import CombineCall, PickCall
from oocdl.planning.cost_model import Rates
from oocdl.planning.hosts.exchange import SMALL_BYTES, Exchange, reader_of
from oocdl.planning.hosts.ragged import Ints
from oocdl.planning.hosts.shown_groups import shown_groups
from oocdl.planning.simulation.costs import Costs
from oocdl.planning.simulation.network import Cluster
from oocdl.planning.simulation.process import GATHER_SECONDS, PART_SECONDS, STRIDED_FACTOR


def work_seconds(going: Exchange, rates: Rates, rules: Rules) -> list[float]:
    """Return the seconds of each call on one thread, with what is put together for it; picks take none."""
    costs, found = Costs(rates, rules), []
    for call in going.graph.calls:
        if isinstance(call, PickCall):
            found.append(0.0)
            continue
        several = [] if isinstance(call, CombineCall) else [one for one in call.reads if not one.parts.is_one]
        nbytes = sum(one.parts.size() * itemsize(one.dtype) for one in several)
        copies = STRIDED_FACTOR * 2 * nbytes / rates.copy_bytes_per_second
        parts = sum(len(one.parts) for one in several)
        found.append(costs.shared_seconds(call) + GATHER_SECONDS + parts * PART_SECONDS + copies)
    return found


def estimated_seconds(going: Exchange, cluster: Cluster, threads: int, work: Sequence[float]) -> float:
    """About the seconds of a pass over ``cluster.hosts`` hosts of so many threads each.

    ``work``: its ``work_seconds``.
    """
    return _Estimate(going, cluster, threads, work).run()


class _Estimate:
    """The calls so far, and a clock for each host. Calls go by place, chunks and bundles by number."""

    def __init__(self, going: Exchange, cluster: Cluster, threads: int, seconds: Sequence[float]) -> None:
        self.going, self.cluster, self.seconds = going, cluster, seconds
        placed, hosts = going.placed, cluster.hosts
        self.flat, self.workers = placed.flat, placed.workers.tolist()
        self.first, self.results = self.flat.first.tolist(), self.flat.results.tolist()
        self.reader = np.repeat(np.arange(len(self.workers)), np.diff(self.flat.first))
        self.where = np.empty(len(self.flat.keys), np.int64)
        self.where[: self.flat.inputs] = [going.homes[key] for key in going.graph.inputs]
        self.where[self.flat.inputs :] = placed.workers[self.flat.maker[self.flat.inputs :]]
        self.senders, self.receivers, self.nbytes = going.columns[:3].tolist()
        self.bundles = np.repeat(np.arange(len(self.senders)), np.diff(going.first))
        """Item of a bundle -> the bundle."""
        self.chunk = going.items.copy()
        """Item of a bundle -> the chunk that it is, or of which it is a strip."""
        strips = np.flatnonzero(self.chunk >= len(self.flat.keys))
        self.chunk[strips] = self.flat.source[placed.strip_reads[self.chunk[strips] - len(self.flat.keys)]]
        self.done = np.zeros(len(self.flat.keys))
        """Chunk -> when it is there where it is made."""
        self.arrived = np.zeros(len(self.senders) + 1)
        """Bundle -> when it has come; the last is none."""
        self.free = [[0.0] * threads for _ in range(hosts)]
        """Host -> when each of its threads is free, as a heap."""
        self.loop_seconds, self.out_seconds, self.in_seconds = ([0.0] * hosts for _ in range(3))
        """Host -> seconds for which its event loop, and its interface in each direction, are busy."""
        self._find_bundles()

    def _find_bundles(self) -> None:
        """Find the bundle by which each argument of a call, and each item that is passed on, has come."""
        going, hosts, flat = self.going, self.cluster.hosts, self.flat
        receivers, senders = going.columns[1][self.bundles], going.columns[0][self.bundles]
        code = going.items * hosts + receivers
        order = np.argsort(code, kind="stable")

        def bringing(items: Ints, to: Ints) -> Ints:
            found = np.searchsorted(code, items * hosts + to, sorter=order)
            return np.asarray(self.bundles[order[found]]) if len(items) else items

        item = flat.source.copy()
        strips = flat.first[reader_of(going.placed)] + going.placed.strip_arguments
        item[strips] = len(flat.keys) + going.placed.strip_of
        mine = going.placed.workers[self.reader]
        # What a worker combines for itself is there when it is where it is combined for others.
        combined = going.placed.copies.holds(flat.maker[flat.source], mine)
        comes = np.flatnonzero((self.where[flat.source] != mine) & ~combined)
        self.by = np.full(len(item), -1)
        """For each argument the bundle by which it comes; -1: it is there."""
        self.by[comes] = bringing(item[comes], mine[comes])
        passed = np.flatnonzero(self.where[self.chunk] != senders)
        self.before = np.full(len(self.chunk), -1)
        """For each item the bundle by which its sender, who passes it on, has it; -1: the sender makes it."""
        self.before[passed] = bringing(going.items[passed], senders[passed])
        self.crossed = np.full(len(self.workers), -1)
        """For each call the last of those of other hosts that it reads of."""
        np.maximum.at(self.crossed, self.reader[comes], flat.maker[flat.source[comes]])
        made_by = np.full(len(self.senders), -1)
        np.maximum.at(made_by, self.bundles, flat.maker[self.chunk])
        while True:
            later = made_by.copy()
            np.maximum.at(later, self.bundles[passed], made_by[self.before[passed]])
            if (later == made_by).all():
                break
            made_by = later
        self.order = np.argsort(made_by, kind="stable")
        """Bundles in the order of the last of the calls that make them."""
        self.made_by = made_by[self.order]

    def run(self) -> float:
        """Go through all calls."""
        hosts, cluster = self.cluster.hosts, self.cluster
        sent = self._send(0, 0)
        for begin, end in self._blocks():
            self._do(begin, end)
            sent = self._send(sent, end)
        ended = max(max(threads) for threads in self.free)
        if hosts == 1:
            return ended
        busy = (self.loop_seconds, self.out_seconds, self.in_seconds)
        ended = max(ended, float(self.arrived.max()), *map(max, busy))
        shown = shown_groups(self.going, hosts, len(self.free[0]))
        counts = [2 + len(mine) for mine in shown]
        hop_seconds = cluster.scheduler_seconds + 2 * cluster.notice_seconds
        begun = sum(counts) * cluster.submit_seconds + cluster.notice_seconds
        # Each task of a host follows the one before it; the scheduler handles one after another.
        ended = max(ended + hop_seconds, max(counts) * hop_seconds, sum(counts) * cluster.scheduler_seconds)
        return cluster.pass_seconds + begun + ended

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Calls that follow each other, none of which reads what another host makes in the same block."""
        begin, before, crossed = 0, None, self.crossed.tolist()
        for place, call in enumerate(self.going.graph.calls):
            key = call.source if isinstance(call, PickCall) else call.key
            if place > begin and (key[:2] != before or crossed[place] >= begin):
                yield begin, place
                begin = place
            before = key[:2]
        yield begin, len(self.workers)

    def _do(self, begin: int, end: int) -> None:
        """Do the calls of a block: those first that can be first, unless some read what others make."""
        arguments = slice(self.first[begin], self.first[end])
        source, mine, by = self.flat.source[arguments], self.reader[arguments] - begin, self.by[arguments]
        inside = source >= self.results[begin]
        there = np.where(by >= 0, self.arrived[by], self.done[source])
        ready = np.zeros(end - begin)
        np.maximum.at(ready, mine[~inside], there[~inside])
        follows: dict[int, list[int]] = {}
        for call, chunk in zip(mine[inside].tolist(), source[inside].tolist(), strict=True):
            follows.setdefault(call, []).append(chunk)
        order = range(end - begin) if follows else np.argsort(ready, kind="stable").tolist()
        starts = ready.tolist()
        for call in order:
            place = begin + call
            when = max((float(self.done[chunk]) for chunk in follows.get(call, ())), default=starts[call])
            when = max(when, starts[call])
            if self.seconds[place]:
                threads = self.free[self.workers[place]]
                when = max(when, threads[0]) + self.seconds[place]
                heapreplace(threads, when)
            self.done[self.results[place] : self.results[place + 1]] = when

    def _send(self, sent: int, end: int) -> int:
        """Send the bundles that calls before ``end`` have made; how many have been sent then."""
        upto = int(np.searchsorted(self.made_by, end))
        some = self.order[sent:upto].tolist()
        hosts = self.cluster.hosts
        loops, outs, ins = ([0.0] * hosts for _ in range(3))
        left = set(some)
        while some:
            items = {one: slice(*self.going.first[one : one + 2]) for one in some}
            now = [one for one in some if not left.intersection(self.before[items[one]].tolist())]
            made = [float(np.maximum(self._at(items[one]), 0.0).max()) for one in now]
            for when, one in sorted(zip(made, now, strict=True)):
                self.arrived[one] = self._travel(one, when, loops, outs, ins)
            left.difference_update(now)
            some = [one for one in some if one in left]
        return upto

    def _at(self, items: slice) -> np.ndarray:
        """Return when items are there, where they are sent from."""
        before = self.before[items]
        return np.where(before >= 0, self.arrived[before], self.done[self.chunk[items]])

    def _travel(
        self, one: int, when: float, loops: list[float], outs: list[float], ins: list[float]
    ) -> float:
        """Return when a bundle that is ready at ``when`` has come: asked for, sent and taken in.

        The event loop of either host takes a part of a core for each message.
        """
        cluster, sender, receiver = self.cluster, self.senders[one], self.receivers[one]
        takes, handles = self.nbytes[one] / cluster.bytes_per_second, cluster.message_seconds
        copies = self.nbytes[one] / cluster.loop_bytes_per_second
        is_large = self.nbytes[one] > SMALL_BYTES
        at = max(when, loops[sender]) + handles + copies
        loops[sender] = at + handles
        at += cluster.wake_seconds * (self.free[sender][0] > when)
        at = max(at, outs[sender]) + takes
        outs[sender] = at if is_large else outs[sender]
        at = max(at + cluster.latency_seconds, ins[receiver] + takes)
        ins[receiver] = at if is_large else ins[receiver]
        wakes = cluster.wake_seconds * (self.free[receiver][0] > at)
        at = max(at, loops[receiver]) + handles + copies
        loops[receiver] = at + handles
        self.out_seconds[sender] += takes
        self.in_seconds[receiver] += takes
        for host in (sender, receiver):
            self.loop_seconds[host] += 2 * handles + copies
            heapreplace(self.free[host], self.free[host][0] + 2 * handles + copies)
        return float(at + wakes)
