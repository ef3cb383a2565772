"""Operators of the vocabulary as standard ONNX operators.

Closed forms and their measured costs: research/kernels.md, section B4. Windows
are in ``onnx_windows``, Einsum in ``onnx_einsum``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from oocdl.engines.onnx_einsum import einsum
from oocdl.engines.onnx_emit import Emitter, Lowering, Val
from oocdl.engines.onnx_windows import WINDOW_LOWERINGS
from oocdl.engines.operands import concat_axis, concat_pieces
from oocdl.graph.program import Instruction

_LARGEST = float(np.finfo(np.float32).max)


def _same(kind: str) -> Lowering:
    """The ONNX operator of that name, result as the operands."""
    return lambda emit, args, instruction: [emit(kind, *args)]


def _test(kind: str) -> Lowering:
    """The ONNX operator of that name, result bool."""
    return lambda emit, args, instruction: [emit(kind, *args, dtype="bool")]


def _formula(function: Callable[..., Val]) -> Lowering:
    """A composite of the emitter and the operands alone."""
    return lambda emit, args, instruction: [function(emit, *args)]


def _cast(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [emit.cast(args[0], instruction.dtypes[0])]


def _where(emit: Emitter, condition: Val, a: Val, b: Val) -> Val:
    if a.dtype != "bool":
        return emit("Where", condition, a, b, dtype=a.dtype)
    chosen = emit("And", condition, a)
    return emit("Or", chosen, emit("And", emit("Not", condition), b))


def _leaky_relu(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [emit("LeakyRelu", args[0], alpha=float(instruction.attrs["alpha"]))]


def _relu_grad(emit: Emitter, dy: Val, x: Val) -> Val:
    # Where takes longer.
    return emit("Mul", dy, emit.cast(emit("Greater", x, 0.0, dtype="bool"), dy.dtype))


def _leaky_relu_grad(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    dy, x = args
    alpha = float(instruction.attrs["alpha"])
    positive = emit("Greater", x, 0.0, dtype="bool")
    low, rise = np.float32(alpha), np.float32(1 - alpha)
    if rise + low != 1:
        return [_where(emit, positive, dy, emit("Mul", dy, alpha))]
    # The same without Where, which makes three copies: alpha + (1 - alpha) is exactly one.
    slope = emit("Add", emit("Mul", emit.cast(positive, dy.dtype), float(rise)), float(low))
    return [emit("Mul", slope, dy)]


def _sigmoid_grad(emit: Emitter, dy: Val, y: Val) -> Val:
    return emit("Mul", dy, emit("Mul", y, emit("Sub", 1.0, y)))


def _tanh_grad(emit: Emitter, dy: Val, y: Val) -> Val:
    return emit("Mul", dy, emit("Sub", 1.0, emit("Mul", y, y)))


def _normal_cdf(emit: Emitter, x: Val) -> Val:
    erf = emit("Erf", emit("Mul", x, math.sqrt(0.5)))
    return emit("Mul", emit("Add", erf, 1.0), 0.5)


def _tanh_inner(emit: Emitter, x: Val) -> tuple[Val, Val]:
    """``tanh(c (x + 0.044715 x^3))`` and ``x^2``."""
    square = emit("Mul", x, x)
    cubic = emit("Mul", x, emit("Add", emit("Mul", square, 0.044715), 1.0))
    return emit("Tanh", emit("Mul", cubic, math.sqrt(2 / math.pi))), square


def _gelu(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    x = args[0]
    if instruction.attrs.get("approximate", "none") == "none":
        return [emit("Mul", x, _normal_cdf(emit, x))]
    tanh, _ = _tanh_inner(emit, x)
    return [emit("Mul", emit("Mul", x, 0.5), emit("Add", tanh, 1.0))]


def _gelu_grad(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
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


def _dropout(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    x, u = args
    ratio = float(instruction.attrs["ratio"])
    if ratio >= 1.0:
        return [emit.full(x.shape, 0.0, x.dtype)]
    # Where takes three times as long.
    kept = emit.cast(emit("GreaterOrEqual", u, ratio, dtype="bool"), x.dtype)
    return [emit("Mul", x, emit("Mul", kept, 1.0 / (1.0 - ratio)))]


def _normalize(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    x, mean, var = args
    deviation = emit("Sqrt", emit("Add", var, float(instruction.attrs["eps"])))
    return [emit("Mul", emit("Sub", x, mean), emit("Reciprocal", deviation))]


def _transpose(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [emit.transpose(args[0], instruction.attrs["perm"])]


def _reshape(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [emit.reshape(args[0], instruction.kernel_shapes[0])]


def _expand(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    shape = instruction.kernel_shapes[0]
    if args[0].shape == shape:
        return [args[0]]
    return [emit.node("Expand", [args[0], emit.ints(shape)], shape)]


def _concat(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    axis = concat_axis(instruction)
    pieces = []
    for index in concat_pieces(instruction):
        pads = instruction.operands[index].pads or ((0, 0),) * len(args[index].shape)
        other = [(0, 0) if i == axis else pair for i, pair in enumerate(pads)]
        pieces.append(emit.pad(args[index], other, instruction.fill))
    if len(pieces) == 1:
        return pieces
    return [emit.node("Concat", pieces, instruction.kernel_shapes[0], axis=axis)]


def _slice(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    # The operand holds just what is wanted, from the first element to the last.
    x = args[0]
    steps = [1] * len(x.shape)
    steps[int(instruction.attrs["axis"]) % len(x.shape)] = int(instruction.attrs.get("step", 1))
    return [emit.slice(x, [(0, extent) for extent in x.shape], steps)]


def _gather(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [emit.node("Gather", args, instruction.kernel_shapes[0], axis=0)]


def _gather_grad(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    ids, dy = args
    shape = instruction.kernel_shapes[0]
    count, row = math.prod(ids.shape), math.prod(shape[1:])
    zeros = emit.full((shape[0], row), 0.0, dy.dtype)
    places, rows = emit.reshape(ids, (count, 1)), emit.reshape(dy, (count, row))
    table = emit.node("ScatterND", [zeros, places, rows], zeros.shape, reduction="add")
    return [emit.reshape(table, shape)]


def _reduction(kind: str) -> Lowering:
    return lambda emit, args, instruction: [emit.reduce(kind, args[0], instruction.attrs["axes"])]


def _log_sum_exp(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    x, axes = args[0], instruction.attrs["axes"]
    # Kept finite: infinity minus itself is not a number.
    largest = emit("Clip", emit.reduce("ReduceMax", x, axes), -_LARGEST, _LARGEST)
    total = emit.reduce("ReduceSum", emit("Exp", emit("Sub", x, largest)), axes)
    return [emit("Add", emit("Log", total), largest)]


def _moments(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    x, axes = args[0], instruction.attrs["axes"]
    mean = emit.reduce("ReduceMean", x, axes)
    centred = emit("Sub", x, mean)
    return [mean, emit.reduce("ReduceMean", emit("Mul", centred, centred), axes)]


def _resample(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    x = args[0]
    axis = int(instruction.attrs["axis"]) % len(x.shape)
    matrix = np.asarray(instruction.attrs["matrix"], dtype=x.dtype)
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    if after == 1:
        y = emit.matmul(emit.reshape(x, (before, x.shape[axis])), emit.constant(matrix.T))
    else:
        y = emit.matmul(emit.constant(matrix), emit.reshape(x, (before, x.shape[axis], after)))
    return [emit.reshape(y, instruction.kernel_shapes[0])]


def _unchanged(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    return [args[0]]


_SAME = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Neg", "Sqrt", "Exp", "Log", "Abs", "Erf"),
    *("Sigmoid", "Tanh", "Softplus", "Reciprocal", "Relu", "Not", "And", "Or"),
)

LOWERINGS: dict[str, Lowering] = {
    **{kind: _same(kind) for kind in _SAME},
    **{kind: _test(kind) for kind in ("Greater", "Less", "Equal")},
    "Identity": _unchanged,
    "Cast": _cast,
    "Where": _formula(_where),
    "LeakyRelu": _leaky_relu,
    "Gelu": _gelu,
    "ReluGrad": _formula(_relu_grad),
    "LeakyReluGrad": _leaky_relu_grad,
    "GeluGrad": _gelu_grad,
    "SigmoidGrad": _formula(_sigmoid_grad),
    "TanhGrad": _formula(_tanh_grad),
    "Dropout": _dropout,
    "Normalize": _normalize,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Expand": _expand,
    "Concat": _concat,
    "Slice": _slice,
    "Pad": _unchanged,  # the operand comes padded
    "Gather": _gather,
    "GatherGrad": _gather_grad,
    "ReduceSum": _reduction("ReduceSum"),
    "ReduceMax": _reduction("ReduceMax"),
    "LogSumExp": _log_sum_exp,
    "Moments": _moments,
    "Einsum": einsum,
    "Resample": _resample,
    **WINDOW_LOWERINGS,
}
"""Every operator of the vocabulary."""
