"""Records of the elementwise operators of the onnxruntime engine: by NumPy on blocks, and as ONNX.

A chain runs on blocks of a few hundred KiB, for which a session's call is too slow and too hungry. So
its members are NumPy kernels that write into memory they are given; they take operands, unpadded and
broadcastable, and the arrays their results go to. Closed forms of the ONNX operators and their measured
costs: `docs/kernel-measurements.md`, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oocdl.engines.ort.emit import Emitter, Lowering, Val
from oocdl.engines.ort.ort_record import Kernel
from oocdl.fusion import blockwise
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction

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


def _divide(args: Sequence[Array], outs: Sequence[Array]) -> None:
    a, b = args
    if outs[0].dtype.kind == "f":
        np.divide(a, b, out=outs[0])
    else:  # ONNX truncates
        np.multiply(np.abs(a) // np.abs(b), np.sign(a) * np.sign(b), out=outs[0])


def _sigmoid(args: Sequence[Array], outs: Sequence[Array]) -> None:
    out = outs[0]
    np.exp(np.negative(args[0], out=out), out=out)
    np.add(out, 1.0, out=out)
    np.reciprocal(out, out=out)


def _where(args: Sequence[Array], outs: Sequence[Array]) -> None:
    condition, a, b = args
    np.copyto(outs[0], b)
    np.copyto(outs[0], a, where=condition)


def _cast(args: Sequence[Array], outs: Sequence[Array]) -> None:
    np.copyto(outs[0], args[0], casting="unsafe")


def _leaky_relu(attrs: Mapping[str, Any]) -> Into:
    alpha = float(attrs["alpha"])
    larger = np.maximum if alpha <= 1 else np.minimum

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        np.multiply(args[0], alpha, out=outs[0])
        larger(args[0], outs[0], out=outs[0])

    return kernel


def _elu(attrs: Mapping[str, Any]) -> Into:
    alpha = float(attrs["alpha"])

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        x, out = args[0], outs[0]
        np.expm1(np.minimum(x, 0, out=out), out=out)
        np.multiply(out, alpha, out=out)
        np.copyto(out, x, where=x > 0)

    return kernel


def _elu_grad(attrs: Mapping[str, Any]) -> Into:
    alpha = float(attrs["alpha"])

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        dy, y = args
        np.add(y, alpha, out=outs[0])
        np.multiply(outs[0], dy, out=outs[0])
        np.copyto(outs[0], dy, where=y > 0)

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


def _sigmoid_grad(args: Sequence[Array], outs: Sequence[Array]) -> None:
    dy, y = args
    np.subtract(1.0, y, out=outs[0])
    np.multiply(outs[0], y, out=outs[0])
    np.multiply(outs[0], dy, out=outs[0])


def _tanh_grad(args: Sequence[Array], outs: Sequence[Array]) -> None:
    dy, y = args
    np.multiply(y, y, out=outs[0])
    np.subtract(1.0, outs[0], out=outs[0])
    np.multiply(outs[0], dy, out=outs[0])


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


def _same(kind: str) -> Lowering:
    """Lower to the ONNX operator of that name, whose result has the operands' dtype."""
    return lambda emit, args, instruction: [emit(kind, *args)]


def _test(kind: str) -> Lowering:
    """Lower to the ONNX operator of that name, whose result is bool."""
    return lambda emit, args, instruction: [emit(kind, *args, dtype="bool")]


def _formula(function: Callable[..., Val]) -> Lowering:
    """Lower by a function of the emitter and the operands alone."""
    return lambda emit, args, instruction: [function(emit, *args)]


