"""Assigns calls to workers, layer by layer in the plan's order, by what each choice costs over hosts.

The units of a layer that has one for every worker go to workers in contiguous blocks of shards, or each to
the worker that has most of its inputs, whichever ends sooner. Units of smaller layers, and calls that combine
partial sums, go where they end the soonest: remote bytes take time to arrive, a busy worker takes time to be
free, and weights beyond a worker's share of all weights and state would be spilled. So layers that cannot be
cut follow each other over the workers where their weights are large (a pipeline), and stay together where
they are small.

A weight and its state live, and are updated, on the only worker that reads a piece of it, or on the one that
adds up its gradient. Only new weights, for those who read them, and sums of gradients travel. So the
destination of a gradient is known when it is made, and is part of what its call costs on each worker. No bits
depend on any of this. Equal graphs are assigned equally, on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from heapq import heapreplace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from oocdl.planning.calls import CombineCall, UnitCall
from oocdl.planning.cost_model import NOMINAL, TASK_SECONDS, call_seconds
from oocdl.planning.hosts.flat_pass import FlatPass, first_of_each
from oocdl.planning.hosts.ragged import Ints, runs
from oocdl.planning.hosts.weight_updates import going, updated_together, updates_of, updates_that_read

NETWORK_BYTES_PER_SECOND = 1.25e9
"""Bytes per second between two workers: 10 Gbit/s."""
MESSAGE_SECONDS = 2e-4
"""Seconds that a message from another worker takes in addition to those of its bytes."""
NEAR_RATIO = 0.8
"""Units go where their inputs are, and not in blocks, if that takes at most this share of the time."""
FEW_UNITS = 2
"""A layer of fewer units per worker than this may also leave workers idle."""
SAMPLES = 24
"""Number of units of a layer whose inputs are located, to choose between the two."""


class _Needs(NamedTuple):
    """Location, size and readiness of the inputs of a call."""

    there: npt.NDArray[np.bool_]
    """Whether each worker has some of the inputs."""
    nbytes: Ints
    """Bytes of the inputs that each worker has."""
    ready_seconds: float
    """Time at which all inputs have been made."""
    homeless: frozenset[int]
    """Pieces of weights and state that no worker has yet."""


def assigned(flat: FlatPass, workers: int, threads: int = 1) -> Ints:
    """Return the worker, from 0, that runs each call of a pass; ValueError if there are no workers.

    ``threads`` is the number of threads of each worker.
    """
    if workers < 1:
        raise ValueError("a pass needs a worker")
    if workers == 1:
        return np.zeros(len(flat.graph.calls), np.int64)
    return _Assigner(flat, workers, threads, call_seconds(flat.calls)).run()


class _Assigner:
    """The assignment so far, and a clock for each worker. Calls are named by place, chunks by number."""

    def __init__(self, flat: FlatPass, workers: int, threads: int, seconds: Sequence[float]) -> None:
        graph = flat.graph
        self.flat, self.calls, self.workers, self.seconds = flat, graph.calls, workers, seconds
        self.worker_of = np.full(len(graph.calls), -1)
        self.where = np.full(len(flat.keys), -1)
        """Chunk -> the worker that has it; -1: it is not there yet, or lives nowhere yet."""
        self.done = np.zeros(len(flat.keys))
        """Chunk -> the time at which it is there."""
        self.first, self.results = flat.first.tolist(), flat.results.tolist()
        self.threads = threads
        self.free = [[0.0] * threads for _ in range(workers)]
        """Worker -> the times at which its threads are free, as a heap."""
        self.held = [0.0] * workers
        """Worker -> bytes of weights and state that live there."""
        self.sending = [0.0] * workers
        """Worker -> seconds in which it sends weights that live there to those whose gradients have come."""
        self.updates = updates_of(flat)
        """Call that makes a piece of weights or of state anew -> that piece, one of several."""
        self.together = updated_together(flat, self.updates)
        self.lives_with_others = np.zeros(len(flat.keys), bool)
        self.lives_with_others[list(self.together)] = True
        regions = {(call.key[:3], call.region) for call in graph.calls if isinstance(call, CombineCall)}
        self.combines = Counter(key for key, _ in regions)
        self.combined = np.zeros(workers, np.int64)
        """Worker -> number of uncut sums that it combines."""
        self.combiner: dict[str, int] = {}
        """Layer -> the worker that combines its uncut sums, so that they travel together."""
        self.share = sum(graph.input_bytes.values()) / workers
        self.update_of = {**self.updates, **updates_that_read(flat, self.updates)}
        """``updates``, with the calls that combine the gradients of such a piece as well."""
        self.going = going(flat, self.update_of, self.together)

    def run(self) -> Ints:
        """Assign all calls; return the worker of each. A call that picks runs where its result is made."""
        layers: dict[tuple[str, ...], list[int]] = {}
        working = np.unique(self.flat.own).tolist()
        for place in working:
            if isinstance(self.calls[place], UnitCall):
                layers.setdefault(self.calls[place].key[:3], []).append(place)
        for place in working:
            if isinstance(self.calls[place], CombineCall):
                self.give(place)
            elif self.worker_of[place] < 0:
                self.give_layer(layers[self.calls[place].key[:3]])
        return self.worker_of[self.flat.own]

    def give_layer(self, units: Sequence[int]) -> None:
        """Assign all units of a layer."""
        if len(units) < self.workers:
            readers = Counter(chunk for place in units for chunk in self.needs(place).homeless)
            shared = {chunk for chunk, count in readers.items() if count > 1}
            for place in units:
                self.give(place, shared)
            self.settle(units)
            return
        homes = [self.where[self.updates[place]] if place in self.updates else -1 for place in units]
        if min(homes) >= 0:
            chosen = [int(home) for home in homes]
        else:
            chosen = self.blocks(units)
            step = -(-len(units) // SAMPLES)
            sample = units[::step]
            near = self.near(sample)
            if self.layer_seconds(sample, near) < NEAR_RATIO * self.layer_seconds(sample, chosen[::step]):
                chosen = self.near(units)
            if len(units) < FEW_UNITS * self.workers and not self.brings_weights(units):
                alone = self.one_by_one(units)
                if self.end(units, alone) < NEAR_RATIO * self.end(units, chosen):
                    chosen = alone
        ready = max(self.needs(place).ready_seconds for place in (units[0], units[-1]))
        ended = [self.book(place, worker, ready) for place, worker in zip(units, chosen, strict=True)]
        self.worker_of[units] = chosen
        firsts = self.flat.results[units]
        counts = self.flat.results[np.array(units) + 1] - firsts
        made = runs(firsts, counts)
        self.where[made], self.done[made] = np.repeat(chosen, counts), np.repeat(ended, counts)
        self.settle(units)

    def book(self, place: int, worker: int, ready: float) -> float:
        """Run a call on a worker as soon as that is free and all inputs are ready; return when it ends."""
        ended = max(self.free[worker][0], ready) + self.seconds[place] + TASK_SECONDS
        heapreplace(self.free[worker], ended)
        return ended

    def blocks(self, units: Sequence[int]) -> list[int]:
        """Assign units in contiguous blocks of shards: neighbours share a worker except at the seams."""
        shards = [
            call.unit.shard for call in map(self.calls.__getitem__, units) if isinstance(call, UnitCall)
        ]
        order = sorted(range(len(units)), key=shards.__getitem__)
        found = [0] * len(units)
        for place, number in enumerate(order):
            found[number] = place * self.workers // len(units)
        return found

    def near(self, units: Sequence[int]) -> list[int]:
        """Assign each unit to the worker with most of its inputs, as long as that has not too many units."""
        most = -(-len(units) // self.workers)
        given = np.zeros(self.workers, np.int64)
        arguments, reader = self.flat.arguments_of(units)
        where = self.where[self.flat.source[arguments]]
        known = where >= 0
        code = reader[known] * self.workers + where[known]
        size = len(units), self.workers
        counts = np.bincount(code, minlength=size[0] * size[1]).reshape(size)
        nbytes = np.bincount(code, self.flat.nbytes[arguments[known]], size[0] * size[1]).reshape(size)
        goes = np.stack([self.going_bytes(place) for place in units])
        counts, nbytes = counts + (goes > 0), nbytes + goes
        found = []
        for there, here in zip(counts > 0, nbytes, strict=True):
            open_to = np.flatnonzero(there & (given < most))
            if len(open_to):
                open_to = open_to[here[open_to] == here[open_to].max()]
            else:
                open_to = np.arange(self.workers)
            worker = int(open_to[given[open_to].argmin()])
            given[worker] += 1
            found.append(worker)
        return found

    def one_by_one(self, units: Sequence[int]) -> list[int]:
        """Assign each unit in turn to the worker where it ends the soonest; inputs come there only once."""
        ends, found = np.array(self.backlog(units)), []
        arguments, reader = self.flat.arguments_of(units)
        source, nbytes = self.flat.source[arguments], self.flat.nbytes[arguments]
        sizes, alike = np.unique(nbytes, return_inverse=True)
        parts, part = first_of_each(source * len(sizes) + alike)
        home = self.where[source]
        nbytes = np.where(home >= 0, nbytes, 0)
        came = np.zeros((len(parts), self.workers), bool)
        """Whether each part of a chunk that is read has come to each of the workers."""
        bounds = np.searchsorted(reader, np.arange(len(units) + 1)).tolist()
        for place, mine in zip(units, (slice(*both) for both in pairwise(bounds)), strict=True):
            need = self.needs(place)
            there = self.seconds_for(need.nbytes, need.there) + self.seconds_for(self.going_bytes(place))
            there -= nbytes[mine] @ came[part[mine]] / NETWORK_BYTES_PER_SECOND
            after = ends + there + (self.seconds[place] + TASK_SECONDS) / self.threads
            worker = int(after.argmin())
            found.append(worker)
            ends[worker] = after[worker]
            came[part[mine], worker] = home[mine] != worker
        return found

    def brings_weights(self, units: Sequence[int]) -> bool:
        """Return whether weights or state that live nowhere yet will live where units of a layer run."""
        return any(self.new_bytes(place, self.needs(place)) for place in units)

    def backlog(self, units: Sequence[int]) -> list[float]:
        """Return the seconds for which each worker is still busy once all that units read has been made."""
        arguments, _ = self.flat.arguments_of(units)
        ready = float(self.done[self.flat.source[arguments]].max(initial=0.0))
        return [max(free[0] - ready, 0.0) for free in self.free]

    def end(self, units: Sequence[int], chosen: Sequence[int]) -> float:
        """Return the seconds until workers have done a layer's units, from when all their inputs are made."""
        found = self.backlog(units)
        for place, worker, seconds in zip(units, chosen, self.moving_seconds(units, chosen), strict=True):
            found[worker] += seconds + (self.seconds[place] + TASK_SECONDS) / self.threads
        return max(found)

    def layer_seconds(self, units: Sequence[int], chosen: Sequence[int]) -> float:
        """Return the seconds that units of a layer take on all workers together."""
        return sum(self.moving_seconds(units, chosen)) + sum(self.seconds[place] for place in units)

    def moving_seconds(self, units: Sequence[int], chosen: Sequence[int]) -> list[float]:
        """Return the seconds in which each unit's inputs come, and its results for updates of weights go.

        An input that several units of a worker read comes once.
        """
        arguments, reader = self.flat.arguments_of(units)
        source, nbytes = self.flat.source[arguments], self.flat.nbytes[arguments]
        mine = np.array(chosen)[reader]
        where = self.where[source]
        comes = np.flatnonzero((where >= 0) & (where != mine))
        _, alike = np.unique(nbytes[comes], return_inverse=True)
        arrival = source[comes] * self.workers + mine[comes]
        once, _ = first_of_each(arrival * (len(comes) + 1) + alike)
        comes = comes[once]
        coming = nbytes[comes] / NETWORK_BYTES_PER_SECOND + MESSAGE_SECONDS
        # Added in the order of what they read, so that plans are equal to the last bit.
        found: list[float] = np.bincount(reader[comes], coming, len(units)).tolist()
        for number, (place, worker) in enumerate(zip(units, chosen, strict=True)):
            if self.going.first[place] < self.going.first[place + 1]:
                there = self.going_bytes(place)
                found[number] += self.seconds_for(there)[worker]
        return found

    def going_bytes(self, place: int) -> Ints:
        """Return, for each worker, the bytes of a call's results that weights which live there will need."""
        goes = slice(*self.going.first[place : place + 2])
        if goes.start == goes.stop:
            return np.zeros(self.workers, np.int64)
        home = self.where[self.going.piece[goes]]
        nbytes = self.going.nbytes[goes][home >= 0]
        return np.bincount(home[home >= 0], nbytes, self.workers).astype(np.int64)

    def seconds_for(self, there: Ints, some: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.float64]:
        """Return, for each worker, the seconds to get from, or send to, all others the bytes ``there``."""
        some = there > 0 if some is None else some
        others = some.sum() - some
        nbytes = there.sum() - there
        return np.where(others > 0, nbytes / NETWORK_BYTES_PER_SECOND + others * MESSAGE_SECONDS, 0.0)

    def soonest(self, place: int, need: _Needs) -> int:
        """Return the worker where a call ends the soonest, with room for the weights that it brings there."""
        call = self.calls[place]
        if place in self.update_of and self.where[self.update_of[place]] >= 0:
            return int(self.where[self.update_of[place]])
        if isinstance(call, CombineCall) and place not in self.update_of:
            # Short work: it goes where most of it is, and no bytes move for the sake of an idle worker.
            equal = np.flatnonzero(need.there & (need.nbytes == need.nbytes[need.there].max()))
            pieces = self.combines[call.key[:3]]
            if pieces == 1:  # Who combines a sum hears of all, and tells all: not one worker for all layers.
                known = self.combiner.get(call.key.layer, -1)
                return known if known in equal else int(equal[self.combined[equal].argmin()])
            # Neighbouring pieces stay together, as in blocks of the shards that will read them.
            return int(equal[min(call.key.number * len(equal) // pieces, len(equal) - 1)])
        free = [threads[0] for threads in self.free]
        finished = np.maximum(free, need.ready_seconds + self.seconds_for(need.nbytes, need.there))
        finished = finished + self.seconds_for(self.going_bytes(place))
        if new_bytes := self.new_bytes(place, need):
            held = np.array(self.held)
            beyond = np.maximum(held + new_bytes - self.share, 0) / NOMINAL.disk_write_bytes_per_second
            finished = finished + 2 * beyond + 1e-12 * held + np.array(self.sending)
        return int(finished.argmin())

    def new_bytes(self, place: int, need: _Needs) -> int:
        """Return the bytes of weights and state that live nowhere yet, and will live where the call runs."""
        found = set(need.homeless)
        if place in self.update_of:
            found.update(self.together[self.update_of[place]])
        return int(self.flat.sizes[list(found)].sum())

    def needs(self, place: int) -> _Needs:
        """Locate the inputs of a call. Partial sums of its own layer are not there yet."""
        arguments = slice(self.first[place], self.first[place + 1])
        source = self.flat.source[arguments]
        where = self.where[source]
        known = where >= 0
        homeless: set[int] = set()
        if not known.all():
            for chunk in source[~known & (source < self.flat.inputs)].tolist():
                homeless.update(self.together.get(chunk, (chunk,)))
        nbytes = np.bincount(where[known], self.flat.nbytes[arguments][known], self.workers).astype(np.int64)
        there = np.bincount(where[known], minlength=self.workers) > 0
        ready = float(self.done[source[known]].max(initial=0.0))
        return _Needs(there, nbytes, ready, frozenset(homeless))

    def give(self, place: int, shared: Collection[int] = ()) -> None:
        """Assign one call. Weights that live nowhere yet will live on its worker, if not ``shared``."""
        need = self.needs(place)
        need = need._replace(homeless=need.homeless.difference(shared))
        worker = self.soonest(place, need)
        if self.combines[self.calls[place].key[:3]] == 1 < need.there.sum():
            self.combined[self.combiner.setdefault(self.calls[place].key.layer, worker)] += 1
        coming = float(self.seconds_for(need.nbytes, need.there)[worker])
        ended = self.book(place, worker, need.ready_seconds + coming)
        made = slice(self.results[place], self.results[place + 1])
        self.worker_of[place], self.where[made], self.done[made] = worker, worker, ended
        self.live(need.homeless, worker)
        if place in self.update_of:
            if isinstance(self.calls[place], CombineCall):
                self.sending[worker] += coming
            self.live(self.together[self.update_of[place]], worker)

    def live(self, pieces: Iterable[int], worker: int) -> None:
        """Have weights and state live on a worker, unless they live elsewhere already."""
        for chunk in pieces:
            if self.where[chunk] < 0:
                self.where[chunk] = worker
                self.held[worker] += int(self.flat.sizes[chunk])

    def settle(self, units: Sequence[int]) -> None:
        """Have weights and state live on the worker whose units alone have read them, or made them anew."""
        for place in units:
            if place in self.updates:
                self.live(self.together[self.updates[place]], int(self.worker_of[place]))
        arguments, reader = self.flat.arguments_of(units)
        source = self.flat.source[arguments]
        new = np.flatnonzero((source < self.flat.inputs) & (self.where[source] < 0))
        new = new[self.lives_with_others[source[new]]]
        mine = self.worker_of[np.asarray(units)[reader[new]]]
        pairs, first = np.unique(source[new] * self.workers + mine, return_index=True)
        _, which, readers = np.unique(pairs // self.workers, return_index=True, return_counts=True)
        single = which[readers == 1]
        alone: dict[int, set[int]] = {}
        ordered = pairs[single[np.argsort(first[single])]].tolist()
        for chunk, worker in (divmod(pair, self.workers) for pair in ordered):
            alone.setdefault(worker, set()).update(self.together[chunk])
        for worker, chunks in alone.items():
            # Several units that run beside each other do not bring one worker more than its share.
            if len(units) == 1 or self.held[worker] + self.flat.sizes[list(chunks)].sum() <= self.share:
                self.live(sorted(chunks), worker)
