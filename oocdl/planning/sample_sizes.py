"""Samples of different sizes: the size that each is padded to, and a binding for each of these sizes.

A size is padded to the smallest multiples with which the network takes it: those of its strides. What is
around a sample counts in no loss: its labels are the ones that the loss ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import gcd, prod

from oocdl.augmentation.crop import crop_of
from oocdl.augmentation.preparation import is_moved
from oocdl.config import Settings
from oocdl.errors import DatasetError, InputError, ModelError
from oocdl.graph.ir.graph import Shape
from oocdl.graph.onnx.reader import OnnxModel
from oocdl.ops import RULES
from oocdl.ops.loss_functions import labels_of
from oocdl.planning.binding import Binding, heads_of
from oocdl.storage.dataset.data_array import DataArray
from oocdl.storage.dataset.dataset import Dataset, View, apart
from oocdl.storage.dataset.sample_stack import members_of

MOST_MULTIPLE = 256
"""Extents are padded to multiples of no more than this."""
ODD_FACTORS = (3, 5, 9, 15, 25, 27, 45, 75, 81, 125, 135, 225, 243)
"""Factors of a multiple beside powers of two."""
PROBED_SIZES = 4
"""Number of distinct sizes up to which all are tried with a multiple."""


@dataclass(frozen=True, eq=False)
class Sized:
    """A dataset whose samples differ in size, in views of one size each."""

    dataset: Dataset
    bindings: Mapping[str, Binding]
    """Label of a size, such as "96x112x80" -> binding to its views; the largest that is trained is ""."""
    labels: tuple[str, ...]
    """The label of each sample's size; empty where all have one size."""
    views: Mapping[str, str] = field(default_factory=dict)
    """View -> the array that it is one of."""
    spaces: tuple[Shape, ...] = ()
    """Padded extents of samples, the main ones first; none where all have one size."""
    trained_spaces: tuple[Shape, ...] = ()
    """Those of them that samples to train on have, or that of their crops."""
    multiple: tuple[int, ...] = ()
    """What extents are padded to multiples of, by axis."""
    crops: Binding | None = None
    """The binding to crops of samples, where these are trained on; None: samples are whole."""

    def apart(self, name_of: Callable[[str], str] = apart) -> Sized:
        """Return the same by other names of arrays; by default by those in ``Dataset.with_validation``."""
        bindings = {label: one.apart(name_of) for label, one in self.bindings.items()}
        return replace(self, bindings=bindings, views={name_of(v): name_of(a) for v, a in self.views.items()})


def sized(
    model: OnnxModel,
    dataset: Dataset,
    binding: Binding,
    settings: Settings,
    trained: Sequence[int],
    *,
    least: Sequence[int] = (),
    alike: Collection[str] = (),
    whole: bool = True,
) -> Sized:
    """Return a dataset in views of one size each; as it is if all its samples have one array.

    It is left as it is, too, if no pass takes its samples ``whole``.

    ``trained`` are the samples that the largest size is one of. Extents are padded to multiples of ``least``
    at least, which another dataset of the run is padded to. ``alike`` are outputs that have the extents of
    inputs, beside those whose targets say so. Raises DatasetError if inputs and targets of
    a sample differ in size, or the network takes no multiple of sizes; InputError if a loss cannot ignore
    what is around a sample.
    """
    arrays = {name: binding.arrays[name] for name in sorted(binding.used)}
    if not whole or not any(members_of(array) for array in arrays.values()):
        return Sized(dataset, {"": binding}, ())
    axes = max(len(port.dims) for port in model.inputs) - 2
    spaces = _spaces(binding, axes)
    spatial = [name for name, array in arrays.items() if _is_spatial(array, spaces)]
    _check_alike({name: array for name, array in arrays.items() if name not in spatial})
    alike = {*alike, *_alike(binding, spatial)}

    def wrong(space: Shape) -> Exception | None:
        views = [View(name, name, space, 0) for name in spatial]
        one = binding.renamed(lambda name: name, dataset.with_views(views).arrays)
        return _why_not(model, one, settings, alike, space)

    asked = least or [settings.pad_to_multiple_of or 1] * axes
    multiple = _multiple(wrong, sorted(set(spaces)), asked)
    padded = [_padded(space, multiple) for space in spaces]
    pads = _pads(binding, spatial, padded != spaces)
    largest = max((padded[row] for row in trained), key=lambda space: (prod(space), space))
    distinct = [largest, *sorted({*padded} - {largest}, key=lambda space: (-prod(space), space))]
    names = {space: "" if space == largest else "x".join(map(str, space)) for space in distinct}
    views = [
        View(name, _view_name(name, names[space]), space, pads[name])
        for space in distinct
        for name in spatial
    ]
    made = dataset.with_views(views)

    def of(label: str) -> Binding:
        return binding.renamed(lambda name: _view_name(name, label) if name in spatial else name, made.arrays)

    labels = tuple(names[space] for space in padded)
    bindings = {label: of(label) for label in names.values()}
    return Sized(
        dataset=made,
        bindings=bindings,
        labels=labels,
        views={view.name: view.array for view in views},
        spaces=tuple(distinct),
        trained_spaces=tuple(dict.fromkeys(padded[row] for row in trained)),
        multiple=tuple(multiple),
    )


