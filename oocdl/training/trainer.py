"""``fit``, ``plan`` and ``open``; ``Trainer`` walks through the steps of a run, with events and commits."""

from __future__ import annotations

import importlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from oocdl.errors import InputError, ModelWarning, NonFiniteError, StoreError
from oocdl.events import Committed, Event, Listener, RunFinished, RunStarted, RunStopped, StepDone
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import Region, as_slices, region_shape
from oocdl.host.heap import lasting
from oocdl.host.limits import check_budget
from oocdl.host.paths import path_of
from oocdl.planning.passes import MAIN, PassInfo, Step
from oocdl.report.disk_check import check_commit, check_start
from oocdl.report.plan_view import Plan
from oocdl.report.progress import Progress, show_progress
from oocdl.report.run_report import write_report
from oocdl.runtime import weight_io
from oocdl.runtime.inputs import own_regions
from oocdl.runtime.session import Held, Moved, Session
from oocdl.runtime.trace import StepTrace, checked_path
from oocdl.storage.files import reporting
from oocdl.storage.run.run_store import RunStore
from oocdl.training import resume as resuming
from oocdl.training.arguments import check_call
from oocdl.training.from_module import name_in_run, planned_file, trained_file
from oocdl.training.job import Job, job_of
from oocdl.training.run import Run
from oocdl.training.signals import Signals, reason_of


def _cluster() -> Any:
    # distributed takes 16 MiB, which a run in one process can use better.
    return importlib.import_module("oocdl.runtime.cluster")


def plan(model: Any, dataset: Any, **options: Any) -> Plan:
    """Return what ``fit`` with the same arguments would do and need; nothing runs.

    ``options`` are those of ``fit``; the ones that do not change the plan are ignored. Raises what ``fit``
    raises for a model, dataset, option or budget.

    >>> print(oocdl.plan("unet.onnx", "brain.zarr", memory="2GiB"))  # doctest: +SKIP
    """
    for name in ("workdir", "resume", "callbacks", "progress", "client", "scheduler", "replan", "trace"):
        options.pop(name, None)
    with planned_file(model, dataset, options) as path:
        return job_of(path, dataset, options).plan()


def open(workdir: str | Path) -> Run:
    """Open a run that is there, finished or not. Raises StoreError if there is none in ``workdir``."""
    return Run(path_of("workdir", workdir))


