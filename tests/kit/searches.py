"""Searches that take a second or two, and workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster

import oocdl
from oocdl.space import LogUniform
from tests.kit.settings import QUICK

SPACE: Mapping[str, Any] = {"lr": LogUniform(1e-4, 1.0), "batch_size": [2, 4], "optimizer": ["sgd", "adam"]}
OPTIONS: Mapping[str, Any] = {**QUICK, "memory": "2GiB", "space": SPACE, "trials": 4, "steps": 2}
MEASURED = ("seconds", "peak_bytes", "run")
"""Columns of a table that tell how and where it went, not what came of it."""


def made_of(search: oocdl.Search) -> list[dict[str, Any]]:
    """The table without what is measured."""
    return [{name: held for name, held in row.items() if name not in MEASURED} for row in search.table]


def commit_times(search: oocdl.Search) -> dict[str, int]:
    """When each trial that has trained was committed last, by the name of its run."""
    return {path.parent.name: path.stat().st_mtime_ns for path in search.path.glob("trials/*/CURRENT")}


@contextmanager
def workers_in(
    folder: Path, count: int = 2, threads: int = 1, memory_limit: str | None = "3GiB"
) -> Iterator[Client]:
    """A client of worker processes, each of which Dask ends at 95 % of its limit."""
    place = {"dashboard_address": ":0", "local_directory": str(folder), "memory_limit": memory_limit}
    with (
        LocalCluster(n_workers=count, threads_per_worker=threads, processes=True, **place) as cluster,
        Client(cluster) as client,
    ):
        yield client
