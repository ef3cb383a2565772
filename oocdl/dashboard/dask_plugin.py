"""Shows runs on a page of Dask's dashboard, and to Prometheus, as long as they last, on the scheduler.

Bokeh is imported only where Dask itself shows a dashboard.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from distributed import Scheduler, SchedulerPlugin

from oocdl.dashboard.live_log import FACTS, FOLDER, LAST_PASS, NOTES, NOW, PICTURES, RESOURCES, STEPS
from oocdl.dashboard.series import put
from oocdl.dashboard.view import View
from oocdl.runtime import dask_private
from oocdl.runtime.cluster.member import mark_of

NAME = "oocdl-page"
PAGE = "oocdl"
"""Last part of the page's address, and its label in the navigation bar."""
GROWING = ("history/steps.jsonl", *(f"{FOLDER}/{name}" for name in (STEPS, RESOURCES, NOTES)))
"""Files that are written on at their end, or anew."""
REPLACED = ("run.json", *(f"{FOLDER}/{name}" for name in (FACTS, NOW, LAST_PASS, PICTURES)))
"""Files that are replaced as a whole."""
Begun = Literal["no dashboard", "seen", "sent"]
"""The scheduler's answer to a driver: it reads the run directory, or is to be sent what is in it."""


@dataclass(frozen=True)
class Piece:
    """The new content of a file."""

    name: str
    at: int
    """Byte offset in the file; 0: the file starts over with this piece."""
    data: bytes


def write(folder: Path, pieces: Iterable[Piece]) -> None:
    """Write what the driver has sent to the copy of the run in ``folder``."""
    for piece in pieces:
        if piece.name not in (*REPLACED, *GROWING):
            raise ValueError(f"'{piece.name}' is no file of a run's page")
        path = folder / piece.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if piece.at:
            with path.open("r+b") as stream:
                stream.seek(piece.at)
                stream.write(piece.data)
        else:
            put(path, piece.data)


@dataclass(eq=False)
class RunOnPage:
    """A run that is shown."""

    client_id: str
    folder: Path
    """The run directory, or the copy that the driver sends of it."""
    is_copy: bool
    shown: Any = None
    """An ``oocdl.dashboard.page.Shown``, once there is something to show."""


@dataclass(eq=False)
class Pages(SchedulerPlugin):
    """The runs that are shown, by their names; the one that has begun last is on the page."""

    scheduler: Scheduler
    runs: dict[str, RunOnPage] = field(default_factory=dict)

    name = NAME

    def __post_init__(self) -> None:
        with ExitStack() as undo:
            undo.callback(_page().add(self.scheduler, dask_pages(self.scheduler), PAGE, self.newest))
            undo.callback(asyncio.create_task(self._read()).cancel)
            undo.callback(register(lambda: [one.shown.view for one in self._shown()]))
            self.take_away = undo.pop_all().close
            """Takes away the page, what reads for it, and the numbers for Prometheus."""

    def _shown(self) -> list[RunOnPage]:
        return [one for one in self.runs.values() if one.shown is not None]

    def newest(self) -> Any:
        """Return the ``Shown`` of the run that has begun last; None while no run has anything to show."""
        return next((one.shown for one in reversed(self._shown())), None)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Stop showing the runs of a client that has left, or whose connection is broken."""
        for run in [run for run, one in self.runs.items() if one.client_id == client]:
            dask_private.call_soon(scheduler, end, run, scheduler)

    async def _read(self) -> None:
        while True:
            await asyncio.sleep(_page().UPDATE_SECONDS)
            for one in self._shown():
                await one.shown.refresh()


def _page() -> Any:
    from oocdl.dashboard import dask_page

    return dask_page


async def begin(run: str, client_id: str, path: str, mark: str, dask_scheduler: Scheduler) -> Begun:
    """Show a run on the scheduler's dashboard, if it has one."""
    if dask_pages(dask_scheduler) is None:
        return "no dashboard"
    await end(run, dask_scheduler)  # its driver had no answer to an earlier call
    pages = _pages(dask_scheduler)
    if pages is None:
        pages = Pages(dask_scheduler)
        dask_scheduler.add_plugin(pages, name=NAME)
    sees = mark != "" and mark_of(Path(path)) == mark
    folder = Path(path) if sees else Path(tempfile.mkdtemp(prefix="oocdl-page-"))
    one = pages.runs[run] = RunOnPage(client_id, folder, not sees)
    try:
        one.shown = _page().look(folder) if sees else None
    except BaseException:
        await end(run, dask_scheduler)
        raise
    return "seen" if sees else "sent"


