"""Inputs on which a module is compared with its file: two sizes of each open axis, and numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod

import torch
from torch import Tensor

from oocdl.graph.onnx.input_sizes import Condition
from oocdl.pytorch.study.freedom import BATCH, Axis

_EXTENTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192)
_LEAST = 8
"""Smaller extents are tried last: windows would see little else than padding."""
_FAR = ((33, 20), (40, 24), (48, 32), (80, 48), (96, 64))
"""Extents that are far from the small ones: a number that code makes of sizes differs there."""
_FAR_BATCH = 9
_MOST_PRODUCTS = 300_000_000
"""Products in a forward pass at far sizes, as estimated; a pass of more is left out."""
_LEAST_PARAMETERS = 1000
Shapes = Mapping[str, tuple[int, ...]]
Works = Callable[[Shapes], Sequence[tuple[int, ...]] | None]
"""Returns the shapes of the outputs for inputs of such shapes; None if the module cannot be called so."""


@dataclass(frozen=True)
class Sizes:
    """Two sets of shapes, in which every open axis has two sizes."""

    first: Shapes
    second: Shapes
    outputs: Sequence[tuple[int | str, ...]] = ()
    """Sizes of each output; "" where they differ between the two."""


def choose(
    example: Shapes,
    names: Mapping[Axis, str],
    conditions: Sequence[Condition],
    works: Works,
    parameters: int = 0,
) -> Sizes | None:
    """Return sizes that the conditions allow and the module takes; None if none are found.

    ``names``: (input, axis) -> the name of its size, for the axes that are open. Of batches, the first is 9
    and the second 1, or 2 where the module refuses 1; extents are small in the first, and those of the
    example or other far ones in the second. Where a module of so many ``parameters`` would compute too long,
    both are small.
    """
    given = {name: example[title][axis] for (title, axis), name in names.items()}
    titles = [name for name in given if name != BATCH]

    def takes(extents: Mapping[str, int], batch: int) -> tuple[Shapes, Sequence[tuple[int, ...]]] | None:
        sizes = {**extents, BATCH: batch} if BATCH in given else dict(extents)
        asked = {name: max(size, 2) if name == BATCH else size for name, size in sizes.items()}
        if not all(item.holds(asked) for item in conditions):
            return None
        shapes = {
            name: tuple(sizes.get(names.get((name, axis), ""), size) for axis, size in enumerate(shape))
            for name, shape in example.items()
        }
        returned = works(shapes)
        return None if returned is None else (shapes, returned)

    def is_cheap(extents: Mapping[str, int], batch: int) -> bool:
        sizes = {**extents, BATCH: batch}
        places = 0
        for name, shape in example.items():
            alone = [1 if len(shape) < 4 or axis == 1 else size for axis, size in enumerate(shape)]
            places += prod(sizes.get(names.get((name, axis), ""), n) for axis, n in enumerate(alone))
        return places * max(parameters, _LEAST_PARAMETERS) <= _MOST_PRODUCTS

    for small, large in _pairs(titles, given, conditions):
        first = takes(small, 2)
        many = takes(small, _FAR_BATCH) if first and BATCH in given and is_cheap(small, _FAR_BATCH) else None
        first = many or first
        for batch in (1, 2 if many else 3):
            second = takes(large, batch) if first else None
            if first and second and _ranks(first[1]) == _ranks(second[1]):
                tried = (takes(one, batch) for one in _far(titles, given, large) if is_cheap(one, batch))
                second = next((far for far in tried if far and _ranks(far[1]) == _ranks(first[1])), second)
                pairs = (zip(*shapes, strict=True) for shapes in zip(first[1], second[1], strict=True))
                outputs = [tuple(a if a == b else "" for a, b in pair) for pair in pairs]
                return Sizes(first[0], second[0], outputs)
    return None


def _ranks(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    return [len(shape) for shape in shapes]


def _far(titles: Sequence[str], own: Mapping[str, int], near: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield extents that are far from those that are near: first with those of the example that are."""
    for pair in _FAR if titles else ():
        far = {name: pair[place % 2] for place, name in enumerate(titles)}
        if min(pair) > max(near.values()):
            yield {name: max(size, own[name]) for name, size in far.items()}
            yield far


