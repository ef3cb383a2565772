"""Other sizes than a file was written at: the network is the module's there too, or refuses by axis."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oocdl
from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx
from oocdl.pytorch import export as exporting
from oocdl.pytorch.comparison.file_pass import inference_pass
from oocdl.pytorch.exporters import EXPORTERS
from tests.kit.plain_files import WAYS, export_as
from tests.kit.torch_modules import error
from tests.kit.turns import some_of

SIZE, OTHER = (8, 8), (16, 12)
"""Of the images that a network is exported for, and of others."""


class Sized(nn.Module):
    """A convolution, a function of what it makes, and a convolution of one voxel."""

    def __init__(self, middle: Callable[[Tensor], Tensor], channels: int = 3) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv2d(1, 3, 3, padding=1), middle
        self.last = nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.middle(self.first(x)))
        return made


def _attention(x: Tensor) -> Tensor:
    rows = x.flatten(2).transpose(1, 2)
    made = F.scaled_dot_product_attention(rows, rows, rows)
    return made.transpose(1, 2).reshape(x.shape)


def _levels(x: Tensor) -> Tensor:
    small = F.relu(F.max_pool2d(x, 2))
    return x + F.interpolate(small, size=x.shape[2:], mode="bilinear", align_corners=False)


def _to_sixteen(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[3] % 16, 0, -x.shape[2] % 16))


def _columns(x: Tensor) -> Tensor:
    return torch.stack([x[..., column] for column in range(x.shape[3])]).cumsum(0).movedim(0, 3)


NETWORKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "a sum divided by h w": lambda x: x * (x.sum((2, 3), keepdim=True) / (x.shape[2] * x.shape[3])),
    "divided by the root of h w": lambda x: x / math.sqrt(x.shape[2] * x.shape[3]),
    "AdaptiveAvgPool2d(4)": lambda x: F.adaptive_avg_pool2d(x, 4),
    "AdaptiveAvgPool2d(1)": lambda x: x * F.adaptive_avg_pool2d(x, 1),
    "AdaptiveMaxPool2d(2)": lambda x: F.adaptive_max_pool2d(x, 2),
    "the upper half": lambda x: x[:, :, : x.shape[2] // 2],
    "without a border": lambda x: x[:, :, 1:-1, 1:-1],
    "the first five": lambda x: x[:, :, :5, :5],
    "a reflecting border": lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"),
    "a circular border": lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"),
    "half the size, by size": lambda x: F.interpolate(x, size=(x.shape[2] // 2, x.shape[3] // 2)),
    "twice the size, by scale": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "five thirds of the size": lambda x: F.interpolate(x, scale_factor=5 / 3, mode="bilinear"),
    "0.7 of the size": lambda x: F.interpolate(x, scale_factor=0.7),
    "down and up again": _levels,
    "padded to a multiple of 16": _to_sixteen,
    "twice where it is large": lambda x: 2 * x if x.shape[2] > 12 else x,
    "a loop over columns": _columns,
    "LayerNorm over space": lambda x: F.layer_norm(x, x.shape[2:]),
    "attention over places": _attention,
    "a grid of places": lambda x: x + torch.linspace(-1, 1, x.shape[3], dtype=x.dtype),
    "rolled by half": lambda x: x.roll(x.shape[2] // 2, 2),
    "rolled by a sixteenth": lambda x: x.roll(1 + x.shape[2] // 16, 2),
    "rolled by 1 + h / 64": lambda x: x.roll(1 + x.shape[2] // 64, 2),
    "rolled along all axes": lambda x: torch.roll(x, (1, 0, -1, 2), (0, 1, 2, 3)),
    "rolled as a row": lambda x: x.roll(2),
    "padded to sixteens by ceil": lambda x: F.pad(x, (0, math.ceil(x.shape[3] / 16) * 16 - x.shape[3])),
    "times the batch by ceil": lambda x: x * math.ceil(x.shape[0] / 4),
    "products of columns": lambda x: x.cumprod(3) + torch.cumprod(x, dim=1),
    "the last row": lambda x: x + x[:, :, x.shape[2] - 1 :],
}
"""By what the middle does; it keeps three channels."""


def network(name: str) -> nn.Module:
    """One of them, in float64."""
    torch.manual_seed(0)
    return Sized(NETWORKS[name]).double()


FIXED = {
    "AdaptiveMaxPool2d(2)": "adaptive",
    "divided by the root of h w": "test_open_axes.py",
    "twice where it is large": "x_2 <= 12",
    "a loop over columns": "test_open_axes.py",
    "a grid of places": "test_open_axes.py",
    "products of columns": "cumprod",
    "padded to sixteens by ceil": "its file is another network",
}
"""Networks that are not free of size, and what the refusal names."""

UNSEEN = (
    *("AdaptiveAvgPool2d(4)", "AdaptiveMaxPool2d(2)", "twice where it is large", "rolled by half"),
    *("rolled by a sixteenth", "padded to sixteens by ceil", "times the batch by ceil"),
)
"""Networks of which a file written at one size may hold nothing that tells them from others."""

EXACT_TO = 1e-12
"""Of float64."""


def predicted(model: OnnxModel, x: Tensor, weights: nn.Module) -> Tensor:
    """What a file predicts with a module's weights."""
    (port,) = model.inputs
    made = inference_pass(model, {port.name: tuple(x.shape)}, "float64")
    held = {name: torch.as_tensor(item.raw()).double() for name, item in model.initializers.items()}
    (result,) = made.run(held, {port.name: x}, {}).values()
    return result


