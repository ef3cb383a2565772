"""The command line, called in this process."""

from __future__ import annotations

import pytest

from oocdl.cli import app


def run(capsys: pytest.CaptureFixture[str], *arguments: object, debug: bool = False) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    capsys.readouterr()
    code = app.run_command([str(argument) for argument in arguments], debug)
    found = capsys.readouterr()
    return code, found.out, found.err
