"""Parks memory that is hardly used again in a file, so that more of a budget is left for arrays.

Of the 160 MiB that a process has with PyTorch in it, a step touches 12. What lies in the heap and in other
anonymous mappings is written to a file without a name, which is mapped in its place, privately. A page that
is only read stays one of the file: the system drops it where memory is short, and reads it again. A page
that is written becomes the process's own again. Addresses stay as they are.

Nobody may write between the two. One native call does both while this thread holds the interpreter's lock,
and only where every other thread sleeps without a time limit, so that this one would have to wake it. A
signal is taken by this thread; its handler writes to the stack and to static variables, which stay. Nothing
is parked where a thread does otherwise (in a notebook, say, or a worker of a cluster), or where a device or
an asynchronous ring may write.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from oocdl.host.heap import IS_SUPPORTED, give_back_freed_memory

VARIABLE = "OOCDL_PARK"
"""Environment variable; "off": nothing is parked."""
RETURNING_BYTES = 36 << 20
"""Part of what is parked that planning and steps write again (8 to 20 MiB), or read all the time."""
LEAST_BYTES, MOST_BYTES = 32 << 20, 512 << 20
"""Bytes that are worth parking, and the most that are: what is more is a user's data."""
LEAST_RUN_BYTES, MOST_RANGES = 64 << 10, 1024
"""Shorter runs of pages stay, as each is a mapping of its own; one call of the system writes so many runs."""
LARGEST_MAPPING_BYTES = 128 << 20
"""Larger anonymous mappings are arrays of the user's."""
NEAR_BYTES = 1 << 20
"""Bytes around this thread's block of control that stay, as the kernel writes there."""
PLAIN_FLAGS = frozenset({"rd", "wr", "mr", "mw", "me", "ac", "sd", "hg", "nh", "rr"})
"""Flags of a mapping (``VmFlags`` of proc(5)) that a private mapping of a file can have in its place."""
MOST_STATIC_BYTES = 4 << 20
"""Bytes of the zeroed variables of a library, which stay: the interpreter's lock is one of them."""
PIECE_BYTES = 32 << 20
"""Pages of so much are looked at together, so that what this takes is no mapping that comes and goes."""
RINGS, SHARED = ("/dev/", "/[aio]", "anon_inode:"), ("/dev/shm/", "/dev/zero")
"""How mappings of devices and of asynchronous calls are named, and those of them that only share memory."""
WAITS = {"x86_64": ({202}, {232, 281}), "aarch64": ({98}, {22})}
"""Machine -> numbers of the system calls futex, and epoll_wait and epoll_pwait."""
_NO_LIMIT = 0xFFFFFFFF
_RANDOM = 1  # MADV_RANDOM: a page is read by itself, as its neighbours would push out what is in use
_PREFIX = "oocdl-parked-"

_is_parked = False
_library = ctypes.CDLL(None, use_errno=True)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CODE = """
define i32 @park(ptr %ranges, i32 %count, i64 %total, i32 %file) {{
entry:
  %written = call i64 inttoptr (i64 {pwritev} to ptr)(i32 %file, ptr %ranges, i32 %count, i64 0)
  %all = icmp eq i64 %written, %total
  br i1 %all, label %sync, label %failed
sync:
  %status = call i32 inttoptr (i64 {fdatasync} to ptr)(i32 %file)
  %synced = icmp eq i32 %status, 0
  br i1 %synced, label %map, label %failed
map:
  %i = phi i32 [0, %sync], [%next, %map]
  %offset = phi i64 [0, %sync], [%end, %map]
  %range = getelementptr {{ptr, i64}}, ptr %ranges, i32 %i
  %address = load ptr, ptr %range
  %size = getelementptr {{ptr, i64}}, ptr %range, i32 0, i32 1
  %bytes = load i64, ptr %size
  %at = call ptr inttoptr (i64 {mmap} to ptr)(
      ptr %address, i64 %bytes, i32 3, i32 18, i32 %file, i64 %offset)
  %end = add i64 %offset, %bytes
  %next = add i32 %i, 1
  %more = icmp ult i32 %next, %count
  br i1 %more, label %map, label %done
done:
  ret i32 0
failed:
  ret i32 1
}}
"""
"""Writes ranges (``struct iovec``) to the file; once all is on the disk, maps (``PROT_READ | PROT_WRITE``,
``MAP_PRIVATE | MAP_FIXED``) the file in their place. Returns 0, or 1 if nothing was mapped."""


class _Mapping(NamedTuple):
    """A line of ``/proc/self/smaps``, and what follows it."""

    begin: int
    end: int
    permissions: str
    name: str
    anonymous_bytes: int
    flags: frozenset[str]


class _NotQuiet(Exception):
    """Somebody else may write to this process's memory."""


