"""What oocdl imports of this package: it needs no PyTorch, and opens the rest when a module is given."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oocdl.config import Settings
from oocdl.errors import InputError
from oocdl.graph.ir.graph import Shape
from oocdl.graph.onnx.metadata import Metadata
from oocdl.storage.dataset.dataset import Dataset


@dataclass(frozen=True)
class Exported:
    """A file that ``from_torch`` wrote. It is a path to ``fit``, ``plan``, ``open`` and the like."""

    path: Path
    exporter: str
    """Which of PyTorch's exporters wrote it: ``dynamo`` or ``TorchScript``."""
    notes: tuple[str, ...] = ()
    """What the user may not expect of it."""

    def __fspath__(self) -> str:
        return str(self.path)


def from_torch(
    module: Any,
    example_inputs: Any,
    path: str | Path,
    *,
    dynamic: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    outputs: Sequence[str] | None = None,
) -> Exported:
    """Write a ``torch.nn.Module`` as an ONNX file that trains exactly as the module does.

    The file holds the module's weights, and in its metadata what ONNX cannot say: which tensors are
    parameters, which of them have ``requires_grad``, which norms are in evaluation mode, ``padding_idx``,
    ties, and PyTorch's names. The module is written in the modes in which its parts are (``train()``,
    ``eval()``), and stays as it was, with its random state.

    Parameters
    ----------
    module
        The network. What it does must be a function of its inputs and parameters: a gradient that is cut
        (``detach()``, ``no_grad()``), backward hooks, buffers that its forward changes (beside the running
        statistics of BatchNorms), and ``alpha_dropout`` are refused by name. Random numbers are drawn anew in
        each step; predictions leave out dropout and stochastic depth, and draw others, with a warning.
    example_inputs
        A tensor, a sequence of them, or a mapping by the arguments of ``forward``. Only dtypes and shapes
        matter; a small example stands for a volume that would not fit.
    path
        The file to write; weights of more than 1 GiB go into ``<path>.data`` beside it.
    dynamic
        Axes of the inputs that the file leaves open, as ``(0, 2, 3, 4)``, or by input. By default the batch,
        axis 0. Other sizes are re-bound where that is possible, as for any file.
    outputs
        Names of the outputs. By default the keys of a mapping that the module returns, ``output``, or
        ``output_0``, ``output_1``, ...

    Returns
    -------
    ``Exported``: the path, the exporter that wrote it (dynamo, or TorchScript where that fails), and notes.

    Raises
    ------
    UnsupportedError that names what cannot be carried; InputError for inputs that do not fit the module, and
    where PyTorch is not installed. While it runs, the weights are in memory some four times.

    Examples
    --------
    >>> file = oocdl.from_torch(net, torch.zeros(1, 1, 16, 16, 16), "net.onnx")  # doctest: +SKIP
    >>> run = oocdl.fit(file, "brain.zarr", loss="dice_ce", memory="2GiB")  # doctest: +SKIP
    """
    found: Exported = _inside("export").export(module, example_inputs, path, dynamic, outputs)
    return found


def from_dataset(module: Any, dataset: Dataset, settings: Settings, path: Path) -> Exported:
    """Write a module with an example made of the dataset; raises what ``from_torch`` raises."""
    example = _inside("example").example_of(module, dataset, settings)
    found: Exported = _inside("export").export(module, example, path)
    return found


def load(module: Any, metadata: Metadata, shapes: Mapping[str, Shape], blocks: Any, passes: int) -> None:
    """Put trained tensors into a module; see ``Run.load_into``."""
    _inside("loading").load(module, metadata, shapes, blocks, passes)


def is_module(model: Any) -> bool:
    """Whether ``model`` is a ``torch.nn.Module``; does not import PyTorch to find out."""
    # Another thread may be at importing it.
    kind = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    return kind is not None and isinstance(model, kind)


def _inside(name: str) -> Any:
    """Return a module of this package that needs PyTorch. Raises InputError where that is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("this needs PyTorch: pip install 'oocdl[torch]'")
    return importlib.import_module(f"oocdl.pytorch.{name}")
