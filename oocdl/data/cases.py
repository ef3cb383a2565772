"""Samples: which files belong together (nnU-Net's folders, tables, folders of NIfTI), and their values."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from oocdl.data.dicom import read_slices, read_volume, series_in
from oocdl.data.nifti import ENDINGS, SAME_VOXELS, Array, Volume, apart_by, read_planes
from oocdl.errors import DatasetError, InputError
from oocdl.storage.files import read_text

T = TypeVar("T")
SPLITS = {"train": ("imagesTr", "labelsTr"), "test": ("imagesTs", "labelsTs")}  # of nnU-Net's raw format
NAME = r"[^\W_][\w. +-]{0,199}"  # names of samples, which are names of files and folders


@dataclass(frozen=True, eq=False)
class Case(Generic[T]):
    """One sample: its files as ``Case[Path]``, or what their headers say as ``Case[Volume]``."""

    name: str
    images: tuple[T, ...]  # one for each channel
    label: T | None = None

    @property
    def volumes(self) -> tuple[T, ...]:
        """All of them; the image's first comes first."""
        return self.images if self.label is None else (*self.images, self.label)


@dataclass(frozen=True)
class Cases:
    """All samples of a source, and what it says of them."""

    cases: tuple[Case[Path], ...]
    channels: tuple[str, ...] = ()  # names of the channels; empty if nothing says them
    classes: Mapping[str, Any] | None = None  # name -> number, or numbers of a region, if they are told

    @property
    def numbers(self) -> tuple[int, ...] | None:
        """The numbers that labels may have, ascending; None if nothing says them."""
        if self.classes is None:
            return None
        found = (held if isinstance(held, list) else [held] for held in self.classes.values())
        return tuple(sorted({int(number) for held in found for number in held}))


def find_cases(source: Path, split: str = "train") -> Cases:
    """Find the cases of a source; ``split`` of an nnU-Net folder. Raises DatasetError, InputError."""
    if not source.exists():
        raise DatasetError(f"no such file or folder: {source}")
    if split not in SPLITS:
        raise InputError(f"split is one of {', '.join(SPLITS)}, got '{split}'")
    if (source / "dataset.json").is_file():
        return _nnunet(source, split)
    if split != "train":
        raise InputError(f"{source} has no dataset.json, so no split '{split}'; leave it out")
    if source.is_dir():
        there = sorted(path for path in source.iterdir() if not path.name.startswith("."))
        files = [path for path in there if path.name.lower().endswith(ENDINGS)]
        odd = [path for path in there if path.name.lower().endswith((".hdr", ".img"))]
        refuse([f"{path} is not read: give it as .nii or .nii.gz" for path in odd])
        files = files or series_in(source)
        if not files:
            raise DatasetError(f"{source} has no dataset.json, NIfTI file (.nii or .nii.gz) or DICOM series")
        return Cases(_named([Case("", (path,)) for path in files], source))
    if source.name.lower().endswith(ENDINGS):
        return Cases(_named([Case("", (source,))], source))
    return Cases(_table(source))


