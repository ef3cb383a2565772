"""Memory of a process over time by term, what moves to and from disk and network, and the use of cores."""

from __future__ import annotations

from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, HoverTool, LayoutDOM, Range1d
from bokeh.models.annotations import Span
from bokeh.models.ui import UIElement

from oocdl.dashboard.panels.style import (
    BLUE,
    GREEN,
    GREY,
    HEIGHT,
    INK,
    INK_CSS,
    MOST_POINTS,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    card,
    chips,
    choice,
    grid,
    html,
    plot,
    text,
    with_legend,
)
from oocdl.dashboard.series import Table, thinned
from oocdl.dashboard.view import View

LARGEST = "the largest process"
MIB = float(1 << 20)
TERMS = {
    "base": ("base_bytes", GREY),
    "chunks in RAM": ("tier_bytes", SKY),
    "running tasks": ("reserved_bytes", ORANGE),
}
NOTHING = {
    "disk": "Disk: nothing was spilled, all arrays fit into the budget.",
    "network": "Network: nothing came from other workers.",
}
MOST_RATIO = 3.0
"""A limit that is more than so many times what moves is told in words: its line would flatten all else."""


class Memory:
    """Memory of one process over time, under the budget."""

    def __init__(self, small: bool = False) -> None:
        self._source = ColumnDataSource({name: [] for name in ("at", *TERMS, "process", "spilled")})
        self._figure = plot("Memory (MiB)", HEIGHT - 22 if small else 340, x_axis_type="datetime")
        self._figure.varea_stack(
            list(TERMS), x="at", source=self._source, color=[color for _, color in TERMS.values()],
            alpha=0.85,
        )  # fmt: skip
        line = self._figure.line("at", "process", source=self._source, color=INK, line_width=1.8)
        self._figure.line(
            "at", "spilled", source=self._source, color=PURPLE, line_width=2, line_dash="dotted"
        )
        self._budget = Span(location=0, dimension="width", line_color=RED, line_width=1.8, line_dash="dashed")
        self._figure.add_layout(self._budget)
        tips = [("by the kernel", "@process{0} MiB"), *((name, f"@{{{name}}}{{0}} MiB") for name in TERMS)]
        self._figure.add_tools(
            HoverTool(tooltips=[*tips, ("spilled", "@spilled{0} MiB")], renderers=[line], mode="vline")
        )
        self._figure.y_range = Range1d(start=0, end=1)
        lines = [(INK_CSS, "by the kernel"), (PURPLE, "spilled to disk"), (RED, "budget")]
        legend = html(chips([*((color, name) for name, (_, color) in TERMS.items()), *lines]))
        self._process = choice("process", [LARGEST], width=280)
        parts = [self._figure, legend]
        self.root: LayoutDOM = card(*(parts if small else [self._process, *parts]))

    def update(self, view: View) -> None:
        """Show what the view has now."""
        if view.facts is None or not view.resources:
            return
        options: Any = [LARGEST, *view.resources]
        if self._process.options != options:
            self._process.options = options
        table = _chosen(view, str(self._process.value))
        shown = thinned(len(table), MOST_POINTS)
        data = {name: table[column][shown] / MIB for name, (column, _) in TERMS.items()}
        for name in ("process", "spilled"):
            data[name] = table[f"{name}_bytes"][shown] / MIB
        self._source.data = {"at": table["at"][shown] * 1e3, **data}
        budget = view.facts.budget_bytes / MIB
        self._budget.location = budget
        top = max([budget, *(float(np.nanmax(column)) for name, column in data.items() if name != "spilled")])
        self._figure.y_range.end = 1.08 * max(top, min(float(np.nanmax(data["spilled"])), 2 * budget))


