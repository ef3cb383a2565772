"""Gathers the sums that units make for metrics, pass by pass, and makes numbers of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import Region, as_slices, region_shape
from oocdl.ops.metric_functions import Metric
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.passes import PassInfo
from oocdl.runtime.inputs import own_regions

PassSums = Mapping[str, Mapping[str, Any]]
"""Output -> name of a sum -> its values in a pass, of shape (samples, classes) or (samples, 1)."""


@dataclass(eq=False)
class Gathered:
    """The sums of the pass that runs."""

    compiled: Mapping[str, CompiledPass]
    arrays: dict[tuple[str, str], Array] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def watched(self) -> frozenset[str]:
        """Stored names of the values that ``deliver`` needs."""
        return frozenset(
            one.plan.factored.stored(value)
            for one in self.compiled.values()
            for head in one.metric_sums.values()
            for value in head.values.values()
        )

    def deliver(self, plan_id: str, value: str, region: Region, array: Array, info: PassInfo) -> None:
        """Take a piece of a value that a unit has made; ignore values that no metric needs."""
        compiled = self.compiled[plan_id]
        factored = compiled.plan.factored
        for output, head in compiled.metric_sums.items():
            for title, name in head.values.items():
                if factored.stored(name) != value:
                    continue
                with self.lock:
                    held = self.arrays.setdefault(
                        (output, title), np.zeros(factored.graph.values[name].shape)
                    )
                    for box, place in own_regions(factored.factors[name], region):
                        held[as_slices(box)] = np.reshape(array[place], region_shape(box))

    def take(self, plan_id: str, samples: int) -> dict[str, dict[str, Any]]:
        """Return the sums of a pass that is over, as plain data, and forget them."""
        heads = self.compiled[plan_id].metric_sums
        with self.lock:
            found, self.arrays = self.arrays, {}
        return {
            output: {
                **{title: found[output, title].tolist() for title in head.values},
                **{title: [[number]] * samples for title, number in head.known.items()},
            }
            for output, head in heads.items()
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
    """Return the metrics over all passes by name; with several outputs, each behind its output's name.

    With ``of_sample`` the passes are one, of one sample.
    """
    outputs = list(passes[0]) if passes else []
    values: dict[str, Any] = {}
    for output in outputs:
        sums = {
            name: np.concatenate([np.asarray(one[output][name], np.float64) for one in passes])
            for name in passes[0][output]
        }
        before = f"{output}/" if len(outputs) > 1 else ""
        for metric in metrics:
            if sums.keys() >= set(metric.needs):
                numbers = metric.of_sample(sums) if of_sample else metric.numbers(sums)
                values |= {f"{before}{name}": value for name, value in numbers.items()}
    return values
