"""Imports on demand: libraries that need not be installed."""

from __future__ import annotations

import importlib
from typing import Any

from oocdl.errors import InputError


def needed(module: str, what: str, extra: str) -> Any:
    """Import what ``what`` needs. Raises InputError, which names the extra, where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = (error.name or module).partition(".")[0]
        raise InputError(
            f"{what} needs {library}, which is not installed; pip install 'oocdl[{extra}]'"
        ) from error
