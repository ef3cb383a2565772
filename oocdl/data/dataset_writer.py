"""``write``: the items of a PyTorch dataset, or of a loader, as a dataset that ``fit`` reads; one at a time.

Samples are stacked, a chunk of one sample each. At the first that has another shape, those that are written
become a group each: their chunks are renamed, not written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from oocdl.data.new_group import new_array, new_group, sample_chunks, write_region
from oocdl.errors import DatasetError, InputError
from oocdl.host.paths import path_of
from oocdl.report.progress import BytesBar
from oocdl.storage.dataset.sample_stack import MARK
from oocdl.storage.files import remove

Array = npt.NDArray[Any]
NAMES = ("image", "label")


def write(
    dataset: Any,
    out: str | Path,
    *,
    names: Sequence[str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> zarr.Group:
    """Write the items of a PyTorch ``Dataset`` or ``DataLoader`` as a Zarr group; returns the group.

    Samples of one shape become stacked arrays, sample axis first; of several shapes, a group a sample, with
    arrays without that axis. Items are read once, in their order; transforms act as the dataset applies
    them, so random ones are frozen. The group appears whole or not at all.

    Parameters
    ----------
    dataset
        What has ``__getitem__`` and ``__len__``, or can be iterated. An item is a dict, a tuple or one
        array; tensors, NumPy arrays and numbers are written. Of a ``DataLoader`` each batch is taken apart.
    out
        Path of the Zarr group to write.
    names
        Names of the arrays: of the members of a tuple (default: image, label), or those to take of a dict
        (default: all).
    overwrite
        Replace what ``convert`` or ``write`` wrote to ``out`` before.
    progress
        Show how far it is, on a terminal.

    Raises
    ------
    DatasetError for an item that is of other types than the first, no number, or not finite; InputError for
    names that do not fit; StoreError if something is at ``out``.

    Examples
    --------
    >>> oocdl.data.write(torch_dataset, "data.zarr")  # doctest: +SKIP
    """
    target = path_of("out", out).expanduser()
    with new_group(target, overwrite) as (group, told), BytesBar(progress) as bar:
        writer = _Writer(group, length_hint(dataset))
        for number, item in enumerate(_items(dataset, names)):
            bar.text = f"item {number}"
            arrays = {name: _array(number, name, value) for name, value in item.items()}
            writer.add(arrays)
            bar.add(sum(array.nbytes for array in arrays.values()))
        if not writer.done:
            raise DatasetError("the dataset has no items")
        told[MARK] = writer.finish()
    return zarr.open_group(str(target), mode="r")


def _items(dataset: Any, names: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
    """Yield samples by name; those of a loader that makes batches are taken apart."""
    if isinstance(dataset, Mapping):
        raise InputError("write takes a series of items, not arrays by name, which fit takes as they are")
    if getattr(dataset, "batch_sampler", None) is None:
        iterates = hasattr(dataset, "__iter__") or not hasattr(dataset, "__len__")
        items = dataset if iterates else map(dataset.__getitem__, range(len(dataset)))
        yield from (_named(item, names) for item in items)
        return
    for batch in dataset:
        columns = _named(batch, names)
        lengths = {len(held) for held in columns.values()}
        if len(lengths) > 1:
            raise DatasetError(f"members of a batch have different lengths {sorted(lengths)}")
        for row in range(min(lengths, default=0)):
            yield {name: held[row] for name, held in columns.items()}


def _named(item: Any, names: Sequence[str] | None) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        odd = [name for name in item if {"", ".", ".."} & set(str(name).split("/"))]
        if odd:
            raise InputError(f"items have '{odd[0]}', which cannot be the name of an array; rename it")
        lost = [name for name in names or () if name not in item]
        if lost:
            raise InputError(f"items have no '{lost[0]}', only {', '.join(map(str, item))}")
        return {str(name): item[name] for name in (item if names is None else names)}
    members = tuple(item) if isinstance(item, tuple | list) else (item,)
    given = NAMES if names is None else tuple(names)
    if len(members) > len(given) or (names is not None and len(members) < len(given)):
        raise InputError(f"items have {len(members)} members; pass as many names= as that, got {list(given)}")
    return dict(zip(given, members, strict=False))


def _array(number: int, name: str, value: Any) -> Array:
    try:
        found = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DatasetError(f"'{name}' of item {number} is no array: {error}") from error
    if isinstance(value, np.ma.MaskedArray):
        raise DatasetError(f"'{name}' of item {number} is a masked array; fill it first: a.filled(..)")
    if found.dtype.kind not in "biuf":
        kind = type(value).__name__
        raise DatasetError(
            f"'{name}' of item {number} is of type {kind} ({found.dtype}); pass names= without it"
        )
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise DatasetError(f"'{name}' of item {number} has NaN or an infinite number")
    return found


class _Writer:
    """Writes samples: stacked as long as they have one shape, then a group each."""

    def __init__(self, group: zarr.Group, expected: int) -> None:
        self.group, self.root, self.expected, self.done = group, Path(group.store.root), expected, 0  # type: ignore[attr-defined]
        self.types: dict[str, np.dtype[Any]] = {}
        self.stacked: dict[str, zarr.Array[Any]] | None = {}

    def add(self, arrays: Mapping[str, Array]) -> None:
        """Write the next sample. Raises DatasetError if its arrays are others than those before."""
        types = {name: array.dtype for name, array in arrays.items()}
        self.types = self.types or types
        if types != self.types:
            raise DatasetError(
                f"item {self.done} has arrays {_told(types)}, those before {_told(self.types)}"
            )
        if self.stacked and any(self.stacked[name].shape[1:] != arrays[name].shape for name in arrays):
            self._take_apart(self.stacked)
        made = self.group.create_group(_sample(self.done)) if self.stacked is None else self.group
        for name, array in arrays.items():
            if self.stacked is None:
                array = np.atleast_1d(array)  # a number, such as a class
            chunks = sample_chunks(array.shape, array.itemsize)
            if self.stacked is None:
                single = new_array(made, name, array.shape, array.dtype, chunks)
                write_region(single, [0] * array.ndim, array)
                continue
            if name not in self.stacked:
                shape = (max(self.expected, 1), *array.shape)
                self.stacked[name] = new_array(made, name, shape, array.dtype, (1, *chunks))
            if self.done == self.stacked[name].shape[0]:
                self.stacked[name].resize((2 * self.done, *array.shape))
            write_region(self.stacked[name], [self.done, *[0] * array.ndim], array[None])
        self.done += 1

    def _take_apart(self, stacked: Mapping[str, zarr.Array[Any]]) -> None:
        for number in range(self.done):
            made = self.group.create_group(_sample(number))
            for name, array in stacked.items():
                new_array(made, name, array.shape[1:] or (1,), array.dtype, array.chunks[1:] or (1,))
                chunks, to = self.root / name / "c" / str(number), self.root / _sample(number) / name / "c"
                if array.ndim == 1:
                    to.mkdir()
                    to /= "0"
                if chunks.exists():  # else the array is empty
                    chunks.rename(to)
        for name in stacked:
            remove(self.root / name)
        self.stacked = None

    def finish(self) -> dict[str, Any]:
        """Cut arrays to their length; returns what the group's attributes are to say."""
        if self.stacked is None:
            return {"samples": [_sample(number) for number in range(self.done)]}
        for array in self.stacked.values():
            if array.shape[0] != self.done:
                array.resize((self.done, *array.shape[1:]))
        return {}


def _sample(number: int) -> str:
    return f"sample_{number:05d}"


def _told(types: Mapping[str, np.dtype[Any]]) -> str:
    return ", ".join(f"{name} {dtype}" for name, dtype in types.items())
