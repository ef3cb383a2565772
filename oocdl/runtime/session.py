"""Sessions run steps: in this process with our own ``get``, or through a Dask client.

A session owns the chunks of weights and state between steps. Both kinds run the
same tasks on the same plan, so they make the same bits.
"""

from __future__ import annotations

import uuid
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from dask.delayed import Delayed

from oocdl.augmentation.preparation import Preparation
from oocdl.config import Settings
from oocdl.engines.engine import get_engine
from oocdl.errors import InputError
from oocdl.events import ProcessLook
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import Region
from oocdl.host.heap import give_back_freed_memory, trim
from oocdl.host.main_heap import MainHeapThreads
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.machine import Machine, discards_old_weights
from oocdl.planning.passes import PassInfo
from oocdl.planning.task_key import DaskKey, TaskKey, dask_key
from oocdl.runtime import execute, weight_io
from oocdl.runtime.dask_private import List, Task, TaskRef
from oocdl.runtime.inputs import Kept, sources_of
from oocdl.runtime.measured import Measured, Moved
from oocdl.runtime.scheduler import get
from oocdl.runtime.trace import Recording, write_trace
from oocdl.storage.cache.chunk import Chunk, home, use
from oocdl.storage.dataset.dataset import Dataset
from oocdl.storage.run.run_store import RunStore

Deliver = Callable[[str, str, Region, Array, PassInfo], None]
Scheduler = Callable[..., Any]
STEPS_BEFORE = 2
"""Steps before the one that is traced: the first also compiles programs and makes files of the spill."""


class Held(AbstractContextManager["Held"]):
    """Runs steps, and holds the chunks of weights and state between passes, here or elsewhere."""

    spent: bool = False
    """Whether a step has failed that had used up what it started from: there is nothing to commit."""
    told: bool = False
    """Whether the user knows that a guard withholds memory."""
    tick: Callable[[], None] | None = None
    """Called about once a second while a pass runs, by the thread that runs it."""

    def tell(self, notice: str | None) -> None:
        """Tell the user what a guard has noticed: once, however many of them notice how much."""
        if notice is not None and not self.told:
            self.told = True
            warnings.warn(notice, RuntimeWarning, stacklevel=3)

    @abstractmethod
    def whole_step(self) -> AbstractContextManager[None]:
        """All passes of a step or none: if one fails, what is held is as it was before the first."""

    @abstractmethod
    def load(self, plan_id: str, read: weight_io.Read) -> None:
        """Load weights and state, as ``read`` gives them."""

    @abstractmethod
    def run_pass(self, plan_id: str, info: PassInfo) -> dict[str, float]:
        """Run one pass; returns the scalar outputs (the loss and its parts) by value name."""

    @abstractmethod
    def commit(self, store: RunStore, plan_id: str, meta: Mapping[str, object]) -> None:
        """Write weights and state to the run."""

    @abstractmethod
    def moved(self) -> Moved:
        """Return the bytes moved since the session began."""

    @abstractmethod
    def looks(self) -> tuple[ProcessLook, ...]:
        """Return the state of each process; workers that do not answer in time are left out."""

    def newcomers(self) -> int:
        """Return the number of workers that have come and will take part; a single process has none."""
        return 0

    def gather_again(self) -> int:
        """Begin anew, at the last commit, with the workers that are there; returns their number.

        A single process loses none.
        """
        raise AssertionError("a single process has no workers to lose")

    @abstractmethod
    def measured(self) -> Measured:
        """Return the cost of its tasks."""

    @abstractmethod
    def start_recording(self) -> None:
        """Begin to record what tasks do in each process, for a trace."""

    @abstractmethod
    def stop_recording(self) -> list[Recording]:
        """Return what each process has recorded since then."""


