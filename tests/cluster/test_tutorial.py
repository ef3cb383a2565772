"""Every command of `docs/tutorials/laptop-to-slurm.md`: jobs are processes here, or of a real Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import slurm as real
from tests.kit.batch import Batch
from tests.kit.code import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PAGE = (ROOT / "docs" / "tutorials" / "laptop-to-slurm.md").read_text()
SMALLER = {"demo --folder demo": "demo --folder demo --size 16 --steps 2 --memory 2GiB"}
"""Stand-ins: what takes a minute."""
SITE = "echo 'long*@2@6000@infinite@127.0.0.1'"


def blocks() -> list[tuple[str, str]]:
    return re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Each line of a shell block, and each Python block, as a command of bash."""
    found = []
    for language, block in blocks():
        if language == "python":
            found.append(f"{sys.executable} - <<'END'\n{block}END")
            continue
        for line in block.splitlines():
            assert line.startswith("oocdl ")
            for long, short in SMALLER.items():
                line = line.replace(long, short)
            found.append(f"{sys.executable} -m oocdl {line.removeprefix('oocdl ')}")
    return found


def test_the_page_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(tmp_path / "batch", "slurm", runs=True)
    batch.use(monkeypatch)
    sinfo = batch.folder / "bin" / "sinfo"
    sinfo.write_text(f"#!/bin/bash\n{SITE}\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("OOCDL_SITE", str(tmp_path / "site.toml"))
    run_all(tmp_path)
    assert batch.cancelled() == ["1", "2", "3", "4"] and batch.keys() == []


def test_the_page_is_run_on_a_real_slurm(
    slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the site file that ``oocdl cluster init`` writes there."""
    monkeypatch.setenv("OOCDL_SITE", str(tmp_path / "site.toml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run_all(tmp_path)
    real.wait_until(lambda: real.jobs() == [], 60, "all jobs are over")
    assert not list((tmp_path / "state").rglob("keys-*"))


def run_all(folder: Path) -> None:
    for command in commands():
        # The site file is made by one of the commands, and not there before.
        site = {} if (folder / "site.toml").exists() or "cluster init" in command else {"OOCDL_SITE": ""}
        how = {"cwd": folder, "env": {**os.environ, **site}, "capture_output": True, "text": True}
        done = subprocess.run(["bash", "-c", command], timeout=400, check=False, **how)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if "cluster show" in command:
            assert "#SBATCH --cpus-per-task=2" in done.stdout and "<keys>" in done.stdout
        if "--cluster slurm" in command:
            assert "step 6/6" in done.stderr and "ssh -L 8787" in done.stderr
            assert "step 3/6" not in done.stderr  # it goes on with what the laptop has done
