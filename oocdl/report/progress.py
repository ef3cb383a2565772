"""Shows the progress of a run: a live line on a terminal, plain lines elsewhere; and bytes of a long task."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

from oocdl import events
from oocdl.errors import printable
from oocdl.planning.calls import PickCall
from oocdl.planning.passes import VALIDATION, role_of
from oocdl.report.history_view import metric_names
from oocdl.report.plan_parts import trained_text
from oocdl.report.units import clock_time, counted, duration
from oocdl.runtime.measured import Phase

LEAST_LINE_SECONDS = 1.0
"""Least time between plain lines, but for the first and the last."""
BAR_COLUMNS = 16
LEAST_BAR_COLUMNS = 110
"""A terminal of at least so many columns has room for a bar beside the words."""
MEAN_STEPS = 20
"""Rates are means over this number of the last steps."""
LONG_STEP_SECONDS = 3.0
"""A step that has run for so long is shown in part."""


class Progress:
    """Shows the events of one or more runs, one after the other. A listener and a context manager."""

    def __init__(
        self, budget_bytes: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget_bytes = budget_bytes
        self.console = console or Console(stderr=True, highlight=False)
        self.clock = clock
        self.bar: Bar | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:  # at once: reading and planning may take a while
            self._begin("planning ..", None, transient=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self._start(event)
            case events.StepRunning():
                self._running(event)
            case events.StepDone():
                self._step(event)
            case events.RunFinished():
                self.close()
                now = f", {event.steps - self.began} of them" if self.began else ""
                done = f"finished {counted(event.steps, 'step')}{now} in {duration(event.seconds)}"
                self._print(done if self.last_row is not None else "finished already; nothing to do")
            case events.RunStopped():
                self.close()
                self._print(f"stopped by {event.reason}: {counted(event.done, 'step')} committed")
            case events.Notice():
                self._print(event.text)
            case events.WorkersChanged():
                self._print(f"goes on with {counted(event.members, 'worker')} from step {event.done}")

    def close(self) -> None:
        """Leave the terminal as it was; what is shown stays. May be called twice."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _start(self, event: events.RunStarted) -> None:
        self.close()
        self.steps = event.steps
        self.began = self.done = event.done
        self.last_row: events.StepDone | None = None
        self.recent = deque[tuple[float, int]](maxlen=MEAN_STEPS)
        """Seconds, and bytes to and from the disk, of the last steps."""
        self.written_at, self.stepped_at = float("-inf"), self.clock()
        self.first_at = self.computed = 0.0
        """When the first step of this call began, and the seconds of all that it did."""
        self.apart = 0.0
        """Mean seconds between two steps: for validations, commits and listeners."""
        self.validated: list[tuple[int, str]] = []
        """The results of the last validation, as parts of the line."""
        kinds: Any = () if event.plan is None else event.plan.kinds.items()
        self.tasks = {n: sum(not isinstance(call, PickCall) for call in k.graph.calls) for n, k in kinds}
        """Tasks of each kind of pass, where its plan is known."""
        if event.plan is not None:
            self.budget_bytes = event.plan.settings.memory_bytes
        so_far = f", {event.done} of them done" if event.done else ""
        self._print(f"{counted(event.steps, 'step')} in {event.workdir}{so_far}")
        for note in event.notes:
            self._print(note)
        if event.plan is not None and event.done < event.steps:
            self._print(trained_text(event.plan.trained))
        if self.console.is_terminal and event.done < event.steps:
            self._begin("the first step ..", event.steps, event.done)

    def _begin(self, text: str, steps: int | None, done: int = 0, transient: bool = False) -> None:
        """Begin a line that is written over; a ``transient`` one does not stay."""
        place = Column(no_wrap=True, overflow="ellipsis")
        words = TextColumn("{task.description}", markup=False, table_column=place)
        has_bar = self.console.width >= LEAST_BAR_COLUMNS and not transient
        bars = [BarColumn(BAR_COLUMNS)] if has_bar else []
        self.bar = Bar(*bars, words, console=self.console, auto_refresh=False, transient=transient)
        self.bar.add_task(text, total=steps, completed=done)
        self.bar.start()
        self.bar.refresh()

    def _step(self, event: events.StepDone) -> None:
        row, self.last_row = event.row, event
        apart = row.get(f"{events.VALIDATION_PREFIX}seconds", 0.0)
        if names := metric_names([row]):
            self.validated = [(1 + bool(at), f"{name} {row[name]:.4f}") for at, name in enumerate(names)]
        self.done = row["step"]
        moved_bytes = row.get("read_bytes", 0) + row.get("written_bytes", 0)
        self.recent.append((row["seconds"], moved_bytes))
        self.stepped_at = self.clock()
        self.first_at = self.first_at if self.computed else self.stepped_at - row["seconds"] - apart
        self.computed += row["seconds"]
        apart = self.stepped_at - self.first_at - self.computed
        self.apart = max(apart, 0.0) / max(self.done - self.began, 1)
        if self.bar is not None:
            self._move(self.done, self._text(event))
        elif self.clock() - self.written_at >= LEAST_LINE_SECONDS or self.done == self.steps:
            self._write(event)

    def _running(self, event: events.StepRunning) -> None:
        """Show how far a long step is."""
        if self.clock() - self.stepped_at < LONG_STEP_SECONDS:
            return
        done = sum(one.phases.count(Phase.DONE) for one in event.processes)
        tasks = self.tasks.get(event.plan_id) or max((len(one.phases) for one in event.processes), default=0)
        share = (event.pass_number - 1 + min(done / max(tasks, 1), 1.0)) / event.passes
        self.done = event.step - 1  # steps may have been rolled back
        last = self.last_row
        if role_of(event.plan_id) == VALIDATION:
            self._move(event.step, f"step {event.step}/{self.steps}, validating: {share:.0%}")
            return
        self._move(self.done + share, self._text(last, share) if last else f"the first step: {share:.0%}")

    def _move(self, done: float, text: str) -> None:
        """Fill the bar up to so many steps, with a text behind it."""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, description=text)
            self.bar.refresh()

    def _write(self, event: events.StepDone) -> None:
        self.written_at = self.clock()
        self._print(self._text(event))

    def _text(self, event: events.StepDone, share: float = 0.0) -> str:
        """Write how the run stands after a step, and a share of the next."""
        row = event.row
        seconds = sum(step for step, _ in self.recent)
        mean = seconds / len(self.recent)
        left = (self.steps - self.done - share) * (mean + self.apart)
        parts = [  # with a rank: those of the highest go first where a terminal is narrow
            (0, f"step {self.done}/{self.steps}"),
            *([(1, f"{share:.0%} of the next")] if share else []),
            (3, f"epoch {row['epoch'] + 1}"),
            (0, f"loss {row['loss']:.4f}"),
            *self.validated,
            (1, f"{mean:.1f} s/step" if mean > 1 else f"{1 / max(mean, 1e-9):.1f} steps/s"),
            (0, f"{clock_time(left)} left"),
        ]
        if "process_bytes" in row:
            peak, budget = row["process_bytes"] / 2**20, self.budget_bytes / 2**20
            parts.append((2, f"peak {peak:.0f} of {budget:.0f} MiB"))
        disk_bytes = sum(moved for _, moved in self.recent)
        if disk_bytes:
            parts.append((4, f"disk {disk_bytes / max(seconds, 1e-9) / 1e6:.0f} MB/s"))
        width = self.console.width
        room = width - (BAR_COLUMNS + 1) * (width >= LEAST_BAR_COLUMNS)
        while self.console.is_terminal and len(_joined(parts)) > room and max(parts)[0]:
            parts.remove(max(parts))
        return _joined(parts)

    def _print(self, text: str) -> None:
        text = "\n".join(map(printable, text.splitlines()))  # names come from files that others wrote
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _joined(parts: list[tuple[int, str]]) -> str:
    return ", ".join(part for _, part in parts)


class BytesBar(Bar):
    """A bar that is filled by ``add``; nothing is shown where there is no terminal. A context manager."""

    def __init__(self, is_shown: bool) -> None:
        console = Console(stderr=True, highlight=False)
        words = TextColumn("{task.description}", markup=False)
        columns = (words, BarColumn(24), DownloadColumn(), TimeRemainingColumn())
        is_shown = is_shown and console.is_terminal
        super().__init__(*columns, console=console, transient=True, disable=not is_shown)
        self._task = self.add_task("", total=None)
        self.total = 0
        """Bytes of all that is to be done; 0: not known."""
        self.text = ""
        """What is done now."""

    def add(self, nbytes: int) -> None:
        self.update(self._task, advance=nbytes, total=self.total or None, description=printable(self.text))
