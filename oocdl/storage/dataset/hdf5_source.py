"""Opens arrays of an HDF5 file; refuses those whose reading would not be safe and complete."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np

from oocdl.errors import DatasetError
from oocdl.storage.dataset.zarr_source import check_type
from oocdl.storage.zarr_json import grid


@dataclass(frozen=True)
class Hdf5Array:
    """Reads an HDF5 dataset under a lock: the library is not made for threads."""

    data: h5py.Dataset
    lock: threading.Lock

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return tuple(int(extent) for extent in self.data.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        dtype: np.dtype[Any] = self.data.dtype
        return dtype

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of what is decoded together; for contiguous data one row of the last axis."""
        if self.data.chunks is None:
            return (1,) * (len(self.shape) - 1) + self.shape[-1:]
        return tuple(int(extent) for extent in self.data.chunks)

    def __getitem__(self, where: tuple[slice, ...]) -> Any:
        with self.lock:
            return self.data[where]


def open_arrays(path: str, allow_missing: bool, names: Collection[str] | None) -> dict[str, Hdf5Array]:
    """Open and check the datasets of a file (those of ``names``, or all), by path. Raises DatasetError."""
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        reason = " ".join(str(error).split())
        raise DatasetError(f"{path} is not a readable HDF5 file ({reason})") from error
    found: dict[str, h5py.Dataset] = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item

    file.visititems(visit)  # follows no links, so nothing outside the file
    if names is not None:
        lost = sorted(set(names) - set(found))
        if lost:
            raise DatasetError(f"{path} has no dataset {lost[0]!r}; it has {sorted(found)}")
        found = {name: found[name] for name in names}
    for name, data in found.items():
        _check(f"dataset {name!r} of {path}", data, allow_missing)
    lock = threading.Lock()
    return {name: Hdf5Array(data, lock) for name, data in sorted(found.items())}


def _check(label: str, data: h5py.Dataset, allow_missing: bool) -> None:
    if data.shape is None:
        raise DatasetError(f"{label} is empty; arrays have the sample axis first")
    check_type(label, data.dtype, data.ndim)
    if data.external or data.is_virtual:
        raise DatasetError(f"{label} has its data in other files, which is refused; copy it in")
    if allow_missing or data.size == 0:
        return
    if data.chunks is None:
        wanted, stored = 1, int(data.id.get_storage_size() > 0)
    else:
        wanted, stored = prod(grid(data.shape, data.chunks)), data.id.get_num_chunks()
    if stored < wanted:
        raise DatasetError(
            f"{label}: {wanted - stored} of {wanted} chunks are missing; they would read as "
            "its fill value, pass allow_missing_chunks=True to accept that"
        )
