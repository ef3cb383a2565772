"""What each thread of each process did in the last whole pass."""

from __future__ import annotations

import numpy as np
from bokeh.models import ColumnDataSource, FactorRange, HoverTool, LayoutDOM

from oocdl.dashboard.answers import thread_shares
from oocdl.dashboard.facts import NO_LAYER
from oocdl.dashboard.panels.style import GREY, PART_COLORS, PURPLE, SKY, card, chips, html, plot
from oocdl.dashboard.view import LastPass, View

MOST_BARS = 12_000
"""Bars that a browser gets: the longest ones."""
SEGMENTS = (
    ("waits for memory", GREY),
    ("reads", SKY),
    ("waits for a permit", "#c9ced4"),
    ("computes", ""),
    ("writes", PURPLE),
)
"""What lies between two times of a task; what it computes has the colour of its part of the step."""


class Timeline:
    """A row a thread."""

    def __init__(self) -> None:
        names = ("y", "left", "right", "color", "layer", "what", "took")
        self._source = ColumnDataSource({name: [] for name in names})
        tools = "xpan,xwheel_zoom,xbox_zoom,reset"
        rows = FactorRange()
        self._figure = plot("Last whole pass, by thread", 300, tools, y_range=rows)
        bars = self._figure.hbar(
            y="y", left="left", right="right", height=0.86, fill_color="color", line_color=None,
            source=self._source,
        )  # fmt: skip
        self._figure.add_tools(
            HoverTool(
                tooltips=[("layer", "@layer"), ("", "@what"), ("seconds", "@took{0.0000}")],
                renderers=[bars],
                point_policy="follow_mouse",
            )
        )
        self._figure.xaxis.axis_label = "seconds"
        self._figure.ygrid.grid_line_color = None
        self._words = html()
        self._shown: LastPass | None = None
        legend = [(color or PART_COLORS["forward"], name) for name, color in SEGMENTS if color]
        computes = [(color, f"computes ({part})") for part, color in PART_COLORS.items()]
        self.root: LayoutDOM = card(self._figure, html(chips([*computes, *legend])), self._words)

    def update(self, view: View) -> None:
        """Show what the view has now."""
        last = view.last_pass
        if last is None or view.facts is None or last is self._shown:
            return
        self._shown = last
        processes = list(dict.fromkeys(lane.process for lane in last.lanes))
        if len(processes) > 1:
            rows = [f"worker {processes.index(lane.process)}, thread {lane.thread}" for lane in last.lanes]
        else:
            rows = [f"thread {lane.thread}" for lane in last.lanes]
        self._figure.y_range.factors = rows[::-1]
        self._figure.height = min(max(150 + 24 * len(rows), 200), 640)
        self._source.data = _bars(view, last, rows)
        shares = thread_shares(last)
        told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        self._words.text = f"{last.seconds:.3g} s; of all threads' time: {told}"


def _bars(view: View, last: LastPass, rows: list[str]) -> dict[str, list[object]]:
    assert view.facts is not None
    layers = view.facts.passes[last.plan_id].layers
    parts = []
    for row, lane in enumerate(last.lanes):
        for segment in range(len(SEGMENTS)):
            begun, ended = lane.times[:, segment], lane.times[:, segment + 1]
            kept = (ended > begun) & (lane.layers != NO_LAYER)
            count = int(kept.sum())
            same = np.full(count, row), np.full(count, segment)
            parts.append(np.column_stack([*same, lane.layers[kept], begun[kept], ended[kept]]))
    bars = np.concatenate(parts) if parts else np.zeros((0, 5))
    if len(bars) > MOST_BARS:
        bars = bars[np.argsort(bars[:, 3] - bars[:, 4])[:MOST_BARS]]
    lanes, segments, of_layer = (bars[:, index].astype(int) for index in range(3))
    return {
        "y": [rows[row] for row in lanes],
        "left": bars[:, 3].tolist(),
        "right": bars[:, 4].tolist(),
        "color": [
            SEGMENTS[segment][1] or PART_COLORS[layers[layer].phase]
            for segment, layer in zip(segments, of_layer, strict=True)
        ],
        "layer": [layers[layer].name for layer in of_layer],
        "what": [SEGMENTS[segment][0] for segment in segments],
        "took": (bars[:, 4] - bars[:, 3]).tolist(),
    }
