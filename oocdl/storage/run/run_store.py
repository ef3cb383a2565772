"""The run on disk: a Zarr v3 group with versions of weights and state, kept values and a history.

    run/  zarr.json  run.json  run-copy.json  LOCK  CURRENT  epoch-3  manifest-120-e3.json
          weights/t00012/e3-v120/{zarr.json, c.0.0, ...}    state/...    kept/...
          history/steps.jsonl

CURRENT names the committed manifest; what neither it nor its parent names is deleted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from oocdl.errors import CorruptError, InputError, StoreError
from oocdl.graph.ir.array_layout import Array
from oocdl.graph.ir.index import Region, intersect, region_shape
from oocdl.storage.checksums import digest_of, record_of, sealed
from oocdl.storage.files import part_of, reporting, sync_all, sync_path, write_text
from oocdl.storage.run import pointer
from oocdl.storage.run.commit import Commit, metadata_of, read_chunk
from oocdl.storage.run.history import History
from oocdl.storage.run.kept_values import Kept
from oocdl.storage.run.lock import RunLock
from oocdl.storage.run.manifest import GROUPS, HistorySeal, Manifest, Tensor, TensorSpec, kept_versions
from oocdl.storage.run.sealed_files import COPY, SEALED_FILES, read_sealed
from oocdl.storage.sealed_store import SealedStore
from oocdl.storage.zarr_json import chunk_region, group_json, touched


class RunStore:
    """A run directory, open for reading or (one process at a time) for writing."""

    def __init__(self, path: Path, lock: RunLock | None) -> None:
        self.path, self._lock = path, lock
        self._writing: Commit | None = None
        self._seals: dict[str, str] = {}
        self._pinned = False  # whether it stays at the version that it was opened at
        self.instead: Mapping[str, str] = {}  # array -> the one that is read in its place
        self.epoch = 0 if lock is None else pointer.next_epoch(path)  # writers so far; 0 for a reader
        self._manifest, self._pointer = pointer.load_current(path)
        meta = self.read_sealed("run.json")
        if meta is None:
            raise StoreError(f"{path} is not a run: no run.json in it")
        self.meta: Mapping[str, Any] = meta  # the settings stored at creation; they never change
        self._kept = Kept(path / "kept")
        self._history = self._history_of(self._manifest)
        if lock is not None:
            self._start()

    def _start(self) -> None:
        """Remove what was not committed, and leave out what is damaged of the history."""
        manifest = self._manifest
        lost = self._history.start()
        if lost:
            warnings.warn(
                f"the history of the run in {self.path} is damaged: {lost}; it is kept as "
                "steps-damaged.jsonl, and the run goes on without these rows",
                stacklevel=2,
            )
        if manifest is not None and manifest.history != self._history.seal:
            # The same version, with the history that is left.
            manifest = replace(manifest, epoch=self.epoch, history=self._history.seal)
            self._pointer = pointer.publish(self.path, manifest, self._pointer)
            self._manifest = manifest
        pointer.remove_unnamed(self.path, manifest)

    @classmethod
    def create(cls, path: str | Path, meta: Mapping[str, Any], restart: bool = False) -> RunStore:
        """Make a run in the folder ``path`` and open it for writing; ``meta`` is plain data.

        With ``restart`` a run that is there is locked and cleared first; other files stay. Raises StoreError
        if the folder holds anything else or the run is in use, ResourceError if the disk is full.
        """
        root = Path(path).absolute()
        text = sealed("run", dict(meta))

        def prepare() -> None:
            if is_again:
                pointer.clear(root)
            elif (root / "run.json").exists():
                raise StoreError(f"a run was made in {root} just now; open it, or choose another folder")
            (root / "history").mkdir(exist_ok=True)
            for name in GROUPS:
                (root / name).mkdir(exist_ok=True)
                write_text(root / name / "zarr.json", group_json())
            write_text(root / COPY, text)
            write_text(root / "run.json", text)
            sync_path(root)
            sync_path(root.parent)

        with reporting(root):
            root.mkdir(parents=True, exist_ok=True)
            is_again = restart and (root / "run.json").is_file()
            if not is_again:
                pointer.check_free(root)
            return cls._locked(root, prepare)

    @classmethod
    def open(cls, path: str | Path, writable: bool = False) -> RunStore:
        """Open a run; for writing, lock it and remove whatever was not committed.

        A damaged history does not keep a writer from going on: what is damaged is left out, with a warning.
        Raises StoreError if there is no run or another process writes it, CorruptError if it is damaged.
        """
        root = Path(path).absolute()
        with reporting(root, "read"):
            if not (root / "run.json").is_file():
                raise StoreError(f"{root} is not a run: no run.json in it")
            if not writable:
                return cls(root, None)
            return cls._locked(root)

    @classmethod
    def _locked(cls, root: Path, prepare: Callable[[], None] = lambda: None) -> RunStore:
        """Lock a run, prepare it and open it for writing."""
        pointer.refuse_links(root)
        lock = RunLock(root / "LOCK")
        try:
            with reporting(root):
                prepare()
                return cls(root, lock)
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Abort a commit that was begun, and release the lock. May be called twice."""
        if self._writing is not None:
            self._writing.abort()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- versions ------------------------------------------------------------------------

    def current(self) -> Manifest | None:
        """Return the committed version, None before the first; readers see later commits of the writer."""
        if self._lock is None and not self._pinned:
            self._manifest, self._pointer = pointer.load_current(self.path, (self._manifest, self._pointer))
        return self._manifest

    def at(self, step: int) -> RunStore:
        """Open the version of a step, for reading. Raises InputError if it is not kept, or CorruptError."""
        now = self.current()
        kept = {} if now is None else {**now.checkpoints, str(now.step): now.file}
        if str(step) not in kept:
            raise InputError(f"the run in {self.path} keeps no step {step}, but {', '.join(kept) or 'none'}")
        found = RunStore(self.path, None)
        found._manifest, found._pinned = pointer.load_manifest(self.path, kept[str(step)]), True
        return found

    def committed_at(self) -> float | None:
        """Return when CURRENT was replaced, in seconds since 1970; None before the first commit."""
        path = self.path / "CURRENT"
        return path.stat().st_mtime if path.is_file() else None

    def version_of(self, meta: Mapping[str, object]) -> int:
        """Return the number of the next version: its step, or more where this step was committed before."""
        step = meta["step"]
        assert isinstance(step, int)
        return step if self._manifest is None else max(step, self._manifest.version + 1)

    def commit_history(self, meta: Mapping[str, object]) -> None:
        """Commit rows that were appended, and ``meta``, with the arrays as they are."""
        assert self._manifest is not None
        self.begin(self.version_of(meta), (), carry=self._manifest.tensors).finish(meta)

    def reading(self, instead: Mapping[str, str]) -> RunStore:
        """Open the current version for reading, with some arrays in the place of others."""
        found = RunStore(self.path, None)
        found.instead = instead
        return found

    def begin(self, version: int, tensors: Sequence[TensorSpec], carry: Collection[str] = ()) -> Commit:
        """Begin ``version``: ``tensors`` are written anew, those that ``carry`` names stay as they are.

        Raises StoreError for a reader, where another commit is open, or if ``version`` is not a new one.
        """
        self._check_writable()
        old = self._manifest
        if self._writing is not None and self._writing.is_open:
            raise StoreError(f"version {self._writing.version} is still being written")
        if old is not None and version <= old.version:
            raise StoreError(f"version {version} is not after the current {old.version}")
        known, next_id = ({}, 0) if old is None else (old.tensors, old.next_id)
        if lost := [name for name in carry if name not in known]:
            raise StoreError(f"cannot carry over {lost[0]!r}: no version has it")
        made = {name: known[name] for name in carry}
        for spec in tensors:
            if spec.name in made:
                raise StoreError(f"array {spec.name!r} is named twice in version {version}")
            same = spec.name in known and known[spec.name].spec.kind == spec.kind
            ident = known[spec.name].id if same else f"t{next_id:05d}"
            next_id += not same
            made[spec.name] = Tensor(spec, ident, self.epoch, version, {})
        draft = Manifest(version, self.epoch, None if old is None else old.file, {}, made, next_id)
        self._writing = Commit(self.path, draft, self._publish)
        return self._writing

    def read(self, name: str, region: Region, out: Array | None = None) -> Array:
        """Read ``region`` of an array of the current version into ``out``, or into a new array.

        Every chunk that it touches is verified, all of it. Takes memory for a block besides ``out``. Raises
        CorruptError, which names array, chunk and version; StoreError if there is no such array, or a writer
        has replaced the version meanwhile; ValueError if ``out`` has another shape or dtype.
        """
        tensor = self._tensor(name)
        spec = tensor.spec
        if out is None:
            out = np.empty(region_shape(region), spec.dtype)
        if out.shape != region_shape(region) or out.dtype != np.dtype(spec.dtype):
            raise ValueError(f"out is {out.dtype} {out.shape}, array {name!r} is {spec.dtype}")
        try:
            for index in touched(region, spec.chunks):
                part = intersect(chunk_region(index, spec.shape, spec.chunks), region)
                read_chunk(self.path, tensor, index, part, part_of(out, part, region))
        except CorruptError as error:
            if self._lock is None and pointer.pointer_text(self.path) != self._pointer:
                raise StoreError(f"the run in {self.path} was trained on meanwhile; call again") from error
            raise
        return out

    def array(self, name: str) -> zarr.Array[Any]:
        """Open an array of the current version as a read-only Zarr array; what is read of it is verified."""
        tensor = self._tensor(name)
        what = f"array {name!r} of version {tensor.version}"
        records = {"zarr.json": record_of(metadata_of(tensor).encode()), **tensor.records}
        outdated = partial(_has_moved_on, self.path, self._pointer)
        store = SealedStore(self.path / tensor.folder, what, records, outdated=outdated)
        return zarr.open_array(store=store, mode="r")

    # --- history, kept values, other files -----------------------------------------------

    def append_history(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of plain data, each with a ``step``; they are durable with the next commit.

        Rows of steps that are there already are left out, so that a commit that failed can be tried again.
        """
        self._check_writable()
        pointer.check_owner(self.path, self.epoch)
        self._history.append(rows)

    def forget_uncommitted(self) -> None:
        """Leave out the rows of steps that are not committed: these steps are done again, by other workers.

        What those before still write of a version that was begun, however late, is refused. Raises StoreError
        if another process has taken over the run.
        """
        self._check_writable()
        pointer.check_owner(self.path, self.epoch)
        self.epoch = pointer.next_epoch(self.path)
        self._history = self._history_of(self._manifest)
        self._history.start()

    def history(self) -> Iterator[dict[str, Any]]:
        """Yield all rows; only the writer sees those that are not committed. Raises CorruptError at once."""
        history = self._history if self._lock is not None else self._history_of(self.current())
        return history.rows()

    def keep(
        self, name: str, shape: tuple[int, ...], dtype: str, chunks: tuple[int, ...], step: int
    ) -> zarr.Array[Any]:
        """Make a writable array for a value to keep; it is the run's from the next commit on."""
        self._check_writable()
        kept = {} if self._manifest is None else self._manifest.kept
        return self._kept.make(name, shape, dtype, chunks, step, kept)

    def kept(self) -> Mapping[str, zarr.Array[Any]]:
        """Open the kept arrays of the current version, by name, read-only; what is read is verified."""
        manifest = self.current()
        return {} if manifest is None else self._kept.arrays(manifest.kept)

    def read_sealed(self, file: str) -> dict[str, Any] | None:
        """Read a file that holds its own digest; None if there is none, CorruptError if it is another."""
        known = None if self._manifest is None else self._manifest.seals.get(file)
        body, digest = read_sealed(self.path / file, known) or (None, "")
        if body is not None:
            self._seals[file] = digest
        return body

    def write_sealed(self, file: str, body: Mapping[str, Any]) -> None:
        """Write a file of the run durably; the next commit is bound to it."""
        self._check_writable()
        known = {} if self._manifest is None else self._manifest.seals
        text = sealed(SEALED_FILES[file], {**body, "replaces": known.get(file)})
        write_text(self.path / file, text)
        sync_path(self.path)
        self._seals[file] = digest_of(text)

    # --- inside --------------------------------------------------------------------------

    def _check_writable(self) -> None:
        if self._lock is None:
            raise StoreError(f"run {self.path} is open for reading only")

    def _tensor(self, name: str) -> Tensor:
        if self._manifest is None:
            raise StoreError(f"run {self.path} has no committed version yet")
        name = self.instead.get(name, name)
        if name not in self._manifest.tensors:
            raise StoreError(f"run {self.path} has no array {name!r}")
        return self._manifest.tensors[name]

    def _history_of(self, manifest: Manifest | None) -> History:
        return History(self.path, HistorySeal() if manifest is None else manifest.history)

    def _publish(self, manifest: Manifest, folders: Sequence[Path]) -> Manifest:
        """Make a version current whose chunks are in ``folders``, with history and kept values."""
        # Another that has taken over deletes what is about to be synced.
        pointer.check_owner(self.path, self.epoch)
        history = (self._history.path, self._history.path.parent)
        paths = [path for path in history if path.exists()] + self._kept.files()
        paths += {place for folder in folders for place in (folder, folder.parent, folder.parent.parent)}
        sync_all(paths + [path for folder in folders for path in folder.iterdir()])
        made = replace(
            manifest,
            checkpoints=kept_versions(self._manifest, manifest),
            seals=dict(self._seals),
            history=self._history.seal,
            kept=self._kept.seals(manifest.step),
        )
        self._pointer = pointer.publish(self.path, made, self._pointer)
        self._manifest = made
        self._kept.committed()
        pointer.remove_unnamed(self.path, made)
        return made


def _has_moved_on(path: Path, before: str | None) -> bool:
    return pointer.pointer_text(path) != before
