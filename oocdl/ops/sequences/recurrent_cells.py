"""Cells of recurrent layers: the elementwise part of a step, between its products, and its gradient.

``oocdl.ops.recurrent`` has the formulas of whole steps. A cell takes results of products and parts of arrays
over time. ``m`` is the mask, if there is one: where it is false, a sample has no such step, so its states
stay and its gates have no gradient. In gradients the step behind gives ``carry`` to the state after this
one; the state before it gets the product of the gates' gradients, and the ``rest`` beside that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oocdl.ops.activation import FORMULAS
from oocdl.ops.expression import Term, apply, where

Attrs = Mapping[str, Any]
Terms = tuple[Term, ...]


def _act(attrs: Attrs, number: int, x: Term) -> Term:
    """Apply an activation of the layer."""
    name = attrs["activations"][number]
    return _formula(name, x) if name in FORMULAS else apply(name, x)


def _slope(attrs: Attrs, number: int, dy: Term, y: Term) -> Term:
    """Multiply ``dy`` by the derivative of an activation, whose result is ``y``."""
    return _formula(f"{attrs['activations'][number]}Grad", dy, y)


def _formula(op: str, *operands: Term) -> Term:
    formula = FORMULAS[op].formula
    assert formula is not None, f"{op} is a primitive"
    return formula({}, *operands)


def _stay(m: Terms, here: Term, before: Term) -> Term:
    return where(*m, here, before) if m else here


def _none(m: Terms, *grads: Term) -> Terms:
    return tuple(where(*m, grad, 0.0) for grad in grads) if m else grads


def _rest(m: Terms, dh: Term) -> Terms:
    return (where(*m, 0.0, dh),) if m else ()


def rnn(attrs: Attrs, p: Term, h: Term, *m: Term) -> Terms:
    """(product, h before, [m]) -> h."""
    return (_stay(m, _act(attrs, 0, p), h),)


def rnn_grad(attrs: Attrs, carry: Term, h: Term, dh: Term, *m: Term) -> Terms:
    """(carry, h, its gradient, [m]) -> gradient of the product, [rest]."""
    dh = carry + dh
    return *_none(m, _slope(attrs, 0, dh, h)), *_rest(m, dh)


def lstm(attrs: Attrs, i: Term, o: Term, f: Term, g: Term, h: Term, c: Term, *m: Term) -> Terms:
    """(products of the gates, h and c before, [m]) -> gates, h, c."""
    i, o, f, g = (_act(attrs, int(gate == 3), p) for gate, p in enumerate((i, o, f, g)))
    cell = f * c + i * g
    return i, o, f, g, _stay(m, o * _act(attrs, 2, cell), h), _stay(m, cell, c)


def lstm_grad(
    attrs: Attrs, carry: Term, i: Term, o: Term, f: Term, g: Term, c: Term, before: Term, dh: Term, dc: Term,
    *m: Term,
) -> Terms:  # fmt: skip
    """(carry, gates, c, c before, gradients of h and c, [m]) -> those of gates and of c before, [rest]."""
    dh = carry + dh
    squashed = _act(attrs, 2, c)
    cell = dc + _slope(attrs, 2, dh * o, squashed)
    sigmas = (_slope(attrs, 0, dy, y) for dy, y in ((cell * g, i), (dh * squashed, o), (cell * before, f)))
    return *_none(m, *sigmas, _slope(attrs, 1, cell * i, g)), _stay(m, cell * f, dc), *_rest(m, dh)


def gru(
    attrs: Attrs, xz: Term, xr: Term, xn: Term, pz: Term, pr: Term, pn: Term, b: Term, h: Term, *m: Term
) -> Terms:
    """(input, products, bias, h before, [m]) -> z, r, n, q, h; the reset comes after the product."""
    z, r, q = _act(attrs, 0, xz + pz), _act(attrs, 0, xr + pr), pn + b
    n = _act(attrs, 1, xn + r * q)
    return z, r, n, q, _stay(m, n + z * (h - n), h)


def gru_grad(
    attrs: Attrs, carry: Term, z: Term, r: Term, n: Term, q: Term, h: Term, dh: Term, *m: Term
) -> Terms:
    """(carry, gates, h before, gradient of h, [m]) -> gradients of the input, of the products, rest."""
    dh = carry + dh
    dn = _slope(attrs, 1, dh * (1.0 - z), n)
    dz, dr, dn = _none(m, _slope(attrs, 0, dh * (h - n), z), _slope(attrs, 0, dn * q, r), dn)
    return dz, dr, dn, dz, dr, dn * r, _stay(m, dh * z, dh)


def gru_reset(attrs: Attrs, xz: Term, xr: Term, pz: Term, pr: Term, h: Term) -> Terms:
    """(input, products, h before) -> z, r, and the state that the last product takes."""
    r = _act(attrs, 0, xr + pr)
    return _act(attrs, 0, xz + pz), r, r * h


def gru_after_reset(attrs: Attrs, xn: Term, pn: Term, z: Term, h: Term, *m: Term) -> Terms:
    """(input, product, z, h before, [m]) -> n, h."""
    n = _act(attrs, 1, xn + pn)
    return n, _stay(m, n + z * (h - n), h)


def gru_after_reset_grad(attrs: Attrs, carry: Term, z: Term, n: Term, h: Term, dh: Term, *m: Term) -> Terms:
    """(carry, z, n, h before, gradient of h, [m]) -> gradients of z, n and h."""
    dh = carry + dh
    dz, dn = _slope(attrs, 0, dh * (h - n), z), _slope(attrs, 1, dh * (1.0 - z), n)
    return *_none(m, dz, dn), dh


def gru_reset_grad(attrs: Attrs, back: Term, z: Term, r: Term, h: Term, dh: Term, *m: Term) -> Terms:
    """(gradient of the reset state, z, r, h before, gradient of h, [m]) -> gradient of r, rest."""
    return _slope(attrs, 0, back * h, r), _stay(m, dh * z + back * r, dh)
