"""``CURRENT``, which names the committed version: reads it, and replaces it for the one writer that may."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from oocdl.errors import CorruptError, StoreError
from oocdl.storage.checksums import sealed, unsealed
from oocdl.storage.files import read_text, sync_path, write_text
from oocdl.storage.run.fencing import acknowledge, acknowledged_version, check_owner
from oocdl.storage.run.manifest import MANIFEST_NAME, Manifest

WAY_OUT = "'oocdl repair' goes back to the newest sound version"


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


def load_current(root: Path) -> tuple[Manifest | None, str | None]:
    """Read the manifest of the committed version, and the text of CURRENT; None before the first commit.

    Raises CorruptError if CURRENT or its manifest is damaged, lost, or older than what was committed.
    """
    while True:
        # In this order: a writer replaces CURRENT before it acknowledges.
        acknowledged, pointer = acknowledged_version(root), pointer_text(root)
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


def load_parent(root: Path, manifest: Manifest) -> Manifest | None:
    """Read the version before ``manifest``; None if it is gone or damaged, as it is only a spare."""
    if manifest.parent is None:
        return None
    try:
        return load_manifest(root, manifest.parent)
    except CorruptError:
        return None
