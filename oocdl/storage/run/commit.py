"""Writes one version of a run, and reads its chunks, verified.

Nothing is updated in place. Every version has folders of its own with the epoch in the name (the number of
writers that this run has had; workers that are gathered anew count as another), so a late write of one that
was given up harms nobody.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from oocdl.errors import CorruptError, StoreError
from oocdl.graph.ir.array_layout import Array
from oocdl.graph.ir.index import Region, contiguous_blocks, intersect, is_empty, region_shape
from oocdl.storage.checksums import Record, crc32c, read_verified
from oocdl.storage.files import part_of, reporting, sync_path, write_parts
from oocdl.storage.run.manifest import WAY_OUT, Index, Manifest, Tensor, TensorSpec
from oocdl.storage.zarr_json import array_json, chunk_key, chunk_region, group_json, touched


@dataclass(frozen=True)
class Writer:
    """Writes chunks of one version. Picklable: workers write, and return records for ``Commit.record``."""

    root: Path
    tensors: Mapping[str, Tensor]
    sync: bool  # whether its writer fsyncs each chunk: on a network disk only that host can

    def write(self, name: str, region: Region, array: Array) -> dict[str, Record]:
        """Write ``array``, which is ``region`` of the tensor ``name``; returns a record of each file.

        ``region`` starts and ends on chunk borders or at the tensor's end. Takes memory for a block of
        ``BLOCK_BYTES``. Raises StoreError for a region that cuts a chunk, another shape or dtype, or a
        version that is gone; ResourceError if the disk is full.
        """
        tensor = self.tensors[name]
        _check(tensor.spec, region, array)
        records = {}
        for index in touched(region, tensor.spec.chunks):
            path = self.root / tensor.folder / chunk_key(index)
            # A second run of the same task may come late: replace whole files only.
            partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
            records[path.name] = _write(partial, _in_file_order(tensor.spec, index, region, array), self.sync)
            with reporting(path):
                partial.replace(path)
        return records


class Commit:
    """A version that is being written, by one thread: record every chunk, then ``finish``, or ``abort``."""

    def __init__(
        self, root: Path, draft: Manifest, publish: Callable[[Manifest, Sequence[Path]], Manifest]
    ) -> None:
        self._root, self._draft, self._publish = root, draft, publish
        # What this version writes; the rest is carried over from the one before.
        mine = (draft.version, draft.epoch)
        self._fresh = {n: t for n, t in draft.tensors.items() if (t.version, t.epoch) == mine}
        self._records: dict[str, dict[str, Record]] = {name: {} for name in self._fresh}
        self.is_open = True  # whether it is neither finished nor aborted
        for tensor in self._fresh.values():
            _make(root, tensor)

    @property
    def version(self) -> int:
        return self._draft.version

    def writer(self, sync: bool = True) -> Writer:
        """Return a writer for workers; give what its ``write`` returns to ``record``."""
        return Writer(self._root, self._fresh, sync)

    def write(self, name: str, region: Region, array: Array) -> None:
        """Write and record chunks, as ``Writer.write``. Writing the same bytes twice changes nothing."""
        self._check_open()
        if name not in self._fresh:
            raise StoreError(f"array {name!r} is not written by version {self.version}")
        # Synced all together by ``finish``.
        self.record(name, self.writer(sync=False).write(name, region, array))

    def record(self, name: str, records: Mapping[str, Record]) -> None:
        """Take the records of chunks that a ``Writer`` wrote; StoreError if one was other bytes before."""
        self._check_open()
        for file, record in records.items():
            if self._records[name].setdefault(file, record) != record:
                raise StoreError(
                    f"array {name!r} chunk {file} of version {self.version} was computed "
                    "twice with different results; the engine is not deterministic"
                )

    def finish(self, meta: Mapping[str, Any]) -> Manifest:
        """Make the version durable and current, with plain data ``meta``: no crash can lose it any more.

        Raises StoreError if chunks are missing; the version before stays current.
        """
        self._check_open()
        tensors = dict(self._draft.tensors)
        for name, records in self._records.items():
            wanted = prod(self._fresh[name].spec.grid)
            if len(records) != wanted:
                told = f"array {name!r} has {len(records)} of {wanted} chunks"
                raise StoreError(f"version {self.version} is incomplete: {told}")
            tensors[name] = replace(tensors[name], records=dict(sorted(records.items())))
        self.is_open = False
        manifest = replace(self._draft, meta=dict(meta), tensors=tensors)
        # If this fails, nothing is deleted: CURRENT may name it already. The next writer clears up.
        with reporting(self._root):
            return self._publish(manifest, self._folders())

    def abort(self) -> None:
        """Delete the chunks that were written. Does nothing after ``finish``."""
        if self.is_open:
            self.is_open = False
            for folder in self._folders():
                shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        return [self._root / tensor.folder for tensor in self._fresh.values()]

    def _check_open(self) -> None:
        if not self.is_open:
            raise StoreError(f"version {self.version} is finished; begin the next one")


def _make(root: Path, tensor: Tensor) -> None:
    folder = root / tensor.folder
    with reporting(folder, need=tensor.spec.chunk_bytes):
        folder.parent.mkdir(exist_ok=True)
        group = folder.parent / "zarr.json"
        if not group.exists():
            group.write_text(group_json({"name": tensor.spec.name}))
            sync_path(group)
        folder.mkdir()
        (folder / "zarr.json").write_text(metadata_of(tensor))


def _check(spec: TensorSpec, region: Region, array: Array) -> None:
    if array.shape != region_shape(region) or array.dtype != np.dtype(spec.dtype):
        raise StoreError(f"array {spec.name!r}: {array.dtype} {array.shape} is not for {region}")
    for (start, stop), size, extent in zip(region, spec.chunks, spec.shape, strict=True):
        whole = start % size == 0 and (stop % size == 0 or stop == extent)
        if not (0 <= start <= stop <= extent and whole):
            raise StoreError(f"array {spec.name!r}: {region} is not made of whole {spec.chunks}")


def _write(path: Path, parts: Iterable[Array], sync: bool) -> Record:
    nbytes = crc = 0

    def noted() -> Iterator[Array]:
        nonlocal nbytes, crc
        for part in parts:
            nbytes, crc = nbytes + part.nbytes, crc32c(part, crc)
            yield part

    write_parts(path, noted(), sync)
    return Record(nbytes, crc)


def _in_file_order(spec: TensorSpec, index: Index, region: Region, array: Array) -> Iterator[Array]:
    """Yield a chunk as it is, or in small copies where it is no run of memory or ends beyond the tensor."""
    covered = chunk_region(index, spec.shape, spec.chunks)
    piece = part_of(array, covered, region)
    if piece.shape == spec.chunks and piece.flags.c_contiguous:
        yield piece
        return
    stored = tuple((start, start + size) for (start, _), size in zip(covered, spec.chunks, strict=True))
    for block in contiguous_blocks(stored, array.itemsize):
        part = np.zeros(region_shape(block), array.dtype)
        inside = intersect(block, covered)
        if not is_empty(inside):
            part_of(part, inside, block)[...] = part_of(piece, inside, covered)
        yield part


def metadata_of(tensor: Tensor) -> str:
    """Return the text of the ``zarr.json`` of an array: it follows from the manifest alone."""
    spec = tensor.spec
    names = {"name": spec.name, "version": tensor.version}
    return array_json(spec.shape, spec.chunks, np.dtype(spec.dtype), names)


def read_chunk(root: Path, tensor: Tensor, index: Index, part: Region, target: Array) -> None:
    """Read ``part`` of the tensor, in this chunk, into ``target``; CorruptError if any of it is wrong."""
    spec = tensor.spec
    stored = tuple((at * size, (at + 1) * size) for at, size in zip(index, spec.chunks, strict=True))
    where = f"array {spec.name!r} chunk {index} of version {tensor.version} in {root}"
    blocks = list(contiguous_blocks(stored, np.dtype(spec.dtype).itemsize))
    buffers = (np.empty(region_shape(block), spec.dtype) for block in blocks)
    path = root / tensor.folder / chunk_key(index)
    verified = read_verified(where, path, tensor.records[path.name], buffers)
    try:
        for block, read in zip(blocks, verified, strict=True):  # to its end, where the sum is compared
            wanted = intersect(block, part)
            if not is_empty(wanted):
                part_of(target, wanted, part)[...] = part_of(read, wanted, block)
    except CorruptError as error:
        raise CorruptError(f"{error}; {WAY_OUT}") from error
