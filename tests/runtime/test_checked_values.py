"""What was read of a dataset is checked in the dtype it is used in, and named by array, value and place."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, helper

from oocdl.errors import DatasetError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.losses import MSE, CrossEntropy, Dice, DiceCE
from oocdl.ops.gather import Rows, rows_of
from oocdl.ops.loss_functions import Labels, labels_of
from oocdl.ops.registry import RULES
from oocdl.runtime.checked_values import check_finite, check_ids, check_labels
from oocdl.runtime.inputs import Feed
from oocdl.testing import array_reader
from tests.kit.nets import write_lookup

REGION = ((5, 6), (10, 12), (20, 23))


LABELS = [("u1", 2, None), ("i1", -1, -100), ("i8", -100, 255), ("u8", 2**64 - 1, -100), ("?", 1, None)]


@pytest.mark.parametrize(("dtype", "wrong", "ignored"), [*LABELS, ("u1", 3, 255)])
def test_labels_outside_the_classes_are_named(dtype: str, wrong: int, ignored: int | None) -> None:
    check_labels("array 'y'", Labels(2), np.array([[[0, 1, 1], [1, 0, 1]]], dtype), REGION)
    values = np.zeros((1, 2, 3), dtype)
    if ignored is not None and np.iinfo(dtype).min <= ignored <= np.iinfo(dtype).max:
        values[0, 0, 1] = ignored
    labels = Labels(1 if dtype == "?" else 2, ignored)
    check_labels("array 'y'", labels, values, REGION)
    values[0, 1, 2] = wrong
    text = "True" if dtype == "?" else str(wrong)
    said = rf"array 'y' has label {text} in sample 5 at \[11, 22\]; classes are 0 to"
    with pytest.raises(DatasetError, match=said):
        check_labels("array 'y'", labels, values, REGION)


IDS = [("i8", 4, True), ("u1", 4, True), ("i8", 5, False), ("u8", 2**64 - 1, False)]


@pytest.mark.parametrize("negative", [True, False])
@pytest.mark.parametrize(
    ("dtype", "id", "passes"), [*IDS, ("i4", -5, None), ("i8", -1, None), ("i2", -6, False)]
)
def test_ids_outside_a_table_are_named(dtype: str, id: int, passes: bool | None, negative: bool) -> None:
    """Ids from the end (None) are taken where that is what the operator says."""
    values = np.zeros((1, 2, 3), dtype)
    values[0, 1, 2] = id
    rows = Rows("w\x1b", 5, negative)
    if negative if passes is None else passes:
        check_ids("array 'x'", rows, values, REGION)
        return
    ends = ", or -5 to -1 from its end" if negative else ""
    message = rf"array 'x' has id {id} in sample 5 at \[11, 22\]; table 'w\\x1b' has rows 0 to 4{ends}; mend"
    with pytest.raises(DatasetError, match=message):
        check_ids("array 'x'", rows, values, REGION)


@pytest.mark.parametrize("opset", [10, 11])
@pytest.mark.parametrize(
    ("nodes", "known"),
    [
        ([helper.make_node("Identity", ["x"], ["i"])], True),
        ([helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("Transpose", ["f"], ["i"])], True),
        ([helper.make_node("Abs", ["x"], ["i"])], False),
    ],
)
def test_ids_of_a_graph(tmp_path: Path, nodes: list[NodeProto], known: bool, opset: int) -> None:
    model = inspect_onnx(write_lookup(tmp_path / "m.onnx", nodes, opset))
    graph = model.bind(RULES, {"x": (2, 4)}).graph
    assert rows_of(graph, opset >= 11) == ({"x": Rows("w5", 5, opset >= 11)} if known else {})


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_named(dtype: str, wrong: float) -> None:
    values = np.full((1, 2, 3), np.finfo(dtype).max, dtype)  # their sum overflows, and they are finite
    check_finite("array 'x'", values, REGION)
    values[0, 0, 0] = -values[0, 0, 0]
    check_finite("array 'x'", values, REGION)
    values[0, 1, 0] = wrong
    with pytest.raises(DatasetError, match=rf"array 'x' has the number {wrong} in sample 5 at \[11, 20\]; "):
        check_finite("array 'x'", values, REGION)


@pytest.mark.parametrize(
    ("found", "used", "scale", "message"),
    [
        ("f8", 1e300, None, "the number inf in sample 0; .*float32"),
        ("f4", 1e30, 1e10, "the number inf in sample 0"),
        ("i8", 2, 1e40, "the number inf in sample 0"),
        ("f2", 6e4, 1e30, None),
        ("u1", 255, None, None),
    ],
)
def test_numbers_are_checked_as_they_are_used(
    found: str, used: float, scale: float | None, message: Any
) -> None:
    values, made = np.array([used], found), np.empty(1, "f4")
    feed = Feed(array_reader("x", values), scale)
    refused: Any = nullcontext() if message is None else pytest.raises(DatasetError, match=message)
    with np.errstate(over="ignore"), refused:
        feed.put(values, made, ((0, 1),))


@pytest.mark.parametrize(
    ("dtype", "number"), [("f4", 0.5), ("f4", np.nan), ("f8", 1e19), ("f8", -np.inf), ("u8", 2**63)]
)
def test_inputs_that_are_no_whole_numbers_are_named(dtype: str, number: float) -> None:
    values, made = np.array([3, -0.0], "f8").astype(dtype), np.empty(2, "i8")
    feed = Feed(array_reader("x", values))
    feed.put(values, made, ((5, 7),))
    np.testing.assert_array_equal(made, [3, 0])
    values[1] = number
    with pytest.raises(
        DatasetError, match=r"the array has the number \S+ in sample 6; the model takes whole numbers"
    ):
        feed.put(values, made, ((5, 7),))


def test_labels_of_a_loss() -> None:
    assert labels_of(MSE(), (2, 3), (2, 3)) is None
    assert labels_of(CrossEntropy(ignore_index=7), (2, 3, 5), (2, 5)) == Labels(3, 7)
    assert labels_of(CrossEntropy(), (2, 5, 9), (2, 5)) == Labels(9, -100)
    assert labels_of(DiceCE(), (2, 3, 5), (2, 1, 5)) == Labels(3, -100)
    assert labels_of(DiceCE(), (2, 1, 5), (2, 5)) == Labels(2, -100)
    assert labels_of(Dice(ignore_index=9), (2, 3, 5), (2, 5)) == Labels(3, 9)
    assert labels_of(Dice(ignore_index=9), (2, 1, 5), (2, 5)) == Labels(2, 9)
    assert labels_of(Dice(), (2, 1, 5), (2, 1, 5)) == Labels(2)
    assert labels_of(Dice(), (2, 3, 5), (2, 5)) == Labels(3)