def _pairs(
    titles: Sequence[str], own: Mapping[str, int], conditions: Sequence[Condition]
) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """Yield extents for both calls, of those that the conditions on single axes allow."""
    if not titles:
        yield {}, {}
        return
    known = sorted({*_EXTENTS, *(own[name] for name in titles)})
    names = [{*re.findall(r"\w+", item.text)} & own.keys() for item in conditions]
    alone = {
        name: [item for item, used in zip(conditions, names, strict=True) if used == {name}]
        for name in titles
    }
    fit = {name: [n for n in known if all(item.holds({name: n}) for item in alone[name])] for name in titles}
    tried = []
    for calls in (*_swapped(len(titles), known), *_in_order([own[name] for name in titles], known)):
        made = [
            [next((n for n in fit[name] if n >= size), 0) for name, size in zip(titles, call, strict=True)]
            for call in calls
        ]
        if all(0 < one != two > 0 for one, two in zip(*made, strict=True)) and made not in tried:
            tried.append(made)
            yield dict(zip(titles, made[0], strict=True)), dict(zip(titles, made[1], strict=True))


def _swapped(axes: int, known: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield extents for both calls: in each, neighbouring axes differ."""
    for pair in sorted(combinations(known, 2), key=lambda pair: (pair[0] < _LEAST, pair[0] * pair[1])):
        yield [pair[place % 2] for place in range(axes)], [pair[1 - place % 2] for place in range(axes)]


def _in_order(own: Sequence[int], known: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield extents whose order is that of the example in both calls, for code that compares axes."""
    for sign, step in product((1, -1), (1, 2, 3)):
        ranks = sorted(range(len(own)), key=lambda place: (own[place], sign * place))
        for start in range(len(known) - step * len(own)):
            places = [start + step * ranks.index(place) for place in range(len(own))]
            yield [known[at] for at in places], [known[at + step] for at in places]


_MOST_ROWS = 64
_WHOLE, _BYTE = (-100, 100), (0, 255)
"""Least and largest of whole numbers that look up nothing."""
_TRUE = 0.7
"""Share of the flags that are set: a mask that hides everything gives no numbers."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The numbers that inputs may hold."""

    dtypes: Mapping[str, torch.dtype]
    rows: int = 2
    """Whole numbers are smaller: rows of the smallest table that they look up."""
    special: tuple[int, ...] = ()
    """Whole numbers that have to be among them, such as rows of padding."""

    wide: bool = False
    """Whether whole numbers look up nothing, and may be any: so they are in all calls but the first."""
    all_set: bool = False
    """Whether flags and whole numbers are all 1, as masks that hide nothing."""

    def inputs(
        self, shapes: Shapes, dtype: torch.dtype, seed: int, *, ties: bool = False, positive: bool = False
    ) -> dict[str, Tensor]:
        """Return inputs of these shapes, floating-point ones in ``dtype``.

        ``ties``: of whole numbers, half of the last axis zeros, as images with a background are.
        """
        random = torch.Generator().manual_seed(seed)

        def numbers(kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
            if self.all_set and not kind.is_floating_point:
                return torch.ones(shape, dtype=kind)
            if kind == torch.bool:
                return torch.rand(shape, generator=random) < _TRUE
            if not kind.is_floating_point and self.wide and seed:
                low, high = _BYTE if kind == torch.uint8 else _WHOLE
                ids = torch.randint(low, high + 1, shape, generator=random)
                ids.view(-1)[: min(ids.numel(), 2)] = torch.tensor((low, high))[: ids.numel()]
                return (ids.abs() if positive else ids).to(kind)
            if not kind.is_floating_point:
                ids = torch.randint(0, max(min(self.rows, _MOST_ROWS), 1), shape, generator=random)
                for place, number in enumerate(self.special[: ids.numel()]):
                    ids.view(-1)[place] = number
                return ids.to(kind)
            x = torch.randn(shape, generator=random, dtype=torch.float64)
            if ties:
                x = x.mul_(1.5).round_()
                x[..., : shape[-1] // 2 if shape else 0] = 0.0
            return (x.abs_().add_(0.1) if positive else x).to(dtype)

        return {name: numbers(self.dtypes[name], shape) for name, shape in shapes.items()}
