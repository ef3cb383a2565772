"""The torch engine's own kernels for arrays with their channels last: operands, a run, and counted calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from oocdl.engines.engine import get_engine
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.graph import Array, Shape
from tests.kit.kernel_cases import around, padded
from tests.kit.kernels import turned
from tests.kit.programs import single

Pads = Sequence[tuple[int, int]]


def noise(*shape: int, seed: int = 0) -> Array:
    """Normal float32 numbers that lie with their channels last."""
    made = ordered(np.empty, shape, np.float32, (0, *range(2, len(shape)), 1))
    made[...] = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return made


def ran(op: str, arrays: Sequence[Array], shape: Shape, attrs: dict[str, Any], pads: Pads) -> Array:
    """Run one instruction of the torch engine, all arrays with their channels last."""
    key = f"{op} {[array.shape for array in arrays]} {attrs} {pads}"
    made = single(op, arrays, [(shape, "float32")], attrs, [around(pads), None], key=key)
    (found,) = get_engine("torch").compile(turned(made))(arrays)
    assert found.strides[1] == found.itemsize, "channels lie last"
    return found


def gradients(
    x: Array, w: Array, dy: Array, pads: Pads, stride: int = 1, dilations: int | Shape = 1
) -> list[Array]:
    """A convolution and its gradients by ``x`` (unpadded) and ``w``, by PyTorch in float64."""
    wide, kernel = (torch.from_numpy(array).double().requires_grad_() for array in (x, w))
    convolve = functional.conv2d if x.ndim == 4 else functional.conv3d
    groups = x.shape[1] // w.shape[1]
    made = convolve(padded(wide, around(pads)), kernel, None, stride, 0, dilations, groups)
    dx, dw = torch.autograd.grad(made, (wide, kernel), torch.from_numpy(dy).double())
    return [tensor.detach().numpy() for tensor in (made, dx, dw)]


def counting(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Tensor]:
    """Record what a function of a module returns from now on, call by call."""
    whole: Callable[..., Tensor] = getattr(module, name)
    calls: list[Tensor] = []

    def call(*args: Any, **options: Any) -> Tensor:
        calls.append(whole(*args, **options))
        return calls[-1]

    monkeypatch.setattr(module, name, call)
    return calls
