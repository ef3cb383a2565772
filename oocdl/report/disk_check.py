"""Checks that there is enough disk, before the first step and before every commit.

In between, a disk that fills up ends the run with the same error, raised by whoever writes to it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from oocdl.errors import ResourceError
from oocdl.report.plan_view import Plan
from oocdl.storage.cache.spill_store import own_folders, refuse_memory, remove_dead
from oocdl.storage.files import existing, free_bytes


class Need(NamedTuple):
    """Bytes that are still to be written to a folder, and what they are."""

    what: str
    folder: Path
    nbytes: int


def check_start(plan: Plan, run: Path, spills: bool = True, kept: int = 0) -> None:
    """Refuse a run that the disk has no room for, or that ``disk=`` does not allow.

    What killed runs have left is deleted first. ``spills`` is False where workers of a client spill: their
    disks cannot be seen from here. ``kept`` is the number of versions that callbacks may keep together.

    Raises ResourceError; StoreError if the spill would be in memory.
    """
    spill = plan.settings.spill_folder(run / "spill")
    remove_dead(run / "spill")
    stored = total = plan.store_bytes + kept * plan.version_bytes
    needs = [Need("weights and state", run.absolute(), max(0, stored - _versions_bytes(run)))]
    if spills:
        refuse_memory(spill)
        remove_dead(spill)
        needs.append(Need("spill", spill, plan.spill_bytes))
        total += plan.spill_bytes
    limit = plan.settings.disk_bytes
    if limit is not None and total > limit:
        raise ResourceError(
            f"the run may need {_mib(total)} of disk ({_mib(total - stored)} of spill, "
            f"{_mib(stored)} of weights and state), disk= allows {_held(limit)}; "
            f"raise it, or {_ways_out(needs)}"
        )
    disks: dict[int, list[Need]] = {}
    for need in needs:
        disks.setdefault(os.stat(existing(need.folder)).st_dev, []).append(need)
    for together in disks.values():
        _check_free(together)


def check_commit(plan: Plan, run: Path) -> None:
    """Refuse to begin a commit that the disk has no room for, or that ``disk=`` does not allow.

    Raises ResourceError; the last commit stays.
    """
    _check_free([Need("the next version of weights and state", run, plan.version_bytes)])
    limit = plan.settings.disk_bytes
    if limit is None:
        return
    spill = plan.settings.spill_folder(run / "spill")
    spilled = sum(_bytes_in(folder) for folder in own_folders(spill))
    total = _versions_bytes(run) + spilled + plan.version_bytes
    if total > limit:
        raise ResourceError(
            f"the next commit would take the run to {_mib(total)} of disk ({_mib(spilled)} of it spill), "
            f"disk= allows {_held(limit)}; the last commit stays; raise disk= and call fit again"
        )


def _check_free(needs: Sequence[Need]) -> None:
    """Raise ResourceError if one file system, on which all of ``needs`` are, has no room for them."""
    free, total = free_bytes(needs[0].folder), sum(need.nbytes for need in needs)
    if total <= free:
        return
    parts = " and ".join(
        f"{_mib(need.nbytes)} for {need.what} in {need.folder}" for need in needs if need.nbytes
    )
    raise ResourceError(
        f"not enough disk: the run needs {parts}, where {_held(free)} are free; "
        f"make room, or {_ways_out(needs)}"
    )


def _ways_out(needs: Sequence[Need]) -> str:
    if any(need.what == "spill" and need.nbytes for need in needs):
        return "choose spill= on another disk, more memory= or a smaller batch_size="
    return "choose workdir= on another disk"


def _versions_bytes(run: Path) -> int:
    return sum(_bytes_in(run / name) for name in ("weights", "state", "kept"))


def _bytes_in(folder: Path) -> int:
    """Return the disk bytes of all files and folders below; those that vanish meanwhile do not count."""
    total = 0
    for place, _, files in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in files)):
            try:
                total += os.lstat(path).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def _mib(nbytes: int) -> str:
    """Return what is needed, rounded up; ``_held`` rounds down, so that the two differ."""
    return f"{-(-nbytes >> 20)} MiB"


def _held(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >> 20 else f"{nbytes} bytes"
