"""Bytes of arrays, and the order of their axes in memory: rules that plans, engines and the tier share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Order = tuple[int, ...]
"""Axes from outermost to innermost in memory; empty: in the order of their numbers (C order)."""

PAGE_BYTES = 4096
LEAST_PAGED_BYTES = 32 << 10
"""Arrays of fewer bytes come from the heap, because pages of their own would be mostly empty."""


class DeviceArray(Protocol):
    """An array in the memory of a device, and the array of the host that is reserved for its bytes."""

    def hold(self) -> Any:
        """Return what keeps the bytes on the device as long as it is referred to; None: they have left it."""
        ...

    def settle(self) -> None:
        """Copy the bytes to the array of the host, unless they are there. Waits for the device."""
        ...


@cache
def itemsize(dtype: str) -> int:
    """Return the bytes of one element."""
    return int(np.dtype(dtype).itemsize)


def array_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of an array of ``shape``.

    >>> array_bytes((2, 3), "bfloat16")
    12
    """
    return prod(shape) * itemsize(dtype)


def footprint(nbytes: int) -> int:
    """Return the bytes of memory that an array of ``nbytes`` takes in the tier, which gives out whole pages.

    >>> footprint(100), footprint(100_000)
    (100, 102400)
    """
    return nbytes if nbytes < LEAST_PAGED_BYTES else -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def ordered(make: Callable[..., Array], shape: tuple[int, ...], dtype: npt.DTypeLike, order: Order) -> Array:
    """Make an array of ``shape`` whose axes lie in ``order`` in the memory that ``make(shape, dtype)`` gives.

    >>> ordered(np.empty, (2, 3, 4), np.uint8, (1, 2, 0)).strides
    (1, 8, 2)
    """
    return as_numbered(make(tuple(shape[axis] for axis in order) or shape, dtype), order)


def as_numbered(stored: Array, order: Order) -> Array:
    """View ``stored``, whose axes are in ``order``, with its axes in the order of their numbers."""
    return stored.transpose(_inverse(order)) if order else stored


@cache
def _inverse(order: Order) -> Order:
    """The place of each axis in ``order``: units ask for few orders, and many times."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def as_stored(array: Array, order: Order) -> Array:
    """Undo ``as_numbered``: view ``array`` with its axes in ``order``."""
    return array.transpose(order) if order else array


def in_memory_order(array: Array) -> tuple[Array, Order]:
    """View an array as C-contiguous; returns the view and the order of its axes in memory.

    Raises ValueError if the array has gaps.
    """
    if array.flags.c_contiguous:
        return array, ()
    order = tuple(sorted(range(array.ndim), key=lambda axis: (-array.strides[axis], axis)))
    stored = array.transpose(order)
    if not stored.flags.c_contiguous:
        raise ValueError("a chunk needs an array without gaps; copy it into reserved memory first")
    return stored, order
