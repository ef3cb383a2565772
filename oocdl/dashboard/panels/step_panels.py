"""The step that runs as a map of layers and shards, and the last whole pass as a line for each thread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from bokeh.models import FactorRange, Range1d

from oocdl.dashboard.answers import thread_shares
from oocdl.dashboard.facts import NO_LAYER
from oocdl.dashboard.panels import style
from oocdl.dashboard.panels.style import OfLastPass, Panel
from oocdl.dashboard.view import LastPass, View
from oocdl.report.layer_facts import LayerFacts
from oocdl.report.units import size_text
from oocdl.runtime.measured import Phase

SHARDS_SHOWN = 48
"""Places of a layer's column; a layer of fewer tasks has larger ones."""
STRIP_PIXELS = 16
"""Height of the strip above, which tells forward, backward and update apart."""
LEAST_NAMED_SHARE = 0.1
"""Parts of a smaller share of the layers have a colour in the strip, but no name."""
PART_COLUMNS = ("left", "right", "middle", "color", "part")
MOST_BARS = 12_000
"""Bars that a browser gets: the longest ones."""
SEGMENTS = (
    ("waits for memory", style.GREY),
    ("reads", style.SKY),
    ("waits for a permit", "#c9ced4"),
    ("computes", ""),
    ("writes", style.PURPLE),
)
"""Interval between two times of a task, and its colour; computing has that of its part of the step."""


class StepMap(Panel):
    """Layers from left to right in the order in which they run, their tasks from top to bottom."""

    def __init__(self, height: int = style.HEIGHT) -> None:
        self._image = style.source("image", "dw")
        self._layers = style.source("left", "right", "name", "about", "done")
        self._parts = style.source(*PART_COLUMNS)
        self._figure = style.plot("Layers × shards of the step", height - 22, tools="xpan,xbox_zoom,reset")
        strip = STRIP_PIXELS * SHARDS_SHOWN / (height - 110)
        low, high = SHARDS_SHOWN + 0.15 * strip, SHARDS_SHOWN + strip
        self._figure.y_range = Range1d(start=0, end=high)
        self._figure.x_range.range_padding = 0
        mapper = style.class_colors(style.PHASE_COLORS)
        self._figure.image(
            "image", x=0, y=0, dw="dw", dh=SHARDS_SHOWN, source=self._image, color_mapper=mapper
        )
        boxes = self._figure.quad(
            left="left", right="right", top=SHARDS_SHOWN, bottom=0, source=self._layers,
            fill_alpha=0.0, line_color="#ffffff", line_width=1, hover_line_color="#1d2733",
        )  # fmt: skip
        tips = {"layer": "@name", "": "@about", "done": "@done{0%}"}
        style.hover(self._figure, tips, boxes, point_policy="follow_mouse")
        self._figure.quad(
            left="left", right="right", top=high, bottom=low, source=self._parts,
            fill_color="color", fill_alpha=0.85, line_color=None,
        )  # fmt: skip
        self._figure.text(
            x="middle", y=(low + high) / 2, text="part", source=self._parts, text_color="white",
            text_align="center", text_baseline="middle", text_font_size="11px",
        )  # fmt: skip
        self._figure.yaxis.visible = False
        self._figure.grid.grid_line_color = None
        self._figure.xaxis.axis_label = "layers, in the order in which they run"
        self._legend = style.chips([(style.PHASE_COLORS[phase], phase.name.lower()) for phase in Phase])
        self._where = style.html(self._legend)
        self._plan_id = ""
        self.root = style.card(self._figure, self._where)

    def draw(self, view: View) -> None:
        image, now, facts = view.phase_map(SHARDS_SHOWN), view.now, view.facts
        if image is None or now is None or facts is None:
            self._where.text = f"{self._legend} no step has begun yet"
            return
        layers = facts.passes[now.plan_id].layers
        if self._plan_id != now.plan_id:
            self._plan_id = now.plan_id
            self._parts.data = _parts(layers)
            self._layers.data = {
                "left": np.arange(len(layers)),
                "right": np.arange(1, len(layers) + 1),
                "name": [layer.name for layer in layers],
                "about": [about(layer) for layer in layers],
                "done": np.zeros(len(layers), np.float32),
            }
        self._image.data = {"image": [image.T[::-1].copy()], "dw": [len(layers)]}
        # The one column that changes: names of hundreds of layers would be sent again each time.
        self._layers.data["done"] = (image == Phase.DONE).mean(axis=1, dtype=np.float32)
        running = np.flatnonzero(((image > 0) & (image < Phase.DONE)).any(axis=1))
        parts = dict.fromkeys(layers[index].phase for index in running)
        of_pass = f", pass {now.pass_number} of {now.passes}" if now.passes > 1 else ""
        where = " and ".join(parts) or "between two passes"
        share = view.done_share()
        words = "done" if view.ended == "finished" and share == 1 else f"{where}, {share:.0%} done"
        self._where.text = f"{self._legend} step {now.step}{of_pass}: {words}"


