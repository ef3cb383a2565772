"""Moves chunks between memory and disk past the page cache.

A budget that is a promise leaves no memory for a page cache: the kernel would have to
find, for each page written or read, another to drop. Direct input and output moves
whole pages between the disk and an array's own memory instead (here 2.6 GB/s read
against 1.0 to 2.1, and no copying). It wants offsets, lengths and addresses that are
multiples of a page; what is not goes through one buffer of ``BOUNCE_BYTES`` a thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.errors import CorruptError, StoreError
from oocdl.graph.ir.array_layout import PAGE_BYTES, Array
from oocdl.graph.ir.index import Region
from oocdl.storage.checksums import BlockSums
from oocdl.storage.files import as_bytes, handle_of, io_error, reporting

Bytes = npt.NDArray[np.uint8]

BOUNCE_BYTES = 1 << 20
LONG_RUN_BYTES = 64 << 10
"""A contiguous run of at least so many bytes is worth a system call of its own."""
MOST_RUNS_PER_CALL = 1024
"""Buffers that one ``preadv`` or ``pwritev`` takes (POSIX's ``IOV_MAX``)."""
MOST_BYTES_PER_CALL = 64 << 20
_local = threading.local()


def direct_flag(folder: Path) -> int:
    """Return the flag that opens files of ``folder`` past the page cache; 0 if its file system has none."""
    flag = getattr(os, "O_DIRECT", 0)
    probe = folder / "probe"
    try:
        with handle_of(probe, os.O_WRONLY | os.O_CREAT | flag, 0o600) as handle:
            os.pwrite(handle, _bounce()[:PAGE_BYTES].data, 0)
        return flag
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return 0
        raise io_error(error, folder, PAGE_BYTES) from error
    finally:
        probe.unlink(missing_ok=True)


def can_be_outer(array: Array, axis: int) -> bool:
    """Whether an array can be written with ``axis`` outermost: the axes after it have to be whole pages."""
    run = prod(array.shape[axis + 1 :]) * array.dtype.itemsize
    return run > 0 and run % PAGE_BYTES == 0 and _aligned(as_bytes(array))


def in_file_order(array: Array, outer: int) -> list[Any]:
    """Return the contiguous runs of a C-contiguous array as they follow each other in its file."""
    return _runs(np.moveaxis(array, outer, 0)) if outer else [array]


def write_array(path: Path, array: Array, flag: int, outer: int = 0) -> None:
    """Write the bytes of a C-contiguous array to ``path``; a file of that size is written over.

    Axis ``outer`` lies outermost in the file (see ``can_be_outer``). Raises ResourceError if the disk is
    full, StoreError for any other failure.
    """
    view = as_bytes(array)
    whole = view.size // PAGE_BYTES * PAGE_BYTES if _aligned(view) or not flag else 0
    flags = os.O_WRONLY | os.O_CREAT | flag
    with reporting(path, need=array.nbytes), handle_of(path, flags) as handle:
        if outer:
            _move(os.pwritev, _write, handle, 0, in_file_order(array, outer))
            return
        _write(handle, 0, view[:whole])
        bounce = _bounce()
        for start in range(whole, view.size, BOUNCE_BYTES):
            part = view[start : start + BOUNCE_BYTES]
            bounce[: part.size] = part
            _write(handle, start, bounce[: -(-part.size // PAGE_BYTES) * PAGE_BYTES])
        if view.size % PAGE_BYTES:
            os.ftruncate(handle, view.size)


def _write(handle: int, start: int, view: Bytes) -> None:
    done = 0
    while done < view.size:
        count = os.pwrite(handle, view[done : done + MOST_BYTES_PER_CALL].data, start + done)
        # What the disk took in part is written again from the last full page.
        done += count if done + count == view.size else count // PAGE_BYTES * PAGE_BYTES
        if count < PAGE_BYTES and done < view.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _runs(array: Array) -> list[Any]:
    """Split the memory of ``array``, in the order of its axes, into its longest contiguous runs.

    Returns an empty list unless all of them are whole aligned pages.
    """
    leading, run_bytes = array.ndim, array.dtype.itemsize
    while leading and (array.shape[leading - 1] == 1 or array.strides[leading - 1] == run_bytes):
        leading -= 1
        run_bytes *= array.shape[leading]
    address = array.__array_interface__["data"][0]
    if any(offset % PAGE_BYTES for offset in (address, run_bytes, *array.strides[:leading])):
        return []
    # System calls take arrays as they are, of types that Python knows.
    runs = [array.view(f"u{array.dtype.itemsize}")]
    for _ in range(leading):
        runs = [part for run in runs for part in run]
    return runs


def _move(
    many: Callable[[int, list[Any], int], int],
    one: Callable[[int, int, Bytes], None],
    handle: int,
    start: int,
    runs: list[Any],
) -> None:
    """Read or write runs that follow each other in the file from ``start`` on, by few system calls.

    ``many`` is ``preadv`` or ``pwritev``; ``one`` moves a single run, and raises what keeps it from that.
    """
    for first in range(0, len(runs), MOST_RUNS_PER_CALL):
        group = runs[first : first + MOST_RUNS_PER_CALL]
        size = sum(run.nbytes for run in group)
        if many(handle, group, start) == size:
            start += size
            continue
        for run in group:  # the disk moved a part; one by one, an error tells why
            one(handle, start, as_bytes(run))
            start += run.nbytes


@dataclass(frozen=True)
class _File:
    """A file that is open for reading, with what its blocks must be."""

    path: Path
    handle: int
    sums: BlockSums | None

    @property
    def most_bounce_bytes(self) -> int:
        """Bytes that can be read through the buffer at once: pages and blocks are read whole."""
        return BOUNCE_BYTES - 2 * PAGE_BYTES - (2 * self.sums.block_bytes if self.sums else 0)

    def check(self, start: int, runs: Sequence[Array]) -> None:
        """Raise CorruptError unless these runs, whole blocks from ``start`` on, are what was written."""
        wrong = None if self.sums is None else self.sums.wrong(start, runs)
        if wrong is not None:
            low, high = wrong
            raise CorruptError(
                f"bytes {low} to {high} of the spilled chunk {self.path} are not what was written; the run "
                "stays at its last commit; check the disk, and call fit again"
            )


def read_box(
    path: Path,
    shape: tuple[int, ...],
    box: Region,
    out: Array,
    flag: int,
    outer: int = 0,
    sums: BlockSums | None = None,
) -> int:
    """Read ``box`` of the C-ordered array of ``shape`` in the file ``path`` into ``out``.

    ``outer``: the axis that is outermost in the file. ``out`` may be strided. Runs that are
    contiguous in both are read in place; small strips are read together through one fixed buffer.
    With ``sums`` every block that the box touches is read whole and verified, where it is read to.
    Returns the bytes read, without those of such blocks outside of the box.

    Raises StoreError if the file is missing or too short, CorruptError if a block is not what was written.
    """
    if out.size == 0:
        return 0
    if outer:
        shape = (shape[outer], *shape[:outer], *shape[outer + 1 :])
        box = (box[outer], *box[:outer], *box[outer + 1 :])
        out = np.moveaxis(out, outer, 0)
    strides = tuple(out.dtype.itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))
    start = sum(low * step for (low, _), step in zip(box, strides, strict=True))
    try:
        with handle_of(path, os.O_RDONLY | flag) as handle:
            return _read(_File(path, handle, sums), start, strides, out)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}; check the disk") from error


def _read(file: _File, start: int, strides: tuple[int, ...], out: Array) -> int:
    if _is_run(out.shape, strides, out.dtype.itemsize):
        if out.flags.c_contiguous:
            _read_runs(file, start, [as_bytes(out)])
            return out.nbytes
        runs = _runs(out) if out.nbytes >= LONG_RUN_BYTES and start % PAGE_BYTES == 0 else []
        if runs:
            _read_runs(file, start, runs)
            return out.nbytes
    span: int = out.dtype.itemsize + sum(
        (extent - 1) * step for extent, step in zip(out.shape, strides, strict=True)
    )
    if span <= file.most_bounce_bytes:
        found = _through_bounce(file, start, span)
        out[...] = np.ndarray(out.shape, out.dtype, buffer=found.data, strides=strides)
        return span
    if out.shape[0] == 1:
        return _read(file, start, strides[1:], out.reshape(out.shape[1:]))
    # Long rows are read one by one; of short ones as many as fill the buffer.
    run = _is_run(out.shape[1:], strides[1:], out.dtype.itemsize) and out[0].nbytes >= LONG_RUN_BYTES
    group = 1 if run else max(1, file.most_bounce_bytes // strides[0])
    count = 0
    for row in range(0, out.shape[0], group):
        count += _read(file, start + row * strides[0], strides, out[row : row + group])
    return count


def _is_run(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether a box of ``shape`` is one run of bytes in the file."""
    for extent, step in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and step != itemsize:
            return False
        itemsize *= extent
    return True


def _read_runs(file: _File, start: int, runs: list[Any]) -> None:
    """Fill runs that follow each other in the file: whole blocks in place, parts of blocks by the buffer."""
    stop = start + sum(run.nbytes for run in runs)
    low, high = start, stop
    if file.sums is not None:
        block = file.sums.block_bytes
        low = min(-(-start // block) * block, stop)
        high = stop if stop == file.sums.nbytes else max(low, stop // block * block)
    head, rest = _split(runs, low - start)
    middle, tail = _split(rest, high - low)
    for place, part in ((start, head), (high, tail)):
        for run in part:
            run = as_bytes(run)
            for done in range(0, run.size, file.most_bounce_bytes):
                piece = run[done : done + file.most_bounce_bytes]
                piece[:] = _through_bounce(file, place + done, piece.size)
            place += run.size
    if len(middle) > 1:
        _move(os.preadv, _fill, file.handle, low, middle)
    elif middle:
        _fill(file.handle, low, as_bytes(middle[0]))
    file.check(low, middle)


def _split(runs: list[Any], size: int) -> tuple[list[Any], list[Any]]:
    """Split runs after ``size`` bytes."""
    for number, run in enumerate(runs):
        if size < run.nbytes:
            if not size:
                return runs[:number], runs[number:]
            view = as_bytes(run)
            return [*runs[:number], view[:size]], [view[size:], *runs[number + 1 :]]
        size -= run.nbytes
    return runs, []


def _fill(handle: int, start: int, target: Bytes) -> None:
    """Read ``target.size`` bytes of the file from ``start`` on."""
    done = 0
    if start % PAGE_BYTES == 0 and _aligned(target):
        whole = target.size // PAGE_BYTES * PAGE_BYTES
        while done < whole:
            count = os.preadv(
                handle, [target[done : min(whole, done + MOST_BYTES_PER_CALL)].data], start + done
            )
            if count % PAGE_BYTES or count == 0:
                raise OSError(errno.EIO, "the file is shorter than it was written")
            done += count
    step = BOUNCE_BYTES - 2 * PAGE_BYTES
    for at in range(done, target.size, step):
        part = target[at : at + step]
        part[:] = _bounced(handle, start + at, part.size)


def _through_bounce(file: _File, start: int, size: int) -> Bytes:
    """Read and verify bytes from ``start`` on; they lie in this thread's buffer until its next use."""
    if file.sums is None:
        return _bounced(file.handle, start, size)
    block = file.sums.block_bytes
    low = start // block * block
    found = _bounced(file.handle, low, min(-(-(start + size) // block) * block, file.sums.nbytes) - low)
    file.check(low, [found])
    return found[start - low : start - low + size]


def _bounced(handle: int, start: int, size: int) -> Bytes:
    """Read bytes from ``start`` on into this thread's buffer; the result is valid until its next use."""
    before = start % PAGE_BYTES
    wanted = -(-(before + size) // PAGE_BYTES) * PAGE_BYTES
    bounce, done = _bounce(), 0
    while done < before + size:
        count = os.preadv(handle, [bounce[done:wanted].data], start - before + done)
        done += count
        if count == 0 or (done % PAGE_BYTES and done < before + size):
            raise OSError(errno.EIO, "the file is shorter than it was written")
    return bounce[before : before + size]


def _aligned(view: Bytes) -> bool:
    return int(view.__array_interface__["data"][0]) % PAGE_BYTES == 0


def _bounce() -> Bytes:
    buffer: Bytes | None = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = np.frombuffer(mmap.mmap(-1, BOUNCE_BYTES), np.uint8)
    return buffer
