"""Paths that a user gives, checked before anything is done with them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from oocdl.errors import InputError

MOST_SHOWN_CHARACTERS = 60
NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR)  # no faults of the path


def path_of(name: str, value: Any) -> Path:
    """Return ``value`` as a path; whether there is something is not asked.

    Raises InputError, which says what ``name`` is to be, for what is no path, and for a path that this
    process may not follow.

    >>> path_of("workdir", "unet.run").name
    'unet.run'
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InputError(f"{name} takes a path, got {_short(repr(value))}")
    try:
        os.lstat(text)
    except OSError as error:
        if error.errno not in NOTHING_THERE:
            raise InputError(f"{name} {_short(repr(text))} cannot be reached: {error.strerror}") from None
    return Path(text)


def home_folder() -> Path:
    """Return the user's home. Raises InputError where nobody knows it, as in some containers."""
    try:
        return Path.home()
    except RuntimeError:
        raise InputError(f"nobody knows the home folder of user {os.getuid()}: set HOME") from None


def cache_folder() -> Path:
    """Return oocdl's folder in the user's cache (``$XDG_CACHE_HOME`` or ``~/.cache``); it need not exist."""
    return _folder("XDG_CACHE_HOME", ".cache")


def state_folder() -> Path:
    """Return oocdl's folder for what outlives a process (``$XDG_STATE_HOME`` or ``~/.local/state``)."""
    return _folder("XDG_STATE_HOME", ".local/state")


def _folder(variable: str, default: str) -> Path:
    root = Path(os.environ.get(variable, ""))
    # A relative path there is to be ignored, as the standard says.
    return (root if root.is_absolute() else home_folder() / default) / "oocdl"


def _short(text: str) -> str:
    return text if len(text) <= MOST_SHOWN_CHARACTERS else f"{text[: MOST_SHOWN_CHARACTERS - 3]}..."
