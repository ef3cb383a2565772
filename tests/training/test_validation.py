"""Validation within a run: its losses are those of PyTorch, and training does not notice it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oocdl
from oocdl.callbacks import CSV
from oocdl.errors import DatasetError, InputError, ModelWarning
from oocdl.events import StepDone, StepRunning
from oocdl.planning.passes import VALIDATION, VALIDATION_RAGGED, Course
from oocdl.pytorch.door import Exported
from oocdl.runtime.session import Session, StepTrace
from tests.kit import nets, runs, settings
from tests.kit.machine import Small, plan

pytestmark = pytest.mark.usefixtures("planned_once", "exported_once")

LR = 0.05


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """What differs between training and validation: statistics, and dropout."""
    torch.manual_seed(0)
    layers = nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.Dropout(0.0), nn.Conv3d(4, 2, 1)
    return nn.Sequential(*layers).double()


@pytest.fixture(scope="module")
def file(net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    zeros = torch.zeros(2, 1, 8, 8, 8).double()
    return oocdl.from_torch(copy.deepcopy(net), zeros, tmp_path_factory.mktemp("net") / "net.onnx")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine volumes in ``a.zarr``, three others, which are larger, in ``b.zarr``."""
    folder = tmp_path_factory.mktemp("data")
    nets.write_data(folder / "a.zarr", nets.volumes(9, 6))
    nets.write_data(folder / "b.zarr", nets.volumes(3, 8, seed=7))
    return folder


def fit(model: Any, data: Path, workdir: Path, **options: Any) -> oocdl.Run:
    given = {**settings.EXACT, "optimizer": "sgd", "lr": LR, "epochs": 2, "batch_size": 2, **options}
    data = data / "a.zarr" if data.suffix != ".zarr" else data
    return oocdl.fit(model, data, workdir=workdir, **given)


def val_losses(run: oocdl.Run) -> dict[int, float]:
    """Step -> loss of the validation after it."""
    return {row["step"]: row["val_loss"] for row in run.history if "val_loss" in row}


CUT = {"batch": 2, "space": (2, 2)}


@pytest.mark.parametrize(
    "cuts", [{}, {"parallel": CUT}, {"accumulate": 2}], ids=["whole", "cut", "accumulated"]
)
def test_held_out_samples_are_never_trained_on(
    file: Exported, data: Path, tmp_path: Path, cuts: dict[str, Any]
) -> None:
    rows = [1, 4, 8]
    run = fit(file, data, tmp_path / "run", validation=rows, **cuts)
    assert list(val_losses(run)) == ([2, 4] if "accumulate" in cuts else [3, 6])
    alone = nets.write_data(
        tmp_path / "c.zarr", {k: np.delete(v, rows, 0) for k, v in nets.volumes(9, 6).items()}
    )
    runs.same(run, fit(file, alone, tmp_path / "other", **cuts))


def test_a_dataset_of_other_sizes_is_validated_on(file: Exported, data: Path, tmp_path: Path) -> None:
    run = fit(file, data, tmp_path / "run", validation=data / "b.zarr")
    half = fit(file, data, tmp_path / "half", epochs=1)
    expected = {one.steps: one.evaluate(data / "b.zarr")["loss"] for one in (half, run)}
    assert val_losses(run) == pytest.approx(expected, rel=1e-12)
    assert nets.files_of(run) == nets.files_of(fit(file, data, tmp_path / "without"))
    assert {VALIDATION, VALIDATION_RAGGED} <= oocdl.open(tmp_path / "run").plan.kinds.keys()


def test_arrays_that_are_validated_on_are_not_stored(file: Exported, data: Path, tmp_path: Path) -> None:
    given = nets.volumes(3, 8, seed=7)
    part = fit(file, data, tmp_path / "run", validation=given, epochs=1)
    assert (part.path / "run.json").stat().st_size < 20_000
    assert part.settings.validation == "arrays in memory"
    run = fit(file, data, tmp_path / "run", validation=given)
    assert val_losses(run) == val_losses(fit(file, data, tmp_path / "other", validation=data / "b.zarr"))
    with pytest.raises(InputError, match="array 'x' has other values"):
        fit(file, data, tmp_path / "run", validation={**given, "x": given["x"] + 1})


@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ({}, [3, 6, 9, 10]),
        ({"validation_freq": 2}, [6, 10]),
        ({"validation_freq": (1, 3)}, [3, 9, 10]),
        ({"validation_steps": 4}, [4, 8, 10]),
    ],
    ids=str,
)
def test_it_comes_as_often_as_asked_and_at_the_end(
    file: Exported, data: Path, tmp_path: Path, how: dict[str, Any], steps: list[int]
) -> None:
    run = fit(file, data, tmp_path / "run", validation=1 / 3, steps=10, **how)
    assert list(val_losses(run)) == steps
    assert all(
        (row["val_seconds"] > 0) == (row["step"] in steps) for row in run.history if "val_seconds" in row
    )


