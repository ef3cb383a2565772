"""The command line and scripts, called in this process, and Python in one of its own, which takes seconds."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from oocdl.cli import app
from tests.kit.code import ROOT


def run(capsys: pytest.CaptureFixture[str], *arguments: object, debug: bool = False) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    capsys.readouterr()
    code = app.run_command([str(argument) for argument in arguments], debug)
    found = capsys.readouterr()
    return code, found.out, found.err


def script(path: Path, folder: Path, *words: str) -> str:
    """What a script prints that runs in ``folder``, and finds what stands beside it."""
    told = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(told), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [path.name, *words])
            patch.setenv("PYTHONPATH", str(ROOT))
            patch.syspath_prepend(path.parent)
            runpy.run_path(str(path), run_name="__main__")
    return told.getvalue()


def python(
    *words: object, folder: Path = ROOT, seconds: float = 250, group: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own that finds what this one does, with variables of its environment.

    ``group``: a cgroup that it enters before.
    """
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"] if group else []
    env, command = {**os.environ, "PYTHONPATH": paths, **variables}, [sys.executable, *map(str, words)]
    return subprocess.run(
        [*enter, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=seconds, check=False
    )
