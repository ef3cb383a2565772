"""A Zarr group that appears whole or not at all, and how its arrays are cut and coded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import zarr
from numcodecs import Blosc
from zarr.codecs import BloscCodec, Crc32cCodec

from oocdl.errors import DatasetError, StoreError
from oocdl.graph.ir.index import within
from oocdl.host.signal_mask import unstoppable
from oocdl.storage.dataset.sample_stack import KIND, MARK
from oocdl.storage.files import remove, reporting, sync_all, sync_path, write_text
from oocdl.storage.run.lock import RunLock
from oocdl.storage.zarr_json import CONVERSION, UNFINISHED, chunk_region, group_json, touched

CHUNK_BYTES = 2 << 20
SMALL_BYTES = 128 << 10  # samples of fewer bytes share a chunk
LOCK = "LOCK"
DATASET = "dataset"  # kind of a group that was written here, and may be replaced
ENCODERS = 2  # chunks that are encoded at once
LEVEL = 3  # level of the zstd compressor, which gets the bytes shuffled


@contextmanager
def new_group(out: Path, overwrite: bool) -> Iterator[tuple[zarr.Group, dict[str, Any]]]:
    """Yield a group to fill, and a dict for its attributes; those under ``MARK`` say who wrote it.

    Raises StoreError if something else is at ``out``, InUseError if another process writes there.
    """
    is_there = out.exists() or out.is_symlink()
    out = out.resolve() if out.exists() else out  # what a link leads to
    partial, replaced = (out.with_name(f"{out.name}.{word}") for word in ("partial", "replaced"))
    if is_there and not overwrite:
        raise StoreError(f"{out} is there already; choose another place, or overwrite=True")
    if is_there and not _is_ours(out):
        raise StoreError(f"{out} was not written by convert or write, so it is not overwritten; move it away")
    if is_there and replaced.exists():
        raise StoreError(f"{replaced} is what {out} was before a call that was killed; move it away")
    told: dict[str, Any] = {}
    with reporting(partial):
        partial.mkdir(parents=True, exist_ok=True)
        ours = UNFINISHED in group_attributes(partial) or _is_ours(partial)
        if not ours and {path.name for path in partial.iterdir()} - {LOCK}:
            raise StoreError(f"{partial}, where {out} would be written first, is there already; move it away")
        lock = RunLock(partial / LOCK)
    try:
        with reporting(partial):
            for left in partial.iterdir():
                if left.name != LOCK:
                    remove(left)
            write_text(partial / "zarr.json", group_json({UNFINISHED: CONVERSION}))
            yield zarr.open_group(str(partial), mode="r+"), told
            mark = {KIND: DATASET, **told.get(MARK, {})}
            write_text(partial / "zarr.json", group_json({**told, MARK: mark}))
            sync_all([partial, *partial.rglob("*")])
            with unstoppable():
                if out.exists():
                    out.rename(replaced)
                partial.rename(out)
                (out / LOCK).unlink()  # not before: another process would have taken the folder
                sync_path(out)
                sync_path(out.absolute().parent)
            remove(replaced)
    except BaseException:
        remove(partial)
        raise
    finally:
        lock.release()


def _is_ours(path: Path) -> bool:
    mark = group_attributes(path).get(MARK)
    return isinstance(mark, Mapping) and mark.get(KIND) == DATASET


def group_attributes(path: Path) -> dict[str, Any]:
    """Return the attributes of a group that may be unfinished; empty if there is no group."""
    try:
        document = json.loads((path / "zarr.json").read_text())
        found = document["attributes"] if document["node_type"] == "group" else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def new_array(
    group: zarr.Group, name: str, shape: Sequence[int], dtype: np.dtype[Any], chunks: Sequence[int]
) -> zarr.Array[Any]:
    """Make an array whose chunks are compressed by zstd and have checksums; every chunk is stored.

    Raises DatasetError for floats that Zarr has no type for.
    """
    if dtype.kind == "f" and dtype.itemsize > 8:
        raise DatasetError(f"array '{name}' is of {dtype}, which Zarr does not have; make it float64 before")
    coders = [BloscCodec(cname="zstd", clevel=LEVEL, shuffle="shuffle"), Crc32cCodec()]
    return group.create_array(
        name, shape=tuple(shape), dtype=dtype.newbyteorder("="), chunks=tuple(chunks), compressors=coders,
        fill_value=0, config={"write_empty_chunks": True},
    )  # fmt: skip


def write_region(array: zarr.Array[Any], corner: Sequence[int], values: npt.NDArray[Any]) -> None:
    """Write whole chunks of an array that ``new_array`` made, from a corner on; the last may be cut.

    No chunk is being written when this ends, also by a signal or a full disk: the library's threads go on.
    """
    encoder, folder = Blosc("zstd", LEVEL, Blosc.SHUFFLE), Path(array.store.root) / array.path  # type: ignore[attr-defined]
    region = tuple((at, at + extent) for at, extent in zip(corner, values.shape, strict=True))

    def write(index: tuple[int, ...]) -> None:
        covered = chunk_region(index, array.shape, array.chunks)
        part = np.asarray(values[within(covered, region)], array.dtype)
        chunk = np.zeros(array.chunks, array.dtype)
        chunk[tuple(slice(extent) for extent in part.shape)] = part
        data = encoder.encode(chunk)
        path = folder.joinpath("c", *map(str, index))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data + google_crc32c.value(data).to_bytes(4, "little"))

    with ThreadPoolExecutor(ENCODERS) as pool:
        list(pool.map(write, touched(region, array.chunks)))


def even(extent: int, most: int) -> int:
    """Return the size of chunks of at most ``most`` that cut an extent into about equal ones.

    >>> even(181, 96), even(512, 80), even(64, 96)
    (91, 74, 64)
    """
    return -(-extent // -(-extent // max(1, most))) if extent else 1


def chunk_shape(shape: Sequence[int], itemsize: int, most_depth: int | None = None) -> tuple[int, ...]:
    """Return near-cubic chunks of about ``CHUNK_BYTES`` over the last three axes; 1 along those before.

    ``most_depth`` limits the first of the three.

    >>> chunk_shape((1, 181, 217, 181), 4), chunk_shape((1, 64, 4096, 4096), 2, 4)
    ((1, 61, 73, 91), (1, 4, 512, 512))
    """
    lead, left, elements = len(shape) - min(len(shape), 3), list(shape)[-3:], CHUNK_BYTES // itemsize
    found: dict[int, int] = {}
    if most_depth is not None:
        found[0] = even(left[0], min(most_depth, round(elements ** (1 / 3))))
    for axis in sorted(set(range(len(left))) - set(found), key=lambda axis: left[axis]):
        edge = (elements / prod(found.values())) ** (1 / (len(left) - len(found)))
        found[axis] = even(left[axis], int(edge + 1e-6))
    return (*[1] * lead, *(found[axis] for axis in range(len(left))))


def stacked_chunks(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return chunks of an array whose first axis is that of samples: a part of one, or a few small ones.

    >>> stacked_chunks((1000, 1, 28, 28), 4), stacked_chunks((3, 2, 128, 128, 128), 4)
    ((40, 1, 28, 28), (1, 1, 64, 64, 128))
    """
    together = even(shape[0], SMALL_BYTES // max(prod(shape[1:]) * itemsize, 1))
    return (together, *sample_chunks(shape[1:], itemsize))


def sample_chunks(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return chunks of one sample: parts of a large one."""
    if prod(shape) * itemsize > CHUNK_BYTES:
        return chunk_shape(shape, itemsize)
    return tuple(max(extent, 1) for extent in shape)
