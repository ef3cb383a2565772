"""Modules that do what a file may lose: state, random numbers, cut gradients, odd arguments."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Does(nn.Module):
    """A linear layer, some state, and a function of the input and the layer's result."""

    def __init__(self, what: Callable[..., Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.n: Any = 0
        self.kept: Any = None
        self.held: dict[str, Any] = {"list": []}
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("seen", torch.ones(()))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("tenth", torch.tensor(0.1))
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return self.what(self, x, self.fc(x))


COUNT = [0]
STATE = torch.ones(4, dtype=torch.float64)


def assigned_buffer(self: Does, x: Tensor, y: Tensor) -> Tensor:
    self.seen = self.seen + 1
    return y * self.seen


def clamped_without_gradient(self: Does, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        y.clamp_(-0.2, 0.2)
    return y * x


def clamped_data(self: Does, x: Tensor, y: Tensor) -> Tensor:
    y.data.clamp_(-0.2, 0.2)
    return y * x


def replaced_data(self: Does, x: Tensor, y: Tensor) -> Tensor:
    y.data = y.data.sign()
    return y * x


def layer_drop(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y if random.random() < 0.5 else x + y * 2


def shaken(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y * float(np.random.uniform())


def every_other_call(self: Does, x: Tensor, y: Tensor) -> Tensor:
    self.n += 1
    return y if self.n % 2 else 2 * y


def unread_counter(self: Does, x: Tensor, y: Tensor) -> Tensor:
    self.n += 1
    return y


def kept_result(self: Does, x: Tensor, y: Tensor) -> Tensor:
    last, self.kept = self.kept, y.detach()
    return y if last is None else y + last


def kept_and_unread(self: Does, x: Tensor, y: Tensor) -> Tensor:
    self.kept = y
    return y


def global_counter(self: Does, x: Tensor, y: Tensor) -> Tensor:
    COUNT[0] += 1
    return y * COUNT[0]


def global_tensor(self: Does, x: Tensor, y: Tensor) -> Tensor:
    STATE.mul_(1.5)
    return y * STATE.to(y.dtype)


def growing_list(self: Does, x: Tensor, y: Tensor) -> Tensor:
    self.held["list"].append(1)
    return y * len(self.held["list"])


def by_the_clock(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y * (1 + time.time_ns() % 1000)


def own_generator(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y * torch.rand(4, generator=self.generator, dtype=y.dtype)


def new_generator(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y * torch.rand(4, generator=torch.Generator().manual_seed(1), dtype=y.dtype)


def seeded(self: Does, x: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(y, 0.5)


def seeded_inside(self: Does, x: Tensor, y: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return F.dropout(y, 0.5)


def turned_off(self: Does, x: Tensor, y: Tensor) -> Tensor:
    made = self.norm(y)
    self.norm.eval()
    return made


def clamped_weights(self: Does, x: Tensor, y: Tensor) -> Tensor:
    self.fc.weight.data.clamp_(-0.3, 0.3)
    return y


def straight_through(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y + (y.round() - y).detach()


def gradient_inside(self: Does, x: Tensor, y: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
    return y + slope.square()


def as_array(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y * torch.as_tensor(np.tanh(y.detach().numpy()))


def as_number(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y * y.max().item()


def branch_on_data(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y if y.sum() > 0 else -y


def twice_normed(self: Does, x: Tensor, y: Tensor) -> Tensor:
    made: Tensor = self.norm(self.norm(y) * 2 + x)
    return made


def own_weights_transposed(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(y) @ self.fc.weight


def in_place_chain(self: Does, x: Tensor, y: Tensor) -> Tensor:
    y = y * 1
    y.mul_(2).add_(x)
    return y.relu_() + y


def assigned_slice(self: Does, x: Tensor, y: Tensor) -> Tensor:
    y = y * 1
    y[:, 0] = x[:, 1] ** 2
    y[:, 1:3] += 1
    return y


def assigned_mask(self: Does, x: Tensor, y: Tensor) -> Tensor:
    y = y * 1
    y[x > 0] = 0.5
    return y


def label_smoothing(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y * F.cross_entropy(y, x.argmax(1), label_smoothing=0.3)


def weighted_entropy(self: Does, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(1, 2, 4, dtype=y.dtype)
    return y * F.cross_entropy(y, x.argmax(1), weight=weight, ignore_index=2, reduction="sum")


def scattered_mean(self: Does, x: Tensor, y: Tensor) -> Tensor:
    places = torch.tensor([[0, 1, 1, 0]]).expand(x.shape[0], 4)
    return y.scatter_reduce(1, places, x * y, "mean", include_self=False)


def safe_logarithm(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(y > 0, torch.log(y.clamp(min=1e-3)), y)


def hidden_rows(self: Does, x: Tensor, y: Tensor) -> Tensor:
    scores = y.masked_fill(x > 10, -math.inf)
    return torch.softmax(scores.masked_fill(x.sum(1, keepdim=True) > 0, -1e4), 1)


def normalized(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return F.normalize(y, dim=1) + torch.linalg.vector_norm(y, dim=1, keepdim=True) + y.std(1, keepdim=True)


def largest(self: Does, x: Tensor, y: Tensor) -> Tensor:
    top = y.topk(2, 1)
    return y + top.values.sum(1, keepdim=True) + y.sort(1, descending=True).values


def halved(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y.half().to(y.dtype) * 2


def autocast(self: Does, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.tanh(self.fc(y)).to(x.dtype)


def recomputed(self: Does, x: Tensor, y: Tensor) -> Tensor:
    made: Tensor = checkpoint(lambda z: torch.tanh(self.fc(z)), y, use_reentrant=False)
    return made


def weights_in_a_mask(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return x @ (self.fc.weight * (self.fc.weight.data > 0)).T


def integers(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y * (x * 3).long().remainder(3) + y * torch.floor(x) + y * torch.round(x * 2) + y * (x * 4).fmod(3)


def sizes_in_numbers(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y * int(x.shape[0])


def shifted_at_random(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y.roll(int(torch.randint(0, 2, ())), 1)


def many_outputs(self: Does, x: Tensor, y: Tensor) -> Any:
    return {"a": y * 2, "b": (y + 1, None)}


@dataclass(frozen=True)
class Case:
    """A module, the shape of a sample, and what is to come of it."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4,)
    refused: str = ""
    """A pattern of the refusal; '' for a module that trains as PyTorch does."""
    batch: int = 2


def does(what: Callable[..., Any], refused: str = "", batch: int = 2) -> Case:
    return Case(lambda: Does(what), refused=refused, batch=batch)


def image(*layers: Callable[[], nn.Module], refused: str = "", channels: int = 4) -> Case:
    """A convolution to four channels, some layers, and one to two."""

    def make() -> nn.Module:
        made = [layer() for layer in layers]
        return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *made, nn.Conv2d(channels, 2, 1))

    return Case(make, (2, 8, 8), refused)


class Calls(nn.Module):
    """A function as a layer."""

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return self.what(x)


CASES: Mapping[str, Case] = {
    "an assigned buffer": does(assigned_buffer, "seen"),
    "clamped without gradient": does(clamped_without_gradient, "a gradient is cut by clamp_"),
    "clamped .data": does(clamped_data, "a gradient is cut by clamp_, in place under .data"),
    "replaced .data": does(replaced_data, r"replaced by \.data"),
    ".data in a mask": does(lambda self, x, y: y * (y.data > 0)),
    "weights in a mask": does(weights_in_a_mask),
    "the batch's number": does(sizes_in_numbers, batch=1),
    "Python's random": does(layer_drop, "Python's random"),
    "NumPy's random": does(shaken, "NumPy's random"),
    "every other call": does(every_other_call, "'n'|calls|counter"),
    "a counter that nothing reads": does(unread_counter),
    "a result that is kept": does(kept_result, "what an earlier call has computed"),
    "a result that nobody reads": does(kept_and_unread),
    "a global counter": does(global_counter, "call"),
    "a global tensor": does(global_tensor, "lives longer than a call"),
    "a growing list": does(growing_list, "held"),
    "the clock": does(by_the_clock, "call"),
    "a generator of its own": does(own_generator, "generator"),
    "a new generator": does(new_generator, "generator"),
    "seeded": does(seeded, "seed"),
    "seeded inside": does(seeded_inside, "seed"),
    "a norm that is turned off": does(turned_off, "two calls with equal inputs differ in 'norm'"),
    "clamped weights": does(clamped_weights, "'fc.weight' is changed"),
    "straight through": does(straight_through, "the gradient is cut by detach"),
    "a gradient inside": does(gradient_inside, "does not require grad"),
    "numbers as an array": does(as_array, "leave PyTorch"),
    "a number": does(as_number, "read as one of Python's"),
    "a branch on data": does(branch_on_data, "read as one of Python's"),
    "normed twice": does(twice_normed),
    "its weights transposed": does(own_weights_transposed),
    "in place": does(in_place_chain),
    "assigned slices": does(assigned_slice),
    "an assigned mask": does(assigned_mask),
    "label smoothing": does(label_smoothing),
    "weighted entropy": does(weighted_entropy),
    "scattered means": does(scattered_mean),
    "a safe logarithm": does(safe_logarithm),
    "hidden rows": does(hidden_rows),
    "norms of rows": does(normalized),
    "the largest": does(largest),
    "half precision": does(halved),
    "autocast": does(autocast),
    "recomputed": does(recomputed),
    "integers": does(integers),
    "outputs in a tree": does(many_outputs),
    # The gradient of a vector shorter than its eps goes on through the length; a file's does not.
    "likeness": does(lambda self, x, y: y * F.cosine_similarity(x, y, 1)[:, None], "a gradient is cut by"),
    "roots and digits": does(
        lambda self, x, y: y.norm(3, 1, keepdim=True) + y.round(decimals=1) + torch.log2(1 + y.abs())
    ),
    "a tenth in float32": does(lambda self, x, y: y * torch.tensor(0.1) + self.tenth),
    "pi in float32": does(lambda self, x, y: y * torch.tensor(math.pi) + x / 3 + torch.tensor([1 / 7])),
    "statistics that are read": does(
        lambda self, x, y: self.norm(y) + self.norm.running_mean,
        "'norm.running_mean' is changed by its norm, and read",
    ),
    "a number of one": does(lambda self, x, y: y * self.temperature),
    "a random number that is read": does(shifted_at_random, "read as one of Python's"),
    "numbers around others": does(lambda self, x, y: torch.normal(y, 0.1 * x.abs()), "of aten.normal"),
    "AvgPool(divisor_override)": image(lambda: nn.AvgPool2d(2, divisor_override=3)),
    "AvgPool(count_include_pad)": image(
        lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)
    ),
    "MaxPool(ceil_mode)": image(lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
    "BatchNorm(momentum=None)": image(lambda: nn.BatchNorm2d(4, momentum=None), refused="momentum"),
    "BatchNorm without statistics": image(lambda: nn.BatchNorm2d(4, track_running_stats=False)),
    "InstanceNorm with statistics": image(
        lambda: nn.InstanceNorm2d(4, track_running_stats=True), refused="'1.running_mean' is changed"
    ),
    "Dropout(1)": image(lambda: nn.Dropout(1.0)),
    "RReLU": image(nn.RReLU, refused="rrelu"),
    "PixelShuffle": image(lambda: nn.PixelShuffle(2), channels=1),
    "bicubic": image(lambda: nn.Upsample(scale_factor=1.7, mode="bicubic")),
    "antialiased": image(
        lambda: Calls(lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True))
    ),
    "a grid": image(
        lambda: Calls(lambda x: F.grid_sample(x, x[:, :2].movedim(1, 3) * 2, align_corners=False))
    ),
    "local responses": image(lambda: nn.LocalResponseNorm(3)),
    "spectral norm": image(
        lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1)),
        refused="is changed by the forward",
    ),
    "weight norm": image(lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))),
    "reflected": image(lambda: nn.Conv2d(4, 4, 5, padding=2, padding_mode="reflect")),
    "uneven groups": image(lambda: nn.Conv2d(4, 8, 3, stride=2, dilation=2, groups=2), channels=8),
    "transposed": image(lambda: nn.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1, groups=2)),
}
