"""Options for the file of a module, and the record of the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oocdl.config import flag


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


@dataclass(frozen=True)
class Asked:
    """A user's wishes for the file of a module."""

    dynamic: str | Sequence[int] | Mapping[str, Sequence[int]] | None = None
    """Axes to leave open; None: all that the module leaves free."""
    verify: bool = True

    def __post_init__(self) -> None:
        flag("verify", self.verify)


AS_IT_IS = Asked()
