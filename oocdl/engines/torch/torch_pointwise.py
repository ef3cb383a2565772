"""PyTorch kernels that write into memory they are given: what chains are made of.

An operator with a formula runs by it, unless a faster kernel of PyTorch stands here. Other elementwise
operators and reductions have a record each. A kernel takes operands, unpadded and broadcastable, and the
tensors its results go to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from oocdl.engines.partial_results import combine_moments
from oocdl.engines.torch.kernel_scratch import by_rule, elementwise
from oocdl.engines.torch.torch_record import Blocks, Kernel, Result
from oocdl.fusion import grouping
from oocdl.graph.ir.program import Instruction
from oocdl.ops.activation import FORMULAS
from oocdl.ops.expression import compute, most_alive
from oocdl.ops.pointwise import Row

Into = grouping.Into[Tensor]
Attrs = Mapping[str, Any]
Run = Callable[[Attrs, list[Tensor], list[Tensor]], Any]
"""A kernel of attributes, operands, and the tensors its results go to."""

aten = torch.ops.aten
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _blocks(
    run: Run, in_place: int, temporaries: int = 0, finish: grouping.Finish[Tensor] | None = None
) -> Blocks:
    return Blocks(lambda attrs: partial(run, attrs), in_place, finish, temporaries)


def _divide(attrs: Attrs, args: list[Tensor], outs: list[Tensor]) -> None:
    # Integer division truncates in ONNX; torch.div would return floats.
    rounding = None if args[0].is_floating_point() else "trunc"
    torch.div(*args, rounding_mode=rounding, out=outs[0])


def _way(attrs: Mapping[str, Any]) -> str:
    return str(attrs.get("approximate", "none"))


def _by_formula(row: Row) -> Blocks:
    """Return the record of an operator that has no kernel of its own here, by functions of PyTorch."""

    def bind(attrs: Mapping[str, Any]) -> Into:
        steps = row.steps(attrs)

        def kernel(args: list[Tensor], outs: list[Tensor]) -> None:
            def apply(op: str, given: list[Tensor | float]) -> Tensor:
                seen = [g if isinstance(g, Tensor) else args[0].new_full((), g) for g in given]
                return cast(Tensor, _PRIMITIVES[op](*seen))

            outs[0].copy_(compute(steps, args, apply))

        return kernel

    alive = most_alive(row.steps(row.sample), row.arity)
    return Blocks(bind, in_place=row.arity, finish=None, temporaries=alive + 1)


def _cast(attrs: Attrs, args: list[Tensor], outs: list[Tensor]) -> None:
    outs[0].copy_(args[0])


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


_UNARY: Mapping[str, Callable[..., Any]] = {
    **{
        function.__name__.title(): function
        for function in (
            *(torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan),
            *(torch.sinh, torch.cosh, torch.asinh, torch.acosh, torch.atanh),
            *(torch.neg, torch.abs, torch.sqrt, torch.reciprocal, torch.floor, torch.round),
            *(torch.exp, torch.log, torch.sigmoid, torch.tanh),
        )
    },
    "Erf": torch.special.erf,
    "Not": torch.logical_not,
}
_BINARY: Mapping[str, Callable[..., Any]] = {
    **{function.__name__.title(): function for function in (torch.add, torch.sub, torch.mul, torch.pow)},
    **{"Max": torch.maximum, "Min": torch.minimum, "And": torch.logical_and, "Or": torch.logical_or},
    **{"Greater": torch.gt, "Less": torch.lt, "Equal": torch.eq},
}
_PRIMITIVES: Mapping[str, Callable[..., Any]] = {
    **_UNARY,
    **_BINARY,
    "Div": torch.div,
    "Where": torch.where,
    "LessOrEqual": torch.le,
    "Expm1": torch.expm1,
    # F.softplus is linear above a threshold, which costs digits in float64.
    "Softplus": lambda x: torch.logaddexp(x, x.new_zeros(())),
}
"""Functions that formulas are made of, which return their result."""
_FASTER: Mapping[str, Callable[[Attrs, list[Tensor], Tensor], Any]] = {
    "Relu": lambda a, args, out: aten.relu.out(*args, out=out),
    "LeakyRelu": lambda a, args, out: aten.leaky_relu.out(*args, float(a["alpha"]), out=out),
    "Elu": lambda a, args, out: aten.elu.out(*args, float(a["alpha"]), out=out),
    "Gelu": lambda a, args, out: aten.gelu.out(*args, approximate=_way(a), out=out),
    "ReluGrad": lambda a, args, out: aten.threshold_backward.grad_input(*args, 0, grad_input=out),
    "LeakyReluGrad": lambda a, args, out: aten.leaky_relu_backward.grad_input(
        *args, float(a["alpha"]), False, grad_input=out
    ),
    "EluGrad": lambda a, args, out: aten.elu_backward.grad_input(
        args[0], float(a["alpha"]), 1, 1, True, args[1], grad_input=out
    ),
    "GeluGrad": lambda a, args, out: aten.gelu_backward.grad_input(
        *args, approximate=_way(a), grad_input=out
    ),
    "SigmoidGrad": lambda a, args, out: aten.sigmoid_backward.grad_input(*args, grad_input=out),
    "TanhGrad": lambda a, args, out: aten.tanh_backward.grad_input(*args, grad_input=out),
}
"""PyTorch's own kernels, which are faster than formulas."""


