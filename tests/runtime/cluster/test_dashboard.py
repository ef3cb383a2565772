"""Dask's own dashboard while a run trains: its pages are there, and show layers by their names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from distributed import Client, Scheduler

import oocdl
from oocdl.dashboard import dask_driver, dask_plugin
from oocdl.events import Event, StepDone, WorkersChanged
from oocdl.planning.hosts import segments
from oocdl.planning.task_key import group_of
from oocdl.presets.unets import write_unet3d
from oocdl.runtime.lost import WorkersLost
from tests.kit import nets
from tests.kit.faults import OPTIONS
from tests.kit.searches import workers_in

pytestmark = pytest.mark.usefixtures("planned_once")
PAGES = ("status", "tasks", "graph", "individual-progress", "individual-task-stream")
"""But "groups": Dask 2026.8 orders it without regard to dependencies, and fails where groups have any."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with workers_in(tmp_path_factory.mktemp("workers"), memory_limit=None) as client:
        yield client


def groups(dask_scheduler: Scheduler) -> set[str]:
    """The groups of tasks that there are."""
    return set(dask_scheduler.task_groups)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"space": (2,)}, {"channels": 2}], ids=str)
def test_pages_show_layers(
    client: Client, tmp_path: Path, parallel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "HANDOVER_SECONDS", 1e-9)  # so that each layer is worth a task
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
    assert shown & layers >= {"down1.conv2", "bottom.conv1", "up1.conv1"}
    assert all(part in layers for name in shown for part in name.split(" to "))


def test_a_page_whose_answer_was_lost_goes_with_the_run(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost, told = dask_driver.on_scheduler, [True], list[str]()

    def deaf(one: Client, function: Any, *arguments: Any) -> Any:
        found = real(one, function, *arguments)
        if function is dask_plugin.begin and lost and lost.pop():
            raise WorkersLost("the scheduler has not answered")
        return found

    def pages(dask_scheduler: Scheduler) -> list[int]:
        return [len(p.runs) for p in dask_scheduler.plugins.values() if isinstance(p, dask_plugin.Pages)]

    monkeypatch.setattr(dask_driver, "on_scheduler", deaf)
    with dask_driver.Showing(lambda: client, tmp_path, told.append, False) as listener:
        assert len(told) == 1 and "has not answered" in told[0]
        listener(WorkersChanged("", 2, 0))
        assert client.run_on_scheduler(pages) == [1]
    assert client.run_on_scheduler(pages) == [] and len(told) == 1
