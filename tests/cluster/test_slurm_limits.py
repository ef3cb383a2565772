"""Limits of jobs: a walltime that ends in mid-epoch, and memory that a worker does not have."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import oocdl
from tests.kit import nets
from tests.kit import slurm as real
from tests.kit.slurm_runs import ended, finished, fit, in_step, log_of, over, steps_told, write_job

pytestmark = [pytest.mark.usefixtures("slurm"), pytest.mark.timeout(900)]
SAMPLES, EPOCHS = 4_000, 5
"""An epoch is longer than the test."""
CUT = ("--epochs", EPOCHS, "--parallel", "space=2")
WALLTIME_SECONDS = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small U-Net, and many volumes."""
    root = tmp_path_factory.mktemp("limits")
    write_job(root, SAMPLES)
    return root


def stopped(started: subprocess.Popen[str], run: Path) -> int:
    """Press Ctrl-C; returns how many steps are committed."""
    started.send_signal(signal.SIGINT)
    assert ended(started, run) == 130, log_of(run).read_text()
    return oocdl.open(run).steps


def equal_alone(folder: Path, run: Path) -> bool:
    """Whether one process makes the same bits in as many steps."""
    steps, alone = oocdl.open(run).steps, folder / f"{run.name}-alone"
    with fit(folder, alone.name, "--steps", steps, "--plan", run.name) as started:
        finished(started, alone, steps)
    return nets.files_of(oocdl.open(run)) == nets.files_of(oocdl.open(alone))


@pytest.mark.slow
def test_a_walltime_ends_in_mid_epoch(folder: Path) -> None:
    """Workers leave before that, their jobs are submitted again, and the run goes on."""
    run = folder / "walltime"
    words = (*CUT, "--cluster", "slurm", "--nodes", 2, "--walltime", "00:02:00")
    with fit(folder, run.name, *words) as started:
        in_step(run)
        first = [number for number, _, _ in real.jobs()]
        real.wait_until(
            lambda: sum(state == "RUNNING" for number, state, _ in real.jobs() if number > max(first)) == 2,
            2 * WALLTIME_SECONDS,
            "both jobs were submitted again",
        )
        in_step(run, steps_told(run) + 3)
        states = [real.run("scontrol", "show", "job", number) for number in first]
        assert stopped(started, run) < SAMPLES  # the first epoch is not over
    assert not any("JobState=TIMEOUT" in state for state in states), states
    assert equal_alone(folder, run)
    over()


def test_more_memory_than_a_job_has_is_refused_with_both_numbers(folder: Path) -> None:
    run, before = folder / "refused", time.monotonic()
    with fit(folder, run.name, *CUT, "--cluster", "slurm", "--memory", "3GiB") as started:
        assert ended(started, run) not in (0, 130)
    said = log_of(run).read_text()
    assert "3072 MiB" in said and "2048 MiB" in said and "Traceback" not in said
    assert "submitted" not in said and time.monotonic() - before < 60
    over()


HOG = "x = bytearray(64 << 20); input()"


@contextmanager
def squeezed(number: int, left_bytes: int) -> Iterator[Path]:
    """A job has only so much memory, and what takes more than is left of it kills its largest process.

    What that had may not be free at once: the next to be killed is what takes more, not the worker's nanny.
    """
    (cgroup,) = real.CGROUPS.glob(f"memory/slurm_*/uid_*/job_{number}")
    limit, before = cgroup / "memory.limit_in_bytes", (cgroup / "memory.limit_in_bytes").read_text()
    has = int(re.findall(r"^total_rss (\d+)", (cgroup / "memory.stat").read_text(), re.MULTILINE)[0])
    enter = f"echo $$ > {cgroup}/cgroup.procs; echo 300 > /proc/self/oom_score_adj"
    command = f"{enter}; exec {sys.executable} -c '{HOG}'"
    limit.write_text(str(has + (32 << 20)))
    hog = subprocess.Popen(["bash", "-c", command], stdin=subprocess.PIPE)
    try:
        real.wait_until(lambda: killed(cgroup) > 0, 60, "a process of the job was killed")
        hog.communicate(b"\n", timeout=60)
        limit.write_text(str(left_bytes) if left_bytes else before)
        yield cgroup
    finally:
        hog.kill()
        hog.wait()
        if limit.exists():
            limit.write_text(before)


def killed(cgroup: Path) -> int:
    """How many processes of a job the kernel has killed for memory."""
    found = [path.read_text() for path in cgroup.rglob("memory.oom_control")]
    return sum(int(count) for text in found for count in re.findall(r"^oom_kill (\d+)", text, re.MULTILINE))


@pytest.mark.slow
def test_a_worker_that_its_job_kills_for_memory_is_survived(folder: Path) -> None:
    run = folder / "killed"
    with fit(folder, run.name, *CUT, "--cluster", "slurm", "--nodes", 2) as started:
        in_step(run)
        number = real.jobs()[0][0]
        with squeezed(number, 0):
            real.wait_until(lambda: "go on from step" in log_of(run).read_text(), 60, "the loss is told")
        in_step(run, steps_told(run) + 3)
        assert number in [one for one, _, _ in real.jobs()]
        stopped(started, run)
    assert equal_alone(folder, run)
    over()


@pytest.mark.slow
def test_a_job_that_has_too_little_memory_for_good_ends_the_run(folder: Path) -> None:
    """Each new worker of it is killed as it starts, or left out, and no other job is to come."""
    run = folder / "small"
    with fit(folder, run.name, *CUT, "--cluster", "slurm", "--nodes", 1) as started:
        in_step(run)
        with squeezed(real.jobs()[0][0], 300 << 20):
            assert ended(started, run) not in (0, 130)
    said = log_of(run).read_text()
    assert "Traceback" not in said
    assert re.search(r"lost 10 times|none of .* \(1\) has room", said.splitlines()[-1])
    assert oocdl.open(run).steps > 0 and oocdl.verify(run).sound
    over()
