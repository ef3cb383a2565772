"""A weight that is larger than the memory for arrays: trained, frozen, evaluated and predicted with."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr

import oocdl
from oocdl.planning.machine import Machine, machine_for
from oocdl.runtime import weight_io
from oocdl.training.prediction import inference
from tests.kit import nets
from tests.kit.machine import Small, fit
from tests.kit.settings import QUICK

SIZES, WEIGHT_BYTES = (1024, 1024, 3), 4 << 20
ROOM = Small(capacity_bytes=3 << 20, process_bytes=300 << 20)
OPTIONS: dict[str, Any] = {"steps": 2, "batch_size": 2, "shuffle": False, **QUICK}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A perceptron with one large matrix, and its data."""
    folder = tmp_path_factory.mktemp("large")
    x = np.random.default_rng(5).normal(size=(4, SIZES[0])).astype("f4")
    arrays = {"x": x, "y": np.argmax(x[:, :3], axis=1)}
    return nets.write_mlp(folder / "mlp.onnx", SIZES), nets.write_data(folder / "data.zarr", arrays)


def read(data: Path, name: str) -> np.ndarray:
    return np.asarray(zarr.open_array(data / name, mode="r")[...])


def logits(weights: Any, files: tuple[Path, Path]) -> np.ndarray:
    """What the perceptron makes of its data."""
    w = {name: np.asarray(array[...], "f8") for name, array in weights.items()}
    x = read(files[1], "x")
    return np.maximum(x @ w["w1"].T + w["b1"], 0) @ w["w2"].T + w["b2"]


def test_it_is_predicted_with_and_evaluated(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fit(*files, machine=ROOM, workdir=tmp_path / "run", **OPTIONS)
    assert run.weights["w1"].nbytes == WEIGHT_BYTES > ROOM.capacity_bytes

    def small(*args: Any, **given: Any) -> Machine:
        return replace(machine_for(*args, **given), capacity_bytes=ROOM.capacity_bytes)

    monkeypatch.setattr(inference, "machine_for", small)
    made = run.predict(files[1], tmp_path / "out.zarr")
    expected = logits(run.weights, files)
    np.testing.assert_allclose(made["y"][...], expected, rtol=1e-4, atol=1e-3)
    loss = nets.cross_entropy(expected, read(files[1], "y"))
    assert run.evaluate(files[1])["loss"] == pytest.approx(loss, rel=1e-4)


def test_it_is_frozen(files: tuple[Path, Path], tmp_path: Path) -> None:
    run = fit(*files, machine=ROOM, workdir=tmp_path / "run", freeze="w1", **OPTIONS)
    roomy = oocdl.fit(*files, workdir=tmp_path / "roomy", freeze="w1", **OPTIONS)
    assert (run.weights["w1"][...] == nets.mlp_weights(SIZES)["w1"].astype("f4")).all()
    assert (run.weights["w2"][...] != nets.mlp_weights(SIZES)["w2"].astype("f4")).any()
    np.testing.assert_allclose(run.weights["w2"][...], roomy.weights["w2"][...], rtol=1e-5, atol=1e-6)
    # and goes on: what is stored is read back a chunk at a time
    again = fit(*files, machine=ROOM, workdir=tmp_path / "run", freeze="w1", **{**OPTIONS, "steps": 4})
    assert again.steps == 4


@pytest.mark.parametrize("accumulate", [1, 3])
def test_old_weights_are_gone_with_their_last_reader(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """As it is planned where old and new ones would not fit, however many passes a step has."""
    started: list[weakref.ref[Any]] = []
    alive: list[int] = []
    real = weight_io.load

    def load(*args: Any) -> Any:
        held = real(*args)
        started.extend(map(weakref.ref, held.values()))
        return held

    monkeypatch.setattr(weight_io, "load", load)

    def get(tasks: Any, keys: Any, **options: Any) -> Any:
        made = dask.get(tasks, keys, **options)
        alive.append(sum(reference() is not None for reference in started))
        return made

    options = {**OPTIONS, "steps": 1, "batch_size": 1, "accumulate": accumulate}
    fit(*files, machine=ROOM, workdir=tmp_path / "run", scheduler=get, **options)
    assert len(started) > 3 and alive == [len(started)] * (accumulate - 1) + [0]
