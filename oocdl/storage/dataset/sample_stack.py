"""Samples that have an array each, in one group a sample, seen as one array with the sample axis first.

Samples may differ in size. A view has one size for all of them: a smaller sample stands in its middle, as in
nnU-Net, and what is around it is ``pad``; of a larger one the middle is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import zarr

from oocdl.errors import DatasetError
from oocdl.graph.ir.array_layout import Array
from oocdl.graph.ir.index import Region, intersect, is_empty, moved, region_shape, within
from oocdl.storage.dataset.chunk_store import ChunkList
from oocdl.storage.dataset.data_array import DataArray, Shape, Source
from oocdl.storage.dataset.ome_zarr import Sample

MARK, KIND = "oocdl", "kind"
"""Attribute of a group whose samples are groups: a mapping whose ``samples`` names them, in order, and whose
``kind`` says who wrote it."""


@dataclass(frozen=True, eq=False)
class StackedSource(Source):
    """Reads samples that have an array each, or one for all, as one array, cropped or padded to ``shape``.

    A region may lie outside of the shape, where there is more of a larger sample.
    """

    members: Sequence[DataArray]  # arrays of the samples, without a sample axis; or the one that has them all
    samples: Mapping[str, Mapping[str, Any]]  # name -> attributes; empty where all have one array
    shape: Shape  # shape of a sample in the view
    dtype: np.dtype[Any]
    pad: int = 0

    @cached_property
    def known(self) -> ChunkList:
        """The chunks of all samples that are stored. A chunk's index is (sample, number in its array)."""
        lists = [member.known for member in self.members]
        most = max(prod(one.grid) for one in lists)
        return ChunkList(
            (len(lists), most),
            np.concatenate([one.numbers + row * most for row, one in enumerate(lists)]),
            np.concatenate([one.sizes for one in lists]),
            np.concatenate([one.marks for one in lists]),
            sum(one.missing for one in lists),
        )

    @property
    def tells(self) -> str:
        return self.members[0].source.tells

    @property
    def digest(self) -> str:
        facts = [(member.name, member.shape) for member in self.members]
        return hashlib.blake2b(repr(facts).encode(), digest_size=6).hexdigest()

    def place(self, number: int) -> str:
        row, chunk = divmod(number, self.known.grid[1])
        return self.members[row].source.place(chunk)

    def content(self, place: int, pieces: int) -> Iterator[bytes]:
        row, chunk = divmod(int(self.known.numbers[place]), self.known.grid[1])
        member = self.members[row]
        inner = member.known.place(chunk)
        assert inner is not None
        yield from member.source.content(inner, pieces)

    def box(self, row: int) -> Region:
        """Return where in the view a sample stands; it may begin or end outside."""
        own = self.members[row].shape if self.samples else self.members[0].shape[1:]
        starts = ((mine - its) // 2 for mine, its in zip(self.shape, own, strict=True))
        return tuple((start, start + its) for start, its in zip(starts, own, strict=True))

    def read(self, region: Region) -> Array:
        (first, last), inner = region[0], region[1:]
        out = np.full(region_shape(region), self.pad, self.dtype)
        for row in range(first, last):
            box = self.box(row)
            part = intersect(inner, box)
            if not is_empty(part):
                own = moved(part, [-start for start, _ in box])
                member = self.members[row if self.samples else 0]
                found = member.read(own if self.samples else ((row, row + 1), *own))
                out[row - first][within(part, inner)] = found if self.samples else found[0]
        return out


def stacked(
    name: str, where: str, members: Sequence[DataArray], samples: Mapping[str, Mapping[str, Any]]
) -> DataArray:
    """See arrays, one a sample, as one, as large as the largest. Raises DatasetError if kinds differ."""
    first = members[0]
    for member in members[1:]:
        if (member.dtype, len(member.shape)) != (first.dtype, len(first.shape)):
            raise DatasetError(
                f"samples of {where} differ: {first.name} is {first.dtype} with {len(first.shape)} axes, "
                f"{member.name} {member.dtype} with {len(member.shape)}"
            )
    shape, chunks, stored = (
        tuple(max(sizes) for sizes in zip(*(getattr(member, which) for member in members), strict=True))
        for which in ("shape", "chunks", "stored_chunks")
    )
    return DataArray(
        name=name, where=where, shape=(len(members), *shape), dtype=first.dtype,
        chunks=(1, *chunks), stored_chunks=(1, *stored),
        index_bytes=max(member.index_bytes for member in members), fill_value=first.fill_value,
        source=StackedSource(members, samples, shape, first.dtype),
    )  # fmt: skip


def members_of(array: DataArray) -> Sequence[DataArray]:
    """Return the arrays of the samples of an array, if it is made of such; else none."""
    return array.source.members if isinstance(array.source, StackedSource) and array.source.samples else ()


def samples_of(array: DataArray) -> Mapping[str, Mapping[str, Any]]:
    """Return the samples of an array and the attributes of their groups, if they have such; else none."""
    return array.source.samples if isinstance(array.source, StackedSource) else {}


def viewed(array: DataArray, space: Shape, pad: int) -> DataArray:
    """See the samples of an array with these extents of their last axes, and ``pad`` around them."""
    shape = (*array.shape[1 : len(array.shape) - len(space)], *space)
    dtype = np.result_type(array.dtype, np.min_scalar_type(pad)) if pad else array.dtype
    if dtype.kind == "f" != array.dtype.kind:  # of uint64 and a negative number; labels stay whole
        dtype = np.dtype(np.int64)
    is_stack = isinstance(array.source, StackedSource)
    source: Any = array.source if is_stack else StackedSource([array], {}, (), dtype)
    made: StackedSource = replace(source, shape=shape, dtype=dtype, pad=pad)
    boxes = [made.box(row) for row in range(array.shape[0])]
    return replace(array, shape=(array.shape[0], *shape), dtype=dtype, source=made, boxes=boxes)


def own_sized(array: DataArray, row: int) -> DataArray:
    """See an array whose samples differ in size with the size of one of them; others as they are."""
    members = members_of(array)
    return viewed(array, members[row].shape, 0) if members else array


def named_samples(group: zarr.Group, where: str) -> dict[str, Sample]:
    """Return a group's samples by name, in order; none if they are no groups. DatasetError if one is lost."""
    mark = group.attrs.get(MARK)
    names = mark.get("samples") if isinstance(mark, Mapping) else None
    if names is None or any(isinstance(found, zarr.Array) for _, found in group.arrays()):
        return {}
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DatasetError(f"{where} names no samples in its attribute {MARK!r}: a list of groups is due")
    odd = [name for name in names if "/" in name or name.startswith(".")]
    if odd:
        raise DatasetError(f"{where} names a sample {odd[0]!r}: a sample is a group right below it")
    lost = [name for name in names if not isinstance(group.get(name), zarr.Group)]
    if lost or len(set(names)) < len(names):
        raise DatasetError(f"{where} names a sample {(lost or names)[0]!r} that is not there, or twice")
    groups: dict[str, Any] = dict(group.groups())
    return {name: Sample(dict(groups[name].attrs), dict(groups[name].arrays()), {}) for name in names}
