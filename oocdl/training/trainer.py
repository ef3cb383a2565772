"""``fit``, ``plan`` and ``open``: checks what is given, opens the run directory and trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from oocdl.config import OPTIONS
from oocdl.dashboard import page_process
from oocdl.dashboard.live_log import LiveLog
from oocdl.errors import InputError, ModelWarning, StoreError
from oocdl.events import Listener, Notice
from oocdl.host.limits import check_budget
from oocdl.host.paths import path_of
from oocdl.ops.optimizers import Optimizer
from oocdl.ops.schedules import Rate
from oocdl.planning.machine_facts import as_one, machine_facts
from oocdl.pytorch.door import Asked
from oocdl.report.disk_check import check_start
from oocdl.report.notebook import progress_here
from oocdl.report.plan_view import Plan
from oocdl.report.progress import Progress
from oocdl.runtime.trace import checked_path
from oocdl.storage.run.run_store import RunStore
from oocdl.storage.run.sealed_files import understood
from oocdl.training import resume as resuming
from oocdl.training.arguments import check_call, check_seconds
from oocdl.training.client_workers import WAIT_SECONDS, Workers, workers_of
from oocdl.training.from_module import name_in_run, planned_file, trained_file
from oocdl.training.job import Job, check_job, job_of
from oocdl.training.loop import Trainer
from oocdl.training.measuring import measured_before
from oocdl.training.run import Run
from oocdl.training.signature import LossLike, Names, Size, like, public


def open(workdir: str | Path) -> Run:
    """Open a run that is there, finished or not. Raises StoreError if there is none in ``workdir``."""
    return Run(path_of("workdir", workdir))


@public
def fit(
    model: Any,
    dataset: Any,
    *,
    loss: LossLike = "cross_entropy",
    optimizer: str | Optimizer = "adam",
    lr: Rate | None = None,
    epochs: int = 1,
    steps: int | None = None,
    batch_size: int = 1,
    accumulate: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    inputs: Mapping[str, str] | None = None,
    targets: Mapping[str, str] | None = None,
    dims: Mapping[str, int] | None = None,
    scale: Mapping[str, float] | None = None,
    logits: Literal["strict", "auto"] = "strict",
    dynamic: str | Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    verify: bool = True,
    allow_missing_chunks: bool = True,
    strict: bool = False,
    memory: Size | None = None,
    disk: Size | None = None,
    spill: str | Path | None = None,
    spill_dtype: Literal["bfloat16"] | None = None,
    parallel: Literal["auto"] | Mapping[str, int | Sequence[int]] = "auto",
    threads: int | None = None,
    engine: str = "auto",
    precision: Literal["float32", "bfloat16", "float64"] = "float32",
    freeze: Names = (),
    keep: Names = (),
    commit_seconds: float = 30.0,
    workdir: str | Path | None = None,
    resume: bool | Literal["restart"] = True,
    replan: bool = False,
    plan: Plan | str | Path | None = None,
    client: Any = None,
    wait_seconds: float = WAIT_SECONDS,
    scheduler: Callable[..., Any] | None = None,
    callbacks: Sequence[Listener] = (),
    progress: bool = True,
    trace: str | Path | None = None,
    dashboard: bool | int = False,
) -> Run:
    """Train a network on a dataset within a memory budget, exactly as in-core training would.

    Parameters
    ----------
    model
        Path of an ONNX file, whose batch and spatial sizes are re-bound to the dataset; or a
        ``torch.nn.Module``, exported as ``from_torch`` does, into the run directory. It is trained in the
        modes of its parts, and only read: ``Run.load_into`` puts the trained weights into it.
    dataset
        A Zarr group (path, store or group) or an HDF5 file; arrays have the sample axis first. A missing
        channel axis of size one is added.
    loss
        What is minimized. "cross_entropy", "dice", "dice_ce", "bce", "mse", "l1" or "ctc"; one of your own by
        its name (``oocdl.losses.register``); an object of ``oocdl.losses``, which has class weights and other
        fields; an ONNX file of (prediction, target) that gives one number; or a mapping output -> loss or
        (loss, weight).
    optimizer
        What makes the updates. "sgd", "adam", "adamw", one of your own by its name
        (``oocdl.optim.register``), or an object of ``oocdl.optim``, which has momentum, weight decay,
        clipping and other fields.
    lr
        Learning rate of an optimizer that is given by name; default: 0.01 of "sgd", 0.001 of others. It is a
        number, a schedule of ``oocdl.optim``, or any function of the step, from 0.
    epochs
        Epochs of the whole run.
    steps
        Steps of the whole run, instead of its epochs. A step is one update.
    batch_size
        Samples that go through the network at once.
    accumulate
        Passes of one step, over a batch each: an update is made by the mean of their gradients.
    shuffle
        Draw samples in a new order each epoch.
    seed
        Seed of shuffling and dropout.
    inputs
        Model input -> dataset array, where their names differ.
    targets
        Model output -> dataset array that it is compared with, where it is not the one that is left.
    dims
        Open dimension of the model -> its size, where the dataset does not tell.
    scale
        Dataset array -> factor that its values are multiplied by.
    logits
        "auto" trains without a final Softmax or Sigmoid, which the losses contain.
    dynamic
        Axes of a module's inputs whose sizes stay open for predictions: "space", "batch", numbers of axes, or
        these by input; default: all of which the module is free.
    verify
        Compare a module with the file that it becomes, by numbers; False trusts the exporter, and is noted.
    allow_missing_chunks
        Chunks that the dataset does not store are their fill value, as Zarr says; False refuses them.
    strict
        Refuse a model in which something looks wrong.
    memory
        Memory budget of the process, such as "2GiB"; default: a safe share of what it may use. With a client
        it is that of each worker process, by default what the workers may use; this process is beside it.
    disk
        Limit of spill and run directory together, such as "50GiB"; default: what is free.
    spill
        Folder for what does not fit into memory; default: $OOCDL_SPILL, or in the run.
    spill_dtype
        "bfloat16": activations may be rounded to 16 bits between layers if that is faster.
    parallel
        At least these cuts: ``{"batch": 2, "space": (3, 2, 1), "channels": 2}``.
    threads
        Compute threads; default: all cores.
    engine
        "torch", "onnxruntime", "auto" (torch if it is installed), or on a GPU "torch:cuda", "torch:cuda:1".
    precision
        "float32", "float64", or "bfloat16" (of convolutions and products).
    freeze
        Weights to leave as they are, by names or patterns such as "encoder.*".
    keep
        Activations, or gradients as "grad/<weight>", of the last step to leave in the run (``Run.kept``).
    commit_seconds
        At most so many seconds of work are ever lost.
    workdir
        The run directory, made if it is not there; default: <model>.run beside the file, or <Class>.run in
        the current folder for a module.
    resume
        Go on with the run that is there (or return it if it is finished); False refuses if there is one,
        "restart" starts anew. A run of a module goes on with the weights of the run, whatever those of the
        module are now. More ``epochs`` or ``steps`` extend a run. The learning rate has to be as it was at
        the steps that are done; ``oocdl.optim.Then`` lets another follow.
    replan
        Plan anew on resume, which changes rounding.
    plan
        A ``Plan``, or the directory of another run, whose cuts to repeat: the same bits, on any number of
        workers.
    client
        A ``distributed.Client`` whose workers train, a Dask cluster, the address of a scheduler
        ("tcp://..") or the path of a scheduler file; None: this process trains. Workers may come and go:
        where some are lost, the run goes on from its last commit, with the same bits; where all are, it waits
        for ``wait_seconds``, then ends with ResourceError, resumable.
    wait_seconds
        Wait so long for the first worker of a client.
    scheduler
        A Dask ``get`` such as ``dask.threaded.get`` for a run in this process; None: oocdl's own.
    callbacks
        Callables that take one event (``oocdl.events``).
    progress
        Show progress: a live line on a terminal, else lines of text.
    trace
        File to write a trace of one step to, for ui.perfetto.dev (Chrome's trace event format). It is the
        third step of this call, or the last if there are fewer. Results are the same.
    dashboard
        Show the run live, on a page whose address is told; a number is its port. It is served by a process
        of its own, whose memory is beside the budget; it ends with the run, and ``oocdl dashboard RUN`` shows
        it again. With a client the page is in Dask's dashboard always, and its address is told with True.

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
    options = {name: value for name, value in locals().items() if name in OPTIONS}
    flags = {"replan": replan, "progress": progress, "dashboard": dashboard}
    place = check_call(workdir, scheduler, callbacks, resume=resume, **flags)
    check_seconds("wait_seconds", wait_seconds)
    target = None if trace is None else checked_path(trace)
    given = None if plan is None else resuming.given_plan(plan)
    with ExitStack() as stack:
        shown = (stack.enter_context(progress_here(0)),) if progress else ()
        listeners = [*callbacks, *shown]
        file = trained_file(model, dataset, options, Asked(dynamic, verify), place, resume)
        path, folder = stack.enter_context(file)
        if client is not None:  # before workers are waited for, which may take a day
            check_job(path, dataset, options)
        workers = stack.enter_context(workers_of(client, wait_seconds, _notices(listeners)))
        crew, options["memory"] = (None, memory) if workers is None else workers.muster(memory, engine)
        job = job_of(path, dataset, options, crew)
        folder = Path(folder) if folder is not None else job.model.path.with_suffix(".run")
        listeners.append(stack.enter_context(LiveLog(folder)))
        own = workers, scheduler, listeners, False, target, dashboard
        return train(job, folder, resume, replan, given, *own)


def _notices(listeners: Sequence[Listener]) -> Callable[[str], None]:
    def say(text: str) -> None:
        for listener in listeners:
            listener(Notice(text))

    return say


@like(fit)
def plan(model: Any, dataset: Any, **options: Any) -> Plan:
    """Return what ``fit`` with the same arguments would do and need; nothing runs.

    Options that do not change a plan, such as ``workdir``, are not looked at. Raises what ``fit`` raises for
    a model, dataset, option or budget.

    >>> print(oocdl.plan("unet.onnx", "brain.zarr", memory="2GiB"))  # doctest: +SKIP
    """
    asked = Asked(options["dynamic"], options["verify"])
    options = {name: options[name] for name in OPTIONS}
    with planned_file(model, dataset, options, asked) as path:
        return job_of(path, dataset, options).plan()


def train(
    job: Job,
    workdir: str | Path | None = None,
    resume: bool | str = True,
    replan: bool = False,
    given: Mapping[str, Any] | None = None,
    workers: Workers | None = None,
    scheduler: Callable[..., Any] | None = None,
    callbacks: Sequence[Listener] = (),
    progress: bool = True,
    trace: Path | None = None,
    dashboard: bool | int = False,
) -> Run:
    """What ``fit`` does once it knows the job; tests give theirs another ``machine``."""
    if workers is None:  # else it is what each worker may use that counts
        check_budget(job.settings.memory_bytes)
    folder = Path(workdir) if workdir is not None else job.model.path.with_suffix(".run")
    with ExitStack() as stack:
        say = _notices(callbacks) if workers is None else None
        machine = as_one([machine_facts(job.machine.engine)] if workers is None else workers.machines())
        store, made = _open_store(stack, folder, job, resume, replan, given, say, machine)
        if progress:
            callbacks = [*callbacks, stack.enter_context(progress_here(job.settings.memory_bytes))]
        elif not any(isinstance(listener, Progress) for listener in callbacks):
            _warn(made)
        callbacks = _with_page(stack, folder, callbacks, workers, dashboard)
        Trainer(job, store, made, callbacks, workers, scheduler, trace).run()
    return Run(folder.absolute(), made)


def _with_page(
    stack: ExitStack,
    folder: Path,
    listeners: Sequence[Listener],
    workers: Workers | None,
    dashboard: bool | int,
) -> Sequence[Listener]:
    """Show the run, on Dask's dashboard or if asked by a process of its own; returns all its listeners."""
    say = _notices(listeners)
    if workers is not None:
        return [*listeners, stack.enter_context(workers.page(folder.absolute(), say, bool(dashboard)))]
    if dashboard:
        stack.enter_context(page_process.shown(folder, say, 0 if dashboard is True else dashboard))
    return listeners


def _open_store(
    stack: ExitStack,
    folder: Path,
    job: Job,
    resume: bool | str,
    replan: bool,
    given: Mapping[str, Any] | None,
    say: Callable[[str], None] | None,
    machine: Mapping[str, str],
) -> tuple[RunStore, Plan]:
    """Lock the run directory, a new one or one that this job may go on with; returns it and its plan.

    A new run is planned first: a refused one leaves nothing behind, and an old run as it was. ``given`` is
    the plan to repeat, if there is one; ``say`` is called with lines for the user, and is None where workers
    of a client compute and spill; ``machine`` is what results depend on of whoever computes.
    """
    exists = (folder / "run.json").is_file()
    if exists and resume is False:
        raise StoreError(f"a run is in {folder} already; pass resume=True to go on, or resume='restart'")
    identity = resuming.identity(job.model, job.binding, job.settings)
    facts = resuming.plan_facts(job.machine.engine, job.settings)
    frozen: Mapping[str, Any] | None = None
    lr = job.settings.optimizer.lr
    if not exists or resume == "restart":
        made = _planned_by(job, given)
        if given is None and say is not None and measured_before(made, folder, say):
            made = job.plan()
        check_start(made, folder, say is not None)
        meta = {
            "format": resuming.RUN_FORMAT,
            "model": str(name_in_run(job.model.path, folder)),
            "identity": identity,
            "settings": job.settings.stored(),
            "source": resuming.source_of(job.dataset),
        }
        store = stack.enter_context(RunStore.create(folder, meta, restart=resume == "restart"))
    else:
        store = stack.enter_context(resuming.open_run(folder, identity, job.dataset.arrays, lr))
        with understood(folder):
            frozen = None if replan else resuming.read_plan(store, facts, machine)
            if frozen is not None:
                resuming.check_plan(given, frozen, "pass replan=True to repeat it, which changes rounding")
            made = job.plan(given if frozen is None else frozen)
        check_start(made, folder, say is not None)
    if frozen is None:
        resuming.write_plan(store, facts, machine, resuming.freeze(made.kinds))
    elif frozen.get("numerics") != resuming.numerics_of(made.kinds):
        raise StoreError(f"the plan of the run in {folder} is of another version of oocdl; pass replan=True")
    return store, made


def _planned_by(job: Job, given: Mapping[str, Any] | None) -> Plan:
    """The plan of a new run: by the cuts that are given, if there are any."""
    try:
        made = job.plan(given)
        resuming.check_plan(given, resuming.freeze(made.kinds), "leave it out")
    except InputError as error:
        if given is None:
            raise
        raise InputError("plan= gives the plan of another model, dataset or options; leave it out") from error
    return made


def _warn(plan: Plan) -> None:
    """Warn of what looks wrong in the model, where no progress is shown that would say it."""
    for remark in plan.trained.remarks:
        warnings.warn(f"{remark.text}: {remark.cure}", ModelWarning, stacklevel=5)