@dataclass(eq=False)
class Session(Held):
    """Runs steps of one run in this process. Use as a context manager."""

    compiled: Mapping[str, CompiledPass]
    """Plan id -> pass."""
    dataset: Dataset
    preparation: Preparation
    machine: Machine
    spill: Path
    deliver: Deliver | None = None
    watched: frozenset[str] = frozenset()
    scheduler: Scheduler | None = None
    """A Dask ``get``; None: our own."""
    most_bytes: int | None = None
    """Maximum memory worth taking by arrays and programs; None: all that the machine gives."""
    kept_bytes: int = 0
    """Freed memory beyond that which is worth keeping, where there is room for it."""
    held: dict[TaskKey, Chunk] = field(default_factory=dict)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    started: dict[TaskKey, Chunk] | None = None
    """Chunks that were held when the step under way began."""

    def __enter__(self) -> Session:
        with ExitStack() as stack:  # what has been opened closes if the rest fails
            self._open(stack)
            self._opened = stack.pop_all()
        return self

    def _open(self, stack: ExitStack) -> None:
        together = max(compiled.plan.threads for compiled in self.compiled.values())
        self.machine = replace(self.machine, together=together)
        room = self.machine.room_bytes(compiled.plan for compiled in self.compiled.values())
        used = room if self.most_bytes is None else min(room, self.most_bytes)
        stack.callback(give_back_freed_memory)
        before, kept = home(), Kept(self.machine.batch_cache_bytes)
        heap, self.tier = execute.open_tier(self.machine, used, self.spill, min(self.kept_bytes, room - used))
        stack.callback(self.tier.close)
        stack.callback(use, before)
        data = self.dataset, self.preparation, kept
        self.context = execute.Context(
            {name: compiled.graph for name, compiled in self.compiled.items()},
            {
                name: sources_of(name, one.plan.factored, one.feeds, one.labels, *data)
                for name, one in self.compiled.items()
            },
            get_engine(self.machine.engine),
            self.tier,
            heap,
            self.deliver,
            watched_results(self.compiled, self.watched),
        )
        execute.register(self.run_id, self.context)
        stack.callback(execute.forget, self.run_id)
        self.pool = MainHeapThreads(self.machine.programs + 1)
        stack.callback(self.pool.shutdown)

    def __exit__(self, *_: object) -> None:
        with self._opened:
            self.pool.shutdown()
            self.held.clear()

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        before, pieces = self.held, len(self.held)
        self.started = before
        try:
            yield
        except BaseException:
            self.held, self.spent = before, len(before) < pieces
            raise
        finally:
            self.started = None

    def load(self, plan_id: str, read: weight_io.Read) -> None:
        compiled = self.compiled[plan_id]
        self.held = weight_io.load(compiled.pieces, compiled.plan.factored, read, self.tier)
        trim()  # what was read from files went through the heap

    def run_pass(self, plan_id: str, info: PassInfo) -> dict[str, float]:
        compiled = self.compiled[plan_id]
        graph = compiled.graph
        self.tier.renew((self.held[key], graph.input_uses.get(key, ())) for key in graph.inputs)
        updated = compiled.plan.factored.graph.updates
        large = discards_old_weights(compiled.plan, self.machine)
        tasks: dict[Any, Any] = {}
        for key in graph.inputs:
            take = self._take if large and key.value in updated else self.held.__getitem__
            tasks[key] = Task(key, take, key)
        tasks |= execute.pass_tasks(graph, self.run_id, plan_id, info)
        run = self.scheduler or get
        ours = {"workers": self.machine.programs + 1, "pool": self.pool, "tick": self.tick}
        options: dict[str, Any] = ours if run is get else {}
        self.context.begin_pass(plan_id)
        results = run(tasks, list(graph.outputs), **options)
        del tasks
        self.context.end_pass(plan_id)
        made = dict(zip(graph.outputs, results, strict=True))
        self.held = weight_io.after_pass(compiled.plan.factored, graph.replaced, made, self.held)
        self.tell(self.context.heap.notice)
        return {name: float(made[key].copy()) for name, key in scalar_keys(compiled).items()}

    def _take(self, key: TaskKey) -> Chunk:
        """A chunk that is gone with its last reader: nothing else holds it, the step's beginning included."""
        chunk = self.held.pop(key)
        if self.started is not None:  # another mapping from the second pass of a step on
            self.started.pop(key, None)
        return chunk

    def commit(self, store: RunStore, plan_id: str, meta: Mapping[str, object]) -> None:
        weight_io.commit(store, self.compiled[plan_id], self.held, self.tier, meta)

    def moved(self) -> Moved:
        return self.context.moved(self.machine.base_bytes)

    def looks(self) -> tuple[ProcessLook, ...]:
        return (self.context.look(self.machine.threads, self.machine.base_bytes),)

    def measured(self) -> Measured:
        return self.context.measured

    def start_recording(self) -> None:
        execute.start_recording(self.run_id)

    def stop_recording(self) -> list[Recording]:
        return [execute.stop_recording(self.run_id)]


