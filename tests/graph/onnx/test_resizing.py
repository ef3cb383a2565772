"""Resize of ONNX files: values and gradients are PyTorch's, in the modes that it has, in every cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops.registry import RULES
from tests.kit import lowered
from tests.kit.one_node import OneNode, check

X = np.random.default_rng(0).normal(size=(2, 2, 9, 6))
MODES = {"linear": "bilinear", "cubic": "bicubic"}
AS_PYTORCH = {"antialias": 1, "exclude_outside": 1, "cubic_coeff_a": -0.5}
"""What PyTorch's exporter writes for ``antialias=True``."""


def interpolate(
    mode: str, size: tuple[int, int], align_corners: bool | None = None, antialias: bool = False
) -> lowered.Formula:
    return partial(
        F.interpolate, size=size, mode=MODES[mode], align_corners=align_corners, antialias=antialias
    )


def resize(mode: str, size: tuple[int, int], function: lowered.Formula, **attrs: object) -> OneNode:
    arrays = [X, None, None, np.array([2, 2, *size])]
    return OneNode("Resize", function, arrays, {"mode": mode, **attrs})


def cubic_without_outside(x: torch.Tensor) -> torch.Tensor:
    """Nine resized to twelve along axis 2, by those of the four neighbours that there are."""
    rows = []
    for at in ((np.arange(12) + 0.5) * 9 / 12) - 0.5:
        near = np.arange(int(np.floor(at)) - 1, int(np.floor(at)) + 3)
        near = near[(near >= 0) & (near < 9)]
        d = abs(near - at)
        close, far = 1.25 * d**3 - 2.25 * d**2 + 1, -0.75 * (d**3 - 5 * d**2 + 8 * d - 4)
        weights = torch.as_tensor(np.where(d <= 1, close, far))
        rows.append((x[:, :, near] * (weights / weights.sum())[:, None]).sum(2))
    return torch.stack(rows, 2)


