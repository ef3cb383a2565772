"""OME-Zarr (OME-NGFF 0.4, 0.5): images at full resolution and their labels, each time a sample."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr

from oocdl.errors import DatasetError

MILLIMETRES = {
    None: 1.0, "meter": 1e3, "centimeter": 10.0, "millimeter": 1.0, "micrometer": 1e-3, "nanometer": 1e-6,
}  # fmt: skip


class Sample(NamedTuple):
    """A sample: its attributes, its arrays by name, and the indices of first axes that it does not have."""

    attributes: Mapping[str, Any]
    arrays: Mapping[str, zarr.Array[Any]]
    at: Mapping[str, tuple[int, ...]]


def ome_folders(place: object) -> list[Path]:
    """Return the images, called ``*.ome.zarr``, in a folder that is no Zarr group itself."""
    if not isinstance(place, Path) or any((place / name).exists() for name in ("zarr.json", ".zgroup")):
        return []
    return sorted(path for path in place.glob("[!.]*") if path.name.lower().endswith(".ome.zarr"))


def ome_samples(group: zarr.Group, where: str) -> dict[str, Sample]:
    """Return an image's samples by name; none if it is no OME-Zarr. DatasetError for what is not read."""
    told = _told(group)
    if several := sorted({"plate", "well", "bioformats2raw.layout"} & told.keys()):
        raise DatasetError(
            f"{where} holds several images ({several[0]}): give one of them, such as {where}/0"
        )
    if "multiscales" not in told:
        return {}
    image, axes, attributes = _full(group, where)
    arrays, first = {"image": image}, {"image": "t" if "t" in axes else ""}
    for name in _told(group["labels"]).get("labels", ()) if "labels" in group else ():
        label, its, _ = _full(group[f"labels/{name}"], f"{where}/labels/{name}")
        wanted = {"t": 1} | dict(zip(axes, image.shape, strict=True)) | {"c": 1}
        if name == "image" or {"t": 1, "c": 1} | dict(zip(its, label.shape, strict=True)) != wanted:
            raise DatasetError(
                f"{where}/labels/{name} has {list(label.shape)} voxels along {its}, its image "
                f"{list(image.shape)} along {axes}: labels have its extents, one channel and "
                "another name than image"
            )
        arrays[name], first[name] = label, "".join(axis for axis in its if axis in "tc")
    times = image.shape[0] if "t" in axes else 1
    title = re.sub(r"(\.ome)?(\.zarr)?(\.zip)?$", "", Path(where).name) or "image"
    found = {}
    for time in range(times):
        at = {name: tuple(time if axis == "t" else 0 for axis in its) for name, its in first.items()}
        found[title if times == 1 else f"{title}_t{time:03d}"] = Sample(attributes, arrays, at)
    return found


def _told(group: Any) -> Mapping[str, Any]:
    """Return what the attributes of a group say: since version 0.5 below "ome"."""
    told = dict(group.attrs)
    return told["ome"] if isinstance(told.get("ome"), Mapping) else told


def _full(group: Any, where: str) -> tuple[zarr.Array[Any], str, dict[str, Any]]:
    """Return the array of the full resolution, its axes, and the attributes of a sample: where it is."""
    scales = _told(group)["multiscales"]
    if len(scales) != 1:
        raise DatasetError(f"{where} has {len(scales)} multiscales; write each to a group of its own")
    (scale,) = scales
    full, told = scale["datasets"][0], scale.get("axes") or ()
    axes = "".join(str(axis["name"]) if isinstance(axis, Mapping) else f"[{axis}]" for axis in told)
    array = group[full["path"]]
    if not re.fullmatch("t?c?z?yx", axes) or array.ndim != len(axes):
        raise DatasetError(f"{where} has the axes '{axes}'; read are t, c, z, y and x, in this order")
    steps, starts = np.ones(len(axes)), np.zeros(len(axes))
    for one in (*full.get("coordinateTransformations", ()), *scale.get("coordinateTransformations", ())):
        factor, shift = one.get("scale", 1.0), one.get("translation", 0.0)
        steps, starts = steps * factor, starts * factor + shift
    spatial = [place for place, axis in enumerate(axes) if axis in "zyx"]
    units = [told[place].get("unit") for place in spatial]
    if not set(units) <= MILLIMETRES.keys() or not (np.isfinite(steps) & (steps > 0)).all():
        raise DatasetError(f"{where} has the scale {steps.tolist()} in {units}, which is no spacing in space")
    to_mm = np.array([MILLIMETRES[unit] for unit in units])
    spacing, origin = steps[spatial] * to_mm, starts[spatial] * to_mm
    affine, rows = np.eye(4), range(len(spatial))
    affine[rows, rows], affine[rows, 3] = spacing[::-1], origin[::-1]
    return array, axes, {"spacing": spacing.tolist(), "affine": affine.tolist()}