class StepTrace:
    """Records one step of a run of ``total`` steps, of which ``done`` are done, and writes it to ``path``.

    The third of those that are left, or the last. ``names``: layer -> what it is called. Without a path
    nothing happens. Raises InputError if no step is left.
    """

    def __init__(self, path: Path | None, done: int, total: int, names: Mapping[str, str]) -> None:
        if path is not None and done >= total:
            raise InputError(f"trace: all {done} steps are done; ask for more of them, or resume='restart'")
        self._path, self._names = path, names
        self._number = min(done + STEPS_BEFORE, total - 1)

    def begin(self, number: int, session: Held) -> None:
        """Step ``number`` (from 0) begins."""
        if self._path is not None and number == self._number:
            session.start_recording()

    def end(self, number: int, session: Held, row: Mapping[str, Any]) -> None:
        """Step ``number`` is over; ``row`` is that of the history."""
        if self._path is not None and number == self._number:
            write_trace(self._path, session.stop_recording(), row, self._names)


def step_delayed(
    kinds: Mapping[str, CompiledPass],
    passes: Sequence[tuple[str, PassInfo]],
    dataset: Dataset,
    settings: Settings,
    machine: Machine,
) -> Delayed:
    """One step as a Delayed: opens a session of its own, loads the initial weights, runs, closes."""
    opened = ("session", 0)

    def start() -> str:
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory(dir=settings.spill_folder(Path(gettempdir()))))
            session = Session(kinds, dataset, Preparation(settings.scale or {}), machine, Path(folder))
            stack.enter_context(session).load("main", weight_io.initial(kinds["main"]))
            _alone[session.run_id] = session, stack.pop_all()
        return session.run_id

    tasks: dict[Any, Any] = {opened: Task(opened, start)}
    held = {key: dask_key(key, "start") for key in kinds[passes[0][0]].graph.inputs}
    for key, name in held.items():
        tasks[name] = Task(name, _load_piece, TaskRef(opened), key)
    losses: list[DaskKey] = []
    for number, (plan_id, info) in enumerate(passes):
        compiled = kinds[plan_id]
        names = {call.key: dask_key(call.key, f"pass {number}") for call in compiled.graph.calls} | held
        for key, task in execute.pass_tasks(compiled.graph, TaskRef(opened), plan_id, info).items():
            tasks[names[key]] = task.substitute(names, names[key])
        loss = compiled.loss
        assert loss is not None
        ((_, key),) = compiled.graph.pieces[compiled.plan.factored.stored(loss)]
        losses.append(names[key])
        made = {key: names[key] for key in compiled.graph.outputs}
        held = weight_io.after_pass(compiled.plan.factored, compiled.graph.replaced, made, held)
    value = ("loss", 0)
    references = [List(*(TaskRef(key) for key in keys)) for keys in (losses, held.values())]
    tasks[value] = Task(value, _finish, TaskRef(opened), *references)
    return Delayed(value, tasks)  # type: ignore[no-untyped-call]


_alone: dict[str, tuple[Session, ExitStack]] = {}
"""Sessions that a Delayed has opened, and what closes them."""


def _load_piece(run_id: str, key: TaskKey) -> Chunk:
    """A piece of the initial weights; the task of a Delayed's inputs."""
    return _alone[run_id][0].held[key]


def _finish(run_id: str, losses: list[Chunk], outputs: list[Chunk]) -> float:
    """The mean of the passes' losses; closes the session of a Delayed."""
    value = sum(float(loss.copy()) for loss in losses) / len(losses)
    _alone.pop(run_id)[1].close()
    return value


def scalar_keys(compiled: CompiledPass) -> dict[str, TaskKey]:
    """The keys of the graph's outputs of shape (), by value name."""
    factored = compiled.plan.factored
    found: dict[str, TaskKey] = {}
    for name in factored.graph.outputs:
        if factored.graph.values[name].shape == ():
            ((_, found[name]),) = compiled.graph.pieces[factored.stored(name)]
    return found


def watched_values(compiled: CompiledPass, watched: Collection[str]) -> list[str]:
    """Return those of these values, by their stored names, that the pass has as results."""
    if not watched:
        return []
    factored = compiled.plan.factored
    return sorted({factored.stored(name) for name in factored.graph.outputs}.intersection(watched))


def watched_results(
    compiled: Mapping[str, CompiledPass], watched: Collection[str]
) -> dict[str, frozenset[TaskKey]]:
    """Return, by plan id, the keys of all pieces of these values, by their stored names."""
    return {
        name: frozenset(
            key for value in watched_values(one, watched) for _, key in one.graph.pieces.get(value, ())
        )
        for name, one in compiled.items()
    }
