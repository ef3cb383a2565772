"""``oocdl fit --cluster slurm`` as a user starts it: the same bits on any nodes, whatever happens to them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import oocdl
from oocdl.cli.zoo import write_unet3d
from tests.kit import nets
from tests.kit import slurm as real

pytestmark = [pytest.mark.usefixtures("slurm"), pytest.mark.timeout(900)]
STEPS = 16
OPTIONS = (
    "--steps", STEPS, "--parallel", "space=3", "--loss", "dice_ce", "--memory", "1GiB", "--threads", 1,
    "--lr", 0.01, "--engine", "onnxruntime", "--commit-seconds", 1,
)  # fmt: skip
STEP_SECONDS, FINISH_SECONDS = 300.0, 300.0
"""Three seconds and twenty, where a machine has a core for each node."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small U-Net, volumes, and what one process makes of them."""
    root = tmp_path_factory.mktemp("fit")
    write_unet3d(root / "net.onnx", classes=2, base=2, depth=1)
    image = np.random.default_rng(0).normal(size=(4, 1, 24, 16, 16)).astype("f4")
    nets.write_data(root / "data.zarr", {"image": image, "logits": (image[:, 0] > 0.3).astype("u1")})
    with fit(root, "alone") as started:
        finished(started, root / "alone")
    return root


@contextmanager
def fit(folder: Path, name: str, *more: object) -> Iterator[subprocess.Popen[str]]:
    """The command, started; ended if it has not by then."""
    words = ("fit", "net.onnx", "data.zarr", "--workdir", name, *OPTIONS, *more)
    command = [sys.executable, "-m", "oocdl.cli.app", *map(str, words)]
    log = folder / f"{name}.log"
    with log.open("w") as out:
        started = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, text=True)
        try:
            yield started
        finally:
            if started.poll() is None:
                started.terminate()
            started.wait(60)


def finished(started: subprocess.Popen[str], run: Path) -> None:
    said = run.with_suffix(".log")
    try:
        code = started.wait(FINISH_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"it hangs: {said.read_text()}")
    assert code == 0, said.read_text()
    assert oocdl.open(run).steps == STEPS


def in_step(run: Path) -> None:
    """Wait until some steps are done, so that another one runs."""

    def runs() -> bool:
        return re.search(r"^step [3-9]/", run.with_suffix(".log").read_text(), re.MULTILINE) is not None

    real.wait_until(runs, STEP_SECONDS, "a step runs")


SLOW = pytest.mark.slow


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
def test_the_same_bits_on_any_number_of_nodes(folder: Path, nodes: int) -> None:
    run = folder / f"nodes{nodes}"
    with fit(folder, run.name, "--cluster", "slurm", "--nodes", nodes) as started:
        finished(started, run)
    assert nets.files_of(oocdl.open(run)) == nets.files_of(oocdl.open(folder / "alone"))
    assert oocdl.verify(run).sound
    ended()


def ended() -> None:
    real.wait_until(lambda: real.jobs() == [], 60, "all jobs are over")
    assert not list((real.ROOT / "shared").glob("keys-*"))
    assert not [path for path in (real.ROOT / "disk").rglob("spill-*")]


def cancel() -> None:
    real.run("scancel", real.jobs()[0][0])


def down() -> None:
    real.run("scontrol", "update", f"NodeName={real.jobs()[0][2]}", "State=DOWN", "Reason=test")


@pytest.mark.parametrize("fault", [cancel, pytest.param(down, marks=SLOW)])
def test_what_clusters_do_in_mid_step(folder: Path, fault: Callable[[], None]) -> None:
    run = folder / fault.__name__
    try:
        with fit(folder, run.name, "--cluster", "slurm", "--nodes", 2) as started:
            in_step(run)
            fault()
            finished(started, run)
    finally:
        for node, state in real.states().items():
            if "down" in state:
                real.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert nets.files_of(oocdl.open(run)) == nets.files_of(oocdl.open(folder / "alone"))
    said = run.with_suffix(".log").read_text()
    assert "to go on from step" in said and "is gone; it is submitted again" in said
    ended()
