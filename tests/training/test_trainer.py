"""``fit`` and the run it leaves: what is stored, and that it is what plain formulas give."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import onnx
import onnxruntime
import pytest
import zarr
from onnx import helper, numpy_helper

import oocdl
from oocdl.engines.engine import get_engine
from oocdl.errors import InputError, ModelError, NonFiniteError
from oocdl.events import Committed, RunFinished, RunStarted, StepDone, StepRunning
from oocdl.losses import CrossEntropy
from oocdl.optim import SGD, Adam
from oocdl.presets.unets import write_unet3d
from tests.kit import nets
from tests.kit.runs import losses_of, refused, same
from tests.kit.settings import EXACT, QUICK

Trained = tuple[oocdl.Run, Path, dict[str, Any]]


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    return nets.write_mlp(tmp_path / "mlp.onnx")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return nets.write_data(tmp_path / "data.zarr", nets.vectors())


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A U-Net after two epochs of three volumes of 16³ in batches of two, and its data."""
    folder = tmp_path_factory.mktemp("unet")
    model = write_unet3d(folder / "unet.onnx", base=4, depth=2, classes=3)
    random = np.random.default_rng(0)
    image = random.normal(size=(3, 1, 16, 16, 16)).astype("f4")
    arrays = {"image": image, "label": (image[:, 0] > 0).astype("u1") + (image[:, 0] > 1)}
    dataset = nets.write_data(folder / "data.zarr", arrays)
    how = {**QUICK, "loss": "dice_ce", "epochs": 2, "batch_size": 2, "parallel": {"space": (2,)}}
    run = oocdl.fit(model, dataset, keep=["down1.conv1", "grad/head.bias"], **how)
    return run, dataset, arrays


def test_history(unet: Trained) -> None:
    run = unet[0]
    assert [row["step"] for row in run.history] == [1, 2, 3, 4]
    assert [row["epoch"] for row in run.history] == [0, 0, 1, 1]
    assert losses_of(run)[3] < losses_of(run)[0]
    keys = {"lr", "seconds", "peak_bytes", "process_bytes"}
    keys |= {f"{unit}{moved}_bytes" for unit in ("", "unit_") for moved in ("read", "written")}
    for row in run.history:
        assert keys <= set(row) and row["lr"] == 0.001 and row["peak_bytes"] < 4 << 30
    assert run.path == unet[1].parent / "unet.run"
    assert str(run.plan).count("\n") > 10 and run.finished
    assert repr(run) == f"Run('{run.path}', steps=4)"


def test_weights_are_zarr_arrays_by_initializer_name(unet: Trained) -> None:
    run = unet[0]
    stored = {t.name: t for t in onnx.load(run.path.with_suffix(".onnx")).graph.initializer}
    assert set(run.weights) == set(stored) and len(run.weights) == len(stored)
    for name, before in stored.items():
        array = run.weights[name]
        assert isinstance(array, zarr.Array)
        assert array.shape == tuple(before.dims) and array.dtype == np.float32
        # A bias before a norm has a gradient of zero, but for rounding.
        if not name.endswith(("conv1.bias", "conv2.bias", "up.bias")):
            assert (array[...] != numpy_helper.to_array(before)).any(), name
    assert "nothing" not in run.weights
    with pytest.raises(KeyError):
        run.weights["nothing"]


def test_a_run_is_a_zarr_group_for_any_reader(unet: Trained) -> None:
    run = unet[0]
    run_group = zarr.open_group(str(run.path), mode="r")
    groups = [run_group[kind] for kind in ("weights", "state", "kept")]
    names = [member.attrs.get("name") for group in groups for _, member in group.members(max_depth=None)]
    assert "down1.conv1.weight" in names and "grad/head.bias" in names


def test_kept_values_of_the_last_step(unet: Trained) -> None:
    run = unet[0]
    assert set(run.kept) == {"down1.conv1", "grad/head.bias"}
    assert run.kept["down1.conv1"].shape == (1, 4, 16, 16, 16)  # the ragged last batch
    assert run.kept["down1.conv1"].chunks[2] == 8  # a chunk a slab: nothing is read to be written
    gradient = run.kept["grad/head.bias"][...]
    assert gradient.shape == (3,) and abs(gradient.sum()) < 1e-3 and np.abs(gradient).max() > 1e-3


