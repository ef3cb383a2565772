"""``convert``: writes files of other formats as a dataset, part by part within a memory budget.

What can be known by headers is checked before anything is written; a failure leaves nothing behind.
"""

from __future__ import annotations

import math
import shutil
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr

from oocdl.config import parse_bytes
from oocdl.data.cases import Case, Cases, Samples, find_cases, read_samples, values
from oocdl.data.new_group import CHUNK_BYTES, chunk_shape, new_array, new_group, stacked_chunks, write_region
from oocdl.data.nifti import PIECE_BYTES, Array, Volume, spacing_of
from oocdl.data.resampling import resample, resampled_affine, resampled_shape
from oocdl.errors import BudgetError, DatasetError, InputError
from oocdl.host.limits import anonymous_bytes, check_budget, default_budget_bytes
from oocdl.host.paths import path_of
from oocdl.report.progress import BytesBar
from oocdl.storage.dataset.dataset import HDF5_ENDINGS, Dataset, attributes_of, open_dataset
from oocdl.storage.dataset.ome_zarr import ome_folders
from oocdl.storage.dataset.sample_stack import MARK, members_of
from oocdl.storage.zarr_json import chunk_region, grid

CODING_BYTES = 24 << 20  # what encoding chunks, and a stream that is decompressed, take at most
PIECE_COPIES = 6  # copies of a piece, as float64, that are made on its way
CHUNK_COPIES = 3  # copies of a chunk on its way: stored, decoded and converted
BLOCK_CHUNKS = 4  # chunks that are copied together: encoders take them side by side


def convert(
    source: str | Path,
    out: str | Path,
    *,
    spacing: Sequence[float] | None = None,
    memory: float | str | None = None,
    split: str = "train",
    overwrite: bool = False,
    progress: bool = True,
) -> zarr.Group:
    """Write NIfTI, DICOM, NumPy, HDF5 or Zarr files as a dataset that ``fit`` reads; returns its group.

    Volumes become a group a sample, with arrays "image" [channels, z, y, x] and "label" [z, y, x], and in its
    attributes affine (voxel (x, y, z) to mm), spacing ([z, y, x] in mm) and file names. Images keep the
    integer type of their files, if these do not scale it, else they are float32; labels take the smallest
    type that holds the classes of ``dataset.json``, else that of their files. Arrays of NumPy, HDF5 and Zarr
    stay as they are, with the sample axis first. The dataset appears whole or not at all.

    Parameters
    ----------
    source
        An nnU-Net raw folder, a CSV or JSON table with columns image, image2, .., label and perhaps name,
        a NIfTI file (.nii, .nii.gz), a DICOM series or a folder of either; .npy, .npz, an HDF5 file or a
        Zarr group.
    out
        Path of the Zarr group to write.
    spacing
        Millimetres [z, y, x] to resample volumes to: images linearly, labels by the nearest voxel.
        None: as they are.
    memory
        Memory budget of the process in bytes, or as a text such as "1GiB"; default: 70 % of what is there.
    split
        "train" or "test" of an nnU-Net folder: imagesTr or imagesTs.
    overwrite
        Replace what ``convert`` or ``write`` wrote to ``out`` before.
    progress
        Show how far it is, on a terminal.

    Raises
    ------
    DatasetError, in one line that names the file: a missing label or modality, a label of another shape or
    place than its image, a class that dataset.json does not name, NaN, a file that is cut off.
    StoreError if something is at ``out``; BudgetError if the budget holds no plane, or chunk;
    InputError without nibabel.

    Examples
    --------
    >>> oocdl.data.convert("Dataset001_Brain", "brain.zarr")  # doctest: +SKIP
    """
    place, target = path_of("source", source).expanduser(), path_of("out", out).expanduser()
    budget_bytes = default_budget_bytes() if memory is None else parse_bytes(memory)
    check_budget(budget_bytes)
    if is_stacked(place):
        if spacing is not None or split != "train":
            raise InputError(
                f"{place} holds arrays, which have neither a spacing nor a split: leave them out"
            )
        with new_group(target, overwrite) as (group, told), BytesBar(progress) as bar:
            beside = target.with_name(f"{target.name}.partial")
            told |= copy_arrays(place, group, beside, budget_bytes, bar)
    else:
        cases = find_cases(place, split)
        steps = None if spacing is None else tuple(map(float, spacing))
        if steps is not None and not (len(steps) == 3 and all(0 < step < math.inf for step in steps)):
            raise InputError(
                f"spacing is three positive numbers, millimetres along z, y and x; got {spacing}"
            )
        samples = read_samples(cases, steps is not None)
        plans = [_planned(sample, samples, steps, budget_bytes) for sample in samples.samples]
        with new_group(target, overwrite) as (group, told), BytesBar(progress) as bar:
            bar.total = sum(volume.nbytes for plan in plans for volume in plan.sample.volumes)
            for number, plan in enumerate(plans, 1):
                bar.text = f"{plan.sample.name} ({number} of {len(plans)})"
                _write(group.create_group(plan.sample.name), plan, samples, cases, bar)
            facts: dict[str, Any] = {"samples": [plan.sample.name for plan in plans]}
            facts |= {"channels": list(cases.channels)} if cases.channels else {}
            facts |= {} if cases.classes is None else {"classes": dict(cases.classes)}
            told[MARK] = facts
    return zarr.open_group(str(target), mode="r")


class _Plan(NamedTuple):
    sample: Case[Volume]
    shape: tuple[int, ...]
    depth: int  # the most planes that a chunk may have, as many as fit the budget


