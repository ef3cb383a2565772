"""Which files belong together: the cases of an nnU-Net folder, of a table, of a folder of NIfTI, of one file.

Nothing of a volume is read here but whether its file is there.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oocdl.data.nifti import ENDINGS
from oocdl.errors import DatasetError, InputError
from oocdl.storage.files import read_text

SPLITS = {"train": ("imagesTr", "labelsTr"), "test": ("imagesTs", "labelsTs")}
"""Folders of nnU-Net's raw format."""

NAME = r"[A-Za-z0-9][A-Za-z0-9_. +-]{0,199}"
"""Names of samples, which are names of files and folders."""


@dataclass(frozen=True)
class Case:
    """The files of one sample."""

    name: str
    images: tuple[Path, ...]
    """One for each channel."""
    label: Path | None = None


@dataclass(frozen=True)
class Cases:
    """All samples of a source, and what it says of them."""

    cases: tuple[Case, ...]
    channels: tuple[str, ...] = ()
    """Names of the channels; empty if nothing says them."""
    classes: Mapping[str, Any] | None = None
    """Name -> number of each class, or numbers of a region; None if nothing says them."""

    @property
    def numbers(self) -> tuple[int, ...] | None:
        """The numbers that labels may have, ascending; None if nothing says them."""
        if self.classes is None:
            return None
        found = (held if isinstance(held, list) else [held] for held in self.classes.values())
        return tuple(sorted({int(number) for held in found for number in held}))


def find_cases(source: Path, split: str = "train") -> Cases:
    """Find the cases of a source.

    ``split`` is "train" or "test", of an nnU-Net folder. Raises DatasetError, in one line that names the
    file, where something is missing; InputError for a split that the source does not have.
    """
    if split not in SPLITS:
        raise InputError(f"split is one of {', '.join(SPLITS)}, got '{split}'")
    if (source / "dataset.json").is_file():
        return _nnunet(source, split)
    if split != "train":
        raise InputError(f"{source} has no dataset.json, so no split '{split}'; leave it out")
    if source.is_dir():
        files = sorted(path for path in source.iterdir() if path.name.endswith(ENDINGS))
        if not files:
            raise DatasetError(f"{source} has no dataset.json and no NIfTI file (.nii or .nii.gz)")
        return _named([(None, (path,), None) for path in files], source)
    if source.name.endswith(ENDINGS):
        return _named([(None, (source,), None)], source)
    return _table(source)


def read_json(path: Path) -> Any:
    """Return what a JSON file holds. Raises DatasetError."""
    return _parsed(path, json.loads)


