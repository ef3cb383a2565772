"""Jobs of five batch systems, by commands that look like theirs: scripts, ends, keys, what is refused."""

from __future__ import annotations

import asyncio
import getpass
import math
import os
import re
import signal
import ssl
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import dask
import pytest
from distributed import Client
from distributed.security import Security
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

import oocdl.cluster
from oocdl.cluster import ended_jobs, keys
from oocdl.cluster.job_options import JobSettings, job_settings
from oocdl.cluster.keys import CA_FILE, CERTIFICATE_FILE, KEY_FILE, LOCK_FILE, make_keys
from oocdl.cluster.launch import memory_bytes
from oocdl.cluster.systems import dashboard_hint, job_script, tunnel
from oocdl.errors import InputError
from tests.kit.batch import Batch
from tests.kit.commands import python

Use = Callable[..., Batch]
JOB: dict[str, Any] = {"cores": 1, "memory": "1GiB", "walltime": "00:30:00"}
OWN: dict[str, dict[str, Any]] = {
    "slurm": {"queue": "long", "account": "brain", "disk": "50GiB", "directives": ["--constraint=sky"]},
    "pbs": {"queue": "long", "account": "brain"},
    "sge": {"queue": "long", "account": "brain"},
    "lsf": {"queue": "long", "account": "brain"},
    "htcondor": {"account": "brain", "disk": "50GiB", "directives": ["rank=Memory"]},
}
ASKS = {
    "slurm": [
        "#SBATCH --cpus-per-task=1", "--mem=1G", "-t 00:30:00", "-p long", "-A brain", "--tmp=51200M",
        "--constraint=sky",
    ],
    "pbs": ["#PBS -l select=1:ncpus=1:mem=1024MB", "-l walltime=00:30:00", "-q long", "-A brain"],
    "sge": [
        "#$ -S /bin/bash", "#$ -pe smp 1", "-l mem_free=1024M", "-l h_rt=00:30:00", "-q long", "-P brain",
    ],
    "lsf": ["#BSUB -n 1", "-M 1073742", "-W 00:30", "-q long", '-P "brain"'],
    "htcondor": [
        "MY.DaskWorkerCores = 1", "MY.DaskWorkerMemory = 1073741824", "MY.DaskWorkerDisk = 53687091200",
        "EnteredCurrentStatus > 1800)", "accounting_group = brain", "rank = Memory",
    ],
}  # fmt: skip


def test_htcondor_has_no_macro_to_replace_in_a_command() -> None:
    """In its files "$(..)" is a macro, and empty if nobody has defined it."""
    script = job_script("htcondor", {**JOB, **OWN["htcondor"]})
    (command,) = [line for line in script.splitlines() if line.startswith("Arguments")]
    assert "--host `" in command and "$(" not in command


@pytest.mark.parametrize("system", ["pbs", "sge"])
def test_resources_have_the_memory_of_a_job_and_of_a_core(system: str) -> None:
    """What SGE counts for each slot would else be asked for as often as there are slots."""
    asked = job_script(system, {**JOB, "cores": 3, "resources": "mem={memory},h_vmem={memory_per_core}"})
    assert " -l mem=1024M,h_vmem=342M\n" in asked


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Batch]:
    def used(system: str = "slurm", runs: bool = False) -> Batch:
        made = Batch(tmp_path / "batch", system, runs)
        made.use(monkeypatch)
        return made

    return used


@contextmanager
def one_job(folder: Path, **options: Any) -> Iterator[Client]:
    """A job that runs here, whose worker is there."""
    more = {"interface": "lo", "spill": str(folder), **options}
    with oocdl.cluster.slurm(**JOB, **more) as cluster, Client(cluster) as client:
        client.wait_for_workers(1, timeout=60)
        yield client