def fit(
    model: Any,
    dataset: Any,
    *,
    workdir: str | Path | None = None,
    resume: bool | str = True,
    replan: bool = False,
    client: Any = None,
    scheduler: Callable[..., Any] | None = None,
    callbacks: Sequence[Listener] = (),
    progress: bool = True,
    trace: str | Path | None = None,
    **options: Any,
) -> Run:
    """Train a network on a dataset within a memory budget, exactly as in-core training would.

    Parameters
    ----------
    model
        Path of an ONNX file, whose batch and spatial sizes are re-bound to the dataset; or a
        ``torch.nn.Module``, exported as ``from_torch`` does, into the run directory. It is trained in the
        modes of its parts, and only read: ``Run.load_into`` puts the trained weights into it.
    dataset
        A Zarr group (path, store or group) or an HDF5 file; arrays have the sample axis first.
        A missing channel axis of size one is added. Chunks that are not stored are their fill value;
        ``allow_missing_chunks=False`` refuses them.
    workdir
        The run directory, made if it is not there; default ``<model>.run`` beside the file, or
        ``<Class>.run`` in the current folder for a module.
    resume, replan
        ``resume=True`` goes on with the run that is there (or returns it if it is finished), False refuses
        if there is one, ``"restart"`` starts anew. ``replan=True`` plans anew, although it changes rounding.
        A run of a module goes on with the weights of the run, whatever those of the module are now.
    client, scheduler
        A ``distributed.Client`` whose workers train; None: this process does, with ``scheduler``, a Dask
        ``get`` such as ``dask.threaded.get``; None: oocdl's own.
    callbacks, progress
        Callables that take one event (``oocdl.events``). Progress is a live line on a terminal, else text.
    trace
        A file to write a trace of one step to, which opens in ui.perfetto.dev (Chrome's trace event format):
        the third step of this call, or the last if there are fewer. Results are the same.
    options
        ``loss``: "cross_entropy", "dice", "dice_ce", "bce", "mse", "l1", "ctc", a loss object, an ONNX file
        of (prediction, target) that gives one number, or a mapping output -> (loss, weight).
        ``optimizer``: "sgd", "adam", "adamw", one of your own by its
        name (``oocdl.optim.register``, ``oocdl.losses.register``) or an ``oocdl.optim`` object;
        ``lr`` for one given by name. ``epochs``, ``steps`` (totals), ``batch_size``, ``shuffle``, ``seed``.
        ``accumulate=k``: a step (one update) is k passes over a batch each, by the mean of their gradients.
        ``inputs``, ``targets``: model name -> dataset array. ``dims``, ``scale`` (array -> factor),
        ``logits="auto"`` strips a final Softmax. ``strict=True``: a model that looks wrong is refused.
        ``memory``: budget of the process ("2GiB" or bytes).
        ``spill``: folder for what does not fit (default: ``$OOCDL_SPILL``, or in the run). ``disk``: limit of
        spill and run directory together, at most what is free. ``spill_dtype="bfloat16"``: activations may be
        rounded to 16 bits between layers if that is faster. ``parallel``: at least these cuts,
        ``{"batch": 2, "space": (3, 2, 1), "channels": 2}``. ``engine``: "torch", "onnxruntime", "auto" (torch
        if it is installed), or on a GPU "torch:cuda", "torch:cuda:1". ``precision``: "float32", "float64", or
        "bfloat16" (of convolutions and products). ``threads``, ``freeze`` (patterns), ``keep``,
        ``commit_seconds``.

    Returns
    -------
    The run, with all steps committed; ``Run.plan`` is the plan that it was trained by.

    What of the model is trained, frozen, tied or constant stands in the first lines of progress and in
    ``oocdl.plan``. What looks wrong there, with its cure, is a ``ModelWarning`` where no progress is shown.

    Raises
    ------
    InputError, DatasetError, ModelError, UnsupportedError, BudgetError, ResourceError, StoreError,
    NonFiniteError. Ctrl-C (``KeyboardInterrupt``), SIGTERM and SIGHUP (``SystemExit`` with code 143 or 129)
    commit the steps that are done first, in the main thread and where the program has no handler of its own.

    Examples
    --------
    >>> run = oocdl.fit("unet.onnx", "brain.zarr", loss="dice_ce", memory="2GiB")  # doctest: +SKIP
    """
    place = check_call(workdir, client, scheduler, callbacks, resume=resume, replan=replan, progress=progress)
    target = None if trace is None else checked_path(trace)
    crew = () if client is None else _cluster().crew(client)
    with trained_file(model, dataset, options, place, resume) as (path, folder):
        job = job_of(path, dataset, options, crew)
        return train(job, folder, resume, replan, client, scheduler, callbacks, progress, target)


def train(
    job: Job,
    workdir: str | Path | None = None,
    resume: bool | str = True,
    replan: bool = False,
    client: Any = None,
    scheduler: Callable[..., Any] | None = None,
    callbacks: Sequence[Listener] = (),
    progress: bool = True,
    trace: Path | None = None,
) -> Run:
    """What ``fit`` does once it knows the job; tests give theirs another ``machine``."""
    if client is None:  # else it is what each worker may use that counts
        check_budget(job.settings.memory_bytes)
    folder = Path(workdir) if workdir is not None else job.model.path.with_suffix(".run")
    with ExitStack() as stack:
        store, made = _open_store(stack, folder, job, resume, replan, spills=client is None)
        if progress:
            callbacks = [*callbacks, stack.enter_context(show_progress(job.settings.memory_bytes))]
        elif not any(isinstance(listener, Progress) for listener in callbacks):
            _warn(made)
        Trainer(job, store, made, callbacks, client, scheduler, trace).run()
    return Run(folder.absolute(), made)


