"""``fit``, ``plan`` and ``open``: checks what is given, opens the run directory and trains."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from oocdl.config.options import LossLike, Size
from oocdl.config.settings import make_settings
from oocdl.dashboard import page_process
from oocdl.dashboard.live_log import LiveLog
from oocdl.errors import InputError, ModelWarning, StoreError
from oocdl.events import Acting, Listener, Notice
from oocdl.host.heap import lasting
from oocdl.host.limits import check_budget
from oocdl.host.paths import path_of
from oocdl.ops.optimizers import Optimizer
from oocdl.ops.schedules import Rate
from oocdl.planning.calibrate import known_rates
from oocdl.planning.cost_model import NOMINAL
from oocdl.planning.machine import Crew, as_one, machine_facts
from oocdl.planning.passes import VALIDATION
from oocdl.report.disk_check import check_start
from oocdl.report.notebook import progress_here
from oocdl.report.plan_view import Plan
from oocdl.report.progress import Progress
from oocdl.report.units import duration
from oocdl.storage.files import existing
from oocdl.storage.run.run_store import RunStore
from oocdl.storage.run.sealed_files import understood
from oocdl.training import resume as resuming
from oocdl.training.call import Call, FurtherOptions, Options, read_call
from oocdl.training.job import Job, job_of, planned_file, trained_file
from oocdl.training.loop import Trainer
from oocdl.training.metric_values import result_names
from oocdl.training.prediction.predictions import warn_of_predictions
from oocdl.training.preparing import Say, prepared
from oocdl.training.run import Run
from oocdl.training.signature import public

if TYPE_CHECKING:
    from oocdl.training.client_workers import Workers

LONG_RUN_SECONDS, MOST_MEASURING_SECONDS = 600.0, 600.0
"""Predicted seconds of a run beyond which half a minute of measuring is worth it; when that is given up."""
MEASURING_BYTES = 1 << 30
"""Budget beside which a process that measures finds room: it takes half of this at most."""
CODE = "import sys; from oocdl.planning.calibrate import rates_for as m; m(sys.argv[1])"


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
    memory: Size | None = None,
    threads: int | None = None,
    seed: int = 0,
    inputs: Mapping[str, str] | None = None,
    targets: Mapping[str, str] | None = None,
    workdir: str | Path | None = None,
    resume: bool | Literal["restart"] = True,
    client: Any = None,
    callbacks: Sequence[Listener] = (),
    progress: bool = True,
    dashboard: bool | int = False,
    **options: Unpack[FurtherOptions],
) -> Run:
    """Train a network on a dataset within a memory budget, exactly as in-core training would.

    Parameters
    ----------
    model
        Path of an ONNX file, whose open sizes are bound to those of the dataset; or a ``torch.nn.Module``,
        which is exported into the run directory as ``from_torch`` does. A module is trained in the modes of
        its parts and only read: ``Run.load_into`` puts the trained weights into it.
    dataset
        A Zarr group (path, store or group), an HDF5 file, or NumPy arrays by name. The first axis of each
        array is that of the samples; samples of different sizes stand in a group each. A missing channel axis
        of size one is added.

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
    call, given = read_call(
        loss=loss, optimizer=optimizer, lr=lr, epochs=epochs, steps=steps, batch_size=batch_size,
        accumulate=accumulate, memory=memory, threads=threads, seed=seed, inputs=inputs, targets=targets,
        workdir=workdir, resume=resume, client=client, callbacks=callbacks, progress=progress,
        dashboard=dashboard, **options,
    )  # fmt: skip
    settings, listeners = make_settings(**given), [*call.callbacks]
    with ExitStack() as stack:
        if call.progress:
            listeners.append(stack.enter_context(progress_here(0)))
        path, folder, data = stack.enter_context(trained_file(model, dataset, settings, call))
        workers: Workers | None = None

        def muster() -> tuple[Crew, int]:
            nonlocal workers
            # distributed takes 16 MiB, which a run in one process can use better.
            from oocdl.runtime.cluster.connecting import connected
            from oocdl.training import client_workers

            client = stack.enter_context(connected(call.client))
            seconds = call.wait_seconds, call.silent_seconds
            workers = client_workers.Workers(client, *seconds, _notices(listeners))
            return workers.muster(None if memory is None else settings.memory_bytes, settings.engine)

        job = job_of(path, data, settings, None if call.client is None else muster)
        folder = (folder or job.model.path.with_suffix(".run")).absolute()
        listeners.append(stack.enter_context(LiveLog(folder)))
        return train(job, replace(call, workdir=folder, callbacks=listeners), workers)


def _notices(listeners: Sequence[Listener]) -> Say:
    def say(text: str) -> None:
        for listener in listeners:
            listener(Notice(text))

    return say


@public
def plan(model: Any, dataset: Any, **options: Unpack[Options]) -> Plan:
    """Return what ``fit`` with the same arguments would do and need, without running it.

    It is the plan of this process: ``client`` is refused. Options that do not change a new plan, such as
    ``workdir``, are checked and ignored. Raises what ``fit`` raises for a model, dataset, option or budget.

    >>> print(oocdl.plan("unet.onnx", "brain.zarr", memory="2GiB"))  # doctest: +SKIP

    Parameters
    ----------
    model
        As in ``fit``.
    dataset
        As in ``fit``.
    """
    call, given = read_call(**options)
    if call.client is not None:
        raise InputError("oocdl.plan is of this process alone: leave client= out, or see oocdl.simulate")
    settings = make_settings(**given)
    with planned_file(model, dataset, settings, call.dynamic, call.verify) as (path, data), lasting():
        return _planned_by(job_of(path, data, settings), call.plan)


