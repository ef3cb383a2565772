"""Chunks of HDF5 that are not what they declare: the library would fill memory, or make up numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import pytest

import oocdl
from oocdl.errors import BudgetError, DatasetError
from oocdl.storage.dataset.dataset import DataArray
from tests.kit import nets
from tests.kit.bombs import HUGE_BYTES, little_memory
from tests.kit.settings import QUICK
from tests.kit.stored import opened

X = np.arange(4 * 3000, dtype="f4").reshape(4, 3000) // 7
CHUNK = (1, 1500)
CHUNK_BYTES = 6000


def written(path: Path, **options: Any) -> DataArray:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, chunks=CHUNK, **options)
    return opened(path)


def put(path: Path, data: bytes, skipped: int = 0) -> None:
    """Replace the chunk in the third row, second column."""
    with h5py.File(path, "r+") as file:
        file["x"].id.write_direct_chunk((2, 1500), data, skipped)


def lzf_zeros(nbytes: int) -> bytes:
    """LZF data: a zero, and references to it of 264 bytes each."""
    return b"\0\0" + b"\xe0\xff\0" * (nbytes // 264)


WRITTEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "gzip": {"compression": "gzip"},
    "lzf": {"compression": "lzf"},
    "shuffled": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "shuffled-lzf": {"compression": "lzf", "shuffle": True, "fletcher32": True},
    "checksum": {"fletcher32": True},
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_the_library_writes_is_read(tmp_path: Path, kind: str) -> None:
    x = written(tmp_path / "a.h5", **WRITTEN[kind])
    for _ in range(2):  # chunks are looked at once
        assert np.array_equal(x.read(((0, 4), (0, 3000))), X)
        assert np.array_equal(x.read(((1, 3), (1400, 1600))), X[1:3, 1400:1600])


def test_chunks_at_the_end_and_chunks_that_are_not_compressed_are_read(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (5, 70), "u1")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=noise, chunks=(2, 32), compression="lzf")  # which cannot: it is skipped
    assert np.array_equal(opened(tmp_path / "a.h5").read(((0, 5), (0, 70))), noise)


def filtered(path: Path, *filters: str) -> h5py.Dataset:
    """Make an array whose chunks go through these filters, in this order; its file stays open."""
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk(CHUNK)
    for name in filters:
        getattr(settings, f"set_{name}")()
    file = h5py.File(path, "w")
    space = h5py.h5s.create_simple(X.shape)
    h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, settings)
    return file["x"]


def test_checksums_before_compression_are_read(tmp_path: Path) -> None:
    """As netCDF writes them."""
    x = filtered(tmp_path / "a.h5", "fletcher32", "deflate")
    x[...] = X
    x.file.close()
    assert np.array_equal(opened(tmp_path / "a.h5").read(((0, 4), (0, 3000))), X)


BAD: dict[str, tuple[str, Callable[[], bytes], int, str]] = {
    # kind -> how the array is written, the chunk, filters it skips, message
    "bomb": ("gzip", lambda: zlib.compress(bytes(HUGE_BYTES), 9)[:6000], 0, "would decode to more"),
    "little-bomb": ("gzip", lambda: zlib.compress(bytes(CHUNK_BYTES + 1)), 0, "6,001 bytes, not the 6,000"),
    "short": ("gzip", lambda: zlib.compress(bytes(CHUNK_BYTES - 1)), 0, "5,999 bytes, not the 6,000"),
    "cut": ("gzip", lambda: zlib.compress(X.tobytes())[:99], 0, "ends too early"),
    "no-deflate": ("gzip", lambda: b"\0" * 99, 0, "Error -3"),
    "shuffled-bomb": (
        "shuffled", lambda: zlib.compress(bytes(HUGE_BYTES), 9)[:6000] + bytes(4), 0, "would decode to"),
    "skipped-and-short": ("gzip", lambda: bytes(7), 1, "decodes to 7 bytes"),
    "lzf-bomb": ("lzf", lambda: lzf_zeros(500_000), 0, "lzf would decode to"),
    "lzf-short": ("lzf", lambda: lzf_zeros(5000), 0, "decodes to 4,7.. bytes, not"),
    "lzf-cut": ("lzf", lambda: b"\x1f\0", 0, "lzf data ends too early"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_chunk_decodes_to_just_what_it_declares(tmp_path: Path, kind: str) -> None:
    how, make, skipped, message = BAD[kind]
    path = tmp_path / "a.h5"
    written(path, **WRITTEN[how])
    put(path, make(), skipped)
    x = opened(path)
    assert np.array_equal(x.read(((0, 2), (0, 3000))), X[:2])
    for _ in range(2):
        with little_memory(), pytest.raises(DatasetError, match=rf"chunk 2/1: .*{message}") as caught:
            x.read(((2, 3), (1499, 1501)))
        assert "\n" not in str(caught.value)


def test_a_chunk_that_is_larger_than_it_can_be_is_not_read(tmp_path: Path) -> None:
    written(tmp_path / "a.h5", compression="gzip")
    put(tmp_path / "a.h5", zlib.compress(bytes(HUGE_BYTES), 1))
    with pytest.raises(
        DatasetError, match=r"2/1 has [0-9,]+ bytes, a chunk of its shape \[1, 1500\] takes at most 72,"
    ):
        opened(tmp_path / "a.h5")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaleoffset": 2}, "uses HDF5 filter 6; allowed are deflate, shuffle, fletcher32, lzf"),
        ({"compression": "szip"}, "uses HDF5 filter 4"),
    ],
)
def test_filters_without_a_bound_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        written(tmp_path / "a.h5", **options)


@pytest.mark.parametrize(
    ("filters", "message"),
    [(("deflate", "deflate"), "compresses twice"), (("deflate", "shuffle"), "shuffles what is compressed")],
)
def test_odd_orders_of_filters_are_refused(tmp_path: Path, filters: tuple[str, ...], message: str) -> None:
    filtered(tmp_path / "a.h5", *filters).file.close()
    with pytest.raises(DatasetError, match=message):
        opened(tmp_path / "a.h5")


def test_absurd_chunks_are_refused_before_one_is_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        options: dict[str, Any] = {"chunks": (1, 1 << 29), "maxshape": (None, None), "compression": "gzip"}
        file.create_dataset("x", shape=(2, 6), dtype="f4", **options)
        file["x"].id.write_direct_chunk((0, 0), zlib.compress(bytes(HUGE_BYTES), 1))
        file.create_dataset("y", data=np.ones(2, "u1"))
    model = nets.write_mlp(tmp_path / "mlp.onnx")
    with little_memory(64 << 20), pytest.raises(BudgetError, match=r"array 'x' of .* has chunks of 2048 MiB"):
        oocdl.plan(model, tmp_path / "data.h5", **{**QUICK, "memory": "3GiB"})


def test_chunks_are_listed_by_what_is_stored(tmp_path: Path) -> None:
    """Of 2^50 declared chunks one is there."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = file.create_dataset("x", shape=(2, 1 << 49), chunks=(1, 1), dtype="u1", compression="gzip")
        x[1, 9] = 7
    with little_memory():
        array = opened(tmp_path / "a.h5")
        assert array.known.missing == (1 << 50) - 1
        assert array.read(((1, 2), (8, 11))).tolist() == [[0, 7, 0]]
