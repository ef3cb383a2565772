"""Datasets of absurd sizes: refused before they are decoded, never listed by what they declare."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr

import oocdl
from oocdl.errors import BudgetError, DatasetError
from oocdl.storage.dataset.dataset import open_dataset
from tests.kit import nets
from tests.kit.bombs import little_memory
from tests.kit.settings import QUICK


@pytest.mark.parametrize("kind", ["blosc", "zstd", "lz4"])
@pytest.mark.parametrize("count", [1, 15, 17, 99])
def test_a_chunk_decodes_to_no_less_than_it_declares(tmp_path: Path, kind: str, count: int) -> None:
    """A decoder that is given a larger buffer would leave the rest as it is."""
    codec = numcodecs.get_codec({"id": kind})
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    group.create_array("x", data=np.ones((2, 16), "u1"), chunks=(1, 16), compressors=codec.get_config())
    (tmp_path / "a.zarr/x/1.0").write_bytes(codec.encode(np.arange(count, dtype="u1")))
    x = open_dataset(tmp_path / "a.zarr").arrays["x"]
    assert (x.read(((0, 1), (0, 16))) == 1).all()
    for stop in (5, 16):
        with pytest.raises(DatasetError, match="cannot be read at .*chunk 1.0: "):
            x.read(((0, 2), (0, stop)))


def test_a_file_that_is_larger_than_any_chunk_is_never_read(tmp_path: Path) -> None:
    path = nets.write_data(tmp_path / "data.zarr", nets.vectors())
    os.truncate(path / "x" / "c" / "3" / "0", 1 << 40)  # takes no room on the disk
    with little_memory(), pytest.raises(DatasetError, match=r"c/3/0 has 1,099,511,627,776 bytes, a chunk"):
        open_dataset(path, names=["x"])


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [([4, 4], [0, 1]), ([4, 4], [-1, 2]), ([4, 4], [2]), ([4], [2, 2]), ([-4, 4], [2, 2]),
     ([2**62, 2**62], [1, 1]), ([4, 4], ["a", 2]), ([4, 4], [1.5, 2]), ([4, 4], None),
     (None, [2, 2]), ([4, 4], [2**70, 2])],
)  # fmt: skip
def test_absurd_shapes_are_refused_in_one_line(
    tmp_path: Path, zarr_format: int, shape: Any, chunks: Any
) -> None:
    path = tmp_path / "a.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)  # type: ignore[arg-type]
    group.create_array("x", data=np.ones((4, 4), "f4"), chunks=(2, 2))
    file = path / "x" / (".zarray" if zarr_format == 2 else "zarr.json")
    document = json.loads(file.read_text())
    document["shape"] = shape
    if zarr_format == 2:
        document["chunks"] = chunks
    else:
        document["chunk_grid"]["configuration"]["chunk_shape"] = chunks
        (path / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group"}))
    file.write_text(json.dumps(document))
    if chunks == [2**70, 2]:  # a chunk may be larger than its array, but then takes more than any memory
        assert open_dataset(path).arrays["x"].chunk_bytes == 2**73
        return
    with pytest.raises(DatasetError) as caught:
        open_dataset(path, names=["x"])
    assert "\n" not in str(caught.value)


def test_chunks_are_listed_by_what_is_stored(tmp_path: Path) -> None:
    """Of 2^26 declared chunks three are there."""
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    x = group.create_array("x", shape=(2, 1 << 25), chunks=(1, 1), dtype="u1")
    for place in (5, 9, 1 << 24):
        x[1, place] = 7
    with little_memory():
        dataset = open_dataset(tmp_path / "a.zarr", names=["x"])
        found = dataset.arrays["x"].known
        assert dataset.notes() == [
            "x: 67,108,861 of 67,108,864 chunks are not stored and read as their fill value 0"
        ]
        assert found.numbers.tolist() == [(1 << 25) + 5, (1 << 25) + 9, (1 << 25) + (1 << 24)]
        assert dataset.arrays["x"].read(((1, 2), (4, 11))).tolist() == [[0, 7, 0, 0, 0, 7, 0]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return nets.write_mlp(tmp_path / "mlp.onnx")


def test_chunks_that_do_not_fit_the_budget_are_refused_before_one_is_read(
    tmp_path: Path, model: Path
) -> None:
    group = zarr.open_group(tmp_path / "data.zarr", mode="w")
    group.create_array("x", shape=(2, 6), chunks=(1 << 20, 1 << 9), dtype="f4", compressors=None)
    group.create_array("y", data=np.zeros(2, "u1") + 1)
    (tmp_path / "data.zarr/x/c/0").mkdir(parents=True)
    (tmp_path / "data.zarr/x/c/0/0").touch()
    os.truncate(tmp_path / "data.zarr/x/c/0/0", 1 << 31)
    with pytest.raises(BudgetError, match=r"array 'x' of .* has chunks of 2048 MiB.*memory='\d+MiB'"):
        oocdl.fit(model, tmp_path / "data.zarr", **{**QUICK, "memory": "3GiB"})


def test_more_samples_than_fit_the_budget_are_refused(tmp_path: Path, model: Path) -> None:
    group = zarr.open_group(tmp_path / "data.zarr", mode="w")
    group.create_array("x", shape=(1 << 34, 6), chunks=(1 << 14, 6), dtype="f4")
    group.create_array("y", shape=(1 << 34,), chunks=(1 << 20,), dtype="u1")
    with (
        little_memory(64 << 20),
        pytest.raises(BudgetError, match=r"17,179,869,184 samples, .*memory='\d+MiB'"),
    ):
        oocdl.plan(model, tmp_path / "data.zarr", **{**QUICK, "memory": "1GiB"})
