"""``from_torch``: a module becomes a file that trains exactly as the module does, or is refused by name."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from oocdl.errors import InputError, UnsupportedError
from oocdl.graph.ir.graph import Shape
from oocdl.graph.onnx.metadata import Metadata
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops.registry import RULES
from oocdl.pytorch.annotate import annotate, keys_of
from oocdl.pytorch.door import Exported
from oocdl.pytorch.exporters import EXPORTERS, Call, exporting, named_axes
from oocdl.pytorch.probe import Findings, as_call, probe
from oocdl.pytorch.tensors import twin_of


def export(
    module: nn.Module,
    example_inputs: Any,
    path: str | Path,
    dynamic: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    outputs: Sequence[str] | None = None,
) -> Exported:
    """What ``from_torch`` does once PyTorch is there."""
    target = Path(path).absolute()
    if not isinstance(module, nn.Module):
        raise InputError(f"from_torch takes a torch.nn.Module, got {type(module).__name__}")
    if not target.parent.is_dir():
        raise InputError(f"there is no folder {target.parent}")
    with torch.random.fork_rng(devices=[]):
        _refuse_hooks(module)
        twin = twin_of(module)
        args, kwargs, names = _inputs(module, example_inputs)
        axes = named_axes(names, (0,) if dynamic is None else dynamic)
        args, kwargs = _widened(args, kwargs, names, axes)
        with exporting():
            found = probe(twin, args, kwargs)
        call = Call(
            args=args,
            kwargs=kwargs,
            inputs=names,
            outputs=_output_names(found.outputs, outputs, names),
            axes=axes,
            asked=dynamic is not None,
        )
        metadata = _first_that_works(module, twin, call, found, target)
    return Exported(target, metadata.exporter, tuple(_notes(module, metadata, found)))


def _first_that_works(
    module: nn.Module, twin: nn.Module, call: Call, found: Findings, target: Path
) -> Metadata:
    """Export with one exporter after the other, until one has written the module."""
    reasons = []
    for name, write in EXPORTERS.items():
        double = copy.deepcopy(twin)  # an exporter may run it, and so change its statistics
        keys = keys_of(double)
        with tempfile.TemporaryDirectory(prefix=".oocdl-", dir=target.parent) as folder:
            draft = Path(folder) / "draft.onnx"
            try:
                with exporting():
                    write(double, call, draft)
                ready = Path(folder) / target.name
                metadata = annotate(draft, ready, module, {**keys_of(double), **keys}, found, name)
                _check_readable(ready, call)
                for file in sorted(Path(folder).glob(f"{target.name}*"), reverse=True):
                    file.replace(target.with_name(file.name))  # the model comes after its data
            except Exception as error:  # exporters raise whatever comes
                reasons.append(f"{name}: {_first_line(error)}")
            else:
                return metadata
    raise UnsupportedError(f"{type(module).__name__} cannot be written as ONNX. " + " | ".join(reasons))


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(lines[0].split())
    kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    return kind + (text if len(text) <= 400 else f"{text[:397]}...")


def _check_readable(path: Path, call: Call) -> None:
    """Raise ModelError if oocdl cannot train what is in the file, at the sizes of the example."""
    shapes: dict[str, Shape] = {
        name: tuple(x.shape) for name, x in zip(call.inputs, (*call.args, *call.kwargs.values()), strict=True)
    }
    inspect_onnx(path).bind(RULES, shapes, precision="float64", training=True)


def _inputs(module: nn.Module, given: Any) -> tuple[tuple[Tensor, ...], dict[str, Tensor], tuple[str, ...]]:
    """Return positional and named inputs, and the names of both: those of forward's arguments."""
    if isinstance(given, Mapping):
        args, kwargs = as_call(module, given)
        names = list(given)
    else:
        args, kwargs = [given] if isinstance(given, Tensor) else list(given), {}
        parameters = inspect.signature(module.forward).parameters.values()
        slots = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names = [*slots[: len(args)], *(f"input_{n}" for n in range(len(slots), len(args)))]
    for name, x in zip(names, (*args, *kwargs.values()), strict=True):
        if not isinstance(x, Tensor):
            raise InputError(
                f"the example of input '{name}' is {type(x).__name__}; inputs have to be tensors"
            )
    if not names:
        raise InputError(
            "example_inputs is empty: give a tensor, several, or a mapping by forward's arguments"
        )
    cpu = {name: x.detach().cpu() for name, x in kwargs.items()}
    return tuple(x.detach().cpu() for x in args), cpu, tuple(names)


