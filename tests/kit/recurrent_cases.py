"""Recurrent layers: instances of their operators, and what these compute by PyTorch, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from oocdl.engines import recurrent_steps
from oocdl.graph.ir.graph import Array
from oocdl.ops.recurrent import AXES, KINDS

Tensors = Sequence[torch.Tensor]
ACTIVATIONS = {"Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Relu": torch.relu}


def _step(kind: str, x: torch.Tensor, R: torch.Tensor, state: Any, b: Any, attrs: Mapping[str, Any]) -> Any:
    """State and gates after a step."""
    s, *more = (ACTIVATIONS[name] for name in attrs["activations"])
    h = state[0]
    if kind == "RNN":
        return (s(x + h @ R.T),), ()
    if kind == "LSTM":
        i, o, f, g = (x + h @ R.T).chunk(4, -1)
        i, o, f, g = s(i), s(o), s(f), more[0](g)
        c = f * state[1] + i * g
        return (o * more[1](c), c), (i, o, f, g)
    xz, xr, xn = x.chunk(3, -1)
    Rz, Rr, Rn = R.chunk(3)
    z, r = s(xz + h @ Rz.T), s(xr + h @ Rr.T)
    if attrs["linear_before_reset"]:
        q = h @ Rn.T + b
        n = more[0](xn + r * q)
        return ((1 - z) * n + z * h,), (z, r, n, q)
    n = more[0](xn + (r * h) @ Rn.T)
    return ((1 - z) * n + z * h,), (z, r, n)


def forward(kind: str) -> Callable[[Tensors, Mapping[str, Any]], tuple[torch.Tensor, ...]]:
    """The operator of a kind as ``tests.kit.interpret`` wants it."""

    def run(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        names = KINDS[kind].operands(bool(attrs.get("linear_before_reset")))
        given = dict(zip(names, inputs, strict=False))
        state = tuple(given[name][0] for name in ("h0", "c0") if name in given)
        x, mask, steps = given["x"], given.get("mask"), len(given["x"])
        states: list[Any] = [None] * steps
        kept: list[Any] = [None] * steps
        for t in reversed(range(steps)) if attrs["reverse"] else range(steps):
            after, gates = _step(kind, x[t], given["R"], state, given.get("b"), attrs)
            pairs = zip(after, state, strict=True)
            state = tuple(new if mask is None else torch.where(mask[t], new, old) for new, old in pairs)
            states[t], kept[t] = state, torch.cat(gates, -1) if gates else None
        found = [torch.stack([each[n] for each in states]) for n in range(len(state))]
        found += [] if kept[0] is None else [torch.stack(kept)]
        return (*found, *(each[None] for each in state))

    return run


def backward(kind: str) -> Callable[[Tensors, Mapping[str, Any]], tuple[torch.Tensor, ...]]:
    """The gradient by the kernel of NumPy, which ``tests/ops/test_rules.py`` compares with autograd."""

    def run(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        arrays = [tensor.detach().numpy() for tensor in inputs]
        return tuple(map(torch.as_tensor, recurrent_steps.KERNELS[f"{KINDS[kind].op}Grad"](arrays, attrs)))

    return run


ORACLES = {
    **{KINDS[kind].op: forward(kind) for kind in KINDS},
    **{f"{KINDS[kind].op}Grad": backward(kind) for kind in KINDS},
}


def _attrs(kind: str, reverse: bool, late: bool, **more: Any) -> dict[str, Any]:
    attrs: dict[str, Any] = {"reverse": reverse, "activations": KINDS[kind].activations, **more}
    return {**attrs, "linear_before_reset": late} if kind == "GRU" else attrs


def instances() -> list[tuple[str, list[Array], dict[str, Any], tuple[int, ...]]]:
    """(operator, operands, attributes, results that a loss may read) of every kind, and of its gradient."""
    found = []
    for kind, (steps, samples, hidden), reverse, late, masked in (
        *product(KINDS, [(4, 3, 2)], (False, True), (False, True), (False, True)),
        ("LSTM", (1, 1, 1), False, False, False),
        ("GRU", (1, 2, 3), True, True, False),
        ("RNN", (3, 1, 2), False, False, False),
    ):
        known = KINDS[kind]
        if late and kind != "GRU":
            continue
        random = np.random.default_rng(steps + 2 * reverse + 4 * late + 8 * masked)
        sizes = {"t": steps, "n": samples, "h": hidden, "g": known.gates * hidden, "1": 1}
        names = known.operands(late)[: None if masked else -1]
        operands = []
        for name in names:
            array = random.normal(size=[sizes[axis] for axis in AXES[name]])
            # A sample that ends early, another that has nothing, and one whole.
            ends = np.array([steps // 2, 0, steps])[:samples]
            operands.append(np.arange(steps)[:, None, None] < ends[:, None] if name == "mask" else array)
        attrs = _attrs(kind, reverse, late)
        made = dict(zip(known.results(), recurrent_steps.KERNELS[known.op](operands, attrs), strict=True))
        seen = tuple(n for n, name in enumerate(known.results()) if name == "h" or name.startswith("last"))
        found.append((known.op, operands, attrs, seen))
        loss = [
            random.normal(size=made[name].shape) for name in ("h", "last h", "last c")[: 1 + known.states]
        ]
        arrays = {**dict(zip(names, operands, strict=True)), **made}
        masks = operands[len(known.operands(late)) - 1 :]
        back = [*(arrays[name] for name in ("R", *known.back)), *loss, *masks]
        found.append((f"{known.op}Grad", back, attrs, ()))
    relu = [0.5 + np.abs(array) if n == 0 else array for n, array in enumerate(found[0][1])]
    found.append(("RnnSteps", relu, _attrs("RNN", False, False, activations=("Relu",)), (0, 1)))
    return found
