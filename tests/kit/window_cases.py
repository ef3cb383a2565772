"""Cases of operators with sliding windows: convolutions, their gradients, pooling."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from oocdl.graph.ir.graph import Array
from tests.kit.kernel_cases import INF, Case, around, box, noise, padded

CONV = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
POOL = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


GEOMETRIES = (
    # spatial, kernel, stride, dilation, pads
    ("1d", (9,), (3,), (1,), (1,), ((1, 1),)),
    ("1d-stride", (11,), (4,), (3,), (2,), ((2, 1),)),
    ("2d", (6, 7), (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1))),
    ("2d-border", (5, 7), (3, 3), (1, 1), (1, 1), ((1, 0), (1, 1))),
    ("2d-wide-pads", (5, 4), (2, 2), (1, 1), (1, 1), ((3, 2), (0, 2))),
    ("2d-stride", (7, 9), (3, 2), (2, 3), (1, 1), ((1, 1), (0, 0))),
    ("2d-dilated", (9, 8), (3, 2), (1, 2), (2, 3), ((2, 2), (0, 1))),
    ("2d-1x1", (5, 4), (1, 1), (1, 1), (1, 1), ((0, 0), (0, 0))),
    ("2d-1x1-stride", (5, 7), (1, 1), (2, 3), (1, 1), ((0, 0), (0, 0))),
    ("3d", (5, 4, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1), ((1, 1), (1, 1), (1, 1))),
    ("3d-slab", (4, 4, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1), ((0, 1), (1, 1), (1, 1))),
    ("3d-stride", (5, 6, 4), (3, 2, 2), (2, 2, 2), (1, 1, 1), ((1, 1), (0, 0), (0, 0))),
    ("3d-dilated", (6, 5, 6), (2, 3, 2), (1, 1, 1), (2, 1, 3), ((1, 1), (1, 1), (0, 2))),
)
FEWER = ("1d", "2d-border", "2d-1x1", "3d-stride")
"""Those that make fewer channels than they read, too."""


def geometries() -> list[tuple[str, dict[str, Any]]]:
    """Batch, channels, windows: (name, what a convolution needs)."""
    found = []
    for name, *spec in GEOMETRIES:
        for channels, filters in ((3, 4), (5, 2))[: 1 + (name in FEWER)]:
            keys = ("spatial", "kernel", "strides", "dilations", "pads")
            geometry = dict(zip(keys, spec, strict=True), channels=channels, filters=filters, batch=2)
            found.append((f"{name}-{channels}to{filters}", trimmed(geometry)))
    found.append(("2d-batch1", trimmed(dict(dict(found)["2d-3to4"], batch=1))))
    return found


def trimmed(geometry: dict[str, Any]) -> dict[str, Any]:
    """The input made exactly as long as the windows, as the cutter does."""
    spatial, outs = [], []
    axes = ("spatial", "kernel", "strides", "dilations", "pads")
    for extent, k, s, d, (b, a) in zip(*(geometry[axis] for axis in axes), strict=True):
        out = (extent + b + a - d * (k - 1) - 1) // s + 1
        outs.append(out)
        spatial.append((out - 1) * s + d * (k - 1) + 1 - b - a)
    return dict(geometry, spatial=tuple(spatial), out=tuple(outs))


def convolutions() -> list[Case]:
    """Conv, its weight gradient, ConvTranspose with crops."""
    cases = []
    for name, g in geometries():
        w = noise(g["filters"], g["channels"], *g["kernel"], seed=1)
        x = noise(g["batch"], g["channels"], *g["spatial"])
        dy = noise(g["batch"], g["filters"], *g["out"], seed=2)
        cases += [*_convolved(name, g, x, w, dy), *_transposed(name, g, dy, w)]
    empty, ones = noise(2, 3, 0, 5), {"strides": (1, 1), "dilations": (1, 1)}
    conv = partial(_zeros, (2, 4, 1, 5)), ones, [around([(0, 2), (1, 0)]), None]
    back = partial(_zeros, (2, 4, 2, 6)), ones | {"crop": (0,) * 4}, [around([(0, 1), (0, 0)]), None]
    cases.append(Case("Conv-empty", "Conv", [empty, noise(4, 3, 2, 2)], *conv))
    cases.append(Case("ConvTranspose-empty", "ConvTranspose", [empty, noise(3, 4, 2, 2)], *back))
    for name, (n, c), tap in (("no-samples", (0, 3), 1), ("no-channels", (2, 0), 3)):
        taps, attrs = (tap,) * 3, {"strides": (1, 1, 1), "dilations": (1, 1, 1)}
        x, dy, w = noise(n, c, 6, 5, 4), noise(n, 4, 7 - tap, 6 - tap, 5 - tap), noise(4, c, *taps)
        made, gradient = partial(_zeros, dy.shape), partial(_zeros, w.shape)
        cases.append(Case(f"Conv-{name}", "Conv", [x, w], made, attrs))
        kernel = {"kernel_shape": taps}
        cases.append(Case(f"ConvWeightGrad-{name}", "ConvWeightGrad", [x, dy], gradient, attrs | kernel))
    return cases


def _zeros(shape: Sequence[int], a: Tensor, b: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=a.dtype)


GROUPED = (
    "1d", "1d-stride", "2d", "2d-border", "2d-stride", "2d-dilated", "2d-1x1", "3d", "3d-slab", "3d-stride",
)  # fmt: skip


def grouped() -> list[Case]:
    """Convolutions with groups: depthwise, with several channels of each, with fewer or more results."""
    kinds = itertools.cycle(((8, 1, 1), (4, 1, 2), (3, 2, 3)))
    found, cases = dict(geometries()), []
    for stem in GROUPED:
        g = found[f"{stem}-3to4"]
        for groups, c, o in itertools.islice(kinds, 2):
            w = noise(groups, o, c, *g["kernel"], seed=1)
            x = noise(g["batch"], groups, c, *g["spatial"])
            dy = noise(g["batch"], groups, o, *g["out"], seed=2)
            cases += _convolved(f"grouped-{stem}-{groups}x{c}to{o}", g, x, w, dy, groups)
    return cases


def _convolved(name: str, g: dict[str, Any], x: Array, w: Array, dy: Array, groups: int = 0) -> list[Case]:
    """A convolution and the gradient of its weights; with an axis of groups, that of its data, too."""
    attrs: dict[str, Any] = {"strides": g["strides"], "dilations": g["dilations"]}
    attrs |= {"grouped": True} if groups else {"pads": (99,) * (2 * len(g["kernel"]))}
    conv, pads = CONV[len(g["kernel"]) - 1], around(g["pads"])
    wide = [[(0, 0)] * bool(groups) + pads, None]

    def forward(a: Tensor, b: Tensor) -> Tensor:
        if not groups:
            return conv(padded(a, pads), b, None, g["strides"], 0, g["dilations"])
        a, b = padded(a.flatten(1, 2), pads), b.flatten(0, 1)
        made = conv(a, b, None, g["strides"], 0, g["dilations"], groups)
        return made.unflatten(1, (groups, -1))

    def weights(a: Tensor, b: Tensor) -> Tensor:
        kernel = torch.zeros(w.shape, dtype=a.dtype, requires_grad=True)
        return torch.autograd.grad(forward(a, kernel), kernel, b)[0]

    def data(a: Tensor, b: Tensor) -> Tensor:
        seen = torch.zeros(x.shape, dtype=a.dtype, requires_grad=True)
        return torch.autograd.grad(forward(seen, b), seen, a)[0]

    kernel, name = attrs | {"kernel_shape": g["kernel"]}, f"-{name}"
    crop = attrs | {"spatial": g["spatial"], "crop": (0, 0, 0, *(before for before, _ in g["pads"]))}
    gradient = Case(f"ConvTranspose{name}", "ConvTranspose", [dy, w], data, crop)
    return [
        Case(f"Conv{name}", "Conv", [x, w], forward, attrs, wide),
        Case(f"ConvWeightGrad{name}", "ConvWeightGrad", [x, dy], weights, kernel, wide, tolerance=1e-4),
        *[gradient] * bool(groups),
    ]


def _transposed(name: str, g: dict[str, Any], x: Array, w: Array) -> list[Case]:
    """The full transposed convolution, cropped: as a data gradient, then in odd ways."""
    rank = len(g["kernel"])
    attrs = {"strides": g["strides"], "dilations": g["dilations"], "spatial": g["spatial"]}
    first = [b for b, _ in g["pads"]]
    variants = {
        "whole": ((0, 0), first, g["spatial"]),
        "padded": ((1, 2), [b + s for b, s in zip(first, g["strides"], strict=True)], g["spatial"]),
        "outside": ((0, 0), [-2] * rank, [n + 9 for n in g["spatial"]]),
        "inside": ((0, 1), [3] * rank, [2] * rank),
    }
    cases = []
    for label, (pad, crop, spatial) in variants.items():
        pads, where, shape = around([pad] * rank), (0, 0, *crop), (g["batch"], g["channels"], *spatial)

        def reference(a: Tensor, b: Tensor, pads: Any = pads, part: Any = (where, shape)) -> Tensor:
            full = TRANSPOSED[rank - 1](padded(a, pads), b, stride=g["strides"], dilation=g["dilations"])
            return box(full, *part)

        named = f"ConvTranspose-{name}-{label}"
        cases.append(Case(named, "ConvTranspose", [x, w], reference, attrs | {"crop": where}, [pads, None]))
    return cases


def pools() -> list[Case]:
    """Max pooling and its gradient, with ties, overlaps, borders and crops."""
    cases = []
    for name, g in geometries():
        if g["channels"] != 3 or all(k == 1 for k in g["kernel"]):
            continue
        attrs = {"kernel_shape": g["kernel"], "strides": g["strides"], "dilations": g["dilations"]}
        pads = around(g["pads"])
        x = np.round(noise(2, 3, *g["spatial"]) * 2) / 2
        dy = noise(2, 3, *g["out"], seed=2)

        def forward(a: Tensor, g: Any = g, pads: Any = pads) -> Tensor:
            pool = POOL[len(g["kernel"]) - 1]
            wide = padded(a, pads, -INF)
            return pool(wide, g["kernel"], g["strides"], 0, g["dilations"])

        if all(max(pair) < k for pair, k in zip(g["pads"], g["kernel"], strict=True)):
            cases.append(Case(f"MaxPool-{name}", "MaxPool", [x], forward, attrs, [pads], -INF))
        cases += pool_gradients(name, g, x, dy, attrs)
    return cases


def pool_gradients(name: str, g: dict[str, Any], x: Array, dy: Array, attrs: dict[str, Any]) -> list[Case]:
    """The gradient over all windows, and with windows around that do not exist."""

    def case(label: str, extra: int) -> Case:
        # `extra` more windows on either side: their inputs are -inf, their gradient is zero.
        pads = [(b + extra * s, a + extra * s) for (b, a), s in zip(g["pads"], g["strides"], strict=True)]
        wider = around([(extra, extra)] * len(pads))
        crop = (0, 0, *(b - 1 for b, _ in pads))

        def reference(a: Tensor, b: Tensor) -> Tensor:
            wide = padded(a, around(pads), -INF).requires_grad_()
            pooled = POOL[len(pads) - 1](wide, g["kernel"], g["strides"], 0, g["dilations"])
            whole = torch.autograd.grad(pooled, wide, padded(b, wider))[0]
            return box(whole, crop, (2, 3, *(n + 2 for n in g["spatial"])))

        cropped, given = dict(attrs, crop=crop), [around(pads), wider]
        return Case(f"MaxPoolGrad-{name}-{label}", "MaxPoolGrad", [x, dy], reference, cropped, given, -INF)

    return [case("whole", 0), case("border", 1)]
