"""A dataset that changes while a network is trained on it, or tried: nothing is computed of what changed."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from distributed import Client
from rich.console import Console

import oocdl
from oocdl.errors import DatasetError
from oocdl.report.progress import Progress
from tests.kit import nets
from tests.kit.runs import after, losses_of
from tests.kit.searches import workers_in
from tests.kit.settings import QUICK

pytestmark = pytest.mark.usefixtures("planned_once")

SAMPLES = 4
OPTIONS: dict[str, Any] = {**QUICK, "shuffle": False, "epochs": 1, "seed": 5, "commit_seconds": 0}


def as_hdf5(folder: Path) -> Path:
    with h5py.File(folder / "data.h5", "w") as file:
        for name, array in nets.vectors(SAMPLES).items():
            file.create_dataset(name, data=array, chunks=(1, *array.shape[1:]))
    return folder / "data.h5"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return nets.write_mlp(tmp_path / "mlp.onnx")


@pytest.mark.parametrize(("array", "sample"), [("x", 2), ("y", 3)])
def test_a_chunk_that_vanishes_stops_training_before_it_is_used(
    tmp_path: Path, model: Path, array: str, sample: int
) -> None:
    data = nets.write_data(tmp_path / "data.zarr", nets.vectors(SAMPLES))
    whole = oocdl.fit(model, data, workdir=tmp_path / "whole", **OPTIONS)
    chunk = data / array / "c" / str(sample) / ("0" if array == "x" else "")
    shutil.copy2(chunk, tmp_path / "kept")
    with pytest.raises(DatasetError, match=f"array '{array}' of .*: chunk c/{sample}.* is gone since"):
        oocdl.fit(model, data, **OPTIONS, callbacks=[after(2, chunk.unlink)])
    run = oocdl.open(model.with_suffix(".run"))
    assert run.steps == sample  # one sample a step: those before it were trained on
    assert losses_of(run) == losses_of(whole)[:sample]
    shutil.copy2(tmp_path / "kept", chunk)
    assert nets.files_of(oocdl.fit(model, data, **OPTIONS)) == nets.files_of(whole)


def test_a_folder_or_file_that_vanishes_stops_training(tmp_path: Path, model: Path) -> None:
    data = nets.write_data(tmp_path / "data.zarr", nets.vectors(SAMPLES))
    for path in (data, as_hdf5(tmp_path)):
        with pytest.raises(DatasetError, match="is gone since the dataset was opened"):
            leaves = after(2, lambda path=path: path.rename(tmp_path / "elsewhere"))
            oocdl.fit(model, path, workdir=tmp_path / f"{path.name}.run", **OPTIONS, callbacks=[leaves])
        assert oocdl.open(tmp_path / f"{path.name}.run").steps == 2
        shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_a_chunk_that_vanishes_stops_what_tries_the_network(
    tmp_path: Path, model: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = nets.write_data(tmp_path / "data.zarr", nets.vectors(SAMPLES))
    run = oocdl.fit(model, data, **OPTIONS)
    real = oocdl.runtime.session.Session.run_pass

    def run_pass(self: Any, plan_id: str, info: Any) -> Any:
        found = real(self, plan_id, info)
        if info.indices == (1,):
            shutil.rmtree(data / "x" / "c" / "2")
        return found

    monkeypatch.setattr("oocdl.runtime.session.Session.run_pass", run_pass)
    with pytest.raises(DatasetError, match=r"array 'x' of .*: chunk c/2/0 is gone since"):
        run.predict(data, tmp_path / "out.zarr") if verb == "predict" else run.evaluate(data)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with workers_in(tmp_path_factory.mktemp("workers"), count=1, memory_limit=None) as client:
        yield client


@pytest.mark.parametrize("change", ["gone", "changed"])
def test_workers_find_it_too(tmp_path: Path, model: Path, client: Client, change: str) -> None:
    data = nets.write_data(tmp_path / "data.zarr", nets.vectors(SAMPLES))
    chunk = data / "x" / "c" / "3" / "0"
    act = chunk.unlink if change == "gone" else lambda: chunk.write_bytes(chunk.read_bytes())
    with pytest.raises(DatasetError, match=rf"array 'x' of .*: chunk c/3/0 .* {change} since"):
        oocdl.fit(model, data, **{**OPTIONS, "memory": "2GiB"}, client=client, callbacks=[after(1, act)])
    assert oocdl.open(model.with_suffix(".run")).steps == 3


def test_background_that_is_not_stored_is_said_once(tmp_path: Path, model: Path) -> None:
    arrays = nets.vectors(SAMPLES)
    arrays["y"][[1, 3]] = 0
    data = nets.write_data(tmp_path / "data.zarr", arrays)
    full = oocdl.fit(model, data, workdir=tmp_path / "full", **OPTIONS)
    for sample in (1, 3):
        (data / "y" / "c" / str(sample)).unlink()
    line = "y: 2 of 4 chunks are not stored and read as their fill value 0"
    assert str(oocdl.plan(model, data, **OPTIONS)).splitlines()[-1] == line
    console = Console(file=io.StringIO(), width=120)
    with Progress(1 << 30, console) as shown:
        run = oocdl.fit(model, data, **OPTIONS, callbacks=[shown])
    assert nets.files_of(run) == nets.files_of(full)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count(line) == 1 and text.splitlines().index(line) == 1
    with pytest.raises(DatasetError, match="2 of 4 chunks are missing, first 1; .*allow_missing_chunks=True"):
        oocdl.fit(model, data, workdir=tmp_path / "strict", **OPTIONS, allow_missing_chunks=False)
    assert np.isfinite(run.evaluate(data)["loss"])
