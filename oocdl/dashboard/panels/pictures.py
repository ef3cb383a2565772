"""A sample: slices of image and target as the run has written them, and of outputs that are kept."""

from __future__ import annotations

import numpy as np
from bokeh.models import Column, LinearColorMapper
from bokeh.models.ui import UIElement

from oocdl.dashboard.panels import style
from oocdl.dashboard.panels.style import Panel
from oocdl.dashboard.samples import Picture, read_outputs
from oocdl.dashboard.view import View
from oocdl.errors import OocdlError

CLASSES = (
    "#101418", "#6b7480", style.ORANGE, style.SKY, style.GREEN, style.YELLOW, style.BLUE, style.RED,
    style.PURPLE, "#ffffff",
)  # fmt: skip
"""Colours of classes; those of higher numbers come round again."""
GREYS = tuple(f"#{level:02x}{level:02x}{level:02x}" for level in range(256))
SLICE_HEIGHT = 320


class Pictures(Panel):
    """Read anew with each commit, while they are looked at."""

    def __init__(self) -> None:
        self._words = style.html()
        self._shown: object = None
        self._card = style.card(self._words)
        self.root: Column = Column(children=[self._card], sizing_mode="stretch_width")

    def draw(self, view: View) -> None:
        if view.facts is None or view.commit is None:
            self._words.text = "there is no commit yet"
            return
        if (view.commit, view.pictures) == self._shown:
            return
        self._shown = view.commit, view.pictures
        slices = [] if view.pictures is None else view.pictures.pictures
        try:
            outputs, more = read_outputs(view.run, view.commit.get("sample", 0), view.facts.outputs)
        except (OocdlError, OSError, KeyError) as error:
            outputs, more = [], [f"outputs cannot be read here: {error}"]
        figures = [style.card(_drawn(one)) for one in (*slices, *outputs)]
        lines = ["middle slices" if figures else "no image or volume"]
        if view.pictures is not None:
            lines = [f"{lines[0]}; inputs and targets of step {view.pictures.step}"]
        lines += [f"outputs of step {view.commit['step']}"] if outputs else []
        self._words.text = "<br>".join(map(style.text, [", ".join(lines), *more]))
        self.root.children = [*([style.grid(figures)] if figures else []), self._card]


def _drawn(shown: Picture) -> UIElement:
    rows, columns = shown.pixels.shape
    if shown.is_labels:
        pixels, mapper = np.mod(shown.pixels, len(CLASSES)), style.class_colors(CLASSES)
    else:
        pixels = shown.pixels
        low, high = float(np.nanmin(pixels)), float(np.nanmax(pixels))
        mapper = LinearColorMapper(palette=list(GREYS), low=low, high=max(high, low + 1e-12))
    # Nothing changes in its colours by night.
    chart = style.plot(shown.title, SLICE_HEIGHT, "pan,wheel_zoom,reset", match_aspect=True, stylesheets=[])
    style.bare(chart).image([pixels[::-1]], x=0, y=0, dw=columns, dh=rows, color_mapper=mapper)
    figure: UIElement = chart
    return figure
