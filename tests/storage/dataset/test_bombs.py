"""Datasets made to fill memory: refused before they are decoded, never listed by what they declare."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable
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
from tests.kit.bombs import HUGE_BYTES, little_memory
from tests.kit.settings import QUICK
from tests.kit.stored import chunk_files, opened, write_x


def zstd_without_a_size() -> bytes:
    """A frame of blocks that each repeat one byte 128 KiB times."""
    count, size = HUGE_BYTES >> 17, 1 << 17
    blocks = [(size << 3 | 1 << 1 | int(n == count - 1)).to_bytes(3, "little") + b"\0" for n in range(count)]
    return (0xFD2FB528).to_bytes(4, "little") + b"\x00\x38" + b"".join(blocks)


def zeros(codec: Any) -> bytes:
    return bytes(codec.encode(np.zeros(HUGE_BYTES, "u1")))


ZSTD = [{"name": "zstd", "configuration": {"level": 1}}]
GZIP = [{"name": "gzip", "configuration": {"level": 1}}]
BOMBS: dict[str, tuple[Callable[[], bytes], int, Any]] = {
    "v2-blosc": (lambda: zeros(numcodecs.Blosc("zstd")), 2, {"id": "blosc", "cname": "zstd", "clevel": 1}),
    "v2-zstd": (lambda: zeros(numcodecs.Zstd()), 2, {"id": "zstd", "level": 1}),
    "v2-lz4": (lambda: zeros(numcodecs.LZ4()), 2, {"id": "lz4", "acceleration": 1}),
    "v2-zlib": (lambda: zlib.compress(bytes(HUGE_BYTES), 1), 2, {"id": "zlib", "level": 1}),
    "v2-gzip": (lambda: gzip.compress(bytes(HUGE_BYTES), 1), 2, {"id": "gzip", "level": 1}),
    "v3-blosc": (lambda: zeros(numcodecs.Blosc("lz4")), 3, [{"name": "blosc", "configuration": {
        "cname": "lz4", "clevel": 1, "shuffle": "noshuffle", "typesize": 4, "blocksize": 0}}]),
    "v3-zstd": (lambda: zeros(numcodecs.Zstd()), 3, ZSTD),
    "v3-zstd-blocks": (zstd_without_a_size, 3, ZSTD),
    "v3-gzip": (lambda: gzip.compress(bytes(HUGE_BYTES), 1), 3, GZIP),
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMBS)
def test_a_chunk_decodes_to_no_more_than_it_declares(tmp_path: Path, kind: str) -> None:
    make, zarr_format, codecs = BOMBS[kind]
    data = np.arange(64, dtype="f4").reshape(4, 16)
    write_x(tmp_path, data, zarr_format, chunks=(1, 16), compressors=codecs)
    assert np.array_equal(opened(tmp_path).read(((0, 4), (0, 16))), data)
    chunk = chunk_files(tmp_path)[2]
    chunk.write_bytes(make())
    assert chunk.stat().st_size < 2 << 20
    if chunk.stat().st_size > 65536:
        with pytest.raises(
            DatasetError, match=r"2.0 has .* bytes, a chunk of its shape \[1, 16\] takes at most"
        ):
            opened(tmp_path)
        chunk.write_bytes(make()[:65000])  # what is cut off would not be decoded
    x = opened(tmp_path)
    with (
        little_memory(),
        pytest.raises(DatasetError, match="chunk .*2.0: .*(would decode to more|too small)"),
    ):
        x.read(((2, 3), (0, 16)))


def test_two_compressors_are_refused(tmp_path: Path) -> None:
    """What is between them has no bound."""
    write_x(tmp_path, shape=(4, 16), dtype="f4", compressors=GZIP * 2)
    with pytest.raises(DatasetError, match="'x' of .* uses two compressors, which is refused"):
        opened(tmp_path)


@pytest.mark.parametrize("kind", ["blosc", "zstd", "lz4"])
@pytest.mark.parametrize("count", [1, 15, 17, 99])
def test_a_chunk_decodes_to_no_less_than_it_declares(tmp_path: Path, kind: str, count: int) -> None:
    """A decoder that is given a larger buffer would leave the rest as it is."""
    codec = numcodecs.get_codec({"id": kind})
    write_x(tmp_path, np.ones((2, 16), "u1"), 2, chunks=(1, 16), compressors=codec.get_config())
    (tmp_path / "x/1.0").write_bytes(codec.encode(np.arange(count, dtype="u1")))
    x = opened(tmp_path)
    assert (x.read(((0, 1), (0, 16))) == 1).all()
    for stop in (5, 16):
        with pytest.raises(DatasetError, match="cannot be read at .*chunk 1.0: "):
            x.read(((0, 2), (0, stop)))


def test_a_chunk_inside_a_shard_is_bounded_too(tmp_path: Path) -> None:
    whole: dict[str, Any] = {"chunks": (1, HUGE_BYTES), "shards": (1, HUGE_BYTES), "compressors": GZIP}
    write_x(tmp_path, np.zeros((1, HUGE_BYTES), "u1"), **whole, config={"write_empty_chunks": True})
    document = json.loads((tmp_path / "x/zarr.json").read_text())
    document["shape"] = document["chunk_grid"]["configuration"]["chunk_shape"] = [1, 1 << 20]
    document["codecs"][0]["configuration"]["chunk_shape"] = [1, 1 << 20]
    (tmp_path / "x/zarr.json").write_text(json.dumps(document))
    x = opened(tmp_path)
    for stop in (5, 1 << 20):
        with little_memory(), pytest.raises(DatasetError, match="gzip would decode to more"):
            x.read(((0, 1), (0, stop)))


def test_a_file_that_is_larger_than_any_chunk_is_never_read(tmp_path: Path) -> None:
    path = nets.write_data(tmp_path / "data.zarr", nets.vectors())
    os.truncate(path / "x" / "c" / "3" / "0", 1 << 40)  # takes no room on the disk
    with little_memory(), pytest.raises(DatasetError, match=r"c/3/0 has 1,099,511,627,776 bytes, a chunk"):
        opened(path)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [([4, 4], [0, 1]), ([4, 4], [-1, 2]), ([4, 4], [2]), ([4], [2, 2]), ([-4, 4], [2, 2]),
     ([2**62, 2**62], [1, 1]), ([4, 4], ["a", 2]), ([4, 4], [1.5, 2]), ([4, 4], None),
     (None, [2, 2]), ([4, 4], [2**70, 2])],
)  # fmt: skip
def test_absurd_shapes_are_refused(tmp_path: Path, zarr_format: int, shape: Any, chunks: Any) -> None:
    write_x(tmp_path, np.ones((4, 4), "f4"), zarr_format, chunks=(2, 2))
    file = tmp_path / "x" / (".zarray" if zarr_format == 2 else "zarr.json")
    document = json.loads(file.read_text())
    document["shape"] = shape
    if zarr_format == 2:
        document["chunks"] = chunks
    else:
        document["chunk_grid"]["configuration"]["chunk_shape"] = chunks
    file.write_text(json.dumps(document))
    if chunks == [2**70, 2]:  # a chunk may be larger than its array, but then takes more than any memory
        assert opened(tmp_path).chunk_bytes == 2**73
        return
    with pytest.raises(DatasetError) as caught:
        opened(tmp_path)
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


def test_chunks_that_do_not_fit_the_budget_are_refused(tmp_path: Path, model: Path) -> None:
    group = zarr.open_group(tmp_path / "data.zarr", mode="w")
    group.create_array("x", shape=(2, 6), chunks=(1 << 19, 1 << 9), dtype="f4", compressors=None)
    group.create_array("y", data=np.zeros(2, "u1") + 1)
    (tmp_path / "data.zarr/x/c/0").mkdir(parents=True)
    (tmp_path / "data.zarr/x/c/0/0").touch()
    os.truncate(tmp_path / "data.zarr/x/c/0/0", 1 << 30)
    with pytest.raises(BudgetError, match=r"array 'x' of .* has chunks of 1024 MiB.*memory='\d+MiB'"):
        oocdl.fit(model, tmp_path / "data.zarr", **{**QUICK, "memory": "2GiB"})


def test_more_samples_than_fit_the_budget_are_refused(tmp_path: Path, model: Path) -> None:
    group = zarr.open_group(tmp_path / "data.zarr", mode="w")
    group.create_array("x", shape=(1 << 34, 6), chunks=(1 << 14, 6), dtype="f4")
    group.create_array("y", shape=(1 << 34,), chunks=(1 << 20,), dtype="u1")
    with (
        little_memory(64 << 20),
        pytest.raises(BudgetError, match=r"17,179,869,184 samples, .*memory='\d+MiB'"),
    ):
        oocdl.plan(model, tmp_path / "data.zarr", **{**QUICK, "memory": "1GiB"})
