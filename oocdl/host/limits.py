"""Reads what this process may use (memory by every limit, cores), its own size, and which code it runs."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from oocdl.errors import BudgetError, InputError

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
DEFAULT_BUDGET_SHARE = 0.7  # share of the available memory that is the budget by default
CGROUP_FOLDER = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limit:
    """The memory limit of this process in bytes, and the name of what sets it."""

    nbytes: int
    name: str
    shared: bool = True  # whether all processes to which it applies have so much together, not each of them


def available() -> Limit:
    """Return the least of RAM, rlimits, Slurm's allocation and the cgroups of all ancestors."""
    ram = Limit(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine's memory")
    found = [ram, *_rlimits(), *_slurm_limits(os.environ), *_cgroup_limits(_proc("cgroup"), CGROUP_FOLDER)]
    return min(found, key=lambda limit: limit.nbytes)


def default_budget_bytes() -> int:
    """Return the budget for a user who gives none: a safe share of the available memory."""
    return int(available().nbytes * DEFAULT_BUDGET_SHARE)


def check_budget(budget_bytes: int) -> None:
    """Raise BudgetError for a budget that the process cannot have: a run would be killed in the middle."""
    limit = available()
    if budget_bytes > limit.nbytes:
        raise BudgetError(
            f"memory={-(-budget_bytes >> 20)} MiB is more than the {limit.nbytes >> 20} MiB that this "
            f"process may use ({limit.name}); give less, or raise that limit"
        )


def _rlimits() -> Iterator[Limit]:
    """Yield limits of ``setrlimit``, less what this process has mapped without having it in memory."""
    status = _status_bytes()
    # Address space counts libraries and thread stacks too, of which most is never touched.
    unused = {
        "RLIMIT_AS": status.get("VmSize", 0) - status.get("VmRSS", 0),
        "RLIMIT_DATA": status.get("VmData", 0) - status.get("RssAnon", 0),
        "RLIMIT_RSS": 0,
    }
    for name, idle in unused.items():
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            nbytes = max(soft - max(idle, 0), 0)
            yield Limit(nbytes, f"{name} of {soft >> 20} MiB", shared=False)


def _slurm_limits(environment: Mapping[str, str]) -> Iterator[Limit]:
    """Yield what Slurm has given this job on this node. Its variables are in MiB; 0 means all there is."""
    if "SLURM_JOB_ID" not in environment:
        return

    def number(name: str) -> int:
        text = environment.get(name, "0")
        if not text.isdigit():
            raise InputError(f"{name}='{text}' is not a number of Slurm's; unset it, or pass memory=")
        return int(text)

    job = f"Slurm job {environment['SLURM_JOB_ID']}"
    node, share = number("SLURM_MEM_PER_NODE"), number("SLURM_MEM_PER_CPU") * number("SLURM_CPUS_ON_NODE")
    if node:
        yield Limit(node << 20, f"{job}, SLURM_MEM_PER_NODE")
    if share:
        yield Limit(share << 20, f"{job}, SLURM_MEM_PER_CPU x SLURM_CPUS_ON_NODE")


def _cgroup_limits(lines: list[str], mount: Path) -> Iterator[Limit]:
    """Yield limits of the process's memory cgroup and of its ancestors, versions 1 and 2."""
    for line in lines:
        _, controllers, place = line.split(":", 2)
        names: tuple[str, ...] = ("memory.limit_in_bytes",)
        if controllers == "":
            root, names = mount, ("memory.max", "memory.high")
        elif "memory" in controllers.split(","):
            root = mount / "memory"
        else:
            continue
        inner = Path(place.lstrip("/"))
        for file in (root / folder / name for folder in (inner, *inner.parents) for name in names):
            text = file.read_text().strip() if file.is_file() else "max"
            if text.isdigit():
                yield Limit(int(text), f"memory cgroup {file}")


def _proc(name: str) -> list[str]:
    """Return the lines of a file of this process in ``/proc``; none where there is no such file."""
    try:
        return Path("/proc/self", name).read_text().splitlines()
    except OSError:
        return []  # not Linux


def _status_bytes() -> dict[str, int]:
    """Return the sizes in ``/proc/self/status`` in bytes, by name."""
    rows = [line.split() for line in _proc("status") if line.endswith(" kB")]
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows}


def anonymous_bytes() -> int:
    """Return the bytes of this process that are resident now, without mapped files."""
    return _anonymous_bytes(os.pread(_statm(os.getpid()), 128, 0))


def anonymous_bytes_of(pid: int) -> int:
    """Return the same of another process. Raises OSError if it is gone."""
    return _anonymous_bytes(Path(f"/proc/{pid}/statm").read_bytes())


def _anonymous_bytes(statm: bytes) -> int:
    resident, shared = map(int, statm.split()[1:3])
    return (resident - shared) * _PAGE_BYTES


@cache
def _statm(pid: int) -> int:
    """A descriptor of this process's sizes, which stays open; one that was forked needs one of its own."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def most_taken_bytes(call: Callable[[], object]) -> int | None:
    """Call ``call``, and return the most that this process had at once meanwhile beyond what it had before.

    None, and nothing is called, where Linux does not tell (``/proc/self/clear_refs`` cannot be written).
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew from what is resident
    except OSError:
        return None
    before = _status_bytes()["VmHWM"]
    call()
    return _status_bytes()["VmHWM"] - before


def machine_seconds() -> tuple[float, float]:
    """Return the seconds that all processors were busy, and were not, since the start; 0 if nothing tells."""
    try:
        with open("/proc/stat") as stat:
            user, nice, system, idle, waiting, *interrupts = map(int, stat.readline().split()[1:8])
    except (OSError, ValueError):
        return 0.0, 0.0  # not Linux
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + sum(interrupts)) / ticks, (idle + waiting) / ticks


def cores() -> int:
    """Return the number of processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))


@cache
def processor() -> str:
    """Return the name of the processor, or of its architecture where the system does not tell more."""
    cpuinfo = Path("/proc/cpuinfo")  # Linux only; not every processor has a name there
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(models), platform.machine())


@cache
def installed_version(package: str) -> str:
    """Return the version of a Python package, or of its build for training; "?" if neither is installed."""
    for name in (package, f"{package}-training"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "?"


@cache
def code_digest() -> str:
    """Return a digest of all modules of oocdl, as they are on this process's disk."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
