"""The part of this package that oocdl imports: it needs no PyTorch, and opens the rest for a given module."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oocdl.config import Settings, flag
from oocdl.errors import InputError
from oocdl.graph.ir.graph import Shape
from oocdl.graph.onnx.metadata import Metadata
from oocdl.host.limits import installed_version
from oocdl.storage.dataset.dataset import Dataset, open_dataset

OLDEST = (2, 9)
"""The first PyTorch whose modules can be written; ``pyproject.toml`` asks for it, too."""


@dataclass(frozen=True)
class Exported:
    """A file that ``from_torch`` wrote. It is a path to ``fit``, ``plan``, ``open`` and the like."""

    path: Path
    exporter: str
    """Name of the PyTorch exporter that wrote it: ``dynamo`` or ``TorchScript``."""
    notes: tuple[str, ...] = ()
    """Remarks on what the user may not expect."""

    def __fspath__(self) -> str:
        return str(self.path)


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
    _check_installed()
    from oocdl.pytorch import export

    made = export.export(module, example_inputs, path, dynamic, flag("verify", verify), outputs)
    return Exported(Path(path).absolute(), made.exporter, made.notes)


def from_dataset(
    module: Any, dataset: Any, settings: Settings, path: Path, dynamic: Any, verify: bool
) -> Dataset:
    """Write a module with an example made of a dataset, and return that, open; raises as ``from_torch``."""
    _check_installed()
    from oocdl.pytorch import example, export

    data = open_dataset(dataset, settings.allow_missing_chunks)
    export.export(module, example.example_of(module, data, settings), path, dynamic, verify)
    return data


def load(module: Any, metadata: Metadata, shapes: Mapping[str, Shape], blocks: Any, passes: int) -> None:
    """Put trained tensors into a module; see ``Run.load_into``."""
    _check_installed()
    from oocdl.pytorch import module_tensors

    module_tensors.load(module, metadata, shapes, blocks, passes)


def _check_installed() -> None:
    if importlib.util.find_spec("torch") is None:
        raise InputError("this needs PyTorch: pip install 'oocdl[torch]'")
    version = installed_version("torch")
    if version[0].isdigit() and tuple(map(int, version.split(".")[:2])) < OLDEST:
        least = ".".join(map(str, OLDEST))
        raise InputError(f"this needs PyTorch {least} or newer, not {version}: pip install 'torch>={least}'")
