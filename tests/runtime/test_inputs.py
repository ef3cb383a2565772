"""What units read that is no chunk."""

from __future__ import annotations

import tracemalloc
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr

import oocdl
from oocdl.graph.ir.graph import Array, Role
from oocdl.graph.ir.index import Region
from oocdl.planning.machine import BATCH_CACHE_BYTES
from oocdl.planning.passes import PassInfo
from oocdl.runtime.inputs import Feed, Kept, Sources, own_regions, uniform
from oocdl.storage.dataset.dataset import DataArray, open_dataset
from tests.kit.nets import write_data, write_mlp
from tests.kit.runs import losses_of


def test_random_numbers_do_not_depend_on_the_region() -> None:
    shape = (3, 5, 7)
    full = uniform(1, 2, "mask", shape, ((0, 3), (0, 5), (0, 7)), "float32")
    part = uniform(1, 2, "mask", shape, ((1, 3), (2, 4), (3, 7)), "float32")
    assert np.array_equal(full[1:3, 2:4, 3:7], part)


def test_random_numbers_are_uniform_and_differ_by_seed_step_and_name() -> None:
    region = ((0, 100), (0, 1000))
    full = uniform(0, 0, "a", (100, 1000), region, "float64")
    assert full.min() >= 0 and full.max() < 1
    histogram = np.histogram(full, bins=20, range=(0, 1))[0]
    # Chi square with 19 degrees of freedom: above 43.8 once in a thousand.
    assert ((histogram - 5000) ** 2 / 5000).sum() < 43.8
    assert abs(np.corrcoef(full.ravel()[:-1], full.ravel()[1:])[0, 1]) < 0.02
    for other in (uniform(1, 0, "a", (100, 1000), region, "float64"),
                  uniform(0, 1, "a", (100, 1000), region, "float64"),
                  uniform(0, 0, "b", (100, 1000), region, "float64")):  # fmt: skip
        assert abs(np.corrcoef(full.ravel(), other.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("factors", [((2, 3), (4,)), ((6,), ()), ((2, 3, 2), (5,)), ((), (3, 2))])
def test_own_boxes_make_up_the_stored_region(factors: tuple[tuple[int, ...], ...]) -> None:
    stored = tuple(f for parts in factors for f in parts)
    own = tuple(int(np.prod(parts, dtype=int)) for parts in factors)
    data = np.arange(np.prod(own)).reshape(own)
    view = data.reshape(stored)
    choices = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in stored]
    for region in product(*choices):
        out = np.full(tuple(b - a for a, b in region), -1)
        for box, place in own_regions(factors, region):
            piece = data[tuple(slice(a, b) for a, b in box)]
            out[place] = piece.reshape(out[place].shape)
        assert np.array_equal(out, view[tuple(slice(a, b) for a, b in region)])


def test_what_was_read_is_kept_for_its_pass_and_within_its_bytes() -> None:
    kept, info, other = Kept(), PassInfo(0, 1, (2,)), PassInfo(1, 1, (2,))
    arrays = [np.full(BATCH_CACHE_BYTES // 3, number, np.uint8) for number in range(4)]
    for number, array in enumerate(arrays):
        kept.add((f"x{number}", ()), info, array)
    found = [kept.get((f"x{number}", ()), info) for number in range(4)]
    assert [array is not None for array in found] == [False, True, True, True]
    assert all(np.array_equal(array, arrays[n]) for n, array in enumerate(found) if array is not None)
    arrays[3][...] = 7
    last = kept.get(("x3", ()), info)
    assert last is not None and last[0] == 3  # a copy: the array is the unit's own
    assert kept.get(("x3", ()), other) is None
    kept.add(("large", ()), info, np.zeros(BATCH_CACHE_BYTES, np.uint8))
    assert kept.get(("large", ()), info) is None
    small = Kept(24)  # of a batch that is no larger
    small.add(("ids", ()), info, np.arange(3))
    assert small.get(("ids", ()), info) is not None
    small.add(("labels", ()), info, np.arange(1))
    assert small.get(("ids", ()), info) is None and small.get(("labels", ()), info) is not None


def test_samples_of_one_chunk_are_read_at_once_and_stay_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, random = write_mlp(tmp_path / "mlp.onnx", (3, 4, 2)), np.random.default_rng(0)
    x, y = random.standard_normal((12, 3)).astype("f4"), random.integers(0, 2, 12)
    read, regions, losses = DataArray.read, [], []

    def noted(array: DataArray, region: Region) -> Array:
        regions.append((array.name, region))
        return read(array, region)

    monkeypatch.setattr(DataArray, "read", noted)
    for count in (1, 4):
        data = write_data(tmp_path / f"{count}.zarr", {"x": x, "y": y}, chunks=count)
        regions.clear()
        run = oocdl.fit(
            model, data, workdir=tmp_path / f"{count}.run", inputs={"x": "x"},
            loss="cross_entropy", steps=2, batch_size=12, seed=3, progress=False,
        )  # fmt: skip
        losses.append(losses_of(run))
    assert losses[0] == losses[1]
    assert regions.count(("x", ((4, 8), (0, 3)))) == 2


@pytest.mark.parametrize("values", [1, 99])
@pytest.mark.parametrize(("dtype", "scale"), [("u1", 1 / 255), ("u1", None), ("i2", 0.5), ("f4", 2.0)])
def test_reading_takes_no_more_copies_of_a_chunk_than_are_counted(
    dtype: str, scale: float | None, values: int, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).integers(1, values + 1, (1, 128, 128, 128)).astype(dtype)
    zarr.open_group(tmp_path, mode="w").create_array("x", data=x, chunks=x.shape)
    array = open_dataset(tmp_path).arrays["x"]
    graph: Any = SimpleNamespace(values={"x": SimpleNamespace(role=Role.INPUT, shape=x.shape)})
    factored: Any = SimpleNamespace(graph=graph, factors={"x": tuple((extent,) for extent in x.shape)})
    sources, out = Sources(factored, {"x": Feed(array, scale)}), np.empty(x.shape, np.float32)
    tracemalloc.start()
    try:
        sources.read("x", tuple((0, extent) for extent in x.shape), PassInfo(0, 1, (0,)), out)
        taken_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(out, x.astype("f4") * np.float32(1 if scale is None else scale))
    assert array.chunk_bytes < taken_bytes <= array.reading_bytes + (1 << 16)
    assert (array.reading_bytes < 2.1 * array.chunk_bytes) == (values == 1)
