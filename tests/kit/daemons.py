"""What the kits of real batch systems share: commands, waits, processes that are ended, one at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

END_SECONDS = 20.0


@contextmanager
def alone(root: Path, start: Callable[[], None], stop: Callable[[], object]) -> Iterator[None]:
    """A batch system whose files are in a folder, started; stopped whatever happens. One at a time."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with _locked(root.with_suffix(".lock")):
        try:
            start()
            yield
        finally:
            stop()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file that nobody else holds, and that is removed at the end."""
    while True:
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_at(lock.fileno(), path):  # who had it has removed it: others may hold a new one
                continue
            try:
                yield
            finally:
                path.unlink()
            return


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that has this path now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def run(*command: object, environment: Mapping[str, str], check: bool = True) -> str:
    """Run a command with variables of its system; returns what it prints, and fails with what it says."""
    env, words = {**os.environ, **environment}, list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.returncode} {done.stdout} {done.stderr}")
    return done.stdout


def wait_until(holds: Callable[[], bool], seconds: float, what: str, state: Callable[[], object]) -> None:
    """Wait until something holds; fails with the state that there is."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}; there is {state()}")
        time.sleep(0.1)


def end(pids: Iterable[int]) -> None:
    """Kill processes, and wait until they are gone: what they would tidy up is the caller's."""
    pids = tuple(pids)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def ip(*words: object, check: bool = True) -> str:
    """Call ``ip``, as root."""
    return run("ip", *words, environment={"PATH": path_of_daemons()}, check=check)


def add_bridge(bridge: str, network: str) -> None:
    """A bridge; this machine is ``network``.254 on it."""
    ip("link", "add", bridge, "type", "bridge")
    ip("address", "add", f"{network}.254/24", "dev", bridge)
    ip("link", "set", bridge, "up")


def add_host(bridge: str, network: str, name: str, link: str, number: int) -> None:
    """A network namespace that is ``network``.``number`` on a bridge, by a link."""
    ip("netns", "add", name)
    ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("link", "set", link, "master", bridge, "up")
    ip("-n", name, "address", "add", f"{network}.{number}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        ip("-n", name, "link", "set", device, "up")


def lacking(what: str, commands: Iterable[str], packages: str) -> str | None:
    """Say why this machine cannot have something; None if it can."""
    absent = [command for command in commands if shutil.which(command, path=path_of_daemons()) is None]
    if os.geteuid() != 0:
        return f"{what} of one's own needs root"
    return f"needs {', '.join(absent)}: apt-get install {packages}" if absent else None


def main(system: Any) -> None:
    """``start`` a batch system and print the variables by which it is found, or ``stop`` it."""
    word = sys.argv[1]
    {"start": system.start, "stop": system.stop}[word]()
    if word == "start":
        print("\n".join(f"export {name}={value}" for name, value in system.environment().items()))


def path_of_daemons() -> str:
    """The path, with the folders of daemons, which users may lack."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
