"""Each tutorial is run as a reader would run it: programs are saved, commands are typed, in a fresh folder.

Each has a process of its own, as budgets are told, and this one is as large as earlier tests have left it.
`tests/cluster/test_tutorial.py` runs the one that needs a cluster.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.code import ROOT

TUTORIALS = ROOT / "docs" / "tutorials"
NAMES = sorted({page.stem for page in TUTORIALS.glob("*.md")} - {"index", "laptop-to-slurm"})
BLOCK = re.compile(r"(?:^Save this as `([\w.]+)`:\n\n)?^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SKIPPED = ("pip install ", "jupyter lab")
"""Commands that prepare what the tests have already."""


def run(command: list[str], folder: Path) -> None:
    paths = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    env = {**os.environ, "PATH": paths, "PYTHONPATH": os.fspath(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_works_as_written(name: str, tmp_path: Path) -> None:
    cells = []
    for file, language, text in BLOCK.findall((TUTORIALS / f"{name}.md").read_text()):
        if file:
            (tmp_path / file).write_text(text)
        elif language == "python":
            cells.append(text)
        else:
            for line in text.splitlines():
                if not line.startswith(SKIPPED):
                    run(["bash", "-c", line], tmp_path)
    if cells:
        (tmp_path / "cells.py").write_text("\n".join(cells))
        run([sys.executable, "cells.py"], tmp_path)
