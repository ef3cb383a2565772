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
from oocdl.graph.ir.index import AxisRule, Index, Plain, Whole
from oocdl.graph.ir.op_rule import Builder, OpRule, Spec
from oocdl.graph.ir.speed import Computing, Heavy, Probe, Scale
from oocdl.ops._broadcast import fail, is_float, no_second_derivative, plain, same_dtype
from oocdl.ops._speed import READING

ROWS = (1, 8, 64)
"""Samples at once, by which the speed of a step is measured: its product has as many rows."""
ELEMENT_FLOPS = 100
"""Operations for an element of a gate beside the products: activations, and calls for each step. They are
so many that a recurrence is never computed twice to save memory."""
BLOCK_ROWS = 256
"""Steps times samples that an engine may hold factors of a gradient for, or the samples of one step."""


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

    def names(self, late: bool) -> tuple[str, ...]:
        """Return the operands, without the mask."""
        return ("x", "R", "h0", "c0")[: 2 + self.states] + ("b",) * late

    def results(self) -> tuple[str, ...]:
        """Return the results: states of all steps, gates, states of the last step."""
        states = ("h", "c")[: self.states]
        return (*states, *("gates",) * (self.gates > 1), *(f"last {name}" for name in states))

    def read_back(self) -> tuple[str, ...]:
        """Return the operands of the gradient, those of the loss named as what they are gradients of."""
        return ("R", *self.back, "h", *(f"last {name}" for name in ("h", "c")[: self.states]))

    def made_back(self) -> tuple[str, ...]:
        """Return what the gradient makes gradients of."""
        return ("x", "h0", "c0")[: 1 + self.states]

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Return the axes of an operand or result: t time, n samples, h hidden, g gates, k those kept."""
        if name in ("h0", "c0", "last h", "last c"):
            return ("1", "n", "h")
        return {"R": ("g", "h"), "b": ("h",), "mask": ("t", "n", "1"), "x": ("t", "n", "g")}.get(
            name, ("t", "n", "k" if name == "gates" else "h")
        )


def _late(node: Node) -> bool:
    """Whether a GRU has the product before the reset gate."""
    return bool(node.attrs.get("linear_before_reset"))


def _extents(kind: Kind, node: Node, x: Shape, hidden: int) -> dict[str, int]:
    """Return the extents of the axes."""
    kept = (kind.gates + _late(node)) * hidden
    return {"t": x[0], "n": x[1], "h": hidden, "g": kind.gates * hidden, "k": kept, "1": 1}


def _specs(kind: Kind, names: Sequence[str], extents: Mapping[str, int], dtype: str) -> list[Spec]:
    return [
        (tuple(extents[axis] for axis in kind.axes_of(name)), "bool" if name == "mask" else dtype)
        for name in names
    ]


def _named(operands: Sequence[str], node: Node) -> tuple[str, ...]:
    """Return all operands but the mask, the bias of a GRU among them."""
    return (*operands, *("b",) * (_late(node) and "x" in operands))


def _infer(
    kind: Kind, operands: Sequence[str], results: Sequence[str], node: Node, inputs: Sequence[Value]
) -> Sequence[Spec]:
    names = _named(operands, node)
    found = [(value.shape, value.dtype) for value in inputs]
    weight, x = (found[names.index(name)][0] for name in ("R", "x" if "x" in names else "h"))
    if len(x) != 3 or len(weight) != 2 or len(found) not in (len(names), len(names) + 1):
        shapes = [list(shape) for shape, _ in found]
        fail(node, f"{len(found)} operands of shapes {shapes} are not those of it")
    dtype = same_dtype(node, [dtype for _, dtype in found[: len(names)]])
    if not is_float(dtype):
        fail(node, f"its operands must be floating point, not {dtype}")
    extents = _extents(kind, node, x, weight[1])
    wanted = _specs(kind, (*names, "mask"), extents, dtype)
    for name, got, want in zip((*names, "mask"), found, wanted, strict=False):
        if got != want:
            fail(node, f"{name} is {got[1]} {list(got[0])}, and not {want[1]} {list(want[0])}")
    if len(node.attrs["activations"]) != len(kind.activations):
        fail(node, f"it has {len(kind.activations)} activations, not {node.attrs['activations']}")
    return _specs(kind, results, extents, dtype)


def _axes(
    kind: Kind,
    operands: Sequence[str],
    results: Sequence[str],
    node: Node,
    inputs: Sequence[Shape],
    outputs: Sequence[Shape],
) -> AxisRule:
    """Only ``n`` is cut; what the operands have of the hidden size is read whole."""
    names = (*_named(operands, node), "mask")
    extents = {
        axis: extent
        for some, shapes in ((names, inputs), (results, outputs))
        for name, shape in zip(some, shapes, strict=False)
        for axis, extent in zip(kind.axes_of(name), shape, strict=True)
    }

    def read(axis: str) -> Index | None:
        return Whole(extents[axis]) if axis in "hgk" else made(axis)

    def made(axis: str) -> Plain | None:
        return None if axis == "1" else plain(axis, extents[axis])

    return AxisRule(
        inputs=tuple(tuple(map(read, kind.axes_of(name))) for name, _ in zip(names, inputs, strict=False)),
        outputs=tuple(tuple(map(made, kind.axes_of(name))) for name in results),
        extents={axis: extent for axis, extent in extents.items() if axis != "1"},
        uncut=frozenset("thgk") & extents.keys(),
    )


# Gradient ------------------------------------------------------------------------------------


def _gradient(kind: Kind, build: Builder, node: Node, *grads: str | None) -> Sequence[str | None]:
    made = dict(zip(kind.results(), node.outputs, strict=True))
    given = dict(zip(kind.results(), grads, strict=True))
    if given.get("c") is not None or given.get("gates") is not None:
        raise UnsupportedError(f"node '{node.name}' ({node.op}): what it keeps for its gradient has none")
    operands = dict(zip((*kind.names(_late(node)), "mask"), node.inputs, strict=False))
    known = {**operands, **made}
    of_loss = [given[name] or build.zeros_like(made[name]) for name in kind.read_back()[1 + len(kind.back) :]]
    mask = [operands["mask"]] if "mask" in operands else []
    back = build.node(
        f"{kind.op}Grad",
        [known["R"], *(known[name] for name in kind.back), *of_loss, *mask],
        node.attrs,
    )
    found: dict[str, str] = dict(zip(kind.made_back(), back, strict=True))
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


def _scratch(weight: int, node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count two copies of R, a step between kernels, states before all steps, and a block's factors."""
    (width, hidden), (steps, samples, *_) = inputs[weight], outputs[0]
    block = min(max(BLOCK_ROWS, samples), steps * samples)
    return 2 * width * hidden + 10 * samples * width + steps * samples * hidden + 6 * block * hidden


