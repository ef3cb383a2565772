"""PyTorch modules that ONNX alone would get wrong, trained by ``fit(module)`` and by PyTorch.

``check`` is what each has to pass: losses, every entry of ``state_dict`` after ``load_into``, predictions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oocdl
from oocdl.optim import SGD
from tests.kit.models import GPT, MLP, ResNet, TwoHeads, UNet3d
from tests.kit.nets import write_data
from tests.kit.runs import in_torch, losses_of
from tests.kit.settings import EXACT

STEPS, SAMPLES = 3, 3
TOLERANCE = 1e-9
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Case:
    """A module, data for it, and a loss in oocdl and in PyTorch."""

    make: Callable[[], nn.Module]
    arrays: Callable[[np.random.Generator], Arrays]
    loss: Any = "mse"
    truth: Callable[[Any, Mapping[str, Tensor]], Tensor] = lambda y, data: F.mse_loss(y, data["target"])
    inputs: tuple[str, ...] = ("x",)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``fit``."""


def away_from_start(module: nn.Module) -> nn.Module:
    """In float64, no longer as fresh as exporters like to merge and fold; equal tensors stay equal."""
    module = module.double()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith(("weight", "bias")) and p.dim() > 1:
                p.add_(0.1 * torch.randn_like(p))
    return module


def train(case: Case, module: nn.Module, arrays: Arrays) -> list[float]:
    """Train ``module`` with PyTorch; return its losses."""
    data = {name: torch.as_tensor(array) for name, array in arrays.items()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    return in_torch(optimizer, [[lambda: case.truth(module(*map(data.get, case.inputs)), data)]] * STEPS)


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest number, or to 1e-3."""
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    found, wanted = found.double(), wanted.double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    away = (found - wanted).abs().where(~same, torch.zeros_like(found)).nan_to_num(float("inf"))
    return float(away.max()) / max(float(wanted.nan_to_num().abs().max()), 1e-3)


def fit(case: Case, module: Any, folder: Path, **options: Any) -> oocdl.Run:
    """Three steps over all samples at once, in float64."""
    names = inspect.signature(module.forward).parameters
    return oocdl.fit(
        module,
        folder / "data.zarr",
        workdir=folder / "net.run",
        **{
            **EXACT,
            "loss": case.loss,
            "optimizer": SGD(lr=0.05, momentum=0.9, weight_decay=0.1),
            "steps": STEPS,
            "batch_size": SAMPLES,
            "inputs": dict(zip(names, case.inputs, strict=False)),
            **case.options,
            **options,
        },
    )


def check(case: Case, folder: Path, seed: int = 0) -> oocdl.Run:
    """Train a module both ways, and compare everything."""
    torch.manual_seed(seed)
    module = away_from_start(case.make())
    arrays = case.arrays(np.random.default_rng(seed))
    write_data(folder / "data.zarr", arrays)
    twin, before = copy.deepcopy(module), copy.deepcopy(module.state_dict())
    run = fit(case, module, folder)
    assert all(
        torch.equal(old, new) for old, new in zip(before.values(), module.state_dict().values(), strict=True)
    )
    losses = train(case, twin, arrays)
    np.testing.assert_allclose(losses_of(run), losses, rtol=TOLERANCE, atol=0)
    run.load_into(module)
    found, wanted = module.state_dict(), twin.state_dict()
    errors = {name: error(found[name], wanted[name]) for name in wanted}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= TOLERANCE, (worst, errors[worst])
    for name, p in twin.named_parameters(remove_duplicate=False):  # a run has the names of PyTorch
        if p.grad is not None:
            assert error(torch.as_tensor(run.weights[name][...]), p.detach()) <= TOLERANCE, name
    predicts_alike(case, run, module.eval(), folder, arrays)
    return run


def predicts_alike(case: Case, run: oocdl.Run, module: nn.Module, folder: Path, arrays: Arrays) -> None:
    """What the module in evaluation mode predicts with the loaded weights, the run does."""
    group = run.predict(folder / "data.zarr", folder / "out.zarr", memory="4GiB", batch_size=SAMPLES)
    with torch.no_grad():
        made = module(*(torch.as_tensor(arrays[name]) for name in case.inputs))
    wanted = [made] if isinstance(made, Tensor) else list(made.values() if isinstance(made, dict) else made)
    assert len(wanted) == len(list(group.arrays()))
    names = made if isinstance(made, dict) else ["output"] if len(wanted) == 1 else ["output_0", "output_1"]
    for name, one in zip(names, wanted, strict=True):
        assert error(torch.as_tensor(np.asarray(group[name])), one) <= TOLERANCE, name


# --- data -------------------------------------------------------------------------------------


def vectors(width: int = 6, out: int = 3) -> Callable[[np.random.Generator], Arrays]:
    return lambda r: {"x": r.normal(size=(SAMPLES, width)), "target": r.normal(size=(SAMPLES, out))}


def images(channels: int = 2, out: int = 3, size: int = 8) -> Callable[[np.random.Generator], Arrays]:
    return lambda r: {
        "x": r.normal(size=(SAMPLES, channels, size, size)),
        "target": r.normal(size=(SAMPLES, out)),
    }


def sequences(length: int = 5) -> Callable[[np.random.Generator], Arrays]:
    return lambda r: {name: r.normal(size=(SAMPLES, length, 8)) for name in ("x", "target")}


def tokens(length: int = 6, words: int = 11) -> Callable[[np.random.Generator], Arrays]:
    """Ids that hold 0 and 1 more often than others, and labels."""
    return lambda r: {
        "x": r.choice([*range(words)] + [0, 1] * 5, (SAMPLES, length)),
        "target": r.integers(0, words, (SAMPLES, length)),
    }


def volume(r: np.random.Generator) -> Arrays:
    x = r.normal(size=(SAMPLES, 1, 8, 8, 8))
    return {"x": x, "target": (x[:, 0] > 0.3).astype("u1")}


def next_token(y: Tensor, data: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(y.transpose(1, 2), data["target"])


def per_voxel(y: Tensor, data: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(y, data["target"].long())


# --- modules ----------------------------------------------------------------------------------


class Encoding(nn.Module):
    """A buffer that is added to an input, as positional encodings are."""

    pe: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm1, self.norm2 = nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.register_buffer("pe", torch.linspace(-1, 1, 40).reshape(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm2(self.fc(self.norm1(x + self.pe[: x.shape[1]])))
        return result


class FrozenBatchNorm2d(nn.Module):
    """As torchvision's detection models have it: four buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.5), ("bias", 0.3), ("running_mean", 0.2), ("running_var", 2.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        w, b, mean, var = (self.get_buffer(n).reshape(1, -1, 1, 1) for n in (
            "weight", "bias", "running_mean", "running_var"))  # fmt: skip
        scale = w * (var + 1e-5).rsqrt()
        return x * scale + (b - mean * scale)


