"""The page of a run: a head with four answers, and tabs; one view for all who look, or one HTML file."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bokeh.core.templates import get_env
from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.models import LayoutDOM, TabPanel, Tabs
from bokeh.resources import INLINE, Resources
from bokeh.server.tornado import BokehTornado
from tornado.httputil import HTTPServerRequest
from tornado.web import ErrorHandler

from oocdl.dashboard.panels import style
from oocdl.dashboard.panels.layer_panels import LayerTable, Network, SlowestLayers
from oocdl.dashboard.panels.learning import Learning
from oocdl.dashboard.panels.machine_panel import Memory, Rates
from oocdl.dashboard.panels.pictures import Pictures
from oocdl.dashboard.panels.step_panels import StepMap, Timeline
from oocdl.dashboard.panels.style import Panel
from oocdl.dashboard.panels.words import Header, Log, Settings
from oocdl.dashboard.view import View
from oocdl.errors import OocdlError, printable
from oocdl.storage.files import reporting, write_text

# Texts: a model could be part of a single browser's document only.
TABS = f""".bk-tab {{ font-family: {style.FONT}; font-size: 13px; color: {style.INK_CSS}; padding: 6px 12px;
  border: none; outline: none; }}
.bk-tab.bk-active {{ color: {style.LINK_CSS}; background: transparent;
  border-bottom: 2px solid {style.LINK_CSS}; font-weight: 600; }}
.bk-header {{ border-bottom: 1px solid {style.LINE_CSS}; margin-bottom: 8px; overflow-x: auto; }}"""
PAGE = """:host { max-width: 1500px; margin: 0 auto; padding: 10px 14px; box-sizing: border-box;
  overflow-x: clip; }"""
TEMPLATE = get_env().from_string(
    "{% extends base %}{% block preamble %}"
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"{style.THEME}{{% endblock %}}"
)
"""Shows the page at the width of a phone, and dark in dark mode."""
PANELS: Mapping[str, Callable[[], tuple[Panel, ...]]] = {
    "Overview": lambda: (Learning(small=True), StepMap(), Memory(small=True), SlowestLayers()),
    "Learning": lambda: (Learning(),),
    "Step": lambda: (StepMap(height=400), Timeline()),
    "Machine": lambda: (Memory(), Rates()),
    "Layers": lambda: (LayerTable(),),
    "Network": lambda: (Network(),),
    "Pictures": lambda: (Pictures(),),
    "Settings": lambda: (Settings(),),
    "Messages": lambda: (Log(),),
}
"""Tab title -> function that makes its panels."""


class Page:
    """All panels of a run, for one browser. Lay out ``root``, and call ``update`` about once a second.

    A browser holds what is in a tab only while it is open: figures take memory there.
    """

    def __init__(self, view: View) -> None:
        self.view, self._version = view, -1
        self._header = Header()
        # An empty layout would be complained of.
        self._places = {title: style.column(style.html("…")) for title in PANELS}
        self._panels: dict[str, tuple[Panel, ...]] = {}
        self._contents: dict[str, list[Any]] = {}
        tabs = [TabPanel(title=title, child=place) for title, place in self._places.items()]
        self._chosen = Tabs(tabs=tabs, sizing_mode="stretch_width", stylesheets=[TABS])
        self._chosen.on_change("active", self._turned)
        self.root = style.column(self._header.root, self._chosen, sheets=[PAGE])
        self._show(self._open())

    def _turned(self, _attr: str, old: int, _new: int) -> None:
        self._show(self._open())
        list(self._places.values())[old].children = [style.html("…")]

    def update(self) -> None:
        """Show what the view has now, if it has something new; of the tabs, only the one that is seen."""
        if self._version == self.view.version:
            self._show()  # time goes on
        else:
            self._version = self.view.version
            self._show(self._open())

    def _open(self) -> str:
        return list(PANELS)[int(self._chosen.active)]

    def _show(self, *titles: str) -> None:
        self._header.update(self.view)
        for title in titles:
            if title not in self._panels:
                self._panels[title] = PANELS[title]()
                roots = [panel.root for panel in self._panels[title]]
                self._contents[title] = [style.grid(roots)] if title == "Overview" else roots
            for panel in self._panels[title]:
                panel.update(self.view)
            if self._places[title].children != self._contents[title]:
                self._places[title].children = self._contents[title]

    def whole(self, tables: str) -> LayoutDOM:
        """Make all tabs, for a page without a server; ``tables`` is HTML for one more, its names escaped."""
        self._show(*PANELS)
        words = style.html(tables, color=style.INK_CSS)
        report = TabPanel(title="Report", child=style.card(words, sheets=[style.SCROLLED]))
        self._chosen.tabs = [*self._chosen.tabs, report]
        for model in self.root.references():
            if model.tags == style.CONTROL["tags"]:
                model.update(visible=False)  # there is no server that would do what it asks for
        return self.root


def write(run: Path, target: Path, tables: str) -> None:
    """Write the page of a run as one HTML file with everything in it: no server, no network.

    ``tables`` is HTML to show with it, whose names are escaped. Raises StoreError where there is no run or
    ``target`` cannot be written.
    """
    view = View(run)
    view.refresh()
    root, title = Page(view).whole(tables), f"oocdl: {run.name}"
    text = file_html(root, INLINE, title, template=TEMPLATE, suppress_callback_warning=True)
    with reporting(target):
        write_text(target, text)


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

    Files are read by a thread: a disk of the network that hangs does not stop who serves the page.
    """

    def __init__(self, view: View, tell: Callable[[str], None]) -> None:
        self.view, self._tell = view, tell
        self.over = False
        """Whether nothing more comes: pages stay as they are."""
        self._reading, self._told = threading.Lock(), ""

    async def refresh(self) -> None:
        """Read what is new of the run."""
        try:
            await asyncio.to_thread(self._read)
        except (OSError, OocdlError) as error:
            if str(error) != self._told:
                self._told = str(error)
                self._tell(f"the page of {self.view.run} cannot be read on: {error}")

    def _read(self) -> None:
        with self._reading:
            self.view.refresh()

    def page(self, document: Document) -> Any:
        """Make the page that a browser asks for: it has a ``view``, a ``root`` and an ``update``."""
        return Page(self.view)

    def add_page(self, document: Document) -> None:
        """Give a browser's session its page, which is updated about once a second."""
        if not self._reading.acquire(timeout=PATIENCE_SECONDS):
            raise OSError(f"{self.view.run} is still being read: load the page again in a moment")
        try:
            page = self.page(document)
        finally:
            self._reading.release()

        def update() -> None:
            if self._reading.acquire(blocking=False):  # else the next call shows what is being read
                try:
                    page.update()
                finally:
                    self._reading.release()
                if self.over:
                    document.remove_periodic_callback(callback)

        callback = document.add_periodic_callback(update, round(1000 * UPDATE_SECONDS))
        document.title = f"{printable(page.view.run.absolute().name)} · {TITLE}"
        document.add_root(page.root)