def test_predict_and_export_agree(unet: Trained, tmp_path: Path) -> None:
    run, dataset, arrays = unet
    group = run.predict(dataset, tmp_path / "out.zarr", batch_size=2)
    session = onnxruntime.InferenceSession(str(run.export(tmp_path / "trained.onnx")))
    expected = session.run(["logits"], {"image": arrays["image"]})[0]
    assert np.abs(group["logits"][...] - expected).max() < 1e-4
    again = oocdl.open(run.path).predict(dataset, tmp_path / "out.zarr")
    assert np.abs(again["logits"][...] - expected).max() < 1e-4


def test_evaluate_is_the_loss_of_what_predict_gives(unet: Trained, tmp_path: Path) -> None:
    run, dataset, arrays = unet
    logits = run.predict(dataset, tmp_path / "out.zarr")["logits"][...].astype(np.float64)
    losses = []
    for scores, labels in zip(logits, arrays["label"], strict=True):
        chance = nets.softmax(scores[None])[0].reshape(3, -1)
        truth = np.eye(3)[labels.reshape(-1)].T
        score = (2 * (chance * truth).sum(1) + 1e-5) / (chance.sum(1) + truth.sum(1) + 1e-5)
        losses.append(1 - score.mean() + nets.cross_entropy(scores[None], labels[None]))
    found = run.evaluate(dataset)
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert oocdl.open(run.path).evaluate(dataset) == found


@pytest.mark.parametrize("cuts", ["auto", {"batch": 2, "channels": 2}])
def test_steps_follow_the_plain_formula(mlp: Path, data: Path, cuts: Any) -> None:
    """SGD on batches of 4, 4, 2: losses, weights, a kept activation and a kept gradient, in float64."""
    how = {**EXACT, "optimizer": SGD(lr=0.5), "batch_size": 4, "epochs": 2, "parallel": cuts}
    run = oocdl.fit(mlp, data, keep=["h", "grad/w1"], **how)
    w: dict[str, Any] = {name: array.astype(np.float64) for name, array in nets.mlp_weights().items()}
    arrays, losses, made = nets.vectors(), [], {}
    for first in (0, 4, 8, 0, 4, 8):
        rows = slice(first, first + 4)
        made = nets.mlp_gradients(w, arrays["x"][rows].astype(float), arrays["y"][rows])
        losses.append(float(made["loss"]))
        w = {name: array - 0.5 * made[name] for name, array in w.items()}
    assert np.allclose(losses_of(run), losses, rtol=1e-12)
    for name, array in w.items():
        assert np.abs(run.weights[name][...] - array).max() < 1e-12
    assert np.abs(run.kept["h"][...] - made["h"]).max() < 1e-12 and run.kept["h"].shape == (2, 8)
    assert np.abs(run.kept["grad/w1"][...] - made["w1"]).max() < 1e-12


def test_shuffling_is_seeded(mlp: Path, data: Path, tmp_path: Path) -> None:
    def losses(name: str, **options: Any) -> list[float]:
        how = {**QUICK, "workdir": tmp_path / name, "batch_size": 3, "epochs": 2}
        return losses_of(oocdl.fit(mlp, data, **how, **options))

    first = losses("a", seed=7)
    assert len(first) == 8  # the ragged last batch counts
    assert losses("b", seed=np.int64(7)) == first
    assert losses("c", seed=8) != first
    assert losses("d", seed=7, shuffle=False) != first


def test_a_missing_channel_axis_is_added(tmp_path: Path) -> None:
    model, arrays = nets.write_conv(tmp_path / "conv.onnx"), nets.volumes()
    flat = nets.write_data(tmp_path / "flat.zarr", arrays)
    full = nets.write_data(tmp_path / "full.zarr", {"x": arrays["x"][:, None], "y": arrays["y"][:, None]})
    runs = [
        oocdl.fit(model, data, workdir=tmp_path / data.stem, steps=2, parallel={"space": (2, 2)}, **QUICK)
        for data in (flat, full)
    ]
    assert nets.files_of(runs[0]) == nets.files_of(runs[1])


