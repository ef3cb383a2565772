"""``--config run.toml``: options of the command line as a file; those that are typed count before it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from oocdl.config import shown
from oocdl.errors import InputError
from oocdl.training.signature import hint

NEVER = ("config", "help", "as_json", "version")
"""Parameters of commands that no file has."""


def read_config(path: Path) -> dict[str, Any]:
    """Read options by their names, as a command line would have them. Raises InputError."""
    try:
        return {name.replace("-", "_"): value for name, value in tomllib.loads(path.read_text()).items()}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"--config {path} is no TOML: {error}") from error


def as_words(name: str, value: Any) -> Any:
    """Write a value as the command line takes it: what is repeated there is a list here.

    >>> as_words("inputs", {"image": "t1"}), as_words("parallel", {"batch": 2, "space": [3, 2, 1]})
    (['image=t1'], 'batch=2,space=3x2x1')
    >>> as_words("loss", {"seg": ["dice", 0.5], "edge": "bce"}), as_words("class_weights", [1, 2.5])
    ('seg=dice:0.5,edge=bce', '1,2.5')
    >>> as_words("param_groups", [{"params": ["a.*", "b.*"], "lr": 0.01}, "no_decay_1d"])
    ['params=a.*|b.*,lr=0.01', 'no_decay_1d']
    >>> as_words("space", {"lr": "log:1e-5..1e-2", "batch_size": [1, 2]}), as_words("batch_size", 2)
    (['lr=log:1e-5..1e-2', 'batch_size=1,2'], 2)
    """
    if name == "param_groups":
        groups = value if isinstance(value, list) else [value]
        return [
            ",".join(f"{key}={_joined(held, '|')}" for key, held in group.items())
            if isinstance(group, Mapping)
            else group
            for group in groups
        ]
    between = {"parallel": "x", "loss": ":"}.get(name, ",")
    if isinstance(value, Mapping):
        words = [f"{key}={_joined(held, between)}" for key, held in value.items()]
        return ",".join(words) if name in ("parallel", "loss") else words
    return _joined(value, ",") if name in ("class_weights", "hosts") else value


def _joined(value: Any, between: str) -> str:
    return between.join(map(str, value)) if isinstance(value, list) else str(value)


def _use(context: typer.Context, path: Path | None) -> Path | None:
    """Make what is in a file the defaults of a command.

    A file may have options of all commands that take one, so that one file does for ``plan`` and ``fit``.
    """
    if path is None or context.resilient_parsing:
        return path
    root = context.find_root().command
    commands = getattr(root, "commands", {}).values()
    known = {
        str(parameter.name)
        for command in commands
        if any(parameter.name == "config" for parameter in command.params)
        for parameter in command.params
    }.difference(NEVER)
    found = read_config(path)
    for name in found:
        if name not in known:
            raise InputError(
                f"--config {path} has '{shown(name)}', which is no option{hint(name, sorted(known))}"
            )
    own = {parameter.name for parameter in context.command.params}
    context.default_map = {name: as_words(name, value) for name, value in found.items() if name in own}
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(is_eager=True, callback=_use, help="TOML file of options; typed options take precedence."),
]
