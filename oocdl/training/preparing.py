"""What is done to samples before the network reads them: checked before a run, and measured then."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from oocdl.augmentation.crop import crop_of, foreground_voxels
from oocdl.augmentation.nnunet import transforms_of
from oocdl.augmentation.normalization import Blocks, moments, numbers_of
from oocdl.augmentation.preparation import CHAIN_BYTES, Preparation, is_moved
from oocdl.config import Settings, plain
from oocdl.errors import InputError, StoreError
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import Region, region_shape, whole
from oocdl.graph.onnx.reader import OnnxModel, Port
from oocdl.ops.loss_functions import labels_of, reads_labels
from oocdl.planning.binding import Binding, Target
from oocdl.planning.sample_sizes import Sized
from oocdl.runtime.inputs import READ_CHUNKS, Feed, read_blocks
from oocdl.storage.dataset.dataset import DataArray, Dataset
from oocdl.storage.dataset.sample_stack import own_sized
from oocdl.storage.run.run_store import RunStore
from oocdl.storage.run.sealed_files import SAMPLES, understood

Say = Callable[[str], None]
CHUNK_COPIES = 3
"""Samples of one large chunk are read again for each part of a chain: parts are to be as large as that."""


def preparation_of(
    model: OnnxModel, sizes: Sized, settings: Settings, further: Sized | None = None
) -> Preparation:
    """Return what ``scale``, ``normalize`` and ``augment`` ask for, not measured yet. Raises InputError."""
    binding, validation = sizes.bindings[""], None if further is None else further.bindings[""]
    views = {**sizes.views, **(further.views if further else {})}
    made = Preparation(settings.scale or {}, views=views)
    if settings.normalize is None and settings.augment is None:
        return made
    images = {one.name: one for one in model.inputs if one.dtype.startswith("float") and len(one.dims) > 2}
    if not images:
        option = "augment" if settings.normalize is None else "normalize"
        raise InputError(f"{option} is for images: the model has no input with spatial axes; leave it out")
    methods = _methods(images, binding, settings.normalize)
    ported = {name: methods.get(binding.inputs[name]) for name in images}
    counts: dict[str, tuple[int, int]] = {}
    for one in filter(None, (binding, validation)):
        for name, port in images.items():
            mine, method = one.inputs[name], ported[name]
            shape = one.arrays[mine].shape
            counts[mine] = shape[0], shape[1] if len(shape) == len(port.dims) else 1
            if method == "ct" and one is validation:  # normalised by the numbers of what is trained on
                its = binding.inputs[name]
                views = {mine: its, **{view: its if of == mine else of for view, of in views.items()}}
            elif method is not None:
                methods[mine] = method
    rows = {name: 1 if method == "ct" else counts[name][0] for name, method in methods.items()}
    numbers = {name: np.zeros((count, counts[name][1], 4)) for name, count in rows.items()}
    shapes = {name: binding.arrays[binding.inputs[name]].shape for name in images}
    extents = {name: shapes[name][2 - len(port.dims) :] for name, port in images.items()}
    made = replace(made, views=views, methods=methods, numbers=numbers, spatial=next(iter(extents.values())))
    if "ct" in methods.values() and binding.targets:
        made = replace(made, foreground=_foreground(binding, made.spatial).array)
    if settings.augment is None:
        return made
    for space in sizes.trained_spaces or (made.spatial,):
        for transform in transforms_of(settings.augment, space):
            transform.check(space)
    return _with_transforms(made, binding, settings, extents, counts)


def _with_transforms(
    made: Preparation,
    binding: Binding,
    settings: Settings,
    extents: Mapping[str, tuple[int, ...]],
    counts: Mapping[str, tuple[int, int]],
) -> Preparation:
    """Return the same with the transforms of ``augment``; ``counts`` are rows and channels of arrays."""
    if len(set(extents.values())) > 1:
        text = ", ".join(f"'{name}' has {list(found)}" for name, found in extents.items())
        raise InputError(f"augment needs images of equal spatial extents: {text}; leave it out")
    transforms, crop = transforms_of(settings.augment, made.spatial), crop_of(settings.augment)
    if crop is not None and crop.foreground:
        target = _foreground(binding, made.spatial)
        labels = labels_of(target.spec, (1, 2, 1), (1, 1))  # of any shapes
        ignored = (labels and labels.ignore_index) or 0
        made = replace(made, foreground=target.array, ignored=ignored, voxels=[()] * binding.samples)
    read = sorted({name for target in binding.targets for name in target.read})
    for name in read if any(transform.spatial for transform in transforms) else ():
        shape, space = binding.arrays[name].shape[1:], list(made.spatial)
        if len(shape) > 1 and not is_moved(shape, made.spatial):
            raise InputError(
                f"augment moves voxels of images of {space}, and cannot move those of the target "
                f"'{name}', whose samples have the shape {list(shape)}; leave out transforms that are spatial"
            )
    largest = max(prod(binding.arrays[name].chunks) for name in binding.used)
    largest_bytes = CHUNK_COPIES * np.dtype(settings.dtype).itemsize * largest
    made = replace(made, transforms=transforms, chain_bytes=max(CHAIN_BYTES, largest_bytes))
    if not made.needs_ranges:
        return made
    names = [binding.inputs[port] for port in extents]
    return replace(made, ranges={name: np.zeros((*counts[name], 3)) for name in names})


def _methods(
    images: Mapping[str, Port], binding: Binding, asked: str | Mapping[str, str] | None
) -> dict[str, str]:
    arrays = [binding.inputs[name] for name in images]
    if not isinstance(asked, Mapping):
        return {} if asked is None else dict.fromkeys(arrays, asked)
    for name in asked:
        if name not in arrays:
            raise InputError(f"normalize names '{name}'; images that are inputs are: {', '.join(arrays)}")
    return dict(asked)


def _foreground(binding: Binding, spatial: tuple[int, ...]) -> Target:
    for target in binding.targets:
        if reads_labels(target.spec) and is_moved(binding.arrays[target.array].shape[1:], spatial):
            return target
    raise InputError(
        "normalize='ct' and foreground= of RandSpatialCrop take labelled voxels, and no target has a label "
        "for each voxel; use 'zscore' or 'percentiles', and leave foreground= out"
    )


def prepared(
    preparation: Preparation, store: RunStore, dataset: Dataset, trained: Sequence[int], say: Say
) -> Preparation:
    """Return the same with its tables filled, from the run or else measured, of ``trained`` rows for "ct"."""
    if not (preparation.numbers or preparation.ranges or preparation.voxels):
        return preparation
    body = store.read_sealed(SAMPLES)
    if body is None:
        say(f"reading all samples of {dataset.where} for the statistics that normalize or augment need")
        made = measured(preparation, dataset, trained)
        packed = [[_packed(places) for places in sample] for sample in made.voxels]
        tables = {"numbers": made.numbers, "ranges": made.ranges}
        store.write_sealed(SAMPLES, plain(tables) | ({"voxels": packed} if packed else {}))
        return made
    with understood(store.path):
        held = body["numbers"], body["ranges"]
        numbers, ranges = ({name: np.array(one, np.float64) for name, one in of.items()} for of in held)
        voxels = [[_unpacked(text) for text in sample] for sample in body.get("voxels", ())]
        return replace(preparation, numbers=numbers, ranges=ranges, voxels=voxels)


def with_numbers_of(preparation: Preparation, store: RunStore, arrays: Mapping[str, str]) -> Preparation:
    """Return the same with what a run knows of all its samples ("ct"); ``arrays`` has its names of arrays."""
    of_all = [name for name, method in preparation.methods.items() if method == "ct"]
    body = store.read_sealed(SAMPLES) if of_all else {}
    if body is None:
        raise StoreError(f"{store.path / SAMPLES} is lost; restore it")
    with understood(store.path):
        known = {name: np.array(body["numbers"][arrays[name]]) for name in of_all}
    return replace(preparation, numbers={**preparation.numbers, **known})


def _packed(places: Array) -> str:
    return b64encode(zlib.compress(np.diff(places, prepend=0).astype("<i8").tobytes())).decode()


def _unpacked(text: str | list[int]) -> Array:
    if isinstance(text, list):  # of an earlier version
        return np.array(text, np.int64)
    return np.cumsum(np.frombuffer(zlib.decompress(b64decode(text)), "<i8"), dtype=np.int64)


def measured(preparation: Preparation, dataset: Dataset, trained: Sequence[int] = ()) -> Preparation:
    """Return the same with its tables filled: samples are read block by block, two to five times."""
    numbers = {name: table.copy() for name, table in preparation.numbers.items()}
    ranges = {name: table.copy() for name, table in preparation.ranges.items()}
    for name, method in preparation.methods.items():
        of_all = method == "ct"
        labels = dataset.arrays[preparation.foreground] if of_all and trained else None
        for row, channel in np.ndindex(*numbers[name].shape[:2]) if trained or not of_all else ():
            rows = trained if of_all else (row,)
            passes = _passes(preparation, name, dataset.arrays[name], rows, channel, labels=labels)
            numbers[name][row, channel] = numbers_of(method, passes)
    made = replace(preparation, numbers=numbers, ranges=ranges)
    for name, table in ranges.items():
        for row, channel in np.ndindex(*table.shape[:2]):
            found = moments(_passes(made, name, dataset.arrays[name], (row,), channel, normalized=True))
            table[row, channel] = found.low, found.high, found.mean
    voxels = [_voxels(made, dataset, row) if row in trained else () for row in range(len(made.voxels))]
    return replace(made, voxels=voxels)


def _voxels(preparation: Preparation, dataset: Dataset, row: int) -> Sequence[Array]:
    own, rank = own_sized(dataset.arrays[preparation.foreground], row), len(preparation.spatial)
    scale = preparation.scale.get(own.name, 1)

    def blocks() -> Iterator[tuple[Region, Array]]:
        for part in read_blocks(whole(own.shape[1:]), own.chunks[1:], own.itemsize * own.chunks[0]):
            found = own.read(((row, row + 1), *part)).reshape(region_shape(part[-rank:]))
            yield part[-rank:], found if scale == 1 else np.rint(found * scale)

    return foreground_voxels(str(row), own.shape[-rank:], blocks(), preparation.ignored)


def _passes(
    preparation: Preparation,
    name: str,
    array: DataArray,
    rows: Sequence[int],
    channel: int,
    labels: DataArray | None = None,
    normalized: bool = False,
) -> Blocks:
    feed = Feed(array, preparation.scale.get(array.name), label=array.label)
    rank = len(preparation.spatial)
    stream = preparation.stream(name, array.shape[1:], rank) if normalized else None

    def blocks() -> Iterator[Array]:
        for row in rows:
            own = own_sized(array, row)
            inner, mask = own.shape[1:], None if labels is None else own_sized(labels, row)
            box = whole(inner) if len(inner) == rank else ((channel, channel + 1), *whole(inner[1:]))
            for part in read_blocks(box, own.chunks[1:], own.itemsize * own.chunks[0], READ_CHUNKS):
                region = ((row, row + 1), *part)
                found = own.read(region)
                used = np.empty(found.shape)
                feed.put(found, used, region)
                if stream is not None:
                    stream.normalize(used.reshape((1, -1)), row, ((channel, channel + 1), (0, used.size)))
                if mask is not None:
                    chosen = mask.read(((row, row + 1), *whole(mask.shape[1:-rank]), *part[-rank:])) > 0
                    used = used[chosen.reshape(used.shape)]
                yield used

    return blocks
