"""In the process of ``fit``: has the scheduler of its client show the run on Dask's dashboard."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oocdl.dashboard import dask_plugin
from oocdl.dashboard.mirror import Source
from oocdl.events import Event, Listener
from oocdl.runtime.cluster.member import mark_of
from oocdl.runtime.cluster.watch import in_loop, on_scheduler

SEND_SECONDS = 1.0
"""What is new is sent no more often than this."""
END_SECONDS = 10.0


@contextmanager
def shown(client: Any, run: Path, tell: Callable[[str], None], tells_address: bool) -> Iterator[Listener]:
    """Show a run on Dask's dashboard as long as the block lasts; gives a listener of the run.

    Where that fails, ``tell`` is called with a line, once, and the run goes on. ``tells_address``: whether
    the address of the page is told as well.
    """
    name = uuid.uuid4().hex[:12]
    try:
        begun: dask_plugin.Begun = on_scheduler(
            client, dask_plugin.begin, name, client.id, str(run), mark_of(run)
        )
    except Exception as error:  # of whatever kind: the page must not end the run
        tell(_failed(run, error))
        yield _deaf
        return
    if not begun.is_shown:
        if tells_address:
            tell(f"Dask shows no dashboard, so there is no page in it; `oocdl dashboard {run}` shows the run")
        yield _deaf
        return
    if tells_address:
        tell(
            f"dashboard: {client.dashboard_link.removesuffix('status')}{dask_plugin.PAGE} until the run ends"
        )
    sender = None if begun.sees_run else Sender(client, name, run, tell)
    try:
        yield sender or _deaf
    finally:
        if sender is not None:
            sender.finish()
        try:
            on_scheduler(client, dask_plugin.end, name)
        except Exception as error:  # the run has ended, or is about to say why not
            tell(f"the page in Dask's dashboard could not be taken away ({_in_words(error)})")


class Sender:
    """Sends what is new in the files of a run to a scheduler that does not see them. A listener.

    It never waits: what could not be sent yet is sent with an event after it.
    """

    def __init__(self, client: Any, name: str, run: Path, tell: Callable[[str], None]) -> None:
        self._client, self._name, self._run, self._tell = client, name, run, tell
        self._source, self._sent_at = Source(run), float("-inf")
        self._sending: Future[Any] | None = None
        self._failed = False

    def __call__(self, event: Event) -> None:
        """Send what is new, if the last that was sent has come and is a second old."""
        if self._failed or (self._sending is not None and not self._sending.done()):
            return
        if time.monotonic() - self._sent_at < SEND_SECONDS:
            return
        self._send()

    def finish(self) -> None:
        """Send all that is left; waits for it for some seconds."""
        deadline = time.monotonic() + END_SECONDS
        while not self._failed:
            if self._sending is not None:
                self._wait(deadline - time.monotonic())
            if self._failed or not self._send():
                return

    def _send(self) -> bool:
        """Send what is new; whether there is anything."""
        try:
            if self._sending is not None:
                self._sending.result(0)
            self._sending, self._sent_at = None, time.monotonic()
            pieces = self._source.news()
            if pieces:
                call = self._client._run_on_scheduler(dask_plugin.receive, self._name, pieces)
                self._sending = in_loop(self._client, call)
            return bool(pieces)
        except Exception as error:  # of whatever kind: the page must not end the run
            self._fail(error)
            return False

    def _wait(self, seconds: float) -> None:
        assert self._sending is not None
        try:
            self._sending.result(max(seconds, 0.0))
        except Exception as error:
            self._sending.cancel()
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        self._tell(_failed(self._run, error))


def _failed(run: Path, error: Exception) -> str:
    return f"no page in Dask's dashboard ({_in_words(error)}); `oocdl dashboard {run}` shows the run"


def _in_words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _deaf(event: Event) -> None:
    """A listener that has nothing to do."""