def _planned(
    sample: Case[Volume], samples: Samples, spacing: Sequence[float] | None, budget_bytes: int
) -> _Plan:
    first = sample.images[0]
    shape = first.shape if spacing is None else resampled_shape(first.shape, first.spacing, spacing)
    room = budget_bytes - anonymous_bytes() - CODING_BYTES
    most = max(samples.image.itemsize, 0 if samples.label is None else samples.label.itemsize)
    plane_bytes = shape[1] * shape[2] * most
    before = first.shape[1] * first.shape[2]
    rows = max(1, PIECE_BYTES // (before * min(volume.stored.itemsize for volume in sample.volumes)))
    piece_bytes = rows * max(before, shape[1] * shape[2]) * 8 * PIECE_COPIES
    depth = (room - piece_bytes) // plane_bytes
    if depth < 1:
        need = -(-(budget_bytes - room + piece_bytes + plane_bytes) >> 20)
        raise BudgetError(f"a plane of {first.path} does not fit; pass memory='{need}MiB' or more")
    return _Plan(sample, shape, depth)


def _write(group: zarr.Group, plan: _Plan, samples: Samples, cases: Cases, bar: BytesBar) -> None:
    sample, first = plan.sample, plan.sample.images[0]
    is_resampled = plan.shape != first.shape
    affine = resampled_affine(first.affine, first.shape, plan.shape) if is_resampled else first.affine
    source = {"image": [volume.path.name for volume in sample.images]}
    source |= {} if sample.label is None else {"label": [sample.label.path.name]}
    told: dict[str, Any] = {
        "affine": affine.tolist(),
        "spacing": list(spacing_of(affine)),
        "codes": list(first.codes),
        "source": source,
    }
    if not np.allclose(first.qform, first.affine, atol=1e-4):
        told["qform"] = first.qform.tolist()
    if is_resampled:
        told["original"] = {"shape": list(first.shape), "affine": first.affine.tolist()}
    group.attrs.update(told)
    channels = (len(sample.images), *plan.shape)
    chunks = chunk_shape(channels, samples.image.itemsize, plan.depth)
    image = new_array(group, "image", channels, samples.image, chunks)
    for channel, volume in enumerate(sample.images):
        write_planes(image, (channel,), _planes(volume, plan.shape, samples.image, None, bar))
    if sample.label is not None and samples.label is not None:
        chunks = chunk_shape(plan.shape, samples.label.itemsize, plan.depth)
        label = new_array(group, "label", plan.shape, samples.label, chunks)
        write_planes(label, (), _planes(sample.label, plan.shape, samples.label, cases, bar))


def _planes(
    volume: Volume, shape: Sequence[int], dtype: np.dtype[Any], cases: Cases | None, bar: BytesBar
) -> Iterator[Array]:
    """Yield the planes of a volume, resampled if it has to be; ``cases`` are those of a label."""

    def pieces() -> Iterator[Array]:
        for piece in values(volume, dtype, None if cases is None else cases.numbers):
            bar.add(piece.size * volume.stored.itemsize)
            yield piece

    if tuple(shape) == volume.shape:
        return pieces()
    return resample(pieces(), volume.shape, shape, cases is not None)


def write_planes(array: zarr.Array[Any], lead: tuple[int, ...], pieces: Iterable[Array]) -> None:
    """Write planes that come in pieces, [planes, y, x], by whole chunks, below the index ``lead``."""
    depth, height, width = array.shape[len(lead) :]
    rows = array.chunks[len(lead)]
    buffer, filled, start = np.empty((rows, height, width), array.dtype), 0, 0
    for piece in pieces:
        while len(piece):
            taken = min(len(piece), rows - filled)
            buffer[filled : filled + taken] = piece[:taken]
            piece, filled = piece[taken:], filled + taken
            if filled == min(rows, depth - start):
                slab = buffer[:filled].reshape((*[1] * len(lead), filled, height, width))
                write_region(array, (*lead, start, 0, 0), slab)
                start, filled = start + filled, 0


def is_stacked(source: Path) -> bool:
    """Whether a path is of a format whose arrays have the sample axis first."""
    is_group = any((source / name).is_file() for name in ("zarr.json", ".zgroup")) or ome_folders(source)
    return bool(is_group) or source.suffix.lower() in (".npy", ".npz", ".zip", *HDF5_ENDINGS)


def copy_arrays(
    source: Path, group: zarr.Group, beside: Path, budget_bytes: int, bar: BytesBar
) -> Mapping[str, Any]:
    """Copy all arrays of a source to a group; returns the attributes of a group or file.

    Members of an .npz file are unpacked below ``beside``. Raises DatasetError for arrays that are not of
    finite numbers, and for a group a sample; BudgetError if a chunk of the source does not fit.
    """
    opened = _opened(source, beside)
    if any(members_of(array) for array in opened.arrays.values()):
        raise DatasetError(f"{source} has a group a sample, or is OME-Zarr: fit and predict read it as it is")
    for name, why in opened.left_out.items():
        warnings.warn(f"{source}: {name} {why}; it is not copied", stacklevel=5)
    told = attributes_of(opened.spec)
    mark = told.get(MARK)
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
        steps = (*chunks[:-1], chunks[-1] * BLOCK_CHUNKS)
        for index in np.ndindex(grid(array.shape, steps)):
            region = chunk_region(index, array.shape, steps)
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
                        shutil.copyfileobj(member, file, 1 << 20)
        return open_dataset({name: np.load(path, "r", allow_pickle=False) for name, path in files.items()})
    except (ValueError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        reason = " ".join(f"{error}".split())
        raise DatasetError(
            f"{source} cannot be read: {reason}; arrays are of numbers, whole and uncut"
        ) from error
