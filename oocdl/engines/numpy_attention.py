"""Attention by NumPy, some rows of scores at a time, in the dtype of the operands.

For engines that have no kernels of their own for it. What it computes, and in which order operands come, is
in ``oocdl.ops.sequences.attention``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from oocdl.engines.recurrent_steps import Run
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.score_tiles import Band, drops, pairs, parts, seen_keys, tiling

Place = tuple[slice, slice, slice, slice, slice]
"""Batches, groups, heads, queries and keys."""


def _tiles(q: Array, keys: int, band: Band) -> Iterator[Place]:
    """The places of tiles, which have all keys that their queries see, one key at least."""
    found = tiling(q.shape, keys, keys, band)
    for pair in pairs(q.shape, found):
        for rows in parts(q.shape[3], found.queries):
            start, stop = seen_keys(band, rows, keys)
            start = min(start, keys - 1)
            yield (*pair, slice(None), slice(*rows), slice(start, max(stop, start + 1)))


def _part(x: Array, place: Place) -> tuple[slice, ...]:
    """The place of a tile in what broadcasts to the scores."""
    return tuple(slice(None) if n == 1 else part for n, part in zip(x.shape, place, strict=True))


def _scores(q: Array, k: Array, masks: Sequence[Array], attrs: Mapping[str, Any], place: Place) -> Array:
    """The scores of one tile [b, g, r, q, k]."""
    scores: Array = q[place[:4]] @ np.swapaxes(k[(*place[:2], place[4])], 2, 3)[:, :, None]
    scores *= scores.dtype.type(attrs["scale"])
    for mask in masks:
        if mask.dtype != bool:
            scores += mask[_part(mask, place)]
    for mask in masks:
        if mask.dtype == bool:
            np.copyto(scores, attrs["unseen"], where=~mask[_part(mask, place)], casting="same_kind")
    far = np.arange(k.shape[2])[place[4]] - np.arange(q.shape[3])[place[3], None]
    low, high = attrs["band"]
    if low is not None:
        np.copyto(scores, -np.inf, where=far < low)
    if high is not None:
        np.copyto(scores, -np.inf, where=far > high)
    return scores


def _split(rest: Sequence[Array], attrs: Mapping[str, Any]) -> tuple[Sequence[Array], Array | None, float]:
    """Return the masks, the uniform numbers by which weights are dropped, and the ratio of those that are.

    The ratio is rounded to the dtype of the numbers, as Dropout rounds it.
    """
    if not drops(attrs):
        return rest, None, 0.0
    *masks, uniform = rest
    return masks, uniform, float(uniform.dtype.type(attrs["ratio"]))


def attend(args: Sequence[Array], attrs: Mapping[str, Any]) -> list[Array]:
    """Attend."""
    q, k, v, *rest = args
    masks, uniform, least = _split(rest, attrs)
    y = np.empty((*q.shape[:4], v.shape[3]), q.dtype)
    stats = np.empty((*q.shape[:4], 2), q.dtype)
    blind = attrs["blind"]
    for place in _tiles(q, k.shape[2], tuple(attrs["band"])):
        rows, seen = place[:4], (*place[:2], place[4])
        weights = _scores(q, k, masks, attrs, place)
        most = weights.max(4, keepdims=True)
        base = np.where(most == -np.inf, 0, most)  # infinity minus itself is not a number
        weights -= base
        np.exp(weights, out=weights)
        total = weights.sum(4, keepdims=True)
        sees_nothing = total == 0
        if uniform is not None:
            np.copyto(weights, 0, where=uniform[place] < least)
            weights /= 1 - attrs["ratio"]
        with np.errstate(invalid="ignore", divide="ignore"):
            y[rows] = np.where(sees_nothing, blind, weights @ v[seen][:, :, None] / total)
            share = np.where(sees_nothing, blind, 1 / total)
        stats[rows] = np.concatenate([base, share], 4)
    return [y, stats]


def attend_grad(args: Sequence[Array], attrs: Mapping[str, Any]) -> list[Array]:
    """AttendGrad."""
    q, k, v, stats, delta, dy, *rest = args
    masks, uniform, least = _split(rest, attrs)
    dq, dk, dv = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    wanted = zip(masks, attrs.get("mask_gradient") or (), strict=False)
    dmasks = [np.zeros_like(mask) for mask, one in wanted if one]
    scale = q.dtype.type(attrs["scale"])
    has_unseen = np.isfinite(attrs["unseen"]) or not np.isfinite(attrs["blind"])
    for place in _tiles(q, k.shape[2], tuple(attrs["band"])):
        rows, seen = place[:4], (*place[:2], place[4])
        weights = _scores(q, k, masks, attrs, place)
        weights -= stats[rows][..., :1]
        np.exp(weights, out=weights)
        weights *= stats[rows][..., 1:]
        given = dy[rows]
        if uniform is None:
            dropped, kept = None, weights
        else:
            dropped = uniform[place] < least
            kept = np.where(dropped, 0, weights / (1 - attrs["ratio"]))
        dv[seen] += (np.swapaxes(kept, 3, 4) @ given).sum(2)
        rise: Array = given @ np.swapaxes(v[seen], 2, 3)[:, :, None]
        if dropped is not None:
            rise /= 1 - attrs["ratio"]
            np.copyto(rise, 0, where=dropped)
        rise -= delta[rows]
        rise *= weights
        for mask in masks:
            if mask.dtype == bool and has_unseen:
                np.copyto(rise, 0, where=~mask[_part(mask, place)])
        for whole in dmasks:
            axes = tuple(axis for axis, n in enumerate(whole.shape) if n == 1)
            whole[_part(whole, place)] += rise.sum(axes, keepdims=True)
        dq[rows] = scale * (rise @ k[seen][:, :, None])
        dk[seen] += scale * (np.swapaxes(rise, 3, 4) @ q[rows]).sum(2)
    return [dq, dk, dv, *dmasks]


KERNELS: Mapping[str, Run] = {"Attend": attend, "AttendGrad": attend_grad}
