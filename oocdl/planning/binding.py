"""Finds the dataset array that feeds each model input, and the target that each output is compared with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from oocdl.config import Settings
from oocdl.errors import DatasetError, InputError
from oocdl.graph.ir.graph import Shape
from oocdl.graph.onnx.reader import OnnxModel, Port
from oocdl.ops.loss_functions import Loss, further_arrays, reads_labels
from oocdl.ops.losses.deep_supervision import DeepSupervision
from oocdl.ops.losses.number_losses import SAMPLE_WEIGHTS
from oocdl.storage.dataset.dataset import DataArray, Dataset, apart

IMAGE = "image"
"""The array of images in what ``oocdl.data`` writes, and in OME-Zarr."""


@dataclass(frozen=True)
class Target:
    """A head of the model: an output, the array it is compared with, and the loss that compares them."""

    output: str
    array: str
    spec: Loss
    weight: float
    """Factor of this loss in the sum of all."""
    further: Mapping[str, str]
    """Further arrays of the loss: what for -> array."""
    resized: bool = False
    """Whether its target is made from that of the first head, which is larger."""

    @property
    def read(self) -> tuple[str, ...]:
        """All arrays that the loss reads."""
        return (self.array, *self.further.values())


@dataclass(frozen=True, eq=False)
class Binding:
    """The model's inputs and heads, tied to arrays of the dataset."""

    inputs: Mapping[str, str]
    """Model input -> dataset array."""
    targets: tuple[Target, ...]
    samples: int
    """Samples of the dataset: axis 0 of every array that is used."""
    arrays: Mapping[str, DataArray]
    """All arrays of the dataset, by name."""

    @property
    def used(self) -> frozenset[str]:
        """Names of the arrays that are inputs or targets."""
        return frozenset({*self.inputs.values(), *(name for target in self.targets for name in target.read)})

    def notes(self) -> list[str]:
        """Say in a line which arrays are which inputs and targets, as far as their names do not."""
        pairs = [(array, f"input '{port}'") for port, array in self.inputs.items() if port != array]
        heads = [one for one in self.targets if one.output != one.array]
        pairs += [(one.array, f"the target of '{one.output}'") for one in heads]
        return ["dataset: " + ", ".join(f"'{array}' is {what}" for array, what in pairs)] if pairs else []

    def renamed(self, name_of: Callable[[str], str], arrays: Mapping[str, DataArray]) -> Binding:
        """Return the same binding to arrays of other names."""
        targets = (
            replace(
                target,
                array=name_of(target.array),
                further={what: name_of(name) for what, name in target.further.items()},
            )
            for target in self.targets
        )
        inputs = {port: name_of(name) for port, name in self.inputs.items()}
        return Binding(inputs, tuple(targets), self.samples, arrays)

    def apart(self, name_of: Callable[[str], str] = apart) -> Binding:
        """Return the same binding by other names of arrays; by default in ``Dataset.with_validation``."""
        return self.renamed(name_of, {name_of(name): array for name, array in self.arrays.items()})

    def input_shape(self, port: Port, batch: int, dims: Mapping[str, int]) -> Shape:
        """The shape that a model input gets with ``batch`` samples; a missing channel axis of 1 is added.

        Raises DatasetError or InputError if the array does not have the shape that the model wants.
        """
        data = self.arrays[self.inputs[port.name]]
        rank = len(port.dims)
        if len(data.shape) == rank:
            shape = (batch, *data.shape[1:])
        elif len(data.shape) == rank - 1:
            shape = (batch, 1, *data.shape[1:])
        else:
            raise DatasetError(
                f"input '{port.name}' has {rank} axes {list(port.dims)}, array '{data.name}' has "
                f"{len(data.shape)} {list(data.shape)}; they must agree (a channel axis of 1 may be left out)"
            )
        for position, dim in enumerate(port.dims):
            if isinstance(dim, str) and dim in dims and shape[position] != dims[dim]:
                raise InputError(f"dims says {dim}={dims[dim]}, array '{data.name}' says {shape[position]}")
        if rank > 2 and isinstance(port.dims[1], int) and shape[1] != port.dims[1]:
            raise DatasetError(
                f"input '{port.name}' wants {port.dims[1]} channels, array '{data.name}' "
                f"of shape {list(data.shape)} has {shape[1]}; is an axis in the wrong place?"
            )
        return shape


