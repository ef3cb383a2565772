"""Reads every byte of a run, and names what is not what was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from oocdl.errors import CorruptError, StoreError, printable
from oocdl.storage.checksums import why_wrong
from oocdl.storage.files import read_bytes, reporting
from oocdl.storage.run.commit import metadata_of
from oocdl.storage.run.history import History
from oocdl.storage.run.manifest import GROUPS, Manifest, Sealed
from oocdl.storage.run.pointer import load_current, load_manifest
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
        if not any((root / name).exists() for name in ("run.json", "CURRENT")):
            raise StoreError(f"{root} is not a run: no run.json in it")
        before = _pointer(root)
        found = _verification(root)
        # A writer that commits meanwhile deletes what it has replaced: then look again.
        return found if found.sound or _pointer(root) == before else verify(root)


def _pointer(root: Path) -> bytes:
    path = root / "CURRENT"
    try:
        return read_bytes(path)
    except OSError:
        return b""  # lost or damaged, which load_current tells


def _verification(root: Path) -> Verification:
    damages: list[Damage] = []
    manifest = None
    spares: list[Manifest] = []
    with _noted(damages, "CURRENT"):
        manifest, _ = load_current(root)
    damages += _files(root, manifest)
    for name in () if manifest is None else manifest.spares:
        with _noted(damages, name):
            spares.append(load_manifest(root, name))
    parts: dict[str, Sealed] = {}
    for version in filter(None, (manifest, *spares)):
        damages += _metadata(root, version)
        for part in version.arrays():
            parts.setdefault(part.folder, part)
    if manifest is not None:
        with _noted(damages, "history", step=manifest.step):
            History(root / "history" / "steps.jsonl", manifest.history).rows()
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


def _files(root: Path, manifest: Manifest | None) -> list[Damage]:
    """Return what is wrong with files that hold their own digest."""
    seals, damages = {} if manifest is None else manifest.seals, list[Damage]()
    for file in SEALED_FILES:
        with _noted(damages, file):
            known = seals.get("run.json" if file == COPY else file)
            if read_sealed(root / file, known) is None and file in ("run.json", COPY, *seals):
                damages.append(Damage(file, f"{root / file} is lost"))
    return damages


def metadata_files(manifest: Manifest) -> dict[Path, str]:
    """Return the metadata of the Zarr groups and arrays of a run, by file in the run: they follow from it."""
    wanted = {Path(name) / "zarr.json": group_json() for name in GROUPS}
    for tensor in manifest.tensors.values():
        folder = Path(tensor.folder)
        wanted[folder.parent / "zarr.json"] = group_json({"name": tensor.spec.name})
        wanted[folder / "zarr.json"] = metadata_of(tensor)
    return wanted


def _metadata(root: Path, manifest: Manifest) -> Iterator[Damage]:
    for file, text in metadata_files(manifest).items():
        if not holds(root / file, text):
            yield Damage(str(file), f"{root / file} is lost or is not what was written")


def holds(path: Path, text: str) -> bool:
    """Whether a regular file is there that can be read, and has this text."""
    try:
        return read_bytes(path) == text.encode()
    except OSError:
        return False
