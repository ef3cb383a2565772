"""Compiled passes as bytes, for the cache of plans.

What is read back is made of oocdl's own data classes, arrays and plain Python data: bytes that ask for
anything else are refused before it is imported or called. What was read of the model's file (where weights
lie, and remarks) is left out, and comes from the model that is there when the passes are read.
"""

from __future__ import annotations

import gzip
import io
import pickle
import platform
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from oocdl.graph.onnx.reader import Imported
from oocdl.host.heap import uncollected
from oocdl.planning.compiler import CompiledPass

OTHERS = {
    ("builtins", "frozenset"),
    ("builtins", "set"),
    ("builtins", "slice"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("ml_dtypes", "bfloat16"),
}
"""What may be named beside oocdl's own classes."""

UNREADABLE = (
    pickle.UnpicklingError, zlib.error, AttributeError, EOFError, ImportError, LookupError, MemoryError,
    OSError, TypeError, ValueError,
)  # fmt: skip
"""What ``from_bytes`` raises for bytes that are not of these versions."""


def versions() -> str:
    """What has to be equal where passes are written and read, beside oocdl's code."""
    return f"python {platform.python_version()}, numpy {np.__version__}"


def to_bytes(kinds: Mapping[str, CompiledPass]) -> bytes | None:
    """Write compiled passes; None if they hold what would not be read again, such as a user's function."""
    target = io.BytesIO()
    try:
        with gzip.GzipFile(fileobj=target, mode="wb", compresslevel=1, mtime=0) as packed:
            _Writer(packed, pickle.HIGHEST_PROTOCOL).dump(dict(kinds))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return target.getvalue()


@uncollected()
def from_bytes(data: bytes, imported_of: Callable[[int], Imported]) -> dict[str, CompiledPass]:
    """Read what ``to_bytes`` wrote; ``imported_of``: a batch -> the model for passes of so many samples.

    Raises one of ``UNREADABLE`` for anything else.
    """
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
        found = _Reader(packed, imported_of).load()
    if not isinstance(found, dict) or not all(isinstance(kind, CompiledPass) for kind in found.values()):
        raise ValueError("these are no passes")
    return found


def _is_allowed(module: str, name: str) -> bool:
    if (module, name) in OTHERS:
        return True
    if module.split(".")[0] != "oocdl" or "." in name:
        return False
    found = getattr(sys.modules.get(module), name, None)  # all that passes are made of is imported by now
    if not isinstance(found, type) or found.__module__ != module:
        return False
    return is_dataclass(found) or issubclass(found, (Enum, tuple))


def _model_of(batch: int) -> Imported:
    """Stands for the model in bytes: ``_Reader`` has another function in its place."""
    raise pickle.UnpicklingError(f"no model for {batch} samples is known here")


class _Writer(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """The batch, in place of what was read of the model's file."""
        if isinstance(obj, Imported):
            return _model_of, (obj.graph.values[obj.inputs[0]].shape[0],)
        is_named = isinstance(obj, (type, FunctionType, BuiltinFunctionType)) and obj is not _model_of
        if is_named and not _is_allowed(str(obj.__module__), obj.__qualname__):
            raise pickle.PicklingError(f"{obj} would not be read again")
        return NotImplemented


class _Reader(pickle.Unpickler):
    def __init__(self, source: gzip.GzipFile, imported_of: Callable[[int], Imported]) -> None:
        super().__init__(source)
        self._imported_of = imported_of

    def find_class(self, module: str, name: str) -> Any:
        """A class that may be named."""
        if (module, name) == (__name__, _model_of.__name__):
            return self._imported_of
        if not _is_allowed(module, name):
            raise pickle.UnpicklingError(f"'{module}.{name}' is not what passes are made of")
        return super().find_class(module, name)
