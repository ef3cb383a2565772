"""Reads the site file: what an admin has written once, so that users need not know their cluster.

It is TOML, with a table for each batch system and in it the options of ``oocdl.cluster``:

    [slurm]
    queue = "long"
    cores = 16
    memory = "60GB"
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oocdl.config import nearest
from oocdl.errors import InputError
from oocdl.host.paths import home_folder, path_of

SITE_VARIABLE = "OOCDL_SITE"
SYSTEM_SITE = Path("/etc/oocdl/site.toml")
SYSTEMS = ("slurm", "pbs", "sge", "lsf", "htcondor")


@dataclass(frozen=True)
class Site:
    """Defaults for one batch system, and the file that they come from; None if there is no file."""

    path: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


def user_site() -> Path:
    """Return a user's own site file; it need not exist."""
    root = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(root) if Path(root).is_absolute() else home_folder() / ".config") / "oocdl" / "site.toml"


def site_path() -> Path | None:
    """Return the site file that holds: ``$OOCDL_SITE``, else the system's, else the user's; None without.

    Raises InputError if ``$OOCDL_SITE`` names a file that is not there, and for one that may not be reached.
    """
    named = os.environ.get(SITE_VARIABLE)
    if named:
        if not path_of(f"${SITE_VARIABLE}", named).is_file():
            raise InputError(f"${SITE_VARIABLE} names the site file '{named}', which is not there")
        return Path(named)
    there = (path_of("the site file", path) for path in (SYSTEM_SITE, user_site()))
    return next((path for path in there if path.is_file()), None)


def read_site(system: str, known: Iterable[str]) -> Site:
    """Read the table of a batch system; InputError names file and key of what is wrong in any table."""
    path = site_path()
    if path is None:
        return Site()
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"the site file {path} cannot be read: {error}") from None
    options = tuple(known)
    for table, values in tables.items():
        if table not in SYSTEMS:
            raise InputError(f"the site file {path} has '{table}'{_hint(table, SYSTEMS)}")
        if not isinstance(values, Mapping):
            raise InputError(f"the site file {path}: '{table}' is to be a table, as [{table}]")
        for key in values:
            if key not in options:
                raise InputError(f"the site file {path} has '{key}' in [{table}]{_hint(key, options)}")
    return Site(path, tables.get(system, {}))


def _hint(word: str, known: Iterable[str]) -> str:
    return nearest(word, known) or f", which is none of {', '.join(known)}"