def _parsed(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(read_text(path).removeprefix("\ufeff"))
    except (OSError, ValueError, csv.Error) as error:
        raise DatasetError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _nnunet(folder: Path, split: str) -> Cases:
    path = folder / "dataset.json"
    told = _parsed(path, json.loads)
    channels: Any = told.get("channel_names", told.get("modality")) if isinstance(told, Mapping) else None
    numbers = [str(number) for number in range(len(channels))] if isinstance(channels, Mapping) else []
    if not numbers or any(number not in channels for number in numbers):
        raise DatasetError(f"{path} has no channel_names (or modality) by number, such as {{'0': 'T1'}}")
    ending = told.get("file_ending", ".nii.gz")
    if ending not in ENDINGS:
        raise DatasetError(f"{path}: file_ending '{ending}' is not read, only {' and '.join(ENDINGS)}")
    images, labels = (folder / name for name in SPLITS[split])
    if not images.is_dir():
        raise DatasetError(f"{images} is missing")
    found, named = (
        {path.name.removesuffix(ending) for path in place.glob(f"[!.]*{ending}")}
        for place in (images, labels)
    )
    names = sorted(named | {name[:-5] for name in found if re.fullmatch(r".+_\d{4}", name)})
    files = [[images / f"{name}_{channel:04d}{ending}" for channel in range(len(channels))] for name in names]
    refuse([
        f"{images / name}{ending} is none of the {len(channels)} modalities of a case, such as _0000{ending}"
        for name in sorted(found - {path.name.removesuffix(ending) for row in files for path in row})
    ])  # fmt: skip
    if not names:
        raise DatasetError(f"{images} has no file that ends in {ending}")
    if split == "train" and str(told.get("numTraining", len(names))) != str(len(names)):
        raise DatasetError(f"{path}: numTraining is {told['numTraining']}, {images} has {len(names)} cases")
    has_labels = split == "train" or labels.is_dir()
    cases = [
        Case(name, tuple(row), labels / f"{name}{ending}" if has_labels else None)
        for name, row in zip(names, files, strict=True)
    ]
    names_of = tuple(str(channels[number]) for number in numbers)
    return Cases(_named(cases, images), names_of, _classes(path, told.get("labels")))


def _classes(path: Path, labels: Any) -> Mapping[str, Any]:
    """Name -> number, or numbers of a region, of nnU-Net 2; of 1 it is the other way round."""
    try:
        if not labels:
            raise ValueError
        if all(str(name).isdigit() and isinstance(number, str) for name, number in labels.items()):
            return {name: int(number) for number, name in labels.items()}
        return {
            str(name): [int(one) for one in number] if isinstance(number, list) else int(number)
            for name, number in labels.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise DatasetError(f"{path} has no labels, such as {{'background': 0, 'tumour': 1}}") from None


def _table(path: Path) -> tuple[Case[Path], ...]:
    """A CSV file with a head line, or a JSON list of objects (of MONAI: under "training")."""
    if path.suffix.lower() == ".csv":
        rows = _parsed(path, _csv_rows)
    elif path.suffix.lower() == ".json":
        rows = _parsed(path, json.loads)
        rows = rows.get("training") if isinstance(rows, Mapping) else rows
    else:
        raise DatasetError(
            f"{path} is not converted; give an nnU-Net folder, a CSV or JSON table, NIfTI, .npy, .npz, HDF5 "
            "or Zarr"
        )
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise DatasetError(f"{path} has no rows; each has image, perhaps image2, .., and label")
    return _named([_row(path, number, row) for number, row in enumerate(rows, 1)], path)


def _csv_rows(text: str) -> list[dict[str, str]]:
    head, *lines = [*csv.reader(text.splitlines())] or [[]]
    twice = [name for name, count in Counter(head).items() if count > 1]
    if twice:
        raise ValueError(f"two of its columns are called '{twice[0]}'")
    return [dict(zip(head, line, strict=False)) for line in lines if line]


def _row(path: Path, number: int, row: Mapping[Any, Any]) -> Case[Path]:
    given = {str(key).strip(): held for key, held in row.items() if held not in (None, "")}
    images = given.pop("image", [])
    images = list(images) if isinstance(images, list) else [images]
    while f"image{len(images) + 1}" in given:
        images.append(given.pop(f"image{len(images) + 1}"))
    label, name = given.pop("label", None), given.pop("name", "")
    # Without a label, another column may be meant as one.
    odd = [key for key in given if key.lower().startswith("image") or label is None]
    if odd or not images:
        what = f", and not '{odd[0]}'" if odd else ""
        raise DatasetError(f"{path}, row {number}: its columns are image, image2, .., label and name{what}")
    files = [path.parent / Path(str(one).strip()).expanduser() for one in (*images, label) if one is not None]
    return Case(str(name).strip(), tuple(files[: len(images)]), None if label is None else files[-1])


def _named(cases: Sequence[Case[Path]], source: Path) -> tuple[Case[Path], ...]:
    """Give every case a folder's name of its own. Raises DatasetError where names or files do not fit."""
    stems = [re.sub(r"(?i)(\.nii)?(\.gz)?$", "", case.images[0].name) for case in cases]
    counts, made = Counter(stems), list[Case[Path]]()
    for case, stem in zip(cases, stems, strict=True):
        own = stem if counts[stem] == 1 else f"{case.images[0].parent.name}_{stem}"
        made.append(replace(case, name=case.name or own))
    often = Counter(case.name for case in made)
    most, labelled = max(len(case.images) for case in made), any(case.label for case in made)
    for case in made:
        reason = ""
        if often[case.name] > 1:
            reason = "is not the only one of that name; give others in a column name of a table"
        elif not re.fullmatch(NAME, case.name) or case.name in ("zarr.json", "LOCK"):
            reason = "cannot be the name of a folder; rename its file, or give a column name of a table"
        elif len(case.images) < most or (labelled and case.label is None):
            reason = "has fewer files than others; each needs the same"
        if reason:
            raise DatasetError(f"{source}: sample '{case.name}' {reason}")
    return tuple(made)


def refuse(problems: Sequence[str]) -> None:
    """Raise DatasetError that lists problems, at most a few of them, if there are any."""
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise DatasetError("; ".join(problems[:5]) + more)


class Samples(NamedTuple):
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
    kept = image if exact and image.kind in "iu" else np.dtype(np.float32)
    return Samples(tuple(found), kept, _label_type(labels, cases.numbers) if labels else None)


def _sample(case: Case[Path]) -> Case[Volume]:
    images = tuple(read_volume(path) for path in case.images)
    label = None if case.label is None else read_volume(case.label)
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
    for piece in read_slices(volume) if volume.slices else read_planes(volume):
        found = piece
        if (volume.slope, volume.intercept) != (1.0, 0.0):
            found = piece * np.float64(volume.slope) + volume.intercept
        with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is found below
            made = found.astype(dtype, copy=False)
        bad, why = found != made, f"labels are whole numbers that {made.dtype} holds"
        if made.dtype.kind == "f":
            bad, why = ~np.isfinite(made), "it is no finite number of float32: replace it"
        elif numbers is not None:
            classes = ", ".join(map(str, numbers[:20]))
            bad, why = ~np.isin(found, numbers), f"its classes are {classes}, by dataset.json"
        if bad.any():
            at = np.unravel_index(int(np.argmax(bad)), bad.shape)
            place = [int(at[2]), int(at[1]), start + int(at[0])]
            raise DatasetError(f"{volume.path} has {found[at]} at voxel {place}; {why}")
        yield made
        start += len(piece)
