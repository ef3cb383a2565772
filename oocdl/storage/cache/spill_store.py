"""The spill: chunks that RAM has no room for, in Zarr v3 arrays, one for all chunks of a kind.

An array is as long as its chunks are numbered, and each chunk a file of its own. Making and
deleting files costs more than writing them: a file that nobody needs is written over, by a chunk
of another kind if need be.

Private to one process and worth nothing after it. Every process has a folder of its
own with a lock in it, so whoever starts next on this host clears up after the dead.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from oocdl.errors import OocdlError, ResourceError, StoreError
from oocdl.graph.ir.index import Region
from oocdl.storage.cache.direct_io import can_be_outer, direct_flag, read_box, write_array
from oocdl.storage.files import filesystem, io_error, is_full
from oocdl.storage.zarr_json import array_json, chunk_key

Array = npt.NDArray[Any]

_Kind = tuple[tuple[int, ...], np.dtype[Any], int]
"""Shape, dtype and outermost axis of a file."""
MOST_CHUNKS = 1 << 31
"""Of a spill: the length of its arrays."""
MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


@dataclass(frozen=True)
class SpillFile:
    """A spilled chunk: ``data`` is the file of element ``index`` of the Zarr array ``folder``."""

    folder: Path
    index: int
    data: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    outer: int = 0
    """The axis that lies outermost in the file; the others follow in order."""

    @property
    def kind(self) -> _Kind:
        """What it has in common with the other chunks of its array."""
        return self.shape, self.dtype, self.outer


class SpillStore:
    """A folder of spilled chunks, one for each process and only for its life.

    ``path`` is shared by the processes of a host; it is made if it is not there.
    Raises StoreError if it is in memory (tmpfs) or cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        root = Path(path).absolute()
        refuse_memory(root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _gate(root):
                _remove_dead(root)
                self.folder = root / f"{_prefix()}{os.getpid()}-{secrets.token_hex(4)}"
                self.folder.mkdir()
                self._lock: IO[str] | None = (self.folder / "lock").open("w")
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._flag = direct_flag(self.folder)
        except OSError as error:
            raise _unusable(root, error) from error
        self._numbers = count()
        self._folders: dict[_Kind, Path] = {}
        self._free: dict[_Kind, list[SpillFile]] = {}
        self._live = self._kept = self._peak = 0  # bytes of files in use, of files kept, most in use
        self._gate = threading.Lock()
        self.watch: Callable[[str, float, int], None] | None = None
        """Told of each transfer by the thread that has made it: what it was, when it began, bytes."""

    def write(self, array: Array, outer: int = 0) -> SpillFile:
        """Store a C-contiguous array, straight from its memory.

        Where whole pages allow it, axis ``outer`` becomes the outermost: strips along it can then be
        read in one go. Raises ResourceError if the disk is full; then nothing is left behind.
        """
        if outer and not can_be_outer(array, outer):
            outer = 0
        begun = perf_counter()
        try:
            file = self._write(array, outer)
        except ResourceError:
            if not self._drop_free():
                raise
            file = self._write(array, outer)
        if (watch := self.watch) is not None:
            watch("spill write", begun, array.nbytes)
        return file

    def _write(self, array: Array, outer: int) -> SpillFile:
        file = None
        try:
            file = self._take((array.shape, array.dtype, outer))
            write_array(file.data, array, self._flag, outer)
            return file
        except BaseException as error:
            with self._gate:
                self._live -= array.nbytes
            if file is not None:
                file.data.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise io_error(error, self.folder, array.nbytes) from error
            raise

    def _take(self, kind: _Kind) -> SpillFile:
        """A file to write over: steps are alike, so the blocks of the last one are there already."""
        shape, dtype, outer = kind
        nbytes = prod(shape) * dtype.itemsize
        old: list[SpillFile] = []
        with self._gate:
            self._live += nbytes
            self._peak = max(self._peak, self._live)
            if self._free.get(kind):
                self._kept -= nbytes
                return self._free[kind].pop()
            # Files that wait for their kind take no more than what lives took at its peak.
            while self._kept and self._live + self._kept > self._peak:
                near = min((k for k, free in self._free.items() if free), key=lambda k: _distance(k, kind))
                old.append(self._free[near].pop())
                self._kept -= old[-1].nbytes
            folder, number = self._folder(kind), next(self._numbers)
        data = folder / chunk_key((number, *(0,) * len(shape)))
        if old:
            # Its blocks become those of the new chunk, as many as are wanted.
            os.rename(old[0].data, data)
            if old[0].nbytes > nbytes:
                os.truncate(data, nbytes)
        for file in old[1:]:
            file.data.unlink(missing_ok=True)
        return SpillFile(folder, number, data, shape, dtype, nbytes, outer)

    def _folder(self, kind: _Kind) -> Path:
        """The Zarr array of a kind of chunks; made for the first of them."""
        if kind not in self._folders:
            folder = self.folder / f"s{len(self._folders):06d}"
            folder.mkdir(exist_ok=True)  # it is there if there was no room for what is in it
            (folder / "zarr.json").write_text(_metadata(*kind))
            self._folders[kind] = folder
        return self._folders[kind]

    def _drop_free(self) -> bool:
        """Delete the files kept for use; whether there were any."""
        with self._gate:
            free, self._free, self._kept = self._free, {}, 0
        for files in free.values():
            for file in files:
                file.data.unlink(missing_ok=True)
        return bool(free)

    def read(self, file: SpillFile, box: Region, out: Array) -> int:
        """Read ``box`` (relative to the chunk) into ``out``; returns the bytes read."""
        begun = perf_counter()
        count = read_box(file.data, file.shape, box, out, self._flag, file.outer)
        if (watch := self.watch) is not None:
            watch("spill read", begun, count)
        return count

    def remove(self, file: SpillFile) -> None:
        """The chunk is gone; its file is kept for the next of its shape."""
        with self._gate:
            self._live -= file.nbytes
            self._kept += file.nbytes
            self._free.setdefault(file.kind, []).append(file)

    def close(self) -> None:
        """Delete everything. May be called twice."""
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()
            self._lock = None

    def __enter__(self) -> SpillStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _metadata(shape: tuple[int, ...], dtype: np.dtype[Any], outer: int) -> str:
    # Zarr lists nothing: an array may be longer than it has chunks.
    axes = tuple(range(1, len(shape) + 1))
    order = (0, outer + 1, *(axis for axis in axes if axis != outer + 1)) if outer else None
    return array_json((MOST_CHUNKS, *shape), (1, *shape), dtype, order=order)


def _distance(kind: _Kind, other: _Kind) -> int:
    """How much two kinds differ in bytes."""
    one, two = (prod(shape) * dtype.itemsize for shape, dtype, _ in (kind, other))
    return abs(one - two)


def _prefix() -> str:
    # The host is in the name because locks of other hosts cannot be trusted on every network disk.
    return f"spill-{re.sub(r'[^A-Za-z0-9.]', '_', socket.gethostname())}-"


def refuse_memory(root: Path) -> None:
    """StoreError if a folder, there or not, is on a file system in memory."""
    kind = filesystem(root)
    if kind in MEMORY_FILESYSTEMS:
        raise StoreError(f"cannot spill to {root}: it is {kind}, which is memory; choose a folder on a disk")


def remove_dead(root: Path) -> None:
    """Delete what processes of this host that are gone have left in a spill folder.

    Raises StoreError if that cannot be done.
    """
    if not any(root.glob(f"{_prefix()}*")):
        return
    try:
        with _gate(root):
            _remove_dead(root)
    except OSError as error:
        raise _unusable(root, error) from error


def own_folders(root: Path) -> list[Path]:
    """The spills of this process in a spill folder."""
    return list(root.glob(f"{_prefix()}{os.getpid()}-*"))


@contextmanager
def _gate(root: Path) -> Iterator[None]:
    """One at a time: a folder that has no lock yet must not be taken for a dead one."""
    with (root / "LOCK").open("a") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield


def _unusable(root: Path, error: OSError) -> OocdlError:
    if is_full(error):
        return io_error(error, root, 0)
    return StoreError(f"cannot use {root} for spilling: {error.strerror or error}; choose another folder")


def _remove_dead(root: Path) -> None:
    for folder in root.glob(f"{_prefix()}*"):
        try:
            with (folder / "lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # its process lives
        except FileNotFoundError:
            shutil.rmtree(folder, ignore_errors=True)  # it died while it made the folder
