"""Samples of NIfTI files: checks by headers that files go together, and values as they are to be stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.data.cases import Case, Cases, refuse
from oocdl.data.nifti import SAME_VOXELS, Volume, apart_by, read_header, read_planes
from oocdl.errors import DatasetError

Array = npt.NDArray[Any]
FLOAT = np.dtype(np.float32)


@dataclass(frozen=True, eq=False)
class Samples:
    """All samples, and the types that their arrays have in common."""

    samples: tuple[Case[Volume], ...]
    image: np.dtype[Any]
    label: np.dtype[Any] | None


def read_samples(cases: Cases, is_resampled: bool) -> Samples:
    """Read and compare all headers. Raises DatasetError, which lists what does not go together."""
    found, problems = list[Case[Volume]](), list[str]()
    for case in cases.cases:
        try:
            found.append(_sample(case))
        except DatasetError as error:
            problems.append(str(error))
    refuse(problems)
    images = [volume for sample in found for volume in sample.images]
    labels = [sample.label for sample in found if sample.label is not None]
    exact = not is_resampled and all(volume.is_integer for volume in images)
    image = np.result_type(*{volume.stored.newbyteorder("=") for volume in images})
    return Samples(
        tuple(found),
        image if exact and image.kind in "iu" else FLOAT,
        _label_type(labels, cases.numbers) if labels else None,
    )


def _sample(case: Case[Path]) -> Case[Volume]:
    images = tuple(read_header(path) for path in case.images)
    label = None if case.label is None else read_header(case.label)
    sample, first = Case(case.name, images, label), images[0]
    for volume in sample.volumes[1:]:
        if volume.shape != first.shape:
            raise DatasetError(
                f"{volume.path} has {list(volume.shape[::-1])} voxels, {first.path} {list(first.shape[::-1])}"
            )
        apart = apart_by(first, volume)
        if apart > SAME_VOXELS:
            raise DatasetError(
                f"{volume.path} lies elsewhere than {first.path}: their affines differ by {apart:.3g} "
                "voxels; resample it, or correct its header"
            )
    return sample


def _label_type(labels: Sequence[Volume], numbers: Sequence[int] | None) -> np.dtype[Any]:
    """The smallest type for the classes, where they are known; else that of the files."""
    if numbers:
        low, high = numbers[0], numbers[-1]
        return np.min_scalar_type(high if low >= 0 else min(low, -high - 1))
    if not all(volume.is_integer for volume in labels):
        return np.dtype(np.int32)
    found = np.result_type(*{volume.stored.newbyteorder("=") for volume in labels})
    return found if found.kind in "iu" else np.dtype(np.int64)


def values(volume: Volume, dtype: np.dtype[Any], numbers: Sequence[int] | None = None) -> Iterator[Array]:
    """Yield the planes of a volume, [planes, y, x], as values of a type; those of a label are ``numbers``.

    Raises DatasetError for a voxel that the type, or the list of classes, does not have.
    """
    start = 0
    for piece in read_planes(volume):
        found = piece
        if (volume.slope, volume.intercept) != (1.0, 0.0):
            found = piece * np.float64(volume.slope) + volume.intercept
        with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is found below
            made = found.astype(dtype, copy=False)
        bad, why = _bad(found, made, numbers)
        if bad.any():
            at = np.unravel_index(int(np.argmax(bad)), bad.shape)
            place = [int(at[2]), int(at[1]), start + int(at[0])]
            raise DatasetError(f"{volume.path} has {found[at]} at voxel {place}{why}")
        yield made
        start += len(piece)


def _bad(found: Array, made: Array, numbers: Sequence[int] | None) -> tuple[Array, str]:
    """Which voxels are refused, and why."""
    if made.dtype.kind == "f":
        return ~np.isfinite(made), ", which is no finite number of float32; replace it"
    if numbers is not None:
        return ~np.isin(
            found, numbers
        ), f"; its classes are {', '.join(map(str, numbers[:20]))}, by dataset.json"
    return found != made, f"; labels are whole numbers that {made.dtype} holds"
