"""Random command lines, in this process: ``python -m tests.kit.command_lines 0 400``.

Each ends with a known exit code, and an error is one line. None trains for more than two steps.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from oocdl.cli import app, verbs
from oocdl.cli.app import run_command
from tests.kit import nets
from tests.kit.changed_files import TooSlow, little_time, try_all
from tests.kit.changed_models import one

CODES = (0, 2, 3, 4)
NOT_RUN = ("dashboard", "demo", "search")
"""What serves until Ctrl-C, or trains for long; their help and their errors of options are tried."""
WORDS = (
    *("0", "1", "-1", "2", "3", "1e-3", "nan", "inf", "1e400", "0x10", "", " ", "a", "-", "--", "x=1"),
    *("x=", "=x", "x=y=z", "1,2,3", "1,,2", "2x2", "batch=2", "space=2x1,channels=2", "batch=0"),
    *("1KiB", "512MiB", "1GiB", "10 parsecs", "-5GiB", "9" * 40, "ä\x1b[2J\n", "mse", "dice", "adam"),
    *("sgd", "y=mse:0.5", "y=mse,z=mse", "float64", "float32", "bfloat16", "numpy", "torch", "cosine"),
    *("w*", "[", "*", "auto", "off", ".", "..", "no/such/place", "a\0b"),
)
"""Values. No path leads out of the folder: what is written is written for good."""


def places(folder: Path) -> list[str]:
    """Write a model, a dataset, a run, and what may be mistaken for one of these."""
    (folder / "folder.onnx").mkdir()
    (folder / "bytes.onnx").write_bytes(b"\x08\x01")
    (folder / "options.toml").write_text('steps = 1\nloss = "mse"\n')
    (folder / "wrong.toml").write_text("steps = [")
    (folder / "empty").mkdir()
    nets.write_mlp(folder / "net.onnx")
    nets.write_data(folder / "data.zarr", nets.vectors())
    fit = ["fit", f"{folder}/net.onnx", f"{folder}/data.zarr", "--steps", "1", "--engine", "numpy"]
    code = run_command([*fit, "--memory", "2GiB", "--no-progress", "--workdir", str(folder / "run")], False)
    assert code == 0
    return [str(path) for path in sorted(folder.iterdir())]


def line(seed: int, folder: Path, there: list[str]) -> list[str]:
    """Return the words of a command line: mostly options that a command has, with values that are odd."""
    random = np.random.default_rng(seed)
    root: Any = app.get_group(verbs.app)
    group = dict(root.commands)
    cluster = group.pop("cluster")
    group |= {f"cluster {name}": command for name, command in cluster.commands.items()}
    name = one(random, sorted(group))
    options = [option for option in group[name].params if option.param_type_name == "option"]
    arguments = [option for option in group[name].params if option.param_type_name == "argument"]
    words = name.split()
    right = {"model": "net.onnx", "dataset": "data.zarr", "run": "run", "what": "run", "out": f"out{seed}"}
    for argument in arguments:
        if random.random() < 0.75 and argument.name in right:
            words.append(str(folder / right[argument.name]))
        elif random.random() < 0.8:
            words.append(one(random, (*there, *WORDS)))
    for _ in range(random.integers(0, 4)):
        option = one(random, options) if options else None
        words.append("--what" if option is None or random.random() < 0.03 else option.opts[0])
        if option is not None and not option.is_flag and random.random() < 0.95:
            words.append(one(random, (*there, *WORDS)) if random.random() < 0.8 else f"w{seed}")
    if random.random() < 0.05:
        words.insert(int(random.integers(len(words) + 1)), one(random, WORDS))
    defaults = {"steps": "1", "engine": "numpy", "memory": "1GiB", "workdir": str(folder / f"w{seed}")}
    for option in options:
        if option.name in defaults and option.opts[0] not in words and random.random() < 0.97:
            words += [option.opts[0], defaults[option.name]]
    long = name in NOT_RUN or "torch" in words or "--machine" in words or "--workers" in words
    return [*words, "x", "--help"] if long or "--cluster" in words or "--scheduler" in words else words


def tried(seed: int, folder: Path, there: list[str]) -> tuple[str, str]:
    """Run the command line of a seed; returns its exit code, and what it wrote where that must not be."""
    words, out, err = line(seed, folder, there), io.StringIO(), io.StringIO()

    def told(what: str) -> str:
        return f"{' '.join(map(repr, words))}: {what}".replace(str(folder), "")

    try:
        with little_time(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_command(words, debug=False)
    except (Exception, SystemExit, TooSlow) as error:
        return type(error).__name__, told(repr(error))
    said = err.getvalue()
    last = said.splitlines()[-1:] or [""]
    wrong = code not in CODES or (code in (2, 4) and not last[0].startswith("oocdl: "))
    wrong = wrong or any(text in said for text in ("internal error", "Traceback", "\x1b[2J"))
    return str(code), told(said[-2000:]) if wrong else ""


def main(first: int, last: int) -> None:
    """Try the command lines of seeds."""
    warnings.simplefilter("ignore")
    app.get_group = functools.cache(app.get_group)  # the commands are made once, as by a shell
    os.environ |= {"OOCDL_PLAN_CACHE": "off", "OOCDL_MEASURE": "off"}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        os.environ |= {"XDG_CACHE_HOME": f"{text}/cache", "XDG_CONFIG_HOME": f"{text}/config", "HOME": text}
        there = places(folder)
        os.chdir(folder / "empty")
        try_all(range(first, last), functools.partial(tried, folder=folder, there=there))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
