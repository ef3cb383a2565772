"""A budget is that of workers: their own size counts in the plan, and the driver's does not."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, LocalCluster

import oocdl
from oocdl.errors import BudgetError
from oocdl.events import Event, Listener, StepDone
from tests.kit import nets
from tests.kit.faults import OPTIONS

BALLAST_BYTES = 400 << 20
"""What a notebook has, or the modules of a site."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    nets.write_conv(tmp_path / "net.onnx")
    nets.write_data(tmp_path / "data.zarr", nets.volumes(3, 8))
    with (
        LocalCluster(2, threads_per_worker=1, memory_limit=None, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def take() -> None:
    np._ballast = np.ones(BALLAST_BYTES, "u1")  # type: ignore[attr-defined]


def train(folder: Path, client: Client, memory: str, *listeners: Listener) -> oocdl.Run:
    data = folder / "net.onnx", folder / "data.zarr"
    options = OPTIONS | {"steps": 2, "memory": memory}
    return oocdl.fit(*data, workdir=folder / "run", client=client, callbacks=listeners, **options)


def test_the_largest_worker_counts(tmp_path: Path, client: Client) -> None:
    """A budget that it exceeds alone is refused before a run is made; the one that is told will do."""
    client.run(take, workers=[max(client.scheduler_info()["workers"])])
    with pytest.raises(BudgetError) as refused:
        train(tmp_path, client, f"{BALLAST_BYTES >> 20}MiB")
    assert not (tmp_path / "run").exists()
    told = re.findall(r"memory='(\d+MiB)' would do", str(refused.value))
    run = train(tmp_path, client, told[0])
    assert run.steps == 2 and run.plan.machine.base_bytes > BALLAST_BYTES
    assert max(row["process_bytes"] for row in run.history) <= int(told[0].removesuffix("MiB")) << 20


@pytest.mark.slow
def test_the_driver_does_not_count(tmp_path: Path, client: Client) -> None:
    """A notebook that is larger than the budget of its workers."""
    ballast = np.ones(2 * BALLAST_BYTES, "u1")
    run = train(tmp_path, client, "600MiB")
    assert run.steps == 2 and run.plan.machine.base_bytes < ballast.nbytes
    assert run.plan.peak_bytes < 600 << 20


@pytest.mark.slow
def test_the_collector_leaves_what_lasts_as_long_as_a_run_alone(tmp_path: Path, client: Client) -> None:
    """Of a plan are hundreds of thousands of objects: no step waits until all have been gone through."""
    frozen: list[dict[str, int]] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            frozen.append(client.run(gc.get_freeze_count))

    train(tmp_path, client, "2GiB", listen)
    assert len(frozen) == 2 and all(min(counts.values()) > 10_000 for counts in frozen)
    assert set(client.run(gc.get_freeze_count).values()) == {0}
