"""LSTM, GRU and plain recurrent layers: the recurrence of a segment of time, in one direction.

    RnnSteps (x, R, h0, [mask])     {reverse, activations}                      -> h, last h
    GruSteps (x, R, h0, [b], [mask]){reverse, activations, linear_before_reset} -> h, gates, last h
    LstmSteps(x, R, h0, c0, [mask]) {reverse, activations}                      -> h, c, gates, last h, last c

``x`` [T, N, G H] is the input times its weights for all steps, with all biases that may be added there;
R [G H, H] are the recurrent weights of G gates in ONNX's order (z r n of a GRU, i o f g of an LSTM). h, c
[T, N, H] are the states after each step; h0, c0 and the last ones are [1, N, H]. ``b`` [H] is there with
``linear_before_reset``: the bias of the recurrent product that the reset gate multiplies. ``mask``
[T, N, 1] is false where a sample has no such step, and keeps its states. A step computes, with
``p = x + h' R^T`` from the state h' before it, and functions s, t, u named by ``activations``:

    RNN   h = s(p)
    GRU   z, r = s(p_z), s(p_r);  q = h' R_n^T + b;  n = t(x_n + r q);  h = n + z (h' - n)
          without linear_before_reset: n = t(x_n + (r h') R_n^T)
    LSTM  i, o, f = s(p_i), s(p_o), s(p_f);  g = t(p_g);  c = f c' + i g;  h = o u(c)

The gates [T, N, ..] (of a GRU z, r, n, and q if there is one) are kept for the gradient, which is one
operator that goes back through the steps:

    RnnStepsGrad (R, h, dh, dlast, [mask])                -> dx, dh0
    GruStepsGrad (R, h0, gates, h, dh, dlast, [mask])     -> dx, dh0
    LstmStepsGrad(R, c0, gates, c, dh, dlast, dc, [mask]) -> dx, dh0, dc0

The gradient of R is a matrix product over all steps, outside of it. Only the batch is cut: H is needed
whole, and time is cut into segments by whoever builds the graph. (Hochreiter & Schmidhuber 1997; Cho et
al. 2014, arXiv:1406.1078.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from oocdl.errors import UnsupportedError
from oocdl.graph.ir.graph import Node, Shape, Value
from oocdl.graph.ir.index import AxisRule, Whole
from oocdl.graph.ir.op_rule import Builder, OpRule, Spec
from oocdl.graph.ir.speed import Computing, Heavy, Scale
from oocdl.ops._broadcast import extents_by, fail, no_second_derivative, plain, plain_by, same_float
from oocdl.ops._speed import READING, probe

ROWS = (1, 8, 64)
"""Samples at once, by which the speed of a step is measured: its product has as many rows."""
ELEMENT_FLOPS = 100
"""Operations for an element of a gate beside the products: activations, and calls for each step. They are
so many that a recurrence is never computed twice to save memory."""

AXES: Mapping[str, str] = {
    "x": "tng", "R": "gh", "b": "h", "mask": "tn1", "gates": "tnk", "h": "tnh", "c": "tnh",
    **dict.fromkeys(("h0", "c0", "last h", "last c"), "1nh"),
}  # fmt: skip
"""Operand or result -> its axes: t time, n samples, h hidden, g gates, k those kept."""


@dataclass(frozen=True)
class Kind:
    """Properties of a kind of recurrent layer."""

    op: str
    gates: int
    states: int
    """Number of states that go from step to step: 1 (h), or 2 (h and c)."""
    activations: tuple[str, ...]
    """The usual ones; others of the same number may be given."""
    back: tuple[str, ...]
    """Operands of the gradient behind R and before those of the loss: ``h0`` or ``c0``, then results."""

    def operands(self, late: bool = False, back: bool = False) -> list[str]:
        """Return the operands of the layer or its gradient; the last one, the mask, may be left out.

        Those of the loss are named as what they are gradients of.
        """
        if back:
            return ["R", *self.back, "h", *("last h", "last c")[: self.states], "mask"]
        return ["x", "R", *("h0", "c0")[: self.states], *["b"] * late, "mask"]

    def results(self, back: bool = False) -> list[str]:
        """Return the results: states of all steps, gates, states of the last step; or what has gradients."""
        if back:
            return ["x", *("h0", "c0")[: self.states]]
        last = ("last h", "last c")[: self.states]
        return [*("h", "c")[: self.states], *["gates"] * (self.gates > 1), *last]


def _late(node: Node) -> bool:
    return bool(node.attrs.get("linear_before_reset"))


def _shape(name: str, extents: Mapping[str, int]) -> Shape:
    return tuple(extents[axis] for axis in AXES[name])


def _infer(kind: Kind, back: bool, node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    names = kind.operands(_late(node), back)
    if len(inputs) not in (len(names) - 1, len(names)):
        fail(node, f"it takes {', '.join(names)}, and not {len(inputs)} operands")
    terms = [AXES[name] for name in names[: len(inputs)]]
    extents = extents_by(node, terms, [value.shape for value in inputs], {"1": 1})
    dtype, kept = same_float(node, inputs[: len(names) - 1]), (kind.gates + _late(node)) * extents["h"]
    if inputs[len(names) - 1 :] and inputs[-1].dtype != "bool":
        fail(node, f"its mask must be bool, not {inputs[-1].dtype}")
    if extents["g"] != kind.gates * extents["h"] or extents.setdefault("k", kept) != kept:
        g, k, h = (extents[axis] for axis in "gkh")
        fail(node, f"its gates have {g} and {k} elements for {h} hidden ones")
    if len(node.attrs["activations"]) != len(kind.activations):
        fail(node, f"it has {len(kind.activations)} activations, not {node.attrs['activations']}")
    return [(_shape(name, extents), dtype) for name in kind.results(back)]


def _axes(kind: Kind, back: bool, node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    """Only ``n`` is cut; what the operands have of the hidden size is read whole."""
    read = [AXES[name] for name in kind.operands(_late(node), back)][: len(inputs)]
    made = [AXES[name] for name in kind.results(back)]
    extents = extents_by(node, (*read, *made), (*inputs, *outputs))
    extents.pop("1", None)
    axes = (zip(term, shape, strict=True) for term, shape in zip(read, inputs, strict=True))
    seen = tuple(tuple(Whole(n) if axis in "hgk" else plain(axis, n) for axis, n in one) for one in axes)
    return AxisRule(seen, plain_by(made, outputs), extents, uncut=frozenset("thgk") & extents.keys())


# Gradient ------------------------------------------------------------------------------------


def _gradient(kind: Kind, build: Builder, node: Node, *grads: str | None) -> Sequence[str | None]:
    made = dict(zip(kind.results(), node.outputs, strict=True))
    given = dict(zip(kind.results(), grads, strict=True))
    if given.get("c") is not None or given.get("gates") is not None:
        raise UnsupportedError(f"node '{node.name}' ({node.op}): what it keeps for its gradient has none")
    operands = dict(zip(kind.operands(_late(node)), node.inputs, strict=False))
    known = {**operands, **made}
    names = kind.operands(back=True)[1 + len(kind.back) : -1]
    of_loss = [given[name] or build.zeros_like(made[name]) for name in names]
    mask = [operands["mask"]] if "mask" in operands else []
    reads = [known["R"], *(known[name] for name in kind.back), *of_loss, *mask]
    back = build.node(f"{kind.op}Grad", reads, node.attrs)
    found: dict[str, str] = dict(zip(kind.results(back=True), back, strict=True))
    if kind.gates == 3:
        found |= _gru_weights(build, node, found["x"], known)
    else:
        found["R"] = _product(build, *_paired(build, node, found["x"], known))
    return [found.get(name) for name in operands]


def _part(build: Builder, value: str, axis: int, start: int, stop: int) -> str:
    if (start, stop) == (0, build.shape(value)[axis]):
        return value
    return build("Slice", value, axis=axis, start=start, stop=stop, step=1)


def _paired(
    build: Builder, node: Node, value: str, known: Mapping[str, str], times: str | None = None
) -> list[tuple[str, str]]:
    """Return (``value`` of some steps, the states before these), for the first step and for all others.

    With ``times`` the states are multiplied by that.
    """
    steps, reverse = build.shape(value)[0], bool(node.attrs["reverse"])
    first = steps - 1 if reverse else 0
    pieces = [((first, first + 1), known["h0"])]
    if steps > 1:
        rest, before = ((0, steps - 1), (1, steps)) if reverse else ((1, steps), (0, steps - 1))
        pieces.append((rest, _part(build, known["h"], 0, *before)))
    found = []
    for place, states in pieces:
        if times is not None:
            states = build("Mul", _part(build, times, 0, *place), states)
        found.append((_part(build, value, 0, *place), states))
    return found


def _product(build: Builder, *pairs: tuple[str, str]) -> str:
    """Return the gradient of a weight: the sum of products over all steps and samples."""
    parts = [build("Einsum", left, right, equation="tng,tnh->gh") for left, right in pairs]
    return parts[0] if len(parts) == 1 else build("Add", *parts)


def _gru_weights(build: Builder, node: Node, dx: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return the gradients of R and b: the product of the last gate is its own."""
    hidden = build.shape(known["R"])[1]
    two, new = _part(build, dx, 2, 0, 2 * hidden), _part(build, dx, 2, 2 * hidden, 3 * hidden)
    reset = _part(build, known["gates"], 2, hidden, 2 * hidden)
    both = _product(build, *_paired(build, node, two, known))
    found = {}
    if _late(node):
        new = build("Mul", new, reset)
        last = _product(build, *_paired(build, node, new, known))
        found["b"] = build("Reshape", build("ReduceSum", new, axes=(0, 1)), shape=(hidden,))
    else:
        last = _product(build, *_paired(build, node, new, known, times=reset))
    return {**found, "R": build("Concat", both, last, axis=0)}


