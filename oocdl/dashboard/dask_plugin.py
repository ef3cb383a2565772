"""Shows runs on a page of Dask's dashboard as long as they last, on the scheduler.

Bokeh is imported only where Dask itself shows a dashboard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from distributed import Scheduler, SchedulerPlugin

from oocdl.runtime import dask_private
from oocdl.runtime.cluster.member import mark_of

NAME = "oocdl-page"
PAGE = "oocdl"
"""Last part of the page's address, and its label in the navigation bar."""


@dataclass(eq=False)
class Pages(SchedulerPlugin):
    """The runs that are shown; the one that has begun last is on the page."""

    scheduler: Scheduler
    runs: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Name of a run -> its client's id, and its ``oocdl.dashboard.page.Shown``."""
    remove: Callable[[], None] | None = None
    """Takes away the page, once there is one."""

    name = NAME

    def begin(self, run: str, client_id: str, folder: Path) -> None:
        """Show a run, unless it is shown."""
        from oocdl.dashboard import dask_page

        if run not in self.runs:
            self.runs[run] = client_id, dask_page.look(folder)
        if self.remove is None:
            dask = dask_pages(self.scheduler)
            self.remove = dask_page.add(
                self.scheduler, dask, PAGE, lambda: [shown for _, shown in self.runs.values()]
            )

    async def end(self, run: str) -> None:
        """Show a run no longer; browsers that look at it keep what they have."""
        _, shown = self.runs.pop(run, ("", None))
        if shown is not None:
            await shown.refresh()
            shown.over = True
        if not self.runs:
            if self.remove is not None:
                self.remove()
            self.remove = None
            if NAME in self.scheduler.plugins:
                self.scheduler.remove_plugin(NAME)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Stop showing the runs of a client that has left, or whose connection is broken."""
        for run in [run for run, (client_id, _) in self.runs.items() if client_id == client]:
            dask_private.call_soon(scheduler, self.end, run)


async def begin(run: str, client_id: str, path: str, mark: str, dask_scheduler: Scheduler) -> str:
    """Show a run on the scheduler's dashboard; returns why it cannot be shown, or nothing."""
    if dask_pages(dask_scheduler) is None:
        return "Dask shows no dashboard"
    if mark_of(Path(path)) != mark:
        return "Dask's scheduler does not see the run"
    pages = _pages(dask_scheduler)
    if pages is None:
        pages = Pages(dask_scheduler)
        dask_scheduler.add_plugin(pages, name=NAME)
    try:
        pages.begin(run, client_id, Path(path))
    except BaseException:
        await pages.end(run)
        raise
    return ""


def is_shown(run: str, dask_scheduler: Scheduler) -> bool:
    """Return whether a run is shown here."""
    pages = _pages(dask_scheduler)
    return pages is not None and run in pages.runs


async def end(run: str, dask_scheduler: Scheduler) -> None:
    """Show a run no longer."""
    pages = _pages(dask_scheduler)
    if pages is not None:
        await pages.end(run)


def _pages(scheduler: Scheduler) -> Pages | None:
    return cast(Pages | None, scheduler.plugins.get(NAME))


def dask_pages(scheduler: Scheduler) -> Any:
    """Return the application of Dask's own pages; None if there is none."""

    def is_bokeh(application: Any) -> bool:
        return any(one.__name__ == "BokehTornado" for one in type(application).__mro__)

    return next(filter(is_bokeh, scheduler.http_application.applications), None)
