"""A real Slurm of three nodes on this machine: ``python -m tests.kit.slurm start``, or ``stop``.

munged, slurmctld and three slurmd, each of these in a network namespace of its own, joined by a bridge; jobs
have the memory that they ask for, and no more (cgroup). All files, keys and sockets are in ``ROOT``; nothing
of the machine's own Slurm or munge is touched. ``stop`` leaves nothing behind, also of a run that was killed.

Needs root, cgroups of version 1, and Debian's packages: ``apt-get install slurm-wlm munge``.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.kit import daemons
from tests.kit.daemons import end, path_of_daemons

ROOT = Path("/var/tmp/oocdl-slurm")
CONF, SITE, MUNGE_SOCKET = ROOT / "slurm.conf", ROOT / "site.toml", ROOT / "munge.socket"
BRIDGE, NETWORK, NODES = "oocdl-br", "10.77.0", ("oocdl-n1", "oocdl-n2", "oocdl-n3")
CGROUPS = Path("/sys/fs/cgroup")
COMMANDS = ("slurmctld", "slurmd", "sbatch", "scancel", "sinfo", "munged", "ip", "nsenter", "unshare")
START_SECONDS = 60.0

CONFIGURATION = f"""
ClusterName=oocdl
SlurmctldHost={{host}}({NETWORK}.254)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={MUNGE_SOCKET}
MpiDefault=none
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=1
SlurmctldPidFile={ROOT}/slurmctld.pid
SlurmdPidFile={ROOT}/%n.pid
SlurmdSpoolDir={ROOT}/spool/%n
StateSaveLocation={ROOT}/state
SlurmctldLogFile={ROOT}/log/slurmctld.log
SlurmdLogFile={ROOT}/log/%n.log
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=5
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
DefMemPerCPU=500
PartitionName=debug Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP
""" + "\n".join(
    f"NodeName={name} NodeHostname={name} NodeAddr={NETWORK}.{number} Port={17000 + number} CPUs=2 Boards=1 "
    "SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=6000 State=UNKNOWN"
    for number, name in enumerate(NODES, start=1)
)
MEMORY_IS_ENFORCED = f"""
CgroupPlugin=cgroup/v1
CgroupMountpoint={CGROUPS}
CgroupAutomount=no
ConstrainRAMSpace=yes
ConstrainCores=no
ConstrainDevices=no
"""
SITE_FILE = f"""
[slurm]
cores = 2
memory = "2GiB"
walltime = "00:20:00"
queue = "debug"
interface = "eth0"
scheduler_interface = "{BRIDGE}"
spill = "{ROOT}/disk/$SLURMD_NODENAME"
shared = "{ROOT}/shared"
"""


def missing() -> str | None:
    """Say why this machine cannot have it; None if it can."""
    found = daemons.lacking("a Slurm", COMMANDS, "slurm-wlm munge iproute2")
    if found is None and not all((CGROUPS / name).is_dir() for name in ("memory", "freezer")):
        return "needs cgroups of version 1 (memory, freezer)"
    return found


def environment() -> dict[str, str]:
    """What commands of Slurm, and of oocdl, need to know to use it."""
    return {"SLURM_CONF": str(CONF), "OOCDL_SITE": str(SITE), "PATH": path_of_daemons()}


def start() -> None:
    """Start all daemons, and wait until the nodes are idle."""
    stop()
    for folder in ("state", "log", "disk", "shared", *(f"spool/{name}" for name in NODES)):
        (ROOT / folder).mkdir(parents=True)
    ROOT.chmod(0o755)
    CONF.write_text(CONFIGURATION.format(host=socket.gethostname()))
    (ROOT / "cgroup.conf").write_text(MEMORY_IS_ENFORCED)
    SITE.write_text(SITE_FILE)
    key = ROOT / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    daemons.add_bridge(BRIDGE, NETWORK)
    for number, name in enumerate(NODES, start=1):
        daemons.add_host(BRIDGE, NETWORK, name, f"oocdl-v{number}", number)
    files = {"socket": MUNGE_SOCKET, "key-file": key}
    files |= {f"{what}-file": ROOT / f"munged.{what}" for what in ("pid", "log", "seed")}
    run("munged", *(f"--{name}={path}" for name, path in files.items()))
    run("slurmctld", "-f", CONF)
    for name in NODES:
        inside = f"hostname {name}; exec slurmd -f {CONF} -N {name}"
        run("nsenter", f"--net=/var/run/netns/{name}", "unshare", "-u", "bash", "-c", inside)
    wait_until(lambda: states() == {name: "idle" for name in NODES}, START_SECONDS, "all nodes are idle")


def stop() -> None:
    """Stop all daemons and jobs, and remove all that there was, in whatever state it is."""
    end([pid for name in ("slurmctld", *NODES, "munged") for pid in _pid(name)])
    for name in NODES:
        end([int(pid) for pid in run("ip", "netns", "pids", name, check=False).split()])
        # Else it goes some time after its namespace.
        run("ip", "link", "delete", f"oocdl-v{NODES.index(name) + 1}", check=False)
        run("ip", "netns", "delete", name, check=False)
    run("ip", "link", "delete", BRIDGE, check=False)
    for node in CGROUPS.glob("*/slurm_oocdl-n*"):
        _remove_cgroup(node)
    shutil.rmtree(ROOT, ignore_errors=True)


def states() -> dict[str, str]:
    """The state of each node, as Slurm has it."""
    lines = run("sinfo", "-h", "-N", "-o", "%N %T", check=False).splitlines()
    return dict(line.split() for line in lines)


def jobs() -> list[tuple[int, str, str]]:
    """Number, state and node of each job that is not over."""
    lines = run("squeue", "-h", "-o", "%A %T %N").splitlines()
    return sorted(
        (int(number), state, node) for number, state, node in (f"{line} - ".split()[:3] for line in lines)
    )


def run(*command: object, check: bool = True) -> str:
    """Run a command, with Slurm's environment; returns what it prints, and fails with what it says."""
    return daemons.run(*command, environment=environment(), check=check)


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until something holds; fails with the states of nodes."""
    daemons.wait_until(holds, seconds, what, states)


def _pid(name: str) -> list[int]:
    """A daemon of ours by its file, if it runs, and not another process that has its number by now."""
    with suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid = int((ROOT / f"{name}.pid").read_text())
        if str(ROOT) in Path(f"/proc/{pid}/cmdline").read_text():
            return [pid]
    return []


def _remove_cgroup(node: Path) -> None:
    for folder, _, _ in os.walk(node, topdown=False):
        tasks = Path(folder) / "cgroup.procs"
        end([int(pid) for pid in (tasks.read_text().split() if tasks.exists() else ())])
        with suppress(FileNotFoundError):
            os.rmdir(folder)


if __name__ == "__main__":
    daemons.main(sys.modules[__name__])
