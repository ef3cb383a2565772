"""What people meet in a terminal: tables that fit it, data, files of options, and the truth after Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import oocdl
from oocdl.cli import app, look
from oocdl.cli.demo import CLASSES, write_volumes
from oocdl.cli.say import say_json
from oocdl.errors import InputError
from oocdl.planning.calibrate import store_rates
from oocdl.planning.cost_model import NOMINAL
from oocdl.presets.unets import write_unet3d
from oocdl.training.prediction.predictions import Predictions
from tests.kit.commands import python, run

TINY = ("--loss", "dice_ce", "--memory", "4GiB", "--threads", "1", "--engine", "onnxruntime")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a dataset and a trained run, in a folder with a long name."""
    root = tmp_path_factory.mktemp("a_folder_with_a_name_that_is_longer_than_a_table_would_like_it_to_be")
    write_unet3d(root / "net.onnx", classes=len(CLASSES), base=2, depth=4)
    write_volumes(root / "data.zarr", samples=3, size=16, seed=0)
    arguments = ["fit", str(root / "net.onnx"), str(root / "data.zarr"), "--steps", "3", "--no-progress"]
    assert app.run_command([*arguments, *TINY], debug=True) == 0
    return root


def verbs(folder: Path) -> dict[str, tuple[object, ...]]:
    """A call of each verb that prints a table."""
    net, data, work = folder / "net.onnx", folder / "data.zarr", folder / "net.run"
    space = ("--space", "lr=0.1,0.01", "--space", "optimizer.weight_decay=0.1", "--trials", 2, "--steps", 1)
    return {
        "plan": ("plan", net, data, *TINY),
        "plan every layer": ("plan", net, data, *TINY, "--all", "--hosts", "1,2"),
        "simulate": ("simulate", net, data, *TINY[:4], "--hosts", "1,2", "--cores", 1),
        "search": ("search", net, data, *TINY, *space, "--no-progress", "--workdir", folder / "s"),
        "report": ("report", work),
        "info of a search": ("info", folder / "s"),
        "info of a run": ("info", work),
        "info of every weight": ("info", work, "--all"),
        "info of a model": ("info", net, "--weights"),
        "info of data": ("info", data),
        "info of the machine": ("info", "--machine", "--engine", "onnxruntime"),
        "evaluate": ("evaluate", work, data, "--memory", "4GiB"),
    }


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose rates are known, which no other test sees."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store_rates("onnxruntime", NOMINAL)


def test_every_table_fits_eighty_columns(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, calibrated: None
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name, words in verbs(folder).items():
        code, out, err = run(capsys, *words)
        assert code == 0, (name, err)
        tables = [line for line in out.splitlines() if line and line[0] in "┏┃┡│├└┌╇"]
        assert tables or name == "evaluate", name
        assert max(map(len, tables), default=0) <= 80, name
        assert all(line.rstrip()[-1] in "┓┃┩│┤┘┐" for line in tables), f"{name} is cut"


def test_every_verb_with_tables_prints_data_too(
    folder: Path, capsys: pytest.CaptureFixture[str], calibrated: None
) -> None:
    found: dict[str, Any] = {}
    for name, words in verbs(folder).items():
        code, out, err = run(capsys, *words, "--json")
        assert code == 0, (name, err)
        found[name] = json.loads(out)
    plan = oocdl.plan(folder / "net.onnx", folder / "data.zarr", loss="dice_ce", memory="4GiB", threads=1,
                      engine="onnxruntime")  # fmt: skip
    assert [layer["layer"] for layer in found["plan"]["layers"]] == [
        plan.layer_names[one.layer.name] for one in plan.layers
    ]
    assert found["plan"]["step"]["flops"] == plan.flops
    assert [row["hosts"] for row in found["plan every layer"]["hosts"]] == [1, 2]
    assert found["search"][0]["metric"] <= found["search"][1]["metric"]
    assert found["evaluate"].keys() == {"loss"}
    made = oocdl.open(folder / "net.run")
    of_run, least = found["info of a run"], min(row["loss"] for row in made.history)
    assert (of_run["steps"], of_run["finished"]) == (3, True) and of_run["losses"]["loss"]["least"] == least
    assert of_run["settings"]["memory_bytes"] == 4 << 30 and of_run["peak_bytes"] == made.peak_bytes
    assert of_run["weights"][0]["nbytes"] == 216 and found["info of data"]["arrays"][0]["dtype"] == "float32"
    assert found["info of a model"]["parameters"] > 0 and found["info of the machine"]["available_bytes"] > 0
    assert found["report"]["predicted"]["peak_bytes"] > 0
    drawn = [name for name, data in found.items() if set("▁█→·") & set(json.dumps(data, ensure_ascii=False))]
    assert drawn == []


def test_what_is_no_finite_number_is_null_in_data(capsys: pytest.CaptureFixture[str]) -> None:
    nan, inf = float("nan"), float("inf")
    say_json({"dice": nan, "by": [inf, (-inf, 0.5)], "of": {"x": np.float64(nan)}, "path": Path("a")})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"dice": None, "by": [None, [None, 0.5]], "of": {"x": None}, "path": "a"}


