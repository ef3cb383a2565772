"""Attention: instances of its operators, and what these compute by PyTorch on whole scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import torch

from oocdl.graph.ir.graph import Array

Tensors = Sequence[torch.Tensor]


def _scores(q: torch.Tensor, k: torch.Tensor, mask: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    scores = attrs["scale"] * torch.einsum("bgrqh,bgkh->bgrqk", q, k)
    if mask and mask[0].dtype == torch.bool:
        scores = torch.where(mask[0], scores, attrs["unseen"])
    elif mask:
        scores = scores + mask[0]
    far = torch.arange(k.shape[2]) - torch.arange(q.shape[3])[:, None]
    low, high = attrs["band"]
    outside = (far < (-(10**6) if low is None else low)) | (far > (10**6 if high is None else high))
    return scores.masked_fill(outside, -inf)


def attend(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Attend."""
    q, k, v, *mask = inputs
    scores = _scores(q, k, mask, attrs)
    blind = (scores == -inf).all(4, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0), 4)
    y = torch.einsum("bgrqk,bgkv->bgrqv", weights, v).masked_fill(blind, attrs["blind"])
    most = scores.amax(4, keepdim=True).masked_fill(blind, 0)
    share = 1 / torch.exp(scores - most).sum(4, keepdim=True)
    return y, torch.cat([most, share.masked_fill(blind, attrs["blind"])], 4)


def attend_grad(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """AttendGrad."""
    q, k, v, stats, delta, dy, *mask = inputs
    weights = torch.exp(_scores(q, k, mask, attrs) - stats[..., :1]) * stats[..., 1:]
    rise = weights * (torch.einsum("bgrqv,bgkv->bgrqk", dy, v) - delta)
    if mask and mask[0].dtype == torch.bool:
        rise = rise * mask[0]
    dq = attrs["scale"] * torch.einsum("bgrqk,bgkh->bgrqh", rise, k)
    dk = attrs["scale"] * torch.einsum("bgrqk,bgrqh->bgkh", rise, q)
    dv = torch.einsum("bgrqk,bgrqv->bgkv", weights, dy)
    dmask = (rise.sum_to_size(mask[0].shape),) if attrs["mask_gradient"] else ()
    return dq, dk, dv, *dmask


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
    ):
        b, g, r, queries, keys, h, v = extents
        attrs = {"scale": 1.0, "band": (None, None), "unseen": -inf, "blind": 0.0, **more}
        given = [
            random.normal(size=shape) for shape in ((b, g, r, queries, h), (b, g, keys, h), (b, g, keys, v))
        ]
        masks = [] if mask is None else [mask]
        found.append(("Attend", [*given, *masks], attrs, (0,)))
        y, stats = attend([torch.as_tensor(array) for array in (*given, *masks)], attrs)
        dy = random.normal(size=y.shape)
        delta = (dy * y.numpy()).sum(4, keepdims=True)
        trained = mask is not None and mask.dtype != bool
        back = [*given, stats.numpy(), delta, dy, *masks]
        found.append(("AttendGrad", back, {**attrs, "mask_gradient": trained}, ()))
    return found
