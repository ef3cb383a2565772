"""Chunks are read as the library reads them; the last one that was decoded is kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from numcodecs import Shuffle
from zarr.codecs import BytesCodec, Crc32cCodec, TransposeCodec
from zarr.storage import MemoryStore, WrapperStore

from oocdl.errors import DatasetError
from oocdl.graph.ir.index import as_slices
from oocdl.storage.dataset.dataset import DataArray, open_dataset
from oocdl.storage.dataset.decoding import Decoder
from tests.kit.stored import chunk_files, opened, write_x

SHAPE, CHUNKS = (5, 4, 7), (2, 4, 3)
X = np.random.default_rng(0).integers(0, 100, SHAPE)
KINDS: dict[str, dict[str, Any]] = {
    "v3": {},
    "v3-raw": {"compressors": None},
    "v3-blosc": {"compressors": {"name": "blosc", "configuration": {}}},
    "v3-gzip": {"compressors": {"name": "gzip", "configuration": {"level": 1}}},
    "v3-big-endian": {"serializer": BytesCodec(endian="big")},
    "v3-bytes": {"dtype": "i1"},
    "v3-bools": {"dtype": "bool"},
    "v3-dots": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "v2": {"zarr_format": 2},
    "v2-raw": {"zarr_format": 2, "compressors": None},
    "v2-fortran": {"zarr_format": 2, "order": "F"},
    "v2-big-endian": {"zarr_format": 2, "dtype": ">f8"},
    "v2-zlib": {"zarr_format": 2, "compressors": {"id": "zlib", "level": 1}},
    "v2-lz4": {"zarr_format": 2, "compressors": {"id": "lz4", "acceleration": 1}},
    "v2-blosc": {"zarr_format": 2, "compressors": {"id": "blosc", "cname": "lz4", "clevel": 1}},
    "v3-sharded": {"chunks": (1, 2, 3), "shards": (2, 4, 3)},
    "v3-sharded-start": {"chunks": (1, 2, 3), "shards": {"shape": (2, 4, 3), "index_location": "start"}},
    "v3-transposed": {"filters": [TransposeCodec(order=(2, 0, 1))]},
    "v3-checksums": {"compressors": [Crc32cCodec()]},
    "v2-shuffled": {"zarr_format": 2, "filters": [Shuffle(4)]},
}


def written(path: Path, **options: Any) -> DataArray:
    """An array of ``X`` without the last chunk of all."""
    x = X.astype(options.pop("dtype", "f4"))
    write_x(path, x, **{"chunks": CHUNKS, "fill_value": 1, "config": {"write_empty_chunks": True}, **options})
    chunk_files(path)[-1].unlink()
    return opened(path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_box_is_as_the_library_reads_it(tmp_path: Path, kind: str) -> None:
    x = written(tmp_path / "a.zarr", **dict(KINDS[kind]))
    whole = np.asarray(zarr.open_group(tmp_path / "a.zarr", mode="r")["x"])
    assert (whole[4:, :, 6:] == 1).all() and (whole != 1).any()
    ranges = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in SHAPE]
    for box in list(product(*ranges))[:: 11 if kind == "v3" else 67]:
        found = x.read(box)
        assert found.dtype == x.dtype and found.dtype.isnative
        assert np.array_equal(found, whole[as_slices(box)])


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """All chunks that were decoded."""
    found: list[weakref.ref[Any]] = []
    decode: Callable[..., Any] = Decoder.__call__

    def noted(self: Decoder, stored: bytes) -> Any:
        assert [one for one in found if one() is not None] == []  # the one before has left
        made = decode(self, stored)
        found.append(weakref.ref(made.base))
        return made

    monkeypatch.setattr(Decoder, "__call__", noted)
    return found


def test_pieces_of_a_chunk_are_decoded_once_and_one_chunk_is_kept(tmp_path: Path, decoded: list[Any]) -> None:
    group = zarr.open_group(tmp_path, mode="w")
    for name in "xy":
        group.create_array(name, data=X.astype("f4"), chunks=CHUNKS)
    data = open_dataset(tmp_path)
    for turn in (1, 2):
        for name in "xy":
            for row in range(4):
                found = data.arrays[name].read(((0, 1), (row, row + 1), (0, 2)))
                assert np.array_equal(found, X[:1, row : row + 1, :2])
                del found
        assert len(decoded) == 2 * turn
    assert [one() is not None for one in decoded] == [False, False, False, True]
    assert np.array_equal(data.arrays["x"].read(((0, 5), (0, 4), (0, 7))), X)
    assert decoded[-1]() is None


def test_what_is_read_of_the_kept_chunk_cannot_be_written_to(tmp_path: Path) -> None:
    x = opened(write_x(tmp_path, X, chunks=CHUNKS))
    with pytest.raises(ValueError, match="read-only"):
        x.read(((0, 1), (0, 1), (0, 1)))[...] = 0


def test_a_chunk_of_another_size_is_refused(tmp_path: Path) -> None:
    file = chunk_files(write_x(tmp_path, X.astype("f4"), chunks=CHUNKS, compressors=None))[0]
    for content in (file.read_bytes()[:-4], file.read_bytes() + bytes(4), file.read_bytes()[:-1]):
        file.write_bytes(content)
        with pytest.raises(DatasetError, match="cannot be read at .*restore or delete the damaged chunk"):
            opened(tmp_path).read(((0, 1), (0, 1), (0, 1)))


@pytest.mark.parametrize("damage", ["flipped", "cut", "outside", "huge", "empty"])
def test_a_damaged_index_of_a_shard_is_never_the_fill_value(tmp_path: Path, damage: str) -> None:
    how = {"chunks": (1, 2, 3), "shards": CHUNKS, "compressors": None}
    file = chunk_files(write_x(tmp_path, X.astype("f4"), **how))[0]
    content, size = bytearray(file.read_bytes()), 2 * 2 * 16  # of the index, before its checksum
    if damage == "flipped":
        content[-size] ^= 1
    elif damage == "cut":
        del content[size:]
    else:
        place, number = {"outside": (0, 1 << 40), "huge": (8, 1 << 40), "empty": (8, 0)}[damage]
        begin = len(content) - size - 4 + place
        content[begin : begin + 8] = number.to_bytes(8, "little")
        content[-4:] = google_crc32c.value(bytes(content[-size - 4 : -4])).to_bytes(4, "little")
    file.write_bytes(content)
    x = opened(tmp_path)
    for stop in (1, 4):
        with pytest.raises(DatasetError, match="cannot be read at .*chunk c/0/0/0: "):
            x.read(((0, 1), (0, stop), (0, 1)))


class Flaky(WrapperStore[MemoryStore]):
    """A store that once says that it has no such key."""

    has_failed = False

    async def get(self, key: str, *options: Any, **more: Any) -> Any:
        if key == "x/c/0/0/0" and not self.has_failed:
            self.has_failed = True
            return None
        return await super().get(key, *options, **more)


def test_a_chunk_that_is_away_for_one_read_is_never_the_fill_value() -> None:
    store = MemoryStore()
    zarr.open_group(store, mode="w").create_array("x", data=X, chunks=CHUNKS)
    x = opened(Flaky(store))
    with pytest.raises(DatasetError, match="chunk c/0/0/0 is gone"):
        x.read(((0, 1), (0, 1), (0, 1)))
    assert (x.read(((0, 1), (0, 1), (0, 1))) == X[0, 0, 0]).all()
