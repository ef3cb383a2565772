"""Example inputs for a module, from the arrays of a dataset: what ``fit(module, dataset)`` exports with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from oocdl.config import Settings
from oocdl.errors import InputError, UnsupportedError
from oocdl.planning.binding import choose
from oocdl.pytorch.child import in_child
from oocdl.pytorch.exporters import exporting
from oocdl.pytorch.module_calls import dtype_of, parameters_of, shapes_of_call, signature_of
from oocdl.pytorch.module_tensors import refuse_kinds
from oocdl.pytorch.study.probe import probe
from oocdl.storage.dataset.dataset import DataArray, Dataset
from oocdl.storage.dataset.sample_stack import members_of

ROUND_EXTENTS = (64, 72, 60)
"""Networks take extents that are multiples of one of them, whatever their strides are."""
Form = tuple[tuple[int, ...], torch.dtype]
"""Shape of one sample, and dtype, in which an array is given to the module."""


def example_of(module: nn.Module, dataset: Dataset, settings: Settings) -> dict[str, Tensor]:
    """Return inputs by the arguments of ``forward``: zeros, in the form of a batch of the dataset.

    Arrays are found as they are for a file: by ``inputs=``, by name, or as the only one left. A missing
    channel axis of one is added, and whole numbers are made floats, if the module cannot be called without.
    It is called on tensors without contents, with two batch sizes, since a batch of volumes may also pass for
    one volume with channels. Single numbers among its outputs have no batch. Raises DatasetError or
    InputError.
    """
    refuse_kinds(module)
    names, chosen = _arguments(module, settings.inputs or {}), dict[str, DataArray]()
    for name in names:
        used = {array.name for array in chosen.values()}
        array = choose("input", name, settings, dataset, used, len(names) == 1)
        chosen[name] = dataset.arrays[array]
    search = partial(_inputs_that_fit, module, chosen, settings.batch_size)
    forms = in_child(f"a call of {type(module).__name__}", search)
    return _tensors(names, forms, settings.batch_size)


def _inputs_that_fit(module: nn.Module, chosen: Mapping[str, DataArray], batch: int) -> Sequence[Form]:
    """Return the first forms with which the module can be called; raises InputError if there are none."""
    # Its code runs here, so it belongs in a copy of the user's process: caches and hooks would keep tensors.
    dtype, names = dtype_of(module), tuple(chosen)
    counts = (max(2, batch), 2 * max(2, batch))  # as groups of samples need, too
    reason = ""
    with exporting():
        for forms in product(*(_forms(array, dtype) for array in chosen.values())):
            try:
                made = [set(shapes_of_call(module, _tensors(names, forms, count))) - {()} for count in counts]
                if all(
                    found and {shape[0] for shape in found} == {count}
                    for found, count in zip(made, counts, strict=True)
                ):
                    return forms
                reason = reason or "its outputs do not have the batch as their first axis"
            except Exception as error:  # a wrong form fails with whatever the module raises
                reason = reason or " ".join(f"{type(error).__name__}: {error}".split())[:300]
                _refuse(module, _tensors(names, forms, counts[0]))
    shown = ", ".join(f"{name}={list(array.shape[1:])} of {array.dtype}" for name, array in chosen.items())
    raise InputError(
        f"{type(module).__name__} cannot be called with samples of {shown}: {reason}; write the file with "
        "oocdl.from_torch(module, example_inputs, path), and give that"
    )


def _refuse(module: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Raise UnsupportedError if a module cannot be called for what it does, whatever form its inputs have."""
    try:
        probe(module, signature_of(module, tuple(inputs)), inputs)
    except UnsupportedError:
        raise
    except InputError:
        return


def _arguments(module: nn.Module, asked: Mapping[str, str]) -> list[str]:
    """Return the arguments of ``forward`` that have no default, and those that ``inputs=`` names."""
    slots = parameters_of(module)
    named = [p for p in slots if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in named if p.default is p.empty or p.name in asked]
    return names or [p.name for p in slots][:1] or ["input"]  # forward(*inputs)


def _forms(array: DataArray, dtype: torch.dtype) -> list[Form]:
    """Return the forms in which an array may be meant, the one that is nearest to it first."""
    kind = array.dtype.kind
    dtypes = [dtype] if kind == "f" else [torch.bool if kind == "b" else torch.int64, dtype]
    shape = tuple(array.shape[1:])
    shapes = [shape, (1, *shape)]
    if members_of(array):  # they are padded to what the network takes, which its file will tell
        first, *others = (tuple(-(-size // step) * step for size in shape) for step in ROUND_EXTENTS)
        shapes = [(*shape[:1], *first[1:]), (1, *first), *shapes]
        shapes += [form for padded in others for form in ((*shape[:1], *padded[1:]), (1, *padded))]
    return [(shape, kind_of_number) for shape in shapes for kind_of_number in dtypes]


def _tensors(names: Sequence[str], forms: Sequence[Form], batch: int) -> dict[str, Tensor]:
    """Zeros, which the system gives without taking memory for them until they are written."""
    pairs = zip(names, forms, strict=True)
    return {name: torch.zeros((batch, *shape), dtype=dtype) for name, (shape, dtype) in pairs}