CASES = [
    resize("cubic", (12, 4), interpolate("cubic", (12, 4))),
    resize(
        "cubic",
        (5, 7),
        interpolate("cubic", (5, 7), align_corners=True),
        coordinate_transformation_mode="align_corners",
    ),
    resize("cubic", (12, 6), cubic_without_outside, exclude_outside=1),
    *(
        resize(mode, size, interpolate(mode, size, antialias=True), **AS_PYTORCH)
        for mode in MODES
        for size in ((4, 5), (2, 8))
    ),
    OneNode(
        "Resize",
        interpolate("cubic", (5, 4)),
        [X, None, None, np.array([4, 5])],
        {"mode": "cubic", "axes": [3, -2]},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case}{case.arrays[3]}".replace(" ", ""))
def test_values_and_gradients_are_pytorchs_in_every_cut(case: OneNode, tmp_path: Path) -> None:
    check(case, tmp_path)


SLOW = pytest.mark.slow
PADDINGS = ("zeros", "border", "reflection")
SHAPES = {2: (2, 3, 4, 5), 3: (1, 2, 3, 2, 4)}
"""Number of axes -> shape of what is sampled at a grid of ``[3, *the last extents]``."""


SAMPLED = {
    (mode, axes, padding, corners)
    for mode, axes in (("linear", 2), ("nearest", 2), ("cubic", 2), ("linear", 3), ("nearest", 3))
    for padding in PADDINGS
    for corners in (0, 1)
}
QUICK = {
    ("linear", 2, "zeros", 0),
    ("linear", 2, "border", 1),
    ("nearest", 2, "reflection", 0),
    ("nearest", 3, "border", 1),
    ("cubic", 2, "zeros", 1),
    ("cubic", 2, "reflection", 0),
    ("linear", 3, "reflection", 1),
}
"""Those that run without ``--slow``."""


@pytest.mark.parametrize(
    ("mode", "axes", "padding", "corners"),
    [pytest.param(*case, marks=() if case in QUICK else SLOW) for case in sorted(SAMPLED)],
)
def test_a_grid_samples_as_pytorch_does(
    mode: str, axes: int, padding: str, corners: int, tmp_path: Path
) -> None:
    """The gradient of the grid is checked, too; much of it lies outside, some beyond a second border."""
    names, random = {"linear": "bilinear", "cubic": "bicubic"}, np.random.default_rng(0)
    batch, _, _, *rest = SHAPES[axes]
    grid = random.uniform(-1.5, 1.5, (batch, 3, *rest, axes)) * random.choice([1, 3], (batch, 3, *rest, axes))
    function = partial(
        F.grid_sample, mode=names.get(mode, mode), padding_mode=padding, align_corners=bool(corners)
    )
    arrays = [random.normal(size=SHAPES[axes]), grid]
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    check(OneNode("GridSample", function, arrays, attrs), tmp_path)


@pytest.mark.parametrize("padding", ["reflection", *(pytest.param(p, marks=SLOW) for p in PADDINGS[:2])])
@pytest.mark.parametrize("corners", [0, 1])
def test_a_grid_that_meets_elements_and_borders_has_pytorchs_gradient(
    padding: str, corners: int, tmp_path: Path
) -> None:
    """Places that are exact in binary: at elements, at both borders, a border beyond; an axis of one."""
    lines = np.array([-3.0, -1.5, -1.25, -1.0, -0.5, 0.0, 0.25, 0.75, 1.0, 1.25, 2.0, 3.0])
    grid = np.stack(np.meshgrid(lines, lines), -1)[None]
    function = partial(F.grid_sample, mode="bilinear", padding_mode=padding, align_corners=bool(corners))
    attrs = {"mode": "linear", "padding_mode": padding, "align_corners": corners}
    for extents in ((5, 9), (1, 5)):
        x = np.random.default_rng(0).normal(size=(1, 2, *extents))
        check(OneNode("GridSample", function, [x, grid], attrs), tmp_path)


def maps(
    folder: Path, size: Sequence[int], roi: Sequence[float] = (), **attrs: Any
) -> list[Mapping[str, Any]]:
    """What the maps are told that a Resize of ``[9, 6]`` becomes."""
    node = helper.make_node("Resize", ["x", "roi" if roi else "", "", "size"], ["y"], name="n", **attrs)
    known: Mapping[str, Any] = {"size": np.array(size), "roi": np.array(roi)}
    model = lowered.model_of([node], {"x": X[0, 0]}, ["y"], known, opset=19)
    onnx.save(model, folder / "resize.onnx")
    return [node.attrs for node in inspect_onnx(folder / "resize.onnx").bind(RULES).graph.nodes]


def test_options_that_change_nothing_leave_the_map_as_it_is(tmp_path: Path) -> None:
    plain = maps(tmp_path, [9, 8], mode="linear")
    assert len(plain) == 1
    assert maps(tmp_path, [9, 8], mode="linear", exclude_outside=1, cubic_coeff_a=-0.5) == plain


@pytest.mark.parametrize(
    ("attrs", "roi", "kind", "message"),
    [
        (
            {"mode": "nearest", "antialias": 1},
            (),
            UnsupportedError,
            "antialias .* in mode nearest",
        ),
        ({"mode": "area"}, (), UnsupportedError, "mode area"),
        ({"coordinate_transformation_mode": "corners"}, (), UnsupportedError, "coordinates corners"),
        ({"keep_aspect_ratio_policy": "larger"}, (), UnsupportedError, "keep_aspect_ratio_policy larger"),
        (
            {"coordinate_transformation_mode": "tf_crop_and_resize"},
            (0.0, 0.0, 1.0, 1.0),
            UnsupportedError,
            "coordinates tf_crop_and_resize",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    attrs: dict[str, Any], roi: tuple[float, ...], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        maps(tmp_path, [9, 8], roi, **attrs)


@pytest.mark.parametrize(
    ("attrs", "axes", "kind", "message"),
    [
        ({"mode": "fourth"}, 2, UnsupportedError, "GridSample with mode fourth"),
        ({"padding_mode": "wrap"}, 2, UnsupportedError, "GridSample with padding_mode wrap"),
        ({}, 3, ModelError, r"a grid \[2, 5, 4, 3\] does not fit an input of shape \[2, 2, 9, 6\]"),
    ],
)
def test_a_grid_that_is_not_known_is_refused_by_name(
    attrs: dict[str, Any], axes: int, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    inputs = {"x": X, "grid": np.zeros((2, 5, 4, axes))}
    node = helper.make_node("GridSample", list(inputs), ["y"], name="n", **attrs)
    onnx.save(lowered.model_of([node], inputs, ["y"], opset=20), tmp_path / "grid.onnx")
    with pytest.raises(kind, match=message):
        inspect_onnx(tmp_path / "grid.onnx").bind(RULES)