def train(job: Job, call: Call, workers: Workers | None = None) -> Run:
    """Do what ``fit`` does once it knows the job; tests give theirs another ``machine``."""
    if workers is None:  # else it is what each worker may use that counts
        check_budget(job.settings.memory_bytes)
    folder, say = call.workdir or job.model.path.with_suffix(".run"), _notices(call.callbacks)
    with ExitStack() as stack:
        machine = as_one([machine_facts(job.machine.engine)] if workers is None else workers.machines())
        store, made = _open_store(stack, folder, job, call, say if workers is None else None, machine)
        if not any(isinstance(listener, Progress) for listener in call.callbacks):
            for remark in made.trained.remarks:  # no progress is shown that would say it
                warnings.warn(f"{remark.text}: {remark.cure}", ModelWarning, stacklevel=4)
        if validations := made.of_role(VALIDATION):
            warn_of_predictions(made.kinds[validations[0]].plan.factored.graph, job.model)
        preparation = prepared(job.preparation, store, job.dataset, job.course.trained, say)
        if workers is not None:
            page = stack.enter_context(workers.page(folder.absolute(), say, bool(call.dashboard)))
            call = replace(call, callbacks=[*call.callbacks, page])
        elif call.dashboard:
            port = 0 if call.dashboard is True else call.dashboard
            stack.enter_context(page_process.shown(folder, say, port))
        Trainer(replace(job, preparation=preparation), store, made, call, workers).run()
    return Run(folder.absolute(), made)


def _open_store(
    stack: ExitStack, folder: Path, job: Job, call: Call, say: Say | None, machine: Mapping[str, str]
) -> tuple[RunStore, Plan]:
    """Lock the run directory, a new one or one that this job may go on with; returns it and its plan.

    A new run is planned first: a refused one leaves nothing behind. ``say`` is None where workers spill.
    """
    resume, given = call.resume, call.plan
    exists = (folder / "run.json").is_file()
    if exists and resume is False:
        raise StoreError(f"a run is in {folder} already; pass resume=True to go on, or resume='restart'")
    acting = [one for one in call.callbacks if isinstance(one, Acting)]
    kept = sum(one.versions(job.course.validations) for one in acting)
    identity = resuming.identity(job.model, job.binding, job.settings, job.validation_binding, job.sized)
    facts = {"engine": job.machine.engine, **resuming.fixed(job.settings, "plan")}
    frozen: Mapping[str, Any] | None = None
    if not exists or resume == "restart":
        made = _checked(acting, _planned_by(job, given))
        if given is None and say is not None and _measured_before(made, folder, say):
            made = job.plan()
        check_start(made, folder, say is not None, kept)
        model = job.model.path  # one that lies in the run goes with it wherever it is moved
        meta = {"format": resuming.RUN_FORMAT, "identity": identity, "settings": job.settings.stored()}
        meta |= {"model": model.name if model.parent == folder.absolute() else str(model)}
        meta |= {"source": resuming.source_of(job.dataset)}
        store = stack.enter_context(RunStore.create(folder, meta, restart=resume == "restart"))
    else:
        store = stack.enter_context(RunStore.open(folder, writable=True))
        with understood(folder):
            resuming.check_run(store, identity, job.dataset.arrays, job.settings)
            frozen = None if call.replan else resuming.read_plan(store, facts, machine)
            if frozen is not None:
                resuming.check_plan(given, frozen, "pass replan=True to repeat it, which changes rounding")
            made = _checked(acting, job.plan(given if frozen is None else frozen))
        check_start(made, folder, say is not None, kept)
    if frozen is None:
        plans = resuming.freeze(made.kinds)
        store.write_sealed("plan.json", {"facts": facts, "machine": dict(machine), **plans})
    elif frozen.get("numerics") != resuming.numerics_of(made.kinds):
        raise StoreError(f"the plan of the run in {folder} is of another version of oocdl; pass replan=True")
    return store, made


def _checked(acting: Sequence[Acting], made: Plan) -> Plan:
    for listener in acting:
        listener.check(result_names(made))
    return made


def _measured_before(plan: Plan, run: Path, say: Say) -> bool:
    """Measure in a process of its own, where the spill will be, if nobody has and the run is long."""
    seconds, engine = plan.seconds * plan.course.total_steps, plan.machine.engine
    off = os.environ.get("OOCDL_MEASURE", "") == "off"
    if off or seconds < LONG_RUN_SECONDS or known_rates(engine) is not NOMINAL:
        return False
    predicted = f"predicted to take {duration(seconds)} by nominal rates"
    if plan.settings.memory_bytes < MEASURING_BYTES:
        say(f"{predicted}; this budget has no room to measure: oocdl info --machine does it")
        return False
    say(f"{predicted}; measuring this machine first, once, half a minute (OOCDL_MEASURE=off does without)")
    folder = existing(plan.settings.spill_folder(run / "spill"))
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    command, env = [sys.executable, "-c", CODE, engine], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": MOST_MEASURING_SECONDS}
    try:
        subprocess.run(command, cwd=folder, env=env, check=True, **how)
    except (OSError, subprocess.SubprocessError) as error:
        told = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        say(f"this machine could not be measured, the plan is by nominal rates: {told}")
        return False
    return True


def _planned_by(job: Job, given: Mapping[str, Any] | None) -> Plan:
    try:
        made = job.plan(given)
        resuming.check_plan(given, resuming.freeze(made.kinds), "leave it out")
    except InputError as error:
        if given is None:
            raise
        raise InputError("plan= gives the plan of another model, dataset or options; leave it out") from error
    return made
