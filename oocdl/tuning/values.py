"""What a search varies: options of ``fit``, and fields of its optimizer and loss by dotted names.

A ``Picks`` says for each name which value a trial has: the place in a list, or the number of a distribution.
It is plain data, where a value may be any object.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from oocdl.config import make_settings
from oocdl.errors import InputError
from oocdl.space import Distribution

Space = Mapping[str, Sequence[Any] | Distribution]
Picks = Mapping[str, int | float]
WITH_FIELDS = ("optimizer", "loss")
"""Options whose fields may be varied, as in ``optimizer.weight_decay``."""
NOT_VARIED = {
    **dict.fromkeys(("steps", "epochs"), "rungs= says how long trials train"),
    **dict.fromkeys(
        ("memory", "disk", "spill", "threads", "commit_seconds", "keep"), "it is the same for all trials"
    ),
}


def checked_space(space: Any, options: Mapping[str, Any]) -> dict[str, tuple[Any, ...] | Distribution]:
    """Return a space whose names and values runs with ``options`` can take, each list as a tuple.

    Every value of a list and both ends of a distribution are tried, each beside the first values of the
    others. Raises InputError, which names the entry of the space.
    """
    if not isinstance(space, Mapping) or not space:
        raise InputError("space takes a mapping such as {'lr': oocdl.space.LogUniform(1e-5, 1e-2)}")
    made: dict[str, tuple[Any, ...] | Distribution] = {}
    for name, given in space.items():
        if not isinstance(name, str):
            raise InputError(f"space takes names of options, got {name!r}")
        made[name] = _dimension(name, given)
    for name in made:
        _check_name(name, made, options)
    first = {name: next(corners(dimension)) for name, dimension in made.items()}
    for name, dimension in made.items():
        for value in corners(dimension):
            try:
                make_settings(**with_values(options, {**first, name: value}))
            except InputError as error:
                raise InputError(f"space['{name}'] has {value!r}: {error}") from error
    return made


def _dimension(name: str, given: Any) -> tuple[Any, ...] | Distribution:
    if isinstance(given, Distribution):
        return given
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence) or not given:
        raise InputError(f"space['{name}'] takes a list of values or one of oocdl.space, got {given!r}")
    return tuple(given)


def _check_name(name: str, space: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    root, dot, _ = name.partition(".")
    if root in NOT_VARIED:
        raise InputError(f"space cannot have '{name}': {NOT_VARIED[root]}")
    if dot and root not in WITH_FIELDS:
        raise InputError(f"space has '{name}', but only {' and '.join(WITH_FIELDS)} have fields to vary")
    twice = name in options or (name == "optimizer.lr" and ("lr" in options or "lr" in space))
    if twice:
        raise InputError(f"'{name}' is given twice; leave it to the space alone")


def corners(dimension: tuple[Any, ...] | Distribution) -> Iterator[Any]:
    """Yield all values of a list, or the ends of a distribution."""
    yield from (dimension if isinstance(dimension, tuple) else (dimension.low, dimension.high))


def value_of(dimension: tuple[Any, ...] | Distribution, pick: int | float) -> Any:
    """Return the value that a pick stands for."""
    return dimension[int(pick)] if isinstance(dimension, tuple) else pick


def pick_at(dimension: tuple[Any, ...] | Distribution, share: float) -> int | float:
    """Return the pick at ``share`` (from 0 to below 1) of a dimension.

    >>> pick_at(("a", "b", "c"), 0.5)
    1
    """
    return int(share * len(dimension)) if isinstance(dimension, tuple) else dimension.at(share)


def with_values(options: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of ``fit`` with a trial's values, by the names of the space. Raises InputError.

    >>> with_values({"optimizer": "sgd"}, {"optimizer.momentum": 0.9, "batch_size": 2})["optimizer"].momentum
    0.9
    """
    made = {**options, **{name: value for name, value in values.items() if "." not in name}}
    deep: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        root, dot, path = name.partition(".")
        if dot:
            deep.setdefault(root, {})[path] = value
    for root, changes in deep.items():
        known = {key: made[key] for key in (root, *(["lr"] if root == "optimizer" else [])) if key in made}
        made[root] = _changed(root, getattr(make_settings(**known), root), changes)
        if root == "optimizer":
            made.pop("lr", None)  # it is in the optimizer now
    return made


def _changed(name: str, record: Any, changes: Mapping[str, Any]) -> Any:
    """A frozen record with other fields, by their paths below it: all at once, as they may depend."""
    if not is_dataclass(record) or isinstance(record, type):
        raise InputError(f"{name} is {record!r}, which has no fields to vary")
    known = [found.name for found in fields(record) if found.init]
    flat: dict[str, Any] = {}
    deep: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        first, dot, rest = path.partition(".")
        if first not in known:
            near = difflib.get_close_matches(first, known, 1)
            hint = f" (did you mean '{near[0]}'?)" if near else f"; it has {', '.join(known)}"
            raise InputError(f"{name}, a {type(record).__name__}, has no '{first}'{hint}")
        if dot:
            deep.setdefault(first, {})[rest] = value
        else:
            flat[first] = value
    both = flat.keys() & deep.keys()
    if both:
        raise InputError(f"{name}.{min(both)} is varied as a whole and by its fields; choose one")
    for first, inner in deep.items():
        flat[first] = _changed(f"{name}.{first}", getattr(record, first), inner)
    try:
        return replace(record, **flat)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be a {type(record).__name__} with {flat}: {error}") from error
