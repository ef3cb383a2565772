"""Plain file input and output: whole writes, fsync, free space, and kinds of file systems."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.errors import DiskFullError, OocdlError, StoreError
from oocdl.graph.ir.array_layout import Array
from oocdl.graph.ir.index import Region, within

SYNC_THREADS = 32  # more than cores: these threads only wait for the disk
NO_FILE = "not a regular file"


def as_bytes(array: Array) -> npt.NDArray[np.uint8]:
    """View the memory of a C-contiguous array as bytes, also for dtypes that memoryview refuses."""
    return array.reshape(-1).view(np.uint8)


def regular(path: str | Path, flags: int) -> int:
    """Open a regular file, as the ``opener`` of ``open``; OSError for anything else: a FIFO never ends."""
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, NO_FILE, str(path))
    return handle


def read_bytes(path: Path) -> bytes:
    """Return what a regular file holds. Raises OSError, also for a folder or a FIFO."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def content_of(path: Path) -> bytes | None:
    """Return what a regular file holds; None if it is lost or cannot be read."""
    try:
        return read_bytes(path)
    except OSError:
        return None


def read_text(path: Path) -> str:
    """Return the text of a regular file. Raises OSError as ``read_bytes``, ValueError if it is no UTF-8."""
    return read_bytes(path).decode()


def remove(path: Path) -> None:
    """Delete a file, a link or a folder; nothing happens if none is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_full(error: OSError) -> bool:
    """Whether an error says that the disk, or the user's quota of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def io_error(error: OSError, path: Path, need: int, verb: str = "write") -> OocdlError:
    """Return the error of oocdl to raise for ``error``, met while writing ``need`` bytes to ``path``."""
    place = error.filename if isinstance(error.filename, str) else path
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        if verb != "write":
            return StoreError(f"cannot {verb} {place}: {error.strerror}; check its permissions")
        denied = place if os.path.exists(place) else Path(place).parent  # not a name of ours in a folder
        return StoreError(f"cannot write to {denied}: {error.strerror}; choose a place that you may write to")
    if not is_full(error):
        return StoreError(f"cannot {verb} {place}: {error.strerror or error}; check the disk")
    return DiskFullError(f"no space left for {place}: {_why_full(error, path, need)}")


def _why_full(error: OSError, path: Path, need: int) -> str:
    """Say what is used up, bytes, files or a quota, and the way out."""
    stats, free = os.statvfs(existing(path)), free_bytes(path)
    if error.errno == errno.EDQUOT:
        return "your quota of this disk is used up; delete some files or choose another folder"
    if stats.f_files and not stats.f_favail:
        return f"its disk can hold no more than {stats.f_files} files; delete some or choose another folder"
    asked = f"needs {need} bytes, {free} are free" if need > free else "the disk is full"
    asked += f" ({need} bytes were to be written)" if 0 < need <= free else ""
    return f"{asked}; free some or choose another folder"


def existing(path: Path) -> Path:
    """Return ``path``, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def make_private(folder: Path) -> None:
    """Make a folder in one that all may write to; StoreError if somebody else made it, or may write there."""
    with reporting(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        known = folder.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.geteuid() or known.st_mode & 0o022:
        raise StoreError(
            f"{folder} is not a folder that only this user may write to; delete it, or pass spill= another"
        )


def free_bytes(path: Path) -> int:
    """Return the bytes that are free for this user on the file system of ``path``, which need not exist."""
    stats = os.statvfs(existing(path))
    return stats.f_bavail * stats.f_frsize


@contextmanager
def reporting(path: Path, verb: str = "write", need: int = 0) -> Iterator[None]:
    """Turn an OSError of this block, which writes ``need`` bytes (or ``verb``) below ``path``, into oocdl's.

    Raises ResourceError if the disk is full, StoreError for any other failure.
    """
    try:
        yield
    except OSError as error:
        raise io_error(error, path, need, verb) from error


def make_writable(folder: Path) -> None:
    """Make a folder unless it is there. Raises StoreError if that, or writing to it, is not possible."""
    with reporting(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


@contextmanager
def handle_of(path: Path, flags: int, mode: int = 0o644) -> Iterator[int]:
    """Hold a file or a folder open as a handle of the system."""
    handle = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield handle
    finally:
        os.close(handle)


def write_parts(path: Path, parts: Iterable[Array], sync: bool = False) -> None:
    """Write the bytes of C-contiguous arrays to ``path``, replacing it. Raises as ``reporting`` does."""
    nbytes = 0
    try:
        with handle_of(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as handle:
            for part in parts:
                nbytes += part.nbytes
                view, done = as_bytes(part).data, 0
                while done < len(view):  # the kernel takes at most 2 GiB a call
                    done += os.write(handle, view[done:])
            if sync:
                os.fsync(handle)
    except OSError as error:
        raise io_error(error, path, nbytes) from error


def write_text(path: Path, text: str) -> None:
    """Write a small file durably: all of it or nothing is there after a crash. Folders are synced apart."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file durably, as ``write_text`` does."""
    if path.is_dir():
        raise StoreError(f"cannot write {path}: it is a folder")
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    write_parts(partial, [np.frombuffer(data, np.uint8)], sync=True)
    with reporting(path):
        partial.replace(path)


def sync_path(path: Path) -> None:
    """Call fsync for a file or a folder that exists."""
    # After a failed fsync the kernel may have dropped the dirty pages: never try again.
    with reporting(path), handle_of(path, os.O_RDONLY | os.O_NONBLOCK) as handle:
        os.fsync(handle)


def sync_all(paths: Sequence[Path]) -> None:
    """Call fsync for files and folders that exist."""
    # Side by side the file system syncs many files in one journal commit: 27 times as fast.
    with ThreadPoolExecutor(SYNC_THREADS) as pool:
        list(pool.map(sync_path, paths))


def part_of(array: Array, inner: Region, outer: Region) -> Array:
    """Return a view of ``inner`` in an array that covers ``outer``; a view for rank 0, too."""
    where: tuple[Any, ...] = (..., *within(inner, outer))
    view: Array = array[where]
    return view


def filesystem(path: Path) -> str:
    """Return the type of the file system that ``path`` is on, such as ``ext4``; empty if unknown."""
    place, found = path.resolve(), [(0, 0, "")]
    for number, line in enumerate(Path("/proc/self/mounts").read_text().splitlines()):
        _, mount, kind = line.split(" ")[:3]
        mount = mount.encode().decode("unicode_escape")  # a space is written \040
        if place.is_relative_to(mount):
            found.append((len(mount), number, kind))  # later mounts hide earlier ones
    return max(found)[-1]
