"""Digests of functions that users register, which tell one function from another."""

from __future__ import annotations

import hashlib
import inspect
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from oocdl.errors import InputError


def digest_of(formula: Any) -> str:
    """Return a digest of a function: its text, its defaults, numbers, texts and arrays that it reads, and
    functions that it calls.

    Functions of other modules do not count. Raises InputError for what is no function.
    """
    if not isinstance(formula, FunctionType):
        raise InputError(f"what is registered has to be a function made by 'def', not {formula!r}")
    parts: dict[str, str] = {}
    _collect(formula, parts)
    return hashlib.blake2b(repr(sorted(parts.items())).encode(), digest_size=16).hexdigest()


def _collect(formula: FunctionType, found: dict[str, str]) -> None:
    found[formula.__qualname__] = _text(formula)
    read = inspect.getclosurevars(formula)
    parameters = inspect.signature(formula).parameters.values()
    defaults = {f"default of {p.name}": p.default for p in parameters if p.default is not p.empty}
    for name, value in {**read.globals, **read.nonlocals, **defaults}.items():
        if isinstance(value, FunctionType):
            if value.__module__ == formula.__module__ and value.__qualname__ not in found:
                _collect(value, found)
        elif isinstance(value, np.ndarray):
            body = (value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest())
            found[f"{formula.__qualname__}: {name}"] = repr(body)
        elif isinstance(value, bool | int | float | str | tuple | list | dict):
            found[f"{formula.__qualname__}: {name}"] = repr(value)


def _text(formula: FunctionType) -> str:
    """Return the source of a function, or its code if it is in no file, as at a prompt.

    Python 3.13 would return the source of something else there, such as that of ``python -c``.
    """
    try:
        in_file = not formula.__code__.co_filename.startswith("<")
        return inspect.getsource(formula) if in_file else repr(_facts(formula.__code__))
    except (OSError, TypeError):  # the file is gone
        return repr(_facts(formula.__code__))


def _facts(code: CodeType) -> tuple[Any, ...]:
    held = [_facts(part) if isinstance(part, CodeType) else part for part in code.co_consts]
    return code.co_code, code.co_names, held
