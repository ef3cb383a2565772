"""``oocdl search``: its options reach their settings, its table is printed, errors are one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import oocdl
from oocdl.cli import verbs
from oocdl.cli.texts import parse_space
from oocdl.errors import InputError, ResourceError
from oocdl.space import IntUniform, LogUniform, Uniform
from tests.kit import nets
from tests.kit.commands import run
from tests.kit.searches import workers_in

TINY = ("--memory", "2GiB", "--threads", "1", "--engine", "onnxruntime", "--steps", "2")


def test_a_search_prints_progress_and_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (*nets.write_job(tmp_path), *TINY, "--space", "lr=log:1e-3..1e-1", "--space", "batch_size=2,5")
    search = ("search", *given, "--trials", 3, "--rungs", 2, "--eta", 2, "--batch-size", 1)
    code, out, err = run(capsys, *search)
    assert code == 0
    assert out.count("stopped") + out.count("finished") == 3
    assert re.search(r"best: .*net.search/trials/\d{4}-lr=", out)
    first, *_, last = err.splitlines()
    told = r"trial 0 \(lr=\S+, batch_size=\d\) \S+ after 2 steps, .*: going on; 0 of 3 done"
    assert re.fullmatch(told, first) and last.endswith("; 3 of 3 done")
    code, again, err = run(capsys, *search, "--no-progress")
    assert (code, again, err) == (0, out, "")
    code, shown, _ = run(capsys, "info", tmp_path / "net.search")
    assert code == 0 and shown.strip() in out


def test_a_search_over_a_scheduler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (*nets.write_job(tmp_path), *TINY, "--space", "lr=0.1,0.01", "--sampler", "grid")
    with workers_in(tmp_path, count=1) as client:
        code, out, _ = run(capsys, "search", *given, "--scheduler-address", client.scheduler.address)
    assert code == 0 and out.count("finished") == 2


def test_each_option_reaches_its_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = nets.write_job(tmp_path)
    taken: dict[str, Any] = {}

    def search(**options: Any) -> Any:
        taken.update(options)
        raise InputError("stop here")

    monkeypatch.setattr(verbs, "search_runs", search)
    cases: dict[str, tuple[Any, Any]] = {
        "trials": (7, 7), "rungs": (2, 2), "eta": (4, 4), "sampler": ("grid", "grid"), "seed": (5, 5),
        "trials_per_round": (3, 3), "metric": ("loss/y", "loss/y"), "mode": ("max", "max"),
        "validation": ("v.zarr", "v.zarr"), "last_steps": (4, 4), "wait_seconds": (9, 9.0),
        "commit_seconds": (1, 1.0), "workdir": ("w", Path("w")), "steps": (8, 8), "loss": ("dice", "dice"),
        "memory": ("1GiB", "1GiB"),
    }  # fmt: skip
    words = [word for name, (text, _) in cases.items() for word in ("--" + name.replace("_", "-"), text)]
    code, _, err = run(capsys, "search", model, data, *words, "--space", "lr=0..1", "--no-progress")
    assert code == InputError.exit_code and "stop here" in err
    expected = {name: value for name, (_, value) in cases.items()}
    expected |= {"model": model, "dataset": str(data), "space": {"lr": Uniform(0, 1)}, "client": None}
    expected |= {"progress": False, "epochs": None}
    assert {name: taken[name] for name in expected} == expected


def test_spaces_as_text() -> None:
    texts = ["lr=log:1e-5..1e-2", "optimizer.momentum=0..0.9", "seed=int:1..4", "precision=float32"]
    assert parse_space(texts) == {
        "lr": LogUniform(1e-5, 1e-2),
        "optimizer.momentum": Uniform(0, 0.9),
        "seed": IntUniform(1, 4),
        "precision": ["float32"],
    }
    table = '{"lr": "log:1e-5..1e-2", "shuffle": [true, false], "batch_size": 2}'  # as those of a file
    assert parse_space([table]) == {"lr": LogUniform(1e-5, 1e-2), "shuffle": [True, False], "batch_size": [2]}
    for text, told in [
        ("lr", "takes an option and its values"),
        ("lr=", "takes an option"),
        ("lr=log:0..1", "above 0"),
        ("lr=exp:1..2", "a range is log:a..b"),
        ("lr=2..1", "needs low < high"),
        ("seed=int:1..2.5", "whole numbers"),
        ("lr=a..b", "finite numbers"),
    ]:
        with pytest.raises(InputError, match=told):
            parse_space([text])
    with pytest.raises(InputError, match="once each"):
        parse_space(["lr=1,2", "lr=3"])


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = nets.write_job(tmp_path)
    code, _, err = run(capsys, "search", model, data)
    assert code == InputError.exit_code and err.count("\n") == 1 and "space takes a mapping" in err
    there = ("--scheduler-address", "no such place")
    code, _, err = run(capsys, "search", model, data, "--space", "lr=1,2", *there)
    assert code in (InputError.exit_code, ResourceError.exit_code) and err.count("\n") == 1
    assert not (tmp_path / "net.search").exists()
    with pytest.raises(oocdl.errors.StoreError):
        oocdl.Search(tmp_path / "net.search")
