"""A run that is shown: one view for all who look at it, and a page for each of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from bokeh.document import Document
from bokeh.resources import Resources
from bokeh.server.tornado import BokehTornado
from tornado.httputil import HTTPServerRequest
from tornado.web import ErrorHandler

from oocdl.dashboard.page import Page
from oocdl.dashboard.view import View
from oocdl.errors import OocdlError, printable

UPDATE_SECONDS = 0.75
"""Seconds between two looks, and two updates: news, told once a second, are shown before the next."""
PATIENCE_SECONDS = 2.0
"""Seconds that a newly opened page waits for files that are being read."""
TITLE = "oocdl"
UNUSED = ("bokeh-mathjax", "bokeh-gl")
"""Scripts of Bokeh that no page needs."""


class Refused(ErrorHandler):
    """The answer to a request that does not name this server as it is called."""

    def write_error(self, status_code: int, **_: Any) -> None:
        """Say which names are answered to; nothing of the request is repeated."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        known = ", ".join(self.application.settings["hosts"])
        self.finish(f"this page answers as {known}; --allow-host adds a name\n")


class Pages(BokehTornado):
    """Serves pages to who asks for one of the host names that are listed, "*" for any.

    So a page of another site, whose name was given this address, reads nothing. Scripts that no page needs
    are left out: browsers would keep 10 MiB of them.
    """

    def __init__(self, *arguments: Any, hosts: Sequence[str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.settings["hosts"] = [host.lower() for host in hosts]

    def find_handler(self, request: HTTPServerRequest, **options: Any) -> Any:
        """Find who answers a request: scripts, pages and connections alike."""
        if not {request.host_name, "*"}.intersection(self.settings["hosts"]) or request.host_name == "*":
            return self.get_handler_delegate(request, Refused, {"status_code": 403})
        return super().find_handler(request, **options)

    def resources(self, absolute_url: str | bool | None = None) -> Resources:
        """Tell what scripts a page loads."""
        every: Resources = super().resources(absolute_url)
        return every.clone(components=[name for name in every.components if name not in UNUSED])


class Shown:
    """The view of a run, read on by one loop; ``tell`` is called with a line where that fails.

    With ``of`` it is one of the runs that ``of`` shows, and reads on. Files are read by a thread: a disk of
    the network that hangs does not stop who serves the page.
    """

    def __init__(self, view: View, tell: Callable[[str], None], of: Shown | None = None) -> None:
        self.view, self._tell = view, tell
        self.over = False
        """Whether nothing more comes: pages stay as they are."""
        self.reading: threading.Lock = threading.Lock() if of is None else of.reading
        self._told = ""

    async def refresh(self) -> None:
        """Read what is new of the run."""
        try:
            await asyncio.to_thread(self._read)
        except (OSError, OocdlError) as error:
            if str(error) != self._told:
                self._told = str(error)
                self._tell(f"the page of {self.view.run} cannot be read on: {error}")

    def _read(self) -> None:
        with self.reading:
            self.view.refresh()

    def page(self) -> Any:
        """Make a page of what is known; it has a ``root`` and an ``update``."""
        return Page(self.view)

    def add_page(self, document: Document) -> None:
        """Give a browser's session its page, which is updated about once a second."""
        if not self.reading.acquire(timeout=PATIENCE_SECONDS):
            raise OSError(f"{self.view.run} is still being read: load the page again in a moment")
        try:
            page = self.page()
        finally:
            self.reading.release()

        def update() -> None:
            if self.reading.acquire(blocking=False):  # else the next call shows what is being read
                try:
                    page.update()
                finally:
                    self.reading.release()
                if self.over:
                    document.remove_periodic_callback(callback)

        callback = document.add_periodic_callback(update, round(1000 * UPDATE_SECONDS))
        document.title = f"{printable(self.view.run.absolute().name)} · {TITLE}"
        document.add_root(page.root)
