"""The command line and scripts, called in this process: a new one takes seconds until it has imported."""

from __future__ import annotations

import contextlib
import io
import runpy
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
