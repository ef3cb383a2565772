"""Deletes what dead writers of a run left, and what later versions replaced."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from oocdl.errors import StoreError
from oocdl.storage.checksums import unsealed
from oocdl.storage.files import read_text, remove, sync_path
from oocdl.storage.run.manifest import Manifest
from oocdl.storage.run.pointer import load_spares
from oocdl.storage.run.sealed_files import COPY, SAMPLES

DELETE_THREADS = 16
_FACTS = (COPY, "plan.json", "report.json", SAMPLES, "zarr.json")
"""Files that a run has beside its manifests, ``CURRENT`` and ``run.json``."""


def remove_unnamed(root: Path, current: Manifest | None) -> None:
    """Delete every version and manifest but ``current``, its parent and its checkpoints."""
    named = [] if current is None else [current, *load_spares(root, current)]
    files = {manifest.file for manifest in named}
    values = set() if current is None else {value.id for value in current.kept.values()}
    folders = {root / tensor.folder for m in named for tensor in m.tensors.values()}
    arrays = {folder.parent for folder in folders}
    for path in [*root.glob("manifest-*.json"), *root.glob("*.partial")]:
        if path.name not in files:
            remove(path)
    dead: list[Path] = []
    for array in [*root.glob("weights/t*"), *root.glob("state/t*")]:
        if array not in arrays:
            dead.append(array)
            continue
        for folder in array.glob("e*-v*"):
            if folder not in folders:
                dead.append(folder)
            else:
                for unfinished in folder.glob("*.partial"):
                    unfinished.unlink(missing_ok=True)
    dead += [path for path in root.glob("kept/k*") if path.name not in values]
    # Side by side: deleting what has just been synced takes milliseconds a file.
    with ThreadPoolExecutor(DELETE_THREADS) as pool:
        list(pool.map(partial(shutil.rmtree, ignore_errors=True), dead))


def refuse_links(root: Path) -> None:
    """Raise StoreError if a link stands where a run has folders and files: writing would leave the run."""
    folders = ("weights", "state", "kept", "history", "spill", "live")
    inner = (f"{name}/*" for name in folders)
    for pattern in (*folders, "LOCK", "epoch-*", *inner, "weights/*/*", "state/*/*"):
        for path in root.glob(pattern):
            if path.is_symlink():
                raise StoreError(
                    f"{path} is a link, which a run does not follow when it writes; put what it names in its "
                    "place, or copy the run"
                )


def clear(root: Path) -> None:
    """Delete a run of which the caller holds the lock; other files in its folder stay.

    A crash at any point leaves a run without a version, or none. The epoch stays: a late write of an old
    writer must not find a folder of the new one.
    """
    for path in root.glob("epoch-*"):
        os.truncate(path, 0)
    manifests = sorted(root.glob("manifest-*.json"))
    named = _named(root / "CURRENT")
    for path in [path for path in manifests if path.name != named]:
        path.unlink(missing_ok=True)
    (root / "CURRENT").unlink(missing_ok=True)
    for path in [*manifests, *root.glob("*.partial"), *(root / name for name in _FACTS)]:
        path.unlink(missing_ok=True)
    for name in ("history", "weights", "state", "kept", "spill", "live"):
        if (root / name).is_dir() and not (root / name).is_symlink():
            shutil.rmtree(root / name)
    sync_path(root)
    (root / "run.json").unlink()


def _named(current: Path) -> str:
    """Return the file name of the manifest that CURRENT names; empty if CURRENT cannot be read."""
    try:
        return str(unsealed("current", read_text(current))["manifest"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