def _open_store(
    stack: ExitStack, folder: Path, job: Job, resume: bool | str, replan: bool, spills: bool
) -> tuple[RunStore, Plan]:
    """Lock the run directory, a new one or one that this job may go on with; returns it and its plan.

    A new run is planned first: a refused one leaves nothing behind, and an old run as it was.
    """
    exists = (folder / "run.json").is_file()
    if exists and resume is False:
        raise StoreError(f"a run is in {folder} already; pass resume=True to go on, or resume='restart'")
    identity = resuming.identity(job.model, job.binding, job.settings)
    facts = resuming.plan_facts(job.machine.engine, job.settings)
    frozen: Mapping[str, Any] | None = None
    if not exists or resume == "restart":
        made = job.plan()
        check_start(made, folder, spills)
        meta = {
            "format": resuming.RUN_FORMAT,
            "model": str(name_in_run(job.model.path, folder)),
            "identity": identity,
            "settings": job.settings.stored(),
        }
        store = stack.enter_context(RunStore.create(folder, meta, restart=resume == "restart"))
    else:
        store = stack.enter_context(resuming.open_run(folder, identity, job.dataset.arrays))
        frozen = None if replan else resuming.read_plan(store, facts)
        made = job.plan(frozen)
        check_start(made, folder, spills)
    if frozen is None:
        resuming.write_plan(store, facts, resuming.freeze(made.kinds))
    elif frozen["numerics"] != resuming.numerics_of(made.kinds):
        raise StoreError(f"the plan of the run in {folder} is of another version of oocdl; pass replan=True")
    return store, made


def _warn(plan: Plan) -> None:
    """Warn of what looks wrong in the model, where no progress is shown that would say it."""
    for remark in plan.trained.remarks:
        warnings.warn(f"{remark.text}: {remark.cure}", ModelWarning, stacklevel=4)


