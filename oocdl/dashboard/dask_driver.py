"""Has the scheduler of the client of ``fit`` show the run on Dask's dashboard."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oocdl.dashboard import dask_plugin
from oocdl.events import Event, WorkersChanged
from oocdl.runtime.cluster.member import mark_of
from oocdl.runtime.cluster.watch import on_scheduler


class Showing:
    """Shows a run on Dask's dashboard as long as the block lasts. A listener and a context manager.

    ``client`` gives the client that the run has now: another one after its scheduler has started anew, which
    then shows the run. Where showing fails, ``tell`` is called with a line, and the run goes on.
    ``tells_address``: whether the address of the page, or why there is none, is told as well.
    """

    def __init__(
        self, client: Callable[[], Any], run: Path, tell: Callable[[str], None], tells_address: bool
    ) -> None:
        self._client, self._run, self._tell, self._tells_address = client, run, tell, tells_address
        self._name = uuid.uuid4().hex[:12]
        """Name of the run on a scheduler: a run that begins twice, as its answer was lost, is there once."""
        self._may_be_shown = True
        self._begin()

    def __call__(self, event: Event) -> None:
        """Take an event."""
        is_other = isinstance(event, WorkersChanged) and self._may_be_shown
        if is_other and self._ask(dask_plugin.is_shown) is False:
            self._begin()  # on a scheduler that has started anew

    def __enter__(self) -> Showing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._may_be_shown:
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
                self._may_be_shown = False
            self._tell_there_is_none(_in_words(error))
            return None

    def _begin(self) -> None:
        client = self._client()
        refusal = self._ask(dask_plugin.begin, client.id, str(self._run), mark_of(self._run))
        if refusal:
            self._may_be_shown = False
        if refusal and self._tells_address:
            self._tell_there_is_none(refusal)
        if refusal == "" and self._tells_address:
            link = client.dashboard_link.removesuffix("status")
            self._tell(f"dashboard: {link}{dask_plugin.PAGE} until the run ends")

    def _tell_there_is_none(self, reason: str) -> None:
        self._tell(f"no page in Dask's dashboard ({reason}); `oocdl dashboard {self._run}` shows the run")


def _in_words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