def _parts(layers: Sequence[LayerFacts]) -> dict[str, list[object]]:
    """Return where forward, backward and update begin and end; each is named where there is room."""
    rows, start = [], 0
    for part, same in groupby(layers, lambda layer: layer.phase):
        end = start + len(list(same))
        name = part if (end - start) / len(layers) > LEAST_NAMED_SHARE else ""
        rows.append((start, end, (start + end) / 2, style.PART_COLORS[part], name))
        start = end
    return dict(zip(PART_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))


class Timeline(OfLastPass):
    """A timeline of the last whole pass, with a row for each thread of each process."""

    def __init__(self) -> None:
        self._source = style.source("y", "left", "right", "color", "layer", "what", "took")
        tools = "xpan,xwheel_zoom,xbox_zoom,reset"
        self._figure = style.plot("Last whole pass, by thread", 300, tools, y_range=FactorRange())
        bars = self._figure.hbar(
            y="y", left="left", right="right", height=0.86, fill_color="color", line_color=None,
            source=self._source,
        )  # fmt: skip
        tips = {"layer": "@layer", "": "@what", "seconds": "@took{0.0000}"}
        style.hover(self._figure, tips, bars, point_policy="follow_mouse")
        self._figure.xaxis.axis_label = "seconds"
        self._figure.ygrid.grid_line_color = None
        self._words = style.html()
        legend = [(color, name) for name, color in SEGMENTS if color]
        computes = [(color, f"computes ({part})") for part, color in style.PART_COLORS.items()]
        self.root = style.card(self._figure, style.html(style.chips([*computes, *legend])), self._words)

    def draw(self, view: View) -> None:
        last = view.last_pass
        assert last is not None and view.facts is not None
        processes = list(dict.fromkeys(lane.process for lane in last.lanes))
        rows = [
            (f"worker {processes.index(lane.process)}, " if len(processes) > 1 else "")
            + f"thread {lane.thread}"
            for lane in last.lanes
        ]
        self._figure.y_range.factors = rows[::-1]
        self._figure.height = min(max(150 + 24 * len(rows), 200), 640)
        self._source.data = _bars(view.facts.passes[last.plan_id].layers, last, rows)
        told = ", ".join(f"{name} {share:.0%}" for name, share in thread_shares(last).items())
        self._words.text = f"{last.seconds:.3g} s; of all threads' time: {told}"


def _bars(layers: Sequence[LayerFacts], last: LastPass, rows: Sequence[str]) -> dict[str, list[object]]:
    parts = [np.zeros((0, 5))]
    for row, lane in enumerate(last.lanes):
        begun, ended = lane.times[:, :-1].T, lane.times[:, 1:].T
        at = segments, tasks = np.nonzero((ended > begun) & (lane.layers != NO_LAYER))
        rows_of = np.full(tasks.size, row)
        parts.append(np.column_stack([rows_of, segments, lane.layers[tasks], begun[at], ended[at]]))
    bars = np.concatenate(parts)
    if len(bars) > MOST_BARS:
        bars = bars[np.argsort(bars[:, 3] - bars[:, 4])[:MOST_BARS]]
    lanes, segments, of_layer = (bars[:, index].astype(int) for index in range(3))
    return {
        "y": [rows[row] for row in lanes],
        "left": bars[:, 3].tolist(),
        "right": bars[:, 4].tolist(),
        "color": [
            SEGMENTS[segment][1] or style.PART_COLORS[layers[layer].phase]
            for segment, layer in zip(segments, of_layer, strict=True)
        ],
        "layer": [layers[layer].name for layer in of_layer],
        "what": [SEGMENTS[segment][0] for segment in segments],
        "took": (bars[:, 4] - bars[:, 3]).tolist(),
    }


def about(layer: LayerFacts) -> str:
    """Write a line on a layer: its part of the step, cuts, shape and bytes."""
    cut = f"{layer.units} units ({layer.cuts})" if layer.cuts else "1 unit"
    return f"{layer.phase}, {layer.shape or 'scalars'}, {cut}, largest {size_text(layer.unit_bytes)}"
