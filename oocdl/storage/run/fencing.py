"""Numbers the writers of a run, so that one that was given up on can do no harm where locks do not hold.

The file ``epoch-N`` belongs to writer N, and holds the last version that it has acknowledged. A writer makes
its own before it reads anything, and deletes those of its predecessors.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from oocdl.errors import StoreError
from oocdl.storage.checksums import sealed, unsealed
from oocdl.storage.files import io_error, read_text, remove, reporting, sync_path

EPOCH_NAME = r"epoch-(\d{1,18})"


def _epochs(root: Path) -> dict[int, Path]:
    found = ((re.fullmatch(EPOCH_NAME, path.name), path) for path in root.glob("epoch-*"))
    return {int(match[1]): path for match, path in found if match}


def next_epoch(root: Path) -> int:
    """Take the next number of a writer by making its file, so that no two writers have the same.

    This holds where locks do not (on some network disks). Raises StoreError if another was faster.
    """
    known = _epochs(root)
    names = (re.fullmatch(r"manifest-\d{1,18}-e(\d{1,18})\.json", p.name) for p in root.glob("manifest-*"))
    epoch = max([0, *known, *(int(match[1]) for match in names if match)]) + 1
    acknowledged = acknowledged_version(root)
    try:
        handle = os.open(root / f"epoch-{epoch}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.close(handle)
        if acknowledged >= 0:
            acknowledge(root, epoch, acknowledged)
        sync_path(root)
        for path in known.values():
            remove(path)
    except FileExistsError as error:
        raise StoreError(f"run {root} was opened by another process just now") from error
    except OSError as error:
        raise io_error(error, root, 0) from error
    return epoch


def check_owner(root: Path, epoch: int) -> None:
    """Raise StoreError if another writer has taken over the run from writer ``epoch``, or if it is gone."""
    with reporting(root, "read"):
        known = _epochs(root)
    if not known:
        raise StoreError(
            f"the run in {root} is gone: it was deleted or moved, or its disk is no longer there; bring it "
            "back to go on from its last commit"
        )
    if epoch not in known or max(known) > epoch:
        other = max(known)
        raise StoreError(
            f"another process has taken over the run in {root} (it is writer {other}, this one was writer "
            f"{epoch}); this one writes nothing more there; its last commit stays"
        )


def acknowledge(root: Path, epoch: int, version: int) -> None:
    """Note that ``version`` is durable, so that an older CURRENT can be told from the newest."""
    # Never made anew: a successor may have deleted it.
    try:
        handle = os.open(root / f"epoch-{epoch}", os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.write(handle, sealed("acknowledged", version).encode())
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise io_error(error, root / f"epoch-{epoch}", 0) from error


def acknowledged_version(root: Path) -> int:
    """Return the last version that is known to be durable; -1 if none is."""
    versions = [-1]
    for path in _epochs(root).values():
        try:
            versions.append(int(unsealed("acknowledged", read_text(path))))
        except (OSError, ValueError, TypeError):
            continue  # none yet, or cut short by a crash: it only ever adds to what CURRENT says
    return max(versions)
