"""Records of the elementwise operators of the onnxruntime engine.

NumPy computes those that it has vector loops for, by their formulas where no faster kernel stands here. A
chain runs on blocks of a few hundred KiB, for which a session's call is too slow and too hungry. So its
members are kernels that write into memory they are given; they take operands, unpadded and broadcastable,
and the arrays their results go to. All else is left to sessions. Closed forms of the ONNX operators and
their measured costs: `docs/explanation/kernel-measurements.md`, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oocdl.engines.numpy_functions import FUNCTIONS, SLOW, TESTS, by_steps, reads_first_operand_once
from oocdl.engines.ort.emit import Emitter, Lowering, Val
from oocdl.engines.ort.ort_record import Kernel
from oocdl.fusion import blockwise
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction
from oocdl.ops.activation import FORMULAS
from oocdl.ops.expression import compute
from oocdl.ops.pointwise import Row

Into = blockwise.Into[Array]
Bind = blockwise.Bind[Array]


Attrs = Mapping[str, Any]


def _into(function: Callable[[Attrs, Sequence[Array], Array], Any]) -> Bind:
    """Bind a function of attributes, operands and the array of the result."""

    def bind(attrs: Attrs) -> Into:
        def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
            function(attrs, args, outs[0])

        return kernel

    return bind


def _out(function: Callable[..., Any], *constants: float) -> Bind:
    """Bind a function of the operands and constants with an ``out`` argument."""
    return _into(lambda attrs, args, out: function(*args, *constants, out=out))


def _leaky_relu(attrs: Attrs, args: Sequence[Array], out: Array) -> None:
    np.multiply(args[0], float(attrs["alpha"]), out=out)
    larger = np.maximum if attrs["alpha"] <= 1 else np.minimum
    larger(args[0], out, out=out)


def _relu_grad(attrs: Attrs, args: Sequence[Array], out: Array) -> None:
    dy, x = args
    np.greater(x, 0, out=out)
    np.multiply(out, dy, out=out)


def _leaky_relu_grad(attrs: Attrs, args: Sequence[Array], out: Array) -> None:
    dy, x = args
    alpha = np.float32(attrs["alpha"])
    rise = np.float32(1) - alpha
    if rise + alpha != 1 or out.dtype != np.float32:
        out[...] = np.where(x > 0, dy, dy * out.dtype.type(attrs["alpha"]))
        return
    # Choosing branches; alpha + (1 - alpha) is exactly one, and takes a third of the time.
    np.greater(x, 0, out=out)
    np.multiply(out, rise, out=out)
    np.add(out, alpha, out=out)
    np.multiply(out, dy, out=out)


def _dropout(attrs: Attrs, args: Sequence[Array], out: Array) -> None:
    x, u = args
    ratio = float(attrs["ratio"])
    if ratio >= 1.0:
        out[...] = 0
        return
    np.greater_equal(u, ratio, out=out)
    np.multiply(out, 1.0 / (1.0 - ratio), out=out)
    np.multiply(out, x, out=out)


def _normalize(attrs: Attrs, args: Sequence[Array], out: Array) -> None:
    x, mean, var = args
    scale = np.reciprocal(np.sqrt(var + float(attrs["eps"])))
    np.subtract(x, mean, out=out)
    np.multiply(out, scale, out=out)


def _same(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """Lower to the ONNX operator of the same name."""
    return [emit(instruction.op, *args)]


def _by_formula(row: Row) -> Lowering:
    """Lower to the primitives of the operator's formula."""

    def lower(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
        def apply(op: str, given: list[Val | float]) -> Val:
            values = [g if isinstance(g, Val) else emit.scalar(g, args[0]) for g in given]
            return emit(op, *values, dtype="bool" if op in TESTS else args[0].dtype)

        return [compute(row.steps(instruction.attrs), args, apply)]

    return lower


def _emit_mod(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    x, divisor = args
    like_dividend = int(instruction.attrs.get("fmod", 0))
    if like_dividend or not x.dtype.startswith("float"):
        return [emit("Mod", x, divisor, fmod=like_dividend)]
    rest = emit("Mod", x, divisor, fmod=1)  # all that there is for floating-point numbers
    wrong = emit("Less", emit("Mul", emit("Sign", rest), emit("Sign", divisor)), 0.0, dtype="bool")
    return [emit("Where", wrong, emit("Add", rest, divisor), rest, dtype=x.dtype)]


def left_to_sessions(lowering: Lowering, *, one_thread: bool = False, indices: int | None = None) -> Kernel:
    """An operator that NumPy has no fast loop for; ``one_thread`` and ``indices``: see ``Kernel``."""
    return replace(_NUMPY, lowering=lowering, one_thread=one_thread, indices=indices)


def left_to_numpy(whole: Bind) -> Kernel:
    """An operator that no session computes, or not as fast, by NumPy on whole arrays."""
    return replace(_NUMPY, whole=whole)


def in_blocks(bind: Bind, *, in_place: int, finish: blockwise.Finish[Array] | None = None) -> Kernel:
    """An operator by NumPy, also as a member of chains: what the arguments are, see ``Blockwise``."""
    return replace(_NUMPY, blocks=blockwise.Blockwise(bind, in_place, finish))


_NUMPY = Kernel(
    lowering=None,
    whole=None,
    blocks=None,
    channels_last=None,
    takes_unpadded=False,
    convolution=None,
    indices=None,
    one_thread=False,
)


def _derived(row: Row) -> Kernel:
    """An operator by its formula: by NumPy where that has a loop for each primitive, else by a session."""
    steps = row.steps(row.sample)
    if any(step.op not in VECTOR_LOOPS for step in steps):
        return left_to_sessions(_by_formula(row))

    def bind(attrs: Attrs) -> Into:
        return by_steps(row.steps(attrs), row.arity)

    return in_blocks(bind, in_place=int(reads_first_operand_once(steps)))


_UNARY = (
    "Sin",
    "Cos",
    "Floor",
    "Round",
    "Neg",
    "Sqrt",
    "Exp",
    "Log",
    "Abs",
    "Sigmoid",
    "Tanh",
    "Reciprocal",
    "Not",
)
_BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "And", "Or")
_WITHOUT_LOOPS = ("Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "Pow")
VECTOR_LOOPS = FUNCTIONS.keys() - set(_WITHOUT_LOOPS)
"""Primitives that NumPy has fast loops for."""

KERNELS: Mapping[str, Kernel] = {
    **{op: _derived(row) for op, row in FORMULAS.items()},
    **{op: left_to_sessions(_same) for op in (*_WITHOUT_LOOPS, *SLOW)},
    **{op: in_blocks(_out(FUNCTIONS[op]), in_place=1) for op in _UNARY},
    **{op: in_blocks(_out(FUNCTIONS[op]), in_place=2) for op in _BINARY},
    **{op: in_blocks(_out(FUNCTIONS[op]), in_place=0) for op in ("Greater", "Less", "Equal", "Where")},
    "Mod": left_to_sessions(_emit_mod),
    "Cast": in_blocks(_into(lambda attrs, args, out: np.copyto(out, args[0], casting="unsafe")), in_place=0),
    "Normalize": in_blocks(_into(_normalize), in_place=1),
    # Faster than their formulas.
    "Relu": in_blocks(_out(np.maximum, 0), in_place=1),
    "LeakyRelu": in_blocks(_into(_leaky_relu), in_place=0),
    "ReluGrad": in_blocks(_into(_relu_grad), in_place=0),
    "LeakyReluGrad": in_blocks(_into(_leaky_relu_grad), in_place=0),
    "Dropout": in_blocks(_into(_dropout), in_place=0),
}
