"""Has the scheduler of the client of ``fit`` show the run on Dask's dashboard."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from shlex import quote
from typing import Any

from oocdl.dashboard import dask_plugin
from oocdl.dashboard.mirror import Source
from oocdl.events import Event, WorkersChanged
from oocdl.runtime import dask_private
from oocdl.runtime.cluster.member import mark_of
from oocdl.runtime.cluster.watch import in_loop, on_scheduler

SEND_SECONDS = 1.0
"""Minimum seconds between two messages with what is new."""
END_SECONDS = 10.0


class Showing:
    """Shows a run on Dask's dashboard as long as the block lasts. A listener and a context manager.

    ``client`` gives the client that the run has now: another one after its scheduler has started anew, which
    then shows the run. Where showing fails, ``tell`` is called with a line, and the run goes on.
    ``tells_address``: whether the address of the page is told as well.
    """

    def __init__(
        self, client: Callable[[], Any], run: Path, tell: Callable[[str], None], tells_address: bool
    ) -> None:
        self._client, self._run, self._tell, self._tells_address = client, run, tell, tells_address
        self._name = uuid.uuid4().hex[:12]
        """Name of the run on a scheduler: a run that begins twice, as its answer was lost, is there once."""
        self._is_begun, self._has_page = False, True
        """Whether the scheduler may have the run, and whether Dask has pages there."""
        self._sender: Sender | None = None
        self._begin()

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, WorkersChanged) and self._has_page and self._ask(dask_plugin.is_shown) is False:
            self._begin()  # on a scheduler that has started anew
        if self._sender is not None:
            self._sender(event)

    def __enter__(self) -> Showing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sender is not None:
            self._sender.finish()
        if self._is_begun:
            try:
                on_scheduler(self._client(), dask_plugin.end, self._name)
            except Exception as error:  # the run has ended, or is about to say why not
                self._tell(f"the page in Dask's dashboard could not be taken away ({_in_words(error)})")

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the plugin for this run; where that fails, tell it, and return None."""
        try:
            return on_scheduler(self._client(), function, self._name, *arguments)
        except Exception as error:  # of whatever kind: the page must not end the run
            if isinstance(error, ImportError):  # the scheduler lacks oocdl
                self._is_begun = self._has_page = False
            self._tell(_failed(self._run, error))
            return None

    def _begin(self) -> None:
        client, self._sender, self._is_begun = self._client(), None, True
        begun = self._ask(dask_plugin.begin, client.id, str(self._run), mark_of(self._run))
        if begun is None:
            return
        link = client.dashboard_link.removesuffix("status") if begun.is_shown else ""
        if self._tells_address:
            self._tell(
                f"dashboard: {link}{dask_plugin.PAGE} until the run ends"
                if begun.is_shown
                else "Dask shows no dashboard, so there is no page in it; "
                f"`oocdl dashboard {quote(str(self._run))}` shows the run"
            )
        self._is_begun = self._has_page = begun.is_shown
        if begun.is_shown and not begun.sees_run:
            self._sender = Sender(client, self._name, self._run, self._tell)


class Sender:
    """A listener that sends what is new in a run's files to a scheduler that does not see them.

    It never waits: what could not be sent yet is sent with a later event.
    """

    def __init__(self, client: Any, name: str, run: Path, tell: Callable[[str], None]) -> None:
        self._client, self._name, self._run, self._tell = client, name, run, tell
        self._source, self._sent_at = Source(run), float("-inf")
        self._sending: Future[Any] | None = None
        self._failed = False

    def __call__(self, event: Event) -> None:
        """Send what is new, if the last message has arrived and is at least ``SEND_SECONDS`` old."""
        has_arrived = self._sending is None or self._sending.done()
        if has_arrived and time.monotonic() - self._sent_at >= SEND_SECONDS:
            self._send(0.0)

    def finish(self) -> None:
        """Send all that is left, and wait for it at most ``END_SECONDS``."""
        deadline = time.monotonic() + END_SECONDS
        while self._send(deadline - time.monotonic()):
            pass

    def _send(self, wait_seconds: float) -> bool:
        """Send what is new, once the last message has arrived; return whether there was anything."""
        if self._failed:
            return False
        try:
            if self._sending is not None:
                self._sending.result(max(wait_seconds, 0.0))
            self._sending, self._sent_at = None, time.monotonic()
            pieces = self._source.news()
            if pieces:
                call = dask_private.run_on_scheduler(self._client, dask_plugin.receive, self._name, pieces)
                self._sending = in_loop(self._client, call)
            return bool(pieces)
        except Exception as error:  # of whatever kind: the page must not end the run
            if self._sending is not None:
                self._sending.cancel()
            self._failed = True
            self._tell(_failed(self._run, error))
            return False


def _failed(run: Path, error: Exception) -> str:
    command = f"`oocdl dashboard {quote(str(run))}`"
    return f"no page in Dask's dashboard ({_in_words(error)}); {command} shows the run"


def _in_words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
