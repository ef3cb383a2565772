"""Loss and metrics, against steps or against time, with smoothing; the learning rate."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from bokeh.models import Column, ColumnDataSource, Row
from bokeh.models.widgets import Slider

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
        self._validated = style.source("x", "loss")
        self._validation_shown = False
        style.with_legend(self._figure, "top_right")
        tips = {"step": "@step", "loss": "@loss{0.0000}", "smoothed": "@smooth{0.0000}"}
        style.hover(self._figure, tips, line, mode="vline")
        self._figure.xaxis.axis_label = "steps"
        self._against = style.choice("against", list(AGAINST), 140, self.changed)
        look = {"start": 0, "end": 0.99, "step": 0.01, "width": 200, **style.CONTROL}
        self._weight = Slider(title="smoothing", value=SMOOTHING, **look)
        self._weight.on_change("value_throttled", self.changed)
        self._metrics: dict[str, ColumnDataSource] = {}
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
        self._show_validation(steps[AGAINST[against]], steps["val_loss"])
        if self._small:
            return
        self._rate.data = {"x": x, "lr": steps["lr"][shown]}
        for name in steps.names:
            if not NOT_METRICS.fullmatch(name):
                self._show_metric(name, *_there(steps[AGAINST[against]], steps[name]))

    def _show_validation(self, x: np.ndarray, losses: np.ndarray) -> None:
        """Draw the losses of validations into the figure of the loss, from the first on."""
        x, losses = _there(x, losses)
        if not len(x):
            return
        self._validated.data = {"x": x, "loss": losses}
        if not self._validation_shown:  # Bokeh complains of empty ones
            self._validation_shown = True
            look: dict[str, Any] = {"color": style.ORANGE, "legend_label": "validation"}
            self._figure.line("x", "loss", source=self._validated, line_width=1.8, **look)
            self._figure.scatter("x", "loss", source=self._validated, size=6, **look)

    def _show_metric(self, name: str, x: np.ndarray, values: np.ndarray) -> None:
        if name not in self._metrics:
            self._metrics[name] = line = style.source("x", "y")
            color = style.CYCLE[(len(self._metrics) - 1) % len(style.CYCLE)]
            self._metric_figure.line("x", "y", source=line, color=color, line_width=1.8, legend_label=name)
            style.with_legend(self._metric_figure, "top_right")
        self._metrics[name].data = {"x": x, "y": values}
        if self._metric_figure not in self.root.children:  # with a line: Bokeh complains of empty ones
            self.root.children = [*self.root.children[:2], self._metric_figure, *self.root.children[2:]]


def _there(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of a curve, at most so many as can be told apart; few steps have a validation's."""
    found = np.flatnonzero(~np.isnan(values))
    found = found[thinned(len(found), style.MOST_POINTS)]
    return x[found], values[found]