class Head(nn.Module):
    """Convolutions with any norm between, an average and a linear layer."""

    def __init__(self, norm: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=bias)
        self.norm = norm
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        result: Tensor = self.fc(self.conv2(x).mean(dim=(2, 3)))
        return result


class Frozen(Head):
    """A backbone that gets no gradient, and whose norm is updated all the same."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(4))
        self.top = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            found = super().forward(x)
        made: Tensor = self.top(found)
        return made


class Codes(nn.Module):
    """The nearest of some codes, whose gradient goes to what it stands for, as in a VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 3)
        self.codes = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        nearest = self.codes[(z[:, None] - self.codes).square().sum(-1).argmin(1)]
        beside = (nearest - z.detach()).square().mean(1, keepdim=True)
        made: Tensor = self.decoder(z + (nearest - z).detach()) + beside
        return made


class Standardised(nn.Module):
    """Weight standardisation by a BatchNorm over the weight, as timm has it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.gain = nn.Parameter(torch.full((4, 1, 1, 1), 0.7))
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        w = self.conv.weight
        w = F.batch_norm(w.reshape(1, w.shape[0], -1), None, None, training=True).reshape_as(w) * self.gain
        result: Tensor = self.fc(F.relu(F.conv2d(x, w, self.conv.bias, padding=1)).mean(dim=(2, 3)))
        return result


class Words(nn.Module):
    """An embedding with a padding row, and a head that may be tied to it."""

    def __init__(self, padding_idx: int | None, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=padding_idx)
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.fc(self.table(x))))
        return result


class Shared(nn.Module):
    """One block, and one BatchNorm, used twice; a layer that forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.unused = nn.Linear(2, 2)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.block(self.block(x)))
        return result


class Named(nn.Module):
    """Two inputs and two outputs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(5, 4)
        self.kind, self.size = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, image: Tensor, age: Tensor) -> dict[str, Tensor]:
        x = torch.sigmoid(self.left(image) + self.right(age))
        return {"kind": self.kind(x), "size": self.size(x)}


def named_data(r: np.random.Generator) -> Arrays:
    widths = {"image": 6, "age": 5, "size": 1}
    drawn = {name: r.normal(size=(SAMPLES, width)) for name, width in widths.items()}
    return {**drawn, "kind": r.integers(0, 3, SAMPLES)}


def in_evaluation(module: nn.Module, *names: str) -> nn.Module:
    """Put parts of a module into evaluation mode."""
    for name in names:
        module.get_submodule(name).eval()
    return module


def frozen(module: nn.Module, *names: str) -> nn.Module:
    """Freeze parts of a module as one does in PyTorch."""
    for name in names:
        module.get_submodule(name).requires_grad_(False)
    return module


def running(module: nn.Module) -> nn.Module:
    """With running statistics other than those of a fresh norm."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is not None:
            assert part.running_var is not None and part.num_batches_tracked is not None
            part.running_mean += 0.3
            part.running_var *= 1.7
            part.num_batches_tracked += 5
    return module


