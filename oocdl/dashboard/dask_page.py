"""Adds the page that shows a run, and a link to it, to the dashboard of a Dask scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.models.widgets import Div
from distributed import Scheduler
from distributed.dashboard.components.scheduler import env
from distributed.dashboard.scheduler import template_variables

from oocdl.dashboard.page import UPDATE_SECONDS, Pages, Shown
from oocdl.dashboard.view import View

__all__ = ["UPDATE_SECONDS", "add", "look"]
KEEP_ALIVE_MILLISECONDS = 500
"""Milliseconds between pings of open pages and between looks for closed ones, as on Dask's own pages."""
LAST_SECONDS = 5.0
"""Seconds that open pages have to show how the last run ended."""
logger = logging.getLogger(__name__)


def look(folder: Path) -> Shown:
    """Return the ``Shown`` of the run in a folder."""
    return Shown(View(folder), logger.warning)


def add(scheduler: Scheduler, dask: Any, name: str, newest: Callable[[], Shown | None]) -> Callable[[], None]:
    """Add the page to the dashboard of a scheduler, whose own pages ``dask`` serves.

    ``name`` is the last part of its address, and its navigation label. Returns a function that removes it.
    """
    known: dict[str, Any] = template_variables(scheduler)  # one for all pages, read whenever one is loaded

    def document(made: Document) -> None:
        made.template = env.get_template("simple.html")
        made.template_variables.update(known, prefix=dask.prefix)
        shown = newest()
        if shown is None:
            made.add_root(Div(text="A run begins: load this page again in a moment."))
        else:
            shown.add_page(made)

    origins = list(dask.websocket_origins)
    application = Pages(
        {f"/{name}": Application(FunctionHandler(document))},
        prefix=dask.prefix,
        use_index=False,
        extra_websocket_origins=origins,
        hosts=[origin.rpartition(":")[0] or origin for origin in origins],
        keep_alive_milliseconds=KEEP_ALIVE_MILLISECONDS,
        check_unused_sessions_milliseconds=KEEP_ALIVE_MILLISECONDS,
    )
    application.initialize(scheduler.loop)
    application.start()
    scheduler.http_application.add_application(application)
    known["pages"].insert(0, name)

    def remove() -> None:
        # A scheduler that closes has taken them away itself.
        for pages, one in ((known["pages"], name), (scheduler.http_application.applications, application)):
            if one in pages:
                pages.remove(one)
        # Browsers get what was last before. This is the event loop, which cannot be waited for.
        scheduler.loop.call_later(LAST_SECONDS, partial(application.stop, wait=False))

    return remove
