"""What ``predict`` writes: unfinished until its end, gone on with, under safe names; from runs of others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import h5py
import numpy as np
import onnx
import pytest
import zarr
from onnx import helper

import oocdl
from oocdl.errors import DatasetError, InputError, ModelError, StoreError
from oocdl.storage.dataset.dataset import open_dataset
from oocdl.training.prediction import predictions
from oocdl.training.prediction.predictions import PROGRESS, array_name
from tests.kit import nets
from tests.kit.commands import python
from tests.kit.runs import Killed, passes_of
from tests.kit.settings import QUICK

SAMPLES = 10


OPTIONS: dict[str, Any] = {**QUICK, "batch_size": 2, "ema": 0.9}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> oocdl.Run:
    folder = tmp_path_factory.mktemp("trained")
    return oocdl.fit(*nets.write_job(folder), workdir=folder / "run", steps=1, **OPTIONS)


@pytest.fixture
def run(trained: oocdl.Run, tmp_path: Path) -> oocdl.Run:
    """A copy of the run, with its data beside it."""
    shutil.copytree(trained.path.parent / "data.zarr", tmp_path / "data.zarr")
    return oocdl.open(shutil.copytree(trained.path, tmp_path / "run"))


def test_evaluate_names_losses_as_the_history_does(run: oocdl.Run, tmp_path: Path) -> None:
    """A network of one head has one loss."""
    assert list(run.evaluate(tmp_path / "data.zarr")) == ["loss"]
    assert not [name for name in run.history[0] if name.startswith("loss/")]


def begun(run: oocdl.Run, patch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The data of a prediction, and what is there of it: the process has died after six samples."""
    data, out = run.path.parent / "data.zarr", run.path.parent / "out.zarr"
    with patch.context() as inner, pytest.raises(Killed):
        passes_of(inner, 3)
        run.predict(data, out, batch_size=2)
    return data, out


def test_it_goes_on_where_it_was_killed(
    run: oocdl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = begun(run, monkeypatch)
    whole = run.predict(data, tmp_path / "whole.zarr", batch_size=2)["y"][...]  # type: ignore[index]
    group = zarr.open_group(out, mode="r")
    assert "oocdl_unfinished" in group.attrs
    assert np.isnan(group["y"][8:]).all()  # type: ignore[index]
    for names in (None, ["y"]):
        with pytest.raises(DatasetError, match="is a prediction that was not finished; call predict again"):
            open_dataset(out, names=names)
    with monkeypatch.context() as patch:
        seen = passes_of(patch)
        found = run.predict(data, out, batch_size=2)
        assert seen == [(6, 7), (8, 9)]
    assert np.array_equal(found["y"][...], whole)  # type: ignore[index]
    assert dict(zarr.open_group(out, mode="r").attrs) == {"oocdl": "predictions"}
    assert open_dataset(out).arrays["y"].shape == (SAMPLES, 3) and not (out / PROGRESS).exists()


def spoil_line(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"[2, 3]", b"[4, 5]"))


SPOILS: dict[str, Callable[[Path], Any]] = {
    "a chunk": lambda out: (out / "y/c/2/0").write_bytes(b"x" * 12),
    "a lost chunk": lambda out: (out / "y/c/2/0").unlink(),
    "a line": lambda out: spoil_line(out / PROGRESS),
}


