"""What the process takes by itself: measured before the budget is spent, and parked where that is much."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path
from tempfile import gettempdir

from oocdl.config import Settings
from oocdl.fusion.jit import address_of
from oocdl.host.heap import give_back_freed_memory
from oocdl.host.limits import anonymous_bytes
from oocdl.host.parked import park, returning_bytes
from oocdl.storage.files import filesystem

TIGHT_BYTES = 64 << 20
"""Room for arrays below which garbage is collected before the process is measured."""
PARK_SHARE = 1 / 8
"""Share of the budget above which memory of the process is parked."""
PARKED_SLACK_BYTES = 8 << 20
"""Bytes by which more or less is parked in another process that does the same. Measured: 5 MiB."""
LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs"})
"""File systems that may hold what is parked: a file in memory would gain nothing, and pages of a file that is
reached over a network, or that a program serves, might not come back."""

_first_bytes: dict[str, int] = {}
"""Engine -> bytes of the process when it was measured first, or parked, whichever is less."""
_loaded_bytes: dict[str, int] = {}
"""Engine -> bytes that the process had when it was parked, which another one takes first, too."""


def own_bytes(engine: str, room_bytes: int, left_bytes: int) -> int:
    """Return the bytes of the process without those that earlier plans have left, which the next one reuses.

    These are ``left_bytes`` at most; ``room_bytes`` is what the process and its arrays may take.
    """
    give_back_freed_memory()
    if room_bytes - anonymous_bytes() < TIGHT_BYTES:
        gc.collect()
        give_back_freed_memory()
    now, returned = anonymous_bytes(), returning_bytes()
    left = now - _first_bytes.setdefault(engine, now)
    return now - min(max(left, 0), left_bytes + returned) + returned


def parked_slack_bytes() -> int:
    """Return the bytes that a process may take more the next time because something was parked."""
    return PARKED_SLACK_BYTES if returning_bytes() else 0


def loaded_bytes(engine: str) -> int:
    """Return the bytes that a process with that engine takes before something is parked; 0: nothing is."""
    return _loaded_bytes.get(engine, 0)


def larger_bytes(nbytes: int) -> int:
    """Return the size of a process that is so much larger than this one."""
    return anonymous_bytes() + nbytes


def park_much(engine: str, settings: Settings, left_bytes: int) -> None:
    """Park memory of the process, in a file, where it takes much of the budget and that is safe.

    Once is enough, unless the process has grown since by more than a plan leaves.
    """
    parked = returning_bytes()
    usual_bytes = _first_bytes.get(engine, 0) + parked + left_bytes if parked else 0
    if anonymous_bytes() <= max(PARK_SHARE * settings.memory_bytes, usual_bytes):
        return
    folder = disk_folder((settings.spill_folder(Path.cwd()), Path(gettempdir()), Path.cwd()))
    if folder is not None and (parked := park(folder, address_of)):
        now = anonymous_bytes()
        _loaded_bytes.setdefault(engine, now + parked)
        _first_bytes[engine] = min(_first_bytes.get(engine, now), now)


def disk_folder(folders: Iterable[Path]) -> Path | None:
    """Return the first of these folders that is there, and on a disk of this machine."""
    return next((one for one in folders if one.is_dir() and filesystem(one) in LOCAL_DISKS), None)