@pytest.mark.parametrize("system", OWN)
def test_what_is_shown_is_what_is_submitted_and_cancelled(batch: Use, system: str) -> None:
    here = batch(system)
    options = {**JOB, **OWN[system], "prologue": ["module load gcc"], "spill": "/scratch/$USER", "nodes": 2}
    shown = job_script(system, options)
    assert here.scripts() == [] and here.keys() == []
    with getattr(oocdl.cluster, system)(**options) as cluster:
        address, keys = cluster.scheduler_address, here.keys()
        assert len(keys) == 1 and address.startswith("tls://")
        submitted = [
            script.replace(address, "tls://<scheduler>")
            .replace(cluster.scheduler.address.split("/")[-1].split(":")[0], "<scheduler>")
            .replace(str(keys[0]), "<keys>")
            for script in here.scripts()
        ]
    assert sorted(submitted) == [shown, shown.replace("Cluster-0", "Cluster-1")]
    ends = [".0"] if system == "htcondor" else [""]
    assert here.cancelled() == [f"{number}{end}" for number in (1, 2) for end in ends]
    assert here.keys() == []
    for asked in (*ASKS[system], "module load gcc", "--nthreads 1", "--memory-limit 1.00GiB", "--nanny"):
        assert asked in shown, asked
    # 1800 s less a tenth, less 3 % by which workers leave earlier or later
    assert "--lifetime 1566s --lifetime-stagger 54s" in shown and "--death-timeout 180" in shown
    assert re.search(r'--local-directory "+/scratch/\$USER"', shown)
    assert "--dashboard-address 127.0.0.1:0" in shown


def test_nothing_listens_beyond_what_is_needed(batch: Use) -> None:
    batch()
    with oocdl.cluster.slurm(**JOB, interface="lo") as cluster:
        scheduler = cluster.scheduler
        assert scheduler.address.startswith("tls://127.0.0.1:")
        bound = {kept.getsockname()[0] for kept in scheduler.http_server._sockets.values()}
        assert bound == {"127.0.0.1"}
        command, page = dashboard_hint(cluster)
        assert re.fullmatch(r"ssh -L 8787:127.0.0.1:(\d+) \S+@\S+", command)
        assert f":{scheduler.http_server.port} " in command and page == "http://127.0.0.1:8787/status"
        with pytest.raises(HTTPError, match="404"):  # it would reach any worker from here
            urlopen(f"http://127.0.0.1:{scheduler.http_server.port}/proxy/80/127.0.0.1/status")

        def code(origin: str) -> int:
            request = HTTPRequest(
                f"ws://127.0.0.1:{scheduler.http_server.port}/status/ws", headers={"Origin": origin}
            )

            async def connect() -> int:
                try:
                    (await websocket_connect(request, subprotocols=["bokeh", "none"])).close()
                except HTTPClientError as error:
                    return error.code
                return 101

            return int(cluster.sync(connect))

        assert code("http://127.0.0.1:8787") == 101 and code("http://localhost:8787") == 101
        assert code("http://evil.example") == 403 and code("http://127.0.0.1:8788") == 403


def test_configuration_of_dask_is_as_before(batch: Use) -> None:
    """In whatever order clusters close."""
    batch()
    names = (
        "distributed.deploy.lost-worker-timeout",
        "distributed.scheduler.http.routes",
        "distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin",
    )
    before = [dask.config.get(name) for name in names]
    for cluster in [oocdl.cluster.slurm(**JOB), oocdl.cluster.slurm(**JOB)]:
        assert dask.config.get(names[0]) == "600s"
        assert [dask.config.get(name) for name in names[1:]] == before[1:]
        cluster.close()
    assert [dask.config.get(name) for name in names] == before


def test_a_users_own_configuration_of_dask_jobqueue_may_name_the_interface() -> None:
    """Dask's worker takes an interface or a host, and ends at once if it is told both."""
    with dask.config.set({"jobqueue.slurm.interface": "ib0"}):
        script = job_script("slurm", JOB)
    assert "--interface ib0" in script and "--host" not in script


