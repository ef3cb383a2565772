"""A function for each batch system, which submits jobs and returns dask-jobqueue's cluster object.

The extra ``oocdl[cluster]`` has what this needs (dask-jobqueue, cryptography); it is imported when a
cluster is asked for.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Unpack

from oocdl.cluster.job_options import TUNNEL_PORT, JobOptions, job_settings
from oocdl.errors import InputError

EXTRA = ("dask_jobqueue", "cryptography")
"""Packages that come with ``oocdl[cluster]`` only."""


def slurm(**options: Unpack[JobOptions]) -> Any:
    """Submit ``nodes`` jobs to Slurm, and return their ``dask_jobqueue.SLURMCluster``.

    Each job is one worker with ``cores`` threads. A job that is lost (cancelled, at its walltime, with its
    node) is submitted again until the cluster is closed. Closing it, by ``with`` or ``close()``, cancels all
    jobs and deletes the keys. The scheduler runs in this process: on a login node, in a terminal that stays.

    Options are those of ``JobOptions``: ``nodes``, ``cores``, ``memory``, ``walltime``, ``queue``,
    ``account``, ``spill`` and others; what is not given is taken from the site file. Raises InputError for an
    option that is wrong, a system that is not here, and a job that it refuses.

    >>> with oocdl.cluster.slurm(nodes=4, cores=16, memory="60GB", walltime="08:00:00") as jobs:
    ...     run = oocdl.fit("unet.onnx", "brain.zarr", client=jobs)  # doctest: +SKIP
    """
    return start("slurm", options)


def pbs(**options: Unpack[JobOptions]) -> Any:
    """Submit ``nodes`` jobs to PBS, and return their ``dask_jobqueue.PBSCluster``; else as ``slurm``.

    A job asks for ``select=1:ncpus=cores:mem=memory``, or for ``resources`` if they are given.
    """
    return start("pbs", options)


def sge(**options: Unpack[JobOptions]) -> Any:
    """Submit ``nodes`` jobs to SGE, and return their ``dask_jobqueue.SGECluster``; else as ``slurm``.

    A job asks for ``cores`` of ``parallel_environment`` and ``mem_free=memory``, or for ``resources`` such as
    ``"mem_free={memory_per_core}"`` where memory is counted for each slot. It runs in bash.
    """
    return start("sge", options)


def lsf(**options: Unpack[JobOptions]) -> Any:
    """Submit ``nodes`` jobs to LSF, and return their ``dask_jobqueue.LSFCluster``; else as ``slurm``."""
    return start("lsf", options)


def htcondor(**options: Unpack[JobOptions]) -> Any:
    """Submit ``nodes`` jobs to HTCondor, and return ``dask_jobqueue.HTCondorCluster``; else as ``slurm``.

    It has to be told the ``disk`` of a job. A job is removed when it has run for ``walltime``.
    """
    return start("htcondor", options)


def start(system: str, options: Mapping[str, Any], tell: Callable[[str], None] | None = None) -> Any:
    """Submit the jobs of a batch system, by its name; see ``slurm``.

    ``tell`` is called with lines for the user, such as of a job that is gone; None: they are logged.
    """
    settings = job_settings(system, options)
    return _launch().start(settings, tell)


def job_script(system: str, options: Mapping[str, Any]) -> str:
    """Return the script of the first job that ``start`` would submit; nothing runs, no system is needed.

    The scheduler's address and the folder of the keys are not known before, and stand in angle brackets.
    """
    settings = job_settings(system, options)
    text: str = _launch().script(settings)
    return text


def dashboard_hint(cluster: Any) -> tuple[str, str]:
    """Return the command of ssh that leads to the dashboard of a cluster, and the page to open then.

    The dashboard listens at the loopback address of this machine only.
    """
    port = cluster.scheduler.http_server.port
    return tunnel(TUNNEL_PORT, port), f"http://127.0.0.1:{TUNNEL_PORT}/status"


def tunnel(here: int, port: int) -> str:
    """Return the command of ssh by which a user's port ``here`` leads to a loopback port of this machine."""
    full = socket.getfqdn()
    host = socket.gethostname() if full.startswith("localhost") else full
    with suppress(KeyError, OSError):  # in a container nobody may know the name
        host = f"{getpass.getuser()}@{host}"
    return f"ssh -L {here}:127.0.0.1:{port} {host}"


def _launch() -> Any:
    try:
        from oocdl.cluster import launch

        return launch
    except ValueError as error:  # it sets a handler of a signal
        raise InputError(
            f"dask-jobqueue can be imported in the main thread only ({error}): call this there"
        ) from error
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise InputError(
            f"jobs of a batch system need {error.name}, which is not installed: pip install 'oocdl[cluster]'"
        ) from None
