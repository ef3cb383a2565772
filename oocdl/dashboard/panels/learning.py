"""Loss and metrics, against steps or against time, with smoothing; the learning rate."""

from __future__ import annotations

from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, HoverTool, Row
from bokeh.models.widgets import Slider

from oocdl.dashboard.panels.style import (
    BLUE,
    CONTROL,
    CYCLE,
    DRAWN,
    FAINT,
    HEIGHT,
    MOST_POINTS,
    SKY,
    card,
    choice,
    plot,
    with_legend,
)
from oocdl.dashboard.series import smoothed, thinned
from oocdl.dashboard.view import View

AGAINST = {"steps": "step", "training time": "train_seconds"}
SMOOTHING = 0.8
NOT_METRICS = frozenset(
    {
        "step", "epoch", "lr", "seconds", "train_seconds", "loss", "unit_read_bytes", "unit_written_bytes",
        "read_bytes", "written_bytes", "peak_bytes", "process_bytes",
    }
)  # fmt: skip
"""Columns of the history that are no losses or metrics."""


class Learning:
    """The loss of each step, and a smoothed line through it; where ``small``, without controls."""

    def __init__(self, small: bool = False) -> None:
        self._loss = ColumnDataSource({"x": [], "step": [], "loss": [], "smooth": []})
        self._figure = plot("Loss", HEIGHT if small else 380)
        self._figure.line("x", "loss", source=self._loss, color=SKY, alpha=0.55, legend_label="each step")
        line = self._figure.line(
            "x", "smooth", source=self._loss, color=BLUE, line_width=2.2, legend_label="smoothed"
        )
        with_legend(self._figure, "top_right")
        self._figure.add_tools(
            HoverTool(
                tooltips=[("step", "@step"), ("loss", "@loss{0.0000}"), ("smoothed", "@smooth{0.0000}")],
                mode="vline",
                renderers=[line],
            )
        )
        self._figure.xaxis.axis_label = "steps"
        self._against = choice("against", list(AGAINST), width=140)
        self._weight = Slider(
            title="smoothing",
            start=0.0,
            end=0.99,
            step=0.01,
            value=SMOOTHING,
            width=200,
            tags=[CONTROL],
            stylesheets=[DRAWN],
        )
        self._metrics: dict[str, ColumnDataSource] = {}
        self._metric_figure: Any = None
        """Made with the first metric."""
        self._rate = ColumnDataSource({"x": [], "lr": []})
        self._rate_figure = plot("Learning rate", 200)
        self._rate_figure.line("x", "lr", source=self._rate, color=FAINT, line_width=1.8)
        self._view: View | None = None
        for control, name in ((self._against, "value"), (self._weight, "value_throttled")):
            control.on_change(name, self._changed)
        controls = Row(children=[self._against, self._weight])
        self._small = small
        self.root = card(self._figure) if small else card(controls, self._figure, self._rate_figure)

    def _changed(self, _attr: str, _old: object, _new: object) -> None:
        if self._view is not None:
            self.update(self._view)

    def update(self, view: View) -> None:
        """Show what the view has now."""
        self._view, steps = view, view.steps
        x = steps[AGAINST[str(self._against.value)]]
        self._figure.xaxis.axis_label = str(self._against.value) + (
            "" if self._against.value == "steps" else " (seconds)"
        )
        shown = thinned(len(steps), MOST_POINTS)
        smooth = smoothed(steps["loss"], float(self._weight.value))
        self._loss.data = {
            "x": x[shown],
            "step": steps["step"][shown],
            "loss": steps["loss"][shown],
            "smooth": smooth[shown],
        }
        if self._small:
            return
        self._rate.data = {"x": x[shown], "lr": steps["lr"][shown]}
        for name in steps.names:
            if name not in NOT_METRICS:
                self._show_metric(name, x[shown], steps[name][shown])

    def _show_metric(self, name: str, x: np.ndarray, values: np.ndarray) -> None:
        is_first = self._metric_figure is None
        if is_first:
            self._metric_figure = plot("Losses of heads, and metrics", 260)
        source = self._metrics.get(name)
        if source is None:
            source = self._metrics[name] = ColumnDataSource({"x": [], "y": []})
            color = CYCLE[(len(self._metrics) - 1) % len(CYCLE)]
            self._metric_figure.line("x", "y", source=source, color=color, line_width=1.8, legend_label=name)
            with_legend(self._metric_figure, "top_right")
        source.data = {"x": x, "y": values}
        if is_first:
            self.root.children = [*self.root.children[:2], self._metric_figure, *self.root.children[2:]]
