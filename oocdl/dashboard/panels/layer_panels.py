"""The layers of a pass, measured beside predicted: the slowest as bars, all as a table, and as a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import log2, prod
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.models import CustomJS, FactorRange, LinearColorMapper
from bokeh.models.annotations import ColorBar
from bokeh.models.widgets.tables import DataTable, NumberFormatter, StringFormatter, TableColumn

from oocdl.dashboard.panels import style
from oocdl.dashboard.panels.step_panels import about
from oocdl.dashboard.panels.style import OfLastPass, Panel
from oocdl.dashboard.view import View
from oocdl.report.layer_facts import LayerFacts
from oocdl.report.tables import shortened
from oocdl.report.units import size_text

MOST_BARS = 12
LONGEST_NAME = 30
PALETTE = ("#f2f6fa", "#d6e4f0", "#aecde3", "#7fb2d4", "#4b93c3", "#1f74ae", "#0b578f", "#083d66")
ROOM = """const x = Array.from(boxes.data.x)
names.visible = x.length <= 40 && figure.inner_width / (Math.max(...x) + 1) > 62"""
"""Hides the names of layers, where many or narrow ones would overlap; the hover still shows them."""

Column = Callable[[LayerFacts], Any]
COLUMNS: Mapping[str, tuple[str, str, int, Column | None]] = {
    "name": ("layer", "", 260, lambda layer: layer.name),
    "measured": ("measured s", "0.0000", 90, None),
    "predicted": ("predicted s", "0.0000", 90, None),
    "ratio": ("ratio", "0.00", 60, None),
    "phase": ("part", "", 80, lambda layer: layer.phase),
    "units": ("units", "0", 60, lambda layer: layer.units),
    "cuts": ("cut", "", 140, lambda layer: layer.cuts),
    "shape": ("shape", "", 160, lambda layer: layer.shape),
    "moved": ("moved MiB", "0.0", 90, lambda layer: _moved_bytes(layer) / 2**20),
    "gflop": ("GFLOP", "0.00", 70, lambda layer: layer.flops / 1e9),
}
"""Columns of the table of layers: title, format, width, and what is shown of a layer; None: its seconds."""
MEASURES: Mapping[str, Column] = {
    "seconds": lambda layer: layer.predicted_seconds,
    "memory of a unit": lambda layer: layer.unit_bytes / 2**20,
    "traffic": lambda layer: _moved_bytes(layer) / 2**20,
}
"""Measure that the graph may be coloured by -> its value for a layer."""


def _moved_bytes(layer: LayerFacts) -> int:
    return layer.read_bytes + layer.written_bytes


def _slowest(view: View) -> tuple[list[LayerFacts], dict[str, np.ndarray]]:
    """The layers of the last pass, or of the main one before there is any, with their seconds."""
    assert view.facts is not None and view.main is not None
    layers = (view.facts.passes[view.last_pass.plan_id] if view.last_pass else view.main).layers
    seconds = view.layer_seconds()
    measured = np.full(len(layers), np.nan) if seconds is None else seconds
    order = np.argsort(-np.nan_to_num(measured), kind="stable")
    ordered = [layers[index] for index in order]
    predicted = np.array([layer.predicted_seconds for layer in ordered])
    with np.errstate(divide="ignore", invalid="ignore"):
        times = {"measured": measured[order], "predicted": predicted, "ratio": measured[order] / predicted}
    return ordered, times


class SlowestLayers(OfLastPass):
    """Bars of the layers that take most time."""

    def __init__(self) -> None:
        self._source = style.source("y", "name", "measured", "predicted", "color", "about", "ratio")
        self._figure = style.plot("Slowest layers (s a pass)", style.HEIGHT, tools="", y_range=FactorRange())
        bars = self._figure.hbar(
            y="y", right="measured", height=0.7, fill_color="color", line_color=None, source=self._source,
            legend_label="measured",
        )  # fmt: skip
        self._figure.scatter(
            "predicted", "y", source=self._source, marker="dash", angle=np.pi / 2, size=16, line_width=2.5,
            line_color=style.INK, legend_label="predicted",
        )  # fmt: skip
        tips = {
            "layer": "@name", "": "@about", "measured": "@measured{0.0000} s",
            "predicted": "@predicted{0.0000} s", "ratio": "@ratio{0.00}",
        }  # fmt: skip
        style.hover(self._figure, tips, bars)
        self._figure.x_range.start = 0
        self._figure.ygrid.grid_line_color = None
        style.with_legend(self._figure, "bottom_right")
        self.root = style.card(self._figure)

    def draw(self, view: View) -> None:
        layers, times = _slowest(view)
        layers = layers[:MOST_BARS]
        names = [shortened(layer.name, LONGEST_NAME) for layer in layers]
        rows = [f"{name}{' ' * names[:place].count(name)}" for place, name in enumerate(names)]
        self._figure.y_range.factors = rows[::-1]
        self._source.data = {
            "y": rows,
            "name": [layer.name for layer in layers],
            **{name: column[:MOST_BARS] for name, column in times.items()},
            "color": [style.PART_COLORS.get(layer.phase, style.GREY) for layer in layers],
            "about": [about(layer) for layer in layers],
        }


class LayerTable(Panel):
    """All layers of a pass."""

    def __init__(self) -> None:
        columns = [
            TableColumn(
                field=name, title=title, width=width,
                formatter=NumberFormatter(format=form) if form else StringFormatter(),
            )
            for name, (title, form, width, _) in COLUMNS.items()
        ]  # fmt: skip
        self._source = style.source(*COLUMNS)
        table = DataTable(
            source=self._source, columns=columns, sizing_mode="stretch_width", height=460, min_width=900,
            index_position=None, autosize_mode="force_fit", reorderable=False, stylesheets=[style.DRAWN],
        )  # fmt: skip
        self.root = style.card(table, sheets=[style.SCROLLED])  # a phone moves it sideways

    def basis(self, view: View) -> object | None:
        return view.last_pass or view.main

    def draw(self, view: View) -> None:
        layers, times = _slowest(view)
        self._source.data = {
            name: [fact(layer) for layer in layers] if fact else times[name]
            for name, (*_, fact) in COLUMNS.items()
        }


class Network(Panel):
    """Forward layers as boxes: to the right as they run, and down as what they make gets smaller in space."""

    def __init__(self) -> None:
        self._boxes = style.source(
            "x", "y", "label_y", "label", "name", "about", "operators", "seconds", "moved", "measure"
        )
        self._edges = style.source("xs", "ys")
        self._figure = style.bare(style.plot("Forward layers", 440, tools="pan,wheel_zoom,box_zoom,reset"))
        self._mapper = LinearColorMapper(palette=list(PALETTE), low=0, high=1)
        self._figure.multi_line("xs", "ys", source=self._edges, color=style.GREY, line_width=1.4, alpha=0.7)
        boxes = self._figure.rect(
            "x", "y", width=0.8, height=0.42, source=self._boxes, line_color=style.INK, line_width=0.8,
            fill_color={"field": "measure", "transform": self._mapper}, border_radius=4,
        )  # fmt: skip
        names = self._figure.text(
            "x", "label_y", text="label", source=self._boxes, text_font=value(style.FONT),
            text_font_size="9px", text_align="center", text_baseline="top", text_color=style.INK,
        )  # fmt: skip
        tips = {
            "layer": "@name", "": "@about", "runs": "@operators",
            "forward seconds": "@seconds{0.0000}", "moves": "@moved",
        }  # fmt: skip
        style.hover(self._figure, tips, boxes)
        room = CustomJS(args={"names": names, "boxes": self._boxes, "figure": self._figure}, code=ROOM)
        self._figure.js_on_change("inner_width", room)
        self._boxes.js_on_change("data", room)
        self._bar = ColorBar(
            color_mapper=self._mapper, background_fill_color=None, width=10, title="seconds", label_standoff=6
        )
        self._figure.add_layout(self._bar, "right")
        self._measure = style.choice("coloured by", list(MEASURES), 180, self.changed)
        self.root = style.card(self._measure, self._figure)

    def basis(self, view: View) -> object | None:
        return view.last_pass if _ends_step(view) else view.main

    def draw(self, view: View) -> None:
        assert view.main is not None
        numbers = [index for index, layer in enumerate(view.main.layers) if layer.phase == "forward"]
        layers = [view.main.layers[index] for index in numbers]
        place = {number: place for place, number in enumerate(numbers)}
        links = [
            (
                tuple(int(extent) for extent in layer.shape.split(" × ") if extent),
                [place[start] for start in layer.sources if start in place],
            )
            for layer in layers
        ]
        x, y = layout(links).T
        measured = view.layer_seconds() if _ends_step(view) else None
        values = {name: np.array([fact(layer) for layer in layers]) for name, fact in MEASURES.items()}
        if measured is not None:
            values["seconds"] = measured[numbers]
        measure = str(self._measure.value)
        self._mapper.high = float(values[measure].max(initial=0.0)) or 1.0
        self._bar.title = "s" if measure == "seconds" else "MiB"
        self._boxes.data = {
            "x": x,
            "y": y,
            "label_y": y - 0.24,
            "label": [shortened(layer.name, 13) for layer in layers],
            "name": [layer.name for layer in layers],
            "about": [about(layer) for layer in layers],
            "operators": [shortened(layer.operators, 90) for layer in layers],
            "seconds": values["seconds"],
            "moved": [size_text(_moved_bytes(layer)) for layer in layers],
            "measure": values[measure],
        }
        pairs = [(start, end) for end, (_, starts) in enumerate(links) for start in starts]
        self._edges.data = {"xs": [[x[s], x[t]] for s, t in pairs], "ys": [[y[s], y[t]] for s, t in pairs]}


def _ends_step(view: View) -> bool:
    """Whether the last whole pass is the one that ends a step."""
    return view.last_pass is not None and view.last_pass.plan_id == "main"


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
