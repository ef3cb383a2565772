"""Defines the options of a job: ``JobOptions`` as a user gives them, ``JobSettings`` once checked.

An option comes from the call, else from the table of its system in the site file, else from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from oocdl.cluster.site import SYSTEMS, Site, read_site
from oocdl.config import flag, nearest, parse_bytes, whole
from oocdl.errors import InputError
from oocdl.host.paths import path_of, state_folder

LEAST_WALLTIME_SECONDS = 60
LEAST_MEMORY_BYTES = 64 << 20
"""Minimum memory of a job: a worker takes more before it holds anything, so less means another unit."""
LEAST_MARGIN_SECONDS, MOST_MARGIN_SECONDS = 15, 300
"""Bounds of the seconds that a worker has to leave in good order, and hand on what it holds."""
STAGGER_SHARE = 0.03
MOST_STAGGER_SECONDS = 240
TUNNEL_PORT = 8787
"""Port on the user's own machine, where a tunnel to the dashboard begins."""
JOB_SPILL = "${TMPDIR:-${TMP:-/tmp}}"
"""Spill folder, for the job's shell: these variables name a folder of the job's own (on SGE, ``TMP``)."""


TAKERS = {
    "disk": ("slurm", "htcondor"),
    "resources": ("pbs", "sge"),
    "parallel_environment": ("sge",),
    "queue": ("slurm", "pbs", "sge", "lsf"),
}
"""Options that only some batch systems have."""


