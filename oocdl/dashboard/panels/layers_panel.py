"""The slowest layers, measured beside predicted: as bars, and all of them as a table."""

from __future__ import annotations

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    FactorRange,
    HoverTool,
    LayoutDOM,
)
from bokeh.models.widgets.tables import DataTable, NumberFormatter, StringFormatter, TableColumn

from oocdl.dashboard.panels.step_map import about
from oocdl.dashboard.panels.style import (
    DRAWN,
    GREY,
    HEIGHT,
    INK,
    PART_COLORS,
    SCROLLED,
    card,
    plot,
    with_legend,
)
from oocdl.dashboard.view import LastPass, View
from oocdl.report.tables import shortened

MOST_BARS = 12
LONGEST_NAME = 30


class SlowestLayers:
    """Bars of the layers that take most time."""

    def __init__(self) -> None:
        names = ("y", "name", "measured", "predicted", "color", "about", "ratio")
        self._source = ColumnDataSource({name: [] for name in names})
        self._figure = plot("Slowest layers (s a pass)", HEIGHT, tools="", y_range=FactorRange())
        bars = self._figure.hbar(
            y="y", right="measured", height=0.7, fill_color="color", line_color=None, source=self._source,
            legend_label="measured",
        )  # fmt: skip
        self._figure.scatter(
            "predicted", "y", source=self._source, marker="dash", angle=np.pi / 2, size=16, line_width=2.5,
            line_color=INK, legend_label="predicted",
        )  # fmt: skip
        self._figure.add_tools(
            HoverTool(
                tooltips=[
                    ("layer", "@name"), ("", "@about"), ("measured", "@measured{0.0000} s"),
                    ("predicted", "@predicted{0.0000} s"), ("ratio", "@ratio{0.00}"),
                ],
                renderers=[bars],
            )
        )  # fmt: skip
        self._figure.x_range.start = 0
        self._figure.ygrid.grid_line_color = None
        with_legend(self._figure, "bottom_right")
        self._shown: LastPass | None = None
        self.root: LayoutDOM = card(self._figure)

    def update(self, view: View) -> None:
        """Show what the view has now."""
        seconds, last = view.layer_seconds(), view.last_pass
        if seconds is None or last is None or view.facts is None or last is self._shown:
            return
        self._shown = last
        layers = view.facts.passes[last.plan_id].layers
        order = np.argsort(-seconds)[:MOST_BARS]
        names = [shortened(layers[index].name, LONGEST_NAME) for index in order]
        rows = [f"{name}{' ' * names[:place].count(name)}" for place, name in enumerate(names)]
        predicted = [layers[index].predicted_seconds for index in order]
        self._figure.y_range.factors = rows[::-1]
        self._source.data = {
            "y": rows,
            "name": [layers[index].name for index in order],
            "measured": seconds[order],
            "predicted": predicted,
            "color": [PART_COLORS.get(layers[index].phase, GREY) for index in order],
            "about": [about(layers[index]) for index in order],
            "ratio": [s / p if p else np.nan for s, p in zip(seconds[order], predicted, strict=True)],
        }


class LayerTable:
    """All layers of a pass."""

    def __init__(self) -> None:
        number, text = NumberFormatter(format="0.0000"), StringFormatter()
        columns = [
            TableColumn(field="name", title="layer", formatter=text, width=260),
            TableColumn(field="measured", title="measured s", formatter=number, width=90),
            TableColumn(field="predicted", title="predicted s", formatter=number, width=90),
            TableColumn(field="ratio", title="ratio", formatter=NumberFormatter(format="0.00"), width=60),
            TableColumn(field="phase", title="part", formatter=text, width=80),
            TableColumn(field="units", title="units", formatter=NumberFormatter(format="0"), width=60),
            TableColumn(field="cuts", title="cut", formatter=text, width=140),
            TableColumn(field="shape", title="shape", formatter=text, width=160),
            TableColumn(field="moved", title="moved MiB", formatter=NumberFormatter(format="0.0"), width=90),
            TableColumn(field="gflop", title="GFLOP", formatter=NumberFormatter(format="0.00"), width=70),
        ]
        self._source = ColumnDataSource({str(column.field): [] for column in columns})
        table = DataTable(
            source=self._source, columns=columns, sizing_mode="stretch_width", height=460, min_width=900,
            index_position=None, autosize_mode="force_fit", reorderable=False, stylesheets=[DRAWN],
        )  # fmt: skip
        self._shown: object = None
        self.root: LayoutDOM = card(table, stylesheets=[SCROLLED])  # a phone moves it sideways

    def update(self, view: View) -> None:
        """Show what the view has now."""
        main, last = view.main, view.last_pass
        if view.facts is None or main is None or (self._shown is (last or main)):
            return
        self._shown = last or main
        one = main if last is None else view.facts.passes[last.plan_id]
        seconds = view.layer_seconds()
        measured = np.full(len(one.layers), np.nan) if seconds is None else seconds
        predicted = np.array([layer.predicted_seconds for layer in one.layers])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = measured / predicted
        order = np.argsort(-np.nan_to_num(measured), kind="stable")
        layers = [one.layers[index] for index in order]
        self._source.data = {
            "name": [layer.name for layer in layers],
            "phase": [layer.phase for layer in layers],
            "measured": measured[order],
            "predicted": predicted[order],
            "ratio": ratio[order],
            "units": [layer.units for layer in layers],
            "cuts": [layer.cuts for layer in layers],
            "shape": [layer.shape for layer in layers],
            "moved": [(layer.read_bytes + layer.written_bytes) / 2**20 for layer in layers],
            "gflop": [layer.flops / 1e9 for layer in layers],
        }
