"""Random convolutions, transposed ones and gradients of weights as single instructions, against float64.

Extents are those that kernels get wrong: axes shorter than a window, single windows, steps longer than one,
slabs of a few wide planes. ``FOUND`` are those of which PyTorch's kernels made wrong numbers, or wrote past
their work space, on one processor or another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import ml_dtypes
import numpy as np
import torch

from oocdl.engines.engine import get_engine
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.operands import Pads
from oocdl.graph.ir.program import Program
from tests.kit.kernel_cases import around
from tests.kit.kernels import error, turned
from tests.kit.programs import single

CHANNELS = (1, 2, 3, 4, 7, 8, 12, 16, 17, 24, 32, 33, 48, 64, 96, 128)
MOST_ELEMENTS, MOST_MULTIPLY_ADDS = 1 << 20, 1 << 25


class Convolution(NamedTuple):
    """What a convolution is made of, with its gradients."""

    channels: tuple[int, int]
    """Those that it reads, and those that it makes."""
    space: Shape
    window: Shape
    pads: Pads
    strides: Shape
    dilations: Shape
    batch: int = 1
    groups: int = 1
    is_turned: bool = True
    """Whether data have their channels last."""

    @property
    def made(self) -> Shape:
        """Extents of the axes of space of the result."""
        axes = zip(self.space, self.window, self.pads, self.strides, self.dilations, strict=True)
        return tuple((n + sum(p) - d * (k - 1) - 1) // s + 1 for n, k, p, s, d in axes)


def plain(channels: tuple[int, int], space: Shape, window: Shape, pad: int, step: int = 1) -> Convolution:
    """The same padding and step along all axes."""
    ones = (1,) * len(space)
    return Convolution(channels, space, window, ((pad, pad),) * len(space), (step,) * len(space), ones)


FOUND = (
    plain((16, 16), (4, 128, 128), (3, 3, 3), 1),
    plain((96, 24), (1, 69, 62), (3, 3, 3), 1),
    plain((32, 128), (11, 159, 18), (5, 3, 2), 0),
    plain((256, 17), (3, 86, 58), (1, 1, 1), 0),
    plain((1, 2), (2, 2, 2), (3, 3, 3), 1),
    plain((8, 16), (1, 9, 4), (3, 5, 3), 2),
    plain((24, 128), (39, 2), (3, 3), 1, 3),
    plain((128, 24), (19, 5), (3, 2), 0, 4),
    plain((64, 16), (57, 125, 1), (3, 3, 1), 1, 4)._replace(pads=((1, 1), (1, 1), (0, 0))),
    plain((12, 12), (8, 182), (1, 5), 0)._replace(batch=9, groups=12, dilations=(2, 2)),
    plain((32, 16), (229, 3), (1, 3), 0, 3),
    plain((1, 8), (9, 18, 3), (4, 4, 4), 0)._replace(strides=(2, 1, 2), pads=((0, 0), (0, 0), (1, 1))),
    plain((12, 8), (5, 7, 56), (7, 7, 7), 3, 2)._replace(batch=2),
    plain((1, 4), (36, 4), (7, 7), 3)._replace(pads=((3, 4), (5, 5))),
    Convolution((64, 16), (7, 1, 214), (7, 7, 1), ((3, 3), (3, 3), (0, 0)), (2, 3, 3), (1, 1, 1), 3, 2),
)


def drawn(seed: int) -> Convolution:
    """Draw one that is small enough for a test."""
    pick = random.Random(seed)
    while True:
        rank, length = pick.choice((1, 2, 2, 3, 3)), pick.choice((8, 60, 400))
        window = [pick.choice((1, 1, 2, 3, 3, 3, 4, 5, 7)) for _ in range(rank)]
        window = window[-1:] * rank if pick.random() < 0.6 else window
        strides = [pick.choice((1, 2, 3, 4)) if pick.random() < 0.5 else 1] * rank
        dilations = [pick.choice((2, 3)) if pick.random() < 0.1 else 1] * rank
        spans = [d * (k - 1) for k, d in zip(window, dilations, strict=True)]
        even = pick.random() < 0.6
        pads = [(s // 2, s // 2) if even else (pick.randint(0, s), pick.randint(0, s)) for s in spans]
        made = [pick.randint(1, 4) if pick.random() < 0.5 else pick.randint(1, length) for _ in range(rank)]
        axes = zip(made, strides, spans, pads, strict=True)
        space = [(m - 1) * s + span + 1 - sum(p) for m, s, span, p in axes]
        channels, batch = (pick.choice(CHANNELS), pick.choice(CHANNELS)), pick.choice((1, 1, 1, 2, 5))
        shared = [g for g in (1, 2, 3, 4, 8, 16) if channels[0] % g == 0 == channels[1] % g]
        groups = pick.choice(shared) if pick.random() < 0.25 else 1
        elements = batch * max(channels[0] * prod(map(abs, space)), channels[1] * prod(made))
        multiply_adds = batch * prod(channels) // groups * prod(made) * prod(window)
        if min(space) > 0 and elements < MOST_ELEMENTS and multiply_adds < MOST_MULTIPLY_ADDS:
            tuples = map(tuple, (space, window, pads, strides, dilations))
            return Convolution(channels, *tuples, batch, groups, pick.random() < 0.85)  # type: ignore[arg-type]


class Run(NamedTuple):
    """One instruction with its operands, and its result in float64."""

    program: Program
    arrays: list[Array]
    wanted: Array


def runs(case: Convolution, dtype: str) -> list[Run]:
    """A convolution, its gradient by the data, which is a transposed one, and that by the weights."""
    space, made, pads = case.space, case.made, around(case.pads)
    last = (0, *range(2, len(space) + 2), 1) if case.is_turned and len(space) > 1 else ()
    shapes = [(case.batch, case.channels[0], *space), (case.batch, case.channels[1], *made)]
    x, dy = (_noise(shape, dtype, seed, last) for seed, shape in enumerate(shapes))
    w = _noise((case.channels[1], case.channels[0] // case.groups, *case.window), dtype, 2)
    attrs = {"strides": case.strides, "dilations": case.dilations, "group": case.groups}
    attrs |= {"pads": (99,) * 2 * len(space)}
    crop = {"spatial": space, "crop": (0, 0, *(before for before, _ in case.pads))}
    kinds = (
        ("Conv", [x, w], dtype, {}, pads),
        ("ConvTranspose", [dy, w], dtype, crop, None),
        ("ConvWeightGrad", [x, dy], "float32", {"kernel_shape": case.window}, pads),
    )
    found = []
    for (op, arrays, made_in, more, padding), wanted in zip(kinds, _by_autograd(case, x, w, dy), strict=True):
        result, key = [(wanted.shape, made_in)], f"{op} {case} {dtype}"
        program = single(op, arrays, result, {**attrs, **more}, [padding, None], key=key)
        found.append(Run(turned(program) if last else program, arrays, wanted))
    return found


def check(run: Run, tolerance: float = 1e-5, engine: str = "torch") -> None:
    """An engine's result is the one in float64, but for rounding."""
    (found,) = get_engine(engine).compile(run.program)(run.arrays)
    off = error(found.astype(np.float64), run.wanted)
    assert off <= tolerance, (off, run.program.key)


def _noise(shape: Sequence[int], dtype: str, seed: int, order: Sequence[int] = ()) -> Array:
    array = ordered(
        np.empty, tuple(shape), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype, tuple(order)
    )
    array[...] = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return array


def _by_autograd(case: Convolution, *arrays: Array) -> list[Array]:
    """The same by PyTorch's own kernels in float64."""
    x, w, dy = (torch.from_numpy(array.astype(np.float64)) for array in arrays)
    x, w = x.requires_grad_(), w.requires_grad_()
    padded = torch.nn.functional.pad(x, [count for pair in reversed(case.pads) for count in pair])
    none = [0] * len(case.space)
    y = torch.convolution(padded, w, None, case.strides, none, case.dilations, False, none, case.groups)
    return [tensor.detach().numpy() for tensor in (y, *torch.autograd.grad(y, (x, w), dy))]
