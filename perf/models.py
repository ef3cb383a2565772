"""The networks that are measured, in PyTorch, and as ONNX files.

Plain torch code without torchvision; ``torch`` is imported here only, so that a
process that measures oocdl with onnxruntime never loads it.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional

ROWS = 256
"""Of a large weight, as many are made at once."""
HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul")


class Block(nn.Module):
    """Convolution, instance norm, LeakyReLU; twice."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(inside, outside, 3, padding=1)
        self.norm1 = nn.InstanceNorm3d(outside, affine=True)
        self.conv2 = nn.Conv3d(outside, outside, 3, padding=1)
        self.norm2 = nn.InstanceNorm3d(outside, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.leaky_relu(self.norm1(self.conv1(x)), 0.01, inplace=True)
        return functional.leaky_relu(self.norm2(self.conv2(x)), 0.01, inplace=True)


class Up(Block):
    """A transposed convolution to twice the size, the skip beside it, and a block."""

    def __init__(self, width: int) -> None:
        super().__init__(2 * width, width)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        """The block of both."""
        result: Tensor = self(torch.cat([skip, self.up(x)], dim=1))
        return result


class UNet3d(nn.Module):
    """The network of ``oocdl.presets.unets.write_unet3d``, parameter names included."""

    def __init__(self, in_channels: int = 1, classes: int = 4, base: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [base * 2**level for level in range(depth + 1)]
        self.depth = depth
        for level, (inside, width) in enumerate(
            zip([in_channels, *widths], widths[:-1], strict=False), start=1
        ):
            self.add_module(f"down{level}", Block(inside, width))
            self.add_module(f"up{level}", Up(width))
        self.bottom = Block(widths[-2], widths[-1])
        self.head = nn.Conv3d(base, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in range(1, self.depth + 1):
            skips.append(self.get_submodule(f"down{level}")(x))
            x = functional.max_pool3d(skips[-1], 2)
        x = self.bottom(x)
        for level in range(self.depth, 0, -1):
            up = self.get_submodule(f"up{level}")
            assert isinstance(up, Up)
            x = up.join(x, skips.pop())
        result: Tensor = self.head(x)
        return result


class PlainNet3d(nn.Module):
    """Convolutions and ReLU, one after the other, without norms or skips; a 1x1x1 convolution at the end."""

    def __init__(self, layers: int, width: int, in_channels: int = 1, classes: int = 4) -> None:
        super().__init__()
        widths = [in_channels, *[width] * layers]
        self.convs = nn.ModuleList(
            nn.Conv3d(a, b, 3, padding=1) for a, b in zip(widths[:-1], widths[1:], strict=True)
        )
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = functional.relu(conv(x))
        result: Tensor = self.head(x)
        return result


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3, 1x1 with batch norm, and a skip."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        shapes = [(inside, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, k, stride=s, padding=k // 2, bias=False) for a, b, k, s in shapes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in shapes)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != 4 * width:
            conv = nn.Conv2d(inside, 4 * width, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.shortcut(x)
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x))
            x = x if index == 2 else functional.relu(x)
        return functional.relu(x + skip)


class ResNet(nn.Module):
    """ResNet (He et al. 2015): ``blocks`` (3, 4, 6, 3) is ResNet-50, (3, 8, 36, 3) is ResNet-152."""

    def __init__(self, blocks: Sequence[int], width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        inside = width
        for level, count in enumerate(blocks):
            for index in range(count):
                layers.append(Bottleneck(inside, width * 2**level, 2 if level and not index else 1))
                inside = 4 * width * 2**level
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.layers(x))
        return result


class GptBlock(nn.Module):
    """Pre-norm causal attention and a two-layer perceptron."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        mask = torch.tril(torch.ones(context, context)).view(1, 1, context, context)
        self.register_buffer("mask", mask, persistent=False)

    def attend(self, x: Tensor) -> Tensor:
        """Attention by matmul, mask and softmax."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        scores = scores.masked_fill(self.get_buffer("mask") == 0, float("-inf"))
        y = (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(batch, length, width)
        result: Tensor = self.proj(y)
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln1(x))
        result: Tensor = x + self.down(functional.gelu(self.up(self.ln2(x))))
        return result


class GPT(nn.Module):
    """A GPT-2-like language model."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GptBlock(width, heads, context) for _ in range(layers)))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        result: Tensor = self.head(self.ln(self.blocks(self.wte(ids) + self.wpe(places))))
        return result


class Mlp(nn.Module):
    """The perceptron of ``write_mlp``, parameter names included; its weights are not initialised."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = len(widths) - 1
        for number, (inside, outside) in enumerate(zip(widths[:-1], widths[1:], strict=True), start=1):
            self.add_module(f"layer{number}", nn.utils.skip_init(nn.Linear, inside, outside))  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        for number in range(1, self.layers + 1):
            x = self.get_submodule(f"layer{number}")(x)
            x = functional.relu(x) if number < self.layers else x
        return x


BLOCKS: tuple[type[nn.Module], ...] = (Block, Bottleneck, GptBlock)
"""What activation checkpointing computes twice, and keeps the input of only."""


class Recurrent(nn.Module):
    """Layers of LSTM between an input of features and logits for each step."""

    def __init__(self, features: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, layers, batch_first=True)
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.lstm(x)[0])
        return logits


def library(where: str, name: str, options: Mapping[str, Any]) -> nn.Module:
    """A network of a library, without what it draws at random: dropout and stochastic depth let all pass."""
    network: nn.Module = getattr(importlib.import_module(where), name)(**options)
    for module in network.modules():
        for rate in {"p", "dropout", "stochastic_depth_prob"} & vars(module).keys():
            if isinstance(getattr(module, rate), float):
                setattr(module, rate, 0.0)
    return network


def res_enc(base: int, stages: int, classes: int) -> nn.Module:
    """nnU-Net's residual encoder U-Net in 3D: widths of ``base`` doubling by stage, up to 320."""
    widths = [min(base * 2**stage, 320) for stage in range(stages)]
    options: dict[str, Any] = {
        "input_channels": 1, "n_stages": stages, "features_per_stage": widths, "conv_op": nn.Conv3d,
        "kernel_sizes": 3, "strides": [1, *[2] * (stages - 1)], "num_classes": classes,
        "n_blocks_per_stage": [1, 3, 4, 6, 6, 6][:stages], "n_conv_per_stage_decoder": 1, "conv_bias": True,
        "norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "nonlin": nn.LeakyReLU, "nonlin_kwargs": {"inplace": True},
    }  # fmt: skip
    network = library("dynamic_network_architectures.architectures.unet", "ResidualEncoderUNet", options)
    decoder: Any = network.decoder
    decoder.seg_layers = decoder.seg_layers[-1:]  # the others are for deep supervision, and compute nothing
    return network


def load_weights(model: nn.Module, path: Path | str) -> None:
    """Take the weights of the ONNX file, so that both sides compute the same. KeyError if one is missing."""
    wanted = dict(model.named_parameters())
    with torch.no_grad():
        for weight in onnx.load(str(path), load_external_data=False).graph.initializer:
            if weight.name in wanted:
                array = numpy_helper.to_array(weight, str(Path(path).parent))
                wanted.pop(weight.name).copy_(torch.from_numpy(array.copy()))
    if wanted:
        raise KeyError(f"{path} has no weights called {', '.join(wanted)}")


def export(model: nn.Module, example: Tensor, path: Path) -> Path:
    """Write ``model`` as ONNX, batch norm and dropout as in training."""
    options: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"], "opset_version": 17}
    options |= {"dynamo": False, "training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(model.train(), (example,), str(path), **options)
    return path


def write_mlp(path: Path, widths: Sequence[int], seed: int = 0) -> Path:
    """Write a perceptron with Relu between its layers; its weights go to ``<name>.data``, row by row.

    ``widths``: of the input, and of each layer's output. Weights are never in memory together.
    """
    random = np.random.default_rng(seed)
    data = path.with_suffix(".data")
    nodes, weights, x = [], [], "x"
    with data.open("wb") as file:
        for number, (inside, outside) in enumerate(zip(widths[:-1], widths[1:], strict=True), start=1):
            begin = file.tell()
            for row in range(0, outside, ROWS):
                shape = (min(ROWS, outside - row), inside)
                file.write(random.standard_normal(shape, np.float32) * np.float32((2 / inside) ** 0.5))
            weights.append(_external(f"layer{number}.weight", (outside, inside), data, begin))
            weights.append(numpy_helper.from_array(np.zeros(outside, np.float32), f"layer{number}.bias"))
            last = number == len(widths) - 1
            made = "y" if last else f"a{number}"
            names = [x, f"layer{number}.weight", f"layer{number}.bias"]
            nodes.append(helper.make_node("Gemm", names, [made], f"layer{number}", transB=1))
            if not last:
                x = f"h{number}"
                nodes.append(helper.make_node("Relu", [made], [x], f"relu{number}"))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])
        for name, width in (("x", widths[0]), ("y", widths[-1]))
    ]
    graph = helper.make_graph(nodes, "mlp", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def _external(name: str, shape: tuple[int, ...], data: Path, begin: int) -> TensorProto:
    """A float32 weight that is in the file ``data`` from ``begin`` on."""
    weight = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
    weight.data_location = TensorProto.EXTERNAL
    length = 4 * int(np.prod(shape))
    for key, value in (("location", data.name), ("offset", begin), ("length", length)):
        weight.external_data.add(key=key, value=str(value))
    return weight


def forward_bytes(path: Path, batch: int) -> int:
    """Bytes of the outputs of all convolutions and matrix products of a file, read as ``batch`` samples."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(str(path))).graph
    shapes = {
        value.name: [dim.dim_value or batch for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.value_info, *graph.output)
    }
    total = 0
    for node in graph.node:
        if node.op_type in HEAVY:
            elements = 1
            for extent in shapes[node.output[0]]:
                elements *= extent
            total += 4 * elements
    return total
