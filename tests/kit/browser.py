"""A real browser that looks at pages: headless Chromium, with all that it asks for and complains of."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-precise-memory-info",
)  # fmt: skip
DESKTOP, PHONE = (1280, 800), (390, 844)

SOURCES = """() => {
    const plain = x => x === null || x.length === undefined || typeof x == 'string' ? x : Array.from(x, plain)
    return Bokeh.documents.flatMap(d => [...d._all_models.values()])
        .filter(m => m.type == 'ColumnDataSource')
        .map(m => Object.fromEntries(Object.entries(m.data).map(([k, v]) => [k, plain(v)])))
}"""
"""Data of all sources of a page, as its browser has them."""
FRAME = """title => {
    const walk = view => {
        if (view.model.type == 'Figure' && view.model.title.text == title) {
            const canvas = view.canvas_view.el.getBoundingClientRect()
            const {left, top, width, height} = view.frame.bbox
            if (canvas.width > 0) return {x: canvas.x + left, y: canvas.y + top, width, height}
        }
        return (view.child_views ?? []).map(walk).find(found => found)
    }
    return Bokeh.documents[0].roots().map(root => walk(Bokeh.index.get_by_id(root.id)))[0]
}"""
"""Where the inside of a figure is."""
IDLE = "() => window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle"
TURN_SECONDS = 0.2


@dataclass
class Seen:
    """A page that is open, and what went wrong or outside."""

    page: Page
    host: str = ""
    outside: list[str] = field(default_factory=list)
    """Requests to any host but the page's own."""
    complaints: list[str] = field(default_factory=list)
    """Errors on the console, exceptions, answers that are none, windows that open."""

    warnings: list[str] = field(default_factory=list)
    """Warnings on the console: pages of a run that has only begun have some."""

    def open(self, address: str) -> None:
        """Load a page and wait until it is drawn."""
        self.host = urlsplit(address).netloc
        self.page.goto(address)
        self.page.wait_for_function(IDLE)

    def column(self, *columns: str) -> list[list[Any]]:
        """The last of these columns, of each source that has them all: of a tab that is not seen too."""
        found: list[dict[str, list[Any]]] = self.page.evaluate(SOURCES)
        return [one[columns[-1]] for one in found if set(columns) <= set(one)]

    def awaits(self, what: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until something holds; fails if it does not in time."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, "it did not come about"
            self.page.wait_for_timeout(1000 * TURN_SECONDS)

    def tooltip(self, title: str) -> str:
        """The words that show when a mouse rests on a figure; fails if nowhere in it any do."""
        box = self.page.evaluate(FRAME, title)
        if box["y"] + box["height"] > self.page.viewport_size["height"]:
            self.page.evaluate("y => window.scrollBy(0, y)", box["y"] - 100)
            self.page.wait_for_timeout(1000 * TURN_SECONDS)
            box = self.page.evaluate(FRAME, title)
        for down in (0.5, 0.35, 0.65, 0.25, 0.8):
            for along in (0.5, 0.6, 0.4, 0.7, 0.3):
                self.page.mouse.move(box["x"] + along * box["width"], box["y"] + down * box["height"])
                self.page.wait_for_timeout(1000 * TURN_SECONDS)
                tips = self.page.locator(".bk-tooltip-content").all()
                shown = [tip.inner_text() for tip in tips if tip.is_visible()]
                if any(shown):
                    return "\n".join(shown)
        raise AssertionError(f"no tooltip in {title}")


@contextmanager
def browser(size: tuple[int, int] = DESKTOP) -> Iterator[Seen]:
    """An empty page of a browser of its own; a phone's has fingers in the place of a mouse."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            folder, executable_path=CHROMIUM, headless=True, args=list(FLAGS),
            viewport={"width": size[0], "height": size[1]}, is_mobile=size == PHONE, has_touch=size == PHONE,
        )  # fmt: skip
        try:
            seen = Seen(context.pages[0])
            page = seen.page
            page.on("request", lambda request: _note_outside(seen, request.url))
            page.on("websocket", lambda socket: _note_outside(seen, socket.url))
            kinds = {"error": seen.complaints, "warning": seen.warnings}
            page.on("console", lambda line: kinds.get(line.type, []).append(line.text))
            page.on("pageerror", lambda error: seen.complaints.append(str(error)))
            page.on("requestfailed", lambda request: seen.complaints.append(f"failed: {request.url}"))
            page.on(
                "dialog",
                lambda dialog: (seen.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()),
            )
            yield seen
        finally:
            context.close()


def _note_outside(seen: Seen, address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme not in ("data", "blob", "about") and parts.netloc != seen.host:
        seen.outside.append(address)
