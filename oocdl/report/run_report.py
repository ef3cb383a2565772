"""``Report``: what was measured beside what the plan had predicted, layer by layer.

The run's ``report.json`` tells of the last session in one process, and of whole steps. Passes over smaller
batches or samples are left out, and so is the first pass of each kind, in which programs are compiled, as
soon as there are others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from oocdl.errors import CorruptError, StoreError
from oocdl.planning.simulation.timeline import Simulated
from oocdl.planning.task_key import TaskKind
from oocdl.report import notebook
from oocdl.report.layer_facts import computing_seconds
from oocdl.report.tables import Column, Sheet, block_sheet, text_of
from oocdl.report.units import counted
from oocdl.runtime.measured import KindTotals, Measured, Spent
from oocdl.storage.checksums import sealed, unsealed
from oocdl.storage.dataset.data_array import one_line
from oocdl.storage.files import write_text

REPORT_FILE = "report.json"


def _ratio(layers: Sequence[LayerReport]) -> float:
    return sum(one.seconds for one in layers) / sum(one.predicted_seconds for one in layers)


COLUMNS = (
    Column("layer", "layer", kind="name"),
    Column("units", "units", rank=4),
    Column("predicted_seconds", "predicted s", "{:.4f}".format),
    Column("seconds", "measured s", "{:.4f}".format),
    Column("ratio", "ratio", "{:.2f}".format, 1, of=_ratio),
    Column("gather_seconds", "reading s", "{:.4f}".format, 3),
    Column("wait_seconds", "waiting s", "{:.4f}".format, 2),
)


SPENT = ("compute_seconds", "gather_seconds", "wait_seconds", "read_bytes", "made_bytes")
"""Fields of ``Spent``, in the order of those of ``LayerReport`` that are measured."""
TOTAL_COLUMNS = (
    Column("what", "in total", kind="words"),
    Column("predicted", "predicted"),
    Column("measured", "measured"),
    Column("ratio", "ratio", rank=1),
)
TOTALS = (
    ("computing of all tasks, one after another, s", "computing", 1, 3),
    ("a step, s", "seconds", 1, 3),
    ("peak memory, MiB", "peak_bytes", 2**20, 0),
    ("read from the spill, MiB", "spill_read_bytes", 2**20, 1),
    ("written to the spill, MiB", "spill_written_bytes", 2**20, 1),
)
"""Rows of a whole step: words, field of ``Total``, unit, digits."""


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
    """Peak of a process: predicted, or by the kernel's count."""
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

    def table(self, every: bool = False) -> Sheet:
        """Make the table of layers: a row each, or one for each block where they are many.

        ``every``: a row each, however many they are.
        """
        title = f"one step, predicted and measured (mean of {counted(self.steps, 'step')})"
        return block_sheet(title, COLUMNS, self.layers, every)

    def totals(self) -> Sheet:
        """Make the table of the whole step."""
        predicted, measured = asdict(self.predicted), asdict(self.measured)
        predicted["computing"] = sum(layer.predicted_seconds for layer in self.layers)
        measured["computing"] = sum(layer.seconds for layer in self.layers)
        rows = []
        for name, key, unit, digits in TOTALS:
            before, after = predicted[key], measured[key]
            ratio = f"{after / before:.2f}" if before else ""
            rows.append((name, f"{before / unit:.{digits}f}", f"{after / unit:.{digits}f}", ratio))
        return Sheet("", TOTAL_COLUMNS, rows)

    def __str__(self) -> str:
        return text_of(self.table(), self.totals())

    def __repr__(self) -> str:
        before = f"{self.predicted.seconds:.3g} s a step predicted"
        after = f"{self.measured.seconds:.3g} s measured (mean of {self.steps})"
        return f"<Report of {len(self.layers)} layers: {before}, {after}>"

    def _repr_html_(self) -> str:
        return notebook.page(self.table(), self.totals())


def make_report(
    kinds: Sequence[str],
    simulated: Sequence[Simulated],
    predicted_peak_bytes: int,
    measured: Measured,
    peak_bytes: int,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Report | None:
    """Compare measured with predicted for a step of these kinds of passes; None before each was measured.

    ``names``: layer -> what it is called, where that is another name.
    """
    times = Counter(kinds)
    if not times.keys() <= measured.kinds.keys():
        return None
    sums = {kind: measured.kinds[kind] for kind in times}

    def mean(number: Callable[[KindTotals], float]) -> float:
        return sum(number(sums[kind]) * count / sums[kind].passes for kind, count in times.items())

    def layer(name: str, predicted_seconds: float) -> LayerReport:
        def spent(field: str) -> float:
            return mean(lambda one: getattr(one.layers.get(name, Spent()), field))

        return LayerReport(names.get(name, name), units[name], predicted_seconds, *map(spent, SPENT))

    units = Counter(ran.key.layer for one in simulated for ran in one.units if ran.key.kind is TaskKind.UNIT)
    predicted_seconds = sum(one.seconds for one in simulated)
    spilled = sum(one.read_bytes for one in simulated), sum(one.written_bytes for one in simulated)
    before = Total(predicted_seconds, predicted_peak_bytes, *spilled)
    moved = mean(lambda one: one.spill_read_bytes), mean(lambda one: one.spill_written_bytes)
    after = Total(mean(lambda one: one.seconds), peak_bytes, *moved)
    layers = tuple(layer(name, seconds) for name, seconds in computing_seconds(simulated).items())
    return Report(sums[kinds[-1]].passes, layers, before, after)


def write_report(folder: Path, report: Report) -> None:
    """Write the report to a run directory, in place of an earlier one."""
    write_text(folder / REPORT_FILE, sealed("report", asdict(report)))


def read_report(folder: Path) -> Report:
    """Read what ``write_report`` wrote. Raises StoreError if there is none, CorruptError if it is damaged."""
    path = folder / REPORT_FILE
    if not path.is_file():
        raise StoreError(
            f"no report is in {folder}: one is written once a full batch of samples of the largest size was "
            "trained on in this process, not by a Dask client's workers; train on, without client="
        )
    try:
        stored: Mapping[str, Any] = unsealed("report", path.read_text())
        layers = tuple(LayerReport(**layer) for layer in stored["layers"])
        totals = Total(**stored["predicted"]), Total(**stored["measured"])
        return Report(int(stored["steps"]), layers, *totals)
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{path} is damaged ({one_line(error)}); delete it, the next commit writes it"
        raise CorruptError(text) from error
