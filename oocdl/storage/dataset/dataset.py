"""The dataset: arrays with the sample axis first, read by region, from Zarr or HDF5.

Whatever could go wrong later is refused at opening, before a chunk is read: types that can run code when
decoded, codecs that are not plain compression, and missing chunks, which would silently be zeros.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import Store

from oocdl.errors import DatasetError
from oocdl.graph.ir.index import Region, as_slices
from oocdl.storage.dataset import hdf5_source, zarr_source
from oocdl.storage.dataset.sampling import batches, permutation

Array = npt.NDArray[Any]

__all__ = ["DataArray", "Dataset", "DatasetSpec", "batches", "open_dataset", "permutation"]

HDF5_ENDINGS = (".h5", ".hdf5", ".he5", ".hdf")


class Reader(Protocol):
    """An array that is read by slices: a Zarr array, or an HDF5 dataset behind a lock."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def chunks(self) -> tuple[int, ...]: ...

    def __getitem__(self, where: tuple[slice, ...], /) -> Any: ...


@dataclass(frozen=True)
class DataArray:
    """One array of a dataset, with the sample axis first."""

    name: str
    shape: tuple[int, ...]
    """Samples come first."""
    dtype: np.dtype[Any]
    reader: Reader
    where: str
    """Name of the dataset, for messages."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of the chunks: what is decoded together."""
        return self.reader.chunks

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Decoded bytes of one chunk."""
        return prod(self.chunks) * self.itemsize

    def read(self, region: Region) -> Array:
        """Read ``region`` as a new array in native byte order; only chunks that it touches are decoded.

        Raises DatasetError if a chunk cannot be decoded.
        """
        try:
            found = self.reader[as_slices(region)]
        except Exception as error:  # codecs raise what they like; all mean the same here
            raise DatasetError(
                f"array {self.name!r} of {self.where} cannot be read at {region}: "
                f"{_one_line(error)}; restore or delete the damaged chunk"
            ) from error
        return np.asarray(found, self.dtype)


@dataclass(frozen=True)
class DatasetSpec:
    """Tells another process how to open the same dataset; picklable."""

    source: str | Store
    group: str
    names: tuple[str, ...]
    allow_missing_chunks: bool


@dataclass(frozen=True)
class Dataset:
    """An open dataset. Made by ``open_dataset``."""

    arrays: Mapping[str, DataArray]
    """Arrays by name; for those of nested groups, by path."""
    where: str

    reopen: DatasetSpec

    def spec(self) -> DatasetSpec:
        """Return what ``open_dataset`` takes in another process."""
        return self.reopen

    def fingerprint(self) -> str:
        """Return a digest of names, shapes and dtypes: cheap, and blind to changed values."""
        facts = sorted((a.name, list(a.shape), a.dtype.str) for a in self.arrays.values())
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def open_dataset(
    source: str | Path | Store | zarr.Group | DatasetSpec,
    allow_missing_chunks: bool = False,
    names: Collection[str] | None = None,
) -> Dataset:
    """Open a Zarr group (path, store or group) or an HDF5 file, and check its arrays.

    With ``names`` only those arrays are checked and opened; ``allow_missing_chunks`` accepts chunks that are
    not stored, which read as the fill value. Raises DatasetError, in one line, if there is no dataset or
    an array has no sample axis, a dtype that is no number, a refused codec, or missing chunks.

    >>> store = zarr.storage.MemoryStore()
    >>> _ = zarr.create_array(store, name="x", data=np.arange(6.0).reshape(3, 2))
    >>> open_dataset(store).arrays["x"].read(((1, 3), (0, 1))).tolist()
    [[2.0], [4.0]]
    """
    group = ""
    if isinstance(source, DatasetSpec):
        allow_missing_chunks, names = source.allow_missing_chunks, source.names
        group, source = source.group, source.source
    elif isinstance(source, zarr.Group):
        group, source = source.path, source.store
    where = _label(source, group)
    place = _existing(source) if isinstance(source, (str, Path)) else source
    readers: Mapping[str, Reader]
    if isinstance(place, str) and Path(place).suffix.lower() in HDF5_ENDINGS:
        readers = hdf5_source.open_arrays(place, allow_missing_chunks, names)
    else:
        readers = zarr_source.open_arrays(place, group, where, allow_missing_chunks, names)
    if not readers:
        raise DatasetError(f"{where} has no arrays; a dataset is a group with at least one")
    arrays = {
        name: DataArray(name, reader.shape, reader.dtype.newbyteorder("="), reader, where)
        for name, reader in readers.items()
    }
    spec = DatasetSpec(place, group, tuple(arrays), allow_missing_chunks)
    return Dataset(arrays, where, spec)


def _label(source: str | Path | Store, group: str) -> str:
    return f"{source}/{group}" if group else str(source)


def _existing(source: str | Path) -> str:
    text = str(source)
    if "://" in text:
        return text  # a remote store; zarr says whether it is there
    path = Path(text).expanduser().absolute()
    if not path.exists():
        raise DatasetError(f"no such dataset: {source}")
    if path.is_file() and path.suffix.lower() not in (*HDF5_ENDINGS, ".zip"):
        raise DatasetError(f"{source} is neither a Zarr group nor an HDF5 file; try oocdl convert")
    return str(path)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
