"""Recurrent layers by NumPy, a step at a time, in the dtype of the operands.

For engines that have no kernels of their own for them.
What a step computes, and in which order operands come, is in ``oocdl.ops.recurrent``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from oocdl.graph.ir.graph import Array

Run = Callable[[Sequence[Array], Mapping[str, Any]], list[Array]]
"""(operands, attributes) -> results"""


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


ACTIVATIONS: Mapping[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "Sigmoid": (_sigmoid, lambda y: y * (1 - y)),
    "Tanh": (np.tanh, lambda y: 1 - y * y),
    "Relu": (lambda x: np.maximum(x, 0), lambda y: (y > 0).astype(y.dtype)),
}
"""Name -> (activation, its derivative as a function of its result)."""


def _functions(attrs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    found = [ACTIVATIONS[name] for name in attrs["activations"]]
    return [one for one, _ in found], [slope for _, slope in found]


def _order(attrs: Mapping[str, Any], like: Array) -> list[int]:
    """Places in time, in the order of the steps."""
    steps = list(range(like.shape[0]))
    return steps[::-1] if attrs["reverse"] else steps


def _before(order: Sequence[int], states: Array, first: Array) -> Array:
    """The state before each step, by place in time."""
    found = np.empty_like(states)
    found[order[0]] = first[0]
    found[order[1:]] = states[order[:-1]]
    return found


def _chosen(mask: Sequence[Array], t: int, here: Array, there: Array) -> Array:
    """``here``; ``there`` for samples that have no such step."""
    return np.where(mask[0][t], here, there) if mask else here


def rnn(args: Sequence[Array], attrs: Mapping[str, Any]) -> list[Array]:
    """RnnSteps."""
    given, weight, h0, *mask = args
    ((act,), _), h = _functions(attrs), h0[0]
    states = np.empty((*given.shape[:2], weight.shape[1]), given.dtype)
    for t in _order(attrs, given):
        h = states[t] = _chosen(mask, t, act(given[t] + h @ weight.T), h)
    return [states, h[None]]


def rnn_grad(args: Sequence[Array], attrs: Mapping[str, Any]) -> list[Array]:
    """RnnStepsGrad."""
    weight, states, dstates, dlast, *mask = args
    (_, (slope,)), dh = _functions(attrs), dlast[0]
    dgates = np.zeros_like(states)
    for t in _order(attrs, states)[::-1]:
        dh = dh + dstates[t]
        dgates[t] = _chosen(mask, t, dh * slope(states[t]), np.zeros_like(dh))
        dh = _chosen(mask, t, dgates[t] @ weight, dh)
    return [dgates, dh[None]]


def lstm(args: Sequence[Array], attrs: Mapping[str, Any]) -> list[Array]:
    """LstmSteps."""
    given, weight, h0, c0, *mask = args
    ((sigma, squash, last), _), h, c = _functions(attrs), h0[0], c0[0]
    states = np.empty((*given.shape[:2], weight.shape[1]), given.dtype)
    cells, gates = np.empty_like(states), np.empty_like(given)
    for t in _order(attrs, given):
        i, o, f, g = np.split(given[t] + h @ weight.T, 4, 1)
        i, o, f, g = sigma(i), sigma(o), sigma(f), squash(g)
        cell = f * c + i * g
        h, c = _chosen(mask, t, o * last(cell), h), _chosen(mask, t, cell, c)
        states[t], cells[t], gates[t] = h, c, np.concatenate([i, o, f, g], 1)
    return [states, cells, gates, h[None], c[None]]


def lstm_grad(args: Sequence[Array], attrs: Mapping[str, Any]) -> list[Array]:
    """LstmStepsGrad."""
    weight, c0, gates, cells, dstates, dlast, dcell, *mask = args
    (_, _, last), (rise, climb, crest) = _functions(attrs)
    dh, dc, dgates = dlast[0], dcell[0], np.zeros_like(gates)
    order = _order(attrs, gates)
    before = _before(order, cells, c0)
    for t in order[::-1]:
        i, o, f, g = np.split(gates[t], 4, 1)
        squashed = last(cells[t])
        dh = dh + dstates[t]
        dcell = dc + dh * o * crest(squashed)
        parts = [
            dcell * g * rise(i),
            dh * squashed * rise(o),
            dcell * before[t] * rise(f),
            dcell * i * climb(g),
        ]
        row = np.concatenate(parts, 1)
        dgates[t] = _chosen(mask, t, row, np.zeros_like(row))
        dh, dc = _chosen(mask, t, row @ weight, dh), _chosen(mask, t, dcell * f, dc)
    return [dgates, dh[None], dc[None]]


def gru(args: Sequence[Array], attrs: Mapping[str, Any]) -> list[Array]:
    """GruSteps."""
    given, weight, h0, *rest = args
    late = bool(attrs["linear_before_reset"])
    bias, mask = (rest[0], rest[1:]) if late else (0.0, rest)
    (sigma, squash), _ = _functions(attrs)
    hidden, h = weight.shape[1], h0[0]
    states = np.empty((*given.shape[:2], hidden), given.dtype)
    gates = np.empty((*given.shape[:2], (4 if late else 3) * hidden), given.dtype)
    both, new = weight[: 2 * hidden], weight[2 * hidden :]
    for t in _order(attrs, given):
        two = sigma(given[t, :, : 2 * hidden] + h @ both.T)
        z, r = np.split(two, 2, 1)
        q = (h if late else r * h) @ new.T + bias
        n = squash(given[t, :, 2 * hidden :] + (r * q if late else q))
        gates[t] = np.concatenate([two, n, q] if late else [two, n], 1)
        h = states[t] = _chosen(mask, t, n + z * (h - n), h)
    return [states, gates, h[None]]


def gru_grad(args: Sequence[Array], attrs: Mapping[str, Any]) -> list[Array]:
    """GruStepsGrad."""
    weight, h0, gates, states, dstates, dlast, *mask = args
    late, hidden = bool(attrs["linear_before_reset"]), weight.shape[1]
    _, (rise, climb) = _functions(attrs)
    both, new = weight[: 2 * hidden], weight[2 * hidden :]
    dh, order = dlast[0], _order(attrs, states)
    dgates = np.zeros((*states.shape[:2], 3 * hidden), states.dtype)
    before = _before(order, states, h0)
    for t in order[::-1]:
        z, r, n, *q = np.split(gates[t], 4 if late else 3, 1)
        dh = dh + dstates[t]
        dn = dh * (1 - z) * climb(n)
        dz = dh * (before[t] - n) * rise(z)
        back = (dn * r if late else dn) @ new
        dr = (dn * q[0] if late else back * before[t]) * rise(r)
        two = np.concatenate([dz, dr], 1)
        row = np.concatenate([two, dn], 1)
        dgates[t] = _chosen(mask, t, row, np.zeros_like(row))
        dh = _chosen(mask, t, dh * z + two @ both + (back if late else back * r), dh)
    return [dgates, dh[None]]


KERNELS: Mapping[str, Run] = {
    "RnnSteps": rnn,
    "RnnStepsGrad": rnn_grad,
    "LstmSteps": lstm,
    "LstmStepsGrad": lstm_grad,
    "GruSteps": gru,
    "GruStepsGrad": gru_grad,
}