def test_keys_of_a_killed_process_are_removed_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "ORPHAN_SECONDS", -1.0)
    program = (
        "import os, sys, pathlib; from oocdl.cluster.keys import make_keys; "
        "made = make_keys(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    python("-c", program, tmp_path)
    (orphan,) = tmp_path.iterdir()
    mine, _, first = make_keys(tmp_path)
    other, _, second = make_keys(tmp_path)
    with first, second:
        assert {*tmp_path.iterdir()} == {mine, other} and not orphan.exists()
    assert not [*tmp_path.iterdir()]
    elsewhere = tmp_path / "keys-elsewhere-1"
    elsewhere.mkdir()
    for days in (keys.VALID_DAYS, keys.VALID_DAYS + 2):
        os.utime(elsewhere, (then := time.time() - 86400 * days, then))
        make_keys(tmp_path)[2].close()
        assert elsewhere.exists() == (days == keys.VALID_DAYS)


def test_keys_of_a_host_with_a_longer_name_are_not_those_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another host a disk of the network may not tell who has a lock."""
    monkeypatch.setattr(keys, "ORPHAN_SECONDS", -1.0)
    monkeypatch.setattr("socket.gethostname", lambda: "node-2")
    other, _, removing = make_keys(tmp_path)
    (other / LOCK_FILE).unlink()
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    make_keys(tmp_path)[2].close()
    with removing:
        assert other.exists()


def test_keys_that_cannot_all_be_written_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "KEY_FILE", "no/such/folder")
    with pytest.raises(InputError, match="keys cannot be written"):
        make_keys(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_way_to_the_dashboard_where_nobody_knows_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", unknown)
    assert re.fullmatch(r"ssh -L 8787:127.0.0.1:4321 [^@ ]+", tunnel(8787, 4321))


def test_only_who_has_a_key_of_this_cluster_comes_in(batch: Use, tmp_path: Path) -> None:
    here = batch()
    with oocdl.cluster.slurm(**JOB, interface="lo") as cluster:
        with Client(cluster) as client:
            assert client.scheduler_info()["workers"] == {}
        _, strangers, removing = make_keys(tmp_path / "strangers")
        removing.close()
        address = cluster.scheduler_address
        for security, where in ((strangers, address), (Security(), address.replace("tls", "tcp"))):
            with pytest.raises((OSError, TimeoutError)):
                Client(where, security=security, timeout=1)
        folder = here.keys()[0]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert modes == dict.fromkeys((CA_FILE, CERTIFICATE_FILE, KEY_FILE, LOCK_FILE), 0o600)
        assert "PRIVATE" not in (folder / CA_FILE).read_text()  # nobody can sign another key
        context = ssl.create_default_context(cafile=str(folder / CA_FILE))
        context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)


def test_without_tls_and_an_error_cancels_all_jobs(batch: Use) -> None:
    here = batch()
    with pytest.raises(ZeroDivisionError), oocdl.cluster.slurm(**JOB, nodes=3, tls=False) as cluster:
        assert cluster.scheduler_address.startswith("tcp://") and here.keys() == []
        assert "--tls" not in here.scripts()[0]
        raise ZeroDivisionError
    assert here.cancelled() == ["1", "2", "3"]


def test_a_job_that_is_refused_is_an_error_with_the_words_of_the_system(batch: Use) -> None:
    here = batch()
    here.refuse("sbatch: error: invalid account or account/partition combination specified\n")
    with pytest.raises(InputError, match=r"^sbatch refuses the job: sbatch: error: invalid account"):
        oocdl.cluster.slurm(**JOB, nodes=2)
    assert here.keys() == [] and here.cancelled() == []


def test_no_batch_system_and_no_package(batch: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    here = batch()
    with pytest.raises(InputError, match=r"there is no condor_submit here: .* \(a login node\)"):
        oocdl.cluster.htcondor(**JOB, disk="1GiB")
    with pytest.raises(InputError, match="no network interface 'ib7' .*scheduler_interface"):
        oocdl.cluster.slurm(**JOB, interface="ib7")
    assert here.keys() == []
    started = ("dask_jobqueue", "oocdl.cluster.launch", "oocdl.cluster.jobqueue")
    for name in [name for name in sys.modules if name.startswith(started)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(oocdl.cluster, "launch", raising=False)
    monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
    with pytest.raises(InputError, match=r"dask_jobqueue.* pip install 'oocdl\[cluster\]'"):
        oocdl.cluster.slurm(**JOB)


@pytest.mark.parametrize(
    ("system", "options", "words"),
    [
        ("slurm", {"cores": 0}, "cores must be at least 1, got 0"),
        ("slurm", {"nodes": True}, "nodes must be"),
        ("slurm", {"memory": "much"}, "memory: 'much' is not a size"),
        ("slurm", {"memory": 4096}, "memory of a job is 4096 bytes, which no worker can do with"),
        ("slurm", {"disk": "much"}, "disk: 'much' is not a size"),
        ("slurm", {"shared": "~no.such.user/x"}, "shared: Could not determine home directory"),
        ("slurm", {"shared": "/proc/none", "tls": False}, "of jobs cannot be written to /proc/none/logs ("),
        ("slurm", {"walltime": "8h"}, "HH:MM:SS"),
        ("slurm", {"walltime": "00:00:30"}, "too short"),
        ("slurm", {"walltime": None}, "needs walltime"),
        ("slurm", {"queue": "long\n#SBATCH --array=0-999"}, "one line"),
        ("slurm", {"prologue": "module load gcc"}, "list of lines"),
        ("slurm", {"ques": "long"}, "did you mean 'queue'"),
        ("slurm", {"shared": "/my files"}, "shells of jobs"),
        ("slurm", {"tls": 1}, "tls must be True or False"),
        ("lsf", {"disk": "1GiB"}, "disk goes with slurm and htcondor, not with lsf"),
        ("htcondor", {}, "has to ask for disk"),
        ("htcondor", {"disk": "1GiB", "queue": "long"}, "queue goes with"),
        ("torque", {"cores": None}, "no batch system 'torque'"),
    ],
)
def test_options_that_are_wrong(batch: Use, system: str, options: dict[str, Any], words: str) -> None:
    batch()
    with pytest.raises(InputError, match=re.escape(words)):
        job_script(system, {**JOB, **options})


@pytest.mark.parametrize("walltime", ["00:01:00", "00:10:00", "01:00:00", "08:00:00", "2-00:00:00"])
def test_workers_leave_before_their_job_ends(walltime: str) -> None:
    settings = job_settings("slurm", {**JOB, "walltime": walltime})
    last = settings.lifetime_seconds + settings.stagger_seconds
    assert 15 <= settings.walltime_seconds - last <= 300
    assert settings.lifetime_seconds - settings.stagger_seconds > settings.walltime_seconds / 2


@pytest.mark.parametrize("asked", [5 * 10**8, 10**9, 1999 << 20, 60 * 10**9, 3 << 40])
def test_the_limit_of_a_worker_is_not_above_its_job(asked: int) -> None:
    assert asked * 0.98 < dask.utils.parse_bytes(dask.utils.format_bytes(memory_bytes(asked))) <= asked


def test_a_lost_job_is_submitted_again_and_a_worker_that_its_nanny_starts_again_is_not(
    batch: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = batch(runs=True)
    with one_job(tmp_path) as client:
        before = client.scheduler_info()["workers"]
        os.kill(client.run(os.getpid).popitem()[1], signal.SIGKILL)
        wait_for_another(client, before)
        assert len(here.scripts()) == 1  # its nanny has started it again
        before = client.scheduler_info()["workers"]
        here.end(1)
        wait_for_another(client, before)
        assert len(here.scripts()) == 2 and "job 1 is gone; it is submitted again" in caplog.text
    assert here.cancelled() == ["1", "2"]


def test_a_job_that_is_over_before_its_worker_came_is_told_and_submitted_again(
    batch: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a run waits for as long as jobs may be queued, and says nothing."""
    here = batch(runs=True)
    monkeypatch.setattr(ended_jobs, "LOOK_SECONDS", 0.5)
    logs = tmp_path / "batch" / "state" / "oocdl" / "logs"
    prologue = f"mkdir {tmp_path}/first && {{ echo no disk > {logs}/oocdl-1.err; exit 1; }}"
    with one_job(tmp_path, prologue=[prologue]):
        assert len(here.scripts()) == 2
    told = f"job 1 is over, and its worker never came: 'no disk' ({logs}/oocdl-1.err); it is submitted again"
    assert told in caplog.text and here.cancelled() == ["1", "2"]


@pytest.mark.parametrize(
    ("first", "log", "over"),
    [({"1"}, None, True), (set(), None, False), (set(), 9.0, True), (set(), 0.0, False)],
)
def test_a_list_that_never_had_our_jobs_tells_nothing_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: set[str], log: float | None, over: bool
) -> None:
    """As that of another cluster: a job that waits there is not cancelled, unless its log has ended."""
    lists = [first, set[str]()]

    async def unfinished(_: str) -> set[str]:
        return lists.pop(0)

    monkeypatch.setattr(ended_jobs, "unfinished", unfinished)
    monkeypatch.setattr(ended_jobs, "LOOK_SECONDS", 5.0)
    (tmp_path / "oocdl-11.err").write_text("of another job\n")
    os.utime(tmp_path / "oocdl-11.err", (0, 0))
    if log is not None:
        (tmp_path / "oocdl-1.err").write_text("no disk\n")
        os.utime(tmp_path / "oocdl-1.err", (time.time() - log,) * 2)
    known = ended_jobs.Ended("slurm", tmp_path)
    assert asyncio.run(known.among({"worker": "1"})) == {}  # it is young
    known._looked, known._waiting = -math.inf, {"1": -math.inf}
    found = asyncio.run(known.among({"worker": "1"}))
    assert bool(found) == over and "another job" not in str(found)