class JobOptions(TypedDict, total=False):
    """Options of ``oocdl.cluster.slurm`` and its like, all of them keywords.

    Each may also stand in the site file, as the default of everybody.
    """

    nodes: int
    """Jobs, each with one worker process; default 1."""
    cores: int
    """Cores per job, which are the threads of its worker."""
    memory: int | str
    """Memory per job, as "60GB" or bytes: requested from the batch system, and the worker's limit."""
    walltime: str
    """Time limit of a job, as "HH:MM:SS" or "D-HH:MM:SS". A job that has ended is submitted again."""
    queue: str | None
    """Queue, or partition of Slurm."""
    account: str | None
    """Account, or project, that pays."""
    spill: str | None
    """Folder on a disk of the node, for what does not fit in memory. The shell of the job expands
    variables. Default: ``$TMPDIR`` of the job, else ``$TMP``, or /tmp."""
    disk: int | str | None
    """Room that a job asks for on that disk: HTCondor needs it, Slurm takes it."""
    interface: str | None
    """Network interface of the nodes that workers listen at, such as "ib0"; default: the one by which a node
    reaches this machine."""
    scheduler_interface: str | None
    """Network interface of this machine that the scheduler listens at. Default: ``interface``, else the
    one of the default route."""
    prologue: list[str]
    """Lines of shell for each job before its worker starts, such as "module load gcc"."""
    directives: list[str]
    """Further directives of the job, without their prefix, such as "--constraint=skylake"."""
    resources: str | None
    """PBS and SGE: the ``-l`` of a job, where the default is not what the site wants. ``{memory}`` in it is
    the job's, ``{memory_per_core}`` a core's: so is asked for what SGE counts for each slot."""
    parallel_environment: str | None
    """SGE: the parallel environment that gives cores of one host; default "smp"."""
    python: str | None
    """Python of the nodes; default: the one that runs this."""
    shared: str | None
    """Folder that all nodes see, for keys of TLS and logs of jobs; default: oocdl's in ``$XDG_STATE_HOME``,
    or in ~/.local/state."""
    tls: bool
    """Encrypt and authenticate all connections, with keys made for this cluster alone; default True."""


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """``JobOptions``, checked and complete."""

    system: str
    nodes: int
    cores: int
    memory_bytes: int
    walltime_seconds: int
    queue: str | None
    account: str | None
    spill: str
    disk_bytes: int | None
    interface: str | None
    scheduler_interface: str | None
    prologue: tuple[str, ...]
    directives: tuple[str, ...]
    resources: str | None
    parallel_environment: str
    python: str | None
    shared: Path
    tls: bool

    @property
    def logs(self) -> Path:
        """Folder of the logs of jobs."""
        return self.shared / "logs"

    @property
    def stagger_seconds(self) -> int:
        """Seconds by which workers leave earlier or later, so that they leave at different times."""
        return int(min(MOST_STAGGER_SECONDS, STAGGER_SHARE * self.walltime_seconds))

    @property
    def lifetime_seconds(self) -> int:
        """Seconds after which a worker leaves in good order, before the batch system ends its job."""
        return self.walltime_seconds - self._margin_seconds - self.stagger_seconds

    @property
    def deadline_seconds(self) -> int:
        """Seconds until a job whose worker has not left is cancelled: its nanny may have restarted it."""
        return self.walltime_seconds - self._margin_seconds // 2

    @property
    def _margin_seconds(self) -> int:
        return max(LEAST_MARGIN_SECONDS, min(MOST_MARGIN_SECONDS, self.walltime_seconds // 10))


def job_settings(system: str, options: Mapping[str, Any]) -> JobSettings:
    """Check options, with the site file's where none are given.

    An option that is None counts as not given. Raises InputError.
    """
    if system not in SYSTEMS:
        raise InputError(f"there is no batch system '{system}'; choose one of: {', '.join(SYSTEMS)}")
    known = tuple(JobOptions.__annotations__)
    for name in options:
        if name not in known:
            hint = nearest(name, known) or f"; it takes {', '.join(known)}"
            raise InputError(f"oocdl.cluster.{system} has no option '{name}'{hint}")
    site = read_site(system, known)
    values = {**site.values, **{name: value for name, value in options.items() if value is not None}}
    _refuse_others(system, values)
    for name, example in (("cores", "16"), ("memory", "'60GB'"), ("walltime", "'08:00:00'")):
        if name not in values:
            raise InputError(f"a job of {system} needs {name}, such as {example}: {_where(site)}")
    try:
        return _checked(system, values)
    except InputError as error:
        if not any(name in site.values for name in values.keys() - options.keys()):
            raise
        raise InputError(f"{error} (options that were not given are of {site.path})") from None


def _where(site: Site) -> str:
    return f"give it, or write it in the site file ({site.path or 'made by `oocdl cluster init`'})"


def _checked(system: str, found: Mapping[str, Any]) -> JobSettings:
    texts: dict[str, Any] = {
        name: None if found.get(name) is None else _line(name, found[name])
        for name in ("queue", "account", "interface", "scheduler_interface", "resources", "python", "spill")
    }
    return JobSettings(
        **{**texts, "spill": texts["spill"] or JOB_SPILL},
        system=system,
        nodes=whole("nodes", found.get("nodes", 1)),
        cores=whole("cores", found["cores"]),
        memory_bytes=_size("memory", found["memory"], LEAST_MEMORY_BYTES),
        walltime_seconds=parse_walltime(found["walltime"]),
        disk_bytes=None if found.get("disk") is None else _size("disk", found["disk"]),
        prologue=_lines("prologue", found.get("prologue", ())),
        directives=_lines("directives", found.get("directives", ())),
        parallel_environment=_line("parallel_environment", found.get("parallel_environment", "smp")),
        shared=_shared(found.get("shared")),
        tls=flag("tls", found.get("tls", True)),
    )


def _refuse_others(system: str, found: Mapping[str, Any]) -> None:
    for name, systems in TAKERS.items():
        if found.get(name) is not None and system not in systems:
            raise InputError(f"{name} goes with {' and '.join(systems)}, not with {system}")
    if system == "htcondor" and found.get("disk") is None:
        raise InputError(
            "a job of htcondor has to ask for disk: give disk='50GB', or write it in the site file"
        )


def parse_walltime(walltime: Any) -> int:
    """Read a walltime in seconds; InputError if it is none, or less than a minute.

    >>> parse_walltime("08:00:00"), parse_walltime("1-12:00:00")
    (28800, 129600)
    """
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,4}):([0-5]\d):([0-5]\d)", str(walltime).strip())
    if match is None:
        raise InputError(f"walltime takes HH:MM:SS or D-HH:MM:SS, such as 08:00:00, got '{walltime}'")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total < LEAST_WALLTIME_SECONDS:
        raise InputError(f"a walltime of {walltime} is too short: workers need a minute at least")
    return total


def walltime_text(seconds: int) -> str:
    """Write a walltime as every batch system but LSF reads it.

    >>> walltime_text(129600)
    '36:00:00'
    """
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _size(name: str, value: Any, least_bytes: int = 1) -> int:
    try:
        size_bytes = parse_bytes(value)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    if size_bytes < least_bytes:
        raise InputError(f"{name} of a job is {size_bytes} bytes, which no worker can do with; write '60GB'")
    return size_bytes


def _line(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise InputError(f"{name} takes one line of text, got {value!r}")  # else it adds lines to the script
    return value


def _lines(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise InputError(f"{name} takes a list of lines, got {value!r}")
    return tuple(_line(name, line) for line in value)


def _shared(value: Any) -> Path:
    try:
        folder = state_folder() if value is None else path_of("shared", value).expanduser().absolute()
    except RuntimeError as error:
        raise InputError(f"shared: {error} Name the folder by its whole path") from None
    if any(char.isspace() or char in "'\"\\$`;&|<>()*?#" for char in str(folder)):
        raise InputError(f"the shared folder '{folder}' has a character that shells of jobs would not keep")
    return folder
