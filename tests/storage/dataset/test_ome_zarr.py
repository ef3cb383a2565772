"""OME-Zarr, as others write it, is read as it is: samples as in a group a sample, and the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
import zarr
from numcodecs import Blosc

import oocdl
from oocdl.cli import app
from oocdl.errors import DatasetError
from oocdl.storage.dataset.dataset import open_dataset
from tests.kit import settings

RANDOM = np.random.default_rng(0)
UNITS = {"t": "second", "c": None, "z": "micrometer", "y": "micrometer", "x": "micrometer"}
KINDS = {"t": "time", "c": "channel"}


def multiscale(group: zarr.Group, data: np.ndarray, axes: str, version: str, **more: Any) -> None:
    """Write an image of two levels by the specification, with blosc, and chunks in folders."""
    told = [{"name": axis, "type": KINDS.get(axis, "space")} for axis in axes]
    told = [one | ({"unit": UNITS[one["name"]]} if UNITS[one["name"]] else {}) for one in told]
    steps = {"z": 2000.0, "y": 500.0, "x": 250.0}
    levels = []
    for level in range(2):
        half = tuple(slice(None, None, 1 + level if axis in "zyx" else 1) for axis in axes)
        chunks = tuple(5 if axis in "zyx" else 1 for axis in axes)
        keys = {"name": "v2" if version == "0.4" else "default", "separator": "/"}
        coding: Any = Blosc() if version == "0.4" else zarr.codecs.BloscCodec()
        shards = tuple(2 * n if n > 1 else 1 for n in chunks) if version == "0.5, shards" else None
        group.create_array(
            str(level),
            data=data[half],
            chunks=chunks,
            shards=shards,
            compressors=coding,
            chunk_key_encoding=keys,
        )
        scale = [steps.get(axis, 1.0) * (1 + level if axis in "zyx" else 1) for axis in axes]
        moved = {"type": "translation", "translation": [1000.0 if axis == "z" else 0.0 for axis in axes]}
        levels.append(
            {"path": str(level), "coordinateTransformations": [{"type": "scale", "scale": scale}, moved]}
        )
    facts = {"multiscales": [{"axes": told, "datasets": levels, "version": version}], **more}
    group.attrs.update(facts if version == "0.4" else {"ome": {"version": version, **facts}})


def write(path: Path, image: np.ndarray, axes: str, version: str, **labels: tuple[np.ndarray, str]) -> Path:
    group = zarr.open_group(path, mode="w", zarr_format=2 if version == "0.4" else 3)
    multiscale(group, image, axes, version)
    if labels:
        above = group.create_group("labels")
        facts = {"labels": list(labels)}
        above.attrs.update(facts if version == "0.4" else {"ome": facts})
        for name, (label, its) in labels.items():
            multiscale(above.create_group(name), label, its, version, **{"image-label": {}})
    return path


def drawn(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    image = RANDOM.normal(size=shape).astype("f4")
    return image, (image[..., 0, :, :, :] > 0).astype("u1")


def written(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two images of two sizes, one of each version; the same as a group a sample in ``plain.zarr``."""
    samples = [drawn(2, 9, 8, 10), drawn(2, 7, 6, 11)]
    (image, label), (other, its) = samples
    write(folder / "images" / "a.ome.zarr", image[None], "tczyx", "0.4", nuclei=(label[None], "czyx"))
    write(folder / "images" / "b.ome.zarr", other, "czyx", "0.5", nuclei=(its, "zyx"), more=(its, "zyx"))
    plain = zarr.open_group(folder / "plain.zarr", mode="w")
    for name, (x, y) in zip("ab", samples, strict=True):
        plain.create_array(f"{name}/image", data=x)
        plain.create_array(f"{name}/nuclei", data=y)
    plain.attrs["oocdl"] = {"samples": ["a", "b"]}
    return samples


def test_a_run_on_ome_zarr_has_the_bits_of_one_on_a_group_a_sample(tmp_path: Path) -> None:
    samples = written(tmp_path)
    net = oocdl.from_torch(
        torch.nn.Conv3d(2, 2, 3, padding=1).double(), torch.zeros(1, 2, 8, 8, 8).double(), tmp_path / "n.onnx"
    )
    options: dict[str, Any] = {**settings.EXACT, "targets": {"output": "nuclei"}, "epochs": 2}
    runs = [
        oocdl.fit(net, tmp_path / data, workdir=tmp_path / f"{data}.run", **options)
        for data in ("plain.zarr", "images")
    ]
    for name, weight in runs[0].weights.items():
        np.testing.assert_array_equal(runs[1].weights[name], weight)
    assert oocdl.fit(net, tmp_path / "images", workdir=tmp_path / "images.run", **options).steps == 4
    shown = runs[1].predict(tmp_path / "images", tmp_path / "o.zarr", argmax=True, nifti=tmp_path / "nifti")
    truth = runs[0].predict(tmp_path / "plain.zarr", tmp_path / "p.zarr", argmax=True)
    for name, (x, _) in zip("ab", samples, strict=True):
        np.testing.assert_array_equal(shown[f"{name}/output"], truth[f"{name}/output"])
        volume = nibabel.load(tmp_path / "nifti" / f"{name}.nii.gz")  # type: ignore[attr-defined]
        assert volume.shape == x.shape[:0:-1]
        np.testing.assert_allclose(
            volume.affine, [[0.25, 0, 0, 0], [0, 0.5, 0, 0], [0, 0, 2, 1], [0, 0, 0, 1]]
        )
    group = runs[1].predict(tmp_path / "images" / "b.ome.zarr", tmp_path / "b.zarr", argmax=True)
    np.testing.assert_array_equal(group["b/output"], truth["b/output"])


