"""Plain file input and output: whole writes, fsync, free space, and kinds of file systems.

Nothing here knows about Zarr; arrays are written straight from their memory, so no
hidden buffers have to be planned for.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.errors import OocdlError, ResourceError, StoreError
from oocdl.graph.ir.index import Region, within

Array = npt.NDArray[Any]

SYNC_THREADS = 32
"""More than cores: these threads only wait for the disk."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def as_bytes(array: Array) -> npt.NDArray[np.uint8]:
    """View the memory of a C-contiguous array as bytes, also for dtypes that memoryview refuses."""
    return array.reshape(-1).view(np.uint8)


def is_full(error: OSError) -> bool:
    """Whether an error says that the disk, or the user's quota of it, is full."""
    return error.errno in _FULL


def io_error(error: OSError, path: Path, need: int) -> OocdlError:
    """Return the error of oocdl to raise for ``error``, met while writing ``need`` bytes to ``path``."""
    if not is_full(error):
        return StoreError(f"cannot write {path}: {error.strerror or error}; check the disk")
    asked = f"needs {need} bytes, {free_bytes(path)} are free" if need else "the disk is full"
    return ResourceError(f"no space left for {path}: {asked}; free some or choose another folder")


def existing(path: Path) -> Path:
    """Return ``path``, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Return the bytes that are free for this user on the file system of ``path``, which need not exist."""
    stats = os.statvfs(existing(path))
    return stats.f_bavail * stats.f_frsize


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Turn every OSError of this block, which writes below ``path``, into an error of oocdl.

    Raises ResourceError if the disk is full, StoreError for any other failure.
    """
    try:
        yield
    except OSError as error:
        raise io_error(error, path, 0) from error


def write_parts(path: Path, parts: Iterable[Array], sync: bool = False) -> None:
    """Write the bytes of C-contiguous arrays to ``path``, one after the other, replacing it.

    Raises ResourceError if the disk is full, StoreError for any other failure.
    """
    nbytes = 0
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            for part in parts:
                nbytes += part.nbytes
                view, done = as_bytes(part).data, 0
                while done < len(view):  # the kernel takes at most 2 GiB a call
                    done += os.write(handle, view[done:])
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise io_error(error, path, nbytes) from error


def write_text(path: Path, text: str) -> None:
    """Write a small file durably: all of it or nothing is there after a crash.

    The caller syncs the folder, once for all that it has put there.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file durably, as ``write_text`` does."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    write_parts(partial, [np.frombuffer(data, np.uint8)], sync=True)
    partial.replace(path)


def sync_path(path: Path) -> None:
    """Call fsync for a file or a folder that exists."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        # After a failed fsync the kernel may have dropped the dirty pages: never try again.
        raise io_error(error, path, 0) from error


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
    place = str(path.resolve())
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:  # not Linux: nothing to tell, and nothing to refuse
        return ""
    for line in lines:
        _, mount, name = line.split(" ")[:3]
        mount = mount.encode().decode("unicode_escape")  # a space is written \040
        inside = mount == "/" or place == mount or place.startswith(mount + "/")
        if inside and len(mount) >= len(best):  # later mounts hide earlier ones
            best, kind = mount, name
    return kind
