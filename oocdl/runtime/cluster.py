"""The same steps over the workers of a Dask client.

Workers hold the chunks; the driver holds futures. Each worker has its own tier and
engine, set up once a run by a plugin; tasks name a call by number and carry nothing
but the step's facts. What a task computes is fixed by the plan, so the bits are
those of a run in one process.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from dask import annotate  # type: ignore[attr-defined]
from dask._expr import LLGExpr
from dask._task_spec import Task, TaskRef
from dask.sizeof import sizeof
from distributed import Future, Worker, WorkerPlugin, wait

from oocdl.config import Settings
from oocdl.engines.engine import get_engine
from oocdl.errors import ResourceError
from oocdl.graph.ir.index import Region, region_shape, whole
from oocdl.graph.transforms.factorize import Factored
from oocdl.host.heap import Heap, give_back_freed_memory, keep_freed_memory, use_one_heap
from oocdl.host.limits import check_budget
from oocdl.ops.gather import Rows
from oocdl.ops.losses import Labels
from oocdl.planning.calls import CombineCall, PickCall
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.machine import machine_for
from oocdl.planning.pass_plan import PassPlan
from oocdl.planning.passes import PassInfo
from oocdl.planning.placement import Placed, largest_crossing, place
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import DaskKey, TaskKey, TaskKind, dask_key, stored_key, task_key
from oocdl.runtime import dask_records, execute, weight_io
from oocdl.runtime.inputs import Kept, Sources, feeds_of, own_regions
from oocdl.runtime.session import Held, Moved, scalar_outputs
from oocdl.runtime.trace import Recording
from oocdl.storage.cache.chunk import Chunk, home
from oocdl.storage.cache.memory_tier import Tier, use
from oocdl.storage.cache.spill_store import SpillStore
from oocdl.storage.dataset.dataset import Dataset, DatasetSpec, open_dataset
from oocdl.storage.dataset.identity import check_same, identity
from oocdl.storage.run.commit import Writer
from oocdl.storage.run.run_store import RunStore

TRAVELLING = 3
"""Times the largest chunk that travels: one arrives, and two at most are on their way to others."""
LEAST_BYTES = 1 << 20
"""So much may arrive at a time in any case."""


@sizeof.register(Chunk)  # type: ignore[no-untyped-call, untyped-decorator]
def _size_of(chunk: Chunk) -> int:
    """Workers fetch no more at a time than they have room for, if they know how large chunks are."""
    return chunk.nbytes


def crew(client: Any) -> tuple[int, int]:
    """Threads of each worker of a client, of the one that has the fewest, and how many workers there are."""
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    if not workers:
        raise ResourceError("the Dask client has no workers; start some, or wait for them")
    return min(worker["nthreads"] for worker in workers), len(workers)


@dataclass(frozen=True, eq=False)
class Setup:
    """All that a worker needs to know of a run; travels once."""

    run_id: str
    graphs: Mapping[str, TaskGraph]
    factored: Mapping[str, Factored]
    feeds: Mapping[str, Mapping[str, str]]
    labels: Mapping[str, Mapping[str, Labels | Rows]]
    dataset: DatasetSpec
    identities: Mapping[str, Mapping[str, Any]]
    """What the client has found the arrays of the dataset to be."""
    settings: Settings
    plans: tuple[PassPlan, ...]
    threads: int
    """Programs that a worker runs at once."""
    crossing_bytes: int
    """Of the largest chunk that travels."""


class WorkerSetup(WorkerPlugin):
    """Gives a worker its tier, engine and plan; takes them away when the run ends."""

    def __init__(self, setup: Setup) -> None:
        self.name = f"oocdl-{setup.run_id}"
        self.run_setup = setup

    def setup(self, worker: Worker) -> None:
        known = self.run_setup
        use_one_heap()
        dataset = open_dataset(known.dataset)
        check_same(dataset, known.identities)
        engine = get_engine(known.settings.engine)
        check_budget(known.settings.memory_bytes)
        machine = machine_for(known.settings, dataset, known.threads)
        room = machine.room_bytes(known.plans, TRAVELLING * known.crossing_bytes)
        folder = known.settings.spill_folder(Path(worker.local_directory) / "spill")
        keep_freed_memory()
        heap = Heap(known.threads, room, lambda: self.tier, machine.guard())
        self.tier = Tier(
            room,
            SpillStore(folder),
            before_mapping=heap.before_mapping,
            withheld_bytes=heap.withheld_bytes,
            check_alone=heap.check_alone,
        )
        use(self.tier)
        scale, kept = known.settings.scale or {}, Kept()
        sources = {
            name: Sources(
                known.factored[name],
                feeds_of(feeds, known.labels[name], dataset, scale),
                kept,
            )
            for name, feeds in known.feeds.items()
        }
        execute.register(known.run_id, execute.Context(known.graphs, sources, engine, self.tier, heap))
        self._hire(worker)
        dask_records.shorten_worker_logs(worker)

    def _hire(self, worker: Worker) -> None:
        """Threads of our own for its tasks: one more than compute, to read what comes next meanwhile.

        They start now, so they share the main heap; the worker's own may have started before.
        Of chunks it fetches no more at a time than there is room for.
        """
        known, state = self.run_setup, worker.state
        self.before = state.nthreads, state.transfer_incoming_bytes_limit
        self.most_outgoing = worker.transfer_outgoing_count_limit
        state.nthreads = known.threads + 1
        state.transfer_incoming_bytes_limit = max(known.crossing_bytes, LEAST_BYTES)
        worker.transfer_outgoing_count_limit = 1
        worker.executors[self.name] = ThreadPoolExecutor(known.threads + 1, thread_name_prefix="oocdl")

    def teardown(self, worker: Worker) -> None:
        worker.state.nthreads, worker.state.transfer_incoming_bytes_limit = self.before
        worker.transfer_outgoing_count_limit = self.most_outgoing
        worker.executors.pop(self.name).shutdown()
        dask_records.lengthen_worker_logs(worker)
        execute.forget(self.run_setup.run_id)
        use(None)
        self.tier.close()
        give_back_freed_memory()


def _moved(run_id: str) -> tuple[Moved, str | None]:
    """What a worker has moved so far, and what its guard has noticed; runs on the worker."""
    context = execute.context_of(run_id)
    stats, moved = context.tier.stats, context.measured
    found = moved.read_bytes, moved.made_bytes, stats.read_bytes, stats.written_bytes, stats.peak_bytes
    return Moved(*found), context.heap.notice


def _write(
    run_id: str, writer: Writer, name: str, box: Region, place: tuple[slice, ...], trained: bool, chunk: Chunk
) -> Any:
    """Write one piece of a commit where it is; runs on the worker."""
    with execute.context_of(run_id).tier.reserve(0, [chunk]):
        array = chunk.array()[place].reshape(region_shape(box))
        if trained:
            weight_io.check_finite(name, array)
        written = writer.write(name, box, array)
        del array
    return written


def _worker_of(worker_of: Mapping[TaskKey, int], workers: Sequence[str], key: DaskKey) -> list[str]:
    """The address of the worker that runs a task; the scheduler asks for it."""
    return [workers[worker_of[task_key(key)]]]


def _priority_of(position_of: Mapping[TaskKey, int], key: DaskKey) -> int:
    """How urgent a task is: the plan's order, the first of all tasks most."""
    return -position_of[task_key(key)]


