"""Memory of a process over time by term, what moves to and from disk and network, and the use of cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from bokeh.models import Range1d
from bokeh.models.annotations import Span

from oocdl.dashboard.panels import style
from oocdl.dashboard.panels.style import Panel
from oocdl.dashboard.series import Table, thinned
from oocdl.dashboard.view import View

LARGEST = "the largest process"
MIB = float(1 << 20)
TERMS = {
    "base": ("base_bytes", style.GREY),
    "chunks in RAM": ("tier_bytes", style.SKY),
    "running tasks": ("reserved_bytes", style.ORANGE),
}
RATES: Mapping[str, tuple[str, float, str]] = {
    "read": ("read_bytes", 1e6, style.BLUE),
    "written": ("written_bytes", 1e6, style.ORANGE),
    "received": ("received_bytes", 1e6, style.GREEN),
    "cores": ("processor_seconds", 1.0, style.PURPLE),
}
"""Name of a line -> the total that it is the rate of, the unit, and its colour."""
CHARTS = {
    "Disk: spill (MB/s)": (("read", "written"), "Disk: nothing was spilled, all arrays fit into the budget."),
    "Network: from other workers (MB/s)": (("received",), "Network: nothing came from other workers."),
    "Cores in use": (("cores",), ""),
}
"""Title of a figure -> its lines, and what is said where there is nothing in it."""
MOST_RATIO = 3.0
"""A limit that is more than so many times what moves is told in words: its line would flatten all else."""


class Memory(Panel):
    """Memory of one process over time, under the budget."""

    def __init__(self, small: bool = False) -> None:
        self._source = style.source("at", *TERMS, "process", "spilled")
        self._figure = style.plot("Memory (MiB)", style.HEIGHT - 22 if small else 340, x_axis_type="datetime")
        colors = [color for _, color in TERMS.values()]
        self._figure.varea_stack(list(TERMS), x="at", source=self._source, color=colors, alpha=0.85)
        line = self._figure.line("at", "process", source=self._source, color=style.INK, line_width=1.8)
        dotted = {"color": style.PURPLE, "line_width": 2, "line_dash": "dotted"}
        self._figure.line("at", "spilled", source=self._source, **dotted)
        dashed: Any = {"line_color": style.RED, "line_width": 1.8, "line_dash": "dashed"}
        self._budget = Span(location=0, dimension="width", **dashed)
        self._figure.add_layout(self._budget)
        terms = {name: f"@{{{name}}}{{0}} MiB" for name in TERMS}
        tips = {"by the kernel": "@process{0} MiB", **terms, "spilled": "@spilled{0} MiB"}
        style.hover(self._figure, tips, line, mode="vline")
        self._figure.y_range = Range1d(start=0, end=1)
        lines = [(style.INK_CSS, "by the kernel"), (style.PURPLE, "spilled to disk"), (style.RED, "budget")]
        legend = style.html(style.chips([*((color, name) for name, (_, color) in TERMS.items()), *lines]))
        self._process = style.choice("process", [LARGEST], 280, self.changed)
        parts = [self._figure, legend]
        self.root = style.card(*(parts if small else [self._process, *parts]))

    def draw(self, view: View) -> None:
        if view.facts is None or not view.resources:
            return
        options: Any = [LARGEST, *view.resources]
        if self._process.options != options:
            self._process.options = options
        table = _chosen(view, str(self._process.value))
        shown = thinned(len(table), style.MOST_POINTS)
        columns = {name: column for name, (column, _) in TERMS.items()} | {"process": "process_bytes"}
        data = {name: table[column][shown] / MIB for name, column in columns.items()}
        spilled = table["spilled_bytes"][shown] / MIB
        self._source.data = {"at": table["at"][shown] * 1e3, **data, "spilled": spilled}
        self._budget.location = budget = view.facts.budget_bytes / MIB
        top = max(budget, *(float(np.nanmax(column)) for column in data.values()))
        self._figure.y_range.end = 1.08 * max(top, min(float(np.nanmax(spilled)), 2 * budget))


class Rates(Panel):
    """Bytes a second to and from the disk and the network, and cores in use."""

    def __init__(self) -> None:
        self._source = style.source("at", *RATES, *(f"{name} limit" for name in RATES))
        self._charts = {title: self._chart(title, lines) for title, (lines, _) in CHARTS.items()}
        self._words = {title: style.html() for title in CHARTS}
        self._cards = {title: style.card(self._charts[title], self._words[title]) for title in CHARTS}
        self.root = style.grid(list(self._cards.values()))

    def _chart(self, title: str, names: tuple[str, ...]) -> Any:
        """Make a figure of some lines, with their limits."""
        chart, lines = style.plot(title, 230, x_axis_type="datetime"), []
        for name in names:
            color, label = RATES[name][2], {"legend_label": name} if len(names) > 1 else {}
            of = {"source": self._source, "color": color}
            lines.append(chart.line("at", name, line_width=1.8, **of, **label))
            chart.line("at", f"{name} limit", line_dash="dashed", **of)
        if len(names) > 1:
            style.with_legend(chart)
        chart.y_range.start = 0
        style.hover(chart, {name: f"@{name}{{0.0}}" for name in names}, *lines, mode="vline")
        return chart

    def draw(self, view: View) -> None:
        facts = view.facts
        if facts is None or not view.resources:
            return
        data = _rates(view)
        most = {name: float(np.nanmax(data[name], initial=0.0)) for name in RATES}
        read, write = facts.disk_read_rate / 1e6, facts.disk_write_rate / 1e6
        limits = {"read": read, "written": write, "cores": float(facts.threads * len(_present(view)))}
        for name in RATES:
            limit = limits.get(name, np.inf)
            shown = limit if most[name] * MOST_RATIO > limit else np.nan
            data[f"{name} limit"] = np.full_like(data["at"], shown)
        self._source.data = data
        rates = "measured" if facts.rates_measured else "nominal: oocdl info --machine measures them"
        of_disk = f"the disk can read {read:.0f} and write {write:.0f} MB/s ({rates}); dashed where in sight"
        for title, (lines, nothing) in CHARTS.items():
            is_full = not nothing or any(most[name] for name in lines)
            # A browser complains of a chart without numbers even where it is not visible.
            parts = [self._charts[title], self._words[title]] if is_full else [self._words[title]]
            if self._cards[title].children != parts:
                self._cards[title].children = parts
            self._words[title].text = nothing if not is_full else of_disk if "read" in lines else ""


def _present(view: View) -> Mapping[str, Table]:
    """The processes that take part now; before one of them has told how it stands, those before them."""
    return view.present or view.resources


def _chosen(view: View, name: str) -> Table:
    """The rows of a process; of the one that has most memory now, if none is chosen."""
    if name in view.resources:
        return view.resources[name]
    return max(_present(view).values(), key=lambda table: float(table["process_bytes"][-1]))


def _rates(view: View) -> dict[str, np.ndarray]:
    """Sums over all processes, of each second or what the log has."""
    at = np.unique(np.concatenate([table["at"] for table in view.resources.values()]))
    at = at[thinned(at.size, style.MOST_POINTS)]
    out = {name: np.zeros(at.size) for name in RATES}
    for table in view.resources.values():
        if len(table) < 2:
            continue
        for name, (column, unit, _) in RATES.items():
            total = np.interp(at, table["at"], table[column], right=np.nan)
            rate = np.diff(total, prepend=np.nan) / np.diff(at, prepend=np.nan)
            # Totals begin anew where a process does.
            out[name] += np.nan_to_num(np.maximum(rate, 0.0)) / unit
    return {"at": at * 1e3, **out}
