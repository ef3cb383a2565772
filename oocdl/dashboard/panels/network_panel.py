"""The network as a graph of its forward layers, coloured by time, memory or traffic."""

from __future__ import annotations

from collections import Counter
from math import log2, prod

import numpy as np
from bokeh.core.properties import value
from bokeh.models import ColumnDataSource, CustomJS, HoverTool, LayoutDOM, LinearColorMapper
from bokeh.models.annotations import ColorBar

from oocdl.dashboard.facts import LayerFacts
from oocdl.dashboard.panels.step_map import about
from oocdl.dashboard.panels.style import FONT, GREY, INK, card, choice, plot
from oocdl.dashboard.view import View
from oocdl.report.tables import shortened
from oocdl.report.units import size_text

PALETTE = ("#f2f6fa", "#d6e4f0", "#aecde3", "#7fb2d4", "#4b93c3", "#1f74ae", "#0b578f", "#083d66")
MEASURES = ("seconds", "memory of a unit", "traffic")
ROOM = """const x = Array.from(boxes.data.x)
names.visible = x.length <= 40 && figure.inner_width / (Math.max(...x) + 1) > 62"""
"""Where layers are many or narrow, names would cover each other: they stand in the hover only."""


class Network:
    """Layers as boxes: to the right as they run, and down as what they make gets smaller in space."""

    def __init__(self) -> None:
        names = ("x", "y", "label_y", "label", "name", "about", "operators", "seconds", "moved", "measure")
        self._boxes = ColumnDataSource({name: [] for name in names})
        self._edges = ColumnDataSource({"xs": [], "ys": []})
        self._figure = plot("Forward layers", 440, tools="pan,wheel_zoom,box_zoom,reset")
        self._mapper = LinearColorMapper(palette=list(PALETTE), low=0, high=1)
        self._figure.multi_line("xs", "ys", source=self._edges, color=GREY, line_width=1.4, alpha=0.7)
        boxes = self._figure.rect(
            "x", "y", width=0.8, height=0.42, source=self._boxes, line_color=INK, line_width=0.8,
            fill_color={"field": "measure", "transform": self._mapper}, border_radius=4,
        )  # fmt: skip
        self._names = self._figure.text(
            "x", "label_y", text="label", source=self._boxes, text_font=value(FONT), text_font_size="9px",
            text_align="center", text_baseline="top", text_color=INK,
        )  # fmt: skip
        self._figure.add_tools(
            HoverTool(
                tooltips=[
                    ("layer", "@name"), ("", "@about"), ("runs", "@operators"),
                    ("forward seconds", "@seconds{0.0000}"), ("moves", "@moved"),
                ],
                renderers=[boxes],
            )
        )  # fmt: skip
        room = CustomJS(args={"names": self._names, "boxes": self._boxes, "figure": self._figure}, code=ROOM)
        self._figure.js_on_change("inner_width", room)
        self._boxes.js_on_change("data", room)
        self._figure.axis.visible = False
        self._figure.grid.grid_line_color = None
        self._bar = ColorBar(
            color_mapper=self._mapper, background_fill_color=None, width=10, title="seconds", label_standoff=6
        )
        self._figure.add_layout(self._bar, "right")
        self._measure = choice("coloured by", list(MEASURES), width=180)
        self._measure.on_change("value", self._changed)
        self._view: View | None = None
        self._shown: object = None
        self.root: LayoutDOM = card(self._measure, self._figure)

    def _changed(self, _attr: str, _old: object, _new: object) -> None:
        self._shown = None
        if self._view is not None:
            self.update(self._view)

    def update(self, view: View) -> None:
        """Show what the view has now."""
        self._view, main = view, view.main
        last = view.last_pass if view.last_pass is not None and view.last_pass.plan_id == "main" else None
        if view.facts is None or main is None or self._shown is (last or main):
            return
        self._shown = last or main
        numbers = [index for index, layer in enumerate(main.layers) if layer.phase == "forward"]
        layers = [main.layers[index] for index in numbers]
        places = layout([_relinked(layer, numbers) for layer in layers])
        measured = view.layer_seconds() if last is not None else None
        predicted = [layer.predicted_seconds for layer in layers]
        seconds = np.array(predicted) if measured is None else measured[numbers]
        values = {
            "seconds": seconds,
            "memory of a unit": np.array([layer.unit_bytes / 2**20 for layer in layers]),
            "traffic": np.array([(layer.read_bytes + layer.written_bytes) / 2**20 for layer in layers]),
        }[str(self._measure.value)]
        self._mapper.high = float(values.max(initial=0.0)) or 1.0
        self._bar.title = "s" if self._measure.value == MEASURES[0] else "MiB"
        x, y = places[:, 0], places[:, 1]
        self._boxes.data = {
            "x": x,
            "y": y,
            "label_y": y - 0.24,
            "label": [shortened(layer.name, 13) for layer in layers],
            "name": [layer.name for layer in layers],
            "about": [about(layer) for layer in layers],
            "operators": [shortened(layer.operators, 90) for layer in layers],
            "seconds": seconds,
            "moved": [size_text(layer.read_bytes + layer.written_bytes) for layer in layers],
            "measure": values,
        }
        pairs = [(s, t) for t, layer in enumerate(layers) for s in _relinked(layer, numbers)[1]]
        self._edges.data = {"xs": [[x[s], x[t]] for s, t in pairs], "ys": [[y[s], y[t]] for s, t in pairs]}


def _relinked(layer: LayerFacts, numbers: list[int]) -> tuple[tuple[int, ...], list[int]]:
    """The extent of what a layer makes, and its sources among the layers that are shown."""
    shape = tuple(int(extent) for extent in layer.shape.split(" × ") if extent)
    known = {number: place for place, number in enumerate(numbers)}
    return shape, [known[source] for source in layer.sources if source in known]


def layout(layers: list[tuple[tuple[int, ...], list[int]]]) -> np.ndarray:
    """Places of layers that are given by shape and sources, sources first: an array (layers, 2).

    A layer stands one to the right of its last source. How far down it is goes by the logarithm of the extent
    behind its channels, so a U-Net is a U; layers in one place are put below each other.

    >>> layout([((8, 64, 64), []), ((16, 32, 32), [0]), ((8, 64, 64), [0, 1])]).tolist()
    [[0.0, 0.0], [1.0, -2.0], [2.0, 0.0]]
    """
    extents = [prod(shape[1:]) if len(shape) > 2 else 1 for shape, _ in layers]
    largest = max(extents, default=1)
    taken: Counter[tuple[int, float]] = Counter()
    places = np.zeros((len(layers), 2))
    for index, ((shape, sources), extent) in enumerate(zip(layers, extents, strict=True)):
        rank = 1 + max((int(places[source, 0]) for source in sources), default=-1)
        level = -round(log2(largest / extent)) if len(shape) > 2 else 0.0
        if len(shape) <= 2 and sources:
            level = places[sources[-1], 1]
        taken[rank, level] += 1
        places[index] = rank, level - 0.8 * (taken[rank, level] - 1)
    return places
