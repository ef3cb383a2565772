"""Tells by heartbeats what members do, and notices a crew of which nobody moves.

A member that runs a unit, reads, writes or gets a bundle moves, however slow it is, and is never given up as
long as its process answers. Where nobody does any of this, all wait for each other, or for a message that is
lost: they would wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from oocdl.runtime.lost import WorkersLost

STILL_TELL_SECONDS = 8.0
"""Seconds without a move after which the user is told who waits for what."""
STILL_SECONDS = 60.0
"""Seconds without a move after which the crew is given up; more where much may be on its way."""
LEAST_RATE_BYTES = 1 << 20
"""Least number of bytes on their way that come in a second."""
NAMED = 3
"""Number of workers of which the user is told what they wait for."""


@dataclass(eq=False)
class Work:
    """Counts what one member works at; used by all its threads."""

    running: int = 0
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, and count it as work as long as it lasts."""
        with self.lock:
            self.running += 1
        try:
            return function(*arguments)
        finally:
            with self.lock:
                self.running -= 1
                self.done += 1

    def count(self) -> None:
        """Count something that has come, or was given."""
        with self.lock:
            self.done += 1


class Report(NamedTuple):
    """The state of a member's work. If two reports are equal, nothing has moved between them.

    Heartbeats carry it as a list.
    """

    busy: int
    """Number of units and the like that run now, and do not wait for memory."""
    moved: Sequence[int]
    """Counts that grow: units that were done, bundles that came or were given, bytes of the spill."""
    arriving_bytes: int
    """Bytes of bundles that were asked for and may be on their way."""
    words: str
    """Words for the user that tell what the member waits for."""


class Stillness:
    """Notices that nobody of a crew moves. ``tell`` is called with lines for the user."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._last: Mapping[str, Report | None] = {}
        self.begin(0)

    def begin(self, nbytes: int) -> None:
        """Begin to wait for something else, for which the driver sends or gets so many bytes."""
        self._seconds, self._told, self._nbytes = 0.0, False, nbytes

    def look(self, reports: Mapping[str, Report | None], seconds: float) -> None:
        """Take the reports of members (None: none), ``seconds`` after the last look. Raises WorkersLost."""
        known = [report for report in reports.values() if report is not None]
        if reports != self._last or any(report.busy > 0 for report in known):
            if self._told:
                self._tell("workers go on")
            self._last, self._seconds, self._told = dict(reports), 0.0, False
            return
        self._seconds += seconds
        arriving_bytes = self._nbytes + max((report.arriving_bytes for report in known), default=0)
        most_seconds = STILL_SECONDS + arriving_bytes / LEAST_RATE_BYTES
        words = f"no worker has moved for {self._seconds:.0f} s ({_named(reports)})"
        if self._seconds >= most_seconds:
            raise WorkersLost(words)
        if self._seconds >= STILL_TELL_SECONDS and not self._told:
            self._told = True
            self._tell(f"{words}; they are gathered anew after {most_seconds:.0f} s")


def _named(reports: Mapping[str, Report | None]) -> str:
    words = [
        f"{address} {'does not answer' if report is None else report.words}"
        for address, report in reports.items()
    ]
    return "; ".join([*words[:NAMED], *([".."] if len(words) > NAMED else [])])
