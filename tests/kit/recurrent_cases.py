"""Recurrent layers: instances of their operators, and what these compute by PyTorch's autograd."""

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
INVERSES = {"Sigmoid": torch.logit, "Tanh": torch.atanh, "Relu": lambda y: torch.where(y > 0, y, -1.0)}


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


def _walk(
    kind: str, steps: int, x_of: Callable[[int, Any], Any], R: Any, state: Any, mask: Any, attrs: Any
) -> list[torch.Tensor]:
    """All results; ``x_of``: (step, state before) -> the input's part of the gates, and the bias."""
    states, kept = [None] * steps, [None] * steps
    for t in reversed(range(steps)) if attrs["reverse"] else range(steps):
        x, b = x_of(t, state)
        after, gates = _step(kind, x, R, state, b, attrs)
        state = tuple(
            torch.where(mask[t], new, old) if mask is not None else new
            for new, old in zip(after, state, strict=True)
        )
        states[t], kept[t] = state, torch.cat(gates, -1) if gates else None
    found = [torch.stack([each[n] for each in states]) for n in range(len(state))]
    if kept[0] is not None:
        found.append(torch.stack(kept))
    return [*found, *(each[None] for each in state)]


def forward(kind: str) -> Callable[[Tensors, Mapping[str, Any]], tuple[torch.Tensor, ...]]:
    """The operator of a kind as ``tests.kit.interpret`` wants it."""

    def run(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        names = KINDS[kind].operands(bool(attrs.get("linear_before_reset")))
        given = dict(zip(names, inputs, strict=False))
        state = tuple(given[name][0] for name in ("h0", "c0") if name in given)
        x, b, mask = given["x"], given.get("b"), given.get("mask")
        return tuple(_walk(kind, len(x), lambda t, _: (x[t], b), given["R"], state, mask, attrs))

    return run


def backward(kind: str) -> Callable[[Tensors, Mapping[str, Any]], tuple[torch.Tensor, ...]]:
    """The gradient by autograd: the same steps once more, from inputs that lead to the gates given."""

    def run(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            return _vjp(kind, [tensor.detach() for tensor in inputs], attrs)

    return run


def _vjp(kind: str, inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    known = KINDS[kind]
    late = bool(attrs.get("linear_before_reset"))
    names = ("R", *known.back, "dh", *("dlast h", "dlast c")[: known.states], "mask")
    given = dict(zip(names, inputs, strict=False))
    R, like = given["R"], given["dh"]
    inverses = [INVERSES[name] for name in attrs["activations"]]
    state = tuple(
        given.get(name, torch.zeros_like(like[:1]))[0].requires_grad_()
        for name in ("h0", "c0")[: known.states]
    )
    leaves: list[Any] = [None] * len(like)

    def x_of(t: int, before: Any) -> Any:
        h = before[0].detach()
        if kind == "RNN":
            x, b = inverses[0](given["h"][t]) - h @ R.T, None
        elif kind == "LSTM":
            i, o, f, g = given["gates"][t].chunk(4, -1)
            gates = [*(inverses[0](gate) for gate in (i, o, f)), inverses[1](g)]
            x, b = torch.cat(gates, -1) - h @ R.T, None
        else:
            Rz, Rr, Rn = R.chunk(3)
            z, r, n, *q = given["gates"][t].chunk(4 if late else 3, -1)
            b = q[0] - h @ Rn.T if late else None
            product = r * q[0] if late else (r * h) @ Rn.T
            parts = [inverses[0](z) - h @ Rz.T, inverses[0](r) - h @ Rr.T, inverses[1](n) - product]
            x = torch.cat(parts, -1)
        leaves[t] = x.detach().requires_grad_()
        return leaves[t], b

    results = _walk(kind, len(like), x_of, R, state, given.get("mask"), attrs)
    total = (results[0] * like).sum() + (results[-known.states] * given["dlast h"]).sum()
    if known.states == 2:
        total = total + (results[-1] * given["dlast c"]).sum()
    grads = torch.autograd.grad(total, [*leaves, *state], allow_unused=True)
    made = [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip([*leaves, *state], grads, strict=True)
    ]
    return (torch.stack(made[: len(like)]), *(grad[None] for grad in made[len(like) :]))


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
