"""Whatever is given to a call, in place of what it takes: an error of oocdl, in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import oocdl
from oocdl.callbacks import MLflow
from oocdl.errors import BudgetError, OocdlError
from oocdl.losses import CrossEntropy, DiceCE
from oocdl.optim import Adam
from tests.kit import nets
from tests.kit.settings import QUICK

DIGITS, LONG = "9" * 400, "x" * 5000

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"memory": DIGITS}, "a size of 999.* is more than any machine has"),
    ({"memory": 10**400}, "a size must be a finite number"),
    ({"disk": DIGITS + "GiB"}, "more than any machine has"),
    ({"threads": 10**9}, "threads must be at most 4096"),
    ({"steps": 10**400}, "steps must be at most"),
    ({"seed": 10**30}, "seed must be at most"),
    ({"spill": 5}, "spill takes a path, got 5"),
    ({"spill": "a\0b"}, "spill takes a path"),
    ({"loss": CrossEntropy(class_weights=2.0)}, "class_weights of CrossEntropy takes several numbers, got 2"),  # type: ignore[arg-type]
    ({"loss": CrossEntropy(class_weights="123")}, "takes several numbers, got 123"),  # type: ignore[arg-type]
    ({"loss": CrossEntropy(ignore_index=None)}, "ignore_index of CrossEntropy must be a whole number"),  # type: ignore[arg-type]
    ({"loss": DiceCE(cross_entropy="x")}, "takes an object of oocdl.losses.CrossEntropy, got x"),  # type: ignore[arg-type]
    ({"optimizer": Adam(weight_decay=float("nan"))}, "weight_decay of Adam must be a finite number"),
]
CALLS: list[tuple[dict[str, Any], str]] = [
    ({"workdir": 3}, "workdir takes a path, got 3"),
    ({"workdir": LONG}, "workdir 'xxx.* cannot be reached"),
    ({"client": "x"}, "client takes a distributed.Client, a Dask cluster, the address"),
    ({"scheduler": 3}, "scheduler takes a Dask 'get'.* got 3"),
    *(({"resume": bad}, "resume must be True, False or 'restart', got") for bad in ("x", 0, 1, None, [1])),
    *(({"replan": bad}, "replan must be True or False, got") for bad in ("x", 0, None, [])),
    *(({"progress": bad}, "progress must be True or False, got") for bad in ("x", 1, None)),
    *(({"trace": bad}, "trace|cannot be") for bad in (3, "a\0b", [])),
    ({"callbacks": None}, "callbacks takes a list of callables.* got None"),
    ({"callbacks": [3]}, r"callbacks takes a list of callables.* got \[3\]"),
    ({"callbacks": [MLflow]}, r"callbacks takes objects, and MLflow is a class: MLflow\(\.\.\)"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return nets.write_job(tmp_path_factory.mktemp("given"))


@pytest.fixture(scope="module")
def run(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> oocdl.Run:
    return oocdl.fit(*files, steps=1, workdir=tmp_path_factory.mktemp("run") / "run", **QUICK)


def refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(OocdlError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def _short(value: object) -> str:
    return repr(value)[:30]


@pytest.mark.parametrize(("given", "message"), OPTIONS, ids=_short)
def test_options(files: tuple[Path, Path], given: dict[str, Any], message: str) -> None:
    for verb in (oocdl.fit, oocdl.plan):
        refused(message, lambda verb=verb: verb(*files, **{**QUICK, **given}))


def test_fields_of_a_loss_may_be_tensors(files: tuple[Path, Path], tmp_path: Path) -> None:
    loss = CrossEntropy(class_weights=list(torch.tensor([1.0, 2.0, 0.5])), label_smoothing=torch.tensor(0.25))  # type: ignore[arg-type]
    run = oocdl.fit(*files, loss=loss, steps=1, workdir=tmp_path / "run", **QUICK)
    assert run.settings.loss == CrossEntropy(class_weights=(1.0, 2.0, 0.5), label_smoothing=0.25)
    assert oocdl.open(run.path).evaluate(files[1]) == run.evaluate(files[1])


@pytest.mark.parametrize(("given", "message"), CALLS, ids=_short)
def test_calls(files: tuple[Path, Path], tmp_path: Path, given: dict[str, Any], message: str) -> None:
    refused(message, lambda: oocdl.fit(*files, **{**QUICK, "workdir": tmp_path / "run", **given}))


@pytest.mark.parametrize("model", [7, None, b"net.onnx", "a\0b", LONG, "/proc/1/mem/x", "/"], ids=_short)
def test_models(files: tuple[Path, Path], model: Any) -> None:
    for verb in (oocdl.fit, oocdl.plan):
        refused("model|there is no file|is a folder", lambda verb=verb: verb(model, files[1], **QUICK))


@pytest.mark.parametrize("dataset", [7, None], ids=_short)
def test_datasets(files: tuple[Path, Path], run: oocdl.Run, tmp_path: Path, dataset: Any) -> None:
    refused("dataset", lambda: oocdl.fit(files[0], dataset, **QUICK))
    refused("dataset", lambda: run.predict(dataset, tmp_path / "out"))
    refused("dataset", lambda: run.evaluate(dataset))


def test_a_chunk_of_no_elements(files: tuple[Path, Path], run: oocdl.Run, tmp_path: Path) -> None:
    data = nets.write_data(tmp_path / "zero.zarr", nets.vectors())
    described = json.loads((data / "x" / "zarr.json").read_text())
    described["chunk_grid"]["configuration"]["chunk_shape"] = [0, 6]
    (data / "x" / "zarr.json").write_text(json.dumps(described))
    refused("chunk", lambda: oocdl.fit(files[0], data, **QUICK))
    refused("chunk", lambda: run.evaluate(data))


@pytest.mark.parametrize("target", [3, "a\0b", LONG, "/proc/x", Path(__file__) / "x"], ids=_short)
def test_targets(run: oocdl.Run, files: tuple[Path, Path], target: Any) -> None:
    refused("path|out|/", lambda: run.export(target))
    refused("path|out|/", lambda: run.predict(files[1], target))


def test_a_file_of_pytorch_is_not_what_export_writes(run: oocdl.Run, tmp_path: Path) -> None:
    refused(r"no \.PTH file.*'\.onnx' or.*load_into", lambda: run.export(tmp_path / "net.PTH"))


def test_a_budget_too_small_for_predictions_names_another(
    run: oocdl.Run, files: tuple[Path, Path], tmp_path: Path
) -> None:
    told = r"nothing is left beside the process itself.*; memory='(\d+MiB)' would do"
    with pytest.raises(BudgetError, match=told) as found:
        run.predict(files[1], tmp_path / "out", memory="1MiB")
    named = re.search(told, str(found.value))
    assert named is not None and run.predict(files[1], tmp_path / "out", memory=named[1])["y"].shape[0]


@pytest.mark.parametrize("workdir", [3, None, "a\0b", LONG, __file__], ids=_short)
def test_open(workdir: Any) -> None:
    refused("workdir|run", lambda: oocdl.open(workdir))


@pytest.mark.parametrize(
    "given",
    [
        *({"batch_size": bad} for bad in ("x", 0, -1, None, 1.5, True)),
        *({"inputs": bad} for bad in (3, "x", {"x": 3}, {3: "x"}, {"x": "nothing"}, ["x"])),
        *({"spill": bad} for bad in (5, "a\0b", [])),
        *({"memory": bad} for bad in ([], {}, b"2GiB", DIGITS, 10**400, "much")),
    ],
    ids=_short,
)
def test_options_of_predict_and_evaluate(
    run: oocdl.Run, files: tuple[Path, Path], tmp_path: Path, given: dict[str, Any]
) -> None:
    (name,) = given
    word = {"inputs": "input", "memory": "size"}.get(name, name)
    refused(word, lambda: run.evaluate(files[1], **given))
    refused(word, lambda: run.predict(files[1], tmp_path / "out", **given))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("targets", [3, "y", {"y": 3}, {"y": "nothing"}, {3: "y"}], ids=_short)
def test_targets_of_evaluate(run: oocdl.Run, files: tuple[Path, Path], targets: Any) -> None:
    refused("target|output", lambda: run.evaluate(files[1], targets=targets))


@pytest.mark.parametrize("module", [3, None, "net"], ids=_short)
def test_modules_to_load_into(run: oocdl.Run, module: Any) -> None:
    refused("module|PyTorch", lambda: run.load_into(module))


@pytest.mark.parametrize("cache", ["/" + LONG, __file__], ids=_short)
def test_a_cache_that_cannot_be_read(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """Rates that nobody can read are the nominal ones, and that is said."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    if cache == __file__:
        assert oocdl.plan(*files, **QUICK).seconds > 0
        return
    with pytest.warns(UserWarning, match="do not count"):
        assert oocdl.plan(*files, **QUICK).seconds > 0
