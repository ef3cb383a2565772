"""Commands of five batch systems that submit nothing: they keep the script, and what they were called with.

With ``runs`` a submitted job is a process of this machine, and cancelling it ends the process.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

SUBMITS = {"slurm": "sbatch", "pbs": "qsub", "sge": "qsub", "lsf": "bsub", "htcondor": "condor_submit"}
CANCELS = {"slurm": "scancel", "pbs": "qdel", "sge": "qdel", "lsf": "bkill", "htcondor": "condor_rm"}
ANSWERS = {
    "slurm": "Submitted batch job $id",
    "pbs": "$id.server",
    "sge": 'Your job $id (\\"oocdl\\") has been submitted',
    "lsf": "Job <$id> is submitted to queue <long>.",
    "htcondor": "1 job(s) submitted to cluster $id.",
}
SUBMIT = """#!/bin/bash
[ -e {folder}/refuse ] && cat {folder}/refuse >&2 && exit 1
exec 9> {folder}/lock; flock 9
id=$(( $(ls {folder} | grep -c '^script-') + 1 ))
script={folder}/script-$id
if [ $# -gt 0 ]; then cp "${{@: -1}}" $script; else cat > $script; fi
{run}
echo "{answer}"
"""
RUN = "setsid bash $script > {folder}/log-$id 2>&1 9>&- & echo $! > {folder}/pid-$id"
CANCEL = """#!/bin/bash
echo "$@" >> {folder}/cancelled
pid=$(cat {folder}/pid-${{1%%.*}} 2>/dev/null) && kill -9 -- -$pid
true
"""
LIST = """#!/bin/bash
for pid in {folder}/pid-*; do kill -0 $(cat $pid) 2>/dev/null && echo "  ${{pid##*-}}"; done
true
"""
"""Slurm's ``squeue``: a line for each job that is not over."""


class Batch:
    """A batch system in a folder: its commands are the only ones of their name on the path."""

    def __init__(self, folder: Path, system: str, runs: bool = False) -> None:
        self.folder = folder
        commands = folder / "bin"
        commands.mkdir(parents=True)
        run = RUN.format(folder=folder) if runs else ""
        submit = SUBMIT.format(folder=folder, run=run, answer=ANSWERS[system])
        texts = {SUBMITS[system]: submit, CANCELS[system]: CANCEL.format(folder=folder)}
        if runs and system == "slurm":
            texts["squeue"] = LIST.format(folder=folder)
        for name, text in texts.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Put the commands on the path, and keys, logs and site file of users elsewhere."""
        patch.setenv("PATH", f"{self.folder / 'bin'}:{os.environ['PATH']}")
        patch.setenv("XDG_STATE_HOME", str(self.folder / "state"))
        patch.setenv("XDG_CONFIG_HOME", str(self.folder / "config"))
        patch.delenv("OOCDL_SITE", raising=False)

    def refuse(self, words: str) -> None:
        """From now on, refuse each job with these words."""
        (self.folder / "refuse").write_text(words)

    def scripts(self) -> list[str]:
        """What was submitted."""
        count = len(list(self.folder.glob("script-*")))
        return [(self.folder / f"script-{number}").read_text() for number in range(1, count + 1)]

    def end(self, number: int) -> None:
        """End a job that runs, as a batch system does at its walltime: all of its processes, at once."""
        os.killpg(int((self.folder / f"pid-{number}").read_text()), signal.SIGKILL)

    def cancelled(self) -> list[str]:
        """Numbers of jobs that were cancelled."""
        file = self.folder / "cancelled"
        return sorted(file.read_text().split()) if file.exists() else []

    def keys(self) -> list[Path]:
        """Folders of keys that are there."""
        return list((self.folder / "state").glob("oocdl/keys-*"))
