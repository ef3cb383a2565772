"""What this process may really use: memory by every limit that applies, cores, its own size."""

from __future__ import annotations

import os
import platform
import resource
from importlib import metadata
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SHARE = 0.7
"""Of what may be used, the part that is taken by default."""


def available_bytes() -> int:
    """Memory that this process may use: the least of RAM, rlimits and cgroups of all ancestors."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_RSS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    limits.extend(_cgroup_limits())
    return min(limits)


def default_budget_bytes() -> int:
    """The budget where the user gives none: a safe share of what may be used."""
    return int(available_bytes() * SHARE)


def _cgroup_limits() -> list[int]:
    """Limits of the process's memory cgroup and of its ancestors, versions 1 and 2."""
    found: list[int] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found  # not Linux: there are no cgroups
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        folder = root / place.lstrip("/")
        while True:
            file = folder / name
            text = file.read_text().strip() if file.is_file() else "max"
            if text.isdigit():
                found.append(int(text))
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent
    return found


def anonymous_bytes() -> int:
    """Memory of this process now that is its own: resident, without mapped files."""
    with Path("/proc/self/statm").open("rb", buffering=0) as file:
        resident, shared = map(int, file.read().split()[1:3])
    return (resident - shared) * _PAGE_BYTES


def cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def processor() -> str:
    """The name of the processor; of its architecture where the system does not tell more."""
    cpuinfo = Path("/proc/cpuinfo")  # Linux only; not every processor has a name there
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(models), platform.machine())


def installed_version(package: str) -> str:
    """The version of a Python package, or of its build for training; "?" if it has none."""
    for name in (package, f"{package}-training"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "?"
