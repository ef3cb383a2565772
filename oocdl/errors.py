"""Every exception that oocdl raises on purpose.

Each message is one line: what is wrong, where, what to do. ``exit_code`` is
what the command line ends with: 2 for input, 3 for a store, 4 for resources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def printable(text: str) -> str:
    """Return a text of which no character commands a terminal: names come from files that others wrote.

    >>> printable("layer\\x1b[2J")
    'layer\\\\x1b[2J'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class OocdlError(Exception):
    """Base of all errors of oocdl."""

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        # Names from files may hold anything, also line breaks and what a terminal obeys.
        super().__init__(printable(" ".join(str(message).splitlines())))


class InputError(OocdlError):
    """The model, the dataset or an option is wrong."""

    exit_code = 2


class ModelError(InputError):
    """The ONNX file cannot be read, or is not a valid model."""


@dataclass(frozen=True)
class Refusal:
    """A node of a model that cannot be read."""

    node: str
    op: str
    reason: str
    """The operator, and what of it is not supported."""


class UnsupportedError(ModelError):
    """The model needs something that oocdl does not have; names every such node, by what it needs."""

    def __init__(self, message: object = "", refusals: Sequence[Refusal] = ()) -> None:
        super().__init__(message)
        self.refusals = tuple(refusals)


class ModelWarning(UserWarning):
    """Something in a model looks wrong: it may train another network than its author means."""


class DatasetError(InputError):
    """The dataset is missing, has the wrong arrays, or does not fit the model."""


class StoreError(OocdlError):
    """The run directory or the spill folder is damaged, in use, or not ours."""

    exit_code = 3


class InUseError(StoreError):
    """Another process writes the run."""


class CorruptError(StoreError):
    """A stored chunk is missing, or is not the one that was written."""


class ResourceError(OocdlError):
    """Memory or disk is too small for what was asked."""

    exit_code = 4


class DiskFullError(ResourceError):
    """A disk, or a user's quota of it, is full."""


class BudgetError(ResourceError):
    """No plan fits the memory budget; names the worst layer and the smallest budget that would do."""


class NonFiniteError(OocdlError):
    """The loss or a gradient is NaN or infinite."""

    exit_code = 4


class IndexRangeError(InputError):
    """A network has computed an index that is outside of what it names; tells node and index."""


class GraphError(OocdlError):
    """A transform of the compiler has made a graph that is not sound: a defect of oocdl, not of the model."""
