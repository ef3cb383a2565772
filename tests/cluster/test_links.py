"""Links that are cut, for a while or for ever, and a slow one: a run goes on, and ends with equal bits."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import oocdl
from oocdl.events import Event, Notice, StepDone, WorkersChanged
from oocdl.presets.unets import write_unet3d
from tests.kit import nets
from tests.kit.hosts import Hosts, hosts, missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]

OPTIONS: dict[str, Any] = {
    "memory": "2GiB", "engine": "onnxruntime", "progress": False, "threads": 1, "batch_size": 1,
    "loss": "dice_ce", "seed": 3, "parallel": {"space": (4,)}, "commit_seconds": 1,
}  # fmt: skip
TOLD_SECONDS = 15.0


@pytest.mark.parametrize("seconds", [5, 60, None], ids=["5 s", "60 s", "for ever"])
def test_a_link_is_cut(tmp_path: Path, seconds: float | None) -> None:
    """``seconds``: after so long it is there again."""

    def hurt(found: Hosts) -> None:
        found.cut(1)
        if seconds is not None:
            time.sleep(seconds)
            found.mend(1)

    told = _trained(tmp_path, hurt, 20 if seconds == 5 else 60)
    assert seconds == 5 or told and told[0] < TOLD_SECONDS


def test_workers_that_do_not_reach_each_other(tmp_path: Path) -> None:
    """All of them send heartbeats, and wait for each other: that is told, and none is taken for dead."""

    def hurt(found: Hosts) -> None:
        found.part(True)
        time.sleep(80)
        found.part(False)

    told = _trained(tmp_path, hurt, 110)
    assert told and told[0] < TOLD_SECONDS


def test_a_slow_link(tmp_path: Path) -> None:
    assert not _trained(tmp_path, lambda found: found.throttle(1, "400mbit"), 20)


def _trained(tmp_path: Path, hurt: Any, least_seconds: float) -> list[float]:
    """Train on two hosts, ``hurt`` them after some steps; returns when the user was told, since then.

    The run lasts until ``least_seconds`` later, and its bits are those of one process.
    """
    model = write_unet3d(tmp_path / "unet.onnx", base=2, depth=1, classes=2)
    data = nets.write_data(tmp_path / "data.zarr", nets.volumes(2, 16))
    began: list[float] = []
    told: list[float] = []
    done = [0]
    stops = threading.Event()

    def listen(event: Event) -> None:
        if isinstance(event, Notice | WorkersChanged) and began:
            told.append(time.monotonic() - began[0])
        if isinstance(event, StepDone):
            done[0] = max(done[0], event.row["step"])
            if done[0] == 5 and not began:
                began.append(time.monotonic())
                threading.Thread(target=hurt, args=[found], daemon=True).start()
            if began and time.monotonic() - began[0] > least_seconds:
                stops.set()
                raise KeyboardInterrupt

    with hosts(tmp_path, 2) as found, pytest.raises(KeyboardInterrupt):
        oocdl.fit(
            model, data, workdir=tmp_path / "there", client=found.cluster.address, callbacks=[listen],
            steps=100_000, **OPTIONS,
        )  # fmt: skip
    assert stops.is_set()
    there = oocdl.open(tmp_path / "there")
    assert there.steps > 5
    here = oocdl.fit(model, data, workdir=tmp_path / "here", steps=there.steps, plan=there.path, **OPTIONS)
    assert nets.files_of(here) == nets.files_of(there)
    return told
