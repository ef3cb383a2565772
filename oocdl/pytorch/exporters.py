"""PyTorch's two exporters, called so that the file trains as the module does: nothing is folded or fused.

The newer one (dynamo) runs without contents, and keeps names; it says of no norm whether it is in training
mode, which the metadata does. The older one (TorchScript) runs the module, and writes some modules that the
newer one cannot.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

EXTERNAL_FROM_BYTES = 2**30
"""Of weights: a protobuf message has at most 2 GiB."""
_DYNAMO_OPSET, _TORCHSCRIPT_OPSET = 18, 17


@dataclass(frozen=True, kw_only=True)
class Call:
    """How the module is called, and what its inputs and outputs are named in the file."""

    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    """One for each of ``args``, then ``kwargs``."""
    outputs: tuple[str, ...]
    axes: Mapping[str, tuple[int, ...]]
    """Input -> the axes that the file leaves open."""
    asked: bool
    """Whether the user asked for these axes, and an exporter must not fix one."""


def with_dynamo(module: nn.Module, call: Call, path: Path) -> None:
    """Export by torch.export."""
    kind = torch.export.Dim.DYNAMIC if call.asked else torch.export.Dim.AUTO
    shapes = [dict.fromkeys(call.axes.get(name, ()), kind) for name in call.inputs]
    count = len(call.args)
    size = sum(x.nbytes for x in (*module.parameters(), *module.buffers()))
    torch.onnx.export(
        module,
        call.args,
        str(path),
        kwargs=dict(call.kwargs),
        input_names=list(call.inputs),
        output_names=list(call.outputs),
        dynamic_shapes=(*shapes[:count],) if not call.kwargs else dict(zip(call.inputs, shapes, strict=True)),
        opset_version=_DYNAMO_OPSET,
        dynamo=True,
        optimize=False,
        verbose=False,
        external_data=size > EXTERNAL_FROM_BYTES,
    )


def with_torchscript(module: nn.Module, call: Call, path: Path) -> None:
    """Export by torch.jit.trace, with the modes that the parts of the module are in."""
    axes = {name: {axis: f"{name}.{axis}" for axis in found} for name, found in call.axes.items() if found}
    for name, found in axes.items():
        axes[name] = {axis: "batch" if axis == 0 else title for axis, title in found.items()}
    torch.onnx.export(
        module,
        call.args,
        str(path),
        kwargs=dict(call.kwargs),
        input_names=list(call.inputs),
        output_names=list(call.outputs),
        dynamic_axes=axes,
        opset_version=_TORCHSCRIPT_OPSET,
        dynamo=False,
        training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False,
        keep_initializers_as_inputs=False,
    )


EXPORTERS: Mapping[str, Callable[[nn.Module, Call, Path], None]] = {
    "dynamo": with_dynamo,
    "TorchScript": with_torchscript,
}
"""In the order in which they are tried."""


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Keep exporters, which talk a lot, from the terminal, and take masks as they are given.

    Unless told, a transformer layer of PyTorch looks whether its mask is causal, to pick a faster kernel of
    the same result; a tensor without contents cannot say.
    """
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    silent = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(silent),
            contextlib.redirect_stderr(silent),
            patch("torch.nn.modules.transformer._detect_is_causal_mask", _as_told),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _as_told(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return bool(is_causal)


def named_axes(names: Sequence[str], dynamic: Any) -> dict[str, tuple[int, ...]]:
    """Return the open axes of each input; ``dynamic`` is a sequence for all, or a mapping by input."""
    if isinstance(dynamic, Mapping):
        return {name: tuple(dynamic.get(name, ())) for name in names}
    return {name: tuple(dynamic) for name in names}
