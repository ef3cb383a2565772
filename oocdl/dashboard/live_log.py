"""``LiveLog``: writes what a run tells to the folder ``live`` of its directory, for whoever looks at it.

``facts.json`` has the plan, ``now.json`` how the step stands, ``last_pass.npz`` when each task ran,
``pictures.npz`` slices of a sample, ``steps.jsonl`` history rows since the last commit, ``resources.jsonl``
memory and bytes moved over time, ``notes.jsonl`` lines for the user.
"""

from __future__ import annotations

import base64
import json
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oocdl import events
from oocdl.dashboard.facts import NO_LAYER, facts_of
from oocdl.dashboard.samples import read_sample
from oocdl.dashboard.series import Tail, packed, put
from oocdl.errors import OocdlError
from oocdl.runtime.measured import Phase
from oocdl.storage.files import regular

FOLDER = "live"
FACTS, NOW, LAST_PASS, PICTURES = "facts.json", "now.json", "last_pass.npz", "pictures.npz"
STEPS, RESOURCES, NOTES = "steps.jsonl", "resources.jsonl", "notes.jsonl"
FLUSH_SECONDS = 1.0
"""Seconds between two writes of history rows."""
MOST_LINES = 4000
"""Lines of resources are a second apart for so many seconds; from then on the distance grows with the run, so
that each doubling of its length adds fewer lines than this."""
LAST_PASS_SECONDS = 5.0
"""Minimum seconds between two writes of the times of tasks."""
RECENT_PASSES = 20
"""Number of recent passes over which the seconds of layers are averaged."""
PICTURES_SHARE = 0.002
"""The part of a run's time that reading slices of samples may take."""
OF_PROCESS = (
    "process_bytes", "base_bytes", "reserved_bytes", "tier_bytes", "spilled_bytes",
    "read_bytes", "written_bytes", "received_bytes", "processor_seconds", "busy_seconds", "idle_seconds",
)  # fmt: skip
"""Fields of each process in a line of resources, in order."""


