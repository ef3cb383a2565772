"""Predicted labels as NIfTI: in the grid that a sample had before it was resampled, plane by plane."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oocdl.data.cases import NAME
from oocdl.data.nifti import PIECE_BYTES, Array, write_volume
from oocdl.data.resampling import nearest
from oocdl.errors import DatasetError
from oocdl.storage.dataset.dataset import Dataset, attributes_of
from oocdl.storage.files import reporting


def sample_facts(dataset: Dataset, samples: int) -> list[tuple[str, Mapping[str, Any]]]:
    """Return name and attributes of each sample of a dataset of stacked arrays.

    They stand in the attributes of a Zarr group or HDF5 file: "samples", names, "affine", one of 4 × 4 or one
    for each sample, and "spacing" likewise. Else samples are numbered, and the affine is the identity.
    """
    told, digits = attributes_of(dataset.spec), len(str(max(samples - 1, 0)))
    names = told.get("samples")
    if not isinstance(names, list):  # somebody's count, as it may be
        names = [f"sample_{row:0{digits}d}" for row in range(samples)]
    good = all(isinstance(name, str) and re.fullmatch(NAME, name) for name in names)
    if not good or not len(names) == len(set(names)) == samples:
        raise _odd(dataset, f"'samples' is to have {samples} names that differ and can be those of files")
    facts: list[dict[str, Any]] = [{"affine": np.eye(4).tolist()} for _ in names]
    for name, rank, text in (("affine", 2, "4 × 4 numbers"), ("spacing", 1, "numbers along each axis")):
        if name not in told:
            continue
        try:
            given = np.asarray(told[name], np.float64)
            by_sample = np.broadcast_to(given, (samples, *given.shape[-rank:]))
        except (TypeError, ValueError):
            by_sample = np.empty(())
        if by_sample.ndim != rank + 1 or (rank == 2 and by_sample.shape[1:] != (4, 4)):
            raise _odd(dataset, f"'{name}' is to have {text}, for all {samples} samples or for each")
        for fact, one in zip(facts, by_sample.tolist(), strict=True):
            fact[name] = one
    return list(zip(names, facts, strict=True))


def _odd(dataset: Dataset, what: str) -> DatasetError:
    return DatasetError(f"{dataset.where}: its attribute {what}; mend or delete it")


def write_labels(
    folder: Path,
    name: str,
    told: Mapping[str, Any],
    shape: Sequence[int],
    dtype: np.dtype[Any],
    planes: Callable[[int, int], Array],
) -> Path:
    """Write one sample's labels to ``<name>.nii.gz`` in a folder; returns the path.

    ``told`` are the attributes that ``convert`` gave the sample; without an affine it is the identity.
    ``planes(start, stop)`` returns labels [stop - start, y, x] of a volume of ``shape`` [z, y, x], which is
    read from its first plane to its last. If it was resampled, each voxel of its own grid takes the nearest
    label. Raises DatasetError for bad attributes, StoreError if the file cannot be written.
    """
    place = told.get("original", told)
    try:
        affine = np.asarray(place.get("affine", np.eye(4)), np.float64).reshape(4, 4)
        after = tuple(int(extent) for extent in place.get("shape", shape))
        codes = tuple(int(code) for code in told.get("codes", (0, 2)))
        qform = np.asarray(told.get("qform", affine), np.float64).reshape(4, 4)
    except (AttributeError, TypeError, ValueError) as error:
        raise DatasetError(f"the attributes of sample '{name}' say no place in space: {error}") from error
    if len(after) != len(shape) or len(codes) != 2:
        raise DatasetError(
            f"the attributes of sample '{name}' are of {len(after)} axes, labels of {len(shape)}"
        )
    low, rows, columns = (nearest(n, m) for n, m in zip(shape, after, strict=True))
    depth = max(1, PIECE_BYTES // max(1, int(shape[1]) * int(shape[2]) * dtype.itemsize))
    path = folder / f"{name}.nii.gz"

    def resampled() -> Iterator[Array]:
        start, kept = 0, planes(0, min(depth, shape[0]))
        for source in low:
            while source >= start + len(kept):
                start += len(kept)
                kept = planes(start, min(start + depth, shape[0]))
            plane = kept[source - start]
            yield plane if after == tuple(shape) else plane.take(rows, 0).take(columns, 1)

    with reporting(path):
        write_volume(path, resampled(), after, dtype, affine, (codes[0], codes[1]), qform)
    return path