def is_shown(run: str, dask_scheduler: Scheduler) -> bool:
    """Return whether a run is shown here."""
    pages = _pages(dask_scheduler)
    return pages is not None and run in pages.runs


async def receive(run: str, pieces: Sequence[Piece], dask_scheduler: Scheduler) -> None:
    """Take what is new of a run whose directory this scheduler does not see."""
    one = cast(Pages, dask_scheduler.plugins[NAME]).runs[run]
    await asyncio.to_thread(write, one.folder, pieces)
    one.shown = one.shown or _page().look(one.folder)


async def end(run: str, dask_scheduler: Scheduler) -> None:
    """Show a run no longer; browsers that look at it keep what they have."""
    pages = _pages(dask_scheduler)
    one = None if pages is None else pages.runs.pop(run, None)
    if pages is None or one is None:
        return
    if one.shown is not None:
        await one.shown.refresh()
        one.shown.over = True
    if one.is_copy:
        await asyncio.to_thread(shutil.rmtree, one.folder, ignore_errors=True)
    if not pages.runs:
        pages.take_away()
        if NAME in dask_scheduler.plugins:
            dask_scheduler.remove_plugin(NAME)


def _pages(scheduler: Scheduler) -> Pages | None:
    return cast(Pages | None, scheduler.plugins.get(NAME))


def dask_pages(scheduler: Scheduler) -> Any:
    """Return the application of Dask's own pages; None if there is none."""

    def is_bokeh(application: Any) -> bool:
        return any(one.__name__ == "BokehTornado" for one in type(application).__mro__)

    return next(filter(is_bokeh, scheduler.http_application.applications), None)


PREFIX = "oocdl"
GAUGES = {
    "step": "Steps that are done.",
    "loss": "Loss of the last step.",
    "lr": "Learning rate of the last step.",
    "seconds": "Seconds that the last step took.",
    "process_bytes": "Memory that a process has by the kernel's count, pages of files left out.",
    "tier_bytes": "Chunks in the RAM tier of a process.",
    "spilled_bytes": "Chunks of a process that are on its disk.",
}
"""Name of a number -> what it is; those of bytes are of each process."""


class RunCollector:
    """A collector for Prometheus's client. ``views`` returns the views of the runs that are shown."""

    def __init__(self, views: Callable[[], Iterable[View]]) -> None:
        self._views = views
        from prometheus_client.core import GaugeMetricFamily

        self._gauge = GaugeMetricFamily

    def describe(self) -> Iterable[Any]:
        """Claim no names: two schedulers of one process have the same."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Give all numbers, each with its run and, of a process, with that."""
        views = list(self._views())
        for name, words in GAUGES.items():
            labels = ["run", "process"] if name.endswith("_bytes") else ["run"]
            gauge = self._gauge(f"{PREFIX}_{name}", words, labels=labels)
            for view in views:
                for process, table in view.present.items() if len(labels) > 1 else [("", view.steps)]:
                    if len(table) and np.isfinite(number := float(table[name][-1])):
                        gauge.add_metric([str(view.run), process][: len(labels)], number)
            yield gauge


def register(views: Callable[[], Iterable[View]]) -> Callable[[], None]:
    """Give Prometheus the numbers of runs from now on; returns what ends that.

    Without its client (``prometheus_client``) Dask has no numbers for it either, and nothing happens.
    """
    if find_spec("prometheus_client") is None:
        return lambda: None
    from prometheus_client import REGISTRY

    collector = RunCollector(views)
    REGISTRY.register(collector)
    return lambda: REGISTRY.unregister(collector)
