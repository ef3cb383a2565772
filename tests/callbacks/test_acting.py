"""Callbacks that act: kept versions and lowered rates are those that the history says, killed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import oocdl
from oocdl.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
from oocdl.cli.app import run_command
from oocdl.errors import InputError, ModelWarning, ResourceError
from tests.kit import nets, settings
from tests.kit.runs import broken_after

Job = tuple[Path, Path]
OPTIONS: dict[str, Any] = {
    **settings.QUICK, "validation": 0.25, "batch_size": 3, "lr": 0.5, "epochs": 6, "metrics": "accuracy"
}  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return nets.write_job(tmp_path_factory.mktemp("job"), 12)


def fit(job: Job, workdir: Path, *callbacks: Any, **options: Any) -> oocdl.Run:
    return oocdl.fit(*job, workdir=workdir, callbacks=callbacks, **{**OPTIONS, **options})


def weights_of(run: oocdl.Run) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in run.weights.items()}


def exported(run: oocdl.Run, path: Path, which: Any = None) -> dict[str, np.ndarray]:
    """What a safetensors file has, read by the format's own description."""
    data = run.export(path, which).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    facts = json.loads(data[8:start])
    assert facts.pop("__metadata__") == {"format": "pt"} and start % 8 == 0
    found = {}
    for name, fact in facts.items():
        part = data[start:][slice(*fact["data_offsets"])]
        found[name] = np.frombuffer(part, {"F32": "<f4"}[fact["dtype"]]).reshape(fact["shape"])
    return found


def validations(run: oocdl.Run, monitor: str) -> dict[int, float]:
    return {row["step"]: row[monitor] for row in run.history if monitor in row}


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"save_top_k": 3},
        {"save_top_k": -1, "every_n_epochs": 2},
        {"save_top_k": 2, "monitor": "val_accuracy"},
        {"save_top_k": 0},
    ],
    ids=str,
)
def test_the_best_versions_are_kept(job: Job, tmp_path: Path, how: dict[str, Any]) -> None:
    run = fit(job, tmp_path / "run", ModelCheckpoint(**how))
    found = validations(run, how.get("monitor", "val_loss"))
    sign = -1 if how.get("monitor") == "val_accuracy" else 1
    every = 3 * how.get("every_n_epochs", 1)
    steps = [step for step in found if step % every == 0]
    ranked = sorted(steps, key=lambda step: (sign * found[step], step))
    top = how.get("save_top_k", 1)
    assert run.checkpoints == tuple(ranked if top < 0 else ranked[:top])
    assert run.best == (next(r for r in run.history if r["step"] == ranked[0]) if top else None)
    for step in run.checkpoints[:2]:  # as a run that ends there
        short = fit(job, tmp_path / f"to{step}", steps=step, validation_steps=1000)
        expected = {name: np.asarray(array) for name, array in short.weights.items()}
        kept = exported(run, tmp_path / "kept.safetensors", step)
        assert kept.keys() == expected.keys()
        assert all(kept[name].tobytes() == expected[name].tobytes() for name in kept)
        assert run.evaluate(job[1], which=step) == short.evaluate(job[1])
    assert weights_of(run) == weights_of(oocdl.open(tmp_path / "run")) and run.steps == 18
    assert oocdl.verify(tmp_path / "run").sound
    folders = {path.parent for path in (tmp_path / "run" / "weights").glob("t*/e*/zarr.json")}
    versions = len({*run.checkpoints, 18}) + (1 if 15 not in run.checkpoints else 0)  # and its parent
    assert len(folders) <= versions * len(run.weights)


