"""PyTorch's kernels of elementwise operators and reductions that are in no loop.

An operator with a formula runs by it, unless a faster kernel of PyTorch stands here. A kernel takes
operands, unpadded and broadcastable, and the tensors its results go to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from oocdl.engines.checked_indices import check_divisor
from oocdl.engines.torch.torch_record import Kernel, Result, by_rule, elementwise
from oocdl.fusion.loop_axes import REDUCTIONS
from oocdl.graph.ir.program import Instruction
from oocdl.ops.activation import FORMULAS
from oocdl.ops.expression import compute
from oocdl.ops.pointwise import Row

Attrs = Mapping[str, Any]
Run = Callable[[Attrs, list[Tensor], list[Tensor]], Any]
"""A kernel of attributes, operands, and the tensors its results go to."""

aten = torch.ops.aten
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _divide(attrs: Attrs, args: list[Tensor], outs: list[Tensor]) -> None:
    if args[0].is_floating_point():
        torch.div(*args, out=outs[0])
        return
    # Integer division truncates in ONNX. The least number divided by -1 would end the process.
    if (turned := args[1] == -1).any():
        sign = torch.where(turned, -1, 1)
        torch.div(args[0], args[1] * sign, rounding_mode="trunc", out=outs[0]).mul_(sign)
    else:
        torch.div(*args, rounding_mode="trunc", out=outs[0])


def _way(attrs: Mapping[str, Any]) -> str:
    return str(attrs.get("approximate", "none"))


def primitive(op: str, given: Sequence[Tensor | float], like: Tensor) -> Tensor:
    """Compute a primitive of a formula; numbers take the dtype of ``like``."""
    return cast(
        Tensor, _PRIMITIVES[op](*(g if isinstance(g, Tensor) else like.new_full((), g) for g in given))
    )


def _by_formula(row: Row) -> Run:
    def run(attrs: Attrs, args: list[Tensor], outs: list[Tensor]) -> None:
        outs[0].copy_(compute(row.steps(attrs), args, lambda op, given: primitive(op, given, args[0])))

    return run


def _dropout(attrs: Attrs, args: list[Tensor], outs: list[Tensor]) -> None:
    (x, u), ratio = args, float(attrs["ratio"])
    if ratio >= 1.0:
        outs[0].zero_()
        return
    # This kernel keeps x where u is above a threshold, ten times as fast as a mask:
    # u >= ratio is u > the number before it.
    at = torch.tensor(ratio, dtype=u.dtype)
    before = float(torch.nextafter(at, torch.full_like(at, -1)))
    aten.threshold_backward.grad_input(x, u.to(x.dtype), before, grad_input=outs[0])
    outs[0].mul_(1.0 / (1.0 - ratio))


def _normalize(attrs: Attrs, args: list[Tensor], outs: list[Tensor]) -> None:
    x, mean, var = args
    scale = torch.rsqrt(var + float(attrs["eps"]))
    torch.sub(x, mean, out=outs[0]).mul_(scale)


def _where(attrs: Attrs, args: list[Tensor], outs: list[Tensor]) -> None:
    """Select by bits, ``b ^ ((a ^ b) & mask)``: torch.where branches, and takes up to ten times as long."""
    condition, a, b = args
    out = outs[0]
    if out.dtype == torch.bool:
        torch.where(condition, a, b, out=out)
        return
    bits = _INTEGERS[out.itemsize]
    mask = condition.to(bits).neg_()
    b, out = b.view(bits), out.view(bits)
    torch.bitwise_xor(a.view(bits).expand(out.shape), b, out=out).bitwise_and_(mask).bitwise_xor_(b)


def _reduce_sum(attrs: Attrs, args: list[Tensor], outs: list[Tensor]) -> None:
    if axes := tuple(attrs["axes"]):
        torch.sum(args[0], dim=axes, keepdim=True, out=outs[0])
    else:  # torch.sum would take all
        outs[0].copy_(args[0])


def _log_sum_exp(attrs: Attrs, args: list[Tensor], outs: list[Tensor]) -> None:
    """``torch.logsumexp`` in half its time; all-infinite rows are left to it."""
    (x,), (out,), axes = args, outs, tuple(attrs["axes"])
    largest = x.amax(dim=axes, keepdim=True)
    if not torch.isfinite(largest).all():
        torch.logsumexp(x, dim=axes, keepdim=True, out=out)
        return
    torch.sum((x - largest).exp_(), dim=axes, keepdim=True, out=out)
    out.log_().add_(largest)


def _moments(attrs: Attrs, args: list[Tensor], outs: list[Tensor]) -> None:
    # In two passes: torch.var_mean is not vectorised, and takes ten times as long.
    axes = tuple(attrs["axes"])
    torch.mean(args[0], dim=axes, keepdim=True, out=outs[0])
    centred = args[0] - outs[0]
    torch.mean(centred.square_(), dim=axes, keepdim=True, out=outs[1])


def _back(kernel: str, given: Callable[[Attrs, list[Tensor]], Sequence[Any]]) -> Run:
    """Return a kernel of PyTorch's for the gradient of a function, by what it is given."""
    call = getattr(aten, f"{kernel}_backward").grad_input
    return lambda attrs, args, outs: call(*given(attrs, args), grad_input=outs[0])