@dataclass(eq=False)
class Trainer:
    """Runs the steps of one ``fit``."""

    job: Job
    store: RunStore
    plan: Plan
    listeners: Sequence[Listener]
    client: Any
    scheduler: Callable[..., Any] | None
    trace: Path | None = None
    """File for the trace of a step; None: no step is traced."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """History rows of steps that are done and not committed yet."""
    kept: dict[str, zarr.Array[Any]] = field(default_factory=dict)
    """Arrays of this step for what ``keep`` names."""

    def __post_init__(self) -> None:
        self.compiled = self.plan.kinds
        self.course = self.job.course
        self.writing = threading.Lock()
        self.signals = Signals()

    def emit(self, event: Event) -> None:
        """Tell all listeners."""
        for listener in self.listeners:
            listener(event)

    def run(self) -> None:
        """Run all steps that are left."""
        started = time.monotonic()
        manifest = self.store.current()
        done = int(manifest.meta["step"]) if manifest else 0
        self.committed = done
        total = max(done, self.course.total_steps)
        trace = StepTrace(self.trace, done, total)
        notes = tuple(self.job.dataset.notes())
        self.emit(RunStarted(self.plan, str(self.store.path), total, done, notes))
        if done < total or manifest is None:
            with self.signals, self._session() as session:
                main = self.compiled[MAIN]
                with self.signals.allowed():
                    session.load(MAIN, self.store.read if manifest else weight_io.initial(main))
                if manifest is None:
                    self._commit(session, 0)
                try:
                    with lasting():
                        self._steps(session, done, trace)
                except (KeyboardInterrupt, SystemExit) as stop:
                    self._commit_done(session)
                    self.emit(RunStopped(reason_of(stop), str(self.store.path), self.committed))
                    raise
        self.emit(RunFinished(total, time.monotonic() - started))

    def _session(self) -> Held[Any]:
        settings = self.job.settings
        if self.client is not None:
            if settings.keep:
                raise InputError("keep is not available with a client; train in one process to keep values")
            made: Held[Any] = _cluster().ClusterSession(
                self.client, self.compiled, self.job.dataset, settings, self.job.machine.threads
            )
            return made
        spill = settings.spill_folder(self.store.path / "spill")
        watched = frozenset(
            c.plan.factored.stored(name) for c in self.compiled.values() for name in c.kept_values.values()
        )
        return Session(
            self.compiled,
            self.job.dataset,
            settings.scale or {},
            self.job.machine,
            spill,
            self._keep if watched else None,
            watched,
            self.scheduler,
            self.plan.most_bytes,
        )

    def _steps(self, session: Held[Any], done: int, trace: StepTrace) -> None:
        course, last_commit = self.course, time.monotonic()
        moved = session.moved()
        for step in course.steps_from(done):
            trace.begin(step.number, session)
            with session.whole_step():
                with self.signals.allowed():
                    row, moved = self._step(session, step, moved)
                self.rows.append(row)
            try:
                trace.end(step.number, session, row)
                with self.signals.allowed():
                    self.emit(StepDone(row))
            except BaseException:  # how a callback stops a run: what is done is kept
                self._commit_done(session)
                raise
            done = step.number + 1
            last = done == course.total_steps
            epoch_ends = done % course.steps_per_epoch == 0 and course.steps_per_epoch > 1
            if last or epoch_ends or time.monotonic() - last_commit > self.job.settings.commit_seconds:
                self._commit(session, done)
                last_commit = time.monotonic()
                self.signals.check()

    def _step(self, session: Held[Any], step: Step, before: Moved) -> tuple[dict[str, Any], Moved]:
        """Run one step; returns its row of the history, and what has been moved since the session began."""
        begun = time.monotonic()
        passes = self.course.passes_of(step)
        losses: list[dict[str, float]] = []
        for number, (plan_id, info) in enumerate(passes, 1):
            if number == len(passes):
                self._prepare_kept(plan_id, step.number)
            losses.append(self._losses(plan_id, session.run_pass(plan_id, info)))
            _check_loss(losses[-1]["loss"], step.number, info.indices)
        after = session.moved()
        row: dict[str, Any] = {"step": step.number + 1, "epoch": step.epoch}
        row |= {name: sum(found[name] for found in losses) / len(losses) for name in losses[0]}
        row |= {"lr": passes[0][1].scalars["lr"], "seconds": time.monotonic() - begun}
        for name, value in asdict(after).items():
            row[name] = value if name == "peak_bytes" else value - getattr(before, name)
        return row, after

    def _losses(self, plan_id: str, found: Mapping[str, float]) -> dict[str, float]:
        """Return the loss of a pass, and its parts if there are several, as the history names them."""
        compiled = self.compiled[plan_id]
        assert compiled.loss is not None
        losses = {"loss": found[compiled.loss]}
        if len(compiled.output_losses) > 1:
            losses |= {f"loss/{name}": found[value] for name, value in compiled.output_losses.items()}
        return losses

    def _commit_done(self, session: Held[Any]) -> None:
        if self.rows and not session.spent:
            self._commit(session, self.rows[-1]["step"])

    def _commit(self, session: Held[Any], step: int) -> None:
        check_commit(self.plan, self.store.path)
        self.store.append_history(self.rows)
        session.commit(self.store, MAIN, {"step": step, "steps": self.course.total_steps})
        self.rows, self.committed = [], step
        report = self.plan.report(session) if isinstance(session, Session) else None
        if report is not None:
            write_report(self.store.path, report)
        self.emit(Committed(step))

    def _prepare_kept(self, plan_id: str, step: int) -> None:
        """Make arrays for what ``keep`` names, of this step's shapes, with a chunk for each piece."""
        compiled = self.compiled[plan_id]
        factored = compiled.plan.factored
        for title, name in compiled.kept_values.items():
            value = factored.graph.values[name]
            regions = [region for region, _ in compiled.graph.pieces[factored.stored(name)]]
            chunks = weight_io.chunks_of(compiled, name, regions)
            with reporting(self.store.path / "kept"):
                self.kept[title] = self.store.keep(title, value.shape, value.dtype, chunks, step + 1)

    def _keep(self, plan_id: str, value: str, region: Region, array: Array, info: PassInfo) -> None:
        compiled = self.compiled[plan_id]
        factored = compiled.plan.factored
        for title, name in compiled.kept_values.items():
            if factored.stored(name) == value:
                for box, place in own_regions(factored.factors[name], region):
                    with self.writing, reporting(self.store.path / "kept"):  # pieces may share a chunk
                        self.kept[title][as_slices(box)] = np.reshape(array[place], region_shape(box))


def _check_loss(loss: float, step: int, rows: Sequence[int]) -> None:
    """Raise NonFiniteError, which names the rows of the dataset, if a loss is NaN or infinite."""
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"the loss of step {step + 1} is {loss} (dataset rows {list(rows)}); the run "
            "stays at its last commit; lower the learning rate, or look in these rows for extreme numbers "
            "and for samples all of whose labels are ignored"
        )