def test_hdf5_and_a_url_equal_zarr(mlp: Path, data: Path, tmp_path: Path) -> None:
    """fsspec's memory stands for an object store; with moto's S3 server the losses were equal, too, once."""
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for name, array in nets.vectors().items():
            file.create_dataset(name, data=array, chunks=(2, *array.shape[1:]), compression="gzip")
    url = "memory://oocdl-remote.zarr"
    group = zarr.open_group(url, mode="w")
    for name, array in nets.vectors().items():
        group.create_array(name, data=array, chunks=(1, *array.shape[1:]))
    run = oocdl.fit(mlp, data, batch_size=4, **QUICK)
    for number, place in enumerate((tmp_path / "data.h5", url)):
        other = oocdl.fit(mlp, place, workdir=tmp_path / f"other{number}", batch_size=4, **QUICK)
        same(other, run)
        assert other.evaluate(place) == run.evaluate(data)
    assert oocdl.fit(mlp, url, workdir=other.path, batch_size=4, **{**QUICK, "steps": 5}).steps == 5


def test_scale_and_mapped_names(mlp: Path, data: Path, tmp_path: Path) -> None:
    arrays = nets.vectors()
    other = {"features": (arrays["x"] * 4).astype("f4"), "kinds": arrays["y"], "more": arrays["x"]}
    renamed = nets.write_data(tmp_path / "renamed.zarr", other)
    names = {"inputs": {"x": "features"}, "targets": {"y": "kinds"}, "scale": {"features": 0.25}}
    run = oocdl.fit(mlp, renamed, workdir=tmp_path / "renamed", steps=3, **names, **QUICK)
    assert nets.files_of(run) == nets.files_of(oocdl.fit(mlp, data, steps=3, **QUICK))
    again = oocdl.open(run.path)
    found = again.evaluate(renamed)
    # A scale belongs to the input, whatever the array is called.
    scaled = nets.write_data(tmp_path / "scaled.zarr", {"x": other["features"], "y": arrays["y"]})
    assert again.evaluate(scaled, inputs={"x": "x"}, targets={"y": "y"}) == found
    expected = again.predict(renamed, tmp_path / "a.zarr")["y"][...]
    assert (again.predict(scaled, tmp_path / "b.zarr", inputs={"x": "x"})["y"][...] == expected).all()


def test_events_in_order(mlp: Path, data: Path) -> None:
    seen: list[Any] = []
    run = oocdl.fit(mlp, data, batch_size=5, epochs=2, callbacks=[seen.append], **QUICK)
    kinds = [type(event) for event in seen if not isinstance(event, StepRunning)]
    epoch = [StepDone, StepDone, Committed]
    assert kinds == [RunStarted, Committed, *epoch, *epoch, RunFinished]
    assert (seen[0].steps, seen[0].done, seen[0].workdir) == (4, 0, str(run.path))
    assert str(seen[0].plan) == str(run.plan)
    assert [event.step for event in seen if isinstance(event, Committed)] == [0, 2, 4]
    assert [dict(event.row) for event in seen if isinstance(event, StepDone)] == run.history
    assert seen[-1].steps == 4 and seen[-1].seconds > 0


def test_weights_that_became_nan_are_never_committed(mlp: Path, data: Path) -> None:
    """The loss of the step is finite; its update is not."""
    with pytest.raises(NonFiniteError, match="array '..' has become NaN or infinite"):
        oocdl.fit(mlp, data, optimizer=Adam(lr=3e38), steps=1, batch_size=10, commit_seconds=0, **QUICK)
    run = oocdl.open(mlp.with_suffix(".run"))
    assert run.steps == 0 and run.history == []
    assert all(np.isfinite(array[...]).all() for array in run.weights.values())


