"""The run on disk: a Zarr v3 group with versions of weights and state, kept values and a history.

    run/  zarr.json  run.json  LOCK  CURRENT  epoch-3  manifest-120-e3.json
          weights/t00012/e3-v120/{zarr.json, c.0.0, ...}    state/...    kept/...
          history/steps.jsonl

CURRENT names the committed manifest; what neither it nor its parent names is deleted.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from oocdl.errors import CorruptError, StoreError
from oocdl.graph.ir.index import Region, contiguous_blocks, intersect, is_empty, region_shape
from oocdl.storage.checksums import crc32c
from oocdl.storage.files import as_bytes, io_error, part_of, sync_path, write_text
from oocdl.storage.run import manifest as manifests
from oocdl.storage.run.commit import Commit
from oocdl.storage.run.garbage import clear, next_epoch, remove_unnamed
from oocdl.storage.run.history import History
from oocdl.storage.run.kept_values import Kept
from oocdl.storage.run.lock import RunLock
from oocdl.storage.run.manifest import Index, Kind, Manifest, Tensor, TensorSpec
from oocdl.storage.zarr_json import chunk_key, chunk_region, group_json, touched

Array = npt.NDArray[Any]

_GROUPS = ("", "weights", "state", "kept")


class RunStore:
    """A run directory, open for reading or (one process at a time) for writing.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RunStore.create(folder.name, {"model": "m.onnx"}) as store:
    ...     commit = store.begin(0, [TensorSpec("w", "weights", (3,), "float32", (2,))])
    ...     commit.write("w", ((0, 3),), np.ones(3, np.float32))
    ...     done = commit.finish({"step": 0})
    ...     store.read("w", ((1, 3),)).tolist()
    [1.0, 1.0]
    >>> folder.cleanup()
    """

    def __init__(self, path: Path, lock: RunLock | None) -> None:
        """Use ``create`` or ``open``."""
        self.path = path
        self._lock = lock
        self._writing: Commit | None = None
        self.meta: Mapping[str, Any] = _read_meta(path)
        """The settings stored at creation; they never change."""
        self._manifest = manifests.load_current(path)
        self._kept = Kept(path / "kept")
        self._history = History(path / "history" / "steps.jsonl")
        self.epoch = self._manifest.epoch if self._manifest else 0
        """The number of writers that the run has had."""
        if lock is not None:
            self.epoch = next_epoch(path, self.epoch)
            done = self._manifest.meta.get("step", -1) if self._manifest else -1
            self._history.cut(done)
            self._kept.cut(done)
            remove_unnamed(path, self._manifest)

    @classmethod
    def create(cls, path: str | Path, meta: Mapping[str, Any], restart: bool = False) -> RunStore:
        """Make a run in the folder ``path`` and open it for writing; ``meta`` is plain data.

        With ``restart`` a run that is there is locked and cleared first; files in its folder that are not the
        run's stay. Raises StoreError if the folder holds anything else or the run is in use,
        ResourceError if the disk is full.
        """
        root = Path(path).absolute()
        text = json.dumps(dict(meta))
        try:
            root.mkdir(parents=True, exist_ok=True)
            restart = restart and (root / "run.json").is_file()
            if not restart:
                _check_free(root)
            lock = RunLock(root / "LOCK")
            try:
                if restart:
                    clear(root)
                elif (root / "run.json").exists():
                    raise StoreError(f"a run was made in {root} just now; open it, or choose another folder")
                (root / "history").mkdir(exist_ok=True)
                for name in _GROUPS:
                    (root / name).mkdir(exist_ok=True)
                    write_text(root / name / "zarr.json", group_json())
                write_text(root / "run.json", text)
                sync_path(root)
                sync_path(root.parent)
                return cls(root, lock)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise io_error(error, root, 0) from error

    @classmethod
    def open(cls, path: str | Path, writable: bool = False) -> RunStore:
        """Open a run; for writing, lock it and remove whatever was not committed.

        Raises StoreError if there is no run or another process writes it, CorruptError if it is damaged.
        """
        root = Path(path).absolute()
        if not (root / "run.json").is_file():
            raise StoreError(f"{root} is not a run: no run.json in it")
        if not writable:
            return cls(root, None)
        lock = RunLock(root / "LOCK")
        try:
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
        if self._lock is None:
            self._manifest = manifests.load_current(self.path)
        return self._manifest

    def begin(self, version: int, tensors: Sequence[TensorSpec], carry: Collection[str] = ()) -> Commit:
        """Begin ``version``: ``tensors`` are written anew, those that ``carry`` names stay as they are.

        Raises StoreError if the run is open for reading only, if another commit is open, or if ``version``
        is not after the current one.
        """
        self._check_writable()
        old = self._manifest
        if self._writing is not None:
            raise StoreError(f"version {self._writing.version} is still being written")
        if old is not None and version <= old.version:
            raise StoreError(f"version {version} is not after the current {old.version}")
        found = {} if old is None else dict(old.tensors)
        lost = [name for name in carry if name not in found]
        if lost:
            raise StoreError(f"cannot carry over {lost[0]!r}: no version has it")
        made: dict[str, Tensor] = {name: found[name] for name in carry}
        next_id = 0 if old is None else old.next_id
        for spec in tensors:
            if spec.name in made:
                raise StoreError(f"array {spec.name!r} is named twice in version {version}")
            same = spec.name in found and found[spec.name].spec.kind == spec.kind
            ident = found[spec.name].id if same else f"t{next_id:05d}"
            next_id += not same
            made[spec.name] = Tensor(spec, ident, self.epoch, version, {})
        parent = None if old is None else old.file
        draft = Manifest(version, self.epoch, parent, {}, made, next_id)
        self._writing = Commit(self.path, draft, self._history.path, self._finished)
        return self._writing

    def read(self, name: str, region: Region, out: Array | None = None) -> Array:
        """Read ``region`` of an array of the current version into ``out``, or into a new array.

        Every chunk that it touches is verified, all of it, whatever part is wanted. Takes memory for a block
        of ``BLOCK_BYTES`` besides ``out``. Raises CorruptError, which names array, chunk and version;
        StoreError if there is no such array; ValueError if ``out`` has another shape or dtype.
        """
        tensor = self._tensor(name)
        spec = tensor.spec
        if out is None:
            out = np.empty(region_shape(region), spec.dtype)
        if out.shape != region_shape(region) or out.dtype != np.dtype(spec.dtype):
            raise ValueError(f"out is {out.dtype} {out.shape}, array {name!r} is {spec.dtype}")
        for index in touched(region, spec.chunks):
            part = intersect(chunk_region(index, spec.shape, spec.chunks), region)
            self._read_chunk(tensor, index, part, part_of(out, part, region))
        return out

    def array(self, kind: Kind, name: str) -> zarr.Array[Any]:
        """Open a weight or state array of the current version as a read-only Zarr array, unverified."""
        tensor = self._tensor(name)
        if tensor.spec.kind != kind:
            raise StoreError(f"array {name!r} is one of {tensor.spec.kind}, not {kind}")
        return zarr.open_array(self.path / tensor.folder, mode="r")

    # --- history and kept values ---------------------------------------------------------

    def append_history(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of plain data, each with a ``step``; they are durable with the next commit."""
        self._check_writable()
        self._history.append(rows)

    def history(self) -> list[dict[str, Any]]:
        """Return all rows. Only the writer sees those that are not committed yet: they may still be lost."""
        rows = self._history.rows()
        if self._lock is not None:
            return rows
        manifest = self.current()
        done = -1 if manifest is None else manifest.meta.get("step", -1)
        return [row for row in rows if row["step"] <= done]

    def keep(
        self, name: str, shape: tuple[int, ...], dtype: str, chunks: tuple[int, ...], step: int
    ) -> zarr.Array[Any]:
        """Make a writable array for a value to keep, in place of an earlier one of the same name."""
        self._check_writable()
        return self._kept.make(name, shape, dtype, chunks, step)

    def kept(self) -> Mapping[str, zarr.Array[Any]]:
        """Open the kept arrays, by name, read-only."""
        return self._kept.arrays()

    # --- inside --------------------------------------------------------------------------

    def _check_writable(self) -> None:
        if self._lock is None:
            raise StoreError(f"run {self.path} is open for reading only")

    def _tensor(self, name: str) -> Tensor:
        if self._manifest is None:
            raise StoreError(f"run {self.path} has no committed version yet")
        if name not in self._manifest.tensors:
            raise StoreError(f"run {self.path} has no array {name!r}")
        return self._manifest.tensors[name]

    def _read_chunk(self, tensor: Tensor, index: Index, part: Region, target: Array) -> None:
        """Read ``part`` of the tensor, which is in this chunk, into ``target``; verify the whole chunk."""
        record, spec, crc = tensor.records[index], tensor.spec, 0
        origin = [number * size for number, size in zip(index, spec.chunks, strict=True)]
        stored = tuple((start, start + size) for start, size in zip(origin, spec.chunks, strict=True))
        in_place = target.shape == spec.chunks and target.flags.c_contiguous
        blocks = [stored] if in_place else contiguous_blocks(stored, target.itemsize)
        where = f"array {tensor.spec.name!r} chunk {index} of version {tensor.version} in {self.path}"
        try:
            with (self.path / tensor.folder / chunk_key(index)).open("rb", buffering=0) as file:
                length = os.fstat(file.fileno()).st_size
                if length != record.nbytes:
                    raise CorruptError(f"{where} has {length} bytes, not {record.nbytes}")
                for block in blocks:
                    read = target if in_place else np.empty(region_shape(block), spec.dtype)
                    _read_exactly(file, read)
                    crc = crc32c(read, crc)
                    wanted = intersect(block, part)
                    if not in_place and not is_empty(wanted):
                        part_of(target, wanted, part)[...] = part_of(read, wanted, block)
        except OSError as error:
            raise CorruptError(f"{where} is lost: {error.strerror or error}") from error
        if crc != record.crc:
            raise CorruptError(f"{where} is not what was written; restore it from a backup")

    def _finished(self, made: Manifest | None) -> None:
        self._writing = None
        if made is not None:
            self._manifest = made
            remove_unnamed(self.path, made)


def _read_exactly(file: io.FileIO, array: Array) -> None:
    """Fill an array; what a file that was cut off lacks stays as it is, and is found by its checksum."""
    view, done = as_bytes(array).data, 0
    while done < array.nbytes and (count := file.readinto(view[done:])):
        done += count


def _check_free(root: Path) -> None:
    """Raise StoreError unless the folder is empty, or holds what a creation that was cut off has left."""
    left = {entry.name for entry in root.iterdir()} - {"LOCK"}
    if "run.json" in left:
        raise StoreError(f"a run is in {root} already; open it, or choose another folder")
    # run.json is written last.
    if left - {"history", "zarr.json", *_GROUPS} - {p.name for p in root.glob("*.partial")}:
        raise StoreError(f"{root} is not empty and not a run; choose another folder")


def _read_meta(path: Path) -> Mapping[str, Any]:
    try:
        meta = json.loads((path / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise CorruptError(f"{path / 'run.json'} is damaged ({error}); restore it") from error
    if not isinstance(meta, dict):
        raise CorruptError(f"{path / 'run.json'} is damaged (not an object); restore it")
    return meta