@pytest.mark.parametrize(("name", "exporter"), some_of(NETWORKS, EXPORTERS))
def test_a_module_at_other_sizes(
    name: str, exporter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "EXPORTERS", {exporter: EXPORTERS[exporter]})
    module, example = network(name), torch.zeros(1, 1, *SIZE, dtype=torch.float64)
    try:
        model = inspect_onnx(oocdl.from_torch(module, example, tmp_path / "net.onnx"))
    except UnsupportedError as why:
        assert f"{exporter}: " in str(why)
        pytest.skip(f"not written: {str(why)[:200]}")
    for size in (SIZE, (12, 12), OTHER, (9, 7), (20, 40), (130, 9)):
        x = torch.randn(2 + 3 * (size == OTHER), 1, *size, dtype=torch.float64)
        try:
            found = predicted(model, x, module)
        except ModelError as why:
            assert size != SIZE and name in FIXED, f"{size}: {why}"
            assert "axis" in str(why) or FIXED[name] in str(why)
            continue
        with torch.no_grad():
            assert error(found, module(x)) <= EXACT_TO, size


def _to_even(x: Tensor) -> Tensor:
    high, wide = x.shape[2] % 2 == 1, x.shape[3] % 2 == 1
    return F.pad(x, (0, int(wide), 0, int(high)))


def _by_the_shorter_side(x: Tensor) -> Tensor:
    return x.roll(3, 2) if min(x.shape[2:]) > 7 else x


def _in_blocks(x: Tensor) -> Tensor:
    if x.shape[2] % 64 or x.shape[2] < 128:
        raise ValueError("two blocks of 64 at least")
    return x


@pytest.mark.parametrize(
    ("middle", "size", "other", "refused"),
    [
        (_to_even, (9, 12), (21, 18), (20, 18)),
        (_by_the_shorter_side, (9, 12), (18, 20), (20, 18)),
        (_in_blocks, (128, 12), (256, 10), (64, 12)),
    ],
)
def test_axes_may_need_sizes_of_different_kinds(
    middle: Callable[[Tensor], Tensor],
    size: tuple[int, int],
    other: tuple[int, int],
    refused: tuple[int, int],
    tmp_path: Path,
) -> None:
    module = Sized(middle).double()
    made = oocdl.from_torch(module, torch.zeros(1, 1, *size, dtype=torch.float64), tmp_path / "net.onnx")
    model, x = inspect_onnx(made), torch.randn(2, 1, *other, dtype=torch.float64)
    with torch.no_grad():
        assert error(predicted(model, x, module), module(x)) <= EXACT_TO
    with pytest.raises(ModelError, match=r"test_open_axes\.py"):
        predicted(model, torch.zeros(2, 1, *refused, dtype=torch.float64), module)


def test_a_size_without_another_one_is_refused_with_what_it_has_to_be(tmp_path: Path) -> None:
    module = Sized(lambda x: x if x.shape[2] % 500 == 0 else x[:, 0])
    model = inspect_onnx(oocdl.from_torch(module, torch.zeros(2, 1, 500, 4), tmp_path / "net.onnx"))
    with pytest.raises(ModelError, match=r"no other size .*x_2 % 500.* \(test_open_axes\.py:"):
        predicted(model, torch.zeros(2, 1, 250, 4), module)


@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_what_pytorch_asks_to_choose_a_kernel_is_no_condition(
    kind: Callable[..., nn.Module], batch: int, tmp_path: Path
) -> None:
    # Of numbers in float32 it asks whether a convolution has 16 samples.
    module = kind(2, 3, 3)
    rank = module.weight.dim() - 2  # type: ignore[operator, union-attr]
    made = oocdl.from_torch(
        module, torch.zeros(batch, 2, *[8] * rank), tmp_path / "net.onnx", dynamic="space"
    )
    model = inspect_onnx(made)
    assert model.metadata is not None and model.metadata.sizes.conditions == ()
    for other in (2, 15, 16, 33):
        x = torch.randn(other, 2, *[9] * rank, dtype=torch.float64)
        with torch.no_grad():
            assert error(predicted(model, x, module), copy.deepcopy(module).double()(x)) <= EXACT_TO


def test_the_batch_is_open_where_other_sizes_cannot_be_followed(tmp_path: Path) -> None:
    module = Sized(
        lambda x: x * {SIZE[0]: 2.0}.get(int(x.shape[2]), 3.0) if hash(x.shape[2:]) else x
    ).double()
    model = inspect_onnx(oocdl.from_torch(module, torch.randn(2, 1, *SIZE).double(), tmp_path / "net.onnx"))
    x = torch.randn(5, 1, *SIZE, dtype=torch.float64)
    assert error(predicted(model, x, module), module(x).detach()) <= EXACT_TO
    with pytest.raises(ModelError, match="its sizes cannot be followed: TypeError: unhashable"):
        predicted(model, torch.zeros(2, 1, *OTHER, dtype=torch.float64), module)