def cropped(model: OnnxModel, sizes: Sized, settings: Settings, trained: Sequence[int]) -> Sized:
    """Return the same with a binding to crops, if ``augment`` begins with one: views of the crop's size.

    ``trained`` are the samples that are cropped. Raises InputError if the crop has another number of axes,
    the network does not take its size, or a loss cannot ignore what is around a smaller sample.
    """
    crop, binding = crop_of(settings.augment), sizes.bindings[""]
    if crop is None:
        return sizes
    axes = max(len(port.dims) for port in model.inputs) - 2
    roi = crop.size(axes)
    crop.check(roi)
    arrays = {name: binding.arrays[name] for name in sorted(binding.used)}
    first = next(arrays[binding.inputs[port.name]] for port in model.inputs if len(port.dims) == axes + 2)
    spaces = _spaces(binding, axes) if members_of(first) else [first.shape[-axes:]] * binding.samples
    spatial = [name for name, array in arrays.items() if _is_spatial(array, spaces)]
    is_padded = any(its < mine for row in trained for its, mine in zip(spaces[row], roi, strict=True))
    pads = _pads(binding, spatial, is_padded)

    def of(space: Shape) -> tuple[Dataset, Binding]:
        views = [View(name, f"/crop/{name}", space, pads[name]) for name in spatial]
        made = sizes.dataset.with_views([*sizes.dataset.spec.views, *views])
        name_of = {view.array: view.name for view in views}
        return made, binding.renamed(lambda name: name_of.get(name, name), made.arrays)

    def wrong(space: Shape) -> Exception | None:
        return _why_not(model, of(space)[1], settings, _alike(binding, spatial), space)

    multiple = _multiple(wrong, [roi], [1] * axes)
    if _padded(roi, multiple) != roi:
        raise InputError(
            f"augment: RandSpatialCrop cuts {list(roi)}, and the network takes multiples of {multiple}"
        )
    dataset, crops = of(roi)
    views = {view.name: view.array for view in dataset.spec.views}
    return replace(sizes, dataset=dataset, views=views, trained_spaces=(roi,), crops=crops)


def _alike(binding: Binding, spatial: Collection[str]) -> set[str]:
    """Return the outputs whose targets say that they have the extents of inputs."""
    return {one.output for one in binding.targets if one.array in spatial and not one.resized}


def _view_name(name: str, label: str) -> str:
    """Return the name of a view; it begins with a slash, as no name of an array does."""
    return f"/{label}/{name}" if label else name


