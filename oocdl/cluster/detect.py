"""Writes a site file from what this machine tells: the batch system, its queue, nodes, disk and network."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from oocdl.cluster.job_options import TAKERS, walltime_text
from oocdl.cluster.site import SITE_VARIABLE, SYSTEMS, user_site
from oocdl.errors import InputError
from oocdl.storage.cache.spill_store import MEMORY_FILESYSTEMS
from oocdl.storage.files import filesystem

ASK_SECONDS = 10.0
LOCAL_DISKS = ("/localscratch", "/lscratch", "/scratch/local", "/local/scratch", "/local")
"""Usual mount points of nodes' disks; this machine is taken to be like the nodes."""
INTERNET = "8.8.8.8"
"""Dask finds this machine's address by the route to this host; nothing is sent."""
MOST_NODES = 100


@dataclass(frozen=True)
class Found:
    """The facts that were found; the admin fills in the missing keys."""

    system: str
    values: Mapping[str, str | int] = field(default_factory=dict)
    doubt: str | None = None
    """The point that the admin has to check, in a sentence; None: there is none."""


def find_site() -> Found:
    """Find the batch system whose commands are here; InputError if there is none."""
    values: Mapping[str, str | int] = {}
    addresses: Sequence[str] = []
    if shutil.which("sbatch"):
        nodes = _default_partition()
        system, values, addresses = "slurm", _slurm(nodes), [node[-1] for node in nodes]
    elif shutil.which("qsub") and (shutil.which("qconf") or os.environ.get("SGE_ROOT")):
        system, values, addresses = "sge", _sge(), _ask("qconf -sel")
    elif shutil.which("qsub"):  # as of SGE, too
        system, values = "pbs", _first("qstat -Q")
    elif shutil.which("bsub"):
        system, values = "lsf", _first("bqueues -noheader -o queue_name")
    elif shutil.which("condor_submit"):
        system = "htcondor"
    else:
        raise InputError(
            "there is no batch system here (none of sbatch, qsub, bsub, condor_submit): run this on a login "
            "node"
        )
    return _with_interface(Found(system, {**values, **_disk()}), addresses[:MOST_NODES])


def site_text(found: Found) -> str:
    """Write a site file: what was found, and as comments what an admin may add."""
    examples: dict[str, tuple[str, str | int | bool | list[str]]] = {
        "queue": ("queue, or partition", "long"),
        "account": ("who pays; users may give their own", "project"),
        "cores": ("of a job: one worker with so many threads", 16),
        "memory": ("of a job", "60GB"),
        "walltime": ("of a job; a job that has ended is submitted again", "08:00:00"),
        "spill": (
            "folder on a disk of the node; default: $TMPDIR or $TMP of the job, or /tmp",
            "/lscratch/$USER",
        ),
        "disk": ("room on that disk that a job asks for", "50GB"),
        "interface": ("network interface of nodes; default: by which a node reaches this machine", "ib0"),
        "scheduler_interface": ("of login nodes, that leads to nodes; default: of the default route", "eth0"),
        "resources": (
            "for -l, instead of what is derived from cores and memory",
            "mem_free={memory_per_core}",
        ),
        "parallel_environment": ("that gives cores of one host", "smp"),
        "prologue": ("shell lines of each job before its worker", ["module load gcc"]),
        "directives": ("further directives of each job, without prefix", ["--constraint=skylake"]),
        "shared": ("folder that all nodes see, for keys and logs; default: ~/.local/state/oocdl", "~/oocdl"),
        "tls": ("encrypt and authenticate all connections", True),
    }
    lines = [
        "# oocdl's site file: defaults for `oocdl fit --cluster` and `oocdl.cluster` on this machine.",
        "# What a user gives goes before what stands here. Without # in front: found on this machine.",
        "",
        f"[{found.system}]",
    ]
    for key, (comment, example) in examples.items():
        if key == "scheduler_interface" and found.doubt is not None:
            lines.append(f"# Not certain: {found.doubt}.")
        if found.system in TAKERS.get(key, SYSTEMS):
            known = key in found.values
            value = found.values[key] if known else example
            text = json.dumps(value, ensure_ascii=False)  # TOML writes these as JSON does
            lines.append(f"{'' if known else '# '}{key} = {text}  # {comment}")
    return "\n".join(lines) + "\n"


