"""Small NIfTI files and folders of nnU-Net."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
AFFINE = np.array([[0.9, 0.1, 0, -5], [-0.1, 1.1, 0, 7], [0, 0, 2.5, 1], [0, 0, 0, 1]])
CLASSES = {"background": 0, "core": 1, "rim": 2}


def volume(shape: tuple[int, ...] = (7, 6, 5), seed: int = 0, dtype: str = "int16") -> Array:
    """Voxels [x, y, z]."""
    return np.random.default_rng(seed).integers(0, 200, shape).astype(dtype)


def labels(shape: tuple[int, ...] = (7, 6, 5), seed: int = 0, dtype: str = "uint8") -> Array:
    return np.random.default_rng(seed + 100).integers(0, 3, shape).astype(dtype)


def save(path: Path, voxels: Array, affine: Array = AFFINE, **header: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nib.Nifti1Image(voxels, affine)
    for name, value in header.items():
        image.header[name] = value
    image.to_filename(path)
    return path


def nnunet(folder: Path, shapes: Mapping[str, tuple[int, int, int]], channels: int = 2, **told: Any) -> Path:
    """A raw folder with cases of these shapes."""
    for seed, (name, shape) in enumerate(shapes.items()):
        for channel in range(channels):
            save(folder / f"imagesTr/{name}_{channel:04d}.nii.gz", volume(shape, 10 * seed + channel))
        save(folder / f"labelsTr/{name}.nii.gz", labels(shape, seed))
    facts = {
        "channel_names": {str(channel): f"T{channel}" for channel in range(channels)},
        "labels": CLASSES,
        "numTraining": len(shapes),
        "file_ending": ".nii.gz",
        **told,
    }
    (folder / "dataset.json").write_text(json.dumps(facts))
    return folder
