"""Hosts on this machine: network namespaces on a bridge, each with a worker, and a memory cgroup and a disk.


Needs root. Everything is removed at the end, also what an earlier call has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.kit import daemons
from tests.kit.daemons import add_bridge, add_host, ip, path_of_daemons
from tests.kit.processes import DASK_SCHEDULER, DASK_WORKER, Cluster, Kept, free_port, kept

BRIDGE, NETWORK = "oocdl-hbr", "10.79.0"
MEMORY = Path("/sys/fs/cgroup/memory")


def missing() -> str | None:
    """Say why this machine cannot have hosts; None if it can."""
    return daemons.lacking("a network", ["ip"], "iproute2")


@dataclass(eq=False)
class Hosts:
    """A scheduler on the bridge, and a worker in each host, which is started again when it ends."""

    cluster: Cluster
    names: tuple[str, ...]

    def cut(self, number: int) -> None:
        """Cut the link of a host; nobody is told."""
        ip("link", "set", f"oocdl-h{number}", "down")

    def mend(self, number: int) -> None:
        """Undo ``cut``."""
        ip("link", "set", f"oocdl-h{number}", "up")

    def part(self, apart: bool) -> None:
        """Cut all links between hosts, or undo that; each still reaches the scheduler."""
        for number in range(len(self.names)):
            run("bridge", "link", "set", "dev", f"oocdl-h{number}", "isolated", "on" if apart else "off")

    def throttle(self, number: int, rate: str) -> None:
        """Limit what a host sends, as by ``tc``: "400mbit"."""
        limit = ("tbf", "rate", rate, "burst", "512kb", "latency", "200ms")
        ip("netns", "exec", self.names[number], "tc", "qdisc", "add", "dev", "eth0", "root", *limit)

    def peak_bytes(self, number: int) -> int:
        """The most that the cgroup of a host has had, page cache included."""
        return int((_cgroup(number) / "memory.max_usage_in_bytes").read_text())

    def killed(self, number: int) -> int:
        """How many processes of a host the kernel has killed for memory."""
        lines = (_cgroup(number) / "memory.oom_control").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@contextmanager
def hosts(
    folder: Path, count: int, memory_bytes: int | None = None, disk_mib: int | None = None
) -> Iterator[Hosts]:
    """Hosts with a worker of one thread each, without a nanny.

    ``memory_bytes``: what all processes of a host may have; ``disk_mib``: the size of its own disk, where the
    worker spills.
    """
    names = tuple(f"oocdl-host{number}" for number in range(count))
    _remove(folder, count)
    port = free_port()
    address = f"tcp://{NETWORK}.254:{port}"
    workers = []
    try:
        add_bridge(BRIDGE, NETWORK)
        for number, name in enumerate(names):
            add_host(BRIDGE, NETWORK, name, f"oocdl-h{number}", number + 1)
            local = folder / f"disk{number}"
            local.mkdir(exist_ok=True)
            if disk_mib is not None:
                _add_disk(folder, number, disk_mib)
            inside = f"cd {local}; "
            if memory_bytes is not None:
                _cgroup(number).mkdir()
                (_cgroup(number) / "memory.limit_in_bytes").write_text(str(memory_bytes))
                inside += f"echo $$ > {_cgroup(number)}/cgroup.procs; "
            worker = [
                *DASK_WORKER, address, "--nthreads", "1", "--no-dashboard", "--no-nanny",
                "--memory-limit", "0", "--host", f"{NETWORK}.{number + 1}", "--local-directory", str(local),
            ]  # fmt: skip
            prefix = (
                "nsenter", f"--net=/var/run/netns/{name}", "unshare", "-u", "bash", "-c",
                f'hostname {name}; {inside} exec "$@"', "host",
            )  # fmt: skip
            workers.append(Kept(worker, folder / f"{name}.log", prefix=prefix))
        scheduler = Kept(
            [*DASK_SCHEDULER, "--host", f"{NETWORK}.254", "--port", str(port), "--no-dashboard"],
            folder / "scheduler.log",
        )
        with kept(Cluster(folder, address, scheduler, workers)) as cluster:
            yield Hosts(cluster, names)
    finally:
        _remove(folder, count)


def run(*command: object, check: bool = True) -> None:
    """Run a command of the system."""
    daemons.run(*command, environment={"PATH": path_of_daemons()}, check=check)


def _cgroup(number: int) -> Path:
    return MEMORY / f"oocdl-host{number}"


def _add_disk(folder: Path, number: int, size_mib: int) -> None:
    image = folder / f"disk{number}.img"
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    run("mkfs.ext4", "-q", "-F", image)
    run("mount", "-o", "loop", image, folder / f"disk{number}")


def _remove(folder: Path, count: int) -> None:
    """Remove all that hosts are, as far as it is there."""
    for number in range(count):
        run("umount", "-l", folder / f"disk{number}", check=False)
        ip("link", "delete", f"oocdl-h{number}", check=False)
        ip("netns", "delete", f"oocdl-host{number}", check=False)
        with suppress(OSError):
            _cgroup(number).rmdir()
        (folder / f"disk{number}.img").unlink(missing_ok=True)
    ip("link", "delete", BRIDGE, check=False)