def _faster(op: str) -> Blocks:
    """The record of an operator of ``_FASTER``: of an activation, or of the gradient of one."""
    return _blocks(lambda a, args, outs: _FASTER[op](a, args, outs[0]), in_place=FORMULAS[op].arity)


def _out(function: Callable[..., Any], arity: int) -> Blocks:
    """The record of a function of the operands with an ``out`` argument."""
    return _blocks(lambda a, args, outs: function(*args, out=outs[0]), in_place=arity)


BLOCKWISE: Mapping[str, Blocks] = {
    **{op: _by_formula(row) for op, row in FORMULAS.items()},
    **{op: _out(function, 1) for op, function in _UNARY.items()},
    **{op: _out(function, 2) for op, function in _BINARY.items()},
    **{op: _faster(op) for op in _FASTER},
    "Mod": _blocks(
        lambda a, args, outs: (torch.fmod if a.get("fmod", 0) else torch.remainder)(*args, out=outs[0]), 2
    ),
    "Div": _blocks(_divide, in_place=2),
    "Softplus": _blocks(
        lambda a, args, outs: torch.logaddexp(args[0], args[0].new_zeros(()), out=outs[0]), 1, temporaries=1
    ),
    "Cast": _blocks(_cast, in_place=0),
    "Where": _blocks(_where, in_place=0, temporaries=1),
    "Normalize": _blocks(_normalize, in_place=1),
    "Dropout": _blocks(_dropout, in_place=1, temporaries=1),
    "ReduceSum": _blocks(
        _reduce_sum, 0, finish=lambda parts, counts, axes: [parts[0].sum(axes, keepdim=True)]
    ),
    "ReduceMax": _blocks(
        lambda a, args, outs: torch.amax(args[0], dim=tuple(a["axes"]), keepdim=True, out=outs[0]),
        in_place=0,
        finish=lambda parts, counts, axes: [parts[0].amax(axes, keepdim=True)],
    ),
    "LogSumExp": _blocks(
        _log_sum_exp, 0, 2, lambda parts, counts, axes: [parts[0].logsumexp(axes, keepdim=True)]
    ),
    "Moments": _blocks(_moments, in_place=0, temporaries=1, finish=partial(combine_moments, torch)),
}


def _by_itself(blocks: Blocks) -> Kernel:
    """The record of an operator of ``BLOCKWISE``, whose kernel also runs outside of chains, in new memory."""

    def run(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
        made = [
            args[0].new_empty(shape, dtype=getattr(torch, dtype))
            for shape, dtype in zip(instruction.kernel_shapes, instruction.dtypes, strict=True)
        ]
        blocks.bind(instruction.attrs)(args, made)
        return made

    scratch = elementwise if blocks.finish is None else by_rule
    return Kernel(run, Result.EITHER, scratch=scratch, blocks=blocks)


KERNELS: Mapping[str, Kernel] = {op: _by_itself(blocks) for op, blocks in BLOCKWISE.items()}
