"""Writes numbers for people: counts, shapes, sizes, speeds and times; and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from oocdl.config import plain
from oocdl.ops.loss_functions import LOSSES
from oocdl.ops.optimizers import OPTIMIZERS
from oocdl.ops.schedules import Cosine, OneCycle, Polynomial

SCHEDULES = (Cosine(0.0), Polynomial(0.0), OneCycle(0.0))
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    found["type"]: found
    for found in map(plain, (*(kind() for kind in OPTIMIZERS.values()), *LOSSES.values(), *SCHEDULES))
}
"""Type of an optimizer or a loss -> its fields as they are by default."""


def counted(number: int, noun: str, thousands: str = "") -> str:
    """Write a number and its noun, in the plural where it has to be; ``thousands`` is "," or nothing."""
    return f"{number:{thousands}} {noun}{'' if number == 1 else 's'}"


def shape_text(shape: Sequence[int | str]) -> str:
    """Write a shape for people: 2 × 64 × depth."""
    return " × ".join(str(extent) for extent in shape) or "scalar"


def size_text(nbytes: float) -> str:
    """Write a size for people: 512 B, 3.0 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def clock_time(seconds: float) -> str:
    """Write a time as minutes and seconds, or hours, minutes and seconds.

    >>> clock_time(59.7), clock_time(75.2), clock_time(7275)
    ('1:00', '1:15', '2:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """Write a length of time for people: 2.0 s, 1:15."""
    return f"{seconds:.1f} s" if seconds < 60 else clock_time(seconds)


def value_text(
    value: Any, defaults: Mapping[str, Mapping[str, Any]] = MappingProxyType({}), exact: bool = False
) -> str:
    """Write a value of a trial, or a setting, for people.

    ``defaults``: type of an optimizer or a loss -> fields that are left out where they are as by default,
    but for the learning rate. ``exact``: numbers have all their digits, so that others have another text,
    and fields without a value are left out.

    >>> value_text(0.00123456), value_text({"type": "SGD", "lr": 0.1}), value_text(None)
    ('0.001235', 'SGD(lr=0.1)', '')
    >>> value_text({"type": "Adam", "lr": 0.1, "eps": 1e-8}, {"Adam": {"lr": 0.1, "eps": 1e-8}})
    'Adam(lr=0.1)'
    >>> value_text({"type": "SGD", "lr": 0.00123456, "clip_norm": None}, exact=True)
    'SGD(lr=0.00123456)'
    """
    if isinstance(value, Mapping):
        kind = str(value.get("type", ""))
        usual = {name: held for name, held in defaults.get(kind, {}).items() if name != "lr"}
        fields = ", ".join(
            f"{name}={value_text(held, defaults, exact)}"
            for name, held in value.items()
            if name != "type"
            and not (name in usual and usual[name] == held)
            and not (exact and held is None and usual.get(name) is None)
        )
        return f"{kind}({fields})" if fields or not defaults else kind
    if value is None:
        return "None" if exact else ""
    if isinstance(value, list | tuple):
        return f"({', '.join(value_text(one, defaults, exact) for one in value)})"
    return f"{value:.4g}" if isinstance(value, float) and not exact else str(value)
