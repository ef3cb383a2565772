"""Runs recurrent layers a step at a time: products by an engine, and between products cells.

``oocdl.ops.recurrent`` has the formulas of steps and the order of operands, and
``oocdl.ops.sequences.recurrent_cells`` the cells. Each engine brings a ``Kit`` that computes both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from oocdl.engines.numpy_functions import FUNCTIONS
from oocdl.graph.ir.graph import Shape
from oocdl.ops.expression import Cell, steps_of_cell
from oocdl.ops.sequences import recurrent_cells as cells

Attrs = Mapping[str, Any]
Run = Callable[[Sequence[Any], Attrs], list[Any]]
"""(operands, attributes) -> results"""
Product = Callable[[Any, Any], Any]
"""(x, what is added or None) -> ``x weight^T`` plus that, in new memory."""
Step = Callable[..., None]
"""A cell that is bound to its arrays: (step, what is made for this step alone)."""


@dataclass(frozen=True, eq=False)
class Part:
    """An array that a cell reads or writes, or one of ``of`` equal parts of its last axis."""

    array: Any
    """[T, N, of H]; [N, of H] is the same array in all steps. None: it is given for each step alone."""
    number: int = 0
    of: int = 1
    first: Any = None
    """If given, the array of the step before is meant, and this one [1, N, H] before the first step."""

    def at(self, t: int, before: int | None, fresh: Any) -> Any:
        """Return the part in step ``t``; ``before``: the step before that."""
        array = fresh if self.array is None else self.array
        if self.first is not None:
            array = self.first[0] if before is None else array[before]
        elif array.ndim == 3:
            array = array[t]
        width = array.shape[-1] // self.of
        return array[:, self.number * width : (self.number + 1) * width]


def _parts(array: Any, of: int) -> list[Part]:
    return [Part(array, number, of) for number in range(of)]


class Kit:
    """Makes arrays, multiplies and computes cells, here by NumPy; other engines derive theirs."""

    def empty(self, like: Any, shape: Shape, result: int | None = None) -> Any:
        """Return an array of the dtype of another; the one of a ``result``, where that has its place."""
        return np.empty(shape, like.dtype)

    def copy(self, array: Any) -> Any:
        """Return a copy without gaps."""
        return array.copy()

    def product(self, weight: Any, rows: int) -> Product:
        """Return the product with a weight, which all steps call."""
        return lambda x, added: x @ weight.T if added is None else added + x @ weight.T

    def compute(self, op: str, given: Sequence[Any]) -> Any:
        """Compute a primitive of cells."""
        return FUNCTIONS[op](*given)

    def cell(
        self, cell: Cell, attrs: Attrs, order: range, reads: Sequence[Part], writes: Sequence[Part]
    ) -> Step:
        """Return a cell with its arrays; ``order``: the steps, as the layer takes them."""
        steps, results = steps_of_cell(cell, attrs, len(reads))
        before = {t: order[at - 1] if at else None for at, t in enumerate(order)}

        def step(t: int, fresh: Any) -> None:
            values = [part.at(t, before[t], fresh) for part in reads]
            for each in steps:
                values.append(self.compute(each.op, [values[a] if type(a) is int else a for a in each.args]))
            for part, value in zip(writes, results, strict=True):
                part.at(t, before[t], fresh)[...] = values[value]

        return step


def _order(attrs: Attrs, like: Any) -> range:
    steps = range(like.shape[0])
    return steps[::-1] if attrs["reverse"] else steps


def _before(order: range, at: int, states: Any, first: Any) -> Any:
    """Return the state before the step that is number ``at`` in the order."""
    return states[order[at - 1]] if at else first[0]


def _forward(cell: Cell, count: int, kit: Kit, args: Sequence[Any], attrs: Attrs) -> list[Any]:
    """RnnSteps, with one state, and LstmSteps, with two and gates that are kept."""
    given, weight, *rest = args
    hidden, first, mask = weight.shape[1], rest[:count], rest[count:]
    order, product = _order(attrs, given), kit.product(weight, given.shape[1])
    states = [kit.empty(given, (*given.shape[:2], hidden), result) for result in range(count)]
    gates = [kit.empty(given, given.shape, count)] if count == 2 else []
    before = [Part(state, first=array) for state, array in zip(states, first, strict=True)]
    reads = [*_parts(None, given.shape[2] // hidden), *before, *map(Part, mask)]
    writes = [*(part for kept in gates for part in _parts(kept, 4)), *map(Part, states)]
    step = kit.cell(cell, attrs, order, reads, writes)
    for at, t in enumerate(order):
        step(t, product(_before(order, at, states[0], first[0]), given[t]))
    return [*states, *gates, *(kit.copy(state[order[-1]])[None] for state in states)]


def rnn_grad(kit: Kit, args: Sequence[Any], attrs: Attrs) -> list[Any]:
    """RnnStepsGrad."""
    weight, states, dstates, dlast, *mask = args
    order, product = _order(attrs, states), kit.product(weight.T, states.shape[1])
    dgates, carry = kit.empty(states, states.shape, 0), kit.copy(dlast[0])
    rest = [kit.empty(carry, carry.shape) for _ in mask]
    reads = [Part(None), Part(states), Part(dstates), *map(Part, mask)]
    step = kit.cell(cells.rnn_grad, attrs, order, reads, [Part(dgates), *map(Part, rest)])
    for t in order[::-1]:
        step(t, carry)
        carry = product(dgates[t], *(rest or [None]))
    return [dgates, carry[None]]


def lstm_grad(kit: Kit, args: Sequence[Any], attrs: Attrs) -> list[Any]:
    """LstmStepsGrad."""
    weight, c0, gates, kept, dstates, dlast, dcell, *mask = args
    order, product = _order(attrs, gates), kit.product(weight.T, gates.shape[1])
    dgates, carry, dc = kit.empty(gates, gates.shape, 0), kit.copy(dlast[0]), kit.copy(dcell[0])
    rest = [kit.empty(carry, carry.shape) for _ in mask]
    reads = [Part(None), *_parts(gates, 4), Part(kept), Part(kept, first=c0), Part(dstates), Part(dc)]
    writes = [*_parts(dgates, 4), Part(dc), *map(Part, rest)]
    step = kit.cell(cells.lstm_grad, attrs, order, [*reads, *map(Part, mask)], writes)
    for t in order[::-1]:
        step(t, carry)
        carry = product(dgates[t], *(rest or [None]))
    return [dgates, carry[None], dc[None]]


def gru(kit: Kit, args: Sequence[Any], attrs: Attrs) -> list[Any]:
    """GruSteps."""
    given, weight, h0, *rest = args
    late, hidden = bool(attrs["linear_before_reset"]), weight.shape[1]
    order, samples = _order(attrs, given), given.shape[1]
    states = kit.empty(given, (*given.shape[:2], hidden), 0)
    gates = kit.empty(given, (*given.shape[:2], (4 if late else 3) * hidden), 1)
    before, bind = Part(states, first=h0), partial(kit.cell, attrs=attrs, order=order)
    if late:
        bias, mask = Part(rest[0][None]), map(Part, rest[1:])
        product = kit.product(weight, samples)
        reads = [*_parts(given, 3), *_parts(None, 3), bias, before, *mask]
        step = bind(cells.gru, reads=reads, writes=[*_parts(gates, 4), Part(states)])
        for at, t in enumerate(order):
            step(t, product(_before(order, at, states, h0), None))
        return [states, gates, kit.copy(states[order[-1]])[None]]
    both, new = kit.product(weight[: 2 * hidden], samples), kit.product(weight[2 * hidden :], samples)
    reset, (xz, xr, xn), (z, r, n) = kit.empty(given, (samples, hidden)), _parts(given, 3), _parts(gates, 3)
    first = bind(cells.gru_reset, reads=[xz, xr, *_parts(None, 2), before], writes=[z, r, Part(reset)])
    reads = [xn, Part(None), z, before, *map(Part, rest)]
    second = bind(cells.gru_after_reset, reads=reads, writes=[n, Part(states)])
    for at, t in enumerate(order):
        first(t, both(_before(order, at, states, h0), None))
        second(t, new(reset, None))
    return [states, gates, kit.copy(states[order[-1]])[None]]


def gru_grad(kit: Kit, args: Sequence[Any], attrs: Attrs) -> list[Any]:
    """GruStepsGrad."""
    weight, h0, gates, states, dstates, dlast, *mask = args
    late, hidden, samples = bool(attrs["linear_before_reset"]), weight.shape[1], states.shape[1]
    order = _order(attrs, states)
    dgates, carry = kit.empty(gates, (*states.shape[:2], 3 * hidden), 0), kit.copy(dlast[0])
    rest, bind = kit.empty(carry, carry.shape), partial(kit.cell, attrs=attrs, order=order)
    before, dh, masks = Part(states, first=h0), Part(dstates), [*map(Part, mask)]
    if late:
        product, through = kit.product(weight.T, samples), kit.empty(carry, (samples, 3 * hidden))
        reads = [Part(None), *_parts(gates, 4), before, dh, *masks]
        writes = [*_parts(dgates, 3), *_parts(through, 3), Part(rest)]
        step = bind(cells.gru_grad, reads=reads, writes=writes)
        for t in order[::-1]:
            step(t, carry)
            carry = product(through, rest)
        return [dgates, carry[None]]
    both, new = kit.product(weight[: 2 * hidden].T, samples), kit.product(weight[2 * hidden :].T, samples)
    (z, r, n), (dz, dr, dn), whole = _parts(gates, 3), _parts(dgates, 3), Part(kit.empty(carry, carry.shape))
    reads = [Part(None), z, n, before, dh, *masks]
    first = bind(cells.gru_after_reset_grad, reads=reads, writes=[dz, dn, whole])
    reads = [Part(None), z, r, before, whole, *masks]
    second = bind(cells.gru_reset_grad, reads=reads, writes=[dr, Part(rest)])
    for t in order[::-1]:
        first(t, carry)
        second(t, new(dgates[t, :, 2 * hidden :], None))
        carry = both(dgates[t, :, : 2 * hidden], rest)
    return [dgates, carry[None]]


RUNS: Mapping[str, Callable[[Kit, Sequence[Any], Attrs], list[Any]]] = {
    "RnnSteps": partial(_forward, cells.rnn, 1), "RnnStepsGrad": rnn_grad, "GruSteps": gru,
    "LstmSteps": partial(_forward, cells.lstm, 2), "LstmStepsGrad": lstm_grad, "GruStepsGrad": gru_grad,
}  # fmt: skip
KERNELS: Mapping[str, Run] = {op: partial(run, Kit()) for op, run in RUNS.items()}
"""Operator -> its kernel by NumPy, for engines that have none of their own."""
