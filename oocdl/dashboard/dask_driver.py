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
from oocdl.dashboard.dask_plugin import GROWING, REPLACED, Piece
from oocdl.dashboard.series import Growing, Watched
from oocdl.events import Event, WorkersChanged
from oocdl.runtime import dask_private
from oocdl.runtime.cluster.member import mark_of
from oocdl.runtime.cluster.watch import in_loop, on_scheduler
from oocdl.storage.dataset.data_array import one_line

SEND_SECONDS = 1.0
"""Minimum seconds between two messages with what is new."""
END_SECONDS = 10.0
MOST_BYTES = 4 << 20
"""Approximate maximum of bytes sent at a time; the rest comes with the next."""


class Source:
    """The files of a run that its page reads, for a scheduler that does not see them."""

    def __init__(self, run: Path) -> None:
        self._replaced = {name: Watched(run / name) for name in REPLACED}
        self._growing = {name: Growing(run / name) for name in GROWING}

    def news(self) -> list[Piece]:
        """Return what is new since the last call, at most about ``MOST_BYTES``."""
        new_data = ((name, file.news()) for name, file in self._replaced.items())
        found = [Piece(name, 0, data) for name, data in new_data if data is not None]
        for name, growing in self._growing.items():
            if sum(len(piece.data) for piece in found) >= MOST_BYTES:
                break
            if (data := growing.news(MOST_BYTES)) or growing.again:
                found.append(Piece(name, growing.at, data))
        return found


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
        self._source: Source | None = None
        """Gives what is new in the run's files, for a scheduler that does not see them; None: it does."""
        self._sending: Future[Any] | None = None
        self._sent_at = float("-inf")
        self._begin()

    def __call__(self, event: Event) -> None:
        """Take an event. Nothing waits: what could not be sent yet is sent with a later one."""
        if isinstance(event, WorkersChanged) and self._has_page and self._ask(dask_plugin.is_shown) is False:
            self._begin()  # on a scheduler that has started anew
        has_arrived = self._sending is None or self._sending.done()
        if has_arrived and time.monotonic() - self._sent_at >= SEND_SECONDS:
            self._send(0.0)

    def __enter__(self) -> Showing:
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + END_SECONDS
        while self._send(deadline - time.monotonic()):
            pass
        if self._is_begun:
            try:
                on_scheduler(self._client(), dask_plugin.end, self._name)
            except Exception as error:  # the run has ended, or is about to say why not
                self._tell(f"the page in Dask's dashboard could not be taken away ({one_line(error)})")

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the plugin for this run; where that fails, tell it, and return None."""
        try:
            return on_scheduler(self._client(), function, self._name, *arguments)
        except Exception as error:  # of whatever kind: the page must not end the run
            if isinstance(error, ImportError):  # the scheduler lacks oocdl
                self._is_begun = self._has_page = False
            self._tell_failure(error)
            return None

    def _begin(self) -> None:
        client, self._source, self._sending, self._is_begun = self._client(), None, None, True
        begun = self._ask(dask_plugin.begin, client.id, str(self._run), mark_of(self._run))
        if begun is None:
            return
        self._is_begun = self._has_page = begun != "no dashboard"
        if begun == "sent":
            self._source = Source(self._run)
        if self._tells_address and self._has_page:
            link = client.dashboard_link.removesuffix("status")
            self._tell(f"dashboard: {link}{dask_plugin.PAGE} until the run ends")
        elif self._tells_address:
            self._tell(f"Dask shows no dashboard, so there is no page in it; {self._other}")

    def _send(self, wait_seconds: float) -> bool:
        """Send what is new, once the last message has arrived; return whether there was anything."""
        if self._source is None:
            return False
        try:
            if self._sending is not None:
                self._sending.result(max(wait_seconds, 0.0))
            self._sending, self._sent_at = None, time.monotonic()
            if pieces := self._source.news():
                client = self._client()
                call = dask_private.run_on_scheduler(client, dask_plugin.receive, self._name, pieces)
                self._sending = in_loop(client, call)
            return bool(pieces)
        except Exception as error:  # of whatever kind: the page must not end the run
            if self._sending is not None:
                self._sending.cancel()
            self._source = None
            self._tell_failure(error)
            return False

    def _tell_failure(self, error: Exception) -> None:
        self._tell(f"no page in Dask's dashboard ({one_line(error)}); {self._other}")

    @property
    def _other(self) -> str:
        return f"`oocdl dashboard {quote(str(self._run))}` shows the run"