@dataclass(eq=False)
class ClusterSession(Held[Future[Chunk]]):
    """Runs steps of one run on a client's workers. The face of ``Session``."""

    client: Any
    """A ``distributed.Client``."""
    compiled: Mapping[str, CompiledPass]
    dataset: Dataset
    settings: Settings
    threads: int
    """Programs that a worker runs at once."""
    held: dict[TaskKey, Future[Chunk]] = field(default_factory=dict)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    numbers: Iterator[int] = field(default_factory=count)
    """Of passes and renewals: no two of a session have the same keys, even if one has failed."""
    tasks_since_renewal: int = 0

    def __enter__(self) -> ClusterSession:
        self.workers = sorted(self.client.scheduler_info(n_workers=-1)["workers"])
        if not self.workers:
            raise ResourceError("the Dask client has no workers; start some, or wait for them")
        self.placed: dict[str, Placed] = {
            name: place(c.graph, len(self.workers)) for name, c in self.compiled.items()
        }
        setup = Setup(
            self.run_id,
            {name: c.graph for name, c in self.compiled.items()},
            {name: c.plan.factored for name, c in self.compiled.items()},
            {name: dict(c.feeds) for name, c in self.compiled.items()},
            {name: dict(c.labels) for name, c in self.compiled.items()},
            self.dataset.spec(),
            {name: identity(array) for name, array in self.dataset.arrays.items()},
            self.settings,
            tuple(c.plan for c in self.compiled.values()),
            self.threads,
            max(largest_crossing(c.graph, self.placed[name]) for name, c in self.compiled.items()),
        )
        layers = dict.fromkeys(key.layer for placed in self.placed.values() for key in placed.worker_of)
        self.groups = dask_records.hold_groups(self.client, self.run_id, ["", *layers])
        self.plugin = WorkerSetup(setup)
        self.client.register_plugin(self.plugin)
        dask_records.shorten_logs(self.client)
        return self

    def __exit__(self, *_: object) -> None:
        self.held.clear()
        self.groups.clear()
        dask_records.lengthen_logs(self.client)
        self.client.unregister_worker_plugin(self.plugin.name)

    def load(self, plan_id: str, read: weight_io.Read) -> None:
        """Send weights and state to the workers, a piece at a time."""
        for key, array, region in weight_io.pieces(self.compiled[plan_id], read):
            chunk = home().adopt(array, region, ())
            self.held[key] = self.client.scatter(chunk, hash=False)

    def run_pass(self, plan_id: str, info: PassInfo) -> dict[str, float]:
        """Run one pass; returns its scalar outputs by value name."""
        compiled, placed = self.compiled[plan_id], self.placed[plan_id]
        pass_name = self.next_name()
        names = {key: dask_key(key, pass_name) for key in placed.worker_of}
        known = {key: future.key for key, future in self.held.items()} | names
        tasks, wanted = self._tasks(plan_id, info, known), [known[key] for key in compiled.graph.outputs]
        where = partial(_worker_of, placed.worker_of, self.workers)
        priority = partial(_priority_of, placed.position_of)
        with annotate(workers=where, priority=priority, executor=self.plugin.name):
            # The name of the pass tells its graph from all others; Dask would hash all tasks for that.
            graph = LLGExpr(tasks, _determ_token=pass_name)  # type: ignore[no-untyped-call]
            futures = self.client.get(graph, wanted, sync=False)
        made = dict(zip(compiled.graph.outputs, futures, strict=True))
        wait(futures)  # type: ignore[no-untyped-call]
        for future in futures:
            if future.status == "error":
                future.result()  # raises what the task has raised
        scalars = {key: self.client.gather(made[key]) for key in _scalar_keys(compiled)}
        self.held = weight_io.after_pass(compiled, made, self.held)
        self.tasks_since_renewal += len(tasks)
        if dask_records.is_due(self.tasks_since_renewal, len(self.held)):
            self.held = dask_records.renew(self.client, self.run_id, self.held, self.next_name())
            self.tasks_since_renewal = 0
        return scalar_outputs(compiled, scalars)

    def next_name(self) -> str:
        """A name that no other pass has on the cluster, of this run or of another."""
        return f"{self.run_id}/{next(self.numbers)}"

    def _tasks(self, plan_id: str, info: PassInfo, names: Mapping[TaskKey, Any]) -> dict[Any, Any]:
        """The tasks of a pass; ``names`` are the cluster's keys of all that they make and read."""
        tasks: dict[Any, Any] = {}
        for strip in self.placed[plan_id].strips:
            key, source = names[strip.key], TaskRef(names[strip.source])
            tasks[key] = Task(key, execute.run_strip, self.run_id, strip.region, source)
        for number, call in self.placed[plan_id].calls:
            key = names[call.key]
            if isinstance(call, PickCall):
                tasks[key] = Task(key, execute.pick, TaskRef(names[call.source]), call.number)
                continue
            run = execute.run_combine if isinstance(call, CombineCall) else execute.run_unit
            references = [TaskRef(names[argument]) for argument in call.arguments]
            tasks[key] = Task(key, run, self.run_id, plan_id, number, info, *references)
        return tasks

    def commit(self, store: RunStore, plan_id: str, meta: Mapping[str, object]) -> None:
        """Write all weights and state as a new version: each worker what it holds."""
        compiled = self.compiled[plan_id]
        factored = compiled.plan.factored
        step = meta["step"]
        assert isinstance(step, int)
        tensors, name = weight_io.specs(compiled), self.next_name()
        writing = store.begin(step, tensors)
        writer = writing.writer()
        jobs: list[tuple[str, Future[Any]]] = []
        for spec in tensors:
            regions, trained = compiled.pieces[spec.name], spec.name in factored.graph.updates
            futures = [self.held[stored_key(spec.name, number)] for number in range(len(regions))]
            if weight_io.by_piece(spec, regions):
                for number, (future, region) in enumerate(zip(futures, regions, strict=True)):
                    ((box, part),) = own_regions(factored.factors[spec.name], region)
                    key = dask_key(TaskKey(TaskKind.WRITE, "", spec.name, number), name)
                    job = self.client.submit(
                        _write, self.run_id, writer, spec.name, box, part, trained, future, key=key
                    )
                    jobs.append((spec.name, job))
                continue
            full = np.empty(spec.shape, spec.dtype)
            for chunk, region in zip(self.client.gather(futures), regions, strict=True):
                weight_io.fill(full, factored.factors[spec.name], region, chunk.copy())
            if trained:
                weight_io.check_finite(spec.name, full)
            writing.write(spec.name, whole(spec.shape), full)
        for written, job in jobs:
            writing.record(written, job.result())
        writing.finish(meta)

    def moved(self) -> Moved:
        """Totals over all workers since the session began; the peak is the largest worker's.

        The first worker whose guard withholds memory is named to the user.
        """
        found: dict[str, tuple[Moved, str | None]] = self.client.run(_moved, self.run_id)
        for worker, (_, notice) in found.items():
            self.tell(None if notice is None else f"worker {worker}: {notice}")
        each = [astuple(moved) for moved, _ in found.values()]
        totals = [sum(numbers) for numbers in zip(*each, strict=True)]
        peak = max(moved.peak_bytes for moved, _ in found.values())
        return replace(Moved(*totals), peak_bytes=peak)

    def start_recording(self) -> None:
        """Record all workers."""
        self.client.run(execute.start_recording, self.run_id)

    def stop_recording(self) -> list[Recording]:
        """What each worker has done."""
        return list(self.client.run(execute.stop_recording, self.run_id).values())


def _scalar_keys(compiled: CompiledPass) -> list[TaskKey]:
    factored = compiled.plan.factored
    names = [n for n in factored.graph.outputs if factored.graph.values[n].shape == ()]
    return [key for name in names for _, key in compiled.graph.pieces[factored.stored(name)]]
