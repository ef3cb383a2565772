"""Random small modules, each from a seed, and what is left of one that fails when the rest is taken away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.beside import Course

Random = np.random.Generator
SIZES = {0: (), 1: (10,), 2: (6, 4), 3: (4, 5, 3)}
ELSEWHERE = {0: (), 1: (14,), 2: (8, 6), 3: (6, 4, 5)}
"""Of samples, by the number of their spatial axes: what is trained on, and what is predicted besides."""


@dataclass(frozen=True)
class Spec:
    """Everything that makes a module and its course; plain data."""

    rank: int
    steps: tuple[tuple[str, int], ...]
    """What the module does, one after another: a name of ``STEPS``, and a seed for its details."""
    ties: bool
    """Whether inputs are multiples of a half, so that many are equal, zero, or at a bound."""
    batch: int
    accumulate: int
    parallel: int
    """Into how many parts the batch is cut; 0 leaves it to the plan."""
    evaluation: bool
    narrow: bool
    """Whether only the batch is left open: other sizes are refused then."""
    seed: int

    def course(self) -> Course:
        options: dict[str, Any] = {"parallel": {"batch": self.parallel}} if self.parallel else {}
        options |= {"dynamic": "batch"} if self.narrow else {}
        return Course(batch=self.batch, accumulate=self.accumulate, options=options)

    def module(self) -> nn.Module:
        torch.manual_seed(self.seed)
        made = Net(self.rank, self.steps)
        return made.eval() if self.evaluation else made.train()

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield the samples that are trained on, and some of another size."""
        random = np.random.default_rng(self.seed)
        for sizes in (SIZES, ELSEWHERE):
            x = random.standard_normal((SAMPLES, CHANNELS, *sizes[self.rank]))
            yield np.round(2 * x) / 2 if self.ties else x


CHANNELS, SAMPLES = 4, 12
"""Samples are a multiple of what any step takes: an epoch ends with a step."""


def spec_of(seed: int) -> Spec:
    """Return the module of a seed."""
    random = np.random.default_rng(seed)
    rank = int(random.choice([0, 1, 2, 2, 2, 3]))
    names = [name for name in STEPS if rank or name in WITHOUT_AXES]
    steps = tuple(
        (str(random.choice(names)), int(random.integers(1000))) for _ in range(random.integers(1, 6))
    )
    return Spec(
        rank=rank,
        steps=steps,
        ties=bool(random.random() < 0.3),
        batch=int(random.choice([1, 2, 2, 3])),
        accumulate=int(random.choice([1, 1, 2])),
        parallel=int(random.choice([0, 0, 1, 2])),
        evaluation=bool(random.random() < 0.1),
        narrow=bool(random.random() < 0.4),
        seed=seed,
    )


def smaller(spec: Spec) -> Iterator[Spec]:
    """Yield specs with less in them."""
    for place in range(len(spec.steps)):
        yield replace(spec, steps=spec.steps[:place] + spec.steps[place + 1 :])
    plain = {"ties": False, "batch": 2, "accumulate": 1, "parallel": 0, "evaluation": False, "narrow": False}
    for name, value in plain.items():
        if getattr(spec, name) != value:
            yield replace(spec, **{name: value})  # type: ignore[arg-type]


def shrunk(spec: Spec, fails: Callable[[Spec], bool]) -> Spec:
    """Return a spec that still fails, and of which nothing can be taken away."""
    for less in smaller(spec):
        if fails(less):
            return shrunk(less, fails)
    return spec


class Net(nn.Module):
    """Steps, each from four channels to four, between two layers that hold weights."""

    def __init__(self, rank: int, steps: tuple[tuple[str, int], ...]) -> None:
        super().__init__()
        self.first, self.last = conv(rank, CHANNELS, CHANNELS), conv(rank, CHANNELS, 2)
        self.steps = nn.ModuleList(STEPS[name](np.random.default_rng(seed), rank) for name, seed in steps)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for step in self.steps:
            x = step(x)
        made: Tensor = self.last(x)
        return made


