"""``write``: items of PyTorch datasets and loaders, stacked or a group a sample."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from oocdl.data import write
from oocdl.errors import DatasetError, InputError, OocdlError
from oocdl.storage.dataset.dataset import open_dataset

IMAGES = np.random.default_rng(0).normal(size=(7, 2, 5, 6)).astype("f4")
LABELS = np.arange(7) % 3
TENSORS = TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(IMAGES, LABELS, strict=True))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(IMAGES)


@pytest.mark.parametrize(
    "dataset",
    [
        TENSORS,
        DataLoader(TENSORS, batch_size=3),
        DataLoader(TENSORS, batch_size=None),
        [{"image": image, "label": label} for image, label in zip(IMAGES, LABELS, strict=True)],
        DataLoader([{"image": x, "label": y} for x, y in zip(IMAGES, LABELS, strict=True)], batch_size=4),  # type: ignore[arg-type]
        (pair for pair in zip(IMAGES, LABELS, strict=True)),
        Stream(),
        SizedStream(),
        DataLoader(Stream(), batch_size=3),
        DataLoader(SizedStream(), batch_size=3),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_samples_of_one_shape_are_stacked(tmp_path: Path, dataset: Any) -> None:
    write(dataset, tmp_path / "out.zarr")
    arrays = open_dataset(tmp_path / "out.zarr", allow_missing_chunks=False).arrays
    assert (arrays["image"].read(((0, 7), (0, 2), (0, 5), (0, 6))) == IMAGES).all()
    assert arrays["image"].shape == IMAGES.shape and arrays["image"].chunks == (1, 2, 5, 6)
    assert arrays["label"].dtype == LABELS.dtype and (arrays["label"].read(((0, 7),)) == LABELS).all()


@pytest.mark.parametrize("odd", [0, 1, 6])
def test_samples_of_several_shapes_are_a_group_each(tmp_path: Path, odd: int) -> None:
    items = [{"x": IMAGES[row], "n": row} for row in range(7)]
    items[odd] = {"x": IMAGES[odd][:, :4], "n": odd}
    group = write(items, tmp_path / "out.zarr")
    told: Any = {**dict(group.attrs)["oocdl"]}  # type: ignore[dict-item]
    assert told.pop("kind") == "dataset"
    assert told["samples"] == sorted(group.group_keys()) and len(told["samples"]) == 7
    assert not list(group.array_keys())
    for item, name in zip(items, told["samples"], strict=True):
        sample = group[name]
        assert isinstance(sample, zarr.Group)
        assert np.array_equal(sample["x"][...], item["x"]) and sample["n"][...] == item["n"]  # type: ignore[index]
    numbers = open_dataset(group).arrays["n"]  # such as the class of each sample
    assert numbers.shape == (7, 1) and numbers.read(((0, 7), (0, 1))).ravel().tolist() == [*range(7)]


def test_names_choose_and_name_members(tmp_path: Path) -> None:
    group = write([(1.0, 2.0, 3.0)], tmp_path / "a.zarr", names=["a", "b", "c"])
    assert {name: array[0] for name, array in group.arrays()} == {"a": 1.0, "b": 2.0, "c": 3.0}
    group = write([{"a": 1, "path": "x.nii"}], tmp_path / "b.zarr", names=["a"])
    assert list(group.array_keys()) == ["a"]


def failing() -> Any:
    yield IMAGES[0]
    raise RuntimeError("disk on fire")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: [], DatasetError, "no items"),
        (lambda: [{"a": 1, "path": "x.nii"}], DatasetError, "'path' of item 0 is of type str"),
        (lambda: [np.zeros(2, np.longdouble)], DatasetError, "array 'image' is of float128, .*float64"),
        (lambda: [1.0, float("nan")], DatasetError, "'image' of item 1 has NaN"),
        (lambda: [(1, 2), (1, 2.5)], DatasetError, "item 1 has arrays image int64, label float64, those bef"),
        (lambda: [(1, 2), (1,)], DatasetError, "1 has arrays image int64, those before image int64, label"),
        (lambda: [(1, 2, 3)], OocdlError, "items have 3 members; pass as many names="),
        (lambda: [{"../a": 1}], InputError, "'../a', which cannot be the name of an array"),
        (lambda: [([[1, 2], [3]], 0)], DatasetError, "'image' of item 0 is no array"),
        (failing, RuntimeError, "on fire"),
    ],
)
def test_bad_items_are_refused_and_leave_nothing(
    tmp_path: Path, make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        write(make(), tmp_path / "out.zarr")
    assert os.listdir(tmp_path) == []


def test_members_of_a_batch_have_one_length(tmp_path: Path) -> None:
    class Loader:
        batch_sampler = True

        def __iter__(self) -> Any:
            yield {"image": np.zeros((4, 1, 3)), "label": np.zeros(4, "u1"), "spacing": np.ones(3)}

    with pytest.raises(DatasetError, match=r"different lengths \[3, 4\]"):
        write(Loader(), tmp_path / "a.zarr")
    group = write(Loader(), tmp_path / "b.zarr", names=["image", "label"])
    assert group["image"].shape == (4, 1, 3)  # type: ignore[union-attr]
    with pytest.raises(InputError, match="not arrays by name"):
        write({"image": np.zeros((2, 3))}, tmp_path / "c.zarr")
    masked = np.ma.masked_array(np.zeros((2, 3)), mask=True)
    with pytest.raises(DatasetError, match="fill it first"):
        write([masked], tmp_path / "d.zarr")
    with pytest.raises(DatasetError, match="filled"):
        open_dataset({"image": masked})
