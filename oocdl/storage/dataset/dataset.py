"""The dataset: arrays with the sample axis first, read by region, from Zarr, HDF5 or memory.

Whatever could go wrong later is refused at opening, before a chunk is read. The chunks that are stored are
listed then: one that is gone or was changed since is an error, never the fill value. Arrays in memory are
read in place, by blocks with checksums; a budget counts them as what the process has before it begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import zarr
from isal import isal_zlib
from zarr.abc.store import Store

from oocdl.errors import DatasetError
from oocdl.graph.ir.array_layout import Array
from oocdl.graph.ir.index import Region, as_slices
from oocdl.storage.dataset import hdf5_source, zarr_source
from oocdl.storage.dataset.chunk_store import WHOLE, ChunkKeys, Memory, Reading
from oocdl.storage.dataset.data_array import DataArray as DataArray
from oocdl.storage.dataset.data_array import Opened, Shape, check_chunks, check_type, open_each
from oocdl.storage.dataset.decoding import Decoder
from oocdl.storage.dataset.sample_stack import viewed
from oocdl.storage.dataset.zarr_source import LastChunk, ZarrSource
from oocdl.storage.files import as_bytes
from oocdl.storage.zarr_json import chunk_region, grid

HDF5_ENDINGS = (".h5", ".hdf5", ".he5", ".hdf")
CONVERTED_ENDINGS = (".nii", ".nii.gz", ".npy", ".npz", ".csv", ".json")  # by ``convert``
BLOCK_BYTES = 1 << 20
MOST_TOLD = 5  # arrays that are left out whose reasons are told
SMALL_BYTES = 64 << 10  # samples of fewer bytes share a block
WHERE = "the arrays given"


class View(NamedTuple):
    """A view of an array whose samples differ in size: all of them in one size."""

    array: str
    name: str
    space: tuple[int, ...]  # extents of the last axes
    pad: int  # the number around smaller samples


@dataclass(frozen=True)
class DatasetSpec:
    """Tells another process how to open the same dataset; picklable."""

    source: str | Store | GivenArrays
    group: str
    names: tuple[str, ...]
    allow_missing_chunks: bool
    views: tuple[View, ...] = ()  # views of arrays whose samples differ in size
    validation: DatasetSpec | None = None  # its arrays have the names that ``apart`` gives

    def check_sent(self) -> None:
        """Raise DatasetError if no other process can open it."""
        if isinstance(self.source, GivenArrays):
            self.source.__reduce__()
        if self.validation is not None:
            self.validation.check_sent()


@dataclass(frozen=True)
class Dataset:
    """An open dataset. Made by ``open_dataset``."""

    arrays: Mapping[str, DataArray]  # arrays by name; for those of nested groups, by path
    where: str
    spec: DatasetSpec  # what ``open_dataset`` takes in another process
    left_out: Mapping[str, str] = field(default_factory=dict)  # name of what is no array of numbers -> why

    @property
    def found(self) -> str:
        """What is there, for messages."""
        others = "; ".join(f"{name!r} {why}" for name, why in list(self.left_out.items())[:MOST_TOLD])
        return ", ".join(sorted(self.arrays)) + (f" (left out: {others})" if others else "")

    def only(self, names: Collection[str]) -> Dataset:
        """Return the dataset with these arrays alone, whose chunks are listed (and may be refused) now."""
        arrays = {name: array for name, array in self.arrays.items() if name in names}
        for array in arrays.values():
            _ = array.known
        return replace(self, arrays=arrays, spec=replace(self.spec, names=tuple(arrays)))

    def with_views(self, views: Sequence[View]) -> Dataset:
        """Return the dataset with views of some of its arrays, which they may take the place of."""
        arrays = {name: viewed(self.arrays[array], space, pad) for array, name, space, pad in views}
        spec = replace(self.spec, views=tuple(views))
        return replace(self, arrays={**self.arrays, **arrays}, spec=spec)

    def with_validation(self, other: Dataset) -> Dataset:
        """Return the dataset with the arrays of another added, by the names that ``apart`` gives them."""
        arrays = {apart(name): array for name, array in other.arrays.items()}
        spec = replace(self.spec, validation=other.spec)
        return replace(self, arrays={**self.arrays, **arrays}, spec=spec)

    def notes(self) -> list[str]:
        """Return a line for each array of which some chunks are not stored, or cannot be told apart."""
        return [note for array in self.stored.values() for note in array.notes()]

    @property
    def stored(self) -> Mapping[str, DataArray]:
        """The arrays without further views of the same."""
        again = {view.name for view in self.spec.views if view.name != view.array}
        return {name: array for name, array in self.arrays.items() if name not in again}


def attributes_of(spec: DatasetSpec) -> dict[str, Any]:
    """Return the attributes of a dataset's group or file; none of arrays in memory."""
    source = spec.source
    if isinstance(source, GivenArrays):
        return {}
    if _is_hdf5(source):
        return hdf5_source.attributes_of(str(source))
    return dict(zarr_source.group_of(zarr_source.store_of(source), spec.group).attrs)


