"""The command line: every verb on tiny data, one line and the right exit code for every error."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx
import pytest
import zarr
from onnx import helper
from typer.main import get_group
from typer.testing import CliRunner

import oocdl
from oocdl.cli import app, look, verbs
from oocdl.cli.cluster import WORKER_OPTIONS
from oocdl.cli.demo import CLASSES, write_volumes
from oocdl.cli.texts import flag
from oocdl.cli.verb_options import IN_PYTHON_ONLY, in_flags
from oocdl.config import OPTIONS, make_settings
from oocdl.config import options as typed
from oocdl.errors import InputError, ModelWarning, ResourceError, StoreError
from oocdl.losses import CrossEntropy, DiceCE
from oocdl.ops.optimizers import Optimizer
from oocdl.ops.schedules import Rate
from oocdl.optim import SGD, Adam, AdamW, Cosine, CosineRestarts, Exponential, MultiStep, WarmUp
from oocdl.presets.unets import write_unet3d
from oocdl.report.plan_view import Plan
from oocdl.training.call import ALL_OPTIONS
from oocdl.training.signature import records_of
from oocdl.transforms import RandFlip
from tests.kit import nets
from tests.kit.commands import python, run

SIZE = 16
TINY = ("--loss", "dice_ce", "--memory", "4GiB", "--threads", "1", "--lr", "0.01")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a dataset and a trained run."""
    root = tmp_path_factory.mktemp("cli")
    write_unet3d(root / "net.onnx", classes=len(CLASSES), base=2, depth=1)
    write_volumes(root / "data.zarr", samples=3, size=SIZE, seed=0)
    arguments = ["fit", str(root / "net.onnx"), str(root / "data.zarr"), "--steps", "3", "--no-progress"]
    assert app.run_command([*arguments, *TINY], debug=True) == 0
    return root


def test_a_full_disk_under_the_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "oocdl", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == ResourceError.exit_code
    assert done.stderr.startswith("oocdl: no space left for the output") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("closed", "out"), [(">&-", 0), (">&- 2>&-", 0), ("2>&-", 1)])
def test_output_that_is_closed_is_no_error(closed: str, out: int) -> None:
    command = f"{shlex.quote(sys.executable)} -m oocdl --version {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"oocdl {oocdl.__version__}\n" * out, "")


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("latin-1", ("plan", "net.onnx", "data.zarr", "--engine", "numpy", *TINY)),
        ("ascii", ("info", "net.onnx")),
    ],
)
def test_a_table_is_shown_in_an_encoding_that_lacks_its_signs(
    folder: Path, encoding: str, words: tuple[str, ...]
) -> None:
    env = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(Path(oocdl.__file__).parents[1])}
    command = [sys.executable, "-m", "oocdl", *words]
    done = subprocess.run(command, capture_output=True, env=env, cwd=folder)
    assert (done.returncode, done.stderr) == (0, b"") and b"net.onnx" in done.stdout


