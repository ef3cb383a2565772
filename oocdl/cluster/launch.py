"""Builds dask-jobqueue's cluster objects from ``JobSettings``, and submits their jobs."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import ceil
from pathlib import Path
from typing import Any

import dask
from distributed.utils import get_ip, get_ip_interface, open_port

from oocdl.cluster.ended_jobs import Ended
from oocdl.cluster.job_options import TUNNEL_PORT, JobSettings, walltime_text
from oocdl.cluster.jobqueue import CLUSTERS
from oocdl.cluster.keep import LOST_WORKER_SECONDS, KeepJobs, Watch, forget_refused
from oocdl.cluster.keys import make_keys, security_of
from oocdl.errors import InputError
from oocdl.host.signal_mask import unstoppable

logger = logging.getLogger(__name__)

DEATH_TIMEOUT_SECONDS = 180
"""Seconds that a worker looks for its scheduler, and a nanny for its worker, before the job ends."""
LOOPBACK = "127.0.0.1"
OWN_ADDRESS = (
    "import socket as s; u = s.socket(s.AF_INET, s.SOCK_DGRAM); u.connect(('{host}', 9)); "
    "print(u.getsockname()[0])"
)
"""Program for Python on a node: it prints the address by which that reaches a host; nothing is sent."""
PROXY_ROUTES = "distributed.http.proxy"
"""Module of routes by which whoever sees the dashboard can reach every worker."""


def script(settings: JobSettings) -> str:
    """Return the script of the first job, with what is known only at the start in angle brackets."""
    kind = CLUSTERS[settings.system]
    protocol = "tls" if settings.tls else "tcp"
    arguments = job_arguments(settings, "<scheduler>")
    if settings.tls:
        arguments |= {"protocol": "tls://", "security": security_of("<keys>")}
    text: str = kind.job_cls(f"{protocol}://<scheduler>", name=f"{kind.__name__}-0", **arguments).job_script()
    return text


def start(settings: JobSettings, tell: Callable[[str], None] | None) -> Any:
    """Start a scheduler here, submit all jobs, and keep their number.

    ``tell`` is called with lines for the user; None: they are logged.
    Raises InputError if the batch system is not here, or refuses a job.
    """
    kind = CLUSTERS[settings.system]
    submit = kind.job_cls.submit_command.split()[0]
    if shutil.which(submit) is None:
        raise InputError(
            f"there is no {submit} here: start where jobs of {settings.system} are submitted (a login node)"
        )
    tell = tell or logger.warning
    with ExitStack() as undo:
        security = None
        if settings.tls:
            _, security, keys = make_keys(settings.shared)
            undo.enter_context(keys)
        undo.enter_context(patient())
        host, port = _scheduler_host(settings, tell), open_port(LOOPBACK)
        with dask.config.set(dashboard_settings(port)):
            cluster = kind(
                security=security,
                scheduler_options={"host": host, "dashboard_address": f"{LOOPBACK}:{port}"},
                **job_arguments(settings, host),
            )
        watch = Watch(undo.pop_all())
        cluster.scheduler.add_plugin(watch)
    try:
        submit_all(cluster, settings.nodes)
    except BaseException:
        with unstoppable():
            cluster.close()
        raise
    jobs = {"minimum_jobs": settings.nodes, "maximum_jobs": settings.nodes}
    kept = {
        "watch": watch,
        "ended": Ended(settings.system, settings.logs),
        "tell": tell,
        "deadline_seconds": settings.deadline_seconds,
    }
    cluster.adapt(Adaptive=KeepJobs, interval="1s", **kept, **jobs)
    return cluster


def submit_all(cluster: Any, nodes: int) -> None:
    """Submit jobs, one for each node; InputError with the batch system's own words if it refuses one."""
    for _ in range(nodes):
        cluster.worker_spec.update(cluster.new_worker_spec())

    async def submitted() -> str | None:
        try:  # unlike ``scale``, which logs what goes wrong and goes on
            await cluster
        except RuntimeError as error:
            return str(error)
        return None

    refusal = cluster.sync(submitted)
    for job in cluster.workers.values():
        if job.job_id is None:
            forget_refused(job)
    if refusal is not None:
        said = refusal.partition("stderr:")[2] or refusal
        raise InputError(f"{cluster.job_cls.submit_command.split()[0]} refuses the job: {said.strip()}")


def job_arguments(settings: JobSettings, host: str) -> dict[str, Any]:
    """Return dask-jobqueue's arguments for a job; anything not set is left to its own configuration.

    ``host`` is the scheduler's address. Where no interface is named, a worker listens at the address by which
    its node reaches that: interfaces have other names there than here, and a node may have no default route,
    or one that leads elsewhere.
    """
    python = shlex.quote(settings.python or sys.executable)
    worker = {
        "--lifetime": f"{settings.lifetime_seconds}s",
        "--lifetime-stagger": f"{settings.stagger_seconds}s",
        "--dashboard-address": f"{LOOPBACK}:0",
    }
    if settings.interface is None and dask.config.get(f"jobqueue.{settings.system}.interface", None) is None:
        # Not in "$(..)": that is a macro to HTCondor, and empty.
        worker["--host"] = f'`{python} -c "{OWN_ADDRESS.format(host=host)}"`'
    common = {
        "job_name": "oocdl",
        "cores": settings.cores,
        "memory": memory_bytes(settings.memory_bytes),
        "processes": 1,
        "nanny": True,
        # Signals of the batch system then reach the worker, and not a shell that waits for it.
        "python": f"exec {python}",
        "local_directory": f'"{settings.spill}"',
        "death_timeout": DEATH_TIMEOUT_SECONDS,
        "interface": settings.interface,
        "worker_extra_args": [word for pair in worker.items() for word in pair],
        "job_script_prologue": list(settings.prologue) or None,
        "job_extra_directives": list(settings.directives) or None,
        "log_directory": str(_made(settings.logs)),
    }
    return {name: value for name, value in {**common, **_own(settings)}.items() if value is not None}


