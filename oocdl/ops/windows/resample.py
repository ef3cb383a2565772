"""Resize or pool along one axis: ``y = R x`` with a banded matrix ``R`` of ``[size, extent]``.

A Resize of several axes is a chain of these (all of ONNX's modes are separable), and so are sums and
averages of windows. ``transposed`` is ``y = R^T x``, where R belongs to the node whose gradient this is:
its ``[extent of x, size]``. R has few numbers in a row: it is never a matrix, but these, its taps, and their
columns, of which kernels get those that a shard needs. Coordinates of a Resize follow ONNX's Resize-19:

    half_pixel (o + 1/2) / scale - 1/2      asymmetric o / scale
    align_corners o (in - 1) / (out - 1)    pytorch_half_pixel: half_pixel, 0 if out = 1
    half_pixel_symmetric: half_pixel, so that the middle of what is made lies on the middle of the input

``mode="cubic"`` and ``antialias`` (linear or cubic) weigh the columns around a coordinate by a filter,
which ``antialias`` stretches by 1 / scale if that is more than 1. Columns outside are those at the end, or,
with ``exclude_outside``, none.

``mode="sum"`` and ``"average"`` have a ``window`` of (kernel, stride, dilation, padding before, padding
after): element t of window o lies at o * stride + t * dilation - padding before. An average divides by
how many elements lie in the operand, with ``count_include_pad`` by how many lie in the padded operand:
what hangs over that, in the last window of ``ceil_mode``, never counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.graph.ir.graph import Node, Shape, Value, is_float
from oocdl.graph.ir.index import AxisRule, Band, Plain, Range, Region
from oocdl.graph.ir.op_rule import Builder, OpRule, Spec
from oocdl.graph.ir.speed import Probe
from oocdl.ops._broadcast import extents_of, fail, letters, size
from oocdl.ops._speed import ARITHMETIC, probe, streaming

Matrix = npt.NDArray[np.float64]
Taps = tuple[npt.NDArray[np.int64], Matrix]
"""R as ``[out, taps]`` columns and the numbers that stand there; those of one place are added."""

POOLED = ("sum", "average")
MODES = ("nearest", "linear", "cubic")
COORDINATES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric")


def _positions(coordinates: str, scale: float, out: int, extent: int) -> Matrix:
    index = np.arange(out, dtype=np.float64)
    if coordinates == "align_corners":
        return index * (extent - 1) / (out - 1) if out > 1 else index
    # A scale that is just the ratio of the extents is used as that ratio: o * in / out is exact
    # where o / scale may fall below the integer that ``floor`` has to find.
    exact = abs(scale * extent - out) < 1e-6 * out
    numerator, denominator = (extent, out) if exact else (1.0, scale)
    if coordinates == "asymmetric":
        return index * numerator / denominator
    if coordinates == "pytorch_half_pixel" and out == 1:
        return index
    offset = (extent - out * numerator / denominator) / 2 if coordinates == "half_pixel_symmetric" else 0.0
    return offset + (2 * index + 1) * numerator / (2 * denominator) - 0.5


NEAREST: Mapping[str, Callable[[Matrix], Any]] = {
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}
"""ONNX's ``nearest_mode`` -> the nearest input index; the first is the default."""


def _rounding(attrs: Mapping[str, Any]) -> str:
    return attrs.get("nearest_mode") or next(iter(NEAREST))


def _filtered(attrs: Mapping[str, Any], positions: Matrix, scale: float, extent: int) -> Taps:
    """Return columns and weights ``[out, taps]`` of a filter around ``positions``; those of one place add."""
    antialias, exclude_outside = attrs.get("antialias"), attrs.get("exclude_outside")
    stretch = max(1 / scale, 1.0) if antialias else 1.0
    radius = (2 if attrs["mode"] == "cubic" else 1) * stretch
    columns = np.ceil(positions - radius).astype(np.int64)[:, None] + np.arange(int(2 * radius) + 1)
    distance = abs(columns - positions[:, None]) / stretch
    if attrs["mode"] == "linear":
        weights = np.maximum(1 - distance, 0)
    else:
        a = float(attrs.get("cubic_coeff_a", -0.75))
        near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        far = a * (((distance - 5) * distance + 8) * distance - 4)
        weights = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
    if exclude_outside:
        weights = np.where((columns >= 0) & (columns < extent), weights, 0.0)
    if antialias or exclude_outside:
        weights = weights / weights.sum(1, keepdims=True)
    return np.clip(columns, 0, extent - 1), weights