def test_a_disk_error_is_no_internal_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/a/file")

    monkeypatch.setattr(look, "verify_run", fails)
    assert refused(capsys, "verify", "x") == (
        StoreError.exit_code,
        "oocdl: cannot read or write /a/file: Permission denied; check its permissions",
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    code, out, err = run(capsys, *arguments)
    assert out == ""
    assert err.startswith("oocdl: ") and err.count("\n") == 1, err
    return code, err.strip()


def test_help_names_every_verb() -> None:
    shown = CliRunner().invoke(app.app, ["--help"]).output
    for verb in ("fit", "search", "plan", "predict", "evaluate", "export", "info", "cluster", "demo"):
        assert re.search(rf"^\W*{verb}\b", shown, re.MULTILINE), verb


def test_every_option_says_what_it_is() -> None:
    commands = get_group(verbs.app).commands.items()
    found = {(name, one.name): one.help for name, command in commands for one in command.params[1:]}
    assert not [place for place, told in found.items() if len(told or "") < 8]


def test_messages_name_options_that_there_are() -> None:
    commands = get_group(verbs.app).commands.values()
    flags = {text for command in commands for one in command.params for text in one.opts}
    for name in ALL_OPTIONS:
        told = in_flags(f"pass {name}=1")
        assert told.split()[1] in flags or (name in IN_PYTHON_ONLY and told == f"pass {name}=1")


def test_help_loads_no_library(tmp_path: Path) -> None:
    code = """import sys
from oocdl.cli.app import run_command
run_command(["--help"], False)
print({"dask", "onnx", "zarr", "oocdl.planning", "oocdl.engines"} & sys.modules.keys())"""
    assert python("-c", code, folder=tmp_path).stdout.splitlines()[-1] == "set()"


def test_nothing_at_all_is_a_request_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        app.main([])
    assert left.value.code == 0
    assert "Usage: oocdl" in capsys.readouterr().out


def test_fit_prints_plain_lines_and_the_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = folder / "plain.run"
    code, out, err = run(
        capsys, "fit", folder / "net.onnx", folder / "data.zarr", *TINY, "--epochs", 2, "--batch-size", 2,
        "--workdir", work, "--parallel", "batch=2,space=2x1x1", "--seed", 7, "--no-shuffle",
    )  # fmt: skip
    assert code == 0
    assert re.fullmatch(rf"{re.escape(str(work))}: 4 steps, loss \d\.\d+\n", out)
    lines = err.splitlines()
    assert lines[0] == f"4 steps in {work}"
    assert lines[1] == "dataset: 'labels' is the target of 'logits'"
    assert lines[2].startswith("trained: 28 tensors, 1,260 parameters (float initializer × 28)")
    assert lines[3].startswith("step 1/4, epoch 1, loss ") and " of 4096 MiB" in lines[3]
    assert lines[-2].startswith("step 4/4, epoch 2, loss ")
    assert lines[-1].startswith("finished 4 steps in ")
    assert "\x1b" not in err


def test_fit_goes_on_or_refuses_or_starts_anew(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = folder / "again.run"
    fit = ("fit", folder / "net.onnx", folder / "data.zarr", *TINY, "--workdir", work)
    assert run(capsys, *fit, "--steps", 2)[0] == 0
    code, _, err = run(capsys, *fit, "--steps", 3)
    assert code == 0 and "3 steps in" in err and "2 of them done" in err and "3 steps, 1 of them in" in err
    _, line = refused(capsys, *fit, "--steps", 3, "--batch-size", 2, "--no-progress")
    assert line.endswith("; choose another workdir, or --restart")
    code, line = refused(capsys, *fit, "--steps", 3, "--no-resume", "--no-progress")
    assert code == StoreError.exit_code and "already" in line
    code, out, _ = run(capsys, *fit, "--steps", 1, "--restart")
    assert code == 0 and ": 1 step, loss" in out


def test_verify_and_repair(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = tmp_path / "copy.run"
    shutil.copytree(folder / "net.run", work)
    code, out, _ = run(capsys, "verify", work)
    assert code == 0
    assert re.fullmatch(rf"{work}: sound \(step 3; \d+ arrays, \d+ chunks, .* MiB read\)\n", out)
    chunk = next((work / "weights").glob("t00000/e*-v3/c*"))
    chunk.write_bytes(chunk.read_bytes()[:-1])
    code, out, _ = run(capsys, "verify", work)
    assert code == StoreError.exit_code and "of step 3: " in out and "damaged in 1 place" in out
    code, out, _ = run(capsys, "repair", work)
    assert code == 0 and "are lost: array" in out and out.endswith("(step 0)\n")
    assert run(capsys, "verify", work)[0] == 0
    code, line = refused(capsys, "repair", tmp_path)
    assert code == StoreError.exit_code and "is not a run" in line


def test_plan_draws(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what, before = ("plan", folder / "net.onnx", folder / "data.zarr", *TINY, "--plot"), {*folder.iterdir()}
    code, out, _ = run(capsys, *what, folder / "plan.svg")
    assert {*folder.iterdir()} - before == {folder / "plan.svg"}, "nothing runs"
    assert code == 0 and "tasks a step" in out and out.endswith(f"picture {folder / 'plan.svg'}\n")
    assert "</svg>" in (folder / "plan.svg").read_text()
    code, line = refused(capsys, *what, folder / "plan.txt")
    assert code == InputError.exit_code and "plan.txt" in line


def test_predict_evaluate_and_export(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work, data = folder / "net.run", folder / "data.zarr"
    code, out, _ = run(capsys, "predict", work, data, folder / "out.zarr", "--memory", "4GiB")
    assert code == 0 and out == f"{folder / 'out.zarr'}/logits: 3 × 4 × 16 × 16 × 16 float32\n"
    logits = zarr.open_group(folder / "out.zarr", mode="r")["logits"]
    assert isinstance(logits, zarr.Array)
    assert np.isfinite(np.asarray(logits[:])).all() and np.asarray(logits[:]).std() > 0
    code, out, _ = run(capsys, "evaluate", work, data, "--memory", "4GiB", "--targets", "logits=labels")
    assert code == 0 and re.match(r"loss \d", out)
    table = folder / "table.csv"
    asked = ("evaluate", work, data, "--memory", "4GiB", "--metrics", "dice,confusion", "--per-sample", table)
    code, out, _ = run(capsys, *asked)
    lines = [line for line in out.splitlines() if re.fullmatch(r"(confusion )?(\d+ ){3}\d+", line)]
    counts = [line.split()[-4:] for line in lines]
    assert code == 0 and np.array(counts, int).sum() == 3 * 16**3
    assert out.endswith(": a row for each sample\n")
    assert re.match(r"sample,loss,dice,dice/0,.*\n0,\d\.\d+,", table.read_text())
    code, out, _ = run(capsys, *asked[:-2], "--json")
    assert code == 0 and json.loads(out)["confusion"] == np.array(counts, int).tolist()
    code, out, _ = run(capsys, "export", work, folder / "trained.onnx")
    assert code == 0 and out.startswith(str(folder / "trained.onnx"))
    tensors = [onnx.load(folder / name).graph.initializer for name in ("net.onnx", "trained.onnx")]
    old, new = ({one.name: onnx.numpy_helper.to_array(one) for one in each} for each in tensors)
    assert old.keys() == new.keys()
    assert any((old[name] != new[name]).any() for name in old)


def test_plan_shows_a_pass_as_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("plan", folder / "net.onnx", folder / "data.zarr", *TINY, "--parallel", "space=2", "--show")
    code, out, _ = run(capsys, *command, "layers")
    assert code == 0 and out.startswith("000 ") and "\n\n001 " in out and " units = space0:2, " in out
    (block, *_) = [block for block in out.split("\n\n") if "Conv" in block]
    first, name = re.findall(r"^(\d+) (\S+)  ", block)[0]
    for what, words in (
        ("graph", r"down1\.conv1 +f32\[1,2,16,16,16\] +.*= Conv\(image, down1\.conv1\.weight\)"),
        ("program", r"= Conv\(%\d+.*\.pad\("),
        ("tasks", r"image\[0:9,:,:\] +\(input\)"),
    ):
        code, out, _ = run(capsys, *command, what, "--layer", name)
        assert code == 0 and re.search(words, out), out
    assert run(capsys, *command, what, "--layer", first) == (0, out, "")
    code, line = refused(capsys, *command, "layers", "--layer", name[:-1] + "_")
    assert code == InputError.exit_code and "did you mean " in line and repr(name) in line


def test_info_of_a_model_says_what_fit_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [
        helper.make_node("Unique", ["x"], ["a"], "/once"),
        helper.make_node("Det", ["a"], ["b"], "/one/det"),
        helper.make_node("Det", ["b"], ["c"], "/two/det"),
        helper.make_node("Mul", ["c", "slope"], ["d"], "/mul"),
        helper.make_node("Relu", ["x"], ["y"], "/relu"),
    ]
    weights = {"slope": np.ones(1, "f4")}
    path = nets.save(tmp_path / "no.onnx", nodes, weights, ["batch", "wide"], {"y": ["batch", "w"]})
    code, out, _ = run(capsys, "info", path, "--dims", "wide=5")
    assert code == 0 and "read for x: 2 × 5 (assumed: batch=2; --dims gives others)" in out
    assert "fit refuses this model: 3 nodes are not supported: '/once' (Unique" in out
    assert "); Det × 2, first '/one/det'; docs/reference/operators.md" in out
    assert re.search(r"Det .* no: Det × 2, first", out) and re.search(r"Unique .* no: '/once'", out)
    assert re.search(r"Relu +│ +1 │ yes", out)
    code, line = refused(capsys, "info", path, "--dims", "long=5")
    assert code == InputError.exit_code and "'long'" in line
    assert "go with a model" in refused(capsys, "info", tmp_path, "--weights")[1]


def test_info_lists_the_weights_of_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info", folder / "net.onnx", "--weights")
    assert code == 0 and "trained: 28 tensors, 1,260 parameters" in out
    assert re.search(r"down1.conv1.weight +│ 2 × 1 × 3 × 3 × 3 +│ trained +│ float initializer", out)
    assert "down1.conv1.weight" not in run(capsys, "info", folder / "net.onnx")[1]


def test_what_looks_wrong_is_said_and_refused_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [helper.make_node("Add", ["x", "pe"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["y"])]
    weights = {"pe": np.ones(6, "f4"), "w": np.ones((6, 3), "f4")}
    model = nets.save(tmp_path / "m.onnx", nodes, weights, ["batch", 6], {"y": ["batch", 3]})
    data = nets.write_data(tmp_path / "data.zarr", nets.vectors())
    given = (model, data, "--memory", "4GiB", "--threads", 1, "--engine", "onnxruntime", "--steps", 1)
    said = "1 tensor is trained that may be a buffer of the module ('pe')"
    code, out, _ = run(capsys, "plan", *given)
    assert code == 0 and "trained: 2 tensors, 24 parameters" in out and f"LOOKS WRONG: {said}" in out
    code, line = refused(capsys, "plan", *given, "--strict")
    assert code == InputError.exit_code and said in line and "--freeze pe leaves" in line
    code, _, err = run(capsys, "fit", *given)
    assert code == 0 and err.index(said) < err.index("step 1/1")
    with pytest.warns(ModelWarning, match=r"may be a buffer .* freeze=\['pe'\]"):
        assert run(capsys, "fit", *given, "--restart", "--no-progress")[0] == 0
    code, out, _ = run(capsys, "plan", *given, "--strict", "--freeze", "pe")
    assert code == 0 and "frozen: 1 tensor, 6 parameters (freeze pattern 'pe' × 1)" in out


def test_hostile_names_of_a_model_stay_text_wherever_they_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;owned\x07\x9b31m[bold]"
    nodes = [helper.make_node("MatMul", ["x", f"w{evil}"], [f"y{evil}"], f"node{evil}")]
    weights = {f"w{evil}": np.ones((6, 3), "f4")}
    model = nets.save(tmp_path / "m.onnx", nodes, weights, ["batch", 6], {f"y{evil}": ["batch", 3]})
    loaded = onnx.load(model)
    loaded.producer_name = evil
    onnx.save(loaded, model)
    data = nets.write_data(tmp_path / "data.zarr", nets.vectors())
    given = ("--memory", "4GiB", "--threads", 1, "--engine", "onnxruntime")
    for command in (
        ("info", model, "--weights"),
        ("plan", model, data, *given),
        ("plan", model, data, *given, "--show", "graph"),
        ("plan", model, data, *given, "--strict", "--freeze", "nothing"),
        ("fit", model, data, *given, "--steps", 1),
        ("evaluate", tmp_path / "m.run", data, "--memory", "4GiB"),
        ("info", tmp_path / "m.run"),
    ):
        code, out, err = run(capsys, *command)
        assert code == (2 if "nothing" in command else 0), err
        assert not {"\x1b", "\x07", "\x9b"}.intersection(out + err), command
        assert command[:2] != ("info", model) or "[bold]" in out


FIT = ("fit", "{}/net.onnx", "{}/data.zarr")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["fit", "{}/none.onnx", "{}/data.zarr"], 2, "none.onnx"),
        (["fit", "{}/net.onnx", "{}/none.zarr"], 2, "there is no dataset"),
        (["fit", "{}/net.onnx", ""], 2, "there is no dataset ''"),
        ([*FIT, "--workdir", ""], 2, "workdir takes a path, got ''"),
        ([*FIT, "--plan", ""], 2, "plan takes a path, got ''"),
        (["info", "{}/net.onnx", "--dims", "batch=0"], 2, "dims['batch'] must be at least 1"),
        ([*FIT, "--validation-freq", "2"], 2, "validation_freq is of a validation; pass --validation"),
        ([*FIT, "--validation-steps", "2"], 2, "validation_steps is of a validation; pass --validation"),
        ([*FIT, "--inputs", "image"], 2, "--inputs takes name=value"),
        ([*FIT, "--dims", "depth=deep"], 2, "--dims takes name=number"),
        ([*FIT, "--inputs", "image=a", "--inputs", "image=b"], 2, "--inputs has 'image' twice"),
        ([*FIT, "--targets", "logits=a, logits=b"], 2, "--targets has 'logits' twice"),
        ([*FIT, "--loss", "a=dice,a=mse"], 2, "--loss has 'a' twice"),
        ([*FIT, "--parallel", "batch=1,batch=2"], 2, "--parallel has 'batch' twice"),
        ([*FIT, "--parallel", "batch=2x3"], 2, "--parallel takes"),
        ([*FIT, "--restart", "--no-resume"], 2, "--restart and --no-resume contradict"),
        ([*FIT, "--folds", "0"], 2, "--folds goes with --preset"),
        ([*FIT, "--hours", "3"], 2, "--hours goes with --preset"),
        ([*FIT, "--parallel", "space=2xx"], 2, "--parallel takes"),
        ([*FIT, "--parallel", "depth=2"], 2, "batch, space, channels"),
        ([*FIT, "--stpes", "2"], 2, "--stpes"),
        ([*FIT, "--momentum", "1"], 2, "adam has no --momentum; it has --weight-decay, --clip-norm"),
        ([*FIT, "--schedule", "cos"], 2, "--schedule takes cosine"),
        ([*FIT, "--schedule", "step:0.5"], 2, "--schedule takes cosine"),
        ([*FIT, "--schedule", "polynomial:x"], 2, "; got 'polynomial:x'"),
        ([*FIT, "--schedule", "step:3:"], 2, "FACTOR]; got 'step:3:'"),
        ([*FIT, "--schedule", "cosine:"], 2, "FACTOR]; got 'cosine:'"),
        ([*FIT, "--class-weights", "a"], 2, "--class-weights takes numbers"),
        ([*FIT, "--loss", "bce", "--class-weights", "1,2"], 2, "bce has no --class-weights; it has none"),
        (
            [*FIT, "--loss", "a=dice_ce", "--class-weights", "1,2"], 2,
            "--class-weights go with one loss by name; several are for oocdl.losses, in Python",
        ),
        ([*FIT, "--loss", "dise", "--ignore-index", "1"], 2, "mean 'dice'"),
        ([*FIT, "--loss", "a=dice:heavy"], 2, "output=loss:weight"),
        (["plan", "{}/net.onnx", "{}/data.zarr", "--hosts", "many"], 2, "--hosts takes whole numbers"),
        (["fit", "{}/net.onnx"], 2, "dataset"),
        ([*FIT, "--steps", "many"], 2, "--steps"),
        (["train"], 2, "train"),
        (["plan", "{}/net.onnx", "{}/data.zarr", "--memory", "1MiB"], 4, "would do"),
        (["plan", "{}/net.onnx", "{}/data.zarr", "--show", "layer"], 2, "--show"),
        (["plan", "{}/net.onnx", "{}/data.zarr", "--layer", "0"], 2, "--layer goes with --show"),
        (["predict", "{}/data.zarr", "{}/data.zarr", "{}/o.zarr"], 3, "is not a run"),
        (["export", "{}/nothing.run", "{}/o.onnx"], 3, "is not a run"),
        (["info", "{}/nothing"], 2, "nothing"),
        (["dashboard", "{}/net.run", "--port", "99999"], 2, "--port"),
    ],
)  # fmt: skip
def test_errors_are_one_line_with_an_exit_code(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    found, line = refused(capsys, *(argument.format(folder) for argument in arguments))
    assert (found, words.lower() in line.lower()) == (code, True), line


def test_debug_shows_the_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        app.main(["export", str(folder / "none.run"), str(folder / "o.onnx"), "--debug"])
    err = capsys.readouterr().err
    assert left.value.code == StoreError.exit_code
    assert "Traceback" in err and err.splitlines()[-1].startswith("oocdl: ")


def test_an_unforeseen_error_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise ZeroDivisionError("of\nall things")

    monkeypatch.setattr(look, "open_run", fail)
    code, line = refused(capsys, "export", "a.run", "b.onnx")
    assert code == 1
    assert line == "oocdl: internal error: ZeroDivisionError: of all things; --debug shows where"


def test_ctrl_c_exits_130(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "fit_run", stop)
    code, line = refused(capsys, "fit", folder / "net.onnx", folder / "data.zarr")
    assert code == 130 and line == "oocdl: interrupted; no step was done, nothing was changed"


TEXTS: dict[Any, tuple[object, object]] = {
    int: (7, 7),
    int | None: (7, 7),
    float: (5, 5.0),
    Rate | None: (0.5, 0.5),
    str: ("numpy", "numpy"),
    str | Optimizer: ("sgd", "sgd"),
    typed.LossLike: ("dice", "dice"),
    typed.Size | None: ("3GiB", "3GiB"),
    Literal["bfloat16"] | None: ("bfloat16", "bfloat16"),
    typed.Names: ("a*", ("a*",)),
    typed.Augment: ("RandFlip(0.5, (0, 1))", [RandFlip(0.5, (0, 1))]),
    typed.Normalize: ("a=ct", {"a": "ct"}),
    typed.Validation: (0.25, 0.25),
    typed.Metrics: ("dice,iou", ("dice", "iou")),
    int | Sequence[int]: ("2,5", (2, 5)),
    typed.Pieces: ("batch=2", {"batch": 2}),
    Mapping[str, str] | None: ("a=b", {"a": "b"}),
    Mapping[str, int] | None: ("a=3", {"a": 3}),
    Mapping[str, float] | None: ("a=0.5", {"a": 0.5}),
    float | None: (0.5, 0.5),
    typed.ParamGroups: ("params=w*|b*,lr=.1", [{"params": ("w*", "b*"), "lr": 0.1}]),
    str | Path | None: ("p", Path("p")),
    Plan | str | Path | None: ("p", Path("p")),
}
"""Type of an option -> what is typed, and what comes of it."""
ALONE: list[tuple[tuple[object, ...], str, object]] = [
    (("--schedule", "cosine"), "optimizer", Adam(Cosine(0.001))),
    (("--warm-up", 5, "--lr", 0.1), "optimizer", Adam(WarmUp(0.1, 5))),
    (("--momentum", 0.9, "--optimizer", "sgd"), "optimizer", SGD(0.01, 0.9)),
    (("--nesterov", "--optimizer=sgd", "--momentum=0.9"), "optimizer", SGD(0.01, 0.9, nesterov=True)),
    (("--weight-decay", 0.1), "optimizer", Adam(weight_decay=0.1)),
    (("--weight-decay", 0, "--optimizer", "adamw"), "optimizer", AdamW(weight_decay=0.0)),
    (("--clip-norm", 2), "optimizer", Adam(clip_norm=2.0)),
    (("--clip-value", 2), "optimizer", Adam(clip_value=2.0)),
    (("--schedule", "multi_step:3:7"), "optimizer", Adam(MultiStep(0.001, (3, 7)))),
    (("--schedule", "exponential:.9"), "optimizer", Adam(Exponential(0.001, 0.9))),
    (("--schedule", "cosine_restarts:3:2"), "optimizer", Adam(CosineRestarts(0.001, 3, 2))),
    (("--label-smoothing", 0.1), "loss", CrossEntropy(label_smoothing=0.1)),
    (("--class-weights", "1,2.5"), "loss", CrossEntropy(class_weights=(1.0, 2.5))),
    (("--ignore-index", 255, "--loss", "dice_ce"), "loss", DiceCE(cross_entropy=CrossEntropy(255))),
    (("--ignore-index", 0), "loss", CrossEntropy(0)),
    (("--no-resume",), "resume", False),
    (("--restart",), "resume", "restart"),
    (("--dashboard",), "dashboard", True),
    (("--dashboard-port", 8765), "dashboard", 8765),
]
"""Options that become another, or go with others."""

IN_FILES: list[tuple[str, str, object]] = [
    ("validation = [0, 1]", "validation", [0, 1]),
    ("validation = [3]", "validation", [3]),
    ('loss = {seg = ["dice", 0.5], edge = "bce"}', "loss", {"seg": ["dice", 0.5], "edge": "bce"}),
    ("parallel = {batch = 2, space = [3, 2, 1]}", "parallel", {"batch": 2, "space": [3, 2, 1]}),
    ("validation_freq = 3", "validation_freq", 3),
    ("validation_freq = [3]", "validation_freq", [3]),
    ("validation_freq = [1, 3]", "validation_freq", [1, 3]),
    ('metrics = "dice"', "metrics", ("dice",)),
    ('freeze = "w1"', "freeze", ("w1",)),
    ('workdir = "~/x"', "workdir", Path.home() / "x"),
]
"""Lines of a file, and what comes of them."""


def test_every_option_of_fit_reaches_its_setting(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[dict[str, Any]] = []

    def stop(**options: Any) -> None:
        given.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "fit_run", stop)
    fit = ("fit", folder / "net.onnx", folder / "data.zarr")
    words, expected = list[object](), dict[str, Any]()
    for name, record in verbs.FIT.items():
        if name in ("model", "dataset", "progress", "resume", "dashboard"):
            continue
        if record.type is bool:
            expected[name] = not record.default
            words.append(flag(name if expected[name] else f"no_{name}"))
        else:
            text, expected[name] = TEXTS.get(record.type) or get_args(record.type)[-1:] * 2
            words += [flag(name), text]
    expected["spill"] = "p"
    alone = {str(one[0][0])[2:].removeprefix("no-").replace("-", "_") for one in ALONE}
    others = {*alone, *WORKER_OPTIONS, *verbs.ACTING, "model", "dataset", "progress", "config", "log"}
    others |= {"context", "preset", "folds", "hours"}
    assert inspect.signature(verbs.fit).parameters.keys() - others == expected.keys()
    refused(capsys, *fit)
    refused(capsys, *fit, *words)
    plain, full = given
    assert {name: full[name] for name in expected} == expected
    assert not [name for name in expected if plain[name] == expected[name]]
    for extra, name, value in ALONE:
        refused(capsys, *fit, *extra)
        assert given[-1][name] == value != plain[name]
    two = '["RandFlip(0.5, 1)", "nnunet"]', [RandFlip(0.5, 1), "nnunet"]
    for text, found in (('"nnunet"', ["nnunet"]), two):
        (listed := folder / "augment.toml").write_text(f"augment = {text}\n")
        refused(capsys, *fit, "--config", listed)
        assert given[-1]["augment"] == found
    for text, name, value in IN_FILES:
        (listed := folder / "words.toml").write_text(f"{text}\n")
        refused(capsys, *fit, "--config", listed)
        assert given[-1][name] == value
    (off := folder / "off.toml").write_text("momentum = 0\nclip-norm = 0.0\nnesterov = false\n")
    for extra in (("--momentum", 0), ("--clip-norm", 0), ("--config", off)):
        refused(capsys, *fit, *extra)
        assert (given[-1]["optimizer"], given[-1]["lr"]) == (plain["optimizer"], plain["lr"])
    for options in given:
        assert options.keys() <= records_of(oocdl.fit).keys()
        make_settings(**{name: value for name, value in options.items() if name in OPTIONS})


def test_the_demo_needs_no_framework(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from oocdl.cli.app import main; main()"
    demo = ("demo", "--folder", tmp_path / "demo", "--size", 16, "--steps", 3, "--memory", "1GiB")
    done = python("-c", code, *demo, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "engine onnxruntime" in done.stdout
    assert "step 3/3" in done.stdout and "Dice of unseen volumes  background " in done.stdout
    assert (tmp_path / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    again = python("-c", code, *demo, folder=tmp_path)
    assert again.returncode == 0, again.stderr


def test_the_demo_leaves_a_folder_of_others_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mine in ("thesis.txt", "unet.onnx"):
        (tmp_path / mine).write_text("all of it")
        code, line = refused(capsys, "demo", "--folder", tmp_path)
        assert code == InputError.exit_code and "--folder" in line
        assert [(tmp_path / mine).read_text() for mine in os.listdir(tmp_path)] == ["all of it"]
        (tmp_path / mine).unlink()
    code, line = refused(capsys, "demo", "--folder", tmp_path / "new", "--size", "50")
    assert code == InputError.exit_code and "multiple of 4" in line
    assert not (tmp_path / "new").exists()
