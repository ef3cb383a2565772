"""Options of many parts, typed and from a file, and ``oocdl --register FILE`` with a user's own code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

import oocdl
from oocdl.cli import app
from oocdl.ops.loss_functions import LOSSES
from oocdl.ops.optimizers import OPTIMIZERS
from oocdl.optim import AdamW, Cosine
from tests.kit import nets
from tests.kit.commands import run

MINE = """
import oocdl

@oocdl.optim.register("plain")
def plain(build, weight, gradient, state, scalars):
    return build("Sub", weight, build("Mul", gradient, scalars["lr"])), state

@oocdl.ops.register("mine::Twice")
def twice(build, x):
    return build("Add", x, x)

@oocdl.losses.register("off")
def off(build, prediction, target):
    error = build("Sub", prediction, oocdl.losses.aligned(build, prediction, target))
    return oocdl.losses.mean(build, build("Mul", error, error))
"""


def test_a_file_registers_an_operator_an_optimizer_and_a_loss(
    own_operators: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, arrays = nets.write_mlp(tmp_path / "mlp.onnx"), nets.vectors()
    changed = onnx.load(model)
    changed.graph.node[-1].output[0] = "half"
    changed.graph.node.append(helper.make_node("Twice", ["half"], ["y"], domain="mine"))
    onnx.save(changed, model)
    data = nets.write_data(tmp_path / "data.zarr", {"x": arrays["x"], "y": arrays["x"][:, :3].copy()})
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    words = ["fit", str(model), str(data), "--optimizer", "plain", "--loss", "off", "--memory", "4GiB"]
    assert app.run_command(words, False) == 2
    assert "no loss 'off'" in capsys.readouterr().err
    before = [dict(LOSSES), dict(OPTIMIZERS)]
    more = ["--steps", "2", "--threads", "1", "--no-progress"]
    assert app.run_command(["--register", str(mine), *words, *more], False) == 0
    run = oocdl.open(tmp_path / "mlp.run")
    assert run.steps == 2
    capsys.readouterr()
    assert app.run_command(["--register", str(mine), "info", str(model)], False) == 0
    assert re.search(r"mine::Twice .* 1 .* yes, your own", capsys.readouterr().out)
    for table, then in zip((LOSSES, OPTIMIZERS), before, strict=True):
        table.clear()
        table.update(then)  # type: ignore[arg-type]


def test_a_file_that_cannot_be_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("1 / 0")
    for path, why in ((bad, "ZeroDivisionError"), (tmp_path / "none.py", "is none"), (tmp_path, "is none")):
        assert app.run_command(["--register", str(path), "info", "--machine"], False) == 2
        assert why in capsys.readouterr().err


@pytest.mark.parametrize("table", [LOSSES, OPTIMIZERS])
def test_help_and_docstring_name_what_there_is(table: dict[str, object]) -> None:
    text = (oocdl.fit.__doc__ or "").split("accumulate=k")[0]
    assert all(f'"{name}"' in text for name in table)


QUICK = ("--memory", "2GiB", "--threads", "1", "--engine", "onnxruntime", "--steps", "2", "--no-progress")
GROUPS = ({"params": ("w1", "b1"), "lr": 0.1, "betas": (0.5, 0.5)}, "no_decay_1d")


@pytest.mark.parametrize("way", ["typed", "file"])
def test_groups_and_averages_reach_the_run(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = nets.write_job(tmp_path)
    words: list[object] = ["--param-groups", "params=w1|b1,lr=0.1,betas=0.5|0.5"]
    words += ["--param-groups", "no_decay_1d", "--ema", 0.9, "--optimizer", "adamw", "--schedule", "cosine"]
    if way == "file":
        (config := tmp_path / "run.toml").write_text(
            'ema = 0.9\noptimizer = "adamw"\nschedule = "cosine"\n'
            'param_groups = [{params = ["w1", "b1"], lr = 0.1, betas = [0.5, 0.5]}, "no_decay_1d"]\n'
        )
        words = ["--config", config]
    code, _, err = run(capsys, "fit", *job, *QUICK, *words)
    assert code == 0, err
    made = oocdl.open(tmp_path / "net.run")
    assert made.settings.param_groups == GROUPS and made.settings.ema == 0.9
    assert made.settings.optimizer == AdamW(lr=Cosine(0.001, 2))
    assert [row["lr/1"] for row in made.history] == pytest.approx([Cosine(0.1, 2)(step) for step in range(2)])


def test_what_is_no_group_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = nets.write_job(tmp_path)
    for words, said in (("nodecay", "got nodecay"), ("params=w9,lr=1", "'w9', which matches no trained")):
        code, _, err = run(capsys, "fit", *job, *QUICK, "--param-groups", words)
        assert code == 2 and said in err and err.count("\n") == 1


@pytest.mark.parametrize("word", ["true", "false"])
def test_what_is_on_or_off_in_a_file_is_so_in_the_run(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = nets.write_job(tmp_path)
    (config := tmp_path / "run.toml").write_text(
        f'optimizer = "sgd"\nmomentum = 0.9\nparam_groups = [{{params = "w1", nesterov = {word}}}]\n'
    )
    code, _, err = run(capsys, "fit", *job, *QUICK, "--config", config)
    assert code == 0, err
    made = oocdl.open(tmp_path / "net.run")
    assert made.settings.param_groups == ({"params": ("w1",), "nesterov": word == "true"},)
