"""A sample in three planes: image, prediction over it, and the target's contour over both."""

from __future__ import annotations

from functools import partial

import numpy as np
from bokeh.models import Column, ColumnDataSource
from bokeh.models.ui import UIElement
from bokeh.models.widgets import Slider

from oocdl.dashboard.panels import style
from oocdl.dashboard.samples import Sample, Volume, contours, plane

CLASSES = (style.ORANGE, style.SKY, style.GREEN, style.YELLOW, style.BLUE, style.RED, style.PURPLE, "#ffffff")
"""Colours of classes from 1; those of higher numbers come round again."""
CLEAR = "#00000000"
NAMES = {
    "x, y, z (NIfTI)": ("sagittal: x", "coronal: y", "axial: z"),
    "z, y, x (ITK, DICOM)": ("axial: z", "coronal: y", "sagittal: x"),
}
"""Order of axes -> what is seen along each."""
NIFTI = next(iter(NAMES))
HEIGHT = 330


class Planes:
    """Three planes of a volume with a slider each, or the one of an image."""

    def __init__(self) -> None:
        self.root = Column(sizing_mode="stretch_width")
        self._order = style.choice("axes", list(NAMES), width=190)
        self._order.on_change("value", self._turned)
        self._sample: Sample | None = None
        self._predicted: Volume | None = None
        self._sources: list[dict[str, ColumnDataSource]] = []
        self._sliders: list[Slider] = []
        self._legend = style.html()

    def show(self, sample: Sample, predicted: Volume | None, dice: dict[int, float]) -> None:
        """Show a sample, and what is predicted of it."""
        shape = sample.volume.shape
        is_same = self._sample is not None and self._sample.volume.shape == shape
        self._sample = sample
        self._predicted = predicted if predicted is not None and predicted.shape == shape else None
        if not is_same:
            self._build(sample.volume)
        for axis in range(len(self._sources)):
            self._draw(axis)
        named = [(CLASSES[(n - 1) % len(CLASSES)], f"class {n}: Dice {d:.3f}") for n, d in dice.items() if n]
        lines = [(style.GREY, "outlines: target, areas: prediction")] if sample.is_labels else []
        self._legend.text = style.chips([*lines, *named])

    def _turned(self, _attr: str, _old: object, _new: object) -> None:
        if self._sample is not None:
            sample, self._sample = self._sample, None
            self.show(sample, self._predicted, {})

    def _build(self, volume: Volume) -> None:
        """Make a figure for each plane."""
        self._sources, self._sliders = [], []
        mapper, classes = style.greys(volume), style.class_colors(CLASSES, low_color=CLEAR)
        place = {"x": 0, "y": 0, "dw": "dw", "dh": "dh"}
        cards: list[UIElement] = []
        for axis in range(3 if volume.ndim == 3 else 1):
            made = style.picture(NAMES[str(self._order.value)][axis] if volume.ndim == 3 else "image", HEIGHT)
            grey, colored = (style.source("image", "dw", "dh") for _ in range(2))
            contour = style.source("x0", "y0", "x1", "y1", "color")
            made.image("image", source=grey, color_mapper=mapper, **place)
            made.image("image", source=colored, color_mapper=classes, alpha=0.5, **place)
            made.segment("x0", "y0", "x1", "y1", source=contour, line_color="color", line_width=1.6)
            made.title.text_color = style.FAINT
            self._sources.append({"grey": grey, "classes": colored, "contour": contour})
            parts = [made]
            if volume.ndim == 3:
                extent = volume.shape[axis]
                at = style.slider("slice", extent - 1, extent // 2, sizing_mode="stretch_width")
                at.on_change("value", partial(self._moved, axis))
                self._sliders.append(at)
                parts.append(at)
            cards.append(style.card(*parts))
        top: list[UIElement] = [self._order] if volume.ndim == 3 else []
        self.root.children = [*top, style.grid(cards, 330), self._legend]

    def _moved(self, axis: int, _attr: str, _old: object, _new: object) -> None:
        self._draw(axis)

    def _draw(self, axis: int) -> None:
        """Show one plane where its slider is."""
        assert self._sample is not None
        at = int(self._sliders[axis].value) if self._sliders else 0
        cut = partial(plane, axis=axis, at=at, is_nifti=str(self._order.value) == NIFTI)
        sources, sample = self._sources[axis], self._sample
        if sample.image is not None:
            sources["grey"].data = _image(cut(sample.image))
        if self._predicted is not None:
            classes = cut(self._predicted)
            sources["classes"].data = _image(np.where(classes > 0, (classes - 1) % len(CLASSES), -1.0))
        if sample.target is not None and sample.is_labels:
            borders = contours(cut(sample.target))
            of = borders.pop("of")
            sources["contour"].data = {**borders, "color": [CLASSES[int(n - 1) % len(CLASSES)] for n in of]}


def _image(pixels: Volume) -> dict[str, list[object]]:
    rows, columns = pixels.shape
    return {"image": [np.ascontiguousarray(pixels, np.float32)], "dw": [columns], "dh": [rows]}