@pytest.mark.parametrize("version", ["0.4", "0.5", "0.5, shards"])
def test_each_time_is_a_sample_and_a_damaged_chunk_is_named(version: str, tmp_path: Path) -> None:
    image, label = drawn(12, 2, 6, 7, 11)
    path = write(tmp_path / "cells.zarr", image, "tczyx", version, seg=(label[:, None], "tczyx"))
    data = open_dataset(path)
    assert {name: array.shape for name, array in data.arrays.items()} == {
        "image": (12, 2, 6, 7, 11), "seg": (12, 6, 7, 11),
    }  # fmt: skip
    region = ((3, 11), (0, 2), (2, 6), (0, 7), (4, 9))
    np.testing.assert_array_equal(data.arrays["image"].read(region), image[3:11, :, 2:6, :, 4:9])
    np.testing.assert_array_equal(data.arrays["seg"].read(((7, 9), *region[2:])), label[7:9, 2:6, :, 4:9])
    key = "7/1/0/0/1" if version == "0.5, shards" else "7/1/0/1/2"
    chunk = path / "0" / (key if version == "0.4" else f"c/{key}")
    content = chunk.read_bytes()
    chunk.write_bytes(content + b"x")
    with pytest.raises(DatasetError, match=f"{key} was changed"):
        data.arrays["image"].read(((7, 8), (0, 2), (0, 6), (0, 7), (0, 11)))
    chunk.unlink()
    again = open_dataset(path).arrays["image"]
    assert again.known.missing == 1 and not again.read(((7, 8), (1, 2), (0, 5), (5, 7), (10, 11))).any()
    with pytest.raises(DatasetError, match=r"1 of \d+ chunks are missing, first 7/"):
        _ = open_dataset(path, allow_missing_chunks=False, names=["image"])


def bad(path: Path, what: str) -> str:
    """Write an image that is not read; returns what the refusal says."""
    image, label = drawn(1, 6, 7, 8)
    labels = {"seg": (label[:3] if what == "extents" else label, "zyx")}
    if what == "channels":
        labels["seg"] = (np.repeat(label[None], 2, 0), "czyx")
    axes = "cxyz" if what == "axes" else "czyx"
    group = zarr.open_group(write(path, image, axes, "0.5", **labels), mode="r+")
    told: Any = dict(group.attrs["ome"])  # type: ignore[call-overload]
    match what:
        case "several":
            told["multiscales"] *= 2
        case "old":
            told["multiscales"][0]["axes"] = list("czyx")
        case "unit":
            told["multiscales"][0]["axes"][2]["unit"] = "parsec"
        case "plate":
            told = {"plate": {"wells": []}}
        case "lost":
            told["multiscales"][0]["datasets"][0]["path"] = "full"
    group.attrs["ome"] = told
    return {
        "several": "has 2 multiscales", "unit": "parsec.*no spacing", "plate": r"several images \(plate\)",
        "extents": "labels/seg has .3, 7, 8. voxels along zyx", "channels": "labels/seg has .2, 6",
        "old": r"has the axes '\[c\]\[z\]", "axes": "has the axes 'cxyz'", "lost": "full",
    }[what]  # fmt: skip


@pytest.mark.parametrize("what", ["several", "old", "unit", "plate", "extents", "channels", "axes", "lost"])
def test_what_is_not_read_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    text = bad(tmp_path / "x.ome.zarr", what)
    with pytest.raises(DatasetError, match=text) as caught:
        open_dataset(tmp_path / "x.ome.zarr")
    assert "\n" not in str(caught.value)


def test_it_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path)
    for source in (tmp_path / "images", tmp_path / "images" / "b.ome.zarr"):
        assert app.run_command(["convert", str(source), str(tmp_path / "out.zarr")], debug=False) != 0
        assert "fit and predict read it as it is" in capsys.readouterr().err
        assert not (tmp_path / "out.zarr").exists()
    assert app.run_command(["info", str(tmp_path / "images")], debug=True) == 0
    assert "nuclei" in capsys.readouterr().out
    (tmp_path / "images" / "c.ome.zarr").mkdir()
    with pytest.raises(DatasetError, match="c.ome.zarr"):
        open_dataset(tmp_path / "images")
