"""Arrays that have the sample axis first already, in .npy, .npz, HDF5 or Zarr: copied block by block."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from oocdl.data.new_group import CHUNK_BYTES, new_array, stacked_chunks, write_region
from oocdl.errors import BudgetError, DatasetError
from oocdl.graph.ir.index import Region
from oocdl.host.limits import anonymous_bytes
from oocdl.report.progress import BytesBar
from oocdl.storage.dataset.dataset import HDF5_ENDINGS, Dataset, attributes_of, open_dataset
from oocdl.storage.dataset.sample_stack import MARK

CHUNK_COPIES = 3
"""Copies of a chunk on its way: stored, decoded and converted."""
BLOCK_CHUNKS = 4
"""Chunks that are copied together: encoders take them side by side."""


def is_stacked(source: Path) -> bool:
    """Whether a path is of a format whose arrays have the sample axis first."""
    is_group = any((source / name).is_file() for name in ("zarr.json", ".zgroup"))
    return is_group or source.suffix.lower() in (".npy", ".npz", ".zip", *HDF5_ENDINGS)


def copy(
    source: Path, group: zarr.Group, beside: Path, budget_bytes: int, bar: BytesBar
) -> Mapping[str, Any]:
    """Copy all arrays of a source to a group; returns the attributes of a group or file.

    Members of an .npz file are unpacked below ``beside``. Raises DatasetError for arrays that are no
    numbers, of no samples, or with a number that is not finite, and for a group with a group a sample;
    BudgetError if a chunk of the source does not fit.
    """
    opened = _opened(source, beside)
    told = attributes_of(opened.spec())
    mark = told.get(MARK)
    if isinstance(mark, Mapping) and "samples" in mark:
        raise DatasetError(f"{source} has a group a sample: convert the files that it was made of")
    bar.total = sum(prod(array.shape) * array.itemsize for array in opened.arrays.values())
    for name, array in opened.arrays.items():
        need_bytes = anonymous_bytes() + CHUNK_COPIES * (array.chunk_bytes + BLOCK_CHUNKS * CHUNK_BYTES)
        if need_bytes > budget_bytes:
            raise BudgetError(
                f"a chunk of {array.label} does not fit; pass memory='{-(-need_bytes >> 20)}MiB'"
            )
        _ = array.known
        bar.text = name
        chunks = stacked_chunks(array.shape, array.itemsize)
        made = new_array(group, name, array.shape, array.dtype, chunks)
        for region in _blocks(array.shape, chunks):
            block = array.read(region)
            if block.dtype.kind == "f" and not np.isfinite(block).all():
                raise DatasetError(f"{array.label} has NaN or an infinite number within {region}; replace it")
            write_region(made, [start for start, _ in region], block)
            bar.add(block.nbytes)
    for path in beside.glob("*.npy"):
        path.unlink()
    return told if isinstance(mark, Mapping) else {**told, MARK: {}}


def _opened(source: Path, beside: Path) -> Dataset:
    suffix = source.suffix.lower()
    if suffix not in (".npy", ".npz"):
        return open_dataset(source)
    files: Mapping[str, Path] = {source.stem: source}
    try:
        if suffix == ".npz":
            with zipfile.ZipFile(source) as packed:
                names = [name for name in packed.namelist() if name.endswith(".npy")]
                # A member is unpacked under a number: its name is never a path.
                files = {name[:-4]: beside / f"{number}.npy" for number, name in enumerate(names)}
                for name, path in zip(names, files.values(), strict=True):
                    with packed.open(name) as member, path.open("wb") as file:
                        while block := member.read(1 << 20):
                            file.write(block)
        return open_dataset({name: np.load(path, "r", allow_pickle=False) for name, path in files.items()})
    except (ValueError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        reason = " ".join(f"{error}".split())
        raise DatasetError(
            f"{source} cannot be read: {reason}; arrays are of numbers, whole and uncut"
        ) from error


def _blocks(shape: tuple[int, ...], chunks: tuple[int, ...]) -> Any:
    """Yield regions of whole chunks, a few side by side along the last axis."""
    steps = (*chunks[:-1], chunks[-1] * BLOCK_CHUNKS)
    for corner in product(*(range(0, extent, step) for extent, step in zip(shape, steps, strict=True))):
        region: Region = tuple(
            (at, min(at + step, extent)) for at, step, extent in zip(corner, steps, shape, strict=True)
        )
        yield region
