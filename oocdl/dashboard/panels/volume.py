"""A sample in three planes: image, prediction over it, and the target's contour over both."""

from __future__ import annotations

from functools import partial

import numpy as np
from bokeh.models import Column, ColumnDataSource, LinearColorMapper
from bokeh.models.ui import UIElement
from bokeh.models.widgets import Slider

from oocdl.dashboard.panels.style import (
    BLUE,
    CONTROL,
    DRAWN,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    card,
    chips,
    choice,
    grid,
    html,
    plot,
)
from oocdl.dashboard.samples.volumes import Sample, Volume, contours, plane

CLASSES = (ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE, "#ffffff")
"""Colours of classes from 1; those of higher numbers come round again."""
GREYS = tuple(f"#{level:02x}{level:02x}{level:02x}" for level in range(256))
CLEAR = "#00000000"
ORDERS = ("x, y, z (NIfTI)", "z, y, x (ITK, DICOM)")
NAMES = {
    ORDERS[0]: ("sagittal: x", "coronal: y", "axial: z"),
    ORDERS[1]: ("axial: z", "coronal: y", "sagittal: x"),
}
HEIGHT = 330


class Planes:
    """Three planes of a volume with a slider each, or the one of an image."""

    def __init__(self) -> None:
        self.root = Column(sizing_mode="stretch_width")
        self._order = choice("axes", list(ORDERS), width=190)
        self._order.on_change("value", self._turned)
        self._sample: Sample | None = None
        self._predicted: Volume | None = None
        self._sources: list[dict[str, ColumnDataSource]] = []
        self._sliders: list[Slider] = []
        self._legend = html()

    def show(self, sample: Sample, predicted: Volume | None, dice: dict[int, float]) -> None:
        """Show a sample, and what is predicted of it."""
        volume = sample.image if sample.image is not None else sample.target
        assert volume is not None
        same = self._sample is not None and _shape(self._sample) == volume.shape
        self._sample = sample
        self._predicted = predicted if predicted is not None and predicted.shape == volume.shape else None
        if not same:
            self._build(volume)
        for axis in range(len(self._sources)):
            self._draw(axis)
        named = [(CLASSES[(n - 1) % len(CLASSES)], f"class {n}: Dice {d:.3f}") for n, d in dice.items() if n]
        lines = [(GREY, "outlines: target, areas: prediction")] if sample.is_labels else []
        self._legend.text = chips([*lines, *named])

    def _turned(self, _attr: str, _old: object, _new: object) -> None:
        if self._sample is not None:
            sample, self._sample = self._sample, None
            self.show(sample, self._predicted, {})

    def _build(self, volume: Volume) -> None:
        """Make a figure for each plane."""
        self._sources, self._sliders = [], []
        order = str(self._order.value)
        axes = range(3) if volume.ndim == 3 else range(1)
        low, high = float(np.nanmin(volume)), float(np.nanmax(volume))
        greys = LinearColorMapper(palette=list(GREYS), low=low, high=max(high, low + 1e-12))
        colors = LinearColorMapper(palette=list(CLASSES), low=-0.5, high=len(CLASSES) - 0.5, low_color=CLEAR)
        cards: list[UIElement] = []
        for axis in axes:
            title = NAMES[order][axis] if volume.ndim == 3 else "image"
            made = plot(title, HEIGHT, "pan,wheel_zoom,reset", match_aspect=True, stylesheets=[])
            names = ("image", "dw", "dh")
            sources = {layer: ColumnDataSource({name: [] for name in names}) for layer in ("grey", "classes")}
            ends = ("x0", "y0", "x1", "y1", "color")
            sources["contour"] = ColumnDataSource({name: [] for name in ends})
            made.image("image", x=0, y=0, dw="dw", dh="dh", source=sources["grey"], color_mapper=greys)
            made.image(
                "image", x=0, y=0, dw="dw", dh="dh", source=sources["classes"], color_mapper=colors, alpha=0.5
            )
            made.segment(
                "x0", "y0", "x1", "y1", source=sources["contour"], line_color="color", line_width=1.6
            )
            made.axis.visible, made.grid.grid_line_color = False, None
            made.title.text_color = "#66717e"
            self._sources.append(sources)
            parts = [made]
            if volume.ndim == 3:
                slider = Slider(
                    start=0, end=volume.shape[axis] - 1, value=volume.shape[axis] // 2, title="slice",
                    tags=[CONTROL], stylesheets=[DRAWN], sizing_mode="stretch_width",
                )  # fmt: skip
                slider.on_change("value", partial(self._moved, axis))
                self._sliders.append(slider)
                parts.append(slider)
            cards.append(card(*parts))
        top: list[UIElement] = [self._order] if volume.ndim == 3 else []
        self.root.children = [*top, grid(cards, 330), self._legend]

    def _moved(self, axis: int, _attr: str, _old: object, _new: object) -> None:
        self._draw(axis)

    def _draw(self, axis: int) -> None:
        """Show one plane where its slider is."""
        assert self._sample is not None
        at = int(self._sliders[axis].value) if self._sliders else 0
        cut = partial(plane, axis=axis, at=at, is_nifti=str(self._order.value) == ORDERS[0])
        sources, sample = self._sources[axis], self._sample
        if sample.image is not None:
            sources["grey"].data = _image(cut(sample.image))
        if self._predicted is not None:
            classes = cut(self._predicted)
            sources["classes"].data = _image(np.where(classes > 0, (classes - 1) % len(CLASSES), -1.0))
        if sample.target is not None and sample.is_labels:
            found = contours(cut(sample.target))
            of = found.pop("of")
            sources["contour"].data = {**found, "color": [CLASSES[int(n - 1) % len(CLASSES)] for n in of]}


def _shape(sample: Sample) -> tuple[int, ...]:
    volume = sample.image if sample.image is not None else sample.target
    return () if volume is None else volume.shape


def _image(pixels: Volume) -> dict[str, list[object]]:
    rows, columns = pixels.shape
    return {"image": [np.ascontiguousarray(pixels, np.float32)], "dw": [columns], "dh": [rows]}
