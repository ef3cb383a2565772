"""Writes the page of a run as one HTML file with everything in it: no server, no network."""

from __future__ import annotations

from pathlib import Path

from bokeh.embed import file_html
from bokeh.resources import INLINE

from oocdl.dashboard.page import TEMPLATE, Page
from oocdl.dashboard.panels.style import CONTROL
from oocdl.dashboard.view import View
from oocdl.storage.files import reporting, write_text


def write(run: Path, target: Path, tables: str) -> None:
    """Write the page of a run; ``tables`` is HTML to show with it, whose names are escaped.

    Raises StoreError where there is no run or ``target`` cannot be written.
    """
    view = View(run)
    view.refresh()
    page = Page(view)
    page.whole(tables)
    for model in page.root.references():
        if CONTROL in model.tags:
            model.update(visible=False)  # there is no server that would do what it asks for
    title = f"oocdl: {run.name}"
    text = file_html(page.root, INLINE, title, template=TEMPLATE, suppress_callback_warning=True)
    with reporting(target):
        write_text(target, text)
