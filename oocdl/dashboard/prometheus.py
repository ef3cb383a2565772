"""Numbers of the runs on a Dask scheduler for Prometheus, at Dask's own address ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from oocdl.dashboard.view import View

PREFIX = "oocdl"
GAUGES = {
    "step": "Steps that are done.",
    "loss": "Loss of the last step.",
    "lr": "Learning rate of the last step.",
    "seconds": "Seconds that the last step took.",
    "process_bytes": "Memory that a process has by the kernel's count, pages of files left out.",
    "tier_bytes": "Chunks in the RAM tier of a process.",
    "spilled_bytes": "Chunks of a process that are on its disk.",
}
"""Name of a number -> what it is; those of bytes are of each process."""


class RunCollector:
    """A collector for Prometheus's client. ``views`` returns the views of the runs that are shown."""

    def __init__(self, views: Callable[[], Iterable[View]]) -> None:
        self._views = views
        from prometheus_client.core import GaugeMetricFamily

        self._gauge = GaugeMetricFamily

    def describe(self) -> Iterable[Any]:
        """Claim no names: two schedulers of one process have the same."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Give all numbers, each with its run and, of a process, with that."""
        views = list(self._views())
        for name, words in GAUGES.items():
            labels = ["run", "process"] if name.endswith("_bytes") else ["run"]
            gauge = self._gauge(f"{PREFIX}_{name}", words, labels=labels)
            for view in views:
                for process, table in list(view.resources.items()) if len(labels) > 1 else [("", view.steps)]:
                    if len(table) and np.isfinite(number := float(table[name][-1])):
                        gauge.add_metric([str(view.run), process][: len(labels)], number)
            yield gauge


def register(views: Callable[[], Iterable[View]]) -> Callable[[], None]:
    """Give Prometheus the numbers of runs from now on; returns what ends that.

    Without its client (``prometheus_client``) Dask has no numbers for it either, and nothing happens.
    """
    if find_spec("prometheus_client") is None:
        return lambda: None
    from prometheus_client import REGISTRY

    collector = RunCollector(views)
    REGISTRY.register(collector)
    return lambda: REGISTRY.unregister(collector)