def bind(model: OnnxModel, dataset: Dataset, settings: Settings, with_targets: bool = True) -> Binding:
    """Tie inputs and heads to arrays: by mapping, by equal name, or as the only candidates left.

    Raises DatasetError or InputError that names what is missing or ambiguous.
    """
    arrays = dict(dataset.arrays)
    _check_names(model, settings, arrays, with_targets)
    inputs: dict[str, str] = {}
    heads = heads_of(model, settings.loss) if with_targets else {}
    for port in model.inputs:
        taken = {*inputs.values(), *heads}
        inputs[port.name] = choose("input", port.name, settings, dataset, taken, len(model.inputs) == 1)
    targets: list[Target] = []
    if with_targets:
        used = set(inputs.values())
        further = {output: further_arrays(spec, arrays) for output, (spec, _) in heads.items()}
        for output, more in further.items():
            for name, array in more.items():
                if array not in arrays:
                    what = f"{name} of the loss of '{output}' is to be array '{array}'"
                    raise DatasetError(f"{what}, the dataset has: {dataset.found}")
                used.add(array)
        deep = isinstance(settings.loss, DeepSupervision)
        for output, (spec, weight) in heads.items():
            resized = deep and bool(targets) and output not in {**arrays, **(settings.targets or {})}
            if resized:
                array = targets[0].array
            else:
                of_others = {name for name in heads if deep and name != output}
                only = deep or len(heads) == 1
                array = choose("output", output, settings, dataset, used | of_others, only)
            used.add(array)
            targets.append(Target(output, array, spec, weight, further[output], resized))
    wanted = [*inputs.values(), *(name for target in targets for name in target.read)]
    counts = {name: arrays[name].shape[0] if arrays[name].shape else 0 for name in wanted}
    if len(set(counts.values())) != 1:
        text = ", ".join(f"'{name}' has {count}" for name, count in counts.items())
        raise DatasetError(f"arrays differ in their number of samples: {text} (axis 0)")
    samples = next(iter(counts.values()))
    if samples < 1:
        raise DatasetError(f"{arrays[wanted[0]].label} has no samples")
    if settings.batch_size > samples and with_targets:
        raise InputError(
            f"batch_size must be 1...{samples} (the number of samples), got {settings.batch_size}"
        )
    whole = {inputs[port.name] for port in model.inputs if "float" not in port.dtype}
    _check_whole_numbers(whole | _of_labels(targets, arrays), settings.scale or {})
    return Binding(inputs, tuple(targets), samples, arrays)


def _check_names(
    model: OnnxModel, settings: Settings, arrays: Mapping[str, DataArray], with_targets: bool
) -> None:
    """Raise InputError if a setting names what is not there: a misspelt name must not be passed over."""
    dims = {dim for port in model.inputs for dim in port.dims if isinstance(dim, str)}
    asked: list[tuple[str, Collection[str], Collection[str]]] = [
        ("inputs", settings.inputs or {}, [port.name for port in model.inputs]),
        ("dims", settings.dims or {}, dims),
    ]
    if with_targets:
        asked.append(("targets", settings.targets or {}, [port.name for port in model.outputs]))
        asked.append(("scale", settings.scale or {}, arrays))
    for option, names, known in asked:
        for name in names:
            if name not in known:
                there = ", ".join(f"'{one}'" for one in sorted(known)) or "none"
                kind = "the dataset" if option == "scale" else "the model"
                raise InputError(f"{option} names '{name}', {kind} has: {there}")
    for pattern in settings.freeze:
        if not any(fnmatchcase(one, pattern) for name in model.initializers for one in model.names_of(name)):
            some = ", ".join(f"'{name}'" for name in list(model.initializers)[:5])
            raise InputError(
                f"freeze pattern '{pattern}' matches no initializer of the model; it has {some}, ..."
            )