class Step(nn.Module):
    """A function of its input and of layers of its own."""

    def __init__(self, what: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.what, self.calls, self.kept = nn.ModuleList(layers), what, 0, None

    def forward(self, x: Tensor) -> Tensor:
        return self.what(self, x, *self.layers)


def layer(name: str, rank: int) -> Any:
    return getattr(nn, f"{name}{max(rank, 1)}d")


def conv(rank: int, channels: int, made: int, extent: int = 1, **options: Any) -> nn.Module:
    if not rank:
        return nn.Linear(channels, made)
    found: nn.Module = layer("Conv", rank)(channels, made, extent, **options)
    return found


def pick(random: Random, *choices: Any) -> Any:
    return choices[random.integers(len(choices))]


def any_conv(random: Random, rank: int) -> nn.Module:
    extent, dilation = pick(random, 1, 2, 3), pick(random, 1, 1, 2)
    modes = ["zeros", "zeros", "circular", "replicate", *(["reflect"] if rank < 3 else [])]
    padding = (extent - 1) * dilation // 2
    return conv(
        rank, CHANNELS, CHANNELS, extent,
        padding=padding, dilation=dilation, stride=pick(random, 1, 1, 2), groups=pick(random, 1, 1, 2, 4),
        bias=pick(random, True, False), padding_mode=pick(random, *modes),
    )  # fmt: skip


def transposed(random: Random, rank: int) -> nn.Module:
    stride, groups, extent = pick(random, 1, 2), pick(random, 1, 2), pick(random, 2, 3)
    options = {"groups": groups, "output_padding": pick(random, 0, stride - 1)}
    return layer("ConvTranspose", rank)(CHANNELS, CHANNELS, extent, stride, **options)  # type: ignore[no-any-return]


def pool(random: Random, rank: int) -> nn.Module:
    extent = pick(random, 2, 3)
    options = {"stride": pick(random, 1, 2), "padding": pick(random, 0, extent // 2)}
    options["ceil_mode"] = pick(random, True, False)
    if pick(random, True, False):
        found: nn.Module = layer("MaxPool", rank)(extent, **options)
        return found
    return layer("AvgPool", rank)(extent, **options, count_include_pad=pick(random, True, False))  # type: ignore[no-any-return]


def norm(random: Random, rank: int) -> nn.Module:
    kind = pick(random, "batch", "batch", "frozen", "instance", "group", "none")
    if kind in ("batch", "frozen", "none"):
        made = layer("BatchNorm", rank)(
            CHANNELS, momentum=pick(random, 0.1, 0.5), affine=pick(random, True, False),
            track_running_stats=kind != "none",
        )  # fmt: skip
        return Step(lambda self, x, norm: norm.eval()(x) if kind == "frozen" else norm(x), made)
    if kind == "instance" and rank:
        return layer("InstanceNorm", rank)(CHANNELS, affine=pick(random, True, False))  # type: ignore[no-any-return]
    return nn.GroupNorm(pick(random, 1, 2, 4), CHANNELS)


ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.Hardtanh, nn.Hardshrink, nn.Softshrink,
    nn.Tanhshrink, nn.Softsign, nn.LogSigmoid, nn.PReLU, nn.Identity,
)  # fmt: skip
FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.abs, torch.sin, torch.erf, torch.floor, torch.round, torch.sign, torch.square, torch.exp,
    lambda x: x.clamp(-0.5, 0.5), lambda x: torch.maximum(x, -x), lambda x: torch.minimum(x, x.flip(1)),
    lambda x: torch.sqrt(x.abs() + 0.1), lambda x: torch.where(x > 0, x * 2, x.square()),
    lambda x: x.cumsum(1), lambda x: torch.softmax(x, 1), lambda x: torch.log_softmax(x, 1),
    lambda x: x / (1 + x.square().sum(1, True)), lambda x: x.roll(1, -1), lambda x: x.flip(1),
    lambda x: x - x.mean(1, keepdim=True), lambda x: x.relu_() + x, lambda x: x * x.amax(1, keepdim=True),
    lambda x: x + x.std(1, keepdim=True), lambda x: x * (x.data > 0), lambda x: x.sort(1).values,
    lambda x: x + x.topk(2, 1).values.sum(1, keepdim=True), lambda x: torch.cat([x[:, 2:], x[:, :2]], 1),
    lambda x: x + torch.arange(4.0).view(4, *[1] * (x.dim() - 2)), lambda x: F.normalize(x, dim=1),
    lambda x: x.float().to(x.dtype), lambda x: torch.stack([x, x * 2]).sum(0),
    lambda x: torch.remainder(x, 0.7), lambda x: x * x.shape[-1], lambda x: x / x.numel() * len(x),
)  # fmt: skip


def activation(random: Random, rank: int) -> nn.Module:
    return pick(random, *ACTIVATIONS)()  # type: ignore[no-any-return]


def function(random: Random, rank: int) -> nn.Module:
    chosen = pick(random, *FUNCTIONS)
    return Step(lambda self, x: chosen(x * 1))


def resized(random: Random, rank: int) -> nn.Module:
    linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[rank]
    if pick(random, True, False):
        return nn.Upsample(scale_factor=2, mode=pick(random, "nearest", linear))
    options = {"mode": linear, "align_corners": pick(random, True, False)}
    return Step(lambda self, x: F.interpolate(x[..., ::2], size=x.shape[2:], **options))


def padded(random: Random, rank: int) -> nn.Module:
    mode, ends = pick(random, "constant", "reflect", "replicate", "circular"), (1, 2) * rank
    return Step(lambda self, x: F.pad(x, ends, mode=mode))


def combined(random: Random, rank: int) -> nn.Module:
    """Two steps side by side: added, multiplied, or joined and mixed."""
    other = pick(random, activation, function, lambda random, rank: conv(rank, CHANNELS, CHANNELS))
    inner = conv(rank, CHANNELS, CHANNELS, 3, padding=1), other(random, rank)
    how = pick(random, "add", "gate", "join", "twice", "frozen")
    if how == "join":
        return Step(
            lambda self, x, a, b, mix: mix(torch.cat([a(x), b(x)], 1)), *inner, conv(rank, 8, CHANNELS)
        )
    if how == "gate":
        return Step(lambda self, x, a, b: b(x) * torch.sigmoid(a(x)), *inner)
    if how == "twice":  # one layer's weights in two places
        return Step(lambda self, x, a, b: a(torch.tanh(a(x))) + b(x), *inner)
    if how == "frozen":
        inner[0].requires_grad_(False)
    return Step(lambda self, x, a, b: x + a(x) + b(x), *inner)


def _attend(self: Step, x: Tensor, attention: nn.MultiheadAttention) -> Tensor:
    rows = x.flatten(2).transpose(1, 2)
    return attention(rows, rows, rows, need_weights=False)[0].transpose(1, 2).reshape(x.shape)  # type: ignore[no-any-return]


def attention(random: Random, rank: int) -> nn.Module:
    return Step(_attend, nn.MultiheadAttention(CHANNELS, pick(random, 1, 2), batch_first=True))


def recurrent(random: Random, rank: int) -> nn.Module:
    two = pick(random, True, False)
    kind = pick(random, nn.GRU, nn.LSTM, nn.RNN)
    made = kind(CHANNELS, CHANNELS // (1 + two), batch_first=True, bidirectional=two)

    def run(self: Step, x: Tensor, cell: nn.Module) -> Tensor:
        return cell(x.flatten(2).transpose(1, 2))[0].transpose(1, 2).reshape(x.shape)  # type: ignore[no-any-return]

    return Step(run, made)


def _counts(self: Step, x: Tensor) -> Tensor:
    self.calls += 1
    return x * 2


def _keeps(self: Step, x: Tensor) -> Tensor:
    self.kept = x
    return x + 1


def _assigns(self: Step, x: Tensor) -> Tensor:
    made = x * 1
    made[:, 0] = x[:, 1] ** 2
    made[:, 2:] += 1
    return made


def stateful(random: Random, rank: int) -> nn.Module:
    """State that nothing reads, writing in place, and layers that do nothing in the modes they are in."""
    weighted = nn.utils.parametrizations.weight_norm(conv(rank, CHANNELS, CHANNELS, 3, padding=1))
    return pick(  # type: ignore[no-any-return]
        random, Step(_counts), Step(_keeps), Step(_assigns), weighted, nn.Dropout(0.0),
        Step(lambda self, x, dropout: dropout.eval()(x), nn.Dropout(0.3)),
        Step(lambda self, x, norm: norm(x.movedim(1, -1)).movedim(-1, 1), nn.LayerNorm(CHANNELS)),
    )  # fmt: skip


STEPS: Mapping[str, Callable[[Random, int], nn.Module]] = {
    make.__name__: make
    for make in (
        *(any_conv, transposed, pool, norm, activation, function, resized, padded),
        *(combined, attention, recurrent, stateful),
    )
}
WITHOUT_AXES = {"norm", "activation", "function", "combined", "stateful"}
"""Those that need no axis of space."""
