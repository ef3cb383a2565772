"""A budget is that of workers: their own size counts in the plan, and the driver's does not."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

import oocdl
from oocdl.errors import BudgetError
from oocdl.events import Event, Listener, StepDone
from tests.kit.faults import OPTIONS
from tests.kit.searches import workers_in

Train = Callable[..., oocdl.Run]
BALLAST_BYTES = 400 << 20
"""What a notebook has, or the modules of a site."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with workers_in(tmp_path / "workers", memory_limit=None) as client:
        yield client


@pytest.fixture
def train(job: tuple[Path, Path], tmp_path: Path, client: Client) -> Callable[..., oocdl.Run]:
    def fit(memory: str, *listeners: Listener) -> oocdl.Run:
        how = OPTIONS | {"steps": 2, "memory": memory}
        return oocdl.fit(*job, workdir=tmp_path / "run", client=client, callbacks=listeners, **how)

    return fit


def take() -> None:
    np._ballast = np.ones(BALLAST_BYTES, "u1")  # type: ignore[attr-defined]


def test_the_largest_worker_counts(tmp_path: Path, client: Client, train: Train) -> None:
    """A budget that it exceeds alone is refused before a run is made; the one that is told will do."""
    client.run(take, workers=[max(client.scheduler_info()["workers"])])
    with pytest.raises(BudgetError) as refused:
        train(f"{BALLAST_BYTES >> 20}MiB")
    assert not (tmp_path / "run").exists()
    told = re.findall(r"memory='(\d+MiB)' would do", str(refused.value))
    run = train(told[0])
    assert run.steps == 2 and run.plan.machine.base_bytes > BALLAST_BYTES
    assert max(row["process_bytes"] for row in run.history) <= int(told[0].removesuffix("MiB")) << 20


@pytest.mark.slow
def test_the_driver_does_not_count(train: Train) -> None:
    """A notebook that is larger than the budget of its workers."""
    ballast = np.ones(2 * BALLAST_BYTES, "u1")
    run = train("600MiB")
    assert run.steps == 2 and run.plan.machine.base_bytes < ballast.nbytes
    assert run.plan.peak_bytes < 600 << 20


@pytest.mark.slow
@pytest.mark.usefixtures("thaws")
def test_the_collector_leaves_what_lasts_as_long_as_a_run_alone(client: Client, train: Train) -> None:
    """Of a plan are hundreds of thousands of objects: no step waits until all have been gone through."""
    frozen: list[dict[str, int]] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            frozen.append(client.run(gc.get_freeze_count))

    train("2GiB", listen)
    assert len(frozen) == 2 and all(min(counts.values()) > 10_000 for counts in frozen)
    assert set(client.run(gc.get_freeze_count).values()) == {0}
