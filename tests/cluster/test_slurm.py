"""A real Slurm of three nodes: jobs on hosts of their own, with their memory, held at their number."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import oocdl.cluster
from tests.kit import slurm as real

pytestmark = pytest.mark.usefixtures("slurm")
HOG = "import sys; x = bytearray(400 << 20); print(len(x))"
AGAIN_SECONDS = 60.0
"""Within which a lost job is there again; it takes about three."""


def leftovers() -> list[str]:
    """What a Slurm leaves on a machine, if it does: files, network, cgroups, processes."""
    found = [str(real.ROOT)] if real.ROOT.exists() else []
    found += [line for line in real.run("ip", "-o", "link").splitlines() if "oocdl-" in line]
    found += real.run("ip", "netns", "list").split()
    found += [str(path) for path in real.CGROUPS.glob("*/slurm*/*oocdl*")]
    found += [str(path) for path in real.CGROUPS.glob("*/slurm_oocdl-*")]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = process.read_text()
        except OSError:  # it has ended meanwhile
            continue
        found += [text] if str(real.ROOT) in text else []
    return found


def test_jobs_are_on_hosts_of_their_own_with_their_memory_and_no_more() -> None:
    assert sorted(real.run("srun", "-N3", "hostname").split()) == list(real.NODES)
    sees = "import socket; s = socket.create_connection(('10.77.0.254', 16817)); print(s.getsockname()[0])"
    assert real.run("srun", "-w", real.NODES[1], "python3", "-c", sees) == "10.77.0.2\n"
    assert real.run("srun", "--mem=600M", "python3", "-c", HOG) == "419430400\n"
    with pytest.raises(RuntimeError, match=r"(?i)oom|out of memory"):
        real.run("srun", "--mem=200M", "python3", "-c", HOG)


def test_nothing_is_left_behind_also_of_daemons_that_were_killed() -> None:
    real.run("sbatch", "--wrap", "sleep 1000", "-o", "/dev/null")
    real.wait_until(lambda: [job[1] for job in real.jobs()] == ["RUNNING"], 30, "a job runs")
    pids = [int((real.ROOT / f"{name}.pid").read_text()) for name in ("slurmctld", real.NODES[0], "munged")]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    real.start()  # stops what is left of it first
    assert real.states() == dict.fromkeys(real.NODES, "idle") and real.jobs() == []
    assert leftovers()
    real.stop()
    assert leftovers() == []
    real.start()


@pytest.fixture
def jobs() -> Iterator[tuple[Any, Client]]:
    """Two jobs, each a whole node, and a client of theirs."""
    with oocdl.cluster.slurm(nodes=2) as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=60)
        yield cluster, client
    real.wait_until(lambda: real.jobs() == [], 60, "all jobs are over")
    assert not list((real.ROOT / "shared").glob("keys-*"))


def hosts(client: Client) -> set[str]:
    """Addresses of the hosts that have a worker."""
    return {worker["host"] for worker in client.scheduler_info(n_workers=-1)["workers"].values()}


def wait_for_two(client: Client, holds: Callable[[], bool]) -> None:
    real.wait_until(lambda: len(hosts(client)) == 2 and holds(), AGAIN_SECONDS, "two workers, once more")


def test_a_job_that_is_cancelled_is_submitted_again(jobs: tuple[Any, Client]) -> None:
    _, client = jobs
    first, other = (number for number, _, _ in real.jobs())
    real.run("scancel", first)
    wait_for_two(client, lambda: first not in [number for number, _, _ in real.jobs()])
    assert other in [number for number, _, _ in real.jobs()]
    assert client.submit(sum, [1, 2]).result(timeout=30) == 3


def test_a_job_of_a_node_that_is_down_goes_to_another(jobs: tuple[Any, Client]) -> None:
    _, client = jobs
    _, _, node = real.jobs()[0]
    address = f"10.77.0.{real.NODES.index(node) + 1}"
    real.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    try:
        wait_for_two(client, lambda: address not in hosts(client))
    finally:
        real.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    real.wait_until(lambda: "down" not in "".join(real.states().values()), 30, "the node is up")


def test_a_worker_that_takes_too_much_is_started_again_in_its_job(jobs: tuple[Any, Client]) -> None:
    _, client = jobs
    before, numbers = client.scheduler_info()["workers"], [number for number, _, _ in real.jobs()]

    def take() -> int:
        return len(bytearray(3 << 30))  # of 2 GiB

    client.run(take, workers=[next(iter(before))], on_error="ignore")
    wait_for_two(client, lambda: bool(client.scheduler_info()["workers"].keys() - before.keys()))
    assert [number for number, _, _ in real.jobs()] == numbers


@pytest.mark.slow
def test_a_job_that_comes_to_its_walltime_ends_in_order_and_is_submitted_again() -> None:
    with oocdl.cluster.slurm(nodes=1, walltime="00:01:00") as cluster, Client(cluster) as client:
        client.wait_for_workers(1, timeout=60)
        ((number, _, _),) = real.jobs()
        held = client.submit(sum, [1, 2], pure=False)  # there is nobody to whom it could be handed on
        real.wait_until(
            lambda: [job[0] for job in real.jobs() if job[1] == "RUNNING"] == [number + 1], 80, "another"
        )
        # It left before the batch system ended it; its place is cancelled, if it is not gone by then.
        assert re.search("JobState=(COMPLET|CANCELLED)", real.run("scontrol", "show", "job", number))
        assert held.result(timeout=30) == 3
