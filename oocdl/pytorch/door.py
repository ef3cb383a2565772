"""What oocdl imports of this package: it needs no PyTorch, and opens the rest when a module is given."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oocdl.config import Settings, flag
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


@dataclass(frozen=True)
class Asked:
    """A user's wishes for the file of a module."""

    dynamic: str | Sequence[int] | Mapping[str, Sequence[int]] | None = None
    """Axes to leave open; None: all that the module leaves free."""
    verify: bool = True
    """Whether file and module are compared by numbers."""

    def __post_init__(self) -> None:
        flag("verify", self.verify)


AS_IT_IS = Asked()
"""What is asked where nobody says anything."""


def from_torch(
    module: Any,
    example_inputs: Any,
    path: str | Path,
    *,
    dynamic: str | Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    outputs: Sequence[str] | None = None,
    verify: bool = True,
) -> Exported:
    """Write a ``torch.nn.Module`` as an ONNX file that trains exactly as the module does.

    The file holds the module's weights, and in its metadata what ONNX cannot say: which tensors are
    parameters, which of them have ``requires_grad``, which norms are in evaluation mode, ``padding_idx``,
    ties, PyTorch's names, and under which sizes of the inputs the file is the module. The module is written
    in the modes in which its parts are (``train()``, ``eval()``), and stays as it was, with its random state.

    Parameters
    ----------
    module
        The network. What it does must be a function of its inputs and parameters: a gradient that is cut in
        place, backward hooks, what its forward changes and reads again (beside the running statistics of
        BatchNorms), random numbers of Python and NumPy, and ``alpha_dropout`` are refused by name. Random
        numbers of PyTorch are drawn anew in each step; predictions leave out dropout and stochastic depth,
        and draw others, with a warning.
    example_inputs
        A tensor, a sequence of them, or a mapping by the arguments of ``forward``. Only dtypes and shapes
        matter; a small example stands for a volume that would not fit.
    path
        The file to write; weights of more than 1 GiB go into ``<path>.data`` beside it.
    dynamic
        Axes of the inputs that the file leaves open: "space" (the batch, and all from the third on), "batch",
        numbers such as ``(0, 2, 3)``, or these by input. By default all axes of which the module is free. An
        axis that is asked for and is not free is refused, with the line that needs its size.
    outputs
        Names of the outputs. By default the keys of a mapping that the module returns, ``output``, or
        ``output_0``, ``output_1``, ...
    verify
        Run module and file on the same numbers, at two sizes of each open axis, and refuse a file whose
        outputs, gradients or statistics differ by more than rounding. False skips this, and the run says so.

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
    exported: Exported = _inside("export").export(
        module, example_inputs, path, Asked(dynamic, verify), outputs
    )
    return exported


def from_dataset(module: Any, dataset: Dataset, settings: Settings, path: Path, asked: Asked) -> Exported:
    """Write a module with an example made of the dataset; raises what ``from_torch`` raises."""
    example = _inside("example").example_of(module, dataset, settings)
    exported: Exported = _inside("export").export(module, example, path, asked)
    return exported


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
