"""Pooling of ONNX files: values and gradients are PyTorch's, in every cut; what is not clear is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from oocdl.errors import OocdlError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops import RULES
from tests.kit import lowered
from tests.kit.one_node import OneNode, check

RANDOM = np.random.default_rng(0)
LINE, PLANE = RANDOM.normal(size=(2, 2, 8)), RANDOM.normal(size=(2, 2, 7, 6))
VOLUME = RANDOM.normal(size=(1, 2, 4, 5, 6))
RECTIFIED = np.maximum(LINE, 0)
RECTIFIED[0, 1] = 0


def dilated(x: torch.Tensor) -> torch.Tensor:
    """Averages of two elements with one between them, padded by zeros that count."""
    weights = torch.full((1, 1, 2), 0.5, dtype=x.dtype)
    return F.conv1d(x.flatten(0, 1)[:, None], weights, padding=1, dilation=2).reshape(*x.shape[:2], -1)


def norm(power: int, kernel: int, stride: int) -> lowered.Formula:
    """Norms of windows: their gradient is 0 where they are."""
    return lambda x: torch.linalg.vector_norm(x.unfold(2, kernel, stride), power, dim=-1)


def window(kernel: list[int], stride: int = 1, pad: int = 0, **more: Any) -> dict[str, Any]:
    """Attributes of a pooling that is alike along all axes but for its kernel."""
    rank = len(kernel)
    return {"kernel_shape": kernel, "strides": [stride] * rank, "pads": [pad] * 2 * rank, **more}


CEIL = window([3, 2], 2, 1, ceil_mode=1)
CASES = [
    OneNode("AveragePool", lambda x: F.avg_pool1d(x, 2), [LINE], {"kernel_shape": [2], "strides": [2]}),
    OneNode("AveragePool", dilated, [LINE], window([2], pad=1, dilations=[2], count_include_pad=1)),
    *(
        OneNode(
            "AveragePool",
            lambda x, counts=counts: F.avg_pool2d(x, (3, 2), 2, 1, ceil_mode=True, count_include_pad=counts),
            [PLANE],
            {**CEIL, "count_include_pad": int(counts)},
        )
        for counts in (False, True)
    ),
    OneNode(
        "AveragePool",
        lambda x: (
            F.avg_pool2d(F.pad(x, (0, 1, 0, 1)), 2, 1) / F.avg_pool2d(F.pad(x * 0 + 1, (0, 1, 0, 1)), 2, 1)
        ),
        [PLANE],
        {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"},
    ),
    OneNode("AveragePool", lambda x: F.avg_pool3d(x, (2, 3, 2), 2), [VOLUME], window([2, 3, 2], 2)),
    # A third window would start in the padding at the end.
    OneNode(
        "AveragePool", lambda x: F.avg_pool1d(x, 2, 5, 1, True, False), [LINE], window([2], 5, 1, ceil_mode=1)
    ),
    OneNode("MaxPool", lambda x: F.max_pool1d(x, 2, 5, 1, 1, True), [LINE], window([2], 5, 1, ceil_mode=1)),
    OneNode("MaxPool", lambda x: F.max_pool2d(x, (3, 2), 2, 1, 1, True), [PLANE], CEIL),
    OneNode(
        "MaxPool", lambda x: F.max_pool3d(x, 2, 2, 0, 1, True), [VOLUME], window([2] * 3, 2, ceil_mode=1)
    ),
    OneNode("LpPool", lambda x: F.lp_pool2d(x, 2, 2, 2), [PLANE], window([2, 2], 2)),
    # PyTorch's own rounds up otherwise: it scales what is left of the last window to a whole one.
    OneNode("LpPool", lambda x: norm(2, 3, 2)(F.pad(x, (0, 1))), [LINE], window([3], 2, ceil_mode=1)),
    OneNode("LpPool", norm(1, 3, 2), [LINE], window([3], 2, p=1)),
    OneNode("LpPool", norm(2, 3, 2), [RECTIFIED], window([3], 2, p=2)),
    OneNode("LpPool", norm(3, 2, 3), [RECTIFIED], window([2], 3, p=3)),
    OneNode("GlobalLpPool", norm(3, 8, 1), [RECTIFIED], {"p": 3}),
    OneNode("GlobalLpPool", lambda x: torch.linalg.vector_norm(x, 2, (2, 3), keepdim=True), [PLANE]),
    OneNode("GlobalMaxPool", lambda x: F.adaptive_max_pool3d(x, 1), [VOLUME]),
    OneNode("GlobalAveragePool", lambda x: F.adaptive_avg_pool2d(x, 1), [PLANE]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_pytorchs_in_every_cut(case: OneNode, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.parametrize(
    ("op", "attrs", "why"),
    [
        ("AveragePool", {"kernel_shape": [3], "strides": [2], "auto_pad": "VALID", "ceil_mode": 1}, "VALID"),
        ("MaxPool", {"kernel_shape": [3], "strides": [2], "auto_pad": "VALID", "ceil_mode": 1}, "VALID"),
        ("AveragePool", {"kernel_shape": [2], "pads": [2, 0]}, "some windows would see nothing"),
        ("AveragePool", {"kernel_shape": [2, 2]}, "a kernel of 2 axes"),
        ("MaxPool", {"kernel_shape": [2], "strides": [3], "pads": [0, 2], "ceil_mode": 1}, "pads as large"),
        ("LpPool", {"kernel_shape": [9]}, "does not fit into spatial shape"),
        ("LpPool", {"kernel_shape": [2], "p": 0}, "with p 0"),
    ],
)
def test_windows_that_see_nothing_or_may_be_read_in_two_ways_are_refused(
    op: str, attrs: dict[str, Any], why: str, tmp_path: Path
) -> None:
    node = helper.make_node(op, ["x"], ["y"], name="pool", **attrs)
    path = tmp_path / "model.onnx"
    path.write_bytes(lowered.model_of([node], {"x": LINE}, ["y"], opset=22).SerializeToString())
    with pytest.raises(OocdlError, match=why):
        inspect_onnx(path).bind(RULES, {"x": LINE.shape})
