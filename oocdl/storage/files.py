"""Plain file input and output: whole writes, boxes read from a file, fsync, what a mount is.

Nothing here knows about Zarr; everything copies straight between array memory
and the file, so no hidden buffers have to be planned for (but ``BOUNCE`` a thread).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.errors import OocdlError, ResourceError, StoreError
from oocdl.graph.axes import Region, within

Array = npt.NDArray[Any]

BOUNCE = 256 * 1024
"""Bytes of the one buffer a thread has for strips too small to be read one by one."""

LONG = 16 * 1024
"""Bytes of a run that is worth a system call of its own."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_local = threading.local()


def as_bytes(array: Array) -> npt.NDArray[np.uint8]:
    """The memory of a C-contiguous array, without a copy (also for dtypes memoryview refuses)."""
    return array.reshape(-1).view(np.uint8)


def is_full(error: OSError) -> bool:
    """Whether it says that the disk, or our share of it, has no room left."""
    return error.errno in _FULL


def io_error(error: OSError, path: Path, need: int) -> OocdlError:
    """What to raise for ``error`` while writing ``need`` bytes to ``path``: one line."""
    if not is_full(error):
        return StoreError(f"cannot write {path}: {error.strerror or error}; check the disk")
    asked = f"needs {need} bytes, {free_bytes(path)} are free" if need else "the disk is full"
    return ResourceError(f"no space left for {path}: {asked}; free some or choose another folder")


def existing(path: Path) -> Path:
    """``path``, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Bytes free for us on the file system of ``path``, or of its nearest parent that exists."""
    stats = os.statvfs(existing(path))
    return stats.f_bavail * stats.f_frsize


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    """What others write below ``path`` in this block fails with an error of ours.

    Raises ResourceError if the disk is full, StoreError for any other failure.
    """
    try:
        yield
    except OSError as error:
        raise io_error(error, path, 0) from error


def write_array(path: Path, array: Array, sync: bool = False) -> None:
    """Write the bytes of a C-contiguous array to ``path``, replacing it.

    Raises ResourceError if the disk is full, StoreError for any other failure.
    """
    view = as_bytes(array).data
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            done = 0
            while done < len(view):  # the kernel takes at most 2 GiB a call
                done += os.write(handle, view[done:])
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise io_error(error, path, array.nbytes) from error


def write_text(path: Path, text: str) -> None:
    """Write a small file durably: all of it or nothing is there after a crash.

    The caller syncs the folder, once for all that it has put there.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """As ``write_text``."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    write_array(partial, np.frombuffer(data, np.uint8), sync=True)
    partial.replace(path)


def sync_path(path: Path) -> None:
    """fsync a file or a folder that is there."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        # After a failed fsync the kernel may have dropped the dirty pages: never try again.
        raise io_error(error, path, 0) from error


def part_of(array: Array, inner: Region, outer: Region) -> Array:
    """The view of ``inner`` in an array that covers ``outer``; a view for rank 0, too."""
    where: tuple[Any, ...] = (..., *within(inner, outer))
    view: Array = array[where]
    return view


def read_box(path: Path, shape: tuple[int, ...], box: Region, out: Array) -> int:
    """Read ``box`` of the C-ordered array of ``shape`` in the file ``path`` into ``out``.

    ``out`` may be strided. Runs that are contiguous in both are read in place; small
    strips are read together through one fixed buffer. Returns the bytes read.

    Raises StoreError if the file is missing or too short.
    """
    if out.size == 0:
        return 0
    strides = _strides(shape, out.dtype.itemsize)
    start = sum(low * step for (low, _), step in zip(box, strides, strict=True))
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read(handle, start, strides, out)
        finally:
            os.close(handle)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}; check the disk") from error


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    steps = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        steps[axis] = steps[axis + 1] * shape[axis + 1]
    return tuple(steps)


def _read(handle: int, start: int, strides: tuple[int, ...], out: Array) -> int:
    if out.flags.c_contiguous and _is_run(out.shape, strides, out.dtype.itemsize):
        _fill(handle, start, as_bytes(out))
        return out.nbytes
    span: int = out.dtype.itemsize + sum(
        (extent - 1) * step for extent, step in zip(out.shape, strides, strict=True)
    )
    if span <= BOUNCE:
        buffer = _bounce()
        _fill(handle, start, buffer[:span])
        out[...] = np.ndarray(out.shape, out.dtype, buffer=buffer.data, strides=strides)
        return span
    if out.shape[0] == 1:
        return _read(handle, start, strides[1:], out.reshape(out.shape[1:]))
    # Long rows are read one by one; of short ones as many as fill the buffer.
    run = _is_run(out.shape[1:], strides[1:], out.dtype.itemsize) and out[0].nbytes >= LONG
    group = 1 if run else max(1, BOUNCE // strides[0])
    count = 0
    for row in range(0, out.shape[0], group):
        count += _read(handle, start + row * strides[0], strides, out[row : row + group])
    return count


def _is_run(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether a box of ``shape`` is one run of bytes in the file."""
    for extent, step in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and step != itemsize:
            return False
        itemsize *= extent
    return True


def _bounce() -> npt.NDArray[np.uint8]:
    buffer: npt.NDArray[np.uint8] | None = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = np.empty(BOUNCE, np.uint8)
    return buffer


def _fill(handle: int, start: int, target: npt.NDArray[np.uint8]) -> None:
    view = target.data
    done = 0
    while done < len(view):
        count = os.preadv(handle, [view[done:]], start + done)
        if count == 0:
            raise OSError(errno.EIO, "the file is shorter than it was written")
        done += count


def filesystem(path: Path) -> str:
    """The type of the file system that ``path`` is on, such as ``ext4``; empty if unknown."""
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