def _widened(
    args: tuple[Tensor, ...],
    kwargs: dict[str, Tensor],
    names: Sequence[str],
    axes: Mapping[str, tuple[int, ...]],
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Repeat a batch of one: torch.export takes an axis of one for a fixed one."""
    tensors = [*args, *kwargs.values()]
    open_batch = [x for name, x in zip(names, tensors, strict=True) if x.dim() and 0 in axes[name]]
    if not open_batch or any(x.shape[0] != 1 for x in open_batch):
        return args, kwargs
    wide = [
        torch.cat([x, x]) if x.dim() and 0 in axes[name] else x
        for name, x in zip(names, tensors, strict=True)
    ]
    return tuple(wide[: len(args)]), dict(zip(kwargs, wide[len(args) :], strict=True))


def _output_names(made: Any, asked: Sequence[str] | None, inputs: Sequence[str]) -> tuple[str, ...]:
    """Name the outputs: as asked, by the keys of a mapping, else ``output``, or ``output_0`` and so on."""
    leaves = [(path, x) for path, x in tree_flatten_with_path(made)[0] if isinstance(x, Tensor)]
    if not leaves:
        raise InputError("the module returns no tensor")
    if asked is not None:
        names = [str(name) for name in ([asked] if isinstance(asked, str) else asked)]
        if len(names) != len(leaves) or len(set(names)) < len(names):
            raise InputError(f"outputs names {', '.join(names)}; the module returns {len(leaves)} tensors")
    else:
        keys = [str(getattr(path[-1], "key", getattr(path[-1], "name", ""))) for path, _ in leaves if path]
        named = len(set(keys)) == len(leaves) and all(keys) and isinstance(made, Mapping | tuple)
        numbered = ["output"] if len(leaves) == 1 else [f"output_{n}" for n in range(len(leaves))]
        names = keys if named else numbered
    return tuple(f"{name}_out" if name in inputs else name for name in names)


def _refuse_hooks(module: nn.Module) -> None:
    """Raise UnsupportedError for what runs in backward only, and for norms that average cumulatively."""
    found = []
    for name, part in module.named_modules():
        where = f"'{name or type(module).__name__}'"
        if part._backward_hooks or part._backward_pre_hooks:
            found.append(f"a backward hook of {where}")
        norm = isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
        if norm and part.track_running_stats and part.momentum is None:
            found.append(f"momentum=None of {where}, a cumulative average (give a number)")
    for name, p in module.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            found.append(f"a hook on the gradient of '{name}'")
    if found:
        raise UnsupportedError(
            f"an ONNX file cannot carry all that {type(module).__name__} does: {'; '.join(found)}"
        )


def _notes(module: nn.Module, metadata: Metadata, found: Findings) -> list[str]:
    """Return what the user may not expect."""
    notes = []
    if not any(part.training for part in module.modules()):
        notes.append(
            "the module is in evaluation mode, and is trained so: without dropout, with norms that use their "
            "running statistics (call module.train() before for training mode)"
        )
    if metadata.unread:
        some = ", ".join(metadata.unread[:3]) + (", ..." if len(metadata.unread) > 3 else "")
        notes.append(f"the forward pass does not read {some}: not trained, as in PyTorch")
    return notes
