"""Recurrent layers on PyTorch: one product and a few in-place kernels for each step.

Forward keeps the gates, so that backward has no product but that of each step: it turns the gates of a block
of steps into the factors of their gradient, all at once, and multiplies by the running gradient step by
step. What a step computes, and in which order operands come, is in ``oocdl.ops.recurrent``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from oocdl.engines.torch.linear import suits_onednn
from oocdl.engines.torch.torch_record import Run
from oocdl.graph.ir.program import Instruction

aten = torch.ops.aten

LEAST_PACKED_MULTIPLY_ADDS = 1 << 20
"""Minimum multiply-adds a step for which oneDNN with packed weights is faster than MKL."""
BLOCK_ROWS = 256
"""Rows (steps x samples) whose gates become factors at once: many for a call, few enough for the caches."""


class Activation(NamedTuple):
    """An activation, whose derivative follows from its result."""

    into: Callable[[Tensor, Tensor], object]
    """(operand, where the result goes)"""
    back: Callable[[Tensor, Tensor, Tensor], object]
    """(gradient, result, where their product goes)"""


ACTIVATIONS = {
    "Sigmoid": Activation(
        lambda x, out: torch.sigmoid(x, out=out),
        lambda g, y, out: aten.sigmoid_backward.grad_input(g, y, grad_input=out),
    ),
    "Tanh": Activation(
        lambda x, out: torch.tanh(x, out=out),
        lambda g, y, out: aten.tanh_backward.grad_input(g, y, grad_input=out),
    ),
    "Relu": Activation(
        lambda x, out: torch.clamp_min(x, 0, out=out),
        lambda g, y, out: aten.threshold_backward.grad_input(g, y, 0, grad_input=out),
    ),
}


class _Product:
    """``x weight^T`` for the few rows of a step, with the weight packed once for all steps."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self.turned, self.packed = weight.t(), None
        if suits_onednn(weight, rows * weight.numel(), LEAST_PACKED_MULTIPLY_ADDS):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)

    def __call__(self, x: Tensor, added: Tensor | None) -> Tensor:
        """``added + x weight^T``, in new memory."""
        if self.packed is None:
            return x @ self.turned if added is None else torch.addmm(added, x, self.turned)
        x = x.contiguous()
        result: Tensor
        if added is None:
            result = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        else:
            other = added.contiguous()
            result = torch.ops.mkldnn._linear_pointwise.binary(x, other, self.packed, None, "add")
        return result


