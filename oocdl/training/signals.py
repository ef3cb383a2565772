"""Signals that stop a run: SIGINT (Ctrl-C), SIGTERM (a preempted job), SIGHUP (a lost terminal).

The exception of a signal is raised only where the trainer allows it, in a step or a callback. Anywhere else,
as in a commit, it waits: what is whole in memory is made durable first. A second signal does not wait.
Signals within a second of the first are the same one: a terminal and a launcher may both send it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from oocdl.host.signal_mask import STOPPING

SAME_SECONDS = 1.0


class Stopped(SystemExit):
    """SIGTERM or SIGHUP has stopped a run, after a commit; ``code`` is 143 or 129, as a shell counts."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number).name


def reason_of(stop: BaseException) -> str:
    """Name what has stopped a run.

    >>> reason_of(Stopped(15)), reason_of(KeyboardInterrupt())
    ('SIGTERM', 'SIGINT')
    """
    named = "SIGINT" if isinstance(stop, KeyboardInterrupt) else type(stop).__name__
    return stop.signal if isinstance(stop, Stopped) else named


class Signals:
    """Turns signals into exceptions while it is open: ``KeyboardInterrupt``, ``Stopped``.

    Only the main thread can have handlers. One that the program has set itself stays, and so does a signal
    that it ignores (``nohup``): the program then decides, and stops a run by raising ``KeyboardInterrupt`` or
    ``SystemExit``. One that is opened inside another takes its signals until it is closed.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, object] = {}
        self._pending: int | None = None
        self._allowed = self._raised = False
        self._taken_at = float("-inf")

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                handler = signal.getsignal(number)
                outer = getattr(handler, "__func__", None) is Signals._take
                if outer or handler in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = handler
                    signal.signal(number, self._take)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()
        if error is None:
            self.check()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Raise the exception of a signal at once in this block, also of one that came before it."""
        self._allowed = True
        try:
            self.check()
            yield
        finally:
            self._allowed = False

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Let a signal wait until the end of this block: it takes locks, which it would leave locked."""
        allowed, self._allowed = self._allowed, False
        try:
            yield
        finally:
            self._allowed = allowed
        if allowed:
            self.check()

    def check(self) -> None:
        """Raise the exception of a signal that has come; called where everything is as it should be."""
        number, self._pending = self._pending, None
        if number is not None:
            self._raised = True
            raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._taken_at < SAME_SECONDS:
            return
        self._taken_at, again = now, self._raised or self._pending is not None
        self._pending = number
        if self._allowed or again:
            self.check()
