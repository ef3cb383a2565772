"""A sample: image, target and what is predicted, in planes; slices where the dataset is not seen here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.io import curdoc
from bokeh.models import Column, ColumnDataSource, LinearColorMapper
from bokeh.models.ui import UIElement
from bokeh.models.widgets import Button, Slider

from oocdl.dashboard.panels import style
from oocdl.dashboard.panels.style import Panel
from oocdl.dashboard.samples import Picture, SamplePictures, Volume, contours, plane, read_outputs, read_whole
from oocdl.dashboard.view import View
from oocdl.errors import OocdlError

CLASSES = (style.ORANGE, style.SKY, style.GREEN, style.YELLOW, style.BLUE, style.RED, style.PURPLE, "#ffffff")
"""Colours of classes from 1; those of higher numbers come round again."""
CLEAR = "#00000000"
NAMES = {
    "x, y, z (NIfTI)": ("sagittal: x", "coronal: y", "axial: z"),
    "z, y, x (ITK, DICOM)": ("axial: z", "coronal: y", "sagittal: x"),
}
"""Order of axes -> what is seen along each."""
NIFTI = next(iter(NAMES))
DARKS = ("#101418", "#6b7480")
"""Colours of classes 0 and 1 in a slice, which has no image below; those of the others follow."""
SLICE_HEIGHT, PLANE_HEIGHT = 320, 330
PREDICT = "Predict this sample"


GREYS = tuple(f"#{level:02x}{level:02x}{level:02x}" for level in range(256))


def picture(title: str, height: int) -> Any:
    """Make an empty figure for an image, in whose colours nothing changes by night."""
    return style.bare(style.plot(title, height, "pan,wheel_zoom,reset", match_aspect=True, stylesheets=[]))


def greys(pixels: np.ndarray) -> LinearColorMapper:
    """Map the least of pixels to black, the largest to white."""
    low, high = float(np.nanmin(pixels)), float(np.nanmax(pixels))
    return LinearColorMapper(palette=list(GREYS), low=low, high=max(high, low + 1e-12))


class Planes:
    """Three planes of a volume with a slider each, or the one of an image."""

    def __init__(self) -> None:
        self.root = style.column()
        self._order = style.choice("axes", list(NAMES), 190, self._turned)
        self._volume = self._target = self._predicted = np.zeros((0, 0), np.float32)
        """Pixels of the image, and classes of target and prediction, which are zeros where there are none."""
        self._sources: list[dict[str, ColumnDataSource]] = []
        self._sliders: list[Slider] = []
        self._legend, self._greys = style.html(), greys(np.zeros(1))

    def show(self, sample: SamplePictures, predicted: Volume | None, dice: dict[int, float]) -> None:
        """Show a sample, and what is predicted of it."""
        image, target = sample.first("input"), sample.first("target")
        volume, before = (image or sample.pictures[0]).pixels, self._volume
        outlined = target.pixels if target is not None and target.is_labels else None
        self._volume, none = volume, np.zeros_like(volume)
        scale = greys(volume)
        self._greys.update(low=scale.low, high=scale.high)
        self._target, self._predicted = (
            none if classes is None or classes.shape != volume.shape else classes
            for classes in (outlined, predicted)
        )
        if before.shape != volume.shape:
            self._build(volume)
        self._draw(*range(len(self._sources)))
        named = [(CLASSES[(n - 1) % len(CLASSES)], f"class {n}: Dice {d:.3f}") for n, d in dice.items() if n]
        lines = [] if self._target is none else [(style.GREY, "outlines: target, areas: prediction")]
        self._legend.text = style.chips([*lines, *named])

    def _turned(self, _attr: str, _old: object, _new: object) -> None:
        self._build(self._volume)
        self._draw(*range(len(self._sources)))

    def _build(self, volume: Volume) -> None:
        self._sources, self._sliders = [], []
        classes = style.class_colors(CLASSES, low_color=CLEAR)
        place = {"x": 0, "y": 0, "dw": "dw", "dh": "dh"}
        cards = []
        for axis in range(3 if volume.ndim == 3 else 1):
            title = NAMES[str(self._order.value)][axis] if volume.ndim == 3 else "image"
            chart = picture(title, PLANE_HEIGHT)
            grey, colored = (style.source("image", "dw", "dh") for _ in range(2))
            contour = style.source("x0", "y0", "x1", "y1", "color")
            chart.image("image", source=grey, color_mapper=self._greys, **place)
            chart.image("image", source=colored, color_mapper=classes, alpha=0.5, **place)
            chart.segment("x0", "y0", "x1", "y1", source=contour, line_color="color", line_width=1.6)
            chart.title.text_color = style.FAINT
            self._sources.append({"grey": grey, "classes": colored, "contour": contour})
            parts = [chart]
            if volume.ndim == 3:
                extent = volume.shape[axis]
                at = style.slider("slice", extent - 1, extent // 2, sizing_mode="stretch_width")
                at.on_change("value", partial(self._moved, axis))
                self._sliders.append(at)
                parts.append(at)
            cards.append(style.card(*parts))
        top = [self._order] if volume.ndim == 3 else []
        self.root.children = [*top, style.grid(cards, 330), self._legend]

    def _moved(self, axis: int, _attr: str, _old: object, _new: object) -> None:
        self._draw(axis)

    def _draw(self, *axes: int) -> None:
        for axis in axes:
            at = int(self._sliders[axis].value) if self._sliders else 0
            cut = partial(plane, axis=axis, at=at, is_nifti=str(self._order.value) == NIFTI)
            sources = self._sources[axis]
            sources["grey"].data = _image(cut(self._volume))
            classes = cut(self._predicted)
            sources["classes"].data = _image(np.where(classes > 0, (classes - 1) % len(CLASSES), -1.0))
            borders = contours(cut(self._target))
            colors = [CLASSES[int(n - 1) % len(CLASSES)] for n in borders.pop("of")]
            sources["contour"].data = {**borders, "color": colors}


class Pictures(Panel):
    """Read anew with each commit, while they are looked at; from the dataset where that is seen here."""

    def __init__(self) -> None:
        self._words = style.html()
        self._shown: tuple[int, int, SamplePictures | None] | None = None
        self._card = style.card(self._words)
        self._planes = Planes()
        self._sample: SamplePictures | None = None
        self._button = Button(label=PREDICT, width=190, **style.CONTROL)
        self._button.on_click(self._asked)
        self._process: subprocess.Popen[bytes] | None = None
        self.root: Column = style.column(self._card)

    def draw(self, view: View) -> None:
        if view.facts is None or view.commit is None:
            self._words.text = "there is no commit yet"
            return
        step, sample = view.commit["step"], view.commit.get("sample", 0)
        if (step, sample, view.pictures) == self._shown:
            return
        self._shown = step, sample, view.pictures
        missing: list[str] = []
        self._sample = None
        try:
            self._sample = read_whole(view.facts, step, sample)
        except (OocdlError, OSError, KeyError) as error:
            missing = [f"the dataset cannot be read here: {error}"]
        slices = [] if view.pictures is None or self._sample is not None else [*view.pictures.pictures]
        try:
            outputs, more = read_outputs(view.run, sample, view.facts.outputs)
        except (OocdlError, OSError, KeyError) as error:
            outputs, more = [], [f"outputs cannot be read here: {error}"]
        figures = [style.card(_drawn(one)) for one in (*slices, *outputs)]
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
        with np.load(out) as arrays:
            dice = dict(zip(arrays["classes"].tolist(), arrays["dice"].tolist(), strict=True))
            self._planes.show(self._sample, arrays["labels"].astype(np.float32), dice)
            self._words.text = style.text(
                f"{arrays['name']} of sample {self._sample.sample}, by the weights of {arrays['version']}; "
                "Dice is of all voxels whose label counts"
            )


def _drawn(shown: Picture) -> Any:
    rows, columns = shown.pixels.shape
    palette = (*DARKS, *CLASSES)
    pixels = np.mod(shown.pixels, len(palette)) if shown.is_labels else shown.pixels
    mapper = style.class_colors(palette) if shown.is_labels else greys(pixels)
    chart = picture(shown.title, SLICE_HEIGHT)
    chart.image([pixels[::-1]], x=0, y=0, dw=columns, dh=rows, color_mapper=mapper)
    return chart


def _image(pixels: Volume) -> dict[str, list[object]]:
    rows, columns = pixels.shape
    return {"image": [np.ascontiguousarray(pixels, np.float32)], "dw": [columns], "dh": [rows]}
