"""Dask's own dashboard while a run trains: its pages are there, and show layers by their names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from distributed import Client, LocalCluster, Scheduler

import oocdl
from oocdl.cli.zoo import write_unet3d
from oocdl.events import Event, StepDone
from oocdl.planning.task_key import group_of
from tests.kit import nets
from tests.kit.faults import OPTIONS

pytestmark = pytest.mark.usefixtures("planned_once")
PAGES = ("status", "tasks", "graph", "individual-progress", "individual-task-stream")
"""But "groups": Dask 2026.8 orders it without regard to dependencies, and fails where groups have any."""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(2, threads_per_worker=1, memory_limit=None, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def groups(dask_scheduler: Scheduler) -> set[str]:
    """The groups of tasks that there are."""
    return set(dask_scheduler.task_groups)


@pytest.mark.parametrize("parallel", [{"space": (2,)}, {"channels": 2}], ids=str)
def test_pages_show_layers(client: Client, tmp_path: Path, parallel: dict[str, Any]) -> None:
    port, pages, shown = client.cluster.scheduler.http_server.port, {}, set()

    def look(event: Event) -> None:
        if isinstance(event, StepDone) and event.row["step"] == 2:
            shown.update(client.run_on_scheduler(groups))
            for page in PAGES:
                with urlopen(f"http://127.0.0.1:{port}/{page}", timeout=60) as answer:
                    pages[page] = answer.status

    model = write_unet3d(tmp_path / "net.onnx", base=2, depth=1, classes=2)
    data = nets.write_data(tmp_path / "data.zarr", nets.volumes(2, 16))
    options = {**OPTIONS, "parallel": parallel, "steps": 3}
    run = oocdl.fit(model, data, workdir=tmp_path / "run", client=client, callbacks=[look], **options)
    assert pages == dict.fromkeys(PAGES, 200)
    layers = {group_of(layer.layer.name) for layer in run.plan.layers}
    assert shown - layers == {"weights"} and shown & layers >= {"down1.conv2", "bottom.conv1", "up1.conv1"}
