"""Checks what is given to ``fit`` beside the settings, before anything is opened."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oocdl.config import flag
from oocdl.errors import InputError
from oocdl.host.paths import path_of


def check_call(
    workdir: Any, scheduler: Any, callbacks: Any, *, resume: Any, replan: Any, progress: Any
) -> Path | None:
    """Return the run directory, if one is given.

    Raises InputError for what is no path, no ``get``, no series of callables, or no flag.
    """
    if not isinstance(resume, bool) and resume != "restart":  # 0 and 1 are no flags either
        raise InputError(f"resume must be True, False or 'restart', got {_short(resume)}")
    flag("replan", replan)
    flag("progress", progress)
    if scheduler is not None and not callable(scheduler):
        raise InputError(f"scheduler takes a Dask 'get', such as dask.threaded.get, got {_short(scheduler)}")
    if not isinstance(callbacks, Iterable) or not all(map(callable, callbacks)):
        raise InputError(
            f"callbacks takes a list of callables, each called with an event, got {_short(callbacks)}"
        )
    return None if workdir is None else path_of("workdir", workdir)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