_SPELLED_ALIKE = (
    *("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Tanh", "Asinh", "Acosh", "Atanh", "Exp"),
    *("Log", "Neg", "Abs", "Sqrt", "Reciprocal", "Floor", "Round", "Sigmoid"),
)
_UNARY: Mapping[str, Callable[..., Any]] = {
    **{op: getattr(torch, op.lower()) for op in _SPELLED_ALIKE},
    **{"Erf": torch.special.erf, "Not": torch.logical_not},
}
_BINARY: Mapping[str, Callable[..., Any]] = {
    **{op: getattr(torch, op.lower()) for op in ("Add", "Sub", "Mul", "Pow")},
    **{"Max": torch.maximum, "Min": torch.minimum, "And": torch.logical_and, "Or": torch.logical_or},
    **{"Greater": torch.gt, "Less": torch.lt, "Equal": torch.eq},
}
_PRIMITIVES: Mapping[str, Callable[..., Any]] = {
    **_UNARY,
    **_BINARY,
    **{"Div": torch.div, "Where": torch.where, "LessOrEqual": torch.le, "Expm1": torch.expm1},
    # F.softplus is linear above a threshold, which costs digits in float64.
    "Softplus": lambda x: torch.logaddexp(x, x.new_zeros(())),
}
"""Functions that formulas are made of, which return their result."""
_FASTER: Mapping[str, Run] = {
    "Relu": lambda a, args, outs: aten.relu.out(*args, out=outs[0]),
    "LeakyRelu": lambda a, args, outs: aten.leaky_relu.out(*args, float(a["alpha"]), out=outs[0]),
    "Elu": lambda a, args, outs: aten.elu.out(*args, float(a["alpha"]), out=outs[0]),
    "Gelu": lambda a, args, outs: aten.gelu.out(*args, approximate=_way(a), out=outs[0]),
    "ReluGrad": _back("threshold", lambda a, args: (*args, 0)),
    "LeakyReluGrad": _back("leaky_relu", lambda a, args: (*args, float(a["alpha"]), False)),
    "EluGrad": _back("elu", lambda a, args: (args[0], float(a["alpha"]), 1, 1, True, args[1])),
    "GeluGrad": lambda a, args, outs: aten.gelu_backward.grad_input(
        *args, approximate=_way(a), grad_input=outs[0]
    ),
    "SigmoidGrad": _back("sigmoid", lambda a, args: args),
    "TanhGrad": _back("tanh", lambda a, args: args),
}
"""PyTorch's own kernels, which are faster than formulas."""


def _out(function: Callable[..., Any]) -> Run:
    """Return the kernel of a function of the operands with an ``out`` argument."""
    return lambda attrs, args, outs: function(*args, out=outs[0])


_RUNS: Mapping[str, Run] = {
    **{op: _by_formula(row) for op, row in FORMULAS.items()},
    **{op: _out(function) for op, function in {**_UNARY, **_BINARY}.items()},
    **_FASTER,
    "Mod": lambda a, args, outs: (torch.fmod if a.get("fmod", 0) else torch.remainder)(*args, out=outs[0]),
    "Div": _divide,
    "Softplus": lambda a, args, outs: torch.logaddexp(args[0], args[0].new_zeros(()), out=outs[0]),
    "Cast": lambda attrs, args, outs: outs[0].copy_(args[0]),
    **{"Where": _where, "Normalize": _normalize, "Dropout": _dropout, "ReduceSum": _reduce_sum},
    "ReduceMax": lambda a, args, outs: torch.amax(args[0], dim=tuple(a["axes"]), keepdim=True, out=outs[0]),
    **{"LogSumExp": _log_sum_exp, "Moments": _moments},
}


def reduced(op: str, x: Tensor) -> Tensor:
    """Reduce a tensor over its last axis, which stays with extent one."""
    result = x.new_empty(*x.shape[:-1], 1)
    _RUNS[op]({"axes": (x.ndim - 1,)}, [x], [result])
    return result


def _record(op: str, run: Run) -> Kernel:
    """Return the record of an operator, whose results are in new memory."""

    def kernel(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
        kinds = zip(instruction.kernel_shapes, instruction.dtypes, strict=True)
        made = [args[0].new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in kinds]
        check_divisor(instruction, args[-1])
        run(instruction.attrs, args, made)
        return made

    return Kernel(kernel, Result.EITHER, scratch=by_rule if op in REDUCTIONS else elementwise)


KERNELS: Mapping[str, Kernel] = {op: _record(op, run) for op, run in _RUNS.items()}