def write_site(path: Path | None = None, force: bool = False) -> tuple[Path, Found]:
    """Find the site, and write its file; returns where, and what was found.

    ``path``: default ``$OOCDL_SITE``, else the user's own; that of everybody is written where it is named.
    Raises InputError if there is no batch system, if there is a file (unless ``force``), or if it cannot be
    written.
    """
    target = path or Path(os.environ.get(SITE_VARIABLE) or user_site())
    if target.is_dir():
        raise InputError(f"the site file cannot be written: {target} is a folder; name a file")
    if target.exists() and not force:
        raise InputError(f"there is a site file {target} already; --force writes another over it")
    site = find_site()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(site_text(site))
    except OSError as error:
        raise InputError(f"the site file {target} cannot be written: {error.strerror}") from None
    return target, site


def _ask(command: str) -> list[str]:
    """Return the lines that a command prints; none if it fails, or takes too long."""
    try:
        done = subprocess.run(
            command.split(), capture_output=True, text=True, timeout=ASK_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _first(command: str) -> dict[str, str | int]:
    """Return the first queue that a command lists, after a heading if it underlines one."""
    lines = _ask(command)
    ruled = [number for number, line in enumerate(lines) if set(line) <= set("- ")]
    names = [line.split()[0] for line in lines[ruled[0] + 1 if ruled else 0 :]]
    return {"queue": names[0]} if names else {}


def _default_partition() -> list[list[str]]:
    """Return partition, cores, MiB, walltime and address of each node of the default partition."""
    rows = [line.split() for line in _ask("sinfo -h -N -o %P@%c@%m@%l@%o")]
    nodes = [row[0].split("@") for row in rows if len(row) == 1 and row[0].count("@") == 4]
    return [node for node in nodes if node[0].endswith("*")] or nodes[:1]


def _slurm(chosen: Sequence[Sequence[str]]) -> dict[str, str | int]:
    """Return a partition's name, the resources of its smallest node, and its longest walltime."""
    if not chosen:
        return {}
    name, _, _, limit, _ = chosen[0]
    facts: dict[str, str | int] = {
        "queue": name.rstrip("*"),
        "cores": min(int(node[1].rstrip("+")) for node in chosen),
        "memory": f"{min(int(node[2].rstrip('+')) for node in chosen)}MiB",
    }
    if limit[0].isdigit():
        minutes = limit.split(":")[0]
        facts["walltime"] = limit if limit.count(":") == 2 else walltime_text(int(minutes) * 60)
    return facts


def _sge() -> dict[str, str | int]:
    """Return the first queue, the parallel environment for slots of one host, and how memory is counted."""
    facts = _first("qconf -sql")
    rules = {name: dict(_pairs(f"qconf -sp {name}")).get("allocation_rule") for name in _ask("qconf -spl")}
    whole = [name for name, rule in rules.items() if rule == "$pe_slots"]
    if whole:
        facts["parallel_environment"] = "smp" if "smp" in whole else whole[0]
    # Name, shortcut, type, relation, requestable, consumable (YES: so much for each slot), ...
    if any(row[:1] == ["mem_free"] and row[5:6] == ["YES"] for row in map(str.split, _ask("qconf -sc"))):
        facts["resources"] = "mem_free={memory_per_core}"
    return facts


def _pairs(command: str) -> list[tuple[str, str]]:
    """Return the name and first value of each line that a command prints."""
    rows = [line.split() for line in _ask(command)]
    return [(row[0], row[1]) for row in rows if len(row) > 1]


def _disk() -> dict[str, str | int]:
    """Return a disk of this machine by a name that disks of nodes usually have."""
    for folder in map(Path, LOCAL_DISKS):
        if folder.is_dir() and os.access(folder, os.W_OK) and filesystem(folder) not in MEMORY_FILESYSTEMS:
            return {"spill": f"{folder}/$USER"}
    return {}


def _with_interface(found: Found, nodes: Sequence[str]) -> Found:
    """Add the interface of this machine that leads to all nodes, or a doubt which it is."""
    names = sorted({interface_to(address) or "none" for address in dict.fromkeys(nodes)})
    if len(names) == 1 and names != ["none"]:
        return replace(found, values={**found.values, "scheduler_interface": names[0]})
    if names:
        known = [name for name in names if name != "none"]
        why = f"this machine reaches nodes by network interface {' and '.join(known)}"
        if known != names:
            why = f"{why}, and others not at all" if known else "this machine has no route to nodes"
    else:
        why = f"{found.system} does not tell the addresses of nodes"
    usual = interface_to(INTERNET)
    default = "at 127.0.0.1, as there is no default route" if usual is None else f"at that of {usual}"
    return replace(
        found,
        doubt=f"{why}: the scheduler will listen {default}; if nodes reach this machine by another, set "
        "scheduler_interface",
    )


def interface_to(host: str) -> str | None:
    """Name the network interface by which this machine reaches a host; None if it does not."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    match = re.search(r" dev (\S+)", " ".join(_ask(f"ip -o route get {address}")))
    return match[1] if match and match[1] != "lo" else None