class LiveLog:
    """Writes the files. A listener and, as it holds files open, a context manager.

    A file that cannot be written ends the log with a warning, never the run.
    """

    def __init__(self, run: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = run / FOLDER, clock
        self._rows: list[Mapping[str, Any]] = []
        self._flushed = self._lined = self._passed = float("-inf")
        self._first = clock()
        self._broken = False
        self._plan: Any = None
        self._layers: dict[str, tuple[np.ndarray, int]] = {}
        """Plan id -> the layer of each task, and the number of layers."""
        self._spent: deque[tuple[str, float, np.ndarray]] = deque(maxlen=RECENT_PASSES)
        """Recent passes that were looked at: the plan id, when the pass began, and seconds by layer."""
        self._last: events.StepRunning | None = None
        self._waiting: events.RunStarted | None = None
        """The beginning of a run that goes on: all that is shown stays until a step runs, if one does."""
        self._images: Sequence[Sequence[str]] = ()
        self._pictured = float("-inf")
        """Monotonic time from which slices may be read again; at the end they are read in any case."""
        self._unpictured: tuple[int, int] | None = None
        """Step and sample of the last commit, if its slices have not been read."""

    def __enter__(self) -> LiveLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._guarded(self._flush)

    def __call__(self, event: events.Event) -> None:
        self._guarded(self._take, event)

    def _guarded(self, write: Callable[..., None], *arguments: Any) -> None:
        if self._broken:
            return
        try:
            write(*arguments)
        except OSError as error:
            self._broken = True
            warnings.warn(
                f"{self._folder} cannot be written ({error.strerror}): no dashboard sees the run from now on",
                RuntimeWarning,
                stacklevel=4,
            )

    def _take(self, event: events.Event) -> None:
        match event:
            case events.RunStarted() if event.done and (self._folder / FACTS).is_file():
                self._waiting = event
            case events.RunStarted():
                self._start(event, self._clock())
            case events.StepRunning():
                self._go_on(event.at_seconds)
                self._now(event)
            case events.StepDone():
                self._go_on(self._clock())
                self._rows.append(event.row)
                if self._clock() - self._flushed >= FLUSH_SECONDS:
                    self._flush()
            case events.Committed():
                self._forget_rows()
                sample = event.samples[0] if event.samples else 0
                self._note("commit", f"step {event.step} is committed", step=event.step, sample=sample)
                self._unpictured = event.step, sample
                if time.monotonic() >= self._pictured:
                    self._picture()
            case events.WorkersChanged():
                self._forget_rows()
                self._lined = float("-inf")  # who takes part is to be seen soon
                self._note("warning", f"{event.reason}: {event.members} workers go on from step {event.done}")
            case events.Notice():
                self._note("notice", event.text)
            case events.RunStopped():
                self._picture()
                self._note("stopped", f"stopped by {event.reason}; {event.done} steps are committed")
            case events.RunFinished():
                self._flush()
                self._picture()
                if self._last is not None and self._last.step == event.steps:
                    phase, looks = bytes([Phase.DONE]), self._last.processes
                    done = tuple(replace(one, phases=phase * len(one.phases)) for one in looks)
                    self._passed = float("-inf")
                    self._now(replace(self._last, pass_number=self._last.passes, processes=done))
                self._note("finished", f"{event.steps} steps are done", step=event.steps)

    def _go_on(self, now: float) -> None:
        if self._waiting is not None:
            self._start(self._waiting, now)

    def _start(self, event: events.RunStarted, now: float) -> None:
        self._waiting = None
        self._folder.mkdir(exist_ok=True)
        for name in (NOW, LAST_PASS, *((RESOURCES, NOTES, PICTURES) if event.done == 0 else ())):
            (self._folder / name).unlink(missing_ok=True)
        self._forget_rows()
        if event.plan is not None:
            facts = facts_of(event.plan, event.steps)
            put(self._folder / FACTS, facts.to_json().encode())
            self._layers = {
                name: (np.array(one.layer_of), len(one.layers)) for name, one in facts.passes.items()
            }
            self._plan, self._images, self._pictured = event.plan, facts.images, float("-inf")
        at = next((row.get("at") for row in Tail(self._folder / RESOURCES).read()), None)
        self._first = at if isinstance(at, float) else now
        self._note("started", f"begins at step {event.done} of {event.steps}", step=event.done, at=now)
        for text in event.notes:
            self._note("notice", text)

    def _now(self, event: events.StepRunning) -> None:
        self._last = event
        width = max((len(one.phases) for one in event.processes), default=0)
        merged = np.zeros(width, np.uint8)
        for one in event.processes:
            phases = np.frombuffer(one.phases, np.uint8)
            np.maximum(merged[: phases.size], phases, out=merged[: phases.size])
        words = {
            "at": event.at_seconds,
            "step": event.step,
            "pass": event.pass_number,
            "passes": event.passes,
            "plan_id": event.plan_id,
            "phases": base64.b64encode(merged.tobytes()).decode(),
        }
        put(self._folder / NOW, json.dumps(words).encode())
        if event.at_seconds - self._lined >= max(1.0, (event.at_seconds - self._first) / MOST_LINES) * 0.9:
            self._lined = event.at_seconds
            rows = {one.name: [getattr(one, name) for name in OF_PROCESS] for one in event.processes}
            self._append(RESOURCES, {"at": event.at_seconds, "processes": rows})
        passes = {one.name: one.last_pass for one in event.processes if one.last_pass is not None}
        self._spend(list(passes.values()))
        if passes and event.at_seconds - self._passed >= LAST_PASS_SECONDS:
            self._passed = event.at_seconds
            plans = [one.plan_id for one in passes.values()]
            same = [spent for plan_id, _, spent in self._spent if plan_id == plans[0]]
            arrays = {
                f"{name}{number}": getattr(one, name)
                for number, one in enumerate(passes.values())
                for name in ("numbers", "times", "threads")
            }
            put(self._folder / LAST_PASS, packed(names=list(passes), plans=plans, spent=same, **arrays))

    def _spend(self, passes: list[events.PassTimes]) -> None:
        """Note what each layer took in a pass, if it is another than before and all processes tell of it."""
        plans = {one.plan_id for one in passes}
        if len(plans) != 1 or not all(one.times.size for one in passes):
            return
        plan_id, began = plans.pop(), min(float(one.times[:, 0].min()) for one in passes)
        if plan_id not in self._layers or any(began == known for _, known, _ in self._spent):
            return
        layer_of, count = self._layers[plan_id]
        spent = np.zeros(count)
        for one in passes:
            of = layer_of[one.numbers]
            seconds = (one.times[:, 5] - one.times[:, 3])[of != NO_LAYER]
            spent += np.bincount(of[of != NO_LAYER], seconds, count)
        self._spent.append((plan_id, began, spent))

    def _picture(self) -> None:
        """Write slices of the last commit's sample; what cannot be read is told once, and no more is read."""
        begun = time.monotonic()
        if not self._images or self._unpictured is None:
            return
        try:
            found = read_sample(self._plan.dataset, self._images, *self._unpictured)
        except OocdlError as error:
            self._images = ()
            self._note("notice", f"pictures of samples end here: {error}")
            return
        self._unpictured = None
        put(self._folder / PICTURES, found.packed())
        self._pictured = time.monotonic() + (time.monotonic() - begun) / PICTURES_SHARE

    def _flush(self) -> None:
        self._flushed = self._clock()
        rows, self._rows = self._rows, []
        if rows and self._folder.is_dir():
            self._append(STEPS, *rows)

    def _forget_rows(self) -> None:
        """Rows are in the history, or were rolled back."""
        self._rows = []
        put(self._folder / STEPS, b"")  # another file, which readers notice however long it has become

    def _note(self, kind: str, text: str, **more: Any) -> None:
        if self._folder.is_dir():
            self._append(NOTES, {"at": self._clock(), "kind": kind, "text": text, **more})

    def _append(self, name: str, *lines: Mapping[str, Any]) -> None:
        with open(self._folder / name, "a", opener=regular) as out:
            out.write("".join(json.dumps(dict(line)) + "\n" for line in lines))