def encoder(layers: int = 1, norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def heads_loss(y: Any, data: Mapping[str, Tensor]) -> Tensor:
    return 0.7 * F.cross_entropy(y["kind"], data["kind"]) + 1.3 * F.mse_loss(y["size"], data["size"])


def maps_loss(y: Any, data: Mapping[str, Tensor]) -> Tensor:
    found = F.binary_cross_entropy_with_logits(y[0], data["map"])
    return 0.7 * found + 1.3 * F.cross_entropy(y[1], data["class"])


def maps(r: np.random.Generator) -> Arrays:
    x = r.normal(size=(SAMPLES, 1, 6, 6))
    return {"x": x, "map": (x > 0).astype("f8"), "class": r.integers(3, size=SAMPLES)}


WORDS = {"loss": "cross_entropy", "truth": next_token}
VOXELS = {"loss": "cross_entropy", "truth": per_voxel}

CASES: dict[str, Case] = {
    "mlp": Case(lambda: MLP((6, 7, 3)), vectors()),
    "zero biases, dropout of 0": Case(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.ReLU(), nn.Linear(6, 3)), vectors()),
    "a positional encoding, two equal LayerNorms": Case(Encoding, sequences()),
    "FrozenBatchNorm2d": Case(lambda: Head(FrozenBatchNorm2d(4), bias=False), images()),
    "a BatchNorm in evaluation mode": Case(
        lambda: in_evaluation(running(Head(nn.BatchNorm2d(4))), "norm"), images()),
    "norms in both modes": Case(
        lambda: in_evaluation(running(Head(nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4)))), "norm.1"),
        images()),
    "a BatchNorm in training mode": Case(lambda: running(Head(nn.BatchNorm2d(4, momentum=0.3))), images()),
    "a module in evaluation mode": Case(lambda: running(Head(nn.BatchNorm2d(4))).eval(), images()),
    "a BatchNorm without statistics": Case(
        lambda: Head(nn.BatchNorm2d(4, track_running_stats=False)), images()),
    "a BatchNorm without weights": Case(lambda: Head(nn.BatchNorm2d(4, affine=False)), images()),
    "GroupNorm": Case(lambda: Head(nn.GroupNorm(2, 4)), images()),
    "InstanceNorm": Case(lambda: Head(nn.InstanceNorm2d(4)), images()),
    "frozen parts": Case(lambda: frozen(Head(nn.BatchNorm2d(4)), "conv", "norm"), images()),
    "a frozen part under no_grad": Case(lambda: running(Frozen()), images()),
    "codes with straight-through gradients": Case(Codes, vectors()),
    "weight standardisation": Case(Standardised, images()),
    "padding_idx": Case(lambda: Words(padding_idx=0), tokens(), **WORDS),
    "a tied head": Case(lambda: Words(padding_idx=None, tied=True), tokens(), **WORDS),
    "a tied head with padding_idx": Case(lambda: Words(padding_idx=1, tied=True), tokens(), **WORDS),
    "a shared block, an unused layer": Case(Shared, vectors()),
    "a parametrization": Case(
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.Tanh(), nn.Linear(4, 3)),
        vectors()),
    "a compiled part": Case(
        lambda: nn.Sequential(torch.compile(nn.Linear(6, 5), backend="eager"), nn.Tanh(), nn.Linear(5, 3)),
        vectors()),
    "inputs and outputs by name": Case(
        Named, named_data, {"kind": ("cross_entropy", 0.7), "size": ("mse", 1.3)}, heads_loss,
        ("image", "age")),
    "two heads": Case(
        TwoHeads, maps, {"output_0": ("bce", 0.7), "output_1": ("cross_entropy", 1.3)}, maps_loss,
        options={"targets": {"output_0": "map", "output_1": "class"}}),
    "TransformerEncoder": Case(encoder, sequences()),
    "GPT": Case(lambda: GPT(vocabulary=11, context=6, width=8, heads=2, tied=True), tokens(), **WORDS),
    "ResNet": Case(lambda: ResNet((1, 1), 4, classes=3), images(3)),
    "3D U-Net with transposed convolutions": Case(
        lambda: UNet3d(classes=2, base=2, depth=1, norm="batch"), volume, **VOXELS),
    "3D U-Net with interpolation": Case(
        lambda: UNet3d(classes=2, base=2, depth=1, norm="group", up="trilinear"), volume, **VOXELS),
}  # fmt: skip
