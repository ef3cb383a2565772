"""Random numbers by key and counter: the same wherever, and in whatever order, they are drawn."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.graph.ir.index import Region, region_shape

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


class Draws:
    """A series of random numbers that its key alone determines.

    >>> Draws(0, "a").uniform() == Draws(0, "a").uniform() != Draws(1, "a").uniform()
    True
    """

    def __init__(self, *key: object) -> None:
        self.key, self._count = "/".join(map(str, key)), 0

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return the next number, uniform in [low, high)."""
        self._count += 1
        digest = hashlib.blake2b(f"{self.key}/{self._count}".encode(), digest_size=8).digest()
        return low + (high - low) * ((int.from_bytes(digest, "little") >> 11) * 2.0**-53)

    def whole(self, count: int) -> int:
        """Return the next number as a whole one, from 0 to ``count - 1``."""
        return int(self.uniform() * count)

    def each(self, count: int, low: float, high: float, apart: bool) -> tuple[float, ...]:
        """Return a number for each of ``count`` channels: one for all, or (``apart``) one each."""
        if apart:
            return tuple(self.uniform(low, high) for _ in range(count))
        return (self.uniform(low, high),) * count


def bits(key: str, shape: Shape, region: Region) -> npt.NDArray[np.uint64]:
    """Return 64 random bits by global index: splitmix64 (Steele, Lea, Flood 2014) of a keyed counter."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    index = np.full((), int.from_bytes(digest, "little"), np.uint64)
    stride = 1
    with np.errstate(over="ignore"):
        for axis in reversed(range(len(shape))):
            start, stop = region[axis]
            steps = np.arange(start, stop, dtype=np.uint64) * np.uint64(stride)
            steps = steps * np.uint64(0x9E3779B97F4A7C15)
            index = index + steps.reshape((-1,) + (1,) * (len(shape) - 1 - axis))
            stride *= shape[axis]
        z: Any = np.array(np.broadcast_to(index, region_shape(region)))
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    found: npt.NDArray[np.uint64] = z
    return found


def uniform(key: str, shape: Shape, region: Region) -> Array:
    """Return float64 numbers uniform in [0, 1) by global index, of 24 random bits each."""
    return (bits(key, shape, region) >> np.uint64(40)).astype(np.float64) * 2.0**-24


def normal(key: str, shape: Shape, region: Region) -> Array:
    """Return float32 numbers of the standard normal distribution by global index (Box and Muller 1958)."""
    both = bits(key, shape, region)
    # From (0, 1], so that the logarithm is finite: no number is beyond 5.8 standard deviations.
    radius = ((both >> np.uint64(40)).astype(np.float32) + np.float32(1)) * np.float32(2.0**-24)
    np.log(radius, out=radius)
    radius *= np.float32(-2)
    np.sqrt(radius, out=radius)
    angle = (both & np.uint64(0xFFFFFF)).astype(np.float32) * np.float32(2.0**-24 * 2 * np.pi)
    radius *= np.cos(angle, out=angle)
    return radius
