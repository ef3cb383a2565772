"""Pickles of small objects of which a pass has hundreds of thousands."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def by_fields(cls: type[T]) -> type[T]:
    """Have a dataclass pickled by the values of its fields.

    A frozen one with slots does that too, but asks for their names each time, which takes several times as
    long.
    """
    values = attrgetter(*[one.name for one in fields(cls)])  # type: ignore[arg-type]

    def reduced(self: T) -> tuple[Any, ...]:
        return _made, (cls, values(self))

    cls.__reduce__ = reduced  # type: ignore[assignment]
    return cls


def _made(cls: type[T], values: tuple[Any, ...]) -> T:
    made = object.__new__(cls)
    for name, value in zip(cls.__slots__, values, strict=True):  # type: ignore[attr-defined]
        object.__setattr__(made, name, value)
    return made
