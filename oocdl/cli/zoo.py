"""Models to begin with, written as ONNX files without any framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, checker, helper, numpy_helper
from onnx import save as save_onnx

from oocdl.errors import InputError

Weights = Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]
"""Last part of the name of a weight -> its contents."""
_NORMS = ("instance", "batch", "none")


class _Writer:
    """Collects nodes and weights under readable names."""

    def __init__(self, seed: int, norm: str) -> None:
        self.random = np.random.default_rng(seed)
        self.norm_kind = norm
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        name: str,
        weights: Weights = MappingProxyType({}),
        others: Sequence[str] = (),
        **attrs: Any,
    ) -> str:
        """Add a node that reads inputs and weights; returns its first output, which has the node's name."""
        for title, data in weights.items():
            self.weights.append(numpy_helper.from_array(data.astype(np.float32), f"{name}.{title}"))
        outputs = [name, *(f"{name}.{title}" for title in others)]
        inputs = [*inputs, *(f"{name}.{title}" for title in weights)]
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, **attrs))
        return name

    def conv(self, x: str, name: str, inside: int, outside: int, kernel: int) -> str:
        """Add a convolution that keeps the size, with He initialisation."""
        weight = self.random.normal(0, (2 / (inside * kernel**3)) ** 0.5, (outside, inside, *(kernel,) * 3))
        weights = {"weight": weight, "bias": np.zeros(outside)}
        return self.node("Conv", [x], name, weights, kernel_shape=[kernel] * 3, pads=[kernel // 2] * 6)

    def up(self, x: str, name: str, inside: int, outside: int) -> str:
        """Add a transposed convolution to twice the size."""
        weight = self.random.normal(0, (2 / inside) ** 0.5, (inside, outside, 2, 2, 2))
        weights = {"weight": weight, "bias": np.zeros(outside)}
        return self.node("ConvTranspose", [x], name, weights, kernel_shape=[2] * 3, strides=[2] * 3)

    def norm(self, x: str, name: str, channels: int) -> str:
        if self.norm_kind == "none":
            return x
        weights = {"weight": np.ones(channels), "bias": np.zeros(channels)}
        if self.norm_kind == "instance":
            return self.node("InstanceNormalization", [x], name, weights)
        weights |= {"running_mean": np.zeros(channels), "running_var": np.ones(channels)}
        return self.node("BatchNormalization", [x], name, weights, ("new_mean", "new_var"), training_mode=1)

    def block(self, x: str, name: str, inside: int, outside: int) -> str:
        """Add convolution, norm and LeakyRelu, twice."""
        for index, channels in ((1, inside), (2, outside)):
            x = self.conv(x, f"{name}.conv{index}", channels, outside, 3)
            x = self.norm(x, f"{name}.norm{index}", outside)
            x = self.node("LeakyRelu", [x], f"{name}.relu{index}", alpha=0.01)
        return x


def write_unet3d(
    path: str | Path,
    *,
    in_channels: int = 1,
    classes: int = 4,
    base: int = 8,
    depth: int = 3,
    norm: str = "instance",
    size: Sequence[int] | None = None,
    seed: int = 0,
) -> Path:
    """Write a 3D U-Net: input "image" [N, C, D, H, W], output "logits" [N, classes, D, H, W].

    ``base`` channels on top, twice as many on each of the ``depth`` levels below.
    ``norm``: "instance", "batch" or "none". ``size``: (D, H, W) to fix; open by default.
    """
    if norm not in _NORMS:
        raise InputError(f"norm '{norm}' is not one of {', '.join(_NORMS)}")
    if min(in_channels, classes, base) < 1 or depth < 0:
        raise InputError("in_channels, classes and base have to be at least 1, depth at least 0")
    spatial: tuple[int | str, ...] = ("depth", "height", "width")
    if size is not None:
        if len(size) != 3 or any(extent < 1 or extent % 2**depth for extent in size):
            raise InputError(f"size {tuple(size)} has to be three multiples of {2**depth}")
        spatial = tuple(int(extent) for extent in size)
    net = _Writer(seed, norm)
    widths = [base * 2**level for level in range(depth + 1)]
    x, inside, skips = "image", in_channels, list[str]()
    for level, width in enumerate(widths[:-1], start=1):
        skips.append(net.block(x, f"down{level}", inside, width))
        x = net.node("MaxPool", [skips[-1]], f"down{level}.pool", kernel_shape=[2] * 3, strides=[2] * 3)
        inside = width
    x = net.block(x, "bottom", inside, widths[-1])
    for level in range(depth, 0, -1):
        width = widths[level - 1]
        x = net.up(x, f"up{level}.up", widths[level], width)
        x = net.node("Concat", [skips.pop(), x], f"up{level}.concat", axis=1)
        x = net.block(x, f"up{level}", 2 * width, width)
    head = net.conv(x, "head", base, classes, 1)
    net.node("Identity", [head], "logits")
    graph = helper.make_graph(
        net.nodes,
        "unet3d",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", in_channels, *spatial])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes, *spatial])],
        net.weights,
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="oocdl", ir_version=8
    )
    checker.check_model(model)
    save_onnx(model, str(path))
    return Path(path)
