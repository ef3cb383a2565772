"""Slices of a sample: input, target and output, side by side."""

from __future__ import annotations

import numpy as np
from bokeh.models import Column, LinearColorMapper
from bokeh.models.ui import UIElement

from oocdl.dashboard.panels.style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    card,
    grid,
    html,
    plot,
    text,
)
from oocdl.dashboard.pictures import Picture, SamplePictures, read_outputs
from oocdl.dashboard.view import View
from oocdl.errors import OocdlError

CLASSES = ("#101418", "#6b7480", ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE, "#ffffff")
"""Colours of classes; those of higher numbers come round again."""
GREYS = tuple(f"#{level:02x}{level:02x}{level:02x}" for level in range(256))
HEIGHT = 320


class Pictures:
    """Read anew with each commit, while they are looked at."""

    def __init__(self) -> None:
        self._words = html()
        self._shown: tuple[int, int, SamplePictures | None] | None = None
        self._card = card(self._words)
        self.root = Column(children=[self._card], sizing_mode="stretch_width")

    def update(self, view: View) -> None:
        """Show what the view has now."""
        commits = [note for note in view.notes if note["kind"] == "commit"]
        if view.facts is None or not commits:
            self._words.text = "there is no commit yet"
            return
        step, sample = commits[-1]["step"], commits[-1].get("sample", 0)
        if (step, sample, view.pictures) == self._shown:
            return
        self._shown = step, sample, view.pictures
        found = [] if view.pictures is None else [*view.pictures.pictures]
        try:
            outputs, missing = read_outputs(view.run, sample, view.facts.outputs)
        except (OocdlError, OSError, KeyError) as error:
            outputs, missing = [], [f"outputs cannot be read here: {error}"]
        figures: list[UIElement] = [card(_drawn(picture)) for picture in (*found, *outputs)]
        self.root.children = [grid(figures), self._card] if figures else [self._card]
        lines = ["middle slices" if figures else "no image or volume"]
        if view.pictures is not None:
            lines = [f"{lines[0]}; inputs and targets of step {view.pictures.step}"]
        lines += [f"outputs of step {step}"] if outputs else []
        self._words.text = "<br>".join(map(text, [", ".join(lines), *missing]))


def _drawn(picture: Picture) -> UIElement:
    rows, columns = picture.pixels.shape
    made = plot(picture.title, HEIGHT, tools="pan,wheel_zoom,reset", match_aspect=True)
    if picture.is_labels:
        pixels = np.mod(picture.pixels, len(CLASSES))
        mapper = LinearColorMapper(palette=list(CLASSES), low=-0.5, high=len(CLASSES) - 0.5)
    else:
        pixels = picture.pixels
        low, high = float(np.nanmin(pixels)), float(np.nanmax(pixels))
        mapper = LinearColorMapper(palette=list(GREYS), low=low, high=max(high, low + 1e-12))
    made.image([pixels[::-1]], x=0, y=0, dw=columns, dh=rows, color_mapper=mapper)
    made.axis.visible = False
    made.grid.grid_line_color = None
    shown: UIElement = made
    return shown
