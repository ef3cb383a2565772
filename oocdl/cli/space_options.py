"""Reads ``--space``: the options that a search varies, and their values, as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oocdl.errors import InputError
from oocdl.space import IntUniform, LogUniform, Uniform

KINDS: Mapping[str, Callable[[Any, Any], Any]] = {
    "": Uniform,
    "uniform": Uniform,
    "log": LogUniform,
    "int": IntUniform,
}
RANGE = re.compile(r"(?:(\w+):)?([^.,:][^,:]*?)\.\.([^,:]+)")


def parse_space(given: Sequence[str]) -> dict[str, Any]:
    """Read texts such as ``lr=log:1e-5..1e-2``, ``optimizer.momentum=0..0.9``, ``batch_size=1,2,4``.

    >>> parse_space(["lr=log:1e-5..1e-2", "batch_size=1,2", "optimizer=sgd,adam"])
    {'lr': LogUniform(low=1e-05, high=0.01), 'batch_size': [1, 2], 'optimizer': ['sgd', 'adam']}
    """
    space: dict[str, Any] = {}
    for text in given:
        name, equals, values = text.partition("=")
        if not (name and equals and values) or name in space:
            raise InputError(
                f"--space takes an option and its values, once each, such as lr=0.1,0.01; got '{text}'"
            )
        found = RANGE.fullmatch(values)
        if found is None:
            space[name] = [_value(value) for value in values.split(",")]
            continue
        kind, low, high = found[1] or "", _value(found[2]), _value(found[3])
        if kind not in KINDS:
            raise InputError(f"--space {text}: a range is log:a..b, int:a..b or a..b")
        space[name] = KINDS[kind](low, high)
    return space


def _value(text: str) -> Any:
    """A whole number, a number, a flag, or a name.

    >>> [_value(text) for text in ("4", "1e-3", "false", "dice_ce")]
    [4, 0.001, False, 'dice_ce']
    """
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
