"""A trace of one step, in Chrome's trace event format, for ui.perfetto.dev and chrome://tracing.

A recorder collects what the tasks, the spill and the memory tier of one process do; nothing is
recorded, and nothing but a look for a recorder is paid, unless somebody has asked for a trace. The
writer puts the recordings of one or several processes on one axis of time: a process for each, a
track for each thread, a counter of the tier's memory.

The format: "Trace Event Format", by the authors of Chrome's trace viewer. Complete events ("X") have
``ts`` and ``dur`` in microseconds; those of one thread lie inside each other or side by side.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

from oocdl.errors import InputError
from oocdl.host.paths import path_of
from oocdl.storage.files import reporting

UNIT_PHASES = ("wait for memory", "read inputs", "wait for a permit", "run", "write results")
COMBINE_PHASES = ("wait for memory", "read and combine", "write results")
STRIP_PHASES = ("wait for memory", "copy")
Facts = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a thread did."""

    name: str
    kind: str
    """"unit", "combine", "strip", "spill" or "dataset"."""
    thread: str
    times: tuple[float, ...]
    """Time of its begin, and of the end of it or of each of its phases (seconds of ``perf_counter``)."""
    phases: tuple[str, ...]
    """Names of the phases; empty: it has none."""
    facts: Facts


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that the memory tier counts, from ``at`` on (seconds of ``perf_counter``)."""

    at: float
    resident_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class Recording:
    """The recording of one process."""

    process: str
    clock_seconds: float
    """Offset of its times to seconds since 1970: times of several processes can stand side by side."""
    spans: tuple[Span, ...]
    memory: tuple[Memory, ...]


class Recorder:
    """Collects spans and counts of one process. Any thread may add to it."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._memory: list[Memory] = []

    def task(
        self, kind: str, name: str, phases: tuple[str, ...], times: tuple[float, ...], facts: Facts
    ) -> None:
        """The calling thread has run a task, whose phases lie between ``times``."""
        self._spans.append(Span(name, kind, threading.current_thread().name, times, phases, facts))

    def transfer(self, kind: str, name: str, begun: float, nbytes: int) -> None:
        """The calling thread has read or written so many bytes, since ``begun``."""
        thread, times = threading.current_thread().name, (begun, perf_counter())
        self._spans.append(Span(name, kind, thread, times, (), {"bytes": nbytes}))

    def counted(self, resident_bytes: int, reserved_bytes: int) -> None:
        """The memory tier counts so many bytes from now on."""
        self._memory.append(Memory(perf_counter(), resident_bytes, reserved_bytes))

    def recording(self) -> Recording:
        """All there is so far."""
        name, clock = f"{socket.gethostname()}, process {os.getpid()}", time.time() - perf_counter()
        return Recording(name, clock, tuple(self._spans), tuple(self._memory))


def checked_path(name: str, path: object) -> Path:
    """Return the path of a file for a trace, made sure of before a run.

    Raises InputError if this is no path of a file, StoreError or ResourceError if its folder is not
    there or cannot be written to.
    """
    target = path_of(name, path).absolute()
    if target.is_dir():
        raise InputError(f"{name} takes the path of a file to write, got {str(path)!r}")
    with reporting(target), TemporaryFile(dir=target.parent):
        return target


def write_trace(
    path: Path, recordings: Sequence[Recording], facts: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    """Write a trace as one JSON file; ``facts`` are told beside the events, layers by their ``names``.

    Raises StoreError or ResourceError if it cannot be written.
    """
    # Seconds since 1970 are known to a quarter of a microsecond only: nothing is added to them.
    shifts = [recording.clock_seconds - recordings[0].clock_seconds for recording in recordings]
    begins = [
        shift + begun
        for recording, shift in zip(recordings, shifts, strict=True)
        for begun in (*(span.times[0] for span in recording.spans), *(one.at for one in recording.memory))
    ]
    origin = min(begins, default=0.0)
    places = enumerate(zip(recordings, shifts, strict=True), 1)
    events = (event for pid, (one, shift) in places for event in _events(one, pid, shift - origin, names))
    partial = path.with_name(f"{path.name}.partial")
    before = f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(dict(facts))}, "traceEvents": ['
    with reporting(path):
        try:
            with partial.open("w") as out:
                for event in events:  # one at a time: all of them would take memory that nobody counts
                    out.write(f"{before}\n{json.dumps(event)}")
                    before = ","
                out.write("\n]}\n")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _events(
    recording: Recording, pid: int, shift_seconds: float, names: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """The events of one process."""

    def nanoseconds(seconds: float) -> int:
        # Both ends of a span are rounded alike, so what lies inside another still does.
        return round((seconds + shift_seconds) * 1e9)

    # Threads that run tasks first.
    busy = {span.thread for span in recording.spans if span.kind == "unit"}
    threads = sorted({span.thread for span in recording.spans}, key=lambda name: (name not in busy, name))
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": recording.process}}
    for tid, name in enumerate(threads, 1):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
    tids = {name: tid for tid, name in enumerate(threads, 1)}
    for begins, ends, thread, name, kind, about in sorted(
        _slices(recording.spans, names), key=itemgetter(0, 1)
    ):
        begun, ended = nanoseconds(begins), nanoseconds(-ends)
        yield {
            "ph": "X", "pid": pid, "tid": tids[thread], "ts": begun / 1e3, "dur": (ended - begun) / 1e3,
            "name": name, "cat": kind, "args": dict(about),
        }  # fmt: skip
    for one in recording.memory:
        counted = {"resident": one.resident_bytes, "reserved": one.reserved_bytes}
        at = nanoseconds(one.at) / 1e3
        yield {"ph": "C", "pid": pid, "ts": at, "name": "tier (bytes)", "args": counted}


def _slices(
    spans: Sequence[Span], names: Mapping[str, str]
) -> Iterator[tuple[float, float, str, str, str, Facts]]:
    """Spans and their phases: (begin, minus end, thread, name, kind, facts).

    Sorted by the first two, what lies inside another comes after it.
    """
    for span in spans:
        name, facts, layer = span.name, span.facts, str(span.facts.get("layer"))
        if layer in names:
            name, facts = names[layer] + name.removeprefix(layer), {**facts, "layer": names[layer]}
        yield span.times[0], -span.times[-1], span.thread, name, span.kind, facts
        for phase, begun, ended in zip(span.phases, span.times, span.times[1:], strict=False):
            yield begun, -ended, span.thread, phase, "phase", {}