@pytest.mark.parametrize(("answer", "known"), [("echo ' 12.srv x'; echo no", {"12"}), ("exit 1", None)])
def test_what_a_batch_system_tells_of_jobs(batch: Use, answer: str, known: set[str] | None) -> None:
    here = batch()
    (here.folder / "bin" / "squeue").write_text(f"#!/bin/bash\n{answer}\n")
    (here.folder / "bin" / "squeue").chmod(0o755)
    assert asyncio.run(ended_jobs.unfinished("slurm")) == known


def test_a_worker_that_stays_until_its_walltime_does_not_meet_it(
    batch: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its nanny has started it again, with a lifetime of its own, or it has found nobody to hand on to."""
    here = batch(runs=True)
    monkeypatch.setattr(JobSettings, "deadline_seconds", 4)
    with one_job(tmp_path) as client:
        wait_for_another(client, client.scheduler_info()["workers"])
        assert "job 1 comes to its walltime; it is submitted again" in caplog.text
    assert {"1", "2"} <= set(here.cancelled())


def wait_for_another(client: Client, before: dict[str, Any]) -> None:
    deadline = time.monotonic() + 60
    while not client.scheduler_info()["workers"].keys() - before.keys():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_ctrl_c_stays_what_it_was() -> None:
    """dask-jobqueue takes it over when it is imported: a run would be left in the middle of a commit."""
    code = (
        "import signal; before = signal.getsignal(signal.SIGINT); import oocdl.cluster.launch; "
        "assert signal.getsignal(signal.SIGINT) is before"
    )
    assert python("-c", code).returncode == 0
