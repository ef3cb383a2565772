"""The runs in a folder: found, read on, and shown beside each other on one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from oocdl.dashboard.answers import learning, remaining
from oocdl.dashboard.panels import style
from oocdl.dashboard.panels.words import settings_text
from oocdl.dashboard.series import thinned
from oocdl.dashboard.view import View
from oocdl.errors import OocdlError, StoreError
from oocdl.report.history_view import smoothed
from oocdl.report.units import DEFAULTS, value_text

MOST_DEPTH = 3
"""Maximum depth of folders that are searched."""
MOST_RUNS = 100
"""Maximum number of runs that are read: the most recently written ones."""
MOST_CURVES = 14
MOST_POINTS = 500
SMOOTHING = 0.8
RUN = "run"
"""The argument of the page's address that names one run."""


class Runs:
    """The runs below a folder. ``refresh`` reads what is new, as that of a ``View`` does."""

    def __init__(self, folder: Path) -> None:
        self.run, self.version = folder, 0
        self.views: dict[str, View] = {}
        """Path in the folder -> view, most recently written first."""
        if not any(_found(folder)):
            raise StoreError(f"there is no run in {folder}")

    def refresh(self) -> bool:
        """Find runs, and read on; whether there is anything new."""
        newest = sorted(_found(self.run), key=_changed, reverse=True)[:MOST_RUNS]
        names = {str(path.relative_to(self.run)): path for path in newest}
        views, changed = dict[str, View](), False
        for name, path in names.items():
            view = self.views.get(name) or View(path)
            with suppress(OocdlError, OSError):  # one that is damaged hides no other, and is read anew
                changed |= view.refresh()
                views[name] = view
        changed |= list(views) != list(self.views)
        self.views = views
        self.version += changed
        return changed


def _found(folder: Path, depth: int = MOST_DEPTH) -> Iterator[Path]:
    try:
        inside = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return
    for path in inside:
        if (path / "run.json").is_file():
            yield path
        elif depth > 1:
            yield from _found(path, depth - 1)


def _changed(run: Path) -> float:
    try:
        return (run / "history").stat().st_mtime
    except OSError:
        return 0.0


class RunsPage:
    """A table of runs, and their losses in one picture. Lay out ``root``, and call ``update``."""

    def __init__(self, view: Runs) -> None:
        self.view, self._version = view, -1
        folder = f"<span style='color:{style.FAINT_CSS}'>{style.text(view.run.absolute())}</span>"
        self._source = style.source("xs", "ys", "color", "name")
        self._figure = style.plot("Losses, smoothed", 420)
        self._figure.multi_line(
            "xs", "ys", source=self._source, line_color="color", line_width=1.8, legend_field="name"
        )
        style.hover(self._figure, {"run": "@name", "loss": "$data_y{0.0000}"})
        self._figure.xaxis.axis_label = "steps"
        style.with_legend(self._figure, "top_right")
        self._table = style.html(size="13px", color=style.INK_CSS)
        head = style.html(f"<b>oocdl</b> &nbsp;{folder}", "18px", style.INK_CSS)
        cards = style.card(self._figure), style.card(self._table, sheets=[style.SCROLLED])
        sheet = ":host { max-width: 1500px; margin: 0 auto; padding: 10px 14px; gap: 12px; }"
        self.root = style.column(head, *cards, sheets=[sheet])
        self.update()

    def update(self) -> None:
        if self._version == self.view.version:
            return
        self._version = self.view.version
        newest = list(self.view.views.items())[:MOST_CURVES]
        shown = [thinned(len(view.steps), MOST_POINTS) for _, view in newest]
        losses = [smoothed(view.steps["loss"], SMOOTHING) for _, view in newest]
        self._source.data = {
            "xs": [view.steps["step"][at] for (_, view), at in zip(newest, shown, strict=True)],
            "ys": [loss[at] for loss, at in zip(losses, shown, strict=True)],
            "color": [style.CYCLE[place % len(style.CYCLE)] for place in range(len(newest))],
            "name": [name for name, _ in newest],
        }
        self._table.text = _table(self.view.views)


def _table(views: dict[str, View]) -> str:
    settings = {name: settings_text(view) for name, view in views.items()}
    differing = _differing([view.settings for view in views.values()])
    heads = ("run", "loss", "done", "steps", "s a step", *differing)
    rows = []
    for name, view in views.items():
        steps = view.steps
        address = f"?{RUN}={quote(name, safe='')}"
        link = f"<a style='color:{style.LINK_CSS}' href='{address}'>{style.text(name)}</a>"
        seconds = f"{np.nanmedian(steps['seconds'][-20:]):.3g}" if len(steps) else ""
        own = (settings[name].get(key, "") for key in differing)
        told = (learning(view).short, remaining(view).short, view.done, seconds, *own)
        rows.append([link, *map(style.text, told)])
    cell = "padding:3px 14px 3px 0;text-align:left;white-space:nowrap;"
    cell += f"border-bottom:1px solid {style.LINE_CSS}"
    title = f"{cell};color:{style.FAINT_CSS};font-weight:600"
    head = "".join(f"<th style='{title}'>{style.text(one)}</th>" for one in heads)
    lines = ["".join(f"<td style='{cell}'>{one}</td>" for one in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    font = f"font-family:{style.FONT};border-collapse:collapse"
    return f"<table style='{font}'><tr>{head}</tr>{body}</table>"


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return names of settings that are not the same in all runs; fields without a value do not count.

    >>> _differing([{"seed": 0, "loss": {"type": "MSE"}}, {"loss": {"type": "MSE", "weight": None}}])
    ['seed']
    """
    names = dict.fromkeys(name for found in settings for name in found)
    texts = {name: {value_text(found.get(name), DEFAULTS, True) for found in settings} for name in names}
    return [name for name, different in texts.items() if len(different) > 1]
