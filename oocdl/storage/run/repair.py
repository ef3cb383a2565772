"""Reads every byte of a run and names what is not what was written; makes a damaged run sound again."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from oocdl.errors import CorruptError, StoreError, printable
from oocdl.storage.checksums import digest_of, why_wrong
from oocdl.storage.files import content_of, read_text, remove, reporting, sync_path, write_text
from oocdl.storage.run import pointer
from oocdl.storage.run.commit import metadata_of
from oocdl.storage.run.history import History
from oocdl.storage.run.lock import RunLock
from oocdl.storage.run.manifest import GROUPS, Manifest, Sealed
from oocdl.storage.run.sealed_files import COPY, SEALED_FILES, read_sealed
from oocdl.storage.zarr_json import group_json


@dataclass(frozen=True)
class Damage:
    """Something in a run that is lost, or is not what was written."""

    what: str
    """The file, array or kept value."""
    reason: str
    chunk: str = ""
    """The file of the chunk, if it is one."""
    step: int | None = None
    """Step of the version that it belongs to; None if it belongs to none."""

    def __str__(self) -> str:
        chunk = f" chunk {self.chunk}" if self.chunk else ""
        step = "" if self.step is None else f" of step {self.step}"
        return printable(f"{self.what}{chunk}{step}: {self.reason}")


@dataclass(frozen=True)
class Verification:
    """The result of ``verify``. ``str(...)`` has a line for each damage, and a summary."""

    path: Path
    step: int | None
    """Step of the current version; None if there is none, or it cannot be read."""
    arrays: int
    chunks: int
    nbytes: int
    """Read and verified."""
    damages: tuple[Damage, ...]

    @property
    def sound(self) -> bool:
        """Whether everything is as it was written."""
        return not self.damages

    def __str__(self) -> str:
        read = f"{self.arrays} arrays, {self.chunks} chunks, {self.nbytes / 2**20:.1f} MiB read"
        count = len(self.damages)
        verdict = "sound" if self.sound else f"damaged in {count} place{'' if count == 1 else 's'}"
        step = "no committed step" if self.step is None else f"step {self.step}"
        return "\n".join([*map(str, self.damages), printable(f"{self.path}: {verdict} ({step}; {read})")])


def verify(workdir: str | Path) -> Verification:
    """Read all that is stored in a run, and compare it with what was written; nothing is changed.

    That is: weights and state of the current version, of the one before and of checkpoints, kept values,
    history, settings, plan, report and the metadata of all Zarr arrays. Takes memory for a block of a chunk.
    Raises StoreError if there is no run in ``workdir``.

    >>> print(oocdl.verify("unet.run"))  # doctest: +SKIP
    unet.run: sound (step 120; 186 arrays, 186 chunks, 73.1 MiB read)
    """
    root = Path(workdir).absolute()
    with reporting(root, "read"):
        _check_run(root)
        before = content_of(root / "CURRENT")
        found = _verification(root)
        # A writer that commits meanwhile deletes what it has replaced: then look again.
        return found if found.sound or content_of(root / "CURRENT") == before else verify(root)


def _check_run(root: Path) -> None:
    if not any((root / name).exists() for name in ("run.json", "CURRENT")):
        raise StoreError(f"{root} is not a run: no run.json in it")


def _verification(root: Path) -> Verification:
    damages: list[Damage] = []
    manifest = None
    spares: list[Manifest] = []
    with _noted(damages, "CURRENT"):
        manifest, _ = pointer.load_current(root)
    seals = {} if manifest is None else manifest.seals
    for file in SEALED_FILES:
        with _noted(damages, file):
            known = seals.get("run.json" if file == COPY else file)
            if read_sealed(root / file, known) is None and file in ("run.json", COPY, *seals):
                damages.append(Damage(file, f"{root / file} is lost"))
    for name in () if manifest is None else manifest.spares:
        with _noted(damages, name):
            spares.append(pointer.load_manifest(root, name))
    parts: dict[str, Sealed] = {}
    for version in filter(None, (manifest, *spares)):
        wrong = "is lost or is not what was written"
        damages += [Damage(str(file), f"{root / file} {wrong}") for file in _wrong_metadata(root, version)]
        for part in version.arrays():
            parts.setdefault(part.folder, part)
    if manifest is not None:
        with _noted(damages, "history", step=manifest.step):
            History(root, manifest.history).rows()
        parts |= {value.id: value.sealed(name) for name, value in manifest.kept.items()}
    for part in parts.values():
        damages += damages_in(root, part)
    chunks = [r for part in parts.values() for key, r in part.files.items() if key != "zarr.json"]
    step, nbytes = None if manifest is None else manifest.step, sum(record.nbytes for record in chunks)
    return Verification(root, step, len(parts), len(chunks), nbytes, tuple(dict.fromkeys(damages)))


@contextmanager
def _noted(damages: list[Damage], what: str, step: int | None = None) -> Iterator[None]:
    """Add what an error tells, without the way out, which is the same for all."""
    try:
        yield
    except CorruptError as error:
        damages.append(Damage(what, str(error).partition("; ")[0], step=step))


def damages_in(root: Path, part: Sealed) -> list[Damage]:
    """Return what is wrong with the files of an array or of a kept value."""
    checked = ((key, why_wrong(root / part.folder / key, record)) for key, record in part.files.items())
    return [Damage(part.what, reason, key, part.step) for key, reason in checked if reason]


def _wrong_metadata(root: Path, manifest: Manifest) -> dict[Path, str]:
    """Return what the metadata of Zarr groups and arrays ought to be, by file, where they are not that."""
    wanted = {Path(name) / "zarr.json": group_json() for name in GROUPS}
    for tensor in manifest.tensors.values():
        folder = Path(tensor.folder)
        wanted[folder.parent / "zarr.json"] = group_json({"name": tensor.spec.name})
        wanted[folder / "zarr.json"] = metadata_of(tensor)
    return {file: text for file, text in wanted.items() if content_of(root / file) != text.encode()}


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
        lines = (*self.changes, f"{self.path}: {verdict} (step {self.step})")
        return "\n".join(map(printable, lines))


def repair(workdir: str | Path, take_over: bool = False) -> Repaired:
    """Go back to the newest version of a run whose every chunk is sound, and leave out what is damaged.

    A run keeps its current version, the one before and checkpoints. Damaged checkpoints, rows of the history
    and kept values are left out; metadata of Zarr arrays is written anew, and ``run.json`` and its copy from
    each other. With ``take_over`` an owner on another host is evicted, which cannot be seen from here and has
    to be dead; if it lives, its next commit is refused.

    Raises StoreError if the run is in use, CorruptError if no version is sound, or ``run.json`` and its copy
    are damaged both.

    >>> print(oocdl.repair("unet.run"))  # doctest: +SKIP
    steps 101 to 120 are lost: array 'w' chunk (0,) of step 120: ...
    unet.run: repaired (step 100)
    """
    root = Path(workdir).absolute()
    with reporting(root):
        _check_run(root)
        pointer.refuse_links(root)
        lock = RunLock(root / "LOCK", take_over)
        try:
            return _repaired(root)
        finally:
            lock.release()


def _repaired(root: Path) -> Repaired:
    changes = list(_settings(root))
    epoch = pointer.next_epoch(root)
    try:
        newest, current = pointer.load_current(root)
        if newest is None:
            return Repaired(root, 0, tuple(changes))  # nothing was committed; fit begins
        names = [newest.file, *filter(None, [newest.parent])]
    except CorruptError as error:
        changes.append(f"CURRENT was written anew: {error}")
        newest, current = None, None
        _set_aside(root / "CURRENT")
        names = _all_manifests(root)
    ours = digest_of(read_text(root / "run.json"))
    chosen, reasons = _first_sound(root, names, ours)
    why = "; ".join(reasons)
    if chosen is None:
        raise CorruptError(f"no version of the run in {root} is sound: {why}; restore a backup")
    if reasons:
        last = "an unknown step" if newest is None else newest.step
        changes.append(f"steps {chosen.step + 1} to {last} are lost: {why}")
    mended, lost = _mended(root, chosen)
    mended = replace(mended, parent=chosen.parent if chosen == newest else None)
    mended, left_out = _with_sound_spares(root, mended, ours)
    changes += [*lost, *left_out]
    for version in (mended, *pointer.load_readable(root, mended.spares)):
        for file, text in _wrong_metadata(root, version).items():
            _write_anew(root / file, text)
            changes.append(f"{root / file} was written anew")
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
    if mended != chosen or chosen != newest:
        made = replace(mended, epoch=epoch)
        pointer.publish(root, made, current)
        pointer.remove_unnamed(root, made)
    return Repaired(root, chosen.step, tuple(changes))


def _settings(root: Path) -> Iterator[str]:
    """Write ``run.json`` or its copy anew where one is damaged: they are the same, and never change."""
    try:
        newest, _ = pointer.load_current(root)
        versions = [] if newest is None else [newest]
    except CorruptError:
        versions = pointer.load_readable(root, _all_manifests(root))
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
            manifest = pointer.load_manifest(root, name)
            if manifest.seals.get("run.json", ours) != ours:
                raise CorruptError(f"{root / manifest.file} is another run's")
        except CorruptError as error:
            reasons.append(str(error))
            continue
        wrong = [damage for part in manifest.arrays() for damage in damages_in(root, part)]
        if not wrong:
            return manifest, reasons
        reasons.append(f"{wrong[0]}" + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""))
    return None, reasons


def _mended(root: Path, chosen: Manifest) -> tuple[Manifest, list[str]]:
    """Return a version without damaged rows of the history and kept values, and what that leaves out."""
    lost: list[str] = []
    history = History(root, chosen.history)
    if wrong := history.start():
        lost.append(f"history: {wrong}; what it was is in steps-damaged.jsonl")
    kept = dict(chosen.kept)
    for name, value in chosen.kept.items():
        for damage in damages_in(root, value.sealed(name)):
            lost.append(f"{damage}; this kept value is left out")
            kept.pop(name, None)
    return replace(chosen, history=history.seal, kept=kept), lost


def _with_sound_spares(root: Path, chosen: Manifest, ours: str) -> tuple[Manifest, list[str]]:
    """Return a version without those beside it that are damaged, and what that leaves out."""
    lost: list[str] = []
    kept, meta, parent = dict(chosen.checkpoints), dict(chosen.meta), chosen.parent
    for name in chosen.spares:
        spare, wrong = _first_sound(root, [name], ours)
        if spare is None:
            steps = [step for step, file in kept.items() if file == name]
            what = f"kept version of step {steps[0]}" if steps else f"version before step {chosen.step}"
            lost.append(f"the {what} is left out: {'; '.join(wrong)}")
            kept = {step: file for step, file in kept.items() if file != name}
            parent = None if name == parent else parent
    if kept != chosen.checkpoints:
        there = {*kept, str(chosen.step)}
        meta["checkpoints"] = [step for step in meta.get("checkpoints", ()) if str(step) in there]
        if str(meta.get("restored", chosen.step)) not in there:
            lost.append(f"the run predicts with the weights of step {chosen.step}, its last")
            del meta["restored"]
    return replace(chosen, checkpoints=kept, parent=parent, meta=meta), lost
