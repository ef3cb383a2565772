"""Callbacks have each committed step once, whatever stops a run, and go on where it goes on."""

from __future__ import annotations

import csv
import importlib
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import google_crc32c
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import oocdl
from oocdl.callbacks import CSV, MLflow, TensorBoard
from oocdl.callbacks.committed_rows import Row
from oocdl.errors import CorruptError, InputError, ResourceError
from oocdl.events import Committed, Event, RunFinished, RunStarted, StepDone, WorkersChanged
from oocdl.optim import Then
from oocdl.presets.unets import write_unet3d
from oocdl.report import history_view
from tests.kit import nets
from tests.kit.runs import Killed, broken_after

Curve = dict[int, float]


def fit(folder: Path, *callbacks: Callable[[Event], None], **options: Any) -> oocdl.Run:
    """Six steps in epochs of two: a commit after every other step."""
    given = {"steps": 6, "lr": 0.1, "memory": "4GiB", "engine": "onnxruntime", "progress": False, **options}
    model = folder / "unet.onnx"
    if not model.exists():
        write_unet3d(model, base=2, depth=1, classes=2)
        nets.write_data(folder / "data.zarr", nets.volumes(2, 8))
    return oocdl.fit(model, folder / "data.zarr", callbacks=list(callbacks), **given)


def from_csv(path: Path) -> Curve:
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    found = {int(row["step"]): float(row["loss"]) for row in rows}
    assert len(found) == len(rows)
    return found


def event_class() -> Any:
    """``Event`` of event.proto, as far as it is written."""
    kinds = {"double": 1, "float": 2, "int64": 3, "string": 9, "message": 11, "enum": 5}
    messages: Mapping[str, Any] = {
        "Value": [("tag", 1, "string", ""), ("simple_value", 2, "float", "")],
        "Summary": [("value", 1, "message", "Value")],
        "SessionLog": [("status", 1, "enum", "")],
        "Event": [
            ("wall_time", 1, "double", ""), ("step", 2, "int64", ""), ("file_version", 3, "string", ""),
            ("summary", 5, "message", "Summary"), ("session_log", 7, "message", "SessionLog"),
        ],
    }  # fmt: skip
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="tb", syntax="proto3")
    for name, fields in messages.items():
        made = file.message_type.add(name=name)
        for title, number, kind, of in fields:
            label = 3 if title == "value" else 1
            field = made.field.add(name=title, number=number, type=kinds[kind], label=label)
            if of:
                field.type_name = f".tb.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tb.Event"))


