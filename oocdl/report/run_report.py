"""``Report``: what was measured beside what the plan had predicted, layer by layer.

The run's ``report.json`` tells of the last session in one process, and of whole steps. Passes over smaller
batches are left out, and so is the first pass of each kind, in which programs are compiled, as soon as
there are others.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oocdl.errors import CorruptError, StoreError, printable
from oocdl.planning.simulation.timeline import Simulated
from oocdl.planning.task_key import TaskKind
from oocdl.runtime.measured import KindTotals, Measured, Spent
from oocdl.storage.checksums import sealed, unsealed
from oocdl.storage.files import write_text

REPORT_FILE = "report.json"
TABLE_COLUMNS = 110
"""Characters of a line of tables."""


@dataclass(frozen=True)
class LayerReport:
    """One layer in one step, as a mean. Seconds are sums over its tasks, which run side by side."""

    name: str
    units: int
    predicted_seconds: float
    seconds: float
    """Measured: from when a task has its compute permit until it is done."""
    gather_seconds: float
    """Measured: reading inputs."""
    wait_seconds: float
    """Measured: for memory, and for a compute permit."""
    read_bytes: float
    made_bytes: float

    @property
    def ratio(self) -> float:
        """Measured seconds / predicted seconds."""
        return self.seconds / self.predicted_seconds


@dataclass(frozen=True)
class Total:
    """Sums of a whole step, predicted or measured."""

    seconds: float
    peak_bytes: int
    """Peak as it is counted: base process, running programs and RAM tier."""
    spill_read_bytes: float
    spill_written_bytes: float


@dataclass(frozen=True)
class Report:
    """Measured beside predicted times, bytes and memory of a step. ``str(report)`` is a table."""

    steps: int
    """Number of measured steps, over which all numbers are means."""
    layers: tuple[LayerReport, ...]
    predicted: Total
    measured: Total

    def table(self) -> Table:
        """Make the table of layers, a row each."""
        counted = f"{self.steps} step{'' if self.steps == 1 else 's'}"
        title = f"one step, predicted and measured (mean of {counted})"
        columns = ("units", "predicted s", "measured s", "ratio", "reading s", "waiting s")
        table = table_of(title, "layer", *columns)
        for layer in self.layers:
            table.add_row(
                Text(printable(layer.name)),
                str(layer.units),
                *(f"{number:.4f}" for number in (layer.predicted_seconds, layer.seconds)),
                f"{layer.ratio:.2f}",
                *(f"{number:.4f}" for number in (layer.gather_seconds, layer.wait_seconds)),
            )
        return table

    def totals(self) -> Table:
        """Make the table of the whole step."""
        table = table_of("", "in total", "predicted", "measured", "ratio")
        sums = (
            sum(layer.predicted_seconds for layer in self.layers),
            sum(layer.seconds for layer in self.layers),
        )
        before, after = self.predicted, self.measured
        rows = (
            ("computing of all tasks, one after another, s", *sums, 1, 3),
            ("a step, s", before.seconds, after.seconds, 1, 3),
            ("peak memory as counted, MiB", before.peak_bytes, after.peak_bytes, 2**20, 0),
            ("read from the spill, MiB", before.spill_read_bytes, after.spill_read_bytes, 2**20, 1),
            ("written to the spill, MiB", before.spill_written_bytes, after.spill_written_bytes, 2**20, 1),
        )
        for name, expected, found, unit, digits in rows:
            ratio = f"{found / expected:.2f}" if expected else ""
            table.add_row(name, f"{expected / unit:.{digits}f}", f"{found / unit:.{digits}f}", ratio)
        return table

    def __str__(self) -> str:
        return text_of(self.table(), self.totals())


def table_of(title: str, *columns: str) -> Table:
    """Make an empty table whose first column takes names, and whose others take numbers."""
    table = Table(title=Text(title) if title else None, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table


def text_of(*parts: Table | str, columns: int = TABLE_COLUMNS) -> str:
    """Print tables and lines as text, at most so many columns wide, with one line break at its end."""
    out = io.StringIO()
    console = Console(file=out, width=columns, force_terminal=False, highlight=False, markup=False)
    for part in parts:
        console.print(part)
    lines = out.getvalue().removesuffix("\n").split("\n")
    return "\n".join(printable(line.rstrip()) for line in lines) + "\n"


def computing_seconds(simulated: Iterable[Simulated]) -> dict[str, float]:
    """Return the predicted seconds of all tasks of each layer, in the order in which layers begin."""
    found: dict[str, float] = {}
    for one in simulated:
        for ran in sorted(one.units, key=lambda ran: ran.position):
            layer = ran.key.layer
            found[layer] = found.get(layer, 0.0) + ran.done - ran.computing
    return found


def make_report(
    kinds: Sequence[str],
    simulated: Sequence[Simulated],
    predicted_peak_bytes: int,
    measured: Measured,
    peak_bytes: int,
) -> Report | None:
    """Compare measured with predicted for a step of these kinds of passes; None before each was measured."""
    times = Counter(kinds)
    if not times.keys() <= measured.kinds.keys():
        return None
    sums = {kind: measured.kinds[kind] for kind in times}

    def mean(number: Callable[[KindTotals], float]) -> float:
        return sum(number(sums[kind]) * count / sums[kind].passes for kind, count in times.items())

    def layer(name: str, predicted_seconds: float) -> LayerReport:
        def spent(number: Callable[[Spent], float]) -> float:
            return mean(lambda one: number(one.layers.get(name, Spent())))

        return LayerReport(
            name,
            units[name],
            predicted_seconds,
            spent(lambda one: one.compute_seconds),
            spent(lambda one: one.gather_seconds),
            spent(lambda one: one.wait_seconds),
            spent(lambda one: one.read_bytes),
            spent(lambda one: one.made_bytes),
        )

    units = Counter(ran.key.layer for one in simulated for ran in one.units if ran.key.kind is TaskKind.UNIT)
    expected = Total(
        sum(one.seconds for one in simulated),
        predicted_peak_bytes,
        sum(one.read_bytes for one in simulated),
        sum(one.written_bytes for one in simulated),
    )
    found = Total(
        mean(lambda one: one.seconds),
        peak_bytes,
        mean(lambda one: one.spill_read_bytes),
        mean(lambda one: one.spill_written_bytes),
    )
    layers = tuple(layer(name, seconds) for name, seconds in computing_seconds(simulated).items())
    return Report(sums[kinds[-1]].passes, layers, expected, found)


def write_report(folder: Path, report: Report) -> None:
    """Write the report to a run directory, in place of an earlier one."""
    write_text(folder / REPORT_FILE, sealed("report", asdict(report)))


def read_report(folder: Path) -> Report:
    """Read what ``write_report`` wrote. Raises StoreError if there is none, CorruptError if it is damaged."""
    path = folder / REPORT_FILE
    if not path.is_file():
        raise StoreError(
            f"no report is in {folder}: one is written after a whole step in this process, not by a Dask "
            "client's workers; train a step without client="
        )
    try:
        stored: Mapping[str, Any] = unsealed("report", path.read_text())
        # Reports of older versions have more facts of a layer.
        names = [known.name for known in fields(LayerReport)]
        layers = tuple(LayerReport(**{name: layer[name] for name in names}) for layer in stored["layers"])
        totals = Total(**stored["predicted"]), Total(**stored["measured"])
        return Report(int(stored["steps"]), layers, *totals)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CorruptError(f"{path} is damaged ({reason}); delete it, the next commit writes it") from error