# Cost ----------------------------------------------------------------------------------------


def _flops(weight: int, node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count the product of each step, and the activations; ``weight`` is the number of the operand R."""
    (width, hidden), (steps, samples, *_) = inputs[weight], outputs[0]
    return steps * samples * width * (2 * hidden + ELEMENT_FLOPS)


def _scratch(back: bool, node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count R as products take it and what a step makes and does not keep.

    A gradient turns R first, and copies the states of all steps if their rows lie apart.
    """
    (width, hidden), (steps, samples, *_) = inputs[0 if back else 1], outputs[0]
    turned = width * hidden + steps * samples * hidden if back else 0
    return width * hidden + 10 * samples * width + turned


def _speed(kind: Kind, back: bool, op: str) -> Computing:
    attrs: dict[str, Any] = {"reverse": False, "activations": kind.activations}
    if kind.gates == 3:
        attrs["linear_before_reset"] = True
    node = Node("", op, (), (), attrs)

    def probes(scale: Scale) -> Iterator[Heavy]:
        hidden = max(int(256 * scale.share), 4)
        gates = {"g": kind.gates * hidden, "k": (kind.gates + _late(node)) * hidden}
        for samples in ROWS:
            extents = {"t": 32, "n": samples, "h": hidden, "1": 1, **gates}
            shapes = [_shape(name, extents) for name in kind.operands(_late(node), back)[:-1]]
            yield op, samples, probe(op, *shapes, **attrs)

    return Computing(
        like=READING,
        kind=lambda step, shapes, thin_slab_elements: (op, step.kernel_shapes[0][1]),
        probes=probes,
    )


def _rule(kind: Kind, back: bool) -> OpRule:
    op, weight = (f"{kind.op}Grad", 0) if back else (kind.op, 1)
    return OpRule(
        op=op, infer=partial(_infer, kind, back), axes=partial(_axes, kind, back), keeps_axes=False,
        gradient=no_second_derivative if back else partial(_gradient, kind),
        speed=_speed(kind, back, op), flops=partial(_flops, weight), scratch_elements=partial(_scratch, back),
    )  # fmt: skip


KINDS: Mapping[str, Kind] = {
    "RNN": Kind("RnnSteps", 1, 1, ("Tanh",), ("h",)),
    "GRU": Kind("GruSteps", 3, 1, ("Sigmoid", "Tanh"), ("h0", "gates", "h")),
    "LSTM": Kind("LstmSteps", 4, 2, ("Sigmoid", "Tanh", "Tanh"), ("c0", "gates", "c")),
}
"""ONNX operator -> what it is made of here."""
RULES: tuple[OpRule, ...] = tuple(_rule(kind, back) for kind in KINDS.values() for back in (False, True))
