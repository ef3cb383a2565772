"""Attention in bfloat16: operands are rounded, and nothing else; PyTorch's is off by more."""

from __future__ import annotations

from math import inf

import ml_dtypes
import numpy as np
import pytest

from oocdl.engines.engine import get_engine
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.speed import Probe
from oocdl.planning.probes import probe_program

torch = pytest.importorskip("torch")
SHAPE = (2, 3, 1, 40, 16)


def rounded(array: Array) -> Array:
    """An array in bfloat16."""
    return array.astype(ml_dtypes.bfloat16)


def ours(q: Array, k: Array, v: Array, dy: Array, high: int | None) -> list[Array]:
    """Result and gradients by the programs of the operator and of its gradient, on operands of bfloat16."""
    attrs = {"scale": 0.25, "band": (None, high), "unseen": -inf, "blind": 0.0}
    wide, rows = (SHAPE, "bfloat16"), ((*SHAPE[:2], *SHAPE[3:]), "bfloat16")
    kept = [((*SHAPE[:4], 2), "float32"), ((*SHAPE[:4], 1), "float32"), wide]
    engine = get_engine("torch")
    forward = engine.compile(probe_program(Probe("Attend", (wide, rows, rows), attrs)))
    backward = engine.compile(probe_program(Probe("AttendGrad", (wide, rows, rows, *kept), attrs)))
    y, stats = forward([q, k, v])
    delta = (dy.astype(np.float32) * y).sum(-1)
    return [y, *backward([q, k, v, stats, delta, dy])]


def pytorchs(arrays: list[Array], high: int | None, dtype: torch.dtype) -> list[Array]:
    """The same by PyTorch in a dtype."""
    *qkv, dy = (torch.from_numpy(array).to(dtype) for array in arrays)
    for one in qkv:
        one.requires_grad_()
    y = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=high == 0, scale=0.25)
    made = [y, *torch.autograd.grad(y, qkv, dy)]
    return [one.detach().double().numpy() for one in made]


@pytest.mark.parametrize("high", [None, 0])
def test_errors_are_those_of_rounded_operands_and_less_than_pytorchs(high: int | None) -> None:
    random = np.random.default_rng(0)
    given = [random.normal(size=(*SHAPE[:2], *SHAPE[3:])) for _ in range(4)]
    halves = [rounded(array) for array in given]
    q, k, v, dy = halves
    found = ours(q, k, v, dy, high)
    assert all(array.dtype == np.float32 for array in found)
    exact = pytorchs(given, high, torch.float64)
    of_rounded = pytorchs([array.astype(np.float64) for array in halves], high, torch.float64)
    theirs = pytorchs(given, high, torch.bfloat16)
    for one, near, far, other in zip(found, of_rounded, exact, theirs, strict=True):
        np.testing.assert_allclose(one, near, rtol=1e-5, atol=1e-5)
        assert np.linalg.norm(one - far) <= np.linalg.norm(other - far)
