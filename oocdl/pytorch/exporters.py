"""PyTorch's two exporters, called so that the file trains as the module does: nothing is folded or fused.

The newer one (dynamo) runs without contents, and keeps names; it says of no norm in which mode it is. The
older one (TorchScript) runs the module, and writes some modules that the newer one cannot.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributions import Distribution

from oocdl.errors import UnsupportedError
from oocdl.pytorch.checkpoints import called_once
from oocdl.pytorch.other_words import TORCHSCRIPT_OPSET

EXTERNAL_FROM_BYTES = 2**30
"""Bytes of weights from which on they go to a file of their own: a protobuf message has at most 2 GiB."""
_DYNAMO_OPSET = 18


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of the module, and the names of its inputs and outputs in the file."""

    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    """One for each of ``args``, then ``kwargs``."""
    outputs: tuple[str, ...]
    axes: Mapping[str, tuple[int, ...]]
    """Input -> the axes that the file leaves open, and no exporter may fix."""
    rounded: str = ""
    """The line of code that rounds a fraction of an open size up or down, if one does."""
    cut: str = ""
    """How and where a gradient is cut, if one is."""


def with_dynamo(module: nn.Module, call: Call, path: Path) -> None:
    """Export by torch.export."""
    if call.cut:
        raise UnsupportedError(f"it does not see that the gradient is cut by {call.cut}")
    dynamic = torch.export.Dim.DYNAMIC
    shapes = {name: dict.fromkeys(call.axes.get(name, ()), dynamic) for name in call.inputs}
    size = sum(x.nbytes for x in (*module.parameters(), *module.buffers()))
    _export(
        module,
        call,
        path,
        dynamic_shapes=shapes if call.kwargs else tuple(shapes.values()),
        opset_version=_DYNAMO_OPSET,
        dynamo=True,
        optimize=False,
        verbose=False,
        external_data=size > EXTERNAL_FROM_BYTES,
    )


def with_torchscript(module: nn.Module, call: Call, path: Path) -> None:
    """Export by torch.jit.trace, with the modes that the parts of the module are in."""
    if call.rounded:  # by math.ceil or math.floor, of which it writes the number
        raise UnsupportedError(f"it fixes a size that is rounded ({call.rounded})")
    _export(
        module,
        call,
        path,
        dynamic_axes={
            name: {axis: f"{name}.{axis}" if axis else "batch" for axis in open_axes}
            for name, open_axes in call.axes.items()
            if open_axes
        },
        opset_version=TORCHSCRIPT_OPSET,
        dynamo=False,
        training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False,
        keep_initializers_as_inputs=False,
    )


def _export(module: nn.Module, call: Call, path: Path, **options: Any) -> None:
    names: dict[str, Any] = {"input_names": list(call.inputs), "output_names": list(call.outputs)}
    torch.onnx.export(module, call.args, str(path), kwargs=dict(call.kwargs), **names, **options)


EXPORTERS: Mapping[str, Callable[[nn.Module, Call, Path], None]] = {
    "TorchScript": with_torchscript,
    "dynamo": with_dynamo,
}
"""All exporters, in the order in which they are tried: the first is ten times as fast."""


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Keep exporters, which talk a lot, from the terminal, and transformers from kernels of their own."""
    # Unless told, a transformer layer of PyTorch looks whether its mask is causal, to pick a faster kernel of
    # the same result; a tensor without contents cannot say. In evaluation mode it has another, which no
    # exporter knows. Distributions look at the numbers of their parameters, but only to raise an error.
    level, fast = logging.root.manager.disable, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    logging.disable(logging.CRITICAL)
    silent = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(silent),
            contextlib.redirect_stderr(silent),
            patch(
                "torch.nn.modules.transformer._detect_is_causal_mask",
                lambda mask, is_causal=None, size=None: bool(is_causal),
            ),
            # No exporter sees into what ``torch.compile`` has wrapped.
            patch.object(OptimizedModule, "__call__", lambda one, /, *args, **kw: one._orig_mod(*args, **kw)),
            patch.object(Distribution, "_validate_args", False),
            torch.compiler.set_stance("force_eager"),
            called_once(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        torch.backends.mha.set_fastpath_enabled(fast)