def choose(
    kind: str,
    name: str,
    settings: Settings,
    dataset: Dataset,
    used: set[str],
    only: bool,
) -> str:
    """Return the array for an input or output: by mapping, by name, or (``only``) the one that is left."""
    arrays, found = dataset.arrays, dataset.found
    option, mapping = ("inputs", settings.inputs) if kind == "input" else ("targets", settings.targets)
    if mapping and name in mapping:
        if mapping[name] not in arrays:
            raise DatasetError(f"{kind} '{name}' is to use array '{mapping[name]}', the dataset has: {found}")
        return mapping[name]
    if name in arrays and name not in used:
        return name
    left = [array for array in arrays if array not in used]
    if kind == "input" and only:
        left = _no_targets(left, arrays, settings)
    if only and len(left) == 1:
        return left[0]
    if not left:
        raise DatasetError(f"the dataset has no array left for {kind} '{name}' of the model; found: {found}")
    raise DatasetError(
        f"{kind} '{name}' of the model has no array of that name; found: {found}; "
        f"pass {option}={{'{name}': ...}}"
    )


def _no_targets(left: Collection[str], arrays: Mapping[str, DataArray], settings: Settings) -> list[str]:
    """Leave out what cannot be the one input: all beside "image", what a loss reads further, certain labels.

    Whole numbers are certain labels beside one array of floats, if losses are of classes and have no others.
    """
    heads = settings.loss if isinstance(settings.loss, Mapping) else {"": (settings.loss, 1.0)}
    asked = {*(settings.targets or {}).values(), *heads}
    if IMAGE in left and IMAGE not in asked:
        return [IMAGE]
    specs = [spec.loss if isinstance(spec, DeepSupervision) else spec for spec, _ in heads.values()]
    further = {array for spec in specs for array in further_arrays(spec, arrays).values()}
    left = [array for array in left if array not in further]
    floats = [array for array in left if arrays[array].dtype.kind == "f"]
    others = set(left) - set(floats)
    labels = all(map(reads_labels, specs)) and (len(others) == 1 or others <= asked)
    return floats if len(floats) == 1 and labels else left


def heads_of(
    model: OnnxModel, loss: Loss | Mapping[str, tuple[Loss, float]]
) -> Mapping[str, tuple[Loss, float]]:
    """Output -> (loss, weight), for each output that has a loss."""
    outputs = [port.name for port in model.outputs]
    if isinstance(loss, DeepSupervision):
        weights = loss.of_outputs(len(outputs))
        return {
            output: (loss.loss, weight) for output, weight in zip(outputs, weights, strict=True) if weight
        }
    if not isinstance(loss, Mapping):
        if len(outputs) != 1:
            raise InputError(
                f"the model has outputs {', '.join(outputs)}; "
                f"pass loss={{'{outputs[0]}': ('cross_entropy', 1.0), ...}}"
            )
        return {outputs[0]: (loss, 1.0)}
    for output in loss:
        if output not in outputs:
            raise InputError(f"loss names the output '{output}'; the model has: {', '.join(outputs)}")
    return loss


def _check_whole_numbers(arrays: Collection[str], scale: Mapping[str, float]) -> None:
    """Raise InputError for a factor that would make other classes or ids of those in ``arrays``."""
    for name, factor in scale.items():
        if name in arrays and not float(factor).is_integer():
            raise InputError(
                f"scale['{name}'] is {factor}, but array '{name}' is read as whole numbers; scale it in the "
                "dataset, and leave the factor out"
            )


def _of_labels(targets: Collection[Target], arrays: Mapping[str, DataArray]) -> set[str]:
    """Return the arrays that losses read as whole numbers; DatasetError for one that holds others."""
    found = set()
    for target in targets:
        for name in target.read:
            if not reads_labels(target.spec) or name == target.further.get(SAMPLE_WEIGHTS):
                continue
            found.add(name)
            if arrays[name].dtype.kind not in "iub":
                what = "labels" if name == target.array else "lengths"
                raise DatasetError(
                    f"array '{name}' is {arrays[name].dtype}; the loss of '{target.output}' "
                    f"wants whole-number {what} (uint8, int64, ...)"
                )
    return found
