"""Which worker runs which call: decided layer by layer, in the plan's order, by what it costs over hosts.

A layer that has a unit for every worker is given out in contiguous blocks of shards, or each unit to where
most of what it reads is, whichever is done sooner. Units of a layer that has fewer, and what combines partial
sums, go where they are done the soonest: bytes that are elsewhere take time to come, a busy worker takes time
to be free, and weights beyond a worker's share of all weights and state would be spilled. So layers that
cannot be cut follow each other over the workers where their weights are large (a pipeline), and stay together
where they are not.

A weight and its state live, and are updated, on the worker that alone reads a piece of it, or adds up its
gradient. Nothing of a weight travels but new weights to who reads them, and sums of gradients.
Bits never depend on any of this. Equal graphs are assigned equally, on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from oocdl.graph.ir.op_rule import Rules
from oocdl.ops import RULES
from oocdl.planning.calls import CombineCall, PickCall, UnitCall, parts_of
from oocdl.planning.cost_model import NOMINAL, TASK_SECONDS, Rates
from oocdl.planning.parallel.list_schedule import call_seconds
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey

NETWORK_BYTES_PER_SECOND = 1.25e9
"""Between two workers: 10 Gbit/s."""
MESSAGE_SECONDS = 2e-4
"""Of something that comes from another worker, beside its bytes."""
NEAR_RATIO = 0.8
"""Units go where their inputs are, and not in blocks, if that takes at most this share of the time."""
SAMPLES = 24
"""So many units of a layer are asked where their inputs are, to choose between the two."""


class _Needs(NamedTuple):
    """What a call reads, by where it is."""

    items: tuple[tuple[TaskKey, int, int], ...]
    """(chunk, worker that has it, bytes that are read of it)."""
    nbytes: dict[int, int]
    """Worker -> bytes of them that are there."""
    ready_seconds: float
    """When all of it has been made."""
    homeless: frozenset[TaskKey]
    """Pieces of weights and state that no worker has yet."""


def assign(
    graph: TaskGraph, workers: int, rates: Rates = NOMINAL, rules: Rules = RULES
) -> dict[TaskKey, int]:
    """Return the worker, from 0, that runs each call of a pass; ValueError if there are no workers."""
    if workers < 1:
        raise ValueError("a pass needs a worker")
    if workers == 1:
        return {call.key: 0 for call in graph.calls}
    return _Assigner(graph, workers, call_seconds(graph, rates, rules), rates).run()


class _Assigner:
    """The assignment so far, and a clock for each worker."""

    def __init__(self, graph: TaskGraph, workers: int, seconds: Sequence[float], rates: Rates) -> None:
        self.graph, self.workers = graph, workers
        self.spill_bytes_per_second = rates.disk_write_bytes_per_second
        self.seconds = {call.key: taken for call, taken in zip(graph.calls, seconds, strict=True)}
        self.worker_of: dict[TaskKey, int] = {}
        self.done: dict[TaskKey, float] = {}
        """Call -> when its results are there."""
        self.free = [0.0] * workers
        """Worker -> when it has done what it has been given."""
        self.held = [0.0] * workers
        """Worker -> bytes of weights and state that live there."""
        self.homes: dict[TaskKey, int] = {}
        """Piece of weights or state -> the worker that holds it."""
        self.updates = _updates(graph)
        """Call that makes a piece of weights or state anew -> that piece."""
        self.together = _updated_together(graph, self.updates)
        self.combines = Counter(call.key[:3] for call in graph.calls if isinstance(call, CombineCall))
        self.stored = {key.value for key in graph.inputs}
        self.share = sum(graph.input_bytes.values()) / workers
        self.update_of = {**self.updates, **_updates_that_read(graph, self.updates)}
        """The same, and for calls that combine the gradients of such a piece."""

    def run(self) -> dict[TaskKey, int]:
        """Assign all calls."""
        layers: dict[tuple[str, ...], list[UnitCall]] = {}
        for call in self.graph.calls:
            if isinstance(call, UnitCall):
                layers.setdefault(call.key[:3], []).append(call)
        for call in self.graph.calls:
            if isinstance(call, PickCall):
                self.worker_of[call.key], self.done[call.key] = (
                    self.worker_of[call.source],
                    self.done[call.source],
                )
            elif isinstance(call, CombineCall):
                self.give(call)
            elif call.key not in self.worker_of:
                self.give_layer(layers[call.key[:3]])
        return self.worker_of

    def give_layer(self, units: Sequence[UnitCall]) -> None:
        """Assign all units of a layer."""
        if len(units) < self.workers:
            for call in units:
                self.give(call, alone=len(units) == 1)
            self.settle(units)
            return
        if all(self.updates.get(call.key) in self.homes for call in units):
            chosen = [self.homes[self.updates[call.key]] for call in units]
        else:
            chosen = self.blocks(units)
            step = -(-len(units) // SAMPLES)
            sample = [(call, self.needs(call)) for call in units[::step]]
            near = self.near(sample)
            if self.layer_seconds(sample, near) < NEAR_RATIO * self.layer_seconds(sample, chosen[::step]):
                chosen = self.near([(call, self.needs(call)) for call in units])
        ready = max(self.needs(call).ready_seconds for call in (units[0], units[-1]))
        for call, worker in zip(units, chosen, strict=True):
            self.worker_of[call.key] = worker
            begun = max(self.free[worker], ready)
            self.free[worker] = self.done[call.key] = begun + self.seconds[call.key] + TASK_SECONDS
        self.settle(units)

    def blocks(self, units: Sequence[UnitCall]) -> list[int]:
        """Contiguous blocks of shards: neighbours share a worker but at the seams."""
        order = sorted(range(len(units)), key=lambda number: units[number].unit.shard)
        found = [0] * len(units)
        for place, number in enumerate(order):
            found[number] = place * self.workers // len(units)
        return found

    def near(self, units: Sequence[tuple[UnitCall, _Needs]]) -> list[int]:
        """Each unit where most of what it reads is, as long as that worker has not too many."""
        most = -(-len(units) // self.workers)
        given = [0] * self.workers
        found = []
        for _, need in units:
            open_to = [worker for worker in need.nbytes if given[worker] < most]
            if open_to:
                worker = max(open_to, key=lambda one: (need.nbytes[one], -given[one], -one))
            else:
                worker = given.index(min(given))
            given[worker] += 1
            found.append(worker)
        return found

    def layer_seconds(self, units: Sequence[tuple[UnitCall, _Needs]], chosen: Sequence[int]) -> float:
        """What units of a layer take on all workers together, until their inputs come and they are computed.

        What several units of a worker read comes once.
        """
        taken = 0.0
        come: set[tuple[TaskKey, int, int]] = set()
        for (call, need), mine in zip(units, chosen, strict=True):
            taken += self.seconds[call.key]
            for key, worker, nbytes in need.items:
                if worker != mine and (key, mine, nbytes) not in come:
                    come.add((key, mine, nbytes))
                    taken += nbytes / NETWORK_BYTES_PER_SECOND + MESSAGE_SECONDS
        return taken

    def coming_seconds(self, need: _Needs, worker: int) -> float:
        """What it takes until all that a call reads is on a worker."""
        others = len(need.nbytes) - (worker in need.nbytes)
        if not others:
            return 0.0
        nbytes = sum(need.nbytes.values()) - need.nbytes.get(worker, 0)
        return nbytes / NETWORK_BYTES_PER_SECOND + others * MESSAGE_SECONDS

    def soonest(self, call: UnitCall | CombineCall, need: _Needs) -> int:
        """The worker on which a call is done the soonest, with room for the weights that it brings there."""
        home = self.homes.get(self.update_of.get(call.key, call.key))
        if home is not None:
            return home
        if isinstance(call, CombineCall) and call.key not in self.update_of:
            # Short work: it goes where most of it is, and no bytes move for the sake of an idle worker.
            most = max(need.nbytes.values())
            equal = sorted(worker for worker, nbytes in need.nbytes.items() if nbytes == most)
            # Neighbouring pieces stay together, as in blocks of the shards that will read them.
            return equal[min(call.key.number * len(equal) // self.combines[call.key[:3]], len(equal) - 1)]
        new_bytes = self.new_bytes(call, need)
        elsewhere = sum(need.nbytes.values()) / NETWORK_BYTES_PER_SECOND
        elsewhere += len(need.nbytes) * MESSAGE_SECONDS
        coming = np.full(self.workers, elsewhere)
        for worker in need.nbytes:
            coming[worker] = self.coming_seconds(need, worker)
        finished = np.maximum(np.array(self.free), need.ready_seconds + coming)
        if new_bytes:
            held = np.array(self.held)
            beyond = np.maximum(held + new_bytes - self.share, 0) / self.spill_bytes_per_second
            finished = finished + 2 * beyond + 1e-12 * held
        return int(finished.argmin())

    def new_bytes(self, call: UnitCall | CombineCall, need: _Needs) -> int:
        """Bytes of weights and state that will live where the call runs, and live nowhere yet."""
        found = set(need.homeless)
        if call.key in self.update_of:
            found.update(self.together[self.update_of[call.key]])
        return sum(self.graph.input_bytes[key] for key in found)

    def needs(self, call: UnitCall | CombineCall) -> _Needs:
        """What a call reads, and where it is. Partial sums of its own layer are not there yet."""
        items: list[tuple[TaskKey, int, int]] = []
        nbytes: dict[int, int] = {}
        homeless: set[TaskKey] = set()
        ready = 0.0
        for number, size in parts_of(call):
            key = call.arguments[number]
            worker = self.worker_of.get(key)
            if worker is not None:
                ready = max(ready, self.done[key])
            else:
                worker = self.homes.get(key)
                if worker is None:
                    if key in self.graph.input_bytes:
                        homeless.update(self.together.get(key, (key,)))
                    continue
            items.append((key, worker, size))
            nbytes[worker] = nbytes.get(worker, 0) + size
        return _Needs(tuple(items), nbytes, ready, frozenset(homeless))

    def give(self, call: UnitCall | CombineCall, alone: bool = True) -> None:
        """Assign a call by itself. Weights that live nowhere yet live there, if no other unit reads them."""
        need = self.needs(call)
        need = need if alone else need._replace(homeless=frozenset())
        self.worker_of[call.key] = worker = self.soonest(call, need)
        begun = max(self.free[worker], need.ready_seconds + self.coming_seconds(need, worker))
        self.free[worker] = self.done[call.key] = begun + self.seconds[call.key] + TASK_SECONDS
        self.live(need.homeless, worker)
        if call.key in self.update_of:
            self.live(self.together[self.update_of[call.key]], worker)

    def live(self, pieces: Iterable[TaskKey], worker: int) -> None:
        """Weights and state live on a worker, unless they live elsewhere already."""
        for key in pieces:
            if key not in self.homes:
                self.homes[key] = worker
                self.held[worker] += self.graph.input_bytes[key]

    def settle(self, units: Sequence[UnitCall]) -> None:
        """What units of one worker alone have read, or made anew, lives there."""
        readers: dict[TaskKey, set[int]] = {}
        for call in units:
            mine = self.worker_of[call.key]
            if call.key in self.updates:
                self.live(self.together[self.updates[call.key]], mine)
            for read in call.reads:
                if read.value in self.stored:
                    for key in call.arguments[read.first : read.first + len(read.parts)]:
                        if key in self.together and key not in self.homes:
                            readers.setdefault(key, set()).add(mine)
        for key, workers in readers.items():
            if len(workers) == 1:
                self.live(self.together[key], *workers)


def _replaced(graph: TaskGraph) -> dict[TaskKey, TaskKey]:
    """What is there before the pass and made anew; sums of gradients are not there before the first."""
    return {stored: made for stored, made in graph.replaced.items() if stored in graph.input_bytes}


def _updates(graph: TaskGraph) -> dict[TaskKey, TaskKey]:
    """Call that makes a piece of a weight or of state anew -> that piece, one of several."""
    source = {call.key: call.source for call in graph.calls if isinstance(call, PickCall)}
    return {source.get(made, made): stored for stored, made in _replaced(graph).items()}


def _updated_together(
    graph: TaskGraph, updates: Mapping[TaskKey, TaskKey]
) -> dict[TaskKey, tuple[TaskKey, ...]]:
    """Piece of weights or state -> the pieces that live with it, itself among them.

    A weight's and its state's: those of equal size of which one is made anew from the other.
    """
    root = {stored: stored for stored in _replaced(graph)}

    def find(key: TaskKey) -> TaskKey:
        while root[key] != key:
            key = root[key] = root[root[key]]
        return key

    source = {call.key: call.source for call in graph.calls if isinstance(call, PickCall)}
    for stored, made in _replaced(graph).items():
        root[find(stored)] = find(updates[source.get(made, made)])
    for call in graph.calls:
        if call.key in updates and isinstance(call, UnitCall):
            mine, nbytes = updates[call.key], graph.input_bytes[updates[call.key]]
            for key in call.arguments:
                if key in root and graph.input_bytes[key] == nbytes:
                    root[find(key)] = find(mine)
    groups: dict[TaskKey, list[TaskKey]] = {}
    for stored in root:
        groups.setdefault(find(stored), []).append(stored)
    return {stored: tuple(pieces) for pieces in groups.values() for stored in pieces}


def _updates_that_read(graph: TaskGraph, updates: Mapping[TaskKey, TaskKey]) -> dict[TaskKey, TaskKey]:
    """Call that combines partial sums -> a stored piece of the weight that is updated by its result."""
    source = {call.key: call.source for call in graph.calls if isinstance(call, PickCall)}
    combined = {call.key for call in graph.calls if isinstance(call, CombineCall)}
    found: dict[TaskKey, TaskKey] = {}
    for call in graph.calls:
        if call.key in updates and isinstance(call, UnitCall):
            for key in call.arguments:
                made = source.get(key, key)
                if made in combined:
                    found.setdefault(made, updates[call.key])
    return found
