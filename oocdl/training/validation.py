"""A validation within a run: forward passes over samples that no step has, with losses and metrics.

What each pass has found is noted in the run, so that a validation that was killed goes on where it was: the
steps that lead there again give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oocdl.events import VALIDATION_PREFIX
from oocdl.ops.metric_functions import Metric
from oocdl.ops.metric_sums import suits
from oocdl.planning.passes import PassInfo
from oocdl.storage.files import read_bytes, regular, reporting, write_bytes
from oocdl.storage.run.history import line_of, row_of
from oocdl.training.job import Job
from oocdl.training.metric_values import PassSums, metric_values

FILE = "history/validation.jsonl"


@dataclass(frozen=True)
class Found:
    """The results of one pass of a validation."""

    losses: Mapping[str, float]
    sums: PassSums


@dataclass(frozen=True)
class Validation:
    """The notes on the validation of one state of the weights."""

    path: Path
    state: Mapping[str, Any]
    """What the results depend on, as plain data."""

    def noted(self) -> list[Found]:
        """Return what the passes that are done have found, and forget notes on any other state."""
        with reporting(self.path):
            lines = read_bytes(self.path).splitlines() if self.path.exists() else []
            rows = [row for line in lines if (row := row_of(line)) is not None]
            rows = [row for row in rows if row["state"] == self.state]
            write_bytes(self.path, b"".join(map(line_of, rows)))
        return [Found(row["losses"], row["sums"]) for row in rows]

    def note(self, found: Found) -> None:
        """Note what the next pass has found."""
        with reporting(self.path), open(self.path, "ab", opener=regular) as stream:
            stream.write(line_of({"state": self.state, **vars(found)}))


def result_names(job: Job) -> list[str]:
    """Return the names of ``results`` without those of single classes; none without a validation."""
    if not job.course.validated:
        return []
    heads = job.binding.targets
    several = len(heads) > 1
    parts = [f"loss/{head.output}" for head in heads if several]
    scores = [
        f"{head.output}/{metric.name}" if several else metric.name
        for head in heads
        for metric in job.settings.metrics
        if suits(metric, head.spec)
    ]
    return [f"{VALIDATION_PREFIX}{name}" for name in ("loss", *parts, *scores)]


def results(
    found: Sequence[Found], passes: Sequence[tuple[str, PassInfo]], metrics: Iterable[Metric]
) -> dict[str, float]:
    """Return mean losses over samples, and metrics, by their names in the history."""
    sizes = [len(info.indices) for _, info in passes]
    losses = [one.losses for one in found]
    values = {
        name: sum(one[name] * size for one, size in zip(losses, sizes, strict=True)) / sum(sizes)
        for name in losses[0]
    }
    values |= metric_values(metrics, [one.sums for one in found])
    return {f"{VALIDATION_PREFIX}{name}": value for name, value in values.items()}
