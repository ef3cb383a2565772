"""Datasets that a URL names are read where they are."""

from __future__ import annotations

from pathlib import Path

import zarr

import oocdl
from tests.kit import nets
from tests.kit.settings import QUICK


def test_a_url_is_the_dataset_of_a_folder(tmp_path: Path) -> None:
    """fsspec's memory stands for an object store; with moto's S3 server the losses were equal, too, once."""
    model, url = nets.write_mlp(tmp_path / "mlp.onnx"), "memory://oocdl-remote.zarr"
    group = zarr.open_group(url, mode="w")
    for name, array in nets.vectors().items():
        group.create_array(name, data=array, chunks=(1, *array.shape[1:]))
    folder = nets.write_data(tmp_path / "data.zarr", nets.vectors())
    runs = [
        oocdl.fit(model, data, workdir=tmp_path / name, **QUICK, batch_size=2, steps=3)
        for name, data in (("far", url), ("near", folder))
    ]
    assert nets.files_of(runs[0]) == nets.files_of(runs[1])
    assert runs[0].evaluate(url) == runs[1].evaluate(folder)
    assert oocdl.fit(model, url, workdir=tmp_path / "far", **QUICK, batch_size=2, steps=5).steps == 5
