"""Measures how far results are off, and how far PyTorch's own are in another rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oocdl.pytorch.module_calls import tensors_in

Results = Mapping[str, Tensor]
"""``output NAME``, ``gradient NAME``, ``update NAME`` -> what was computed."""
_SMALL = 1e-3
"""A tensor's own largest number counts for its size, but no less than so much of the largest of its kind."""


def errors(found: Results, wanted: Results) -> dict[str, float]:
    """Return by how much each result is off, relative to its largest number; infinite if one is missing."""
    largest: dict[str, float] = {}
    for title, x in wanted.items():
        kind = title.partition(" ")[0]
        largest[kind] = max(largest.get(kind, 0.0), _size(x))
    off: dict[str, float] = {}
    for title in {**wanted, **found}:
        kind = title.partition(" ")[0]
        a, b = found.get(title), wanted.get(title)
        if a is None or b is None:
            there = a if b is None else b
            missing = kind != "gradient" or there is None or bool(there.count_nonzero())
            off[title] = float("inf") if missing else 0.0  # a gradient of zeros is as good as none
            continue
        off[title] = _off(a, b, max(_size(b), _SMALL * largest[kind]))
    return off


def _size(x: Tensor) -> float:
    finite = x.double().nan_to_num(0.0, 0.0, 0.0) if x.is_floating_point() else x.double()
    return float(finite.abs().max()) if x.numel() else 0.0


def _off(a: Tensor, b: Tensor, size: float) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not b.numel():
        return 0.0
    if not b.is_floating_point():
        return 0.0 if torch.equal(a.to(b.dtype), b) else float("inf")
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    away = torch.where(same, torch.zeros_like(a), (a - b).abs()).nan_to_num(float("inf"))
    worst = float(away.max())
    return worst / size if size else worst and float("inf")


class Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves out roundings to fewer bits that a module's code asks for, as oocdl does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = kwargs.get("dtype")
        rounds = func is torch.ops.aten._to_copy.default and wanted is not None and wanted.is_floating_point
        if rounds and args[0].dtype == self.dtype:
            kwargs["dtype"] = self.dtype
        return func(*args, **kwargs)


class Jitter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves every new result by about its rounding: PyTorch against itself, in another order of sums."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(slot.alias_info is not None for slot in func._schema.returns):
            return out
        for x in tensors_in(out):
            if x.is_floating_point() and x.numel():
                bits = torch.rand(x.shape, generator=self.random, dtype=x.dtype).mul_(2).sub_(1)
                moved = x + bits.mul_(torch.finfo(x.dtype).eps) * x
                x.copy_(moved.where(moved.isfinite(), x))
        return out
