"""``from_torch``: a module becomes a file that trains exactly as the module does, or is refused by name."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from oocdl.errors import InputError, UnsupportedError
from oocdl.graph.onnx.input_sizes import OpenAxes
from oocdl.graph.onnx.metadata import Metadata
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops.registry import RULES
from oocdl.pytorch.annotate import Dims, annotate, keys_of
from oocdl.pytorch.child import first_line, in_child
from oocdl.pytorch.comparison.blame import Recorder
from oocdl.pytorch.comparison.compare import differences
from oocdl.pytorch.exporters import EXPORTERS, Call, exporting
from oocdl.pytorch.module_calls import Places, Signature, dtype_of, inputs_of, tensors_in
from oocdl.pytorch.module_tensors import refuse_kinds, twin_of
from oocdl.pytorch.other_words import rewritten
from oocdl.pytorch.study.freedom import BATCH
from oocdl.pytorch.study.state import same_generators
from oocdl.pytorch.study.study import Axes, Study, narrowed, study

COURTESY_SECONDS = 60
"""Processor time allowed for a file with open axes that nobody has asked for."""


def export(
    module: nn.Module,
    example_inputs: Any,
    path: str | Path,
    dynamic: Any,
    verify: bool,
    outputs: Sequence[str] | None = None,
) -> Metadata:
    """Do the work of ``from_torch`` once PyTorch is imported."""
    target = Path(path).absolute()
    if not isinstance(module, nn.Module):
        raise InputError(f"from_torch takes a torch.nn.Module, got {type(module).__name__}")
    if not target.parent.is_dir():
        raise InputError(f"there is no folder {target.parent}")
    refuse_kinds(module)
    title = type(module).__name__
    with same_generators():
        if any(x.is_cuda for x in (*module.parameters(), *module.buffers())):
            module = copy.deepcopy(module).cpu()
        signature, inputs = inputs_of(module, example_inputs)
        tried, wanted = _tried(dynamic, {name: x.dim() for name, x in inputs.items()}), dynamic is not None

        def look() -> Study:
            twin_of(module)
            with exporting():
                return study(module, signature, inputs, tried, wanted, outputs)

        findings = in_child(f"a call of {title}", look)
        if findings.found.cut and not verify:
            way_out = "leave out verify=False (to freeze parameters, use requires_grad_(False))"
            raise UnsupportedError(f"the gradient is cut by {findings.found.cut}: {way_out}")
        return _first_that_works(module, signature, findings, target, verify, narrows=not wanted)


def _tried(dynamic: Any, ranks: Mapping[str, int]) -> Axes:
    """Return the axes of each input that are to be open, if they can be."""
    if dynamic is None or dynamic == "space":
        gone = (1,) if dynamic else ()
        return {name: [axis for axis in range(rank) if axis not in gone] for name, rank in ranks.items()}
    if isinstance(dynamic, str) and dynamic != "batch":
        raise InputError(f"dynamic takes 'space', 'batch' or numbers of axes, got '{dynamic}'")
    if isinstance(dynamic, Mapping):
        return {name: tuple(dynamic.get(name, ())) for name in ranks}
    return dict.fromkeys(ranks, (0,) if dynamic == "batch" else tuple(dynamic))


def _first_that_works(
    module: nn.Module, signature: Signature, made: Study, target: Path, verify: bool, narrows: bool
) -> Metadata:
    """Export with one exporter after the other, until one has written the module."""
    # Where none can write it with all axes that are free, and none are asked for, only the batch is left
    # open. So it is where that takes too long: dynamo may reason for hours on a size that is open.
    title = type(module).__name__
    studies: list[Study | None] = [made]
    if narrows and any(name != BATCH for name in made.free.names.values()):
        studies.append(None)
    reasons: dict[str, str] = {}
    for tried in studies:
        most_seconds = COURTESY_SECONDS if tried is not studies[-1] else None
        if tried is None:
            why = f"its file is another network at other sizes ({_joined(reasons)})"
            tried = in_child(f"a call of {title}", partial(narrowed, module, signature, made, why))
        for name in EXPORTERS:
            with tempfile.TemporaryDirectory(prefix=".oocdl-", dir=target.parent) as folder:
                ready = Path(folder) / target.name
                write = partial(_written, module, signature, tried, name, ready, verify)
                try:
                    metadata = in_child(f"PyTorch's {name} exporter", write, most_seconds)
                except InputError as error:
                    reasons[name] = first_line(error)
                else:
                    for file in sorted(Path(folder).glob(f"{target.name}*"), reverse=True):
                        file.replace(target.with_name(file.name))  # the model comes after its data
                    return metadata
    unknown = {exporter: found for exporter, why in reasons.items() if (found := _unknown(why))}
    look = partial(_places, module, signature, made, unknown)
    places = in_child(f"a call of {title}", look) if unknown else {}
    reasons |= {name: f"it does not know {unknown[name]} {place}" for name, place in places.items()}
    way_out = "; write it there in other functions" if places else ""
    raise UnsupportedError(f"{title} cannot be written as ONNX. {_joined(reasons)}{way_out}")


def _unknown(reason: str) -> str:
    """Return the function that an exporter says it does not know; '' where it says something else."""
    says = r"Exporting the operator 'aten::(\w+)'|No ONNX function found for <OpOverload\(op='\w+\.(\w+)'"
    found = re.search(says, reason)
    return (found[1] or found[2]).strip("_") if found else ""


def _places(
    module: nn.Module, signature: Signature, made: Study, unknown: Mapping[str, str]
) -> Mapping[str, str]:
    """Say for each exporter where the module calls first what that does not know, where that is found."""
    recorder = Recorder(Places(module))
    args, kwargs = signature.split(made.data.inputs(made.sizes.first, dtype_of(module), 0))
    with exporting(), recorder:
        module(*args, **kwargs)
    places = {}
    for exporter, name in unknown.items():
        # Its name of a part of a function may be longer (cholesky_ex), or shorter (i0 of special_i0).
        alike = [
            called
            for called in recorder.operations
            if name.startswith(called.name.removesuffix("_")) or called.name.endswith(name)
        ]
        if alike:
            places[exporter] = max(alike, key=lambda called: len(called.name)).place
    return places


def _joined(reasons: Mapping[str, str]) -> str:
    return " | ".join(f"{exporter}: {why}" for exporter, why in reasons.items())


def _written(
    module: nn.Module, signature: Signature, made: Study, exporter: str, ready: Path, verify: bool
) -> Metadata:
    """Write the module as ``ready`` with one exporter, and compare the two."""
    twin = twin_of(module)
    keys = keys_of(twin)
    draft = ready.with_name("draft.onnx")
    twin.register_forward_hook(_tensors_alone)
    with exporting(), rewritten():
        EXPORTERS[exporter](twin, _call_of(signature, made, twin, exporter), draft)
    about, dims = _about(module, made, exporter, verify), _dims(made)
    keys = {**keys_of(twin), **keys}  # an exporter may have run it, and so changed its statistics
    metadata = annotate(draft, ready, module, keys, made.found, about, dims)
    model = inspect_onnx(ready)
    model.bind(RULES, made.example, precision="float64", training=True)
    with exporting():
        wrong, otherwise = differences(module, signature, model, made) if verify else ("", "")
    if wrong:
        raise UnsupportedError(f"its file is another network: {wrong}")
    if not otherwise:
        return metadata
    note = f"in evaluation mode the module computes something else than the run predicts: {otherwise}"
    about = replace(about, notes=(*about.notes, note), predicts=otherwise)
    return annotate(draft, ready, module, keys, made.found, about, dims)


def _tensors_alone(module: nn.Module, inputs: Any, returned: Any) -> tuple[torch.Tensor, ...] | None:
    """Leave out of what a module returns what no file holds, such as a cache of keys; None if nothing is."""
    is_plain = all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in tree_leaves(returned))
    return None if is_plain else tuple(tensors_in(returned))


def _call_of(signature: Signature, made: Study, twin: nn.Module, exporter: str) -> Call:
    """Return how an exporter is to call the module: at small sizes, where these are open and it runs it.

    The newer one chooses by the sizes of its call how to write some operators, and so is given those of the
    example; it computes nothing.
    """
    inputs = made.data.inputs(made.sizes.first, dtype_of(twin), 0)
    if exporter == "dynamo":
        inputs = {name: torch.empty(made.example[name], dtype=x.dtype) for name, x in inputs.items()}
    args, kwargs = signature.split(inputs)
    axes = {name: tuple(axis for title, axis in made.free.names if title == name) for name in signature.names}
    names = {"inputs": signature.names, "outputs": made.outputs}
    lines = [line for name, line in made.free.rounded.items() if name in made.free.names.values()]
    rounded, cut = "".join(lines[:1]), made.found.cut
    return Call(args=tuple(args), kwargs=kwargs, **names, axes=axes, rounded=rounded, cut=cut)


def _dims(made: Study) -> Dims:
    names = made.free.names
    dims: dict[str, tuple[int | str, ...]] = {
        name: tuple(names.get((name, axis), size) for axis, size in enumerate(shape))
        for name, shape in made.example.items()
    }
    for name, shape in zip(made.outputs, made.sizes.outputs, strict=False):
        dims[name] = tuple(
            size or (BATCH if axis == 0 and BATCH in names.values() else f"{name}_{axis}")
            for axis, size in enumerate(shape)
        )
    return dims


def _about(module: nn.Module, made: Study, exporter: str, verify: bool) -> Metadata:
    """Collect what the file is to say of the module, but for its tensors."""
    called = (*made.sizes.first.items(), *made.sizes.second.items())
    batches = [shape[0] for name, shape in called if made.free.names.get((name, 0)) == BATCH]
    return Metadata(
        module=type(module).__name__,
        exporter=exporter,
        facts={},
        sizes=OpenAxes(
            conditions=made.free.conditions,
            fixed={f"{name}.{axis}": why for (name, axis), why in made.free.fixed.items()},
            least_batch=min(batches, default=1) if verify else 1,
        ),
        notes=tuple(_notes(module, made, verify)),
        compared=verify,
        numbers=(*sorted(made.found.tensors), *_not_of_float32(made)),
    )


def _not_of_float32(made: Study) -> list[float]:
    return sorted(x for x in made.found.numbers if float(np.float32(x)) != x)


def _notes(module: nn.Module, made: Study, verify: bool) -> Iterator[str]:
    if not any(part.training for part in module.modules()):
        yield (
            "the module is in evaluation mode, and is trained so: without dropout, with norms that use their "
            "running statistics (call module.train() before for training mode)"
        )
    if unread := [name for name, _ in module.named_parameters() if name not in made.found.read]:
        some = ", ".join(unread[:3]) + (", ..." if len(unread) > 3 else "")
        yield f"the forward pass does not read {some}: not trained, as in PyTorch"
    if made.found.untraced:
        yield (
            f"the code decides by data {made.found.untraced}, but not where it is traced: the run computes "
            "what it does there"
        )
    if narrow := {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.element_size() < 4}:
        yield f"parameters of {', '.join(sorted(narrow))} are trained in the precision of the run"
    for place, dtype in list(made.found.casts.items())[:3]:
        yield f"the code rounds to {dtype} {place}; the run computes in its own precision there"
    rounded = {float(np.float32(x)): x for x in _not_of_float32(made)}
    is_exact = any(p.dtype == torch.float64 for p in module.parameters())
    for value in sorted(rounded.keys() & made.found.tensors if is_exact else ()):
        yield (
            f"the code has the number {rounded[value]:g} and its float32 rounding in a tensor; the file does "
            "not tell them apart, and the run computes with the rounded one for both"
        )
    if not verify:
        yield "verify=False: the file was not compared with the module"
