"""``Scaling``: how a step goes on more and more hosts, as simulated: numbers, a table, a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oocdl.errors import printable
from oocdl.planning.simulation.hosts import SimulatedHosts
from oocdl.report import notebook
from oocdl.report.figure import BLUE, empty_figure, picture_path, written
from oocdl.report.tables import Column, Sheet, shortened, text_of

CERTAINTY = "checked on 1 and 2 workers: off by up to 20 %; with attention 30 % too fast"
NOMINAL_CERTAINTY = "by nominal rates: off by -57 to +47 % (oocdl info --machine measures)"
"""Accuracy against measurements (``perf/simulate.py``), in one line of a terminal."""

COLUMNS = (
    Column("hosts", "hosts"),
    Column("working", "at work"),
    Column("batch", "batch", rank=4),
    Column("seconds", "s/step", "{:.3g}".format),
    Column("speedup", "speed-up", "{:.3g}".format),
    Column("efficiency", "%", lambda share: f"{100 * share:.0f}", 1),
    Column("memory_bytes", "memory GiB", lambda nbytes: f"{nbytes / 2**30:.2f}", 3),
    Column("traffic_bytes", "sent MiB", lambda nbytes: f"{nbytes / 2**20:.0f}", 2),
    Column("limit", "limited by"),
)


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One step on a number of hosts."""

    hosts: int
    working: int
    """Hosts that get work: fewer than there are where a step on all would hardly be faster."""
    batch: int
    """Samples of a step, on all hosts together."""
    seconds: float
    speedup: float
    """Samples a second as a multiple of the first row's, times the hosts of that row."""
    efficiency: float
    """The speed-up for each host: 1 is ideal."""
    memory_bytes: int
    """Predicted peak of the host that takes most, the process itself included."""
    traffic_bytes: int
    """Bytes sent and received in a step by the host with most of them."""
    spilled_bytes: int
    """Bytes read from and written to disk in a step by the host with most of them."""
    limit: str
    """"compute", "network", "disk", "messages", "scheduler" or, where nothing is busy most of the time,
    "dependencies": hosts or threads wait for each other."""
    details: SimulatedHosts = field(repr=False)


@dataclass(frozen=True)
class Scaling:
    """The result of ``oocdl.simulate``: a row for each number of hosts."""

    title: str
    weak: bool
    """Whether the batch grows with the hosts."""
    rows: tuple[ScalingRow, ...]
    nominal: bool = False
    """Whether rates are nominal, as this machine was not measured."""

    @property
    def certainty(self) -> str:
        """How far seconds are off, in one line."""
        return NOMINAL_CERTAINTY if self.nominal else CERTAINTY

    def table(self) -> Sheet:
        """Make the table: % is efficiency, memory and traffic are a host's; "at work" if not all are."""
        all_work = all(row.working == row.hosts for row in self.rows)
        columns = [column for column in COLUMNS if column.key != "working" or not all_work]
        rows = [[getattr(row, column.key) for column in columns] for row in self.rows]
        return Sheet(f"{self.title}: {'weak' if self.weak else 'strong'} scaling, simulated", columns, rows)

    def __repr__(self) -> str:
        hosts = ", ".join(str(row.hosts) for row in self.rows)
        return f"<Scaling of {shortened(printable(self.title), 60)}: {shortened(hosts, 60)} hosts>"

    def _repr_html_(self) -> str:
        return notebook.page(self.table(), self.certainty)

    def __str__(self) -> str:
        return f"{text_of(self.table()).rstrip()}\n{self.certainty}\n"

    def plot(self, path: str | Path) -> Path:
        """Draw the speed-up over the number of hosts beside the ideal, as PNG or SVG; returns the path.

        Raises InputError for another ending and where matplotlib is missing, StoreError if the file cannot
        be written.
        """
        target = picture_path(path)
        figure = empty_figure(8.0, 5.0)
        axes = figure.subplots()
        hosts, speedups = [row.hosts for row in self.rows], [row.speedup for row in self.rows]
        axes.plot(hosts, hosts, color="#777777", linestyle="--", label="ideal")
        axes.plot(hosts, speedups, color=BLUE, marker="o", label="simulated")
        below: Any = {"xytext": (0, -14), "textcoords": "offset points", "fontsize": 8, "ha": "center"}
        for row in self.rows:
            axes.annotate(row.limit, (row.hosts, row.speedup), **below)
        labels = [str(count) for count in hosts]
        axes.loglog(base=2)
        axes.set_xticks(hosts, labels)
        axes.set_yticks(hosts, labels)
        axes.set(xlabel="hosts", ylabel="samples a second, as multiples of one host's")
        axes.set_title(f"{self.title}: {'weak' if self.weak else 'strong'} scaling", parse_math=False)
        axes.grid(linewidth=0.4, alpha=0.6)
        axes.legend(frameon=False)
        return written(figure, target)
