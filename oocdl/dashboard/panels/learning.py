"""Loss and metrics, against steps or against time, with smoothing; the learning rate."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from bokeh.models import Column, ColumnDataSource, Row

from oocdl.dashboard.panels import style
from oocdl.dashboard.panels.style import Panel
from oocdl.dashboard.series import thinned
from oocdl.dashboard.view import View
from oocdl.report.history_view import smoothed

AGAINST = {"steps": "step", "training time": "train_seconds"}
SMOOTHING = 0.8
NOT_METRICS = re.compile(r"step|epoch|lr(/.*)?|(val_)?loss|((val|train)_)?seconds|(?!val_)\w+_bytes")
"""Names of columns of the history that are no losses of heads and no metrics."""


class Learning(Panel):
    """The loss of each step, and a smoothed line through it; where ``small``, without controls."""

    def __init__(self, small: bool = False) -> None:
        self._loss = style.source("x", "step", "loss", "smooth")
        self._figure = style.plot("Loss", style.HEIGHT if small else 380)
        pale = {"color": style.SKY, "alpha": 0.55, "legend_label": "each step"}
        bold = {"color": style.BLUE, "line_width": 2.2, "legend_label": "smoothed"}
        self._figure.line("x", "loss", source=self._loss, **pale)
        line = self._figure.line("x", "smooth", source=self._loss, **bold)
        style.with_legend(self._figure, "top_right")
        tips = {"step": "@step", "loss": "@loss{0.0000}", "smoothed": "@smooth{0.0000}"}
        style.hover(self._figure, tips, line, mode="vline")
        self._figure.xaxis.axis_label = "steps"
        self._against = style.choice("against", list(AGAINST), 140, self.changed)
        self._weight = style.slider("smoothing", 0.99, SMOOTHING, step=0.01, width=200)
        self._weight.on_change("value_throttled", self.changed)
        self._curves: dict[str, ColumnDataSource] = {}
        """Name of a validation or metric -> its curve."""
        self._metric_figure = style.plot("Losses of heads, and metrics", 260)
        self._rate = style.source("x", "lr")
        self._rate_figure = style.plot("Learning rate", 200)
        self._rate_figure.line("x", "lr", source=self._rate, color=style.FAINT, line_width=1.8)
        controls = Row(children=[self._against, self._weight])
        self._small = small
        parts = [self._figure] if small else [controls, self._figure, self._rate_figure]
        self.root: Column = style.card(*parts)

    def draw(self, view: View) -> None:
        steps, against = view.steps, str(self._against.value)
        shown = thinned(len(steps), style.MOST_POINTS)
        x, loss = steps[AGAINST[against]][shown], steps["loss"]
        self._figure.xaxis.axis_label = against + ("" if against == "steps" else " (seconds)")
        self._loss.data = {
            "x": x,
            "step": steps["step"][shown],
            "loss": loss[shown],
            "smooth": smoothed(loss, float(self._weight.value))[shown],
        }
        self._show(self._figure, "validation", steps[AGAINST[against]], steps["val_loss"], style.ORANGE)
        if self._small:
            return
        self._rate.data = {"x": x, "lr": steps["lr"][shown]}
        for name in list(steps.columns):
            if not NOT_METRICS.fullmatch(name):
                color = style.CYCLE[len(self._metric_figure.renderers) % len(style.CYCLE)]
                self._show(self._metric_figure, name, steps[AGAINST[against]], steps[name], color)
        if self._metric_figure.renderers and self._metric_figure not in self.root.children:
            self.root.children = [*self.root.children[:2], self._metric_figure, *self.root.children[2:]]

    def _show(self, chart: Any, name: str, x: np.ndarray, values: np.ndarray, color: str) -> None:
        """Draw a curve of the points that there are, from the first on: few steps have a validation's."""
        there = np.flatnonzero(~np.isnan(values))
        there = there[thinned(len(there), style.MOST_POINTS)]
        if name not in self._curves:
            if not len(there):  # Bokeh complains of empty ones
                return
            self._curves[name] = style.source("x", "y")
            look: Any = {"source": self._curves[name], "color": color, "legend_label": name}
            chart.line("x", "y", line_width=1.8, **look)
            if chart is self._figure:
                chart.scatter("x", "y", size=6, **look)
            style.with_legend(chart, "top_right")
        self._curves[name].data = {"x": x[there], "y": values[there]}