def _parsed(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(read_text(path))
    except (OSError, ValueError, csv.Error) as error:
        raise DatasetError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _nnunet(folder: Path, split: str) -> Cases:
    path = folder / "dataset.json"
    told = read_json(path)
    channels = told.get("channel_names", told.get("modality")) if isinstance(told, Mapping) else None
    if not isinstance(channels, Mapping) or not channels:
        raise DatasetError(f"{path} has no channel_names (or modality), such as {{'0': 'T1'}}")
    ending = told.get("file_ending", ".nii.gz")
    if ending not in ENDINGS:
        raise DatasetError(f"{path}: file_ending '{ending}' is not read, only {' and '.join(ENDINGS)}")
    images, labels = (folder / name for name in SPLITS[split])
    if not images.is_dir():
        raise DatasetError(f"{images} is missing")
    is_labelled = split == "train" or labels.is_dir()
    found = sorted(name.name.removesuffix(ending) for name in images.glob(f"*{ending}"))
    wrong = [name for name in found if not re.fullmatch(r".+_\d{4}", name)]
    if wrong:
        raise DatasetError(f"{images / wrong[0]}{ending} has no number of a modality, such as _0000{ending}")
    names = sorted({name[:-5] for name in found})
    expected = {f"{name}_{channel:04d}" for name in names for channel in range(len(channels))}
    missing = [images / f"{name}{ending}" for name in sorted(expected - set(found))]
    if is_labelled:
        missing += [one for name in names if not (one := labels / f"{name}{ending}").is_file()]
        there = {one.name.removesuffix(ending) for one in labels.glob(f"*{ending}")}
        missing += [images / f"{name}_0000{ending}" for name in sorted(there - set(names))]
    extra = sorted(set(found) - expected)
    refuse([f"{one} is missing" for one in missing])
    refuse([f"{images / one}{ending} is of none of the {len(channels)} channels" for one in extra])
    if split == "train" and told.get("numTraining", len(names)) != len(names):
        raise DatasetError(f"{path}: numTraining is {told['numTraining']}, {images} has {len(names)} cases")
    cases = [
        (name, tuple(images / f"{name}_{channel:04d}{ending}" for channel in range(len(channels))), label)
        for name in names
        for label in [labels / f"{name}{ending}" if is_labelled else None]
    ]
    named = _named(cases, images)
    return Cases(named.cases, tuple(map(str, channels.values())), _classes(path, told.get("labels")))


def _classes(path: Path, labels: Any) -> Mapping[str, Any]:
    """Name -> number, or numbers of a region, of nnU-Net 2; of 1 it is the other way round."""
    try:
        if all(str(name).isdigit() and isinstance(number, str) for name, number in labels.items()):
            return {name: int(number) for number, name in labels.items()}
        return {
            str(name): [int(one) for one in number] if isinstance(number, list) else int(number)
            for name, number in labels.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise DatasetError(f"{path} has no labels, such as {{'background': 0, 'tumour': 1}}") from None


def _table(path: Path) -> Cases:
    """A CSV file with a head line, or a JSON list of objects (of MONAI: under "training")."""
    if path.suffix.lower() == ".csv":
        rows = _parsed(path, lambda text: list(csv.DictReader(text.splitlines())))
    elif path.suffix.lower() == ".json":
        rows = read_json(path)
        rows = rows.get("training") if isinstance(rows, Mapping) else rows
    else:
        raise DatasetError(
            f"{path} is not converted; give an nnU-Net folder, a CSV or JSON table, NIfTI, .npy, .npz, HDF5 "
            "or Zarr"
        )
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise DatasetError(f"{path} has no rows; each has image, perhaps image2, .., and label")
    return _named([_row(path, number, row) for number, row in enumerate(rows, 1)], path)


def _row(path: Path, number: int, row: Mapping[Any, Any]) -> tuple[str | None, tuple[Path, ...], Path | None]:
    given = {str(key).strip(): held for key, held in row.items() if held not in (None, "")}
    images = given.pop("image", None)
    images = list(images) if isinstance(images, list) else [] if images is None else [images]
    while f"image{len(images) + 1}" in given:
        images.append(given.pop(f"image{len(images) + 1}"))
    label, name = given.pop("label", None), given.pop("name", None)
    if not images or [key for key in given if key.startswith("image")]:
        raise DatasetError(
            f"{path}, row {number}: its columns are image, image2, .. without a gap, and label"
        )
    files = [
        path.parent / Path(str(one).strip()).expanduser() for one in [*images, *([label] if label else [])]
    ]
    return (
        None if name is None else str(name).strip(),
        tuple(files[: len(images)]),
        files[len(images)] if label else None,
    )


def _named(found: Sequence[tuple[str | None, tuple[Path, ...], Path | None]], source: Path) -> Cases:
    """Give every case a name that is a folder's: its own, else its file's, else with that of its folder."""
    stems = [images[0].name.removesuffix(".gz").removesuffix(".nii") for _, images, _ in found]
    counts = Counter(stems)
    names = [
        name or (stem if counts[stem] == 1 else f"{images[0].parent.name}_{stem}")
        for (name, images, _), stem in zip(found, stems, strict=True)
    ]
    refuse([f"{one} is missing" for _, images, _ in found for one in images if not one.exists()])
    refuse([f"{label} is missing" for *_, label in found if label is not None and not label.exists()])
    for name, count in Counter(names).items():
        if count > 1 or not re.fullmatch(NAME, name) or name == "zarr.json":
            reason = "is not the only one" if count > 1 else "cannot be the name of a folder"
            raise DatasetError(
                f"{source}: sample '{name}' {reason}; give another in a column name of a table"
            )
    lengths = {len(images) for _, images, _ in found}
    if len(lengths) > 1 or len({label is None for *_, label in found}) > 1:
        first = next(
            name for name, (_, images, label) in zip(names, found, strict=True)
            if len(images) < max(lengths) or label is None
        )  # fmt: skip
        raise DatasetError(f"{source}: sample '{first}' has fewer files than others; each needs the same")
    return Cases(
        tuple(Case(name, images, label) for name, (_, images, label) in zip(names, found, strict=True))
    )


def refuse(problems: Sequence[str]) -> None:
    """Raise DatasetError that lists problems, at most a few of them, if there are any."""
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise DatasetError("; ".join(problems[:5]) + more)