def test_a_final_softmax(data: Path, tmp_path: Path) -> None:
    model = nets.write_mlp(tmp_path / "soft.onnx", final="Softmax")
    with pytest.raises(InputError, match="ends in Softmax.*logits='auto'"):
        oocdl.fit(model, data, steps=2, **QUICK)
    assert not model.with_suffix(".run").exists()  # refused before anything was made
    run = oocdl.fit(model, data, steps=2, logits="auto", **QUICK)
    plain = oocdl.fit(nets.write_mlp(tmp_path / "plain.onnx"), data, steps=2, **QUICK)
    assert nets.files_of(run) == nets.files_of(plain)
    exported = onnxruntime.InferenceSession(str(run.export(tmp_path / "out.onnx")))
    chances = exported.run(["y"], {"x": nets.vectors()["x"]})[0]
    assert np.abs(chances.sum(1) - 1).max() < 1e-5
    assert np.abs(run.predict(data, tmp_path / "p.zarr")["y"][...] - chances).max() < 1e-6
    expected = nets.cross_entropy(np.log(chances), nets.vectors()["y"])
    assert oocdl.open(run.path).evaluate(data)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("final", "loss"), [("Softmax", "bce"), ("Sigmoid", "cross_entropy"), ("Sigmoid", "dice")]
)
def test_a_final_activation_that_the_loss_does_not_contain(
    data: Path, tmp_path: Path, final: str, loss: str
) -> None:
    model = nets.write_mlp(tmp_path / "net.onnx", final=final)
    y = np.eye(3, dtype="f4")[nets.vectors()["y"]]
    data = nets.write_data(tmp_path / "hot.zarr", nets.vectors() | {"y": y}) if loss == "bce" else data
    with pytest.raises(InputError, match=f"ends in {final}, but the loss contains a S"):
        oocdl.fit(model, data, inputs={"x": "x"}, loss=loss, logits="auto", steps=1, **QUICK)


def test_freeze_patterns(mlp: Path, data: Path) -> None:
    run = oocdl.fit(mlp, data, steps=2, freeze="?1", **QUICK)
    before = nets.mlp_weights()
    changed = {name for name, array in run.weights.items() if (array[...] != before[name]).any()}
    assert changed == {"w2", "b2"}
    assert set(run.weights) == set(before)
    with pytest.raises(InputError, match="freeze pattern 'conv\\*' matches no initializer"):
        oocdl.fit(mlp, data, freeze=["conv*"], resume="restart", **QUICK)
    with pytest.raises(InputError, match="nothing to train"):
        oocdl.fit(mlp, data, freeze="*", resume="restart", **QUICK)


def test_several_heads(tmp_path: Path) -> None:
    """Their losses in the history, and again after reopening: objects and weights of losses are stored."""
    model, x = nets.write_two_heads(tmp_path / "two.onnx"), nets.vectors()["x"]
    kind, size = nets.vectors()["y"], x.sum(1, keepdims=True)
    data = nets.write_data(tmp_path / "data.zarr", {"x": x, "kind": kind, "size": size})
    weights = (0.2, 1.0, 3.0)
    loss = {"kind": (CrossEntropy(class_weights=weights), np.float32(0.5)), "size": ["mse", 2]}
    how = {**QUICK, "batch_size": 5, "steps": 3, "optimizer": Adam(lr=np.float64(0.01))}
    run = oocdl.fit(model, data, loss=loss, **how)
    for row in run.history:
        assert row["loss"] == pytest.approx(0.5 * row["loss/kind"] + 2 * row["loss/size"], rel=1e-6)
    found = oocdl.open(run.path).evaluate(data, batch_size=10)
    made = run.predict(data, tmp_path / "out.zarr")
    share = np.asarray(weights)[kind]
    chosen = np.take_along_axis(nets.softmax(made["kind"][...].astype(float)), kind[:, None], 1)[:, 0]
    assert found["loss/kind"] == pytest.approx(float((-np.log(chosen) * share).sum() / share.sum()), rel=1e-5)
    assert found["loss/size"] == pytest.approx(float(((made["size"][...] - size) ** 2).mean()), rel=1e-5)


def test_dims_must_agree_with_the_data(tmp_path: Path) -> None:
    model = nets.write_conv(tmp_path / "conv.onnx")
    data = nets.write_data(tmp_path / "data.zarr", nets.volumes())
    assert oocdl.fit(model, data, steps=1, dims={"d": 8, "w": np.int64(8)}, **QUICK).steps == 1
    with pytest.raises(InputError, match="dims says h=9, array 'x' says 8"):
        oocdl.fit(model, data, dims={"h": 9}, **QUICK)
    with pytest.raises(InputError, match="dims names 'depth', the model has: 'batch', 'd', 'h', 'w'"):
        oocdl.fit(model, data, dims={"depth": 8}, **QUICK)