def _emit_cast(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [emit.cast(args[0], instruction.dtypes[0])]


def _emit_where(emit: Emitter, condition: Val, a: Val, b: Val) -> Val:
    if a.dtype != "bool":
        return emit("Where", condition, a, b, dtype=a.dtype)
    chosen = emit("And", condition, a)
    return emit("Or", chosen, emit("And", emit("Not", condition), b))


def _emit_leaky_relu(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [emit("LeakyRelu", args[0], alpha=float(instruction.attrs["alpha"]))]


def _emit_mod(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    x, divisor = args
    like_dividend = int(instruction.attrs.get("fmod", 0))
    if like_dividend or not x.dtype.startswith("float"):
        return [emit("Mod", x, divisor, fmod=like_dividend)]
    rest = emit("Mod", x, divisor, fmod=1)  # all that there is for floating-point numbers
    wrong = emit("Less", emit("Mul", emit("Sign", rest), emit("Sign", divisor)), 0.0, dtype="bool")
    return [_emit_where(emit, wrong, emit("Add", rest, divisor), rest)]


def _emit_elu(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [emit("Elu", args[0], alpha=float(instruction.attrs["alpha"]))]


def _emit_elu_grad(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    dy, y = args
    falling = emit("Mul", dy, emit("Add", y, float(instruction.attrs["alpha"])))
    return [_emit_where(emit, emit("Greater", y, 0.0, dtype="bool"), dy, falling)]


def _emit_relu_grad(emit: Emitter, dy: Val, x: Val) -> Val:
    # Where takes longer.
    return emit("Mul", dy, emit.cast(emit("Greater", x, 0.0, dtype="bool"), dy.dtype))


def _emit_leaky_relu_grad(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    dy, x = args
    alpha = float(instruction.attrs["alpha"])
    positive = emit("Greater", x, 0.0, dtype="bool")
    low, rise = np.float32(alpha), np.float32(1 - alpha)
    if rise + low != 1:
        return [_emit_where(emit, positive, dy, emit("Mul", dy, alpha))]
    # The same without Where, which makes three copies: alpha + (1 - alpha) is exactly one.
    slope = emit("Add", emit("Mul", emit.cast(positive, dy.dtype), float(rise)), float(low))
    return [emit("Mul", slope, dy)]


def _emit_sigmoid_grad(emit: Emitter, dy: Val, y: Val) -> Val:
    return emit("Mul", dy, emit("Mul", y, emit("Sub", 1.0, y)))


def _emit_tanh_grad(emit: Emitter, dy: Val, y: Val) -> Val:
    return emit("Mul", dy, emit("Sub", 1.0, emit("Mul", y, y)))


def _normal_cdf(emit: Emitter, x: Val) -> Val:
    erf = emit("Erf", emit("Mul", x, math.sqrt(0.5)))
    return emit("Mul", emit("Add", erf, 1.0), 0.5)


def _tanh_inner(emit: Emitter, x: Val) -> tuple[Val, Val]:
    """``tanh(c (x + 0.044715 x^3))`` and ``x^2``."""
    square = emit("Mul", x, x)
    cubic = emit("Mul", x, emit("Add", emit("Mul", square, 0.044715), 1.0))
    return emit("Tanh", emit("Mul", cubic, math.sqrt(2 / math.pi))), square


def _emit_gelu(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    x = args[0]
    if instruction.attrs.get("approximate", "none") == "none":
        return [emit("Mul", x, _normal_cdf(emit, x))]
    tanh, _ = _tanh_inner(emit, x)
    return [emit("Mul", emit("Mul", x, 0.5), emit("Add", tanh, 1.0))]


def _emit_gelu_grad(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    dy, x = args
    if instruction.attrs.get("approximate", "none") == "none":
        bell = emit("Exp", emit("Mul", emit("Mul", x, x), -0.5))
        density = emit("Mul", emit("Mul", x, bell), 1 / math.sqrt(2 * math.pi))
        return [emit("Mul", dy, emit("Add", _normal_cdf(emit, x), density))]
    tanh, square = _tanh_inner(emit, x)
    factor = math.sqrt(2 / math.pi)
    inner = emit("Add", emit("Mul", square, 3 * 0.044715 * factor), factor)
    steep = emit("Mul", emit("Sub", 1.0, emit("Mul", tanh, tanh)), emit("Mul", x, inner))
    slope = emit("Add", emit("Add", tanh, 1.0), steep)
    return [emit("Mul", dy, emit("Mul", slope, 0.5))]


def _emit_dropout(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    x, u = args
    ratio = float(instruction.attrs["ratio"])
    if ratio >= 1.0:
        return [emit.full(x.shape, 0.0, x.dtype)]
    # Where takes three times as long.
    kept = emit.cast(emit("GreaterOrEqual", u, ratio, dtype="bool"), x.dtype)
    return [emit("Mul", x, emit("Mul", kept, 1.0 / (1.0 - ratio)))]


def _emit_normalize(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    x, mean, var = args
    deviation = emit("Sqrt", emit("Add", var, float(instruction.attrs["eps"])))
    return [emit("Mul", emit("Sub", x, mean), emit("Reciprocal", deviation))]


def left_to_sessions(lowering: Lowering, *, one_thread: bool = False, indices: int | None = None) -> Kernel:
    """An operator that NumPy has no fast loop for; ``one_thread`` and ``indices``: see ``Kernel``."""
    return Kernel(
        lowering=lowering,
        whole=None,
        blocks=None,
        channels_last=None,
        takes_unpadded=False,
        convolution=None,
        indices=indices,
        one_thread=one_thread,
    )


def left_to_numpy(bind: Bind) -> Kernel:
    """An operator that no session computes, or not as fast, by NumPy on whole arrays without padding."""
    return Kernel(
        lowering=None,
        whole=bind,
        blocks=None,
        channels_last=None,
        takes_unpadded=False,
        convolution=None,
        indices=None,
        one_thread=False,
    )


def _elementwise(lowering: Lowering, bind: Bind, *, in_place: int) -> Kernel:
    return replace(left_to_sessions(lowering), blocks=blockwise.Blockwise(bind, in_place, None))


_FUNCTIONS = ("Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh")

KERNELS: Mapping[str, Kernel] = {
    **{op: left_to_sessions(_same(op)) for op in _FUNCTIONS},
    "Sin": _elementwise(_same("Sin"), _out(np.sin), in_place=1),
    "Cos": _elementwise(_same("Cos"), _out(np.cos), in_place=1),
    "Floor": _elementwise(_same("Floor"), _out(np.floor), in_place=1),
    "Round": _elementwise(_same("Round"), _out(np.rint), in_place=1),
    "Mod": left_to_sessions(_emit_mod),
    "Add": _elementwise(_same("Add"), _out(np.add), in_place=2),
    "Sub": _elementwise(_same("Sub"), _out(np.subtract), in_place=2),
    "Mul": _elementwise(_same("Mul"), _out(np.multiply), in_place=2),
    "Div": _elementwise(_same("Div"), _always(_divide), in_place=2),
    "Pow": left_to_sessions(_same("Pow")),
    "Max": _elementwise(_same("Max"), _out(np.maximum), in_place=2),
    "Min": _elementwise(_same("Min"), _out(np.minimum), in_place=2),
    "Neg": _elementwise(_same("Neg"), _out(np.negative), in_place=1),
    "Sqrt": _elementwise(_same("Sqrt"), _out(np.sqrt), in_place=1),
    "Exp": _elementwise(_same("Exp"), _out(np.exp), in_place=1),
    "Log": _elementwise(_same("Log"), _out(np.log), in_place=1),
    "Abs": _elementwise(_same("Abs"), _out(np.absolute), in_place=1),
    "Erf": left_to_sessions(_same("Erf")),
    "Sigmoid": _elementwise(_same("Sigmoid"), _always(_sigmoid), in_place=1),
    "Tanh": _elementwise(_same("Tanh"), _out(np.tanh), in_place=1),
    "Softplus": left_to_sessions(_same("Softplus")),
    "Reciprocal": _elementwise(_same("Reciprocal"), _out(np.reciprocal), in_place=1),
    "Relu": _elementwise(_same("Relu"), _out(np.maximum, 0), in_place=1),
    "LeakyRelu": _elementwise(_emit_leaky_relu, _leaky_relu, in_place=0),
    "Elu": _elementwise(_emit_elu, _elu, in_place=0),
    "EluGrad": _elementwise(_emit_elu_grad, _elu_grad, in_place=0),
    "Gelu": left_to_sessions(_emit_gelu),
    "Cast": _elementwise(_emit_cast, _always(_cast), in_place=0),
    "Greater": _elementwise(_test("Greater"), _out(np.greater), in_place=0),
    "Less": _elementwise(_test("Less"), _out(np.less), in_place=0),
    "Equal": _elementwise(_test("Equal"), _out(np.equal), in_place=0),
    "Not": _elementwise(_same("Not"), _out(np.logical_not), in_place=1),
    "And": _elementwise(_same("And"), _out(np.logical_and), in_place=2),
    "Or": _elementwise(_same("Or"), _out(np.logical_or), in_place=2),
    "Where": _elementwise(_formula(_emit_where), _always(_where), in_place=0),
    "ReluGrad": _elementwise(_formula(_emit_relu_grad), _always(_relu_grad), in_place=0),
    "LeakyReluGrad": _elementwise(_emit_leaky_relu_grad, _leaky_relu_grad, in_place=0),
    "GeluGrad": left_to_sessions(_emit_gelu_grad),
    "SigmoidGrad": _elementwise(_formula(_emit_sigmoid_grad), _always(_sigmoid_grad), in_place=0),
    "TanhGrad": _elementwise(_formula(_emit_tanh_grad), _always(_tanh_grad), in_place=0),
    "Dropout": _elementwise(_emit_dropout, _dropout, in_place=0),
    "Normalize": _elementwise(_emit_normalize, _normalize, in_place=1),
}
