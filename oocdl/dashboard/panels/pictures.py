"""A sample: image, target and what is predicted; slices of it where the dataset is not seen here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from bokeh.io import curdoc
from bokeh.models import Column, LinearColorMapper
from bokeh.models.ui import UIElement
from bokeh.models.widgets import Button

from oocdl.dashboard.panels.style import (
    BLUE,
    CONTROL,
    DRAWN,
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
from oocdl.dashboard.panels.volume import Planes
from oocdl.dashboard.samples.slices import Picture, SamplePictures, read_outputs
from oocdl.dashboard.samples.volumes import Sample, read_volumes
from oocdl.dashboard.view import View
from oocdl.errors import OocdlError

CLASSES = ("#101418", "#6b7480", ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE, "#ffffff")
"""Colours of classes; those of higher numbers come round again."""
GREYS = tuple(f"#{level:02x}{level:02x}{level:02x}" for level in range(256))
HEIGHT = 320


class Pictures:
    """Read anew with each commit, while they are looked at; from the dataset where that is seen here."""

    def __init__(self) -> None:
        self._words = html()
        self._shown: tuple[int, int, SamplePictures | None] | None = None
        self._card = card(self._words)
        self._planes = Planes()
        self._sample: Sample | None = None
        self._button = Button(label="Predict this sample", width=190, tags=[CONTROL], stylesheets=[DRAWN])
        self._button.on_click(self._asked)
        self._view: View | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.root = Column(children=[self._card], sizing_mode="stretch_width")

    def update(self, view: View) -> None:
        """Show what the view has now."""
        self._view = view
        commits = [note for note in view.notes if note["kind"] == "commit"]
        if view.facts is None or not commits:
            self._words.text = "there is no commit yet"
            return
        step, sample = commits[-1]["step"], commits[-1].get("sample", 0)
        if (step, sample, view.pictures) == self._shown:
            return
        self._shown = step, sample, view.pictures
        missing: list[str] = []
        volumes: Sample | None = None
        try:
            volumes = read_volumes(view.facts, sample)
        except (OocdlError, OSError, KeyError) as error:
            missing = [f"the dataset cannot be read here: {error}"]
        self._sample = volumes
        found = [] if view.pictures is None or volumes is not None else [*view.pictures.pictures]
        try:
            outputs, more = read_outputs(view.run, sample, view.facts.outputs)
        except (OocdlError, OSError, KeyError) as error:
            outputs, more = [], [f"outputs cannot be read here: {error}"]
        figures: list[UIElement] = [card(_drawn(picture)) for picture in (*found, *outputs)]
        top: list[UIElement] = []
        if volumes is not None:
            self._planes.show(volumes, None, {})
            top, more = [self._button, self._planes.root], []
            lines = [f"sample {sample}, in the last step of the commit at step {step}"]
        else:
            lines = ["middle slices" if figures else "no image or volume"]
            if view.pictures is not None:
                lines = [f"{lines[0]}; inputs and targets of step {view.pictures.step}"]
        self.root.children = [*top, *([grid(figures)] if figures else []), self._card]
        lines += [f"outputs of step {step}"] if outputs else []
        self._words.text = "<br>".join(map(text, [", ".join(lines), *missing, *more]))

    def _asked(self) -> None:
        """Predict the sample that is shown, in a process of its own."""
        if self._process is not None or self._view is None or self._shown is None:
            return
        folder = tempfile.TemporaryDirectory(prefix="oocdl-page-")
        out = Path(folder.name) / "predicted.npz"
        words = [str(self._view.run.absolute()), str(self._shown[1]), str(out)]
        command = [sys.executable, "-m", "oocdl.cli.predict_sample", *words]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self._button.label, self._button.disabled = "Predicting ..", True
        document = curdoc()

        def look() -> None:
            if self._process is None or self._process.poll() is None:
                return
            document.remove_periodic_callback(callback)
            self._predicted(out, self._process)
            self._process = None
            self._button.label, self._button.disabled = "Predict this sample", False
            folder.cleanup()

        callback = document.add_periodic_callback(look, 500)

    def _predicted(self, out: Path, process: subprocess.Popen[bytes]) -> None:
        """Show what a process has predicted, or why it has not."""
        assert process.stderr is not None
        complaint = process.stderr.read().decode(errors="replace").strip()
        process.stderr.close()
        if process.returncode != 0 or self._sample is None or not out.is_file():
            self._words.text = text(f"no prediction: {complaint or 'its process ended'}")
            return
        with np.load(out) as found:
            dice = dict(zip(found["classes"].tolist(), found["dice"].tolist(), strict=True))
            self._planes.show(self._sample, found["labels"].astype(np.float32), dice)
            self._words.text = text(
                f"{found['name']} of sample {self._sample.number}, by the weights of the last commit; "
                "Dice is of all voxels"
            )


def _drawn(picture: Picture) -> UIElement:
    rows, columns = picture.pixels.shape
    made = plot(picture.title, HEIGHT, tools="pan,wheel_zoom,reset", match_aspect=True, stylesheets=[])
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
