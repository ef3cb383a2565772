"""Early stopping: a run ends where its validations say, killed or not."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocdl
from oocdl.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
from oocdl.errors import InputError
from oocdl.events import RunFinished, RunStarted, StepDone, WorkersChanged
from tests.kit import nets, settings
from tests.kit.runs import broken_after

Job = tuple[Path, Path]
OPTIONS: dict[str, Any] = {**settings.QUICK, "validation": 0.25, "batch_size": 3, "lr": 0.5, "epochs": 30}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A perceptron, and labels that are noise: what it learns does not hold for others."""
    return nets.write_job(tmp_path_factory.mktemp("job"), 12)


def ends(values: list[float], patience: int, min_delta: float = 0.0, sign: float = -1.0) -> int:
    """At which of the values a run ends, counted from 1; 0 at none. As Keras counts."""
    best, wait = -np.inf, 0
    for number, value in enumerate(values, 1):
        if sign * value - min_delta > best:
            best, wait = sign * value, 0
        else:
            wait += 1
        if wait >= patience:
            return number
    return 0


def fit(job: Job, workdir: Path, *callbacks: Any, **options: Any) -> oocdl.Run:
    return oocdl.fit(*job, workdir=workdir, callbacks=callbacks, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> oocdl.Run:
    return fit(job, tmp_path_factory.mktemp("whole") / "run", metrics="accuracy")


@pytest.mark.parametrize(
    "how",
    [
        {"patience": 2},
        {"patience": 3, "monitor": "val_accuracy"},
        {"patience": 3, "monitor": "val_accuracy", "mode": "min"},
        {"patience": 4, "min_delta": 0.05},
    ],
    ids=str,
)
def test_a_run_ends_where_its_validations_say(
    job: Job, whole: oocdl.Run, tmp_path: Path, how: dict[str, Any]
) -> None:
    monitor = how.get("monitor", "val_loss")
    rows = [row for row in whole.history if monitor in row]
    sign = 1.0 if monitor == "val_accuracy" and how.get("mode") != "min" else -1.0
    number = ends([row[monitor] for row in rows], how["patience"], how.get("min_delta", 0.0), sign)
    assert 0 < number < len(rows)
    events: list[Any] = []
    run = fit(job, tmp_path / "run", events.append, EarlyStopping(**how), metrics="accuracy")
    step = rows[number - 1]["step"]
    assert run.steps == run.total_steps == step == events[-1].steps and run.finished
    assert isinstance(events[-1], RunFinished)
    names = ("loss", monitor)
    rows = [[[row.get(name) for name in names] for row in one.history[:step]] for one in (run, whole)]
    assert rows[0] == rows[1]
    again = fit(job, tmp_path / "run", EarlyStopping(**how), metrics="accuracy")  # nothing is left to do
    assert again.steps == step


def test_a_run_that_was_killed_ends_at_the_same_step(job: Job, whole: oocdl.Run, tmp_path: Path) -> None:
    stop = EarlyStopping(patience=2)
    expected = fit(job, tmp_path / "one", stop, metrics="accuracy")
    killed = broken_after(expected.steps - 2)
    with pytest.raises(RuntimeError):
        fit(job, tmp_path / "two", EarlyStopping(patience=2), killed, metrics="accuracy")
    run = fit(job, tmp_path / "two", EarlyStopping(patience=2), metrics="accuracy")
    assert run.steps == expected.steps and nets.files_of(run) == nets.files_of(expected)
    more = fit(job, tmp_path / "two", metrics="accuracy")  # without it, the run trains on
    assert more.steps == whole.steps and nets.files_of(more) == nets.files_of(whole)


@pytest.mark.parametrize("monitor", ["val_loss", "val_loss/kind", "val_size/mae", "val_dice", "val_dice/1"])
def test_losses_and_errors_are_to_be_small(monitor: str) -> None:
    falling = EarlyStopping(monitor, patience=2)
    with pytest.raises(oocdl.Stop) if "dice" in monitor else nullcontext():
        for step in range(1, 4):
            falling(StepDone({"step": step, monitor: 1.0 / step}))


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
def test_the_best_version_before_a_rollback_is_kept(kind: Any) -> None:
    acting = kind()
    for step, value in ((10, 0.5), (20, 0.4)):
        acting(StepDone({"step": step, "val_loss": value}))
    assert acting.kept == (20,)
    acting(WorkersChanged("lost", 1, 15))
    assert acting.kept == (10,)


def test_steps_that_are_rolled_back_are_forgotten() -> None:
    stop = EarlyStopping(patience=2)
    for step, value in ((1, 1.0), (2, 2.0)):
        stop(StepDone({"step": step, "val_loss": value}))
    stop(WorkersChanged("lost", 1, 1))
    stop(StepDone({"step": 2, "val_loss": 2.0}))
    with pytest.raises(oocdl.Stop, match="val_loss was no better than 1 for 2 validations"):
        stop(StepDone({"step": 3, "val_loss": 1.0}))


@pytest.mark.parametrize("at", [1, 4])
def test_a_listener_ends_a_run(job: Job, tmp_path: Path, at: int) -> None:
    heard: list[Any] = []

    def stop(event: Any) -> None:
        if isinstance(event, StepDone) and event.row["step"] == at:
            raise oocdl.Stop("enough")

    run = fit(job, tmp_path / "run", stop, heard.append, validation=None)
    assert run.steps == at == len(run.history) and run.finished
    assert [event.row["step"] for event in heard if isinstance(event, StepDone)] == list(range(1, at + 1))
    assert f"stopped after step {at}: enough" in [getattr(event, "text", "") for event in heard]


def test_what_cannot_be_is_refused(job: Job, tmp_path: Path) -> None:
    for how in (
        {"monitor": "loss"}, {"monitor": None}, {"mode": "less"}, {"patience": 0}, {"patience": "3"},
        {"patience": 1.5}, {"min_delta": -1.0}, {"min_delta": float("nan")}, {"min_delta": "0"},
    ):  # fmt: skip
        with pytest.raises(InputError, match=next(iter(how))):
            EarlyStopping(**how)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="pass validation="):
        fit(job, tmp_path / "a", EarlyStopping(), validation=None)
    run = fit(job, tmp_path / "c", epochs=1)  # as one of a version with other names
    begun: Any = RunStarted(None, str(run.path), run.steps, run.steps)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no 'val_dice' to monitor, but .* is done: choose another workdir"):
        ReduceLROnPlateau("val_dice")(begun)
