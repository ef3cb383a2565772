"""Models to begin with, written as ONNX files without any framework."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, checker, helper, numpy_helper
from onnx import save as save_onnx

from oocdl.errors import InputError
from oocdl.presets.fingerprint import Topology

_CUBE, _POINT = (3, 3, 3), (1, 1, 1)
_NORMS = ("instance", "batch", "none")


class _Writer:
    """Collects nodes and weights under readable names."""

    def __init__(self, seed: int, norm: str) -> None:
        self.random = np.random.default_rng(seed)
        self.norm_kind = norm
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []

    def weight(self, name: str, data: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> str:
        self.weights.append(numpy_helper.from_array(data.astype(np.float32), name))
        return name

    def node(self, op: str, inputs: Sequence[str], name: str, more: Sequence[str] = (), **attrs: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [name, *more], name=name, **attrs))
        return name

    def conv(
        self, x: str, name: str, inside: int, outside: int, kernel: Sequence[int],
        stride: Sequence[int] = _POINT,
    ) -> str:  # fmt: skip
        """Add a convolution that keeps the size but for its stride, with He initialisation."""
        deviation = (2 / (inside * prod(kernel))) ** 0.5
        weight = self.weight(f"{name}.weight", self.random.normal(0, deviation, (outside, inside, *kernel)))
        bias = self.weight(f"{name}.bias", np.zeros(outside))
        strides: dict[str, Any] = {} if prod(stride) == 1 else {"strides": [*stride]}
        pads = [extent // 2 for extent in kernel] * 2
        return self.node("Conv", [x, weight, bias], name, kernel_shape=[*kernel], pads=pads, **strides)

    def up(self, x: str, name: str, inside: int, outside: int, stride: Sequence[int]) -> str:
        """Add a transposed convolution to ``stride`` times the size."""
        deviation = (2 / inside) ** 0.5
        weight = self.weight(f"{name}.weight", self.random.normal(0, deviation, (inside, outside, *stride)))
        bias = self.weight(f"{name}.bias", np.zeros(outside))
        sizes: dict[str, Any] = {"kernel_shape": [*stride], "strides": [*stride]}
        return self.node("ConvTranspose", [x, weight, bias], name, **sizes)

    def norm(self, x: str, name: str, channels: int) -> str:
        if self.norm_kind == "none":
            return x
        scale, bias = np.ones(channels), np.zeros(channels)
        operands = [x, self.weight(f"{name}.weight", scale), self.weight(f"{name}.bias", bias)]
        if self.norm_kind == "instance":
            return self.node("InstanceNormalization", operands, name)
        operands.append(self.weight(f"{name}.running_mean", np.zeros(channels)))
        operands.append(self.weight(f"{name}.running_var", np.ones(channels)))
        updated = [f"{name}.new_mean", f"{name}.new_var"]
        return self.node("BatchNormalization", operands, name, updated, training_mode=1)

    def block(
        self, x: str, name: str, inside: int, outside: int, kernel: Sequence[int] = _CUBE,
        stride: Sequence[int] = _POINT,
    ) -> str:  # fmt: skip
        """Add convolution, norm and LeakyRelu, twice; the first convolution has the stride."""
        for index, channels in ((1, inside), (2, outside)):
            step = stride if index == 1 else _POINT
            x = self.conv(x, f"{name}.conv{index}", channels, outside, kernel, step)
            x = self.norm(x, f"{name}.norm{index}", outside)
            x = self.node("LeakyRelu", [x], f"{name}.relu{index}", alpha=0.01)
        return x

    def save(
        self, path: str | Path, name: str, channels: int, outputs: Sequence[str], classes: int,
        size: Sequence[Any],
    ) -> Path:  # fmt: skip
        """Check and write the model with the input "image", which has the size of the first output."""
        sizes = [size, *([f"{axis}_{number}" for axis in size] for number in range(1, len(outputs)))]
        told = [
            helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", classes, *its])
            for output, its in zip(outputs, sizes, strict=True)
        ]
        image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", channels, *size])
        graph = helper.make_graph(self.nodes, name, [image], told, self.weights)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="oocdl", ir_version=8
        )
        checker.check_model(model)
        save_onnx(model, str(path))
        return Path(path)


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
        x = net.up(x, f"up{level}.up", widths[level], width, (2, 2, 2))
        x = net.node("Concat", [skips.pop(), x], f"up{level}.concat", axis=1)
        x = net.block(x, f"up{level}", 2 * width, width)
    head = net.conv(x, "head", base, classes, _POINT)
    net.node("Identity", [head], "logits")
    return net.save(path, "unet3d", in_channels, ["logits"], classes, spatial)


def write_nnunet(
    path: str | Path, topology: Topology, *, in_channels: int, classes: int, seed: int = 0
) -> tuple[str, ...]:
    """Write nnU-Net's plain U-Net: input "image", an output for each resolution that is supervised.

    Each level but the first begins with a strided convolution; the way up is by transposed ones. Outputs are
    "logits", at full size, "logits_1", .., each smaller; of the smallest, whose weight in nnU-Net's deep
    supervision is 0, none is made. Returns the names of the outputs. Raises InputError for a single level.
    """
    if len(topology.widths) < 2:
        raise InputError("volumes are too small for a U-Net: no axis has 8 voxels")
    net, skips, inside = _Writer(seed, "instance"), list[str](), in_channels
    x, levels = "image", list(zip(topology.widths, topology.kernels, topology.strides, strict=True))
    for level, (width, kernel, stride) in enumerate(levels):
        x = net.block(x, f"down{level}", inside, width, kernel, stride)
        skips.append(x)
        inside = width
    x, heads = skips.pop(), list[str]()
    for level in range(len(levels) - 2, -1, -1):
        (width, kernel, _), (below, _, stride) = levels[level : level + 2]
        x = net.up(x, f"up{level}.up", below, width, stride)
        x = net.node("Concat", [x, skips.pop()], f"up{level}.concat", axis=1)
        x = net.block(x, f"up{level}", 2 * width, width, kernel)
        if level == 0 or level < len(levels) - 2:
            heads.append(net.conv(x, f"head{level}", width, classes, _POINT))
    names = ["logits", *(f"logits_{number}" for number in range(1, len(heads)))]
    for name, head in zip(names, reversed(heads), strict=True):
        net.node("Identity", [head], name)
    net.save(path, "nnunet", in_channels, names, classes, ("depth", "height", "width"))
    return tuple(names)