def test_a_killed_run_keeps_the_same_versions(job: Job, tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [ModelCheckpoint(save_top_k=2), ReduceLROnPlateau(factor=0.5, patience=1, min_delta=0.01)]

    whole = fit(job, tmp_path / "whole", *callbacks())
    assert len({row["lr"] for row in whole.history}) > 1
    for at in (4, 9, 10, 15):
        workdir = tmp_path / f"killed{at}"
        with pytest.raises(RuntimeError):
            fit(job, workdir, *callbacks(), broken_after(at))
        run = fit(job, workdir, *callbacks())
        assert nets.files_of(run) == nets.files_of(whole) and run.checkpoints == whole.checkpoints
        for step in run.checkpoints:
            mine, others = (exported(r, tmp_path / "one.safetensors", step) for r in (run, whole))
            assert all(mine[name].tobytes() == others[name].tobytes() for name in mine)
    heard: list[Any] = []
    fit(job, tmp_path / "whole", heard.append, epochs=7)  # without callbacks: what is kept stays
    assert any("is 0.5 again" in getattr(event, "text", "") for event in heard)
    more = oocdl.open(tmp_path / "whole")
    assert more.steps == 21 and more.checkpoints == whole.checkpoints and oocdl.verify(more.path).sound


@pytest.mark.parametrize(("patience", "epochs"), [(2, 30), (30, 6)])
def test_the_best_weights_are_restored(job: Job, tmp_path: Path, patience: int, epochs: int) -> None:
    """As Keras does, whether or not patience ran out."""

    def stopped(name: str, *callbacks: Any, **how: Any) -> oocdl.Run:
        return fit(job, tmp_path / name, EarlyStopping(patience=patience, **how), *callbacks, epochs=epochs)

    heard: list[Any] = []
    run = stopped("run", heard.append)
    found = validations(run, "val_loss")
    best = min(found, key=lambda step: found[step])
    assert run.checkpoints == (best,) and best < run.steps == run.total_steps and run.finished
    assert any(f"weights of step {best}" in getattr(event, "text", "") for event in heard)
    short = fit(job, tmp_path / "short", steps=best)
    assert weights_of(run) == weights_of(short)
    assert run.evaluate(job[1]) == run.evaluate(job[1], which="best") == short.evaluate(job[1])
    last = run.evaluate(job[1], which="last")
    outs = [r.predict(job[1], tmp_path / r.path.name / "out.zarr")["y"] for r in (run, short)]
    np.testing.assert_array_equal(*map(np.asarray, outs))
    assert oocdl.verify(run.path).sound and weights_of(stopped("run")) == weights_of(short)  # nothing is left
    with pytest.raises(RuntimeError):
        stopped("killed", broken_after(run.steps))
    killed = stopped("killed")
    assert nets.files_of(killed) == nets.files_of(run) and weights_of(killed) == weights_of(run)
    assert stopped("left", restore_best_weights=False).evaluate(job[1]) == last != run.evaluate(job[1])
    more = fit(job, tmp_path / "run", epochs=30)  # trains on from the last step
    straight = fit(job, tmp_path / "straight", epochs=30)
    assert nets.files_of(more) == nets.files_of(straight) and weights_of(more) == weights_of(straight)


def reduced(values: list[float], factor: float, patience: int, delta: float, cooldown: int) -> list[float]:
    """The factor after each result, as Keras's callback counts."""
    best, wait, cooling, lr, found = np.inf, 0, 0, 1.0, []
    for value in values:
        if cooling > 0:
            cooling, wait = cooling - 1, 0
        if value < best - delta:
            best, wait = value, 0
        elif cooling <= 0:
            wait += 1
            if wait >= patience:
                lr, cooling, wait = lr * factor, cooldown, 0
        found.append(lr)
    return found


@pytest.mark.parametrize("how", [{"patience": 1}, {"patience": 1, "cooldown": 2}, {"patience": 2}], ids=str)
def test_the_rate_is_reduced_as_keras_does(job: Job, tmp_path: Path, how: dict[str, Any]) -> None:
    callback = ReduceLROnPlateau(factor=0.5, min_delta=0.01, min_lr=0.05, **how)
    run = fit(job, tmp_path / "run", callback, epochs=12)
    results = list(validations(run, "val_loss").values())
    factors = reduced(results, 0.5, how["patience"], 0.01, how.get("cooldown", 0))
    rates = [max(0.5 * factor, 0.05) for factor in [1.0, *factors[:-1]]]
    assert [row["lr"] for row in run.history] == [rate for rate in rates for _ in range(3)]
    assert len(set(rates)) > 1

    def schedule(step: int) -> float:
        return rates[step // 3]

    same = fit(job, tmp_path / "same", epochs=12, lr=schedule)
    assert weights_of(same) == weights_of(run)


def test_a_callback_of_a_later_call_names_only_versions_that_are_there(job: Job, tmp_path: Path) -> None:
    """The best validations, those of steps 6 and 9, are over when the callbacks come."""
    for name, first, later in [
        ("new", [], [ModelCheckpoint()]),
        ("more", [ModelCheckpoint()], [ModelCheckpoint(save_top_k=3)]),
    ]:
        fit(job, tmp_path / name, *first)
        run = fit(job, tmp_path / name, *later, epochs=7)
        found = validations(run, "val_loss")
        assert min(found, key=lambda step: found[step]) == 6
        assert run.checkpoints == ((6, 21, 18) if first else (21,))
        for step in run.checkpoints:
            assert run.evaluate(job[1], which=step)
    heard: list[Any] = []
    fit(job, tmp_path / "stop")
    run = fit(job, tmp_path / "stop", EarlyStopping(patience=2), heard.append, epochs=30)
    assert any("did not keep the best version, 6" in getattr(event, "text", "") for event in heard)
    assert run.checkpoints == () and run.evaluate(job[1]) == run.evaluate(job[1], which="last")


def test_a_callback_may_serve_another_run(job: Job, tmp_path: Path) -> None:
    stop = EarlyStopping(patience=30)
    assert fit(job, tmp_path / "one", stop, epochs=4).checkpoints == (6,)
    with pytest.raises(RuntimeError):
        fit(job, tmp_path / "two", stop, broken_after(1))
    assert oocdl.open(tmp_path / "two").checkpoints == ()


def test_no_number_is_the_worst_result() -> None:
    best = ModelCheckpoint(save_top_k=2)
    best.seen = {3: float("nan"), 6: 0.5, 9: float("nan"), 12: 0.1, 15: 0.3}
    best.decide()
    assert best.kept == (12, 15)


def test_a_kept_version_that_is_damaged_is_found(job: Job, tmp_path: Path) -> None:
    run = fit(job, tmp_path / "run", ModelCheckpoint())
    manifest = run._store.at(run.checkpoints[0]).current()
    assert manifest is not None and run.checkpoints[0] not in (15, 18)
    tensor = next(iter(manifest.tensors.values()))
    file = next(path for path in (run.path / tensor.folder).iterdir() if path.name != "zarr.json")
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(bytes(data))
    assert not oocdl.verify(run.path).sound
    with pytest.raises(oocdl.errors.CorruptError):
        run.export(tmp_path / "x.onnx", "best")
    run.export(tmp_path / "x.onnx", "last")
    assert f"the kept version of step {run.checkpoints[0]} is left out: array" in str(oocdl.repair(run.path))
    assert oocdl.verify(run.path).sound and run.checkpoints == () and run.steps == 18
    more = fit(job, run.path, ModelCheckpoint(), epochs=7)
    assert more.checkpoints == (21,) and more.evaluate(job[1], which="best")


def test_the_version_that_was_restored_is_lost(job: Job, tmp_path: Path) -> None:
    run = fit(job, tmp_path / "run", EarlyStopping(patience=2), epochs=30)
    manifest = run._store.current()
    assert manifest is not None
    older = run._store.at(6).current()
    assert older is not None
    (run.path / next(iter(older.tensors.values())).folder / "zarr.json").write_text("{}")
    assert not oocdl.verify(run.path).sound
    assert "zarr.json was written anew" in str(oocdl.repair(run.path)) and run.checkpoints == (6,)
    assert oocdl.verify(run.path).sound
    (run.path / manifest.checkpoints["6"]).unlink()
    assert not oocdl.verify(run.path).sound
    assert "predicts with the weights of step 12, its last" in str(oocdl.repair(run.path))
    assert oocdl.verify(run.path).sound and run.evaluate(job[1]) == run.evaluate(job[1], which="last")


def test_a_module_gets_the_best_weights(tmp_path: Path, job: Job) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    shape = nets.vectors(12)["x"].shape
    net[0] = torch.nn.Linear(shape[1], 6)
    run = oocdl.fit(net, job[1], workdir=tmp_path / "run", callbacks=[ModelCheckpoint()], **OPTIONS)
    run.load_into(net, "best")
    kept = exported(run, tmp_path / "kept.safetensors", "best")
    for name, tensor in net.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), kept[name])


