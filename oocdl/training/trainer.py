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
        Path of an ONNX file, whose open sizes are bound to those of the dataset; or a ``torch.nn.Module``,
        which is exported into the run directory as ``from_torch`` does. A module is trained in the modes of
        its parts and only read: ``Run.load_into`` puts the trained weights into it.
    dataset
        A Zarr group (path, store or group) or an HDF5 file. The first axis of each array is that of the
        samples. A missing channel axis of size one is added.
    loss
        Loss to minimize: "cross_entropy", "dice", "dice_ce", "bce", "mse", "l1" or "ctc"; the name of a loss
        of your own (``oocdl.losses.register``); an object of ``oocdl.losses``, which has class weights and
        other fields; an ONNX file that computes one number from (prediction, target); or a mapping from
        output to loss or (loss, weight).
    optimizer
        Optimizer: "sgd", "adam" or "adamw"; the name of one of your own (``oocdl.optim.register``); or an
        object of ``oocdl.optim``, which has momentum, weight decay, clipping and other fields.
    lr
        Learning rate of an optimizer given by name; default: 0.01 for "sgd", 0.001 for others. A number, a
        schedule of ``oocdl.optim``, or any function of the step, which counts from 0.
    epochs
        Total number of epochs of the run.
    steps
        Total number of steps of the run, instead of epochs. A step is one update.
    batch_size
        Number of samples that go through the network at once.
    accumulate
        Number of batches per update, which uses the mean of their gradients.
    shuffle
        Shuffle the samples in each epoch.
    seed
        Seed for shuffling and dropout.
    inputs
        Mapping from model input to dataset array, where their names differ.
    targets
        Mapping from model output to the dataset array that holds its target; default: the remaining array.
    dims
        Mapping from open dimension of the model to its size, where the dataset does not determine it.
    scale
        Mapping from dataset array to the factor that multiplies its values.
    logits
        "auto" drops a final Softmax or Sigmoid, which the losses contain.
    dynamic
        Axes of a module's inputs whose sizes stay open for predictions: "space", "batch", axis numbers, or a
        mapping from input to these; default: every axis whose size the module does not fix.
    verify
        Compare a module numerically with its exported file; False trusts the exporter, and the run says so.
    allow_missing_chunks
        Read chunks that are not stored as their fill value, as Zarr defines; False refuses them.
    strict
        Refuse a model that looks wrong instead of warning.
    memory
        Memory budget of the process, such as "2GiB"; default: a safe share of what it may use. With a client,
        the budget of each worker process, by default what the workers may use; this process is not counted.
    disk
        Limit for spill and run directory together, such as "50GiB"; default: the free space.
    spill
        Folder for data that does not fit in memory; default: $OOCDL_SPILL, else inside the run.
    spill_dtype
        "bfloat16" allows rounding activations to 16 bits between layers where that is faster.
    parallel
        Minimum number of pieces per axis: ``{"batch": 2, "space": (3, 2, 1), "channels": 2}``.
    threads
        Compute threads; default: all cores.
    engine
        "torch", "onnxruntime", "auto" (torch if installed), or for a GPU "torch:cuda", "torch:cuda:1".
    precision
        "float32", "float64", or "bfloat16" (of convolutions and products).
    freeze
        Weights to leave unchanged, by name or by pattern such as "encoder.*".
    keep
        Activations, or gradients as "grad/<weight>", of the last step to keep in the run (``Run.kept``).
    commit_seconds
        Maximum seconds between commits.
    workdir
        The run directory, created if absent; default: <model>.run beside the file, or <Class>.run in the
        current folder for a module.
    resume
        Resume an existing run, or return it if it is finished; False refuses an existing run, "restart"
        starts over. A run of a module resumes with the run's own weights, whatever the module's are now. More
        ``epochs`` or ``steps`` extend a run. The learning rate of completed steps must be unchanged;
        ``oocdl.optim.Then`` appends another.
    replan
        Make a new plan on resume, which changes rounding.
    plan
        A ``Plan``, or the directory of another run, whose cuts are repeated: the same bits on any number of
        workers.
    client
        A ``distributed.Client`` whose workers train, a Dask cluster, the address of a scheduler
        ("tcp://..") or the path of a scheduler file; None: this process trains. Workers may come and go: if
        some are lost, the run continues from its last commit with the same bits; if all are, it waits for
        ``wait_seconds`` and then raises ResourceError, resumable.
    wait_seconds
        Maximum seconds to wait for the first worker of a client.
    scheduler
        A Dask ``get`` such as ``dask.threaded.get`` for a run in this process; None: oocdl's own.
    callbacks
        Callables that receive each event (``oocdl.events``).
    progress
        Show progress: a live line on a terminal, else lines of text.
    trace
        File for a trace of one step, for ui.perfetto.dev (Chrome's trace event format): the third step of
        this call, or the last if there are fewer. Results do not change.
    dashboard
        Show the run live on a page whose address is printed; a number is its port. A process of its own, not
        counted in the budget, serves it until the run ends; ``oocdl dashboard RUN`` shows it again. With a
        client the page is always in Dask's dashboard, and True prints its address.

    Returns
    -------
    The run, with all steps committed; ``Run.plan`` is the plan that it followed.

    The first lines of progress and ``oocdl.plan`` tell which parts of the model are trained, frozen, tied or
    constant. Where no progress is shown, anything that looks wrong is a ``ModelWarning`` with its cure.

    Raises
    ------
    InputError, DatasetError, ModelError, UnsupportedError, BudgetError, ResourceError, StoreError,
    NonFiniteError. Ctrl-C (``KeyboardInterrupt``), SIGTERM and SIGHUP (``SystemExit`` with code 143 or 129)
    first commit completed steps, in the main thread and unless the program has a handler of its own.

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
        path, folder, dataset = stack.enter_context(file)
        if client is not None:  # before workers are waited for, which may take a day
            dataset = check_job(path, dataset, options)
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
    """Return what ``fit`` with the same arguments would do and need, without running it.

    Options that do not change a plan, such as ``workdir``, are ignored. Raises what ``fit`` raises for a
    model, dataset, option or budget.

    >>> print(oocdl.plan("unet.onnx", "brain.zarr", memory="2GiB"))  # doctest: +SKIP
    """
    asked = Asked(options["dynamic"], options["verify"])
    options = {name: options[name] for name in OPTIONS}
    with planned_file(model, dataset, options, asked) as (path, data):
        return job_of(path, data, options).plan()


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
