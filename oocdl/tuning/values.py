"""The values that a search varies: options of ``fit``, and dotted fields of its optimizer and loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from oocdl.config import make_settings, nearest
from oocdl.errors import InputError
from oocdl.space import Distribution

Dimension = tuple[Any, ...] | Distribution
WITH_FIELDS = ("optimizer", "loss")
"""Options whose fields may be varied, as in ``optimizer.weight_decay``."""
NOT_VARIED = dict.fromkeys(("steps", "epochs"), "rungs= says how long trials train")
NOT_VARIED |= dict.fromkeys(
    ("memory", "disk", "spill", "threads", "commit_seconds", "keep"), "it is the same for all trials"
)


def checked_space(space: Any, options: Mapping[str, Any]) -> dict[str, Dimension]:
    """Return a space, lists as tuples, all of whose values runs can take. InputError names a wrong entry."""
    if not isinstance(space, Mapping) or not space:
        raise InputError("space takes a mapping such as {'lr': oocdl.space.LogUniform(1e-5, 1e-2)}")
    checked = {name: _dimension(name, given) for name, given in space.items()}
    for name in checked:
        root, dot, _ = name.partition(".")
        if root in NOT_VARIED:
            raise InputError(f"space cannot have '{name}': {NOT_VARIED[root]}")
        if dot and root not in WITH_FIELDS:
            raise InputError(f"space has '{name}', but only {' and '.join(WITH_FIELDS)} have fields to vary")
        if name in options or (name == "optimizer.lr" and ("lr" in options or "lr" in checked)):
            raise InputError(f"'{name}' is given twice; leave it to the space alone")
    for name, values in corners(checked):
        try:
            make_settings(**with_values(options, values))
        except InputError as error:
            raise InputError(f"space['{name}'] has {values[name]!r}: {error}") from error
    return checked


def _dimension(name: Any, given: Any) -> Dimension:
    if not isinstance(name, str):
        raise InputError(f"space takes names of options, got {name!r}")
    if isinstance(given, Distribution):
        return given
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence) or not given:
        raise InputError(f"space['{name}'] takes a list of values or one of oocdl.space, got {given!r}")
    return tuple(given)


def corners(space: Mapping[str, Dimension]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a name with values of a trial for each of its values, or ends; others have their first ones."""
    ends = {name: held if isinstance(held, tuple) else (held.low, held.high) for name, held in space.items()}
    first = {name: values[0] for name, values in ends.items()}
    for name, values in ends.items():
        yield from ((name, {**first, name: value}) for value in values)


def picked(space: Mapping[str, Any], picks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a trial's picks stand for: of a list that is the place in it."""
    listed = {name for name, held in space.items() if isinstance(held, tuple | list)}
    return {name: held[picks[name]] if name in listed else picks[name] for name, held in space.items()}


def with_values(options: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of ``fit`` with a trial's values, by the names of the space. Raises InputError.

    >>> with_values({"optimizer": "sgd"}, {"optimizer.momentum": 0.9, "batch_size": 2})["optimizer"].momentum
    0.9
    """
    varied = {**options, **{name: value for name, value in values.items() if "." not in name}}
    for root in WITH_FIELDS:
        if changes := _below(root, values):
            goes_with = ("optimizer", "lr") if root == "optimizer" else (root,)
            known = {name: varied.pop(name) for name in goes_with if name in varied}
            varied[root] = _changed(root, getattr(make_settings(**known), root), changes)
    return varied


def _below(root: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(f"{root}."): v for name, v in values.items() if name.startswith(f"{root}.")}


def _changed(name: str, record: Any, changes: Mapping[str, Any]) -> Any:
    if not is_dataclass(record) or isinstance(record, type):
        raise InputError(f"{name} is {record!r}, which has no fields to vary")
    known, varied = [field.name for field in fields(record) if field.init], dict[str, Any]()
    for field_name in dict.fromkeys(path.partition(".")[0] for path in changes):
        if field_name not in known:
            hint = nearest(field_name, known) or f"; it has {', '.join(known) or 'none'}"
            raise InputError(f"{name}, a {type(record).__name__}, has no '{field_name}'{hint}")
        further = _below(field_name, changes)
        if further and field_name in changes:
            raise InputError(f"{name}.{field_name} is varied as a whole and by its fields; choose one")
        before = getattr(record, field_name)
        below = f"{name}.{field_name}"
        varied[field_name] = _changed(below, before, further) if further else changes[field_name]
    try:
        return replace(record, **varied)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be a {type(record).__name__} with {varied}: {error}") from error
