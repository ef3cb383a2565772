"""PyTorch models for the whole test suite, and their export to ONNX.

Plain torch code without torchvision, so that what is exported is what is read here.
``export`` is the call we ask users to make: it keeps BatchNorm and the names of the parameters.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm3d(channels)
    if kind == "group":
        return nn.GroupNorm(min(4, channels), channels)
    return nn.InstanceNorm3d(channels, affine=True)


class _Double(nn.Module):
    """Convolution, norm, LeakyReLU; twice."""

    def __init__(self, inside: int, outside: int, norm: str, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(inside, outside, 3, stride=stride, padding=1)
        self.norm1 = _norm(norm, outside)
        self.conv2 = nn.Conv3d(outside, outside, 3, padding=1)
        self.norm2 = _norm(norm, outside)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.leaky_relu(self.norm1(self.conv1(x)), 0.01)
        return functional.leaky_relu(self.norm2(self.conv2(x)), 0.01)


class _Up(nn.Module):
    """Twice the size, or one that is told: a transposed convolution, or interpolation and a convolution."""

    def __init__(self, inside: int, outside: int, up: str) -> None:
        super().__init__()
        self.up = up
        if up == "transpose":
            self.conv: nn.Module = nn.ConvTranspose3d(inside, outside, 2, stride=2)
        else:
            self.conv = nn.Conv3d(inside, outside, 1)

    def forward(self, x: Tensor, size: list[int] | None) -> Tensor:
        if self.up == "transpose":
            return self.conv(x, output_size=size)  # type: ignore[no-any-return]
        corners = False if self.up == "trilinear" else None
        scale = None if size else 2.0
        result: Tensor = self.conv(functional.interpolate(x, size, scale, self.up, corners))
        return result


class UNet3d(nn.Module):
    """A 3D U-Net.

    ``norm``: instance, batch, group; ``down``: maxpool, stride; ``up``: transpose,
    trilinear, nearest.
    """

    def __init__(
        self,
        in_channels: int = 1,
        classes: int = 3,
        base: int = 4,
        depth: int = 2,
        *,
        norm: str = "instance",
        down: str = "maxpool",
        up: str = "transpose",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.pool = down == "maxpool"
        stride = 1 if self.pool else 2
        widths = [base * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _Double(before, width, norm, stride if level else 1)
            for level, (before, width) in enumerate(zip([in_channels, *widths], widths, strict=False))
        )
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(_Up(below, width, up) for below, width in pairs)
        self.merge = nn.ModuleList(_Double(2 * width, width, norm) for _, width in pairs)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Conv3d(base, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            if level and self.pool:
                x = functional.max_pool3d(x, 2)
            x = block(x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            skip = skips.pop()
            x = merge(torch.cat([skip, up(x, self.size_of(skip))], dim=1))
        result: Tensor = self.head(self.dropout(x))
        return result

    def size_of(self, skip: Tensor) -> list[int] | None:
        """What ``up`` makes: twice as much as there is."""
        return None


def small_unet() -> UNet3d:
    """In float64, in training mode, with the same weights each time."""
    torch.manual_seed(0)
    return UNet3d(base=2, depth=1, norm="instance", down="maxpool", up="transpose").double().train()


class _Block(nn.Module):
    """A residual block: two 3x3 convolutions, or 1x1, 3x3, 1x1 with four times the channels."""

    def __init__(self, inside: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outside = width * 4 if bottleneck else width
        if bottleneck:
            shapes = [(inside, width, 1, 1), (width, width, 3, stride), (width, outside, 1, 1)]
        else:
            shapes = [(inside, width, 3, stride), (width, width, 3, 1)]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, k, stride=s, padding=k // 2, bias=False) for a, b, k, s in shapes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in shapes)
        self.downsample: nn.Module | None = None
        if stride != 1 or inside != outside:
            conv = nn.Conv2d(inside, outside, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        last = len(self.convs) - 1
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x))
            x = x if index == last else functional.relu(x)
        return functional.relu(x + skip)


class ResNet(nn.Module):
    """He et al. 2015, with the stem of ImageNet models where ``stem`` is "imagenet"."""

    def __init__(
        self,
        blocks: Sequence[int] = (1, 1),
        width: int = 8,
        *,
        bottleneck: bool = False,
        classes: int = 10,
        stem: str = "small",
    ) -> None:
        super().__init__()
        large = stem == "imagenet"
        kernel, stride = (7, 2) if large else (3, 1)
        self.conv1 = nn.Conv2d(3, width, kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        layers, inside = [], width
        for level, count in enumerate(blocks):
            for index in range(count):
                stride = 2 if level and not index else 1
                layers.append(_Block(inside, width * 2**level, stride, bottleneck))
                inside = width * 2**level * (4 if bottleneck else 1)
        self.layers = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x))))
        x = torch.flatten(self.avgpool(self.layers(x)), 1)
        result: Tensor = self.fc(x)
        return result


def resnet50(classes: int = 1000) -> ResNet:
    """ResNet-50, 25.6 million parameters."""
    return ResNet((3, 4, 6, 3), 64, bottleneck=True, classes=classes, stem="imagenet")


def resnet152(classes: int = 1000) -> ResNet:
    """ResNet-152, 60.2 million parameters."""
    return ResNet((3, 8, 36, 3), 64, bottleneck=True, classes=classes, stem="imagenet")


class _Attention(nn.Module):
    """Causal self-attention written with matmul, softmax and a mask."""

    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        mask = torch.tril(torch.ones(context, context)).view(1, 1, context, context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        mask: Tensor = self.get_buffer("mask")[:, :, :length, :length]
        scores = scores.masked_fill(mask == 0, float("-inf"))
        y = self.dropout(torch.softmax(scores, dim=-1)) @ v
        result: Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return result


class _GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, context: int, dropout: float, gelu: str) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads, context, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gelu = nn.GELU(approximate=gelu)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x))
        result: Tensor = x + self.dropout(self.down(self.gelu(self.up(self.ln2(x)))))
        return result


class GPT(nn.Module):
    """A GPT-2-like language model with pre-norm blocks. ``gelu``: none, tanh."""

    def __init__(
        self,
        vocabulary: int = 50,
        context: int = 16,
        width: int = 16,
        heads: int = 2,
        layers: int = 2,
        *,
        dropout: float = 0.0,
        gelu: str = "none",
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_GptBlock(width, heads, context, dropout, gelu) for _ in range(layers)))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        result: Tensor = self.head(self.ln(self.blocks(self.wte(ids) + self.wpe(positions))))
        return result


class MLP(nn.Module):
    """Linear layers with ReLU (and dropout) between. ``final``: softmax, sigmoid, or nothing."""

    def __init__(self, sizes: Sequence[int] = (8, 16, 4), *, dropout: float = 0.0, final: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)
        self.final = final

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x if not index else self.dropout(functional.relu(x)))
        if self.final == "softmax":
            return torch.softmax(x, dim=1)
        return torch.sigmoid(x) if self.final == "sigmoid" else x


class TwoHeads(nn.Module):
    """A shared convolution, a map and a class: two outputs."""

    def __init__(self, channels: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.map = nn.Conv2d(channels, 1, 1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = functional.relu(self.stem(x))
        return self.map(x), self.fc(x.mean(dim=(2, 3)))


class Grouped(nn.Module):
    """Depthwise and grouped convolutions of ``rank`` axes: strided, dilated, multiplied, transposed."""

    def __init__(self, rank: int, inputs: int = 3, classes: int = 10) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        up = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[rank - 1]
        layers: list[nn.Module] = [
            conv(inputs, 8, 3, padding=1, bias=False),
            conv(8, 8, 3, padding=1, groups=8, bias=False),
            conv(8, 12, 1),
            conv(12, 24, 5, stride=2, padding=2, groups=12, bias=False),
            conv(24, 16, 3, padding=2, dilation=2, groups=4, bias=False),
            up(16, 16, 3, stride=2, padding=1, output_padding=1, groups=16),
            up(16, 8, 3, padding=1, groups=2),
        ]
        self.body = nn.Sequential(*(nn.Sequential(layer, norm(layer.out_channels)) for layer in layers))  # type: ignore[arg-type]
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = functional.relu(layer(x))
        made: Tensor = self.head(x.mean(tuple(range(2, x.dim()))))
        return made


def export(
    model: nn.Module,
    inputs: Sequence[Tensor],
    path: Path | str,
    exporter: str = "torchscript",
    *,
    training: bool = True,
    dynamic: Sequence[int] = (),
    opset: int | None = None,
    names: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
    **options: Any,
) -> Path:
    """Write ``model`` as ONNX, as a user should; ``dynamic`` axes of all inputs are left open."""
    model.train(training)
    mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
    shared: dict[str, Any] = {"input_names": list(names), "output_names": list(outputs), **options}
    if exporter == "torchscript":
        shared |= {"dynamo": False, "opset_version": opset or 17, "training": mode}
        shared |= {"do_constant_folding": not training}
        if dynamic:
            shared["dynamic_axes"] = {name: {axis: f"d{axis}" for axis in dynamic} for name in names}
    else:
        shared |= {"dynamo": True, "opset_version": opset or 18, "verbose": False}
        shared |= {"optimize": not training, "external_data": options.get("external_data", False)}
        if dynamic:
            axes = dict.fromkeys(dynamic, torch.export.Dim.DYNAMIC)
            shared["dynamic_shapes"] = tuple(axes for _ in names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(model, tuple(inputs), str(path), **shared)
    return Path(path)


def exact(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The outputs of ``model`` in float64, norms as in training."""
    model = model.double().train()
    doubled = [x.double() if x.is_floating_point() else x for x in inputs]
    with torch.no_grad():
        result = model(*doubled)
    return result if isinstance(result, tuple) else (result,)


