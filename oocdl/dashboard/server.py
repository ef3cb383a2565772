"""Serves the page of one run, or of all in a folder, at the loopback address, with all that it needs.

``python -m oocdl.dashboard.server RUN`` is a process that does; its first line on stdout is the address.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.server import BaseServer
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets

from oocdl.dashboard.page import TEMPLATE, UPDATE_SECONDS, Page, Pages, Shown
from oocdl.dashboard.runs import RUN, Runs, RunsPage
from oocdl.dashboard.view import View
from oocdl.errors import OocdlError, ResourceError

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost", "[::1]")
"""Names by which a browser calls this machine, or the end of a tunnel to it."""


async def serve(
    run: Path, port: int, tell: Callable[[str], None], parent: int | None = None, allowed: Sequence[str] = ()
) -> None:
    """Serve the page of a run, or of all runs in a folder, until Ctrl-C.

    It also ends once the process ``parent`` is no longer that of this one. ``port`` 0 is any that is free.
    ``tell`` is called with the page's address, once it is there. ``allowed`` are further host names by which
    the page may be asked for. Raises StoreError where there is no run, ResourceError if the port is taken.
    """
    shown = Shown(View(run), _complain) if (run / "run.json").is_file() else ShownRuns(Runs(run))
    await shown.refresh()

    def document(made: Document) -> None:
        made.template = TEMPLATE
        shown.add_page(made)

    try:
        sockets = bind_sockets(port, LOOPBACK, family=socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ResourceError(
            f"port {port} of {LOOPBACK} cannot be had ({error}); give another --port"
        ) from error
    port = sockets[0].getsockname()[1]
    # A page of another origin, whatever address its name is given, gets no connection.
    origins = [*(f"{host}:{port}" for host in HOSTS), *(f"{host}:*" for host in allowed)]
    pages = {"/": Application(FunctionHandler(document))}
    application = Pages(pages, extra_websocket_origins=origins, hosts=[*HOSTS, *allowed])
    http = HTTPServer(application)
    http.add_sockets(sockets)
    server = BaseServer(IOLoop.current(), application, http)
    server.start()
    tell(f"http://{LOOPBACK}:{port}/")
    ended = asyncio.Event()
    if parent is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    try:
        while not ended.is_set() and (parent is None or os.getppid() == parent):
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), UPDATE_SECONDS)
            await shown.refresh()
        if server.get_sessions():  # whoever looks is left with the end of the run
            await asyncio.sleep(2 * UPDATE_SECONDS)
    finally:
        server.stop(wait=False)  # its event loop ends now


class ShownRuns(Shown):
    """All runs of a folder, and each of them where the address asks for it."""

    def __init__(self, runs: Runs) -> None:
        super().__init__(cast(View, runs), _complain)
        self._runs = runs

    def page(self, document: Document) -> Any:
        context: Any = document.session_context
        asked = context.request.arguments.get(RUN, []) if context is not None else []
        view = self._runs.views.get(asked[0].decode(errors="replace")) if asked else None
        return RunsPage(self._runs) if view is None else Page(view)


def _complain(text: str) -> None:
    print(f"oocdl: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Serve; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m oocdl.dashboard.server", description=__doc__)
    parser.add_argument("run", type=Path, help="run directory, or a folder of them")
    parser.add_argument("--port", type=int, default=0, help="default: one that is free")
    parser.add_argument("--parent", type=int, help="process id: ends when this one is no longer its child")
    given = parser.parse_args()
    if given.parent is not None:
        os.nice(10)  # the one that trains goes first
    try:
        with suppress(KeyboardInterrupt):  # how it is ended
            asyncio.run(serve(given.run, given.port, partial(print, flush=True), given.parent))
    except OocdlError as error:
        _complain(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