def test_layers_are_grouped_unless_all_are_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oocdl.report.tables.MOST_ROWS", 10)
    monkeypatch.setattr("oocdl.planning.pass_plan.MIN_PARALLEL_SECONDS", 0.0)  # no layers are joined
    what = ("plan", folder / "net.onnx", folder / "data.zarr", *TINY)
    grouped, every = run(capsys, *what)[1], run(capsys, *what, "--all")[1]
    assert "│ down2 × 2 " in grouped, grouped
    assert "grouped by blocks; --all" in grouped
    assert "│ down2.conv1 " in every and "grouped" not in every


def test_info_of_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "info", folder / "net.run")[1]
    history = oocdl.open(folder / "net.run").history
    ends = f"{history[0]['loss']:.4g} → {history[-1]['loss']:.4g}"
    assert re.search(rf"loss +│ [▁▂▃▄▅▆▇█]{{3}}  {ends} ", out)
    for words in ("last commit", "Adam(lr=0.001)", "DiceCE of labels", "onnxruntime, float32"):
        assert words in out
    assert re.search(r"down1 × 4 +│ 8 tensors", out) and "down1.conv1.weight" not in out
    assert re.search(r"down1.conv1.weight +│ 2 × 1 × 3 × 3 × 3 +│ float32", run(
        capsys, "info", folder / "net.run", "--all")[1])  # fmt: skip


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"oocdl {oocdl.__version__}\n", "")


def test_shells_can_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    shown = CliRunner().invoke(app.app, ["--show-completion"])
    assert "complete" in shown.output


