"""The loop over the steps of a run, with events, history and commits; goes on where workers were lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import zarr

from oocdl import events
from oocdl.events import Event, Notice, Stop
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import Region, as_slices
from oocdl.host.heap import lasting
from oocdl.ops.param_groups import rates_of
from oocdl.ops.schedules import rate
from oocdl.planning.passes import MAIN, PassInfo, Step
from oocdl.report.disk_check import check_commit
from oocdl.report.plan_view import Plan
from oocdl.report.run_report import write_report
from oocdl.runtime import weight_io
from oocdl.runtime.checked_values import check_loss
from oocdl.runtime.lost import WorkersLost, check_losses
from oocdl.runtime.measured import MEMORY, Moved
from oocdl.runtime.session import Held, Session, StepTrace
from oocdl.storage.files import reporting
from oocdl.storage.run.run_store import RunStore
from oocdl.training.call import Call
from oocdl.training.job import Job
from oocdl.training.metric_values import NOTES, Gathered, Notes, mean_losses, metric_values
from oocdl.training.resume import noted_settings
from oocdl.training.signals import Signals, reason_of
from oocdl.training.versions import kept_steps

if TYPE_CHECKING:
    from oocdl.training.client_workers import Workers

LOOK_SECONDS, MOST_LOOK_SECONDS, LOOK_SHARE = 1.0, 5.0, 0.02
"""Minimum and maximum seconds between two ``StepRunning`` events; the share of time they may take."""


@dataclass(eq=False)
class Trainer:
    """Runs the steps of one ``fit``."""

    job: Job
    store: RunStore
    plan: Plan
    call: Call
    workers: Workers | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    """History rows of steps that are done and not committed yet."""
    kept: dict[str, zarr.Array[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.compiled = self.plan.kinds
        self.course, self.settings = self.job.course, self.job.settings.stored()
        self.gathered, self.writing, self.signals = Gathered(self.compiled), threading.Lock(), Signals()
        self.furthest = 0
        """Steps that were done, though some of them were lost with workers."""
        self.samples: tuple[int, ...] = ()
        """Dataset rows of the last pass of the last step that is done."""
        self.due: dict[str, Any] | None = None
        """Row of the last step, until its validation is done and listeners know of it."""
        self.is_committing = False
        """Whether a commit was begun, and has not ended well yet."""
        self.restored: int | None = None
        """Step whose weights the run predicts with; None: the last."""
        self.listeners = self.call.callbacks
        self.acting = [one for one in self.listeners if isinstance(one, events.Acting)]
        self.look_at = 0.0

    def emit(self, event: Event) -> None:
        stops: list[Stop] = []
        for listener in self.listeners:
            try:
                listener(event)
            except Stop as stop:
                stops.append(stop)
        if stops:
            raise stops[0]

    def run(self) -> None:
        started = time.monotonic()
        manifest = self.store.current()
        done = int(manifest.meta["step"]) if manifest else 0
        self.begun = self.committed = done
        self.total = max(done, self.course.total_steps)
        trace = StepTrace(self.call.trace, done, self.total, self.plan.layer_names)
        try:
            notes = (*self.job.binding.notes(), *self.job.dataset.notes())
            self.emit(events.RunStarted(self.plan, str(self.store.path), self.total, done, notes))
            lr = rate(self.job.settings.optimizer.lr, done)
            lowered = any(row["step"] == done and "scheduled_lr" in row for row in self.store.history())
            if lowered and self._rate(lr) == lr:
                text = f"the learning rate is {lr:.6g} again: the callback that had lowered it is missing"
                self.emit(Notice(text))
            self._run(trace)
            for one in self.acting:
                if one.restored not in (None, self.total):
                    raise Stop("all steps are done", one.restored)
        except Stop as stop:
            self.total, self.restored = self.committed, stop.restored
            if (manifest := self.store.current()) and manifest.meta != (meta := self._meta(self.total)):
                self.store.commit_history(meta)
            of = "" if stop.restored is None else f"; the weights of step {stop.restored} are the run's"
            self.emit(Notice(f"stopped after step {self.total}: {stop}{of}"))
        self.emit(events.RunFinished(self.total, time.monotonic() - started))

    def _run(self, trace: StepTrace) -> None:
        manifest = self.store.current()
        if self.committed < self.total or manifest is None or "due" in manifest.meta:
            if manifest is None and self.workers is not None:
                # Members of a crew load their shares from the run.
                weight_io.write_initial(self.store, self.compiled[MAIN], self._meta(0))
                self.emit(events.Committed(0))
            with self.signals, ExitStack() as stack:
                made = self._session()
                with self.signals.allowed() if self.workers is not None else nullcontext():
                    session = stack.enter_context(made)
                self._run_in(session, trace)

    def _run_in(self, session: Held, trace: StepTrace) -> None:
        losses, furthest = 0, 0
        try:
            while True:
                try:
                    self._load(session)
                    with lasting():
                        self._steps(session, self.committed, trace)
                    return
                except WorkersLost as lost:
                    if self.committed == self.course.total_steps and self.due is None:
                        return
                    losses, furthest = 0 if self.furthest > furthest else losses + 1, self.furthest
                    check_losses(losses, lost)
                    self.rows, self.due, self.is_committing = [], None, False
                    with self.signals.allowed():
                        self.emit(Notice(f"{lost}; gathering workers, to go on from step {self.committed}"))
                        members = session.gather_again()
                    self.emit(events.WorkersChanged(str(lost), members, self.committed))
        except Stop:
            self._commit_done(session)
            raise
        except (KeyboardInterrupt, SystemExit) as stop:
            try:
                self._commit_done(session)
            finally:  # a second signal breaks that off
                self.emit(events.RunStopped(reason_of(stop), str(self.store.path), self.committed))
            raise

    def _load(self, session: Held) -> None:
        main, manifest = self.compiled[MAIN], self.store.current()
        with self.signals.allowed():
            session.load(MAIN, self.store.read if manifest else weight_io.initial(main))
        self.due = None if manifest is None else manifest.meta.get("due")
        if manifest is None:
            self._commit(session, 0)

    def _session(self) -> Held:
        settings, passes = self.job.settings, self.compiled.values()
        watched = self.gathered.watched
        watched |= {c.plan.factored.stored(name) for c in passes for name in c.kept_values.values()}
        given: dict[str, Any] = {"compiled": self.compiled, "dataset": self.job.dataset, "watched": watched}
        given |= {"preparation": self.job.preparation, "deliver": self._keep if watched else None}
        if self.workers is not None:
            threads = self.job.machine.threads
            return self.workers.session(settings=settings, threads=threads, store=self.store, **given)
        given |= {"machine": self.job.machine, "spill": settings.spill_folder(self.store.path / "spill")}
        given |= {"most_bytes": self.plan.most_bytes, "kept_bytes": self.plan.kept_bytes}
        return Session(scheduler=self.call.scheduler, **given)

    def _steps(self, session: Held, done: int, trace: StepTrace) -> None:
        course, last_commit = self.course, time.monotonic()
        if self.due is not None:
            self._end_step(session)
            if done == course.total_steps or done in self._kept_steps():
                self._commit(session, done)
        moved = session.moved()
        for step in course.steps_from(done):
            trace.begin(step.number, session)
            with session.whole_step():
                with self.signals.allowed():
                    row, moved = self._step(session, step, moved)
                self.due, self.furthest = row, max(self.furthest, step.number + 1)
            try:
                trace.end(step.number, session, row)
            except BaseException:
                self._commit_done(session)
                raise
            done = step.number + 1
            last = done == course.total_steps
            is_due = done % course.steps_per_epoch == 0 and course.steps_per_epoch > 1
            is_due = is_due or time.monotonic() - last_commit > self.job.settings.commit_seconds
            if is_due and not last and course.validates_after(done):
                self._commit(session, done)
                last_commit, is_due = time.monotonic(), False
            self._end_step(session)
            moved = session.moved()
            more = not last and session.newcomers() > 0
            if last or is_due or more or done in self._kept_steps():
                self._commit(session, done)
                last_commit = time.monotonic()
                self.signals.check()
            if more:
                raise WorkersLost("workers have come")

    def _step(self, session: Held, step: Step, before: Moved) -> tuple[dict[str, Any], Moved]:
        """Run one step; returns its row of the history, and what the session has moved so far."""
        begun = time.monotonic()
        passes = self.course.passes_of(step, self._rate)
        losses: list[dict[str, float]] = []
        for number, (plan_id, info) in enumerate(passes, 1):
            where = {"step": step.number + 1, "pass_number": number, "passes": len(passes)}
            session.tick = partial(self._look, session, plan_id=plan_id, **where)
            if number == len(passes):
                self._prepare_kept(plan_id, step.number)
            losses.append(self.compiled[plan_id].named_losses(session.run_pass(plan_id, info)))
            check_loss(losses[-1]["loss"], step.number, info.indices)
            if step.number + 1 == self.course.total_steps:
                self.look_at = 0.0  # how the last step went is told whole
            session.tick()
        self.samples = info.indices
        after = session.moved()
        row: dict[str, Any] = {"step": step.number + 1, "epoch": step.epoch}
        row |= {name: sum(found[name] for found in losses) / len(losses) for name in losses[0]}
        rates = rates_of(passes[0][1].scalars)
        scheduled = rates_of(self.course.passes_of(step)[0][1].scalars) if self.acting else rates
        row |= rates | {f"scheduled_{name}": lr for name, lr in scheduled.items() if lr != rates[name]}
        row["seconds"] = time.monotonic() - begun
        moved = {n: one if n in MEMORY else one - getattr(before, n) for n, one in asdict(after).items()}
        return row | moved, after

    def _validate(self, session: Held, row: Mapping[str, Any]) -> dict[str, float]:
        begun, passes = time.monotonic(), self.course.validation_passes
        numerics = {plan_id: self.compiled[plan_id].plan.numerics() for plan_id, _ in passes}
        state = {"step": row["step"], "loss": row["loss"], "numerics": numerics}
        notes = Notes(self.store.path / NOTES, state)
        found = notes.read([info.indices for _, info in passes])
        for number, (plan_id, info) in enumerate(passes[len(found) :], len(found) + 1):
            where = {"step": row["step"], "pass_number": number, "passes": len(passes)}
            session.tick = partial(self._look, session, plan_id=plan_id, **where)
            with self.signals.allowed():
                found.append(self.gathered.run(session, plan_id, info))
            notes.add(found[-1])
        values = mean_losses(found) | metric_values(self.job.settings.metrics, [one.sums for one in found])
        values["seconds"] = time.monotonic() - begun
        return {f"{events.VALIDATION_PREFIX}{name}": value for name, value in values.items()}

    def _end_step(self, session: Held) -> None:
        row = self.due
        assert row is not None
        if self.course.validates_after(row["step"]):
            row |= self._validate(session, row)
        self.due = None
        self.rows.append(row)
        try:
            with self.signals.allowed():
                self.emit(events.StepDone(row))
        except BaseException:  # how a callback stops a run: what is done is kept
            self._commit_done(session)
            raise

    def _look(self, session: Held, **where: Any) -> None:
        begun = time.monotonic()
        if begun < self.look_at:
            return
        with self.signals.delayed():  # tasks need the locks that this takes
            self.emit(events.StepRunning(at_seconds=time.time(), processes=session.looks(), **where))
        ended = time.monotonic()
        pause = max(LOOK_SECONDS, (ended - begun) / LOOK_SHARE)
        self.look_at = ended + min(pause, MOST_LOOK_SECONDS)

    def _rate(self, lr: float) -> float:
        for listener in self.acting:
            lr = listener.rate(lr)
        return lr

    def _kept_steps(self) -> list[int]:
        """Steps whose versions the run keeps, the best first: as listeners say, or else as it does."""
        asked = [listener.kept for listener in self.acting if listener.kept is not None]
        if asked:
            return list(dict.fromkeys(step for kept in asked for step in kept))
        return list(kept_steps(self.store))

    def _meta(self, step: int) -> dict[str, Any]:
        facts: dict[str, Any] = {"step": step, "steps": self.total, "due": self.due}
        facts |= {"restored": self.restored, "checkpoints": self._kept_steps() or None}
        facts["settings"] = noted_settings(self.store, self.settings if step > self.begun else None)
        return {name: fact for name, fact in facts.items() if fact is not None}

    def _commit_done(self, session: Held) -> None:
        # A commit that a second signal has broken off is not tried again.
        step = max((row["step"] for row in (*self.rows, self.due) if row), default=0)
        if (self.rows or step > self.committed) and not session.spent and not self.is_committing:
            try:
                self._commit(session, step)
            except WorkersLost as lost:
                self.emit(Notice(f"{lost}: steps after {self.committed} could not be committed"))

    def _commit(self, session: Held, step: int) -> None:
        self.is_committing = True
        check_commit(self.plan, self.store.path)
        self.store.append_history(self.rows)
        if step == self.committed and self.store.current() is not None:  # as its validation began
            self.store.commit_history(self._meta(step))
        else:
            session.commit(self.store, MAIN, self._meta(step))
        rows, self.rows, self.committed, self.is_committing = self.rows, [], step, False
        try:
            if rows and (report := self.plan.report(session.measured(), rows[-1]["process_bytes"])):
                write_report(self.store.path, report)
        finally:  # workers may be lost meanwhile: committed it is
            self.emit(events.Committed(step, self.samples))

    def _prepare_kept(self, plan_id: str, step: int) -> None:
        compiled = self.compiled[plan_id]
        factored = compiled.plan.factored
        for title, name in compiled.kept_values.items():
            value = factored.graph.values[name]
            regions = [region for region, _ in compiled.graph.pieces[factored.stored(name)]]
            chunks = weight_io.chunks_of(compiled, name, regions)
            with reporting(self.store.path / "kept"):
                self.kept[title] = self.store.keep(title, value.shape, value.dtype, chunks, step + 1)

    def _keep(self, plan_id: str, value: str, region: Region, array: Array, info: PassInfo) -> None:
        self.gathered.deliver(plan_id, value, region, array, info)
        compiled = self.compiled[plan_id]
        for title, box, part in weight_io.boxes_of(compiled, compiled.kept_values, value, region, array):
            with self.writing, reporting(self.store.path / "kept"):  # pieces may share a chunk
                self.kept[title][as_slices(box)] = part
