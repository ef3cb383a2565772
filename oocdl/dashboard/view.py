"""``View``: all that a page shows of one run, read from its directory, and read on as the run goes on."""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from oocdl.dashboard import live_log
from oocdl.dashboard.facts import NO_LAYER, PassFacts, RunFacts, read_facts
from oocdl.dashboard.samples import SamplePictures, unpacked
from oocdl.dashboard.series import Table, Tail, Watched
from oocdl.errors import CorruptError, StoreError
from oocdl.runtime.measured import Phase
from oocdl.storage.checksums import unsealed
from oocdl.storage.run.sealed_files import MISREAD

MOST_NOTES = 200
"""Maximum number of lines for the user that are shown: the last ones."""


@dataclass(frozen=True, kw_only=True)
class Now:
    """The progress of the current step."""

    at_seconds: float
    step: int
    pass_number: int
    passes: int
    plan_id: str
    phases: npt.NDArray[np.uint8]
    """Phase of each call of the pass: see ``ProcessLook.phases``."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """The work of one thread in the last whole pass, one element per task."""

    process: str
    thread: int
    layers: npt.NDArray[np.intp]
    times: npt.NDArray[np.float64]
    """Seconds since the pass began. Shape (tasks, 6); see ``PassTimes.times``."""


@dataclass(frozen=True, kw_only=True)
class LastPass:
    """Times of the tasks of the last whole pass."""

    plan_id: str
    seconds: float
    lanes: tuple[Lane, ...]
    spent: npt.NDArray[np.float64]
    """Seconds by layer of the last passes that were looked at. Shape (passes, layers)."""


class View:
    """Everything known of a run. ``refresh`` reads news; ``version`` grows if there are any."""

    def __init__(self, run: Path) -> None:
        if not (run / "run.json").is_file():
            raise StoreError(f"there is no run in {run}")
        self.run, self._live = run, run / live_log.FOLDER
        self.version = 0
        self.facts: RunFacts | None = None
        self.now: Now | None = None
        self.last_pass: LastPass | None = None
        self.pictures: SamplePictures | None = None
        self.notes: list[dict[str, Any]] = []
        self.steps = Table()
        """One row per step: that of the history, with ``train_seconds``, the total of all steps so far."""
        self.resources: dict[str, Table] = {}
        """Process -> rows with ``at`` (seconds since 1970) and the fields of ``live_log.OF_PROCESS``."""
        self._committed = 0
        """Rows of ``steps`` that are of the history."""
        self._since = 0.0
        """Time at which the run last began or went on, or its workers changed."""
        self._history = Tail(run / "history" / "steps.jsonl")
        self._rows, self._lines = Tail(self._live / live_log.STEPS), Tail(self._live / live_log.RESOURCES)
        self._notes = Tail(self._live / live_log.NOTES)
        self._replaced = {
            Watched(self._live / live_log.FACTS): self._take_facts,
            Watched(self._live / live_log.NOW): self._take_now,
            Watched(self._live / live_log.LAST_PASS): self._take_last_pass,
            Watched(self._live / live_log.PICTURES): self._take_pictures,
        }
        """Files that are replaced as a whole -> what reads one."""

    def refresh(self) -> bool:
        """Read what is new; whether there is anything. Raises CorruptError for a file that is damaged."""
        place = self._live
        try:
            news = [self._read_steps(), self._read_resources(), self._read_notes()]
            for file, take in self._replaced.items():
                place = file.path
                if (found := file.news()) is not None:
                    take(found)
                    news.append(True)
        except (*MISREAD, EOFError, BadZipFile, zlib.error) as error:
            self.version += 1  # by what was read before it
            reason = f"{type(error).__name__}: {error}"
            raise CorruptError(f"{place} is damaged ({reason}); delete it, and look without it") from error
        self.version += any(news)
        return any(news)

    # --- files -----------------------------------------------------------------------------

    def _take_facts(self, data: bytes) -> None:
        self.facts, self.last_pass = read_facts(data.decode()), None

    def _take_now(self, data: bytes) -> None:
        words = json.loads(data)
        self.now = Now(
            at_seconds=words["at"],
            step=words["step"],
            pass_number=words["pass"],
            passes=words["passes"],
            plan_id=words["plan_id"],
            phases=np.frombuffer(base64.b64decode(words["phases"]), np.uint8),
        )

    def _take_last_pass(self, data: bytes) -> None:
        with np.load(io.BytesIO(data)) as arrays:
            names, plans = arrays["names"].tolist(), arrays["plans"].tolist()
            spent = arrays["spent"] if "spent" in arrays else np.zeros((0, 0))  # of an older version
            processes = [
                (name, *(arrays[f"{key}{at}"] for key in ("numbers", "times", "threads")))
                for at, name in enumerate(names)
                if plans[at] == plans[0]
            ]
        facts = None if self.facts is None else self.facts.passes.get(plans[0])
        if facts is None:
            return
        layer_of = np.array(facts.layer_of)
        began = min(float(times[:, 0].min()) for _, _, times, _ in processes if times.size)
        ended = max(float(times[:, -1].max()) for _, _, times, _ in processes if times.size)
        lanes = [
            Lane(
                process=name,
                thread=int(thread),
                layers=layer_of[numbers[threads == thread]],
                times=times[threads == thread] - began,
            )
            for name, numbers, times, threads in processes
            for thread in np.unique(threads)
        ]
        self.last_pass = LastPass(plan_id=plans[0], seconds=ended - began, lanes=tuple(lanes), spent=spent)

    def _take_pictures(self, data: bytes) -> None:
        self.pictures = unpacked(data)

    def _read_steps(self) -> bool:
        history, live = self._history.read(), self._rows.read()
        again = self._history.again
        if again:
            self.steps.cut(0)
            self._committed = 0
        if self._rows.again or history:
            # Rows since the last commit may have come into the history, or were rolled back.
            self.steps.cut(self._committed)
            live = live if self._rows.again else Tail(self._live / live_log.STEPS).read()
        self._add_steps(history)
        self._committed = len(self.steps) if history else self._committed
        done = self.done
        self._add_steps([row for row in live if row.get("step", 0) > done])
        return bool(history or live or again)

    def _add_steps(self, rows: list[dict[str, Any]]) -> None:
        total = float(self.steps["train_seconds"][-1]) if len(self.steps) else 0.0
        for row in rows:
            total += row.get("seconds", 0.0)
            self.steps.add([{**row, "train_seconds": total}])

    def _read_resources(self) -> bool:
        lines = self._lines.read()
        if self._lines.again:
            self.resources = {}
        for line in lines:
            for name, numbers in line["processes"].items():
                row = {"at": line["at"], **dict(zip(live_log.OF_PROCESS, numbers, strict=False))}
                self.resources.setdefault(name, Table()).add([row])
        return bool(lines)

    def _read_notes(self) -> bool:
        lines = [note for note in self._notes.read() if {"kind", "at", "text"} <= note.keys()]
        self.notes = [*([] if self._notes.again else self.notes), *lines][-MOST_NOTES:]
        begins = [note["at"] for note in lines if note["kind"] in ("started", "warning")]
        self._since = begins[-1] if begins else self._since
        return bool(lines)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the last call as plain data, else the run's first; empty if they cannot be read."""
        if self.facts is not None and self.facts.settings:
            return self.facts.settings
        try:
            settings: Mapping[str, Any] = unsealed("run", (self.run / "run.json").read_text())["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return settings

    # --- what follows from it --------------------------------------------------------------

    @property
    def present(self) -> dict[str, Table]:
        """``resources`` of the processes that take part now: others, which told nothing since, have ended."""
        tables = list(self.resources.items())  # another thread may add one, as yet without rows
        return {name: table for name, table in tables if len(table) and table["at"][-1] >= self._since}

    @property
    def main(self) -> PassFacts | None:
        """The pass that ends a step; None before the run is planned."""
        if self.facts is None:
            return None
        return self.facts.passes.get("main") or next(iter(self.facts.passes.values()))

    @property
    def done(self) -> int:
        """Number of steps that are done."""
        return int(self.steps["step"][-1]) if len(self.steps) else 0

    @property
    def total(self) -> int:
        """Number of steps of the run: those that were asked for, or of one that is over, that it had."""
        return self.done if self.facts is None or self.ended == "finished" else self.facts.steps

    @property
    def commit(self) -> dict[str, Any] | None:
        """The note of the last commit; None before there is one."""
        return next((note for note in reversed(self.notes) if note["kind"] == "commit"), None)

    @property
    def seconds_apart(self) -> float | None:
        """Mean seconds between two steps of this call, for validations, commits and listeners.

        It is measured from commit to commit; None before the second.
        """
        commits = [note for note in self.notes if note["kind"] == "commit" and note["at"] >= self._since]
        first, last = (commits[0], commits[-1]) if commits else ({"step": 0}, {"step": 0})
        if last["step"] <= first["step"]:
            return None
        steps = self.steps["step"]
        inside = self.steps["seconds"][(steps > first["step"]) & (steps <= last["step"])]
        return max(float(last["at"] - first["at"] - np.nansum(inside)), 0.0) / (last["step"] - first["step"])

    @property
    def ended(self) -> str:
        """ "finished" or "stopped" if the last thing that the run told is that; else empty."""
        kinds = [note["kind"] for note in self.notes if note["kind"] in ("started", "finished", "stopped")]
        return kinds[-1] if kinds and kinds[-1] != "started" else ""

    def layer_seconds(self) -> npt.NDArray[np.float64] | None:
        """Measured seconds of each layer's program, a mean of the last passes; None before there is one."""
        if self.last_pass is None or self.facts is None or not self.last_pass.spent.size:
            return None
        return np.asarray(self.last_pass.spent.mean(axis=0))

    @property
    def running(self) -> PassFacts | None:
        """The pass that runs; None before there is one, or if ``now`` is of another plan than the facts."""
        if self.now is None or self.facts is None:
            return None
        running = self.facts.passes.get(self.now.plan_id)
        return running if running and len(running.layer_of) == self.now.phases.size else None

    def done_share(self) -> float:
        """The part of the tasks of the pass that runs that are done."""
        if self.now is None or self.running is None:
            return 0.0
        return float(np.mean(self.now.phases[np.array(self.running.layer_of) != NO_LAYER] == Phase.DONE))

    def phase_map(self, columns: int) -> npt.NDArray[np.uint8] | None:
        """The map of the step that runs: shape (layers, columns), the phase of the task in each place.

        A layer's tasks share its row: a task takes several columns, or several tasks one, of which the one
        that is least far is shown. None before there is a step.
        """
        if self.now is None or self.running is None:
            return None
        layer_of, count = np.array(self.running.layer_of), len(self.running.layers)
        out = np.zeros((count, columns), np.uint8)
        order = np.argsort(layer_of, kind="stable")
        bounds = np.searchsorted(layer_of[order], np.arange(count + 1))
        for row, start, end in zip(out, bounds[:-1], bounds[1:], strict=True):
            phases = self.now.phases[order[start:end]]
            if phases.size > columns:
                edges = np.linspace(0, phases.size, columns + 1).astype(np.intp)[:-1]
                row[:] = np.minimum.reduceat(phases, edges)
            elif phases.size:
                row[:] = phases[np.arange(columns) * phases.size // columns]
        return out