def test_options_in_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    lines = [
        f'model = "{folder / "net.onnx"}"', f'dataset = "{folder / "data.zarr"}"', 'loss = "dice_ce"',
        'memory = "4GiB"', "threads = 1", 'engine = "onnxruntime"', "batch-size = 3", "shuffle = false",
        'parallel = {space = [2, 1, 1]}', 'inputs = {image = "image"}', f'workdir = "{tmp_path / "c.run"}"',
        "class_weights = [1, 2, 2, 2]", f'out = "{tmp_path / "made.zarr"}"',
    ]  # fmt: skip
    config.write_text("\n".join(lines))
    code, out, err = run(capsys, "plan", "--config", config, "--json")
    assert code == 0, err
    asked = json.loads(out)
    plan = oocdl.plan(
        folder / "net.onnx", folder / "data.zarr", memory="4GiB", threads=1, engine="onnxruntime",
        batch_size=3, parallel={"space": (2, 1, 1)},
        loss=oocdl.losses.DiceCE(cross_entropy=oocdl.losses.CrossEntropy(class_weights=(1, 2, 2, 2))),
    )  # fmt: skip
    assert asked["step"]["flops"] == plan.flops and asked["step"]["tasks"] == plan.tasks
    out = run(capsys, "plan", "--config", config, "--batch-size", 1)[1]
    assert "one step of batch 1" in out, "what is typed goes first"
    code, out, err = run(capsys, "fit", "--config", config, "--steps", 1, "--no-progress")
    assert code == 0 and out.startswith(f"{tmp_path / 'c.run'}: 1 step"), err
    code, out, err = run(capsys, "evaluate", tmp_path / "c.run", "--config", config, "--json")
    assert code == 0 and json.loads(out)["loss"] > 0, err
    code, out, err = run(capsys, "predict", tmp_path / "c.run", "--config", config)
    assert code == 0 and str(tmp_path / "made.zarr") in out, err
    for text, told in [
        ("epochz = 3", r"has 'epochz', which is no option \(did you mean 'epochs'\?\)"),
        ("learning_rate = 3", "has 'learning_rate', which is no option: it is called 'lr' here"),
        ("epochs = ", "is no TOML"),
        ('epochs = "many"', "--epochs"),
        ("steps = true", "run.toml: 'steps' takes one text or number, got True"),
        ("lr = true", "'lr' takes one text or number, got True"),
        ("steps = 1.5", "--steps"),
        ("steps = [3]", "--steps"),
        ("spill = false", "'spill' takes one text or number, got False"),
        ("validation = [0.2]", "an index of validation must be a whole number, got 0.2"),
        ("strict = 1", "'strict' takes true or false, got 1"),
        ('restart = "no"', "'restart' takes true or false, got no"),
        ("freeze = true", "'freeze' takes texts, got True"),
        ('metrics = ["dice", true]', r"'metrics' takes texts, got \['dice', True\]"),
        ("parallel = {batch = [2, 3]}", r"parallel\['batch'\] must be a whole number, got \[2, 3\]"),
        ('workdir = ["a"]', r"workdir takes a path, got \['a'\]"),
        ("batch_size = 1\nbatch-size = 2", "has 'batch-size' twice, once with '_'"),
        ("hours = 1", "--hours goes with --preset"),
    ]:
        config.write_text(text)
        code, out, err = run(capsys, "fit", folder / "net.onnx", folder / "data.zarr", "--config", config)
        assert code == InputError.exit_code and out == "" and re.search(told, err), err
        assert err.count("\n") == 1
    code, _, err = run(capsys, "plan", "--config", tmp_path / "none.toml")
    assert code == InputError.exit_code and "cannot be read" in err


