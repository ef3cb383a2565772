"""Functions of PyTorch in other words, where exporters get them wrong or do not know them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from oocdl.graph.onnx.own_operators import DETACH

TORCHSCRIPT_OPSET = 17
"""The opset that TorchScript writes."""
_TINY, _LOG_2 = float(torch.finfo(torch.float32).tiny), math.log(2)


@torch.library.custom_op("oocdl::detach", mutates_args=())
def _cut(x: Tensor) -> Tensor:
    """Mark in a traced graph that a tensor has no gradient."""
    return x.detach().clone()


torch.onnx.register_custom_op_symbolic(  # type: ignore[attr-defined]
    "oocdl::detach", lambda g, x: g.op(DETACH, x), TORCHSCRIPT_OPSET
)


class _InOtherWords(TorchFunctionMode):
    """Calls ``_WORDS`` for what these write out, reads ``.data`` as ``detach()``, and marks cut gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__" and getattr(func, "__self__", None) is Tensor.data:
            func = Tensor.detach
        made = _WORDS.get(func, func)(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and func not in (Tensor.detach, torch.detach):
            return made
        is_traced = torch._C._get_tracing_state() is not None
        given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        if not is_traced or not any(x.requires_grad for x in given):
            return made
        return tree_map(lambda x: _cut(x) if isinstance(x, Tensor) and x.is_floating_point() else x, made)


def _softplus(input: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """Compute Softplus, which is its input above a threshold: exporters write it without one."""
    if threshold >= _FLAT:
        return _PLAIN_SOFTPLUS(input, beta, threshold)
    scaled = input * beta
    return torch.where(scaled > threshold, input, _PLAIN_SOFTPLUS(scaled) / beta)


def _logaddexp(input: Tensor, other: Tensor) -> Tensor:
    """Compute the logarithm of a sum of powers of e that may overflow."""
    return torch.maximum(input, other) + _PLAIN_SOFTPLUS(-(input - other).abs())


def _log1p(input: Tensor) -> Tensor:
    """Compute the logarithm of 1 + x; what the sum loses of a small x is in its quotient, too."""
    total = 1 + input
    is_lost = total == 1
    added = torch.where(is_lost, torch.ones_like(input), total - 1)
    return torch.where(is_lost, input, torch.log(total) * (input / added))


def _bce(input: Tensor, target: Tensor, weight: Tensor | None = None, *how: Any, **named: Any) -> Tensor:
    """Compute binary cross entropy, in which the logarithm of 0 is -100."""

    def log(x: Tensor) -> Tensor:
        logs = torch.log(torch.where(x > 0, x, torch.ones_like(x))).clamp(min=-100)
        return torch.where(x > 0, logs, torch.full_like(x, -100))

    return _reduced(-target * log(input) - (1 - target) * log(1 - input), weight, *how, **named)


def _bce_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """Compute binary cross entropy of logits, also of those whose Sigmoid is rounded to 0 or 1."""
    positive = 1 if pos_weight is None else 1 + (pos_weight - 1) * target
    each = (1 - target) * input + positive * _PLAIN_SOFTPLUS(-input)
    return _reduced(each, weight, size_average, reduce, reduction)


def _reduced(
    each: Tensor,
    weight: Tensor | None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    if size_average is not None or reduce is not None:  # as it was called before ``reduction``
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    each = each if weight is None else each * weight
    return each.mean() if reduction == "mean" else each.sum() if reduction == "sum" else each


_LANCZOS = (
    676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059,
    12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7,
)  # fmt: skip
"""Numerators of Lanczos's series of the Gamma function."""


def _lgamma(input: Tensor) -> Tensor:
    """Compute the logarithm of the Gamma function, by a series from a half on, below by its mirror image."""
    x, low, is_low = _mirrored(input)
    series = 1 + torch.stack([factor / (x + n) for n, factor in enumerate(_LANCZOS)]).sum(0)
    above = 0.5 * math.log(2 * math.pi) + (x - 0.5) * torch.log(x + 6.5) - (x + 6.5) + torch.log(series)
    return torch.where(is_low, math.log(math.pi) - torch.sin(low).abs().log() - above, above)


def _digamma(input: Tensor) -> Tensor:
    """Compute the slope of ``lgamma``."""
    x, low, is_low = _mirrored(input)
    terms = torch.stack([factor / (x + n) for n, factor in enumerate(_LANCZOS)])
    slope = torch.stack([term / (x + n) for n, term in enumerate(terms)]).sum(0) / (1 + terms.sum(0))
    above = torch.log(x + 6.5) + (x - 0.5) / (x + 6.5) - 1 - slope
    return torch.where(is_low, above - math.pi / torch.tan(low), above)


def _mirrored(input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers from a half on, those below as a part of a circle, and which these are."""
    is_low = input < 0.5
    low = torch.where(is_low, input, torch.full_like(input, 0.25))
    return torch.where(is_low, 1 - input, input), math.pi * (low - low.round()), is_low


def _xlogy(input: Any, other: Any) -> Tensor:
    """Compute x log y, which is 0 of two zeros."""
    if not isinstance(other, Tensor):
        other = input.new_full((), other)
    made: Tensor = input * torch.log(torch.where((input == 0) & (other <= 0), torch.ones_like(other), other))
    return made


def _floor_divide(input: Any, other: Any) -> Tensor:
    """Divide and round down, which is not what exporters write for negative whole numbers."""
    return torch.div(input, other, rounding_mode="floor")


def _linspace(start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    """Compute numbers at equal distances: exporters write the distance in float32."""
    if isinstance(start, Tensor) or isinstance(end, Tensor):
        return _PLAIN_LINSPACE(start, end, steps, dtype=dtype, **how)
    return torch.tensor(np.linspace(start, end, int(steps)), dtype=dtype or torch.get_default_dtype(), **how)


def _adaptive_average(rank: int, plain: Callable[..., Tensor]) -> Callable[[Tensor, Any], Tensor]:
    """Return an adaptive average pooling over so many axes, for any size: exporters write windows of one."""

    def pooled(input: Tensor, output_size: Any) -> Tensor:
        wanted = output_size if isinstance(output_size, Sequence) else [output_size] * rank
        if all(cells == 1 for cells in wanted):
            return plain(input, output_size)
        for axis, cells in enumerate(wanted, input.dim() - rank):
            if cells is not None:
                size, place = input.shape[axis], torch.arange(cells)[:, None]
                begin, end = place * size // cells, (place * size + size + cells - 1) // cells
                element = torch.arange(size)
                inside = ((element >= begin) & (element < end)).to(input.dtype)
                input = (input.transpose(axis, -1) @ (inside / (end - begin)).T).transpose(axis, -1)
        return input

    return pooled


def _interpolate(
    input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *how: Any, **named: Any
) -> Tensor:
    """Interpolate; by area this is an adaptive average, which PyTorch calls out of sight."""
    if mode == "area" and size is not None:
        rank = input.dim() - 2
        return _adaptive_average(rank, _AVERAGES[rank - 1])(input, size)
    return _PLAIN_INTERPOLATE(input, size, scale_factor, mode, *how, **named)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Compute cosines by lengths of at least ``eps``, whose gradients are those of the lengths themselves."""

    def unit(x: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
        return x / (length + (length.clamp(min=eps) - length).detach())

    x1, x2 = torch.broadcast_tensors(x1, x2)  # type: ignore[no-untyped-call]
    return (unit(x1) * unit(x2)).sum(dim)


def _cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute cumulative products, which no exporter knows: each step doubles their number of factors."""
    made = input.to(dtype or (input.dtype if input.is_floating_point() else torch.int64))
    size, distance = int(input.shape[dim]), 1
    while distance < size:
        longer = made.narrow(dim, distance, size - distance) * made.narrow(dim, 0, size - distance)
        made, distance = torch.cat([made.narrow(dim, 0, distance), longer], dim), 2 * distance
    return made


def _roll(input: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    """Compute a roll, whose shift may depend on sizes: exporters write its number, and refuse one of 0."""
    shifts, dims = (x if isinstance(x, tuple | list) else (x,) for x in (shifts, dims))
    if not dims:
        return _roll(input.flatten(), shifts, 0).reshape(input.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        if not isinstance(shift, int) or dim in (0, -input.dim()):  # of a batch of one, no part is left
            start = -shift % input.shape[dim]
            input = torch.cat([input, input], dim).narrow(dim, start, input.shape[dim])
        elif shift:
            input = _PLAIN_ROLL(input, shift, dim)
    return input


def uniform_(self: Tensor, *given: float, **named: Any) -> Tensor:
    """Draw uniform numbers; PyTorch calls their ends ``from``, a keyword of Python, and ``to``."""
    ends = {"from": 0.0, "to": 1.0, **dict(zip(("from", "to"), given, strict=False)), **named}
    return self.copy_(torch.rand_like(self) * (ends["to"] - ends["from"]) + ends["from"])


def exponential_(self: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    """Draw exponentially distributed numbers."""
    return self.copy_(exponential(torch.rand_like(self), lambd))


def exponential(uniform: Tensor, lambd: float) -> Tensor:
    """Turn uniform numbers, which may be 0, into exponentially distributed ones."""
    return -torch.log(uniform.clamp(min=_TINY)) / lambd


def _gumbel(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 0, dim: int = -1) -> Tensor:
    """Compute what ``gumbel_softmax`` does, inside of which a mode does not look."""
    with _InOtherWords():
        soft = ((logits - torch.empty_like(logits).exponential_().log()) / tau).softmax(dim)
        largest = torch.zeros_like(soft).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)
        return largest - soft.detach() + soft if hard else soft


_FLAT = 20
"""Threshold of Softplus from which on it changes nothing but the last digits."""
_PLAIN_SOFTPLUS, _PLAIN_ROLL, _PLAIN_LINSPACE = nn.functional.softplus, torch.roll, torch.linspace
_PLAIN_INTERPOLATE: Callable[..., Tensor] = nn.functional.interpolate
_AVERAGES: tuple[Callable[[Tensor, Any], Tensor], ...] = (
    torch.adaptive_avg_pool1d,
    nn.functional.adaptive_avg_pool2d,
    nn.functional.adaptive_avg_pool3d,
)
_OF_BOTH: Mapping[str, Callable[..., Any]] = {
    "logaddexp": _logaddexp,
    "logaddexp2": lambda input, other: _logaddexp(input * _LOG_2, other * _LOG_2) / _LOG_2,
    "log1p": _log1p,
    # exp(x) - 1 without a difference that loses the digits of a small x.
    "expm1": lambda input: torch.tanh(input / 2) * (torch.exp(input) + 1),
    "cumprod": _cumprod,
    "floor_divide": _floor_divide,
    "roll": _roll,
    "lgamma": _lgamma,
    "digamma": _digamma,
    "xlogy": _xlogy,
}
"""Functions that are methods of tensors, too."""
_WORDS: Mapping[Any, Callable[..., Any]] = {
    **{getattr(of, name): word for name, word in _OF_BOTH.items() for of in (torch, Tensor)},
    nn.functional.softplus: _softplus,
    # The logarithm of Sigmoid is not 0 where that is rounded to 0.
    nn.functional.logsigmoid: lambda input: -_PLAIN_SOFTPLUS(-input),
    nn.functional.binary_cross_entropy: _bce,
    nn.functional.binary_cross_entropy_with_logits: _bce_with_logits,
    nn.functional.cosine_similarity: cosine_similarity,
    # An exporter adds to ``p`` what belongs into each difference.
    nn.functional.pairwise_distance: lambda x1, x2, p=2.0, eps=1e-6, keepdim=False: torch.linalg.vector_norm(
        x1 - x2 + eps, p, -1, keepdim
    ),
    torch.cdist: lambda x1, x2, p=2.0, compute_mode=None: torch.linalg.vector_norm(
        x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1
    ),
    nn.functional.interpolate: _interpolate,
    **{pool: _adaptive_average(rank, pool) for rank, pool in enumerate(_AVERAGES, 1)},
    torch.special.gammaln: _lgamma,
    torch.special.digamma: _digamma,
    torch.special.psi: _digamma,
    torch.special.xlogy: _xlogy,
    Tensor.__floordiv__: _floor_divide,
    Tensor.__rfloordiv__: lambda input, other: _floor_divide(other, input),
    Tensor.__rshift__: lambda input, other: _floor_divide(input, 2**other),
    torch.linspace: _linspace,
    nn.functional.gumbel_softmax: _gumbel,
    Tensor.uniform_: uniform_,
    Tensor.exponential_: exponential_,
}
"""A function of PyTorch that exporters get wrong -> the same in other words."""


@contextlib.contextmanager
def rewritten() -> Iterator[None]:
    """Have a module call in other words what exporters get wrong."""
    # They write attention without PyTorch's zeros for queries that see no key, lose sight of ``.data`` and of
    # Softplus's threshold, and write the others as formulas that lose digits or overflow.
    attention = patch("torch.nn.functional.scaled_dot_product_attention", _attention)
    with torch.enable_grad(), attention, _InOtherWords():
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what ``scaled_dot_product_attention`` does, by its documentation."""
    if enable_gqa:
        heads = int(query.shape[-3]) // int(key.shape[-3])
        key, value = key.repeat_interleave(heads, -3), value.repeat_interleave(heads, -3)
    scores = query @ key.transpose(-2, -1) * (int(query.shape[-1]) ** -0.5 if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2], scores.shape[-1], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_bool else scores + attn_mask
    weights = torch.softmax(scores, -1)
    if attn_mask is not None:
        weights = torch.where(weights.isnan(), torch.zeros((), dtype=weights.dtype), weights)
    return (torch.dropout(weights, dropout_p, True) if dropout_p else weights) @ value