class Rates:
    """Bytes a second to and from the disk and the network, and cores in use."""

    def __init__(self) -> None:
        names = ("at", "read", "written", "received", "cores")
        self._source = ColumnDataSource({name: [] for name in names})
        self._disk = plot("Disk: spill (MB/s)", 230, x_axis_type="datetime")
        self._net = plot("Network: from other workers (MB/s)", 230, x_axis_type="datetime")
        self._cores = plot("Cores in use", 230, x_axis_type="datetime")
        self._lines(self._disk, {"read": BLUE, "written": ORANGE})
        self._lines(self._net, {"received": GREEN})
        self._lines(self._cores, {"cores": PURPLE})
        self._limits = {
            name: Span(dimension="width", line_color=color, line_dash="dashed", visible=False)
            for name, color in (("read", BLUE), ("written", ORANGE), ("cores", PURPLE))
        }
        for name, span in self._limits.items():
            (self._cores if name == "cores" else self._disk).add_layout(span)
        self._words = html()
        self._cards = {"disk": card(self._disk, self._words), "network": card(self._net)}
        self._empty = {"disk": html(size="13px"), "network": html(size="13px")}
        self.root: LayoutDOM = grid([*self._cards.values(), card(self._cores)])

    def _lines(self, made: Any, colors: dict[str, str]) -> None:
        for name, color in colors.items():
            label = {"legend_label": name} if len(colors) > 1 else {}
            made.line("at", name, source=self._source, color=color, line_width=1.8, **label)
        if len(colors) > 1:
            with_legend(made)
        made.y_range.start = 0
        tips = [(name, f"@{name}{{0.0}}") for name in colors]
        made.add_tools(HoverTool(tooltips=tips, mode="vline"))

    def update(self, view: View) -> None:
        """Show what the view has now."""
        if view.facts is None or not view.resources:
            return
        data = _rates(view)
        self._source.data = data
        limits = {
            "read": view.facts.disk_read_rate / 1e6,
            "written": view.facts.disk_write_rate / 1e6,
            "cores": float(view.facts.threads * len(view.resources)),
        }
        for name, limit in limits.items():
            most = float(np.nanmax(data[name], initial=0.0))
            self._limits[name].location = limit
            self._limits[name].visible = most * MOST_RATIO > limit
        self._show("disk", bool(np.nanmax([data["read"], data["written"]], initial=0.0)))
        self._show("network", bool(np.nanmax(data["received"], initial=0.0)))
        source = "measured" if view.facts.rates_measured else "nominal: oocdl info --machine measures them"
        self._words.text = text(
            f"the disk can read {limits['read']:.0f} and write {limits['written']:.0f} MB/s ({source}); "
            "dashed where in sight"
        )

    def _show(self, name: str, has_any: bool) -> None:
        """Show a figure, or a sentence where there is nothing in it."""
        parts: list[UIElement] = [self._empty[name]]
        if has_any:
            parts = [self._disk, self._words] if name == "disk" else [self._net]
        self._empty[name].text = NOTHING[name]
        if self._cards[name].children != parts:
            self._cards[name].children = parts


def _chosen(view: View, name: str) -> Table:
    """The rows of a process; of the one that has most memory now, if none is chosen."""
    if name in view.resources:
        return view.resources[name]
    return max(view.resources.values(), key=lambda table: float(table["process_bytes"][-1]))


def _rates(view: View) -> dict[str, np.ndarray]:
    """Sums over all processes, of each second or what the log has."""
    columns = {"read": "read_bytes", "written": "written_bytes", "received": "received_bytes"}
    grid_ = np.unique(np.concatenate([table["at"] for table in view.resources.values()]))
    grid_ = grid_[thinned(grid_.size, MOST_POINTS)]
    out = {name: np.zeros(grid_.size) for name in (*columns, "cores")}
    for table in view.resources.values():
        at = table["at"]
        if at.size < 2:
            continue
        counted = [(name, column, 1e6) for name, column in columns.items()]
        counted.append(("cores", "processor_seconds", 1.0))
        for name, column, unit in counted:
            total = np.interp(grid_, at, table[column], right=np.nan)
            rate = np.diff(total, prepend=np.nan) / np.diff(grid_, prepend=np.nan)
            # Totals begin anew where a process does.
            out[name] += np.nan_to_num(np.maximum(rate, 0.0)) / unit
    return {"at": grid_ * 1e3, **out}
