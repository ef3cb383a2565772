"""Operators that move values or look them up, by NumPy: for engines that compute with its arrays.

Operands come as ``operand_of`` makes them, and results may be views. Concat and pooling take their operands
unpadded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np

from oocdl.engines.checked_indices import check_indices
from oocdl.fusion.chain import crop
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.operands import concat_axis, concat_pieces, crop_of, is_empty, pads_of
from oocdl.graph.ir.program import Instruction, Operand, padded_shape

Run = Callable[[Sequence[Array], Instruction], Sequence[Array]]
"""A kernel: operands and an instruction to results."""


def padded(array: Array, operand: Operand, fill: float) -> Array:
    """An operand with its padding."""
    pads = pads_of(operand)
    if pads is None:
        return array
    if is_empty(operand):  # wholly outside: one side of its padding may be negative
        return np.full(padded_shape(operand), fill, array.dtype)
    return np.pad(array, pads, constant_values=array.dtype.type(fill))


def operand_of(array: Array, item: Instruction, operand: Operand, takes_unpadded: bool) -> Array:
    """An operand as its kernel takes it: the array of its slot cropped, reshaped and padded."""
    array = crop(array, operand.crop).reshape(operand.shape)
    return array if takes_unpadded else padded(array, operand, item.fill)


def copy(source: Array, target: Array) -> None:
    """``target[...] = source``; a run of elements that lie side by side in both is copied as one element."""
    if source.dtype == target.dtype and source.shape == target.shape:
        size = source.itemsize
        for axis, steps in enumerate(zip(source.strides, target.strides, strict=True)):
            if steps == (size, size) and source.shape[axis] > 1:
                run = f"V{source.shape[axis] * size}"
                source, target = (array.swapaxes(axis, -1).view(run) for array in (source, target))
                break
    target[...] = source


def boxed(whole: Array, item: Instruction, out: Array) -> None:
    """Put the wanted box of a result into ``out``, zeros where that reaches beyond ``whole``."""
    out[...] = 0
    source, target = [], []
    for start, extent, have in zip(crop_of(item), out.shape, whole.shape, strict=True):
        first, last = max(start, 0), min(start + extent, have)
        source.append(slice(first, max(last, first)))
        target.append(slice(first - start, first - start + max(last - first, 0)))
    out[tuple(target)] = whole[tuple(source)]


def concat(args: Sequence[Array], item: Instruction, out: Array) -> None:
    """Concat."""
    axis, start = concat_axis(item), 0
    for index in concat_pieces(item):
        stop = start + args[index].shape[axis]
        place = out[(slice(None),) * axis + (slice(start, stop),)]
        pads = item.operands[index].pads or ()
        if any(any(pair) for number, pair in enumerate(pads) if number != axis):
            place[...] = item.fill
            sides = zip(pads, place.shape, strict=True)
            inside = [slice(before, extent - after) for (before, after), extent in sides]
            place = place[tuple(slice(None) if n == axis else part for n, part in enumerate(inside))]
        copy(args[index], place)
        start = stop


def _slice(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    # The operand holds just what is wanted, from the first element to the last.
    axis = int(item.attrs["axis"]) % args[0].ndim
    return [args[0][(slice(None),) * axis + (slice(None, None, int(item.attrs.get("step", 1))),)]]


def places_of(ids: Array, item: Instruction) -> tuple[Array, Array]:
    """The index of each place: its table, of those one below the other, and its row there, also from the end.

    Rows are not counted through all tables: that would be an array more, as large as the ids.
    """
    check_indices(item, ids)
    batch = int(item.attrs.get("batch", 0))
    tables = prod(ids.shape[:batch])
    return np.arange(tables)[:, None], ids.reshape(tables, prod(ids.shape[batch:]))


def _gather(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    table, batch = args[0], int(item.attrs.get("batch", 0))
    tables = table.reshape(prod(table.shape[:batch]), *table.shape[batch:])
    return [tables[places_of(args[1], item)].reshape(item.kernel_shapes[0])]


def _last_at(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    """The largest place at which each row is named; of one table by NumPy's fast loop, of one axis."""
    shape, places = item.kernel_shapes[0], places_of(args[0], item)
    found = np.full((prod(shape[:-1]), shape[-1]), -1, np.int64)
    numbers = np.arange(places[1].shape[1])
    if len(found) == 1:
        np.maximum.at(found[0], places[1][0], numbers)
    else:
        np.maximum.at(found, places, np.broadcast_to(numbers, places[1].shape))
    return [found.reshape(shape)]


def _top(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    axis, k = int(item.attrs["axis"]), int(item.attrs["k"])
    if not item.attrs["largest"]:
        return [np.argsort(args[0], axis, kind="stable").take(range(k), axis)]
    # From the other end: negatives would turn neither the least whole number nor what is no number.
    places = np.flip(np.argsort(np.flip(args[0], axis), axis, kind="stable"), axis)
    return [args[0].shape[axis] - 1 - places.take(range(k), axis)]


KERNELS: Mapping[str, Run] = {
    "Identity": lambda args, item: args,
    "Pad": lambda args, item: args,  # the operand comes padded
    "Transpose": lambda args, item: [args[0].transpose(item.attrs["perm"])],
    "Reshape": lambda args, item: [args[0].reshape(item.kernel_shapes[0])],
    "Expand": lambda args, item: [np.broadcast_to(args[0], item.kernel_shapes[0])],
    "Reverse": lambda args, item: [np.flip(args[0], item.attrs["axis"])],
    **{"Slice": _slice, "Gather": _gather, "LastAt": _last_at, "Top": _top},
}