def park(folder: Path, address_of: Callable[[str, str], int]) -> int:
    """Park what can be in a file in ``folder``, which has to be on a local disk; returns its bytes.

    ``address_of`` compiles a module of LLVM's, and returns the address of one of its functions. The result is
    0 where parking is not certain to be safe, or not worth it. Objects that are there now are not collected
    until ``gc.unfreeze``, as the collector writes to each.
    """
    if not _is_possible() or os.environ.get(VARIABLE) == "off":
        return 0
    gc.collect()
    gc.freeze()
    give_back_freed_memory()
    with suppress(OSError, _NotQuiet), _nameless(folder) as file:
        native = _native(address_of)
        stacks = list(_sleeping_stacks())
        ranges = list(_ranges(list(_mappings()), stacks))
        total = sum(end - begin for begin, end in ranges)
        if LEAST_BYTES <= total <= MOST_BYTES and len(ranges) <= MOST_RANGES:
            os.posix_fallocate(file.fileno(), 0, total)
            told = np.array([(begin, end - begin) for begin, end in ranges], np.int64)
            # Signals are not blocked: the next thread that takes one would wake.
            if not native(told.ctypes.data, len(ranges), total, file.fileno()):
                for begin, end in ranges:
                    _library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _RANDOM)
                global _is_parked
                _is_parked = True
                return total
    gc.unfreeze()
    return 0


def returning_bytes() -> int:
    """Return the bytes by which this process will grow again, because something was parked."""
    return RETURNING_BYTES if _is_parked else 0


def _nameless(folder: Path) -> IO[bytes]:
    """Open a new file that has no name any more, but for the one by which mappings tell it."""
    handle, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    os.unlink(name)
    return os.fdopen(handle, "r+b")


def _is_possible() -> bool:
    """Whether the system has what this module calls, and this is the thread that may."""
    try:
        strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"  # a mapping may be refused
    except OSError:
        return False
    is_main = threading.current_thread() is threading.main_thread()
    return IS_SUPPORTED and is_main and not strict and platform.machine() in WAITS


def _native(address_of: Callable[[str, str], int]) -> Callable[[int, int, int, int], int]:
    """The native call, which holds the interpreter's lock."""
    names = ("pwritev", "fdatasync", "mmap")
    addresses = {name: ctypes.cast(getattr(_library, name), ctypes.c_void_p).value for name in names}
    kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int)
    return kind(address_of(_CODE.format(**addresses), "park"))


def _sleeping_stacks() -> Iterator[int]:
    """Yield an address in the stack of each other thread; all of them have to sleep without a time limit."""
    futex, epoll = WAITS[platform.machine()]
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != threading.get_native_id():
            number, *told = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
            arguments = [int(one, 16) for one in told]
            is_futex, is_epoll = (number in map(str, calls) for calls in (futex, epoll))
            # A time limit is a pointer, or a number of which -1 is none.
            if not (is_futex and not arguments[3] or is_epoll and arguments[3] & _NO_LIMIT == _NO_LIMIT):
                raise _NotQuiet(f"thread {thread} is in call {number}")
            yield arguments[6]


def _mappings() -> Iterator[_Mapping]:
    """Yield all mappings of this process, by address."""
    head, anonymous_bytes = list[str](), 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, *rest = line.split()
            if not first.endswith(":"):
                head = [first, *rest]
            elif first == "Anonymous:":
                anonymous_bytes = int(rest[0]) << 10
            elif first == "VmFlags:":
                begin, _, end = head[0].partition("-")
                name = " ".join(head[5:])
                yield _Mapping(int(begin, 16), int(end, 16), head[1], name, anonymous_bytes, frozenset(rest))


def _ranges(mappings: Iterable[_Mapping], stacks: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the addresses, in whole pages, of what can be parked."""
    _library.pthread_self.restype = ctypes.c_ulong
    control, library_end = _library.pthread_self() // _PAGE_BYTES * _PAGE_BYTES, 0
    low, high = control - NEAR_BYTES, control + NEAR_BYTES  # what is between them stays
    for one in mappings:
        if one.name.startswith(RINGS) and not one.name.startswith(SHARED):
            raise _NotQuiet(f"{one.name} is mapped")
        is_mine = one.name == "[heap]" or f"/{_PREFIX}" in one.name
        # What is small and follows the data of a library directly is the library's, too.
        follows = one.begin == library_end and one.end - one.begin <= MOST_STATIC_BYTES
        if not is_mine and (one.name or follows):
            library_end = one.end
            continue
        if (
            one.permissions == "rw-p"
            and one.flags <= PLAIN_FLAGS
            and (is_mine or one.anonymous_bytes <= LARGEST_MAPPING_BYTES)
            and not any(one.begin <= stack < one.end for stack in stacks)
        ):
            pieces = range(one.begin, one.end, PIECE_BYTES)
            for begin, end in chain.from_iterable(_runs(at, min(at + PIECE_BYTES, one.end)) for at in pieces):
                for first, last in ((begin, min(end, low)), (max(begin, high), end)):
                    if last - first >= LEAST_RUN_BYTES:
                        yield first, last


def _runs(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of pages between two addresses that are in memory, and no pages of files."""
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        told = os.pread(table.fileno(), (end - begin) // _PAGE_BYTES * 8, begin // _PAGE_BYTES * 8)
    facts = np.frombuffer(told, np.uint64) >> np.uint64(61)  # bit 61: of a file, 63: in memory
    own = np.concatenate([[False], (facts & np.uint64(5)) == 4, [False]])
    for first, last in np.flatnonzero(np.diff(own)).reshape(-1, 2).tolist():
        yield begin + first * _PAGE_BYTES, begin + last * _PAGE_BYTES
