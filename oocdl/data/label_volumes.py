"""Predicted labels as NIfTI: in the grid that a sample had before it was resampled, plane by plane."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oocdl.data.cases import NAME
from oocdl.data.nifti import PIECE_BYTES, Array, volume_writer
from oocdl.data.resampling import nearest
from oocdl.errors import DatasetError
from oocdl.storage.dataset.dataset import Dataset, attributes_of
from oocdl.storage.files import reporting


def sample_facts(dataset: Dataset, samples: int) -> list[tuple[str, Mapping[str, Any]]]:
    """Return name and attributes of each sample of a dataset of stacked arrays.

    They stand in the attributes of a Zarr group or HDF5 file: "samples", names, "affine", one of 4 × 4 or one
    for each sample, and "spacing" likewise. Else samples are numbered, and the affine is the identity.
    Raises DatasetError for others.
    """
    told = attributes_of(dataset.spec())
    digits = len(str(max(samples - 1, 0)))
    names = told.get("samples", [f"sample_{row:0{digits}d}" for row in range(samples)])
    affines = np.asarray(told.get("affine", np.eye(4)), np.float64)
    if affines.shape == (4, 4):
        affines = np.broadcast_to(affines, (samples, 4, 4))
    good = all(isinstance(name, str) and re.fullmatch(NAME, name) for name in names)
    if affines.shape != (samples, 4, 4) or len(names) != samples or len(set(names)) != samples or not good:
        raise DatasetError(
            f"{dataset.where} has {samples} samples, {len(names)} names and affines {list(affines.shape)}"
        )
    facts = [{"affine": affine.tolist()} for affine in affines]
    if "spacing" in told:
        spacings = np.asarray(told["spacing"], np.float64)
        for row, spacing in enumerate(np.broadcast_to(spacings, (samples, spacings.shape[-1]))):
            facts[row]["spacing"] = spacing.tolist()
    return list(zip(names, facts, strict=True))


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
    read from its first plane to its last. If ``convert`` resampled the sample, each voxel of its own grid
    takes the nearest label.
    Raises DatasetError for bad attributes, StoreError if the file cannot be written.
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
    path, start, kept = folder / f"{name}.nii.gz", 0, planes(0, min(depth, shape[0]))
    with reporting(path), volume_writer(path, after, dtype, affine, (codes[0], codes[1]), qform) as write:
        for source in low:
            while source >= start + len(kept):
                start += len(kept)
                kept = planes(start, min(start + depth, shape[0]))
            plane = kept[source - start]
            write(plane if after == tuple(shape) else plane.take(rows, 0).take(columns, 1))
    return path