def test_a_history_is_written_elsewhere_too(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = ("fit", folder / "net.onnx", folder / "data.zarr", *TINY, "--steps", 2, "--no-progress")
    log = tmp_path / "losses.csv"
    code, _, err = run(capsys, *fit, "--workdir", tmp_path / "run", "--log", f"csv={log}")
    assert code == 0 and len(log.read_text().splitlines()) == 3, err
    two = [word for name in ("a", "b") for word in ("--log", f"csv={tmp_path / name}")]
    code, _, err = run(capsys, *fit, "--workdir", tmp_path / "two", *two)
    assert code == 0 and (tmp_path / "a").read_text() == (tmp_path / "b").read_text(), err
    code, _, err = run(capsys, *fit, "--workdir", tmp_path / "run", "--log", "wandb=x")
    assert code == InputError.exit_code and "no 'wandb', only csv, tensorboard, mlflow" in err


def test_a_report_complains_of_nothing(folder: Path, tmp_path: Path) -> None:
    done = python("-m", "oocdl", "report", folder / "net.run", "--out", tmp_path / "page.html")
    assert done.stderr == f"the page is in {tmp_path / 'page.html'}\n"


# --- after Ctrl-C ------------------------------------------------------------------------


def test_ctrl_c_says_what_is_true(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, data, work = folder / "net.onnx", folder / "data.zarr", folder / "net.run"

    def stop(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("oocdl.cli.verbs.plan_run", stop)
        code, _, err = run(capsys, "plan", net, data)
        assert (code, err) == (130, "oocdl: interrupted; nothing was changed\n")
    with monkeypatch.context() as patch:
        patch.setattr("oocdl.training.trainer.job_of", stop)
        code, _, err = run(capsys, "fit", net, data, *TINY, "--workdir", tmp_path / "new.run")
        assert err == "oocdl: interrupted; no step was done, nothing was changed\n"
        assert code == 130 and not (tmp_path / "new.run").exists()
    with monkeypatch.context() as patch:
        patch.setattr("oocdl.training.loop.Trainer._step", stop)
        code, _, err = run(capsys, "fit", net, data, *TINY, "--steps", 9, "--workdir", work)
        told = f"oocdl: interrupted; 3 steps are committed in {work}; the same command goes on"
        assert code == 130 and err.splitlines()[-1] == told
    with monkeypatch.context() as patch:
        patch.setattr(look, "open_run", stop)
        for words in (("evaluate", work, data), ("export", work, tmp_path / "o.onnx")):
            assert run(capsys, *words)[2] == "oocdl: interrupted; nothing was changed\n"
    with monkeypatch.context() as patch:
        patch.setattr(Predictions, "note", stop)
        out = tmp_path / "out.zarr"
        assert run(capsys, "predict", work, data, out)[2] == (
            f"oocdl: interrupted; {out} is unfinished, the same command goes on\n"
        )
    assert run(capsys, "predict", work, data, out)[0] == 0


REMOVED = "the old run in {} was removed, no step of the new one is committed"
STOPPED_AS_IT_RESTARTS = {
    "trainer.job_of": "no step was done, nothing was changed",
    "trainer.prepared": REMOVED,
    "loop.Trainer._step": "0 steps are committed in {}; the same command without --restart goes on",
}


@pytest.mark.parametrize("place", STOPPED_AS_IT_RESTARTS)
def test_ctrl_c_says_whether_the_run_before_a_restart_is_there(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    net = Path(shutil.copy(folder / "net.onnx", tmp_path))
    work = shutil.copytree(folder / "net.run", tmp_path / "net.run")
    (tmp_path / "restart.toml").write_text("restart = true\n")

    def stop(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"oocdl.training.{place}", stop)
    again = *TINY, "--no-progress", "--config", tmp_path / "restart.toml"
    code, _, err = run(capsys, "fit", net, folder / "data.zarr", *again)
    told = STOPPED_AS_IT_RESTARTS[place].format(work)
    assert (code, err) == (130, f"oocdl: interrupted; {told}\n")
    assert oocdl.open(work).steps == (3 if "nothing was changed" in told else 0)


def read_from(terminal: int) -> bytes:
    """What a terminal shows within a second; nothing when the process at its other end is gone."""
    if not select.select([terminal], [], [], 1)[0]:
        return b""
    try:
        return os.read(terminal, 4096)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""


def test_a_terminal_is_not_blank_while_a_run_is_planned(folder: Path, tmp_path: Path) -> None:
    """On a terminal of 80 columns: it says that it plans before it has planned, and no line is cut."""
    script = "import sys; from oocdl.cli.app import main; main(sys.argv[1:])"
    given = (folder / "net.onnx", folder / "data.zarr", *TINY)
    words = ("fit", *given, "--steps", "4000", "--workdir", tmp_path / "t")
    env = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    outer, inner = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", script, *map(str, words)], stderr=inner, stdout=inner, stdin=inner, env=env
    ) as process:
        os.close(inner)
        shown, deadline = b"", time.monotonic() + 200
        while b"loss" not in shown and time.monotonic() < deadline:
            shown += read_from(outer)
        process.send_signal(signal.SIGINT)
        while process.poll() is None and time.monotonic() < deadline:
            shown += read_from(outer)
    os.close(outer)
    assert process.returncode == 130
    assert shown.index(b"planning ..") < shown.index(b"4000 steps in")
    assert "…".encode() not in shown
