"""Results of passes that only look at samples: losses and sums for metrics, and what they are on the whole.

A validation notes those of each pass in the run: one that was killed goes on where it was.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from oocdl.events import VALIDATION_PREFIX
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import Region, as_slices
from oocdl.ops.metric_functions import Metric
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.passes import VALIDATION, PassInfo
from oocdl.report.plan_view import Plan
from oocdl.runtime.session import Held
from oocdl.runtime.weight_io import boxes_of
from oocdl.storage.files import read_bytes, regular, reporting, write_bytes
from oocdl.storage.run.history import line_of, row_of

PassSums = Mapping[str, Mapping[str, Any]]
"""Output -> name of a sum -> its values in a pass, of shape (samples, classes) or (samples, 1)."""
NOTES = "history/validation.jsonl"


@dataclass(frozen=True)
class Measured:
    """The results of one pass over some samples."""

    rows: Sequence[int]
    losses: Mapping[str, float]
    sums: dict[str, dict[str, Any]]


@dataclass(eq=False)
class Gathered:
    """The sums of the pass that runs."""

    compiled: Mapping[str, CompiledPass]
    arrays: dict[tuple[str, str], Array] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def watched(self) -> frozenset[str]:
        found = set[str]()
        for one in self.compiled.values():
            names = (name for head in one.metric_sums.values() for name in head.values.values())
            found.update(map(one.plan.factored.stored, names))
        return frozenset(found)

    def deliver(self, plan_id: str, value: str, region: Region, array: Array, info: PassInfo) -> None:
        compiled = self.compiled[plan_id]
        for output, head in compiled.metric_sums.items():
            for title, box, part in boxes_of(compiled, head.values, value, region, array):
                with self.lock:
                    shape = compiled.plan.factored.graph.values[head.values[title]].shape
                    self.arrays.setdefault((output, title), np.zeros(shape))[as_slices(box)] = part

    def run(self, session: Held, plan_id: str, info: PassInfo) -> Measured:
        compiled, rows = self.compiled[plan_id], info.indices
        losses = compiled.named_losses(session.run_pass(plan_id, info))
        with self.lock:
            found, self.arrays = self.arrays, {}
        return Measured(rows, losses, _sums(compiled, lambda *head: found[head].tolist(), len(rows)))


def _sums(compiled: CompiledPass, of: Callable[[str, str], Any], count: int) -> dict[str, dict[str, Any]]:
    """Return the sums of each output over some samples: those ``of`` a title, and what is known before."""
    return {
        output: {title: of(output, title) for title in head.values}
        | {title: [[number]] * count for title, number in head.known.items()}
        for output, head in compiled.metric_sums.items()
    }


def fold(first: dict[str, dict[str, Any]], later: dict[str, dict[str, Any]]) -> None:
    """Move counts by two classes, which are many, from a later pass to the first: no sample has its own."""
    for output, sums in later.items():
        if "joint" in sums:
            both = np.asarray([*first[output]["joint"], *sums["joint"]])
            first[output]["joint"], sums["joint"] = both.sum(axis=0, keepdims=True), both[:0]


def metric_values(
    metrics: Iterable[Metric], passes: Sequence[PassSums], of_sample: bool = False
) -> dict[str, Any]:
    """Return metrics over passes (``of_sample``: one, of one sample); of several outputs by output, too."""
    values: dict[str, Any] = {}
    outputs: PassSums = passes[0] if passes else {}
    for output, known in outputs.items():
        before = f"{output}/" if len(outputs) > 1 else ""
        for metric in (one for one in metrics if known.keys() >= set(one.needs)):
            tables = {n: [np.asarray(one[output][n], np.float64) for one in passes] for n in metric.needs}
            sums = {name: np.concatenate(table) for name, table in tables.items()}
            numbers = metric.of_sample(sums) if of_sample else metric.numbers(sums)
            values |= {f"{before}{name}": value for name, value in numbers.items()}
    return values


def mean_losses(passes: Sequence[Measured]) -> dict[str, float]:
    """Return the losses of passes, averaged over samples."""
    count = sum(len(one.rows) for one in passes)
    return {n: sum(one.losses[n] * len(one.rows) for one in passes) / count for n in passes[0].losses}


@dataclass(frozen=True)
class Notes:
    """The notes on a validation; ``state`` is what its results depend on, as plain data."""

    path: Path
    state: Mapping[str, Any]

    def read(self, passes: Sequence[Sequence[int]]) -> list[Measured]:
        """Return the results of those passes that are done; forget all of other states."""
        with reporting(self.path):
            lines = read_bytes(self.path).splitlines() if self.path.exists() else []
            rows = [row for line in lines if (row := row_of(line)) is not None]
            rows = [row for row in rows if row["state"] == self.state]
            write_bytes(self.path, b"".join(map(line_of, rows)))
        done = zip(passes, rows, strict=False)
        return [Measured(samples, row["losses"], row["sums"]) for samples, row in done]

    def add(self, found: Measured) -> None:
        with reporting(self.path), open(self.path, "ab", opener=regular) as stream:
            stream.write(line_of({"state": self.state, "losses": found.losses, "sums": found.sums}))


def result_names(plan: Plan) -> list[str]:
    """Return the names of all results of validations; none without any."""
    ids = plan.of_role(VALIDATION)
    if not ids:
        return []
    compiled = plan.kinds[ids[0]]
    values, heads = compiled.plan.factored.graph.values, compiled.metric_sums
    sample = _sums(compiled, lambda one, title: np.ones(values[heads[one].values[title]].shape).tolist(), 1)
    with np.errstate(all="ignore"):
        scores = metric_values(plan.settings.metrics, [sample])
    return [f"{VALIDATION_PREFIX}{name}" for name in (*compiled.named_losses(defaultdict(float)), *scores)]
