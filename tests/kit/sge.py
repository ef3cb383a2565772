"""A real Grid Engine on this machine: ``python -m tests.kit.sge start``, or ``stop``.

sge_qmaster and one sge_execd, with a queue of four slots that is as Grid Engine makes queues (its shell is
csh, whatever the first line of a script says), and memory that is counted for each slot. All files are in
``ROOT``, ports are its own; nothing of the machine's own Grid Engine is touched. ``stop`` leaves nothing.

Needs root and Debian's packages: ``apt-get install gridengine-master gridengine-exec gridengine-client``.
"""

from __future__ import annotations

import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.kit import daemons
from tests.kit.daemons import end, path_of_daemons

ROOT = Path("/var/tmp/oocdl-sge")
SITE, COMMON, SPOOL = ROOT / "site.toml", ROOT / "default" / "common", ROOT / "spool"
PROGRAMS, SHARE = Path("/usr/lib/gridengine"), Path("/usr/share/gridengine")
COMMANDS = ("sge_qmaster", "sge_execd", "qsub", "qdel", "qstat", "qconf", "csh")
QUEUE, SLOTS, MEMORY = "all.q", 4, "6G"
START_SECONDS = 60.0

BOOTSTRAP = f"""admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {COMMON};{SPOOL}/qmaster
binary_path {ROOT}/bin
qmaster_spool_dir {SPOOL}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""
CONFIGURATION = {
    "execd_spool_dir": f"{SPOOL}/execd",
    "load_report_time": "00:00:01",
    "min_uid": "0",
    "min_gid": "0",
    "execd_params": "ENABLE_ADDGRP_KILL=true",
}
SCHEDULER = {
    "schedule_interval": "0:0:1",
    "flush_submit_sec": "1",
    "flush_finish_sec": "1",
    "job_load_adjustments": "NONE",
}
SITE_FILE = f"""
[sge]
cores = 2
memory = "2GiB"
walltime = "00:20:00"
queue = "{QUEUE}"
resources = "mem_free={{memory_per_core}}"
shared = "{ROOT}/shared"
directives = ["-v PYTHONPATH"]
"""


def missing() -> str | None:
    """Say why this machine cannot have it; None if it can."""
    packages = "gridengine-master gridengine-exec gridengine-client"
    return daemons.lacking("a Grid Engine", COMMANDS, packages)


def environment() -> dict[str, str]:
    """What commands of Grid Engine, and of oocdl, need to know to use it."""
    place = {"SGE_ROOT": str(ROOT), "SGE_CELL": "default", "OOCDL_SITE": str(SITE)}
    ports = {"SGE_QMASTER_PORT": "16444", "SGE_EXECD_PORT": "16445"}
    return {**place, **ports, "PATH": path_of_daemons()}


def start() -> None:
    """Start both daemons, and wait until the queue takes jobs."""
    stop()
    for folder in (COMMON, SPOOL / "qmaster/job_scripts", SPOOL / "execd", ROOT / "disk", ROOT / "shared"):
        folder.mkdir(parents=True)
    for name in ("bin", "utilbin", "lib"):
        (ROOT / name).symlink_to(f"/var/lib/gridengine/{name}")
    (ROOT / "util").symlink_to(SHARE / "util")
    host = socket.gethostname()
    (COMMON / "bootstrap").write_text(BOOTSTRAP)
    (COMMON / "act_qmaster").write_text(f"{host}\n")
    (COMMON / "host_aliases").write_text(f"{host} localhost\n")
    SITE.write_text(SITE_FILE)
    run(PROGRAMS / "spoolinit", "classic", "libspoolc", f"{COMMON};{SPOOL}/qmaster", "init")
    defaults = _changed((SHARE / "default-configuration").read_text(), CONFIGURATION)
    run(PROGRAMS / "spooldefaults", "configuration", _file(defaults))
    for kind, folder in (("complexes", "centry"), ("pes", "pe"), ("usersets", "usersets")):
        run(PROGRAMS / "spooldefaults", kind, SHARE / "util" / "resources" / folder)
    run(PROGRAMS / "spooldefaults", "managers", "root")
    run("sge_qmaster")
    wait_until(lambda: host in run("qconf", "-sh", check=False), START_SECONDS, "the qmaster answers")
    run("sge_execd")
    wait_until(lambda: host in run("qconf", "-sel", check=False), START_SECONDS, "the host is known")
    run("qconf", "-as", host)
    run("qconf", "-Msconf", _file(_changed(run("qconf", "-ssconf"), SCHEDULER)))
    complexes = re.sub(r"(?m)^(mem_free .*) NO ( *0 .*)$", r"\1 YES\2", run("qconf", "-sc"))
    run("qconf", "-Mc", _file(complexes))
    run("qconf", "-mattr", "exechost", "complex_values", f"mem_free={MEMORY}", host)
    queue = {"qname": QUEUE, "hostlist": host, "slots": str(SLOTS), "load_thresholds": "NONE"}
    queue |= {"tmpdir": f"{ROOT}/disk", "shell": "/bin/csh", "shell_start_mode": "posix_compliant"}
    run("qconf", "-Aq", _file(_changed(run("qconf", "-sq"), queue)))
    wait_until(lambda: f"0/0/{SLOTS}" in states() and "NA" not in states(), START_SECONDS, "the queue is up")


def stop() -> None:
    """Stop both daemons and all jobs, and remove all that there was, in whatever state it is."""
    while pids := list(processes()):
        end(pids)
    shutil.rmtree(ROOT, ignore_errors=True)


def processes() -> Iterator[int]:
    """Daemons and shepherds, which are in their folders of ``ROOT``, and processes of jobs."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            inside = (process / "cwd").readlink().is_relative_to(SPOOL)
            job = f"SGE_JOB_SPOOL_DIR={SPOOL}" in (process / "environ").read_text(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        if inside or job:
            yield int(process.name)


def states() -> str:
    """The queue, as Grid Engine has it."""
    return run("qstat", "-f", check=False)


def jobs() -> list[tuple[int, str, str]]:
    """Number, state ("r": it runs) and queue of each job that is not over."""
    rows = [line.split() for line in run("qstat").splitlines()[2:]]
    return sorted((int(row[0]), row[4], row[7] if "@" in row[7] else "-") for row in rows)


def run(*command: object, check: bool = True) -> str:
    """Run a command, with Grid Engine's environment; returns what it prints, and fails with what it says."""
    return daemons.run(*command, environment=environment(), check=check)


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until something holds; fails with the state of the queue."""
    daemons.wait_until(holds, seconds, what, states)


def _changed(text: str, values: dict[str, str]) -> str:
    """A form of ``qconf`` with other values."""
    for name, value in values.items():
        text, count = re.subn(rf"(?m)^{name}\s.*$", f"{name} {value}", text)
        assert count == 1, name
    return text


def _file(text: str) -> Path:
    file = ROOT / "form"
    file.write_text(text)
    return file


if __name__ == "__main__":
    daemons.main(sys.modules[__name__])