class _Walk:
    """The order of the steps, and what is before each."""

    def __init__(self, item: Instruction, like: Tensor) -> None:
        self.reverse = bool(item.attrs["reverse"])
        self.steps, self.samples = like.shape[:2]
        self.order = range(self.steps - 1, -1, -1) if self.reverse else range(self.steps)

    def blocks(self) -> Iterator[range]:
        """The steps as backward takes them, in blocks."""
        size = max(BLOCK_ROWS // self.samples, 1)
        back = self.order[::-1]
        for start in range(0, self.steps, size):
            yield back[start : start + size]

    def before(self, block: range, states: Tensor, first: Tensor) -> list[tuple[slice, Tensor]]:
        """(steps, counted from the block's first in time, and their states before them), as views.

        The first step of all is apart: the state before it lies elsewhere.
        """
        low, high, start = min(block), max(block) + 1, self.order[0]
        found = [(slice(start - low, start - low + 1), first)] if start in block else []
        shift = 1 if self.reverse else -1
        begin, end = max(low, -shift, 0), min(high, self.steps - max(shift, 0))
        if begin < end:
            found.append((slice(begin - low, end - low), states[begin + shift : end + shift]))
        return found


def _acts(item: Instruction) -> list[Activation]:
    return [ACTIVATIONS[name] for name in item.attrs["activations"]]


def rnn(args: list[Tensor], item: Instruction) -> list[Tensor]:
    """RnnSteps."""
    given, weight, h0, *mask = args
    walk, (act,) = _Walk(item, given), _acts(item)
    states = given.new_empty(walk.steps, walk.samples, weight.shape[1])
    product, h = _Product(weight, walk.samples), h0[0]
    for t in walk.order:
        act.into(product(h, given[t]), states[t])
        if mask:
            torch.where(mask[0][t], states[t], h, out=states[t])
        h = states[t]
    return [states, h.clone()[None]]


def rnn_grad(args: list[Tensor], item: Instruction) -> list[Tensor]:
    """RnnStepsGrad."""
    weight, states, dstates, dlast, *mask = args
    walk, (act,) = _Walk(item, states), _acts(item)
    dgates, carry = states.new_empty(states.shape), dlast[0].clone()
    product = _Product(weight.t(), walk.samples)
    for t in walk.order[::-1]:
        carry.add_(dstates[t])
        act.back(carry, states[t], dgates[t])
        if mask:
            dgates[t].mul_(mask[0][t])
            carry = torch.where(mask[0][t], product(dgates[t], None), carry)
        else:
            carry = product(dgates[t], None)
    return [dgates, carry[None]]


def lstm(args: list[Tensor], item: Instruction) -> list[Tensor]:
    """LstmSteps."""
    given, weight, h0, c0, *mask = args
    walk, (sigma, squash, last), hidden = _Walk(item, given), _acts(item), weight.shape[1]
    states, cells = (given.new_empty(walk.steps, walk.samples, hidden) for _ in range(2))
    gates = given.new_empty(given.shape)
    product, h, c = _Product(weight, walk.samples), h0[0], c0[0]
    views = zip(*(part.unbind(0) for part in torch.split(gates, hidden, 2)), strict=True)
    each = list(zip(given.unbind(0), gates[..., : 3 * hidden].unbind(0), views, strict=True))
    for t in walk.order:
        x, three, (i, o, f, g) = each[t]
        made = product(h, x)
        sigma.into(made[:, : 3 * hidden], three)
        squash.into(made[:, 3 * hidden :], g)
        cell, state = cells[t], states[t]
        torch.mul(f, c, out=cell).addcmul_(i, g)
        last.into(cell, state)
        state.mul_(o)
        if mask:
            torch.where(mask[0][t], state, h, out=state)
            torch.where(mask[0][t], cell, c, out=cell)
        h, c = state, cell
    return [states, cells, gates, h.clone()[None], c.clone()[None]]


def lstm_grad(args: list[Tensor], item: Instruction) -> list[Tensor]:
    """LstmStepsGrad."""
    weight, c0, gates, cells, dstates, dlast, dcell, *mask = args
    walk, acts, hidden = _Walk(item, gates), _acts(item), weight.shape[1]
    product = _Product(weight.t(), walk.samples)
    dgates, carry, dc = gates.new_empty(gates.shape), dlast[0].clone(), dcell[0].clone()
    for block in walk.blocks():
        low, high = min(block), max(block) + 1
        part = dgates[low:high]
        here = mask[0][low:high] if mask else None
        rise = _lstm_factors(acts, gates[low:high], cells[low:high], walk.before(block, cells, c0), part)
        forget = gates[low:high, :, 2 * hidden : 3 * hidden]
        if here is not None:
            part.mul_(here)
            rise.mul_(here)
            forget = forget.masked_fill(~here, 1)
        four = part.view(*part.shape[:2], 4, hidden)
        di, do, dfg = four[:, :, 0].unbind(0), four[:, :, 1].unbind(0), four[:, :, 2:].unbind(0)
        for t in block:
            dh, n = carry.add_(dstates[t]), t - low
            dc.addcmul_(dh, rise[n])
            di[n].mul_(dc)
            do[n].mul_(dh)
            dfg[n].mul_(dc.unsqueeze(1))
            dc.mul_(forget[n])
            carry = product(part[n], None)
            if here is not None:
                carry = torch.where(here[n], carry, dh)
    return [dgates, carry[None], dc[None]]


def _lstm_factors(
    acts: list[Activation],
    gates: Tensor,
    cells: Tensor,
    before: list[tuple[slice, Tensor]],
    out: Tensor,
) -> Tensor:
    """Puts what the gradients of cell and state are multiplied by into ``out``.

    Returns what the gradient of a state is multiplied by on its way to the cell.
    """
    sigma, squash, last = acts
    i, o, f, g = gates.chunk(4, 2)
    di, do, df, dg = out.chunk(4, 2)
    squashed, rise = torch.empty_like(cells), torch.empty_like(cells)
    last.into(cells, squashed)
    last.back(o, squashed, rise)
    sigma.back(squashed, o, do)
    sigma.back(g, i, di)
    squash.back(i, g, dg)
    for place, cell in before:
        sigma.back(cell, f[place], df[place])
    return rise


def gru(args: list[Tensor], item: Instruction) -> list[Tensor]:
    """GruSteps: the reset gate comes after the product with its bias, or before it."""
    given, weight, h0, *rest = args
    late = bool(item.attrs["linear_before_reset"])
    mask = rest[1:] if late else rest
    walk, (sigma, squash), hidden = _Walk(item, given), _acts(item), weight.shape[1]
    states = given.new_empty(walk.steps, walk.samples, hidden)
    gates = given.new_empty(walk.steps, walk.samples, (4 if late else 3) * hidden)
    views = list(zip(*(part.unbind(0) for part in torch.split(gates, hidden, 2)), strict=True))
    h = h0[0]
    if late:
        product = _Product(weight, walk.samples)
        added = torch.cat([rest[0].new_zeros(2 * hidden), rest[0]]).expand(walk.samples, -1).contiguous()
    else:
        both, new = (_Product(part, walk.samples) for part in torch.split(weight, [2 * hidden, hidden]))
    for t in walk.order:
        z, r, n, *q = views[t]
        x, two = given[t], gates[t, :, : 2 * hidden]
        if late:
            made = product(h, added)
            q[0].copy_(made[:, 2 * hidden :])
            sigma.into(torch.add(x[:, : 2 * hidden], made[:, : 2 * hidden], out=two), two)
            squash.into(torch.addcmul(x[:, 2 * hidden :], r, q[0], out=n), n)
        else:
            sigma.into(both(h, x[:, : 2 * hidden]), two)
            squash.into(new(r * h, x[:, 2 * hidden :]), n)
        torch.lerp(n, h, z, out=states[t])
        if mask:
            torch.where(mask[0][t], states[t], h, out=states[t])
        h = states[t]
    return [states, gates, h.clone()[None]]


def gru_grad(args: list[Tensor], item: Instruction) -> list[Tensor]:
    """GruStepsGrad."""
    weight, h0, gates, states, dstates, dlast, *mask = args
    walk, (sigma, squash), hidden = _Walk(item, states), _acts(item), weight.shape[1]
    late = bool(item.attrs["linear_before_reset"])
    turned = weight.t()
    whole = _Product(turned if late else turned[:, : 2 * hidden], walk.samples)
    new = None if late else _Product(turned[:, 2 * hidden :], walk.samples)
    dgates, carry = states.new_empty(walk.steps, walk.samples, 3 * hidden), dlast[0].clone()
    through = states.new_empty(walk.samples, 3 * hidden)
    for block in walk.blocks():
        low, high = min(block), max(block) + 1
        part, pieces = dgates[low:high], torch.split(gates[low:high], hidden, 2)
        z, r, n = pieces[:3]
        dz, dr, dn = torch.split(part, hidden, 2)
        squash.back(1 - z, n, dn)
        for place, state in walk.before(block, states, h0):
            sigma.back(state - n[place], z[place], dz[place])
            sigma.back(
                dn[place] * pieces[3][place] if late else state.expand_as(z[place]), r[place], dr[place]
            )
        here = mask[0][low:high] if mask else None
        if here is not None:
            part.mul_(here)
            z = z.masked_fill(~here, 1)
        for t in block:
            dh, at = carry.add_(dstates[t]), t - low
            dn[at].mul_(dh)
            dz[at].mul_(dh)
            if new is None:
                dr[at].mul_(dh)
                through[:, : 2 * hidden] = part[at, :, : 2 * hidden]
                torch.mul(dn[at], r[at], out=through[:, 2 * hidden :])
                carry = whole(through, dh.mul_(z[at]))
            else:
                back = new(dn[at], None)
                dr[at].mul_(back)
                carry = whole(part[at, :, : 2 * hidden], dh.mul_(z[at]).addcmul_(back, r[at]))
    return [dgates, carry[None]]


KERNELS: Mapping[str, Run] = {
    "RnnSteps": rnn,
    "RnnStepsGrad": rnn_grad,
    "LstmSteps": lstm,
    "LstmStepsGrad": lstm_grad,
    "GruSteps": gru,
    "GruStepsGrad": gru_grad,
}