def test_what_cannot_be_is_refused(job: Job, tmp_path: Path) -> None:
    for kind, how in [
        (ModelCheckpoint, {"save_top_k": -2}), (ModelCheckpoint, {"every_n_epochs": 0}),
        (ModelCheckpoint, {"save_last": False}), (ReduceLROnPlateau, {"factor": 1.0}),
        (ReduceLROnPlateau, {"patience": 0}), (ReduceLROnPlateau, {"min_lr": -1.0}),
        (ReduceLROnPlateau, {"factor": "0.1"}), (ReduceLROnPlateau, {"patience": 2.5}),
        (ReduceLROnPlateau, {"cooldown": "1"}), (ReduceLROnPlateau, {"min_lr": float("nan")}),
        (ModelCheckpoint, {"save_top_k": "3"}), (ModelCheckpoint, {"every_n_epochs": 1.5}),
    ]:  # fmt: skip
        with pytest.raises(InputError):
            kind(**how)
    with pytest.raises(TypeError, match="min_delta"):
        ModelCheckpoint(min_delta=0.1)  # type: ignore[call-arg]
    for callback, text in [
        (EarlyStopping("val_dise"), "no 'val_dise' to monitor, but val_loss, val_accuracy"),
        (EarlyStopping("val_y/accuracy"), "no 'val_y/accuracy'"),
        (EarlyStopping("val_accuracy/7"), "no 'val_accuracy/7'"),
        (ModelCheckpoint(), "pass validation="),
    ]:
        more = {"validation": None, "metrics": ()} if isinstance(callback, ModelCheckpoint) else {}
        with pytest.raises(InputError, match=text):
            fit(job, tmp_path / "run", callback, **more)
        assert not (tmp_path / "run").exists()
    plan = oocdl.plan(*job, **{name: held for name, held in OPTIONS.items() if name != "progress"})
    two = ModelCheckpoint(save_top_k=2), ModelCheckpoint("val_accuracy", save_top_k=2)
    for callbacks in ((ModelCheckpoint(save_top_k=4),), (ModelCheckpoint(save_top_k=-1),), two):
        with pytest.raises(ResourceError, match="of weights and state"):
            fit(job, tmp_path / "run", *callbacks, disk=plan.disk_bytes + 3 * plan.version_bytes)
        assert not (tmp_path / "run").exists()
    run = fit(job, tmp_path / "run")
    for which, text in [("best", "ModelCheckpoint"), (7, "no step 7, but 18"), ("first", "got 'first'")]:
        with pytest.raises(InputError, match=text):
            run.evaluate(job[1], which=which)
    with pytest.warns(ModelWarning, match="before the learning rate has fallen"):
        fit(job, tmp_path / "cosine", EarlyStopping(), lr=oocdl.optim.Cosine(0.1), epochs=1)