def _made(logs: Path) -> Path:
    """Make the folder of logs, which dask-jobqueue would otherwise. Raises InputError."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"logs of jobs cannot be written to {logs} ({error.strerror}); name a folder that all nodes see "
            "with shared="
        ) from None
    return logs


def _own(settings: JobSettings) -> Mapping[str, Any]:
    """Return the arguments that only some batch systems take, or take by other names."""
    walltime = walltime_text(settings.walltime_seconds)
    extra = list(settings.directives)
    match settings.system:
        case "slurm":
            extra += [] if settings.disk_bytes is None else [f"--tmp={ceil(settings.disk_bytes / 2**20)}M"]
            arguments: dict[str, Any] = {"account": settings.account, "job_extra_directives": extra or None}
        case "pbs":
            arguments = {
                "account": settings.account,
                "resource_spec": _resources(settings, settings.resources),
            }
        case "sge":
            # Its queues run scripts with a shell of theirs, csh if nobody has changed it.
            extra = ["-S /bin/bash", f"-pe {settings.parallel_environment} {settings.cores}", *extra]
            asked = _resources(settings, settings.resources or "mem_free={memory}")
            arguments = {"project": settings.account, "resource_spec": asked, "job_extra_directives": extra}
        case "lsf":
            walltime = f"{settings.walltime_seconds // 3600:02d}:{settings.walltime_seconds // 60 % 60:02d}"
            arguments = {"project": settings.account}
        case _:
            directives = dict(line.partition("=")[::2] for line in extra)
            seconds = settings.walltime_seconds
            late = f"(JobStatus == 2) && (time() - EnteredCurrentStatus > {seconds})"
            directives = {"periodic_remove": late, **directives}
            if settings.account is not None:
                directives["accounting_group"] = settings.account
            return {"disk": settings.disk_bytes, "job_extra_directives": directives}
    return {"queue": settings.queue, "walltime": walltime, **arguments}


def _resources(settings: JobSettings, text: str | None) -> str | None:
    """Return the ``-l`` of a job, with its memory where that is to stand."""
    if text is None:
        return None
    per_core = f"{ceil((settings.memory_bytes >> 20) / settings.cores)}M"
    return text.replace("{memory}", f"{settings.memory_bytes >> 20}M").replace("{memory_per_core}", per_core)


def memory_bytes(asked_bytes: int) -> int:
    """Return at most what is asked, so that dask-jobqueue, which writes two decimals, rounds nothing up.

    >>> memory_bytes(60 * 10**9) / 2**30
    55.87...
    """
    unit = max((1 << shift for shift in (0, 10, 20, 30, 40) if asked_bytes >= 0.9 * (1 << shift)), default=1)
    return ceil(int(asked_bytes / unit * 100) * unit / 100) if unit > 1 else asked_bytes


def _scheduler_host(settings: JobSettings, tell: Callable[[str], None]) -> str:
    """Return the address by which workers reach this machine, the only one that the scheduler listens at."""
    name = settings.scheduler_interface or settings.interface
    if name is None:
        address: str = get_ip()  # type: ignore[no-untyped-call]
        if address.startswith("127."):
            tell(
                f"this machine has no default route: jobs on other machines do not reach it at {address}; "
                "name the network interface that leads to nodes, by scheduler_interface"
            )
        return address
    try:
        address = get_ip_interface(name)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise InputError(
            f"this machine has no network interface '{name}' with an address: {error}; name the one that "
            "nodes reach it by with scheduler_interface"
        ) from None
    return address


def dashboard_settings(port: int) -> dict[str, Any]:
    """Return Dask's configuration for a dashboard that answers only its own page, here or by the tunnel."""
    hosts = (LOOPBACK, "localhost")
    routes = [
        route for route in dask.config.get("distributed.scheduler.http.routes") if route != PROXY_ROUTES
    ]
    return {
        "distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin": [
            f"{host}:{number}" for host in hosts for number in dict.fromkeys((port, TUNNEL_PORT))
        ],
        "distributed.scheduler.http.routes": routes,
    }


_lock, _clusters, _changed = threading.Lock(), set[object](), ExitStack()


@contextmanager
def patient() -> Iterator[None]:
    """Have Dask wait ``LOST_WORKER_SECONDS``, as long as a cluster needs it; clusters may end in any order.

    Its configuration is that of the whole process.
    """
    token = object()
    with _lock:
        if not _clusters:
            name = "distributed.deploy.lost-worker-timeout"
            _changed.enter_context(dask.config.set({name: f"{LOST_WORKER_SECONDS}s"}))
        _clusters.add(token)
    try:
        yield
    finally:
        with _lock:
            _clusters.discard(token)
            if not _clusters:
                _changed.close()
