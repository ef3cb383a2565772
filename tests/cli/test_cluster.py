"""``fit --cluster`` and ``oocdl cluster``: options reach jobs, jobs end whatever happens, what users see."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed.deploy import Cluster

from oocdl.cli import cluster as commands
from oocdl.cli import verbs
from oocdl.cli.texts import flag
from oocdl.cluster.systems import job_script
from oocdl.errors import InputError
from tests.kit.batch import Batch
from tests.kit.commands import run

JOB = ("--cores", 2, "--node-memory", "1GiB", "--walltime", "00:30:00")
FIT = ("fit", "net.onnx", "data.zarr", "--no-progress")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    """A Slurm that submits nothing, and nobody's site file."""
    made = Batch(tmp_path / "batch", "slurm")
    made.use(monkeypatch)
    return made


def fit_is(patch: pytest.MonkeyPatch, does: Any) -> list[dict[str, Any]]:
    """What ``oocdl.fit`` is called with, which only does this."""
    given: list[dict[str, Any]] = []

    def fit(**options: Any) -> None:
        given.append(options)
        does()

    patch.setattr(verbs, "fit_run", fit)
    return given


def interrupt() -> None:
    raise KeyboardInterrupt


REACHES = {
    "nodes": 3, "cores": 5, "node_memory": "2GiB", "walltime": "02:00:00", "queue": "long", "account": "lab",
    "interface": "ib0", "shared": "/shared", "spill": "$SCRATCH/x",
}  # fmt: skip


def test_every_option_reaches_the_jobs(
    here: Batch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {*commands.JOB_OPTIONS, "spill"} == {*REACHES, "tls"}
    given: list[dict[str, Any]] = []

    def start(system: str, options: dict[str, Any], tell: Any) -> None:
        given.append(options)
        assert system == "slurm"
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "start", start)
    words = ["--no-tls", *(word for name, value in REACHES.items() for word in (flag(name), value))]
    for extra in ((), words):
        assert run(capsys, *FIT, "--cluster", "slurm", *extra)[0] == 130
    expected = {**REACHES, "tls": False, "memory": REACHES["node_memory"]}
    del expected["node_memory"]
    assert given == [{}, expected]
    # The script is the same as of Python; the interface has to be one of this host.
    words[words.index("ib0")] = expected["interface"] = "lo"
    code, out, _ = run(capsys, "cluster", "show", "slurm", *words)
    assert (code, out) == (0, job_script("slurm", expected).rstrip() + "\n")


@pytest.mark.parametrize("words", [("--scheduler-address", "tcp://a:1"), ("--scheduler-file", "s.json")])
def test_a_scheduler_that_runs_is_the_client(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, str]
) -> None:
    given = fit_is(monkeypatch, interrupt)
    assert run(capsys, *FIT, *words, "--spill", "s")[0] == 130
    assert given[0]["client"] == words[1] and given[0]["spill"] == "s"
    assert run(capsys, "fit", "--help")[1].count("--scheduler-file <path>") == 1
    assert run(capsys, *FIT)[0] == 130 and given[1]["client"] is None


def test_how_long_it_waits(
    here: Batch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = fit_is(monkeypatch, interrupt)
    for words in ((), ("--cluster", "slurm", *JOB)):
        for more in ((), ("--wait-seconds", 7)):
            assert run(capsys, *FIT, *words, *more)[0] == 130
    assert [one.get("wait_seconds") for one in given] == [None, 7.0, 86400.0, 7.0]


def fail() -> None:
    raise InputError("the model is wrong")


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(10)


@pytest.mark.parametrize(
    ("does", "code", "words"),
    [
        (fail, 2, "the model is wrong"),
        (interrupt, 130, "interrupted"),
        (partial(send, signal.SIGTERM), 143, "SIGTERM"),
        (partial(send, signal.SIGHUP), 129, "SIGHUP"),
    ],
)
def test_jobs_are_cancelled_and_keys_deleted_however_it_ends(
    here: Batch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    does: Any, code: int, words: str,
) -> None:  # fmt: skip
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    seen: list[int] = []

    def look() -> None:
        seen.append(len(here.keys()))
        does()

    given = fit_is(monkeypatch, look)
    found, out, err = run(capsys, *FIT, "--cluster", "slurm", "--nodes", 2, *JOB, "--spill", "/scratch")
    assert (found, out) == (code, "") and words in err
    assert seen == [1] and here.keys() == [] and here.cancelled() == ["1", "2"]
    assert isinstance(given[0]["client"], Cluster) and given[0]["spill"] is None
    assert '--local-directory "/scratch"' in here.scripts()[0]
    assert "submitted to slurm: 1, 2 (2 jobs, each of 2 cores, 1.07 GB, 00:30:00)" in err
    assert f"logs of jobs: {here.folder}/state/oocdl/logs" in err
    assert re.search(r"^dashboard: ssh -L 8787:127\.0\.0\.1:\d+ \S+@\S+$", err, re.MULTILINE)
    assert "and open http://127.0.0.1:8787/status" in err
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]


