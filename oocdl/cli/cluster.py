"""Jobs of a batch system: what would be submitted, and defaults for everybody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from oocdl.cli.say import say
from oocdl.cli.texts import flag
from oocdl.cli.verb_options import Records, typed, with_options
from oocdl.cluster.detect import write_site
from oocdl.cluster.job_options import job_settings, walltime_text
from oocdl.cluster.site import SYSTEMS, site_path
from oocdl.cluster.systems import dashboard_hint, job_script, start
from oocdl.config import parse_bytes
from oocdl.errors import BudgetError, InputError
from oocdl.host.signal_mask import unstoppable
from oocdl.report.units import counted
from oocdl.training.call import ALL_OPTIONS
from oocdl.training.signals import Signals, Stopped

QUEUE_SECONDS = 86400.0
JOB_OPTIONS: Records = {
    "nodes": typed("Number of jobs, one worker each; default: 1.", int | None),
    "cores": typed("Cores per job.", int | None),
    "node_memory": typed("Memory per job, such as 60GB."),
    "walltime": typed("Time limit of a job: HH:MM:SS or D-HH:MM:SS."),
    "queue": typed("Queue, or Slurm partition."),
    "account": typed("Account or project to charge."),
    "interface": typed("Network interface of the nodes, such as ib0."),
    "shared": typed("Folder that all nodes see, for keys and logs of jobs."),
    "tls": typed("Encrypt all connections, with keys of this run.", bool | None),
}
"""Options of jobs. The site file supplies what is left out."""
WAYS: Records = {
    "cluster": typed(f"Train on jobs of a batch system: {', '.join(SYSTEMS)}."),
    "scheduler_address": typed("Train on workers of this Dask scheduler, such as tcp://host:8786."),
    "scheduler_file": typed("Train on workers of the scheduler that wrote this file.", str | Path | None),
}
"""Options that say which workers train; at most one may be given."""
WORKER_OPTIONS: Records = {
    **WAYS,
    "wait_seconds": typed("Maximum wait for workers; default: 300, a day with --cluster.", float | None),
    **JOB_OPTIONS,
}

app = typer.Typer(help=__doc__)


@contextmanager
def workers(given: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the ``client`` of ``fit``; jobs are submitted here, and cancelled however it ends."""
    ways = [name for name in WAYS if given[name] is not None]
    if len(ways) > 1:
        raise InputError(f"{' and '.join(map(flag, ways))} name different workers: give one of them")
    if given["cluster"] is None:
        for name in JOB_OPTIONS:
            if given[name] is not None:
                raise InputError(f"{flag(name)} goes with --cluster")
        named = given["scheduler_address"] or given["scheduler_file"]
        yield None if named is None else str(named)
        return
    options = _options(given)
    if given["memory"] is not None:  # workers would refuse it, too, when they have come through the queue
        memory_bytes = parse_bytes(given["memory"])
        if memory_bytes > (job_bytes := job_settings(given["cluster"], options).memory_bytes):
            raise BudgetError(
                f"memory={-(-memory_bytes >> 20)} MiB is more than a job has ({job_bytes >> 20} MiB); give "
                "less with --memory, or jobs more with --node-memory"
            )
    with Signals() as signals:
        with signals.allowed():
            jobs = start(given["cluster"], options, partial(say, aside=True))
        try:
            with signals.allowed():
                _announce(jobs, given["cluster"], options)
                yield jobs
        except (KeyboardInterrupt, Stopped):
            say("cancelling jobs ..", aside=True)
            raise
        finally:
            with unstoppable():  # whoever is impatient would leave jobs and keys behind
                jobs.close()


def call_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what else ``fit`` is told: how long it waits, and where the spill is, unless jobs say so."""
    on_jobs = given["cluster"] is not None
    told = {"wait_seconds": QUEUE_SECONDS, "spill": None} if on_jobs else {}
    return told if given["wait_seconds"] is None else told | {"wait_seconds": given["wait_seconds"]}


def _announce(jobs: Any, system: str, options: Mapping[str, Any]) -> None:
    settings, (command, page) = job_settings(system, options), dashboard_hint(jobs)
    numbers = sorted((job.job_id for job in jobs.workers.values()), key=lambda number: (len(number), number))
    gigabytes, walltime = settings.memory_bytes / 1e9, walltime_text(settings.walltime_seconds)
    say(
        f"submitted to {system}: {', '.join(numbers)} ({counted(settings.nodes, 'job')}, each of "
        f"{counted(settings.cores, 'core')}, {gigabytes:.3g} GB, {walltime})\n"
        f"logs of jobs: {settings.logs}\n"
        f"dashboard: {command}\n"
        f"           and open {page}",
        aside=True,
    )


@app.command()
def init(
    out: Annotated[
        Path | None,
        typer.Option(help="Default: $OOCDL_SITE, or your own. /etc/oocdl/site.toml is everybody's."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a site file: defaults of jobs, from what this machine tells; asks nothing."""
    path, found = write_site(out, force)
    say(f"{path}: " + ", ".join([found.system, *(f"{name} {value}" for name, value in found.values.items())]))
    if found.doubt is not None:
        say(f"Not certain: {found.doubt}.")
    say("Look through it: what could not be found stands there as a comment.")


@app.command()
@with_options({"spill": ALL_OPTIONS["spill"]}, JOB_OPTIONS)
def show(system: Annotated[str, typer.Argument(help=f"{', '.join(SYSTEMS)}.")], **given: Any) -> None:
    """Print the script of the jobs that fit --cluster would submit; nothing is submitted."""
    options = _options(given)
    text, nodes = job_script(system, options), job_settings(system, options).nodes
    many = "the job" if nodes == 1 else f"the first of {nodes} jobs; others differ by --name"
    say(f"# {many}; <scheduler> and <keys> are known once it starts", aside=True)
    say(f"# defaults of the site file: {site_path() or 'there is none; see oocdl cluster init'}", aside=True)
    say(text.rstrip())


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: given[name] for name in (*JOB_OPTIONS, "spill") if given[name] is not None}
    return {name.removeprefix("node_"): value for name, value in found.items()}