def _resized(attrs: Mapping[str, Any], out: int, extent: int) -> Taps:
    scale = float(attrs.get("scale") or out / extent)
    positions = _positions(attrs["coordinates"], scale, out, extent)
    if attrs["mode"] == "nearest":
        nearest = NEAREST[_rounding(attrs)](positions)
        return np.clip(nearest, 0, extent - 1).astype(np.int64)[:, None], np.ones((out, 1))
    if attrs["mode"] == "cubic" or attrs.get("antialias"):
        return _filtered(attrs, positions, scale, extent)
    positions = np.clip(positions, 0, extent - 1)
    lower = np.floor(positions).astype(np.int64)
    upper = np.minimum(lower + 1, extent - 1)
    return np.stack([lower, upper], 1), np.stack([1 - (positions - lower), positions - lower], 1)


def _pooled(attrs: Mapping[str, Any], out: int, extent: int) -> Taps:
    """Return the taps of sums of windows, or of averages over elements of the operand or the padded one."""
    kernel, stride, dilation, before, after = attrs["window"]
    places = np.arange(out)[:, None] * stride + np.arange(kernel) * dilation - before
    inside = (places >= 0) & (places < extent)
    counted = places < extent + after if attrs.get("count_include_pad") else inside
    counts = np.ones((out, 1)) if attrs["mode"] == "sum" else counted.sum(1, keepdims=True)
    return np.clip(places, 0, extent - 1), inside / np.maximum(counts, 1)


@lru_cache(maxsize=64)
def _taps(attrs: tuple[tuple[str, Any], ...], in_extent: int) -> Taps:
    """Return R, also when ``transposed``."""
    found = dict(attrs)
    out, extent = (in_extent, found["size"]) if found["transposed"] else (found["size"], in_extent)
    return (_pooled if found["mode"] in POOLED else _resized)(found, out, extent)


def _local_taps(
    attrs: Mapping[str, Any], in_extent: int, rows: Range, columns: Range
) -> tuple[npt.NDArray[np.int32], Matrix]:
    """Return columns and weights ``[taps, size]`` of the map, R or R^T when ``transposed``.

    ``rows`` and ``columns``: the ranges of the result and of the operand that a shard has; columns count from
    the first of these. Taps that a row does not need have weight 0, on a column that it reads anyway.
    """
    (first, last), (left, right) = rows, columns
    row, column, weights = _entries(attrs, in_extent, (left, right) if attrs["transposed"] else (first, last))
    held = (row >= first) & (row < last) & (column >= left) & (column < right)
    row, column, weights = row[held] - first, column[held] - left, weights[held]
    counts = np.bincount(row, minlength=last - first)
    tap = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    shape = (max(int(counts.max()), 1), last - first)
    places, found = np.zeros(shape, np.int32), np.zeros(shape)
    places[:, row[tap == 0]] = column[tap == 0]
    places[tap, row], found[tap, row] = column, weights
    return places, found


def _entries(
    attrs: Mapping[str, Any], in_extent: int, of: Range | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Matrix]:
    """Return row, column and weight of what is not zero in the map, by rows; ``of``: a range of R's rows."""
    start, stop = of or (0, None)
    places, weights = _taps(tuple(attrs.items()), in_extent)
    places, weights = places[start:stop], weights[start:stop]
    row, tap = np.nonzero(weights)
    column, weights, row = places[row, tap], weights[row, tap], (row + start).astype(np.int64)
    if not attrs["transposed"]:
        return row, column, weights
    order = np.argsort(column, kind="stable")
    return column[order], row[order], weights[order]


