"""Attention on PyTorch, tile by tile: products, an exponential and sums of one tile of scores at a time.

What it computes, and in which order operands come, is in ``oocdl.ops.sequences.attention``. Operands may be
in bfloat16: tiles of them are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from oocdl.engines.torch.linear import matmul
from oocdl.engines.torch.torch_pointwise import primitive, reduced
from oocdl.engines.torch.torch_record import Run
from oocdl.fusion.cell_loops import Rows, bind, cell_code
from oocdl.graph.ir.program import Instruction
from oocdl.graph.ir.score_tiles import drops, pairs, parts, seen_keys, sees_all, tiling
from oocdl.ops.expression import Cell, Steps, Term, equal, exp, minimum, steps_of_cell, values_of, where

_FLOAT_BYTES = 4


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of each of several matrices."""
    return matmul(a[0], b[0])[None] if len(a) == 1 else torch.bmm(a, b)


def _add(total: Tensor, a: Tensor, b: Tensor) -> None:
    if len(a) == 1:
        total += _product(a, b)
    else:
        total.baddbmm_(a, b)


def _flat(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A part of an operand [b, g, .., size] as matrices [b g, rows, size]."""
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1]).to(dtype)


def _seen(attrs: Any, tile: Term, *bound: Term) -> tuple[Term, ...]:
    """(scores, [bounds]) -> scores, minus infinity where a band hides them."""
    return (minimum(tile, *bound) if bound else tile,)


def _weights(attrs: Any, tile: Term, base: Term, *bound: Term) -> tuple[Term, ...]:
    """(scores, their largest, [bounds]) -> weights, and what is summed of them."""
    # Minus infinity minus itself is not a number.
    weights = exp(_seen(attrs, tile, *bound)[0] - where(equal(base, -inf), 0.0, base))
    return weights, weights


def _rises(
    attrs: Any, tile: Term, rise: Term, most: Term, scale: Term, shift: Term, *bound: Term
) -> tuple[Term, ...]:
    """(scores, gradient of weights, stats, delta, [bounds]) -> weights, gradient of scores."""
    weights = exp(_seen(attrs, tile, *bound)[0] - most) * scale
    return weights, (rise - shift) * weights


def _by_rows(cell: Cell, reads: Sequence[Tensor], writes: Sequence[Tensor], reduction: str = "") -> Tensor:
    """Compute a cell on tensors that broadcast to the first one, a tile [n, rows, lanes] without gaps.

    Its results go to ``writes``. With a ``reduction`` the last one is reduced over lanes and returned,
    [n, rows, 1]; else the tile is returned.
    """
    tile = reads[0]
    if tile.dtype != torch.float32 or tile.device.type != "cpu":
        return _eager(cell, reads, writes, reduction)
    result = tile.new_empty(*tile.shape[:2], 1) if reduction else tile
    arrays = (*reads, *writes, result) if reduction else (*reads, *writes)
    loop = _loop(cell, len(reads), reduction, tuple((x.shape, x.stride()) for x in arrays))
    loop([x.data_ptr() for x in arrays])
    return result


@cache
def _loop(
    cell: Cell, reads: int, reduction: str, arrays: tuple[tuple[Sequence[int], Sequence[int]], ...]
) -> Callable[[Sequence[int]], None]:
    """Return the loop for arrays of these shapes and strides, a function of their addresses."""
    (outer, rows, lanes), _ = arrays[0]
    sizes = [[(1, 0)] * (3 - len(shape)) + [*zip(shape, strides, strict=True)] for shape, strides in arrays]
    steps = [[stride * _FLOAT_BYTES if n > 1 else 0 for n, stride in one] for one in sizes]
    assert all(step[2] in (0, _FLOAT_BYTES) for step in steps), "numbers of a row lie side by side"
    lines = [Rows(lanes if step[2] or lanes == 1 else 1, step[1]) for step in steps]
    code = cell_code(cell, (), tuple(lines[:reads]), tuple(lines[reads:]), reduction)
    return bind(code, (outer, rows), lines, [step[0] for step in steps])


@cache
def _steps(cell: Cell, arity: int) -> tuple[Steps, tuple[int, ...]]:
    return steps_of_cell(cell, {}, arity)


def _eager(cell: Cell, reads: Sequence[Tensor], writes: Sequence[Tensor], reduction: str) -> Tensor:
    steps, results = _steps(cell, len(reads))
    values = values_of(steps, reads, lambda op, given: primitive(op, given, reads[0]))
    for write, place in zip(writes, results, strict=False):
        write.copy_(values[place])
    return reduced(reduction, values[results[-1]]) if reduction else reads[0]


class _Scores:
    """The scores of the queries and keys of an instruction, a tile at a time."""

    def __init__(self, args: list[Tensor], rest: list[Tensor], item: Instruction) -> None:
        self.q, self.k = args[:2]
        self.attrs = item.attrs
        self.dtype: torch.dtype = getattr(torch, item.dtypes[0])
        self.uniform = rest[-1] if drops(item.attrs) else None
        given = rest if self.uniform is None else rest[:-1]
        self.added = [mask for mask in given if mask.dtype != torch.bool]
        self.seen = [mask for mask in given if mask.dtype == torch.bool]
        self.has_unseen = isfinite(item.attrs["unseen"]) or not isfinite(item.attrs["blind"])
        """Whether what a mask hides has a weight that is not 0."""
        self.scale, self.band = float(item.attrs["scale"]), tuple(item.attrs["band"])
        self.ratio, self.blind = float(item.attrs.get("ratio", 0.0)), float(item.attrs["blind"])
        self.tiling = tiling(tuple(self.q.shape), self.k.shape[2], band=self.band)
        self.most: dict[tuple[int, int, int], Tensor] = {}

    def pairs(self) -> Iterator[tuple[slice, slice]]:
        return pairs(tuple(self.q.shape), self.tiling)

    def rows(self) -> Iterator[slice]:
        return (slice(*rows) for rows in parts(self.q.shape[3], self.tiling.queries))

    def keys(self, rows: slice) -> Iterator[slice]:
        """Keys of the tiles of these queries, those alone of which they see any."""
        start, stop = seen_keys(self.band, (rows.start, rows.stop), self.k.shape[2])
        for low, high in parts(stop - start, self.tiling.keys):
            yield slice(start + low, start + high)

    def tile(self, pair: tuple[slice, slice], q: Tensor, rows: slice, keys: slice) -> Tensor:
        """The scores of one tile as matrices, q being that of its rows, scaled."""
        scores = _product(q, _flat(self.k[(*pair, keys)], self.dtype).transpose(1, 2))
        seen = self._as_scores(scores, pair, rows, keys)
        for mask in self.added:
            seen.add_(mask[self.part(mask, pair, rows, keys)])
        for mask in self.seen:
            seen.masked_fill_(~mask[self.part(mask, pair, rows, keys)], self.attrs["unseen"])
        return scores

    def bounds(self, rows: slice, keys: slice) -> list[Tensor]:
        """Return upper bounds of a tile's scores [heads queries, keys] where not all of them are seen."""
        all_seen = sees_all(self.band, (rows.start, rows.stop), (keys.start, keys.stop))
        return [] if all_seen else [self._most(rows, keys)]

    def part(self, x: Tensor, pair: tuple[slice, slice], rows: slice, keys: slice) -> tuple[slice, ...]:
        """The place of a tile in what broadcasts to the scores."""
        wanted = (*pair, slice(None), rows, keys)
        return tuple(slice(None) if n == 1 else part for n, part in zip(x.shape, wanted, strict=True))

    def _as_scores(self, tile: Tensor, pair: tuple[slice, slice], rows: slice, keys: slice) -> Tensor:
        """A tile with the axes of the scores."""
        counts = [part.stop - part.start for part in (*pair, rows, keys)]
        return tile.view(*counts[:2], self.q.shape[2], *counts[2:])

    def _most(self, rows: slice, keys: slice) -> Tensor:
        """Return upper bounds of scores: minus infinity outside the band; made once for all pairs."""
        key = keys.start - rows.start, rows.stop - rows.start, keys.stop - keys.start
        if key not in self.most:
            places = [torch.arange(part.start, part.stop, device=self.q.device) for part in (rows, keys)]
            far, (low, high) = places[1] - places[0][:, None], self.band
            most = torch.full(far.shape, inf, dtype=self.dtype, device=self.q.device)
            most = most if low is None else most.masked_fill_(far < low, -inf)
            most = most if high is None else most.masked_fill_(far > high, -inf)
            self.most[key] = most if self.q.shape[2] == 1 else most.repeat(self.q.shape[2], 1)
        return self.most[key]

    def clear_unseen(self, dscores: Tensor, *tile: Any) -> None:
        """Clear the gradient where a mask has put a number in the place of the score."""
        for mask in self.seen if self.has_unseen else ():
            self._as_scores(dscores, *tile).masked_fill_(~mask[self.part(mask, *tile)], 0)

    def dropped(self, pair: tuple[slice, slice], rows: slice, keys: slice) -> Tensor | None:
        """Return masks of the dropped weights of a tile, as matrices; None if there is no dropout."""
        if self.uniform is None:
            return None
        found = self.uniform[(*pair, slice(None), rows, keys)] < self.ratio
        return found.reshape(-1, found.shape[2] * found.shape[3], found.shape[4])

    def sum_gradient(self, dscores: Tensor, dmask: Tensor, *tile: Any) -> None:
        """Add the gradient of a tile to that of the mask."""
        place, whole = self.part(dmask, *tile), self._as_scores(dscores, *tile)
        axes = [axis for axis, n in enumerate(dmask.shape) if n == 1]
        dmask[place] += whole.sum(axes, keepdim=True) if axes else whole


def attend(args: list[Tensor], item: Instruction) -> list[Tensor]:
    """Attend: softmax over tiles of keys, by the largest score so far."""
    q, _, v, *rest = args
    scores = _Scores(args, rest, item)
    y, stats = (torch.empty(shape, dtype=scores.dtype, device=q.device) for shape in item.kernel_shapes[:2])
    for pair in scores.pairs():
        for rows in scores.rows():
            here = _flat(q[(*pair, slice(None), rows)], scores.dtype) * scores.scale
            most: Tensor | None = None
            total = found = here  # until there is a tile
            for keys in scores.keys(rows):
                tile, bounds = scores.tile(pair, here, rows, keys), scores.bounds(rows, keys)
                top = _by_rows(_seen, [tile, *bounds], [], "ReduceMax")
                top = top if most is None else torch.maximum(most, top)
                new = _by_rows(_weights, [tile, top, *bounds], [tile], "ReduceSum")
                if (dropped := scores.dropped(pair, rows, keys)) is not None:
                    tile.masked_fill_(dropped, 0)
                values = _flat(v[(*pair, keys)], scores.dtype)
                if most is None:
                    total, found = new, _product(tile, values)
                else:
                    shrunk = most.sub_(top.masked_fill(top == -inf, 0)).exp_()
                    total.mul_(shrunk).add_(new)
                    _add(found.mul_(shrunk), tile, values)
                most = top
            place = (*pair, slice(None), rows)
            if most is None:
                y[place], stats[place] = scores.blind, 0
                stats[place][..., 1] = scores.blind
            else:
                _finish(scores, [y[place], stats[place]], total, found, most)
    return [y, stats]


def _finish(scores: _Scores, outs: list[Tensor], total: Tensor, found: Tensor, most: Tensor) -> None:
    """Put the results of some queries: 0 and 0, or 0 and NaN, in the stats of one that sees nothing."""
    nothing, inverse = total == 0, total.reciprocal()
    found.div_(total * (1 - scores.ratio) if scores.ratio else total)
    if nothing.device.type != "cpu" or nothing.any():
        found.masked_fill_(nothing, scores.blind)
        most.masked_fill_(nothing, 0)
        inverse.masked_fill_(nothing, scores.blind)
    y, stats = outs
    y.copy_(found.view(y.shape))
    for number, array in enumerate((most, inverse)):
        stats[..., number : number + 1].copy_(array.view(*stats.shape[:-1], 1))


def attend_grad(args: list[Tensor], item: Instruction) -> list[Tensor]:
    """AttendGrad: the softmax of each tile again, and its part of all gradients."""
    q, k, v, stats, delta, dy, *rest = args
    scores = _Scores(args, rest, item)
    made = [torch.empty(shape, dtype=scores.dtype, device=q.device) for shape in item.kernel_shapes[:3]]
    dmask = [torch.zeros(shape, dtype=scores.dtype, device=q.device) for shape in item.kernel_shapes[3:]]
    for pair in scores.pairs():
        # Of one pair turned, as products with few rows and long ones are the faster.
        dk, dv = (whole[pair].flatten(0, 1) for whole in made[1:3])
        if alone := len(dk) == 1:
            dk, dv = (whole.new_empty(1, x.shape[3], x.shape[2]) for whole, x in ((dk, k), (dv, v)))
        dk.zero_()
        dv.zero_()
        for rows in scores.rows():
            place = (*pair, slice(None), rows)
            here, given, known, shift = (_flat(x[place], scores.dtype) for x in (q, dy, stats, delta))
            here, dq = here * scores.scale, torch.zeros_like(here)
            for keys in scores.keys(rows):
                weights, bounds = scores.tile(pair, here, rows, keys), scores.bounds(rows, keys)
                rise = _product(given, _flat(v[(*pair, keys)], scores.dtype).transpose(1, 2))
                if (dropped := scores.dropped(pair, rows, keys)) is not None:
                    rise.masked_fill_(dropped, 0).div_(1 - scores.ratio)
                by_row = known[:, :, :1], known[:, :, 1:], shift
                _by_rows(_rises, [weights, rise, *by_row, *bounds], [weights, rise])
                if dropped is not None:
                    weights.masked_fill_(dropped, 0).div_(1 - scores.ratio)
                if alone:
                    _add(dv[:, :, keys], given.transpose(1, 2), weights)
                else:
                    _add(dv[:, keys], weights.transpose(1, 2), given)
                scores.clear_unseen(rise, pair, rows, keys)
                for whole in dmask:
                    scores.sum_gradient(rise, whole, pair, rows, keys)
                _add(dq, rise, _flat(k[(*pair, keys)], scores.dtype))
                if alone:
                    _add(dk[:, :, keys], here.transpose(1, 2), rise)
                else:
                    _add(dk[:, keys], rise.transpose(1, 2), here)
            made[0][place] = dq.mul_(scores.scale).view(made[0][place].shape)
        if alone:
            for whole, part in zip(made[1:], (dk, dv), strict=True):
                whole[pair] = part.transpose(1, 2).view_as(whole[pair])
    return [*made, *dmask]


KERNELS: Mapping[str, Run] = {"Attend": attend, "AttendGrad": attend_grad}
