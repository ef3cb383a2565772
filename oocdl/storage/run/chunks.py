"""Reads what is stored of one version of an array, verified by its records in the manifest."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.errors import CorruptError
from oocdl.graph.ir.index import Region, contiguous_blocks, intersect, is_empty, region_shape
from oocdl.storage.checksums import Record, crc32c, record_of
from oocdl.storage.files import as_bytes, part_of, regular
from oocdl.storage.run.manifest import Index, Tensor
from oocdl.storage.zarr_json import array_json, chunk_key

Array = npt.NDArray[Any]


def metadata_of(tensor: Tensor) -> str:
    """Return the text of the ``zarr.json`` of an array: it follows from the manifest alone."""
    spec = tensor.spec
    names = {"name": spec.name, "version": tensor.version}
    return array_json(spec.shape, spec.chunks, np.dtype(spec.dtype), names)


def files_of(tensor: Tensor) -> dict[str, Record]:
    """Return the record of each file of an array, by file name, its metadata included."""
    chunks = {chunk_key(index): record for index, record in tensor.records.items()}
    return {"zarr.json": record_of(metadata_of(tensor).encode()), **chunks}


def read_chunk(
    root: Path, tensor: Tensor, index: Index, part: Region | None = None, target: Array | None = None
) -> None:
    """Read ``part`` of the tensor, which is in this chunk, into ``target``; verify the whole chunk.

    Without ``target`` it is only verified. Takes memory for a block of ``BLOCK_BYTES``. Raises CorruptError,
    which names array, chunk and version.
    """
    record, spec, crc = tensor.records[index], tensor.spec, 0
    origin = [number * size for number, size in zip(index, spec.chunks, strict=True)]
    stored = tuple((start, start + size) for start, size in zip(origin, spec.chunks, strict=True))
    in_place = target is not None and target.shape == spec.chunks and target.flags.c_contiguous
    whole = target if in_place else None
    blocks = [stored] if whole is not None else contiguous_blocks(stored, np.dtype(spec.dtype).itemsize)
    where = f"array {spec.name!r} chunk {index} of version {tensor.version} in {root}"
    way_out = "'oocdl repair' goes back to the newest sound version"
    try:
        with open(root / tensor.folder / chunk_key(index), "rb", buffering=0, opener=regular) as file:
            length = os.fstat(file.fileno()).st_size
            if length != record.nbytes:
                raise CorruptError(f"{where} has {length} bytes, not {record.nbytes}; {way_out}")
            for block in blocks:
                read = (
                    target if target is not None and in_place else np.empty(region_shape(block), spec.dtype)
                )
                _read_exactly(file, read)
                crc = crc32c(read, crc)
                if target is not None and part is not None and whole is None:
                    wanted = intersect(block, part)
                    if not is_empty(wanted):
                        part_of(target, wanted, part)[...] = part_of(read, wanted, block)
    except OSError as error:
        raise CorruptError(f"{where} is lost: {error.strerror or error}; {way_out}") from error
    if crc != record.crc:
        raise CorruptError(f"{where} is not what was written; {way_out}")


def _read_exactly(file: io.FileIO, array: Array) -> None:
    """Fill an array; what a file that was cut off lacks stays as it is, and is found by its checksum."""
    view, done = as_bytes(array).data, 0
    while done < array.nbytes and (count := file.readinto(view[done:])):
        done += count
