"""Recurrent layers, CTC, attention and products: what they take of the heap, and what they round."""

from __future__ import annotations

from functools import cache
from math import inf
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from oocdl.engines import numpy_attention, numpy_ctc, recurrent_steps
from oocdl.engines.engine import get_engine
from oocdl.engines.torch import linear
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.speed import Probe
from oocdl.ops import RULES
from oocdl.ops.recurrent import AXES, KINDS
from oocdl.planning.probes import probe_program
from tests.kit.programs import single
from tests.kit.torch_heap import peak_bytes

STEPS, SAMPLES, HIDDEN = 64, 16, 256


def operands(kind: str, masked: bool, attrs: dict[str, Any]) -> tuple[list[Array], list[Array], list[Array]]:
    """Operands of a recurrence, its results, and the operands of its gradient."""
    known, random = KINDS[kind], np.random.default_rng(0)
    sizes = {"t": STEPS, "n": SAMPLES, "h": HIDDEN, "g": known.gates * HIDDEN, "1": 1}
    names = known.operands(bool(attrs.get("linear_before_reset")))[:-1]
    given = [random.normal(size=[sizes[a] for a in AXES[name]]).astype("f4") / 8 for name in names]
    mask = [np.arange(STEPS)[:, None, None] < np.full((SAMPLES, 1), STEPS // 2)] if masked else []
    made = recurrent_steps.KERNELS[known.op]([*given, *mask], attrs)
    arrays = {**dict(zip(names, given, strict=True)), **dict(zip(known.results(), made, strict=True))}
    loss = [made[0], *([made[-1]] * known.states)]
    return [*given, *mask], made, [arrays["R"], *(arrays[name] for name in known.back), *loss, *mask]


CASES = [
    (kind, reverse, masked, {"linear_before_reset": late} if kind == "GRU" else {})
    for kind in KINDS
    for reverse, masked in ((False, False), (True, True))
    for late in ((True, False) if kind == "GRU" else (True,))
]


@cache
def programs() -> list[tuple[str, list[Array], list[Array], dict[str, Any]]]:
    """(operator, operands, results, attributes)"""
    found = []
    for kind, reverse, masked, more in CASES:
        attrs = {"reverse": reverse, "activations": KINDS[kind].activations, **more}
        given, made, back = operands(kind, masked, attrs)
        op = KINDS[kind].op
        found.append((op, given, made, attrs))
        found.append((f"{op}Grad", back, recurrent_steps.KERNELS[f"{op}Grad"](back, attrs), attrs))
    x = np.random.default_rng(1).normal(size=(4, 200, 40)).astype("f4")
    labels = np.full((4, 30), 7)
    lattice = [x, labels, np.full(4, 30), np.full(4, 200)]
    attrs = {"blank": 0, "zero_infinity": False}
    found.append(("Ctc", lattice, numpy_ctc.ctc(lattice, attrs), attrs))
    found.append(("CtcGrad", [*lattice, np.ones(4, "f4")], [x], attrs))
    return [*found, *attentions()]


def attentions() -> list[tuple[str, list[Array], list[Array], dict[str, Any]]]:
    """Long sequences, which have many tiles, and short ones, of which a tile has many; masked, too."""
    found = []
    for batch, groups, heads, length, masked in ((1, 1, 2, 3000, False), (8, 4, 1, 100, True)):
        random = np.random.default_rng(2)
        queries, keys = (batch, groups, heads, length, 32), (batch, groups, length, 32)
        given = [random.normal(size=shape).astype("f4") for shape in (queries, keys, keys)]
        mask = [random.normal(size=(1, groups, 1, length, length)).astype("f4")] * masked
        attrs = {"scale": 0.2, "band": (None, 0), "unseen": -np.inf, "blind": 0.0}
        made = numpy_attention.attend([*given, *mask], attrs)
        found.append(("Attend", [*given, *mask], made, attrs))
        attrs = {**attrs, "mask_gradient": masked and (True,)}
        back = [*given, made[1], made[1][..., :1].copy(), made[0], *mask]
        found.append(("AttendGrad", back, numpy_attention.attend_grad(back, attrs), attrs))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_steps_by_loops_are_those_of_numpy(seed: int) -> None:
    random = np.random.default_rng(seed)
    kind, late, reverse, masked = str(random.choice(list(KINDS))), *map(bool, random.integers(0, 2, 3))
    known, late = KINDS[kind], late and kind == "GRU"
    steps, samples, hidden = (int(random.choice(some)) for some in ([1, 2, 9], [1, 4], [1, 3, 16, 37]))
    sizes = {"t": steps, "n": samples, "h": hidden, "g": known.gates * hidden, "1": 1}
    sizes["k"] = (known.gates + late) * hidden
    functions = [str(random.choice(["Sigmoid", "Tanh", "Relu"])) for _ in known.activations]
    attrs = {"reverse": reverse, "activations": tuple(functions), "linear_before_reset": late}
    for back in (False, True):
        op = f"{known.op}Grad" if back else known.op
        shapes = [[sizes[a] for a in AXES[name]] for name in known.operands(late, back)[:-1]]
        arrays = [random.normal(size=shape).astype("f4") / 8 for shape in shapes]
        # Some lie with gaps between their numbers.
        arrays = [np.repeat(x, 2, -1)[..., ::2] if random.integers(2) else x for x in arrays]
        mask = [random.integers(0, 2, (steps, samples, 1)).astype(bool)] if masked else []
        wanted = recurrent_steps.KERNELS[op]([*(x.astype("f8") for x in arrays), *mask], attrs)
        program = single(
            op, [*arrays, *mask], [(x.shape, "float32") for x in wanted], attrs, key=f"{seed}{op}"
        )
        made = get_engine("torch").compile(program)([*arrays, *mask])
        for out, x in zip(made, wanted, strict=True):
            np.testing.assert_allclose(out, x, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("number", range(2 * len(CASES) + 6))
def test_no_more_is_taken_than_is_said(number: int) -> None:
    op, given, made, attrs = programs()[number]
    engine = get_engine("torch")
    results = [(array.shape, array.dtype.name) for array in made]
    program = single(op, given, results, attrs, key=f"scratch of {op} {number}")
    said, most = engine.scratch_of(program, RULES).scratch_bytes, peak_bytes(program, "torch", given)
    assert most <= said < 6 * most


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


@pytest.mark.skipif(linear.linear_pointwise is None, reason="PyTorch without oneDNN")
def test_onednn_gets_no_operand_of_one_element_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the states before the first step of a recurrent layer, which are zeros."""
    given: list[Tensor] = []

    def watched(a: Tensor, b: Tensor, *rest: Any) -> Any:
        given.extend((a, b))
        return pointwise(a, b, *rest)

    pointwise = linear.linear_pointwise
    a, b = torch.randn(64, 128), torch.randn(1, 1).expand(128, 64)
    wanted = a @ b
    monkeypatch.setattr(linear, "linear_pointwise", watched)
    torch.testing.assert_close(linear.matmul(a, b), wanted)
    torch.testing.assert_close(linear.matmul(b.t(), a.t()), wanted.t())
    assert len(given) == 4 and not any(0 in x.stride() for x in given)
