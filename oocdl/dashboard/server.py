"""Serves the page of one run at the loopback address of this machine, with all that a browser needs."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.server import BaseServer
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets

from oocdl.dashboard.page import TEMPLATE
from oocdl.dashboard.shown import UPDATE_SECONDS, Pages, Shown
from oocdl.dashboard.view import View
from oocdl.errors import ResourceError

LOOPBACK = "127.0.0.1"


def serve(run: Path, port: int, tell: Callable[[str], None], parent: int | None = None) -> None:
    """Serve the page of a run until Ctrl-C, or until the process ``parent`` is no longer that of this one.

    ``port`` 0 is any that is free. ``tell`` is called with the page's address, once it is there. Raises
    StoreError where there is no run, ResourceError if the port is taken.
    """
    asyncio.run(_serve(View(run), port, tell, parent))


async def _serve(view: View, port: int, tell: Callable[[str], None], parent: int | None) -> None:
    shown = Shown(view, _complain)
    await shown.refresh()

    def document(made: Document) -> None:
        made.template = TEMPLATE
        shown.add_page(made)

    sockets = _bound(port)
    port = sockets[0].getsockname()[1]
    # A page of another origin, whatever address its name is given, gets no connection.
    origins = [f"{LOOPBACK}:{port}", f"localhost:{port}"]
    application = Pages({"/": Application(FunctionHandler(document))}, extra_websocket_origins=origins)
    http = HTTPServer(application)
    http.add_sockets(sockets)
    server = BaseServer(IOLoop.current(), application, http)
    server.start()
    tell(f"http://{LOOPBACK}:{port}/")
    try:
        while parent is None or os.getppid() == parent:
            await asyncio.sleep(UPDATE_SECONDS)
            await shown.refresh()
    finally:
        server.stop(wait=False)  # its event loop ends now


def _bound(port: int) -> list[socket.socket]:
    try:
        return bind_sockets(port, LOOPBACK, family=socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ResourceError(
            f"port {port} of {LOOPBACK} cannot be had ({error}); give another --port"
        ) from error


def _complain(text: str) -> None:
    print(f"oocdl: {text}", file=sys.stderr, flush=True)
