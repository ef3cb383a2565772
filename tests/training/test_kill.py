"""kill -9 at random moments, four times or (--slow) twenty: it makes what an uninterrupted run makes.

The processes are forked from a server that has everything imported, so that most of their
life is training: planning, steps, and a commit after every step.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocdl
from oocdl.events import RunStarted, StepDone
from oocdl.presets.unets import write_unet3d
from tests.kit import nets
from tests.kit.settings import QUICK

STEPS = 20
NOTHING: Mapping[str, str] = {}
FORKS = multiprocessing.get_context("forkserver")


def train(
    model: Path, data: Path, workdir: Path, pipe: Connection, steps: int = STEPS,
    variables: Mapping[str, str] = NOTHING, **options: Any,
) -> None:  # fmt: skip
    """The process that is killed: tells when it starts to train, and when it takes a step."""
    os.environ.update(variables)

    def tell(event: Any) -> None:
        if isinstance(event, RunStarted | StepDone):
            pipe.send(type(event).__name__)

    how = {**QUICK, "memory": "3GiB", "batch_size": 2, "loss": "dice_ce", "seed": 5, "commit_seconds": 0}
    how |= {"parallel": {"space": (2,)}, "steps": steps, "callbacks": [tell], **options}
    oocdl.fit(model, data, workdir=workdir, **how)


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    FORKS.set_forkserver_preload(
        ["oocdl", "onnxruntime", "tests.training.test_kill", "oocdl.engines.ort.ort_engine"]
    )
    yield


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Convolutions with batch norms, and three volumes: the last batch of an epoch is ragged."""
    folder = tmp_path_factory.mktemp("kill")
    model = write_unet3d(folder / "unet.onnx", base=2, depth=0, classes=2, norm="batch")
    return model, nets.write_data(folder / "data.zarr", nets.volumes(3, 8))


class Process:
    """One process that trains until it is done or killed."""

    def __init__(self, model: Path, data: Path, workdir: Path, **options: Any) -> None:
        self.hears, tells = FORKS.Pipe(False)
        self.process = FORKS.Process(target=train, args=(model, data, workdir, tells), kwargs=options)
        self.process.start()
        tells.close()

    def wait_for(self, what: str) -> bool:
        """Whether the process told so before it ended."""
        try:
            while self.hears.recv() != what:
                pass
        except EOFError:
            return False
        return True

    def kill(self) -> bool:
        """Whether it was still running."""
        assert self.process.pid is not None
        running = self.process.is_alive()
        os.kill(self.process.pid, signal.SIGKILL) if running else None
        self.process.join()
        self.hears.close()
        return running and self.process.exitcode == -signal.SIGKILL

    def finish(self) -> None:
        """Let it train to the end."""
        self.process.join()
        self.hears.close()
        assert self.process.exitcode == 0


def told(row: Mapping[str, Any]) -> list[float | None]:
    """What of a row every process finds."""
    return [row.get(name) for name in ("loss", "val_loss", "val_dice", "val_dice/1")]


@pytest.mark.parametrize("most", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_kills(job: tuple[Path, Path], tmp_path: Path, most: int) -> None:
    how: dict[str, Any] = {"validation": str(job[1]), "validation_steps": 3, "metrics": "dice"}
    Process(*job, tmp_path / "whole", **how).finish()
    whole = oocdl.open(tmp_path / "whole")
    expected, losses = nets.files_of(whole), [told(row) for row in whole.history]
    assert len(losses) == STEPS and whole.finished and len(expected) > len(whole.weights)
    random = np.random.default_rng(int(os.environ.get("OOCDL_TEST_SEED", "0")))
    step_seconds = float(np.median([row["seconds"] for row in whole.history])) + 0.03  # and its commit
    kills, runs = 0, 0
    while kills < most:
        workdir = tmp_path / f"killed{runs}"
        runs += 1
        reached = [0]
        while not (workdir.exists() and (workdir / "run.json").exists() and oocdl.open(workdir).finished):
            process = Process(*job, workdir, **how)
            if kills >= most:
                process.finish()
                break
            # Every fourth is killed while it starts or plans, the others in or between steps.
            if kills % 4 == 3 or process.wait_for("RunStarted"):
                time.sleep(random.uniform(0, 1.0 if kills % 4 == 3 else 6 * step_seconds))
            kills += process.kill()
            if (workdir / "run.json").exists():
                reached.append(oocdl.open(workdir).steps)
                due = reached[-1] - len(oocdl.open(workdir).history)  # the row of a step that is validated
                assert due in (0, 1) and reached[-1] >= reached[-2]
        Process(*job, workdir, **how).finish()  # finds nothing to do, and clears up
        run = oocdl.open(workdir)
        assert nets.files_of(run) == expected
        assert [row["step"] for row in run.history] == list(range(1, STEPS + 1))
        assert [told(row) for row in run.history] == losses
        assert not list(workdir.glob("*.partial")) and len(list(workdir.glob("manifest-*"))) <= 2


@pytest.mark.parametrize("where", ["in the run", "in the variable's folder", "where it is told"])
def test_spill_of_the_dead_is_removed(job: tuple[Path, Path], tmp_path: Path, where: str) -> None:
    """By the next of the same directory, and by the next, of any directory, with the same OOCDL_SPILL."""
    scratch = {"OOCDL_SPILL": str(tmp_path / "scratch")}
    first: dict[str, Any] = {"variables": scratch} if "variable" in where else {}
    then: dict[str, Any] = {"variables": scratch}
    if "told" in where:
        first = then = {"spill": tmp_path / "scratch"}
    process = Process(*job, tmp_path / "run", steps=8, **first)
    assert process.wait_for("StepDone")
    assert process.kill()
    spill = tmp_path / ("run/spill" if where == "in the run" else "scratch")
    assert len(list(spill.glob("spill-*"))) == 1
    Process(*job, tmp_path / ("other" if "variable" in where else "run"), steps=2, **then).finish()
    assert not list(tmp_path.rglob("spill-*"))


@pytest.fixture(scope="module")
def whole(job: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that nothing has disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    Process(*job, run, steps=2).finish()
    return run


@pytest.mark.parametrize("left", ["nothing", "run.json", "plan.json"])
def test_killed_before_the_first_commit(
    job: tuple[Path, Path], whole: Path, tmp_path: Path, left: str
) -> None:
    """What is there after a kill between two files of the beginning."""
    run = shutil.copytree(whole, tmp_path / "run")
    expected = nets.files_of(oocdl.open(run))
    patterns = ("CURRENT", "manifest-*", "history/*.jsonl", "epoch-*")
    for path in [found for pattern in patterns for found in run.glob(pattern)]:
        path.unlink()
    if left != "plan.json":
        (run / "plan.json").unlink()
    if left == "nothing":
        patterns = ("report.json", "run.json", "state/t*", "weights/t*", "spill", "live")
        for path in [found for pattern in patterns for found in run.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        assert repr(oocdl.open(run)) == f"Run('{run}', steps=0, unfinished)" and oocdl.open(run).history == []
    Process(*job, run, steps=2).finish()
    assert nets.files_of(oocdl.open(run)) == expected and len(oocdl.open(run).history) == 2