def _kernel_of_each_sample(x: Tensor) -> Tensor:
    groups = 3 * x.shape[0]
    kernels = x.mean((2, 3)).view(groups, 1, 1, 1)
    return F.conv2d(x.flatten(0, 1)[None], kernels, groups=groups).view(x.shape)


def _halves(x: Tensor) -> Tensor:
    """Halves of a batch, each with a number of its own, as norms for two kinds of samples have."""
    return torch.cat([half * by for half, by in zip(x.split(x.shape[0] // 2), (1, 3), strict=True)])


@pytest.mark.parametrize("middle", [_kernel_of_each_sample, _halves])
def test_what_is_made_of_a_number_of_samples_fixes_the_batch(
    middle: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    # As StyleGAN has kernels.
    module, x = Sized(middle).double(), torch.randn(2, 1, *OTHER, dtype=torch.float64)
    model = inspect_onnx(oocdl.from_torch(module, torch.zeros_like(x), tmp_path / "net.onnx"))
    assert model.inputs[0].dims[0] == 2
    assert error(predicted(model, x, module), module(x).detach()) <= EXACT_TO


AVERAGES = (
    *((1, nn.AdaptiveAvgPool1d(7)), (2, nn.AdaptiveAvgPool2d((7, 1))), (2, nn.AdaptiveAvgPool2d((None, 3)))),
    *((3, nn.AdaptiveAvgPool3d((2, 3, 7))), (2, nn.Upsample((7, 3), mode="area"))),
)


@pytest.mark.parametrize(("rank", "pool"), AVERAGES)
def test_adaptive_averages_are_right_at_any_size(rank: int, pool: nn.Module, tmp_path: Path) -> None:
    # As in VGG on small images: windows of other sizes than those compared may be of another kind.
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](3, 4, 1)
    module = nn.Sequential(conv, pool).double()
    example = torch.zeros(2, 3, *[16] * rank, dtype=torch.float64)
    model = inspect_onnx(oocdl.from_torch(module, example, tmp_path / "net.onnx", dynamic="space"))
    onnx.checker.check_model(model.path, full_check=True)  # other runtimes read it, too
    for size in (2, 3, 5, 7, 14, 16, 19):
        x = torch.randn(2, 3, *range(size, size + rank), dtype=torch.float64)
        assert error(predicted(model, x, module), module(x).detach()) <= EXACT_TO


ROUNDED: Mapping[str, tuple[Callable[[int], int], str]] = {
    "ceil": (lambda columns: math.ceil(columns / 128), ""),
    "floor": (lambda columns: math.floor(columns / 2), ""),
    "floor of a whole number": (lambda columns: math.floor(columns // 128), ""),
    "floor of a product": (lambda columns: math.floor(columns * 0.29), "test_open_axes.py"),
}
"""What code makes of a size, the same at all sizes that are compared or rounded in float32; what fixes it."""


@pytest.mark.parametrize("name", ROUNDED)
def test_a_size_that_is_rounded_is_no_constant(name: str, tmp_path: Path) -> None:
    times, fixed = ROUNDED[name]
    module = Sized(lambda x: x * times(x.shape[3])).double()
    made = oocdl.from_torch(module, torch.zeros(1, 1, 8, 8, dtype=torch.float64), tmp_path / "net.onnx")
    for columns in (8, 130, 1000):
        x = torch.randn(2, 1, 8, columns, dtype=torch.float64)
        try:
            found = predicted(inspect_onnx(made), x, module)
        except ModelError as why:
            assert columns != 8 and fixed in str(why) != ""
            continue
        with torch.no_grad():
            assert error(found, module(x)) <= EXACT_TO, columns


@pytest.mark.parametrize(("name", "way"), some_of(NETWORKS, WAYS))
def test_a_plain_file_at_other_sizes(name: str, way: str, tmp_path: Path) -> None:
    """Exported at one size, with no axis named: what looks like a size is refused, and the rest is said."""
    module = network(name).float()
    try:
        file = export_as(module, [torch.zeros(2, 1, *SIZE)], tmp_path / "net.onnx", way)
        model = inspect_onnx(file)
        model.bind(exporting.RULES)
    except Exception as why:  # exporters raise whatever they like
        pytest.skip(f"not exported: {str(why)[:100]}")
    for size in (SIZE, OTHER):
        x = torch.randn(2, 1, *size, dtype=torch.float64)
        try:
            found = predicted(model, x, module)
        except ModelError as why:
            assert size != SIZE and "\n" not in str(why)
            continue
        with torch.no_grad():
            wanted = module.double()(x)
        if size == SIZE or name not in UNSEEN:
            assert error(found, wanted) <= 1e-6, size
        if size != SIZE:
            remarks = model.bind(exporting.RULES, {model.inputs[0].name: (2, 1, *size)}).trained.remarks
            assert "the file fixes input" in remarks[-1].text and "dynamic axes" in remarks[-1].cure