Family = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]


def families() -> dict[str, Family]:
    """Name -> (model, example inputs): what every importer and gradient test goes through."""
    ways = (
        *(("instance", "maxpool", "transpose"), ("batch", "stride", "nearest")),
        *(("group", "maxpool", "trilinear"), ("group", "stride", "transpose")),
        *(("batch", "maxpool", "trilinear"), ("instance", "stride", "nearest")),
    )
    found: dict[str, Family] = {
        f"unet-{norm}-{down}-{up}": (
            partial(UNet3d, norm=norm, down=down, up=up), lambda: (torch.randn(2, 1, 8, 8, 8),)
        )
        for norm, down, up in ways
    }  # fmt: skip
    small = partial(ResNet, (1, 2), 4, bottleneck=True, stem="imagenet")
    return found | {
        "resnet": (ResNet, lambda: (torch.randn(4, 3, 16, 16),)),
        "bottleneck": (small, lambda: (torch.randn(2, 3, 32, 32),)),
        "gpt": (GPT, lambda: (torch.randint(0, 50, (2, 12)),)),
        "gpt-tanh-tied": (partial(GPT, gelu="tanh", tied=True), lambda: (torch.randint(0, 50, (2, 16)),)),
        "mlp": (MLP, lambda: (torch.randn(5, 8),)),
        "two-heads": (TwoHeads, lambda: (torch.randn(2, 1, 6, 6),)),
    }
