"""A transform, the same with its random parameters drawn, and regions of a sample.

A sample has its channels first, then its spatial axes; so have all regions here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, ClassVar

from oocdl.augmentation.draws import Array, Draws, Shape
from oocdl.errors import InputError
from oocdl.graph.ir.index import Region, contiguous_blocks, region_shape

PIECE_VOXELS = 1 << 16  # computed at once, where that takes memory beside input and output


@dataclass(frozen=True)
class Sample:
    """The facts of a sample that parameters are drawn by."""

    channels: int
    spatial: Shape
    ranges: Array | None = None  # minimum, maximum and mean as normalised, of shape (channels, 3)
    box: Region = ()  # where the sample that a crop is of stands in the view that is read
    voxels: Sequence[Array] = ()  # places of foreground voxels in it, of each class that it has

    @property
    def shape(self) -> Shape:
        return (self.channels, *self.spatial)


class Operation(ABC):
    """A transform whose parameters are drawn: a function from samples to samples of the same shape."""

    copies: ClassVar[int] = 2  # arrays of the size of its input, and of its output, that are there at once

    def source(self, region: Region) -> Region:
        """Return the region of the input that a region of the output depends on."""
        return region

    @abstractmethod
    def apply(self, block: Array, source: Region, region: Region) -> Array:
        """Compute ``region`` of the output from ``source`` of the input, which may be written over."""

    def carried(self, ranges: Array) -> Array:
        """Return the ``Sample.ranges`` of the output from those of the input."""
        return ranges


class Transform(ABC):
    """A random change of samples. All arguments are MONAI's, and mean what they mean there."""

    prob: float  # the probability that a sample is changed

    spatial: ClassVar[bool] = False
    """Whether it moves voxels, of labels as well; else it changes the numbers of inputs."""
    needs_ranges: ClassVar[bool] = False
    ranks: ClassVar[tuple[int, ...]] = (1, 2, 3)  # numbers of spatial axes that it can do
    ranged: ClassVar[Mapping[str, float | None]] = {}  # argument that is a range -> the least of it

    def __post_init__(self) -> None:
        if not isinstance(self.prob, Real) or not 0 <= self.prob <= 1:
            raise self._refuse(f"takes a prob from 0 to 1, got {self.prob!r}")
        for name in self.ranged:
            self._ends(name)

    def draw(self, draws: Draws, sample: Sample) -> Operation | None:
        """Draw whether a sample is changed, and the parameters; None: it stays as it is."""
        return self.operation(draws, sample) if draws.uniform() < self.prob else None

    @abstractmethod
    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        """Draw the parameters for a sample that is to be changed; None: they change nothing."""

    def check(self, spatial: Shape) -> None:
        """Raise InputError if samples of these spatial extents cannot be transformed."""
        if len(spatial) not in self.ranks:
            known = " or ".join(map(str, self.ranks))
            raise self._refuse(f"takes {known} spatial axes, there are {len(spatial)}")

    def _refuse(self, why: str) -> InputError:
        return InputError(f"augment: {type(self).__name__} {why}")

    def _ends(self, name: str) -> tuple[float, float]:
        return self._range(name, getattr(self, name), self.ranged[name])

    def _range(self, name: str, value: Any, least: float | None = None) -> tuple[float, float]:
        """Return the ends of a range: a pair, or one number f for (-f, f), or for (least, f)."""
        pair = (-value if least is None else least, value) if isinstance(value, Real) else value
        numbers = isinstance(pair, Sequence) and all(isinstance(end, Real) and isfinite(end) for end in pair)
        if not numbers or len(pair) != 2 or any(isinstance(end, bool) for end in pair):
            raise self._refuse(f"takes a number or a pair of numbers for {name}, got {value!r}")
        low, high = sorted(map(float, pair))
        if least is not None and low < 0:
            raise self._refuse(f"takes no negative numbers for {name}, got {value!r}")
        return low, high


def halves(region: Region) -> tuple[Region, Region]:
    """Cut a region in the middle of its longest axis."""
    extents = region_shape(region)
    axis = extents.index(max(extents))
    low, high = region[axis]
    middle = low + (extents[axis] + 1) // 2
    cut = ((low, middle), (middle, high))
    first, second = ((*region[:axis], part, *region[axis + 1 :]) for part in cut)
    return first, second


def parts(region: Region, most: int = PIECE_VOXELS) -> Iterator[Region]:
    """Cut a region into parts of so many elements at most, the first axes first."""
    return contiguous_blocks(region, 1, most)
