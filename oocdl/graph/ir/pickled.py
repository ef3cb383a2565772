"""Pickles of small objects of which a pass has hundreds of thousands."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def by_fields(cls: type[T]) -> type[T]:
    """Have a frozen dataclass of several fields, with slots, pickled by their values.

    It is so anyway, but asks for the names of its fields each time, which takes several times as long.
    """
    names = tuple(one.name for one in fields(cls))  # type: ignore[arg-type]
    values_of = attrgetter(*names)

    def state(self: T) -> Any:
        return values_of(self)

    def restore(self: T, values: tuple[Any, ...]) -> None:
        for name, value in zip(names, values, strict=True):
            object.__setattr__(self, name, value)

    cls.__getstate__ = state  # type: ignore[assignment, method-assign]
    cls.__setstate__ = restore  # type: ignore[attr-defined]
    return cls
