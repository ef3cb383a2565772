"""A file whose batch is fixed, with another one: equal sample by sample, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import oocdl
from oocdl.errors import ModelWarning, UnsupportedError
from tests.kit import nets
from tests.kit.runs import losses_of
from tests.kit.settings import EXACT


def write(path: Path, batch: int, samples: str | int, mean: bool = False) -> Path:
    """Six numbers as three pairs, whose larger ones a matrix makes four classes of; the batch is in a shape.

    ``mean``: less the mean of the batch.
    """
    w = np.random.default_rng(0).normal(size=(3, 4))
    nodes = [
        helper.make_node("Constant", [], ["pairs"], "pairs", value_ints=[batch, 3, 2]),
        helper.make_node("Reshape", ["x", "pairs"], ["p"], "pair"),
        helper.make_node("ReduceMax", ["p"], ["m"], "larger", axes=[2], keepdims=0),
    ]
    if mean:
        nodes += [
            helper.make_node("ReduceMean", ["m"], ["mean"], "mean", axes=[0]),
            helper.make_node("Sub", ["m", "mean"], ["less"], "less"),
        ]
    nodes.append(helper.make_node("MatMul", ["less" if mean else "m", "w"], ["y"], "dense"))
    return nets.save(path, nodes, {"w": w}, [samples, 6], {"y": [samples, 4]})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    random = np.random.default_rng(1)
    x = random.normal(size=(6, 6)).astype("f4")
    return nets.write_data(tmp_path / "data.zarr", {"x": x, "y": random.normal(size=(6, 4)).astype("f4")})


def losses(model: Path, data: Path, **options: Any) -> list[float]:
    options = {**EXACT, "loss": "mse", "steps": 3, "batch_size": 3, **options}
    return losses_of(oocdl.fit(model, data, workdir=model.with_suffix(".run"), **options))


def test_what_a_file_does_with_each_sample_it_does_with_more(tmp_path: Path, data: Path) -> None:
    fixed, free = write(tmp_path / "fixed.onnx", 2, 2), write(tmp_path / "free.onnx", -1, "n")
    assert losses(fixed, data) == losses(free, data)


def test_what_a_file_does_with_its_batch_is_refused(tmp_path: Path, data: Path) -> None:
    model = write(tmp_path / "fixed.onnx", 2, 2, mean=True)
    with pytest.raises(UnsupportedError, match="was exported for a batch of 2, and does something else"):
        losses(model, data)
    assert len(losses(model, data, batch_size=2)) == 3


def pooled(path: Path, batch: int, dims: list[str | int]) -> Path:
    """Four classes of the mean of each of two channels over space, by shapes that hold the batch."""
    nodes = [
        helper.make_node("Constant", [], ["row"], "row", value_ints=[batch, 2, -1]),
        helper.make_node("Reshape", ["x", "row"], ["r"], "rows"),
        helper.make_node("ReduceMean", ["r"], ["m"], "mean", axes=[2]),
        helper.make_node("Constant", [], ["flat"], "flat", value_ints=[batch, 2]),
        helper.make_node("Reshape", ["m", "flat"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "w"], ["y"], "dense"),
    ]
    w = np.random.default_rng(0).normal(size=(2, 4))
    return nets.save(path, nodes, {"w": w}, dims, {"y": [dims[0], 4]})


def test_batch_and_sizes_may_be_others_at_once(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    x, y = random.normal(size=(6, 2, 5, 4)).astype("f4"), random.normal(size=(6, 4)).astype("f4")
    data = nets.write_data(tmp_path / "data.zarr", {"x": x, "y": y})
    fixed = pooled(tmp_path / "fixed.onnx", 1, [1, 2, 3, 2])
    free = pooled(tmp_path / "free.onnx", 0, ["n", 2, "h", "w"])
    with pytest.warns(ModelWarning, match=r"fixes input 'x' to \[1, 2, 3, 2\]"):
        found = losses(fixed, data)
    assert found == losses(free, data)