@pytest.mark.parametrize("what", SPOILS)
def test_only_what_is_there_as_it_was_written_is_left_out(
    run: oocdl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    data, out = begun(run, monkeypatch)
    SPOILS[what](out)
    with monkeypatch.context() as patch:
        seen = passes_of(patch)
        found = run.predict(data, out, batch_size=2)
        assert seen == [(2, 3), (6, 7), (8, 9)]
    whole = run.predict(data, tmp_path / "whole.zarr", batch_size=2)["y"][...]  # type: ignore[index]
    assert np.array_equal(found["y"][...], whole)  # type: ignore[index]


@pytest.mark.parametrize("other", ["run", "dataset", "batch", "metadata", "averages"])
def test_another_question_starts_anew(
    run: oocdl.Run, trained: oocdl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    data, out = begun(run, monkeypatch)
    batch, which = 5 if other == "batch" else 2, "last"
    if other == "run":
        run = oocdl.fit(trained.path.parent / "net.onnx", data, workdir=run.path, steps=2, **OPTIONS)
    elif other == "dataset":
        arrays = nets.vectors()
        data = nets.write_data(tmp_path / "other.zarr", {**arrays, "x": arrays["x"] + 1})
    elif other == "averages":  # of the same commit
        which = "ema"
    elif other == "metadata":
        (out / "y/zarr.json").write_text("{}")
    with monkeypatch.context() as patch:
        seen = passes_of(patch)
        run.predict(data, out, batch_size=batch, which=which)
        assert len(seen) == SAMPLES // batch


NAMES = [
    "..", "/abs", "a\nb", "a\x1b[2Jb", "", "x" * 300, "a/../../b", "zarr.json", ".zattrs", PROGRESS,
    "ä", "c/0", "字" * 90,
]  # fmt: skip


def test_a_name_of_a_model_is_never_a_path() -> None:
    for made in map(array_name, NAMES):
        assert made.isprintable() and 0 < len(made.encode()) <= 200 and not {"/", "\\"} & set(made)
        assert made not in ("zarr.json", PROGRESS, "..", ".") and not made.startswith(".")
    assert len({array_name(one) for one in NAMES}) == len(NAMES)


@pytest.mark.parametrize("name", ["../../../escape", "/head\x1b[2J"])
def test_outputs_have_safe_names_and_tell_the_true_one(tmp_path: Path, name: str) -> None:
    model = onnx.load(nets.write_mlp(tmp_path / "mlp.onnx"))
    model.graph.output[0].name = name
    for node in model.graph.node:
        node.output[:] = [name if output == "y" else output for output in node.output]
    onnx.save(model, tmp_path / "named.onnx")
    data = nets.write_data(tmp_path / "data.zarr", nets.vectors())
    run = oocdl.fit(
        tmp_path / "named.onnx", data, workdir=tmp_path / "deep/er/run", targets={name: "y"},
        **{**QUICK, "batch_size": 5, "steps": 1},
    )  # fmt: skip

    def others() -> set[Path]:
        return {path for path in tmp_path.rglob("*") if not {"out.zarr", "run"} & set(path.parts)}

    before = others()
    group = run.predict(data, tmp_path / "deep/er/out.zarr")
    assert others() == before
    ((key, array),) = group.arrays()
    assert key == array_name(name) and array.attrs["name"] == name and array.shape == (SAMPLES, 3)
    assert run.export(tmp_path / "trained.onnx").is_file()


def squeezed(folder: Path, nodes: list[onnx.NodeProto], width: int) -> tuple[oocdl.Run, Path]:
    """Train ``x w``, of which nodes make y, on a batch of all samples; returns the run and its data."""
    weights = {"w": np.arange(6.0 * width).reshape(6, width)}
    product = helper.make_node("MatMul", ["x", "w"], ["h"])
    model = nets.save(folder / "net.onnx", [product, *nodes], weights, ["b", 6], {"y": ["b", width][:width]})
    x = nets.vectors()["x"]
    data = nets.write_data(folder / "data.zarr", {"x": x, "y": (x @ weights["w"]).squeeze().astype("f4")})
    options = {**QUICK, "batch_size": SAMPLES, "steps": 1, "loss": "mse", "lr": 0.0}
    return oocdl.fit(model, data, workdir=folder / "run", **options), data


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("width", [1, 3])
def test_the_batch_may_be_squeezed_away_with_a_sample_alone(width: int, batch: int, tmp_path: Path) -> None:
    run, data = squeezed(tmp_path, [helper.make_node("Squeeze", ["h"], ["y"])], width)
    found = run.predict(data, tmp_path / "out.zarr", batch_size=batch)["y"]
    np.testing.assert_allclose(found[...], zarr.open_group(data)["y"][...], rtol=1e-5, atol=1e-5)
    assert run.evaluate(data, batch_size=batch)["loss"] < 1e-6


def test_an_output_without_an_axis_of_samples_is_refused(tmp_path: Path) -> None:
    run, data = squeezed(tmp_path, [helper.make_node("Transpose", ["h"], ["y"])], SAMPLES)
    with pytest.raises(ModelError, match=r"'y' has the shape \[10, 2\] for 2 samples.*batch_size=1"):
        run.predict(data, tmp_path / "out.zarr", batch_size=2)


AS_NOBODY = """
import os, sys
import oocdl
run, data, mine = sys.argv[1:]
oocdl.open(run).evaluate(data, spill=mine + "/of-root")  # the interpreter itself may be closed to others
os.setgroups([]), os.setgid(65534), os.setuid(65534)
run = oocdl.open(run)
run.predict(data, mine + "/out.zarr")
print(run.evaluate(data, spill=mine + "/spill")["loss"])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_predicts_from_a_run_that_only_its_owner_can_write(tmp_path: Path) -> None:
    with TemporaryDirectory() as shared, TemporaryDirectory() as mine:  # pytest's own are closed to others
        os.chmod(shared, 0o755)
        os.chmod(mine, 0o777)
        model, data = nets.write_job(Path(shared))
        run = oocdl.fit(model, data, **{**QUICK, "batch_size": 5, "steps": 1})
        shutil.rmtree(run.path / "spill", ignore_errors=True)
        before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
        ended = python("-c", AS_NOBODY, run.path, data, mine, folder=Path("/"), seconds=120, TMPDIR=mine)
        assert ended.returncode == 0, ended.stderr
        assert f"cannot be written; spilling to {mine}/oocdl-spill-65534" in ended.stderr
        assert float(ended.stdout) == run.evaluate(data, spill=tmp_path)["loss"]
        found = zarr.open_group(f"{mine}/out.zarr", mode="r")["y"]
        wanted = run.predict(data, tmp_path / "out.zarr", spill=tmp_path)["y"]
        assert np.array_equal(found[...], wanted[...])  # type: ignore[index]
        assert (Path(mine) / "out.zarr").stat().st_uid == 65534
        assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_a_finished_prediction_is_durable_metadata_of_its_arrays_too(
    run: oocdl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, out = set[Path](), tmp_path / "out.zarr"
    monkeypatch.setattr(predictions, "sync_all", lambda paths: synced.update(paths))
    run.predict(tmp_path / "data.zarr", out)
    assert {path for path in out.rglob("*") if path != out / "zarr.json"} <= synced


def test_predictions_read_the_array_that_training_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, arrays = nets.write_mlp(tmp_path / "mlp.onnx"), nets.vectors()
    arrays["scan"] = arrays.pop("x")
    made = oocdl.fit(model, arrays, **{**QUICK, "steps": 1, "progress": True})
    assert "dataset: 'scan' is input 'x'\n" in capsys.readouterr().err
    made.predict({**arrays, "age": arrays["scan"][:, 0]}, tmp_path / "out.zarr")


def test_earlier_predictions_are_replaced_and_nothing_else(run: oocdl.Run, tmp_path: Path) -> None:
    data = tmp_path / "data.zarr"
    for _ in range(2):
        run.predict(data, tmp_path / "out.zarr")
    (tmp_path / "file").write_text("precious")
    for place in (data, tmp_path / "file", run.path):
        with pytest.raises(StoreError, match="is there already and no earlier prediction"):
            run.predict(data, place)
    assert (tmp_path / "file").read_text() == "precious"


def test_what_predict_reads_is_not_replaced(run: oocdl.Run, tmp_path: Path) -> None:
    """An earlier prediction may hold the dataset, by whatever path, or the run."""
    data, earlier, link = (tmp_path / f"{name}.zarr" for name in ("data", "earlier", "link"))
    run.predict(data, earlier)
    link.symlink_to(earlier)
    inner = shutil.copytree(data, earlier / "data.zarr")
    group = zarr.open_group(earlier, path="data.zarr", mode="r")

    def refuse(reader: oocdl.Run, place: Any, **options: Any) -> None:
        before = sorted(earlier.rglob("*"))
        with pytest.raises(InputError, match="earlier.zarr has .*, which predict reads; choose another"):
            reader.predict(place, earlier, **options)
        assert sorted(earlier.rglob("*")) == before

    refuse(run, earlier, inputs={"x": "data.zarr/x"})
    for place in (inner, link / "data.zarr", f"file://{inner}", group):
        refuse(run, place)
    with h5py.File(earlier / "data.h5", "w") as file:
        file["x"] = nets.vectors()["x"]
    refuse(run, earlier / "data.h5")
    refuse(oocdl.open(shutil.copytree(run.path, earlier / "run")), data)
    for _ in range(2):  # beside the arrays that are read
        run.predict(data, data / "predicted")