def apart(name: str) -> str:
    """Return a validation array's name in the dataset of a run: it begins with a slash, as no other does."""
    return f"/validation/{name}"


def open_dataset(
    source: str | Path | Store | zarr.Group | Mapping[str, Any] | DatasetSpec | Dataset,
    allow_missing_chunks: bool = True,
    names: Collection[str] | None = None,
) -> Dataset:
    """Open a Zarr group (path, store or group), an HDF5 file or NumPy arrays by name, and check its arrays.

    With ``names`` only those arrays are checked and opened, and their chunks listed; without, chunks of an
    array are listed when it is first used. Chunks that are not stored are their fill value, as Zarr and HDF5
    say; ``allow_missing_chunks=False`` refuses them. Raises DatasetError, in one line, if there is no dataset
    or an array has a refused codec or chunks. One without sample axis, or whose dtype is no number, is left
    out, and refused where ``names`` has it.

    >>> import numpy as np
    >>> store = zarr.storage.MemoryStore()
    >>> _ = zarr.create_array(store, name="x", data=np.arange(6.0).reshape(3, 2))
    >>> open_dataset(store).arrays["x"].read(((1, 3), (0, 1))).tolist()
    [[2.0], [4.0]]
    """
    if isinstance(source, Dataset):
        return source
    group = ""
    if isinstance(source, DatasetSpec):
        if source.validation is not None:
            other = open_dataset(source.validation)
            return open_dataset(replace(source, validation=None)).with_validation(other)
        if source.views:
            return open_dataset(replace(source, views=())).with_views(source.views)
        allow_missing_chunks, names = source.allow_missing_chunks, source.names
        group, source = source.group, source.source
    elif isinstance(source, zarr.Group):
        group, source = source.path, source.store
    if isinstance(source, Mapping):
        source = GivenArrays(source)
    if not isinstance(source, str | Path | Store | GivenArrays):
        raise DatasetError(
            "a dataset is a path, a Zarr store or group, or NumPy arrays by name, not of type "
            f"{type(source).__name__}; give arrays names: {{'image': images, 'label': labels}}, with the "
            "sample axis first; oocdl.data.write(loader, 'data.zarr') writes datasets of PyTorch"
        )
    place = _existing(source) if isinstance(source, str | Path) else source
    if isinstance(place, GivenArrays):
        where, (opened, left_out) = WHERE, open_given(place, names)
    elif _is_hdf5(place):
        where, (opened, left_out) = str(source), hdf5_source.open_arrays(str(place), names)
    else:
        where = f"{source}/{group}" if group else str(source)
        opened, left_out = zarr_source.open_arrays(place, group, where, names, allow_missing_chunks)
    if not opened:
        others = "".join(f"; {name!r} {why}" for name, why in left_out.items())
        raise DatasetError(f"{where} has no arrays of numbers; a dataset has at least one{others}")
    arrays = {array.name: replace(array, allow_missing_chunks=allow_missing_chunks) for array in opened}
    made = Dataset(arrays, where, DatasetSpec(place, group, tuple(arrays), allow_missing_chunks), left_out)
    return made if names is None else made.only(names)


def _is_hdf5(place: object) -> bool:
    return isinstance(place, str) and Path(place).suffix.lower() in HDF5_ENDINGS


def _existing(source: str | Path) -> str:
    text = str(source)
    if "://" in text:
        return text  # a remote store; zarr says whether it is there
    path = Path(text).expanduser().absolute()
    if not text or not path.exists():
        raise DatasetError(f"there is no dataset {path if text else repr(text)}")
    if not path.is_dir() and not path.is_file():
        raise DatasetError(f"{source} is neither a folder nor a file; give a Zarr group or an HDF5 file")
    if path.is_file() and path.suffix.lower() not in (*HDF5_ENDINGS, ".zip"):
        way_out = (
            "write one, sample by sample: g = zarr.open_group('data.zarr', mode='w'); "
            "x = g.create_array('image', shape=(samples, *volume), chunks=(1, *volume), dtype='float32'); "
            "x[0] = ..."
        )
        if path.name.lower().endswith(CONVERTED_ENDINGS):
            way_out = f"convert it: oocdl.data.convert('{path.name}', 'data.zarr'), or oocdl convert"
        raise DatasetError(f"{source} is neither a Zarr group nor an HDF5 file; {way_out}")
    return str(path)


