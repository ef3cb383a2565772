"""``oocdl --register FILE``: the command line knows what a user's own file registers."""

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
from tests.kit import nets

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
