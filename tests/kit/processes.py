"""A scheduler and workers as processes of their own, which are started again as a batch system would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import distributed

ROOT = Path(__file__).parents[2]
AGAIN_SECONDS = 2.0
"""After so long a process that has ended is started again."""


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@dataclass(eq=False)
class Kept:
    """A process that is started again whenever it ends, as long as it is kept."""

    command: Sequence[str]
    log: Path
    nanny: bool = False
    prefix: Sequence[str] = ()
    """Words before the command, such as those that enter a namespace."""
    process: subprocess.Popen[bytes] | None = None
    ended: float = 0.0
    starts: int = 0

    def tend(self) -> None:
        """Start it, if it has ended some seconds ago."""
        if self.process is not None:
            if self.process.poll() is None:
                return
            self.process, self.ended = None, time.monotonic()
        if self.starts and time.monotonic() - self.ended < AGAIN_SECONDS:
            return
        self.starts += 1
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, *self.command], stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PYTHONPATH": paths},
            )  # fmt: skip

    def pid(self) -> int | None:
        """The process that works: that of a worker, not its nanny's."""
        if self.process is None or self.process.poll() is not None:
            return None
        if not self.nanny:
            return self.process.pid
        for line in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for child in line.read_text().split():
                with suppress(OSError):
                    if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return int(child)
        return None

    def send(self, number: signal.Signals) -> int | None:
        """Send a signal to the process that works; returns whom, None if there is none."""
        pid = self.pid()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                return pid
        return None

    def end(self) -> None:
        """End it and all that it has started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@dataclass(eq=False)
class Cluster:
    """A scheduler, and workers that are kept alive."""

    folder: Path
    address: str
    scheduler: Kept
    workers: list[Kept]
    over: threading.Event = field(default_factory=threading.Event)

    def keep(self) -> None:
        """What the thread does that keeps them alive."""
        while not self.over.wait(0.2):
            for one in (self.scheduler, *self.workers):
                one.tend()


@contextmanager
def cluster(
    folder: Path,
    nannies: Sequence[bool],
    options: Sequence[str] = (),
    dashboard: bool = False,
    scheduler_command: Sequence[str] | None = None,
) -> Iterator[Cluster]:
    """A scheduler and a worker of one thread each, with a nanny or not; all are ended at the end."""
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    page = ["--dashboard-address", "127.0.0.1:0"] if dashboard else ["--no-dashboard"]
    scheduler = Kept(
        [*(scheduler_command or DASK_SCHEDULER), "--host", "127.0.0.1", "--port", str(port), *page],
        folder / "scheduler.log",
    )
    workers = [
        Kept(
            [*DASK_WORKER, address, "--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1",
             "--local-directory", str(folder / f"worker{number}"),
             "--nanny" if nanny else "--no-nanny", *options],
            folder / f"worker{number}.log",
            nanny,
        )
        for number, nanny in enumerate(nannies)
    ]  # fmt: skip
    with kept(Cluster(folder, address, scheduler, workers)) as made:
        yield made


@contextmanager
def kept(made: Cluster) -> Iterator[Cluster]:
    """Keep its processes alive; all are ended at the end."""
    keeper = threading.Thread(target=made.keep, daemon=True)
    keeper.start()
    try:
        yield made
    finally:
        made.over.set()
        keeper.join()
        for one in (*made.workers, made.scheduler):
            one.end()


_CLI = "import sys; from dask.__main__ import main; main()"
DASK_SCHEDULER = (sys.executable, "-c", _CLI, "scheduler")
WITHOUT_OOCDL = (sys.executable, "-c", f"import sys; sys.modules['oocdl'] = None; {_CLI}", "scheduler")
DASK_WORKER = (sys.executable, "-c", _CLI, "worker")


def left_behind(dask_worker: Any) -> list[str]:
    """What a worker still has of a run, in words; runs there."""
    from oocdl.runtime import execute
    from oocdl.runtime.cluster import dask_limits, member
    from oocdl.storage.cache import chunk

    found = [f"member of {name}" for name in member.members]
    found += [f"context {name}" for name in execute._contexts]
    found += [] if type(chunk.home()) is chunk.Home else ["a memory tier"]
    found += [f"plugin {name}" for name in dask_worker.plugins if name.startswith("oocdl-")]
    found += [f"{path}" for path in Path(dask_worker.local_directory).rglob("spill-*")]
    if dask_worker.state.nthreads != dask_worker.executors["default"]._max_workers:
        found.append(f"{dask_worker.state.nthreads} threads")
    monitor = dask_worker.periodic_callbacks.get(dask_limits.MONITOR)
    if monitor is not None and not monitor.is_running():
        found.append("a memory monitor that is off")
    return found


def runs_of() -> list[str]:
    """Runs in which a worker has part; runs there."""
    from oocdl.runtime.cluster import member

    return list(member.members)


def held_nanny(dask_worker: Any) -> list[str]:
    """The same of its nanny; runs there."""
    monitor = dask_worker.periodic_callbacks.get("memory_monitor")
    is_held = monitor is not None and getattr(monitor.callback, "run_id", None) is not None
    return ["a nanny's memory monitor that is off"] if is_held else []


ANSWER_SECONDS = 60.0
"""Workers that are stopped are killed, or go on, before this."""


def ask(client: distributed.Client, function: Any, nanny: bool = False) -> dict[str, list[str]]:
    """Call a function on all workers, or their nannies; raises TimeoutError if one does not answer."""
    found: dict[str, list[str]] = client.sync(
        client._run, function, nanny=nanny, on_error="ignore", callback_timeout=ANSWER_SECONDS
    )
    return found


def remains(client: distributed.Client, seconds: float = 30.0) -> Mapping[str, list[str]]:
    """What workers still have of a run after some seconds, by address; empty: nothing."""
    deadline = time.monotonic() + seconds
    while True:
        found = {**ask(client, left_behind)}
        for address, more in ask(client, held_nanny, nanny=True).items():
            found[address] = [*found.get(address, []), *more]
        found = {address: words for address, words in found.items() if words}
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)