def test_whoever_presses_ctrl_c_again_leaves_no_job_and_no_key(
    here: Batch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal sends it to the commands that cancel jobs, too."""
    fit_is(monkeypatch, interrupt)
    scancel = here.folder / "bin" / "scancel"
    scancel.write_text(f"#!/bin/bash\nkill -INT $PPID $$; sleep 0.3\necho $1 >> {here.folder}/cancelled\n")
    code, _, err = run(capsys, *FIT, "--cluster", "slurm", "--nodes", 2, *JOB)
    assert code == 130 and here.keys() == [] and here.cancelled() == ["1", "2"]
    last = ["cancelling jobs ..", "oocdl: interrupted; no step was done, nothing was changed"]
    assert err.splitlines()[-2:] == last


def test_a_job_that_is_refused_is_one_line(here: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    here.refuse(said := "sbatch: error: Batch job submission failed: Invalid account\n")
    code, out, err = run(capsys, *FIT, "--cluster", "slurm", *JOB)
    assert (code, out) == (2, "") and here.keys() == []
    assert err == f"oocdl: sbatch refuses the job: {said}"


@pytest.mark.parametrize("command", ["fit", "search"])
def test_a_budget_that_jobs_do_not_have_is_refused_before_they_queue(
    here: Batch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = (command, *FIT[1:], "--cluster", "slurm", *JOB, "--memory", "1025MiB")
    code, out, err = run(capsys, *words)
    assert code != 0 and out == "" and err.count("\n") == 1 and here.scripts() == []
    assert "--memory 1025 MiB is more than a job has (1024 MiB)" in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--nodes", 3), "--nodes goes with --cluster"),
        (("--no-tls",), "--tls goes with --cluster"),
        (("--cluster", "slurm", "--scheduler-file", "f"), "--scheduler-file name different workers"),
        (("--cluster", "torque"), "no batch system 'torque'"),
        (("--cluster", "slurm"), "a job of slurm needs cores"),
    ],
)
def test_options_that_do_not_go_together(
    here: Batch, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], line: str
) -> None:
    code, out, err = run(capsys, *FIT, *words)
    assert (code, out, err.count("\n")) == (2, "", 1) and line in err


def test_init_writes_what_show_and_fit_then_use(
    here: Batch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = here.folder / "bin" / "sinfo"
    sinfo.write_text("#!/bin/bash\necho 'long*@32@129000@7-00:00:00@localhost'\n")
    sinfo.chmod(0o755)
    file = here.folder / "site.toml"
    monkeypatch.setenv("OOCDL_SITE", str(file))
    code, out, _ = run(capsys, "cluster", "init")
    assert code == 0 and out.startswith(f"{file}: slurm, queue long, cores 32, memory 129000MiB")
    code, _, err = run(capsys, "cluster", "init")
    assert code == 2 and "--force" in err and run(capsys, "cluster", "init", "--force")[0] == 0
    code, out, err = run(capsys, "cluster", "show", "slurm", "--nodes", 4)
    assert code == 0 and "#SBATCH -p long" in out and "#SBATCH --cpus-per-task=32" in out
    assert "the first of 4 jobs" in err and str(file) in err
    assert here.scripts() == []
