"""Run a command inside a memory cgroup, and watch how much it takes.

Without a limit the page cache is a hidden budget: files that were just written are
read back from memory. Inside a cgroup the cache counts as well, and a process that
takes more than the limit is killed. Needs root; versions 1 and 2.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

ROOT = Path("/sys/fs/cgroup")
KILLED = 137
PERIOD_SECONDS = 0.01


class NoCage(Exception):
    """This machine does not let us limit memory."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    result: Mapping[str, Any] = field(default_factory=dict)
    """The last line that it printed, as JSON; empty if it failed."""
    resident_bytes: int = 0
    """Peak of its processes' resident memory, mapped files included."""
    anonymous_bytes: int = 0
    """Peak of what is their own."""
    disk_bytes: int = 0
    """The most that its disk had in use beyond what it had before; what others write counts, too."""
    oom_kills: int = 0
    message: str = ""
    """The end of what it wrote to stderr."""


@contextmanager
def cage(limit_bytes: int) -> Iterator[Path]:
    """A new memory cgroup with a limit; gone afterwards."""
    first = (ROOT / "memory").is_dir()
    folder = (ROOT / "memory" if first else ROOT) / f"oocdl-perf-{os.getpid()}"
    try:
        folder.mkdir()
        limit = folder / ("memory.limit_in_bytes" if first else "memory.max")
        limit.write_text(str(limit_bytes))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        raise NoCage(f"no memory cgroup can be made here ({error.strerror}): run as root") from error
    try:
        yield folder
    finally:
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.05)  # the kernel is not done with its processes


def _oom_kills(folder: Path) -> int:
    file = folder / "memory.oom_control"
    file = file if file.is_file() else folder / "memory.events"
    for line in file.read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def _resident(pid: int) -> tuple[int, int]:
    """(peak resident, anonymous now) of a process; zeros if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return int(found.get("VmHWM", 0)) * 1024, int(found.get("RssAnon", 0)) * 1024


def _used(disk: Path) -> int:
    """Bytes in use on the file system of a folder."""
    stats = os.statvfs(disk)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


def watch(
    command: Sequence[str],
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 3600,
    disk: Path | None = None,
) -> Outcome:
    """Run ``command``, in the cgroup ``folder`` if one is given; sample its memory, and its ``disk``."""

    def enter() -> None:
        if folder is not None:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    # Into files: a pipe that nobody reads meanwhile would fill up.
    with TemporaryFile("w+") as out, TemporaryFile("w+") as error:
        process = subprocess.Popen(
            list(command), stdout=out, stderr=error, preexec_fn=enter, env={**os.environ, **(env or {})}
        )
        resident = anonymous = most = 0
        before = _used(disk) if disk else 0
        ends = time.monotonic() + timeout
        while process.poll() is None:
            peak, now = _resident(process.pid)
            resident, anonymous = max(resident, peak), max(anonymous, now)
            most = max(most, _used(disk) - before if disk else 0)
            if time.monotonic() > ends:
                process.kill()
            time.sleep(PERIOD_SECONDS)
        texts = []
        for stream in (out, error):
            stream.seek(0)
            texts.append(stream.read().strip())
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    lines = texts[0].splitlines()
    result = json.loads(lines[-1]) if code == 0 and lines else {}
    kills = _oom_kills(folder) if folder is not None else 0
    return Outcome(code, result, resident, anonymous, most, kills, texts[1][-2000:])
