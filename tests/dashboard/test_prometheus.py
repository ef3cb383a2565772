"""Prometheus finds numbers of a run at Dask's own address, as long as the run lasts."""

from __future__ import annotations

import re
import time
import urllib.request
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

import oocdl
from oocdl.dashboard import dask_plugin
from oocdl.events import Event, StepDone
from tests.kit import nets

pytest.importorskip("prometheus_client")
NUMBERS = re.compile(r"^oocdl_(\w+)\{(.*)\} (\S+)$", re.MULTILINE)


def test_numbers_of_a_run(tmp_path: Path) -> None:
    job = nets.write_job(tmp_path)
    found: dict[str, tuple[str, float]] = {}
    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, memory_limit=None, dashboard_address="127.0.0.1:0"
    ) as cluster, Client(cluster, set_as_default=False) as client:  # fmt: skip
        address = f"http://127.0.0.1:{cluster.scheduler.http_server.port}/metrics"

        def numbers() -> dict[str, tuple[str, float]]:
            page = urllib.request.urlopen(address, timeout=20).read().decode()
            return {name: (labels, float(number)) for name, labels, number in NUMBERS.findall(page)}

        def listen(event: Event) -> None:
            deadline = time.monotonic() + 30
            while isinstance(event, StepDone) and event.row["step"] == 3 and time.monotonic() < deadline:
                found.update(numbers())
                if "process_bytes" in found and "loss" in found:
                    return
                time.sleep(0.2)

        run = oocdl.fit(
            *job, workdir=tmp_path / "run", client=client, callbacks=[listen], steps=4, memory="1GiB",
            progress=False, commit_seconds=0,
        )  # fmt: skip
        assert not numbers()
    labels, loss = found["loss"]
    assert f'run="{run.path}"' in labels
    assert loss in {row["loss"] for row in run.history}
    assert found["process_bytes"][1] > 1 << 20 and "process=" in found["process_bytes"][0]


def test_two_schedulers_of_one_process_both_have_numbers() -> None:
    ends = [dask_plugin.register(lambda: []) for _ in range(2)]
    for end in ends:
        end()
