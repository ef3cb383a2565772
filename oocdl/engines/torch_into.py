"""PyTorch kernels that write into memory they are given: what chains are made of.

A kernel takes operands, unpadded and broadcastable, and the tensors its results go to.
A result may lie in the memory of an operand of its own shape and dtype: of any operand
where ``IN_PLACE`` says -1, of operand 0 alone where it says 1, of none where it says 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from oocdl.graph.program import Instruction

Into = Callable[[list[Tensor], list[Tensor]], None]
Bind = Callable[[Mapping[str, Any]], Into]

aten = torch.ops.aten
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _out(function: Callable[..., Any], **options: Any) -> Bind:
    """A function of the operands with an ``out`` argument."""

    def kernel(args: list[Tensor], outs: list[Tensor]) -> None:
        function(*args, **options, out=outs[0])

    return lambda attrs: kernel


def _grad(function: Callable[..., Any], *constants: Any) -> Bind:
    """A gradient of aten's, of the operands and constants."""

    def kernel(args: list[Tensor], outs: list[Tensor]) -> None:
        function(*args, *constants, grad_input=outs[0])

    return lambda attrs: kernel


def _divide(args: list[Tensor], outs: list[Tensor]) -> None:
    # Integer division truncates in ONNX; torch.div would return floats.
    rounding = None if args[0].is_floating_point() else "trunc"
    torch.div(*args, rounding_mode=rounding, out=outs[0])


def _softplus(args: list[Tensor], outs: list[Tensor]) -> None:
    # F.softplus is linear above a threshold, which costs digits in float64.
    torch.logaddexp(args[0], args[0].new_zeros(()), out=outs[0])


def _leaky_relu(attrs: Mapping[str, Any]) -> Into:
    alpha = float(attrs["alpha"])
    return lambda args, outs: aten.leaky_relu.out(args[0], alpha, out=outs[0])


def _gelu(attrs: Mapping[str, Any]) -> Into:
    how = attrs.get("approximate", "none")
    return lambda args, outs: aten.gelu.out(args[0], approximate=how, out=outs[0])


def _gelu_grad(attrs: Mapping[str, Any]) -> Into:
    how = attrs.get("approximate", "none")
    return lambda args, outs: aten.gelu_backward.grad_input(*args, approximate=how, grad_input=outs[0])


def _cast(args: list[Tensor], outs: list[Tensor]) -> None:
    outs[0].copy_(args[0])


def _dropout(attrs: Mapping[str, Any]) -> Into:
    ratio = float(attrs["ratio"])

    def kernel(args: list[Tensor], outs: list[Tensor]) -> None:
        x, u = args
        if ratio >= 1.0:
            outs[0].zero_()
            return
        # This kernel keeps x where u is above a threshold, ten times as fast as a mask:
        # u >= ratio is u > the number before it.
        at = torch.tensor(ratio, dtype=u.dtype)
        before = float(torch.nextafter(at, torch.full_like(at, -1)))
        aten.threshold_backward.grad_input(x, u.to(x.dtype), before, grad_input=outs[0])
        outs[0].mul_(1.0 / (1.0 - ratio))

    return kernel


def _normalize(attrs: Mapping[str, Any]) -> Into:
    eps = float(attrs["eps"])

    def kernel(args: list[Tensor], outs: list[Tensor]) -> None:
        x, mean, var = args
        scale = torch.rsqrt(var + eps)
        torch.sub(x, mean, out=outs[0]).mul_(scale)

    return kernel


def _where(args: list[Tensor], outs: list[Tensor]) -> None:
    """By bits, ``b ^ ((a ^ b) & mask)``: torch.where branches, and takes up to ten times as long."""
    condition, a, b = args
    out = outs[0]
    if out.dtype == torch.bool:
        torch.where(condition, a, b, out=out)
        return
    bits = _INTEGERS[out.itemsize]
    mask = condition.to(bits).neg_()
    b, out = b.view(bits), out.view(bits)
    torch.bitwise_xor(a.view(bits).expand(out.shape), b, out=out).bitwise_and_(mask).bitwise_xor_(b)


