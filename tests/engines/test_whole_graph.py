"""A graph with its gradients, uncut, through both engines: the helper and the rules agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from oocdl.engines.engine import get_engine
from oocdl.graph.ir.graph import Array, Graph, Node, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.registry import RULES
from oocdl.ops.windows.resample import local_taps
from tests.kit.kernel_cases import noise
from tests.kit.programs import whole_program

SPATIAL = (7, 6)


def attrs(stride: int, pad: int) -> dict[str, tuple[int, ...]]:
    """Of a window operator on two axes."""
    return {"strides": (stride,) * 2, "pads": (pad,) * 4, "dilations": (1, 1)}


def net(dtype: str) -> Graph:
    """conv, pool, resize, concat, slice, and the gradient of the sum of squares by hand."""
    build = Builder(RULES)
    x = build.value("x", (2, 3, *SPATIAL), dtype, Role.INPUT)
    w = build.value("w", (4, 3, 3, 3), dtype, Role.WEIGHT)
    y = build("Conv", x, w, **attrs(2, 1))
    pool = {"kernel_shape": (2, 2), **attrs(1, 1)}
    z = build("MaxPool", y, **pool)
    size, scale = 2 * build.shape(z)[2], 2.0
    resize = {"axis": 2, "mode": "linear", "coordinates": "half_pixel", "scale": scale}
    resize |= {"nearest_mode": "floor"}
    up = build("Resample", z, size=size, transposed=False, **resize)
    joined = build("Concat", up, up, axis=1)
    part = build("Slice", joined, axis=3, start=1, stop=build.shape(up)[3], step=2)
    moments = build.node("Moments", [part], {"axes": (0, 2, 3)})
    grad = build("Resample", up, size=build.shape(z)[2], transposed=True, **resize)
    grad = build("MaxPoolGrad", y, grad, **pool)
    dw = build("ConvWeightGrad", x, grad, kernel_shape=(3, 3), **attrs(2, 1))
    dx = build("ConvTranspose", grad, w, spatial=SPATIAL, **attrs(2, 1))
    build.outputs += [part, *moments, dw, dx]
    return build.graph()


def expected(x: Array, w: Array) -> list[Array]:
    """The same by PyTorch and autograd, in float64."""
    a = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    b = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    z = F.max_pool2d(F.conv2d(a, b, stride=2, padding=1), 2, 1, 1)
    up = F.interpolate(z, (2 * z.shape[2], z.shape[3]), mode="bilinear", align_corners=False)
    part = torch.cat([up, up], 1)[:, :, :, 1::2]
    var, mean = torch.var_mean(part, (0, 2, 3), correction=0, keepdim=True)
    dx, dw = torch.autograd.grad((up * up).sum() / 2, (a, b))
    return [value.detach().numpy() for value in (part, mean, var, dw, dx)]


@pytest.mark.parametrize(
    ("engine", "dtype", "tolerance"),
    [("torch", "float64", 1e-12), ("torch", "float32", 1e-5), ("onnxruntime", "float32", 1e-5)],
)
def test_net(engine: str, dtype: str, tolerance: float) -> None:
    graph = net(dtype)

    def local(node: Node, extent: int) -> dict[str, Array]:
        return dict(zip(("columns", "weights"), local_taps(node.attrs, extent), strict=True))

    axes = {op: rule.axes for op, rule in RULES.items() if rule.axes is not None}
    fills = {op: rule.fill for op, rule in RULES.items()}
    program, names = whole_program(graph, axes, fills, local)
    x, w = noise(2, 3, *SPATIAL).astype(dtype), noise(4, 3, 3, 3, seed=1).astype(dtype)
    inputs = [{"x": x, "w": w}[name] for name in names]
    results = get_engine(engine).compile(program)(inputs)
    for got, want in zip(results, expected(x, w), strict=True):
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()
