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


def _out(function: Callable[..., Any], *constants: float) -> Bind:
    """Bind a function of the operands and constants with an ``out`` argument."""

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        function(*args, *constants, out=outs[0])

    return lambda attrs: kernel


def _always(kernel: Into) -> Bind:
    """Bind a kernel that takes no attributes."""
    return lambda attrs: kernel


def _cast(args: Sequence[Array], outs: Sequence[Array]) -> None:
    np.copyto(outs[0], args[0], casting="unsafe")


def _leaky_relu(attrs: Mapping[str, Any]) -> Into:
    alpha = float(attrs["alpha"])
    larger = np.maximum if alpha <= 1 else np.minimum

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        np.multiply(args[0], alpha, out=outs[0])
        larger(args[0], outs[0], out=outs[0])

    return kernel


def _relu_grad(args: Sequence[Array], outs: Sequence[Array]) -> None:
    dy, x = args
    np.greater(x, 0, out=outs[0])
    np.multiply(outs[0], dy, out=outs[0])


def _leaky_relu_grad(attrs: Mapping[str, Any]) -> Into:
    alpha = np.float32(attrs["alpha"])
    rise = np.float32(1) - alpha

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        dy, x = args
        out = outs[0]
        if rise + alpha != 1 or out.dtype != np.float32:
            out[...] = np.where(x > 0, dy, dy * out.dtype.type(attrs["alpha"]))
            return
        # Choosing branches; alpha + (1 - alpha) is exactly one, and takes a third of the time.
        np.greater(x, 0, out=out)
        np.multiply(out, rise, out=out)
        np.add(out, alpha, out=out)
        np.multiply(out, dy, out=out)

    return kernel


def _dropout(attrs: Mapping[str, Any]) -> Into:
    ratio = float(attrs["ratio"])

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        x, u = args
        if ratio >= 1.0:
            outs[0][...] = 0
            return
        np.greater_equal(u, ratio, out=outs[0])
        np.multiply(outs[0], 1.0 / (1.0 - ratio), out=outs[0])
        np.multiply(outs[0], x, out=outs[0])

    return kernel


def _normalize(attrs: Mapping[str, Any]) -> Into:
    eps = float(attrs["eps"])

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        x, mean, var = args
        scale = np.reciprocal(np.sqrt(var + eps))
        np.subtract(x, mean, out=outs[0])
        np.multiply(outs[0], scale, out=outs[0])

    return kernel


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

    def bind(attrs: Mapping[str, Any]) -> Into:
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
    "Cast": in_blocks(_always(_cast), in_place=0),
    "Normalize": in_blocks(_normalize, in_place=1),
    # Faster than their formulas.
    "Relu": in_blocks(_out(np.maximum, 0), in_place=1),
    "LeakyRelu": in_blocks(_leaky_relu, in_place=0),
    "ReluGrad": in_blocks(_always(_relu_grad), in_place=0),
    "LeakyReluGrad": in_blocks(_leaky_relu_grad, in_place=0),
    "Dropout": in_blocks(_dropout, in_place=0),
}
