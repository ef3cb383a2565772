"""Progress shows what the largest process of a run has, whatever was counted: this one, or one of a crew."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from distributed import Client
from rich.console import Console

import oocdl
from oocdl.events import Event, StepDone
from oocdl.host.limits import anonymous_bytes
from oocdl.report.progress import Progress
from tests.kit.faults import OPTIONS
from tests.kit.searches import workers_in

pytestmark = pytest.mark.usefixtures("planned_once")
BALLAST_BYTES = 150 << 20
"""What nobody counts, and the budget has room for."""
MIB = 1 << 20


def take() -> int:
    """Take ballast, if this process has none; returns what it has."""
    if not hasattr(np, "_ballast"):
        np._ballast = np.ones(BALLAST_BYTES, "u1")  # type: ignore[attr-defined]
    return anonymous_bytes()


def drop() -> None:
    del np._ballast  # type: ignore[attr-defined]


def train(
    job: tuple[Path, Path], workdir: Path, client: Client | None
) -> tuple[list[dict[str, int]], str, int]:
    """Rows and last line of a run in which one process takes ballast, and how large that process became."""
    out, has = io.StringIO(), [0]
    shown = Progress(1000 * MIB, Console(file=out, width=200))
    worker = [] if client is None else [sorted(client.scheduler_info()["workers"])[-1]]

    def listen(event: Event) -> None:
        shown(event)
        if isinstance(event, StepDone):
            found = take() if client is None else client.run(take, workers=worker)[worker[0]]
            has[0] = max(has[0], found if event.row["step"] > 1 else 0)

    how = OPTIONS | {"steps": 4, "memory": "2GiB"}
    run = oocdl.fit(*job, workdir=workdir, client=client, callbacks=[listen], **how)
    if client is None:
        drop()
    else:
        client.run(drop, workers=worker)
    return run.history, out.getvalue().splitlines()[-2], has[0]


@pytest.mark.parametrize("where", ["one process", pytest.param("two workers", marks=pytest.mark.slow)])
def test_the_largest_process_is_shown(job: tuple[Path, Path], tmp_path: Path, where: str) -> None:
    workers = workers_in(tmp_path / "workers", memory_limit=None) if where == "two workers" else nullcontext()
    with workers as client:
        rows, line, has_bytes = train(job, tmp_path / "run", client)
    first, last = rows[0]["process_bytes"], rows[-1]["process_bytes"]
    assert last >= first + 0.9 * BALLAST_BYTES  # the other worker has none
    assert 0.95 * has_bytes < last < 1.2 * has_bytes
    assert f"peak {last / MIB:.0f} of 2048 MiB" in line
