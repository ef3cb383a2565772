"""``oocdl fit --cluster`` as a user starts it, on nodes of ``tests.kit.slurm`` or ``tests.kit.sge``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import oocdl
from oocdl.presets.unets import write_unet3d
from tests.kit import nets, slurm
from tests.kit.daemons import wait_until

OPTIONS = (
    "--loss", "dice_ce", "--memory", "1GiB", "--threads", 1, "--lr", 0.01, "--engine", "onnxruntime",
    "--batch-size", 1, "--commit-seconds", 1,
)  # fmt: skip
STEP_SECONDS, FINISH_SECONDS = 300.0, 600.0
"""Three seconds and twenty, where a machine has a core for each node."""


def write_job(folder: Path, samples: int = 4) -> None:
    """A small U-Net, and volumes."""
    write_unet3d(folder / "net.onnx", classes=2, base=2, depth=1)
    image = np.random.default_rng(0).normal(size=(samples, 1, 24, 16, 16)).astype("f4")
    nets.write_data(folder / "data.zarr", {"image": image, "logits": (image[:, 0] > 0.3).astype("u1")})


@contextmanager
def fit(folder: Path, name: str, *more: object) -> Iterator[subprocess.Popen[str]]:
    """The command, started; ended if it has not by then."""
    words = ("fit", "net.onnx", "data.zarr", "--workdir", name, *OPTIONS, *more)
    command = [sys.executable, "-m", "oocdl", *map(str, words)]
    with log_of(folder / name).open("w") as out:
        started = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, text=True)
        try:
            yield started
        finally:
            if started.poll() is None:
                started.terminate()
            started.wait(60)


def log_of(run: Path) -> Path:
    """What the command has said."""
    return run.with_suffix(".log")


def ended(started: subprocess.Popen[str], run: Path) -> int:
    """Wait for the end of the command; returns its exit code, and fails if it hangs."""
    try:
        return started.wait(FINISH_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"it hangs: {log_of(run).read_text()}")


def finished(started: subprocess.Popen[str], run: Path, steps: int) -> None:
    """Wait until all steps are done."""
    assert ended(started, run) == 0, log_of(run).read_text()
    assert oocdl.open(run).steps == steps


def steps_told(run: Path) -> int:
    """The last step that the command has told of; 0 before the first."""
    told = re.findall(r"^step (\d+)/", log_of(run).read_text(), re.MULTILINE)
    return int(told[-1]) if told else 0


def in_step(run: Path, step: int = 3) -> None:
    """Wait until so many steps are done, so that another one runs."""
    wait_until(lambda: steps_told(run) >= step, STEP_SECONDS, f"step {step} is done", log_of(run).read_text)


def over(system: ModuleType = slurm) -> None:
    """All jobs are over, and have left nothing."""
    system.wait_until(lambda: system.jobs() == [], 60, "all jobs are over")
    assert not list((system.ROOT / "shared").glob("keys-*"))
    assert not list((system.ROOT / "disk").rglob("spill-*"))


def equal(one: Path, other: Path) -> bool:
    """Whether two runs have the same bits."""
    return nets.files_of(oocdl.open(one)) == nets.files_of(oocdl.open(other))