def test_a_share_is_chosen_by_the_seed() -> None:
    def course(share: float, seed: int) -> Course:
        return Course(20, oocdl.config.make_settings(validation=share, seed=seed))

    found = [course(0.25, seed) for seed in range(5)]
    assert len({tuple(one.validated) for one in found}) == 5
    for one in found:
        assert len(one.validated) == 5 and sorted([*one.validated, *one.trained]) == list(range(20))
        seen = {row for step in one.steps_from(0) for rows in step.batches for row in rows}
        assert seen == set(one.trained)
    assert len(course(0.001, 0).validated) == 1


class Stop(Exception):
    """Ends a run as a killed process would: nothing is committed after it."""


@pytest.mark.parametrize(("step", "stop"), [(3, KeyboardInterrupt), (6, Stop), (12, KeyboardInterrupt)])
def test_a_validation_that_was_broken_off_goes_on_where_it_was(
    file: Exported, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Any, step: int
) -> None:
    options: dict[str, Any] = {"validation": [0, 3, 5], "batch_size": 1, "steps": 12, "metrics": "dice"}
    options |= {"validation_steps": step}
    whole = fit(file, data, tmp_path / "whole", **options)
    passes: list[str] = []
    original, ends_after = Session.run_pass, [2]

    def run_pass(self: Session, plan_id: str, info: Any) -> dict[str, float]:
        if plan_id == VALIDATION and passes.count(VALIDATION) == ends_after[0]:
            raise stop
        passes.append(plan_id)
        return original(self, plan_id, info)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "run_pass", run_pass)
        with pytest.raises(stop):
            fit(file, data, tmp_path / "run", **options)
        left = oocdl.open(tmp_path / "run")
        assert left.steps == (step if stop is KeyboardInterrupt else step // 6 * 6 if step < 12 else 6)
        assert not left.finished
        assert "val_loss" not in str(left.history)
        passes.clear()
        ends_after[0] = -1
        run = fit(file, data, tmp_path / "run", **options)
    assert passes[: passes.index(VALIDATION) + 2].count(VALIDATION) == 1  # of three, two were noted
    alike(run, whole)


@pytest.mark.parametrize(("stop", "validation"), [(OSError, None), (KeyboardInterrupt, [0, 3, 5])])
def test_a_step_that_is_done_is_kept_whatever_comes_before_it_is_told(
    file: Exported, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validation: Any, stop: Any
) -> None:
    options: dict[str, Any] = {"validation": validation, "steps": 3}
    whole = fit(file, data, tmp_path / "whole", **options)
    original = StepTrace.end

    def end(self: StepTrace, number: int, *others: Any) -> None:
        if number == 1:
            raise stop
        original(self, number, *others)

    with monkeypatch.context() as patch:
        patch.setattr(StepTrace, "end", end)
        with pytest.raises(stop):
            fit(file, data, tmp_path / "run", **options)
    assert oocdl.open(tmp_path / "run").steps == 2
    run = fit(file, data, tmp_path / "run", **options)
    alike(run, whole)


def alike(run: oocdl.Run, whole: oocdl.Run) -> None:
    """Equal files, and equal rows but for what hangs on the clock, or on the process."""
    names = ("step", "epoch", "loss", "val_loss", "val_dice", "lr")
    rows = [[{name: row.get(name) for name in names} for row in one.history] for one in (run, whole)]
    assert rows[0] == rows[1] and nets.files_of(run) == nets.files_of(whole)


@pytest.mark.parametrize(
    ("validation", "said"),
    [
        (1.5, "between 0 and 1, got 1.5"),
        (True, "a dataset is a path"),
        ([3, 3], "each once"),
        ([], "each once"),
        ([0, 9], "index 9, the dataset has 9 samples"),
        (list(range(9)), "none is left to train on"),
        (list(range(8)), r"batch_size must be 1...1 \(samples that are trained on\)"),
        ("nowhere.zarr", "there is no dataset"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_runs(
    file: Exported, data: Path, tmp_path: Path, validation: Any, said: str
) -> None:
    with pytest.raises((InputError, DatasetError), match=said):
        fit(file, data, tmp_path / "run", validation=validation)
    assert not (tmp_path / "run" / "run.json").exists()


def test_what_is_told_of_a_run_stays(file: Exported, data: Path, tmp_path: Path) -> None:
    rows, another = {"validation": [1, 2], "metrics": "dice"}, {"validation": data / "b.zarr"}
    for number, (then, now, said) in enumerate((
        (another, {}, "validation was a dataset, is nothing"),
        ({}, another, "validation was nothing, is a dataset"),
        (rows, {**rows, "validation": [1, 3]}, "validation was"),
        (rows, {**rows, "metrics": "iou"}, "metrics.dice was DiceMetric, is nothing"),
    )):  # fmt: skip
        if number < 3:
            fit(file, data, tmp_path / f"run{number}", steps=2, **then)
        with pytest.raises(InputError, match=said):
            fit(file, data, tmp_path / f"run{min(number, 2)}", steps=4, **now)
    equal = {**rows, "validation": [2, 1], "validation_steps": 1}
    assert fit(file, data, tmp_path / "run2", steps=4, **equal).steps == 4


class Noisy(nn.Module):
    """Draws random numbers, whatever its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv3d(1, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(x + 0.1 * torch.randn_like(x))
        return found


def test_what_evaluate_warns_of_a_validation_does_as_well(data: Path, tmp_path: Path) -> None:
    with pytest.warns(ModelWarning, match="draws random numbers in predictions"):
        fit(Noisy().double(), data, tmp_path / "run", validation=0.2, steps=1)


def test_those_who_listen_are_told(file: Exported, data: Path, tmp_path: Path) -> None:
    events: list[Any] = []
    run = fit(
        file, data, tmp_path / "run", validation=0.2, callbacks=[events.append, CSV(tmp_path / "h.csv")]
    )
    rows = [event.row for event in events if isinstance(event, StepDone)]
    assert [row.get("val_loss") for row in rows] == [row.get("val_loss") for row in run.history]
    assert {event.plan_id for event in events if isinstance(event, StepRunning)} <= run.plan.kinds.keys()
    head, *lines = (tmp_path / "h.csv").read_text().splitlines()
    names = head.split(",")
    values = [line.split(",")[names.index("val_loss")] for line in lines]
    assert values == [str(row.get("val_loss", "")) for row in run.history]
    again = CSV(tmp_path / "h.csv")
    fit(file, data, tmp_path / "a", validation=0.2, steps=2, callbacks=[again])
    again.path = tmp_path / "g.csv"
    fit(file, data, tmp_path / "b", steps=2, callbacks=[again])
    assert "val_loss" not in (tmp_path / "g.csv").read_text()
    assert list(run.frame()["val_loss"].dropna()) == list(val_losses(run).values())
    run.plot(tmp_path / "h.png")


def test_the_plan_has_room_for_it(file: Exported, data: Path, tmp_path: Path) -> None:
    """A validation on larger volumes is planned within the budget, and told."""
    large = nets.write_data(tmp_path / "large.zarr", nets.volumes(2, 40))
    room = Small(3 << 20, 300 << 20)
    found = plan(file, data / "a.zarr", machine=room, validation=large, **settings.EXACT)
    assert len(found.kinds[VALIDATION].plan.layers[0].units) > 1
    assert found.validation_seconds > 0 and "validation: 2 samples" in found.text()
    assert found.most_bytes >= max(one.peak_tier_bytes for one in found.validation.values())


@pytest.mark.parametrize("how", [{"scale": {"x": 0.25}}, {"normalize": "zscore"}], ids=str)
def test_samples_of_another_dataset_are_prepared_alike(
    file: Exported, data: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    run = fit(file, data, tmp_path / "run", validation=data / "b.zarr", epochs=1, **how)
    found = run.history[-1]["val_loss"]
    np.testing.assert_allclose(found, run.evaluate(data / "b.zarr")["loss"], rtol=1e-12)
    plain = fit(file, data, tmp_path / "plain", validation=data / "b.zarr", epochs=1)
    assert abs(plain.history[-1]["val_loss"] - found) > 1e-4


def test_ct_takes_the_numbers_of_what_is_trained_on(file: Exported, data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"normalize": "ct", "epochs": 1, "validation": tmp_path / "v.zarr"}
    arrays = nets.volumes(2, 8, seed=7)
    nets.write_data(tmp_path / "v.zarr", {**arrays, "x": arrays["x"] * 3 + 5})
    run = fit(file, data, tmp_path / "run", **options)
    found = run.evaluate(tmp_path / "v.zarr")["loss"]
    np.testing.assert_allclose(run.history[-1]["val_loss"], found, rtol=1e-12)
    nets.write_data(tmp_path / "none.zarr", {**arrays, "y": np.zeros_like(arrays["y"])})
    with pytest.raises(DatasetError, match="needs labelled voxels"):
        fit(file, tmp_path / "none.zarr", tmp_path / "b", normalize="ct")