POINTWISE: Mapping[str, Bind] = {
    "Add": _out(torch.add),
    "Sub": _out(torch.sub),
    "Mul": _out(torch.mul),
    "Div": lambda attrs: _divide,
    "Pow": _out(torch.pow),
    "Max": _out(torch.maximum),
    "Min": _out(torch.minimum),
    "Neg": _out(torch.neg),
    "Sqrt": _out(torch.sqrt),
    "Exp": _out(torch.exp),
    "Log": _out(torch.log),
    "Abs": _out(torch.abs),
    "Erf": _out(torch.special.erf),
    "Sigmoid": _out(torch.sigmoid),
    "Tanh": _out(torch.tanh),
    "Softplus": lambda attrs: _softplus,
    "Reciprocal": _out(torch.reciprocal),
    "Relu": _out(aten.relu.out),
    "LeakyRelu": _leaky_relu,
    "Gelu": _gelu,
    "Cast": lambda attrs: _cast,
    "Greater": _out(torch.gt),
    "Less": _out(torch.lt),
    "Equal": _out(torch.eq),
    "Not": _out(torch.logical_not),
    "And": _out(torch.logical_and),
    "Or": _out(torch.logical_or),
    "Where": lambda attrs: _where,
    "ReluGrad": _grad(aten.threshold_backward.grad_input, 0),
    "LeakyReluGrad": lambda attrs: _grad(aten.leaky_relu_backward.grad_input, float(attrs["alpha"]), False)(
        attrs
    ),
    "GeluGrad": _gelu_grad,
    "SigmoidGrad": _grad(aten.sigmoid_backward.grad_input),
    "TanhGrad": _grad(aten.tanh_backward.grad_input),
    "Dropout": _dropout,
    "Normalize": _normalize,
}

IN_PLACE: Mapping[str, int] = {"Where": 0, "Cast": 0, "Normalize": 1, "Dropout": 1}
"""How many of the first operands a result may lie in; all where an operator is not named."""


def _reduce_sum(attrs: Mapping[str, Any]) -> Into:
    axes = tuple(attrs["axes"])
    if not axes:  # torch.sum would take all
        return _cast
    return lambda args, outs: torch.sum(args[0], dim=axes, keepdim=True, out=outs[0])  # type: ignore[return-value]


def _reduce_max(attrs: Mapping[str, Any]) -> Into:
    axes = tuple(attrs["axes"])
    return lambda args, outs: torch.amax(args[0], dim=axes, keepdim=True, out=outs[0])  # type: ignore[return-value]


def log_sum_exp(x: Tensor, axes: tuple[int, ...], out: Tensor) -> None:
    """``torch.logsumexp`` in half its time; all-infinite rows are left to it."""
    largest = x.amax(dim=axes, keepdim=True)
    if not torch.isfinite(largest).all():
        torch.logsumexp(x, dim=axes, keepdim=True, out=out)
        return
    torch.sum((x - largest).exp_(), dim=axes, keepdim=True, out=out)
    out.log_().add_(largest)


def _log_sum_exp(attrs: Mapping[str, Any]) -> Into:
    axes = tuple(attrs["axes"])
    return lambda args, outs: log_sum_exp(args[0], axes, outs[0])


def _moments(attrs: Mapping[str, Any]) -> Into:
    axes = tuple(attrs["axes"])

    def kernel(args: list[Tensor], outs: list[Tensor]) -> None:
        # In two passes: torch.var_mean is not vectorised, and takes ten times as long.
        torch.mean(args[0], dim=axes, keepdim=True, out=outs[0])
        centred = args[0] - outs[0]
        torch.mean(centred.square_(), dim=axes, keepdim=True, out=outs[1])

    return kernel


REDUCTIONS: Mapping[str, Bind] = {
    "ReduceSum": _reduce_sum,
    "ReduceMax": _reduce_max,
    "LogSumExp": _log_sum_exp,
    "Moments": _moments,
}


def bound(instruction: Instruction) -> Into:
    """The kernel of an instruction of these tables."""
    return (POINTWISE.get(instruction.op) or REDUCTIONS[instruction.op])(instruction.attrs)


def finish(op: str, parts: list[Tensor], counts: Tensor, axes: tuple[int, ...]) -> list[Tensor]:
    """Results of a reduction from those of its parts, which lie along ``axes``.

    ``counts``: elements of each part, broadcastable. Moments by Chan, Golub and LeVeque (1983),
    in float64.
    """
    if op == "ReduceSum":
        return [parts[0].sum(axes, keepdim=True)]
    if op == "ReduceMax":
        return [parts[0].amax(axes, keepdim=True)]
    if op == "LogSumExp":
        return [parts[0].logsumexp(axes, keepdim=True)]
    dtype = parts[0].dtype
    means, variances = (part.double() for part in parts)
    shares = counts / counts.sum()
    mean = (means * shares).sum(axes, keepdim=True)
    variance = ((variances + (means - mean).square_()) * shares).sum(axes, keepdim=True)
    return [mean.to(dtype), variance.to(dtype)]