def events_of(path: Path) -> list[Any]:
    """All events of a file; its checksums are compared."""
    event, data, found = event_class(), path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        for part, crc in ((data[:8], data[8:12]), (data[12 : 12 + length], data[12 + length : 16 + length])):
            value = google_crc32c.value(part)
            turned = (value >> 15) | (value << 17 & 0xFFFFFFFF)
            assert struct.unpack("<I", crc)[0] == (turned + 0xA282EAD8) % 2**32
        found.append(event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def from_tensorboard(folder: Path, tag: str = "loss") -> Curve:
    """What TensorBoard shows: from a start on, what was written of later steps before does not count."""
    found: Curve = {}
    for path in sorted(folder.glob("events*")):
        first, *others = events_of(path)
        assert first.file_version == "brain.Event:2" and first.wall_time > 1e9
        for event in others:
            if event.session_log.status == 1:
                found = {step: value for step, value in found.items() if step < event.step}
            for value in event.summary.value:
                if value.tag == tag:
                    assert event.step not in found
                    found[event.step] = value.simple_value
    return found


def test_numbers_beyond_float32_are_infinite_in_tensorboard(tmp_path: Path) -> None:
    writer = TensorBoard(tmp_path / "logs")
    writer.begin(RunStarted(None, str(tmp_path), 2, 0))
    writer.write([Row({"step": step, "loss": value}, 2e9) for step, value in ((1, 1e39), (2, -1e39))])
    assert from_tensorboard(tmp_path / "logs") == {1: float("inf"), 2: float("-inf")}


def mlflow() -> Any:
    """MLflow, where it is used: it takes two seconds, which each worker would spend that lists the tests."""
    return importlib.import_module("mlflow")


def from_mlflow(uri: str, workdir: Path) -> list[tuple[str, Curve]]:
    """Status and losses of each MLflow run of a run, the oldest first."""
    client = mlflow().MlflowClient(tracking_uri=uri)
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    found = []
    for run in client.search_runs(ids, order_by=["attributes.start_time ASC"]):
        if run.data.tags["oocdl.workdir"] != str(workdir):
            continue
        metrics = client.get_metric_history(run.info.run_id, "loss")
        assert len({metric.step for metric in metrics}) == len(metrics)
        found.append((run.info.status, {metric.step: metric.value for metric in metrics}))
    return found


def history(run: oocdl.Run) -> Curve:
    return {row["step"]: row["loss"] for row in run.history}


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlruns").as_uri()


def test_a_killed_run_goes_on_in_the_same_places(tmp_path: Path, uri: str) -> None:
    def places() -> tuple[Callable[[Event], None], ...]:
        return CSV(tmp_path / "losses.csv"), TensorBoard(tmp_path / "logs"), MLflow("brains", uri)

    with pytest.raises(Killed):
        fit(tmp_path, *places(), broken_after(4, Killed))
    run = fit(tmp_path, *places())
    expected = history(run)
    assert list(expected) == [1, 2, 3, 4, 5, 6]
    assert from_csv(tmp_path / "losses.csv") == expected
    assert from_tensorboard(tmp_path / "logs") == pytest.approx(expected)
    assert from_tensorboard(tmp_path / "logs", "lr") == pytest.approx(dict.fromkeys(expected, 0.1))
    assert from_mlflow(uri, run.path) == [("FINISHED", expected)]
    assert len(list((tmp_path / "logs").glob("events*"))) == 2


def test_a_copy_of_a_run_has_an_mlflow_run_of_its_own(tmp_path: Path, uri: str) -> None:
    def go_on(steps: int, name: str, **options: Any) -> Curve:
        return history(fit(tmp_path, MLflow("brains", uri), steps=steps, workdir=tmp_path / name, **options))

    begun = fit(tmp_path, MLflow("brains", uri), steps=2, workdir=tmp_path / "a").path
    shutil.copytree(begun, tmp_path / "b")
    copied = go_on(6, "b", lr=Then(0.1, 2, 0.01))
    begun.rename(tmp_path / "c")
    moved = go_on(4, "c")
    assert moved[4] != copied[4]
    assert from_mlflow(uri, tmp_path / "a") == [("FINISHED", moved)]
    assert from_mlflow(uri, tmp_path / "b") == [("FINISHED", copied)]
    (tmp_path / "c" / "mlflow.json").write_text("")
    with pytest.raises(CorruptError, match="mlflow.json is damaged; without it"):
        go_on(6, "c")


def test_one_that_is_new_to_a_run_has_all_of_it(tmp_path: Path, uri: str) -> None:
    fit(tmp_path, steps=4)
    run = fit(tmp_path, CSV(tmp_path / "losses.csv"), TensorBoard(), MLflow(tracking_uri=uri))
    expected = history(run)
    assert len(expected) == 6 and from_csv(tmp_path / "losses.csv") == expected
    assert from_tensorboard(run.path / "tensorboard") == pytest.approx(expected)
    assert from_mlflow(uri, run.path) == [("FINISHED", expected)]


def test_a_run_that_starts_anew_does_so_everywhere(tmp_path: Path, uri: str) -> None:
    places = CSV(tmp_path / "losses.csv"), TensorBoard(tmp_path / "logs"), MLflow("brains", uri)
    first = history(fit(tmp_path, *places))
    run = fit(tmp_path, *places, steps=2, seed=1, resume="restart")
    expected = history(run)
    assert from_csv(tmp_path / "losses.csv") == expected and len(expected) == 2
    assert from_tensorboard(tmp_path / "logs") == pytest.approx(expected)
    assert from_mlflow(uri, run.path) == [("FINISHED", first), ("FINISHED", expected)]


def test_places_stay_where_they_are_if_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def go(event: Event) -> None:
        if isinstance(event, StepDone):
            os.chdir(tmp_path / "elsewhere")

    run = fit(tmp_path, CSV("losses.csv"), TensorBoard("logs"), go, workdir="run", spill="spill")
    assert run.path == tmp_path / "run"
    assert from_csv(tmp_path / "losses.csv") == history(run)
    assert from_tensorboard(tmp_path / "logs") == pytest.approx(history(run))
    assert not list((tmp_path / "elsewhere").iterdir())


def row(step: int, loss: float) -> StepDone:
    return StepDone({"step": step, "epoch": 0, "loss": loss, "lr": 0.1, "seconds": 1.0})


def test_steps_that_workers_took_with_them_are_not_there(tmp_path: Path, uri: str) -> None:
    (tmp_path / "run").mkdir()
    places = CSV(tmp_path / "losses.csv"), TensorBoard(tmp_path / "logs"), MLflow("brains", uri)
    for listener in places:
        for event in (
            RunStarted(None, str(tmp_path / "run"), 4, 0),
            row(1, 9.0), Committed(1), row(2, 8.0), row(3, 7.0),
            WorkersChanged("one is lost", 2, 1), row(2, 6.0), row(3, 5.0), Committed(3), RunFinished(3, 1.0),
        ):  # fmt: skip
            listener(event)
    expected = {1: 9.0, 2: 6.0, 3: 5.0}
    assert from_csv(tmp_path / "losses.csv") == expected
    assert from_tensorboard(tmp_path / "logs") == expected
    assert from_mlflow(uri, tmp_path / "run") == [("FINISHED", expected)]


def test_a_server_that_is_away_does_not_stop_a_run(tmp_path: Path, uri: str, monkeypatch: Any) -> None:
    (tmp_path / "run").mkdir()
    listener = MLflow("brains", uri)
    listener(RunStarted(None, str(tmp_path / "run"), 4, 0))
    log_batch = listener._client.log_batch

    def away(*args: Any, **named: Any) -> None:
        raise mlflow().exceptions.MlflowException("no route")

    monkeypatch.setattr(listener._client, "log_batch", away)
    listener(row(1, 9.0))
    with pytest.warns(UserWarning, match=r"MLflow did not take 1 steps \(no route\)"):
        listener(Committed(1))
    monkeypatch.setattr(listener._client, "log_batch", log_batch)
    for event in (row(2, 8.0), Committed(2), RunFinished(2, 1.0)):
        listener(event)
    assert from_mlflow(uri, tmp_path / "run") == [("FINISHED", {1: 9.0, 2: 8.0})]
    monkeypatch.setattr(mlflow().MlflowClient, "get_experiment_by_name", away)
    with pytest.raises(ResourceError, match="MLflow cannot be used: no route; fit without it"):
        listener(RunStarted(None, str(tmp_path / "run"), 4, 0))


def test_many_rows_are_sent_in_parts(tmp_path: Path, uri: str) -> None:
    (tmp_path / "run").mkdir()
    listener = MLflow("brains", uri)
    listener(RunStarted(None, str(tmp_path / "run"), 400, 0))
    for step in range(1, 401):
        listener(row(step, float(step)))
    listener(Committed(400))
    assert from_mlflow(uri, tmp_path / "run") == [("RUNNING", {step: float(step) for step in range(1, 401)})]


def test_other_files_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("what I measured\n1\n")
    with pytest.raises(InputError, match=r"notes\.csv is no history of a run"):
        fit(tmp_path, CSV(tmp_path / "notes.csv"))
    assert (tmp_path / "notes.csv").read_text() == "what I measured\n1\n"


def test_a_line_that_was_cut_off_is_written_anew(tmp_path: Path) -> None:
    fit(tmp_path, CSV(tmp_path / "losses.csv"), steps=4)
    text = (tmp_path / "losses.csv").read_text()
    (tmp_path / "losses.csv").write_text(text[:-9])
    run = fit(tmp_path, CSV(tmp_path / "losses.csv"))
    assert from_csv(tmp_path / "losses.csv") == history(run)


def test_a_frame_and_a_picture_of_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fit(tmp_path)
    frame = run.frame()
    assert frame.index.name == "step" and frame["loss"].to_dict() == history(run)
    assert run.plot(tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(history_view, "empty_figure", None)  # it is refused before it is drawn
    with pytest.raises(InputError, match=r"\.png or \.svg, not 'losses\.gif'"):
        run.plot(tmp_path / "losses.gif")


def test_what_is_missing_is_said_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fit(tmp_path, steps=1)

    def missing(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    for extra, library, call in (
        ("pandas", "pandas", run.frame),
        ("plot", "matplotlib", lambda: run.plot(tmp_path / "losses.png")),
        ("mlflow", "mlflow", MLflow),
    ):
        with pytest.raises(InputError) as told:
            call()
        assert f"needs {library}, which is not installed; pip install 'oocdl[{extra}]'" in str(told.value)