def test_a_node_may_be_called_as_a_layer_of_updates(tmp_path: Path) -> None:
    """Tasks go by the names of layers: two with one name would be taken for each other."""
    data = nets.write_data(tmp_path / "volumes.zarr", nets.volumes())
    models = [nets.write_conv(tmp_path / f"{name}.onnx") for name in ("plain", "odd")]
    loaded = onnx.load(str(models[1]))
    (node,) = (node for node in loaded.graph.node if node.name == "conv1")
    node.name = "update/div"
    onnx.save(loaded, str(models[1]))
    options = {**QUICK, "parallel": {"space": (2,)}, "steps": 2, "loss": "cross_entropy"}
    plain, odd = (oocdl.fit(m, data, workdir=m.with_suffix(".run"), **options) for m in models)
    names = [layer.layer.name for layer in odd.plan.layers]
    assert {"conv1", "update/div"} < {layer.layer.name for layer in plain.plan.layers}
    assert names.count("update/div") == 1 and "update/div'" in names
    assert nets.files_of(plain) == nets.files_of(odd)


def test_names_with_line_breaks_stay_in_one_line(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gemm", ["x", "w\n1"], ["y"], "layer\n1", transB=1)]
    weights = {"w\n1": np.zeros((3, 6))}
    model = nets.save(tmp_path / "odd.onnx", nodes, weights, ["batch", 6], {"y": ["batch", 3]})
    data = nets.write_data(tmp_path / "data.zarr", nets.vectors())
    refused(InputError, "freeze pattern", lambda: oocdl.fit(model, data, freeze="a\nb", **QUICK))
    assert oocdl.fit(model, data, steps=1, **QUICK).weights["w\n1"].shape == (3, 6)


def fit_named(folder: Path, names: dict[str, str], **options: Any) -> np.ndarray:
    """Train y = tanh(x u) v, whose tensors and node "t" have other names; returns the weights."""
    name = {name: names.get(name, name) for name in "xuvt"}
    nodes = [
        helper.make_node("MatMul", [name["x"], name["u"]], ["h"], "first"),
        helper.make_node("Tanh", ["h"], ["a"], name["t"]),
        helper.make_node("MatMul", ["a", name["v"]], ["y"], "last"),
    ]
    weights = {name["u"]: np.eye(6, 9), name["v"]: np.eye(9, 3)}
    path = nets.save(folder / "named.onnx", nodes, weights, ["batch", 6], {"y": ["batch", 3]})
    model = onnx.load(path)
    model.graph.input[0].name = name["x"]
    onnx.save(model, path)
    data = nets.write_data(folder / "data.zarr", nets.vectors())
    given = {"inputs": {name["x"]: "x"}, "targets": {"y": "y"}, "resume": "restart", "workdir": folder / "r"}
    found = oocdl.fit(path, data, **{**QUICK, **given, "steps": 2, **options}).weights
    return np.concatenate([np.ravel(found[name[weight]]) for weight in "uv"])


@pytest.mark.parametrize(
    "names",
    [{"u": "lr"}, {"x": "lr"}, {"t": "lr"}, {"x": "target/y"}, {"u": "adam/bias1", "v": "adam/bias2"},
     {"v": "accumulate/share"}, {"v": "u/next"}, {"v": "u/accumulated/next"}, {"v": "norm"}, {"v": "grad/u"}],
)  # fmt: skip
def test_a_file_may_have_names_that_training_has_too(names: dict[str, str], tmp_path: Path) -> None:
    options = {"optimizer": Adam(lr=0.1, clip_norm=0.01), "accumulate": 2}
    plain, named = (fit_named(tmp_path, one, **options) for one in ({}, names))
    np.testing.assert_array_equal(plain, named)


@pytest.mark.parametrize(
    ("name", "options"),
    [("u/exp_avg", {}), ("u/ema", {"ema": 0.9}), ("u/accumulated", {"accumulate": 2}),
     ("u/bfloat16", {"precision": "bfloat16", "engine": "torch"})],
)  # fmt: skip
def test_a_name_of_what_a_run_keeps_is_refused(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    if "precision" in options and not get_engine("torch").has_bfloat16:
        pytest.skip("no bfloat16 arithmetic on this processor")
    call = partial(fit_named, tmp_path, {"v": name}, optimizer=Adam(lr=0.1), **options)
    refused(ModelError, f"tensor '{name}', .*rename it", call)
    assert not (tmp_path / "r").exists()
