"""A real Grid Engine: its site file, its jobs, and ``oocdl fit --cluster sge`` as a user starts it."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from distributed import Client

import oocdl.cluster
from oocdl.errors import InputError
from tests.kit import sge as real
from tests.kit.commands import python
from tests.kit.slurm_runs import equal, finished, fit, in_step, log_of, over, write_job

pytestmark = [pytest.mark.usefixtures("sge"), pytest.mark.timeout(900), pytest.mark.slow]
STEPS = 24


def test_the_site_file_and_the_script_are_those_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a host where there is no other batch system."""
    monkeypatch.setenv("PATH", str(real.PROGRAMS))
    monkeypatch.setenv("OOCDL_SITE", str(tmp_path / "site.toml"))
    oocdl_("cluster", "init")
    found = tomllib.loads((tmp_path / "site.toml").read_text())["sge"]
    assert found == {
        "queue": real.QUEUE,
        "parallel_environment": "smp",
        "resources": "mem_free={memory_per_core}",
        **({"spill": found["spill"]} if "spill" in found else {}),
    }
    said = oocdl_("cluster", "show", "sge", "--cores", 2, "--node-memory", "2GiB", "--walltime", "00:20:00")
    for line in ("-S /bin/bash", "-pe smp 2", "-l mem_free=1024M", "-l h_rt=00:20:00", f"-q {real.QUEUE}"):
        assert f"#$ {line}\n" in said
    assert real.jobs() == []


def oocdl_(*words: object) -> str:
    """What a command of oocdl prints."""
    done = python("-m", "oocdl", *words, seconds=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_that_is_deleted_is_submitted_again() -> None:
    """Two jobs, of two slots each: all that there are, and most of the memory, counted for each slot."""
    with oocdl.cluster.sge(nodes=2) as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=60)
        (first, *_), (other, *_) = real.jobs()
        before = client.run(os.getpid)
        folders = client.run(lambda dask_worker: dask_worker.local_directory)
        assert all(Path(folder).is_relative_to(real.ROOT / "disk") for folder in folders.values())
        real.run("qdel", first)
        real.wait_until(
            lambda: len(client.run(os.getpid, on_error="ignore").keys() - before) == 1, 60, "another"
        )
        numbers = [number for number, state, _ in real.jobs() if "d" not in state]
        assert len(numbers) == 2 and other in numbers and first not in numbers
        assert client.submit(sum, [1, 2]).result(timeout=30) == 3
    over(real)
    assert list((real.ROOT / "disk").iterdir()) == []


def test_a_job_that_is_refused_is_an_error_with_the_words_of_the_system() -> None:
    words = 'qsub refuses the job: .*requested parallel environment "threads" does not exist'
    with pytest.raises(InputError, match=words):
        oocdl.cluster.sge(parallel_environment="threads")
    assert real.jobs() == []


def test_a_job_that_comes_to_its_walltime_ends_in_order_and_is_submitted_again() -> None:
    with oocdl.cluster.sge(walltime="00:01:00") as cluster, Client(cluster) as client:
        client.wait_for_workers(1, timeout=60)
        ((number, _, _),) = real.jobs()
        held = client.submit(sum, [1, 2], pure=False)  # there is nobody to whom it could be handed on
        real.wait_until(lambda: [job[:2] for job in real.jobs()] == [(number + 1, "r")], 80, "another")
        assert held.result(timeout=30) == 3


def test_a_job_that_is_deleted_in_mid_step(tmp_path: Path) -> None:
    write_job(tmp_path)
    run = tmp_path / "deleted"
    with fit(tmp_path, "alone", "--steps", STEPS, "--parallel", "space=2") as started:
        finished(started, tmp_path / "alone", STEPS)
    more = ("--steps", STEPS, "--plan", "alone", "--cluster", "sge", "--nodes", 2)
    with fit(tmp_path, run.name, *more) as started:
        in_step(run)
        real.run("qdel", real.jobs()[0][0])
        finished(started, run, STEPS)
    assert equal(run, tmp_path / "alone") and oocdl.verify(run).sound
    said = log_of(run).read_text()
    assert "to go on from step" in said and "is gone; it is submitted again" in said
    over(real)
