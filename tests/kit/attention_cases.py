"""Attention: instances of its operators, and what these compute by PyTorch on whole scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import torch

from oocdl.graph.ir.graph import Array

Tensors = Sequence[torch.Tensor]


def _scores(q: torch.Tensor, k: torch.Tensor, masks: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    scores = attrs["scale"] * torch.einsum("bgrqh,bgkh->bgrqk", q, k)
    for mask in sorted(masks, key=lambda mask: mask.dtype == torch.bool):
        is_bool = mask.dtype == torch.bool
        scores = torch.where(mask, scores, attrs["unseen"]) if is_bool else scores + mask
    far = torch.arange(k.shape[2]) - torch.arange(q.shape[3])[:, None]
    low, high = attrs["band"]
    outside = (far < (-(10**6) if low is None else low)) | (far > (10**6 if high is None else high))
    return scores.masked_fill(outside, -inf)


def _split(rest: Tensors, attrs: Mapping[str, Any]) -> tuple[Tensors, Any]:
    """The masks, and what weights are multiplied by."""
    ratio = attrs.get("ratio", 0)
    return (rest[:-1], (rest[-1] >= ratio).to(rest[-1].dtype) / (1 - ratio)) if ratio else (rest, 1)


def attend(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Attend."""
    q, k, v, *rest = inputs
    masks, kept = _split(rest, attrs)
    scores = _scores(q, k, masks, attrs)
    blind = (scores == -inf).all(4, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0), 4)
    y = torch.einsum("bgrqk,bgkv->bgrqv", weights * kept, v).masked_fill(blind, attrs["blind"])
    most = scores.amax(4, keepdim=True).masked_fill(blind, 0)
    share = 1 / torch.exp(scores - most).sum(4, keepdim=True)
    return y, torch.cat([most, share.masked_fill(blind, attrs["blind"])], 4)


def attend_grad(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """AttendGrad."""
    q, k, v, stats, delta, dy, *rest = inputs
    masks, kept = _split(rest, attrs)
    weights = torch.exp(_scores(q, k, masks, attrs) - stats[..., :1]) * stats[..., 1:]
    rise = weights * (kept * torch.einsum("bgrqv,bgkv->bgrqk", dy, v) - delta)
    for mask in masks:
        rise = rise * mask if mask.dtype == torch.bool else rise
    dq = attrs["scale"] * torch.einsum("bgrqk,bgkh->bgrqh", rise, k)
    dk = attrs["scale"] * torch.einsum("bgrqk,bgrqh->bgkh", rise, q)
    dv = torch.einsum("bgrqk,bgrqv->bgkv", weights * kept, dy)
    wanted = zip(masks, attrs["mask_gradient"] or (), strict=False)
    return dq, dk, dv, *(rise.sum_to_size(mask.shape) for mask, one in wanted if one)


ORACLES: Mapping[str, Callable[..., Any]] = {"Attend": attend, "AttendGrad": attend_grad}


def _seen(shape: Sequence[int], blind: bool) -> Array:
    """Which scores count; ``blind``: one query sees nothing."""
    seen = np.random.default_rng(5).uniform(size=shape) < 0.6
    seen[..., 0] = True
    if blind:
        seen[0, ..., -1, :] = False
    return seen


CAUSAL, WINDOW, AFTER_PAST = (None, 0), (-1, 1), (None, 3)
EXTENTS = (2, 2, 3, 5, 6, 4, 3)
"""Batch, groups, heads, queries, keys, sizes of keys and of values."""


def instances() -> list[tuple[str, list[Array], dict[str, Any], tuple[int, ...]]]:
    """(operator, operands, attributes, results that a loss may read)"""
    random, found = np.random.default_rng(0), []
    one = (1, 1, 1, 4, 4, 2, 2)
    for extents, mask, more in (
        (EXTENTS, None, {}),
        (one, None, {"band": CAUSAL}),
        (EXTENTS, None, {"band": CAUSAL, "scale": 0.3}),
        ((1, 2, 1, 9, 5, 2, 2), None, {"band": WINDOW}),
        ((2, 1, 2, 3, 6, 2, 4), None, {"band": AFTER_PAST}),
        (EXTENTS, _seen((2, 1, 1, 5, 6), True), {}),
        (EXTENTS, _seen((2, 2, 3, 1, 6), False), {"band": CAUSAL}),
        (EXTENTS, _seen((1, 1, 3, 5, 6), True), {"unseen": -0.7}),
        (EXTENTS, random.normal(size=(1, 2, 3, 5, 6)), {}),
        (EXTENTS, random.normal(size=(2, 1, 1, 1, 6)), {"band": CAUSAL}),
        (EXTENTS, np.where(_seen((2, 2, 3, 5, 6), True), 0, -inf), {}),
        (EXTENTS, None, {"ratio": 0.3, "band": CAUSAL}),
        (EXTENTS, random.normal(size=(1, 2, 1, 5, 6)), {"ratio": 0.3}),
    ):
        b, g, r, queries, keys, h, v = extents
        attrs = {"scale": 1.0, "band": (None, None), "unseen": -inf, "blind": 0.0, **more}
        given = [
            random.normal(size=shape) for shape in ((b, g, r, queries, h), (b, g, keys, h), (b, g, keys, v))
        ]
        masks = [] if mask is None else [mask]
        if mask is not None and mask.dtype != bool:
            masks += [random.normal(size=(2, 1, 1, 1, 6)), _seen((1, 1, 1, queries, keys), False)]
        if "ratio" in attrs:
            masks.append(random.uniform(size=(b, g, r, queries, keys)))
        found.append(("Attend", [*given, *masks], attrs, (0,)))
        y, stats = attend([torch.as_tensor(array) for array in (*given, *masks)], attrs)
        dy = random.normal(size=y.shape)
        delta = (dy * y.numpy()).sum(4, keepdims=True)
        trained = mask is not None and mask.dtype != bool and (True, mask.shape[3] > 1)
        back = [*given, stats.numpy(), delta, dy, *masks]
        found.append(("AttendGrad", back, {**attrs, "mask_gradient": trained}, ()))
    return found
