"""PyTorch kernels that write into memory they are given: what chains are made of.

Elementwise operators and reductions are all here, a record each. A kernel takes operands, unpadded and
broadcastable, and the tensors its results go to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from oocdl.engines.torch.kernel_scratch import by_rule, elementwise, no_more
from oocdl.engines.torch.torch_record import Blocks, Kernel, Result
from oocdl.fusion import blockwise
from oocdl.graph.ir.program import Instruction

Into = blockwise.Into[Tensor]
Bind = blockwise.Bind[Tensor]

aten = torch.ops.aten
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _out(function: Callable[..., Any], **options: Any) -> Bind:
    """Bind a function of the operands with an ``out`` argument."""

    def kernel(args: list[Tensor], outs: list[Tensor]) -> None:
        function(*args, **options, out=outs[0])

    return lambda attrs: kernel


def _grad(function: Callable[..., Any], *constants: Any) -> Bind:
    """Bind an aten gradient of the operands and constants, with a ``grad_input`` argument."""

    def kernel(args: list[Tensor], outs: list[Tensor]) -> None:
        function(*args, *constants, grad_input=outs[0])

    return lambda attrs: kernel


def _always(kernel: Into) -> Bind:
    """Bind a kernel that takes no attributes."""
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


def _leaky_relu_grad(attrs: Mapping[str, Any]) -> Into:
    return _grad(aten.leaky_relu_backward.grad_input, float(attrs["alpha"]), False)(attrs)


def _elu(attrs: Mapping[str, Any]) -> Into:
    alpha = float(attrs["alpha"])
    return lambda args, outs: aten.elu.out(args[0], alpha, out=outs[0])


def _elu_grad(attrs: Mapping[str, Any]) -> Into:
    alpha = float(attrs["alpha"])
    return lambda args, outs: aten.elu_backward.grad_input(
        args[0], alpha, 1, 1, True, args[1], grad_input=outs[0]
    )


def _gelu(attrs: Mapping[str, Any]) -> Into:
    how = attrs.get("approximate", "none")
    return lambda args, outs: aten.gelu.out(args[0], approximate=how, out=outs[0])


def _gelu_grad(attrs: Mapping[str, Any]) -> Into:
    how = attrs.get("approximate", "none")
    return lambda args, outs: aten.gelu_backward.grad_input(*args, approximate=how, grad_input=outs[0])


def _mod(attrs: Mapping[str, Any]) -> Into:
    function = torch.fmod if attrs.get("fmod", 0) else torch.remainder
    return _out(function)(attrs)


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


def _finish_sum(parts: list[Tensor], counts: Tensor, axes: tuple[int, ...]) -> list[Tensor]:
    return [parts[0].sum(axes, keepdim=True)]


def _finish_max(parts: list[Tensor], counts: Tensor, axes: tuple[int, ...]) -> list[Tensor]:
    return [parts[0].amax(axes, keepdim=True)]


def _finish_log_sum_exp(parts: list[Tensor], counts: Tensor, axes: tuple[int, ...]) -> list[Tensor]:
    return [parts[0].logsumexp(axes, keepdim=True)]


def _finish_moments(parts: list[Tensor], counts: Tensor, axes: tuple[int, ...]) -> list[Tensor]:
    """Combine moments by Chan, Golub and LeVeque (1983), in float64."""
    dtype = parts[0].dtype
    means, variances = (part.double() for part in parts)
    shares = counts / counts.sum()
    mean = (means * shares).sum(axes, keepdim=True)
    variance = ((variances + (means - mean).square_()) * shares).sum(axes, keepdim=True)
    return [mean.to(dtype), variance.to(dtype)]


def _elementwise(bind: Bind, *, in_place: int, temporaries: int) -> Blocks:
    return Blocks(bind, in_place, None, temporaries)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Tan": torch.tan,
    "Asin": torch.asin,
    "Acos": torch.acos,
    "Atan": torch.atan,
    "Sinh": torch.sinh,
    "Cosh": torch.cosh,
    "Asinh": torch.asinh,
    "Acosh": torch.acosh,
    "Atanh": torch.atanh,
    "Floor": torch.floor,
    "Round": torch.round,
}
BLOCKWISE: Mapping[str, Blocks] = {
    **{op: _elementwise(_out(function), in_place=1, temporaries=0) for op, function in _FUNCTIONS.items()},
    "Mod": _elementwise(_mod, in_place=2, temporaries=0),
    "Add": _elementwise(_out(torch.add), in_place=2, temporaries=0),
    "Sub": _elementwise(_out(torch.sub), in_place=2, temporaries=0),
    "Mul": _elementwise(_out(torch.mul), in_place=2, temporaries=0),
    "Div": _elementwise(_always(_divide), in_place=2, temporaries=0),
    "Pow": _elementwise(_out(torch.pow), in_place=2, temporaries=0),
    "Max": _elementwise(_out(torch.maximum), in_place=2, temporaries=0),
    "Min": _elementwise(_out(torch.minimum), in_place=2, temporaries=0),
    "Neg": _elementwise(_out(torch.neg), in_place=1, temporaries=0),
    "Sqrt": _elementwise(_out(torch.sqrt), in_place=1, temporaries=0),
    "Exp": _elementwise(_out(torch.exp), in_place=1, temporaries=0),
    "Log": _elementwise(_out(torch.log), in_place=1, temporaries=0),
    "Abs": _elementwise(_out(torch.abs), in_place=1, temporaries=0),
    "Erf": _elementwise(_out(torch.special.erf), in_place=1, temporaries=0),
    "Sigmoid": _elementwise(_out(torch.sigmoid), in_place=1, temporaries=0),
    "Tanh": _elementwise(_out(torch.tanh), in_place=1, temporaries=0),
    "Softplus": _elementwise(_always(_softplus), in_place=1, temporaries=1),
    "Reciprocal": _elementwise(_out(torch.reciprocal), in_place=1, temporaries=0),
    "Relu": _elementwise(_out(aten.relu.out), in_place=1, temporaries=0),
    "LeakyRelu": _elementwise(_leaky_relu, in_place=1, temporaries=0),
    "Elu": _elementwise(_elu, in_place=1, temporaries=0),
    "EluGrad": _elementwise(_elu_grad, in_place=2, temporaries=0),
    "Gelu": _elementwise(_gelu, in_place=1, temporaries=0),
    "Cast": _elementwise(_always(_cast), in_place=0, temporaries=0),
    "Greater": _elementwise(_out(torch.gt), in_place=2, temporaries=0),
    "Less": _elementwise(_out(torch.lt), in_place=2, temporaries=0),
    "Equal": _elementwise(_out(torch.eq), in_place=2, temporaries=0),
    "Not": _elementwise(_out(torch.logical_not), in_place=1, temporaries=0),
    "And": _elementwise(_out(torch.logical_and), in_place=2, temporaries=0),
    "Or": _elementwise(_out(torch.logical_or), in_place=2, temporaries=0),
    "Where": _elementwise(_always(_where), in_place=0, temporaries=1),
    "ReluGrad": _elementwise(_grad(aten.threshold_backward.grad_input, 0), in_place=2, temporaries=0),
    "LeakyReluGrad": _elementwise(_leaky_relu_grad, in_place=2, temporaries=0),
    "GeluGrad": _elementwise(_gelu_grad, in_place=2, temporaries=0),
    "SigmoidGrad": _elementwise(_grad(aten.sigmoid_backward.grad_input), in_place=2, temporaries=0),
    "TanhGrad": _elementwise(_grad(aten.tanh_backward.grad_input), in_place=2, temporaries=0),
    "Dropout": _elementwise(_dropout, in_place=1, temporaries=1),
    "Normalize": _elementwise(_normalize, in_place=1, temporaries=0),
    "ReduceSum": Blocks(_reduce_sum, in_place=0, finish=_finish_sum, temporaries=0),
    "ReduceMax": Blocks(_reduce_max, in_place=0, finish=_finish_max, temporaries=0),
    "LogSumExp": Blocks(_log_sum_exp, in_place=0, finish=_finish_log_sum_exp, temporaries=2),
    "Moments": Blocks(_moments, in_place=0, finish=_finish_moments, temporaries=1),
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

    return Kernel(
        run=run,
        on_device=run,
        takes_unpadded=False,
        convolution=None,
        result=Result.EITHER,
        planes=False,
        scratch=elementwise if blocks.finish is None else by_rule,
        device_scratch=no_more,
        blocks=blocks,
        landing=None,
    )


KERNELS: Mapping[str, Kernel] = {op: _by_itself(blocks) for op, blocks in BLOCKWISE.items()}
