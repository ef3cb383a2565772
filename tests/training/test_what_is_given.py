"""Whatever is given to a call, in place of what it takes: an error of oocdl, in one line."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import oocdl
from oocdl.callbacks import MLflow
from oocdl.errors import BudgetError, InputError, OocdlError
from oocdl.losses import CrossEntropy, DiceCE
from oocdl.optim import SGD, Adam, WarmUp
from tests.kit import nets, runs
from tests.kit.settings import QUICK

DIGITS, LONG = "9" * 400, "x" * 5000

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": "adm"}, r"there is no optimizer 'adm' \(did you mean 'adam'\?\)"),
    ({"optimizer": SGD}, "optimizer .*SGD.* is neither a name"),
    ({"optimizer": Adam(), "lr": 0.1}, "lr goes with an optimizer given by name"),
    ({"loss": "crossentropy"}, r"there is no loss 'crossentropy' \(did you mean 'cross_entropy'\?\)"),
    ({"loss": len}, r"no loss like <built-in function len>; choose .* file by oocdl.from_torch\("),
    ({"loss": {}}, "loss is empty"),
    ({"loss": {"z": "mse"}}, "loss names the output 'z'; the model has: y"),
    ({"loss": {"y": ("mse", float("nan"))}}, r"weight of loss\['y'\] must be a finite number, got nan"),
    ({"lr": float("nan")}, "lr must be a finite number, got nan"),
    ({"lr": -1}, "lr must not be negative"),
    ({"lr": lambda step: None}, "the learning rate of step 1 must be a finite number, got None"),
    ({"lr": WarmUp(lambda step: float("nan"), 3)}, "rate of step 1 must be a finite number, got nan"),
    ({"lr": "fast"}, "lr must be a finite number, got fast"),
    ({"optimizer": SGD(lr=float("inf"))}, "lr of SGD must be a finite number, got inf"),
    ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ({"batch_size": 11}, r"batch_size must be 1...10 \(the number of samples\), got 11"),
    ({"batch_size": 2.5}, "batch_size must be a whole number, got 2.5"),
    ({"epochs": -1}, "epochs must be at least 1, got -1"),
    ({"steps": "3"}, "steps must be a whole number, got 3"),
    ({"steps": True}, "steps must be a whole number, got True"),
    ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
    ({"shuffle": "no"}, "shuffle must be True or False, got no"),
    ({"threads": 0}, "threads must be at least 1, got 0"),
    ({"memory": "much"}, "'much' is not a size; write for example '2GiB'"),
    ({"memory": -5}, "a size must be at least one byte, got -5"),
    ({"memory": "1.2.3G"}, "'1.2.3G' is not a size"),
    ({"commit_seconds": float("nan")}, "commit_seconds must be a number of seconds, got nan"),
    ({"precision": "float16"}, "precision must be 'float32' or 'bfloat16' or 'float64', got float16"),
    ({"logits": True}, "logits must be 'strict' or 'auto', got True"),
    ({"engine": "jax"}, "there is no engine 'jax'; choose one of: auto, torch, onnxruntime"),
    ({"inputs": {"image": "x"}}, "inputs names 'image', the model has: 'x'"),
    ({"inputs": {"x": "image"}}, "input 'x' is to use array 'image', the dataset has: x, y"),
    ({"targets": {"label": "y"}}, "targets names 'label', the model has: 'y'"),
    ({"scale": {"image": 2}}, "scale names 'image', the dataset has: 'x', 'y'"),
    ({"scale": {"x": float("inf")}}, r"scale\['x'\] must be a finite number, got inf"),
    ({"scale": 2}, "scale takes a mapping by name, got 2"),
    ({"scale": {"y": 0.5}}, r"scale\['y'\] is 0.5, .* whole numbers"),
    ({"freeze": 3}, "freeze takes names, got 3"),
    ({"keep": ["h", "gradient/w1"]}, "keep names 'gradient/w1', which is no activation"),
    ({"parallel": "data"}, "parallel takes 'auto' or a mapping"),
    ({"parallel": {"batches": 2}}, r"parallel does not know 'batches' \(did you mean 'batch'\?\)"),
    ({"parallel": {"space": (2, 0)}}, r"parallel\['space'\] must be at least 1, got 0"),
    ({"dims": {"batch": 1.5}}, r"dims\['batch'\] must be a whole number"),
    ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
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


refused = partial(runs.refused, OocdlError)


def _short(value: object) -> str:
    return repr(value)[:30]


@pytest.mark.parametrize(("given", "message"), OPTIONS, ids=_short)
def test_options(files: tuple[Path, Path], given: dict[str, Any], message: str) -> None:
    for verb in (oocdl.fit, oocdl.plan):
        with pytest.raises(InputError, match=message) as caught:
            verb(*files, **{**QUICK, **given})
        assert "\n" not in str(caught.value)
    assert not files[0].with_suffix(".run").exists()


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
    told = r"(?:nothing is left beside the process|while it loads engine).*; memory='(\d+MiB)' would do"
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
