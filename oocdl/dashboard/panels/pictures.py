"""A sample: image, target and what is predicted; slices of it where the dataset is not seen here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from bokeh.io import curdoc
from bokeh.models import Column
from bokeh.models.ui import UIElement
from bokeh.models.widgets import Button

from oocdl.dashboard.panels import style
from oocdl.dashboard.panels.style import Panel
from oocdl.dashboard.panels.volume import Planes
from oocdl.dashboard.samples import Picture, Sample, SamplePictures, read_outputs, read_volumes
from oocdl.dashboard.view import View
from oocdl.errors import OocdlError

CLASSES = (
    "#101418",
    "#6b7480",
    style.ORANGE,
    style.SKY,
    style.GREEN,
    style.YELLOW,
    style.BLUE,
    style.RED,
    style.PURPLE,
    "#ffffff",
)
"""Colours of classes; those of higher numbers come round again."""
HEIGHT = 320
PREDICT = "Predict this sample"


class Pictures(Panel):
    """Read anew with each commit, while they are looked at; from the dataset where that is seen here."""

    def __init__(self) -> None:
        self._words = style.html()
        self._shown: tuple[int, int, SamplePictures | None] | None = None
        self._card = style.card(self._words)
        self._planes = Planes()
        self._sample: Sample | None = None
        self._button = Button(label=PREDICT, width=190, tags=[style.CONTROL], stylesheets=[style.DRAWN])
        self._button.on_click(self._asked)
        self._process: subprocess.Popen[bytes] | None = None
        self.root: Column = Column(children=[self._card], sizing_mode="stretch_width")

    def draw(self, view: View) -> None:
        """Show what the view has now."""
        commits = [note for note in view.notes if note["kind"] == "commit"]
        if view.facts is None or not commits:
            self._words.text = "there is no commit yet"
            return
        step, sample = commits[-1]["step"], commits[-1].get("sample", 0)
        if (step, sample, view.pictures) == self._shown:
            return
        self._shown = step, sample, view.pictures
        missing: list[str] = []
        self._sample = None
        try:
            self._sample = read_volumes(view.facts, sample)
        except (OocdlError, OSError, KeyError) as error:
            missing = [f"the dataset cannot be read here: {error}"]
        slices = [] if view.pictures is None or self._sample is not None else [*view.pictures.pictures]
        try:
            outputs, more = read_outputs(view.run, sample, view.facts.outputs)
        except (OocdlError, OSError, KeyError) as error:
            outputs, more = [], [f"outputs cannot be read here: {error}"]
        figures: list[UIElement] = [style.card(_drawn(one)) for one in (*slices, *outputs)]
        top: list[UIElement] = []
        if self._sample is not None:
            self._planes.show(self._sample, None, {})
            top, more = [self._button, self._planes.root], []
            lines = [f"sample {sample}, in the last step of the commit at step {step}"]
        else:
            lines = ["middle slices" if figures else "no image or volume"]
            if view.pictures is not None:
                lines = [f"{lines[0]}; inputs and targets of step {view.pictures.step}"]
        self.root.children = [*top, *([style.grid(figures)] if figures else []), self._card]
        lines += [f"outputs of step {step}"] if outputs else []
        self._words.text = "<br>".join(map(style.text, [", ".join(lines), *missing, *more]))

    def _asked(self) -> None:
        """Predict the sample that is shown, in a process of its own."""
        if self._process is not None or self.view is None or self._shown is None:
            return
        folder = tempfile.TemporaryDirectory(prefix="oocdl-page-")
        out = Path(folder.name) / "predicted.npz"
        words = [str(self.view.run.absolute()), str(self._shown[1]), str(out)]
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
            self._button.label, self._button.disabled = PREDICT, False
            folder.cleanup()

        callback = document.add_periodic_callback(look, 500)

    def _predicted(self, out: Path, process: subprocess.Popen[bytes]) -> None:
        """Show what a process has predicted, or why it has not."""
        assert process.stderr is not None
        complaint = process.stderr.read().decode(errors="replace").strip()
        process.stderr.close()
        if process.returncode != 0 or self._sample is None or not out.is_file():
            self._words.text = style.text(f"no prediction: {complaint or 'its process ended'}")
            return
        with np.load(out) as found:
            dice = dict(zip(found["classes"].tolist(), found["dice"].tolist(), strict=True))
            self._planes.show(self._sample, found["labels"].astype(np.float32), dice)
            self._words.text = style.text(
                f"{found['name']} of sample {self._sample.number}, by the weights of the last commit; "
                "Dice is of all voxels"
            )


def _drawn(shown: Picture) -> UIElement:
    rows, columns = shown.pixels.shape
    made = style.picture(shown.title, HEIGHT)
    pixels = np.mod(shown.pixels, len(CLASSES)) if shown.is_labels else shown.pixels
    mapper = style.class_colors(CLASSES) if shown.is_labels else style.greys(pixels)
    made.image([pixels[::-1]], x=0, y=0, dw=columns, dh=rows, color_mapper=mapper)
    figure: UIElement = made
    return figure
