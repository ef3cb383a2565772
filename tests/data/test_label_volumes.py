"""What attributes of stacked arrays say of their samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from oocdl.data.label_volumes import sample_facts
from oocdl.errors import DatasetError
from oocdl.storage.dataset.dataset import open_dataset

EYE = np.eye(4).tolist()


def facts_of(folder: Path, attributes: dict[str, Any]) -> Any:
    group = zarr.open_group(folder / "data.zarr", mode="w")
    group.create_array("image", data=np.zeros((3, 1, 4, 4, 4), "f4"))
    group.attrs.update(attributes)
    return sample_facts(open_dataset(folder / "data.zarr"), 3)


def test_attributes_name_and_place_samples(tmp_path: Path) -> None:
    numbered = [(f"sample_{row}", {"affine": EYE}) for row in range(3)]
    assert facts_of(tmp_path, {}) == numbered
    assert facts_of(tmp_path, {"samples": 3}) == numbered  # somebody's count
    affines = [np.diag([row, 1, 1, 1.0]).tolist() for row in range(1, 4)]
    found = facts_of(tmp_path, {"samples": ["a", "b", "c"], "affine": affines, "spacing": [3, 2, 1]})
    assert [name for name, _ in found] == ["a", "b", "c"]
    assert [one["affine"] for _, one in found] == affines
    assert [one["spacing"] for _, one in found] == [[3.0, 2.0, 1.0]] * 3
    spacings = [[row, 1.0, 1.0] for row in range(1, 4)]
    assert [one["spacing"] for _, one in facts_of(tmp_path, {"spacing": spacings})] == spacings


@pytest.mark.parametrize(
    "attributes",
    [
        {"samples": ["a", "b"]},
        {"samples": ["a", "b", "b"]},
        {"samples": ["a", "b", "../c"]},
        {"samples": ["a", "b", ["c"]]},
        {"affine": "none"},
        {"affine": [1.0, 2.0, 3.0]},
        {"affine": [EYE] * 2},
        {"spacing": 1.0},
        {"spacing": None},
        {"spacing": "1 mm"},
        {"spacing": {"z": 1}},
        {"spacing": [[1, 1, 1]] * 2},
        {"spacing": [[1, 1, 1], [1, 1], [1, 1, 1]]},
    ],
    ids=str,
)
def test_an_attribute_that_says_something_else_is_named(tmp_path: Path, attributes: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match=f"its attribute '{next(iter(attributes))}' .*delete it"):
        facts_of(tmp_path, attributes)
