"""Attention by NumPy, some rows of scores at a time, in the dtype of the operands.

For engines that have no kernels of their own for it. What it computes, and in which order operands come, is
in ``oocdl.ops.sequences.attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.score_tiles import pairs, parts, tiling

Run = Callable[[Sequence[Array], Mapping[str, Any]], list[Array]]
"""(operands, attributes) -> results"""
Place = tuple[slice, slice, slice, slice]
"""Batches, groups, heads and queries."""


def _rows(q: Array, keys: int) -> Iterator[Place]:
    """The places of tiles, which have all keys."""
    found = tiling(q.shape, keys, keys)
    for pair in pairs(q.shape, found):
        for rows in parts(q.shape[3], found.queries):
            yield (*pair, slice(None), slice(*rows))


def _part(x: Array, place: Place) -> tuple[slice, ...]:
    """The place of a tile in what broadcasts to the scores."""
    return tuple(
        slice(None) if n == 1 else part for n, part in zip(x.shape, (*place, slice(None)), strict=True)
    )


def _scores(q: Array, k: Array, mask: Sequence[Array], attrs: Mapping[str, Any], place: Place) -> Array:
    """The scores of one tile [b, g, r, q, k]."""
    scores: Array = q[place] @ np.swapaxes(k[place[:2]], 2, 3)[:, :, None]
    scores *= scores.dtype.type(attrs["scale"])
    if mask and mask[0].dtype == bool:
        np.copyto(scores, attrs["unseen"], where=~mask[0][_part(mask[0], place)], casting="same_kind")
    elif mask:
        scores += mask[0][_part(mask[0], place)]
    far = np.arange(k.shape[2]) - np.arange(q.shape[3])[place[3], None]
    low, high = attrs["band"]
    if low is not None:
        np.copyto(scores, -np.inf, where=far < low)
    if high is not None:
        np.copyto(scores, -np.inf, where=far > high)
    return scores


def attend(args: Sequence[Array], attrs: Mapping[str, Any]) -> list[Array]:
    """Attend."""
    q, k, v, *mask = args
    y = np.empty((*q.shape[:4], v.shape[3]), q.dtype)
    stats = np.empty((*q.shape[:4], 2), q.dtype)
    blind = attrs["blind"]
    for place in _rows(q, k.shape[2]):
        weights = _scores(q, k, mask, attrs, place)
        most = weights.max(4, keepdims=True)
        base = np.where(most == -np.inf, 0, most)  # infinity minus itself is not a number
        weights -= base
        np.exp(weights, out=weights)
        total = weights.sum(4, keepdims=True)
        sees_nothing = total == 0
        with np.errstate(invalid="ignore", divide="ignore"):
            y[place] = np.where(sees_nothing, blind, weights @ v[place[:2]][:, :, None] / total)
            share = np.where(sees_nothing, blind, 1 / total)
        stats[place] = np.concatenate([base, share], 4)
    return [y, stats]


def attend_grad(args: Sequence[Array], attrs: Mapping[str, Any]) -> list[Array]:
    """AttendGrad."""
    q, k, v, stats, delta, dy, *mask = args
    dq, dk, dv = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    dmask = [np.zeros_like(mask[0])] if attrs.get("mask_gradient") else []
    scale = q.dtype.type(attrs["scale"])
    for place in _rows(q, k.shape[2]):
        weights = _scores(q, k, mask, attrs, place)
        weights -= stats[place][..., :1]
        np.exp(weights, out=weights)
        weights *= stats[place][..., 1:]
        given, pair = dy[place], place[:2]
        dv[pair] += (np.swapaxes(weights, 3, 4) @ given).sum(2)
        rise: Array = given @ np.swapaxes(v[pair], 2, 3)[:, :, None]
        rise -= delta[place]
        rise *= weights
        if (
            mask
            and mask[0].dtype == bool
            and (np.isfinite(attrs["unseen"]) or not np.isfinite(attrs["blind"]))
        ):
            np.copyto(rise, 0, where=~mask[0][_part(mask[0], place)])
        for whole in dmask:
            axes = tuple(axis for axis, n in enumerate(whole.shape) if n == 1)
            whole[_part(whole, place)] += rise.sum(axes, keepdims=True)
        dq[place] = scale * (rise @ k[pair][:, :, None])
        dk[pair] += scale * (np.swapaxes(rise, 3, 4) @ q[place]).sum(2)
    return [dq, dk, dv, *dmask]


KERNELS: Mapping[str, Run] = {"Attend": attend, "AttendGrad": attend_grad}
