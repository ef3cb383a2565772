"""Admits one writer to a run: an flock, with a record of its owner for the error message."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from oocdl.errors import InUseError, StoreError
from oocdl.storage.files import io_error, reporting

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
MOST_TRIES = 100  # times that a lock whose file was removed before it was taken is opened anew


class RunLock:
    """Holds ``path`` locked until ``release``; the kernel lets go when the process dies.

    Raises InUseError naming the owner if another has it. Where the file system has no locks the record
    decides: an owner on this host that is dead is taken over. With ``take_over`` an owner on another host is
    evicted, as nobody here can see that it is dead; should it live, its next commit is refused (see
    ``pointer``). One that lives on this host is not.
    """

    def __init__(self, path: Path, take_over: bool = False) -> None:
        if take_over:
            _evict(path)
        self._handle: int | None = _held(path)
        self._pid = os.getpid()
        start = datetime.now(UTC).isoformat(timespec="seconds")
        owner = {"host": socket.gethostname(), "pid": self._pid, "start": start}
        try:
            with reporting(path):
                os.ftruncate(self._handle, 0)
                os.pwrite(self._handle, json.dumps(owner).encode(), 0)
        except BaseException:
            os.close(self._handle)
            raise

    def release(self) -> None:
        """Release the lock, unless this process was forked from its owner. May be called twice."""
        if self._handle is not None:
            if self._pid == os.getpid():
                with suppress(OSError):  # it only says who the owner was
                    os.ftruncate(self._handle, 0)
                with suppress(OSError):  # a file system without locks
                    # Of a process that was forked meanwhile, too, which has the file open.
                    fcntl.flock(self._handle, fcntl.LOCK_UN)
            os.close(self._handle)
            self._handle = None


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Lock a place to write to, by a file beside it. Raises InUseError if another process writes there."""
    path = target.absolute().with_name(f".{target.name}.lock")
    with reporting(target):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = RunLock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def _held(path: Path) -> int:
    """Open the file and lock it, anew if it was removed meanwhile: whoever came next would lock another."""
    for _try in range(MOST_TRIES):
        handle = _opened(path)
        try:
            _take(handle, path)
            with suppress(FileNotFoundError):
                if os.fstat(handle).st_ino == path.stat().st_ino:
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    raise StoreError(
        f"cannot lock {path}: it is removed each time before it is locked; what else writes there?"
    )


def _take(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner, is_held = _owner(handle), isinstance(error, BlockingIOError)
        if not is_held and error.errno not in _NO_LOCKS:
            raise io_error(error, path, 0, "lock") from error
        if is_held or (owner and not _is_dead(owner)):
            who = "pid {} on {} since {}".format(*(owner.get(fact, "?") for fact in ("pid", "host", "start")))
            way_out = "wait for it, or stop it"
            if owner.get("host") not in (None, socket.gethostname()):
                way_out += "; if it is dead, 'oocdl repair --take-over' takes the run from it"
            raise InUseError(f"run {path.parent} is in use by {who}; {way_out}") from error


def _opened(path: Path) -> int:
    with reporting(path, "lock"):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _evict(path: Path) -> None:
    """Remove the lock of an owner on another host: a new file is a new lock."""
    handle = _opened(path)
    owner = _owner(handle)
    os.close(handle)
    if owner and owner.get("host") != socket.gethostname():
        path.unlink(missing_ok=True)


def _owner(handle: int) -> dict[str, object]:
    try:
        record = json.loads(os.pread(handle, 4096, 0))
    except ValueError:  # empty: released, or between the lock and its record
        return {}
    return record if isinstance(record, dict) else {}


def _is_dead(owner: dict[str, object]) -> bool:
    if owner.get("host") != socket.gethostname():
        return False  # cannot be seen from here
    try:
        os.kill(int(str(owner.get("pid"))), 0)
    except (OSError, ValueError) as error:
        return isinstance(error, ProcessLookupError)
    return False