def _padded(space: Shape, multiple: Sequence[int]) -> Shape:
    return tuple(-(-extent // step) * step for extent, step in zip(space, multiple, strict=True))


def _spaces(binding: Binding, axes: int) -> list[Shape]:
    """Return the extents of each sample. Raises DatasetError if its inputs differ."""
    if axes < 1:
        raise DatasetError("samples in groups of their own are for networks with spatial axes")
    found: list[Shape] = []
    for row in range(binding.samples):
        members = [members_of(binding.arrays[name])[row] for name in binding.inputs.values()]
        shapes = {member.name: member.shape[-axes:] for member in members}
        if len(set(shapes.values())) > 1:
            raise DatasetError(f"inputs of one sample differ in size: {_listed(shapes)}")
        found.append(next(iter(shapes.values())))
    return found


def _listed(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} has {list(shape)}" for name, shape in shapes.items())


def _is_spatial(array: DataArray, spaces: Sequence[Shape]) -> bool:
    """Whether the samples of an array have the extents of the inputs."""
    members = members_of(array)
    if not members:
        return is_moved(array.shape[1:], spaces[0])
    return all(member.shape[-len(space) :] == space for member, space in zip(members, spaces, strict=True))


def _check_alike(arrays: Mapping[str, DataArray]) -> None:
    """Raise DatasetError if samples of other arrays differ in size."""
    for array in arrays.values():
        first, *others = members_of(array)
        for other in others:
            if other.shape != first.shape:
                shapes = {first.name: first.shape, other.name: other.shape}
                raise DatasetError(
                    f"{array.label}: samples differ in size, and not as the inputs do: {_listed(shapes)}"
                )


def _multiple(
    why_not: Callable[[Shape], Exception | None], spaces: Sequence[Shape], asked: Sequence[int]
) -> list[int]:
    """Return the least multiples of ``asked`` by 2, 3 and 5, one an axis, that the network takes.

    ``why_not`` says why it does not take a size. Powers of two come first; if none will do, or one that
    does is no multiple of the strides, as chance of a few sizes may have it, others have to take any size.
    """
    known = cache(why_not)

    def wrong(multiple: Sequence[int]) -> Exception | None:
        return next(filter(None, map(known, _probes(spaces, multiple))), None)

    def wrong_at_any(multiple: Sequence[int]) -> Exception | None:
        return known(_any_size(spaces, multiple))

    powers = [[least << power for least in asked] for power in range(MOST_MULTIPLE.bit_length())]
    multiple, test = next((each for each in powers if wrong(each) is None), None), wrong
    step = multiple[0] // asked[0] if multiple else MOST_MULTIPLE + 1
    if step > 2 and (multiple is None or wrong_at_any(multiple) is not None):
        scales = [odd << (((step - 1) // odd).bit_length() - 1) for odd in ODD_FACTORS if odd < step]
        others = ([scale * least for least in asked] for scale in scales)
        other = next((each for each in others if wrong_at_any(each) is None), None)
        multiple, test = (other, wrong_at_any) if other else (multiple, wrong)
    if multiple is None:
        first = wrong(asked)
        raise DatasetError(f"the network takes samples of no size here, padded or not: {first}") from first
    for axes in (range(len(asked)), *([axis] for axis in range(len(asked)))):
        for prime in (2, 3, 5):
            while all(multiple[axis] % (prime * asked[axis]) == 0 for axis in axes):
                fewer = [size // prime if axis in axes else size for axis, size in enumerate(multiple)]
                if test(fewer) is not None:
                    break
                multiple = fewer
    return multiple


def _probes(spaces: Sequence[Shape], multiple: Sequence[int]) -> list[Shape]:
    """Return the sizes that show whether a network takes these extents, padded: of many, one."""
    padded = sorted({_padded(space, multiple) for space in spaces})
    return padded if len(padded) <= PROBED_SIZES else [_any_size(spaces, multiple)]


def _any_size(spaces: Sequence[Shape], multiple: Sequence[int]) -> Shape:
    """Return a size that stands for all: it is no multiple of more, by 2, 3 or 5."""
    least = min(_padded(space, multiple) for space in spaces)
    counts = (max(size // step, 7) for size, step in zip(least, multiple, strict=True))
    odd = (next(n for n in range(count, count + 7) if gcd(n, 2 * 3 * 5) == 1) for count in counts)
    return tuple(step * count for step, count in zip(multiple, odd, strict=True))


def _why_not(
    model: OnnxModel, binding: Binding, settings: Settings, alike: Collection[str], space: Shape
) -> Exception | None:
    """Say why the network does not take samples of a size, or makes outputs of another; None if it does."""
    try:
        shapes = {port.name: binding.input_shape(port, 1, settings.dims or {}) for port in model.inputs}
        needed = heads_of(model, settings.loss)
        found = model.bind(RULES, shapes, precision=settings.dtype, freeze=settings.freeze, outputs=needed)
    except (ModelError, InputError) as error:
        return error
    for output, name in found.outputs:
        shape = found.graph.values[name].shape
        if output in alike and shape[-len(space) :] != space:
            return ModelError(f"output '{output}' has {list(shape)} for samples of {list(space)}")
    return None


def _pads(binding: Binding, spatial: Sequence[str], is_padded: bool) -> dict[str, int]:
    """Return the number around the samples of each array: 0 of inputs, of labels the one that is ignored."""
    found: dict[str, int] = {}
    for target in binding.targets:
        if is_padded and target.array in spatial:
            labels = labels_of(target.spec, (1, 2, 1), (1, 1))  # of any shapes
            ignored = None if labels is None else labels.ignore_index
            if ignored is None:
                raise InputError(
                    f"samples are padded, and the loss of '{target.output}' ignores no label: take "
                    "'cross_entropy', 'dice_ce' or oocdl.losses.Dice(ignore_index=255), or write samples "
                    "of sizes that the network takes as they are, none of them below a roi_size"
                )
            is_input = target.array in binding.inputs.values()
            if is_input or found.setdefault(target.array, ignored) != ignored:
                raise InputError(
                    f"samples are padded, and array '{target.array}' is read in another way, too, so that "
                    "what is around a sample cannot be ignored; write it a second time by another name"
                )
    return dict.fromkeys(spatial, 0) | found
