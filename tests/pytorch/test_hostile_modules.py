"""Modules that do what a file may lose: state, random numbers, cut gradients, odd arguments.

Each is trained as PyTorch does, or refused by name; nothing in between. What is refused wherever a module is
written stands in ``test_from_torch``.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import oocdl
from oocdl.errors import UnsupportedError
from oocdl.pytorch import export as exporting
from oocdl.pytorch.exporters import EXPORTERS
from tests.kit.beside import Course, beside
from tests.kit.turns import some_of


class Does(nn.Module):
    """A linear layer, some state, and a function of the input and the layer's result."""

    def __init__(self, what: Callable[..., Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.n: Any = 0
        self.kept: Any = None
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("seen", torch.ones(()))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("tenth", torch.tensor(0.1))
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return self.what(self, x, self.fc(x))


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


def global_tensor(self: Does, x: Tensor, y: Tensor) -> Tensor:
    STATE.mul_(1.5)
    return y * STATE.to(y.dtype)


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


def gradient_inside(self: Does, x: Tensor, y: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
    return y + slope.square()


def twice_normed(self: Does, x: Tensor, y: Tensor) -> Tensor:
    made: Tensor = self.norm(self.norm(y) * 2 + x)
    return made


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


def weighted_entropy(self: Does, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(1, 2, 4, dtype=y.dtype)
    return y * F.cross_entropy(y, x.argmax(1), weight=weight, ignore_index=2, reduction="sum")


def scattered_mean(self: Does, x: Tensor, y: Tensor) -> Tensor:
    places = torch.tensor([[0, 1, 1, 0]]).expand(x.shape[0], 4)
    return y.scatter_reduce(1, places, x * y, "mean", include_self=False)


def hidden_rows(self: Does, x: Tensor, y: Tensor) -> Tensor:
    scores = y.masked_fill(x > 10, -math.inf)
    return torch.softmax(scores.masked_fill(x.sum(1, keepdim=True) > 0, -1e4), 1)


def largest(self: Does, x: Tensor, y: Tensor) -> Tensor:
    top = y.topk(2, 1)
    return y + top.values.sum(1, keepdim=True) + y.sort(1, descending=True).values


def autocast(self: Does, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.tanh(self.fc(y)).to(x.dtype)


Case = tuple[Callable[[], nn.Module], tuple[int, ...], str, int]
"""A module, the shape of a sample, a pattern of its refusal ('' if it trains as PyTorch does), the batch."""


def does(what: Callable[..., Any], refused: str = "", batch: int = 2) -> Case:
    return lambda: Does(what), (4,), refused, batch


def recomputed(what: Callable[[Does, Tensor], Tensor], reentrant: bool, refused: str = "") -> Case:
    """A function of the layer's result under a checkpoint."""
    return does(lambda self, x, y: checkpoint(partial(what, self), y, use_reentrant=reentrant), refused)


def image(layer: Callable[[], nn.Module], refused: str = "", channels: int = 4) -> Case:
    """A convolution to four channels, a layer, and a convolution to two."""
    first, last = partial(nn.Conv2d, 2, 4, 3, padding=1), partial(nn.Conv2d, channels, 2, 1)
    return lambda: nn.Sequential(first(), layer(), last()), (2, 8, 8), refused, 2


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
    "weights in a mask": does(lambda self, x, y: x @ (self.fc.weight * (self.fc.weight.data > 0)).T),
    "the batch's number": does(lambda self, x, y: y * int(x.shape[0]), batch=1),
    "Python's random": does(lambda self, x, y: y if random.random() < 0.5 else x + y * 2, "Python's random"),
    "NumPy's random": does(lambda self, x, y: y * float(np.random.uniform()), "NumPy's random"),
    "every other call": does(every_other_call, "'n'|calls|counter"),
    "a counter that nothing reads": does(unread_counter),
    "a result that is kept": does(kept_result, "what an earlier call has computed"),
    "a result that nobody reads": does(kept_and_unread),
    "a global tensor": does(global_tensor, "lives longer than a call"),
    "the clock": does(lambda self, x, y: y * (1 + time.time_ns() % 1000), "call"),
    "a generator of its own": does(
        lambda self, x, y: y * torch.rand(4, generator=self.generator, dtype=y.dtype), "generator"
    ),
    "a new generator": does(
        lambda self, x, y: y * torch.rand(4, generator=torch.Generator().manual_seed(1), dtype=y.dtype),
        "generator",
    ),
    "seeded": does(seeded, "seed"),
    "seeded inside": does(seeded_inside, "seed"),
    "a norm that is turned off": does(turned_off, "two calls with equal inputs differ in 'norm'"),
    "clamped weights": does(clamped_weights, "'fc.weight' is changed"),
    "a gradient inside": does(gradient_inside, "does not require grad"),
    "normed twice": does(twice_normed),
    "its weights transposed": does(lambda self, x, y: torch.tanh(y) @ self.fc.weight),
    "in place": does(in_place_chain),
    "assigned slices": does(assigned_slice),
    "an assigned mask": does(assigned_mask),
    "label smoothing": does(lambda self, x, y: y * F.cross_entropy(y, x.argmax(1), label_smoothing=0.3)),
    "weighted entropy": does(weighted_entropy),
    "scattered means": does(scattered_mean),
    "a safe logarithm": does(lambda self, x, y: torch.where(y > 0, torch.log(y.clamp(min=1e-3)), y)),
    "hidden rows": does(hidden_rows),
    "norms of rows": does(
        lambda self, x, y: (
            F.normalize(y, dim=1) + torch.linalg.vector_norm(y, dim=1, keepdim=True) + y.std(1, keepdim=True)
        )
    ),
    "the largest": does(largest),
    "half precision": does(lambda self, x, y: y.half().to(y.dtype) * 2),
    "autocast": does(autocast),
    "recomputed": recomputed(lambda self, y: torch.tanh(self.fc(y)), False),
    "recomputed, reentrant": recomputed(lambda self, y: torch.tanh(self.fc(y)), True),
    "recomputed, without a gradient": does(lambda self, x, y: y + checkpoint(self.fc, x, use_reentrant=True)),
    "a recomputed norm": recomputed(
        lambda self, y: self.norm(y), False, "twice in each step, in 'norm'.*leave out"
    ),
    "a recomputed norm, reentrant": recomputed(lambda self, y: self.norm(y), True, "twice in each step"),
    "integers": does(
        lambda self, x, y: (
            y * (x * 3).long().remainder(3)
            + y * torch.floor(x)
            + y * torch.round(x * 2)
            + y * (x * 4).fmod(3)
        )
    ),
    "outputs in a tree": does(lambda self, x, y: {"a": y * 2, "b": (y + 1, None)}),
    "more than tensors": does(lambda self, x, y: (y * 2, random.Random(0), "text", 3)),
    # The gradient of a vector shorter than its eps goes on through the length.
    "likeness": does(lambda self, x, y: y * F.cosine_similarity(x * 1e-9, y, 1)[:, None]),
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
    "a random number that is read": does(
        lambda self, x, y: y.roll(int(torch.randint(0, 2, ())), 1), "read as one of Python's"
    ),
    "numbers of buffers that stay": does(
        lambda self, x, y: F.pad(y * self.tenth.item(), (int(self.seen), 0)) if self.seen.view(1) > 0 else x
    ),
    "a count that is read": does(
        lambda self, x, y: self.norm(y) if self.norm.num_batches_tracked < 2 else y, "read as one of Python's"
    ),
    "a distribution": does(lambda self, x, y: torch.distributions.Normal(y, x.abs() + 0.1).log_prob(x)),
    "a distribution of counts": does(
        lambda self, x, y: torch.distributions.NegativeBinomial(x.abs() + 0.1, logits=y).log_prob(
            (3 * x).round().abs()
        )
    ),
    "the Gamma function": does(
        lambda self, x, y: (
            torch.lgamma(0.3 + y.abs()) * torch.digamma(0.3 + y.abs()) + torch.xlogy(x.relu(), 0.3 + y.abs())
        )
    ),
    "distances": does(lambda self, x, y: torch.cdist(y, x[:3]) + torch.cdist(y, y[:1], p=1)),
    "what exporters do not know": does(
        lambda self, x, y: torch.cummax(y, 1).values,
        r"it does not know cummax in 'Does' \(test_hostile_modules.py:\d+\); write it there",
    ),
    "numbers around others": does(lambda self, x, y: torch.normal(y, 0.1 * x.abs()), "of aten.normal"),
    "AvgPool(divisor_override)": image(lambda: nn.AvgPool2d(2, divisor_override=3)),
    "AvgPool(count_include_pad)": image(
        lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)
    ),
    "MaxPool(ceil_mode)": image(lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
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
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of a prediction, by checkpoint
@pytest.mark.parametrize(("name", "exporter"), some_of(CASES, EXPORTERS))
def test_equal_or_refused(name: str, exporter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "EXPORTERS", {exporter: EXPORTERS[exporter]})
    make, shape, refused, batch = CASES[name]
    torch.manual_seed(1)
    x = np.random.default_rng(3).standard_normal((4, *shape))
    verdict = beside(make().train(), x, tmp_path, Course(batch=batch))
    if refused:
        assert verdict.word == "refused", verdict
        assert re.search(refused, verdict.why), verdict.why
        assert "\n" not in verdict.why
    else:
        assert verdict.word == "equal" or f"{exporter}: " in verdict.why, verdict


def test_a_refusal_with_many_places_lists_five(tmp_path: Path) -> None:
    layers = nn.Sequential(*(Calls(lambda x: x if x.sum() > 0 else -x) for _ in range(7)))
    with pytest.raises(UnsupportedError, match=r"in '4' .*; and 2 more$"):
        oocdl.from_torch(layers, torch.zeros(2, 4), tmp_path / "net.onnx")
