"""The spill: chunks that RAM has no room for, in Zarr v3 arrays, one array for all chunks of a kind.

Each chunk is an element of its array and a file of its own, which is written over once nobody needs it:
making and deleting files costs more than writing them. The CRC-32 of its blocks stays in memory. A spill is
private to one process and worth nothing after it. Every process has a folder of its own with a lock in it;
the next process of the same user that starts on this host deletes the folders of dead ones.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import numpy as np

from oocdl.errors import ResourceError, StoreError
from oocdl.graph.ir.array_layout import Array
from oocdl.graph.ir.index import Region
from oocdl.storage.cache.direct_io import can_be_outer, direct_flag, in_file_order, read_box, write_array
from oocdl.storage.checksums import BlockSums, block_bytes_for, block_sums
from oocdl.storage.files import existing, filesystem, handle_of, io_error, is_full
from oocdl.storage.zarr_json import array_json, chunk_key

_Kind = tuple[tuple[int, ...], np.dtype[Any], int]  # shape, dtype, outermost axis
MOST_CHUNKS = 1 << 31  # chunks that a spill can number: the length of its Zarr arrays
CHECK_THREADS = 2  # threads that take checksums while chunks are written
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
    outer: int = 0  # the axis that lies outermost in the file; the others follow in order
    sums: BlockSums | None = None  # checksums of its blocks; None before it is written


class SpillStore:
    """Writes chunks to a folder of this process below ``path``, and reads boxes of them. Thread-safe.

    ``path`` is shared by the processes of a host, also of several users, and made if it is not there: with
    the rights of the folder it is in, and so that nobody deletes another's. Raises StoreError if it is on a
    file system in memory (tmpfs) or cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        root = Path(path).absolute()
        refuse_memory(root)
        with _gate(root):
            _remove_dead(root)
            self.folder = root / f"{prefix_of('spill')}{os.getpid()}-{secrets.token_hex(4)}"
            self.folder.mkdir(0o700)
            self._lock: IO[str] | None = (self.folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._flag = direct_flag(self.folder)
        self._checks = ThreadPoolExecutor(CHECK_THREADS, thread_name_prefix="spill-check")
        self._numbers = count()
        self._folders: dict[_Kind, Path] = {}
        self._free: dict[_Kind, list[SpillFile]] = {}
        self.live_bytes = 0  # bytes of chunks that are in it. Needs no lock to be read
        self._kept = self._peak = 0  # bytes of files kept, most bytes in use
        self._gate = threading.Lock()
        self.watch: Callable[[str, float, int], None] | None = None
        """Called after each transfer, by its thread: "spill read" or "spill write", when it began, bytes."""

    def write(self, array: Array, outer: int = 0) -> SpillFile:
        """Store a C-contiguous array, straight from its memory.

        Axis ``outer`` becomes the outermost in the file where that leaves whole pages: strips along it can
        then be read in one go. Raises ResourceError or StoreError; neither leaves a file behind.
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
            row_bytes = array.nbytes // max(1, array.shape[outer]) if array.ndim else array.nbytes
            runs = in_file_order(array, outer)
            # While the disk takes the chunk: nobody changes it any more.
            sums = self._checks.submit(block_sums, runs, block_bytes_for(row_bytes))
            try:
                write_array(file.data, array, self._flag, outer)
            finally:
                wait((sums,))
            return replace(file, sums=sums.result())
        except BaseException as error:
            with self._gate:
                self.live_bytes -= array.nbytes
            if file is not None:
                file.data.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise io_error(error, self.folder, array.nbytes) from error
            raise

    def _take(self, kind: _Kind) -> SpillFile:
        """Take a file to write over: passes are alike, so the last one has left blocks on the disk."""
        shape, dtype, outer = kind
        nbytes = prod(shape) * dtype.itemsize
        old: list[SpillFile] = []
        with self._gate:
            self.live_bytes += nbytes
            self._peak = max(self._peak, self.live_bytes)
            if self._free.get(kind):
                self._kept -= nbytes
                return self._free[kind].pop()
            folder, number = self._folder(kind), next(self._numbers)  # first: the disk may be full
            # Files in use and files kept for their kind take no more than the files in use at their peak.
            while self._kept and self.live_bytes + self._kept > self._peak:
                near = min(filter(None, self._free.values()), key=lambda free: abs(free[0].nbytes - nbytes))
                old.append(near.pop())
                self._kept -= old[-1].nbytes
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
        """Return the folder of the Zarr array of a kind of chunks; made for the first of them."""
        if kind not in self._folders:
            shape, dtype, outer = kind
            axes = (0, outer + 1, *(axis + 1 for axis in range(len(shape)) if axis != outer))
            # Zarr lists nothing: an array may be longer than it has chunks.
            long, order = (MOST_CHUNKS, *shape), axes if outer else None
            folder = self.folder / f"s{len(self._folders):06d}"
            folder.mkdir(exist_ok=True)  # it is there if there was no room for what is in it
            (folder / "zarr.json").write_text(array_json(long, (1, *shape), dtype, order=order))
            self._folders[kind] = folder
        return self._folders[kind]

    def _drop_free(self) -> bool:
        """Delete the files that are kept to be written over; returns whether there were any."""
        with self._gate:
            free, self._free, self._kept = self._free, {}, 0
        for files in free.values():
            for file in files:
                file.data.unlink(missing_ok=True)
        return any(free.values())

    def read(self, file: SpillFile, box: Region, out: Array) -> int:
        """Read ``box`` of a chunk into ``out``; returns the bytes read. Raises StoreError, CorruptError."""
        begun = perf_counter()
        assert file.sums is not None, "it was written"
        count = read_box(file.data, file.shape, box, out, self._flag, file.outer, file.sums)
        if (watch := self.watch) is not None:
            watch("spill read", begun, count)
        return count

    def remove(self, file: SpillFile) -> None:
        """Keep the file of a chunk that is gone, to be written over."""
        with self._gate:
            self.live_bytes -= file.nbytes
            self._kept += file.nbytes
            self._free.setdefault((file.shape, file.dtype, file.outer), []).append(file)

    def close(self) -> None:
        """Delete the folder of this process. May be called twice."""
        if self._lock is not None:
            self._checks.shutdown()
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()
            self._lock = None

    def __enter__(self) -> SpillStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prefix_of(what: str) -> str:
    """Return what names of this host's folders begin with: locks of other hosts cannot always be trusted."""
    return f"{what}-{re.sub(r'[^A-Za-z0-9.]', '_', socket.gethostname())}-"


def refuse_memory(root: Path) -> None:
    """Raise StoreError if a folder, whether it exists or not, is on a file system in memory."""
    kind = filesystem(root)
    if kind in MEMORY_FILESYSTEMS:
        raise StoreError(f"cannot spill to {root}: it is {kind}, which is memory; choose a folder on a disk")


def remove_dead(root: Path) -> None:
    """Delete what dead processes of this user and host left in a spill folder; StoreError if it fails."""
    if _mine(root):
        with _gate(root):
            _remove_dead(root)


def own_folders(root: Path) -> list[Path]:
    """Return the folders of this process in a spill folder."""
    return list(root.glob(f"{prefix_of('spill')}{os.getpid()}-*"))


@contextmanager
def _gate(root: Path) -> Iterator[None]:
    """Admit one process of a user at a time, so that no new folder seems dead; makes the spill folder."""
    try:
        if not root.is_dir():
            rights = stat.S_IMODE(existing(root).stat().st_mode)
            root.mkdir(parents=True, exist_ok=True)
            root.chmod(rights | stat.S_ISVTX)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with handle_of(root / f"LOCK-{os.geteuid()}", flags, 0o600) as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            yield
    except OSError as error:
        if is_full(error):
            raise io_error(error, root, 0) from error
        reason = error.strerror or error
        raise StoreError(f"cannot use {root} for spilling: {reason}; choose another folder") from error


def _mine(root: Path) -> list[Path]:
    """Return the folders of this user's processes on this host, living or dead."""
    found = []
    for folder in root.glob(f"{prefix_of('spill')}*"):
        with suppress(FileNotFoundError):
            facts = folder.lstat()
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
                found.append(folder)
    return found


def _remove_dead(root: Path) -> None:
    for folder in _mine(root):
        try:
            with (folder / "lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # its process lives
        except FileNotFoundError:
            shutil.rmtree(folder, ignore_errors=True)  # it died while it made the folder