class GivenArrays(dict[str, Array]):
    """Arrays by name, that no other process is sent."""

    def __repr__(self) -> str:
        return f"arrays {sorted(self)}"

    def __reduce__(self) -> NoReturn:
        """Raise DatasetError: who is about to send them calls it first."""
        raise DatasetError(
            "arrays in memory are read by this process alone; for a client, write them to Zarr: "
            "oocdl.data.convert('arrays.npz', 'data.zarr')"
        )


class GivenBlocks(Memory):
    """Blocks of an array in memory."""

    def __init__(self, data: Array, blocks: Shape) -> None:
        self.data, self.blocks = data, blocks
        self.keys = ChunkKeys(grid(data.shape, blocks), "", ".")

    def names(self) -> Iterator[str]:
        return map(self.keys.key, range(prod(self.keys.grid)))

    def _region(self, block: str) -> Region:
        return chunk_region(tuple(map(int, block.split("."))), self.data.shape, self.blocks)

    def place(self, chunk: str) -> str:
        return f"at {self._region(chunk)}"

    def read(self, chunk: str, part: slice = WHOLE) -> Reading:
        # A copy: what is compared is what is used, whatever the caller does meanwhile.
        block = self.data[as_slices(self._region(chunk))].copy(order="C")
        mark = block.nbytes, int(isal_zlib.crc32(as_bytes(block)))
        if block.shape != self.blocks:
            lacking = (most - its for most, its in zip(self.blocks, block.shape, strict=True))
            block = np.pad(block, [(0, extent) for extent in lacking])
        return mark, as_bytes(block).data, mark


def open_given(given: Mapping[Any, Any], names: Collection[str] | None) -> Opened:
    """Open arrays by name (those of ``names``, or all). Raises DatasetError for what is no such array."""
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray):
            kind = type(value).__name__
            raise DatasetError(
                f"a dataset in memory maps names to NumPy arrays, and {name!r} is of type {kind}; pass "
                "numpy.asarray(it), with the sample axis first, or write one sample at a time to Zarr"
            )
        if isinstance(value, np.ma.MaskedArray):
            raise DatasetError(
                f"{name!r} is a masked array; say what is there instead: pass {name}.filled(..)"
            )
    lost = sorted(set(names or ()) - set(given))
    if lost:
        raise DatasetError(f"{WHERE} have no array {lost[0]!r}; they are {sorted(given)}")
    last = LastChunk()
    known = sorted(given) if names is None else names
    return open_each(known, lambda name: _given(name, given[name], last), names is not None)


def _given(name: str, data: Array, last: LastChunk) -> DataArray:
    label = f"array {name!r} of {WHERE}"
    check_type(label, data.dtype, data.ndim)
    blocks = _blocks(data.shape, data.dtype.itemsize)
    check_chunks(label, data.shape, blocks, blocks)
    decoder = Decoder(data.dtype, blocks, tuple(range(data.ndim)), (), prod(blocks) * data.itemsize)
    source = ZarrSource(label, data.shape, blocks, 0, GivenBlocks(data, blocks), decoder, None, last)
    return DataArray(
        name=name, where=WHERE, shape=data.shape, dtype=data.dtype.newbyteorder("="),
        chunks=blocks, stored_chunks=blocks, fill_value=0, source=source,
    )  # fmt: skip


def _blocks(shape: Shape, itemsize: int) -> Shape:
    """Blocks of a part of one sample, or of a few small ones, that are contiguous in C order.

    >>> _blocks((10, 1, 256, 256, 256), 4), _blocks((10_000, 4), 8)
    ((1, 1, 4, 256, 256), (2048, 4))
    """
    left, found = BLOCK_BYTES // itemsize, list[int]()
    for extent in reversed(shape[1:]):
        found.append(max(1, min(extent, left)))
        left //= max(extent, 1)
    rows = SMALL_BYTES // (max(prod(shape[1:]), 1) * itemsize)
    return (max(1, min(rows, shape[0])), *reversed(found))
