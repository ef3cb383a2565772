"""What is used of Dask that its documentation does not promise: a release without one of these fails here.

Checked with dask and distributed 2026.8.0. Some are asked for with a default, and would be missed in silence.
"""

from __future__ import annotations

import ast
from operator import attrgetter
from pathlib import Path

import pytest
from distributed import Client, LocalCluster
from distributed.spill import SpillBuffer

from oocdl.runtime.cluster.dask_limits import MONITOR
from oocdl.runtime.cluster.dask_records import OF_WORKER, SENT
from tests.kit.code import modules

PRIVATE = {
    "client": (
        "_close", "_gather", "_loop_runner.is_started", "_register_scheduler_plugin", "_run",
        "_run_on_scheduler", "_start",
    ),
    "scheduler": ("_ongoing_background_tasks.call_soon",),
    "worker": ("_ongoing_background_tasks.call_soon",),
    "future": ("_state.exception",),
    "cluster": ("_adaptive",),
}  # fmt: skip
UNDOCUMENTED = {
    "client": ("loop.asyncio_loop", *(f"scheduler_comm.{name}" for name in SENT)),
    "scheduler": (
        "broadcast", "client_comms", "http_application.applications", "remove_worker", "stream_comms",
        "task_prefixes", "plugins",
    ),
    "worker": (
        "data", "handlers", "memory_manager.memory_limit", "metrics", "plugin_add", "plugin_remove", "rpc",
        "set_resources", "state.executing", "state.nthreads", "state.ready.peek", "state.tasks",
        "state.total_resources", *OF_WORKER,
    ),
    "cluster": ("plan",),
}  # fmt: skip
FOLDERS = ("runtime.cluster", "tuning", "cluster", "dashboard")


def test_names_are_there(tmp_path: Path) -> None:
    how = {"memory_limit": "1GiB", "dashboard_address": ":0", "local_directory": str(tmp_path)}
    with (
        LocalCluster(n_workers=1, processes=False, **how) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        cluster.adapt(minimum=1, maximum=1)
        (worker,) = cluster.workers.values()
        future = client.submit(int)
        future.result()
        known = {"client": client, "scheduler": cluster.scheduler, "worker": worker}
        known |= {"future": future, "cluster": cluster}
        for names in (PRIVATE, UNDOCUMENTED):
            for who, wanted in names.items():
                for name in wanted:
                    attrgetter(name)(known[who])
        assert MONITOR in worker.periodic_callbacks
        assert isinstance(worker.data, SpillBuffer) and isinstance(worker.data.n, float | int)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_other_private_names_are_used(folder: str) -> None:
    """Of what is not one's own."""
    known = {name.partition(".")[0] for names in PRIVATE.values() for name in names}
    for name, tree in modules().items():
        for node in ast.walk(tree) if name.startswith(f"{folder}.") else ():
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[:2] != "__":
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                assert own or node.attr in known, (name, node.lineno, node.attr)