def _band(attrs: Mapping[str, Any], in_extent: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return first and last column of each row, made monotone (a row of zeros needs one column)."""
    row, column, _ = _entries(attrs, in_extent)
    first, last = np.full(attrs["size"], in_extent - 1), np.zeros(attrs["size"], np.int64)
    np.minimum.at(first, row, column)
    np.maximum.at(last, row, column)
    last = np.maximum.accumulate(last)
    first = np.minimum(np.minimum.accumulate(first[::-1])[::-1], last)
    return tuple(first.tolist()), tuple(last.tolist())


def _infer(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, attrs = inputs[0], node.attrs
    if not 0 <= attrs["axis"] < len(x.shape) or attrs["size"] < 1:
        fail(node, f"axis {attrs['axis']} or size {attrs['size']} does not fit {list(x.shape)}")
    if attrs["mode"] in POOLED:
        kernel, stride, dilation, before, after = attrs["window"]
        if min(kernel, stride, dilation) < 1 or min(before, after) < 0:
            fail(node, "strides, dilations and kernel must be positive, pads not negative")
        divides = attrs["mode"] == "average" and not attrs["count_include_pad"]
        if divides and not _taps(tuple(attrs.items()), x.shape[attrs["axis"]])[1].any(axis=1).all():
            fail(node, "its pads are as large as its window: some windows would see nothing")
    elif attrs["mode"] not in MODES or attrs["coordinates"] not in COORDINATES:
        fail(node, f"mode '{attrs['mode']}' with '{attrs.get('coordinates')}' is not supported")
    if attrs["mode"] == "nearest" and (attrs.get("antialias") or attrs.get("exclude_outside")):
        fail(node, "antialias and exclude_outside need a filter, not the nearest element")
    if _rounding(attrs) not in NEAREST or not is_float(x.dtype):
        fail(node, f"nearest mode '{attrs.get('nearest_mode')}' on {x.dtype} is not supported")
    return [((*x.shape[: attrs["axis"]], attrs["size"], *x.shape[attrs["axis"] + 1 :]), x.dtype)]


def _axes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    axis, axes = node.attrs["axis"], letters(outputs[0])
    before, letter, after = axes[:axis], f"a{axis}", axes[axis + 1 :]
    band = Band(letter, *_band(node.attrs, inputs[0][axis]))
    return AxisRule(((*before, band, *after),), ((*before, Plain(letter), *after),), extents_of(outputs[0]))


def _localize(node: Node, out: Region, inputs: Sequence[Region], shapes: Sequence[Shape]) -> dict[str, Any]:
    axis = node.attrs["axis"]
    columns, weights = _local_taps(node.attrs, shapes[0][axis], out[axis], inputs[0][axis])
    return {"columns": columns, "weights": weights}


def _gradient(build: Builder, node: Node, g: str) -> Sequence[str | None]:
    size = build.shape(node.inputs[0])[node.attrs["axis"]]
    return [build("Resample", g, **{**node.attrs, "size": size, "transposed": not node.attrs["transposed"]})]


def _flops(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count the entries of each row of R; its rows are the side it maps to."""
    rows, columns = (inputs[0], outputs[0]) if node.attrs["transposed"] else (outputs[0], inputs[0])
    taps = {"nearest": 1, "linear": 2, "cubic": 4}.get(node.attrs["mode"]) or int(node.attrs["window"][0])
    if node.attrs.get("antialias"):
        taps *= -(-columns[node.attrs["axis"]] // max(rows[node.attrs["axis"]], 1))
    return 2 * taps * size(rows)


def _scratch(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count copies of operand and result with other orders in memory, and the weights."""
    weights = node.attrs.get("weights")
    return size(inputs[0]) + size(outputs[0]) + (0 if weights is None else int(weights.size))


def _probes(shape: Shape) -> Sequence[Probe]:
    resize = {"axis": 3, "size": 2 * shape[-1], "coordinates": "half_pixel", "nearest_mode": None}
    return [probe("Resample", shape, **resize, mode=mode, transposed=False) for mode in ("linear", "nearest")]


RULES: tuple[OpRule, ...] = (
    OpRule(
        op="Resample", infer=_infer, gradient=_gradient, axes=_axes, localize=_localize, flops=_flops,
        speed=streaming(ARITHMETIC, 8.3, _probes), scratch_elements=_scratch,
    ),
)  # fmt: skip
