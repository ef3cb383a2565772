"""Checks what is given to ``fit`` and ``search`` beside the settings, before anything is opened."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from oocdl.config import flag
from oocdl.errors import InputError
from oocdl.host.paths import path_of

MOST_PORT = 65535


def check_call(
    workdir: Any,
    scheduler: Any,
    callbacks: Any,
    *,
    resume: Any,
    replan: Any,
    progress: Any,
    dashboard: Any = False,
) -> Path | None:
    """Return the run directory, if one is given.

    Raises InputError for what is no path, no ``get``, no series of callables, or no flag.
    """
    if not isinstance(resume, bool) and resume != "restart":  # 0 and 1 are no flags either
        raise InputError(f"resume must be True, False or 'restart', got {_short(resume)}")
    flag("replan", replan)
    flag("progress", progress)
    if not isinstance(dashboard, bool) and whole_number("dashboard", dashboard) > MOST_PORT:
        raise InputError(f"dashboard must be True, False or a port up to {MOST_PORT}, got {dashboard}")
    if scheduler is not None and not callable(scheduler):
        raise InputError(f"scheduler takes a Dask 'get', such as dask.threaded.get, got {_short(scheduler)}")
    if not isinstance(callbacks, Iterable) or not all(map(callable, callbacks)):
        raise InputError(
            f"callbacks takes a list of callables, each called with an event, got {_short(callbacks)}"
        )
    return None if workdir is None else path_of("workdir", workdir)


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return an argument that counts something; InputError for what is no whole number, or too small."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InputError(f"{name} must be a whole number, got {_short(value)}")
    if value < least:
        raise InputError(f"{name} must be at least {least}, got {_short(value)}")
    return int(value)


def check_seconds(name: str, value: Any) -> None:
    """Raise InputError for what is no number of seconds."""
    if not isinstance(value, Real) or isinstance(value, bool) or not float(value) >= 0:
        raise InputError(f"{name} must be a number of seconds, got {_short(value)}")


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