def test_the_command_line_keeps_and_stops(job: Job, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "cli.run"
    options = {**OPTIONS, "epochs": 30}
    run = fit(job, tmp_path / "run", ModelCheckpoint(), EarlyStopping(patience=2), epochs=30)
    given = ["--validation", "0.25", "--batch-size", "3", "--lr", "0.5", "--epochs", "30", "--patience", "2"]
    given += ["--memory", str(options["memory"]), "--loss", str(options.get("loss", "cross_entropy"))]
    given += ["--metrics", "accuracy", "--optimizer", str(options.get("optimizer", "adam")), "--no-progress"]
    assert run_command(["fit", *map(str, job), "--workdir", str(folder), *given], False) == 0
    assert oocdl.open(folder).checkpoints == run.checkpoints
    out = tmp_path / "best.safetensors"
    assert run_command(["export", str(folder), str(out), "--which", "best"], False) == 0
    assert out.read_bytes() == oocdl.open(folder).export(tmp_path / "same.safetensors", "best").read_bytes()
    assert run_command(["export", str(folder), str(out), "--which", "7"], False) == 2
    capsys.readouterr()
    assert run_command(["fit", *map(str, job), "--monitor", "val_accuracy"], False) == 2
    assert "--monitor goes with --patience" in capsys.readouterr().err


def test_averages_are_a_version(job: Job, tmp_path: Path) -> None:
    run = fit(job, tmp_path / "run", ModelCheckpoint(), ema=0.7)
    averages = exported(run, tmp_path / "ema.safetensors", "ema")
    last = exported(run, tmp_path / "last.safetensors", "last")
    assert averages.keys() == last.keys()
    state = run._store
    for name, array in averages.items():
        expected = np.asarray(state.array(oocdl.optim.average_of(name)))
        np.testing.assert_array_equal(array, expected)
        assert not np.array_equal(array, last[name])
    assert run.evaluate(job[1], which="ema") != run.evaluate(job[1])
    made = onnx.load(run.export(tmp_path / "ema.onnx", "ema"))
    for initializer in made.graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(initializer), averages[initializer.name])
    with pytest.raises(InputError, match="has no averages of weights"):
        fit(job, tmp_path / "plain").evaluate(job[1], which="ema")