def _speed(kind: Kind, op: str, operands: Sequence[str]) -> Computing:
    attrs: dict[str, Any] = {"reverse": False, "activations": kind.activations}
    if kind.gates == 3:
        attrs["linear_before_reset"] = True
    node = Node("", op, (), (), attrs)

    def probes(scale: Scale) -> Iterator[Heavy]:
        for samples in ROWS:
            extents = _extents(kind, node, (32, samples, 0), max(int(256 * scale.share), 4))
            given = _specs(kind, _named(operands, node), extents, "float32")
            yield op, samples, Probe(op, tuple(given), attrs)

    return Computing(
        like=READING,
        kind=lambda step, shapes, thin_slab_elements: (op, step.kernel_shapes[0][1]),
        probes=probes,
    )


def _rule(kind: Kind, back: bool) -> OpRule:
    """Return the operator, or its gradient."""
    op = f"{kind.op}Grad" if back else kind.op
    operands = kind.read_back() if back else kind.names(False)
    results = kind.made_back() if back else kind.results()
    return OpRule(
        op=op,
        infer=partial(_infer, kind, operands, results),
        gradient=no_second_derivative if back else partial(_gradient, kind),
        axes=partial(_axes, kind, operands, results),
        speed=_speed(kind, op, operands),
        flops=partial(_flops, operands.index("R")),
        scratch_elements=partial(_scratch, operands.index("R")),
        keeps_axes=False,
    )


KINDS: Mapping[str, Kind] = {
    "RNN": Kind("RnnSteps", gates=1, states=1, activations=("Tanh",), back=("h",)),
    "GRU": Kind("GruSteps", gates=3, states=1, activations=("Sigmoid", "Tanh"), back=("h0", "gates", "h")),
    "LSTM": Kind(
        "LstmSteps", gates=4, states=2, activations=("Sigmoid", "Tanh", "Tanh"), back=("c0", "gates", "c")
    ),
}
"""ONNX operator -> what it is made of here."""
RULES: tuple[OpRule, ...] = tuple(_rule(kind, back) for kind in KINDS.values() for back in (False, True))
