"""``CURRENT``, which names the committed version: reads it, and replaces it for the one writer that may.

What neither it nor the spares of its version name is deleted.

Writers have numbers, so that one that was given up on can do no harm where locks do not hold. The file
``epoch-N`` belongs to writer N, and holds the last version that it has acknowledged. A writer makes its own
before it reads anything, and deletes those of its predecessors.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from oocdl.errors import CorruptError, StoreError
from oocdl.storage.checksums import sealed, unsealed
from oocdl.storage.files import handle_of, read_text, remove, reporting, sync_path, write_text
from oocdl.storage.run.manifest import GROUPS, MANIFEST_NAME, WAY_OUT, Manifest
from oocdl.storage.run.sealed_files import COPY, SEALED_FILES

Current = tuple[Manifest | None, str | None]  # the committed version, and the text of CURRENT
DELETE_THREADS = 16
FOLDERS = ("weights", "state", "kept", "history", "spill", "live")  # folders of a run
MODULE_FILES = "module-*.onnx"  # model files that are written for a run: there before the run is
EXPORT_FOLDERS = ".oocdl-*"  # folders in which such a file is made: a killed process leaves them


def publish(root: Path, manifest: Manifest, before: str | None) -> str:
    """Make ``manifest`` the current version, durably; returns the text of CURRENT, which is replaced last.

    ``before`` is the text that CURRENT must have now. Raises StoreError if another process has taken over.
    """
    text = manifest.dumps()
    write_text(root / manifest.file, text)
    sync_path(root)
    digest = hashlib.sha256(text.encode()).hexdigest()
    pointer = sealed("current", {"manifest": manifest.file, "sha256": digest})
    check_owner(root, manifest.epoch)
    if pointer_text(root) != before:
        raise StoreError(
            f"another process has committed to {root} meanwhile; this one writes nothing more there; "
            "call fit again to go on from that commit"
        )
    write_text(root / "CURRENT", pointer)
    sync_path(root)
    acknowledge(root, manifest.epoch, manifest.version)
    return pointer


def pointer_text(root: Path) -> str | None:
    """Return the text of CURRENT; None if there is none. Raises CorruptError if it cannot be read."""
    try:
        return read_text(root / "CURRENT")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CorruptError(f"{root / 'CURRENT'} is damaged ({error}); {WAY_OUT}") from error


def load_current(root: Path, known: Current = (None, None)) -> Current:
    """Read the manifest of the committed version, and the text of CURRENT; None before the first commit.

    ``known`` is what an earlier call returned: the manifest is read again only if CURRENT has changed. Raises
    CorruptError if CURRENT or its manifest is damaged, lost, or older than what was committed.
    """
    while True:
        # In this order: a writer replaces CURRENT before it acknowledges.
        acknowledged, pointer = acknowledged_version(root), pointer_text(root)
        if known[0] is not None and pointer == known[1] and known[0].version >= acknowledged:
            return known
        try:
            return _load(root, pointer, acknowledged), pointer
        except CorruptError:
            if pointer_text(root) == pointer:
                raise
            # Its writer has committed twice meanwhile, and has deleted what this reader was about to read.


def _load(root: Path, pointer: str | None, acknowledged: int) -> Manifest | None:
    path = root / "CURRENT"
    if pointer is None:
        # Before the first commit there is at most its own manifest, not yet acknowledged.
        if len(list(root.glob("manifest-*.json"))) > 1 or acknowledged >= 0:
            raise CorruptError(f"{path} is missing, but versions are there; {WAY_OUT}")
        return None
    try:
        named: dict[str, Any] = unsealed("current", pointer)
        manifest = load_manifest(root, named["manifest"], named["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} is damaged ({error}); {WAY_OUT}") from error
    if manifest.version < acknowledged:
        raise CorruptError(
            f"{path} names version {manifest.version}, but version {acknowledged} was committed; {WAY_OUT}"
        )
    return manifest


def load_manifest(root: Path, name: str, digest: str | None = None) -> Manifest:
    """Read a manifest by its file name. Raises CorruptError if it is lost, damaged, or another's."""
    if not re.fullmatch(MANIFEST_NAME, name):
        raise CorruptError(f"{root} names {name!r}, which is no manifest of a run; {WAY_OUT}")
    path = root / name
    try:
        text = read_text(path)
        if digest is not None and hashlib.sha256(text.encode()).hexdigest() != digest:
            raise ValueError("it is not the one that was committed")
        manifest = Manifest.loads(text)
        if manifest.file != name:
            raise ValueError(f"it is {manifest.file}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StoreError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorruptError(f"{path} is damaged ({reason}); {WAY_OUT}") from error
    return manifest


def load_readable(root: Path, names: Iterable[str]) -> list[Manifest]:
    """Read manifests by their file names, but for those that are gone or damaged."""
    manifests = []
    for name in names:
        with suppress(CorruptError):
            manifests.append(load_manifest(root, name))
    return manifests


def _epochs(root: Path) -> dict[int, Path]:
    found = ((re.fullmatch(r"epoch-(\d{1,18})", path.name), path) for path in root.glob("epoch-*"))
    return {int(match[1]): path for match, path in found if match}


def next_epoch(root: Path) -> int:
    """Take the next number of a writer by making its file, so that no two writers have the same.

    This holds where locks do not (on some network disks). Raises StoreError if another was faster.
    """
    known = _epochs(root)
    names = (re.fullmatch(r"manifest-\d{1,18}-e(\d{1,18})\.json", p.name) for p in root.glob("manifest-*"))
    epoch = max([0, *known, *(int(match[1]) for match in names if match)]) + 1
    acknowledged = acknowledged_version(root)
    with reporting(root):
        try:
            (root / f"epoch-{epoch}").touch(0o644, exist_ok=False)
        except FileExistsError as error:
            raise StoreError(f"run {root} was opened by another process just now") from error
        if acknowledged >= 0:
            acknowledge(root, epoch, acknowledged)
        sync_path(root)
        for path in known.values():
            remove(path)
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
    path = root / f"epoch-{epoch}"
    with reporting(path), handle_of(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW) as handle:
        os.write(handle, sealed("acknowledged", version).encode())
        os.fsync(handle)


def acknowledged_version(root: Path) -> int:
    """Return the last version that is known to be durable; -1 if none is."""
    versions = [-1]
    for path in _epochs(root).values():
        try:
            versions.append(int(unsealed("acknowledged", read_text(path))))
        except (OSError, ValueError, TypeError):
            continue  # none yet, or cut short by a crash: it only ever adds to what CURRENT says
    return max(versions)


def remove_unnamed(root: Path, current: Manifest | None) -> None:
    """Delete every version and manifest but ``current``, its parent and its checkpoints."""
    named = [] if current is None else [current, *load_readable(root, current.spares)]
    files = {manifest.file for manifest in named}
    folders = {root / tensor.folder for m in named for tensor in m.tensors.values()}
    kept = () if current is None else current.kept.values()
    living = folders | {folder.parent for folder in folders} | {root / "kept" / value.id for value in kept}
    for path in [*root.glob("manifest-*.json"), *root.glob("*.partial")]:
        if path.name not in files:
            remove(path)
    for unfinished in [path for folder in folders for path in folder.glob("*.partial")]:
        unfinished.unlink(missing_ok=True)
    places = [path for pattern in ("weights/t*", "state/t*", "kept/k*") for path in root.glob(pattern)]
    places += [folder for place in places if place in living for folder in place.glob("e*-v*")]
    dead = [place for place in places if place not in living]
    # Side by side: deleting what has just been synced takes milliseconds a file.
    with ThreadPoolExecutor(DELETE_THREADS) as pool:
        list(pool.map(partial(shutil.rmtree, ignore_errors=True), dead))


def refuse_links(root: Path) -> None:
    """Raise StoreError if a link stands where a run has folders and files: writing would leave the run."""
    inner = (f"{name}/*" for name in FOLDERS)
    for pattern in (*FOLDERS, "LOCK", "epoch-*", *inner, "weights/*/*", "state/*/*"):
        for path in root.glob(pattern):
            if path.is_symlink():
                raise StoreError(
                    f"{path} is a link, which a run does not follow when it writes; put what it names in its "
                    "place, or copy the run"
                )


def check_free(root: Path) -> None:
    """Raise StoreError unless the folder is empty, or holds what a creation or ``clear`` has left."""
    left = {entry.name for entry in root.iterdir()} - {"LOCK"}
    if "run.json" in left:
        raise StoreError(f"a run is in {root} already; open it, or choose another folder")
    # run.json is written last.
    patterns = ("*.partial", f"{MODULE_FILES}*", EXPORT_FOLDERS)
    known = {p.name for pattern in patterns for p in root.glob(pattern)}
    known |= {f"{name}-damaged" for name in ("CURRENT", *SEALED_FILES)}  # which a repair has set aside
    known |= {p.name for p in _epochs(root).values() if p.is_file() and not p.stat().st_size}
    if left - {"history", "spill", "zarr.json", COPY, *GROUPS} - known:
        raise StoreError(f"{root} is not empty and not a run; choose another folder")


def clear(root: Path) -> None:
    """Delete a run of which the caller holds the lock; other files in its folder stay.

    A crash at any point leaves a run without a version, or none. The epoch stays: a late write of an old
    writer must not find a folder of the new one.
    """
    for path in root.glob("epoch-*"):
        os.truncate(path, 0)
    manifests = sorted(root.glob("manifest-*.json"))
    named = ""
    with suppress(OSError, ValueError, KeyError, TypeError):  # it names none
        named = str(unsealed("current", read_text(root / "CURRENT"))["manifest"])
    for path in [path for path in manifests if path.name != named]:
        path.unlink(missing_ok=True)
    (root / "CURRENT").unlink(missing_ok=True)
    facts = (root / name for name in (*SEALED_FILES, "zarr.json") if name != "run.json")
    for path in [*manifests, *root.glob("*.partial"), *facts]:
        path.unlink(missing_ok=True)
    for name in FOLDERS:
        if (root / name).is_dir() and not (root / name).is_symlink():
            shutil.rmtree(root / name)
    sync_path(root)
    (root / "run.json").unlink()
