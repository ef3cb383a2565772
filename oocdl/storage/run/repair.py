"""Makes a damaged run sound again, as far as what is on the disk allows, and says what is lost."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from oocdl.errors import CorruptError, StoreError, printable
from oocdl.storage.checksums import digest_of
from oocdl.storage.files import read_text, remove, reporting, sync_path, write_text
from oocdl.storage.run.garbage import refuse_links, remove_unnamed
from oocdl.storage.run.history import History
from oocdl.storage.run.lock import RunLock
from oocdl.storage.run.manifest import Manifest
from oocdl.storage.run.pointer import load_current, load_manifest, load_spares, next_epoch, publish
from oocdl.storage.run.run_verification import damages_in, holds, metadata_files
from oocdl.storage.run.sealed_files import COPY, read_sealed


@dataclass(frozen=True)
class Repaired:
    """The result of ``repair``. ``str(...)`` has a line for each thing that was lost or mended."""

    path: Path
    step: int
    """The step from which the run goes on."""
    changes: tuple[str, ...]
    """Things that are lost or were mended; empty if the run was sound."""

    def __str__(self) -> str:
        verdict = "repaired" if self.changes else "sound, nothing to repair"
        return "\n".join(
            printable(line) for line in (*self.changes, f"{self.path}: {verdict} (step {self.step})")
        )


def repair(workdir: str | Path, take_over: bool = False) -> Repaired:
    """Go back to the newest version of a run whose every chunk is sound, and leave out what is damaged.

    A run keeps its current version and the one before. Damaged rows of the history, damaged kept values and
    versions that callbacks have kept are left out; metadata of Zarr arrays is written anew. With
    ``take_over`` an owner on another host is evicted, which cannot be seen from here and has to be dead; if
    it lives, its next commit is refused.

    ``run.json`` and its copy are written anew from each other.

    Raises StoreError if the run is in use, CorruptError if no version is sound, or ``run.json`` and its copy
    are damaged both.

    >>> print(oocdl.repair("unet.run"))  # doctest: +SKIP
    steps 101 to 120 are lost: array 'w' chunk (0,) of step 120: ...
    unet.run: repaired (step 100)
    """
    root = Path(workdir).absolute()
    with reporting(root):
        if not any((root / name).exists() for name in ("run.json", "CURRENT")):
            raise StoreError(f"{root} is not a run: no run.json in it")
        refuse_links(root)
        lock = RunLock(root / "LOCK", take_over)
        try:
            return _repaired(root)
        finally:
            lock.release()


def _repaired(root: Path) -> Repaired:
    changes = list(_settings(root))
    epoch = next_epoch(root)
    try:
        newest, pointer = load_current(root)
        if newest is None:
            return Repaired(root, 0, tuple(changes))  # nothing was committed; fit begins
        names = [newest.file, *filter(None, [newest.parent])]
    except CorruptError as error:
        changes.append(f"CURRENT was written anew: {error}")
        newest, pointer = None, None
        _set_aside(root / "CURRENT")
        names = _all_manifests(root)
    ours = digest_of(read_text(root / "run.json"))
    chosen, reasons = _first_sound(root, names, ours)
    if chosen is None:
        raise CorruptError(
            f"no version of the run in {root} is sound: {'; '.join(reasons)}; restore a backup"
        )
    if reasons:
        last = "an unknown step" if newest is None else newest.step
        changes.append(f"steps {chosen.step + 1} to {last} are lost: {'; '.join(reasons)}")
    mended, lost = _mended(root, chosen, newest)
    changes += lost
    mended, lost = _with_sound_checkpoints(root, mended, ours)
    changes += lost
    try:
        known = chosen.seals.get("plan.json")
        if read_sealed(root / "plan.json", known) is None and known is not None:
            raise CorruptError(f"{root / 'plan.json'} is lost; restore it")
    except CorruptError as error:
        changes.append(f"{error}, or go on with replan=True (which changes rounding)")
    try:
        read_sealed(root / "report.json")
    except CorruptError:
        _set_aside(root / "report.json")
        changes.append(f"{root / 'report.json'} is damaged; the next commit writes it")
    parent = chosen.parent if chosen == newest else None
    if parent is not None:
        spare, wrong = _first_sound(root, [parent], ours)
        if spare is None:
            parent = None
            changes.append(f"the version before step {chosen.step} is left out: {'; '.join(wrong)}")
    made = replace(mended, parent=parent)
    for version in (made, *load_spares(root, made)):
        changes += _metadata(root, version)
    if made != newest:
        made = replace(made, epoch=epoch)
        publish(root, made, pointer)
        remove_unnamed(root, made)
    return Repaired(root, chosen.step, tuple(changes))


def _settings(root: Path) -> Iterator[str]:
    """Write ``run.json`` or its copy anew where one is damaged: they are the same, and never change."""
    try:
        newest, _ = load_current(root)
        versions = [] if newest is None else [newest]
    except CorruptError:
        versions = []
        for name in _all_manifests(root):
            with suppress(CorruptError):  # one that cannot be read says nothing of settings
                versions.append(load_manifest(root, name))
    # One of the manifests may be another run's: settings that any of them was made with are this run's.
    names, texts = ("run.json", COPY), dict[str, str]()
    for known in dict.fromkeys([version.seals.get("run.json") for version in versions] or [None]):
        for name in () if texts else names:
            with suppress(CorruptError):  # what is damaged is what this mends
                if read_sealed(root / name, known) is not None:
                    texts[name] = read_text(root / name)
    if not texts:
        raise CorruptError(f"{root / 'run.json'} is damaged or lost, and so is its copy; restore a backup")
    source = next(iter(texts))
    for name in names:
        if texts.get(name) != texts[source]:
            _write_anew(root / name, texts[source])
            yield f"{root / name} was written anew, from {source}"


def _all_manifests(root: Path) -> list[str]:
    """Return the names of all manifests that are there, the newest first: by version, then by epoch."""
    names = [path.name for path in root.glob("manifest-*.json")]
    return sorted(names, key=lambda name: [*map(int, re.findall(r"\d+", name))], reverse=True)


def _set_aside(path: Path) -> None:
    """Rename what is damaged, whatever it is."""
    beside = path.with_name(f"{path.name}-damaged")
    if os.path.lexists(path):
        remove(beside)
        path.replace(beside)


def _write_anew(path: Path, text: str) -> None:
    """Write a file in the place of one that is damaged or lost, of a folder or of a FIFO."""
    if not path.is_file():
        _set_aside(path)
    path.parent.mkdir(exist_ok=True)
    write_text(path, text)
    sync_path(path.parent)


def _first_sound(root: Path, names: list[str], ours: str) -> tuple[Manifest | None, list[str]]:
    """Return the first of these versions whose chunks are all sound, and what is wrong with those before it.

    ``ours`` is the digest of ``run.json``: a manifest of another run names chunks that are not this run's.
    """
    reasons: list[str] = []
    for name in names:
        try:
            manifest = load_manifest(root, name)
        except CorruptError as error:
            reasons.append(str(error))
            continue
        if manifest.seals.get("run.json", ours) != ours:
            reasons.append(f"{root / manifest.file} is another run's")
            continue
        wrong = [damage for part in manifest.arrays() for damage in damages_in(root, part)]
        if not wrong:
            return manifest, reasons
        reasons.append(f"{wrong[0]}" + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""))
    return None, reasons


def _metadata(root: Path, manifest: Manifest) -> Iterator[str]:
    """Write metadata of Zarr groups and arrays anew where it is damaged."""
    for file, text in metadata_files(manifest).items():
        path = root / file
        if not holds(path, text):
            _write_anew(path, text)
            yield f"{path} was written anew"


def _mended(root: Path, chosen: Manifest, newest: Manifest | None) -> tuple[Manifest, list[str]]:
    """Return a version without damaged rows of the history and kept values, and what that leaves out."""
    lost: list[str] = []
    history = History(root / "history" / "steps.jsonl", chosen.history)
    if wrong := history.start():
        lost.append(f"history: {wrong}; what it was is in steps-damaged.jsonl")
    kept = dict(chosen.kept)
    for name, value in chosen.kept.items():
        for damage in damages_in(root, value.sealed(name)):
            lost.append(f"{damage}; this kept value is left out")
            kept.pop(name, None)
    return replace(chosen, history=history.seal, kept=kept), lost


def _with_sound_checkpoints(root: Path, chosen: Manifest, ours: str) -> tuple[Manifest, list[str]]:
    """Return a version without those of its checkpoints that are damaged, and what that leaves out."""
    lost: list[str] = []
    kept, meta = dict(chosen.checkpoints), dict(chosen.meta)
    for step, name in chosen.checkpoints.items():
        found, wrong = _first_sound(root, [name], ours)
        if found is None:
            lost.append(f"the kept version of step {step} is left out: {'; '.join(wrong)}")
            kept.pop(step)
    if lost:
        there = {*kept, str(chosen.step)}
        meta["checkpoints"] = [step for step in meta.get("checkpoints", ()) if str(step) in there]
        if str(meta.get("restored", chosen.step)) not in there:
            lost.append(f"the run predicts with the weights of step {chosen.step}, its last")
            del meta["restored"]
    return replace(chosen, checkpoints=kept, meta=meta), lost
